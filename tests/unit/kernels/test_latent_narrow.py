"""Latent decoding of few heads by roles without a GPU: who waits for whom, and what the compiler makes of it."""

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))

import narrow_play
import role_play
from test_latent_roles import loops_of

from ridgeline.kernels import compiler, launcher
from ridgeline.kernels.contract import case
from ridgeline.kernels.latent_attention import config
from ridgeline.kernels.variants import variants_of

LENGTHS = ((9,), (1, 0, 4, 5), (13, 1, 1, 1, 1, 1, 8, 30), (0, 2, 40), (3, 3, 3, 3, 3, 3, 3))
WAITS = ("empty", "full", "told", "over", "over_empty", "q_full", "q_empty")


def program_of(lengths, thirds=7, queries=1, unit=2, ends=0, skipped="", seed=0):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((len(lengths), narrow_play.HEADS, narrow_play.WIDTH))
    keys = [rng.standard_normal((n, narrow_play.WIDTH)) for n in lengths]
    return narrow_play.Narrow(q, keys, thirds, 0, skipped, num_queries=queries, unit=unit, ends=ends)


def cut(lengths, programs, unit, ends):
    """Stretches of as many programs: sequence, first unit of it, and how many units, ends counted."""
    weights = [-(-n // unit) + ends * (n > 0) for n in lengths]
    borders = [sum(weights) * i // programs for i in range(programs + 1)]
    for start, stop in pairwise(borders):
        b = 0
        while b < len(weights) - 1 and start >= weights[b]:
            start, stop, b = start - weights[b], stop - weights[b], b + 1
        yield b, start, stop - start


def joined(pieces):
    """Pieces of a sequence (maxima, totals, sums) as one."""
    top = np.max([m for m, _, _ in pieces], 0)
    weights = [np.exp(m - top) for m, _, _ in pieces]
    total = sum(w * t for w, (_, t, _) in zip(weights, pieces, strict=True))
    return sum(w * o for w, (_, _, o) in zip(weights, pieces, strict=True)) / total


def assert_right(lengths, programs, seed, **more):
    """All programs' pieces of every sequence, joined, as a softmax at once has them."""
    found, played = {}, None
    for stretch in cut(lengths, programs, more.get("unit", 2), more.get("ends", 0)):
        played = program_of(lengths, seed=seed, **more)
        played.play(seed, *stretch)
        for b, first, _, _ in played.stretches(*stretch):
            top, total = played.left_behind[b, first, "seen"]
            halves = [played.left_behind[b, first, c] for c in range(2)]
            assert all(np.array_equal(told, total) for _, told in halves)
            found.setdefault(b, []).append((top, total, np.concatenate([o for o, _ in halves])))
    for b, length in enumerate(lengths):
        if length:
            s = played.keys[b] @ played.q[b].T
            p = np.exp(s - s.max(0))
            np.testing.assert_allclose(joined(found[b]), played.keys[b][:, :8].T @ (p / p.sum(0)))
        assert (b in found) == (length > 0)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(
    ("thirds", "queries", "unit", "ends"), [(7, 1, 2, 1), (6, 2, 4, 0), (6, 1, 2, 2), (3, 1, 4, 1)]
)
def test_no_order_of_events_makes_a_sum_wrong_or_stops_everybody(lengths, thirds, queries, unit, ends):
    for seed in range(25):
        for programs in (1, 2, 5):
            assert_right(lengths, programs, seed, thirds=thirds, queries=queries, unit=unit, ends=ends)


def goes_wrong(skipped, seed, **more):
    try:
        with np.errstate(all="ignore"):
            assert_right((13, 1, 1, 1, 1, 1, 8, 30), 1, seed, skipped=skipped, **more)
    except (AssertionError, role_play.Stuck):
        return True
    return False


@pytest.mark.parametrize("skipped", WAITS)
def test_every_wait_is_needed(skipped):
    """Without it some order of events goes wrong: what the play would not see it does not check."""
    assert any(goes_wrong(skipped, seed) for seed in range(150))


def test_probabilities_of_two_blocks_are_too_few_where_a_ring_has_room_for_more():
    assert any(goes_wrong("", seed, thirds=9) for seed in range(150))


def test_a_ring_without_room_for_a_block_stops_everybody():
    with pytest.raises(role_play.Stuck):
        program_of((9,), thirds=2).play(0, 0, 0, 5)


def narrow_of(**sizes):
    of = case(sizes.pop("dtype", "bfloat16"), **{"b": 32, "h": 32, "s": 4096, "d": 512, "e": 64, "page": 64,
                                                 "uneven": False, **sizes})  # fmt: skip
    return [v for v in variants_of("paged_latent_attention", [of]) if v.kernel.startswith("latent")]


@pytest.mark.parametrize(
    "sizes", [{}, {"b": 109, "s": 571}, {"h": 16, "b": 11, "s": 6143, "page": 128}, {"h": 20, "page": 16}], ids=str
)
def test_nothing_is_multiplied_twice_and_loops_spill_nothing(sizes):
    (variant,) = narrow_of(**sizes)
    assert variant.kernel == "latent_narrow"
    compiled = compiler.compile_variant(launcher.kernel("latent_narrow").function, variant)
    facts = compiler.facts_of_cubin(compiled)
    assert facts.num("HGMMA") == 36 + 2 * 16, "scores of 576 dims once, sums of 256 columns in each of two groups"
    assert (facts.num_registers, compiled.num_warps) == (128, 16) and facts.shared_bytes <= 227 * 1024
    assert facts.num_spills <= 16, "between sequences"
    loops = loops_of(compiled.cubin)
    assert sorted(loop.count("HGMMA") for loop in loops) == [16, 16, 36]
    assert not any("LDL" in loop or "STL" in loop for loop in loops)
    assert all(loop.count("WARPGROUP.DEPBAR") == 1 for loop in loops), "products are on their way together"


def test_few_heads_in_pages_of_whole_tiles_are_narrow(monkeypatch):
    assert [v.kernel for v in narrow_of(h=8, page=48)] == ["latent_narrow"]
    assert [v.kernel for v in narrow_of(page=8)] == ["latent_share"]
    monkeypatch.setattr(config, "NARROW", False)
    assert [[v.kernel for v in narrow_of(h=h)] for h in (16, 32)] == [["latent_columns"], ["latent_line"]]


def test_room_for_queries_is_taken_from_blocks():
    sizes = [(16, 1), (16, 300), (32, 1), (32, 300)]
    found = [config.choose_narrow(batch, heads, 4096, 132, 64) for heads, batch in sizes]
    assert [(one.queries, one.ring) for one in found] == [(2, 7), (2, 7), (1, 7), (2, 6)]
    assert [config.choose_narrow(9, 16, s, 132, 64).rows for s in (4000, 4001)] == [16, 64]
