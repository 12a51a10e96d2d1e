"""Which kernels a softmax or a loss runs, and what follows from it."""

from __future__ import annotations

import pytest

from ridgeline.cost.call import Call, Time, call, family_of
from ridgeline.cost.time.chip import Chip
from ridgeline.cost.time.rows.softmax import DEFAULTS, kernels, model
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


@pytest.mark.parametrize("kind", ["softmax", "log_softmax", "cross_entropy", "nll_loss"])
def test_every_kind_is_priced_by_this_family(kind):
    assert family_of(kind).name == "softmax"


@pytest.mark.parametrize(("dtype", "width", "kernel"), [
    ("bf16", 1024, "softmax_warp_forward"), ("fp32", 2048, "softmax_warp_forward"),
    ("bf16", 2049, "cunn_SoftMaxForwardReg"), ("fp32", 9216, "cunn_SoftMaxForwardReg"),
    ("fp32", 9220, "cunn_SoftMaxForwardSmem"), ("bf16", 9217, "cunn_SoftMaxForward"),
    ("bf16", 24504, "cunn_SoftMaxForwardSmem"), ("bf16", 32000, "cunn_SoftMaxForward"),
])  # fmt: skip
def test_the_width_of_a_row_chooses_the_forward_kernel(dtype, width, kernel):
    assert names(call("softmax", dtype, n=128, c=width)) == [kernel]


@pytest.mark.parametrize(("dtype", "width", "kernel"), [
    ("bf16", 1024, "softmax_warp_backward"), ("bf16", 1032, "cunn_SoftMaxBackwardSmem"),
    ("bf16", 1030, "cunn_SoftMaxBackward"), ("fp32", 12288, "cunn_SoftMaxBackward"),
])  # fmt: skip
def test_the_width_of_a_row_chooses_the_backward_kernel(dtype, width, kernel):
    assert names(call("softmax", dtype, "bwd", n=128, c=width)) == ["mul", kernel]
    assert names(call("log_softmax", dtype, "bwd", n=128, c=width)) == [kernel]


def test_cross_entropy_is_log_softmax_and_nll_loss():
    whole = time(call("cross_entropy", "bf16", n=2048, v=32000)).busy_s
    parts = time(call("log_softmax", "bf16", n=2048, c=32000)), time(call("nll_loss", "bf16", n=2048, v=32000))
    assert whole == pytest.approx(sum(part.busy_s for part in parts))
    backward = names(call("cross_entropy", "bf16", "bwd", n=2048, v=32000))
    assert backward == ["fill", "nll_loss_backward", "cunn_SoftMaxBackward"]


def test_nll_loss_is_one_block_waiting_on_loads():
    many, few = (time(call("nll_loss", "bf16", n=rows, v=32000)).busy_s for rows in (512, 64))
    assert many > 3 * few


def test_inductor_reads_and_writes_once():
    made = call("softmax", "fp32", library="inductor", n=72486, c=1024)
    assert time(made).busy_s < 1.3 * time(made).floor_s


def test_rows_that_fill_a_power_of_two_waste_no_lanes():
    full, over = (time(call("softmax", "bf16", n=200_000, c=width)).busy_s for width in (256, 257))
    assert over > 1.1 * full


def test_warm_inputs_are_never_slower():
    made = call("softmax", "bf16", n=1024, c=4096)
    assert time(made, 1.0).busy_s < time(made).busy_s


def test_an_empty_tensor_launches_nothing():
    assert time(call("softmax", "bf16", n=0, c=1024)) == Time(0.0, 0.0, "latency", 0)


def test_an_unknown_phase_is_an_error():
    with pytest.raises(CostError, match="fwd and bwd"):
        time(call("softmax", "bf16", "optimizer", n=1, c=4))


def test_a_missing_dimension_is_named():
    with pytest.raises(CostError, match="v not given"):
        time(call("cross_entropy", "bf16", n=8, c=64))
