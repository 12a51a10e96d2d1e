"""The entry point of ``optimize``: checks arguments, looks up the cache, searches, and returns the drop-in."""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from ridgeline.bench.verdict import error_of
from ridgeline.engine.capture.capture import uncached_casts
from ridgeline.engine.compat.transformers import Sliding, full_windows, stood_in
from ridgeline.engine.deferred import Later
from ridgeline.engine.drop_in import Optimized, RunsEagerly, slide, state_of, with_receipt
from ridgeline.engine.example_inputs import Inputs, State
from ridgeline.engine.guards.check import Watch
from ridgeline.engine.replay.training import GraphedTraining
from ridgeline.engine.state import left_alone
from ridgeline.errors import NotGraphable, OptimizeError, nearest
from ridgeline.optimizer import memo as cache
from ridgeline.optimizer.backend import Report
from ridgeline.optimizer.receipt import Receipt
from ridgeline.optimizer.search.candidate import Built, Candidate, build
from ridgeline.optimizer.search.facts import DEFAULT_BUDGET_S
from ridgeline.optimizer.search.handover import clone_guards, plans_of
from ridgeline.optimizer.search.judge import Subject
from ridgeline.optimizer.search.problem import Outcome, Problem, raised_in, unchanged_outcome, why_failed
from ridgeline.optimizer.search.search import search
from ridgeline.optimizer.search.timing import Track, compare, reserved_bytes
from ridgeline.optimizer.training import optimizer_update as update
from ridgeline.units import parse_quantity, show_seconds

MOST_EAGER_RATIO = 2.0
"""A cached search is valid while eager's time is within this factor of its time then."""
PARALLEL = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")
OPTIMIZED_MODES = {"infer": "inference", "train": "train"}
_alive: WeakValueDictionary[tuple[int, str], Optimized] = WeakValueDictionary()


