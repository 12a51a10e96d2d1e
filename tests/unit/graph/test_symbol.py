"""Symbols compute as numbers do, and say nothing else about them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.graph.symbol import Recording, SymbolError, hold, largest, log2, picker

SIZES = st.integers(1, 10_000)


def computed(a: Any, b: Any) -> list[Any]:
    """A little of everything that builders and rules do with sizes."""
    area = math.prod((a, b, 128))
    return [area, sum((a, b, 3)), 5 - a, -a, -(-area * 16 // 8), a / b, 7 / a, 9 // a, a // b, 100 % a, a % 8,
            largest((a, 64, b)), math.trunc(area / 3), math.trunc(area), round(a / 7, 1), log2(b),
            1.0 * a * b]  # fmt: skip


@given(a=SIZES, b=SIZES, c=SIZES, d=SIZES)
def test_what_was_recorded_at_some_sizes_is_done_with_others(a: int, b: int, c: int, d: int) -> None:
    recording = Recording((a, b))
    pick = picker(recording, computed(*recording.sizes))
    for sizes in ((a, b), (c, d)):
        numbers = recording.replay(sizes)
        assert numbers is not None
        found, wanted = pick(numbers), computed(*sizes)
        assert list(found) == wanted
        assert [type(number) for number in found] == [type(number) for number in wanted]


@given(a=SIZES, b=SIZES, c=SIZES, d=SIZES)
def test_numbers_that_decide_alike_hold_and_others_do_not(a: int, b: int, c: int, d: int) -> None:
    def decisions(x: Any, y: Any) -> list[bool]:
        return [x < y, x <= 64, y > 1, x >= y, x == y, x != 5, bool(x - y), max(x, y) == x, min(x, 7) == 7]

    recording = Recording((a, b))
    said = decisions(*recording.sizes)
    guards = recording.take_guards()
    assert said == decisions(a, b)
    numbers = recording.replay((c, d))
    assert numbers is not None
    if hold(guards, numbers):
        assert decisions(c, d) == said
    assert hold(guards, recording.replay((a, b)) or ())
    assert recording.take_guards() == ()


def test_a_number_on_the_other_side_of_a_limit_is_not_held() -> None:
    recording = Recording((8,))
    assert recording.sizes[0] > 1
    guards = recording.take_guards()
    assert hold(guards, recording.replay((2,)) or ())
    assert not hold(guards, recording.replay((1,)) or ())


def test_a_symbol_equals_itself_whatever_its_number() -> None:
    recording = Recording((8, 8))
    a, b = recording.sizes
    assert a * b == a * b
    assert not (a * b != a * b)  # noqa: SIM202
    assert recording.take_guards() == ()
    assert a == b
    assert len(recording.take_guards()) == 1


@pytest.mark.parametrize(
    "look",
    [int, float, str, range, abs, math.floor, math.ceil, math.sqrt, "{}".format, "{:d}".format, lambda s: s**2,
     lambda s: divmod(s, 3), lambda s: [0] * s, lambda s: [1, 2][s]],
)  # fmt: skip
def test_nobody_looks_at_the_number_of_a_symbol(look: Callable[[Any], Any]) -> None:
    with pytest.raises(SymbolError):
        look(Recording((8,)).sizes[0])


def test_symbols_inside_a_constant_are_refused() -> None:
    recording = Recording((8,))
    with pytest.raises(SymbolError, match="inside a constant"):
        picker(recording, [(1, recording.sizes[0])])


def test_ones_and_trues_stay_what_they_are() -> None:
    recording = Recording((8,))
    found = picker(recording, [1, True, 1.0, "1", None, (1, 2)])(recording.numbers)
    assert [repr(value) for value in found] == ["1", "True", "1.0", "'1'", "None", "(1, 2)"]


def test_sizes_that_divide_by_nothing_have_no_numbers() -> None:
    recording = Recording((8,))
    assert 16 // recording.sizes[0] == 2
    assert recording.replay((0,)) is None


def test_recording_goes_on_at_other_sizes() -> None:
    recording = Recording((8,))
    size = recording.sizes[0]
    recording.rebase(recording.replay((3,)) or [])
    assert size * 2 == 6
    assert (recording.replay((5,)) or [])[-2:] == [10, 6]
