"""Reverse-mode differentiation of our own graphs: the backward pass and optimizer step a framework would run.

``differentiate`` appends what autograd appends: one gradient rule an op, sums where a value has several consumers,
a reversed block for every block, and then the optimizer. What a rule reads in the backward pass stays alive until
then; a value that a reversed block reads becomes a stack, one slice an iteration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from ridgeline.dtypes import DType, dtype
from ridgeline.errors import GraphError, nearest
from ridgeline.graph.build import Builder, root_of, with_frees
from ridgeline.graph.types import Block, Graph, Kind, Node, Phase, TensorType, Value

Grads = Sequence[int | None]
Rule = Callable[["Tape", Node, Grads], None]
_RULES: dict[str, Rule] = {}


def gradient(op: str) -> Callable[[Rule], Rule]:
    """Register the gradient rule of an op; two for one op are an error."""

    def add(rule: Rule) -> Rule:
        if op in _RULES:
            raise GraphError(f"op {op!r} has two gradient rules")
        _RULES[op] = rule
        return rule

    return add


def differentiate(graph: Graph, loss: int | None = None, optimizer: str = "adamw", foreach: bool = True) -> Graph:
    """``graph`` followed by the gradients of ``loss`` (its first output unless told) and one optimizer step."""
    tape = Tape(graph)
    tape.run(graph.outputs[0] if loss is None else loss)
    append_optimizer(tape.out, tape.param_grads, optimizer, foreach=foreach)
    made = Graph(
        graph.name,
        tuple(tape.out.values),
        tuple(tape.out.items),
        graph.inputs,
        graph.outputs,
        "train",
        {**graph.meta, "optimizer": optimizer},
    )
    return with_frees(made)


class Tape:
    """The backward pass being written: gradients known so far, by the forward value they belong to."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.out = Builder(graph.name, "train")
        self.out.values = list(graph.values)
        self.out.items = list(graph.items)
        self.out.phase = Phase.BACKWARD
        self.grads: dict[int, int] = {}
        self.param_grads: dict[int, int] = {}
        self.needed = _needing_grad(graph)
        # Forward values whose memory follows another order than their dims: transposed, or computed from such
        found: set[int] = set()
        for node, _ in graph.nodes():
            first = bool(node.inputs) and node.inputs[0] in found
            if node.op == "view":
                first = first != (node.attrs.get("fn") == "transpose")
            elif node.op != "pointwise":
                first = node.op == "attention"  # written token by token, heads side by side
            if first:
                found.update(node.outputs)
        self.forward_permuted = found
        self.node: Node | None = None  # the forward node whose rule is running
        self.local: frozenset[int] = frozenset()  # values of the forward block being reversed
        self.repeat = 1
        self.outside: dict[int, int] = {}  # value from outside the block → its running gradient
        self.permuted: set[int] = set()  # gradients laid out in another order than their dims
        self.outer: dict[int, int] = {}  # gradients of the values around the block being reversed

    def run(self, loss: int) -> None:
        """Walk the forward items backward from ``loss``."""
        if loss not in self.needed:
            raise GraphError(f"value {loss} of {self.graph.name} depends on no parameter: nothing to differentiate")
        self.grads[loss] = self.emit("fill", [], self.type(loss), fn="ones_like", module="")
        for item in reversed(self.graph.items):
            if isinstance(item, Block):
                self.reverse(item)
            else:
                self.apply(item)

    def apply(self, node: Node) -> None:
        """Run the rule of one node, if any gradient has reached it."""
        grads = [self.grads.get(o) for o in node.outputs]
        if all(g is None for g in grads) or not any(i in self.needed for i in node.inputs):
            return
        rule = _RULES.get(node.op)
        if rule is None:
            raise GraphError(
                f"no gradient rule for op {node.op!r} at {node.module or 'the top'}"
                f"{nearest(node.op, _RULES)}; write one in graph/backward.py"
            )
        self.node = node
        for output in node.outputs:
            if output not in node.inputs:
                self.grads.pop(output, None)
        rule(self, node, grads)

    # What rules call.

    def type(self, value: int) -> TensorType:
        return self.out.values[value].type

    def needs(self, value: int) -> bool:
        return value in self.needed

    def is_param(self, value: int) -> bool:
        """Whether ``value`` is a parameter itself, not a look at one."""
        seen = self.out.values[value]
        return seen.kind is Kind.PARAM and seen.alias is None

    def emit(
        self, op: str, inputs: Iterable[int], *types: TensorType | int, module: str | None = None, **attrs: Any
    ) -> int:
        """Add a backward node beside the forward node being differentiated; returns its first output."""
        reads = tuple(inputs)
        for value in reads:
            if value in self.local:
                self.stack(value)
        where = module if module is not None else self.node.module if self.node else ""
        return self.out.node(op, reads, types, module=where, **attrs)[0]

    def emit_all(
        self, op: str, inputs: Iterable[int], types: Sequence[TensorType | int], **attrs: Any
    ) -> tuple[int, ...]:
        """Like ``emit``, returning every output."""
        self.emit(op, inputs, *types, **attrs)
        last = self.out._block.nodes[-1] if self.out._block is not None else self.out.items[-1]
        assert isinstance(last, Node)
        return last.outputs

    def pointwise(self, fn: str, inputs: Sequence[int], like: int) -> int:
        out = self.emit("pointwise", inputs, _dense(self.type(like)), fn=fn)
        if inputs[0] in self.permuted:
            self.permuted.add(out)
        return out

    def view(self, grad: int, type_: TensorType, fn: str = "view") -> int:
        """The same gradient seen with another shape; one laid out in another order is copied first."""
        if self.type(grad).shape == type_.shape and fn != "transpose":
            return grad
        if grad in self.permuted and fn == "view":
            grad = self.emit("copy", [grad], _dense(self.type(grad)), fn="clone", transposed=True)
        out = self.out.value(type_, alias=grad)
        if (grad in self.permuted) != (fn == "transpose"):
            self.permuted.add(out)
        return self.emit("view", [grad], out, fn=fn)

    def give(self, value: int, grad: int) -> None:
        """Hand ``value`` a gradient; a second one is added to the first in place."""
        if value not in self.needed:
            return
        grad = self.shrink(grad, self.type(value))
        if value in self.outside:
            self.outside[value] = self._add_into(self.outside[value], grad)
        elif self.is_param(value):
            self._give_param(value, grad)
        else:
            known = self.outer if self.local and value not in self.local else self.grads
            known[value] = self._add_into(known[value], grad) if value in known else grad

    def _give_param(self, param: int, grad: int) -> None:
        known = self.param_grads.get(param)
        self.param_grads[param] = self._own(param, grad) if known is None else self._add_into(known, grad)

    def _own(self, param: int, grad: int) -> int:
        """Make ``grad`` the parameter's own gradient tensor, which outlives the pass."""
        values = self.out.values
        root = root_of(values, grad)
        if (
            values[root].type.numel != values[param].type.numel
            or values[root].kind is not Kind.ACTIVATION
            or root in self._carried()
        ):
            root = grad = self.emit("copy", [grad], _dense(self.type(param)), fn="clone")
        values[root] = replace(
            values[root], kind=Kind.GRAD, count=values[param].count, name=f"{values[param].name}.grad"
        )
        return grad

    def _carried(self) -> set[int]:
        return {c.inner for c in self.out._block.carries} if self.out._block else set()

    def _add_into(self, total: int, grad: int) -> int:
        out = self.out.value(
            self.type(total), self.out.values[total].kind, alias=total, count=self.out.values[total].count
        )
        if total in self.permuted:
            self.permuted.add(out)
        return self.emit("pointwise", [total, grad], out, fn="add", inplace=True)

    def shrink(self, grad: int, want: TensorType) -> int:
        """Undo broadcasting: sum ``grad`` over the dims that ``want`` lacks."""
        have = self.type(grad)
        if have.numel == want.numel:
            return self.view(grad, replace(want, dtype=have.dtype))
        padded = (1,) * (len(have.shape) - len(want.shape)) + want.shape
        dims = tuple(i for i, (h, w) in enumerate(zip(have.shape, padded, strict=True)) if h != w)
        return self.emit("reduce", [grad], replace(_dense(want), dtype=have.dtype), fn="sum", dims=dims, keepdim=True)

    def stack(self, value: int) -> None:
        """Keep every iteration's ``value`` for the reversed block."""
        values = self.out.values
        at: int | None = value
        while at is not None and at in self.local:
            if values[at].count == 1:
                values[at] = replace(values[at], count=self.repeat)
            at = values[at].alias

    # Blocks.

    def reverse(self, block: Block) -> None:
        """The reversed block: gradients of the carried values flow from the last iteration to the first."""
        flowing = [c for c in block.carries if c.next in self.grads]
        if not flowing:
            return
        self.outer = outer = self.grads
        self.grads = {}
        inits = [outer.pop(c.next) for c in flowing]
        self.repeat = block.repeat
        local = frozenset(o for n in block.nodes for o in n.outputs) | {c.inner for c in block.carries}
        sums = self._outside_sums(block, local)
        with self.out.repeat(block.repeat, block.module, reverse=True):
            self.local = local
            inner = [self.out.carry(g) for g in inits]
            self.outside = {v: self.out.carry(s) for v, s in sums.items()}
            started = dict(self.outside)
            self.grads.update({c.next: g for c, g in zip(flowing, inner, strict=True)})
            for node in reversed(block.nodes):
                self.apply(node)
            ends = [self.grads[c.inner] for c in flowing]
            for g, end in zip(inner, ends, strict=True):
                self.out.close_carry(g, end)
            for value, first in started.items():
                self.out.close_carry(first, self.outside[value])
        totals, self.outside, self.outer = self.outside, {}, {}
        self.local, self.repeat, self.grads, self.node = frozenset(), 1, outer, None
        for value, grad in (*((c.init, end) for c, end in zip(flowing, ends, strict=True)), *totals.items()):
            self.give(value, grad)

    def _outside_sums(self, block: Block, local: frozenset[int]) -> dict[int, int]:
        """Zeroed sums for values from outside whose gradient every iteration adds to."""
        if block.repeat == 1:
            return {}
        used = dict.fromkeys(i for n in block.nodes for i in n.inputs if i in self.needed and i not in local)
        shared = [v for v in used if not (self.is_param(v) and self.out.values[v].count > 1)]
        return {v: self.emit("fill", [], _dense(self.type(v)), fn="zeros", module=block.module) for v in shared}


