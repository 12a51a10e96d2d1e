"""A simulated training step, or a search for plans, as one HTML file with its data, style and script inside."""

from __future__ import annotations

import html
import os
from pathlib import Path
from typing import Any

from ridgeline.errors import InputError
from ridgeline.sim.campaign import Campaign
from ridgeline.sim.search import Search
from ridgeline.sim.step import PARTS, Step
from ridgeline.web.report import PAGE, POLICY, asset, embedded

MAX_PASSES = 24_000
"""Passes drawn in the timeline; a longer steady stretch is shown by its rounds."""


def write_step(step: Step, path: str | os.PathLike[str], run: Campaign | None = None) -> Path:
    """Write the report of one step."""
    return _write({"step": step_data(step), "run": run.to_dict() if run else None, "search": None},
                  f"{step.model} on {step.cluster.name}", path)  # fmt: skip


def write_search(found: Search, path: str | os.PathLike[str]) -> Path:
    """Write the report of a search: the winner's step, the other plans, and the frontier."""
    best = found.best[0]
    return _write({"step": step_data(best), "run": None, "search": search_data(found)},
                  f"plans for {best.model} on {best.cluster.name}", path)  # fmt: skip


def _write(data: dict[str, Any], title: str, path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    text = PAGE.format(policy=html.escape(POLICY), title=html.escape(f"{title} · Ridgeline"), style=asset("report.css"),
                       body=asset("step.html"), data=embedded(data), script=asset("step.js"))  # fmt: skip
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}; choose a folder you may write to") from error
    return target


def step_data(step: Step) -> dict[str, Any]:
    """Everything the page shows of a step, in SI units."""
    return {
        **step.to_dict(),
        "title": step.plan.words(),
        "part_names": list(PARTS),
        "stack_title": step.stack.title,
        "stack_basis": str(step.stack.basis),
        "lanes": _lanes(step),
        "skipped_s": step.timeline.skipped_s,
        "tail_s": list(step.tail_s),
        "price_usd_per_hour": step.cluster.device.price_usd_per_hour,
        "num_micro_batches": step.plan.num_micro_batches,
    }


def _lanes(step: Step) -> list[dict[str, Any]]:
    """Passes of each stage as flat lists, with the live bytes after each."""
    found = []
    budget = MAX_PASSES // max(1, step.plan.pp)
    for stage, done in enumerate(step.timeline.done):
        live = step.footprints[stage].over_time
        shown = done[:budget]
        found.append({
            "start": [_short(d.start_s) for d in shown], "end": [_short(d.end_s) for d in shown],
            "kind": "".join(d.work.kind for d in shown), "micro": [d.work.micro for d in shown],
            "chunk": [d.work.chunk for d in shown], "live": [_short(b) for _, b in live[: len(shown)]],
        })  # fmt: skip
    return found


def search_data(found: Search) -> dict[str, Any]:
    return {
        "num_candidates": found.num_candidates, "outcomes": dict(found.outcomes),
        "best": [{"plan": s.plan.words(), "step_s": s.step_s, "mfu_frac": s.mfu_frac, "peak_bytes": s.peak_bytes,
                  "tokens_per_s_per_device": s.tokens_per_s_per_device, "exposed_s": s.exposed_s,
                  "bubble_frac": s.bubble_frac, "usd": s.usd} for s in found.best],
        "points": [[_short(t), _short(b)] for t, b in found.points],
        "frontier": [[t, b, words] for t, b, words in found.frontier],
        "sensitivity": [{"choice": s.choice, "from": str(getattr(found.best[0].plan, s.choice)), "to": str(s.value),
                         "step_s": s.step_s, "why": s.why} for s in found.sensitivity],
    }  # fmt: skip


def _short(value: float) -> float:
    return float(f"{value:.6g}")
