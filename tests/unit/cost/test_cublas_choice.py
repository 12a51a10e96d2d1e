"""What cuBLAS takes for products of odd rows and wide elements, as its launches told."""

from __future__ import annotations

import pytest

from ridgeline.cost.call import call
from ridgeline.cost.price import pricer_of
from ridgeline.cost.time.chip import Chip, chip_of
from ridgeline.cost.time.gemm.cublas_choice import FAMILIES, POOLS, _trees, kernel_of, questions, taken, told
from ridgeline.hardware import device


@pytest.fixture
def h200() -> Chip:
    return chip_of(device("h200"))


def test_a_kernel_is_read_from_its_text() -> None:
    kernel = kernel_of("ampere 128 64 64 3 2 1 0 2")
    assert (kernel.family, kernel.across, kernel.down, kernel.depth) == ("ampere", 128, 64, 64)
    assert (kernel.stages, kernel.loads, kernel.reduced, kernel.cleared, kernel.num_kernels) == (3, 2, True, False, 2)


@pytest.mark.parametrize("pool", POOLS)
def test_every_kernel_is_of_a_known_family(pool: str) -> None:
    trees = _trees(pool)
    assert trees is not None
    assert {kernel.family for kernel in trees[2]} <= set(FAMILIES)


@pytest.mark.parametrize(
    ("problem", "dtype", "aligned", "families"),
    [
        ((1, 1, 4096, 4096, "nt"), "fp32", 8, {"vector", "thin_t"}),
        ((1, 4, 28672, 1024, "nt"), "fp32", 8, {"thin_t"}),
        ((1, 2048, 2048, 2048, "nt"), "fp32", 8, {"xmma", "simt"}),
        ((1, 2048, 4097, 2048, "nt"), "bf16", 1, {"turing", "turing_wide"}),
        ((1, 2048, 4098, 2048, "nt"), "bf16", 2, {"ampere", "ampere_wide"}),
        ((1, 4096, 4096, 4096, "nt"), "tf32", 8, {"xmma_group"}),
    ],
)
def test_kernels_are_those_of_the_recordings(problem, dtype, aligned, families, h200: Chip) -> None:
    kernel = taken(problem, dtype, aligned, h200)
    assert kernel is not None
    assert kernel.family in families


def test_aligned_products_and_other_architectures_are_not_told(h200: Chip) -> None:
    assert taken((1, 2048, 2048, 2048, "nt"), "bf16", 8, h200) is None
    assert taken((1, 2048, 2048, 2048, "nt"), "fp32", 8, chip_of(device("l40s"))) is None


def test_a_long_inner_loop_over_few_outputs_is_cut_into_slices(h200: Chip) -> None:
    kernel = taken((1, 96, 65, 32768, "nt"), "bf16", 1, h200)
    assert kernel is not None
    assert kernel.split > 1
    assert kernel.reduced
    assert kernel.num_kernels == 2


def test_features_of_a_known_kernel_count_its_blocks(h200: Chip) -> None:
    kernel = kernel_of("ampere 128 64 64 3 2 0 0 1")
    values = told(kernel, (2, 640, 1280, 512, "nt"), 2.0, 1e-5, h200.num_sms)
    assert values[len(FAMILIES) + 6] == 2 * 10 * 10
    assert len(values) == len(told(kernel_of("vector 0 0 0 0 0 0 0 1"), (1, 1, 16, 16, "nt"), 4.0, 1e-6, 132))


def test_questions_do_not_depend_on_the_alignment_given_alone() -> None:
    odd, even = (questions((1, 64, n, 64, "nt"), "bf16", 1) for n in (65, 66))
    assert len(odd) == len(even)
    assert odd != even


def test_the_second_kernel_of_a_sliced_product_is_counted() -> None:
    time = pricer_of(device("h200")).price(call("gemm", "bf16", "fwd", "cublas", m=96, n=65, k=32768)).time
    assert time.num_kernels == 2
