"""Activations after GEMMs: as an epilogue, or as a kernel bound by memory.

A race at the first run of a shape decides between cuBLASLt's epilogue, ours, and a kernel after cuBLASLt's plain GEMM.
For a short inner dim, as in the first stages of image networks, a pass over the result costs more than the GEMM.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ridgeline.engine.autotune import Contest
from ridgeline.kernels.gelu.op import GELU, gelu
from ridgeline.kernels.linear_epilogue import config
from ridgeline.kernels.linear_epilogue.op import DENSE, NARROW, tiled
from ridgeline.optimizer.rewrites.context import SMALL, GraphContext
from ridgeline.optimizer.rewrites.op_names import Call, call
from ridgeline.optimizer.rewrites.registry import INFERENCE, TRAINING, Match, Worth, rewrite

CONTEST = Contest()
_PRODUCTS = ("linear", "addmm", "matmul", "mm", "bmm", "conv1d", "conv2d", "conv3d")
_ROOMS = ("view", "reshape", "flatten", "unflatten", "contiguous", "permute", "transpose", "unsqueeze", "squeeze")
_active_modes = torch._C._len_torch_dispatch_stack


def activated_product(bias: Tensor, x: Tensor, weight: Tensor, kind: str) -> Tensor:
    """``relu``, ``gelu_tanh`` or ``gelu`` of ``x @ weight + bias`` by the fastest implementation.

    One opaque op for tracers: decomposed, the activation would be a separate pass over memory.
    """
    if type(x) is Tensor and not _active_modes():
        return _activated(bias, x, weight, kind)
    return torch.ops.ridgeline_optimizer.activated_product(bias, x, weight, kind)


def _activated(bias: Tensor, x: Tensor, weight: Tensor, kind: str) -> Tensor:
    if not x.is_cuda:
        return _apart(bias, x, weight, kind)
    key = (x.shape, x.stride(), weight.shape, weight.stride(), x.dtype, kind, x.device)
    return CONTEST.run(key, _ways(bias, x, weight, kind), x.device)


def _ways(bias: Tensor, x: Tensor, weight: Tensor, kind: str) -> dict[str, Any]:
    """The library's GEMM and a kernel after it; the library's epilogue; ours."""
    found: dict[str, Any] = {"apart": partial(_apart, bias, x, weight, kind)}
    if kind != "gelu":
        found["together"] = partial(torch._addmm_activation, bias, x, weight, use_gelu=kind == "gelu_tanh")
    ends = (bias, None, None, None, None, None, 1e-5, kind, False)
    if x.shape[0] * weight.shape[1] >= SMALL and DENSE.support(x, weight.t(), *ends) is None:
        for tile in config.tiles(x.shape[0], weight.shape[1], x.shape[1]):
            found[str(tile)] = partial(tiled, x, weight.t(), *ends, tile=tile)  # type: ignore[arg-type]
    return found


def _apart(bias: Tensor, x: Tensor, weight: Tensor, kind: str) -> Tensor:
    product = torch.addmm(bias, x, weight)
    if kind == "relu":
        return torch.relu_(product)
    approximate = "tanh" if kind == "gelu_tanh" else "none"
    return gelu(product, approximate) if x.is_cuda and x.dtype in NARROW else F.gelu(product, approximate=approximate)


_op = torch.library.custom_op("ridgeline_optimizer::activated_product", _activated, mutates_args=())


@_op.register_fake
def _(bias: Tensor, x: Tensor, weight: Tensor, kind: str) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@rewrite(
    "linear-activation",
    summary="ReLU or GELU after a GEMM with a bias becomes its epilogue, where that is faster",
    modes=(INFERENCE,),
    worth=Worth(eager=1.1, compiled=1.05, basis="a pass over the activations less; raced when first run"),
)
def linear_activation(ctx: GraphContext) -> list[Match]:
    found = []
    for node in ctx.nodes:
        read = call(node)
        kind = None if read is None or ctx.autocast or ctx.training else _kind(ctx, read)
        match = None if kind is None else _joined(ctx, read, kind)  # type: ignore[arg-type]
        if match is not None:
            found.append(match)
    return found


def _kind(ctx: GraphContext, read: Call) -> str | None:
    if read.op == "relu":
        return "relu"
    if read.op != "gelu":
        return None
    if read.get("approximate", "none") == "tanh":
        return "gelu_tanh"
    return "gelu" if ctx.dtype(read.node) in NARROW else None  # no library has it; our kernels need 16 bits


def _joined(ctx: GraphContext, act: Call, kind: str) -> Match | None:
    source, steps = _before_views(act["input"])
    product = None if len(source.users) != 1 else _product(ctx, source)
    shape = ctx.shape(act.node)
    if product is None or shape is None:
        return None
    bias, x, weight, turned = product
    width = (ctx.shape(bias) or (0,))[-1]
    if (
        len(ctx.shape(bias) or ()) != 1
        or ctx.dtype(bias) != ctx.dtype(x)
        or ctx.dtype(x) != ctx.dtype(weight)
    ):
        return None
    if not ctx.unchanged((bias, x, weight), (source, *steps, act.node), act.node):
        return None
    flat = ctx.emit(act.node, torch.reshape, x, (-1, (ctx.shape(x) or (0,))[-1]))
    columns = ctx.emit(act.node, torch.t, weight) if turned else weight
    made = ctx.emit(act.node, activated_product, bias, flat, columns, kind)
    new = ctx.emit(act.node, torch.reshape, made, shape)
    if not ctx.replace(act.node, new):
        return None
    ctx.discard(act.node)
    return ctx.match(new, f"{kind} of {width} columns")


def _before_views(node: Any) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """The node before views without other users."""
    steps = []
    while (read := call(node)) is not None and read.op in ("view", "reshape") and len(node.users) == 1:
        steps.append(node)
        node = read["input"]
    return node, tuple(steps)


def _product(ctx: GraphContext, node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, bool] | None:
    """(bias, x, weight, whether the weight is transposed) of a linear layer or a GEMM with a bias."""
    read = call(node)
    if read is None or read.op not in ("linear", "addmm"):
        return None
    bias, x = read.get("bias"), read["input"]
    weight = read["weight"] if read.op == "linear" else read["other"]
    plain = read.given.get("beta") in (None, 1) and read.given.get("alpha") in (None, 1)
    if not plain or not all(isinstance(each, fx.Node) for each in (bias, x, weight)):
        return None
    return bias, x, weight, read.op == "linear"


@rewrite(
    "gelu",
    summary="GELU between GEMMs becomes our kernel, which is bound by memory",
    modes=(INFERENCE, TRAINING),
    worth=Worth(eager=1.4, compiled=1.4, basis="PyTorch's and Inductor's take 74 and 71 µs for 206 MB: erf"),
    needs_kernels=True,
)
def plain_gelu(ctx: GraphContext) -> list[Match]:
    """Only between GEMMs: elsewhere a compiler fuses it with its neighbors."""
    found = []
    for node in ctx.nodes:
        read = call(node)
        if read is None or read.op != "gelu" or ctx.autocast or ctx.is_small(node) or not _between(read):
            continue
        source, approximate = read["input"], read.get("approximate", "none")
        value = ctx.tensor(source)
        if value is None or value.dtype not in NARROW or GELU.support(value) is not None:
            continue
        new = ctx.emit(node, gelu, source, approximate)
        if ctx.replace(node, new):
            ctx.discard(node)
            found.append(ctx.match(new, f"GELU of {tuple(ctx.shape(source) or ())}"))
    return found


def _between(act: Call) -> bool:
    """Whether an activation reads a GEMM and only GEMMs read it, through views."""
    source = act["input"]
    while (read := call(source)) is not None and read.op in _ROOMS:
        source = read["input"]
    return read is not None and read.op in _PRODUCTS and all(map(_is_product, act.node.users))


def _is_product(user: fx.Node) -> bool:
    read = call(user)
    if read is not None and read.op in _ROOMS:
        return bool(user.users) and all(map(_is_product, user.users))
    return read is not None and read.op in _PRODUCTS
