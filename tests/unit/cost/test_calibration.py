"""Coefficients of a device: its own file, its parent's, or none, and what the basis then says."""

from __future__ import annotations

import json

import pytest

from ridgeline.basis import Basis
from ridgeline.cost import calibration, energy, host
from ridgeline.cost.calibration import SIBLINGS, Calibration, calibration_of
from ridgeline.cost.call import call, family_of, kinds
from ridgeline.cost.price import pricer_of
from ridgeline.errors import CalibrationError
from ridgeline.hardware import device, devices
from ridgeline.resources import data_dir

GEMM = call("gemm", "bf16", "fwd", "cublas", m=8, n=8, k=8)
FILES = sorted(path.stem for path in (data_dir() / "calibrations").glob("*.json"))


def test_a_measured_device_uses_its_own_file() -> None:
    assert calibration_of(device("h200")).device == "h200"


def test_an_imagined_device_uses_its_parent_s_and_is_assumed() -> None:
    found = calibration_of(device("h200 hbm_bandwidth=2x"))
    assert (found.device, found.basis) == ("h200", Basis.ASSUMED)


def test_a_device_nobody_measured_uses_a_sibling_s_or_none_and_its_datasheet() -> None:
    sibling, alone = calibration_of(device("gh200")), calibration_of(device("p100-sxm2"))
    assert sibling.device in FILES and sibling.basis is Basis.DATASHEET
    assert (alone.device, alone.families, alone.basis) == ("", {}, Basis.DATASHEET)


def test_an_imagined_device_of_an_unmeasured_one_is_assumed() -> None:
    assert calibration_of(device("p100-sxm2 sms=80")).basis is Basis.ASSUMED


def test_siblings_are_devices_that_were_measured() -> None:
    assert set(SIBLINGS.values()) <= set(FILES)
    assert {device(name).arch for name in SIBLINGS.values()} <= set(SIBLINGS)


def test_fitted_coefficients_replace_defaults_and_say_so() -> None:
    gemm = family_of("gemm")
    fitted = Calibration("x", {"gemm": {"bf16": {"coef": {"grouped_s": 1.0}}}})
    assert fitted.coef(gemm, GEMM) == ({**gemm.defaults, "grouped_s": 1.0}, Basis.FITTED)


def test_a_dtype_that_was_not_fitted_falls_back_to_all_then_to_the_datasheet() -> None:
    gemm, fp8 = family_of("gemm"), call("gemm", "fp8", "fwd", "cublas", m=16, n=16, k=16)
    shared = Calibration("x", {"gemm": {"all": {"coef": {"grouped_s": 2.0}}}})
    assert shared.coef(gemm, fp8)[0]["grouped_s"] == 2.0 and shared.coef(gemm, fp8)[1] is Basis.FITTED
    other = Calibration("x", {"gemm": {"bf16": {"coef": {}}}})
    assert other.coef(gemm, fp8) == (gemm.defaults, Basis.DATASHEET)


def test_a_family_nobody_fitted_is_no_better_than_the_datasheet() -> None:
    assert Calibration("x").coef(family_of("gemm"), GEMM)[1] is Basis.DATASHEET
    assert Calibration("x", basis=Basis.ASSUMED).coef(family_of("gemm"), GEMM)[1] is Basis.ASSUMED


def test_the_width_of_an_entry_is_the_wider_side_of_its_held_out_rows() -> None:
    entry = {"heldout": {"log_quantiles": {"q05": -0.2, "q95": 0.1}}}
    assert Calibration("x").width(entry) == pytest.approx(0.21)
    assert Calibration("x").width({"coef": {}}) is None and Calibration("x").width(None) is None


@pytest.mark.parametrize("name", FILES)
def test_every_file_belongs_to_a_device_and_names_what_the_models_know(name: str) -> None:
    raw = json.loads((data_dir() / "calibrations" / f"{name}.json").read_text())
    assert raw["device"] == name and name in devices() and raw["source"]
    assert set(raw.get("host", {})) <= set(host.DEFAULTS)
    assert set(raw.get("power", {})) <= set(energy.DEFAULTS)
    families = {family_of(kind).name for kind in kinds()}
    assert set(raw.get("families", {})) <= families


def test_an_interval_s_kinds_are_kinds() -> None:
    for entry in calibration_of(device("h200")).intervals["kinds"]:
        kind, phase, *_ = entry.split("/")
        assert kind in kinds() and phase in ("fwd", "bwd")


def test_a_malformed_file_says_what_to_rerun(tmp_path, monkeypatch) -> None:
    (tmp_path / "calibrations").mkdir()
    (tmp_path / "calibrations" / "h200.json").write_text('{"families": {}}')
    monkeypatch.setattr(calibration, "data_dir", lambda: tmp_path)
    calibration._load.cache_clear()
    try:
        with pytest.raises(CalibrationError, match=r"h200\.json is malformed.*ridgeline calibrate"):
            calibration_of(device("h200"))
    finally:
        calibration._load.cache_clear()


def test_the_pricer_prices_under_the_calibration_of_its_device() -> None:
    assert pricer_of(device("h200")).price(GEMM).basis is Basis.FITTED
    assert pricer_of(device("t4")).price(GEMM).basis is Basis.DATASHEET
    assert pricer_of(device("h200 sms=160")).price(GEMM).basis is Basis.ASSUMED
