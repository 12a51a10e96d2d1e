"""Error bars: where their widths come from, and how they combine over a model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from ridgeline.basis import Basis
from ridgeline.cost.call import call
from ridgeline.cost.interval import FAMILY_WIDTH, OTHER_WIDTH, OUTSIDE, UNRECORDED, WIDER, factors, half_width, spread

GEMM = call("gemm", "bf16", "fwd", "cublas", m=8, n=8, k=8)
ENTRY = {"split_s": 1e-4, "domain_s": [1e-5, 1e-2], "short": 0.2, "long": 0.1}
FITTED = {"kinds": {"gemm/fwd/cublas": ENTRY}, "families": {"norm": 0.07}}


@dataclass
class Line:
    family: str
    busy_s: float
    width: float
    times: int = 1


def test_short_and_long_calls_have_their_own_widths() -> None:
    assert half_width(FITTED, GEMM, "gemm", Basis.FITTED, 5e-5) == 0.2
    assert half_width(FITTED, GEMM, "gemm", Basis.FITTED, 5e-3) == 0.1


def test_outside_the_measured_domain_is_wider() -> None:
    for busy_s, inside in ((1e-6, 0.2), (1.0, 0.1)):
        assert half_width(FITTED, GEMM, "gemm", Basis.FITTED, busy_s) == pytest.approx(inside * OUTSIDE)


def test_a_kind_that_was_not_measured_takes_its_family_s_width() -> None:
    unseen = call("rms_norm", "bf16", n=4, c=4)
    assert half_width(FITTED, unseen, "norm", Basis.FITTED, 1e-4) == pytest.approx(0.07 * UNRECORDED)
    assert half_width({}, GEMM, "gemm", Basis.FITTED, 1e-4) == FAMILY_WIDTH["gemm"]
    assert half_width({}, GEMM, "unheard of", Basis.FITTED, 1e-4) == OTHER_WIDTH


def test_a_worse_basis_is_never_narrower() -> None:
    widths = [half_width(FITTED, GEMM, "gemm", basis, 1e-3) for basis in sorted(Basis)]
    assert widths == sorted(widths) and widths[-1] == pytest.approx(0.1 * WIDER[Basis.ASSUMED])


def test_factors_are_the_same_distance_on_both_sides() -> None:
    low, high = factors(0.3)
    assert low < 1 < high and math.isclose(low * high, 1.0)
    assert factors(0.0) == (1.0, 1.0)


def test_errors_of_many_families_average_out_and_those_of_one_do_not() -> None:
    same = [Line("gemm", 1.0, 0.2) for _ in range(16)]
    mixed = [Line(f"family {i}", 1.0, 0.2) for i in range(16)]
    assert spread(mixed, 16.0) < spread(same, 16.0) < 0.2 + 0.1


def test_a_repeated_line_errs_the_same_way_every_time() -> None:
    once = spread([Line("gemm", 1.0, 0.2)], 1.0)
    assert spread([Line("gemm", 1.0, 0.2, times=32)], 32.0) == pytest.approx(once)


def test_a_model_is_never_surer_than_the_part_it_adds_itself() -> None:
    exact = [Line("gemm", 1.0, 0.0)]
    widths = [spread(exact, 1.0, basis) for basis in sorted(Basis)]
    assert widths[0] > 0 and widths == sorted(widths)


def test_nothing_run_has_no_spread() -> None:
    assert spread([], 0.0) == 0.0
