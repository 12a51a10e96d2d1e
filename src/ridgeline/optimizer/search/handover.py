"""Wraps the winner in the drop-in that checks the arguments of every call."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from ridgeline.engine.drop_in import Optimized, Plan
from ridgeline.engine.guards.check import Watch
from ridgeline.engine.signature import Signature
from ridgeline.optimizer.search.candidate import Built
from ridgeline.optimizer.search.problem import Problem


def as_stock(built: Built) -> bool:
    """Whether what runs is the code of torch.compile: its own, or Inductor's where no rewrite matched."""
    found = built.candidate if built.report.matches else replace(built.candidate, rewrites=())
    return found.is_stock


def plans_of(problem: Problem, built: Built) -> list[Plan]:
    """The plans of the drop-in for calls like the optimized one; eager needs none."""
    if built.candidate.name == "eager":
        return []
    signature = Signature.of(
        problem.inputs.args, dict(problem.inputs.kwargs), problem.model, grad=problem.mode != "infer"
    )
    watch = clone_guards(problem.model) if built.candidate.needs_clone else None
    return [Plan(signature, built.call, built.candidate.name, watch=watch)]


def clone_guards(model: nn.Module) -> Watch:
    """Guards on everything but the weights, which a clone shares with its model."""
    return Watch(model, shared_weights=True)


def handed(problem: Problem, built: Built, asked: tuple[str, ...] = ()) -> Built:
    """The candidate as the user will call it, behind the guard check of the drop-in."""
    if built.candidate.name == "eager":
        return built
    mode = "inference" if problem.mode == "infer" else "train"
    return replace(built, call=Optimized(problem.model, plans_of(problem, built), mode=mode, asked=asked))
