"""The dot interaction as it is meant, and as DLRM writes it in PyTorch; and kernels that would be wrong."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def forward(dense: Tensor, sparse: Tensor) -> Tensor:
    x = torch.cat((dense.unsqueeze(1), sparse), 1)
    z = x @ x.transpose(1, 2)
    num = x.shape[1]
    i, j = torch.tril_indices(num, num, -1, device=x.device)
    return torch.cat((dense, z[:, i, j]), 1)


def backward(grad: Tensor, dense: Tensor, sparse: Tensor) -> tuple[Tensor, Tensor]:
    x = torch.cat((dense.unsqueeze(1), sparse), 1)
    num, dim = x.shape[1], dense.shape[1]
    i, j = torch.tril_indices(num, num, -1, device=x.device)
    pairs = x.new_zeros(x.shape[0], num, num)
    pairs[:, i, j] = grad[:, dim:]
    dx = (pairs + pairs.transpose(1, 2)) @ x
    return dx[:, 0] + grad[:, :dim], dx[:, 1:]


@cache
def pairs_of(num: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The pairs' places, made once: a model keeps them."""
    i, j = torch.tril_indices(num, num, -1, device=device)
    return i, j


def eager(dense: Tensor, sparse: Tensor) -> Tensor:
    x = torch.cat((dense, sparse.flatten(1)), 1).view(dense.shape[0], -1, dense.shape[1])
    z = torch.bmm(x, x.transpose(1, 2))
    i, j = pairs_of(x.shape[1], x.device)
    return torch.cat((dense, z[:, i, j]), 1)


def upper(dense: Tensor, sparse: Tensor) -> Tensor:
    """Pairs in the order of the upper triangle."""
    x = torch.cat((dense.unsqueeze(1), sparse), 1)
    i, j = torch.triu_indices(x.shape[1], x.shape[1], 1, device=x.device)
    return torch.cat((dense, (x @ x.transpose(1, 2))[:, i, j]), 1)


def short(dense: Tensor, sparse: Tensor) -> Tensor:
    """The last column left out of the products."""
    cut = forward(dense[:, :-1], sparse[..., :-1])
    return torch.cat((dense, cut[:, dense.shape[1] - 1 :]), 1)
