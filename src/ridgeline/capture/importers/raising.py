"""Decomposed exports raised back to the calls the network made: attention, norms, activations, linear layers.

What an exporter took apart is put together; what a network spelled out itself stays as it is, because its price is that
of the network and the optimizer's own rewrites know it. Exporters betray themselves: attention's scale is split between
queries and keys, a reciprocal root is two ops, a group norm is an instance norm of a reshaped input.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

Constants = Mapping[str, torch.Tensor]


def name_of(node: Any) -> str:
    """The call's name: ``mul`` for torch.mul and Tensor.mul alike."""
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        return ""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def is_call(node: Any, *names: str) -> bool:
    return name_of(node) in names


def shape_of(node: Any) -> tuple[int, ...]:
    return tuple(node.meta.get("shape", ())) if isinstance(node, fx.Node) else ()


def close(value: Any, wanted: float, tolerance: float = 2e-3) -> bool:
    return isinstance(value, (int, float)) and abs(value - wanted) <= tolerance * max(abs(wanted), 1e-6)


def factor(node: Any, value: float) -> Any:
    """What is multiplied by the constant, or divided by its inverse; None if this is no such product."""
    if is_call(node, "mul"):
        a, b = node.args
        return a if close(b, value) else b if close(a, value) else None
    if is_call(node, "div") and close(node.args[1], 1 / value):
        return node.args[0]
    return None


def offset(node: Any, value: float) -> Any:
    """What the constant is added to."""
    if not is_call(node, "add"):
        return None
    a, b = node.args
    return a if close(b, value) else b if close(a, value) else None


def pair(node: Any, name: str, test: Callable[[Any], bool]) -> Any:
    """(the operand that passes, the other one) of a commutative call."""
    if not is_call(node, name) or len(node.args) != 2:
        return None
    a, b = node.args
    if isinstance(a, fx.Node) and test(a):
        return a, b
    return (b, a) if isinstance(b, fx.Node) and test(b) else None


def alone(*nodes: fx.Node) -> bool:
    """Whether each is read by one other only, so that nothing else needs what it makes."""
    return all(len(node.users) == 1 for node in nodes)


class Rewriter:
    """Replaces a node by a call; what nothing reads any more goes in the end."""

    def __init__(self, graph: fx.Graph, constants: Constants, weight: Callable[[str], torch.Tensor]) -> None:
        self.graph, self.constants, self.weight = graph, constants, weight

    def call(self, at: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None,
             shape: tuple[int, ...] | None = None) -> fx.Node:  # fmt: skip
        with self.graph.inserting_before(at):
            made = self.graph.call_function(target, args, kwargs or {})
        made.meta.update(at.meta)
        if shape is not None:
            made.meta["shape"] = shape
        return made

    def replace(self, node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        node.replace_all_uses_with(self.call(node, target, args, kwargs))

    def constant(self, node: Any) -> torch.Tensor | None:
        """The value of a constant the program holds."""
        if isinstance(node, fx.Node) and node.op == "get_attr":
            return self.constants.get(str(node.target))
        if isinstance(node, fx.Node) and "weight" in node.meta and math.prod(shape_of(node)) <= 1 << 22:
            return self.weight(node.meta["weight"])
        return None


def raised(graph: fx.Graph, constants: Constants, weight: Callable[[str], torch.Tensor], form: str = "") -> None:
    """Rewrite in place, pattern by pattern; ``weight`` reads a weight, for masks that are stored as one."""
    rewriter = Rewriter(graph, constants, weight)
    patterns = PATTERNS
    if form == "stablehlo":
        from ridgeline.capture.importers import raising_xla

        patterns = [PATTERNS[0], *raising_xla.PATTERNS, *PATTERNS[1:]]
    for pattern in patterns:
        for node in list(graph.nodes):
            if node.op in ("call_function", "call_method") and (node.users or pattern is PATTERNS[0]):
                pattern(rewriter, node)
        graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))


