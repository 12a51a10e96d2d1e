"""Coefficients of a device: its own file, its parent's, or none, and what the basis then says."""

from __future__ import annotations

import json

import pytest

from ridgeline.basis import Basis
from ridgeline.cost import calibration, energy, host
from ridgeline.cost.calibration import Calibration, calibration_of
from ridgeline.cost.call import call, family_of, kinds
from ridgeline.cost.price import pricer_of
from ridgeline.errors import CalibrationError
from ridgeline.hardware import device, devices
from ridgeline.resources import data_dir

GEMM = call("gemm", "bf16", "fwd", "cublas", m=8, n=8, k=8)
FILES = sorted(path.stem for path in (data_dir() / "calibrations").glob("*.json"))


def test_a_measured_device_uses_its_own_file() -> None:
    assert calibration_of(device("h200")).device == "h200"


def test_an_imagined_device_uses_its_parent_s() -> None:
    assert calibration_of(device("h200 hbm_bandwidth=2x")).device == "h200"


def test_a_device_nobody_measured_has_an_empty_one() -> None:
    assert calibration_of(device("t4")) == Calibration("")


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


def test_no_calibration_is_assumed_and_a_missing_family_is_the_datasheet() -> None:
    assert Calibration("").coef(family_of("gemm"), GEMM)[1] is Basis.ASSUMED
    assert Calibration("x").coef(family_of("gemm"), GEMM)[1] is Basis.DATASHEET


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
        kind, phase, _ = entry.split("/")
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
    assert pricer_of(device("t4")).price(GEMM).basis is Basis.ASSUMED
