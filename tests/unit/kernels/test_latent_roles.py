"""Latent decoding by roles without a GPU: who waits for whom, and what the compiler makes of it."""

import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))

import role_play

from ridgeline.kernels import compiler, launcher
from ridgeline.kernels.contract import case
from ridgeline.kernels.latent_attention import config
from ridgeline.kernels.variants import variants_of

LENGTHS = ((9,), (1, 0, 4, 5), (13, 1, 1, 1, 1, 1, 8, 30), (0, 2, 40), (3, 3, 3, 3, 3, 3, 3))
WAITS = ("half_empty", "half_full", "more_full", "told", "over", "over_empty", "q_full", "q_empty")


def program_of(lengths, halves=config.HALVES, mores=config.MORES, skipped="", seed=0):
    rng = np.random.default_rng(seed)
    width = 2 * role_play.WIDTH + role_play.MORE
    q = rng.standard_normal((len(lengths), role_play.HEADS, width))
    return role_play.Program(q, [rng.standard_normal((n, width)) for n in lengths], halves, mores, skipped)


def assert_right(program, stretch):
    """Sums, maxima and totals of every piece of a sequence as a softmax at once has them."""
    for b, first, last, length in program.stretches(*stretch):
        keys = program.keys[b][first * role_play.KEYS : min(last * role_play.KEYS, length)]
        s = program.q[b] @ keys.T
        p = np.exp(s - s.max(1, keepdims=True))
        top, total = program.left_behind[b, first, "seen"]
        np.testing.assert_allclose(top, s.max(1))
        np.testing.assert_allclose(total, p.sum(1))
        for c in range(2):
            o, told = program.left_behind[b, first, c]
            np.testing.assert_array_equal(told, total)
            np.testing.assert_allclose(o, p @ keys[:, c * role_play.WIDTH : (c + 1) * role_play.WIDTH])


def stretches_of(lengths):
    """The whole line, and its second half."""
    blocks = [-(-n // role_play.KEYS) for n in lengths]
    yield next(b for b, num in enumerate(blocks) if num), 0, sum(blocks)
    start, b = sum(blocks) // 2, 0
    while start >= blocks[b]:
        start, b = start - blocks[b], b + 1
    yield b, start, sum(blocks) - sum(blocks) // 2


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("room", [(5, 3), (4, 2), (3, 2)])
def test_no_order_of_events_makes_a_sum_wrong_or_stops_everybody(lengths, room):
    for stretch in stretches_of(lengths):
        for seed in range(40):
            program = program_of(lengths, *room, seed=seed)
            program.play(seed, *stretch)
            assert_right(program, stretch)


def goes_wrong(program, seed, *stretch):
    try:
        with np.errstate(all="ignore"):
            program.play(seed, *stretch)
            assert_right(program, stretch)
    except (AssertionError, role_play.Stuck):
        return True
    return False


@pytest.mark.parametrize("skipped", WAITS)
def test_every_wait_is_needed(skipped):
    """Without it some order of events goes wrong: what the play would not see it does not check."""
    lengths = (13, 1, 1, 1, 1, 1, 8, 30)
    assert any(goes_wrong(program_of(lengths, skipped=skipped, seed=seed), seed, 0, 0, 19) for seed in range(150))


def test_rotary_parts_that_are_fewer_than_blocks_are_overwritten():
    assert any(goes_wrong(program_of((30,), 5, 2, seed=seed), seed, 0, 0, 8) for seed in range(150))


def test_a_ring_without_room_for_both_halves_of_a_block_stops_everybody():
    with pytest.raises(role_play.Stuck):
        program_of((9,), 1, 1).play(0, 0, 0, 3)


def roles_of(monkeypatch, way, **sizes):
    monkeypatch.setattr(config, "ROLES", way)
    of = case(sizes.pop("dtype", "bfloat16"), **{"b": 32, "h": 128, "s": 4096, "d": 512, "e": 64, "page": 64,
                                                 "uneven": False, **sizes})  # fmt: skip
    return [v for v in variants_of("paged_latent_attention", [of]) if v.kernel.startswith("latent")]


def loops_of(cubin):
    """Instructions of every innermost loop that multiplies."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        lines = compiler._tool("nvdisasm", "-c", str(path)).splitlines()
    label = {line.strip().rstrip(":"): i for i, line in enumerate(lines) if re.match(r"\s*\.L_x_\d+:", line)}
    found = ((i, re.search(r"BRA.*`\((\.L_x_\d+)\)", line)) for i, line in enumerate(lines))
    spans = sorted(((label[jump[1]], i) for i, jump in found if jump), key=lambda span: span[1] - span[0])
    products = [i for i, line in enumerate(lines) if "HGMMA" in line]
    inner = {next((a, b) for a, b in spans if a < i < b) for i in products}
    return ["\n".join(lines[a:b]) for a, b in sorted(inner)]


@pytest.mark.parametrize(("way", "sizes"), [("line", {}), ("shares", {"h": 64, "page": 16, "dtype": "float16"})])
def test_roles_multiply_as_much_as_they_must_and_spill_nothing_in_their_loops(monkeypatch, way, sizes):
    (variant,) = roles_of(monkeypatch, way, **sizes)
    assert variant.kernel == "latent_roles" and dict(variant.constants)["SHARED"] == (way == "shares")
    compiled = compiler.compile_variant(launcher.kernel("latent_roles").function, variant)
    facts = compiler.facts_of_cubin(compiled)
    assert facts.num("HGMMA") == 36 + 2 * 8, "scores once, sums of 2 × 128 columns in each of two groups"
    assert (facts.num_registers, compiled.num_warps) == (128, 16), "all registers there are"
    assert facts.shared_bytes <= 227 * 1024
    assert facts.num_spills <= 48, "between sequences"
    loops = loops_of(compiled.cubin)
    assert sorted(loop.count("HGMMA") for loop in loops) == [8, 8, 36]
    assert not any("LDL" in loop or "STL" in loop for loop in loops)


def test_roles_are_taken_where_the_configuration_says_so(monkeypatch):
    for way, kernel in (("line", "latent_roles"), ("shares", "latent_roles"), ("", "latent_blocks")):
        assert [v.kernel for v in roles_of(monkeypatch, way)] == [kernel]
    assert [v.kernel for v in roles_of(monkeypatch, "line", h=32)] == ["latent_narrow"]
    assert [v.kernel for v in roles_of(monkeypatch, "shares", h=100, page=48)] == ["latent_roles"]
    assert [v.kernel for v in roles_of(monkeypatch, "line", page=8)] == ["latent_share"]
