"""What XLA's front ends take apart, put together: softmax, means, norms, activations, attention and biases.

StableHLO has no op for any of them, repeats every operand to the full shape, and writes constants as tensors.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from ridgeline.capture.importers.raising import Rewriter, alone, close, is_call, name_of, offset, pair, shape_of

_BINARY = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "maximum": torch.maximum}


def _uniform(r: Rewriter, node: Any) -> Any:
    """The one value of a constant, whatever shape it was repeated to."""
    while is_call(node, "expand", "reshape"):
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return node if isinstance(node, (int, float)) else None
    t = r.constants[str(node.target)]
    if not t.dtype.is_floating_point or not t.numel() or bool((t != t.reshape(-1)[0]).any()):
        return None
    return float(t.reshape(-1)[0])


def unrepeat(r: Rewriter, node: fx.Node) -> None:
    """Operands of arithmetic before they were repeated, where broadcasting gives the same."""
    if name_of(node) not in _BINARY or len(node.args) != 2 or node.kwargs:
        return
    args, shape = list(node.args), shape_of(node)
    for i, arg in enumerate(args):
        other = args[1 - i]
        value = _uniform(r, arg) if isinstance(other, fx.Node) and shape_of(other) == shape else None
        if value is not None and is_call(node, "add", "mul", "sub", "div") and (i == 1 or is_call(node, "add", "mul")):
            args[i] = value
            if i == 0:
                args = args[::-1]
            break
        if is_call(arg, "expand") and isinstance(other, fx.Node) and shape_of(other) == shape:
            source = arg.args[0]
            if is_call(source, "reshape") and math.prod(shape_of(source)) == shape_of(source)[-1]:
                inner = source.args[0]
                source = inner if shape_of(inner) == shape_of(source)[-1:] else source
            before = shape_of(source)
            if torch.broadcast_shapes(before, shape) == torch.Size(shape):
                args[i] = source
    if args != list(node.args):
        node.args = tuple(args)


def mean(r: Rewriter, node: fx.Node) -> None:
    """A sum over as many elements as it is divided by."""
    if not is_call(node, "div") or not isinstance(node.args[1], (int, float)):
        return
    total, kept = node.args[0], False
    if is_call(total, "reshape"):
        total, kept = total.args[0], True
    if not is_call(total, "sum") or len(total.args) < 2:
        return
    x, dims = total.args[:2]
    full = shape_of(x)
    if node.args[1] != math.prod(full[d] for d in dims) or total.meta.get("dtype") != x.meta.get("dtype"):
        return
    if not kept or shape_of(node) == tuple(1 if d in dims else size for d, size in enumerate(full)):
        r.replace(node, torch.mean, (x, list(dims)), {"keepdim": kept})


def _row_of(node: Any, name: str) -> Any:
    """What a reduction over the last dim, kept as a dim of one, reduces."""
    inner: Any = node.args[0] if is_call(node, "reshape") and shape_of(node)[-1:] == (1,) else None
    if is_call(inner, "maximum") and len(inner.args) == 2:  # of a lower bound of minus infinity
        inner = next((a for a in inner.args if is_call(a, name)), None)
    if not is_call(inner, name) or list(inner.args[1]) != [len(shape_of(inner.args[0])) - 1]:
        return None
    return inner.args[0]


def softmax(r: Rewriter, node: fx.Node) -> None:
    """exp(x − max) over its sum, and x − max less the logarithm of it."""
    shifted: Any = None
    target = F.softmax
    up: Any = node.args[0] if node.args else None
    low: Any = node.args[1] if len(node.args) > 1 else None
    if is_call(node, "div") and is_call(up, "exp") and _row_of(low, "sum") is up:
        shifted = up.args[0]
    elif is_call(node, "sub") and is_call(low, "log"):
        shifted, target = up, F.log_softmax
        inside = _row_of(low.args[0], "sum")
        if not is_call(inside, "exp") or inside.args[0] is not shifted:
            return
    if not is_call(shifted, "sub"):
        return
    x, top = shifted.args
    if _row_of(top, "amax") is x:
        r.replace(node, target, (x,), {"dim": len(shape_of(x)) - 1})


# --- functions of one tensor ----------------------------------------------------------------------------------------

FUNCTIONS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (F.gelu, {}), (F.gelu, {"approximate": "tanh"}), (F.silu, {}), (torch.sigmoid, {}), (torch.erf, {}),
    (F.softplus, {}), (F.logsigmoid, {}), (torch.special.erfc, {}),
]  # fmt: skip
_POINTWISE = frozenset(
    "abs add div erf exp expm1 ge gt le log log1p logical_and logical_not lt maximum minimum mul neg pow reciprocal "
    "rsqrt sigmoid special_erfc sqrt sub tanh where".split()
)


def function(r: Rewriter, node: fx.Node) -> None:
    """Arithmetic on one tensor alone that gives what a known function gives, tried on 4,001 numbers.

    XLA's front ends write erfc and the like as polynomials of their own: there are too many forms to match by shape.
    """
    if name_of(node) not in _POINTWISE or node.meta.get("dtype") != torch.float32:
        return
    inner: set[fx.Node] = set()
    pending = {node}
    while len(inner) < 120:
        last = max(pending)  # in the order they run
        if name_of(last) not in _POINTWISE:
            return
        pending.discard(last)
        inner.add(last)
        if last is not node and any(user not in inner for user in last.users):
            return
        pending.update(arg for arg in last.all_input_nodes if _uniform(r, arg) is None)
        if not pending or sum(name_of(n) not in _POINTWISE for n in pending) > 1:
            return
        (x, *more) = pending
        if not more and len(inner) > 2 and shape_of(x) == shape_of(node) and x.meta.get("dtype") == torch.float32:
            found = _recognized(r, node, x, sorted(inner))
            if found is not None:
                r.replace(node, found[0], (x,), found[1])
                for dead in sorted(inner, reverse=True):  # what is left of it would count as a reader
                    if not dead.users:
                        r.graph.erase_node(dead)
                return
        if not more and name_of(x) not in _POINTWISE:
            return


def _recognized(r: Rewriter, node: fx.Node, x: fx.Node, inner: list[fx.Node]) -> Any:
    grid = torch.linspace(-12, 12, 4001)
    values: dict[fx.Node, Any] = {x: grid}

    def value(arg: Any) -> Any:
        if not isinstance(arg, fx.Node):
            return arg
        return values[arg] if arg in values else torch.tensor(_uniform(r, arg))

    for step in inner:
        args = [value(a) for a in step.args]
        if isinstance(step.target, str):
            values[step] = getattr(args[0], step.target)(*args[1:])
        elif step.target is not operator.getitem and callable(step.target):
            if isinstance(args[0], (int, float)):
                args[0] = torch.tensor(float(args[0]))
            values[step] = step.target(*args, **step.kwargs)
    got = values.get(node)
    if not isinstance(got, torch.Tensor) or got.dtype != torch.float32:
        return None
    for fn, options in FUNCTIONS:
        if torch.allclose(got, fn(grid, **options), rtol=1e-5, atol=1e-6):
            return fn, options
    return None


# --- norms, biases, attention ---------------------------------------------------------------------------------------


def rms_norm(r: Rewriter, node: fx.Node) -> None:
    """x / √(mean x² + ε), and the scale after it."""
    found = pair(node, "mul", lambda n: is_call(n, "rsqrt"))
    if not found:
        return
    root, x = found
    inside = root.args[0]
    eps = next((a for a in inside.args if isinstance(a, (int, float))), None) if is_call(inside, "add") else None
    square: Any = offset(inside, eps) if eps is not None else None
    if not is_call(square, "mean") or not square.kwargs.get("keepdim") or not isinstance(x, fx.Node):
        return
    inner, rank = square.args[0], len(shape_of(x))
    squared = (is_call(inner, "mul") and inner.args == (x, x)) or (is_call(inner, "pow") and inner.args == (x, 2))
    if not squared or [d % rank for d in square.args[1]] != [rank - 1]:
        return
    end, weight, shape = node, None, shape_of(x)[-1:]
    after = next(iter(node.users)) if alone(node) else None
    scaled = pair(after, "mul", lambda n: n is node)
    if scaled and after is not None and shape_of(scaled[1]) == shape:
        end, weight = after, scaled[1]
    r.replace(end, F.rms_norm, (x, shape, weight, float(eps or 0.0)))


def transposed(r: Rewriter, node: fx.Node) -> None:
    """A matrix with its two dims exchanged, by the name that linear layers are known by."""
    if is_call(node, "permute") and list(node.args[1]) == [1, 0]:
        r.replace(node, torch.t, (node.args[0],))


def conv_bias(r: Rewriter, node: fx.Node) -> None:
    """A convolution and the bias of each of its channels."""
    found = pair(node, "add", lambda n: name_of(n) in ("conv1d", "conv2d", "conv3d") and alone(n))
    if not found:
        return
    conv, bias = found
    if (len(conv.args) > 2 and conv.args[2] is not None) or conv.kwargs.get("bias") is not None:
        return
    while is_call(bias, "expand", "reshape"):
        side = shape_of(bias)
        kept = [d for d, size in enumerate(side) if size != 1]
        if is_call(bias, "reshape") and kept not in ([], [len(side) - len(shape_of(conv)) + 1]):
            return
        bias = bias.args[0]
    channels = shape_of(conv)[1]
    if not isinstance(bias, fx.Node) or shape_of(bias) != (channels,) or channels in shape_of(conv)[2:]:
        return
    kwargs = {key: value for key, value in conv.kwargs.items() if key != "bias"}
    r.replace(node, conv.target, (*conv.args[:2], bias, *conv.args[3:]), kwargs)


def relu(r: Rewriter, node: fx.Node) -> None:
    if is_call(node, "maximum") and len(node.args) == 2:
        for x, low in (node.args, node.args[::-1]):
            if isinstance(x, fx.Node) and _uniform(r, low) == 0:
                r.replace(node, torch.relu, (x,))
                return


def attention(r: Rewriter, node: fx.Node) -> None:
    """softmax(q·kᵀ·s + mask)·v, or its transpose, which is how dot_general puts the larger side first."""
    if not is_call(node, "matmul"):
        return
    weights, v = node.args
    turn = lambda n: r.call(node, torch.transpose, (n, 2, 3), shape=tuple(shape_of(n)[d] for d in (0, 1, 3, 2)))
    swapped = is_call(v, "permute") and list(v.args[1]) == [0, 1, 3, 2] and is_call(v.args[0], "softmax")
    if swapped:
        weights, v = v.args[0], turn(weights)
    if not is_call(weights, "softmax") or len(shape_of(v)) != 4 or weights.kwargs.get("dim") not in (3, -1):
        return
    scores, mask, scale = weights.args[0], None, 1.0
    if is_call(scores, "where"):
        test, inside, low = scores.args
        fill, known = _uniform(r, low), r.constant(test)
        if fill is None or fill > -1e4 or known is None or not bool(known.any(-1).all()):
            return  # a row without anything to look at is spread evenly here, and is no number there
        scores, mask = inside, test
    for _ in range(2):
        if is_call(scores, "mul", "div") and isinstance(scores.args[1], (int, float)):
            scale = scale * scores.args[1] if is_call(scores, "mul") else scale / scores.args[1]
            scores = scores.args[0]
    if not is_call(scores, "matmul"):
        return
    q, keys = scores.args
    if len(shape_of(q)) != 4 or shape_of(q)[:2] != shape_of(v)[:2]:
        return
    options: dict[str, Any] = {}
    if not close(scale, 1 / math.sqrt(shape_of(q)[-1]), 1e-5):
        options["scale"] = scale
    if isinstance(mask, fx.Node):
        known = r.constant(mask)
        size = shape_of(q)[2]
        causal = torch.ones(size, size, dtype=torch.bool).tril()
        if known is not None and known.shape[-2:] == causal.shape and bool((known == causal).all()):
            options["is_causal"], mask = True, None
    made = r.call(node, F.scaled_dot_product_attention, (q, turn(keys), v, mask), options,
                  shape=(*shape_of(q)[:3], shape_of(v)[3]))  # fmt: skip
    node.replace_all_uses_with(turn(made) if swapped else made)


PATTERNS: list[Callable[[Rewriter, fx.Node], None]] = [
    unrepeat, mean, softmax, function, relu, transposed, rms_norm, conv_bias, attention,
]  # fmt: skip
"""Operands first, then means and softmax, which norms and attention are made of."""
