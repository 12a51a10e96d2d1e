"""``ridgeline optimize``: a model that a script makes, faster, with its receipt on the screen or as a page."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from ridgeline.api import optimize
from ridgeline.cli import draw
from ridgeline.cli.keep import keep
from ridgeline.cli.source import dims_of, made_by
from ridgeline.errors import InputError, MissingExtra, OptimizeError
from ridgeline.units import show_bytes, show_seconds

STYLES = {"winner": "bold green", "beaten": "cyan", "wrong": "bold red", "failed": "red", "too large": "magenta",
          "skipped": "dim", "slower": "yellow", "equal": ""}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Asked:
    """Everything that was asked for on the command line."""

    source: str
    mode: str
    budget_s: float
    memory_limit: str | None
    error_budget: float | None
    use_cache: bool
    json: bool
    html: Path | None
    dims: tuple[str, ...] = ()


def optimize_and_show(asked: Asked) -> None:
    """Search and print the receipt."""
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("PyTorch", "torch", "optimize")
    from ridgeline.engine.drop_in import state_of

    if asked.html is not None and not asked.html.resolve().parent.is_dir():
        raise InputError(f"there is no folder {asked.html.resolve().parent} to write the receipt to: make it first")
    model, args, kwargs = made_by(asked.source, dims_of(asked.dims))
    out = draw.console()
    say = (lambda text: None) if asked.json else (lambda text: out.print(Text(f"· {text}", style=draw.DIM)))
    # A freshly made module is in training mode; what was asked for says which is meant
    if asked.mode == "infer":
        model.eval()
    elif asked.mode == "train":
        model.train()
    options = {name: getattr(asked, name) for name in ("mode", "budget_s", "memory_limit", "error_budget", "use_cache")}
    try:
        fast = optimize(model, args, kwargs, **options, say=say)
    except OptimizeError as error:
        raise InputError(f"{asked.source}: {error}; the function returns (model, args, kwargs)") from error
    receipt = state_of(fast).receipt.to_dict()
    keep("optimize", asked.source, lambda: receipt, measured=True, settings={"mode": asked.mode},
         device=str(receipt.get("device", "")))  # fmt: skip
    if asked.html:
        from ridgeline.web.optimize import write_receipt

        write_receipt(receipt, asked.html)
    if asked.json:
        draw.print_json(receipt)
    else:
        _show(receipt, asked.html)


def _show(receipt: Mapping[str, Any], html: Path | None) -> None:
    out = draw.console()
    head = f"{receipt['model']}, {receipt['mode']} on {receipt['device']}"
    gain = f"{show_seconds(receipt['eager_s'])} → {show_seconds(receipt['final_s'])}, {receipt['speedup']:.2f}× eager"
    out.print(Text(f"{head}: {gain}", style="bold"))
    out.print(f"kept: {receipt['winner']} ({'; '.join(receipt['changes'])})")
    columns = ("candidate", "time", "× eager", "memory", "error", "built in", "status", "why")
    sides = ("left", "right", "right", "right", "right", "right", "left", "left")
    # columns of a terminal below which memory, error and build times are left to the page and to JSON
    kept = [i for i, name in enumerate(columns) if out.width >= 110 or name not in ("memory", "error", "built in")]
    made = draw.table("Everything that was tried", *((columns[i], sides[i]) for i in kept))
    rows = [[cells[i] for i in kept] for cells in map(_cells, receipt["entries"])]
    for at, column in enumerate(made.columns[:-1]):
        column.min_width = max([len(columns[kept[at]]), *(len(row[at]) for row in rows)])
    made.columns[-1].no_wrap, made.columns[-1].overflow = False, "fold"  # reasons wrap, numbers are never cut
    for row in rows:
        made.add_row(*row)
    out.print(made)
    for line in receipt.get("legend", ()):
        out.print(Text(f"  {line}", style=draw.DIM))
    if receipt.get("parts"):
        out.print(_parts(receipt))
    if receipt.get("narrowed"):
        out.print(_narrowed(receipt))
    for title, key in (("Why torch.compile is where it is", "explanations"), ("What is left", "remaining")):
        if receipt[key]:
            out.print(Text(title, style="bold"))
            for line in receipt[key]:
                out.print(Text(f"  {line}"))
    for note in receipt["notes"]:
        out.print(Text(f"· {note}", style=draw.DIM))
    where = f"; page: {html}" if html else ""
    if receipt.get("cached"):
        searched = receipt.get("searched_at") or "an unknown date"
        out.print(
            Text(f"from the cache: searched on {searched}; --no-cache searches again{where}", style="bold yellow")
        )
        return
    out.print(Text(f"searched {receipt['spent_s']:.1f} s of {receipt['budget_s']:.0f} s{where}", style=draw.DIM))


def _parts(receipt: Mapping[str, Any]) -> Table:
    made = draw.table("Time by part of the model", ("part", "left"), ("eager", "right"), ("result", "right"),
                      ("floor", "right"), ("told by", "left"), ("what would close it", "left"))  # fmt: skip
    made.columns[-1].no_wrap, made.columns[-1].overflow = False, "fold"
    for part in receipt["parts"]:
        times = ("" if part[key] is None else show_seconds(part[key]) for key in ("eager_s", "final_s", "floor_s"))
        made.add_row(part["name"], *times, part["basis"], part["cure"])
    return made


def _narrowed(receipt: Mapping[str, Any]) -> Table:
    title = f"Computed in fewer bits, within an error_budget of {receipt['error_budget']:g}"
    made = draw.table(title, ("layer", "left"), ("format", "left"), ("error at the layer", "right"),
                      ("at the outputs", "right"), ("gain", "right"))  # fmt: skip
    for layer in receipt["narrowed"]:
        errors = (f"{layer[key]:.1e}" for key in ("local_frac", "error_frac"))
        made.add_row(layer["name"], layer["format"], *errors, show_seconds(layer["gain_s"]))
    return made


def _cells(entry: Mapping[str, Any]) -> list[str | Text]:
    def shown(key: str, show: Any) -> str:
        return "" if entry[key] is None else show(entry[key])

    error = "" if not entry["verdict"] else f"{entry['verdict']['rms_frac'] or 0.0:.1e}"
    return [
        entry["name"], shown("measured_s", show_seconds), shown("speedup", "{:.2f}".format),
        shown("peak_bytes", show_bytes), error, shown("build_s", "{:.1f} s".format),
        Text(entry["status"], style=STYLES.get(entry["status"], "")), entry["reason"],
    ]  # fmt: skip


def read_receipt(path: Path) -> Mapping[str, Any]:
    """A receipt written with ``--json``, to draw it elsewhere than where it was measured."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path} as a receipt: {error}") from error
    if not isinstance(found, dict) or "entries" not in found:
        raise InputError(f"{path} is no receipt: write one with `ridgeline optimize … --json > {path}`")
    return found


def draw_receipt(path: Path, html: Path | None) -> None:
    """Show a receipt that was measured elsewhere."""
    receipt = read_receipt(path)
    if html:
        from ridgeline.web.optimize import write_receipt

        write_receipt(receipt, html)
    _show(receipt, html)
