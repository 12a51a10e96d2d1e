"""Large GEMMs with an odd number of columns, such as a vocabulary of 50,257 words, by the fastest implementation.

Outside of traced graphs the layer itself is padded (``in_place.padded_linear``). GPT-2 medium rewritten as a whole took
10.5 ms with the library's slow kernel where its blocks, with the last GEMM padded, took 6.4 (H200). Inductor pads by
itself.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from ridgeline.optimizer.in_place.padded_linear import LEAST_ROWS, NARROW, is_odd_size, product_of
from ridgeline.optimizer.rewrites.context import GraphContext
from ridgeline.optimizer.rewrites.op_names import call
from ridgeline.optimizer.rewrites.registry import INFERENCE, Match, Worth, rewrite


def odd_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear``, raced at the first run of its sizes."""
    flat = x.reshape(-1, weight.shape[1])
    return product_of(flat, weight, bias).view(*x.shape[:-1], weight.shape[0])


@rewrite(
    "odd-products",
    summary="large GEMMs with an odd number of columns are padded, or split into whole tiles and a tail, where faster",
    modes=(INFERENCE,),
    worth=Worth(
        eager=1.5, compiled=1.0, basis="GPT-2's last product 4.4 and 1.1 ms (H200, run 17); Inductor pads by itself"
    ),
    exact="reordered",
)
def odd_products(ctx: GraphContext) -> list[Match]:
    if ctx.training or ctx.autocast:
        return []
    return [match for node in ctx.nodes if (match := _put(ctx, node)) is not None]


def _put(ctx: GraphContext, node: fx.Node) -> Match | None:
    read = call(node)
    if read is None or read.op != "linear" or not isinstance(read["weight"], fx.Node):
        return None
    x, weight, bias = ctx.tensor(read["input"]), ctx.tensor(read["weight"]), ctx.tensor(read.get("bias"))
    shape = ctx.shape(read["input"])
    if x is None or weight is None or shape is None or weight.dim() != 2 or not weight.is_contiguous():
        return None
    if x.dtype not in NARROW or x.dtype != weight.dtype or (bias is not None and bias.dtype != x.dtype):
        return None
    if not is_odd_size(*weight.shape) or torch.Size(shape[:-1]).numel() < LEAST_ROWS:
        return None
    new = ctx.emit(node, odd_linear, read["input"], read["weight"], read.get("bias"))
    if not ctx.replace(node, new):
        return None
    ctx.discard(node)
    return ctx.match(new, f"{tuple(shape)} × {tuple(weight.shape)}")
