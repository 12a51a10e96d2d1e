"""What rows are brought to, PyTorch's own form, and kernels that would be wrong."""

from __future__ import annotations

import torch
from torch import Tensor


def forward(
    x: Tensor, kind: str, cols: int, weight: Tensor | None, bias: Tensor | None, channels: int, eps: float
) -> Tensor:
    """``x`` as rows of ``cols``; ``channels`` of a row have a weight each, or every column has (0)."""
    flat = x.reshape(-1, cols)
    if kind == "norm":
        var, mean = torch.var_mean(flat, 1, correction=0, keepdim=True)
        flat = (flat - mean) * torch.rsqrt(var + eps)
    elif kind == "l1":
        flat = flat / flat.abs().mean(1, keepdim=True)
    elif kind == "l2":
        flat = flat / flat.square().sum(1, keepdim=True).sqrt()
    else:
        flat = flat.softmax(1) if kind == "softmax" else flat.log_softmax(1)
    return _weighed(flat, weight, bias, channels).reshape(x.shape)


def _weighed(flat: Tensor, weight: Tensor | None, bias: Tensor | None, channels: int) -> Tensor:
    """Rows times weight plus bias, of columns or of channels that go round over the rows."""
    for each, times in ((weight, True), (bias, False)):
        if each is None:
            continue
        spread = each.to(flat.dtype).reshape(-1)
        if channels:
            shaped = flat.reshape(-1, each.numel(), flat.shape[1] // channels)
            shaped = shaped * spread[:, None] if times else shaped + spread[:, None]
            flat = shaped.reshape(flat.shape)
        else:
            flat = flat * spread if times else flat + spread
    return flat


eager = forward


def first_share(x: Tensor, kind: str, cols: int, *rest: object) -> Tensor:
    """Everything judged by the first half of its row."""
    half = x.reshape(-1, cols).clone()
    half[:, cols // 2 :] = half[:, : cols - cols // 2]
    return forward(half.reshape(x.shape), kind, cols, *rest)  # type: ignore[arg-type]
