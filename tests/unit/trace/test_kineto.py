"""Every dialect of Chrome JSON gives the same table, and damage costs no more than it touched."""

from __future__ import annotations

import gzip
import json
import zipfile

import numpy as np
import pytest

from ridgeline.errors import InputError
from ridgeline.trace import Kind, TraceBuilder, read, read_job, read_ranks, steps, totals, write_chrome
from ridgeline.trace.kineto import read_kineto

from . import dialects


@pytest.fixture(params=[True, False], ids=["msgspec", "json"])
def fast(request):
    if request.param:
        pytest.importorskip("msgspec")
    return request.param


def _read(tmp_path, document, name="t.json", fast=True):
    path = tmp_path / name
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return read_kineto(path, fast=fast)


def _named(trace, name):
    return int(np.flatnonzero(trace.name == trace.word_id(name))[0])


def test_a_kernel_is_linked_up_to_its_step(tmp_path, fast):
    trace = _read(tmp_path, dialects.modern(), fast=fast)
    path = [trace.text("name", i) for i in trace.path(_named(trace, "sgemm"))]
    assert path[:3] == ["sgemm", "cudaLaunchKernel", "aten::addmm"]
    assert path[-2:] == ["ProfilerStep#3", "train.py(10): main"] and "nn.Module: Linear_1" in path


def test_a_kernel_has_its_op_module_line_and_step(tmp_path, fast):
    trace = _read(tmp_path, dialects.modern(), fast=fast)
    kernel = _named(trace, "sgemm")
    assert [trace.text(c, kernel) for c in ("op", "module", "source", "phase")] == [
        "aten::addmm", "Net_0.Linear_1", "train.py:10", "forward",
    ]  # fmt: skip
    assert trace.step[kernel] == 3 and trace.step[_named(trace, "relu")] == 4
    assert trace.extra["grid"][kernel].tolist() == [4, 2, 1]
    assert trace.text("shapes", _named(trace, "aten::addmm")) == "[[16], [64, 32], [32, 16]]"


def test_nanoseconds_are_exact(tmp_path, fast):
    trace = _read(tmp_path, dialects.modern(), fast=fast)
    kernel = _named(trace, "sgemm")
    assert (trace.start_ns[kernel], trace.end_ns[kernel]) == (30_125, 70_625)
    assert trace.origin_ns == dialects.EPOCH_US * 1000


def test_time_divides_into_compute_communication_copies_and_idle(tmp_path, fast):
    found = totals(_read(tmp_path, dialects.modern(), fast=fast))["all"]
    assert found == {
        "total_ms": pytest.approx(0.144875), "busy_ms": pytest.approx(0.0905), "compute_ms": pytest.approx(0.0705),
        "exposed_comm_ms": pytest.approx(0.010), "exposed_memcpy_ms": pytest.approx(0.010),
        "idle_ms": pytest.approx(0.054375), "num_gpu_events": 4,
    }  # fmt: skip


def test_kinds_come_from_categories_and_names(tmp_path, fast):
    trace = _read(tmp_path, dialects.modern(), fast=fast)
    kinds = {trace.text("name", i): Kind(int(trace.kind[i])) for i in range(len(trace))}
    assert kinds["ncclDevKernel_AllReduce_Sum_f32_RING_LL"] is Kind.COMMUNICATION
    assert kinds["Memcpy HtoD (Pageable -> Device)"] is Kind.MEMCPY
    assert kinds["ProfilerStep#3"] is Kind.STEP and kinds["train.py(10): main"] is Kind.PYTHON
    assert trace.text("copy", _named(trace, "Memcpy HtoD (Pageable -> Device)")) == "HtoD pageable"


@pytest.mark.parametrize(
    "dialect", ["of_2021", "in_nanoseconds", "as_pairs", "of_rocm", "of_mtia", "absolute_decimals", "with_arrows"]
)
def test_dialects_agree_on_totals_and_links(tmp_path, fast, dialect):
    plain = _read(tmp_path, dialects.modern(), fast=fast)
    other = _read(tmp_path, getattr(dialects, dialect)(dialects.modern()), name="o.json", fast=fast)
    slack = {"of_2021": 1e-2, "absolute_decimals": 5e-4}.get(dialect, 1e-6)  # their clocks are that coarse
    for key, value in totals(plain)["linked"].items():
        assert totals(other)["linked"][key] == pytest.approx(value, abs=slack), key
    assert [step.number for step in steps(other)] == [3, 4]
    assert other.text("op", _named(other, "sgemm")) == "aten::addmm"


