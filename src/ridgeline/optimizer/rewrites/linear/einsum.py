"""Rewrites einsums that are matrix products to ``matmul`` and ``linear``, which other rewrites recognize."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from ridgeline.optimizer.rewrites.context import GraphContext
from ridgeline.optimizer.rewrites.op_names import Call, call
from ridgeline.optimizer.rewrites.registry import Match, Worth, rewrite


@dataclass(frozen=True, slots=True)
class Letters:
    """Two operands and the letters of their dims; the free letter of the left one comes first in the result."""

    left: str
    right: str
    out: str
    a: fx.Node
    b: fx.Node

    @property
    def summed(self) -> str:
        return "".join(each for each in self.left if each in self.right and each not in self.out)

    @property
    def shared(self) -> str:
        """The letters of both operands and of the result, in its order."""
        return "".join(each for each in self.out if each in self.left and each in self.right)

    @property
    def rows(self) -> str:
        return "".join(each for each in self.left if each not in self.right)

    @property
    def columns(self) -> str:
        return "".join(each for each in self.right if each not in self.left)


@rewrite(
    "einsum",
    summary="an einsum that is a matrix product becomes matmul or linear, which other rewrites recognize",
    worth=Worth(eager=1.0001, compiled=1.0001, basis="PyTorch does the same inside; attention by letters is seen then"),
    exact="rounding",
)
def einsums(ctx: GraphContext) -> list[Match]:
    if ctx.autocast:
        return []
    found = [_put(ctx, read) for node in ctx.nodes if (read := call(node)) is not None and read.op == "dot_einsum"]
    return [match for match in found if match is not None]


def _put(ctx: GraphContext, read: Call) -> Match | None:
    letters = _letters(ctx, read)
    if letters is None or not ctx.unchanged((letters.a, letters.b), (read.node,), read.node):
        return None
    new = _layer(ctx, read.node, letters) or _product(ctx, read.node, letters)
    if new is None:
        return None
    if not ctx.same_shape(read.node, new):
        ctx.discard(new)
        return None
    ctx.replace_any_layout(read.node, new)
    ctx.discard(read.node)
    return ctx.match(new, f"{letters.left},{letters.right}->{letters.out}")


def _letters(ctx: GraphContext, read: Call) -> Letters | None:
    """The equation with all dims named, no letter twice in an operand, and equal sizes in both."""
    operands, equation = read["operands"], read["equation"]
    if len(operands) != 2 or not all(isinstance(each, fx.Node) for each in operands) or not isinstance(equation, str):
        return None
    sides, arrow, out = equation.replace(" ", "").partition("->")
    names, shapes = sides.split(","), [ctx.shape(each) for each in operands]
    if len(names) != 2 or any(shape is None for shape in shapes):
        return None
    if not arrow:  # the implicit output: letters that occur once, sorted
        out = "..." * ("..." in sides) + "".join(sorted(x for x in set(sides) - set(",.") if sides.count(x) == 1))
    named = _without_dots(names, [len(shape or ()) for shape in shapes], out)
    if named is None:
        return None
    left, right, out = named
    if not _is_product(left, right, out) or not _agree(left, right, shapes):
        return None
    a, b = operands
    if out.index(_free(left, right)) > out.index(_free(right, left)):
        left, right, a, b = right, left, b, a
    return Letters(left, right, out, a, b)


def _without_dots(names: list[str], dims: list[int], out: str) -> tuple[str, str, str] | None:
    """The equation with letters in place of the ellipsis, counted from the last dim."""
    spare = [each for each in string.ascii_letters if each not in "".join((*names, out))]
    hidden = [num - len(name.replace("...", "")) if "..." in name else 0 for name, num in zip(names, dims, strict=True)]
    most = max(hidden)
    if min(hidden) < 0 or most > len(spare) or any("." in each.replace("...", "", 1) for each in (*names, out)):
        return None
    pool = "".join(spare[:most])
    left, right = (name.replace("...", pool[most - num :]) for name, num in zip(names, hidden, strict=True))
    return left, right, out.replace("...", pool)


def _is_product(left: str, right: str, out: str) -> bool:
    """Whether one letter is summed, the others kept, and each operand has letters of its own: a (batched) GEMM."""
    if any(len(set(each)) != len(each) for each in (left, right, out)) or set(out) - set(left) - set(right):
        return False
    summed = (set(left) & set(right)) - set(out)
    alone = (set(left) ^ set(right)) - set(out)
    return len(summed) == 1 and not alone and bool(set(left) - set(right)) and bool(set(right) - set(left))


def _free(one: str, other: str) -> str:
    return next(each for each in one if each not in other)


def _agree(left: str, right: str, shapes: list[Any]) -> bool:
    sizes = dict(zip(left, shapes[0], strict=False))
    counted = len(left) == len(shapes[0]) and len(right) == len(shapes[1])
    return counted and all(sizes.get(name, size) == size for name, size in zip(right, shapes[1], strict=False))


def _layer(ctx: GraphContext, at: fx.Node, read: Letters) -> fx.Node | None:
    """A matrix applied to all rows of a tensor, as in a linear layer."""
    if read.shared or len(read.columns) != 1 or read.left[-1] != read.summed or read.out != read.rows + read.columns:
        return None
    if read.right == read.columns + read.summed:
        return ctx.emit(at, F.linear, read.a, read.b)
    return ctx.emit(at, torch.matmul, read.a, read.b)


def _product(ctx: GraphContext, at: fx.Node, read: Letters) -> fx.Node | None:
    """Shared letters first, then rows and columns; keys are transposed last, as attention is usually written."""
    if len(read.rows) != 1 or len(read.columns) != 1 or not read.shared:
        return None
    a = _ordered(ctx, at, read.a, read.left, read.shared + read.rows + read.summed)
    if read.right == read.shared + read.summed + read.columns:
        b = read.b
    else:
        b = _ordered(ctx, at, read.b, read.right, read.shared + read.columns + read.summed)
        b = ctx.emit(at, torch.transpose, b, -2, -1)
    made = ctx.emit(at, torch.matmul, a, b)
    return _ordered(ctx, at, made, read.shared + read.rows + read.columns, read.out)


def _ordered(ctx: GraphContext, at: fx.Node, node: fx.Node, names: str, wanted: str) -> fx.Node:
    if names == wanted:
        return node
    return ctx.emit(at, torch.permute, node, tuple(names.index(each) for each in wanted))
