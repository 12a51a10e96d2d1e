"""``ridgeline import``: what an importer makes of a model file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.text import Text

from ridgeline.api import imported_graph
from ridgeline.capture.importers import bindings_of, load
from ridgeline.cli import draw
from ridgeline.errors import InputError
from ridgeline.units import show_bytes


def import_and_show(path: Path, check: bool, dims: Mapping[str, int], save: Path | None, json: bool) -> bool:
    """Print tables or JSON; false where ops are missing."""
    from ridgeline.capture.importers.check import compared, missing, summary

    model = load(path)
    found = summary(model)
    lacking = missing(model)
    if check and not lacking and model.import_format == "onnx":
        try:
            found["compared"] = compared(model, path, bindings_of(model, {"dims": dims}))
        except InputError as error:
            found["compared"] = {"with": None, "why": str(error)}
    if save is not None and not lacking:
        found["graph"] = str(imported_graph(model, {"dims": dims}).save(save))
    if json:
        draw.print_json(found)
    else:
        _show(found, check)
    return not lacking


def _show(found: Mapping[str, Any], check: bool) -> None:
    out = draw.console()
    out.print(
        Text.assemble(
            (_printable(found["name"]), "bold"),
            (f", {found['format']}: ", draw.DIM),
            f"{found['num_params']:,} parameters, {show_bytes(found['weight_bytes'])} of weights",
        )
    )
    for name, described in found["inputs"].items():
        out.print(Text(f"  input {_printable(name)}: {_printable(described)}"))
    out.print(Text(f"  outputs: {_printable(', '.join(found['outputs']))}"))
    lacking = [row for row in found["ops"] if not row["supported"]]
    rows = found["ops"] if check else lacking
    if rows:
        made = draw.table(
            "Ops", ("op", "left"), ("nodes", "right"), ("supported", "left"), ("why not", "left"), ("such as", "left")
        )
        for row in rows:
            made.add_row(
                _printable(row["op"]),
                f"{row['count']:,}",
                "yes" if row["supported"] else Text("no", style="bold red"),
                _printable(row["why"]),
                _printable(row["example"]),
            )
        out.print(made)
    kinds = len(found["ops"])
    if kinds:
        out.print(f"{kinds - len(lacking)} of {kinds} kinds of ops supported")
    if "graph" in found:
        out.print(Text(f"graph: {found['graph']}"))
    compared = found.get("compared")
    if compared is None:
        return
    if "outputs" not in compared:
        out.print(Text(f"results not compared: {_printable(compared['why'])}", style=draw.DIM))
        return
    for name, row in compared["outputs"].items():
        told = row.get("error") or f"differs by at most {row['max_abs']:.2g}, largest value {row['largest']:.3g}"
        out.print(Text(f"{_printable(name)}: {told} ({compared['with']})"))


def _printable(text: str) -> str:
    """Names of a file as a terminal may show them."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)