def test_decimals_since_1970_keep_their_nanoseconds(tmp_path, fast):
    trace = _read(tmp_path, dialects.absolute_decimals(dialects.modern(base=False)), fast=fast)
    kernel = _named(trace, "sgemm")
    assert trace.start_ns[kernel] - trace.start_ns[_named(trace, "ProfilerStep#3")] == 30_125
    assert trace.origin_ns == dialects.EPOCH_US * 1000 and trace.meta["grid_ns"] == 250


def test_whole_microseconds_are_known_as_such(tmp_path, fast):
    assert _read(tmp_path, dialects.of_2021(dialects.modern()), fast=fast).meta["clock_ns"] == 1000
    assert _read(tmp_path, dialects.modern(), fast=fast).meta["clock_ns"] == 1


def test_a_trace_of_the_device_alone_is_complete(tmp_path, fast):
    trace = _read(tmp_path, dialects.gpu_only(dialects.modern()), fast=fast)
    assert totals(trace)["all"]["num_gpu_events"] == 4 and totals(trace)["linked"]["num_gpu_events"] == 0
    assert totals(trace)["all"]["busy_ms"] == pytest.approx(0.0905)


def test_a_trace_of_the_host_alone_has_no_device_time(tmp_path, fast):
    trace = _read(tmp_path, dialects.cpu_only(dialects.modern()), fast=fast)
    assert totals(trace)["all"]["total_ms"] == 0.0 and trace.of_kind(Kind.OP).sum() == 2


def test_files_may_be_compressed(tmp_path):
    text = json.dumps(dialects.modern()).encode()
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(text))
    with zipfile.ZipFile(tmp_path / "t.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("readme.txt", "no trace")
        archive.writestr("folder/t.json", text)
    with zipfile.ZipFile(tmp_path / "two.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.json", text)
        archive.writestr("b.json", "[]")
    assert any("only the largest, a.json" in note for note in read(tmp_path / "two.zip").notes)
    (tmp_path / "misnamed.json").write_bytes(gzip.compress(text))
    for name in ("t.json.gz", "t.zip", "misnamed.json"):
        assert totals(read(tmp_path / name))["all"]["num_gpu_events"] == 4, name


@pytest.mark.parametrize("form", ["list", "unclosed list", "bom", "compact", "pretty", "metadata last"])
def test_the_text_may_be_laid_out_in_any_way(tmp_path, fast, form):
    document = dialects.modern()
    events = document["traceEvents"]
    text = {
        "list": json.dumps(events),
        "unclosed list": json.dumps(events, indent=1)[:-2] + ",\n",
        "bom": "\ufeff" + json.dumps(document),
        "compact": json.dumps(document, separators=(",", ":")),
        "pretty": json.dumps(document, indent=2),
        "metadata last": json.dumps({"traceEvents": events, "pg_config": [{"a": [1]}, {"b": 2}], "traceName": "x"}),
    }[form]
    trace = _read(tmp_path, text, fast=fast)
    assert totals(trace)["all"]["num_gpu_events"] == 4 and len(trace) == 16


def test_a_file_cut_off_gives_what_came_before_and_says_so(tmp_path, fast):
    text = json.dumps(dialects.modern())
    cut = text[: text.index('"relu"') + 20]
    trace = _read(tmp_path, cut, fast=fast)
    assert len(trace) == 15 and trace.meta["truncated"] and any("incomplete" in note for note in trace.notes)
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(text.encode() * 1)[:-40])
    assert read(tmp_path / "t.json.gz").meta["truncated"]


def test_a_damaged_event_costs_only_itself(tmp_path, fast):
    text = json.dumps(dialects.modern()).replace('"name": "relu"', '"name": relu', 1)
    trace = _read(tmp_path, text, fast=fast)
    assert len(trace) == 15 and trace.meta["num_lost"] == 1
    assert any("1 events could not be read" in note for note in trace.notes)


