"""Products on kernels of older generations: full precision, odd rows, small batches, vectors."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from ridgeline.cost.call import Call, call
from ridgeline.cost.price import pricer_of
from ridgeline.cost.time.chip import chip_of
from ridgeline.cost.time.gemm.calls import group_of
from ridgeline.cost.time.gemm.simt import START, classic_timing, vector_timing
from ridgeline.hardware import device

H200 = chip_of(device("h200"))


def busy_s(made: Call) -> float:
    return pricer_of(device("h200")).price(made).time.busy_s


def product(dtype: str = "fp32", **shape: int) -> Call:
    return call("bmm" if "b" in shape else "gemm", dtype, "fwd", "cublas", **shape)


@pytest.mark.parametrize("grown", ["m", "n", "k"])
def test_a_larger_product_never_takes_much_less_time(grown: str) -> None:
    """Tiles quantize and the library changes kernels: twice as many may fit a little better, four times as many not."""
    sizes = [64 * 2**i for i in range(8)]
    times = [busy_s(product(**({"m": 512, "n": 512, "k": 512} | {grown: size}))) for size in sizes]
    assert all(later >= 0.9 * before for before, later in pairwise(times))
    assert all(later >= before for before, later in zip(times, times[2:], strict=False))


def test_no_product_beats_the_speed_of_light() -> None:
    rng = np.random.default_rng(0)
    b, m, n, k = (
        rng.integers(low, high, 200).astype(float) for low, high in ((1, 64), (1, 3000), (1, 3000), (1, 3000))
    )
    found = classic_timing(H200, START, b=b, m=m, n=n, k=k, dtype="fp32")
    assert (found.expected_s >= found.floor_s).all()
    assert (found.floor_s >= 2 * b * m * n * k / H200.vector_flops_per_s * 0.999).all()


def test_a_warm_vector_product_is_faster_than_a_cold_one() -> None:
    cold, warm = (
        vector_timing(H200, START, n=8192, k=4096, dtype="fp32", warm_frac=frac).expected_s[0] for frac in (0.0, 1.0)
    )
    assert warm < cold


def test_batches_are_never_split_and_long_single_chains_are() -> None:
    single, batched = (
        classic_timing(H200, START, b=b, m=64, n=64, k=65536, dtype="fp32").num_kernels[0] for b in (1, 8)
    )
    assert (single, batched) == (2, 1)


@pytest.mark.parametrize(
    ("problem", "dtype", "group"),
    [
        ((1, 512, 512, 512, "nt"), "bf16", ""),
        ((1, 512, 512, 511, "nt"), "bf16", "odd1"),
        ((1, 512, 514, 512, "nt"), "bf16", "odd2"),
        ((8, 512, 512, 511, "nt"), "bf16", "odd1b"),
        ((1, 1, 512, 511, "nt"), "bf16", "vector"),
        ((1, 512, 512, 512, "nt"), "fp32", "plain"),
        ((1, 16, 512, 512, "nt"), "fp32", "thin"),
        ((1, 512, 512, 512, "nt"), "tf32", "even"),
        ((1, 512, 512, 511, "nt"), "tf32", "odd"),
    ],
)  # fmt: skip
def test_which_kernels_a_product_meets(problem: tuple[int, int, int, int, str], dtype: str, group: str) -> None:
    assert group_of(problem, dtype) == group


def test_an_unaligned_row_costs_a_large_product_several_times_its_time() -> None:
    aligned, odd = (busy_s(product("bf16", m=4096, n=4096, k=k)) for k in (4096, 4095))
    assert 2.0 < odd / aligned < 12.0