def _needing_grad(graph: Graph) -> set[int]:
    """Parameters and every floating-point value computed from them."""
    values = graph.values
    needed = {v.id for v in values if v.kind is Kind.PARAM and v.type.dtype.family == "float"}
    for item in graph.items:
        if isinstance(item, Node):
            _flow(item, values, needed)
            continue
        for _ in range(2):  # the second pass sees what the first handed around the loop
            needed.update(c.inner for c in item.carries if c.init in needed or c.next in needed)
            for node in item.nodes:
                _flow(node, values, needed)
    return needed


def _flow(node: Node, values: Sequence[Value], needed: set[int]) -> None:
    if any(i in needed for i in node.inputs):
        needed.update(o for o in node.outputs if values[o].type.dtype.family == "float")


def _dense(type_: TensorType) -> TensorType:
    return type_ if type_.layout != "strided" else TensorType(type_.shape, type_.dtype)


def _first(grads: Grads) -> int:
    assert grads[0] is not None
    return grads[0]


# Linear algebra.


@gradient("matmul")
def _matmul(t: Tape, node: Node, grads: Grads) -> None:
    g, a = _first(grads), node.attrs
    x, w = node.inputs[:2]
    b, m, n, k = a["b"], a["m"], a["n"], a["k"]
    if t.needs(x):
        t.give(x, t.emit("matmul", [g, w], _dense(t.type(x)), b=b, m=m, n=k, k=n, trans_b=not a.get("trans_b", False)))
    if t.needs(w):
        t.give(
            w,
            t.emit(
                "matmul",
                [g, x],
                _dense(t.type(w)),
                b=b,
                m=n if a.get("trans_b") else k,
                n=k if a.get("trans_b") else n,
                k=m,
                trans_a=True,
            ),
        )
    if len(node.inputs) > 2 and t.needs(node.inputs[2]):
        bias = node.inputs[2]
        rows = t.view(g, TensorType((m, n), t.type(g).dtype))
        t.give(bias, t.emit("reduce", [rows], t.type(bias), fn="sum", dims=(0,), keepdim=False))


