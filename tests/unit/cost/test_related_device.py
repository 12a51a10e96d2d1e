"""What a device that nobody measured takes from one of its kin."""

from __future__ import annotations

import pytest

from ridgeline.cost.unmeasured.related_device import adapted, wanted_power_frac
from ridgeline.hardware import device
from ridgeline.validation.operators import predict_call

COEF = {"launch_s": 2e-6, "tensor_frac": 0.9, "power_frac": 1.5, "exp_per_clock": 12.0}


def test_a_launch_takes_the_same_number_of_clocks() -> None:
    l40s, l4 = device("l40s"), device("l4")
    assert adapted(COEF, l40s, l4)["launch_s"] * l4.boost_hz == pytest.approx(2e-6 * l40s.boost_hz)


def test_a_board_with_less_power_for_its_peak_is_capped_more() -> None:
    l40s, l4 = device("l40s"), device("l4")
    more = (121e12 / l4.tdp_w) / (362e12 / l40s.tdp_w)
    assert adapted(COEF, l40s, l4)["power_frac"] == pytest.approx(1.5 * more, rel=0.02)


def test_shares_of_a_peak_carry_over_as_they_are() -> None:
    assert adapted(COEF, device("b200"), device("b300"))["tensor_frac"] == 0.9


def test_blackwell_ultra_gains_half_of_its_further_exponentials() -> None:
    assert adapted(COEF, device("b200"), device("b300"))["exp_per_clock"] == pytest.approx(18.0)


def test_a_newer_generation_streams_as_fast_as_its_memory_and_a_sibling_as_its_kin() -> None:
    coef, h100 = {"load_frac": 0.36, "dram_frac": 0.9}, device("h100-sxm")
    assert adapted(coef, h100, device("b200"))["load_frac"] == pytest.approx(0.73, rel=0.1)
    assert adapted(coef, h100, device("h200"))["load_frac"] == 0.36
    assert adapted(coef, h100, device("l40s"))["load_frac"] == 0.36
    assert adapted(coef, h100, device("b200"))["dram_frac"] == 0.9


def test_a_device_borrows_nothing_from_itself() -> None:
    h100 = device("h100-sxm")
    assert adapted(COEF, h100, h100) == pytest.approx(COEF)


def test_a_card_of_seventy_watts_wants_more_than_its_limit_in_full_precision() -> None:
    t4, v100 = device("t4"), device("v100-sxm2-16gb")
    wanted = [wanted_power_frac(d.arch, "fp32", d.peak_flops_per_s("vector", "fp32"), d.tdp_w) for d in (t4, v100)]
    assert wanted[0] > 2.0 > 1.1 > wanted[1]


def test_an_architecture_nobody_told_of_wants_no_power_of_its_own() -> None:
    assert wanted_power_frac("tpu-v4", "fp32", 1e13, 200.0) is None
    assert wanted_power_frac("hopper", "bf16", 1e15, 700.0) is None  # fitted products say


def test_narrower_matrix_operands_want_less_power_for_an_operation() -> None:
    wide, narrow = (wanted_power_frac("cdna3", dtype, 1.3e15, 750.0) for dtype in ("bf16", "fp8"))
    assert narrow == pytest.approx(wide / 2)


@pytest.mark.parametrize(
    ("name", "dtype", "mnk", "published_s"),
    [
        ("v100-sxm2-16gb", "fp16", (24000, 6144, 2048), 5687e-6),  # DeepBench, cuBLAS of CUDA 10.1
        ("v100-sxm2-16gb", "fp16", (24000, 512, 1530), 402e-6),  # rows on 4 bytes
        ("mi300x", "bf16", (10240, 15360, 8192), 2 * 10240 * 15360 * 8192 / 668.4e12),  # stas00/ml-engineering
        ("mi325x", "bf16", (13312, 10240, 8192), 2 * 13312 * 10240 * 8192 / 784.9e12),
        ("t4", "fp32", (8192, 2048, 8192), 66.98e-3),  # NeuSight, PyTorch 2.1
    ],
)
def test_products_of_devices_known_by_their_datasheet_take_what_was_published(name, dtype, mnk, published_s) -> None:
    told = predict_call(name, "gemm", dtype, "fwd", "cublas", dict(zip("mnk", mnk, strict=True)))
    assert told.expected_s == pytest.approx(published_s, rel=0.2)


def test_half_precision_of_either_kind_is_priced_alike_where_one_was_measured() -> None:
    shape = {"m": 4096, "n": 4096, "k": 4096}
    brain, ieee = (predict_call("a100-sxm-80gb", "gemm", dtype, "fwd", "cublas", shape) for dtype in ("bf16", "fp16"))
    assert brain.expected_s == pytest.approx(ieee.expected_s, rel=0.05)
