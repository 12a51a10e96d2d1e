"""Products on kernels known by name: their blocks, steps, slices and bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.cost.time.chip import Chip, chip_of
from ridgeline.cost.time.gemm.calls import alignment
from ridgeline.cost.time.gemm.cublas_choice import Kernel, taken
from ridgeline.cost.time.gemm.named_kernels import (
    CLEAR_S,
    Rates,
    Sums,
    adder_of,
    blocks_s,
    known,
    name_of,
    sum_s,
    sums_apart,
    tiled,
    walk_of,
    walked_s,
)
from ridgeline.hardware import device

KERNEL = Kernel("xmma", 64, 32, 8, 3, 4, False, False, 1)
RATES = Rates(2e-6, 1e-6, 1e-7, 2e-7, 5e-8, 0.5, 0.5, 1.0, 2e-7, 4)
DRAM, L2 = 4.8e12, 1e13


@pytest.fixture(scope="module")
def h200() -> Chip:
    return chip_of(device("h200"))


def test_a_walk_counts_blocks_of_the_busiest_sm_and_steps_of_a_slice() -> None:
    queue, steps, read, written, loaded, waits = walk_of((2, 100, 130, 100, "nt"), 4.0, replace(KERNEL, split=3), 10)
    blocks = 2 * 3 * 4 * 3  # two matrices, three tiles across, four down, three slices
    assert queue == -(-blocks // 10)
    assert steps == 5  # 34 of a slice, by eight
    assert read == 2 * (100 + 130) * 100 * 4
    assert written == 2 * 100 * 130 * 4
    assert loaded == blocks * (64 + 32) * 34 * 4
    assert waits == 2


def test_slices_added_up_by_a_second_kernel_do_not_wait_and_write_their_sums() -> None:
    apart = replace(KERNEL, split=3, reduced=True, num_kernels=2)
    _, _, _, written, _, waits = walk_of((1, 100, 130, 100, "nt"), 2.0, apart, 132)
    assert sums_apart(apart) and not sums_apart(KERNEL) and not sums_apart(replace(KERNEL, cleared=True, num_kernels=2))
    assert waits == 0 and written == 100 * 130 * 4 * 3


def test_a_block_alone_takes_its_start_and_its_steps() -> None:
    told = walked_s(RATES, (1, 50, 1.0, 0.0, 1.0, 0), DRAM, L2)
    assert told == pytest.approx(2e-6 + 1e-6 + 50 * 1e-7, rel=0.02)


def test_a_full_sm_takes_turns_of_the_blocks_it_holds() -> None:
    once, twice = (walked_s(RATES, (queue, 50, 1.0, 0.0, 1.0, 0), DRAM, L2) - RATES.launch_s for queue in (4, 8))
    assert twice == pytest.approx(2 * once)
    assert once == pytest.approx(((1e-6 + 5e-6) ** 4 + (4 * (2e-7 + 2.5e-6)) ** 4) ** 0.25)


def test_each_further_slice_waits_for_those_before_it() -> None:
    none, ten = (walked_s(RATES, (1, 5, 1.0, 0.0, 1.0, waits), DRAM, L2) for waits in (0, 10))
    assert ten - none == pytest.approx(10 * RATES.slice_s)


def _some(h200: Chip) -> tuple[Kernel, tuple[int, int, int, int, str]]:
    name = next(n for n in known().kernels if n.startswith("fp32 xmma 64 64"))
    across, down, depth, stages, loads = map(int, name.split()[2:7])
    return Kernel("xmma", across, down, depth, stages, loads, False, False, 1), (1, 2048, 2048, 2048, "nt")


def test_kernels_fitted_on_the_h200_stay_above_its_peak_and_below_five_times_the_time(h200: Chip) -> None:
    kernel, problem = _some(h200)
    told = blocks_s(kernel, problem, "fp32", 8, h200, 0.0)
    floor_s = 2 * 2048**3 / h200.peak_flops_per_s("fp32")
    assert told is not None and floor_s < told < 5 * floor_s


def test_clearing_counters_and_adding_up_slices_take_time(h200: Chip) -> None:
    kernel, problem = _some(h200)
    plain = blocks_s(kernel, problem, "fp32", 8, h200, 0.0)
    cleared = blocks_s(replace(kernel, cleared=True, num_kernels=2), problem, "fp32", 8, h200, 0.0)
    apart = blocks_s(replace(kernel, reduced=True, num_kernels=2), problem, "fp32", 8, h200, 0.0)
    assert plain is not None and cleared == pytest.approx(plain + CLEAR_S)
    assert apart is not None and apart > plain + known().sums[adder_of(kernel)].start_s


def test_an_imagined_device_moves_what_it_should(h200: Chip) -> None:
    kernel, problem = _some(h200)
    plain = blocks_s(kernel, problem, "fp32", 8, h200, 0.0)
    slower = replace(h200, vector_flops_per_s=h200.vector_flops_per_s / 2)
    assert blocks_s(kernel, problem, "fp32", 8, slower, 0.0) > 1.7 * plain  # type: ignore[operator]
    thin = (1, 16384, 64, 64, "nt")
    wide = replace(h200, dram_bytes_per_s=2 * h200.dram_bytes_per_s, l2_bytes_per_s=2 * h200.l2_bytes_per_s)
    assert blocks_s(kernel, thin, "fp32", 8, wide, 0.0) < blocks_s(kernel, thin, "fp32", 8, h200, 0.0)  # type: ignore[operator]
    assert blocks_s(kernel, thin, "fp32", 8, h200, 1.0) <= blocks_s(kernel, thin, "fp32", 8, h200, 0.0)  # type: ignore[operator]


def test_other_devices_and_kernels_without_tiles_are_not_told(h200: Chip) -> None:
    kernel, problem = _some(h200)
    assert blocks_s(kernel, problem, "fp32", 8, chip_of(device("h100-sxm")), 0.0) is None
    assert blocks_s(replace(kernel, family="vector"), problem, "fp32", 8, h200, 0.0) is None
    assert blocks_s(replace(kernel, across=24), problem, "fp32", 8, h200, 0.0) is None
    assert name_of("fp32", kernel) in known().kernels


@pytest.mark.parametrize(("problem", "family", "grid"), [
    ((1, 8, 6081, 256, "nt"), "thin_t", (761, 1)),
    ((1, 8, 618, 29, "nn"), "thin_n", (10, 2)),
    ((1, 5, 4096, 96, "nn"), "long", (64, 1)),
])  # fmt: skip
def test_kernels_whose_names_do_not_say_their_tile_have_the_grid_that_was_recorded(
    problem: tuple[int, int, int, int, str], family: str, grid: tuple[int, int]
) -> None:
    rows = {"thin_t": 8, "thin_n": 4, "long": 0}[family]
    threads = {"thin_t": 128, "thin_n": 256, "long": 0}[family]
    found = tiled(Kernel(family, threads, rows, 16, 4, 0, False, False, 1), problem)
    assert found is not None
    assert (-(-problem[2] // found.across), -(-problem[1] // found.down)) == grid


def test_a_long_kernel_is_told_with_all_that_it_launches(h200: Chip) -> None:
    """Recorded at 27.9 µs between events, 24.3 µs in three kernels; the structure of before said 13."""
    problem = (1, 5, 1520, 256, "nn")
    kernel = taken(problem, "fp32", alignment(problem, "fp32"), h200)
    assert kernel is not None and kernel.family == "long" and not sums_apart(kernel)
    told = blocks_s(kernel, problem, "fp32", alignment(problem, "fp32"), h200, 0.0)
    assert told == pytest.approx(2.2e-5, rel=0.15)


def test_each_slice_that_is_added_up_waits_and_those_of_xmma_wait_longest() -> None:
    sums = Sums(1e-6, 2e-7, 1e13, 1e12)
    few, many = (sum_s(replace(KERNEL, split=split), (1, 56, 148, 218, "nt"), 4.0, sums) for split in (2, 88))
    assert many - few == pytest.approx(86 * (2e-7 + 56 * 148 * 4 / 1e13))
    assert known().sums["xmma"].slice_s > 3 * known().sums["other"].slice_s
    assert adder_of(KERNEL) == "xmma" and adder_of(replace(KERNEL, family="turing")) == "other"
