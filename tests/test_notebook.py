"""The tour runs cell by cell, and what its cells end with shows itself as a table."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import ridgeline as rl

NOTEBOOK = Path(__file__).resolve().parent.parent / "examples" / "tour.ipynb"


def test_the_tour_runs() -> None:
    namespace: dict[str, Any] = {}
    shown = []
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, NOTEBOOK.name, "exec"), namespace)
        if isinstance(last, ast.Expr):
            shown.append(eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), namespace))  # noqa: S307
    tables = [value._repr_html_() for value in shown if hasattr(value, "_repr_html_")]
    assert len(tables) == 3 and all("<table>" in table for table in tables)


def test_a_result_says_itself_in_a_line() -> None:
    found = rl.predict("bert-large", on="h200", batch=8)
    assert repr(found).startswith("<Prediction: bert-large on h200, eager: ") and len(repr(found)) < 120
    assert json.loads(found.to_json())["expected_s"] == found.expected_s
    assert found.trace().title.endswith("predicted")
    assert len(found.records()) == len(found.rows())


def test_names_are_escaped_in_a_notebook() -> None:
    from dataclasses import replace

    graph = replace(rl.build("bert-large", batch=1, seq=128), name="<script>alert(1)</script>")
    assert "<script>" not in rl.predict(graph, on="h200")._repr_html_()
