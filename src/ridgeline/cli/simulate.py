"""``ridgeline simulate``: one training step of a model under a plan on a cluster, shown and written."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ridgeline.api import simulate
from ridgeline.cli.keep import keep
from ridgeline.cli.source import dims_of, graph_of, is_model_file
from ridgeline.errors import InputError, UnitError
from ridgeline.graph import Graph
from ridgeline.sim.campaign import campaign
from ridgeline.sim.step import Trouble
from ridgeline.units import parse_quantity


@dataclass(frozen=True, slots=True)
class Wish:
    """Everything that was asked for on the command line."""

    model: str
    on: str
    choices: Mapping[str, Any]
    seq: int | None
    stack: str
    tokens: str | None
    straggler: float
    slow_link: float
    at_stage: int
    json: bool
    html: Path | None
    trace: Path | None
    dims: tuple[str, ...] = ()


def simulate_and_show(wish: Wish) -> None:
    """Print JSON or tables, and write the files that were asked for."""
    step = simulate(_model(wish), wish.on, stack=wish.stack, seq=wish.seq, trouble=_trouble(wish), **wish.choices)
    run = campaign(step, tokens_of(wish.tokens)) if wish.tokens else None
    if wish.json:
        from ridgeline.cli.draw import print_json

        print_json({**step.to_dict(), "run": run.to_dict() if run else None})
    else:
        from ridgeline.cli.step_view import show_step

        show_step(step, run)
    how = {**asdict(step.plan), "seq": wish.seq, "stack": step.stack.name}
    keep("simulate", wish.model, lambda: {**step.to_dict(), "run": run.to_dict() if run else None}, settings=how,
         device=step.cluster.name, quiet=wish.json)  # fmt: skip
    if wish.html:
        from ridgeline.web.step import write_step

        print(f"report: {write_step(step, wish.html, run)}", file=sys.stderr)
    if wish.trace:
        from ridgeline.sim.timeline import timeline_of
        from ridgeline.trace import write_chrome

        made = timeline_of(step)
        path = write_chrome(made, wish.trace)
        print(f"trace: {path}, open it at https://ui.perfetto.dev", file=sys.stderr)
        for note in made.notes:
            print(f"trace: {note}", file=sys.stderr)


def _model(wish: Wish) -> Graph | str:
    """A name of the zoo as it is; files and scripts are read and captured for training."""
    if is_model_file(wish.model):
        sizes = {"dims": dims_of(wish.dims), "batch": wish.choices.get("micro_batch", 1)}
        return graph_of(wish.model, {"mode": "train", **sizes}, ())
    if ":" in wish.model or wish.model.endswith((".json", ".json.gz")):
        return graph_of(wish.model, {"mode": "train"} if ":" in wish.model else {}, ())
    return wish.model


def _trouble(wish: Wish) -> Trouble | None:
    for name, value in (("--straggler", wish.straggler), ("--slow-link", wish.slow_link)):
        if value < 1.0:
            raise InputError(f"{name} {value:g} would be faster than the others: give 1 or more")
    return Trouble(wish.at_stage, wish.straggler, wish.slow_link)


def tokens_of(text: str) -> float:
    """``15T`` → 1.5e13."""
    try:
        found = parse_quantity(text.replace("B", "G") if text.upper().endswith("B") else text)
    except UnitError:
        raise InputError(f"cannot read {text!r} as a number of tokens: write 15T or 300B") from None
    if found <= 0:
        raise InputError(f"{text!r} is no number of tokens")
    return found
