"""Which kernels a primitive launches, found by running it on tensors without storage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.compiler import Variant
from ridgeline.kernels.contract import Case, Trial, trials
from ridgeline.kernels.launcher import collecting


def variants_of(name: str, cases: Iterable[Case] | None = None, *, aligned: bool = True) -> list[Variant]:
    """Variants a public function needs for these cases, forward, without gradients, and backward."""
    trial = trials()[name][1]
    with collecting(aligned=aligned) as found:
        for of in default_cases(trial) if cases is None else cases:
            _run(trial, trial.make(of, torch.device("meta"), None))  # type: ignore[arg-type]
    return list(dict.fromkeys(found))


def default_cases(trial: Trial) -> list[Case]:
    """What a pack holds unless told otherwise."""
    return list(dict.fromkeys((*trial.packs, *trial.races, *trial.small, *trial.checks)))


def _run(trial: Trial, args: tuple[Any, ...]) -> None:
    with torch.no_grad():
        trial.call(*args)
    leaves = [
        value.detach().requires_grad_() if _is_float(value) and i not in trial.constants else value
        for i, value in enumerate(args)
    ]
    outputs = trial.call(*leaves)
    smooth = [o for o in (outputs if isinstance(outputs, tuple) else (outputs,)) if o.requires_grad]
    if smooth:
        wanted = [value for value in leaves if isinstance(value, Tensor) and value.requires_grad]
        torch.autograd.grad(smooth, wanted, [torch.empty_like(o) for o in smooth], allow_unused=True)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
