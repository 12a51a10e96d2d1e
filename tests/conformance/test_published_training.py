"""Published training runs beside simulated ones: step times and memory, on a sample of the rows."""

from __future__ import annotations

import csv
import statistics

import pytest

from ridgeline.validation.training_llm import MEMORY, case_of, judge
from ridgeline.validation.verdict import Judged, Row

SAMPLE = 6
"""Every so many rows; `ridgeline validate` does all of them."""


@pytest.fixture(scope="module")
def rows(shared_dir):
    path = shared_dir / "published" / "training_llm.csv"
    if not path.is_file():
        pytest.skip("no published training runs")
    with path.open(newline="") as file:
        return [Row(i, {k.lower(): v for k, v in row.items()}) for i, row in enumerate(csv.DictReader(file), 2)]


@pytest.fixture(scope="module")
def judged(rows):
    chosen = [row for row in rows if row.line % SAMPLE == 0]
    verdicts = list(judge(chosen))
    assert {v.row for v in verdicts} == {row.line for row in chosen}, "every row ends in a verdict"
    return [v for v in verdicts if isinstance(v, Judged)]


def test_step_times_are_within_the_target(judged):
    apes = [v.ape for v in judged if "mem" not in v.metric]
    assert len(apes) > 50
    assert statistics.fmean(apes) < 0.10
    assert statistics.median(apes) < 0.06
    assert abs(statistics.fmean(v.error for v in judged if "mem" not in v.metric)) < 0.04


def test_intervals_hold_most_of_the_measurements(judged):
    inside = [v.inside for v in judged if "mem" not in v.metric]
    assert statistics.fmean(inside) > 0.8


def test_memory_is_within_ten_percent_wherever_it_is_published(rows):
    chosen = [row for row in rows if row.text("metric") in MEMORY or row.number("peak_mem_gib")]
    found = [v for v in judge(chosen) if isinstance(v, Judged) and "mem" in v.metric]
    assert len(found) >= 20
    assert max(v.ape for v in found) < 0.10


def test_a_row_is_read_as_it_stands(rows):
    row = next(r for r in rows if r.text("model") == "LLAMA3_70B" and r.number("tp") == 4 and r.number("pp") == 8)
    case = case_of(row)
    assert (case.plan.tp, case.plan.pp, case.plan.vp, case.plan.dp) == (4, 8, 5, 2)
    assert case.config is not None
    assert (case.config.layers, case.config.hidden, case.config.kv_heads, case.config.gated) == (80, 8192, 8, True)
    assert case.cluster.num_devices == 64
