"""Rows of tokens to the experts and back: copies in the order of experts, and their weighted sums.

``place`` [T · k] says in which row the j-th copy of token t lies. Both directions are a read and a write of the rows;
sums over k are the same bits every time. Shapes: T tokens, k experts of each, M hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def places_of(order: Tensor) -> Tensor:
    """Where each element of a permutation went."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def spread(x_TM: Tensor, place: Tensor, k: int) -> Tensor:
    """``k`` copies of every row, each at its place."""
    return _Spread.apply(x_TM, place, k)  # type: ignore[no-any-return]


def combine(y: Tensor, place: Tensor, k: int, weights_Tk: Tensor | None = None) -> Tensor:
    """The sum of every token's rows, weighted where weights are given."""
    return _Combine.apply(y, place, k, weights_Tk)  # type: ignore[no-any-return]


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.k = k
        return _spread(x, place, k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _combine(grad, *ctx.saved_tensors, ctx.k), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, place: Tensor, k: int, weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(*((place,) if weights is None else (place, y, weights)))
        ctx.k = k
        return _combine(y, place, k, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, Tensor | None]:
        place, *weighted = ctx.saved_tensors
        if not weighted:
            return _spread(grad, place, ctx.k), None, None, None
        y, weights = weighted
        if on_device(grad):
            grad, y, weights = grad.contiguous(), y.contiguous(), weights.contiguous()
            dy, dweights = torch.empty_like(y), torch.empty_like(weights)
            _launch("spread", grad, place, ctx.k, grad, dy, y, weights, dweights)
            return dy, None, None, dweights
        copies = grad[:, None] * weights[..., None]
        dweights = (y[place].unflatten(0, (-1, ctx.k)) * grad[:, None]).sum(-1)
        return torch.empty_like(y).index_copy_(0, place, copies.flatten(0, 1)), None, None, dweights


def _spread(x: Tensor, place: Tensor, k: int) -> Tensor:
    rows = x.new_empty(len(place), x.shape[1])
    if on_device(x):
        x = x.contiguous()
        _launch("spread", x, place, k, x, rows, x, x, x)
        return rows
    return rows.index_copy_(0, place, x.repeat_interleave(k, 0))


def _combine(y: Tensor, place: Tensor, k: int, weights: Tensor | None = None) -> Tensor:
    if on_device(y):
        y, out = y.contiguous(), y.new_empty(len(place) // k, y.shape[1])
        _launch("combine", out, place, k, y, out, y if weights is None else weights.contiguous())
        return out
    found = y[place].unflatten(0, (-1, k))
    return (found if weights is None else found * weights[..., None]).sum(1)


def on_device(x: Tensor) -> bool:
    """Whether a kernel can run on this tensor: it is on a GPU, and no fake one."""
    return x.is_cuda and not isinstance(x, FakeTensor)


def _launch(name: str, like: Tensor, place: Tensor, k: int, *tensors: Tensor) -> None:
    from triton import next_power_of_2

    from ridgeline.llm.model import expert_row_kernels as kernels

    cols, weighted = like.shape[1], tensors[-1] is not tensors[0]
    if len(like):
        with torch.cuda.device(like.device):
            getattr(kernels, name)[(len(like),)](
                place, *tensors, cols, K=k, WEIGHTED=weighted, BLOCK=next_power_of_2(cols), num_warps=4
            )
