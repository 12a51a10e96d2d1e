"""Compares loss curves: a run of training steps from the same weights, eager and optimized."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.engine import autocast as casts
from ridgeline.engine.example_inputs import Inputs, State

Call = Callable[..., Any]
Step = Callable[[], Tensor]
STEPS, LEAST_STEPS = 50, 8
"""Fewer steps are enough if fifty exceed the budget: the second step already shows a wrong first one."""
LEARNING_RATE = 3e-4
TAIL = 10
"""The last steps are compared by their mean, because single steps of a random model differ."""


@dataclass(frozen=True, slots=True)
class LossCurves:
    """Losses of both runs; ``perturbed`` are eager's from weights perturbed by one rounding step."""

    eager: tuple[float, ...]
    found: tuple[float, ...]
    perturbed: tuple[float, ...] = ()
    optimizer: str = "AdamW"

    @property
    def apart(self) -> float:
        return abs(_tail(self.eager) - _tail(self.found))

    @property
    def allowed(self) -> float:
        """A tenth of eager's progress, 0.1 % of its loss, the standard errors of both means, and three times the
        distance of eager from itself with perturbed weights."""
        gained, scatter = abs(self.eager[0] - _tail(self.eager)), _scatter(self.eager) + _scatter(self.found)
        return 0.1 * gained + 1e-3 * abs(_tail(self.eager)) + 2 * scatter + 3.0 * self.noise

    @property
    def noise(self) -> float:
        """The mean distance of eager's losses from its own with perturbed weights."""
        return (
            statistics.fmean(abs(a - b) for a, b in zip(self.eager, self.perturbed, strict=True))
            if self.perturbed
            else 0
        )

    @property
    def ok(self) -> bool:
        return all(loss == loss for loss in self.found) and self.apart <= self.allowed

    def __str__(self) -> str:
        beside = f", {self.noise:.2g} of it rounding noise of eager itself" if self.perturbed else ""
        run = f"{len(self.found)} steps of {self.optimizer}: loss {self.eager[0]:.4g} → {_tail(self.eager):.4g} eager"
        apart = f"{self.apart:.2g} apart, {self.allowed:.2g} allowed{beside}"
        return f"{run}, {_tail(self.found):.4g} optimized ({apart})"


def _tail(losses: Sequence[float]) -> float:
    return statistics.fmean(losses[-TAIL:])


def _scatter(losses: Sequence[float]) -> float:
    """Standard error of the mean of the last steps, without their trend."""
    last = losses[-TAIL:]
    steps = [b - a for a, b in pairwise(last)]
    return statistics.pstdev(steps) / (2 * len(last)) ** 0.5 if len(steps) > 1 else 0.0


def track(
    model: nn.Module, call: Call, inputs: Inputs, loss: Callable[[Any], Tensor], state: State, steps: int = STEPS
) -> LossCurves:
    """Train eagerly and through ``call`` from the same weights on the same inputs; the weights are restored."""
    parameters = [p for p in model.parameters() if p.requires_grad]

    def stepping(each: Call) -> Step:
        return _stepping(each, torch.optim.AdamW(parameters, lr=LEARNING_RATE), inputs, loss)

    return compared(lambda: stepping(model), lambda: stepping(call), parameters, state, steps)


def compared(
    eager: Callable[[], Step],
    found: Callable[[], Step],
    parameters: list[nn.Parameter],
    state: State,
    steps: int = STEPS,
    optimizer: str = "AdamW",
) -> LossCurves:
    """Run two ways to take a step from the same weights, which are restored.

    If they diverge, eager is run again from weights perturbed by one rounding step, to measure rounding noise.
    """
    kept = [p.detach().clone() for p in parameters]

    def losses(make: Callable[[], Step], perturbed: bool = False) -> tuple[float, ...]:
        try:
            if perturbed:
                _perturb(parameters)
            step = make()
            return tuple(torch.stack([step() for _ in range(steps)]).float().tolist())
        finally:
            put_back(parameters, kept)
            state.restore()

    both = LossCurves(losses(eager), losses(found), optimizer=optimizer)
    return both if both.ok else replace(both, perturbed=losses(eager, perturbed=True))


def _stepping(call: Call, optimizer: torch.optim.Optimizer, inputs: Inputs, loss: Callable[[Any], Tensor]) -> Step:
    taken = 0

    def step() -> Tensor:
        nonlocal taken
        taken += 1
        for group in optimizer.param_groups:
            # Ten steps of warm-up: an untrained model may diverge from a full first step.
            group["lr"] = LEARNING_RATE * min(1.0, taken / 10)
        ready = inputs.reused()
        value = loss(call(*ready.args, **ready.kwargs))
        with casts.off():
            value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value.detach().clone()

    return step


@contextmanager
def perturbed(parameters: list[nn.Parameter], share: float = 0.5, seed: int = 7) -> Iterator[None]:
    """Perturb a share of the weights by one rounding step inside the context."""
    kept = [p.detach().clone() for p in parameters]
    _perturb(parameters, share, seed)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, was in zip(parameters, kept, strict=True):
                parameter.copy_(was)


def _perturb(parameters: list[nn.Parameter], share: float = 0.5, seed: int = 7) -> None:
    """Perturb a random share of the weights upward by one rounding step."""
    with torch.no_grad():
        for parameter in parameters:
            generator = torch.Generator(parameter.device).manual_seed(seed)
            up = torch.rand(parameter.shape, generator=generator, device=parameter.device) < share
            step = torch.finfo(parameter.dtype).eps
            parameter.copy_(torch.where(up, parameter * (1 + step), parameter))


def put_back(parameters: list[nn.Parameter], kept: list[Tensor]) -> None:
    """Restore weights and clear gradients."""
    with torch.no_grad():
        for parameter, was in zip(parameters, kept, strict=True):
            parameter.copy_(was)
            parameter.grad = None
