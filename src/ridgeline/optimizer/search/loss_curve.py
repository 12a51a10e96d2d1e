"""Does training go the same way? A run of steps from the same weights, eager and optimized, loss beside loss."""

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
"""Where fifty take longer than what is left of a budget, fewer still tell: the second step shows a wrong first one."""
LEARNING_RATE, WARM_STEPS = 3e-4, 10
"""Untrained models may spring away from a full first step, and then show nothing: the rate grows over the first."""
TAIL = 10
"""The last steps are compared by their mean: single steps of a random model differ by their random numbers."""
PROGRESS_FRAC, LOSS_FRAC = 0.1, 1e-3
"""How far the mean of the last losses may be from eager's: in shares of what eager gained and of the loss itself,
beside what chance does to the mean of as many steps."""
TIMES_NUDGED = 3.0
"""Times as far from eager as eager is from itself when its weights start one rounding away."""


@dataclass(frozen=True, slots=True)
class Tracked:
    """Losses of both runs, and whether the last of them agree; ``nudged`` is eager's from weights a rounding away."""

    eager: tuple[float, ...]
    found: tuple[float, ...]
    nudged: tuple[float, ...] = ()
    optimizer: str = "AdamW"

    @property
    def apart(self) -> float:
        return abs(_tail(self.eager) - _tail(self.found))

    @property
    def allowed(self) -> float:
        gained, scatter = abs(self.eager[0] - _tail(self.eager)), _scatter(self.eager) + _scatter(self.found)
        return PROGRESS_FRAC * gained + LOSS_FRAC * abs(_tail(self.eager)) + 2 * scatter + TIMES_NUDGED * self.noise

    @property
    def noise(self) -> float:
        """How far rounding alone takes eager from itself, in the mean of all steps."""
        return statistics.fmean(abs(a - b) for a, b in zip(self.eager, self.nudged, strict=True)) if self.nudged else 0

    @property
    def ok(self) -> bool:
        return all(loss == loss for loss in self.found) and self.apart <= self.allowed

    def __str__(self) -> str:
        beside = f", {self.noise:.2g} of it what rounding does to eager itself" if self.nudged else ""
        run = f"{len(self.found)} steps of {self.optimizer}: loss {self.eager[0]:.4g} → {_tail(self.eager):.4g} eager"
        apart = f"{self.apart:.2g} apart, {self.allowed:.2g} allowed{beside}"
        return f"{run}, {_tail(self.found):.4g} optimized ({apart})"


def _tail(losses: Sequence[float]) -> float:
    return statistics.fmean(losses[-TAIL:])


def _scatter(losses: Sequence[float]) -> float:
    """Standard error of the mean of the last steps, their trend taken out."""
    last = losses[-TAIL:]
    steps = [b - a for a, b in pairwise(last)]
    return statistics.pstdev(steps) / (2 * len(last)) ** 0.5 if len(steps) > 1 else 0.0


def track(
    model: nn.Module, call: Call, inputs: Inputs, loss: Callable[[Any], Tensor], state: State, steps: int = STEPS
) -> Tracked:
    """Train eagerly and through ``call`` from the same weights on the same inputs; the weights are put back."""
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
) -> Tracked:
    """Two ways to take a step, each made anew and run from the same weights, which are put back.

    Where they part, eager is run once more from weights that are one rounding away: what that does is no mistake.
    """
    kept = [p.detach().clone() for p in parameters]

    def losses(make: Callable[[], Step], nudged: bool = False) -> tuple[float, ...]:
        try:
            if nudged:
                _nudge(parameters)
            step = make()
            return tuple(torch.stack([step() for _ in range(steps)]).float().tolist())
        finally:
            put_back(parameters, kept)
            state.restore()

    both = Tracked(losses(eager), losses(found), optimizer=optimizer)
    return both if both.ok else replace(both, nudged=losses(eager, nudged=True))


def _stepping(call: Call, optimizer: torch.optim.Optimizer, inputs: Inputs, loss: Callable[[Any], Tensor]) -> Step:
    taken = 0

    def step() -> Tensor:
        nonlocal taken
        taken += 1
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, taken / WARM_STEPS)
        ready = inputs.reused()
        value = loss(call(*ready.args, **ready.kwargs))
        with casts.off():
            value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value.detach().clone()

    return step


@contextmanager
def nudged(parameters: list[nn.Parameter], share: float = 0.5, seed: int = 7) -> Iterator[None]:
    """A share of the weights one rounding away, for as long as it takes to see what that does."""
    kept = [p.detach().clone() for p in parameters]
    _nudge(parameters, share, seed)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, was in zip(parameters, kept, strict=True):
                parameter.copy_(was)


def _nudge(parameters: list[nn.Parameter], share: float = 0.5, seed: int = 7) -> None:
    """Every second weight, on average, or another share of them, to the next number its type has."""
    with torch.no_grad():
        for parameter in parameters:
            generator = torch.Generator(parameter.device).manual_seed(seed)
            up = torch.rand(parameter.shape, generator=generator, device=parameter.device) < share
            step = torch.finfo(parameter.dtype).eps
            parameter.copy_(torch.where(up, parameter * (1 + step), parameter))


def put_back(parameters: list[nn.Parameter], kept: list[Tensor]) -> None:
    """Weights as they were, and no gradients."""
    with torch.no_grad():
        for parameter, was in zip(parameters, kept, strict=True):
            parameter.copy_(was)
            parameter.grad = None
