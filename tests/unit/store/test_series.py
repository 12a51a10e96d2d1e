"""Levels of a series: a change is found, and noise is not one."""

from __future__ import annotations

import numpy as np
import pytest

from ridgeline.store.series import series_of


def noisy(num: int, seed: int, scale: float = 0.02) -> np.ndarray:
    return np.exp(np.random.default_rng(seed).normal(0.0, scale, num))


@pytest.mark.parametrize("at", [10, 20, 30])
def test_a_change_of_four_times_the_noise_is_found_where_it_is(at):
    values = noisy(40, 1)
    values[at:] *= 1.08
    found = series_of(values)
    assert len(found.levels) == 2
    assert abs(found.levels[1].start - at) <= 1
    assert found.change == pytest.approx(1.08, rel=0.02)
    assert found.regressed(0.03)
    assert not found.regressed(0.03, higher_is_worse=False)


def test_noise_alone_is_rarely_a_change():
    alarms = sum(len(series_of(noisy(num, seed)).levels) > 1 for num in (5, 10, 40) for seed in range(100))
    assert alarms <= 9  # 3 %


def test_numbers_computed_twice_have_no_noise_and_every_change_counts():
    found = series_of([1.0, 1.0, 1.0, 1.001])
    assert (len(found.levels), found.noise) == (2, 0.0)
    assert not found.regressed(0.03)
    assert series_of([1.0]).change == 1.0


def test_noise_is_the_standard_deviation_from_one_run_to_the_next():
    assert series_of(noisy(4000, 3, 0.02)).noise == pytest.approx(0.02, rel=0.05)


def test_the_largest_of_a_few_steps_is_a_change_and_no_noise():
    assert series_of(np.exp([0.0, 0.01, 0.0, 0.5])).noise == pytest.approx(0.01 * 1.4826 / 2**0.5)


def test_a_level_has_the_median_of_its_own_values():
    found = series_of([1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0])
    assert [(level.start, level.stop, level.median) for level in found.levels] == [(0, 4, 1.0), (4, 8, 2.0)]
    odd = series_of([1.0, 3.0e6])
    assert [level.median for level in odd.levels] == [1.0, 3.0e6]


def test_a_drop_regresses_where_higher_is_better():
    found = series_of([2.0, 2.0, 2.0, 1.0, 1.0, 1.0])
    assert found.regressed(0.5, higher_is_worse=False)
    assert not found.regressed(0.5)
