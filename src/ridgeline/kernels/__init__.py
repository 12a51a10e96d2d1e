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

from ridgeline.kernels.adamw.op import adamw_
from ridgeline.kernels.adamw.optimizer import AdamW
from ridgeline.kernels.attention.op import attention, varlen_attention
from ridgeline.kernels.contract import Primitive, Support, primitive, primitives
from ridgeline.kernels.convolution.op import convolution
from ridgeline.kernels.cross_entropy.op import cross_entropy
from ridgeline.kernels.cross_layer.op import cross_layer
from ridgeline.kernels.decode_attention.op import decode_attention
from ridgeline.kernels.depthwise_conv.op import depthwise
from ridgeline.kernels.dot_interaction.op import dot_interaction
from ridgeline.kernels.drop_padding.op import drop_padding
from ridgeline.kernels.dropout_add.op import dropout_add
from ridgeline.kernels.embedding_bag.module import EmbeddingBags
from ridgeline.kernels.embedding_bag.op import embedding_bag, embedding_bags
from ridgeline.kernels.gated.op import geglu, swiglu
from ridgeline.kernels.gelu.op import gelu
from ridgeline.kernels.grad_norm.op import clip_grad_norm_, grad_norm
from ridgeline.kernels.group_norm.op import group_norm
from ridgeline.kernels.group_norm_channels_last.op import group_norm_last
from ridgeline.kernels.grouped_conv.op import grouped_convolution
from ridgeline.kernels.grouped_conv1d.op import sequence_convolution
from ridgeline.kernels.latent_attention.op import paged_latent_attention
from ridgeline.kernels.layer_norm.op import add_layer_norm, layer_norm
from ridgeline.kernels.layer_norm_quant.op import layer_norm_quant
from ridgeline.kernels.linear.op import linear
from ridgeline.kernels.linear_cross_entropy.op import linear_cross_entropy
from ridgeline.kernels.linear_epilogue.op import dense
from ridgeline.kernels.long_norm.op import long_norm
from ridgeline.kernels.paged_attention.op import paged_attention
from ridgeline.kernels.pixel_unshuffle.op import unshuffle
from ridgeline.kernels.pooling.op import pool
from ridgeline.kernels.qk_norm_rope.op import qk_norm_rope
from ridgeline.kernels.quantize.op import dequantize, quantize
from ridgeline.kernels.quantized_linear.op import quantize_weight, quantized_linear
from ridgeline.kernels.relu2.op import relu2
from ridgeline.kernels.resize.op import resize
from ridgeline.kernels.rms_norm.op import add_rms_norm, rms_norm
from ridgeline.kernels.rms_norm_quant.op import rms_norm_quant
from ridgeline.kernels.rope.op import rope
from ridgeline.kernels.rope.tables import rope_tables
from ridgeline.kernels.scan.op import scan
from ridgeline.kernels.selective_scan.op import selective_scan
from ridgeline.kernels.short_attention.op import short_attention
from ridgeline.kernels.softmax.op import softmax
from ridgeline.kernels.split_gemm.op import matmul
from ridgeline.kernels.top_k.op import top_k

__all__ = [
    "AdamW",
    "EmbeddingBags",
    "Primitive",
    "Support",
    "adamw_",
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "clip_grad_norm_",
    "convolution",
    "cross_entropy",
    "cross_layer",
    "depthwise",
    "dequantize",
    "dot_interaction",
    "decode_attention",
    "dense",
    "dropout_add",
    "embedding_bag",
    "embedding_bags",
    "geglu",
    "gelu",
    "grad_norm",
    "group_norm",
    "group_norm_last",
    "grouped_convolution",
    "layer_norm",
    "layer_norm_quant",
    "linear",
    "linear_cross_entropy",
    "long_norm",
    "matmul",
    "quantize_weight",
    "quantized_linear",
    "paged_attention",
    "paged_latent_attention",
    "pool",
    "primitive",
    "primitives",
    "qk_norm_rope",
    "quantize",
    "relu2",
    "resize",
    "rms_norm",
    "rms_norm_quant",
    "rope",
    "rope_tables",
    "scan",
    "selective_scan",
    "sequence_convolution",
    "short_attention",
    "softmax",
    "supports",
    "swiglu",
    "drop_padding",
    "top_k",
    "unshuffle",
    "varlen_attention",
]


def supports(name: str, *args: Any) -> Support:
    """Whether a primitive's kernels run these arguments: yes, or no with the reason."""
    return primitive(name).supports(*args)
