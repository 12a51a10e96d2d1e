"""Calibrations are fitted from recordings: what is put in comes out."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math

import pytest

from ridgeline.bench.fitting import Sample, calibrate, descend, fit, intervals, sample, samples
from ridgeline.cost.call import call, family_of
from ridgeline.cost.price import Pricer
from ridgeline.cost.time.chip import chip_of
from ridgeline.errors import CalibrationError
from ridgeline.hardware import device

CHIP = chip_of(device("h200"))
ADDS = [call("add", "bf16", n=n, c=4096) for n in (64, 256, 1024, 4096, 16384, 65536)]


def _samples(chip, coef):
    family = family_of("add")
    return [Sample(c, family.model(c, chip, coef, 0.0).busy_s, 1) for c in ADDS]


def test_a_wrong_coefficient_is_found_again():
    family = family_of("add")
    slower = {**family.defaults, "read_frac": 0.6}
    found = descend(_samples(CHIP, slower), family, CHIP, family.defaults)
    errors = [family.model(s.call, CHIP, found, 0.0).busy_s / s.target_s - 1 for s in _samples(CHIP, slower)]
    before = [family.model(s.call, CHIP, family.defaults, 0.0).busy_s / s.target_s - 1 for s in _samples(CHIP, slower)]
    assert max(map(abs, errors)) < 0.08 < max(map(abs, before))


def test_right_coefficients_are_left_alone():
    family = family_of("add")
    assert descend(_samples(CHIP, family.defaults), family, CHIP, family.defaults) == dict(family.defaults)


def test_events_that_the_host_delayed_give_way_to_the_profiler():
    row = {"kind": "add", "dtype": "bf16", "phase": "fwd", "library": "aten", "shape": {"n": 1, "c": 8}}
    row["kernels"] = [["k", 1e-5]]
    assert sample({**row, "cold_s": 3e-4}).target_s == 1e-5
    assert sample({**row, "cold_s": 1.35e-5}).target_s == pytest.approx(1.05e-5)


def test_events_of_a_short_call_that_read_a_few_microseconds_more_waited_for_the_host():
    row = {"kind": "attention", "dtype": "bf16", "phase": "fwd", "library": "cudnn", "shape": {"b": 1}}
    short, long = [["k", 3.3e-5]], [["k", 3.3e-3]]
    assert sample({**row, "kernels": short, "cold_s": 4.2e-5}).target_s == 3.3e-5
    assert sample({**row, "kernels": short, "cold_s": 3.8e-5}).target_s == pytest.approx(3.5e-5)
    assert sample({**row, "kernels": long, "cold_s": 3.4e-3}).target_s == pytest.approx(3.397e-3)


def test_pieces_of_a_convolution_beside_each_other_in_part_take_what_events_read():
    row = {"kind": "conv2d", "dtype": "bf16", "phase": "fwd", "library": "cudnn", "shape": {"n": 1, "c": 48}}
    names = ["kern_precompute_indices", *["implicit_convolve_sgemm"] * 3, "precomputed_convolve_sgemm"]
    row["kernels"] = [[name, s] for name, s in zip(names, (1e-6, 8e-4, 1e-3, 8e-4, 4e-4), strict=True)]
    assert sample({**row, "cold_s": 1.8e-3}).target_s == pytest.approx(1.8e-3 - 9e-6)  # between the longest and all
    assert sample({**row, "cold_s": 5e-3}).target_s == pytest.approx(1e-3)  # more than all of them: the host's time


def test_a_new_calibration_drops_the_factor_learned_beside_the_old_one():
    rows = _samples(CHIP, family_of("add").defaults)
    assert "leftover_frac" not in fit(rows, Pricer(device("h200")), "all")[0]["coef"]


def test_the_interval_holds_nine_of_ten():
    found = [(Sample(ADDS[0], 1e-5, 1), 1e-5 * (1 + i / 100), i / 100) for i in range(40)]
    width = intervals(found)["kinds"]["add/fwd/aten"]
    assert sum(log <= width["short"] for _, b, log in found if b < width["split_s"]) >= 0.9 * 20
    assert math.isclose(width["domain_s"][0], 0.8e-5)


def test_a_folder_of_recordings_becomes_a_calibration(tmp_path):
    rows = [{"environment": {}}]
    for s in _samples(dataclasses.replace(CHIP, dram_bytes_per_s=4e12), family_of("add").defaults):
        rows.append({"kind": "add", "dtype": "bf16", "phase": "fwd", "library": "aten", "shape": s.call.dims(),
                     "kernels": [["k", s.target_s]], "cold_s": s.target_s + 3e-6})  # fmt: skip
    with gzip.open(tmp_path / "operators_seed0.jsonl.gz", "wt") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)
    said = []
    made = calibrate(device("h100-sxm"), tmp_path, said.append)
    assert made["device"] == "h100-sxm"
    assert made["families"]["stream"]["all"]["heldout"]["n"] == 3
    assert "stream" in said[0]
    assert json.loads(json.dumps(made)) == made


def test_an_empty_folder_says_what_to_run(tmp_path):
    with pytest.raises(CalibrationError, match="ridgeline calibrate"):
        samples(tmp_path)
