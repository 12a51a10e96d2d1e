"""What an op asks of any device: arithmetic and bytes, before anyone says how fast.

Sizes may be symbols (``graph/symbol.py``), whose numbers nobody can look at: rules say ``1.0 *``, not ``float``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ridgeline.dtypes import dtype
from ridgeline.errors import CostError
from ridgeline.graph import Node, TensorType, ops
from ridgeline.graph.symbol import log2

Attrs = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Every field but ``dtype`` is extensive: twice the op, twice the work."""

    flops: float = 0.0
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    matrix_flops: float = 0.0  # the part of flops that matrix units do
    dtype: str = "fp32"

    @property
    def num_bytes(self) -> float:
        return self.read_bytes + self.written_bytes

    def __add__(self, other: Work) -> Work:
        return Work(
            flops=self.flops + other.flops,
            read_bytes=self.read_bytes + other.read_bytes,
            written_bytes=self.written_bytes + other.written_bytes,
            matrix_flops=self.matrix_flops + other.matrix_flops,
            dtype=self.dtype if self.matrix_flops >= other.matrix_flops else other.dtype,
        )

    def __mul__(self, times: float) -> Work:
        return Work(
            flops=self.flops * times,
            read_bytes=self.read_bytes * times,
            written_bytes=self.written_bytes * times,
            matrix_flops=self.matrix_flops * times,
            dtype=self.dtype,
        )


class NoWorkRule(CostError):
    """An op that nobody taught the cost model."""

    def __init__(self, op: str, where: str) -> None:
        super().__init__(
            f"no work rule for op {op!r} at {where or 'top level'}: "
            "add one to cost/work.py, or declare the op free in graph/ops.py"
        )


@dataclass(frozen=True, slots=True)
class Site:
    """A node with the types and the bytes it really touches (a broadcast view touches its storage, not its shape)."""

    op: str
    attrs: Attrs
    ins: tuple[TensorType, ...]
    outs: tuple[TensorType, ...]
    in_bytes: tuple[float, ...]
    backward: bool  # a gradient kernel rather than a (re)computed forward
    where: str = ""
    target: str = ""

    @property
    def read_bytes(self) -> float:
        return sum(self.in_bytes)

    @property
    def written_bytes(self) -> float:
        return 1.0 * sum([t.num_bytes for t in self.outs])

    @property
    def dtype(self) -> str:
        """The element type the arithmetic is about: of the first floating input, else of the first tensor."""
        for types in (self.ins, self.outs):
            for t in types:
                if t.dtype.family in ("float", "complex"):
                    return t.dtype.name
        both = (*self.ins, *self.outs)
        return both[0].dtype.name if both else "fp32"

    @property
    def out_numel(self) -> int:
        return max((t.numel for t in self.outs), default=0)


def site_of(node: Node, ins: Sequence[TensorType], outs: Sequence[TensorType], in_bytes: Sequence[float]) -> Site:
    attrs = node.attrs
    backward = attrs.get("which") == "bwd"
    return Site(node.op, attrs, tuple(ins), tuple(outs), tuple(in_bytes), backward, node.module, node.target)


