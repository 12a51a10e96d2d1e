"""Embedding bags as they are meant, in their inputs' precision; PyTorch's form; and kernels that would be wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

OPTIMIZERS = ("none", "sgd", "rowwise_adagrad", "adam")


@dataclass(frozen=True, slots=True)
class Rule:
    """The numbers of an optimizer step; ``decay`` is added to the gradient as L2 regularization."""

    optimizer: str = "sgd"
    lr: float = 0.01
    eps: float = 1e-8
    decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999


def rows_and_bags(
    indices: Tensor, offsets: Tensor, starts: Tensor | None, num_tables: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(row among all rows, bag, length of each bag) of every index; no tables: one, whose last offset is left out."""
    end = None if num_tables else offsets.new_full((1,), indices.numel())
    lengths = offsets.diff(append=end)
    num_bags = lengths.numel()
    bags = torch.repeat_interleave(torch.arange(num_bags, device=indices.device), lengths.long())
    rows = indices.long()
    if starts is not None:
        rows = rows + starts[bags // (num_bags // num_tables)]
    return rows, bags, lengths


def forward(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    starts: Tensor | None,
    sample_weights: Tensor | None,
    scale_shift: Tensor | None,
    num_tables: int,
    mean: bool,
    padding: int,
    kind: str,
) -> Tensor:
    """[B, T·D], bag by bag."""
    rows, bags, lengths = rows_and_bags(indices, offsets, starts, num_tables)
    kept = torch.ones_like(rows, dtype=torch.bool) if padding < 0 else indices != padding
    known = (indices >= 0) & (rows < weight.shape[0])
    safe = torch.where(known, rows, 0)
    x = weight[safe]
    if scale_shift is not None:
        x = x.to(scale_shift.dtype) * scale_shift[safe, :1] + scale_shift[safe, 1:]
    if sample_weights is not None:
        x = x * sample_weights.to(x.dtype).unsqueeze(-1)
    x = torch.where(kept.unsqueeze(-1), torch.where(known.unsqueeze(-1), x, math.nan), 0.0)
    out = x.new_zeros(lengths.numel(), weight.shape[1]).index_add(0, bags, x)
    if mean:
        counts = torch.zeros_like(lengths, dtype=x.dtype).index_add(0, bags, kept.to(x.dtype))
        out = out / counts.clamp_min(1.0).unsqueeze(-1)
    num_tables = max(1, num_tables)
    batch = lengths.numel() // num_tables
    return out.reshape(num_tables, batch, -1).transpose(0, 1).reshape(batch, -1)


def shares(indices: Tensor, bags: Tensor, lengths: Tensor, weights: Tensor | None, mean: bool, padding: int) -> Tensor:
    """What each index's bag gradient is multiplied by."""
    dtype = torch.float64 if weights is not None and weights.dtype == torch.float64 else torch.float32
    kept = (torch.ones_like(bags, dtype=torch.bool) if padding < 0 else indices != padding).to(dtype)
    found = kept if weights is None else kept * weights.to(dtype)
    if mean:
        counts = torch.zeros(lengths.numel(), dtype=dtype, device=bags.device).index_add(0, bags, kept)
        found = found / counts.clamp_min(1.0)[bags]
    return found


def row_grads(
    grad: Tensor, weight: Tensor, indices: Tensor, offsets: Tensor, starts: Tensor | None,
    sample_weights: Tensor | None, num_tables: int, mean: bool, padding: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(row, its bag's gradient, share, whether the row exists) of every index."""
    rows, bags, lengths = rows_and_bags(indices, offsets, starts, num_tables)
    num_tables = max(1, num_tables)
    batch = lengths.numel() // num_tables
    by_bag = grad.reshape(batch, num_tables, -1).transpose(0, 1).reshape(lengths.numel(), -1)
    known = (indices >= 0) & (rows < weight.shape[0]) & ((indices != padding) if padding >= 0 else True)
    share = shares(indices, bags, lengths, sample_weights, mean, padding).to(grad.dtype)
    return torch.where(known, rows, 0), by_bag[bags], torch.where(known, share, 0.0), known


def backward(
    grad: Tensor, weight: Tensor, indices: Tensor, offsets: Tensor, starts: Tensor | None,
    sample_weights: Tensor | None, num_tables: int, mean: bool, padding: int, want_sample_weights: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of the tables (dense) and of the samples' weights."""
    given = (grad, weight, indices, offsets, starts, sample_weights, num_tables, mean, padding)
    rows, by_index, share, known = row_grads(*given)
    dense = torch.zeros_like(weight).index_add(0, rows, by_index * share.unsqueeze(-1))
    if not want_sample_weights:
        return dense, grad.new_empty(0)
    return dense, torch.where(known, (by_index * weight[rows]).sum(-1), 0.0)


def updated(
    weight: Tensor, first: Tensor, second: Tensor, dense: Tensor, touched: Tensor, num: float, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """(tables, states) after a step in which only the touched rows take part."""
    g = dense + rule.decay * weight
    if rule.optimizer == "sgd":
        new = weight - rule.lr * g
    elif rule.optimizer == "rowwise_adagrad":
        grown = first + g.square().mean(-1)
        first = torch.where(touched, grown, first)
        new = weight - rule.lr * g / (grown.sqrt() + rule.eps).unsqueeze(-1)
    else:
        m, v = rule.beta1 * first + (1 - rule.beta1) * g, rule.beta2 * second + (1 - rule.beta2) * g.square()
        first, second = (torch.where(touched.unsqueeze(-1), a, b) for a, b in ((m, first), (v, second)))
        fix1, fix2 = 1 / (1 - rule.beta1**num), 1 / (1 - rule.beta2**num)
        new = weight - rule.lr * m * fix1 / ((v * fix2).sqrt() + rule.eps)
    return torch.where(touched.unsqueeze(-1), new, weight), first, second


def raced(
    weight: Tensor, indices: Tensor, offsets: Tensor, starts: None, weights: Tensor | None, tables: int, mode: str,
    *_: int | None,
) -> Tensor:  # fmt: skip
    """``F.embedding_bag`` on one table, as users call it."""
    return F.embedding_bag(indices, weight, offsets, mode=mode, per_sample_weights=weights, include_last_offset=True)


def coded_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Tables in eight bits: uint8 codes and each row's (scale, shift)."""
    wide = weight.float()
    low, high = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
    scale = ((high - low) / 255).clamp_min(1e-12)
    codes = ((wide - low) / scale).round().clamp(0, 255).to(torch.uint8)
    return codes, torch.cat((scale, low), -1)


def eager(
    weight: Tensor, indices: Tensor, offsets: Tensor, starts: Tensor | None, weights: Tensor | None, num_tables: int,
    mode: str, padding: int, scale_shift: Tensor | None,
) -> Tensor:  # fmt: skip
    """``F.embedding_bag`` over all bags at once; rows are shifted to where their tables start."""
    rows = rows_and_bags(indices, offsets, starts, num_tables)[0]
    pad = None if padding < 0 else padding
    if scale_shift is not None:
        weight = weight * scale_shift[:, :1] + scale_shift[:, 1:]
    dtype = weight.dtype
    if weights is not None and dtype == torch.bfloat16:  # on a GPU PyTorch has no gradient of bfloat16 sample weights
        weight, weights = weight.float(), weights.float()
    out = F.embedding_bag(rows, weight, offsets.long(), mode=mode, per_sample_weights=weights, include_last_offset=True,
                          padding_idx=pad)  # fmt: skip
    batch = (offsets.numel() - 1) // num_tables
    return out.to(dtype).reshape(num_tables, batch, -1).transpose(0, 1).reshape(batch, -1)
