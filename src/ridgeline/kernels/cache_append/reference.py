"""The writes as PyTorch makes them."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.rope import reference as rotary


def append(keys: Tensor, values: Tensor, index: Tensor, k: Tensor, v: Tensor) -> None:
    keys.index_copy_(2, index, k)
    values.index_copy_(2, index, v)


def rope_append(
    keys: Tensor, values: Tensor, index: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor,
    interleaved: bool,
) -> Tensor:  # fmt: skip
    """Turned in float32, rounded once, written; the queries in the layout they came in."""
    wide_q, wide_k, wide_cos, wide_sin = (x.float() if x.dtype.itemsize < 4 else x for x in (q, k, cos, sin))
    turned_q, turned_k = rotary.forward(wide_q, wide_k, wide_cos, wide_sin, interleaved, 2)
    append(keys, values, index, turned_k.to(keys.dtype), v)
    return torch.empty_like(q).copy_(turned_q)
