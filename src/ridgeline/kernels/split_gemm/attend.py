"""Float32 attention on the tensor cores, at float32's own accuracy: both of its products from two digits a factor."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels import tuning
from ridgeline.kernels.launcher import Kernel, Plans, vector_of
from ridgeline.kernels.rows import cdiv, power_of_two
from ridgeline.kernels.split_gemm import config, kernel

_ATTENTION = Kernel(
    kernel.attention_digits,
    vectors=("q_b", "q_h", "q_l", "k_b", "k_h", "k_l", "v_b", "v_h", "v_l", "out_b", "out_h", "out_l"),
)
_plans = Plans()
MOST_WIDTH, MOST_HEADS = 128, 65535


def fits(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    """Whether the kernel takes these: [B, H, L, D], as many heads of keys as of queries, their numbers dense."""
    if any(x.dim() != 4 or x.dtype != torch.float32 or x.stride(-1) != 1 for x in (q, k, v)):
        return False
    alike = q.shape[:2] == k.shape[:2] and k.shape == v.shape and q.shape[-1] == k.shape[-1]
    sized = 16 <= q.shape[-1] <= MOST_WIDTH and q.shape[0] * q.shape[1] <= MOST_HEADS and k.shape[2] > 0
    return alike and sized and (not causal or q.shape[2] == k.shape[2])


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, turned: bool) -> Tensor:
    """softmax(q kᵀ · scale) v; ``turned`` lays the heads of a position side by side."""
    batch, heads, length, width = q.shape
    if turned:
        out = torch.empty((batch, length, heads, width), dtype=q.dtype, device=q.device).transpose(1, 2)
    else:
        out = torch.empty((batch, heads, length, width), dtype=q.dtype, device=q.device)
    strides = [stride for x in (q, k, v, out) for stride in x.stride()[:3]]
    places = 0 if q.is_meta else q.data_ptr() | k.data_ptr() | v.data_ptr()
    key = (q.shape, k.shape, tuple(strides), causal, places & 15, q.get_device())
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = _plan(q, k, v, out, strides, causal, places)
    plan(q, k, v, out, *strides, heads, length, k.shape[2], scale * math.log2(math.e))
    return out


def _plan(q: Tensor, k: Tensor, v: Tensor, out: Tensor, strides: list[int], causal: bool, places: int) -> Any:
    batch, heads, length, width = q.shape
    sizes = {"length": length, "keys": k.shape[2], "width": width}
    chosen = tuning.choose("matmul.attend", sizes, config.attend(width))
    return _ATTENTION.bind(
        (q, k, v, out, *strides, heads, length, k.shape[2], 1.0),
        grid=(cdiv(length, chosen.rows), batch * heads),
        constants={"D": width, "BD": power_of_two(width), "BM": chosen.rows, "BN": chosen.cols, "CAUSAL": causal},
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        device=q.get_device(),
        vector=vector_of(4, places, *strides),
    )