# --- activations ----------------------------------------------------------------------------------------------------


def rsqrt(r: Rewriter, node: fx.Node) -> None:
    root: Any = (
        node.args[0]
        if is_call(node, "reciprocal")
        else (node.args[1] if is_call(node, "div") and close(node.args[0], 1.0) else None)
    )
    if is_call(root, "sqrt"):
        r.replace(node, torch.rsqrt, (root.args[0],))
    elif is_call(node, "pow") and close(node.args[1], -0.5, 0):
        r.replace(node, torch.rsqrt, (node.args[0],))


def silu(r: Rewriter, node: fx.Node) -> None:
    found = pair(node, "mul", lambda n: is_call(n, "sigmoid"))
    if found and found[0].args[0] is found[1]:
        r.replace(node, F.silu, (found[1],))


def gelu_erf(r: Rewriter, node: fx.Node) -> None:
    """x · (1 + erf(x / √2)) / 2, in whatever order the factors come."""
    leaves = list[Any]()
    half = 1.0

    def collect(n: Any, depth: int) -> None:
        nonlocal half
        if is_call(n, "mul") and depth < 3 and (depth == 0 or alone(n)):
            for arg in n.args:
                if isinstance(arg, (int, float)):
                    half *= arg
                else:
                    collect(arg, depth + 1)
        elif is_call(n, "div") and isinstance(n.args[1], (int, float)) and depth < 3 and (depth == 0 or alone(n)):
            half /= n.args[1]
            collect(n.args[0], depth + 1)
        else:
            leaves.append(n)

    if not is_call(node, "mul", "div"):
        return
    collect(node, 0)
    if len(leaves) != 2 or not close(half, 0.5):
        return
    for x, inner in (leaves, leaves[::-1]):
        erf = offset(inner, 1.0)
        if is_call(erf, "erf") and factor(erf.args[0], math.sqrt(0.5)) is x:
            r.replace(node, F.gelu, (x,))
            return


def gelu_tanh(r: Rewriter, node: fx.Node) -> None:
    """½ · (x · (1 + tanh(…))) or x · (½ · (1 + tanh(…))), as exporters write it; networks multiply x by ½ first."""
    inner = factor(node, 0.5)
    if inner is not None:
        sides = [(x, s) for x, s in (inner.args, inner.args[::-1])] if is_call(inner, "mul") and alone(inner) else []
    else:
        found = pair(node, "mul", lambda n: offset(factor(n, 0.5), 1.0) is not None and alone(n))
        sides = [(found[1], factor(found[0], 0.5))] if found else []
    for x, sum_ in sides:
        tanh = offset(sum_, 1.0)
        if not is_call(tanh, "tanh"):
            continue
        cubic = factor(tanh.args[0], math.sqrt(2 / math.pi))
        if not is_call(cubic, "add") or x not in cubic.args:
            continue
        cube = factor(cubic.args[0] if cubic.args[1] is x else cubic.args[1], 0.044715)
        if is_call(cube, "pow") and cube.args[0] is x and close(cube.args[1], 3):
            r.replace(node, F.gelu, (x,), {"approximate": "tanh"})
            return


# --- norms ----------------------------------------------------------------------------------------------------------


def _last_dims(node: fx.Node, rank: int) -> list[int] | None:
    """Dims that a mean takes, where they are the last ones and are kept."""
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    dims = [dims] if isinstance(dims, int) else list(dims or [])
    dims = sorted(d % rank for d in dims)
    kept = node.kwargs.get("keepdim") or (len(node.args) > 2 and node.args[2])
    return dims if kept and dims == list(range(rank - len(dims), rank)) and dims else None


