"""Validations are kept once, in order, and compared row by row."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.errors import InputError
from ridgeline.store.validations import append, changes, last, run_of, runs


def test_a_run_is_kept_only_when_something_changed(tmp_path: Path) -> None:
    first = run_of("a.csv", "1", {"x": (1.0, 1.1), "y": (2.0, 2.0)})
    assert append(first, tmp_path)
    assert not append(run_of("a.csv", "1", {"y": (2.0, 2.0), "x": (1.0, 1.1)}), tmp_path)
    assert append(run_of("a.csv", "1", {"x": (1.0, 1.0), "y": (2.0, 3.0)}), tmp_path)
    assert len(runs("a.csv", tmp_path)) == 2 and runs("b.csv", tmp_path) == []
    newest = last("a.csv", tmp_path)
    assert newest is not None and newest.rows["y"] == (2.0, 3.0)


def test_changes_say_what_got_better_and_worse() -> None:
    before = run_of("a", "1", {"x": (1.0, 1.2), "y": (1.0, 1.0), "same": (1.0, 1.5), "gone": (1.0, 1.0)})
    after = run_of("a", "2", {"x": (1.0, 1.1), "y": (1.0, 0.5), "same": (1.0, 1.5), "new": (1.0, 9.0)})
    moved = changes(before, after)
    assert [(change.key, change.better) for change in moved] == [("y", False), ("x", True)]
    assert moved[1].before == pytest.approx(0.2) and moved[1].after == pytest.approx(0.1)


def test_a_broken_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv.jsonl").write_text('{"name": "a.csv"}\n')
    with pytest.raises(InputError, match=r"a\.csv\.jsonl, line 1"):
        last("a.csv", tmp_path)
