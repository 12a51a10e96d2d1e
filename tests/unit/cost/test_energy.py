"""Energy from activity, and what the power limit does about it."""

from __future__ import annotations

import pytest

from ridgeline.api import predict
from ridgeline.cost import energy
from ridgeline.cost.energy import DEFAULTS, Activity, activity_of, dynamic_j, energy_j, throttle_factor
from ridgeline.cost.time.chip import chip_of
from ridgeline.cost.work import Work
from ridgeline.hardware import device

LIMIT_W = 700.0


def test_activity_is_seconds_at_the_peaks() -> None:
    work = Work(flops=2e12, matrix_flops=2e12, read_bytes=3e9, written_bytes=1e9)
    assert activity_of(work, 5e-3, 1e15, 4e12, 1.0) == Activity(5e-3, 2e-3, 1e-3)


def test_bytes_found_in_the_cache_draw_no_dram_power() -> None:
    assert activity_of(Work(read_bytes=1e9), 1e-3, 1e15, 4e12, 0.0).peak_dram_s == 0.0


def test_activities_add_up_and_so_does_their_energy() -> None:
    one, other = Activity(1.0, 0.5, 0.25), Activity(2.0, 0.0, 1.0)
    both = dynamic_j(one, DEFAULTS, LIMIT_W) + dynamic_j(other, DEFAULTS, LIMIT_W)
    assert dynamic_j(one + other, DEFAULTS, LIMIT_W) == pytest.approx(both)


def test_an_idle_board_draws_its_idle_power() -> None:
    idle_j = energy_j(Activity(0, 0, 0), 10.0, DEFAULTS, LIMIT_W, LIMIT_W)
    assert idle_j == pytest.approx(10.0 * LIMIT_W * DEFAULTS["idle_frac"])


def test_the_limit_caps_the_mean_power() -> None:
    greedy = Activity(1.0, 1.0, 1.0)
    assert energy_j(greedy, 1.0, DEFAULTS, LIMIT_W, LIMIT_W) == pytest.approx(LIMIT_W * DEFAULTS["cap_frac"])


def test_only_work_that_wants_more_than_the_limit_is_slowed() -> None:
    assert throttle_factor(Activity(1.0, 0.1, 0.1), 1.0, DEFAULTS, LIMIT_W, LIMIT_W) == 1.0
    some, more = (throttle_factor(Activity(1.0, f, 0.1), 1.0, DEFAULTS, LIMIT_W, LIMIT_W) for f in (0.7, 0.9))
    assert 1.0 < some < more < 1.5
    assert throttle_factor(Activity(1.0, 1.0, 1.0), 0.0, DEFAULTS, LIMIT_W, LIMIT_W) == 1.0


def test_waiting_for_the_host_cools_the_board() -> None:
    hot = Activity(1.0, 0.9, 0.1)
    cooled, steady = (throttle_factor(hot, wall_s, DEFAULTS, LIMIT_W, LIMIT_W) for wall_s in (3.0, 1.0))
    assert cooled < steady


def test_a_lower_limit_slows_the_same_chip_more() -> None:
    work = Activity(1.0, 0.6, 0.1)
    factors = [throttle_factor(work, 1.0, DEFAULTS, LIMIT_W, limit_w) for limit_w in (700.0, 500.0, 300.0)]
    assert factors == sorted(factors) and factors[-1] > factors[0]


def test_a_tighter_power_limit_slows_a_compute_bound_model() -> None:
    full, half = (predict("llama3-8b", batch=4, on=f"h200{limit}") for limit in ("", " tdp=300W"))
    assert half.power_w <= 300.0 < full.power_w <= 700.0
    assert half.busy_s > full.busy_s and half.throttle > full.throttle > 1.0


def test_rows_share_the_energy_above_idle() -> None:
    p = predict("bert-large", batch=1, seq=128)
    above_idle_j = p.energy_j - p.device.tdp_w * DEFAULTS["idle_frac"] * p.expected_s
    assert sum(row.energy_j for row in p.rows()) == pytest.approx(above_idle_j, rel=0.05)


def test_single_precision_on_vector_units_draws_less_than_matrix_units_do() -> None:
    ampere, hopper = (chip_of(device(name)) for name in ("a100-pcie-80gb", "h200"))
    assert energy.matrix_rate_flops_per_s(ampere, "fp32", DEFAULTS) > 2 * ampere.vector_flops_per_s
    assert energy.matrix_rate_flops_per_s(hopper, "fp32", DEFAULTS) == hopper.vector_flops_per_s
    assert energy.matrix_rate_flops_per_s(ampere, "bf16", DEFAULTS) == ampere.peak_flops_per_s("bf16")