def layer_norm(r: Rewriter, node: fx.Node) -> None:
    """(x − mean) / √(var + ε), with the scale and the bias after it."""
    if is_call(node, "div") and is_call(node.args[1], "sqrt"):
        centered, root = node.args[0], node.args[1].args[0]
    else:
        found = pair(node, "mul", lambda n: is_call(n, "rsqrt"))
        if not found:
            return
        centered, root = found[1], found[0].args[0]
    if not is_call(centered, "sub") or not is_call(centered.args[1], "mean") or not is_call(root, "add"):
        return
    x, mean = centered.args
    eps = next((a for a in root.args if isinstance(a, (int, float))), None)
    var = next((a for a in root.args if isinstance(a, fx.Node)), None)
    if mean.args[0] is not x or eps is None or not is_call(var, "mean"):
        return
    square: Any = var.args[0] if var is not None else None
    squared: Any = (
        square.args[0]
        if is_call(square, "pow") and close(square.args[1], 2)
        else (square.args[0] if is_call(square, "mul") and square.args[0] is square.args[1] else None)
    )
    rank = len(shape_of(x))
    dims = _last_dims(mean, rank)
    same = squared is centered or (is_call(squared, "sub") and squared.args == centered.args)
    if not same or dims is None or _last_dims(var, rank) != dims:
        return
    shape = shape_of(x)[dims[0] :]
    end, weight, bias = node, None, None
    if alone(end):
        user = next(iter(end.users))
        found = pair(user, "mul", lambda n: n is end)
        if found and shape_of(found[1]) == shape:
            end, weight = user, found[1]
            after = next(iter(end.users)) if alone(end) else None
            found = pair(after, "add", lambda n: n is user)
            if found and after is not None and shape_of(found[1]) == shape:
                end, bias = after, found[1]
    r.replace(end, F.layer_norm, (x, shape, weight, bias, float(eps)))


def group_norm(r: Rewriter, node: fx.Node) -> None:
    """An instance norm of the channels in groups, with a scale and a bias a channel after it."""
    found = pair(node, "add", lambda n: is_call(n, "mul"))
    if not found:
        return
    scaled, bias = found
    inner = pair(scaled, "mul", lambda n: is_call(n, "reshape"))
    if not inner:
        return
    back, weight = inner
    norm = back.args[0]
    if not is_call(norm, "instance_norm") or not is_call(norm.args[0], "reshape"):
        return
    grouped = norm.args[0]
    x = grouped.args[0]
    shape, groups = shape_of(x), shape_of(grouped)
    if shape_of(back) != shape or len(groups) != 3 or len(shape) < 2 or shape[1] % max(groups[1], 1):
        return
    ones, zeros = (r.constant(norm.args[i] if len(norm.args) > i else norm.kwargs.get(k))
                   for i, k in ((3, "weight"), (4, "bias")))  # fmt: skip
    if ones is None or zeros is None or not bool((ones == 1).all()) or bool((zeros != 0).any()):
        return
    sides = []
    for side in (weight, bias):
        if not isinstance(side, fx.Node) or math.prod(shape_of(side)) != shape[1] or shape_of(side)[:1] != (shape[1],):
            return
        flat = side if len(shape_of(side)) == 1 else r.call(node, torch.reshape, (side, (-1,)), shape=(shape[1],))
        sides.append(flat)
    eps = norm.args[7] if len(norm.args) > 7 else norm.kwargs.get("eps", 1e-5)
    r.replace(node, F.group_norm, (x, groups[1], sides[0], sides[1], eps))


# --- products -------------------------------------------------------------------------------------------------------


