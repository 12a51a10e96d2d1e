"""What a device of an architecture that nobody measured is told by the measured ones."""

from __future__ import annotations

import json
import math

import pytest

from ridgeline.basis import Basis
from ridgeline.cost import interval
from ridgeline.cost.calibration import SIBLINGS, calibration_of
from ridgeline.cost.call import call
from ridgeline.cost.price import pricer_of
from ridgeline.cost.time import serving
from ridgeline.cost.time.attention import tiles as attention
from ridgeline.cost.time.gemm import tiles as gemm
from ridgeline.cost.unmeasured.architectures import (
    FILE,
    STRANGERS,
    coefficients,
    entry_of,
    families_of,
    library_of,
    tensor_limit,
    unit_of,
)
from ridgeline.hardware import device, devices
from ridgeline.resources import data_dir
from ridgeline.validation.operators import predict_call

TABLE = json.loads((data_dir() / FILE).read_text())["families"]
ENTRIES = [(family, key) for family, entries in TABLE.items() for key in entries]
SHARED = {"common": {"launch_s": 2e-6, "tensor_frac": 0.9}, "contrast": {"tensor_frac": 0.1}, "protocol": [],
          "unseen": {"width": 0.3}}  # fmt: skip


def test_no_architecture_is_both_measured_and_a_stranger() -> None:
    assert not set(STRANGERS) & set(SIBLINGS)
    assert {device(name).arch for name in devices()} >= set(STRANGERS)


@pytest.mark.parametrize("name", ["rtx-pro-6000", "v100-sxm2-32gb", "t4", "a40"])
def test_a_stranger_has_no_calibration_of_a_device_and_says_so(name: str) -> None:
    found = calibration_of(device(name))
    assert (found.device, found.basis) == ("", Basis.DATASHEET)
    assert set(found.families["attention"]) == {"prefill", "decode"}
    assert set(found.families["gemm"]) >= {"bf16"}


def test_measured_architectures_keep_their_own_devices() -> None:
    assert [calibration_of(device(name)).device for name in ("l4", "h100-pcie", "b300", "a100-pcie-40gb")] == [
        "l40s", "h100-sxm", "b200", "a100-sxm-80gb",
    ]  # fmt: skip


@pytest.mark.parametrize(("family", "key"), ENTRIES)
def test_the_file_names_coefficients_that_the_time_models_know(family: str, key: str) -> None:
    shared, known = TABLE[family][key], {"gemm": gemm.COEFFICIENTS, "attention": attention.COEFFICIENTS}[family]
    assert set(shared["common"]) - set(shared["protocol"]) <= set(known)
    assert set(shared["contrast"]) <= set(shared["common"]) >= set(shared["protocol"])
    assert 0.1 < shared["unseen"]["width"] < 0.6
    found = entry_of(shared, device("rtx-pro-6000"), library_of(family, key))
    assert all(math.isfinite(value) and value >= 0 for value in (*found["coef"].values(), *found["protocol"].values()))


def test_products_of_a_type_that_the_device_has_no_units_for_are_computed_wider() -> None:
    assert "fp8" in families_of(device("rtx-pro-6000"))["gemm"] and "fp8" not in families_of(device("a40"))["gemm"]
    shape = {"m": 1024, "n": 1024, "k": 1024}
    narrow, wide = (predict_call("t4", "gemm", dtype, "fwd", "cublas", shape).expected_s for dtype in ("fp8", "fp16"))
    assert narrow > wide


def test_a_launch_is_so_many_clocks_and_so_many_kernels() -> None:
    l40s, h100 = device("l40s"), device("h100-sxm")
    assert unit_of("launch_s", h100, "fa3") == 1.0
    assert unit_of("launch_s", l40s, "fa2_paged") == pytest.approx(2 / 3 * h100.boost_hz / l40s.boost_hz)


def test_only_the_library_that_does_it_pays_for_it() -> None:
    l40s, h100, a100 = device("l40s"), device("h100-sxm"), device("a100-sxm-80gb")
    assert unit_of("regroup_s", l40s, "fa2_decode") > 0 == unit_of("regroup_s", h100, "decode")
    assert unit_of("scan_s", h100, "decode") == 1.0 and unit_of("scan_s", a100, "decode") == 0.0


def test_an_l2_in_one_piece_holds_twice_what_two_halves_hold() -> None:
    assert unit_of("io_held_frac", device("rtx-pro-6000"), "fa2_paged") == 2 * unit_of(
        "io_held_frac", device("b200"), "trtllm"
    )


def test_power_follows_the_peak_over_the_budget() -> None:
    t4, v100 = device("t4"), device("v100-sxm2-16gb")
    wanted = (65e12 / t4.tdp_w) / (125e12 / v100.tdp_w)
    ratio = unit_of("power_frac", t4, "cublas") / unit_of("power_frac", v100, "cublas")
    assert ratio == pytest.approx(wanted, rel=0.05)


def test_a_contrast_moves_the_two_generations_apart() -> None:
    old, new = (coefficients(SHARED, device(name), "cublas") for name in ("a100-sxm-80gb", "b200"))
    assert old["tensor_frac"] == pytest.approx(0.9 * math.exp(0.1)) and new["tensor_frac"] < 0.9


def test_no_share_of_the_peak_exceeds_what_the_boost_clock_allows() -> None:
    above = {**SHARED, "common": {"tensor_frac": 3.0}, "contrast": {}}
    for name in ("a100-sxm-80gb", "h100-sxm", "rtx-5090", "t4"):
        limit = tensor_limit(device(name))
        assert 1.0 <= limit < 1.1
        assert coefficients(above, device(name), "cublas")["tensor_frac"] == limit


def test_intervals_are_those_of_architectures_left_out_and_wider_for_imagined_devices() -> None:
    product = call("gemm", "bf16", "fwd", "cublas", m=4096, n=4096, k=4096)
    width = TABLE["gemm"]["bf16"]["unseen"]["width"]
    assert pricer_of(device("rtx-pro-6000")).price(product).width == pytest.approx(width)
    half = call("gemm", "fp16", "fwd", "cublas", m=4096, n=4096, k=4096)
    assert pricer_of(device("v100-sxm2-16gb")).price(half).width == pytest.approx(width)
    imagined = pricer_of(device("rtx-pro-6000 sms=200")).price(product).width
    assert imagined == pytest.approx(width * interval.WIDER[Basis.ASSUMED] / interval.WIDER[Basis.DATASHEET])


def test_validate_prices_a_stranger_s_calls_by_these_entries() -> None:
    on = device("rtx-pro-6000")
    entry = families_of(on)["attention"]["decode"]
    shape = {"b": 8, "h": 32, "hkv": 8, "s": 1, "skv": 4096, "d": 128, "causal": 1}
    found = call("attention", "bf16", "fwd", "fa2", **shape)
    warm = serving.loop_warm_frac(found, pricer_of(on).chip, entry)
    time = serving.attention(found, pricer_of(on).chip, entry, round(warm * 8) / 8)
    assert predict_call(on, "attention", "bf16", "fwd", "fa2", shape).expected_s == pytest.approx(time.busy_s)
