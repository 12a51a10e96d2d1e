"""The predicted timeline is the prediction: same end, same busy time, same peak."""

from __future__ import annotations

import pytest

import ridgeline as rl
from ridgeline.cost.analyses.timeline import timeline


@pytest.mark.parametrize("options", [{}, {"mode": "decode"}, {"mode": "train"}])
def test_the_timeline_ends_and_works_as_predicted(options):
    p = rl.predict("llama3.2-1b", seq=512, **options)
    trace = timeline(p)
    assert trace.lanes() == ["device", "host"] or trace.lanes() == ["host", "device"]
    assert trace.busy_s("device") == pytest.approx(p.busy_s, rel=0.01)
    assert trace.end_s == pytest.approx(p.expected_s, rel=0.02)
    assert trace.counters["memory_bytes"].value.max() == pytest.approx(p.peak_bytes, rel=0.02)


def test_memory_is_counted_when_the_host_calls():
    p = rl.predict("llama3.2-1b", seq=512)
    counter = timeline(p).counters["memory_bytes"]
    assert len(counter.at_s) == p.graph.num_nodes
    assert (counter.at_s[1:] >= counter.at_s[:-1]).all()


@pytest.mark.parametrize("execution", ["compiled", "cudagraph"])
def test_other_executions_have_a_timeline_too(execution):
    trace = timeline(rl.predict("llama3.2-1b", seq=512, execution=execution))
    assert "device" in trace.lanes()
    assert trace.counters["memory_bytes"].at_s.max() <= trace.end_s


def test_a_long_timeline_is_cut_and_says_so():
    trace = timeline(rl.predict("llama3.2-1b", seq=512), max_spans=100)
    assert len(trace) == 100
    assert "first 100 spans" in trace.notes[0]
    assert not trace.counters
