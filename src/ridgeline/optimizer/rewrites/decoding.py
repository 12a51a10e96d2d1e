"""Attention of one new token over a cache becomes the kernel that shares the keys out over the device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from ridgeline.kernels import attention as ridgeline_attention
from ridgeline.kernels import decode_attention
from ridgeline.kernels.decode_attention.op import DECODE_ATTENTION
from ridgeline.optimizer.rewrites.attention import _repeated, attention_call, cudnn_first
from ridgeline.optimizer.rewrites.registry import INFERENCE, Match, Worth, rewrite
from ridgeline.optimizer.rewrites.scene import Scene


@dataclass(frozen=True, slots=True)
class Found:
    """An attention call with one query position; a mask of keys is [batch, keys]."""

    query: Any
    key: Any
    value: Any
    mask: Any
    scale: float | None
    node: fx.Node
    is_key_mask: bool = False


def attended(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, is_key_mask: bool
) -> Tensor:
    """Our kernel; a mask of keys is given the dims of heads and queries."""
    mask = mask[:, None, None, :] if is_key_mask and mask is not None else mask
    return decode_attention(query, key, value, mask, None, scale)


@rewrite(
    "decode-attention",
    summary="attention of one query position over many keys becomes our kernel, key heads shared",
    modes=(INFERENCE,),
    worth=Worth(eager=1.3, compiled=1.2, basis="benchmarks/2026-11-15-decode.md"),
    exact="reordered",
    needs_kernels=True,
)
def decoding(scene: Scene) -> list[Match]:
    found = []
    for node in scene.nodes:
        read = None if scene.autocast or scene.training else _read(scene, node)
        if read is not None and (match := _put(scene, read)) is not None:
            found.append(match)
    return found


def _read(scene: Scene, node: fx.Node) -> Found | None:
    """The call, if its query has one position and every key may be seen."""
    found = _plain(node) or _ours(node)
    shape = None if found is None else scene.shape(found.query)
    keys = None if found is None else scene.shape(found.key)
    if found is None or shape is None or keys is None or len(shape) != 4 or shape[2] != 1 or len(keys) != 4:
        return None
    key, value = _repeated(scene, found.key), _repeated(scene, found.value)
    if key is not None and value is not None and scene.unchanged((key, value), (found.key, found.value), node):
        found = replace(found, key=key, value=value)
    return found


def _plain(node: fx.Node) -> Found | None:
    """PyTorch's function, or the one that asks cuDNN first. A causal mask over one row hides all keys but one."""
    if node.target is cudnn_first:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
        given = dict(zip(names, node.args, strict=False)) | node.kwargs
        if given.get("dropout_p") or given.get("is_causal"):
            return None
        return Found(given["query"], given["key"], given["value"], given.get("attn_mask"), given.get("scale"), node)
    read = attention_call(node)
    if read is None or read.dropout_p or read.is_causal:
        return None
    return Found(read.query, read.key, read.value, read.mask, read.scale, node)


def _ours(node: fx.Node) -> Found | None:
    """Our own attention, put in by an earlier rewrite."""
    if node.target is not ridgeline_attention or len(node.args) != 3:
        return None
    given = {name: value for name, value in node.kwargs.items() if value not in (None, False)}
    causal = given.pop("is_causal", False)
    whole = given.pop("lower_right", False)
    scale, mask = given.pop("scale", None), given.pop("key_mask", None)
    if given or (causal and not whole):
        return None
    query, key, value = node.args
    return Found(query, key, value, mask, scale, node, mask is not None)


def _put(scene: Scene, found: Found) -> Match | None:
    mask = scene.value(found.mask)
    if found.is_key_mask and isinstance(mask, Tensor):
        mask = mask[:, None, None, :]
    reason = DECODE_ATTENTION.support(scene.value(found.query), scene.value(found.key), scene.value(found.value), mask)
    if reason is not None:
        scene.refuse(found.node, reason)
        return None
    new = scene.emit(
        found.node, attended, found.query, found.key, found.value, found.mask, found.scale, found.is_key_mask
    )
    if not scene.alike_sizes(found.node, new):
        scene.discard(new)
        return None
    found.node.replace_all_uses_with(new)
    scene.relaxed = True
    scene.discard(found.node)
    return scene.match(new, f"decoding over {(scene.shape(found.key) or (0, 0, 0))[2]} keys")
