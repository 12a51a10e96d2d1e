"""Which kernels a normalization runs, and what follows from it."""

from __future__ import annotations

import pytest

from ridgeline.cost.call import Call, Time, call, family_of
from ridgeline.cost.time.chip import Chip
from ridgeline.cost.time.rows.norm import DEFAULTS, kernels, model
from ridgeline.errors import CostError

H200 = Chip(
    name="h200", arch="hopper", num_sms=132, clock_hz=1.98e9, dram_bytes_per_s=4.8e12, l2_bytes=60e6,
    l2_bytes_per_s=10.14e12, smem_bytes=233472.0, tensor_flops_per_s={}, vector_flops_per_s=67e12, tdp_w=700.0,
    idle_w=75.0,
)  # fmt: skip


def names(made: Call) -> list[str]:
    return [k[0] for k in kernels(made, H200, DEFAULTS, 0.0)]


def time(made: Call, warm_frac: float = 0.0) -> Time:
    return model(made, H200, DEFAULTS, warm_frac)


def test_every_kind_is_priced_by_this_family():
    assert {family_of(kind).name for kind in ("layer_norm", "rms_norm", "group_norm", "batch_norm")} == {"norm"}


def test_rows_divisible_by_four_are_normalized_in_one_kernel():
    assert names(call("layer_norm", "bf16", n=4096, c=4096)) == ["ln"]
    assert names(call("rms_norm", "bf16", n=4096, c=4096)) == ["rms"]
    assert names(call("layer_norm", "bf16", n=4096, c=4095)) == ["moments", "affine"]


def test_many_rows_sum_parameter_gradients_in_two_steps():
    assert names(call("rms_norm", "bf16", "bwd", n=65536, c=1024)) == ["dx", "dgb"]
    assert names(call("rms_norm", "bf16", "bwd", n=65537, c=1024))[:2] == ["dx", "dgp"]
    layer, rms = (names(call(kind, "bf16", "bwd", n=100_000, c=512)) for kind in ("layer_norm", "rms_norm"))
    assert layer.count("reduce") == 2 and rms.count("reduce") == 1


def test_few_rows_sum_parameter_gradients_a_warp_alone():
    assert names(call("layer_norm", "fp32", "bwd", n=63, c=1024)) == ["dx", "dgs"]


def test_a_channels_last_group_norm_copies_first():
    shape = {"n": 8, "c": 256, "h": 32, "w": 32, "groups": 32}
    assert names(call("group_norm", "bf16", nhwc=0, **shape)) == ["gmoments", "fused_params", "gaffine"]
    assert names(call("group_norm", "bf16", nhwc=1, **shape))[0] == "gcopy"
    assert len(names(call("group_norm", "bf16", "bwd", nhwc=0, **shape))) == 5


def test_batch_norm_is_cudnn_in_single_precision_and_native_in_half():
    shape = {"n": 16, "c": 64, "h": 56, "w": 56, "training": 1}
    assert names(call("batch_norm", "fp32", library="cudnn", nhwc=0, **shape)) == ["ntrain"]
    assert names(call("batch_norm", "bf16", library="cudnn", nhwc=0, **shape)) == ["bstat", "update_stats", "baffine"]
    channels_last = names(call("batch_norm", "bf16", library="cudnn", nhwc=1, **shape))
    assert channels_last == ["fill", "cstat", "update_stats", "caffine"]


def test_the_layout_defaults_to_contiguous_as_in_pytorch():
    shape = {"n": 16, "c": 64, "h": 56, "w": 56}
    assert names(call("batch_norm", "bf16", library="cudnn", **shape)) == ["bstat", "update_stats", "baffine"]


def test_inductor_fuses_the_forward_into_one_kernel():
    assert names(call("layer_norm", "bf16", library="inductor", n=4096, c=1024)) == ["triton_persistent"]
    assert names(call("layer_norm", "bf16", library="inductor", n=4096, c=4096)) == ["triton_looped"]
    assert len(names(call("layer_norm", "bf16", library="inductor", n=64, c=16384))) == 3


def test_a_large_rms_norm_is_close_to_its_floor():
    priced = time(call("rms_norm", "fp32", n=65536, c=1024))
    assert priced.bound == "memory"
    assert priced.floor_s < priced.busy_s < 2.5 * priced.floor_s


def test_one_long_row_waits_for_its_loads():
    priced = time(call("layer_norm", "bf16", n=1, c=16384))
    assert priced.bound == "latency"
    assert priced.busy_s > 100 * priced.floor_s


def test_warm_inputs_are_never_slower():
    made = call("layer_norm", "bf16", n=1024, c=4096)
    assert time(made, 1.0).busy_s < time(made, 0.5).busy_s < time(made).busy_s


def test_an_empty_tensor_launches_nothing():
    assert time(call("layer_norm", "bf16", n=0, c=1024)) == Time(0.0, 0.0, "latency", 0)


def test_an_unknown_phase_is_an_error():
    with pytest.raises(CostError, match="fwd and bwd"):
        time(call("layer_norm", "bf16", "optimizer", n=1, c=4))


def test_a_missing_dimension_is_named():
    with pytest.raises(CostError, match="groups not given"):
        time(call("group_norm", "bf16", n=8, c=64, h=8, w=8))
