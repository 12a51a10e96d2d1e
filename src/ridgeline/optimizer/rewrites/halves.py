"""Large float32 products go to the tensor cores as halves, at float32's own accuracy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.kernels import matmul
from ridgeline.kernels.matmul.op import MATMUL
from ridgeline.optimizer.rewrites.registry import INFERENCE, Match, Worth, rewrite
from ridgeline.optimizer.rewrites.scene import Scene
from ridgeline.optimizer.rewrites.words import Call, call

LEAST_BALANCE = 200.0
"""rows · columns / (rows + columns) from which the faster product pays for taking its factors apart.

A product takes 2mnk / 50 TFLOP/s in float32 and about 2mnk / 130 as halves; splitting moves 12 bytes of every element
of both factors at 3.5 TB/s.
"""


def linear_from_halves(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return matmul(x, weight.t(), bias)


@rewrite(
    "halves",
    summary="large float32 products run on the half-precision tensor cores, as accurate as float32",
    modes=(INFERENCE,),
    worth=Worth(eager=1.5, compiled=1.5, basis="three products at half precision's peak against one at float32's"),
    exact="reordered",
    needs_kernels=True,
)
def halves(scene: Scene) -> list[Match]:
    if scene.training or scene.autocast or torch.backends.cuda.matmul.allow_tf32:
        return []
    found = []
    for node in scene.nodes:
        read = _as_matmul(call(node))
        if read is not None and (match := _put(scene, node, read)) is not None:
            found.append(match)
    return found


def _put(scene: Scene, node: fx.Node, read: Call) -> Match | None:
    factors = _factors(scene, read)
    if factors is None or not _pays(factors):
        return None
    target, args = (linear_from_halves, _linear_args(read)) if read.op == "linear" else (matmul, _matmul_args(read))
    new = scene.emit(node, target, *args)
    if not scene.replace(node, new):
        return None
    scene.discard(node)
    return scene.match(new, f"float32 product {tuple(factors[0].shape)} × {tuple(factors[1].shape)}")


def _as_matmul(read: Call | None) -> Call | None:
    """An einsum that is a product with one matrix, ``...l,lk->...k``, read as that; anything else as it is."""
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


def _factors(scene: Scene, read: Call) -> tuple[Tensor, Tensor] | None:
    """The factors of a product our kernel takes, as [..., M, K] and [K, N]."""
    if read.op not in ("linear", "matmul", "mm", "bmm", "addmm"):
        return None
    if read.given.get("beta", 1) != 1 or read.given.get("alpha", 1) != 1:
        return None
    a, b = scene.tensor(read["input"]), scene.tensor(read["weight" if read.op == "linear" else "other"])
    bias = scene.tensor(read.get("bias"))
    if a is None or b is None or scene.shape(read["input"]) is None or b.dim() < 2:
        return None
    b = b.t() if read.op == "linear" else b
    return (a, b) if MATMUL.support(a, b, bias) is None else None


def _pays(factors: tuple[Tensor, Tensor]) -> bool:
    a, b = factors
    rows = a.shape[-2] if b.dim() == 3 else a.shape[:-1].numel()
    return rows * b.shape[-1] / max(1, rows + b.shape[-1]) >= LEAST_BALANCE
