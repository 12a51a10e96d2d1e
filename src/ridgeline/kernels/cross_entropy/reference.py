"""Cross-entropy as it is meant, in the precision of its inputs; PyTorch's own form; and kernels that would be wrong."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def forward(
    x: Tensor, target: Tensor, ignore_index: int, smoothing: float, z_weight: float, reduction: str, wide: bool
) -> tuple[Tensor, Tensor, Tensor]:
    lse = torch.logsumexp(x, -1)
    counted = target != ignore_index
    picked = x.gather(-1, target.clamp(0, x.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
    loss = (1 - smoothing) * (lse - picked) + smoothing * (lse - x.mean(-1)) + z_weight * lse.square()
    loss = torch.where(counted, loss, 0.0)
    one = torch.ones((), dtype=x.dtype, device=x.device)
    top = x.amax(-1)
    both = torch.stack((top, lse - top))
    if reduction == "none":
        return loss, both, one
    weight = counted.sum().to(x.dtype) if reduction == "mean" else one
    return loss.sum() / weight, both, weight


def backward(
    grad: Tensor, x: Tensor, target: Tensor, lse: Tensor, weight: Tensor, ignore_index: int, smoothing: float,
    z_weight: float,
) -> Tensor:  # fmt: skip
    lse = lse.sum(0)
    p = (x - lse.unsqueeze(-1)).exp() * (1 + 2 * z_weight * lse.unsqueeze(-1)) - smoothing / x.shape[-1]
    p = p - (1 - smoothing) * F.one_hot(target.clamp(0, x.shape[-1] - 1), x.shape[-1]).to(x.dtype)
    scale = grad if grad.dim() else (grad / weight).expand(x.shape[0])
    return torch.where((target != ignore_index).unsqueeze(-1), p * scale.unsqueeze(-1), 0.0)


def cross_entropy(x: Tensor, target: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Tensor:
    return forward(x, target, -100, label_smoothing, z_loss, "mean", False)[0]


def eager(x: Tensor, target: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Tensor:
    loss = F.cross_entropy(x, target, label_smoothing=label_smoothing)
    if z_loss:
        counted = target != -100
        loss = loss + z_loss * (torch.logsumexp(x, -1).square() * counted).sum() / counted.sum()
    return loss


def ignored_counted(x: Tensor, target: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Tensor:
    """Divides by all rows, the ignored ones among them."""
    counted = (target != -100).sum()
    return cross_entropy(x, target, label_smoothing, z_loss) * counted / target.numel()


def last_classes_lost(x: Tensor, target: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Tensor:
    """The sum of exponentials misses the last classes."""
    cut = x.clone()
    cut[..., x.shape[-1] * 15 // 16 :] = -1e30
    keep = F.one_hot(target.clamp(0), x.shape[-1]).bool()
    return cross_entropy(torch.where(keep, x, cut), target, 0.0, z_loss)
