"""Memory snapshots: the curve is walked back from what is known, and the peak is named by its lines."""

from __future__ import annotations

import gzip
import pickle

import pytest

from ridgeline.errors import InputError
from ridgeline.trace import read
from ridgeline.trace.memory import peaks
from ridgeline.trace.snapshot import BEFORE, NO_STACK, is_snapshot, read_snapshot

FORWARD = [
    {"filename": "torch/nn/functional.py", "line": 9, "name": "linear"},
    {"filename": "model.py", "line": 12, "name": "forward"},
    {"filename": "train.py", "line": 40, "name": "main"},
]
OPTIMIZER = [
    {"filename": "/x/torch/optim/adamw.py", "line": 3, "name": "_init_group"},
    {"filename": "train.py", "line": 44, "name": "main"},
]


def entry(action, addr, size, frames=(), at=0):
    return {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": at, "frames": list(frames)}


def block(address, size, state="active_allocated", frames=(), requested=None):
    return {"address": address, "size": size, "requested_size": requested or size, "state": state, "frames": frames}


@pytest.fixture
def file(tmp_path):
    """100 bytes held throughout, 50 freed early, an activation of 400 made and freed, optimizer state of 200 kept."""
    segments = [
        {"device": 0, "address": 0, "total_size": 2048, "stream": 0, "blocks": [
            block(0, 128, requested=100), block(128, 200, frames=OPTIMIZER), block(328, 1720, "inactive")]},
        {"device": 0, "address": 4096, "total_size": 1024, "stream": 0, "blocks": [block(4096, 1024, "inactive")]},
    ]  # fmt: skip
    trace = [
        entry("free_requested", 900, 50, at=10),
        entry("free_completed", 900, 50, at=10),
        entry("segment_alloc", 4096, 1024, FORWARD, at=15),
        entry("alloc", 4096, 400, FORWARD, at=20),
        entry("alloc", 512, 30, at=25),
        entry("free_requested", 4096, 400, at=30),
        entry("free_requested", 512, 30, at=31),
        entry("alloc", 128, 200, OPTIMIZER, at=40),
    ]
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": [trace, []], "allocator_settings": {}}))
    return path


def test_the_curve_ends_at_what_the_segments_say(file):
    memory = read_snapshot(file).devices[0]
    assert memory.curve.allocated_bytes.tolist() == [150, 100, 100, 100, 500, 530, 130, 100, 300]
    assert memory.curve.reserved_bytes.tolist() == [2048, 2048, 2048, 3072, 3072, 3072, 3072, 3072, 3072]
    assert memory.curve.at_s[-1] == pytest.approx(30e-6)


def test_the_peak_is_held_by_the_lines_that_allocated_it(file):
    rows = [(row.where, row.category, row.num_bytes) for row in read_snapshot(file).devices[0].at_peak()]
    assert rows == [
        ("model.py:12 forward", "activation", 400),
        (NO_STACK, "backward or unknown", 130),
    ]
    assert sum(row[2] for row in rows) == 530


def test_the_end_is_held_by_what_is_still_there(file):
    rows = [(row.where, row.category, row.num_bytes) for row in read_snapshot(file).devices[0].at_end()]
    assert rows[0] == ("train.py:44 main", "optimizer state", 200)


def test_memory_freed_in_the_recording_but_made_before_it_is_named_so(tmp_path):
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[entry("free_requested", 1, 64, at=3)]]}))
    rows = read_snapshot(path).devices[0].at_peak()
    assert [(row.where, row.num_bytes) for row in rows] == [(BEFORE, 64)]


def test_a_packed_snapshot_reads_the_same_and_becomes_counters(file, tmp_path):
    packed = tmp_path / "s.pickle.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    trace = read(packed, cache=False)
    assert trace.counters["memory_bytes"].value.max() == 530
    assert trace.counters["reserved_bytes"].value[-1] == 3072
    assert is_snapshot(file.read_bytes()[:64])


def test_whoever_holds_the_peak_is_in_the_trace(file):
    (peak,) = peaks(read(file, cache=False))
    assert (peak.allocated_bytes, peak.reserved_bytes) == (530, 3072)
    assert [(h.phase, h.source, h.num_bytes) for h in peak.holders][0] == ("activation", "model.py:12 forward", 400)
    assert dict(peak.categories)["activation"] == 400 and sum(num for _, num in peak.categories) == 530


@pytest.mark.parametrize(
    "value", [{}, [], {"segments": 3}, {"segments": [1]}, {"segments": [{"device": "a"}]},
              {"segments": [], "device_traces": [[3]]}, {"segments": [], "device_traces": [[{"size": "x"}]]}],
)  # fmt: skip
def test_a_pickle_that_is_no_snapshot_says_so(tmp_path, value):
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(value))
    with pytest.raises(InputError, match="no memory snapshot"):
        read_snapshot(path)


def test_shared_rows_cannot_make_it_run_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr("ridgeline.trace.snapshot.MAX_ROWS", 10_000)
    path = tmp_path / "s.pickle"
    blocks = [block(0, 1)] * 1000
    path.write_bytes(pickle.dumps({"segments": [{"device": 0, "total_size": 1, "blocks": blocks}] * 1000}))
    with pytest.raises(InputError, match="more than 10,000 rows"):
        read_snapshot(path)