def test_values_of_the_wrong_sort_are_absent_not_wrong(tmp_path, fast):
    strange = (
        dialects.device("kernel", "odd", 180.0, 1.0, 99) | {"args": {"stream": "a", "correlation": [], "device": None}},
        dialects.host("cpu_op", "no time", 0.0, 1.0) | {"ts": None},
        dialects.host("cpu_op", "backward", 190.0, -5.0),
        dialects.host("cpu_op", "text", 191.0, 1.0) | {"ts": "191.5", "args": "none"},
        {"ph": "X", "cat": ["x"], "name": {"a": 1}, "pid": [1], "tid": {}, "ts": 1, "dur": 1},
    )
    trace = _read(tmp_path, dialects.modern(extra=strange), fast=fast)
    odd = _named(trace, "odd")
    assert trace.launch[odd] == -1 and trace.gpu[odd]
    assert trace.meta["num_lost"] == 1 and trace.duration_s[_named(trace, "backward")] == 0.0
    assert trace.start_ns[_named(trace, "text")] == 191_500


def test_nan_and_control_characters_are_read_over(tmp_path, fast):
    text = json.dumps(dialects.modern()).replace('"bytes": 4096', '"bytes": NaN', 1).replace("sgemm", "sg\temm", 1)
    trace = _read(tmp_path, text, fast=fast)
    assert totals(trace)["all"]["num_gpu_events"] == 4


@pytest.mark.parametrize("digits", [13, 15, 7000])
def test_a_time_of_thousands_of_digits_is_no_time(tmp_path, digits):
    """More digits than Python turns into a number; the events beside it are read."""
    events = [{"ph": "X", "cat": "cpu_op", "name": "b", "ts": 2.0, "dur": 1.0, "pid": 1, "tid": 1}]
    text = json.dumps({"traceEvents": events})
    first = '{"ph": "X", "cat": "cpu_op", "name": "a", "ts": %s.5, "dur": 1.0, "pid": 1, "tid": 1},' % ("9" * digits)
    path = tmp_path / "trace.json"
    path.write_text(text.replace('[{"ph"', f'[{first}{{"ph"'))
    trace = read(path, cache=False)
    assert "b" in [trace.words[int(word)] for word in trace.name]


@pytest.mark.parametrize("text", ["", "{}", "[x]", "not json", '{"a": 1}', '{"traceEvents": 5}', "\x00\x01"])
def test_what_is_no_trace_is_refused_with_a_reason(tmp_path, text):
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"t\.json"):
        read(path)


def test_memory_instants_become_totals_and_blocks(tmp_path, fast):
    def memory(at, size, addr, total):
        args = {
            "Bytes": size,
            "Addr": addr,
            "Device Type": 1,
            "Device Id": 0,
            "Total Allocated": total,
            "Total Reserved": 999,
        }
        return {
            "ph": "i",
            "s": "t",
            "name": "[memory]",
            "cat": "cpu_instant_event",
            "pid": 100,
            "tid": 100,
            "ts": at,
            "args": args,
        }

    extra = (memory(13.0, 64, 5000, 64), memory(14.0, 32, 6000, 96), memory(90.0, -64, 5000, 32))
    trace = _read(tmp_path, dialects.modern(extra=extra), fast=fast)
    held = np.flatnonzero(trace.of_kind(Kind.ALLOCATION))
    assert trace.extra["bytes"][held].tolist() == [64, 32]
    assert trace.end_ns[held].tolist() == [90_000, 90_000] and trace.start_ns[held].tolist() == [13_000, 14_000]
    assert {trace.text("op", i) for i in held} == {"aten::addmm"}
    assert trace.counters["allocated_bytes (GPU 0)"].value.tolist() == [64.0, 96.0, 32.0]


