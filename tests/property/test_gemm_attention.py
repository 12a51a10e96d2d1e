"""Laws of the GEMM and attention time models: never below the floor, never faster for more work."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.cost.time.attention.tiles import LIBRARIES, attention_timing
from ridgeline.cost.time.chip import Chip, chip_of
from ridgeline.cost.time.gemm.tiles import gemm_timing
from ridgeline.hardware import device

CHIPS = [chip_of(device(name)) for name in ("h200", "a100-sxm-80gb", "b200", "l40s", "t4")]
chips = st.sampled_from(CHIPS)
sizes = st.integers(1, 20_000)
aligned = st.integers(1, 2_000).map(lambda x: 8 * x)
rounding = 1 + 1e-9


@settings(max_examples=150, deadline=None)
@given(chips, st.integers(1, 64), sizes, sizes, sizes, st.floats(0, 1))
def test_gemm_never_beats_its_floor(chip: Chip, b: int, m: int, n: int, k: int, warm: float) -> None:
    times = gemm_timing(chip, {}, b=b, m=m, n=n, k=k, dtype="fp16", warm_frac=warm)
    assert times.expected_s[0] >= times.floor_s[0] > 0


@settings(max_examples=150, deadline=None)
@given(chips, sizes, aligned, aligned, aligned)
def test_gemm_with_more_k_is_never_faster(chip: Chip, m: int, n: int, k: int, more: int) -> None:
    short, long = gemm_timing(chip, {}, m=m, n=n, k=[k, k + more], dtype="fp16").expected_s
    assert long * rounding >= short


@settings(max_examples=150, deadline=None)
@given(chips, aligned, aligned, aligned, st.integers(1, 100), st.integers(1, 100))
def test_more_batches_are_never_faster(chip: Chip, m: int, n: int, k: int, b: int, more: int) -> None:
    few, many = gemm_timing(chip, {}, b=[b, b + more], m=m, n=n, k=k, dtype="fp16").expected_s
    assert many * rounding >= few


@settings(max_examples=150, deadline=None)
@given(chips, sizes, aligned, aligned, st.floats(0, 1), st.floats(0, 1))
def test_warmer_operands_are_never_slower(chip: Chip, m: int, n: int, k: int, a: float, b: float) -> None:
    cold, warm = gemm_timing(chip, {}, m=m, n=n, k=k, dtype="fp16", warm_frac=sorted((a, b))).expected_s
    assert warm <= cold * rounding


@settings(max_examples=100, deadline=None)
@given(chips, sizes, aligned, aligned, st.floats(1.0, 3.0))
def test_more_dram_bandwidth_is_never_slower(chip: Chip, m: int, n: int, k: int, factor: float) -> None:
    wider = dataclasses.replace(chip, dram_bytes_per_s=chip.dram_bytes_per_s * factor)
    slow, fast = (gemm_timing(c, {}, m=m, n=n, k=k, dtype="fp16").expected_s[0] for c in (chip, wider))
    assert fast <= slow * rounding


attention_shapes = st.fixed_dictionaries(
    {
        "b": st.integers(1, 256), "hkv": st.integers(1, 16), "group": st.sampled_from([1, 2, 4, 5, 8]),
        "s": st.integers(1, 16_384), "more": st.integers(0, 65_536), "d": st.sampled_from([32, 64, 80, 128, 192, 256]),
        "causal": st.booleans(), "window": st.sampled_from([0, 128, 4096]),
        "library": st.sampled_from(sorted(LIBRARIES)),
    }
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(chips, attention_shapes, st.sampled_from(["fwd", "bwd"]))
def test_attention_never_beats_its_floor(chip: Chip, shape: dict[str, int], phase: str) -> None:
    times = attention_timing(chip, {}, phase=phase, dtype="fp16", **_arguments(shape))
    assert times.expected_s[0] >= times.floor_s[0] > 0


@settings(max_examples=200, deadline=None)
@given(chips, attention_shapes, st.integers(1, 64))
def test_attention_over_more_sequences_is_never_faster(chip: Chip, shape: dict[str, int], more: int) -> None:
    if not LIBRARIES[str(shape["library"])].splits:
        arguments = _arguments(shape)
        b = int(arguments.pop("b"))
        few, many = attention_timing(chip, {}, b=[b, b + more], dtype="fp16", **arguments).expected_s
        assert many * 1.01 >= few  # a last wave that fills up may cost a little less than a ragged one, as on B200


def _arguments(shape: dict[str, int]) -> dict[str, object]:
    made = {k: v for k, v in shape.items() if k not in ("group", "more")}
    return {**made, "h": shape["hkv"] * shape["group"], "skv": shape["s"] + shape["more"]}


def test_chips_of_the_properties_differ() -> None:
    assert len({chip.arch for chip in CHIPS}) == len(CHIPS)
