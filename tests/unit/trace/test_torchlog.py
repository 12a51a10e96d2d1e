"""Compile logs: reasons are found, gathered by line, and broken lines are counted."""

from __future__ import annotations

import json

import pytest

from ridgeline.errors import InputError
from ridgeline.trace.torchlog import is_compile_log, read_compile_log

HEAD = "V1115 06:45:34.096000 24127 torch/_dynamo/convert_frame.py:303] "
BREAK = """Graph break in user code at /home/me/model.py:571
Graph Break Reason: Encountered graph break when attempting to trace CALL: a function call, e.g. f(x, y):

Unsupported Tensor.item() call with capture_scalar_outputs=False
  Explanation: Dynamo does not support tracing `Tensor.item()`.
"""
OLD_BREAK = "Graph break in user code at model.py:9\nReason: Unsupported: call_function print\nUser code traceback:"


def line(entry, payload=""):
    text = HEAD + json.dumps(entry) + "\n"
    return text + "".join(f"\t{row}\n" for row in payload.splitlines())


def metrics(compile_id, seconds, **more):
    frame, number = compile_id.split("/")
    facts = {"compile_id": compile_id, "co_name": "forward", "co_filename": "model.py", "co_firstlineno": 12,
             "start_time": 1.7e9, "entire_frame_compile_time_s": seconds, "backend_compile_time_s": None}  # fmt: skip
    return {"compilation_metrics": facts | more, "frame_id": int(frame), "frame_compile_id": int(number)}


def reasons(compile_id, text):
    frame, number = compile_id.split("/")
    entry = {"artifact": {"name": "recompile_reasons", "encoding": "json"}, "has_payload": "1"}
    return line(entry | {"frame_id": int(frame), "frame_compile_id": int(number)}, text)


@pytest.fixture
def log(tmp_path):
    broken = {
        "artifact": {"name": "dynamo_graph_break_reason", "encoding": "string"},
        "frame_id": 0,
        "frame_compile_id": 0,
    }
    text = line({"chromium_event": {}}, '{"x": 1}') + line(broken, BREAK) + line(broken | {"frame_id": 3}, OLD_BREAK)
    text += line(metrics("0/0", 2.0))
    text += reasons("0/1", "0/0: tensor 'x' size mismatch at index 0. expected 16, actual 24")
    text += line(metrics("0/1", 1.5))
    text += reasons("0/2", "[\"0/1: tensor 'x' size mismatch at index 0. expected 24, actual 32\"]")
    text += line(metrics("0/2", 1.25))
    text += line(metrics("1/0", 0.5, fail_reason="no\nbackend"))
    path = tmp_path / "dedicated_log_torch_trace_1.log"
    path.write_text(text)
    return path


def test_recompilations_of_one_guard_are_one_cause(log):
    first = read_compile_log(log).causes()[0]
    assert (first.kind, first.where, first.num, first.compile_s) == ("recompilation", "model.py:12", 2, 2.75)
    assert first.reason == "tensor 'x' size mismatch at index #. expected #, actual #"


def test_graph_breaks_have_their_line_and_reason_in_old_and_new_logs(log):
    new, old = read_compile_log(log).breaks
    assert (new.file, new.line) == ("/home/me/model.py", 571)
    assert new.reason == "Unsupported Tensor.item() call with capture_scalar_outputs=False"
    assert new.hint == "Dynamo does not support tracing `Tensor.item()`."
    assert (old.file, old.line, old.reason) == ("model.py", 9, "Unsupported: call_function print")


def test_failures_and_seconds_are_kept(log):
    found = read_compile_log(log)
    assert found.compile_s == pytest.approx(5.25)
    assert [c.failure for c in found.compilations] == ["", "", "", "no"]
    assert [c.again for c in found.compilations] == [False, True, True, False]


def test_a_folder_is_all_its_processes(log):
    assert read_compile_log(log.parent).compile_s == pytest.approx(5.25)


def test_damaged_lines_are_counted(log):
    log.write_text(log.read_text() + HEAD + '{"compilation_metrics": {"comp\nnot a line\n')
    assert read_compile_log(log).notes == ("2 lines could not be read",)


def test_what_is_no_log_is_refused(tmp_path, log):
    (tmp_path / "x.txt").write_text("hello\n")
    with pytest.raises(InputError, match="not a structured compile log"):
        read_compile_log(tmp_path / "x.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="set TORCH_TRACE"):
        read_compile_log(tmp_path / "empty")
    assert is_compile_log(log.read_bytes()[:400]) and not is_compile_log(b"{}")
