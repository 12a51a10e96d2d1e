"""Published serving runs beside simulated ones: first and other tokens, on a sample of the aggregated rows."""

from __future__ import annotations

import csv
import statistics

import pytest

from ridgeline.validation.serving_ttft_tpot import judge
from ridgeline.validation.verdict import Judged, Row

SAMPLE, LIGHT = 9, 64
"""Every so many rows of at most so many in flight; `ridgeline validate` does all of them."""


@pytest.fixture(scope="module")
def judged(shared_dir):
    path = shared_dir / "published" / "serving_ttft_tpot.csv"
    if not path.is_file():
        pytest.skip("no published serving runs")
    with path.open(newline="") as file:
        rows = [Row(i, row) for i, row in enumerate(csv.DictReader(file), 2)]
    runs = [row for row in rows if row.columns["mode"] == "agg" and float(row.columns["concurrency"] or 0) <= LIGHT]
    chosen = runs[::SAMPLE]
    return [v for v in judge(chosen) if isinstance(v, Judged)]


def test_tokens_are_within_the_target(judged):
    apes = [v.ape for v in judged if v.metric == "tpot_mean"]
    assert len(apes) > 120
    assert statistics.fmean(apes) < 0.12
    assert statistics.median(apes) < 0.09


def test_first_tokens_are_within_the_target(judged):
    apes = [v.ape for v in judged if v.metric == "ttft_mean"]
    assert statistics.fmean(apes) < 0.20
    assert statistics.median(apes) < 0.18


def test_intervals_hold_most_of_the_runs(judged):
    assert statistics.fmean(v.inside for v in judged) > 0.8
