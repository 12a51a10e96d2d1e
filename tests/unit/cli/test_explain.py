"""explain, diff and gate on the command line: a summary for people, JSON for programs, exit codes for builds."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from dataclasses import replace

import pytest

from ridgeline.api import explain
from ridgeline.cli.app import run
from ridgeline.cli.diff import changes_table
from ridgeline.cli.draw import console, table
from ridgeline.cli.explain import show
from ridgeline.findings.diff import Change
from ridgeline.findings.finding import Alternative
from ridgeline.trace import Kind, TraceBuilder, write_chrome
from ridgeline.trace.memory import Peak

LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def _trace(loader_us: float = 3000.0, kernel_us: float = 200.0, title: str = "run"):
    """Steps that wait for a loader and launch ten kernels; with a slow loader they wait for them as well."""
    build = TraceBuilder(title)
    now_us = 0.0

    def add(name, start_us, us, **more):
        return build.add(name, more.pop("lane", "host 1"), start_us * 1e-6, us * 1e-6, **more)

    for step in range(4):
        length = loader_us + 10 * kernel_us + (120 if loader_us > 100 else 20)
        mark = add(f"ProfilerStep#{step}", now_us, length, kind=Kind.STEP, thread=1, step=step)
        add(LOADER, now_us, loader_us, kind=Kind.DATALOADER, thread=1, parent=mark, step=step)
        at = now_us + loader_us
        for i in range(10):
            call = add("cudaLaunchKernel", at + 8 * i, 4, kind=Kind.RUNTIME, thread=1, parent=mark, step=step)
            add("nvjet_tst_128x256", at + 10 + i * (kernel_us + 1), kernel_us, kind=Kind.KERNEL, device=0, stream=7,
                lane="GPU 0 stream 7", launch=call, step=step, op="aten::mm", module="model.body")  # fmt: skip
        if loader_us > 100:
            add("cudaDeviceSynchronize", at + 90, 10 * kernel_us, kind=Kind.RUNTIME, thread=1, parent=mark, step=step)
        now_us += length
    build.describe(devices=[{"name": "NVIDIA H200"}])
    return build.build()


@pytest.fixture
def slow(tmp_path):
    return str(write_chrome(_trace(), tmp_path / "slow.json"))


@pytest.fixture
def fast(tmp_path):
    return str(write_chrome(_trace(loader_us=10.0), tmp_path / "fast.json"))


def test_the_summary_begins_with_the_verdict_and_three_numbers(slow, capsys):
    assert run(["explain", slow]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[1].startswith("Data loader")
    assert re.search(r"[\d.]+ ms a step .* device busy .* to win back", lines[2])
    assert any("num_workers" in line for line in lines)


def test_the_json_is_json_and_nothing_else(slow, capsys):
    assert run(["explain", slow, "--json", "--what-if", "workers=4"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["findings"][0]["rule"] == "data-loader"
    assert document["totals"]["all"]["num_gpu_events"] == 40
    assert document["what_if"][0]["after_ms"] < document["what_if"][0]["before_ms"]


def test_a_file_of_memory_alone_says_who_holds_the_peak(tmp_path, capsys):
    """It said that no device work was recorded, and nothing of memory."""
    path = tmp_path / "memory.raw.json"
    path.write_text(json.dumps([[-1, 1, 2_000_000, 0], [5_000, 2, 6_000_000, 4], [9_000, 4, -6_000_000, 4]]))
    assert run(["explain", str(path)]) == 0
    said = capsys.readouterr().out
    assert "Memory alone: 8 MB at the peak, of which 6 MB activation, 2 MB parameter." in said
    assert re.search(r"activation +6 MB +75%", said) and "a step" not in said and "nothing to analyze" not in said
    assert run(["explain", str(path), "--json"]) == 0
    (peak,) = json.loads(capsys.readouterr().out)["memory"]
    assert peak["allocated_bytes"] == 8_000_000
    assert peak["by_category"] == {"activation": 6_000_000, "parameter": 2_000_000}


def test_a_step_slowed_by_its_recording_is_told_as_both(slow, capsys):
    """A gain may be longer than the step is without a recorder, and never longer than the one recorded."""
    found = explain([slow])
    show(replace(found, replay=replace(found.replay, recorded_ms=2 * found.step_ms, host_frac=0.5)), 5)
    said = " ".join(capsys.readouterr().out.split())
    step, recorded = re.search(r"([\d.]+) ms a step \(mean of 4, ([\d.]+) as recorded\)", said).groups()
    assert float(recorded) == pytest.approx(2 * float(step), rel=1e-3)
    assert "nobody timed this program without it" in said


def test_a_peak_of_which_nobody_is_known_to_hold_a_part_is_one_line(slow, capsys):
    """An empty table broke its title into a column of words."""
    found = explain([slow])
    show(replace(found, memory=(Peak(0, 0.0, 2_790_000_000, -1, 0, ()),)), 5)
    lines = capsys.readouterr().out.splitlines()
    assert "Memory at its peak: 2.79 GB" in lines and not any(line.split() == ["held", "share"] for line in lines)


def test_titles_of_narrow_tables_are_not_broken(capsys):
    made = table("A title that is longer than its table", ("n", "right"))
    made.add_row("1")
    console().print(made)
    assert "A title that is longer than its table" in capsys.readouterr().out


def test_long_findings_go_on_below_their_first_word(slow, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    found = explain([slow])
    first = replace(found.findings[0], what="word " * 30)
    show(replace(found, findings=(first,)), 5)
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(" 1. "))
    assert lines[at + 1].startswith("    word")


def test_a_folder_of_ranks_is_called_by_its_name_and_counts_them_all(tmp_path, capsys):
    """One rank of the folder was named in its place, and the quality missed the others."""
    job = tmp_path / "job"
    job.mkdir()
    for rank in range(3):
        document = json.loads(write_chrome(_trace(100.0 + 900.0 * rank), tmp_path / "one.json").read_text())
        events = [event for event in document["traceEvents"] if event["ph"] == "X"]
        kineto = {"schemaVersion": 1, "distributedInfo": {"rank": rank, "world_size": 3}, "traceEvents": events}
        (job / f"rank{rank}.json").write_text(json.dumps(kineto))
    assert run(["explain", str(job), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["title"].startswith("job, rank ")
    assert not {"missing_ranks", "strangers"} & {issue["code"] for issue in document["quality"]["issues"]}
    idle_ms = sum(cause["idle_ms"] for cause in document["idle_causes"].values())
    assert idle_ms == pytest.approx(document["totals"]["all"]["idle_ms"], rel=1e-6)
    assert run(["diff", str(job), str(job / "rank2.json")]) == 0
    assert "2 more ranks of A not compared" in " ".join(capsys.readouterr().out.split())


def test_files_that_name_no_rank_are_not_taken_for_a_job_in_silence(slow, fast, capsys):
    assert run(["explain", slow, fast, "--json"]) == 0
    issues = {issue["code"]: issue["what"] for issue in json.loads(capsys.readouterr().out)["quality"]["issues"]}
    assert issues["strangers"] == "2 of 2 files do not say which rank they are"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"traceEvents": []}', "The trace is empty"),
        ('{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 0, "dur": 5}, {"ph": "X", "ca', "cut off"),
        ('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a", "ts": "soon", "dur": 5}]}', "could be read"),
    ],
)
def test_a_trace_without_device_work_says_why_it_has_none(text, said, tmp_path, capsys):
    path = tmp_path / "t.json"
    path.write_text(text)
    assert run(["explain", str(path), "--json"]) == 0
    assert said in json.loads(capsys.readouterr().out)["verdict"]


def test_what_is_left_out_of_a_file_is_said(slow, tmp_path, capsys):
    """Of an archive of two ranks one was read, and times that run backwards were none, without a word."""
    packed = tmp_path / "two.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        for name in ("r0.json", "r1.json"):
            archive.write(slow, name)
    backwards = tmp_path / "backwards.json"
    event = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "args": {"stream": 7, "device": 0}}
    backwards.write_text(json.dumps({"traceEvents": [event | {"ts": 10 * i, "dur": -5} for i in range(3)]}))
    found = {}
    for path in (packed, backwards):
        assert run(["explain", str(path), "--json"]) == 0
        found |= {i["code"]: i["what"] for i in json.loads(capsys.readouterr().out)["quality"]["issues"]}
    assert found["unread"] == "of 2 files in the archive only the largest, r0.json, is read"
    assert found["negative"] == "3 events end before they start"


def test_a_folder_of_compile_logs_is_told_by_line_and_cause(tmp_path, capsys):
    """It was refused as a folder without traces."""
    facts = {"co_name": "forward", "co_filename": "model.py", "co_firstlineno": 12, "start_time": 1.7e9}
    head = "V1115 06:45:34.096000 24127 torch/_dynamo/convert_frame.py:303] "
    entries = [
        {"compilation_metrics": facts | {"compile_id": f"0/{i}", "entire_frame_compile_time_s": 2.0 + i}, "frame_id": 0,
         "frame_compile_id": i} for i in range(2)
    ]  # fmt: skip
    logs = tmp_path / "logs"
    logs.mkdir()
    text = "".join(f"{head}{json.dumps(entry)}\n" for entry in entries)
    (logs / "dedicated_log_torch_trace_a.log").write_text(text)
    assert run(["explain", str(logs)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Compilation alone: 5 s in 2 compilations, of which 1 again, with 0 graph breaks." in said
    assert "model.py:12 1 3 s recompilation" in said
    assert run(["explain", str(logs), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_recompilations"] == 1
    assert run(["explain", str(logs), "--html", str(tmp_path / "r.html")]) == 2


def test_a_healthy_run_has_no_findings(fast, capsys):
    assert run(["explain", fast, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []


def test_files_are_written_where_asked(slow, tmp_path, capsys):
    page, timeline = tmp_path / "r.html", tmp_path / "t.json"
    assert run(["explain", slow, "--html", str(page), "--trace", str(timeline)]) == 0
    assert "<!doctype html>" in page.read_text() and "critical path" in timeline.read_text()
    capsys.readouterr()


def test_diff_says_what_got_slower(slow, fast, capsys):
    assert run(["diff", fast, slow]) == 0
    out = capsys.readouterr().out
    assert "slower" in out and "idle: data loader" in out
    assert run(["diff", fast, slow, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert sum(change["delta_ms"] for change in document["changes"]) == pytest.approx(document["delta_ms"], abs=1e-6)


def test_two_equal_runs_are_told_as_such(fast, capsys):
    assert run(["diff", fast, fast]) == 0
    out = capsys.readouterr().out
    assert "No difference" in out and "0.0% faster" not in out and "everything else" not in out


def test_collectives_of_a_comparison_keep_their_names(capsys):
    """Signatures were cut from the left, and what was left of all of them was the same."""
    long = "communication: ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)"
    changes_table([Change(long, "communication", 3.9, 0.3, -3.6, 4.0, 4.0, "faster kernels")], "What changed")
    assert "communication: ncclKernel_Sen" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["[0.02, 0.021]", "[]", '[["a"]]', "[[-1, 0]]"])
def test_step_times_that_are_none_say_how_to_write_them(text, tmp_path, capsys):
    """They were taken for traces, or for files of memory."""
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text("[[0.02, 0.02, 0.02], [0.02, 0.02, 0.02]]")
    bad.write_text(text)
    assert run(["gate", "--baseline", str(good), "--runs", str(bad)]) == 2
    assert "write a list of seconds for every run" in capsys.readouterr().err


def test_mistaken_options_point_to_the_help_of_their_command(slow, capsys):
    assert run(["explain", slow, "--top", "x"]) == 2
    assert "`ridgeline explain --help`" in capsys.readouterr().err
    assert run(["profile", "--stpes", "3", "train.py"]) == 2
    assert "did you mean '--steps'" in capsys.readouterr().err


def test_gate_fails_a_build_that_got_slower_and_passes_one_that_did_not(tmp_path, capsys):
    for side, kernel_us in (("base", 200.0), ("same", 200.0), ("slow", 230.0)):
        (tmp_path / side).mkdir()
        for i in range(3):
            write_chrome(_trace(10.0, kernel_us + 0.1 * i), tmp_path / side / f"{i}.json")
    base, same, slow = (str(tmp_path / side) for side in ("base", "same", "slow"))
    assert run(["gate", "--baseline", base, "--runs", same, "--max-regression", "3%"]) == 0
    assert run(["gate", "--baseline", base, "--runs", slow, "--max-regression", "3%"]) == 1
    assert "regression" in capsys.readouterr().out
    assert run(["gate", "--baseline", base, "--runs", slow, "--max-regression", "0.3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "ok"


@pytest.mark.parametrize(
    "argv",
    [
        ["explain", "nowhere.json"],
        ["diff", "nowhere.json", "nowhere.json"],
        ["gate", "--baseline", "nowhere", "--runs", "nowhere"],
        ["explain"],
    ],
)
def test_misuse_is_one_line_and_exit_code_2(argv, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(argv) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_share_that_is_none_is_refused(slow, capsys):
    assert run(["gate", "--baseline", slow, "--runs", slow, "--max-regression", "much"]) == 2
    assert "3%" in capsys.readouterr().err


def test_a_file_that_is_no_trace_is_refused(tmp_path, capsys):
    path = tmp_path / "x.json"
    path.write_text("[1, 2")
    assert run(["explain", str(path)]) in (0, 2)
    shutil.copy(__file__, tmp_path / "y.json")
    assert run(["explain", str(tmp_path / "y.json")]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_what_the_same_time_may_be_lost_to_is_a_line_under_its_finding(tmp_path, capsys):
    found = explain(write_chrome(_trace(), tmp_path / "run.json"))
    other = Alternative(
        rule="graph-breaks", what="2 graphs", cause="graph breaks: in between", change="fullgraph=True; more",
        tell="TORCH_LOGS", low_ms=0.5, high_ms=2.25,
    )  # fmt: skip
    first = replace(found.findings[0], alternatives=(other,))
    show(replace(found, findings=(first, *found.findings[1:])), 5)
    said = " ".join(capsys.readouterr().out.split())
    assert "or for the same time (0.5 to 2.25 ms), graph breaks: fullgraph=True. What tells: TORCH_LOGS" in said
    assert "or for the same time" not in _said(found, capsys)


def _said(found, capsys) -> str:
    show(found, 5)
    return " ".join(capsys.readouterr().out.split())


def test_watching_a_folder_explains_each_file_once_it_is_whole(tmp_path, capsys):
    import json

    from ridgeline.cli.explain import Wish, watch_and_show

    events = [{"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 0, "dur": 5,
               "args": {"device": 0, "stream": 7}}]  # fmt: skip
    folder = tmp_path / "run"
    folder.mkdir()
    file = folder / "step.pt.trace.json"
    looks = []

    def wait() -> bool:
        looks.append(len(looks))
        if len(looks) == 1:
            file.write_text(json.dumps({"traceEvents": events})[:20])
        if len(looks) == 2:
            file.write_text(json.dumps({"traceEvents": events}))
        return len(looks) < 6

    watch_and_show(Wish((str(folder),), None, 0, True, None, None), wait)
    shown = capsys.readouterr()
    assert shown.err.count("step.pt.trace.json:") == 1
    assert json.loads(shown.out)["totals"]["all"]["num_gpu_events"] == 1