@gradient("grouped_matmul")
def _grouped_matmul(t: Tape, node: Node, grads: Grads) -> None:
    g, a = _first(grads), node.attrs
    x, w, *rest = node.inputs
    m, n, k, groups = a["m"], a["n"], a["k"], a["groups"]
    if t.needs(x):
        t.give(
            x,
            t.emit(
                "grouped_matmul",
                [g, w, *rest],
                _dense(t.type(x)),
                groups=groups,
                m=m,
                n=k,
                k=n,
                which="rows",
                trans_b=not a.get("trans_b", False),
            ),
        )
    if t.needs(w):
        t.give(
            w,
            t.emit(
                "grouped_matmul",
                [g, x, *rest],
                _dense(t.type(w)),
                groups=groups,
                m=n if a.get("trans_b") else k,
                n=k if a.get("trans_b") else n,
                k=m,
                which="reduction",
                trans_a=True,
            ),
        )


@gradient("conv")
def _conv(t: Tape, node: Node, grads: Grads) -> None:
    g, operands = _first(grads), node.inputs
    names = [name for name, value in zip(("input", "weight", "bias"), operands, strict=False) if t.needs(value)]
    wanted = [v for v in operands if t.needs(v)]
    attrs = {**node.attrs, "which": "bwd", "grads": tuple(names)}
    outs = t.emit_all("conv", [g, *operands[:2]], [_dense(t.type(v)) for v in wanted], **attrs)
    for value, grad in zip(wanted, outs, strict=True):
        t.give(value, grad)


