"""What a device that nobody measured takes from one of its kin."""

from __future__ import annotations

import pytest

from ridgeline.cost.borrowing import adapted
from ridgeline.cost.calibration import calibration_of
from ridgeline.hardware import device

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


def test_blackwell_ultra_computes_twice_the_exponentials() -> None:
    assert adapted(COEF, device("b200"), device("b300"))["exp_per_clock"] == pytest.approx(24.0)


def test_a_device_borrows_nothing_from_itself() -> None:
    h100 = device("h100-sxm")
    assert adapted(COEF, h100, h100) == pytest.approx(COEF)


def test_an_older_generation_borrows_from_the_oldest_that_was_measured() -> None:
    assert calibration_of(device("v100-sxm2-32gb")).device == "a100-sxm-80gb"
