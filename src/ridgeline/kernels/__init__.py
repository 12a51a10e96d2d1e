"""Primitives for NVIDIA GPUs: normalization, losses, gating and position kernels, measured against the alternatives.

Functions have PyTorch's semantics and argument names; ``primitives()`` lists them, ``supports(name, *args)`` says
whether a call runs on a kernel and if not why.
"""

from __future__ import annotations

from typing import Any

try:
    import torch  # noqa: F401
    import triton  # noqa: F401
except ImportError as error:
    from ridgeline.errors import MissingExtra

    raise MissingExtra(error.name or "torch", "kernels", "ridgeline.kernels") from None

from ridgeline.kernels.attention.op import attention, varlen_attention
from ridgeline.kernels.contract import Primitive, Support, primitive, primitives
from ridgeline.kernels.cross_entropy.op import cross_entropy
from ridgeline.kernels.decode_attention.op import decode_attention
from ridgeline.kernels.dropout_add.op import dropout_add
from ridgeline.kernels.gated.op import geglu, swiglu
from ridgeline.kernels.group_norm.op import group_norm
from ridgeline.kernels.latent_attention.op import paged_latent_attention
from ridgeline.kernels.layer_norm.op import add_layer_norm, layer_norm
from ridgeline.kernels.linear.op import linear
from ridgeline.kernels.linear_cross_entropy.op import linear_cross_entropy
from ridgeline.kernels.matmul.op import matmul
from ridgeline.kernels.paged_attention.op import paged_attention
from ridgeline.kernels.qk_norm_rope.op import qk_norm_rope
from ridgeline.kernels.relu2.op import relu2
from ridgeline.kernels.rms_norm.op import add_rms_norm, rms_norm
from ridgeline.kernels.rms_norm_quant.op import rms_norm_quant
from ridgeline.kernels.rope.op import rope
from ridgeline.kernels.rope.tables import rope_tables
from ridgeline.kernels.softmax.op import softmax

__all__ = [
    "Primitive",
    "Support",
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "cross_entropy",
    "decode_attention",
    "dropout_add",
    "geglu",
    "group_norm",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "matmul",
    "paged_attention",
    "paged_latent_attention",
    "primitive",
    "primitives",
    "qk_norm_rope",
    "relu2",
    "rms_norm",
    "rms_norm_quant",
    "rope",
    "rope_tables",
    "softmax",
    "supports",
    "swiglu",
    "varlen_attention",
]


def supports(name: str, *args: Any) -> Support:
    """Whether a primitive's kernels run these arguments: yes, or no with the reason."""
    return primitive(name).supports(*args)
