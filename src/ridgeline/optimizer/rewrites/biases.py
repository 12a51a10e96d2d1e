"""Biases that are added to scores, laid out as fused attention reads them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from ridgeline.optimizer.rewrites.attention import Attention, attention_call, recalled
from ridgeline.optimizer.rewrites.registry import Match, Worth, rewrite
from ridgeline.optimizer.rewrites.scene import Scene, is_written


@rewrite(
    "attention-bias",
    summary="a bias that lies across its rows is laid along them once, so that fused attention takes it",
    worth=Worth(eager=2.0, compiled=1.5, basis="T5-large: 17 of 33 ms are unfused attention in float32 for this alone"),
    exact="rounding",
)
def attention_bias(scene: Scene) -> list[Match]:
    made: dict[fx.Node, fx.Node] = {}
    found = []
    for node in scene.nodes:
        read = attention_call(node)
        if read is None or read.mask is None or not _lies_across(scene, read) or is_written(scene, read.mask):
            continue
        if read.mask not in made:  # layers share a bias: it is laid out before the first that reads it
            made[read.mask] = scene.emit(node, along, read.mask)
        what = f"bias {tuple(scene.shape(read.mask) or ())}"
        if scene.training and _is_learned(scene, read):
            new = recalled(scene, read, target=learned, mask=made[read.mask])
            found += [scene.match(new, what)] if new is not None else []
            continue
        node.replace_input_with(read.mask, made[read.mask])
        found.append(scene.match(node, what))
    return found


def _is_learned(scene: Scene, read: Attention) -> bool:
    bias = scene.tensor(read.mask)
    return bias is not None and bias.requires_grad


def learned(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """PyTorch's function by the one of its fused kernels that has a gradient for what is added to scores."""
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
            enable_gqa=enable_gqa,
        )  # fmt: skip


def _lies_across(scene: Scene, read: Attention) -> bool:
    """Whether neighbors in a row of a bias are not neighbors in memory, which no fused kernel of PyTorch's reads."""
    bias = scene.tensor(read.mask)
    if bias is None or not bias.is_floating_point() or scene.shape(read.mask) is None:
        return False
    return bias.shape[-1] > 1 and bias.stride(-1) not in (0, 1)


def along(bias: Tensor) -> Tensor:
    """The same numbers with rows in one piece; what is the same for all batches or heads is kept once."""
    kept = bias[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in bias.stride())]
    return kept.contiguous(memory_format=torch.contiguous_format).expand(bias.shape)
