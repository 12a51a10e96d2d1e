"""Rows of tokens to the experts and back: copies in the order of experts, and their weighted sums.

``place`` [T · k] says in which row the j-th copy of token t lies. Both directions are a read and a write of the rows;
sums over k are the same bits every time. Shapes: T tokens, k experts of each, M hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.graph.declared import cost_of


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
        dy, dweights = _weighted_gradient(grad, place, *weighted)
        return dy, None, None, dweights


@torch.library.custom_op(
    "ridgeline_llm::spread_rows", mutates_args=(), schema="(Tensor x, Tensor place, int k) -> Tensor"
)
def _spread(x: Tensor, place: Tensor, k: int) -> Tensor:
    rows = x.new_empty(len(place), x.shape[1])
    if x.is_cuda:
        x = x.contiguous()
        _launch("spread", x, place, k, False, x, rows, x, x, x)
        return rows
    return rows.index_copy_(0, place, x.repeat_interleave(k, 0))


@torch.library.custom_op(
    "ridgeline_llm::combine_rows", mutates_args=(),
    schema="(Tensor y, Tensor place, int k, Tensor? weights=None) -> Tensor",
)  # fmt: skip
def _combine(y: Tensor, place: Tensor, k: int, weights: Tensor | None = None) -> Tensor:
    if y.is_cuda:
        y, out = y.contiguous(), y.new_empty(len(place) // k, y.shape[1])
        _launch("combine", out, place, k, weights is not None, y, out, y if weights is None else weights.contiguous())
        return out
    found = y[place].unflatten(0, (-1, k))
    return (found if weights is None else found * weights[..., None]).sum(1)


@torch.library.custom_op(
    "ridgeline_llm::combine_rows_backward", mutates_args=(),
    schema="(Tensor grad, Tensor place, Tensor y, Tensor weights) -> (Tensor, Tensor)",
)  # fmt: skip
def _weighted_gradient(grad: Tensor, place: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    k = weights.shape[1]
    if grad.is_cuda:
        grad, y, weights = grad.contiguous(), y.contiguous(), weights.contiguous()
        dy, dweights = torch.empty_like(y), torch.empty_like(weights)
        _launch("spread", grad, place, k, True, grad, dy, y, weights, dweights)
        return dy, dweights
    dweights = (y[place].unflatten(0, (-1, k)) * grad[:, None]).sum(-1)
    copies = (grad[:, None] * weights[..., None]).flatten(0, 1)
    return torch.empty_like(copies).index_copy_(0, place, copies), dweights


_spread.register_fake(lambda x, place, k: x.new_empty(len(place), x.shape[1]))
_combine.register_fake(lambda y, place, k, weights=None: y.new_empty(len(place) // k, y.shape[1]))
_weighted_gradient.register_fake(
    lambda grad, place, y, weights: (y.new_empty(y.shape), weights.new_empty(weights.shape))
)
for _op in ("spread_rows", "combine_rows", "combine_rows_backward"):
    cost_of(f"ridgeline_llm::{_op}")(lambda inputs, outputs, **options: {})  # every row is read and written once


def _launch(name: str, like: Tensor, place: Tensor, k: int, weighted: bool, *tensors: Tensor) -> None:
    from triton import next_power_of_2

    from ridgeline.llm.model import expert_row_kernels as kernels

    cols = like.shape[1]
    if len(like):
        with torch.cuda.device(like.device):
            getattr(kernels, name)[(len(like),)](
                place, *tensors, cols, K=k, WEIGHTED=weighted, BLOCK=next_power_of_2(cols), num_warps=4
            )
