"""Does training go the same way? A run of steps from the same weights, eager and optimized, loss beside loss."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.optimizer.inputs import Inputs, State

Call = Callable[..., Any]
STEPS = 50
LEARNING_RATE = 3e-4
TAIL = 10
"""The last steps are compared by their mean: single steps of a random model differ by their random numbers."""
PROGRESS_FRAC, LOSS_FRAC = 0.1, 1e-3
"""How far the mean of the last losses may be from eager's: in shares of what eager gained and of the loss itself,
beside what chance does to the mean of as many steps."""


@dataclass(frozen=True, slots=True)
class Tracked:
    """Losses of both runs, and whether the last of them agree."""

    eager: tuple[float, ...]
    found: tuple[float, ...]

    @property
    def apart(self) -> float:
        return abs(_tail(self.eager) - _tail(self.found))

    @property
    def allowed(self) -> float:
        gained, scatter = abs(self.eager[0] - _tail(self.eager)), _scatter(self.eager) + _scatter(self.found)
        return PROGRESS_FRAC * gained + LOSS_FRAC * abs(_tail(self.eager)) + 2 * scatter

    @property
    def ok(self) -> bool:
        return all(loss == loss for loss in self.found) and self.apart <= self.allowed

    def __str__(self) -> str:
        return (f"{len(self.found)} steps of AdamW: loss {self.eager[0]:.4g} → {_tail(self.eager):.4g} eager, "
                f"{_tail(self.found):.4g} optimized ({self.apart:.2g} apart, {self.allowed:.2g} allowed)")  # fmt: skip


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
    kept = [p.detach().clone() for p in parameters]
    found = []
    for each in (model, call):
        try:
            found.append(_losses(each, parameters, inputs, loss, steps))
        finally:
            _put_back(parameters, kept)
            state.restore()
    return Tracked(*found)


def _losses(
    call: Call, parameters: list[nn.Parameter], inputs: Inputs, loss: Callable[[Any], Tensor], steps: int
) -> tuple[float, ...]:
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE)
    values = []
    for _ in range(steps):
        ready = inputs.reused()
        value = loss(call(*ready.args, **ready.kwargs))
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        values.append(value.detach().clone())
    return tuple(torch.stack(values).float().tolist())


def _put_back(parameters: list[nn.Parameter], kept: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter, was in zip(parameters, kept, strict=True):
            parameter.copy_(was)
            parameter.grad = None