@gradient("attention")
def _attention(t: Tape, node: Node, grads: Grads) -> None:
    wanted = [v for v in node.inputs if t.needs(v)]
    attrs = {**node.attrs, "which": "bwd", "bias_grad": any(v in wanted for v in node.inputs[3:])}
    outs = t.emit_all(
        "attention", [_first(grads), *node.inputs, *node.outputs], [_dense(t.type(v)) for v in wanted], **attrs
    )
    for value, grad in zip(wanted, outs, strict=True):
        if value in t.forward_permuted:  # gradients are laid out like what they belong to
            t.permuted.add(grad)
        t.give(value, grad)


# Norms, softmax and losses.


@gradient("norm")
def _norm(t: Tape, node: Node, grads: Grads) -> None:
    g = _first(grads)
    wanted = [v for v in node.inputs[:3] if t.needs(v)]
    names = tuple(name for name, v in zip(("input", "weight", "bias"), node.inputs, strict=False) if t.needs(v))
    reads = [g, node.inputs[0], *node.inputs[1:2], *node.outputs[1:]]
    outs = t.emit_all(
        "norm", reads, [_dense(t.type(v)) for v in wanted], **{**node.attrs, "which": "bwd", "grads": names}
    )
    for value, grad in zip(wanted, outs, strict=True):
        t.give(value, grad)


@gradient("softmax")
def _softmax(t: Tape, node: Node, grads: Grads) -> None:
    x, y = node.inputs[0], node.outputs[0]
    t.give(x, t.emit("softmax", [_first(grads), y], _dense(t.type(x)), **{**node.attrs, "which": "bwd"}))


