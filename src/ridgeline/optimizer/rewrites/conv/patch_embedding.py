"""Rewrites convolutions with adjacent windows to GEMMs."""

from __future__ import annotations

from torch import fx

from ridgeline.optimizer.in_place.patch_embedding import NARROW, fits, is_patching, patched
from ridgeline.optimizer.rewrites.context import GraphContext
from ridgeline.optimizer.rewrites.conv.read import CONVOLUTIONS, settings_of
from ridgeline.optimizer.rewrites.op_names import Call, call
from ridgeline.optimizer.rewrites.registry import INFERENCE, Match, Worth, rewrite


@rewrite(
    "patches",
    summary="a convolution with adjacent windows over few channels becomes one GEMM",
    modes=(INFERENCE,),
    worth=Worth(eager=5.0, compiled=5.0, basis="cuDNN pads three channels to eight: ViT-L's patches take 0.46 ms"),
    exact="reordered",
)
def patches(ctx: GraphContext) -> list[Match]:
    if ctx.autocast:
        return []
    found = []
    for node in ctx.nodes:
        read = call(node)
        if read is None or read.op not in CONVOLUTIONS or not _cuts(ctx, read):
            continue
        leaves = (read["input"], read["weight"], read.get("bias"))
        if not ctx.unchanged(leaves, (node,), node):
            continue
        new = ctx.emit(node, patched, *leaves)
        ctx.replace_any_layout(node, new)
        ctx.discard(node)
        found.append(ctx.match(new, f"patches of {tuple(ctx.shape(read['weight']) or ())[1:]}"))
    return found


def _cuts(ctx: GraphContext, read: Call) -> bool:
    settings = settings_of(read)
    x, weight = ctx.tensor(read["input"]), ctx.tensor(read["weight"])
    if settings is None or settings[5] or x is None or weight is None or not isinstance(read["weight"], fx.Node):
        return False
    stride, padding, dilation, _, groups, _ = settings
    narrow = x.dtype in NARROW and weight.dtype in NARROW  # autocast's casts are nodes at this point
    return narrow and fits(x, weight) and is_patching(weight, stride, padding, dilation, groups)
