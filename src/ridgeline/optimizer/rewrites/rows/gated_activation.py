"""Recognizes activations written as separate ops, and fuses gates with their products."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import fx

from ridgeline.kernels import geglu, relu2, swiglu
from ridgeline.kernels.gated.op import GATED
from ridgeline.kernels.relu2.op import RELU2
from ridgeline.optimizer.rewrites.context import GraphContext
from ridgeline.optimizer.rewrites.op_names import Call, call
from ridgeline.optimizer.rewrites.registry import INFERENCE, TRAINING, Match, Worth, rewrite

GELU_TANH_CUBIC = 0.044715
_CLOSE = 1e-4
"""Tolerance for the constants of an approximate GELU: 0.7978845608 or math.sqrt(2 / math.pi)."""


@rewrite(
    "activation",
    summary="SiLU, GELU and squared ReLU as separate ops become one call",
    worth=Worth(eager=3.0, compiled=1.0001, basis="three to eight passes over memory become one; compilers fuse them"),
)
def activation(ctx: GraphContext) -> list[Match]:
    found = []
    for node in ctx.nodes:
        read = call(node)
        if read is None or read.op not in ("mul", "pow", "square"):
            continue
        for name, form, target, options in _FORMS:
            source = form(read)
            if source is not None and _put(ctx, node, target, source, options):
                found.append(ctx.match(node, f"{name} written out"))
                break
    return found


def _put(ctx: GraphContext, node: fx.Node, target: Any, source: fx.Node, options: dict[str, Any]) -> bool:
    if not ctx.unchanged((source,), _between(node, source), node):
        return False
    new = ctx.emit(node, target, source, **options)
    if not ctx.replace(node, new):
        return False
    ctx.discard(node)
    return True


def _between(node: fx.Node, source: fx.Node) -> list[fx.Node]:
    """The nodes from ``node`` back to ``source``."""
    found, todo = [node], [node]
    while todo:
        for each in todo.pop().all_input_nodes:
            if each is not source and each not in found and call(each) is not None and len(found) < 16:
                found.append(each)
                todo.append(each)
    return found


def _silu(read: Call) -> fx.Node | None:
    """x · sigmoid(x)."""
    for x, gate in _sides(read, "mul"):
        inner = call(gate)
        if inner is not None and inner.op == "sigmoid" and inner["input"] is x and len(gate.users) == 1:
            return x
    return None


def _gelu_erf(read: Call) -> fx.Node | None:
    """0.5 · x · (1 + erf(x / √2)) in any order of its factors."""
    return _gelu(read, _erf_argument)


def _gelu_tanh(read: Call) -> fx.Node | None:
    """0.5 · x · (1 + tanh(√(2/π) · (x + 0.044715 · x³)))."""
    return _gelu(read, _tanh_argument)


_FORMS: tuple[tuple[str, Any, Any, dict[str, Any]], ...] = (
    ("SiLU", _silu, F.silu, {}),
    ("GELU", _gelu_erf, F.gelu, {}),
    ("GELU", _gelu_tanh, F.gelu, {"approximate": "tanh"}),
)


def _gelu(read: Call, argument: Any) -> fx.Node | None:
    if read.op != "mul":
        return None
    number, factors = _factors(read.node)
    if abs(number - 0.5) > _CLOSE / 2 or len(factors) != 2:
        return None
    for x, one_plus in (tuple(factors), tuple(reversed(factors))):
        inner = _less_number(one_plus, 1.0)
        if inner is not None and argument(inner) is x:
            return x
    return None


def _factors(node: fx.Node, depth: int = 3) -> tuple[float, list[fx.Node]]:
    """A product as a number and its factors; inner products with other users stay whole."""
    read = call(node)
    if depth == 0 or read is None or read.op not in ("mul", "div"):
        return 1.0, [node]
    if read.op == "div":
        number = _number(read["other"])
        if number is None or number == 0 or not isinstance(read["input"], fx.Node):
            return 1.0, [node]
        inner, nodes = _inner(read["input"], depth)
        return inner / number, nodes
    total = 1.0
    found: list[fx.Node] = []
    for side in (read["input"], read["other"]):
        number = _number(side)
        if number is not None:
            total *= number
        elif isinstance(side, fx.Node):
            inner, nodes = _inner(side, depth)
            total, found = total * inner, [*found, *nodes]
    return total, found


def _inner(node: fx.Node, depth: int) -> tuple[float, list[fx.Node]]:
    return _factors(node, depth - 1) if len(node.users) == 1 else (1.0, [node])


def _less_number(node: Any, number: float) -> fx.Node | None:
    """x of x + number."""
    read = call(node)
    if read is None or read.op != "add" or read.given.get("alpha") not in (None, 1):
        return None
    for x, other in _sides(read, "add", numbers=True):
        if _number(other) == number and isinstance(x, fx.Node):
            return x
    return None


def _erf_argument(node: fx.Node) -> fx.Node | None:
    read = call(node)
    if read is None or read.op != "erf":
        return None
    number, factors = _factors(read["input"])
    return factors[0] if len(factors) == 1 and abs(number - math.sqrt(0.5)) < _CLOSE else None


def _tanh_argument(node: fx.Node) -> fx.Node | None:
    read = call(node)
    if read is None or read.op != "tanh":
        return None
    number, factors = _factors(read["input"])
    if len(factors) == 1 and abs(number - math.sqrt(2 / math.pi)) < _CLOSE:
        return _with_cube(factors[0])
    if len(factors) == 2 and abs(number - math.sqrt(2 / math.pi)) < _CLOSE:
        return _factored_cube(factors)
    return None


def _with_cube(node: fx.Node) -> fx.Node | None:
    """x of x + 0.044715 · x³."""
    read = call(node)
    if read is None or read.op != "add" or read.given.get("alpha") not in (None, 1):
        return None
    for x, cube in _sides(read, "add"):
        number, factors = _factors(cube)
        if abs(number - GELU_TANH_CUBIC) < _CLOSE * GELU_TANH_CUBIC and _powers(factors, x) == 3:
            return x
    return None


def _factored_cube(factors: list[fx.Node]) -> fx.Node | None:
    """x of x · (1 + 0.044715 · x²)."""
    for x, rest in (tuple(factors), tuple(reversed(factors))):
        inner = _less_number(rest, 1.0)
        if inner is None:
            continue
        number, squares = _factors(inner)
        if abs(number - GELU_TANH_CUBIC) < _CLOSE * GELU_TANH_CUBIC and _powers(squares, x) == 2:
            return x
    return None


def _powers(factors: list[fx.Node], x: fx.Node) -> float:
    """The exponent of x in a product of nodes, or -1."""
    total = 0.0
    for node in factors:
        read = call(node)
        if node is x:
            total += 1
        elif read is not None and read.op == "pow" and read["input"] is x and _number(read["other"]) is not None:
            total += _number(read["other"])  # type: ignore[operator]
        elif read is not None and read.op == "square" and read["input"] is x:
            total += 2
        else:
            return -1
    return total


def _sides(read: Call, op: str, numbers: bool = False) -> list[tuple[Any, Any]]:
    """Both orders of a commutative call's arguments."""
    if read.op != op:
        return []
    a, b = read.given.get("input"), read.given.get("other")
    if not numbers and not (isinstance(a, fx.Node) and isinstance(b, fx.Node)):
        return []
    return [(a, b), (b, a)]


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