@gradient("loss")
def _loss(t: Tape, node: Node, grads: Grads) -> None:
    x = node.inputs[0]
    attrs = {**node.attrs, "which": "bwd"}
    t.give(x, t.emit("loss", [_first(grads), *node.inputs, *node.outputs[1:]], _dense(t.type(x)), **attrs))


@gradient("cross_entropy")
def _cross_entropy(t: Tape, node: Node, grads: Grads) -> None:
    x = node.inputs[0]
    t.give(
        x, t.emit("cross_entropy", [_first(grads), *node.inputs], _dense(t.type(x)), **{**node.attrs, "which": "bwd"})
    )


# Elementwise ops.

_FROM_OUTPUT = frozenset("relu sigmoid tanh".split())  # fused kernels that read the result
_FROM_INPUT = frozenset("silu gelu hardswish hardsigmoid hardtanh softplus elu leaky_relu mish".split())
_FACTORS = {"sin": "cos", "cos": "sin", "abs": "sgn"}  # the derivative is another function of the input


@gradient("pointwise")
def _pointwise(t: Tape, node: Node, grads: Grads) -> None:
    fn, g = node.attrs["fn"], _first(grads)
    if len(node.inputs) == 1:
        _unary(t, node, g)
    elif fn in ("add", "sub"):
        _sum(t, node, g)
    elif fn in ("mul", "div"):
        _product(t, node, g)
    elif fn in ("where", "masked_fill"):
        masks = [i for i in node.inputs if not t.needs(i)]
        for value in node.inputs:
            if t.needs(value):
                t.give(value, t.pointwise(fn, [g, *masks], g))
    else:
        raise _no_pointwise_rule(fn, node)


def _no_pointwise_rule(fn: str, node: Node) -> GraphError:
    where = node.module or "the top"
    return GraphError(f"no gradient rule for pointwise fn {fn!r} at {where}; add it to graph/backward.py")


def _unary(t: Tape, node: Node, g: int) -> None:
    fn, x, y = node.attrs["fn"], node.inputs[0], node.outputs[0]
    if fn in ("add", "sub"):
        return t.give(x, g)
    if fn in ("mul", "div", "neg"):
        return t.give(x, t.emit("pointwise", [g], _dense(t.type(x)), **{**node.attrs, "inplace": False}))
    if fn in {"pow", "square", "rsqrt"}:
        # g·(c·baseⁿ), which autograd spells out in three ops
        base = y if fn == "rsqrt" else x
        raised = t.pointwise("pow", [base], base)
        return t.give(
            x, t.pointwise("mul", [g, t.emit("pointwise", [raised], _dense(t.type(base)), fn="mul", scalars=1)], g)
        )
    if fn in _FROM_OUTPUT:
        return t.give(x, t.pointwise("threshold_backward" if fn == "relu" else f"{fn}_backward", [g, y], x))
    if fn in _FROM_INPUT:
        return t.give(x, t.pointwise(f"{fn}_backward", [g, x], x))
    return t.give(x, _spelled_out(t, node, g, x, y))


def _spelled_out(t: Tape, node: Node, g: int, x: int, y: int) -> int:
    """Gradients that autograd writes in plain ops."""
    fn = node.attrs["fn"]
    if fn in _FACTORS:
        return t.pointwise("mul", [g, t.pointwise(_FACTORS[fn], [x], x)], g)
    if fn == "exp":
        return t.pointwise("mul", [g, y], g)
    if fn == "log":
        return t.pointwise("div", [g, x], g)
    if fn == "sqrt":
        return t.pointwise("div", [g, t.emit("pointwise", [y], _dense(t.type(y)), fn="mul", scalars=1)], g)
    if fn == "reciprocal":
        return t.pointwise("mul", [t.pointwise("mul", [t.pointwise("neg", [g], g), y], g), y], g)
    if fn == "clamp":
        inside = t.emit("pointwise", [x], TensorType(t.type(x).shape, dtype("bool")), fn="ge", scalars=1)
        return t.pointwise("where", [g, inside], g)
    raise _no_pointwise_rule(fn, node)


