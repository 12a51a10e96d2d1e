"""Pooling, resizing and recurrent layers."""

from __future__ import annotations

import pytest

from ridgeline.cost.call import Call, Time, call, family_of
from ridgeline.cost.time import recurrent
from ridgeline.cost.time.chip import Chip
from ridgeline.cost.time.stream import pooling

H200 = Chip(
    name="h200", arch="hopper", num_sms=132, clock_hz=1.98e9, dram_bytes_per_s=4.8e12, l2_bytes=62914560.0,
    l2_bytes_per_s=10.14e12, smem_bytes=233472.0, tensor_flops_per_s={"bf16": 989e12}, vector_flops_per_s=66.9e12,
    tdp_w=700.0, idle_w=75.0,
)  # fmt: skip
IMAGE = {"n": 32, "c": 64, "h": 112, "w": 112}


def time(made: Call) -> Time:
    return family_of(made.kind).model(made, H200, family_of(made.kind).defaults, 0.0)


def test_the_kinds_are_registered():
    assert family_of("pool").model is pooling.model and family_of("lstm").model is recurrent.model


def test_a_larger_window_takes_longer():
    small, large = (time(call("max_pool2d", "bf16", **IMAGE, k=k, stride=2)).busy_s for k in (3, 5))
    assert large > small


def test_pooling_to_a_pixel_is_a_mean():
    made = time(call("adaptive_pool2d", "bf16", **IMAGE))
    rows = time(call("mean_dim1", "bf16", n=32 * 64, c=112 * 112))
    assert made.busy_s == pytest.approx(rows.busy_s)


def test_the_gradient_of_maximum_pooling_is_cleared_first():
    forward, backward = (time(call("max_pool2d", "bf16", phase, **IMAGE, k=3, stride=2)) for phase in ("fwd", "bwd"))
    assert backward.num_kernels == 2 and backward.busy_s > forward.busy_s


def test_the_generic_pool_and_the_named_one_agree():
    named = time(call("max_pool2d", "bf16", **IMAGE, k=3, stride=2))
    generic = time(call("pool", "bf16", in_numel=32 * 64 * 112 * 112, out_numel=32 * 64 * 56 * 56, window=9))
    assert generic.busy_s == pytest.approx(named.busy_s, rel=0.01)


def test_interpolation_costs_more_than_the_nearest_neighbor():
    nearest, linear = (time(call("upsample2x", "bf16", **IMAGE, nearest=flag)).busy_s for flag in (1, 0))
    assert linear > 1.5 * nearest


def test_a_sequence_costs_its_steps():
    one, four = (
        time(call("lstm", "bf16", "fwd", "cudnn", input=512, hidden=512, layers=1, seq=s, batch=16)) for s in (64, 256)
    )
    assert 3.5 < four.busy_s / one.busy_s < 4.0 and one.bound == "latency"


@pytest.mark.parametrize(
    "made",
    [
        call("pool", "bf16", in_numel=0, out_numel=0, window=4),
        call("lstm", "bf16", "fwd", "cudnn", input=8, hidden=8, layers=1, seq=0, batch=1),
    ],
)
def test_nothing_takes_no_time(made: Call):
    assert time(made).busy_s == 0.0
