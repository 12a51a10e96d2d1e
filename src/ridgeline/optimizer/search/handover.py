"""How the winner is called: with the check of every call's arguments that comes before it."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from ridgeline.engine.drop_in import Optimized, Plan
from ridgeline.engine.guards.check import Watch
from ridgeline.engine.signature import Signature
from ridgeline.optimizer.search.candidate import Built
from ridgeline.optimizer.search.problem import Problem


def as_stock(built: Built) -> bool:
    """Whether what runs is what torch.compile makes: its own, or what Inductor makes where no rewrite matched."""
    found = built.candidate if built.report.matches else replace(built.candidate, rewrites=())
    return found.is_stock


def plans_of(problem: Problem, built: Built) -> list[Plan]:
    """What the drop-in runs for calls like the one that was optimized; eager needs no plan."""
    if built.candidate.name == "eager":
        return []
    signature = Signature.of(
        problem.inputs.args, dict(problem.inputs.kwargs), problem.model, grad=problem.mode != "infer"
    )
    watch = clone_watch(problem.model) if built.candidate.needs_clone else None
    return [Plan(signature, built.call, built.candidate.name, watch=watch)]


def clone_watch(model: nn.Module) -> Watch:
    """What must not change for a clone of a model to compute what the model does; weights may, which they share."""
    return Watch(model, shared_weights=True)


def handed(problem: Problem, built: Built, asked: tuple[str, ...] = ()) -> Built:
    """The candidate as a person will call it, with the look at every call's arguments that comes before it."""
    if built.candidate.name == "eager":
        return built
    mode = "inference" if problem.mode == "infer" else "train"
    return replace(built, call=Optimized(problem.model, plans_of(problem, built), mode=mode, asked=asked))
