"""Fused attention calls: which kernels run, how their times follow shapes, and known figures."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ridgeline.cost.call import Call, call
from ridgeline.cost.time.attention.calls import (
    BASE,
    COEFFICIENTS,
    DEFAULTS,
    KERNELS,
    group_coef,
    model,
    num_splits,
    plan_of,
    plan_s,
)
from ridgeline.cost.time.chip import Chip, chip_of
from ridgeline.hardware import device

SHAPE = {"b": 4, "h": 32, "hkv": 32, "s": 2048, "skv": 2048, "d": 128, "causal": 0}


@pytest.fixture(scope="module")
def h200() -> Chip:
    return chip_of(device("h200"))


def attention(library: str = "cudnn", phase: str = "fwd", dtype: str = "bf16", **changed: int) -> Call:
    return call("attention", dtype, phase, library, **{**SHAPE, **changed})


def seconds(chip: Chip, library: str = "cudnn", phase: str = "fwd", dtype: str = "bf16", **changed: int) -> float:
    return model(attention(library, phase, dtype, **changed), chip, DEFAULTS, 0.0).busy_s


def test_every_coefficient_is_documented() -> None:
    assert set(BASE) == set(COEFFICIENTS)
    assert {name.partition(".")[2] for name in DEFAULTS} <= set(COEFFICIENTS)


def test_every_group_has_kernels() -> None:
    groups = {name.partition(".")[0] for name in DEFAULTS}
    assert groups - {"fa2_decode"} == set(KERNELS)


@pytest.mark.parametrize(
    ("library", "phase", "changed", "num_kernels"),
    [
        ("fa2", "fwd", {}, 1),
        ("fa2", "fwd", {"b": 1, "h": 8, "hkv": 8, "s": 1}, 2),
        ("fa2", "fwd", {"b": 64, "s": 1}, 1),
        ("fa2", "bwd", {}, 3),
        ("fa2", "bwd", {"hkv": 8}, 5),
        ("cudnn", "fwd", {}, 2),
        ("cudnn", "fwd", {"b": 1, "hkv": 8, "s": 1, "skv": 2049}, 2),
        ("cudnn", "fwd", {"b": 32, "hkv": 8, "s": 1, "skv": 1025}, 1),
        ("cudnn", "bwd", {}, 4),
        ("cudnn", "bwd", {"hkv": 8}, 6),
        ("efficient", "fwd", {"mask": 1}, 1),
        ("efficient", "fwd", {"mask": 1, "s": 1081, "skv": 1081}, 3),
        ("efficient", "bwd", {"mask": 1}, 2),
        ("efficient", "bwd", {"mask": 1, "s": 128, "skv": 128}, 1),
    ],
)
def test_number_of_kernels(h200: Chip, library: str, phase: str, changed: dict[str, int], num_kernels: int) -> None:
    assert model(attention(library, phase, **changed), h200, DEFAULTS, 0.0).num_kernels == num_kernels


def test_splits_are_the_fewest_that_fill_the_waves() -> None:
    assert num_splits(256, 132, 64) == 1
    assert num_splits(64, 132, 64) == 4
    assert num_splits(1, 132, 3) == 3


def test_grouped_heads_share_a_decoding_tile() -> None:
    plan = plan_of({**SHAPE, "hkv": 8, "s": 1, "b": 64}, "fa2", "fwd", 132)
    assert (plan.problem.h, plan.problem.s) == (8, 4)
    assert plan.launch.tiles == 64 * 8


def test_causal_tiles_visit_half_the_blocks() -> None:
    whole, causal = (plan_of({**SHAPE, "causal": flag}, "cudnn", "fwd", 132).launch for flag in (0, 1))
    assert causal.tiles == whole.tiles
    assert causal.mean_blocks == pytest.approx(0.5 * (whole.max_blocks + 1))


def test_head_dims_are_padded_to_a_kernel(h200: Chip) -> None:
    assert seconds(h200, d=72) == pytest.approx(seconds(h200, d=120), rel=0.1)
    assert seconds(h200, d=64) < 0.75 * seconds(h200, d=72)


def test_causal_is_faster_and_a_mask_is_slower(h200: Chip) -> None:
    assert seconds(h200, causal=1) < 0.7 * seconds(h200) < 0.7 * seconds(h200, mask=1)


def test_window_limits_the_blocks(h200: Chip) -> None:
    long = {"s": 16384, "skv": 16384, "causal": 1, "b": 1}
    assert seconds(h200, "fa2", window=1024, **long) < 0.3 * seconds(h200, "fa2", **long)


def test_full_precision_takes_three_products_in_the_narrower_mode(h200: Chip) -> None:
    assert seconds(h200, "efficient", dtype="fp32") > 2.5 * seconds(h200, "efficient")


def test_nothing_takes_no_time(h200: Chip) -> None:
    assert model(attention(b=0), h200, DEFAULTS, 0.0).busy_s == 0.0


@pytest.mark.parametrize("library", ["flashinfer", "trtllm", "fa2_paged"])
def test_serving_libraries_are_priced_by_the_tile_model(h200: Chip, library: str) -> None:
    assert 100e-6 < seconds(h200, library) < 1e-3


@pytest.mark.parametrize(
    ("library", "device_name", "changed", "seen_s"),
    [
        ("cudnn", "h200", {"b": 1, "hkv": 8, "s": 1, "skv": 2049}, 8.3e-6),
        ("cudnn", "h200", {"b": 32, "hkv": 8, "s": 1, "skv": 1025}, 41e-6),
        ("fa3", "h100-sxm", {"h": 16, "hkv": 16, "s": 4096, "skv": 4096}, 4 * 4 * 16 * 4096**2 * 128 / 638e12),
        ("fa2", "h100-sxm", {"h": 16, "hkv": 16, "s": 4096, "skv": 4096}, 4 * 4 * 16 * 4096**2 * 128 / 368e12),
    ],
)
def test_known_kernels(library: str, device_name: str, changed: dict[str, int], seen_s: float) -> None:
    """Kernels seen in whole models, and figures published in github:Dao-AILab/flash-attention assets."""
    assert seconds(chip_of(device(device_name)), library, **changed) == pytest.approx(seen_s, rel=0.08)


def test_known_training_step_on_ampere() -> None:
    """FlashAttention-2, forward and backward, head dim 128, 16k tokens: 187 Tflop/s on an A100."""
    chip, shape = chip_of(device("a100-sxm-80gb")), {"b": 8, "h": 16, "hkv": 16}
    took_s = seconds(chip, "fa2", **shape) + seconds(chip, "fa2", "bwd", **shape)
    assert 3.5 * 4 * 8 * 16 * 2048**2 * 128 / took_s == pytest.approx(187e12, rel=0.06)


def test_pricing_is_fast(h200: Chip, num_calls: Callable[..., int]) -> None:
    calls = [attention("fa2", b=b, s=s, skv=4096) for b in range(1, 11) for s in (1, 640, 4096)]
    num = num_calls(lambda: [model(one, h200, DEFAULTS, 0.0) for one in calls])
    assert num / len(calls) < 400  # 117 of them, some 50 µs


def test_heads_of_192_cost_no_more_an_operation_backward_where_accumulators_have_room() -> None:
    def rate(d: int, arch: str) -> float:
        dims = {"b": 1, "h": 64, "hkv": 64, "s": 8192, "skv": 8192, "d": d, "dv": 128, "causal": 1}
        plan = plan_of(dims, "cudnn", "bwd", 148, 2.0, arch)
        chip = chip_of(device("b200"))
        seconds, *_ = plan_s(chip, group_coef(dict(DEFAULTS), plan.group), plan, chip.peak_flops_per_s("bf16"))
        return (d + 128) / seconds

    assert rate(192, "blackwell") > 0.95 * rate(128, "blackwell")
    assert rate(192, "hopper") < 0.7 * rate(128, "hopper")
