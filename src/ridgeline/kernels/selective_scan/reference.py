"""The recurrence step by step, in the precision of its inputs; PyTorch's form of it; and scans that would be wrong."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def forward(
    x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, z: Tensor | None,
    delta_bias: Tensor | None, softplus: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``h ← exp(Δ·a)·h + Δ·b·x``, ``y = c·h + d·x``, times ``silu(z)``, in the order in which it is written."""
    step = delta if delta_bias is None else delta + delta_bias[:, None]
    step = F.softplus(step) if softplus else step
    kind = torch.promote_types(x.dtype, a.dtype)
    state = torch.zeros(x.shape[0], x.shape[1], a.shape[1], dtype=kind, device=x.device)
    found = []
    for i in range(x.shape[2]):
        state = torch.exp(step[:, :, i, None] * a) * state + step[:, :, i, None] * b[:, None, :, i] * x[:, :, i, None]
        found.append((state * c[:, None, :, i]).sum(-1))
    y = torch.stack(found, -1) if found else x.new_zeros(x.shape)
    y = y if d is None else y + d[:, None] * x
    return (y if z is None else y * F.silu(z)), state


def state_kept(*args: object) -> tuple[Tensor, Tensor]:
    """Forgets to let the state decay in the last step."""
    delta, a, delta_bias, softplus = args[1], args[2], args[7], args[8]
    y, state = forward(*args)  # type: ignore[arg-type]
    step = delta if delta_bias is None else delta + delta_bias[:, None]  # type: ignore[index, operator]
    step = F.softplus(step) if softplus else step  # type: ignore[arg-type]
    return y, state / torch.exp(step[:, :, -1, None] * a)  # type: ignore[index, operator]


def last_step_lost(*args: object) -> tuple[Tensor, Tensor]:
    """Masks one step too many."""
    y, state = forward(*args)  # type: ignore[arg-type]
    y = y.clone()
    y[:, :, -1] = 0
    return y, state