def test_backward_ops_have_the_module_of_their_forward(tmp_path, fast):
    forward = dialects.host("cpu_op", "aten::mul", 50.0, 5.0)
    forward["args"] = {"Sequence number": 11, "Fwd thread id": 0}
    backward = dialects.host("cpu_op", "MulBackward0", 80.0, 10.0, tid=200)
    backward["args"] = {"Sequence number": 11, "Fwd thread id": 1}
    kernel = [dialects.host("cuda_runtime", "cudaLaunchKernel", 82.0, 2.0, tid=200) | {"args": {"correlation": 50}},
              dialects.device("kernel", "mul_backward", 86.0, 3.0, 50)]  # fmt: skip
    trace = _read(tmp_path, dialects.modern(extra=(forward, backward, *kernel)), fast=fast)
    row = _named(trace, "mul_backward")
    assert trace.text("module", row) == "Net_0" and trace.text("phase", row) == "backward"


def test_a_graph_launch_owns_all_its_kernels(tmp_path, fast):
    extra = [dialects.call("cudaGraphLaunch", 176.0, 2.0, 60)]
    extra += [dialects.device("kernel", f"k{i}", 180.0 + i, 0.5, 60) for i in range(4)]
    trace = _read(tmp_path, dialects.modern(extra=tuple(extra)), fast=fast)
    assert (trace.launch == _named(trace, "cudaGraphLaunch")).sum() == 4


def test_a_folder_has_a_trace_for_each_rank(tmp_path):
    for rank in (10, 2):
        document = dialects.modern() | {"distributedInfo": {"rank": rank, "world_size": 16}}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(document))
    assert [trace.ranks() for trace in read_ranks(tmp_path)] == [[2], [10]]
    job = read_job(tmp_path)
    assert job.ranks() == [2, 10] and totals(job)["all"]["num_gpu_events"] == 8
    kernel = np.flatnonzero((job.rank == 10) & (job.name == job.word_id("sgemm")))[0]
    assert job.rank[job.launch[kernel]] == 10


def test_ranks_that_files_do_not_tell_apart_get_numbers(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.json").write_text(json.dumps(dialects.modern()))
    assert [trace.ranks() for trace in read_ranks(tmp_path)] == [[0], [1]]


def test_what_we_write_reads_back(tmp_path):
    build = TraceBuilder("two ranks")
    build.note("a note")
    for rank in range(2):
        build.add("step", "host", 0.0, 1.0, rank=rank, kind=Kind.STEP, step=5)
        op = build.add("matmul", "host", 1e-9, 2e-6, rank=rank, module="a.b", op="mm", phase="forward", step=5)
        build.add("gemm", "device", 3e-6, 123e-9, rank=rank, launch=op, step=5, extra={"flops": 2.5e9, "floor_s": 1e-7})
        build.add("all_reduce", "network", 4e-6, 1e-6, rank=rank, kind=Kind.COMMUNICATION, device=0, stream=1,
                  extra={"collective": "all_reduce", "group_size": 2, "message_bytes": 1024})  # fmt: skip
        build.add("wait", "device", 6e-6, 1e-6, rank=rank, kind=Kind.BUBBLE, device=0)
    build.count("memory_bytes", 0.0, 7.0)
    build.count("memory_bytes", 1e-6, 9.0)
    build.describe(origin_ns=123_456_789, machine="imagined")
    trace = build.build()
    again = read(write_chrome(trace, tmp_path / "t.json.gz"))
    assert again.title == trace.title and again.notes == trace.notes and again.origin_ns == trace.origin_ns
    assert again.meta["machine"] == "imagined" and again.meta["format"] == "ridgeline"
    key = lambda t: sorted(
        (int(t.rank[i]), t.text("name", i), t.text("lane", i), int(t.start_ns[i]), int(t.end_ns[i]), int(t.kind[i]),
         int(t.device[i]), int(t.step[i]), t.text("module", i), t.text("op", i), t.text("phase", i),
         t.text("name", int(t.launch[i])) if t.launch[i] >= 0 else "", t.text("collective", i),
         int(t.optional("message_bytes")[i]), float(np.nan_to_num(t.optional("floor_s")[i])))
        for i in range(len(t))
    )  # fmt: skip
    assert key(again) == key(trace)
    assert again.counters["memory_bytes"].value.tolist() == [7.0, 9.0]
    assert totals(again) == totals(trace)


def test_traces_of_xla_and_of_the_old_profiler_have_devices_by_name(tmp_path, fast):
    xla = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "/device:GPU:0"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 13, "args": {"name": "Stream #13(Compute)"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "XLA Ops"}},
        {"ph": "M", "name": "process_name", "pid": 701, "args": {"name": "/host:CPU"}},
        {"ph": "X", "pid": 1, "tid": 13, "ts": 10.0, "dur": 5.0, "name": "fusion_3", "args": {"correlation_id": 4}},
        {"ph": "X", "pid": 1, "tid": 1, "ts": 10.0, "dur": 5.0, "name": "fusion.3"},
        {"ph": "X", "pid": 701, "tid": 5, "ts": 2.0, "dur": 1.0, "name": "PjitFunction(f)"},
    ]
    assert totals(_read(tmp_path, {"traceEvents": xla}, fast=fast))["all"]["num_gpu_events"] == 1
    old = [{"ph": "X", "name": "gemm", "ts": 1.0, "dur": 3.0, "tid": 0, "pid": "CUDA functions", "args": {}},
           {"ph": "X", "name": "mm", "ts": 0.0, "dur": 1.0, "tid": 1, "pid": "CPU functions", "args": {}}]  # fmt: skip
    assert totals(_read(tmp_path, old, fast=fast))["all"]["compute_ms"] == pytest.approx(0.003)


