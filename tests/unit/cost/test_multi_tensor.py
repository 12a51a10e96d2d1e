"""Operators over lists of tensors: how they are cut into launches, and what those cost."""

from __future__ import annotations

import pytest

from ridgeline.cost.call import Call, Time, call
from ridgeline.cost.time.chip import Chip
from ridgeline.cost.time.stream.multi_tensor import DEFAULTS, launches, model

H200 = Chip(
    name="h200", arch="hopper", num_sms=132, clock_hz=1.98e9, dram_bytes_per_s=4.8e12, l2_bytes=62914560.0,
    l2_bytes_per_s=10.14e12, smem_bytes=233472.0, tensor_flops_per_s={}, vector_flops_per_s=66.9e12,
    tdp_w=700.0, idle_w=75.0,
)  # fmt: skip


def time(made: Call) -> Time:
    return model(made, H200, DEFAULTS, 0.0)


def test_a_launch_holds_so_many_tensors_and_so_many_blocks():
    assert launches(89, 2, lists=4) == [72, 72, 34]
    assert launches(5, 178, lists=2) == [320, 320, 250]
    assert launches(110, 1, lists=1) == [110]


def test_every_element_is_in_one_launch():
    assert sum(launches(77, 13, lists=3)) == 77 * 13


def test_fused_adamw_moves_seven_tensors_once():
    numel = 2**28
    fused = time(call("adamw", "fp32", "fwd", "fused", numel=numel // 16, tensors=16))
    assert fused.busy_s == pytest.approx(7 * 4 * numel / 3.6e12, rel=0.1)


def test_fused_adamw_beats_the_foreach_one():
    shape = {"numel": 2**22, "tensors": 40}
    fused, foreach = (time(call("adamw", "fp32", "fwd", library, **shape)) for library in ("fused", "foreach"))
    assert foreach.busy_s > 2 * fused.busy_s and foreach.num_kernels > fused.num_kernels


def test_a_lone_chunk_is_bound_by_latency():
    assert time(call("foreach_add", "fp32", numel=65536, tensors=1)).bound == "latency"


def test_the_generic_kind_and_the_named_one_agree():
    named = time(call("foreach_add", "fp32", numel=100_000, tensors=10))
    generic = time(call("foreach", "fp32", numel=1_000_000, num_tensors=10, reads=2, writes=1))
    assert generic.busy_s == named.busy_s


def test_no_tensors_take_no_time():
    assert time(call("foreach_add", "fp32", numel=0, tensors=4)).busy_s == 0.0
