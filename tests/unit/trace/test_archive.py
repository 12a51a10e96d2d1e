"""A trace is kept and found again by its contents, and what was damaged meanwhile is read anew."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from ridgeline.errors import InputError
from ridgeline.trace import cache, load, read, save, totals
from ridgeline.trace.table import COLUMNS

from . import dialects


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "MIN_BYTES", 0)
    return tmp_path / "cache" / "traces"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps(dialects.modern()))
    return path


def _equal(a, b):
    assert a.words == b.words and a.title == b.title and a.notes == b.notes and a.origin_ns == b.origin_ns
    for name in COLUMNS:
        assert np.array_equal(getattr(a, name), getattr(b, name)), name
    assert a.extra.keys() == b.extra.keys() and totals(a) == totals(b)


def test_a_saved_trace_opens_as_it_was(tmp_path, file):
    trace = read(file)
    again = load(save(trace, tmp_path / "t.trace"))
    _equal(trace, again)
    _equal(trace, read(tmp_path / "t.trace"))
    assert again.extra["grid"].shape == trace.extra["grid"].shape


def test_the_second_reading_comes_from_the_cache(kept, file, monkeypatch):
    first = read(file)
    assert len(list(kept.glob("*.trace"))) == 1
    monkeypatch.setattr(sys.modules["ridgeline.trace.read"], "read_kineto", lambda *a, **k: pytest.fail("read again"))
    _equal(first, read(file))


def test_new_contents_are_read_anew(kept, file):
    read(file)
    file.write_text(json.dumps(dialects.gpu_only(dialects.modern())))
    assert len(read(file)) == 4 and len(list(kept.glob("*.trace"))) == 2


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_a_damaged_cache_is_read_over(kept, file, damage):
    first = read(file)
    entry = next(kept.glob("*.trace"))
    data = entry.read_bytes()
    entry.write_bytes({"cut": data[: len(data) // 2], "flip": b"x" + data[1:], "empty": b""}[damage])
    _equal(first, read(file))


def test_a_damaged_file_of_ours_is_refused(tmp_path, file):
    path = save(read(file), tmp_path / "t.trace")
    data = path.read_bytes()
    path.write_bytes(data[:-200])
    with pytest.raises(InputError, match="damaged"):
        load(path)
    path.write_bytes(data.replace(b'"int32"', b'"objec"', 1))
    with pytest.raises(InputError, match="damaged"):
        load(path)


def test_the_cache_can_be_turned_off_and_stays_small(kept, file, monkeypatch):
    monkeypatch.setattr(cache, "MAX_BYTES", 0)
    read(file)
    assert not list(kept.glob("*.trace"))
    monkeypatch.setenv("RIDGELINE_CACHE", "off")
    assert len(read(file)) == 16


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, file, monkeypatch):
    monkeypatch.setattr(cache, "MIN_BYTES", 0)
    (tmp_path / "blocked").write_text("a file, not a folder")
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "blocked"))
    assert len(read(file)) == 16


def test_spans_that_enclose_one_another_are_refused(tmp_path, file):
    trace = read(file)
    child = int(np.flatnonzero(trace.parent >= 0)[0])
    parent = trace.parent.copy()
    parent[parent[child]] = child
    path = save(trace.with_columns(parent=parent), tmp_path / "t.trace")
    with pytest.raises(InputError, match="enclose one another"):
        load(path)
