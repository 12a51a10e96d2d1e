"""Products as calls: dense, batched, grouped, and the gradients of each."""

from __future__ import annotations

import pytest

from ridgeline.cost.call import Time, call
from ridgeline.cost.price import pricer_of
from ridgeline.cost.time.gemm.calls import alignment
from ridgeline.hardware import device


def time(kind: str = "gemm", dtype: str = "bf16", phase: str = "fwd", on: str = "h200", **dims: int | str) -> Time:
    return pricer_of(device(on)).price(call(kind, dtype, phase, "cublas", **dims)).time


@pytest.mark.parametrize(
    ("m", "n", "k", "layout", "dtype", "aligned"),
    [
        (4096, 4096, 4096, "nt", "bf16", 8),
        (4095, 4096, 4096, "nt", "bf16", 8),  # rows of A are k long: an odd m does not matter
        (4095, 4096, 4096, "tn", "bf16", 1),
        (4096, 4094, 4096, "nt", "bf16", 2),
        (4096, 4096, 4097, "nt", "bf16", 1),
        (4096, 4096, 4097, "nn", "bf16", 1),
        (4096, 4100, 4096, "nt", "fp32", 8),  # four floats are 16 bytes
    ],
)
def test_alignment_is_that_of_the_worst_row(m, n, k, layout, dtype, aligned) -> None:
    assert alignment((1, m, n, k, layout), dtype) == aligned


def test_misaligned_rows_are_slower() -> None:
    assert time(m=4096, n=4096, k=4095).busy_s > 1.2 * time(m=4096, n=4096, k=4096).busy_s


def test_the_gradients_of_a_product_are_two_products() -> None:
    shape = {"m": 8192, "n": 4096, "k": 4096}
    forward, backward = time(**shape), time(phase="bwd", **shape)
    assert backward.num_kernels == 2
    assert 1.7 < backward.busy_s / forward.busy_s < 2.6


def test_a_large_product_is_bound_by_arithmetic_and_a_thin_one_by_memory() -> None:
    assert time(m=8192, n=8192, k=8192).bound == "compute"
    assert time(m=1, n=8192, k=8192).bound == "memory"


def test_a_batch_of_products_is_never_faster_than_one_of_them() -> None:
    one, many = (time("bmm", b=b, m=512, n=512, k=512).busy_s for b in (2, 64))
    assert one < many < 40 * one


def test_experts_cost_more_than_one_batched_product_of_their_size() -> None:
    grouped = time("grouped_gemm", groups=8, m=4096, n=1024, k=1024).busy_s
    assert grouped > time("bmm", b=8, m=512, n=1024, k=1024).busy_s


def test_experts_with_few_rows_still_read_all_their_weights() -> None:
    thin = time("grouped_gemm", groups=64, m=64, n=2048, k=2048)
    weight_bytes = 64 * 2048 * 2048 * 2
    assert thin.busy_s > weight_bytes / pricer_of(device("h200")).chip.dram_bytes_per_s


def test_a_narrower_format_is_faster_where_the_device_has_it() -> None:
    shape = {"m": 8192, "n": 8192, "k": 8192}
    assert time(dtype="fp8", **shape).busy_s < time(**shape).busy_s < time(dtype="fp32", **shape).busy_s


def test_a_device_without_the_format_computes_in_fp32() -> None:
    shape = {"m": 2048, "n": 2048, "k": 2048}
    assert time(dtype="bf16", on="p100-sxm2", **shape).busy_s > 0


def test_nothing_is_faster_than_arithmetic_and_memory_allow() -> None:
    chip = pricer_of(device("h200")).chip
    for m, n, k in ((1, 4096, 4096), (64, 512, 64), (8192, 8192, 8192), (333, 777, 999)):
        found = time(m=m, n=n, k=k)
        arithmetic_s = 2.0 * m * n * k / chip.tensor_flops_per_s["bf16"]
        assert found.busy_s >= found.floor_s >= arithmetic_s * (1 - 1e-9)
