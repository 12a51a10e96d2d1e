"""Less arithmetic for the same value: scalings instead of diagonal products, sums before products, numbers joined."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.optimizer.rewrites.context import Scene
from ridgeline.optimizer.rewrites.conv.read import CONVOLUTIONS, settings_of
from ridgeline.optimizer.rewrites.op_names import Call, call
from ridgeline.optimizer.rewrites.registry import Match, Worth, rewrite


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
        shape, dims = scene.shape(read["input"]), read.given.get("dim")
        dims = tuple(dims) if isinstance(dims, (tuple, list)) else (dims,)
        if shape is None or len(dims) != 1 or not isinstance(dims[0], int) or dims[0] % len(shape) != len(shape) - 1:
            continue
        layer = _shifted_product(scene, read["input"])
        if layer is None or scene.dtype(node) is not torch.float32:
            continue
        leaves = (layer.x, layer.weight, *layer.shifts)
        if not scene.unchanged(leaves, (*layer.inside, node), node):
            continue
        new = scene.emit(node, summed_product, layer.x, layer.weight, layer.turned, list(layer.shifts),
                         list(layer.factors), layer.number, layer.scale, read.op == "mean",
                         bool(read.get("keepdim", False)))  # fmt: skip
        if scene.replace(node, new):
            scene.discard(node)
            found.append(scene.match(new, f"{read.op} of {shape[-1]} outputs"))
    return found


@dataclass(frozen=True, slots=True)
class Shifted:
    """scale · (x @ weight) + Σ factor · shift + number, and the nodes it was read from."""

    x: fx.Node
    weight: fx.Node
    turned: bool  # whether the weight lies [outputs, inputs]
    shifts: tuple[fx.Node, ...]
    factors: tuple[float, ...]
    number: float
    scale: float
    inside: tuple[fx.Node, ...]


def _shifted_product(scene: Scene, node: Any) -> Shifted | None:
    """A product with a weight behind scalings by numbers and sums with numbers or one number an output."""
    scale, number = 1.0, 0.0
    shifts: list[fx.Node] = []
    factors: list[float] = []
    inside: list[fx.Node] = []
    width = (scene.shape(node) or (0,))[-1]
    while isinstance(node, fx.Node) and len(node.users) == 1:
        read = call(node)
        if read is None:
            return None
        inside.append(node)
        product = _weighted(scene, read)
        if product is not None:
            x, weight, turned, bias = product
            if bias is not None:
                shifts, factors = [*shifts, bias], [*factors, scale]
            return Shifted(x, weight, turned, tuple(shifts), tuple(factors), number, scale, tuple(inside))
        affine = _affine(read)
        if affine is not None and affine[0] == "mul":
            scale, node = scale * affine[1], affine[2]
        elif affine is not None:
            number, node = number + scale * affine[1], affine[2]
        elif (
            read.op in ("add", "sub") and not read.given.get("alpha") and _is_row(scene, read.given.get("other"), width)
        ):
            shifts.append(read["other"])
            factors.append(scale if read.op == "add" else -scale)
            node = read["input"]
        else:
            return None
    return None


def _is_row(scene: Scene, node: Any, width: int) -> bool:
    """One float32 number an output."""
    return isinstance(node, fx.Node) and scene.shape(node) == (width,) and scene.dtype(node) is torch.float32


def _weighted(scene: Scene, read: Call) -> tuple[fx.Node, fx.Node, bool, fx.Node | None] | None:
    """(x, weight, whether it lies [outputs, inputs], bias) of a product with a matrix."""
    if read.op == "linear":
        return read["input"], read["weight"], True, read.get("bias")
    if read.op not in ("matmul", "mm") or not isinstance(read["input"], fx.Node):
        return None
    other = read["other"]
    if not isinstance(other, fx.Node) or len(scene.shape(other) or ()) != 2 or not scene.shape(read["input"]):
        return None
    return read["input"], other, False, None


def summed_product(
    x: Tensor, weight: Tensor, turned: bool, shifts: list[Tensor], factors: list[float], number: float, scale: float,
    mean: bool, keepdim: bool,
) -> Tensor:  # fmt: skip
    """The sum over the outputs of scale · x @ weight + shifts: x times the sum of the weight's columns."""
    outputs = weight.shape[0 if turned else 1]
    share = 1.0 / outputs if mean else 1.0
    total = torch.matmul(x, weight.sum(0 if turned else 1) * (scale * share))
    for shift, factor in zip(shifts, factors, strict=True):
        total = total + shift.sum() * (factor * share)
    if number:
        total = total + number * share * outputs
    return total.unsqueeze(-1) if keepdim else total