def _sum(t: Tape, node: Node, g: int) -> None:
    for position, value in enumerate(node.inputs):
        if t.needs(value):
            t.give(value, t.pointwise("neg", [g], g) if node.attrs["fn"] == "sub" and position else g)


def _product(t: Tape, node: Node, g: int) -> None:
    fn, (a, b) = node.attrs["fn"], node.inputs
    if t.needs(a):
        t.give(a, t.pointwise(fn, [g, b], g))
    if t.needs(b) and fn == "mul":
        t.give(b, t.pointwise("mul", [g, a], g))
    elif t.needs(b):  # -g·(a/b)/b
        ratio = t.pointwise("div", [t.pointwise("div", [a, b], g), b], g)
        t.give(b, t.pointwise("mul", [t.pointwise("neg", [g], g), ratio], g))


# Movement.


@gradient("view")
def _view(t: Tape, node: Node, grads: Grads) -> None:
    fn, x = node.attrs.get("fn", "view"), node.inputs[0]
    want = _dense(t.type(x))
    if fn in ("split", "unbind"):
        pieces = [
            t.emit("fill", [], _dense(t.type(o)), fn="zeros") if g is None else g
            for o, g in zip(node.outputs, grads, strict=True)
        ]
        dim = node.attrs.get("dim", 0)
        t.give(x, t.emit("copy", pieces, want, fn="cat" if fn == "split" else "stack", dim=dim))
    elif fn == "slice":
        t.give(x, t.emit("copy", [_first(grads)], want, fn="slice_backward"))
    elif fn == "expand":
        t.give(x, t.shrink(_first(grads), want))
    else:
        t.give(x, t.view(_first(grads), t.type(x), fn))


@gradient("copy")
def _copy(t: Tape, node: Node, grads: Grads) -> None:
    fn, g = node.attrs["fn"], _first(grads)
    if fn in ("cat", "stack"):
        for value in node.inputs:  # each part's gradient is a look at its share of the whole one
            if t.needs(value):
                t.give(value, t.view(g, replace(_dense(t.type(value)), layout="strided"), "slice"))
    elif fn == "to":
        t.give(node.inputs[0], t.emit("copy", [g], _dense(t.type(node.inputs[0])), fn="to"))
    elif fn == "constant_pad_nd":
        t.give(node.inputs[0], t.view(g, replace(_dense(t.type(node.inputs[0])), layout="strided"), "slice"))
    elif fn in ("repeat", "roll"):
        t.give(
            node.inputs[0],
            t.emit(
                "copy" if fn == "roll" else "reduce",
                [g],
                _dense(t.type(node.inputs[0])),
                **({"fn": "roll"} if fn == "roll" else {"fn": "sum", "dims": (0,)}),
            ),
        )
    else:  # clone, contiguous: the gradient passes as it is
        t.give(node.inputs[0], g)


@gradient("reduce")
def _reduce(t: Tape, node: Node, grads: Grads) -> None:
    fn, x, g = node.attrs["fn"], node.inputs[0], _first(grads)
    want = _dense(t.type(x))
    if fn == "sum":
        wide = t.out.value(replace(want, layout="strided"), alias=g)
        t.give(x, t.emit("view", [g], wide, fn="expand"))
    elif fn == "mean":
        t.give(x, t.emit("pointwise", [g], want, fn="div", scalars=1))
    elif fn == "norm":  # x·(g/‖x‖)
        ratio = t.pointwise("div", [g, node.outputs[0]], g)
        t.give(x, t.emit("pointwise", [x, ratio], want, fn="mul"))
    elif fn in ("amax", "amin"):  # shared among the elements that are the largest
        top = t.emit("pointwise", [x, node.outputs[0]], TensorType(want.shape, dtype("bool")), fn="eq")
        num = t.emit("reduce", [top], _dense(t.type(g)), fn="sum", dims=node.attrs["dims"], keepdim=True)
        t.give(x, t.emit("pointwise", [top, t.pointwise("div", [g, num], g)], want, fn="mul"))
    else:
        raise GraphError(f"no gradient rule for reduce fn {fn!r} at {node.module}; add it to graph/backward.py")


