from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ridgeline.errors import GraphError
from ridgeline.graph import Graph, Node, dumps, load, loads, save
from ridgeline.graph import serial as serial_module


@pytest.mark.parametrize("name", ["graph.json", "graph.json.gz"])
def test_what_is_saved_is_what_is_loaded(mlp: Graph, trained: Graph, tmp_path: Path, name: str):
    for graph in (mlp, trained):
        path = save(graph, tmp_path / name)
        again = load(path)
        assert again == graph
        assert again.content_hash == graph.content_hash
        assert [p.name for p in tmp_path.iterdir()] == [name]


def test_the_same_graph_gives_the_same_bytes(mlp: Graph, tmp_path: Path):
    first, second = save(mlp, tmp_path / "a.json.gz"), save(mlp, tmp_path / "b.json.gz")
    assert first.read_bytes() == second.read_bytes()
    assert dumps(mlp) == dumps(loads(dumps(mlp)))


def test_tuples_stay_tuples_and_meta_may_nest(mlp: Graph):
    graph = replace(mlp, meta={"sizes": {"batch": 8}, "dims": (1, [2, (3,)]), "note": None, "rate": 0.5, "on": True})
    assert loads(dumps(graph)).meta == graph.meta


def test_attributes_json_cannot_hold_are_refused(mlp: Graph):
    with pytest.raises(GraphError, match="meta 'x' is a float64"):
        dumps(replace(mlp, meta={"x": np.float64(1)}))
    with pytest.raises(GraphError, match="meta 'x' is nan"):
        dumps(replace(mlp, meta={"x": float("nan")}))
    with pytest.raises(GraphError, match="attribute 'dims' is a set"):
        dumps(replace(mlp, items=(*mlp.items[:3], replace(mlp.items[3], attrs={"fn": "sum", "dims": {0}}))))


def test_a_graph_that_is_not_well_formed_is_not_saved(mlp: Graph, tmp_path: Path):
    with pytest.raises(GraphError, match="not well formed"):
        save(replace(mlp, items=(Node("nothing", (), ()),)), tmp_path / "g.json")
    assert not list(tmp_path.iterdir())


def test_missing_files_and_folders_are_named(mlp: Graph, tmp_path: Path):
    with pytest.raises(GraphError, match=r"cannot read .*nowhere.json: No such file"):
        load(tmp_path / "nowhere.json")
    with pytest.raises(GraphError, match=r"cannot write .*: No such file"):
        save(mlp, tmp_path / "nowhere" / "g.json")


def test_truncated_files_say_so(mlp: Graph, tmp_path: Path):
    whole = dumps(mlp)
    (tmp_path / "cut.json").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(GraphError, match=r"cut.json is not JSON .*cut short"):
        load(tmp_path / "cut.json")
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(whole)[:-20])
    with pytest.raises(GraphError, match="not a whole gzip file"):
        load(tmp_path / "cut.json.gz")


def test_a_small_file_that_unpacks_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serial_module, "MAX_BYTES", 1000)
    (tmp_path / "bomb.json.gz").write_bytes(gzip.compress(b" " * 100_000))
    with pytest.raises(GraphError, match="more than 1,000 bytes"):
        load(tmp_path / "bomb.json.gz")


def _edited(graph: Graph, edit: Callable[[dict[str, Any]], object]) -> bytes:
    document = json.loads(dumps(graph))
    edit(document)
    return json.dumps(document).encode()


@pytest.mark.parametrize(("edit", "says"), [
    (lambda d: d.update(version=2), "is version 2 of the graph format and this Ridgeline reads 1"),
    (lambda d: d.update(format="other"), "not a saved graph"),
    (lambda d: d.pop("values"), "the file lacks values"),
    (lambda d: d.update(run="rm"), "unknown 'run'"),
    (lambda d: d["values"][0].__setitem__(0, 99), r"values\[0\] type must be below"),
    (lambda d: d["values"][0].__setitem__(1, "weight"), r"values\[0\] kind must be one of param"),
    (lambda d: d["values"][0].__setitem__(2, -1), r"values\[0\] alias must be a whole number"),
    (lambda d: d["values"][2].__setitem__(2, 2), "circle"),
    (lambda d: d["types"][0].__setitem__(0, "bf17"), "unknown dtype 'bf17'; did you mean 'bf16'"),
    (lambda d: d["types"][0].__setitem__(1, [1.5]), "shape"),
    (lambda d: d["types"][0].__setitem__(2, "diagonal"), "layout must be one of channels_last"),
    (lambda d: d["items"][0].update(op="matmull"), "unknown op; did you mean 'matmul'"),
    (lambda d: d["items"][0].update({"in": [True]}), "whole number"),
    (lambda d: d["items"][0].update(attrs={"b": {"exec": 1}}), "must be a plain value"),
    (lambda d: d["items"][0].update(phase="sideways"), "phase must be one of forward"),
    (lambda d: d["items"].append([]), "must be a node or a block"),
    (lambda d: d["items"][1].update(repeat=10**30), "whole number"),
    (lambda d: d["items"][1].update(carries=[[1, 2]]), "list of 3"),
])  # fmt: skip
def test_hostile_or_damaged_content_is_refused_with_its_place(mlp: Graph, edit: Callable[..., object], says: str):
    with pytest.raises(GraphError, match=says):
        loads(_edited(mlp, edit))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"9" * 10_000,
        b'{"format": NaN}',
        b"\x00" * 50,
    ],
)
def test_what_is_no_graph_at_all_is_refused(content: bytes):
    with pytest.raises(GraphError):
        loads(content)