@rewrite(
    "mean-of-convolution",
    summary="the mean of a convolution over all its pixels becomes sums of the image and one small product",
    worth=Worth(eager=5.0, compiled=5.0, basis="the image read a few times instead of a convolution computed"),
    exact="reordered",
)
def mean_of_convolution(scene: Scene) -> list[Match]:
    found = []
    for node in scene.nodes:
        read = call(node)
        averaged = read is not None and pooled_to_one(read)
        if read is None or not (averaged or read.op in ("sum", "mean")) or read.given.get("dtype") or scene.autocast:
            continue
        source, scale = _scaled_source(read["input"])
        layer = call(source)
        settings = None if layer is None or layer.op not in CONVOLUTIONS else settings_of(layer)
        shape = scene.shape(source)
        dims = list(range(2, len(shape or ()))) if averaged else read.given.get("dim")
        if layer is None or settings is None or shape is None or not isinstance(dims, (tuple, list)):
            continue
        pixels = sorted(dim % len(shape) for dim in dims) == list(range(2, len(shape)))
        if not pixels or settings[4] != 1 or len(source.users) != 1:
            continue
        leaves = (layer["input"], layer["weight"], layer.get("bias"))
        if scene.dtype(node) is not torch.float32 or not scene.unchanged(leaves, (source, node), node):
            continue
        new = scene.emit(node, mean_convolved, *leaves, *settings[:3], settings[5], list(shape[2:]), scale,
                         averaged or read.op == "mean", averaged or bool(read.get("keepdim", False)))  # fmt: skip
        if scene.replace(node, new):
            scene.discard(node)
            found.append(scene.match(new, f"{'mean' if averaged else read.op} of {layer.op} over its pixels"))
    return found


def pooled_to_one(read: Call) -> bool:
    """Whether it is the mean over all pixels, as a layer says it."""
    size = read.given.get("output_size")
    ones = all(each == 1 for each in size) if isinstance(size, (tuple, list)) else size == 1
    return read.op == "adaptive_avg_pool" and ones


def _scaled_source(node: Any) -> tuple[Any, float]:
    """(node, number) of a node that is scaled by a number, perhaps more than once."""
    scale = 1.0
    while (read := call(node)) is not None and (affine := _affine(read)) is not None and affine[0] == "mul":
        if len(node.users) != 1:
            break
        scale, node = scale * affine[1], affine[2]
    return node, scale


def mean_convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int],
    transposed: bool, out: list[int], scale: float, mean: bool, keepdim: bool,
) -> Tensor:  # fmt: skip
    """The sum over pixels of a convolution: a tap meets a box of the image's pixels, which is summed before."""
    count = math.prod(out)
    share = scale / count if mean else scale
    taps = [list(range(size)) for size in weight.shape[2:]]
    kept: dict[tuple[Any, ...], Tensor] = {}
    sums = []
    for tap in itertools.product(*taps):
        box = tuple(
            _reach(k, x.shape[2 + i], out[i], stride[i], padding[i], dilation[i], transposed) for i, k in enumerate(tap)
        )
        sums.append(_box_sum(x, box, kept))
    filters = (weight.transpose(0, 1) if transposed else weight).flatten(2)  # [outputs, inputs, taps]
    total = torch.matmul(torch.stack(sums, 2).flatten(1), filters.flatten(1).t()) * share
    if bias is not None:
        total = total + bias * (scale if mean else scale * count)
    return total.view(*total.shape, *([1] * len(out))) if keepdim else total


def _reach(k: int, size: int, out: int, stride: int, padding: int, dilation: int, transposed: bool) -> slice:
    """The pixels of the image that a tap meets in one dim."""
    if transposed:  # output i·stride − padding + k·dilation lies inside
        first = max(0, -(-(padding - k * dilation) // stride))
        return slice(first, min(size, (out - 1 + padding - k * dilation) // stride + 1))
    start = k * dilation - padding
    low = max(0, -(start // stride))
    high = min(out - 1, (size - 1 - start) // stride)
    return slice(start + low * stride, start + high * stride + 1, stride) if high >= low else slice(0, 0)


def _box_sum(x: Tensor, box: tuple[slice, ...], kept: dict[tuple[Any, ...], Tensor]) -> Tensor:
    """[images, channels]: the sum over a box of pixels; sums over leading dims serve several boxes."""
    for depth, part in enumerate(box):
        key = tuple((each.start, each.stop, each.step) for each in box[: depth + 1])
        if key not in kept:
            kept[key] = x[:, :, part].sum(2)
        x = kept[key]
    return x


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