@gradient("embedding")
def _embedding(t: Tape, node: Node, grads: Grads) -> None:
    table, indices = node.inputs
    t.give(
        table, t.emit("embedding", [_first(grads), indices], _dense(t.type(table)), **{**node.attrs, "which": "bwd"})
    )


@gradient("embedding_bag")
def _embedding_bag(t: Tape, node: Node, grads: Grads) -> None:
    table = node.inputs[0]
    t.give(
        table,
        t.emit(
            "embedding_bag", [_first(grads), *node.inputs[1:]], _dense(t.type(table)), **{**node.attrs, "which": "bwd"}
        ),
    )


@gradient("gather")
def _gather(t: Tape, node: Node, grads: Grads) -> None:
    x, *indices = node.inputs
    zeros = t.emit("fill", [], _dense(t.type(x)), fn="zeros")
    out = t.out.value(_dense(t.type(x)), alias=zeros)
    t.give(
        x,
        t.emit(
            "scatter", [zeros, _first(grads), *indices], out, fn="index_add", num=node.attrs.get("num", 0), inplace=True
        ),
    )


@gradient("scatter")
def _scatter(t: Tape, node: Node, grads: Grads) -> None:
    g = _first(grads)
    base, *rest = node.inputs
    indices = [i for i in rest if not t.needs(i)]
    if t.needs(base):
        t.give(base, g)
    for source in rest:
        if t.needs(source):
            t.give(
                source,
                t.emit(
                    "gather",
                    [g, *indices],
                    _dense(t.type(source)),
                    fn="index_select",
                    num=math.prod(t.type(source).shape),
                ),
            )


@gradient("topk")
def _topk(t: Tape, node: Node, grads: Grads) -> None:
    x = node.inputs[0]
    zeros = t.emit("fill", [], _dense(t.type(x)), fn="zeros")
    out = t.out.value(_dense(t.type(x)), alias=zeros)
    t.give(
        x,
        t.emit(
            "scatter",
            [zeros, _first(grads), node.outputs[1]],
            out,
            fn="value_selecting_backward",
            num=t.type(node.outputs[0]).numel,
            inplace=True,
        ),
    )


@gradient("scan")
def _scan(t: Tape, node: Node, grads: Grads) -> None:
    wanted = [v for v in node.inputs if t.needs(v)]
    extra = [] if node.attrs["fn"] == "cumsum" else [*node.inputs, *node.outputs]
    outs = t.emit_all(
        "scan", [_first(grads), *extra], [_dense(t.type(v)) for v in wanted], **{**node.attrs, "which": "bwd"}
    )
    for value, grad in zip(wanted, outs, strict=True):
        t.give(value, grad)


@gradient("pool")
def _pool(t: Tape, node: Node, grads: Grads) -> None:
    x = node.inputs[0]
    t.give(
        x, t.emit("pool", [_first(grads), x, *node.outputs[1:]], _dense(t.type(x)), **{**node.attrs, "which": "bwd"})
    )


@gradient("resize")
def _resize(t: Tape, node: Node, grads: Grads) -> None:
    wanted = [v for v in node.inputs if t.needs(v)]
    reads = [_first(grads), *(node.inputs if len(node.inputs) > 1 else ())]
    outs = t.emit_all("resize", reads, [_dense(t.type(v)) for v in wanted], **{**node.attrs, "which": "bwd"})
    for value, grad in zip(wanted, outs, strict=True):
        t.give(value, grad)


_TRANSPOSED = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather", "spread": "all_reduce",
               "all_to_all": "all_to_all", "ring": "ring"}  # fmt: skip