# gates --------------------------------------------------------------------------------------------------------------


@rewrite(
    "gate",
    summary="silu(a) · b, gelu(a) · b and relu(a)² become one kernel, forward and backward",
    worth={
        INFERENCE: Worth(
            eager=1.7, compiled=0.98, basis="swiglu 8192x14336: 167 µs against 286 eager; compilers fuse it"
        ),
        TRAINING: Worth(eager=1.7, compiled=1.0, basis="swiglu backward 278 µs against 496 eager; compilers fuse it"),
    },
    needs_kernels=True,
)
def gate(ctx: GraphContext) -> list[Match]:
    found = []
    for node in ctx.nodes:
        read = call(node)
        if read is None or ctx.autocast:
            continue
        match = _gated(ctx, read) or _squared_relu(ctx, read)
        if match is not None:
            found.append(match)
    return found


def _gated(ctx: GraphContext, read: Call) -> Match | None:
    for gated, up in _sides(read, "mul"):
        kind = _gate_kind(gated)
        if kind is None or len(gated.users) != 1 or up is gated:
            continue
        source = call(gated)["input"]  # type: ignore[index]
        if GATED.support(ctx.value(source), ctx.value(up), kind) is not None or ctx.tensor(source) is None:
            continue
        if not ctx.unchanged((source, up), (gated, read.node), read.node):
            continue
        if kind == "silu":
            new = ctx.emit(read.node, swiglu, source, up)
        else:
            new = ctx.emit(read.node, geglu, source, up, kind.removeprefix("gelu_"))
        if ctx.replace(read.node, new):
            ctx.discard(read.node)
            return ctx.match(new, f"{kind} gate {tuple(ctx.shape(source) or ())}")
    return None


def _gate_kind(node: Any) -> str | None:
    read = call(node)
    if read is None:
        return None
    if read.op == "silu":
        return "silu"
    if read.op == "gelu":
        return f"gelu_{read.get('approximate', 'none')}"
    return None


def _squared_relu(ctx: GraphContext, read: Call) -> Match | None:
    inner = read.given.get("input")
    is_square = read.op == "square" or (read.op == "pow" and _number(read["other"]) == 2.0)
    is_product = read.op == "mul" and inner is read.given.get("other")
    rectified = call(inner)
    if not (is_square or is_product) or rectified is None or rectified.op != "relu" or len(rectified.node.users) != 1:
        return None
    source = rectified["input"]
    if ctx.tensor(source) is None or RELU2.support(ctx.value(source)) is not None:
        return None
    if not ctx.unchanged((source,), (inner, read.node), read.node):
        return None
    new = ctx.emit(read.node, relu2, source)
    if not ctx.replace(read.node, new):
        return None
    ctx.discard(read.node)
    return ctx.match(new, f"squared ReLU {tuple(ctx.shape(source) or ())}")
