"""``ridgeline plan``: search the parallel plans of a model on a cluster; the best few, why they win, what matters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ridgeline.api import plans
from ridgeline.cli import draw
from ridgeline.cli.keep import keep
from ridgeline.cli.source import dims_of, is_model_file
from ridgeline.sim.search import Search, Space
from ridgeline.units import show_bytes, show_seconds


@dataclass(frozen=True, slots=True)
class Wish:
    """Everything that was asked for on the command line."""

    model: str
    on: str
    global_batch: int
    seq: int | None
    precision: str
    stack: str
    space: Mapping[str, tuple[Any, ...]]
    top: int
    json: bool
    html: Path | None
    dims: tuple[str, ...] = ()


def plan_and_show(wish: Wish) -> None:
    """Search with progress on stderr, then print JSON or tables."""
    model: Any = wish.model
    if is_model_file(wish.model):
        from ridgeline.capture.importers import captured, load

        loaded, dims = load(wish.model), dims_of(wish.dims)
        model = lambda batch: captured(loaded, {"mode": "train", "batch": batch, "dims": dims})
    with _progress(not wish.json) as progress:
        found = plans(model, wish.on, global_batch=wish.global_batch, seq=wish.seq, precision=wish.precision,
                      stack=wish.stack, space=Space(**{k: v for k, v in wish.space.items() if v}), top=wish.top,
                      progress=progress)  # fmt: skip
    if wish.json:
        draw.print_json(found.to_dict())
    else:
        show_search(found, wish)
    keep("plan", wish.model, found.to_dict, device=wish.on, quiet=wish.json,
         settings={"global_batch": wish.global_batch, "seq": wish.seq, "precision": wish.precision})  # fmt: skip
    if wish.html:
        from ridgeline.web.step import write_search

        print(f"report: {write_search(found, wish.html)}", file=sys.stderr)


@contextmanager
def _progress(wanted: bool) -> Iterator[Callable[[int, int], None] | None]:
    if not wanted or not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("searching plans"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("search", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def show_search(found: Search, wish: Wish) -> None:
    """The best plans, why the first wins, and what each of its choices is worth."""
    out = draw.console()
    best = found.best[0]
    outcomes = ", ".join(f"{num:,} {what}" for what, num in found.outcomes.items())
    out.print(Text.assemble((f"{best.model} ", "bold"), ("on ", draw.DIM), (f"{best.cluster.name}", "bold"),
                            (f": {found.num_candidates:,} legal plans, {outcomes}", draw.DIM)))  # fmt: skip
    out.print()
    rate = "samples/s/device" if found.best[0].unit == "sample" else "tok/s/device"
    made = draw.table("Best plans", ("plan", "left"), ("step", "right"), ("MFU", "right"), (rate, "right"),
                      ("memory", "right"), ("exposed", "right"), ("bubble", "right"), ("$", "right"))  # fmt: skip
    for step in found.best:
        made.add_row(step.plan.words(), show_seconds(step.step_s), draw.percent(step.mfu_frac),
                     f"{step.tokens_per_s_per_device:,.0f}", show_bytes(step.peak_bytes),
                     draw.percent(step.exposed_s / step.step_s), draw.percent(step.bubble_frac),
                     draw.money(step.usd))  # fmt: skip
    made.columns[0].no_wrap = False
    out.print(made)
    out.print()
    out.print(_why(found))
    out.print()
    out.print(_sensitivity_table(found))


def _why(found: Search) -> Text:
    """One sentence: what the winner spends least on, compared with the runners-up that differ."""
    best = found.best[0]
    parts = sorted(((s, n) for n, s in best.parts.items() if n != "compute"), reverse=True)
    largest = ", ".join(f"{name} {draw.percent(seconds / best.step_s)}" for seconds, name in parts[:3] if seconds > 0)
    low, high = (show_seconds(s) for s in best.interval_s)
    return Text(f"The first spends {draw.percent(best.parts['compute'] / best.step_s)} of its step computing; "
                f"beside that {largest or 'nothing'}. 90 % interval {low} … {high}; plans closer to each other than "
                "that differ less than the model can tell.", style=draw.DIM)  # fmt: skip


def _sensitivity_table(found: Search) -> Table:
    made = draw.table("What each choice of the first is worth", ("change", "left"), ("step", "right"), ("", "right"),
                      ("because", "left"))  # fmt: skip
    best = found.best[0]
    for one in found.sensitivity:
        change = f"{one.choice} {getattr(best.plan, one.choice)} → {one.value}"
        if one.step_s is None:
            made.add_row(change, "–", "", Text(one.why, style=draw.DIM))
            continue
        ratio = one.step_s / best.step_s - 1.0
        style = "red" if ratio > 0.02 else "green" if ratio < -0.005 else draw.DIM
        made.add_row(change, show_seconds(one.step_s), Text(f"{100 * ratio:+.1f}%", style=style), one.why)
    made.columns[-1].no_wrap = False
    return made