@gradient("collective")
def _collective(t: Tape, node: Node, grads: Grads) -> None:
    """What ranks gathered they sum, what they summed they spread; a sum's gradient is everyone's own."""
    fn, x, g = node.attrs["fn"], node.inputs[0], _first(grads)
    if fn == "all_reduce":
        return t.give(x, g)
    if fn not in _TRANSPOSED:
        raise GraphError(f"no gradient rule for collective {fn!r} at {node.module}; add it to graph/backward.py")
    attrs = {**node.attrs, "fn": _TRANSPOSED[fn]}
    if fn == "spread":
        attrs["num_bytes"] = t.type(x).num_bytes
    elif fn == "ring":
        attrs["num_bytes"] = 2 * node.attrs["num_bytes"]  # keys and values come round again, with their gradients
    return t.give(x, t.emit("collective", [g], _dense(t.type(x)), **attrs))


# The optimizer step.

_ADAMW = (  # fn, operands of a state each reads and writes, in the order torch.optim's foreach path runs them
    ("mul", ("param",), "param"), ("lerp", ("exp_avg", "grad"), "exp_avg"), ("mul", ("exp_avg_sq",), "exp_avg_sq"),
    ("addcmul", ("exp_avg_sq", "grad"), "exp_avg_sq"), ("sqrt", ("exp_avg_sq",), "root"), ("div", ("root",), "root"),
    ("add", ("root",), "root"), ("addcdiv", ("param", "exp_avg", "root"), "param"),
)  # fmt: skip


def append_optimizer(out: Builder, grads: dict[int, int], optimizer: str, *, foreach: bool = True) -> None:
    """One step over every parameter that has a gradient, grouped by dtype as foreach optimizers do."""
    out.phase = Phase.OPTIMIZER
    steps = {"adamw": _adamw_foreach if foreach else _fused, "adamw_fused": _fused, "sgd": _sgd, "none": None}
    if optimizer not in steps:
        raise GraphError(f"unknown optimizer {optimizer!r}{nearest(optimizer, steps)}")
    step = steps[optimizer]
    groups: dict[DType, list[int]] = {}
    for param in sorted(grads):
        groups.setdefault(out.values[param].type.dtype, []).append(param)
    for params in groups.values():
        if step is not None:
            step(out, params, [grads[p] for p in params])


def _states(out: Builder, params: Sequence[int], name: str) -> list[int]:
    values = out.values
    return [
        out.value(values[p].type, Kind.STATE, count=values[p].count, name=f"{values[p].name}.{name}") for p in params
    ]


def _extent(out: Builder, params: Sequence[int]) -> tuple[int, int]:
    """How many tensors and elements a step touches."""
    values = [out.values[p] for p in params]
    return sum(v.count for v in values), sum(v.type.numel * v.count for v in values)


def _adamw_foreach(out: Builder, params: list[int], grads: list[int]) -> None:
    num, numel = _extent(out, params)
    held = {
        "param": params,
        "grad": grads,
        "exp_avg": _states(out, params, "exp_avg"),
        "exp_avg_sq": _states(out, params, "exp_avg_sq"),
        "root": [],
    }
    for fn, reads, writes in _ADAMW:
        inputs = [v for name in reads for v in held[name]]
        targets: Sequence[int | TensorType] = held[writes] or [TensorType((numel,), out.values[params[0]].type.dtype)]
        made = out.node(
            "foreach",
            inputs,
            targets,
            module="optimizer",
            fn=fn,
            num_tensors=num,
            numel=numel,
            reads=len(reads),
            writes=1,
        )
        held[writes] = list(made)


def _sgd(out: Builder, params: list[int], grads: list[int]) -> None:
    num, numel = _extent(out, params)
    out.node(
        "foreach",
        [*params, *grads],
        params,
        module="optimizer",
        fn="add",
        num_tensors=num,
        numel=numel,
        reads=2,
        writes=1,
    )


def _fused(out: Builder, params: list[int], grads: list[int]) -> None:
    num, numel = _extent(out, params)
    states = [*_states(out, params, "exp_avg"), *_states(out, params, "exp_avg_sq")]
    out.node(
        "optimizer",
        [*params, *grads, *states],
        params,
        module="optimizer",
        fn="adamw",
        num_tensors=num,
        numel=numel,
        state_dtype=str(out.values[params[0]].type.dtype),
    )
