"""Widths are scaled to hold nine in ten of what was left out, however wrong they were."""

from __future__ import annotations

import random

import pytest

from lab.fit.intervals import Score, coverage, crossed, quantile


@pytest.mark.parametrize("width", [0.02, 0.1, 5.0])
def test_samples_left_out_are_covered_whatever_the_widths_were(width: float) -> None:
    draw = random.Random(3)
    scores = [Score("gemm", str(i % 4), abs(draw.gauss(0.0, 0.1)), width) for i in range(800)]
    assert 0.87 <= crossed(scores) <= 0.93
    assert not 0.85 <= coverage(scores) <= 0.95


def test_a_few_values_promise_no_more_than_their_largest() -> None:
    assert quantile([1.0, 2.0, 3.0]) == 3.0
    assert quantile([float(i) for i in range(1, 100)]) == 90.0
