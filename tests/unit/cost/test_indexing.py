"""Gathers and scatters: rows, elements, bags and the gradients of tables."""

from __future__ import annotations

import pytest

from ridgeline.cost.call import Call, Time, call
from ridgeline.cost.time.chip import Chip
from ridgeline.cost.time.stream.indexing import DEFAULTS, model

H200 = Chip(
    name="h200", arch="hopper", num_sms=132, clock_hz=1.98e9, dram_bytes_per_s=4.8e12, l2_bytes=62914560.0,
    l2_bytes_per_s=10.14e12, smem_bytes=233472.0, tensor_flops_per_s={}, vector_flops_per_s=66.9e12,
    tdp_w=700.0, idle_w=75.0,
)  # fmt: skip


def time(made: Call, warm_frac: float = 0.0) -> Time:
    return model(made, H200, DEFAULTS, warm_frac)


def test_short_rows_cost_a_block_each_whatever_their_width():
    narrow, wide = (time(call("embedding", "bf16", v=100_000, d=d, n=400_000)).busy_s for d in (16, 64))
    assert narrow == pytest.approx(wide, rel=0.01)


def test_long_rows_cost_their_bytes():
    made = call("embedding", "bf16", v=128_256, d=4096, n=16_384)
    assert time(made).busy_s == pytest.approx(2 * 16_384 * 8192 / 3.7e12, rel=0.15)


def test_a_table_that_stays_in_the_l2_is_read_from_dram_once():
    small, large = (
        time(call("gather", "fp32", rows=200_000, row_bytes=4096, table_bytes=t)).busy_s for t in (10**7, 10**9)
    )
    assert large > 1.3 * small


def test_elements_picked_one_by_one_are_not_a_block_each():
    numel = 10_000_000
    assert time(call("gather", "bf16", rows=numel, row_bytes=2, table_bytes=2 * numel)).busy_s < 1e-4


def test_few_indices_are_walked_and_many_are_sorted():
    few, tile, many = (
        time(call("embedding", "bf16", "bwd", v=50_000, d=64, n=3000)),
        time(call("embedding_bag", "fp32", "bwd", v=50_000, d=64, b=500, l=2)),
        time(call("embedding", "bf16", "bwd", v=50_000, d=64, n=30_000)),
    )
    assert (few.num_kernels, tile.num_kernels, many.num_kernels) == (2, 12, 31)


def test_longer_bags_take_longer():
    short, long = (time(call("embedding_bag", "fp32", v=10**6, d=64, b=4096, l=length)).busy_s for length in (4, 64))
    assert long > 3 * short


def test_atomic_additions_cost_more_than_a_gather():
    shape = {"v": 100_000, "d": 256, "n": 100_000}
    assert time(call("index_add", "bf16", **shape)).busy_s > 3 * time(call("index_select", "bf16", **shape)).busy_s


def test_no_rows_take_no_time():
    assert time(call("embedding", "bf16", v=1000, d=64, n=0)).busy_s == 0.0
