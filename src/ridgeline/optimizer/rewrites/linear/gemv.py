"""Large matrix-vector products: our kernel for few rows, where a race shows it to be faster."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, fx

from ridgeline.engine.autotune import Contest
from ridgeline.kernels.linear.op import LINEAR, linear
from ridgeline.optimizer.rewrites.context import GraphContext
from ridgeline.optimizer.rewrites.op_names import Call, call
from ridgeline.optimizer.rewrites.registry import INFERENCE, Match, Worth, rewrite

LEAST_ELEMENTS = 1 << 24
"""Smaller matrices take less time to read than a launch."""
CONTEST = Contest()
_active_modes = torch._C._len_torch_dispatch_stack


def raced_vector(matrix: Tensor, vector: Tensor) -> Tensor:
    """``matrix @ vector``, [M, K] by [K] or [K, 1]; one opaque op for tracers."""
    if type(matrix) is Tensor and not _active_modes():
        return _raced(matrix, vector)
    return torch.ops.ridgeline_optimizer.raced_vector(matrix, vector)


def _raced(matrix: Tensor, vector: Tensor) -> Tensor:
    ways = {"library": partial(torch.matmul, matrix, vector), "ours": partial(_ours, matrix, vector)}
    return CONTEST.run((matrix.shape, vector.shape, matrix.dtype, matrix.device), ways, matrix.device)


def _ours(matrix: Tensor, vector: Tensor) -> Tensor:
    """The matrix as the weight of a linear layer with one row of input, the vector."""
    return linear(vector.reshape(1, -1), matrix).reshape(matrix.shape[0], *vector.shape[1:])


_op = torch.library.custom_op("ridgeline_optimizer::raced_vector", _raced, mutates_args=())


@_op.register_fake
def _(matrix: Tensor, vector: Tensor) -> Tensor:
    return matrix.new_empty((matrix.shape[0], *vector.shape[1:]))


@rewrite(
    "vectors",
    summary="a large matrix-vector product becomes our kernel for GEMMs of few rows, where that is faster",
    modes=(INFERENCE,),
    worth=Worth(eager=1.1, compiled=1.1, basis="read at the rate of decoding's products; the faster by a race"),
    exact="reordered",
    needs_kernels=True,
)
def vectors(ctx: GraphContext) -> list[Match]:
    if ctx.training or ctx.autocast:
        return []
    return [match for node in ctx.nodes if (match := _put(ctx, node)) is not None]


def _put(ctx: GraphContext, node: fx.Node) -> Match | None:
    read = call(node)
    if read is None or read.op not in ("matmul", "mm", "mv") or not _fits(ctx, read):
        return None
    matrix, vector = read["input"], read["other"]
    if not ctx.unchanged((matrix, vector), (node,), node):
        return None
    new = ctx.emit(node, raced_vector, matrix, vector)
    if not ctx.replace(node, new):
        return None
    ctx.discard(node)
    return ctx.match(new, f"matrix {ctx.shape(matrix)} times a vector")


def _fits(ctx: GraphContext, read: Call) -> bool:
    matrix, vector = ctx.tensor(read["input"]), ctx.tensor(read["other"])
    if matrix is None or vector is None or matrix.dim() != 2 or not matrix.is_contiguous():
        return False
    single = vector.dim() == 1 or (vector.dim() == 2 and vector.shape[1] == 1)
    if not single or matrix.numel() < LEAST_ELEMENTS or matrix.shape[1] != vector.shape[0]:
        return False
    row = vector.new_empty((1, vector.shape[0]))
    return LINEAR.support(row, matrix, None, None, None, 1e-6, 0.0, "none", False) is None
