"""Patterns read from constant masks: a pattern hides exactly what the mask hides, whichever diagonal made it."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from ridgeline.optimizer.rewrites.attention.masks import BLOCKED, Pattern, allowed_by, pattern_of

SIZES = ((5, 5), (3, 7), (7, 3))


def _seen(pattern: Pattern, rows: int, keys: int) -> torch.Tensor:
    """What a pattern lets every row see, spelled out."""
    found = torch.zeros(rows, keys, dtype=torch.bool)
    for i, j in itertools.product(range(rows), range(keys)):
        before = i + pattern.shift - j  # how far the key lies before the row's own
        if pattern.causal:
            found[i, j] = before >= 0 and (pattern.window is None or before < pattern.window)
        else:
            found[i, j] = pattern.window is None or -pattern.behind <= before < pattern.window
    return found


@pytest.mark.parametrize(("rows", "keys"), SIZES)
def test_a_band_between_any_two_diagonals_is_read_as_itself_or_not_at_all(rows: int, keys: int) -> None:
    ones = torch.ones(rows, keys, dtype=torch.bool)
    for upper, lower in itertools.product(range(-rows, keys + 1), repeat=2):
        mask = ones.tril(upper).triu(lower)
        found = pattern_of(mask, rows, keys)
        assert found is None or torch.equal(_seen(found, rows, keys), mask), (upper, lower, found)


@pytest.mark.parametrize(("rows", "keys"), SIZES)
def test_only_the_diagonals_that_end_at_the_first_or_the_last_key_are_causal(rows: int, keys: int) -> None:
    ones = torch.ones(rows, keys, dtype=torch.bool)
    for diagonal in range(-rows + 1, keys - 1):
        found = pattern_of(ones.tril(diagonal), rows, keys)
        causal = found is not None and found.causal and found.window is None
        assert causal == (diagonal in (0, keys - rows)), (diagonal, found)
        assert not causal or found.shift == diagonal


def test_one_entry_off_the_diagonal_is_no_pattern() -> None:
    ones = torch.ones(6, 6, dtype=torch.bool)
    for i, j in ((0, 5), (3, 4), (5, 0), (2, 2)):
        mask = ones.tril()
        mask[i, j] = ~mask[i, j]
        found = pattern_of(mask, 6, 6)
        assert found is None or torch.equal(_seen(found, 6, 6), mask), (i, j, found)


def test_heads_or_batches_that_differ_have_no_pattern_in_common() -> None:
    both = torch.stack((torch.ones(4, 4, dtype=torch.bool).tril(), torch.ones(4, 4, dtype=torch.bool).tril(1)))
    assert pattern_of(both[:, None], 4, 4) is None
    assert pattern_of(both[None], 4, 4) is None
    assert pattern_of(both[:1, None], 4, 4) == Pattern(causal=True)


def test_an_added_mask_hides_only_where_it_is_far_below_every_score() -> None:
    mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), BLOCKED)
    assert torch.equal(allowed_by(mask), torch.ones(4, 4, dtype=torch.bool).tril())
    assert allowed_by(mask / 2) is None
    assert allowed_by(mask + 1) is None


def test_the_last_rows_of_a_causal_window_are_a_causal_window() -> None:
    ones = torch.ones(3, 7, dtype=torch.bool)
    assert pattern_of(ones.tril(4).triu(2), 3, 7) == Pattern(causal=True, shift=4, window=3)
    assert pattern_of(torch.ones(7, 7, dtype=torch.bool).tril().triu(-2), 7, 7) == Pattern(causal=True, window=3)
