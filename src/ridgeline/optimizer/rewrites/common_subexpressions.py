"""Computes what several layers derive from the same tensors, masks and biases above all, only once.

A compiler fuses such ops into their readers, which is free for kernels it generates. Attention is not one of those: its
bias is written to memory for every layer.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from ridgeline.optimizer.rewrites.attention.backends import key_mask
from ridgeline.optimizer.rewrites.attention.fused import (
    additive_mask,
    finite_mask,
    flat_image_bias,
    masked_bias,
    merged_bias,
)
from ridgeline.optimizer.rewrites.attention.score_bias import along
from ridgeline.optimizer.rewrites.context import GraphContext, clash, is_written
from ridgeline.optimizer.rewrites.op_names import call, cast_target
from ridgeline.optimizer.rewrites.registry import INFERENCE, Match, Worth, rewrite

_FUNCTIONS = (
    "add", "sub", "mul", "div", "rsub", "neg", "abs", "not", "logical_not", "and", "or", "exp", "cos", "sin", "eq",
    "ne", "lt", "le", "gt", "ge", "expand", "repeat", "repeat_interleave", "unsqueeze", "squeeze", "view", "reshape",
    "flatten", "transpose", "permute", "contiguous", "masked_fill", "where", "tril", "triu", "cumsum", "diff", "cat",
    "stack", "clamp", "arange", "full", "ones", "zeros", "ones_like", "zeros_like", "full_like", "type_as",
    "getitem", "select", "narrow",
)  # fmt: skip
"""Ops that depend only on their arguments, and write nowhere."""
_OURS = (merged_bias, additive_mask, masked_bias, along, key_mask, finite_mask, flat_image_bias)
_PLAIN = (int, float, bool, str, type(None), type(Ellipsis), torch.dtype, torch.device, torch.memory_format)


@rewrite(
    "once",
    summary="common subexpressions of several layers are computed once",
    modes=(INFERENCE,),
    worth=Worth(eager=1.01, compiled=1.01, basis="T5 with padding: 13 % of its bytes are one sum, made in every layer"),
    exact="bits",
)
def once(ctx: GraphContext) -> list[Match]:
    if ctx.autocast:
        return []
    first: dict[Hashable, fx.Node] = {}
    found = []
    returned = {owner for node in ctx.graph.find_nodes(op="output") for each in node.all_input_nodes
                for owner in ctx.memory(each)}  # fmt: skip
    for node in ctx.nodes:
        key = _key(node)
        if key is None:
            continue
        known = first.setdefault(key, node)
        if known is node or not _is_the_same(ctx, known, node, returned):
            continue
        node.replace_all_uses_with(known)
        ctx.discard(node)
        found.append(ctx.match(known, f"{ctx.shape(known)} once"))
    return found


def _is_the_same(ctx: GraphContext, known: fx.Node, node: fx.Node, returned: set[int]) -> bool:
    """Whether two nodes read the same values, nothing writes to either, and neither is an output, whose identity
    counts."""
    if not ctx.unchanged(node.all_input_nodes, (known,), node):
        return False
    if any(is_written(ctx, each) for each in (known, node)):
        return False
    kept = ctx.memory(known) | ctx.memory(node)
    return not (returned and clash(kept, returned))


def _key(node: fx.Node) -> Hashable | None:
    """What a node computes from which inputs; None if that may not be everything."""
    read = call(node)
    plain = read is not None and (read.op in _FUNCTIONS or cast_target(read) is not None)
    if not plain and node.target not in _OURS:
        return None
    try:
        return (node.op, node.target, _frozen(node.args), _frozen(tuple(sorted(node.kwargs.items()))))
    except TypeError:
        return None


def _frozen(value: Any) -> Hashable:
    """A hashable form of a value; raises for mutable objects."""
    if isinstance(value, fx.Node):
        return ("node", id(value))
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *map(_frozen, value))
    if isinstance(value, slice):
        return ("slice", *map(_frozen, (value.start, value.stop, value.step)))
    if type(value) in _PLAIN:
        return (type(value).__name__, repr(value))
    raise TypeError(type(value).__name__)
