"""Spans as columns add up, stay in order and refuse impossible times."""

from __future__ import annotations

import pytest

from ridgeline.errors import InputError
from ridgeline.trace import TraceBuilder


def _trace():
    trace = TraceBuilder("a run")
    trace.add("launch", "host", 0.0, 2.0, module="m")
    trace.add("gemm", "device", 3.0, 2.0, module="m.a")
    trace.add("add", "device", 1.0, 1.0, module="m.b")
    trace.count("memory_bytes", 0.0, 8)
    return trace.build()


def test_words_are_kept_once_and_columns_have_one_length():
    trace = _trace()
    assert len(trace) == 3 == len(trace.name) == len(trace.start_s)
    assert sorted(trace.words) == sorted(set(trace.words))


def test_lanes_are_listed_in_order_of_appearance():
    assert _trace().lanes() == ["host", "device"]


def test_spans_of_a_lane_come_in_time_order():
    trace = _trace()
    assert [trace.words[trace.name[i]] for i in trace.on("device")] == ["add", "gemm"]
    assert len(trace.on("nowhere")) == 0


def test_busy_time_counts_an_overlap_once():
    trace = TraceBuilder("overlap")
    for start_s in (0.0, 0.5, 0.6, 3.0):
        trace.add("k", "device", start_s, 1.0)
    assert trace.build().busy_s("device") == pytest.approx(1.6 + 1.0)


def test_the_end_is_that_of_the_last_span_and_zero_when_empty():
    assert _trace().end_s == 5.0
    assert TraceBuilder("empty").build().end_s == 0.0
    assert TraceBuilder("empty").build().busy_s("device") == 0.0


@pytest.mark.parametrize(("start_s", "duration_s"), [(0.0, -1.0), (0.0, float("nan")), (float("nan"), 1.0)])
def test_time_does_not_run_backward(start_s, duration_s):
    with pytest.raises(InputError, match="no such time"):
        TraceBuilder("bad").add("k", "device", start_s, duration_s)
