"""Linear cross-entropy as it is meant, in the precision of its inputs; PyTorch's form; and a wrong kernel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.cross_entropy import reference as cross_entropy


def forward(
    x: Tensor, weight: Tensor, target: Tensor, ignore_index: int, smoothing: float, z_weight: float, reduction: str,
    want_x: bool, want_w: bool, wide: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    logits = x @ weight.t()
    loss, lse, counted = cross_entropy.forward(logits, target, ignore_index, smoothing, z_weight, reduction, False)
    one = torch.ones((), dtype=x.dtype, device=x.device)
    d = cross_entropy.backward(one, logits, target, lse, counted, ignore_index, smoothing, z_weight)
    return loss, (d @ weight if want_x else x.new_empty(0)), (d.t() @ x if want_w else x.new_empty(0))


def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return cross_entropy.cross_entropy(x @ weight.t(), target)


def eager(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), target)


def last_chunk_lost(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The rows of the last chunk count, and add nothing."""
    losses = F.cross_entropy(x @ weight.t(), target, reduction="none")
    losses[-max(1, len(losses) // 4) :] = 0
    return losses.sum() / (target != -100).sum()
