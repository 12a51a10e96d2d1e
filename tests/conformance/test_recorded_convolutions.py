"""Convolutions in groups as they were raced on the device: right, faster than cuDNN's, by the tile that is taken."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from ridgeline.kernels.grouped_conv.config import bundled, tiles

FILE = Path(__file__).resolve().parents[2] / "data" / "recordings" / "h200" / "grouped_convolutions.json.gz"
ROWS: list[dict[str, Any]] = json.loads(gzip.decompress(FILE.read_bytes()))["rows"]


def _by(name: str) -> dict[tuple[Any, ...], dict[str, dict[str, Any]]]:
    found: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = defaultdict(dict)
    for row in ROWS:
        if name in row:
            found[tuple(row[name])][row["way"]] = row
    return found


def test_our_kernel_was_as_right_as_the_librarys_and_faster() -> None:
    assert len(_by("shape")) == 9
    for (_, channels, _, groups, _), ways in _by("shape").items():
        size = channels // groups
        ours = [ways[repr(tile)] for tile in tiles(size * bundled(groups, size, size))]
        assert all(row["apart"] <= ways["library"]["apart"] for row in ours)
        assert min(row["s"] for row in ours) < 0.9 * ways["library"]["s"]


def test_the_tiles_that_are_tried_hold_one_near_the_fastest() -> None:
    for (_, channels, _, groups, _), ways in _by("shape").items():
        size = channels // groups
        tried = tiles(size * bundled(groups, size, size))
        best = min(row["s"] for way, row in ways.items() if way.startswith("Tile") and "s" in row)
        assert min(ways[repr(tile)]["s"] for tile in tried) <= 1.05 * best
        assert ways[repr(tried[0])]["s"] <= 1.1 * best, "without a race the first is taken"


def test_first_convolutions_by_our_kernel_beat_both_others() -> None:
    assert len(_by("stem")) == 4
    for ways in _by("stem").values():
        assert ways["squares, one kernel"]["s"] < 0.6 * min(ways[way]["s"] for way in ("library", "squares"))
        assert ways["squares, one kernel"]["apart"] <= 1.01 * ways["library"]["apart"]
