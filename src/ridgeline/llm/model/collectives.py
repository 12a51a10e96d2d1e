"""Collectives with gradients, and the process groups that a decoder's blocks are split over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = Any
"""A process group, or None for a single process."""


def size(group: Group) -> int:
    return 1 if group is None else dist.get_world_size(group)


def rank(group: Group) -> int:
    return 0 if group is None else dist.get_rank(group)


@dataclass(frozen=True, slots=True)
class Groups:
    """Ranks that share a layer's heads and hidden units (tensor), its tokens (context) and its experts (expert)."""

    tensor: Group = None
    context: Group = None
    expert: Group = None


ALONE = Groups()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.rows = group, x.shape[0]
        out = x.new_empty((x.shape[0] * size(group), *x.shape[1:]))
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out = grad.new_empty((ctx.rows, *grad.shape[1:]))
        dist.reduce_scatter_tensor(out, grad.contiguous(), group=ctx.group)
        return out, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int], group: Group) -> Tensor:
        ctx.group, ctx.received, ctx.sent = group, received, sent
        out = x.new_empty((sum(received), *x.shape[1:]))
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        out = grad.new_empty((sum(ctx.sent), *grad.shape[1:]))
        dist.all_to_all_single(out, grad.contiguous(), ctx.sent, ctx.received, group=ctx.group)
        return out, None, None, None


def copy_to(x: Tensor, group: Group) -> Tensor:
    """``x`` as it is; its gradient is summed over the group, each rank of which uses ``x`` for a part."""
    return x if size(group) == 1 else _Copy.apply(x, group)


def sum_over(x: Tensor, group: Group) -> Tensor:
    """The sum of every rank's part; the gradient is every rank's as it is."""
    return x if size(group) == 1 else _Sum.apply(x, group)


def gather_rows(x: Tensor, group: Group) -> Tensor:
    """Rows of all ranks one after the other; gradients go back to the rank whose rows they are."""
    return x if size(group) == 1 else _Gather.apply(x, group)


def exchange_rows(x: Tensor, received: list[int], sent: list[int], group: Group) -> Tensor:
    """All-to-all: ``sent[i]`` rows go to rank i, ``received[i]`` come from it."""
    return _Exchange.apply(x, received, sent, group)


def local(weight: Tensor) -> Tensor:
    """The part of a tensor-parallel weight that this rank holds; its gradient stays with it."""
    return weight.to_local() if hasattr(weight, "to_local") else weight
