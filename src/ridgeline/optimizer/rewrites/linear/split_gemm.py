"""Large float32 GEMMs as split GEMMs on the tensor cores at float32's accuracy, where those are faster.

A race at the first run of a shape decides (``contest``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ridgeline.engine.autotune import Contest, may_time, prepared
from ridgeline.kernels.split_gemm.attend import attend, fits
from ridgeline.kernels.split_gemm.op import MATMUL, is_thin, pieces_fit, planned, tall_fits, thin_fits
from ridgeline.kernels.tensorfloat import products_round
from ridgeline.optimizer.rewrites.context import GraphContext
from ridgeline.optimizer.rewrites.op_names import Call, call
from ridgeline.optimizer.rewrites.registry import INFERENCE, Match, Worth, rewrite

LEAST_FLOPS = 1e8
TILE, PIECES_TOGETHER, LEAST_PIECE = 128, 264, 2048
"""Long sums are split where the result has few tiles: to two pieces per SM of an H200, of so many terms each that
adding the pieces costs little."""
CONTEST = Contest()
_active_modes = torch._C._len_torch_dispatch_stack


def raced_product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """``a @ b`` (+ ``bias``) in float32, by the library or on the tensor cores; one opaque op for tracers."""
    if type(a) is Tensor and not _active_modes():
        return _raced(a, b, bias)
    return torch.ops.ridgeline_optimizer.raced_product(a, b, bias)


def raced_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return raced_product(x, weight.t(), bias)


def _raced(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    if not a.is_cuda:
        return _library(a, b, bias)
    key = (a.shape, a.stride(), b.shape, b.stride(), bias is None, a.device)
    name = CONTEST.won.get(key)
    if name is not None:
        return _WAYS[name](a, b, bias)
    names = ["library"]
    if thin_fits(a, b) and (is_thin(a, b) or a.shape[:-1].numel() <= 1024):
        names.append("digits")
    if not is_thin(a, b) or a.shape[:-1].numel() > 64:
        names.append("halves")
    if tall_fits(a, b):
        names.append("tall")
    if num_pieces(a, b) > 1:
        names.append("pieces")
    if pieces_fit(a, b):
        names.append("stretches")
    if may_time(a.device):
        prepared(partial(planned, a, b, bias, **_TILES[each]) for each in names if each in _TILES)
    return CONTEST.run(key, {each: partial(_WAYS[each], a, b, bias) for each in names}, a.device)


def _library(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return torch.matmul(a, b)
    return F.linear(a, b.t(), bias) if b.dim() == 2 else torch.matmul(a, b) + bias


def num_pieces(a: Tensor, b: Tensor) -> int:
    """The number of split-K pieces that keeps all SMs busy."""
    if a.dim() != 2 or b.dim() != 2:
        return 1
    tiles = -(-a.shape[0] // TILE) * -(-b.shape[1] // TILE)
    found, terms = 1, a.shape[1]
    while 2 * found * tiles <= PIECES_TOGETHER and terms % (2 * found) == 0 and terms >= 2 * found * LEAST_PIECE:
        found *= 2
    return found


def _in_pieces(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """Split-K: GEMMs of pieces of the inner dim, added in float32."""
    num = num_pieces(a, b)
    left, right = a.unflatten(1, (num, -1)).transpose(0, 1), b.unflatten(0, (num, -1))
    found = planned(left, right, None, thin=False)(left, right, None).sum(0)
    return found if bias is None else found + bias


_TILES: dict[str, dict[str, Any]] = {
    "digits": {"thin": True},
    "halves": {"thin": False},
    "tall": {"tall": True},
    "stretches": {"pieces": True},
}


def _tiled(tile: dict[str, Any], a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    found: Tensor = planned(a, b, bias, **tile)(a, b, bias)
    return found


_WAYS: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    "library": _library,
    **{name: partial(_tiled, tile) for name, tile in _TILES.items()},
    "pieces": _in_pieces,
}


_op = torch.library.custom_op("ridgeline_optimizer::raced_product", _raced, mutates_args=())


@_op.register_fake
def _(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-1]))


@rewrite(
    "halves",
    summary="large float32 GEMMs run as split GEMMs on the tensor cores at float32's accuracy, where faster",
    modes=(INFERENCE,),
    worth=Worth(eager=1.5, compiled=1.5, basis="three products at half precision's peak against one at float32's"),
    exact="reordered",
    needs_kernels=True,
)
def halves(ctx: GraphContext) -> list[Match]:
    if ctx.training or ctx.autocast or products_round():
        return []
    found = []
    for node in ctx.nodes:
        read = _as_matmul(call(node))
        if read is not None and (match := _put(ctx, node, read)) is not None:
            found.append(match)
    return found


def _put(ctx: GraphContext, node: fx.Node, read: Call) -> Match | None:
    factors = _factors(ctx, read)
    if factors is None or not _pays(factors):
        return None
    target, args = (raced_linear, _linear_args(read)) if read.op == "linear" else (raced_product, _matmul_args(read))
    new = ctx.emit(node, target, *args)
    if not ctx.replace(node, new):
        return None
    ctx.discard(node)
    return ctx.match(new, f"float32 product {tuple(factors[0].shape)} × {tuple(factors[1].shape)}")


def _as_matmul(read: Call | None) -> Call | None:
    """An einsum ``...l,lk->...k`` read as a matmul; anything else is returned unchanged."""
    if read is None or read.op != "dot_einsum":
        return read
    operands = read["operands"]
    sides, _, out = str(read["equation"]).replace(" ", "").partition("->")
    left, _, right = sides.partition(",")
    plain = all(len(set(part)) == len(part) and "." not in part for part in (left, right, out))
    if len(operands) != 2 or not plain or len(right) != 2 or left[-1:] != right[0] or out != left[:-1] + right[1]:
        return None
    return Call("matmul", {"input": operands[0], "other": operands[1]}, read.node)


def _linear_args(read: Call) -> tuple[Any, ...]:
    return read["input"], read["weight"], read.get("bias")


def _matmul_args(read: Call) -> tuple[Any, ...]:
    return read["input"], read["other"], read.get("bias")


def _factors(ctx: GraphContext, read: Call) -> tuple[Tensor, Tensor] | None:
    """The factors of a GEMM that our kernel supports, as [..., M, K] and [K, N]."""
    if read.op not in ("linear", "matmul", "mm", "bmm", "addmm"):
        return None
    if read.given.get("beta", 1) != 1 or read.given.get("alpha", 1) != 1:
        return None
    a, b = ctx.tensor(read["input"]), ctx.tensor(read["weight" if read.op == "linear" else "other"])
    bias = ctx.tensor(read.get("bias"))
    if a is None or b is None or ctx.shape(read["input"]) is None or b.dim() < 2:
        return None
    b = b.t() if read.op == "linear" else b
    return (a, b) if MATMUL.support(a, b, bias) is None else None


def _pays(factors: tuple[Tensor, Tensor]) -> bool:
    a, b = factors
    rows = a.shape[-2] if b.dim() == 3 else a.shape[:-1].numel()
    # From this value of rows · columns / (rows + columns) a GEMM may be bound by compute, not by reading its factors.
    balanced = rows * b.shape[-1] / max(1, rows + b.shape[-1]) >= 24.0
    return balanced and 2.0 * a.numel() * b.shape[-1] >= LEAST_FLOPS


@rewrite(
    "wide-attention",
    summary="float32 attention with heads too wide for fused kernels becomes two split GEMMs on the tensor cores",
    modes=(INFERENCE,),
    worth=Worth(eager=1.8, compiled=1.8, basis="as for large float32 products, which it consists of"),
    exact="reordered",
    needs_kernels=True,
)
def wide_attention(ctx: GraphContext) -> list[Match]:
    if ctx.training or ctx.autocast or products_round():
        return []
    found = []
    for node in ctx.nodes:
        read = call(node)
        if read is None or read.op != "attention" or not _is_wide(ctx, read):
            continue
        scale = read.get("scale") or (ctx.shape(read["query"]) or (1,))[-1] ** -0.5
        out = ctx.tensor(node)
        turned = out is not None and not out.is_contiguous()
        new = ctx.emit(node, unfused_attention, read["query"], read["key"], read["value"], scale, turned)
        if ctx.replace(node, new):
            ctx.discard(node)
            found.append(ctx.match(new, f"attention {ctx.shape(read['query'])}"))
    return found


def _is_wide(ctx: GraphContext, read: Call) -> bool:
    """Plain attention of contiguous float32 heads, as many of keys as of queries."""
    tensors = [ctx.tensor(read.given.get(name)) for name in ("query", "key", "value")]
    plain = read.get("attn_mask") is None and not read.get("is_causal", False) and not read.get("dropout_p", 0.0)
    if not plain or read.get("enable_gqa", False) or any(each is None or each.dim() != 4 for each in tensors):
        return False
    dense = all(each.is_contiguous() and each.dtype == torch.float32 for each in tensors)  # type: ignore[union-attr]
    q, k, v = (each.shape for each in tensors if each is not None)
    # PyTorch's fused attention kernels take heads up to this size: wider ones are two GEMMs and a softmax anyway.
    return dense and q[:2] == k[:2] == v[:2] and q[-1] > 256 and min(q[2], k[2]) >= 128


def unfused_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, turned: bool = False) -> Tensor:
    """softmax(q kᵀ · scale) v, head by head; ``turned`` puts the heads of a position side by side."""
    heads = [each.flatten(0, 1) for each in (q, k, v)]
    scores = raced_product(heads[0], heads[1].transpose(1, 2), None)
    weights = torch.softmax(scores * scale, -1)
    found = raced_product(weights, heads[2], None).view(*q.shape[:-1], v.shape[-1])
    return found.transpose(1, 2).contiguous().transpose(1, 2) if turned else found


LEAST_ATTENTION_FLOPS = 1e9
ATTENTION_CONTEST = Contest()


def raced_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, turned: bool) -> Tensor:
    """Float32 attention by the library or by our kernel; one opaque op for tracers."""
    if type(q) is Tensor and not _active_modes():
        return _raced_attention(q, k, v, scale, causal, turned)
    return torch.ops.ridgeline_optimizer.raced_attention(q, k, v, scale, causal, turned)


def _raced_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, turned: bool) -> Tensor:
    given = (q, k, v, scale, causal, turned)
    if not q.is_cuda:
        return _library_attention(*given)
    ways = {"library": partial(_library_attention, *given), "ours": partial(attend, *given)}
    key = (q.shape, q.stride(), k.shape, k.stride(), v.stride(), scale, causal, turned, q.device)
    return ATTENTION_CONTEST.run(key, ways, q.device)


def _library_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, turned: bool) -> Tensor:
    found = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    return found.transpose(1, 2).contiguous().transpose(1, 2) if turned else found.contiguous()


_attention_op = torch.library.custom_op(
    "ridgeline_optimizer::raced_attention", _raced_attention, mutates_args=()
)  # fmt: skip


@_attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, turned: bool) -> Tensor:
    batch, heads, length, width = q.shape
    if turned:
        return q.new_empty((batch, length, heads, width)).transpose(1, 2)
    return q.new_empty((batch, heads, length, width))


@rewrite(
    "float32-attention",
    summary="float32 attention runs on the tensor cores at float32's accuracy, where that beats PyTorch's kernels",
    modes=(INFERENCE,),
    worth=Worth(eager=1.5, compiled=1.5, basis="PyTorch's float32 attention reaches 18 TFLOP/s on an H200"),
    exact="reordered",
    needs_kernels=True,
)
def float32_attention(ctx: GraphContext) -> list[Match]:
    if ctx.training or ctx.autocast or products_round():
        return []
    found = []
    for node in ctx.nodes:
        read = call(node)
        if read is None or read.op != "attention" or not _is_plain_float32(ctx, read):
            continue
        scale = read.get("scale") or (ctx.shape(read["query"]) or (1,))[-1] ** -0.5
        out = ctx.tensor(node)
        turned, causal = out is not None and not out.is_contiguous(), bool(read.get("is_causal", False))
        new = ctx.emit(node, raced_attention, read["query"], read["key"], read["value"], scale, causal, turned)
        if ctx.replace(node, new):
            ctx.discard(node)
            found.append(ctx.match(new, f"float32 attention {ctx.shape(read['query'])}"))
    return found


def _is_plain_float32(ctx: GraphContext, read: Call) -> bool:
    """Attention without masks but the causal one, with supported heads, and large enough."""
    tensors = [ctx.tensor(read.given.get(name)) for name in ("query", "key", "value")]
    if any(each is None for each in tensors) or ctx.shape(read["query"]) is None:
        return False
    if read.get("attn_mask") is not None or read.get("dropout_p", 0.0) or read.get("enable_gqa", False):
        return False
    if not isinstance(read.get("scale", 1.0), (int, float)):
        return False
    q, k, v = (each for each in tensors if each is not None)
    if not fits(q, k, v, bool(read.get("is_causal", False))):
        return False
    return 4.0 * q.numel() * k.shape[2] >= LEAST_ATTENTION_FLOPS
