"""Exports of Nsight Systems of any version: what a table lacks is absent, and what is no export is refused."""

from __future__ import annotations

import sqlite3

import numpy as np
import pytest

from ridgeline.errors import InputError
from ridgeline.trace import Kind, read, totals
from ridgeline.trace.idle import idle_causes


def _export(path, tables):
    with sqlite3.connect(path) as db:
        for name, (columns, rows) in tables.items():
            quoted = ", ".join(f'"{column}"' for column in columns)
            db.execute(f'CREATE TABLE "{name}" ({quoted})')
            db.executemany(f'INSERT INTO "{name}" VALUES ({",".join("?" * len(columns))})', rows)
    db.close()
    return path


PID_A, PID_B = 5 << 24, 6 << 24
STRINGS = (("id", "value"), [(1, "void gemm<float>()"), (2, "cudaLaunchKernel_v7000"), (3, "forward"), (4, "main"),
                             (5, "ncclDevKernel_AllGather"), (6, "gemm")])  # fmt: skip


OP = "aten::mm, seq = 7, op_id = 3, sizes = [[2, 3], [3, 4]]"


def _tables():
    kernel = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid", "demangledName", "shortName",
              "gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "registersPerThread", "staticSharedMemory",
              "dynamicSharedMemory", "graphNodeId")  # fmt: skip
    size = (8, 1, 1, 128, 1, 1, 32, 0, 1024, None)
    return {
        "StringIds": STRINGS,
        "CUPTI_ACTIVITY_KIND_KERNEL": (kernel, [
            (1000, 3000, 0, 7, 11, PID_A, 1, 6, *size), (1500, 4000, 1, 7, 11, PID_B, 1, 6, *size),
            (5000, 6000, 0, 9, 12, PID_A, 5, 5, *size),
        ]),
        "CUPTI_ACTIVITY_KIND_MEMCPY": (
            ("start", "end", "deviceId", "streamId", "correlationId", "globalPid", "bytes", "copyKind", "srcKind",
             "dstKind"),
            [(3000, 3500, 0, 7, 13, PID_A, 4096, 1, 1, 2), (6500, 7000, 0, 7, 14, PID_A, 64, 2, 2, 0),
             (7000, 7100, 0, 7, 15, PID_A, 64, 8, 2, 2)],
        ),
        "CUPTI_ACTIVITY_KIND_MEMSET": (("start", "end", "deviceId", "streamId", "correlationId", "bytes"),
                                       [(8000, 8100, 0, 7, 16, 12)]),
        "CUPTI_ACTIVITY_KIND_RUNTIME": (
            ("start", "end", "globalTid", "correlationId", "nameId"),
            [(100, 200, PID_A + 5, 11, 2), (150, 250, PID_B + 6, 11, 2), (300, 400, PID_A + 5, 12, 2)],
        ),
        "NVTX_EVENTS": (
            ("start", "end", "eventType", "text", "textId", "globalTid"),
            [(50, 500, 59, None, 3, PID_A + 5), (90, 210, 59, OP, None, PID_A + 5),
             (95, None, 34, "a mark", None, PID_A + 5)],
        ),
        "ThreadNames": (("nameId", "globalTid"), [(4, PID_A + 5)]),
        "TARGET_INFO_GPU": (("id", "name", "smMajor", "smMinor", "smCount"), [(0, "NVIDIA H100", 9, 0, 132)]),
        "META_DATA_EXPORT": (("name", "value"), [("EXPORT_SCHEMA_VERSION", "3.25.0")]),
    }  # fmt: skip


def _named(trace, name):
    return int(np.flatnonzero(trace.name == trace.word_id(name))[0])


def test_kernels_copies_calls_and_ranges_are_linked(tmp_path):
    trace = read(_export(tmp_path / "t.sqlite", _tables()))
    assert totals(trace)["all"]["num_gpu_events"] == 7 and trace.devices() == [0, 1]
    first = np.flatnonzero((trace.device == 0) & (trace.name == trace.word_id("void gemm<float>()")))[0]
    assert [trace.text("name", i) for i in trace.path(int(first))] == [
        "void gemm<float>()", "cudaLaunchKernel", "aten::mm", "forward",
    ]  # fmt: skip
    assert trace.text("op", int(first)) == "aten::mm" and trace.extra["grid"][first].tolist() == [8, 1, 1]
    assert trace.text("shapes", _named(trace, "aten::mm")) == "[[2, 3], [3, 4]]"
    assert Kind(int(trace.kind[_named(trace, "ncclDevKernel_AllGather")])) is Kind.COMMUNICATION


def test_two_processes_may_use_the_same_correlations(tmp_path):
    trace = read(_export(tmp_path / "t.sqlite", _tables()))
    other = np.flatnonzero((trace.device == 1) & trace.gpu)[0]
    assert trace.start_ns[trace.launch[other]] - trace.start_ns[_named(trace, "forward")] == 100


def test_copies_say_what_memory_they_use(tmp_path):
    trace = read(_export(tmp_path / "t.sqlite", _tables()))
    copies = trace.in_order(trace.of_kind(Kind.MEMCPY))
    assert [trace.text("copy", int(i)) for i in copies] == ["HtoD pinned", "DtoH pageable", "DtoD"]
    assert trace.extra["bytes"][copies].tolist() == [4096, 64, 64]


def test_an_old_export_with_few_tables_is_enough(tmp_path):
    tables = {
        "StringIds": STRINGS,
        "CUPTI_ACTIVITY_KIND_KERNEL": (
            ("start", "end", "deviceId", "streamId", "shortName"),
            [(0, 10, 0, 7, 6), (20, 30, 0, 7, 6)],
        ),
    }
    trace = read(_export(tmp_path / "t.sqlite", tables))
    assert totals(trace)["all"]["idle_ms"] == pytest.approx(1e-5)
    assert [row.cause for row in idle_causes(trace)] == ["unknown"]


def test_the_device_and_versions_are_known(tmp_path):
    trace = read(_export(tmp_path / "t.sqlite", _tables()))
    assert trace.meta["devices"][0]["name"] == "NVIDIA H100" and trace.meta["devices"][0]["numSms"] == 132
    assert trace.meta["versions"]["EXPORT_SCHEMA_VERSION"] == "3.25.0" and trace.meta["format"] == "nsys"


def test_a_database_of_something_else_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"not an export of Nsight Systems; it holds users"):
        read(_export(tmp_path / "t.sqlite", {"users": (("id",), [(1,)])}))


def test_a_damaged_database_is_refused(tmp_path):
    path = _export(tmp_path / "t.sqlite", _tables())
    data = path.read_bytes()
    path.write_bytes(data[:100] + b"\xff" * 3000 + data[3100:])
    with pytest.raises(InputError, match="export it again"):
        read(path)


def test_views_are_not_run(tmp_path):
    path = tmp_path / "t.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
        endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS start, i AS end FROM n"
        db.execute(f"CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS {endless}")
    db.close()
    assert len(read(path)) == 0