def linear(r: Rewriter, node: fx.Node) -> None:
    """A product with a matrix of weights, and the bias after it if there is one."""
    found = pair(node, "add", lambda n: is_call(n, "matmul") and alone(n))
    product, bias = found if found else (node, None)
    if not is_call(product, "matmul"):
        return
    x, w = product.args
    turned = is_call(w, "transpose", "t") and w.args[0].op in ("placeholder", "get_attr")
    if len(shape_of(w)) != 2 or len(shape_of(x)) < 2 or (bias is not None and shape_of(bias) != shape_of(w)[1:]):
        return
    if bias is None:
        after = next(iter(product.users), None)
        follows = alone(product) and pair(after, "add", lambda n: n is product)
        if not turned or (follows and shape_of(follows[1]) == shape_of(w)[1:]):
            return  # the sum after it takes it
    elif not turned and not (isinstance(w, fx.Node) and w.op in ("placeholder", "get_attr")):
        return
    flipped = w.args[0] if turned else r.call(node, torch.t, (w,), shape=shape_of(w)[::-1])
    r.replace(node, F.linear, (x, flipped) if bias is None else (x, flipped, bias))


def _scaled(node: Any) -> tuple[Any, float]:
    """What is multiplied by a constant, and the constant."""
    if is_call(node, "mul"):
        for a, b in (node.args, node.args[::-1]):
            if isinstance(b, (int, float)):
                return a, float(b)
    if is_call(node, "div") and isinstance(node.args[1], (int, float)):
        return node.args[0], 1 / float(node.args[1])
    return node, 1.0


def _transposed(node: Any) -> Any:
    """What was transposed in its last two dims, perhaps with batch dims flattened for the time being."""
    shape = shape_of(node)
    if is_call(node, "transpose") and {a % len(shape) for a in node.args[1:3]} == {len(shape) - 2, len(shape) - 1}:
        return node.args[0]
    if is_call(node, "permute"):
        order = list(node.args[1])
        if order[:-2] == list(range(len(order) - 2)) and order[-2:] == [len(order) - 1, len(order) - 2]:
            return node.args[0]
        return None
    if is_call(node, "reshape"):
        inner = node.args[0]
        if is_call(inner, "transpose") and len(shape_of(inner)) == 3 and is_call(inner.args[0], "reshape"):
            source = inner.args[0].args[0]
            before = shape_of(source)
            if len(before) == 4 and shape == (*before[:2], before[3], before[2]):
                return source  # as exporters write the keys of scaled_dot_product_attention
            if is_call(source, "expand") and len(before) == 5:  # keys repeated for their group of queries
                return inner.args[0]
    return None


def _ungrouped(node: Any, heads: int) -> Any:
    """Keys or values before each was repeated for a group of query heads."""
    while is_call(node, "reshape"):
        node = node.args[0]
    if not is_call(node, "expand") or not is_call(node.args[0], "unsqueeze"):
        return None
    source = node.args[0].args[0]
    before, after = shape_of(source), shape_of(node)
    if len(before) == 4 and len(after) == 5 and before[1] * after[2] == heads and after[3:] == before[2:]:
        return source
    return None


