"""Memory timelines: columns add up, both forms agree, and a picture is refused."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from ridgeline.errors import InputError
from ridgeline.trace import read
from ridgeline.trace.memory_timeline import CATEGORIES, read_memory_timeline

PARAMETER, ACTIVATION, GRADIENT = (CATEGORIES.index(name) for name in ("parameter", "activation", "gradient"))
EVENTS = [
    [-1, 1, 1000, PARAMETER],
    [5_000, 2, 300, ACTIVATION],
    [6_000, 3, -300, ACTIVATION],
    [6_000, 3, 300, GRADIENT],
    [7_000, 2, 50, ACTIVATION],
    [9_000, 4, -300, GRADIENT],
]


def written(path, document):
    path.write_bytes(
        gzip.compress(json.dumps(document).encode()) if path.suffix == ".gz" else json.dumps(document).encode()
    )
    return path


def test_events_add_up_to_what_is_held(tmp_path):
    timeline = read_memory_timeline(written(tmp_path / "m.raw.json.gz", EVENTS))
    assert timeline.at_s.tolist() == pytest.approx([0.0, 1e-6, 2e-6, 4e-6])
    assert timeline.total_bytes().tolist() == [1300, 1300, 1350, 1050]
    assert timeline.at_peak() == [("parameter", 1000), ("gradient", 300), ("activation", 50)]


def test_sums_read_like_events(tmp_path):
    row = [0] * (len(CATEGORIES) + 1)
    row[PARAMETER + 1], row[GRADIENT + 1] = 1000, 300
    timeline = read_memory_timeline(written(tmp_path / "m.json", [[5, 6], [row, row]]))
    assert timeline.at_s.tolist() == pytest.approx([0.0, 1e-6])
    assert timeline.at_peak() == [("parameter", 1000), ("gradient", 300)]


def test_counters_of_the_trace_are_the_categories(tmp_path):
    trace = read(written(tmp_path / "m.json", EVENTS), cache=False)
    assert set(trace.counters) == {
        "memory_bytes", "memory_bytes: parameter", "memory_bytes: activation", "memory_bytes: gradient",
    }  # fmt: skip


def test_rows_of_unknown_category_are_counted_not_dropped_in_silence(tmp_path):
    timeline = read_memory_timeline(written(tmp_path / "m.json", [*EVENTS, [9_500, 2, 7, 99]]))
    assert timeline.notes == ("1 rows of unknown action or category are left out",)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"<html><img src='data:image/png;base64,xx'/></html>", "no numbers"),
        (b"[[1, 2, 3, 4", "not JSON"),
        (b"{}", "no memory timeline"),
        (b'[[1, 2, 3, "x"]]', "whole numbers"),
        (b"[[1, 2, 3, 1e400]]", "whole numbers"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_other_files_are_refused_with_what_to_do(tmp_path, text, says):
    (tmp_path / "m.json").write_bytes(text)
    with pytest.raises(InputError, match=says):
        read_memory_timeline(tmp_path / "m.json")


def test_a_real_timeline_returns_to_where_it_began():
    roots = [os.environ.get("RIDGELINE_SHARED", ""), *(str(p / "shared") for p in Path(__file__).resolve().parents)]
    found = [Path(root) / "traces/hta/memory_timeline.raw.gz" for root in roots if root]
    path = next((path for path in found if path.exists()), None)
    if path is None:
        pytest.skip("shared traces are not here")
    timeline = read_memory_timeline(path)
    assert timeline.at_peak()[0][0] == "activation"
    assert timeline.total_bytes().max() == 3_082_832_104
    assert min(column.min() for column in timeline.by_category.values()) >= 0
