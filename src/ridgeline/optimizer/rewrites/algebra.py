"""Less arithmetic for the same value: scalings instead of diagonal products, sums before products, numbers joined."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.optimizer.rewrites.registry import Match, Worth, rewrite
from ridgeline.optimizer.rewrites.scene import Scene
from ridgeline.optimizer.rewrites.words import Call, call


@rewrite(
    "diagonal",
    summary="a product with a diagonal matrix becomes a scaling of rows or columns",
    worth=Worth(eager=10.0, compiled=10.0, basis="O(rows x columns) instead of O(rows x columns x rows)"),
    exact="rounding",
)
def diagonal(scene: Scene) -> list[Match]:
    """Where the other matrix is finite: a product turns an infinity into NaN in every row, a scaling does not."""
    found = []
    for node in scene.nodes:
        read = call(node)
        if read is None or read.op not in ("matmul", "mm"):
            continue
        new = None
        left, right = _diagonal_of(scene, read["input"]), _diagonal_of(scene, read["other"])
        if left is not None and len(scene.shape(read["other"]) or ()) == 2:
            leaves, new = (left, read["other"]), scene.emit(node, scaled_rows, left, read["other"])
        elif right is not None and len(scene.shape(read["input"]) or ()) >= 2:
            leaves, new = (read["input"], right), scene.emit(node, scaled_columns, read["input"], right)
        if new is None:
            continue
        if scene.unchanged(leaves, (read["input"], read["other"], node), node) and scene.replace(node, new):
            scene.discard(node)
            found.append(scene.match(new, "diagonal product"))
    return found


def scaled_rows(scale: Tensor, x: Tensor) -> Tensor:
    return scale.unsqueeze(-1) * x


def scaled_columns(x: Tensor, scale: Tensor) -> Tensor:
    return x * scale


def _diagonal_of(scene: Scene, node: Any) -> fx.Node | None:
    """The vector of which a node is the diagonal matrix."""
    read = call(node)
    if read is None or read.op not in ("diag", "diag_embed") or len(node.users) != 1:
        return None
    plain = (
        read.get("diagonal", read.get("offset", 0)) == 0 and read.get("dim1", -2) == -2 and read.get("dim2", -1) == -1
    )
    vector = read["input"]
    return vector if plain and isinstance(vector, fx.Node) and len(scene.shape(vector) or ()) == 1 else None


@rewrite(
    "sum-of-linear",
    summary="the sum or mean of a linear layer's outputs becomes one product with the summed weight",
    worth=Worth(eager=5.0, compiled=5.0, basis="rows x inputs instead of rows x inputs x outputs"),
    exact="reordered",
)
def sum_of_linear(scene: Scene) -> list[Match]:
    found = []
    for node in scene.nodes:
        read = call(node)
        if read is None or read.op not in ("sum", "mean") or read.given.get("dtype") is not None or scene.autocast:
            continue
        layer = call(read["input"])
        shape, dims = scene.shape(read["input"]), read.given.get("dim")
        dims = tuple(dims) if isinstance(dims, (tuple, list)) else (dims,)
        if layer is None or layer.op != "linear" or len(layer.node.users) != 1 or shape is None:
            continue
        if len(dims) != 1 or not isinstance(dims[0], int) or dims[0] % len(shape) != len(shape) - 1:
            continue
        leaves = (layer["input"], layer["weight"], layer.get("bias"))
        if scene.dtype(node) is not torch.float32 or not scene.unchanged(leaves, (layer.node, node), node):
            continue
        new = scene.emit(node, summed_linear, *leaves, read.op == "mean", bool(read.get("keepdim", False)))
        if scene.replace(node, new):
            scene.discard(node)
            found.append(scene.match(new, f"{read.op} of {shape[-1]} outputs"))
    return found


def summed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, mean: bool, keepdim: bool) -> Tensor:
    """sum(linear(x)) over its outputs: x times the sum of the weight's rows."""
    factor = 1.0 / weight.shape[0] if mean else 1.0
    total = torch.matmul(x, weight.sum(0) * factor)
    if bias is not None:
        total = total + bias.sum() * factor
    return total.unsqueeze(-1) if keepdim else total


@rewrite(
    "one-element",
    summary="reductions over a dim of one element become views",
    worth=Worth(eager=1.5, compiled=1.0001, basis="a kernel less each"),
    exact="bits",
)
def one_element(scene: Scene) -> list[Match]:
    found = []
    for node in scene.nodes:
        read = call(node)
        if read is None or read.op not in ("sum", "mean", "logsumexp", "amax") or read.given.get("dtype") is not None:
            continue
        shape, dim = scene.shape(read.given.get("input")), read.given.get("dim")
        dims = tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
        if not shape or not dims or not all(isinstance(d, int) and shape[d] == 1 for d in dims):
            continue
        if not _is_float(scene, read["input"]):
            continue
        new = scene.emit(node, reduced_view, read["input"], dims, bool(read.get("keepdim", False)))
        if scene.replace(node, new):
            scene.discard(node)
            found.append(scene.match(new, f"{read.op} over one element"))
    return found


def _is_float(scene: Scene, node: Any) -> bool:
    dtype = scene.dtype(node)
    return dtype is not None and dtype.is_floating_point


def reduced_view(x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """A reduction over dims of one element: the element itself, in fresh memory as a reduction's result is."""
    return x.clone() if keepdim else x.squeeze(tuple(dims)).clone()


@rewrite(
    "numbers",
    summary="products and sums with several numbers become one",
    worth=Worth(eager=1.5, compiled=1.0001, basis="a kernel less each; compilers fuse them"),
)
def numbers(scene: Scene) -> list[Match]:
    found = []
    for node in scene.nodes:
        read = call(node)
        outer = None if read is None else _affine(read)
        if outer is None:
            continue
        inner_node = outer[2]
        inner_read = call(inner_node)
        inner = None if inner_read is None or len(inner_node.users) != 1 else _affine(inner_read)
        if inner is None or outer[0] != inner[0] or not _is_float(scene, inner[2]):
            continue
        if scene.dtype(inner[2]) != scene.dtype(node) or not scene.unchanged((inner[2],), (inner_node, node), node):
            continue
        target, number = (torch.mul, outer[1] * inner[1]) if outer[0] == "mul" else (torch.add, outer[1] + inner[1])
        new = scene.emit(node, target, inner[2], number)
        if scene.replace(node, new):
            scene.discard(node)
            found.append(scene.match(new, "numbers joined"))
    return found


def _affine(read: Call) -> tuple[str, float, fx.Node] | None:
    """("mul" or "add", number, node) of a call that scales a node or shifts it by a number."""
    if read.op not in ("mul", "div", "add", "sub") or read.given.get("rounding_mode") or read.given.get("alpha"):
        return None
    a, b = read.given.get("input"), read.given.get("other")
    number = _number(b)
    if isinstance(a, fx.Node) and number is not None:
        if read.op == "div":
            return ("mul", 1.0 / number, a) if number else None
        return ("add", -number, a) if read.op == "sub" else (read.op, number, a)
    number = _number(a)
    if isinstance(b, fx.Node) and number is not None and read.op in ("mul", "add"):
        return read.op, number, b
    return None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
