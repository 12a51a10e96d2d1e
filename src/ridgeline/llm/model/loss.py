"""The output projection and cross-entropy as one: logits exist for a few rows at a time, never for all tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.llm.model.collectives import Group, copy_to, rank, size

IGNORED = -100
"""The target of a token that has none."""


class _LinearCrossEntropy(torch.autograd.Function):
    """The gradient is made with the loss, chunk by chunk. ``group`` shares the vocabulary, its ranks in order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor, softcap: float, group: Group) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        total = torch.zeros(1, dtype=wide, device=x.device)
        need_x, need_w = ctx.needs_input_grad[:2]
        dx = torch.empty_like(x) if need_x else None
        dw = torch.zeros_like(weight, dtype=wide) if need_w else None
        first = rank(group) * weight.shape[0]
        # As many rows as make 64 Mi logits
        step = max(1, min(x.shape[0], (1 << 26) // weight.shape[0]))
        for start in range(0, x.shape[0], step):
            rows = slice(start, start + step)
            logits = (x[rows] @ weight.t()).to(wide)
            slope = None
            if softcap:
                bent = (logits / softcap).tanh()
                logits, slope = bent * softcap, 1 - bent * bent
            own = target[rows] - first
            here = (own >= 0) & (own < weight.shape[0])
            own = own.clamp(0, weight.shape[0] - 1)[:, None]
            largest = logits.amax(1)
            _reduce(largest, dist.ReduceOp.MAX, group)
            sums = (logits - largest[:, None]).exp().sum(1)
            picked = logits.gather(1, own)[:, 0] * here
            _reduce(sums, dist.ReduceOp.SUM, group)
            _reduce(picked, dist.ReduceOp.SUM, group)
            counted = (target[rows] != IGNORED).to(wide)
            lse = largest + sums.log()
            total += ((lse - picked) * counted).sum()
            if need_x or need_w:
                grad = (logits - lse[:, None]).exp_()
                grad.scatter_add_(1, own, -here.to(wide)[:, None])
                grad *= counted[:, None]
                if slope is not None:
                    grad *= slope
                narrow = grad.to(x.dtype)
                if dx is not None:
                    torch.mm(narrow, weight, out=dx[rows])
                if dw is not None:
                    dw += (narrow.t() @ x[rows]).to(wide)
        ctx.save_for_backward(dx, None if dw is None else dw.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        dx, dw = ctx.saved_tensors
        return (*(None if d is None else (d * grad.to(d.dtype)) for d in (dx, dw)), None, None, None)


def _reduce(x: Tensor, op: Any, group: Group) -> None:
    if size(group) > 1:
        dist.all_reduce(x, op, group=group)


def cross_entropy_sum(x: Tensor, weight: Tensor, target: Tensor, softcap: float = 0.0, group: Group = None) -> Tensor:
    """The sum [1] of the cross-entropy of every token that has a target, in float32 or better."""
    if x.is_cuda and not softcap and size(group) == 1:
        from ridgeline.kernels import linear_cross_entropy

        # Under autocast, of which it takes nothing else, its loss is float32: a sum over tokens needs that
        with torch.autocast("cuda", x.dtype, enabled=x.dtype != torch.float32):
            return linear_cross_entropy(x, weight, target, ignore_index=IGNORED, reduction="sum").float()[None]
    return _LinearCrossEntropy.apply(copy_to(x, group), weight, target, softcap, group)
