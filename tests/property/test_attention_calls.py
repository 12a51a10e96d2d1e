"""Laws of fused attention calls: never below the floor, never faster for more work by the same kernels."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ridgeline.cost.call import call
from ridgeline.cost.time.attention.calls import DECODE_ROWS, DEFAULTS, model, plan_of
from ridgeline.cost.time.chip import Chip, chip_of
from ridgeline.hardware import device

CHIPS = [chip_of(device(name)) for name in ("h200", "a100-sxm-80gb", "b200", "l40s", "t4")]
LIBRARIES = ("fa2", "cudnn", "efficient", "fa3")
rounding = 1 + 1e-9
lengths = st.integers(1, 20_000)
shapes = st.fixed_dictionaries(
    {
        "b": st.integers(1, 256), "hkv": st.sampled_from((1, 2, 8, 32)), "group": st.sampled_from((1, 4, 8)),
        "s": lengths, "skv": lengths, "d": st.sampled_from((32, 64, 72, 96, 128, 192, 256)), "causal": st.booleans(),
        "mask": st.booleans(), "window": st.sampled_from((0, 0, 0, 512)),
    }
)  # fmt: skip


def shape_of(drawn: dict[str, int]) -> dict[str, int]:
    shape = {name: int(value) for name, value in drawn.items() if name != "group"}
    return shape | {"h": drawn["hkv"] * drawn["group"]}


def seconds(chip: Chip, library: str, phase: str, shape: dict[str, int], warm_frac: float = 0.0) -> float:
    return model(call("attention", "fp16", phase, library, **shape), chip, DEFAULTS, warm_frac).busy_s


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(CHIPS), st.sampled_from(LIBRARIES), st.sampled_from(("fwd", "bwd")), shapes, st.floats(0, 1))
def test_never_beats_its_floor(chip: Chip, library: str, phase: str, drawn: dict[str, int], warm: float) -> None:
    found = model(call("attention", "fp16", phase, library, **shape_of(drawn)), chip, DEFAULTS, warm)
    assert math.isfinite(found.busy_s)
    assert found.busy_s >= found.floor_s > 0
    assert found.num_kernels >= 1


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(CHIPS), st.sampled_from(LIBRARIES), st.sampled_from(("fwd", "bwd")), shapes,
    st.sampled_from(("b", "hkv", "s", "skv")), st.integers(1, 16),
)  # fmt: skip
def test_more_work_is_never_faster(
    chip: Chip, library: str, phase: str, drawn: dict[str, int], grown: str, times: int
) -> None:
    """A length grows by whole multiples, so that full blocks stay full; other kernels may be faster."""
    small = shape_of(drawn)
    large = small | {name: small[name] * times for name in (("hkv", "h") if grown == "hkv" else (grown,))}
    assume(not small["causal"] or grown in ("b", "hkv"))
    plans = [plan_of(shape, library, phase, chip.num_sms) for shape in (small, large)]
    assume(plans[0].group == plans[1].group and plans[0].splits == plans[1].splits)
    assume(plans[0].num_kernels == plans[1].num_kernels)
    assume(plans[0].launch.is_ragged == plans[1].launch.is_ragged)
    assume((small["s"] <= DECODE_ROWS) == (large["s"] <= DECODE_ROWS))
    assert seconds(chip, library, phase, large) * rounding >= seconds(chip, library, phase, small)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(CHIPS), st.sampled_from(LIBRARIES), st.sampled_from(("fwd", "bwd")), shapes, st.integers(2, 16))
def test_longer_causal_sequences_are_never_faster(
    chip: Chip, library: str, phase: str, drawn: dict[str, int], times: int
) -> None:
    small = shape_of(drawn) | {"s": 128 * -(-drawn["s"] // 128), "causal": 1, "window": 0}
    small["skv"] = small["s"]
    large = small | {"s": small["s"] * times, "skv": small["s"] * times}
    plans = [plan_of(shape, library, phase, chip.num_sms) for shape in (small, large)]
    assume(plans[0].splits == plans[1].splits)
    assert seconds(chip, library, phase, large) * rounding >= seconds(chip, library, phase, small)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(CHIPS), st.sampled_from(LIBRARIES), st.sampled_from(("fwd", "bwd")), shapes)
def test_warm_inputs_are_never_slower(chip: Chip, library: str, phase: str, drawn: dict[str, int]) -> None:
    cold, warm = (seconds(chip, library, phase, shape_of(drawn), share) for share in (0.0, 1.0))
    assert warm <= cold * rounding


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("phase", ["fwd", "bwd"])
def test_extremes_are_finite(library: str, phase: str) -> None:
    for size in (1, 2**20):
        shape = {"b": 1, "h": 1, "hkv": 1, "s": size, "skv": size, "d": 64, "causal": 1}
        assert math.isfinite(seconds(CHIPS[0], library, phase, shape))
