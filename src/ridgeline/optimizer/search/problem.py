"""The problem that a search solves, its outcome, and one-line descriptions of errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ridgeline.bench.environment import environment
from ridgeline.engine.example_inputs import Inputs
from ridgeline.engine.guards.code_reads import installed, library
from ridgeline.optimizer.backend import Report
from ridgeline.optimizer.receipt import (
    Receipt,
)
from ridgeline.optimizer.search.candidate import Built, Candidate
from ridgeline.optimizer.search.facts import (
    DEFAULT_BUDGET_S,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A model to optimize, its inputs, and the limits."""

    model: nn.Module
    inputs: Inputs
    mode: str
    device: torch.device
    loss: Callable[..., Any] | None = None
    optimizer: torch.optim.Optimizer | None = None  # of the training loop, if known
    budget_s: float = DEFAULT_BUDGET_S
    memory_limit_bytes: int | None = None
    error_budget: float | None = None  # relative RMS error that results may have in fewer bits
    say: Callable[[str], None] = lambda text: None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The winner, ready to be called, and the receipt."""

    built: Built
    receipt: Receipt


def unchanged_outcome(problem: Problem, reason: str) -> Outcome:
    """The unchanged model, with a receipt that says why nothing was tried."""
    receipt = Receipt(
        model=type(problem.model).__name__, mode=problem.mode, device=device_name(problem.device),
        inputs=described(problem.inputs), environment=environment(), winner="eager", changes=("nothing",),
        eager_s=0.0, final_s=0.0, stock_s=None, speedup=1.0, speedup_low=1.0, speedup_high=1.0, over_best=1.0,
        floor_s=None, eager_bytes=None, final_bytes=None, memory_limit_bytes=problem.memory_limit_bytes,
        budget_s=problem.budget_s, spent_s=0.0, verdict=None, entries=(), steps=(), notes=(reason,),
    )  # fmt: skip
    return Outcome(Built(Candidate(name="eager"), problem.model, Report()), receipt)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def described(inputs: Inputs) -> str:
    """Shapes and dtypes of the four largest inputs."""
    shown = sorted(inputs.named(), key=lambda pair: -pair[1].numel())
    text = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for _, t in shown[:4]]
    return ", ".join(text) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


def why_failed(error: BaseException) -> str:
    """An error in one line; of an error that wraps another, the message of the inner one."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith("raised:"):
        return lines[1][:240]
    found = f"{type(error).__name__}: {lines[0][:240]}" if lines else type(error).__name__
    unclear = isinstance(error, (TypeError, AttributeError, AssertionError, LookupError))
    return found + raised_in(error) if unclear else found


def raised_in(error: BaseException) -> str:
    """The last line of the model's own code in the traceback, else the last line of any code."""
    frames, at = [], error.__traceback__
    while at is not None:
        frames.append((at.tb_frame.f_code.co_filename, at.tb_lineno))
        at = at.tb_next
    own = [each for each in frames if not library(each[0]) and not installed(each[0])]
    file, line = (own or frames or [("", 0)])[-1]
    return f" ({'/'.join(Path(file).parts[-3:])}:{line})" if file else ""
