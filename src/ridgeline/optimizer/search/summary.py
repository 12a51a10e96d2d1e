"""Makes the receipt at the end of a search, with time by part and by kind of kernel."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ridgeline.bench.environment import environment
from ridgeline.engine.example_inputs import Inputs
from ridgeline.optimizer.receipt import (
    Part,
    QuantizedLayer,
    Receipt,
    Step,
)
from ridgeline.optimizer.search.blocks import (
    regions_of,
)
from ridgeline.optimizer.search.candidate import Built
from ridgeline.optimizer.search.explanation import explanations, remaining
from ridgeline.optimizer.search.problem import described, device_name, why_failed
from ridgeline.optimizer.search.time_by_part import parts_of
from ridgeline.optimizer.search.timing import Comparison, Timed

if TYPE_CHECKING:
    from ridgeline.optimizer.search.search import Search


def regions(search: Search, stock: Built | None) -> tuple[Any, ...]:
    if search.problem.device.type != "cuda" or search.budget.left_s() < 10 * search.eager_s:
        return ()
    try:
        return regions_of(search.track, search.eager, search.best, stock)
    except Exception as error:  # a profiler that fails does not affect the result
        search.notes.append(f"no breakdown by kind of kernel: {why_failed(error)}")
        return ()
    finally:
        search.track.restore()


def parts(search: Search, eager: Timed, best: Timed) -> tuple[Part, ...]:
    """Time by part of the model, if there is time to profile a call of each."""
    if search.budget.left_s() < 20 * search.eager_s:
        search.notes.append("no breakdown by part of the model: no time was left to profile it")
        return ()
    floors = search.forecast.floors if search.forecast else None
    try:
        return parts_of(search.track, search.eager, search.best, (eager.median_s, best.median_s), floors)
    except Exception as error:  # a profiler that fails does not affect the result
        search.notes.append(f"no breakdown by part of the model: {why_failed(error)}")
        return ()
    finally:
        search.track.restore()


def quantized_rows(search: Search) -> tuple[QuantizedLayer, ...]:
    chosen = search.choices.get(search.best.candidate.narrow, {})
    if search.study is None or not chosen:
        return ()
    search.notes.append(search.study.summary(chosen))
    return search.study.rows(chosen)


def floor_s(search: Search, final_s: float) -> float | None:
    """The floor of the model as written; None if a rewrite needs less work than that."""
    if search.forecast is None or search.forecast.floor_s <= final_s:
        return search.forecast.floor_s if search.forecast else None
    written_ms = 1e3 * search.forecast.floor_s
    search.notes.append(f"no floor: as the model is written it is {written_ms:.3g} ms, and the result does less work")
    return None


def receipt_of(
    search: Search, eager: Timed, best: Timed, stock: Timed | None, over_eager: Comparison, over_best: float
) -> Receipt:
    problem, winner = search.problem, search.entries[search.best.candidate.name]
    least_s = floor_s(search, best.median_s)
    scale = eager.median_s / search.eager_s  # steps were measured at other times: show all relative to one eager
    between = [Step(step.name, scale * step.measured_s) for step in search.steps[1:]
               if best.median_s < scale * step.measured_s and step.name != search.best.candidate.name]  # fmt: skip
    last = [Step(search.best.candidate.name, best.median_s)] if search.best is not search.eager else []
    return Receipt(
        model=type(problem.model).__name__, mode=problem.mode, device=device_name(problem.device),
        inputs=described(problem.inputs), environment=environment(), winner=winner.name, changes=winner.changes,
        eager_s=eager.median_s, final_s=best.median_s, stock_s=stock.median_s if stock else None,
        speedup=over_eager.speedup, speedup_low=over_eager.low, speedup_high=over_eager.high, over_best=over_best,
        floor_s=least_s, eager_bytes=search.memory.eager_bytes, final_bytes=winner.peak_bytes,
        memory_limit_bytes=search.memory.limit_bytes, budget_s=problem.budget_s,
        spent_s=time.perf_counter() - search.budget.began, verdict=winner.verdict,
        entries=tuple(search.entries.values()), stages_left_out=tuple(search.skipped),
        steps=(Step("eager", eager.median_s), *between, *last),
        forecast=search.forecast.to_dict() if search.forecast else None, asked=search.asked,
        error_budget=problem.error_budget, narrowed=quantized_rows(search),
        searched_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        notes=(*search.notes, *(search._prover.notes if search._prover else ())),
    )  # fmt: skip


def explained(receipt: Receipt, inputs: Inputs) -> Receipt:
    """The receipt with its explanations."""
    return replace(receipt, explanations=tuple(explanations(receipt, inputs)), remaining=tuple(remaining(receipt)))