def optimize(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mode: str = "infer",
    loss: Callable[[Any], Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    budget_s: float = DEFAULT_BUDGET_S,
    memory_limit: int | str | None = None,
    error_budget: float | None = None,
    use_cache: bool = True,
    say: Callable[[str], None] | None = None,
) -> Optimized:
    """The model as a callable that is no slower than eager or torch.compile, with its receipt."""
    problem = _problem(model, args, kwargs, mode, loss, budget_s, memory_limit, error_budget, say)
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        what = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else f"a {type(optimizer).__name__}"
        raise OptimizeError(f"optimizer is {what}: give one of this model's parameters, as "
                            "torch.optim.AdamW(model.parameters())")  # fmt: skip
    own = set(map(id, problem.model.parameters()))
    held = [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]
    if optimizer is not None and own and not any(id(parameter) in own for parameter in held):
        raise OptimizeError("optimizer has none of the model's parameters: its steps would change another model")
    problem = replace(problem, optimizer=optimizer)
    stood = stood_in(problem.model, problem.inputs) if mode == "infer" else None
    if stood is not None:
        problem = replace(problem, inputs=Inputs(stood.args, stood.kwargs))
    made = _optimized(problem, optimizer, use_cache)
    if stood is None:
        return made
    # Stand-ins for sliding-window caches, with a note in the receipt.
    receipt: Receipt = state_of(made).receipt
    note = f"sliding windows are counted on the device; searched with {stood.told()}, the rest is captured when met"
    if state_of(made).plans and note not in receipt.notes:
        made = with_receipt(made, receipt.noted(note))
    return slide(made, Sliding(problem.model, stood))


def _optimized(problem: Problem, optimizer: torch.optim.Optimizer | None, use_cache: bool) -> Optimized:
    """The result of a new search, of one in this process, or of the disk cache."""
    budget_s, mode, loss = problem.budget_s, problem.mode, problem.loss
    key = cache.key_of(problem.model, problem.inputs, _settings(problem, optimizer)) if use_cache else ""
    began = time.perf_counter()
    given = {"mode": OPTIMIZED_MODES[mode], "optimizer": optimizer, "loss": loss}
    before = _alive.get((id(problem.model), key)) if key else None
    kept = None if before is None else state_of(before)
    known = kept is not None and kept.model is problem.model and not kept.receipt.ran_out_of_time
    if kept is not None and known and _is_enough(kept.receipt, budget_s):
        receipt = kept.receipt.from_cache(time.perf_counter() - began)
        again = Optimized(problem.model, list(kept.plans.values()), receipt=receipt, **given)
        return _stepping(problem, again, optimizer)
    outcome = _remembered(problem, key, began) if key else None
    known = isinstance(outcome, Outcome)
    if not isinstance(outcome, Outcome):
        dropped, outcome = outcome, _searched(problem)
        if dropped:
            outcome = replace(outcome, receipt=outcome.receipt.noted(dropped))
    made = Optimized(problem.model, plans_of(problem, outcome.built), receipt=outcome.receipt, **given)
    made = _stepping(problem, made, optimizer)
    for plan in state_of(made).plans.values():
        if isinstance(plan.call, Later):
            plan.call.plan = plan
        for call in (plan.call, getattr(plan.call, "call", None)):
            if isinstance(call, GraphedTraining):
                call.lend()
    if not known:
        reserved_bytes(problem.device)  # frees the memory of the search and its proofs
    if key:
        _alive[id(problem.model), key] = made
        if not known and outcome.receipt.entries and not outcome.receipt.ran_out_of_time:
            cache.save(key, outcome.built.candidate, state_of(made).receipt)
    return made


def _stepping(problem: Problem, made: Optimized, optimizer: torch.optim.Optimizer | None) -> Optimized:
    """The result with a faster update of the optimizer, if that is correct, and a note in the receipt."""
    receipt: Receipt = state_of(made).receipt
    if problem.mode != "train" or optimizer is None or not receipt.entries:
        return made
    if receipt.cached:
        update.again(made, optimizer, receipt.notes)
        return made
    # Share of the budget reserved for the proof of an optimizer's update.
    left_s = max(problem.budget_s - receipt.spent_s, 0.15 * problem.budget_s)
    notes = update.settle(made, optimizer, problem.inputs, problem.loss, receipt.eager_s, left_s)
    noted = receipt
    for note in notes:
        noted = noted.noted(note)
    return with_receipt(made, noted)


def _searched(problem: Problem) -> Outcome:
    """Search; if the search fails, return the model unchanged with the reason, unless its own call fails."""
    try:
        return search(problem)
    except Exception as error:
        if isinstance(error, OptimizeError) and not isinstance(error, NotGraphable):
            raise  # an error in the arguments
        _check_call(problem)
        return unchanged_outcome(problem, f"left as it is: {why_failed(error)}")


def _check_call(problem: Problem) -> None:
    """Call the model and the loss as the caller does, and report their errors in one line; the state is restored."""
    state, given = None, problem.inputs
    with suppress(Exception):  # the state may be what the search failed on
        state, given = State(problem.model), problem.inputs.copied()
    try:
        with left_alone(problem.model, problem.loss), torch.set_grad_enabled(problem.mode != "infer"):
            what, remedy = "the model itself", "give inputs that it takes: optimize(model, args=(…,), kwargs={…})"
            output = problem.model(*given.args, **given.kwargs)
            if problem.loss is not None:
                what, remedy = "the loss", "it is called with what the model returns"
                problem.loss(output)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        why, at = why_failed(error), raised_in(error)
        said = why if why.endswith(at) else f"{why}{at}"
        raise OptimizeError(f"{what} fails on these inputs: {said}; {remedy}") from error
    finally:
        if state is not None:
            state.restore()


def _problem(
    model: Any,
    args: Any,
    kwargs: Any,
    mode: str,
    loss: Any,
    budget_s: float,
    memory_limit: Any,
    error_budget: Any,
    say: Any,
) -> Problem:
    from ridgeline.capture.model import unwrapped

    if mode not in OPTIMIZED_MODES:
        raise OptimizeError(f"no mode {mode!r}{nearest(str(mode), OPTIMIZED_MODES)}")
    if not isinstance(model, nn.Module):
        raise OptimizeError(f"optimize takes a torch.nn.Module, not {type(model).__name__}: wrap what it does in one")
    if error_budget is not None and mode != "infer":
        raise OptimizeError("error_budget: layers are computed in fewer bits in inference only; leave it out to train")
    if error_budget is not None and (not isinstance(error_budget, (int, float)) or not 0 < error_budget < 1):
        raise OptimizeError(f"error_budget is {error_budget!r}: it is the relative root mean square error that results "
                            "may have, between 0 and 1; 0.01 is one percent")  # fmt: skip
    if not isinstance(args, (tuple, list)):
        raise OptimizeError(f"args is a tuple of positional arguments, not {type(args).__name__}: write args=(x,)")
    if not isinstance(kwargs or {}, Mapping) or not all(isinstance(name, str) for name in kwargs or ()):
        raise OptimizeError('kwargs is a dictionary of named arguments: write kwargs={"mask": mask}')
    if not isinstance(budget_s, int | float) or not budget_s > 0:
        raise OptimizeError(f"budget_s is {budget_s!r}: give the search some seconds")
    for name, given in (("loss", loss), ("say", say)):
        if given is not None and not callable(given):
            raise OptimizeError(f"{name} is a {type(given).__name__}, and is called: give a function")
    inputs = Inputs(tuple(args), dict(kwargs or {}))
    limit = _limit(memory_limit)
    given = state_of(model).model if isinstance(model, Optimized) else model
    if mode == "train":
        _check_single_process(given)
    own = unwrapped(given)
    _check_arguments(own, inputs)
    return Problem(model=own, inputs=inputs, mode=mode, device=_device(own, inputs), loss=loss,
                   budget_s=float(budget_s), memory_limit_bytes=limit, error_budget=error_budget,
                   say=say or (lambda text: None))  # fmt: skip


def _check_arguments(model: nn.Module, inputs: Inputs) -> None:
    """Check the arguments against the signature of the forward."""
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # scripted, or written in C
        return
    try:
        signature.bind(*inputs.args, **inputs.kwargs)
    except TypeError as error:
        taken = ", ".join(signature.parameters)
        given = "no inputs" if not inputs.args and not inputs.kwargs else "these inputs"
        raise OptimizeError(f"{type(model).__name__}.forward({taken}) cannot be called with {given}: {error}; give all "
                            "that it takes: optimize(model, args=(x,), kwargs={…})") from None  # fmt: skip


def _check_single_process(model: nn.Module) -> None:
    """Reject models wrapped for data parallelism or with sharded parameters."""
    for part in model.modules():
        if type(part).__name__ in PARALLEL:
            raise OptimizeError(f"{type(part).__name__} acts around every call and every backward, which a result "
                                "without it would not do: optimize the module inside (model.module), and wrap the "
                                "result")  # fmt: skip
    if any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
        raise OptimizeError("parameters are spread over processes (DTensor): optimize the model before it is sharded, "
                            "or train it as it is")  # fmt: skip


def _limit(given: Any) -> int | None:
    """The memory limit in bytes."""
    read = parse_quantity(given) if isinstance(given, str) else given
    if given is None or (isinstance(read, int | float) and read > 0):
        return None if given is None else int(read)
    raise OptimizeError(f'memory_limit is {given!r}: it is a number of bytes, or words such as "40GB"')


def _device(model: nn.Module, inputs: Inputs) -> torch.device:
    """The one device of all tensors."""
    found = {t.device for t in (*model.parameters(), *model.buffers(), *inputs.tensors())}
    if any(device.type == "meta" for device in found):
        raise OptimizeError("the model or its inputs are on the meta device and hold no values: load them first")
    large = {device for device in found if device.type != "cpu"}
    if len(large) > 1:
        named = ", ".join(sorted(map(str, large)))
        raise OptimizeError(f"the model and its inputs are on several devices ({named}): optimize one device's part")
    return large.pop() if large else torch.device("cpu")


def _settings(problem: Problem, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    return {
        "mode": problem.mode,
        "budget": cache.budget_class(problem.budget_s),
        "memory_limit_bytes": problem.memory_limit_bytes,
        "error_budget": problem.error_budget,
        "loss": cache.described(problem.loss),
        "training": problem.model.training,
        "optimizer": update.described(optimizer) if optimizer is not None else "",
        **full_windows(problem.inputs),
    }


def _remembered(problem: Problem, key: str, began: float) -> Outcome | str | None:
    """Rebuild the winner of a cached search, if it still agrees with eager and is no slower.

    If eager's time has changed much, the search is dropped, and the reason returned.
    """
    found = cache.load(key)
    if found is None or not _is_enough(found[1], problem.budget_s):
        return None
    candidate, receipt = found
    try:
        track = Track(problem.model, problem.inputs, problem.mode, problem.loss, problem.device)
        try:
            track.settle(problem.model)
            eager = Built(Candidate(name="eager"), problem.model, Report())
            eager_s = track.race({"eager": eager}, 0.3)["eager"].median_s
        finally:
            track.hand_back()
        if not receipt.eager_s / MOST_EAGER_RATIO <= eager_s <= receipt.eager_s * MOST_EAGER_RATIO:
            cache.forget(key)
            return (f"a cached search of {receipt.searched_at or 'an unknown date'} was dropped: eager takes "
                    f"{show_seconds(eager_s)} now and took {show_seconds(receipt.eager_s)} then")  # fmt: skip
        if candidate.compiles and problem.mode == "infer":
            return _deferred(problem, key, candidate, receipt, began)
        outcome = _rebuilt(problem, candidate, receipt)
    except Exception:  # a new search will report the reason
        outcome = None
    if outcome is None:
        cache.forget(key)
        return None
    return Outcome(outcome.built, outcome.receipt.from_cache(time.perf_counter() - began))


def _is_enough(receipt: Receipt, budget_s: float) -> bool:
    """Whether a cached search is valid for this budget: not if it had less time, and none for torch.compile.

    Budgets in the same range share an entry: a search of 70 s would otherwise answer for the default of 120, which
    always measures torch.compile.
    """
    return receipt.budget_s >= budget_s or not receipt.lacks_rival


def _deferred(problem: Problem, key: str, candidate: Candidate, receipt: Receipt, began: float) -> Outcome:
    """The winner, built at its first call, because tracing and compiling take long even from the compilers' caches.

    The first call also checks that it still agrees with eager and is no slower; if not, calls run the model itself,
    with a warning, and the entry is deleted.
    """

    def make() -> Callable[..., Any]:
        try:
            outcome = _rebuilt(problem, candidate, receipt)
        except Exception as error:  # as above
            outcome, why = None, why_failed(error)
        else:
            why = "it no longer agrees with eager, or is slower here"
        if outcome is None:
            cache.forget(key)
            said = f"the cached {candidate.name} is not used, the model itself is: {why}; optimize again to search"
            warnings.warn(said, RunsEagerly, stacklevel=5)
            return problem.model
        return outcome.built.call

    entry = next((each for each in receipt.entries if each.name == candidate.name), None)
    about = "" if entry is None or not entry.build_s else f"; the first time that took {entry.build_s:.0f} s"
    noted = receipt.noted(f"cached: built and checked at its first call{about}")
    watch = clone_guards if candidate.needs_clone else partial(Watch, hooks_only=True)
    built = Built(candidate, Later(make, problem.model, watch), Report())
    return Outcome(built, noted.from_cache(time.perf_counter() - began))


def _rebuilt(problem: Problem, candidate: Candidate, receipt: Receipt) -> Outcome | None:
    track = Track(problem.model, problem.inputs, problem.mode, problem.loss, problem.device)
    try:
        with uncached_casts():  # as in the search, so that compiled code and captures match
            return _checked(problem, candidate, receipt, track)
    finally:
        track.hand_back()


def _checked(problem: Problem, candidate: Candidate, receipt: Receipt, track: Track) -> Outcome | None:
    model, inputs = problem.model, problem.inputs
    eager = Built(Candidate(name="eager"), model, Report())
    track.settle(model)
    if candidate.name == "eager":
        return Outcome(eager, receipt)
    built = build(candidate, model, inputs, problem.mode, loss=problem.loss)
    track.restore()
    timed = track.race({"eager": eager, candidate.name: built}, 0.3, [("eager", candidate.name)])
    if compare(timed["eager"], timed[candidate.name]).slower or not _agrees(problem, track, built, receipt):
        built.undo()
        return None
    return Outcome(built, receipt)


def _agrees(problem: Problem, track: Track, built: Built, receipt: Receipt) -> bool:
    """Compare with eager on one fresh input; the full proof was made by the search."""
    subject = Subject(problem.model, problem.inputs, problem.mode, track.loss, track.state)
    inputs, eager = problem.inputs.taken(1, lambda given: subject.observe(problem.model, given))
    most = 2 * float((receipt.verdict or {}).get("most_rms_frac") or 0.0)
    with built.switched() as call:
        found = subject.observe(call, inputs.copied())
    track.restore()
    if [(leaf.name, leaf.shape, leaf.dtype) for leaf in found] != [
        (leaf.name, leaf.shape, leaf.dtype) for leaf in eager
    ]:
        return False
    floats = [(a, b) for a, b in zip(found, eager, strict=True) if a.dtype.is_floating_point]
    return most == 0.0 or all(error_of(a.values, b.values.double()).rms_frac <= most for a, b in floats)
