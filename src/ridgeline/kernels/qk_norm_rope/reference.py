"""Head norm and rotary embedding as they are meant, in the precision of their inputs; PyTorch's form; wrong kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.rms_norm import reference as norm
from ridgeline.kernels.rope import reference as rope


def forward(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float, offset: float,
    sequence_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    qn, q_rstd = norm.forward(q, q_weight, eps, offset)
    kn, k_rstd = norm.forward(k, k_weight, eps, offset)
    heads = 3 - sequence_dim
    rstd = torch.cat((q_rstd, k_rstd), heads)
    rstd = rstd.transpose(1, 2) if heads == 1 else rstd
    return *rope.forward(qn, kn, cos, sin, False, sequence_dim), rstd


def backward(
    dq: Tensor, dk: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
    rstd: Tensor, offset: float, sequence_dim: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    gq, gk = rope.backward(dq, dk, cos, sin, False, sequence_dim)
    heads = 3 - sequence_dim
    rstd = rstd.transpose(1, 2) if heads == 1 else rstd
    q_rstd, k_rstd = rstd.split((q.shape[heads], k.shape[heads]), heads)
    q_grad, q_dw = norm.backward(gq, q, q_weight, q_rstd, None, offset, True)
    k_grad, k_dw = norm.backward(gk, k, k_weight, k_rstd, None, offset, True)
    return q_grad, k_grad, q_dw, k_dw


def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    return forward(q, k, q_weight, k_weight, cos, sin, 1e-6, 0.0, 2)[:2]


def eager(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    dim = q.shape[-1:]
    return rope.eager(F.rms_norm(q, dim, q_weight, 1e-6), F.rms_norm(k, dim, k_weight, 1e-6), cos, sin)


def weights_swapped(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    return qk_norm_rope(q, k, k_weight, q_weight, cos, sin)