def attention(r: Rewriter, node: fx.Node) -> None:
    """softmax(q·√s @ (k·√s)ᵀ + mask) @ v: how exporters write scaled_dot_product_attention."""
    if not is_call(node, "matmul"):
        return
    weights, v = node.args
    guarded = is_call(weights, "where")
    if guarded:  # rows without anything to look at
        test, zero, rest = weights.args
        if not is_call(test, "isnan") or test.args[0] is not rest:
            return
        filled = r.constant(zero)
        if zero != 0 and (filled is None or bool((filled != 0).any())):
            return
        weights = rest
    if not is_call(weights, "softmax") or len(shape_of(v)) != 4:
        return
    dim = weights.kwargs.get("dim", weights.args[1] if len(weights.args) > 1 else None)
    if dim not in (-1, 3):
        return
    scores, mask = weights.args[0], None
    if is_call(scores, "add"):
        found = pair(scores, "add", lambda n: is_call(n, "matmul"))
        if not found:
            return
        scores, mask = found
    if not is_call(scores, "matmul"):
        return
    q, scale_q = _scaled(scores.args[0])
    keys, scale_k = _scaled(scores.args[1])
    k = _transposed(keys)
    if not close(scale_q, scale_k, 1e-6) and guarded:  # the network scales queries itself
        q, scale_q, scale_k = scores.args[0], 1.0, 1.0
        k = _transposed(scores.args[1])
    by_exporter = guarded or is_call(keys, "reshape")
    if k is None or not close(scale_q, scale_k, 1e-6) or (scale_q == 1.0 and not by_exporter):
        return
    k_4d = k
    heads = shape_of(q)[1]
    options: dict[str, Any] = {}
    key, value = _ungrouped(k, heads), _ungrouped(v, heads)
    if key is not None and value is not None:
        k_4d, v, options["enable_gqa"] = key, value, True
    elif len(shape_of(k)) != 4:
        return
    scale = scale_q * scale_k
    if not close(scale, 1 / math.sqrt(shape_of(q)[-1]), 1e-5):
        options["scale"] = scale
    num_q, num_k = shape_of(q)[2], shape_of(k_4d)[2]
    if isinstance(mask, fx.Node):
        if is_call(mask, "where"):
            kept, zero, low = mask.args
            values = [value if isinstance(value, (int, float)) else r.constant(value) for value in (zero, low)]
            if all(v is not None for v in values):
                zeros, lows = (torch.as_tensor(v) for v in values)
                if not bool(zeros.any()) and bool((lows <= -1e4).all()) and len(shape_of(kept)) >= 2:
                    mask = kept
        known = r.constant(mask)
        if known is not None:
            allowed = known if known.dtype is torch.bool else known == 0
            if num_q > 1 and num_q == num_k and _is_causal(known, num_q):
                options["is_causal"], mask = True, None
            elif bool(allowed.all()):
                mask = None
    if (
        isinstance(mask, fx.Node) and mask.meta.get("stride", (1,))[-1] != 1
    ):  # kernels take rows of masks that are dense
        copied = r.call(node, torch.clone, (mask,), {"memory_format": torch.contiguous_format}, shape_of(mask))
        copied.meta["dtype"] = mask.meta["dtype"]
        mask = copied
    r.replace(node, F.scaled_dot_product_attention, (q, k_4d, v, mask), options)


def _is_causal(mask: torch.Tensor, size: int) -> bool:
    """Whether a mask lets every position look at itself and before."""
    if tuple(mask.shape[-2:]) != (size, size):
        return False
    allowed = torch.ones(size, size, dtype=torch.bool).tril()
    flat = mask.reshape(-1, size, size)
    if mask.dtype is torch.bool:
        return bool((flat == allowed).all())
    below, above = flat[:, allowed], flat[:, ~allowed]
    return mask.dtype.is_floating_point and bool((below == 0).all()) and bool((above <= -1e4).all())


# --- what is nothing ------------------------------------------------------------------------------------------------


def identity(r: Rewriter, node: fx.Node) -> None:
    """Calls that hand back what they were given."""
    if is_call(node, "to") and len(node.args) == 2 and isinstance(node.args[0], fx.Node):
        if node.args[0].meta.get("dtype") == node.args[1] and isinstance(node.args[1], torch.dtype):
            node.replace_all_uses_with(node.args[0])
    elif is_call(node, "reshape", "expand") and isinstance(node.args[0], fx.Node) and node.op != "output":
        if shape_of(node) == shape_of(node.args[0]) and node.meta.get("dtype") == node.args[0].meta.get("dtype"):
            node.replace_all_uses_with(node.args[0])
    elif node.target is operator.getitem and isinstance(node.args[0], fx.Node) and isinstance(node.args[1], tuple):
        if shape_of(node) == shape_of(node.args[0]) and all(i == slice(None) for i in node.args[1]):
            node.replace_all_uses_with(node.args[0])


PATTERNS: list[Callable[[Rewriter, fx.Node], None]] = [
    identity, rsqrt, silu, gelu_erf, gelu_tanh, layer_norm, group_norm, attention, linear,
]  # fmt: skip
"""In this order: roots before norms, which read them; attention before products with a bias."""
