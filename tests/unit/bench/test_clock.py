"""Timing without a device: what is kept between marks, and what a summary says."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from ridgeline.bench.clock import MARK, _summary, split_by_marks

SPIN = f"void at::cuda::{MARK}(long)"


def events(*names: str) -> list[tuple[int, str, float]]:
    return [(at, name, 1e-6 * (at + 1)) for at, name in enumerate(names)]


def test_stretches_between_marks_are_told_apart() -> None:
    found = split_by_marks(events(SPIN, "gemm", SPIN, SPIN, "relu", "sum", SPIN))
    assert [[name for name, _ in stretch] for stretch in found] == [["gemm"], ["relu", "sum"]]


def test_what_runs_outside_the_marks_is_dropped() -> None:
    found = split_by_marks(events("flush", SPIN, "gemm", SPIN, "flush", SPIN, SPIN, "flush"))
    assert [[name for name, _ in stretch] for stretch in found] == [["gemm"], []]


def test_durations_are_kept() -> None:
    assert split_by_marks(events(SPIN, "gemm", SPIN)) == [[("gemm", 2e-6)]]


def test_nothing_recorded_is_no_stretch() -> None:
    assert split_by_marks([]) == []


def test_a_summary_is_the_median_and_the_middle_of_the_spread() -> None:
    timing = _summary([float(i) for i in reversed(range(1, 22))])
    assert (timing.median_s, timing.low_s, timing.high_s, timing.num) == (11.0, 3.0, 19.0, 21)