def test_an_unknown_category_runs_on_a_device_only_if_it_names_a_stream(tmp_path, fast):
    strange = (dialects.host("brand_new", "somewhere", 180.0, 5.0),
               dialects.device("brand_new_too", "over there", 190.0, 5.0, 77))  # fmt: skip
    trace = _read(tmp_path, dialects.modern(extra=strange), fast=fast)
    assert [bool(trace.gpu[_named(trace, name)]) for name in ("somewhere", "over there")] == [False, True]


def test_steps_of_a_trace_of_the_device_alone_come_from_its_own_marks(tmp_path, fast):
    marks = tuple(
        dialects.device("gpu_user_annotation", f"ProfilerStep#{n}", 20.0 + 90.0 * i, 90.0, 0) | {"args": {}}
        for i, n in enumerate((3, 4))
    )
    document = dialects.gpu_only(dialects.modern())
    document["traceEvents"] += list(marks)
    trace = _read(tmp_path, document, fast=fast)
    assert [step.number for step in steps(trace)] == [3, 4]
    assert totals(trace)["all"]["num_gpu_events"] == 4


def test_sizes_that_are_none_are_absent(tmp_path, fast):
    odd = dialects.device("kernel", "odd", 180.0, 1.0, 99, grid=[1e300, 1, 1], block="x")
    text = json.dumps(dialects.modern(extra=(odd,))).replace("1e+300", "1e400")
    trace = _read(tmp_path, text, fast=fast)
    assert trace.extra["grid"][_named(trace, "odd")].tolist() == [-1, -1, -1]
    assert trace.extra["grid"][_named(trace, "sgemm")].tolist() == [4, 2, 1]


def test_a_begin_without_an_end_is_counted(tmp_path, fast):
    document = dialects.as_pairs(dialects.modern())
    document["traceEvents"] = [e for e in document["traceEvents"] if e.get("name") != "relu"]
    trace = _read(tmp_path, document, fast=fast)
    assert len(trace) == 15 and trace.meta["num_lost"] == 1


def test_arguments_of_any_shape_are_read_over(tmp_path, fast):
    nested = dialects.host("cpu_op", "nested", 195.0, 1.0) | {
        "args": {"groups": [{"a": 1}, {"b": [{"c": 2}, {"d": 3}]}]}
    }
    listed = dialects.host("cpu_op", "listed", 197.0, 1.0) | {"args": [{"x": 1}, {"y": 2}]}
    trace = _read(tmp_path, dialects.modern(extra=(nested, listed)), fast=fast)
    assert len(trace) == 18 and trace.meta["num_lost"] == 0 and not trace.notes


def test_a_list_where_a_time_should_be_is_no_time(tmp_path, fast):
    text = dialects.absolute_decimals(dialects.modern(base=False))
    at = text.index('"ts": ', text.index("relu")) + 6
    trace = _read(tmp_path, text[:at] + '["a"], "x": ' + text[at:], fast=fast)
    assert len(trace) == 15 and trace.meta["num_lost"] == 1
