"""A written trace is what Perfetto expects: valid JSON, lanes named, slices nested, counters only where they change."""

from __future__ import annotations

import json

import pytest

from ridgeline.errors import InputError
from ridgeline.trace import TraceBuilder, write_chrome


def _written(trace, path):
    write_chrome(trace.build(), path)
    return json.loads(path.read_text())


def _slices(document, tid_of):
    names = {e["args"]["name"]: e["tid"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    return [e for e in document["traceEvents"] if e["ph"] == "X" and e["tid"] == names[tid_of]]


def _two_layers():
    trace = TraceBuilder("two layers")
    for i, module in enumerate(("model.0.a", "model.0.b", "model.1.a", "head")):
        trace.add("launch", "host", i * 1e-6, 1e-6, module=module)
        trace.add("gemm", "device", (2 + i) * 1e-6, 0.9e-6, module=module, op="matmul", phase="forward")
    return trace


def test_every_span_is_a_slice_on_the_thread_of_its_lane(tmp_path):
    document = _written(_two_layers(), tmp_path / "t.json")
    assert len(_slices(document, "host")) == 4
    first = _slices(document, "device")[0]
    assert (first["ts"], first["dur"]) == (2.0, 0.9)
    assert first["args"] == {"module": "model.0.a", "op": "matmul", "phase": "forward"}


def test_the_host_lane_comes_first_and_modules_last(tmp_path):
    document = _written(_two_layers(), tmp_path / "t.json")
    names = {e["tid"]: e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    assert [names[tid] for tid in sorted(names)] == ["host", "device", "modules"]


def test_modules_nest_and_cover_their_kernels(tmp_path):
    slices = _slices(_written(_two_layers(), tmp_path / "t.json"), "modules")
    spans = {(e["args"]["module"], e["ts"]): e for e in slices}
    model = spans["model", 2.0]
    assert model["ts"] + model["dur"] == pytest.approx(4.9)
    layer = spans["model.0", 2.0]
    assert layer["dur"] == pytest.approx(1.9)
    for inner in slices:  # slices of one thread either nest or do not touch
        for outer in slices:
            a, b = inner["ts"], inner["ts"] + inner["dur"]
            c, d = outer["ts"], outer["ts"] + outer["dur"]
            assert b <= c + 1e-9 or d <= a + 1e-9 or (c <= a and b <= d + 1e-9) or (a <= c and d <= b + 1e-9)


def test_a_counter_is_written_where_it_changes(tmp_path):
    trace = _two_layers()
    for at_s, value in ((0.0, 1), (1e-6, 1), (2e-6, 5)):
        trace.count("memory_bytes", at_s, value)
    events = [e for e in _written(trace, tmp_path / "t.json")["traceEvents"] if e["ph"] == "C"]
    assert [(e["ts"], e["args"]["memory_bytes"]) for e in events] == [(0.0, 1.0), (2.0, 5.0)]


def test_hostile_names_survive_as_text(tmp_path):
    trace = TraceBuilder('"</script>\n')
    trace.add('k"\\\u2028', "device", 0.0, 1e-6, module="a.<b>")
    assert _slices(_written(trace, tmp_path / "t.json"), "device")[0]["name"] == 'k"\\\u2028'


def test_an_empty_trace_is_still_a_trace(tmp_path):
    assert _written(TraceBuilder("nothing"), tmp_path / "t.json")["traceEvents"]


def test_a_folder_that_is_not_there_is_an_error_with_a_cure(tmp_path):
    with pytest.raises(InputError, match="choose a folder"):
        write_chrome(_two_layers().build(), tmp_path / "no" / "t.json")
