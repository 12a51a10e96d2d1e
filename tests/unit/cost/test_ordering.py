"""Sort, cumulative sum and top-k: kernels by row length and number of rows."""

from __future__ import annotations

import pytest

from ridgeline.cost.call import Call, Time, call
from ridgeline.cost.time.chip import Chip
from ridgeline.cost.time.stream.sort_scan_topk import DEFAULTS, model

H200 = Chip(
    name="h200", arch="hopper", num_sms=132, clock_hz=1.98e9, dram_bytes_per_s=4.8e12, l2_bytes=62914560.0,
    l2_bytes_per_s=10.14e12, smem_bytes=233472.0, tensor_flops_per_s={}, vector_flops_per_s=66.9e12,
    tdp_w=700.0, idle_w=75.0,
)  # fmt: skip


def time(made: Call) -> Time:
    return model(made, H200, DEFAULTS, 0.0)


@pytest.mark.parametrize(
    ("made", "num_kernels"),
    [
        (call("sort", "fp32", n=3308), 5),
        (call("sort", "fp32", n=5948), 14),
        (call("sort", "bf16", n=4483), 10),
        (call("sort", "fp32", n=5, c=22061), 21),
        (call("sort", "bf16", n=4, c=32232), 17),
        (call("sort", "fp32", n=528, c=36220), 8),
        (call("cumsum", "fp32", n=37247), 2),
        (call("cumsum", "bf16", n=402, c=3425), 1),
        (call("topk", "bf16", n=7, v=4096, k=10), 2),
        (call("topk", "bf16", n=3341, v=1000, k=10), 16),
        (call("topk", "fp32", n=1, v=128256, k=1), 21),
    ],
)
def test_kernels_are_those_recorded_on_an_h200(made: Call, num_kernels: int):
    assert time(made).num_kernels == num_kernels


def test_wider_keys_need_more_passes():
    assert time(call("sort", "fp32", n=10_000_000)).busy_s > 1.6 * time(call("sort", "bf16", n=10_000_000)).busy_s


def test_short_rows_in_great_number_meet_the_librarys_wide_blocks():
    few, many = time(call("cumsum", "fp32", n=16_384, c=32)).busy_s, time(call("cumsum", "fp32", n=32_768, c=32)).busy_s
    assert many > 10 * few


def test_taking_one_needs_no_sort_of_the_winners():
    one, two = (time(call("topk", "bf16", n=8, v=1000, k=k)) for k in (1, 2))
    assert (one.num_kernels, two.num_kernels) == (1, 2) and two.busy_s > one.busy_s


@pytest.mark.parametrize("kind", ["sort", "cumsum"])
def test_nothing_takes_no_time(kind: str):
    assert time(call(kind, "fp32", n=0)).busy_s == 0.0
