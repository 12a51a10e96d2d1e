"""Reductions: the launch the library chooses, and what it costs."""

from __future__ import annotations

import pytest

from ridgeline.cost.call import Call, Time, call
from ridgeline.cost.time.chip import Chip
from ridgeline.cost.time.rows.reduction import DEFAULTS, launch, model

H200 = Chip(
    name="h200", arch="hopper", num_sms=132, clock_hz=1.98e9, dram_bytes_per_s=4.8e12, l2_bytes=62914560.0,
    l2_bytes_per_s=10.14e12, smem_bytes=233472.0, tensor_flops_per_s={}, vector_flops_per_s=66.9e12,
    tdp_w=700.0, idle_w=75.0,
)  # fmt: skip


def time(made: Call, warm_frac: float = 0.0) -> Time:
    return model(made, H200, DEFAULTS, warm_frac)


@pytest.mark.parametrize(
    ("view", "vector", "splits"),
    [
        ((1, 1256, 256), 4, 20),
        ((1, 743, 512), 4, 1),
        ((1, 5429, 1135), 1, 15),
        ((1, 678, 2466), 2, 1),
        ((1, 311034, 128), 4, 2112),
        ((2286, 3600, 1), 1, 1),
        ((1, 830_872, 1), 1, 102),
    ],
)
def test_launches_are_those_recorded_on_an_h200(view: tuple[int, int, int], vector: int, splits: int):
    made = launch(*view, num_sms=132)
    assert (made.vector, made.splits) == (vector, splits)


def test_long_rows_are_shared_by_a_whole_block():
    assert launch(1024, 4096, 1, 132).split_rows is False
    assert launch(1024, 16384, 1, 132).split_rows is True


def test_a_split_output_needs_its_counters_cleared():
    assert time(call("sum_dim0", "bf16", n=100_000, c=128)).num_kernels == 2
    assert time(call("sum_dim0", "bf16", n=256, c=8192)).num_kernels == 1


def test_few_columns_of_many_rows_wait_for_the_last_block():
    narrow, square = time(call("sum_dim0", "bf16", n=2**19, c=128)), time(call("sum_dim0", "bf16", n=2**13, c=2**13))
    assert narrow.busy_s > 3 * square.busy_s


def test_the_generic_kind_sees_the_same_tensor():
    row = call("reduce", "bf16", outer=512, reduced=4096, inner=1, out_bytes=1024)
    column = call("reduce", "bf16", outer=1, reduced=4096, inner=512, out_bytes=1024)
    assert time(row).busy_s == time(call("sum_dim1", "bf16", n=512, c=4096)).busy_s
    assert time(column).busy_s == time(call("sum_dim0", "bf16", n=4096, c=512)).busy_s


def test_carrying_an_index_costs_more_than_a_maximum_and_that_more_than_a_sum():
    kinds = ("argmax_dim1", "max_dim1", "sum_dim1")
    index, guard, plain = (time(call(kind, "bf16", n=100_000, c=96)).busy_s for kind in kinds)
    assert index > guard > plain


def test_compiled_column_sums_are_split_in_two_kernels():
    assert time(call("sum_dim0", "bf16", "fwd", "inductor", n=70_000, c=256)).num_kernels == 2
    assert time(call("sum_dim1", "bf16", "fwd", "inductor", n=70_000, c=256)).num_kernels == 1


def test_an_empty_reduction_takes_no_time():
    assert time(call("sum_all", "bf16", n=0, c=8)).busy_s == 0.0