Rule = Callable[[Site], Work]
_RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the work rule of ops; a second rule for an op is an error."""

    def register(fn: Rule) -> Rule:
        for name in names:
            if name in _RULES:
                raise CostError(f"op {name!r} has two work rules")
            _RULES[name] = fn
        return fn

    return register


def work_of(site: Site) -> Work:
    """The work of one call of the op."""
    if ops()[site.op].free:
        return Work()
    found = _RULES.get(site.op)
    if found is None:
        raise NoWorkRule(site.op, site.where)
    return found(site)


def _streamed(site: Site, flops_per_element: float) -> Work:
    """Every input read once, every output written once."""
    numel = max([t.numel for t in (*site.ins, *site.outs)], default=0)
    return Work(
        flops=flops_per_element * numel, read_bytes=site.read_bytes, written_bytes=site.written_bytes, dtype=site.dtype
    )


def _matrix(site: Site, flops: float, read_bytes: float | None = None, written_bytes: float | None = None) -> Work:
    return Work(
        flops=flops,
        matrix_flops=flops,
        dtype=site.dtype,
        read_bytes=site.read_bytes if read_bytes is None else read_bytes,
        written_bytes=site.written_bytes if written_bytes is None else written_bytes,
    )


@rule("matmul")
def _matmul(site: Site) -> Work:
    a = site.attrs
    return _matrix(site, 2.0 * a["b"] * a["m"] * a["n"] * a["k"])


@rule("grouped_matmul")
def _grouped(site: Site) -> Work:
    a = site.attrs
    return _matrix(site, 2.0 * a["m"] * a["n"] * a["k"])


@rule("conv")
def _conv(site: Site) -> Work:
    a = site.attrs
    passes = len({"input", "weight"} & set(a.get("grads", ("input", "weight")))) if site.backward else 1
    return replace(_matrix(site, 2.0 * conv_macs(a) * passes), dtype=conv_dtype(site.dtype))


def conv_dtype(dtype: str) -> str:
    """What a convolution multiplies in: PyTorch lets cuDNN round fp32 to tf32 (not so its products) unless told."""
    return "tf32" if dtype == "fp32" else dtype


def conv_macs(a: Attrs) -> float:
    """Multiply-accumulates of one convolution: positions × output channels × input channels a group × window.

    A transposed convolution scatters, so its positions are those of the input.
    """
    positions = math.prod(a["spatial"]) if a["transposed"] else math.prod(a["out_spatial"])
    return float(a["n"] * positions * a["o"] * a["c"] / a["groups"] * math.prod(a["kernel"]))


@rule("attention")
def _attention(site: Site) -> Work:
    a = site.attrs
    pairs = attended_pairs(a["s"], a["skv"], bool(a["causal"]), a.get("window"))
    d, dv = a["d"], a.get("dv") or a["d"]
    products = (
        2.0 * (3 * d + 2 * dv) if site.backward else 2.0 * (d + dv)
    )  # backward recomputes q·kᵀ, then four products
    return _matrix(site, a["b"] * a["h"] * pairs * products)


def attended_pairs(s: int, skv: int, causal: bool, window: int | None = None) -> float:
    """Query-key pairs inside the mask; queries are the last ``s`` of ``skv`` positions."""
    if not causal:
        return 1.0 * s * (skv if not window else min(window, skv))
    full = s * (skv - s) + _triangle(s) if skv >= s else _triangle(skv) + (s - skv) * skv
    if not window:
        return full
    return full - (_triangle(skv - window) - _triangle(skv - s - window))  # keys that have left the window


def _triangle(side: int) -> float:
    return side * (side + 1) / 2 if side > 0 else 0.0


@rule("rnn")
def _rnn(site: Site) -> Work:
    a = site.attrs
    gates = {"lstm": 4, "gru": 3}.get(str(a["cell"]), 1)
    directions = 2 if a.get("bidirectional") else 1
    per_layer = 2.0 * a["seq"] * a["batch"] * gates * a["hidden"] * directions
    flops = per_layer * (a["input"] + a["hidden"]) + per_layer * (a["layers"] - 1) * (
        directions * a["hidden"] + a["hidden"]
    )
    return _matrix(site, flops * (2 if site.backward else 1))


@rule("fft")
def _fft(site: Site) -> Work:
    length = max(2, site.attrs["length"])
    return Work(
        flops=5.0 * length * math.log2(length) * site.attrs["batch"],
        read_bytes=site.read_bytes,
        written_bytes=site.written_bytes,
        dtype=site.dtype,
    )


@rule("linalg")
def _linalg(site: Site) -> Work:
    return Work(
        flops=2.0 / 3.0 * site.attrs["n"] ** 3 * site.attrs["batch"],
        read_bytes=site.read_bytes,
        written_bytes=site.written_bytes,
    )


@rule("pointwise", "quantize")
def _pointwise(site: Site) -> Work:
    return _streamed(site, 1.0)


@rule("random")
def _random(site: Site) -> Work:
    return Work(flops=1.0 * site.out_numel, written_bytes=site.written_bytes)


@rule("copy")
def _copy(site: Site) -> Work:
    return Work(
        read_bytes=min(site.read_bytes, _copied_bytes(site)), written_bytes=site.written_bytes, dtype=site.dtype
    )


def _copied_bytes(site: Site) -> float:
    """An in-place copy reads its source, not its destination; a repeat reads what it has."""
    return sum(site.in_bytes[1:]) if site.attrs.get("inplace") and len(site.in_bytes) > 1 else site.read_bytes


@rule("fill")
def _fill(site: Site) -> Work:
    return Work(written_bytes=site.written_bytes, dtype=site.dtype)


@rule("reduce")
def _reduce(site: Site) -> Work:
    return _streamed(site, 1.0)


@rule("norm")
def _norm(site: Site) -> Work:
    return _streamed(site, 10.0 if site.backward else 5.0)


@rule("softmax", "loss", "cross_entropy")
def _softmax(site: Site) -> Work:
    if site.op == "loss" and str(site.attrs["fn"]).startswith("nll") and not site.backward:
        rows = 1.0 * site.attrs["n"]  # one element of each row is looked at
        return Work(flops=rows, read_bytes=rows * 40.0, written_bytes=site.written_bytes, dtype=site.dtype)
    return _streamed(site, 5.0)


@rule("embedding")
def _embedding(site: Site) -> Work:
    a = site.attrs
    row_bytes = a["cols"] * (site.outs[0].dtype.itemsize if site.outs else 2.0)
    moved = 1.0 * a["num"] * row_bytes
    if site.backward:  # the dense gradient is zeroed, then rows are added into it
        return Work(
            flops=1.0 * a["num"] * a["cols"],
            read_bytes=2 * moved + a["num"] * 8.0,
            written_bytes=site.written_bytes + moved,
            dtype=site.dtype,
        )
    return Work(read_bytes=moved + a["num"] * 8.0, written_bytes=moved, dtype=site.dtype)


@rule("embedding_bag")
def _embedding_bag(site: Site) -> Work:
    a = site.attrs
    size = site.outs[0].dtype.itemsize if site.outs else 4.0
    picked = float(a["b"]) * a["l"] * a["d"]
    if site.backward:
        return Work(flops=picked, read_bytes=picked * size, written_bytes=site.written_bytes, dtype=site.dtype)
    return Work(
        flops=picked,
        read_bytes=picked * size + a["b"] * a["l"] * 8.0,
        written_bytes=a["b"] * a["d"] * size,
        dtype=site.dtype,
    )


@rule("gather")
def _gather(site: Site) -> Work:
    """Rows picked are read and written; the table is not read whole."""
    return Work(
        read_bytes=min(site.written_bytes, site.read_bytes) + sum(site.in_bytes[1:]),
        written_bytes=site.written_bytes,
        dtype=site.dtype,
    )


@rule("scatter")
def _scatter(site: Site) -> Work:
    """The source is read, the rows it lands on are read and written."""
    source = max(site.in_bytes[1:], default=0.0)
    return Work(flops=source / 2.0, read_bytes=sum(site.in_bytes[1:]) + source, written_bytes=source, dtype=site.dtype)


@rule("scan", "pool", "resize", "nonzero")
def _pass(site: Site) -> Work:
    return _streamed(site, 1.0)


@rule("sort")
def _sort(site: Site) -> Work:
    rounds = max(1.0, log2(max(2, site.attrs["c"])))
    return Work(
        flops=site.attrs["n"] * site.attrs["c"] * rounds,
        read_bytes=site.read_bytes,
        written_bytes=site.written_bytes,
        dtype=site.dtype,
    )


@rule("topk")
def _topk(site: Site) -> Work:
    return _streamed(site, 2.0)


@rule("foreach", "optimizer")
def _foreach(site: Site) -> Work:
    a = site.attrs
    numel, size = float(a["numel"]), dtype(site.dtype).itemsize
    if site.op == "optimizer":
        return Work(flops=12.0 * numel, read_bytes=4 * numel * size, written_bytes=3 * numel * size, dtype=site.dtype)
    return Work(
        flops=numel,
        read_bytes=a.get("reads", 1) * numel * size,
        written_bytes=a.get("writes", 1) * numel * size,
        dtype=site.dtype,
    )


@rule("sync")
def _sync(site: Site) -> Work:
    return Work(read_bytes=min(64.0, site.read_bytes))


@rule("transfer")
def _transfer(site: Site) -> Work:
    return Work(read_bytes=site.read_bytes, written_bytes=site.written_bytes)


@rule("collective")
def _collective(site: Site) -> Work:
    return Work(read_bytes=float(site.attrs["num_bytes"]), written_bytes=float(site.attrs["num_bytes"]))


@rule("custom")
def _custom(site: Site) -> Work:
    a = site.attrs
    return Work(
        flops=float(a["flops"]),
        matrix_flops=float(a.get("matrix_flops", 0.0)),
        read_bytes=float(a["read_bytes"]),
        written_bytes=float(a["written_bytes"]),
        dtype=str(a.get("dtype", site.dtype)),
    )
