"""Tables of a trace, parts of it, and what a spreadsheet makes of them."""

from __future__ import annotations

import csv
import io

import pytest

from ridgeline.errors import InputError
from ridgeline.trace import Kind, Trace, TraceBuilder
from ridgeline.trace.analyses.select import range_of, selected
from ridgeline.trace.analyses.table import Table
from ridgeline.trace.analyses.tables import TABLES, table_of

MS = 1e-3


def run(rank: int = 0, late: float = 0.0) -> Trace:
    """Two steps of 10 ms: three kernels, a copy and a collective each."""
    build = TraceBuilder("two steps")
    for step in range(2):
        at = 10 * MS * step
        mark = build.add(f"ProfilerStep#{step}", "host", at, 10 * MS, kind=Kind.STEP, thread=1, step=step, rank=rank)
        op = build.add("aten::mm", "host", at + 1 * MS, 3 * MS, kind=Kind.OP, thread=1, parent=mark, step=step,
                       rank=rank, module="layers.0", extra={"shapes": "[[4, 8], [8, 2]]"})  # fmt: skip
        for i in range(3):
            call = build.add("cudaLaunchKernel", "host", at + (1 + i) * MS, 0.1 * MS, kind=Kind.RUNTIME, thread=1,
                             parent=op, step=step, rank=rank)  # fmt: skip
            build.add("gemm" if i else "=cmd()", "GPU", at + (2 + i) * MS, (i + 1) * 0.2 * MS, kind=Kind.KERNEL,
                      device=0, stream=7, launch=call, op="aten::mm", module="layers.0", step=step, rank=rank,
                      extra={"floor_s": 0.1 * MS, "expected_s": 0.2 * MS})  # fmt: skip
        build.add("Memcpy HtoD", "GPU", at + 6 * MS, 1 * MS, kind=Kind.MEMCPY, device=0, stream=8, rank=rank, step=step,
                  extra={"copy": "HtoD pinned", "bytes": 10_000_000})  # fmt: skip
        build.add("ncclAllReduce", "GPU", at + 8 * MS + late, 1.5 * MS - late, kind=Kind.COMMUNICATION, device=0,
                  rank=rank, stream=9, step=step,
                  extra={"collective": "all_reduce", "message_bytes": 1_000_000})  # fmt: skip
    return build.build()


def test_kernels_have_counts_times_floors_and_places():
    found = table_of(run(), "kernels")
    rows = {row[0]: dict(zip(found.columns, row, strict=True)) for row in found.rows}
    gemm = rows["gemm"]
    assert gemm["count"] == 4 and gemm["total_ms"] == pytest.approx(2.0)
    assert gemm["median_us"] == pytest.approx(500) and gemm["times_floor"] == pytest.approx(5.0)
    assert gemm["module"] == "layers.0" and gemm["shapes"] == "[[4, 8], [8, 2]]"
    assert sum(found.column("share_frac")) == pytest.approx(1.0)


def test_grouping_by_a_step_splits_rows():
    found = table_of(run(), "kernels", ["step"])
    assert found.columns[:2] == ("step", "name")
    assert {row[:2] for row in found.rows if row[1] == "gemm"} == {(0, "gemm"), (1, "gemm")}


def test_every_table_of_a_trace_and_of_an_empty_one():
    for name in TABLES:
        assert all(len(row) == len(table_of(run(), name).columns) for row in table_of(run(), name).rows)
        assert len(table_of(TraceBuilder("empty").build(), name)) in (0, 1)


def test_ops_copies_streams_and_steps_add_up():
    trace = run()
    ops, copies = table_of(trace, "ops"), table_of(trace, "copies")
    assert ops.column("num_kernels") == [6] and ops.column("device_ms") == [pytest.approx(2.4)]
    assert copies.column("bytes_per_s") == [pytest.approx(10e9)] and copies.column("exposed_ms") == [pytest.approx(2.0)]
    assert sorted(table_of(trace, "streams").column("stream")) == [7, 8, 9]
    assert table_of(trace, "steps").column("step") == [0, 1]


def test_collectives_tell_who_came_last_and_how_fast_the_bytes_moved():
    found = table_of(run(), "collectives", (), [run(1, 0.5 * MS)])
    first = dict(zip(found.columns, found.rows[0], strict=True))
    assert first["num_ranks"] == 2 and first["last_rank"] == 1 and first["arrival_order"] == "0 1"
    assert first["skew_ms"] == pytest.approx(0.5) and first["transfer_ms"] == pytest.approx(1.0)
    assert first["algorithm_bytes_per_s"] == pytest.approx(1e9) and first["bus_bytes_per_s"] == pytest.approx(1e9)


def test_cells_that_a_spreadsheet_would_run_are_defused():
    text = table_of(run(), "kernels").to_csv()
    names = [row["name"] for row in csv.DictReader(io.StringIO(text))]
    assert "'=cmd()" in names and "gemm" in names
    cells = Table("t", ("a", "b", "c"), (("@x", -1.5, None), ("+1", float("nan"), "a\x1b[2J\nb"))).to_csv()
    assert cells == "a,b,c\n'@x,-1.5,\n'+1,,a [2J b\n"


def test_dataframes_have_the_columns_of_the_table():
    pandas = pytest.importorskip("pandas")
    frame = table_of(run(), "kernels").to_dataframe()
    assert isinstance(frame, pandas.DataFrame) and list(frame.columns) == list(table_of(run(), "kernels").columns)


def test_an_unknown_table_or_column_is_answered_with_the_known_ones():
    with pytest.raises(InputError, match="did you mean 'kernels'"):
        table_of(run(), "kernel")
    with pytest.raises(InputError, match="cannot group by"):
        table_of(run(), "kernels", ["colour"])


def test_one_step_is_a_trace_of_its_own():
    part = selected(run(), step=1)
    assert table_of(part, "steps").column("total_ms") == [pytest.approx(10.0)]
    assert int(part.gpu.sum()) == 5
    with pytest.raises(InputError, match="steps 0 to 1"):
        selected(run(), step=7)


def test_a_stretch_of_time_cuts_what_reaches_beyond_it():
    part = selected(run(), between="1.5ms..2.1ms")
    assert table_of(part, "steps").column("total_ms") == [pytest.approx(0.6)]
    assert part.duration_s[part.gpu].sum() == pytest.approx(0.1 * MS)


def test_instances_of_an_annotation_are_steps_without_the_time_between_them():
    part = selected(run(), annotation="aten::mm")
    found = table_of(part, "steps")
    assert found.column("step") == [0, 1]
    assert found.column("total_ms") == [pytest.approx(3.6), pytest.approx(3.6)]


@pytest.mark.parametrize("text", ["1..x", "5s", "2s..1s", "1.2.3s..4s", "..", "1s..2parsec"])
def test_a_range_that_is_none_is_refused(text):
    with pytest.raises(InputError, match="--range"):
        range_of(text)


def test_ranges_in_several_units():
    assert range_of("1.2s..1.5s") == (1.2, 1.5)
    assert range_of("300..350ms") == pytest.approx((0.3, 0.35))


def test_a_trace_with_its_own_words_alone_says_the_same():
    trace = run()
    part = trace.select(trace.of_kind(Kind.COMMUNICATION))
    small = part.with_used_words()
    assert len(small.words) < len(trace.words)
    assert small.text("name", 0) == "ncclAllReduce" and small.text("collective", 0) == "all_reduce"
    assert table_of(small, "collectives") == table_of(part, "collectives")
