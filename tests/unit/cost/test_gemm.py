"""The GEMM time model: tiles, waves, memory, splits, alignment and the power cap."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ridgeline.cost.time.chip import COMPUTE_BOUND, LATENCY_BOUND, MEMORY_BOUND, Chip, chip_of, related_archs
from ridgeline.cost.time.gemm.tiles import (
    COEFFICIENTS,
    DEFAULTS,
    defaults,
    gemm_timing,
    held_frac,
    menu,
    out_dtype_of,
    overlapped,
)
from ridgeline.errors import CostError
from ridgeline.hardware import device


@pytest.fixture(scope="module")
def h200() -> Chip:
    return chip_of(device("h200"))


def seconds(chip: Chip, m: int, n: int, k: int, **options: object) -> float:
    return float(gemm_timing(chip, {}, m=m, n=n, k=k, dtype="bf16", **options).expected_s[0])  # type: ignore[arg-type]


def test_large_square_product_runs_near_the_measured_rate(h200: Chip) -> None:
    rate = 2 * 8192**3 / seconds(h200, 8192, 8192, 8192)
    assert 0.68 < rate / 989.4e12 < 0.85  # 700 to 800 TFLOP/s is what H200 boards deliver under their power cap


def test_one_row_product_streams_the_weight_from_dram(h200: Chip) -> None:
    times = gemm_timing(h200, {}, m=1, n=8192, k=65536, dtype="bf16")
    assert times.bound[0] == MEMORY_BOUND
    assert 0.8 < 2 * 8192 * 65536 / 4.8e12 / times.expected_s[0] < 0.95


def test_empty_sized_product_costs_a_launch(h200: Chip) -> None:
    times = gemm_timing(h200, {}, m=8, n=64, k=64, dtype="bf16")
    assert times.bound[0] == LATENCY_BOUND
    assert 2e-6 < times.expected_s[0] < 3.5e-6


def test_a_tile_more_than_the_sms_hold_costs_another_wave(h200: Chip) -> None:
    """132 tiles of 128 x 256 fill the SMs of an H200 once; more rows of tiles need a second turn."""
    one_wave, two_waves = (seconds(h200, 128 * 11, 256 * cols, 16384) for cols in (12, 18))
    assert two_waves > 1.35 * one_wave


def test_long_k_with_few_tiles_is_split(h200: Chip) -> None:
    times = gemm_timing(h200, {}, m=64, n=64, k=65536, dtype="bf16", warm_frac=1.0)
    assert times.latency_s[0] > 4e-6  # a launch and a reduction
    assert times.expected_s[0] < 20e-6


def test_warm_operands_are_faster(h200: Chip) -> None:
    assert seconds(h200, 16, 4096, 4096, warm_frac=1.0) < 0.8 * seconds(h200, 16, 4096, 4096)


def test_unaligned_rows_are_slower(h200: Chip) -> None:
    assert seconds(h200, 4096, 4095, 4096) > 1.4 * seconds(h200, 4096, 4096, 4096)


def test_batches_fill_waves_together(h200: Chip) -> None:
    alone = seconds(h200, 256, 256, 4096)
    assert float(gemm_timing(h200, {}, b=30, m=256, n=256, k=4096, dtype="bf16").expected_s[0]) < 8 * alone


def test_the_power_cap_slows_only_long_products(h200: Chip) -> None:
    capped, free = ({"power_frac": value, "power_tau_s": 1e-3} for value in (2.0, 0.5))
    sides = [1024, 16384]
    short, long = (gemm_timing(h200, capped, m=sides, n=sides, k=sides, dtype="bf16").expected_s
                   / gemm_timing(h200, free, m=sides, n=sides, k=sides, dtype="bf16").expected_s)  # fmt: skip
    assert short < 1.05
    assert long > 1.3


def test_fp8_doubles_a_compute_bound_product(h200: Chip) -> None:
    times = gemm_timing(h200, {"power_frac": 0.1}, m=8192, n=8192, k=8192, dtype="fp8", out_dtype="bf16")
    halves = gemm_timing(h200, {"power_frac": 0.1}, m=8192, n=8192, k=8192, dtype="bf16")
    assert times.bound[0] == COMPUTE_BOUND
    assert 1.6 < halves.expected_s[0] / times.expected_s[0] < 2.2


def test_columns_broadcast_and_keep_order(h200: Chip) -> None:
    m = np.array([128.0, 4096.0, 16.0])
    together = gemm_timing(h200, {}, m=m, n=1024, k=1024, dtype="bf16").expected_s
    assert together == pytest.approx([seconds(h200, int(rows), 1024, 1024) for rows in m])


def test_expected_is_lifted_to_the_floor(h200: Chip) -> None:
    perfect = {"launch_s": 1e-12, "fanout_s": 1e-12, "tensor_frac": 5.0, "l2_frac": 100.0, "dram_frac": 5.0,
               "epilogue_frac": 100.0, "kstep_s": 1e-12, "kstep_cold_s": 1e-12, "gap_s": 1e-12,
               "power_frac": 0.1}  # fmt: skip
    times = gemm_timing(h200, perfect, m=4096, n=4096, k=4096, dtype="bf16")
    assert times.expected_s[0] == times.floor_s[0] == pytest.approx(2 * 4096**3 / 989.4e12)


def test_every_default_names_every_coefficient() -> None:
    for key, coef in DEFAULTS.items():
        assert set(coef) == set(COEFFICIENTS), key


def test_defaults_fall_back_to_kin_then_generic() -> None:
    assert defaults("turing", "cublas") is DEFAULTS["ampere/cublas"]
    assert defaults("cdna3", "cublas") is DEFAULTS["generic/cublas"]
    assert related_archs("hopper") == ("hopper", "generic")


def test_unknown_library_is_an_error_that_names_known_ones(h200: Chip) -> None:
    with pytest.raises(CostError, match="cublas"):
        menu("hopper", "cubla")
    with pytest.raises(CostError, match="did you mean"):
        defaults("hopper", "cutlas")


def test_dtype_without_a_matrix_peak_is_an_error(h200: Chip) -> None:
    bare = dataclasses.replace(h200, tensor_flops_per_s={"bf16": 1e15})
    with pytest.raises(CostError, match="fp8"):
        gemm_timing(bare, {}, m=64, n=64, k=64, dtype="fp8")


def test_menus_follow_the_architecture() -> None:
    assert menu("hopper", "cublas").multicast == 2
    assert not menu("ampere", "cublas").cols_flex.any()
    assert menu("hopper", "cutlass").is_gated


def test_results_are_wider_than_narrow_operands() -> None:
    assert out_dtype_of("fp8") == "bf16"
    assert out_dtype_of("bf16") == "bf16"


def test_overlap_hides_the_shorter_stream() -> None:
    assert overlapped(np.array([10.0]), np.array([1.0]), 0.5)[0] == pytest.approx(10.0, rel=1e-3)
    assert overlapped(np.array([10.0]), np.array([10.0]), 0.25)[0] == pytest.approx(12.5)


def test_a_cache_holds_what_fits() -> None:
    assert held_frac(np.array([10.0, 100.0, 1000.0]), 100.0) == pytest.approx([1.0, 0.5, 0.0])
