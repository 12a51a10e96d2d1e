"""Where a run becomes steady."""

from __future__ import annotations

import random

import pytest

from ridgeline.profiler.steady import steady


def noisy(level_s: float, num: int, seed: int, noise: float = 0.01) -> list[float]:
    draw = random.Random(seed)
    return [level_s * (1 + draw.gauss(0, noise)) for _ in range(num)]


@pytest.mark.parametrize("seed", range(20))
def test_slow_first_steps_are_warm_up(seed):
    found = steady([5.0, 0.9, 0.3, *noisy(0.1, 12, seed)])
    assert found is not None and found.first == 3
    assert found.step_s == pytest.approx(0.1, rel=0.03)


@pytest.mark.parametrize("seed", range(20))
def test_a_level_run_is_steady_from_the_start(seed):
    found = steady(noisy(0.1, 12, seed))
    assert found is not None and found.first == 0 and found.num == 12


def test_a_run_that_keeps_slowing_down_is_not_steady():
    assert steady([0.1 * 1.12**i for i in range(8)]) is None


def test_two_changes_of_level_are_both_passed():
    times = [*noisy(1.0, 4, 1), *noisy(0.4, 5, 2), *noisy(0.1, 8, 3)]
    found = steady(times)
    assert found is not None and found.first == 9


def test_too_few_steps_after_the_last_change_are_not_enough():
    assert steady([1.0, 1.0, 1.0, 0.1, 0.1, 0.1]) is None
    assert steady([0.1] * 4) is None


def test_one_slow_step_in_a_level_run_is_no_change_of_level():
    times = noisy(0.1, 12, 4)
    times[6] = 0.3
    found = steady(times)
    assert found is not None and found.first == 0 and found.step_s == pytest.approx(0.1, rel=0.03)
