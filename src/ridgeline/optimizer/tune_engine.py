"""What a build does to the exported program: alternatives that are timed, and fewer bits within an error budget."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ridgeline.engine.file.container import to_json
from ridgeline.engine.file.contents import Contents
from ridgeline.engine.file.engine import Engine
from ridgeline.engine.file.export import Exported, named_inputs
from ridgeline.engine.file.proof import cases_like, drawn
from ridgeline.errors import EngineError
from ridgeline.optimizer.quantize.choose import Choice
from ridgeline.optimizer.quantize.draft import Draft, fold_batch_norms, timed

if TYPE_CHECKING:
    from ridgeline.optimizer.build_engine import Question

GAIN = 0.98
"""What a change has to make of the time to be kept: less than this is noise."""


def tuned(engine: Engine, exported: Exported, question: Question, notes: list[str]) -> Engine:
    """The engine after what helps it, with a receipt of what was tried."""
    contents = engine.contents
    if len(contents.programs) != 1:
        return engine
    timings, tried = dict(question.timings), list[dict[str, Any]]()
    draft = Draft(contents)
    example = list(
        named_inputs(question.model, *question.call_at(question.profiles[len(question.profiles) // 2])).values()
    )
    if num := fold_batch_norms(draft):
        before, after = (_time(engine, each, example, timings, question) for each in (contents, draft.contents()))
        kept = after <= GAIN * before
        tried.append({"change": f"{num} batch norms folded into convolutions", "before_s": before, "after_s": after,
                      "kept": kept})  # fmt: skip
        draft = draft if kept else Draft(contents)
    precision: dict[str, Any] = {}
    if question.error_budget is not None:
        precision = _narrowed(draft, exported, question, timings, notes, example)
    made = replace(draft.contents(), timings=timings)
    receipt = {**contents.receipt, "tried": tried, **({"precision": precision} if precision else {})}
    return engine.with_contents(replace(made, receipt=receipt))


def _time(
    engine: Engine, contents: Contents, inputs: Sequence[Tensor], timings: dict[str, Any], question: Question
) -> float:
    """Seconds of a call of an engine with these contents, from the table or measured."""
    digest = hashlib.sha256(to_json(contents.programs[0].to_json())).hexdigest()[:16]
    shapes = ",".join("x".join(map(str, x.shape)) for x in inputs)
    key = f"program {digest} {shapes} {engine.device.type} threads={torch.get_num_threads()}"
    if key not in timings:
        if question.error_on_miss:
            raise EngineError(f"the timing table has no {key!r}: build without --errorOnTimingCacheMiss to measure it")
        made = engine.with_contents(contents)

        def call() -> None:
            made.on_inputs(inputs)
            if made.device.type == "cuda":
                torch.cuda.synchronize(made.device)

        timings[key] = float(f"{timed(call, time.perf_counter):.3g}")
    return float(timings[key])


def _narrowed(
    draft: Draft, exported: Exported, question: Question, timings: dict[str, Any], notes: list[str],
    example: list[Tensor],
) -> dict[str, Any]:  # fmt: skip
    """Fewer bits for linear layers. Calibration inputs choose; others, at the smallest size too, are the judges."""
    weights = {**exported.weights, **{n: w for n, w in draft.weights.items() if n not in exported.weights}}
    base, device = draft.base, example[0].device if example else torch.device("cpu")
    middle = question.profiles[len(question.profiles) // 2]
    calls = [list(named_inputs(question.model, *question.sized(call, middle)).values())
             for call in question.calibration]  # fmt: skip
    smallest = list(named_inputs(question.model, *question.call_at(question.profiles[0])).values())
    cases = [
        *cases_like([example], [base], exported.weights, 12, 100),
        *cases_like([smallest], [base], exported.weights, 44, 200),
    ]
    inputs = [drawn(entries, kept, device) for entries, kept in cases]
    calibration = calls[: max(1, len(calls) // 2)] if calls else [example, *inputs[:8]]
    # The smallest calls have the longest tail, and cost the least: among the first few there are some of each size
    validation = [*calls[len(calls) // 2 :], *inputs[8:10], *inputs[12:], *inputs[10:12]]
    assert question.error_budget is not None
    choice = Choice(
        draft, weights, calibration, validation, budget=question.error_budget, objective=question.objective,
        timings=timings, error_on_miss=question.error_on_miss,
        deadline_s=question.deadline_s - 0.1 * question.budget_s if not question.timings else math.inf,
    )  # fmt: skip
    told = choice.run(question.metric, question.max_drop)
    notes += choice.notes
    return told
