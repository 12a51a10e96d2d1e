"""One rank's share of a forward graph: products split by columns and rows, heads, vocabulary, experts and sequence.

The graph is walked once in program order. Each value gets a layout; an op that cannot work on the layout it is handed
is preceded by the collective that changes it. Nothing is known about model families: what is split follows from where
a value flows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ridgeline.errors import PlanError, nearest
from ridgeline.graph import Block, Graph, Kind, Node, Phase, TensorType
from ridgeline.graph.build import Builder
from ridgeline.plan.layout import WHOLE, Layout, Mesh, local_type, permuted, reshaped

RESIDENTS = frozenset({Kind.PARAM, Kind.BUFFER, Kind.INPUT, Kind.CONSTANT, Kind.STATE})
Rule = Callable[["Sharder", Node], None]
_RULES: dict[str, Rule] = {}


def sharding(*ops: str) -> Callable[[Rule], Rule]:
    """Register how ops are split; two rules for one op are an error."""

    def add(rule: Rule) -> Rule:
        for op in ops:
            if op in _RULES:
                raise PlanError(f"op {op!r} has two sharding rules")
            _RULES[op] = rule
        return rule

    return add


def shard(graph: Graph, mesh: Mesh, *, ring: bool = True, imbalance: float = 1.0) -> Graph:
    """What one rank of ``mesh`` runs of a forward graph, with the collectives between."""

    # Products with their operands as input, weight, bias; some frameworks name the bias first
    def ordered(node: Node) -> Node:
        first = graph.values[node.inputs[0]].type.shape if node.op == "matmul" else (0, 0)
        if len(first) != 1 or len(node.inputs) != 3:
            return node
        bias, x, weight = node.inputs
        return replace(node, inputs=(x, weight, bias))

    items = tuple(replace(i, nodes=tuple(map(ordered, i.nodes))) if isinstance(i, Block) else ordered(i)
                  for i in graph.items)  # fmt: skip
    return Sharder(replace(graph, items=items), mesh, ring=ring, imbalance=imbalance).run()


class Sharder:
    """Writes the local graph: which local value stands for each global one, and how it is laid out."""

    def __init__(self, graph: Graph, mesh: Mesh, *, ring: bool, imbalance: float) -> None:
        self.graph, self.mesh, self.ring, self.imbalance = graph, mesh, ring, imbalance
        self.seq = sequence_of(graph)
        self.out = Builder(graph.name, graph.mode, **dict(graph.meta))
        self.env: dict[int, int] = {}
        self.layouts: dict[int, Layout] = {}
        self.kept: dict[tuple[int, Layout], int] = {}  # values already moved to another layout
        self.defined: dict[int, Node] = {}
        self.consumers: dict[int, list[Node]] = {}
        self.carried = {c.next for item in graph.items if isinstance(item, Block) for c in item.carries}
        for node, _ in graph.nodes():
            self.defined.update(dict.fromkeys(node.outputs, node))
            for value in node.inputs:
                self.consumers.setdefault(value, []).append(node)
        self.lazy: dict[int, Node] = {}  # looks at parameters, made when their layout is known

    def run(self) -> Graph:
        for item in self.graph.items:
            if isinstance(item, Block):
                self._block(item)
            else:
                self._node(item)
        outputs = [self.env[o] for o in self.graph.outputs if o in self.env]
        if "donated" in self.out.meta:
            self.out.meta["donated"] = tuple(self.env[d] for d in self.out.meta["donated"] if d in self.env)
        return self.out.finish(outputs, frees=self.graph.mode != "train")

    def _block(self, block: Block) -> None:
        self.kept = {}
        inits = [self.settled(c.init) for c in block.carries]
        with self.out.repeat(block.repeat, block.module, reverse=block.reverse):
            inner = [self.out.carry(i) for i in inits]
            for c, local, init in zip(block.carries, inner, inits, strict=True):
                self._bind(c.inner, local, self.layouts[init])
            for node in block.nodes:
                self._node(node)
            for c, local in zip(block.carries, inner, strict=True):
                self.out.close_carry(local, self.moved(c.next, self.layouts[local]))
        self.kept = {}

    def _node(self, node: Node) -> None:
        rule = _RULES.get(node.op)
        if rule is None:
            raise PlanError(
                f"no sharding rule for op {node.op!r} at {node.module or 'the top'}{nearest(node.op, _RULES)}; "
                "write one in plan/shard.py, or leave the model on one device"
            )
        rule(self, node)

    # What rules call.

    def type(self, value: int) -> TensorType:
        return self.graph.values[value].type

    def rank(self, value: int) -> int:
        return len(self.graph.values[value].type.shape)

    def is_resident(self, value: int) -> bool:
        """A tensor that exists before the step, or a look at one, not yet given a layout."""
        return value not in self.env and (self.graph.values[value].kind in RESIDENTS or value in self.lazy)

    def layout(self, value: int) -> Layout:
        """How a global value lies here; a resident one nobody asked for is whole."""
        return self.layouts[self.env[value]] if value in self.env else WHOLE

    def local(self, value: int) -> int:
        """The local value, as it is."""
        return self.env[value] if value in self.env else self.resident(value, WHOLE)

    def resident(self, value: int, layout: Layout) -> int:
        """A parameter, buffer or input, split as its first reader wants it."""
        if value in self.env:
            return self.moved(value, layout)
        if value in self.lazy:
            return self._look(value, layout) if self.lazy[value].inputs else self._make(value, layout)
        seen = self.graph.values[value]
        made = self.out.value(local_type(seen.type, layout, self.mesh), seen.kind, count=seen.count, name=seen.name)
        self._bind(value, made, layout)
        return made

    def _look(self, value: int, layout: Layout) -> int:
        """A view of a parameter: the parameter is split along the dim that becomes the wanted one."""
        node = self.lazy.pop(value)
        source = node.inputs[0]
        inner = replace(layout, tp=_back(self, node, layout.tp), cp=_back(self, node, layout.cp))
        self.resident(source, inner)
        self.view(node, layout)
        return self.env[value]

    def _make(self, value: int, layout: Layout) -> int:
        """A tensor from nothing, each rank its own part."""
        self.emit(self.lazy.pop(value), [], [layout])
        return self.env[value]

    def _bind(self, value: int, local: int, layout: Layout) -> None:
        self.env[value] = local
        self.layouts[local] = layout

    def whole(self, value: int) -> int:
        """The value with its features together: sequence splits stay unless tensor ranks hold them."""
        layout = self.layout(value)
        return self.moved(value, replace(layout, tp=None, partial=False, unit=1))

    def settled(self, value: int) -> int:
        """The value without an owed sum: reduced onto the sequence with sequence parallelism, else onto every rank."""
        if value not in self.env:
            return self.resident(value, WHOLE)
        layout = self.layout(value)
        if not layout.partial:
            return self.env[value]
        dim = self._token_dim(value, layout)
        return self.moved(value, replace(layout, partial=False, tp=dim if self.mesh.sequence else None, unit=1))

    def _token_dim(self, value: int, layout: Layout) -> int:
        """The dim that sequence parallelism splits: that of the sequence, or of all tokens."""
        shape = self.type(value).shape
        if layout.cp is not None:
            return layout.cp
        exact = [i for i, s in enumerate(shape[:-1]) if s == self.seq]
        return exact[0] if exact else max(0, len(shape) - 2)

    def moved(self, value: int, want: Layout) -> int:
        """The local value in layout ``want``, through a collective if ranks must talk."""
        local = self.env.get(value)
        if local is None:
            return self.resident(value, want)
        have = self.layouts[local]
        if have == want or (have.tp == want.tp and have.partial == want.partial and have.cp == want.cp):
            return local
        key = (local, replace(want, unit=1))
        if key not in self.kept:
            self.kept[key] = self._move(value, local, have, want)
            self.layouts[self.kept[key]] = want
        return self.kept[key]

    def _move(self, value: int, local: int, have: Layout, want: Layout) -> int:
        whole = self.type(value)
        module = self.defined[value].module if value in self.defined else ""
        target = local_type(whole, want, self.mesh)
        gathered = local_type(whole, replace(want, tp=None), self.mesh)
        if have.partial:
            fn = "reduce_scatter" if want.tp is not None else "all_reduce"
            return self.collective(fn, [local], target, gathered.num_bytes, "tp", module)
        if have.tp is not None and want.tp is None:
            return self.collective("all_gather", [local], target, gathered.num_bytes, "tp", module)
        if have.tp is not None and want.tp is not None:
            return self.collective("all_to_all", [local], target, target.num_bytes, "tp", module)
        if have.cp is not None and want.cp is None:
            return self.collective("all_gather", [local], target, target.num_bytes, "cp", module)
        out = self.out.value(replace_layout(target), alias=local)
        return self.out.node("view", [local], [out], module=module, fn="slice")[0]

    def collective(self, fn: str, inputs: Sequence[int], made: TensorType, num_bytes: int, group: str,
                   module: str) -> int:  # fmt: skip
        """A node in which the ranks of ``group`` exchange a buffer of ``num_bytes`` (all ranks' pieces together)."""
        ranks = getattr(self.mesh, group)
        return self.out.node("collective", inputs, [TensorType(made.shape, made.dtype)], module=module, fn=fn,
                             num_bytes=int(num_bytes), num_ranks=ranks, group=group)[0]  # fmt: skip

    def emit(self, node: Node, inputs: Sequence[int], layouts: Sequence[Layout], **changed: Any) -> None:
        """The node on local operands; outputs that alias an operand keep doing so."""
        made: list[int] = []
        for value, layout in zip(node.outputs, layouts, strict=True):
            if value in self.env:  # written in place
                made.append(self.env[value])
                continue
            seen = self.graph.values[value]
            alias = self.env.get(seen.alias) if seen.alias is not None else None
            if alias is not None and self.layouts.get(alias) != layout and node.op != "view":
                alias = inputs[0]
            local = self.out.value(local_type(seen.type, layout, self.mesh), seen.kind, alias=alias, count=seen.count,
                                   name=seen.name, storage_bytes=None)  # fmt: skip
            self._bind(value, local, layout)
            made.append(local)
        attrs = {**node.attrs, **changed}
        self.out.phase = node.phase
        self.out.node(node.op, inputs, made, module=node.module, target=node.target, **attrs)

    def view(self, node: Node, layout: Layout | Sequence[Layout]) -> None:
        layouts = [layout] * len(node.outputs) if isinstance(layout, Layout) else list(layout)
        source = self.env[node.inputs[0]]
        made = []
        for value, lay in zip(node.outputs, layouts, strict=True):
            seen = self.graph.values[value]
            local = self.out.value(local_type(seen.type, lay, self.mesh), seen.kind, alias=source, count=seen.count)
            self._bind(value, local, lay)
            made.append(local)
        self.out.phase = node.phase
        self.out.node("view", [source], made, module=node.module, target=node.target, **node.attrs)

    def share(self, before: TensorType, local: int) -> float:
        """Elements of the local value over those of the global one."""
        return self.out.values[local].type.numel / max(1, before.numel)

    def aligned(self, node: Node) -> tuple[list[int], Layout]:
        """Operands of an elementwise op brought to one layout, that of the result (dims counted from the right)."""
        rank = max((self.rank(v) for v in node.inputs), default=0)
        cp = tp = None
        unit, home = 1, True
        for value in node.inputs:
            if self.is_resident(value):
                continue
            self._settle(value)
            layout = self.layout(value).shifted(rank - self.rank(value))
            cp = layout.cp if cp is None else cp
            if tp is None and layout.tp is not None:
                tp, unit = layout.tp, layout.unit
            home = home and layout.home
        want = Layout(cp, tp, unit=unit, home=home)
        return [self._operand(v, want, rank) for v in node.inputs], want

    def _settle(self, value: int) -> None:
        local = self.settled(value)
        self.env[value] = local

    def _operand(self, value: int, want: Layout, rank: int) -> int:
        """One operand in the common layout; dims it broadcasts stay whole."""
        shape, shift = self.type(value).shape, rank - self.rank(value)
        cp, tp = (
            None if dim is None or dim < shift or shape[dim - shift] == 1 else dim - shift for dim in (want.cp, want.tp)
        )
        return self.moved(value, replace(want, cp=cp, tp=tp))

    # Where a column split would lead.

    def column_unit(self, value: int, dim: int, unit: int = 1, depth: int = 0) -> int | None:
        """The piece a split of ``dim`` must respect if everything downstream can work on it; None if something cannot.

        A good split ends in a product that sums over it, in attention heads, or in a loss over the vocabulary.
        """
        if value in self.carried or depth > 60:
            return None
        users = self.consumers.get(value, [])
        if not users:
            return unit
        for node in users:
            found = self._through(node, value, dim, unit, depth)
            if found is None:
                return None
            unit = max(unit, found)
        return unit

    def _through(self, node: Node, value: int, dim: int, unit: int, depth: int) -> int | None:
        rank = self.rank(value)
        if node.op == "view":
            return self._through_view(node, value, dim, unit, depth)
        if node.op in ("pointwise", "copy", "quantize", "random"):
            shift = max(self.rank(o) for o in node.outputs) - rank
            if node.attrs.get("fn") == "cat" and node.attrs.get("dim", -1) % rank == dim:
                return None
            return self._all(node, dim + shift, unit, depth)
        if node.op == "attention":
            return unit if dim == rank - 3 else None
        if node.op == "matmul":
            if _weight_of(self, node) is None:
                return self._all(node, dim, unit, depth) if dim < rank - 2 else None
            return unit if dim == rank - 1 and node.inputs[0] == value else None
        if node.op in ("softmax", "norm", "reduce"):
            # Ops that work along rows: a split across rows passes, one within a row only on its way to a loss
            if node.op == "reduce":
                whole = dim not in {d % rank for d in node.attrs["dims"]} and node.attrs.get("keepdim", False)
                return self._all(node, dim, unit, depth) if whole else None
            if dim != rank - 1:
                return self.column_unit(node.outputs[0], dim, unit, depth + 1)
            ends = {n.op for o in node.outputs for n in self.consumers.get(o, [])}
            return unit if node.op == "softmax" and ends and ends <= {"loss"} else None
        return unit if node.op in ("loss", "cross_entropy") else None

    def _through_view(self, node: Node, value: int, dim: int, unit: int, depth: int) -> int | None:
        shape = self.type(value).shape
        for out in node.outputs:
            new = self.type(out).shape
            to = _forth(self, node, dim, out)
            if to is None:
                return None
            inner = unit
            if node.attrs.get("fn", "view") in ("view", "reshape") and new[to] and shape[dim] > new[to]:
                inner = max(1, shape[dim] // new[to])
            passed = self.column_unit(out, to, 1 if inner > unit else unit, depth + 1)
            if passed is None:
                return None
            unit = max(inner, unit)
        return unit

    def _all(self, node: Node, dim: int, unit: int, depth: int) -> int | None:
        for out in node.outputs:
            found = self.column_unit(out, dim, unit, depth + 1)
            if found is None:
                return None
            unit = max(unit, found)
        return unit


def replace_layout(type_: TensorType) -> TensorType:
    return TensorType(type_.shape, type_.dtype, "strided")


def unsplittable(graph: Graph) -> str:
    """The first op of the forward pass without a rule here, and where it is; empty if all have one."""
    for node, _ in graph.nodes():
        if node.phase is Phase.FORWARD and node.op not in _RULES:
            return f"the {node.op!r} at {node.module or 'the top'}"
    return ""


def sequence_of(graph: Graph) -> int:
    """Tokens a sequence: as the graph says, else the second dim of a first input of tokens or of embedded ones."""
    if graph.meta.get("seq"):
        return int(graph.meta["seq"])
    first = graph.values[graph.inputs[0]].type if graph.inputs else None
    if first is None or len(first.shape) not in (2, 3) or (len(first.shape) == 2 and first.dtype.family != "int"):
        return 0
    return int(first.shape[1])


def _weight_of(sharder: Sharder, node: Node) -> int | None:
    """The parameter (or a look at one) that a product multiplies by, if it is one of two dims."""
    value = node.inputs[1]
    seen: int | None = value
    while seen is not None:
        if sharder.graph.values[seen].kind in (Kind.PARAM, Kind.BUFFER):
            return value if sharder.rank(value) == 2 else None
        seen = sharder.graph.values[seen].alias
    return None


def _forth(sharder: Sharder, node: Node, dim: int | None, out: int) -> int | None:
    """Where a dim of a view's input lies in its output; None where it is cut or gone."""
    if dim is None:
        return None
    old, new = sharder.type(node.inputs[0]).shape, sharder.type(out).shape
    fn = node.attrs.get("fn", "view")
    if fn in ("transpose", "permute", "t"):
        return permuted(old, new, dim)
    if fn in ("slice", "expand", "split", "select", "unbind", "unsqueeze", "squeeze"):
        if fn == "unbind":
            return dim - 1 if dim > 0 else None
        if len(old) != len(new):
            return reshaped(old, new, dim, sharder.seq) if math.prod(old) == math.prod(new) else None
        whole = old[dim] == new[dim] or (fn == "split" and node.attrs.get("dim", -1) % len(old) == dim)
        return dim if whole else None
    return reshaped(old, new, dim, sharder.seq)


def _back(sharder: Sharder, node: Node, dim: int | None) -> int | None:
    """Where a dim of a view's output lies in its input."""
    if dim is None:
        return None
    old, new = sharder.type(node.inputs[0]).shape, sharder.type(node.outputs[0]).shape
    if node.attrs.get("fn") in ("transpose", "permute", "t"):
        return next((d for d in range(len(old)) if permuted(old, new, d) == dim), None)
    return reshaped(new, old, dim, sharder.seq)


# Movement.


@sharding("view")
def _view(s: Sharder, node: Node) -> None:
    source = node.inputs[0]
    if s.is_resident(source) and s.graph.values[source].kind in (Kind.PARAM, Kind.BUFFER):
        if len(node.outputs) == 1:
            s.lazy[node.outputs[0]] = node
            return
    s.env[source] = s.settled(source)
    have = s.layout(source)
    if node.attrs.get("fn") == "expand" and have.tp is not None and s.type(source).shape[have.tp] == s.seq:
        s.env[source] = s.whole(source)  # gathered while it is small
        have = s.layout(source)
    layouts, lost = [], False
    old = s.type(source).shape
    for out in node.outputs:
        tp, cp = _forth(s, node, have.tp, out), _forth(s, node, have.cp, out)
        lost = lost or (have.tp is not None and tp is None) or (have.cp is not None and cp is None)
        new = s.type(out).shape
        unit = have.unit
        if tp is not None and have.tp is not None and old[have.tp] > new[tp] and node.attrs.get("fn") != "split":
            unit = max(1, have.unit * new[tp] // old[have.tp])
        elif tp is not None and have.tp is not None and new[tp] > old[have.tp]:
            unit = have.unit * (new[tp] // old[have.tp])
        layouts.append(replace(have, tp=tp, cp=cp, unit=unit))
    if lost:  # the view cuts through a split dim: bring it together first
        s.env[source] = s.moved(source, Layout(home=have.home))
        layouts = [WHOLE] * len(node.outputs)
    s.view(node, layouts)


@sharding("pointwise", "quantize", "copy")
def _elementwise(s: Sharder, node: Node) -> None:
    if node.op == "copy" and node.attrs["fn"] in ("cat", "stack", "constant_pad_nd"):
        return _joined(s, node)
    inputs, layout = s.aligned(node)
    s.emit(node, inputs, [layout] * len(node.outputs))
    return None


def _joined(s: Sharder, node: Node) -> None:
    """Concatenation and padding: fine along whole dims; a split along the joined dim is brought together."""
    rank = s.rank(node.outputs[0])
    dim = node.attrs.get("dim", rank - 1)
    dim = rank - 1 if dim is None else dim % rank
    inputs, layout = s.aligned(node)
    if layout.tp == dim:
        layout = replace(layout, tp=None, unit=1)
        inputs = [s._operand(v, layout, rank) for v in node.inputs]
    s.emit(node, inputs, [layout] * len(node.outputs))


@sharding("sync", "transfer", "nonzero")
def _asked(s: Sharder, node: Node) -> None:
    """The host looks at a value, or sends one: every rank its own."""
    s.emit(node, [s.settled(v) for v in node.inputs], [WHOLE] * len(node.outputs))


@sharding("fill", "random", "alloc", "host")
def _made(s: Sharder, node: Node) -> None:
    if node.op == "random" and not node.inputs and len(node.outputs) == 1:
        s.lazy[node.outputs[0]] = node
        return
    s.emit(node, [s.local(v) for v in node.inputs], [WHOLE] * len(node.outputs))


@sharding("reduce")
def _reduce(s: Sharder, node: Node) -> None:
    source = node.inputs[0]
    s.env[source] = s.settled(source)
    have, rank = s.layout(source), s.rank(source)
    gone = sorted({d % rank for d in node.attrs["dims"]})
    keep = node.attrs.get("keepdim", False)

    def to(dim: int | None) -> int | None:
        if dim is None or dim in gone:
            return None
        return dim if keep else dim - sum(g < dim for g in gone)

    if node.attrs["fn"] == "histc":
        s.emit(node, [s.local(source)], [replace(WHOLE, home=have.home)])
        return
    layout = replace(have, cp=to(have.cp), tp=to(have.tp), partial=have.tp in gone and have.tp is not None)
    s.emit(node, [s.local(source)], [layout] * len(node.outputs))


@sharding("gather")
def _gather(s: Sharder, node: Node) -> None:
    """Rows picked by index: the result is split as the indices are, its columns as the table's."""
    inputs = [s.settled(v) for v in node.inputs]
    index = s.layout(node.inputs[-1])
    whole = s.graph.values[node.inputs[0]].kind in RESIDENTS
    layout = Layout(0 if index.cp is not None else None, 0 if index.tp is not None else None, home=index.home)
    if not whole and s.layout(node.inputs[0]).tp not in (None, 0):
        inputs[0] = s.whole(node.inputs[0])
    share = local_type(s.type(node.outputs[0]), layout, s.mesh).numel / max(1, s.type(node.outputs[0]).numel)
    s.emit(node, inputs, [layout], num=int(node.attrs.get("num", 0) * share))


@sharding("scatter")
def _scatter(s: Sharder, node: Node) -> None:
    known = [s.layout(v) for v in node.inputs if v in s.env and (s.layout(v).tp, s.layout(v).cp) != (None, None)]
    rows = known[0] if known else WHOLE
    layout = Layout(0 if rows.cp is not None else None, 0 if rows.tp is not None else None)
    inputs = [s.moved(v, layout) if v in s.env and s.type(v).shape[:1] == s.type(node.outputs[0]).shape[:1]
              else s.settled(v) for v in node.inputs]  # fmt: skip
    s.emit(node, inputs, [layout] * len(node.outputs))


@sharding("sort", "topk", "scan")
def _rows(s: Sharder, node: Node) -> None:
    source = node.inputs[0]
    s.env[source] = s.settled(source)
    have, last = s.layout(source), s.rank(source) - 1
    if have.tp == last and last > 0:
        s.env[source] = s.whole(source)
        have = s.layout(source)
    local = s.local(source)
    share = s.share(s.type(source), local)
    size = "c" if node.op == "sort" and node.attrs["n"] == 1 else "n"
    scaled = max(1, round(node.attrs[size] * share))
    s.emit(node, [local], [have] * len(node.outputs), **{size: scaled})


# Arithmetic.


@sharding("matmul")
def _matmul(s: Sharder, node: Node) -> None:
    weight = _weight_of(s, node)
    if weight is None:
        return _pairwise(s, node)
    x, rank = node.inputs[0], s.rank(node.inputs[0])
    s.env[x] = s.settled(x)
    have, out = s.layout(x), node.outputs[0]
    n_dim, k_dim = _weight_dims(s, node, weight)
    last = s.rank(out) - 1
    if have.tp == rank - 1 and have.tp is not None:
        return _row_product(s, node, weight, k_dim, have, last)
    unit = s.column_unit(out, last) if s.mesh.tp > 1 else None
    # columns a rank must get for a split to be worth it: an adapter of rank 16 stays whole
    if unit is None or s.type(out).shape[-1] < 16 * s.mesh.tp:
        return _plain_product(s, node, weight, have)
    return _column_product(s, node, weight, n_dim, have, unit)


def _weight_dims(s: Sharder, node: Node, weight: int) -> tuple[int, int]:
    """Which dim of the weight are its columns, which its rows: by shape, of square ones by how they are looked at."""
    n, k = node.attrs["n"], node.attrs["k"]
    shape = s.type(weight).shape
    if n == k:
        turned = s.graph.values[weight].alias is not None or not node.attrs.get("trans_b")
        return (1, 0) if turned else (0, 1)
    return (0, 1) if shape == (n, k) else (1, 0)


def _bias(s: Sharder, node: Node, split: Layout) -> list[int]:
    return [s.resident(v, split) if s.is_resident(v) else s.moved(v, split) for v in node.inputs[2:]]


def _rows_of(s: Sharder, node: Node, x: int) -> int:
    return s.out.values[x].type.numel // max(1, s.out.values[x].type.shape[-1])


def _row_product(s: Sharder, node: Node, weight: int, k_dim: int, have: Layout, last: int) -> None:
    x = s.local(node.inputs[0])
    w = s.resident(weight, Layout(tp=k_dim, unit=have.unit))
    k = s.out.values[x].type.shape[-1]
    out = Layout(cp=have.cp, partial=True)
    s.emit(node, [x, w, *_bias(s, node, WHOLE)], [out], k=k, m=_rows_of(s, node, x))


def _plain_product(s: Sharder, node: Node, weight: int, have: Layout) -> None:
    """Every rank multiplies its own tokens by the whole weight."""
    x, w = s.local(node.inputs[0]), s.resident(weight, WHOLE)
    s.emit(node, [x, w, *_bias(s, node, WHOLE)], [replace(have, unit=1)], m=_rows_of(s, node, x))


def _column_product(s: Sharder, node: Node, weight: int, n_dim: int, have: Layout, unit: int) -> None:
    source, out = node.inputs[0], node.outputs[0]
    x = s.whole(source) if have.tp is not None else _spread(s, source)
    w = s.resident(weight, Layout(tp=n_dim, unit=unit))
    split = Layout(cp=have.cp, tp=s.rank(out) - 1, unit=unit)
    n = s.out.values[w].type.shape[n_dim]
    s.emit(node, [x, w, *_bias(s, node, Layout(tp=0, unit=unit))], [split], n=n, m=_rows_of(s, node, x))


def _spread(s: Sharder, value: int) -> int:
    """A value every rank holds, used by each for its own columns: free forward, its gradients are summed."""
    local = s.local(value)
    if s.mesh.tp == 1 or s.graph.mode != "train":
        return local
    key = (local, Layout(partial=True))
    if key not in s.kept:
        held = s.out.values[local]
        module = s.defined[value].module if value in s.defined else ""
        made = s.out.value(held.type, alias=local)
        s.kept[key] = s.out.node("collective", [local], [made], module=module, fn="spread", num_bytes=0,
                                 num_ranks=s.mesh.tp, group="tp")[0]  # fmt: skip
        s.layouts[s.kept[key]] = s.layouts[local]
    return s.kept[key]


def _pairwise(s: Sharder, node: Node) -> None:
    """A product of two activations, batched over heads: leading splits pass, others are brought together."""
    ins = []
    for value in node.inputs:
        s.env[value] = s.settled(value)
    first, second = (s.layout(v) for v in node.inputs[:2])
    rows = second.tp is None and first.tp == s.rank(node.inputs[0]) - 2  # own rows times a whole matrix
    for value in node.inputs:
        have = s.layout(value)
        if have.tp is not None and have.tp >= s.rank(value) - 2 and not rows:
            s.env[value] = s.whole(value)
        ins.append(s.env[value])
    have = s.layout(node.inputs[0])
    shape = s.out.values[ins[0]].type.shape
    if node.attrs["b"] == 1:
        s.emit(node, ins, [have], m=_rows_of(s, node, ins[0]))
    else:
        s.emit(node, ins, [have], b=max(1, math.prod(shape[:-2])))


@sharding("grouped_matmul")
def _grouped(s: Sharder, node: Node) -> None:
    """Experts: tokens travel to their experts' ranks for the first product and home after the last."""
    source, weight, *rest = node.inputs
    s.env[source] = s.settled(source)
    have, mesh = s.layout(source), s.mesh
    away = not have.home
    x = s.env[source] if away else _dispatched(s, source, node.module)
    groups = max(1, node.attrs["groups"] // mesh.ep)
    dims = (1, 2) if node.attrs.get("trans_b") else (2, 1)
    split = None if mesh.etp == 1 else dims[1] if away else dims[0]
    w = _expert_weight(s, weight, split)
    shape, rows = s.out.values[w].type.shape, s.out.values[x].type.shape[0]
    changed = {"groups": groups, "m": max(1, round(rows * s.imbalance)), "n": shape[dims[0]], "k": shape[dims[1]]}
    indices = [s.settled(v) for v in rest]
    out_type = TensorType((rows, shape[dims[0]]), s.type(node.outputs[0]).dtype)
    s.out.phase = node.phase
    made = s.out.node(node.op, [x, w, *indices], [out_type], module=node.module, target=node.target,
                      **{**node.attrs, **changed})[0]  # fmt: skip
    if away:
        made = _combined(s, made, node)
    s._bind(node.outputs[0], made, Layout(have.cp, have.tp, home=away))


def _expert_weight(s: Sharder, weight: int, split: int | None) -> int:
    if weight in s.env:
        return s.env[weight]
    seen = s.graph.values[weight]
    shape = list(seen.type.shape)
    shape[0] = max(1, shape[0] // s.mesh.ep)
    if split is not None:
        shape[split] //= s.mesh.etp
    made = s.out.value(TensorType(tuple(shape), seen.type.dtype), seen.kind, count=seen.count, name=seen.name)
    s._bind(weight, made, WHOLE)
    return made


def _dispatched(s: Sharder, source: int, module: str) -> int:
    """Tokens sent to the ranks of their experts, then shared among an expert's tensor-parallel ranks."""
    local = s.env[source]
    key = (local, Layout(home=False))
    if key in s.kept:
        return s.kept[key]
    held = s.out.values[local].type
    made = local
    tokens = max(1, int(s.out.meta.get("batch", 1)) * s.seq)
    s.out.meta["top"] = max(1, s.type(source).shape[0] // tokens)  # copies of a token
    if s.mesh.ep > 1:
        made = s.collective("all_to_all", [made], held, held.num_bytes, "ep", module)
    if s.mesh.etp > 1:
        wide = TensorType((held.shape[0] * s.mesh.etp, *held.shape[1:]), held.dtype)
        made = s.collective("all_gather", [made], wide, wide.num_bytes, "etp", module)
    s.kept[key] = made
    s.layouts[made] = replace(s.layouts[local], home=False) if made != local else s.layouts[local]
    return made


def _combined(s: Sharder, made: int, node: Node) -> int:
    held = s.out.values[made].type
    if s.mesh.etp > 1:
        narrow = TensorType((max(1, held.shape[0] // s.mesh.etp), *held.shape[1:]), held.dtype)
        made = s.collective("reduce_scatter", [made], narrow, held.num_bytes, "etp", node.module)
        held = narrow
    if s.mesh.ep > 1:
        made = s.collective("all_to_all", [made], held, held.num_bytes, "ep", node.module)
    return made


@sharding("attention")
def _attention(s: Sharder, node: Node) -> None:
    q, k, v, *extra = node.inputs
    for value in (q, k, v):
        s.env[value] = s.settled(value)
    a, mesh, heads = node.attrs, s.mesh, s.layout(q)
    split = heads.tp == 1
    layout = Layout(2 if mesh.cp > 1 and heads.cp is not None else None, 1 if split else None)
    ins = [s.moved(value, replace(layout, tp=1 if split else None)) for value in (q, k, v)]
    changed: dict[str, Any] = {}
    if split:
        changed = {"h": -(-a["h"] // mesh.tp), "hkv": max(1, -(-a["hkv"] // mesh.tp))}
    if layout.cp is not None:
        ins, changed = _context(s, node, ins, changed)
    operands = [s.resident(e, Layout(tp=0) if split else WHOLE) if s.is_resident(e) else s.local(e) for e in extra]
    outs = [replace(layout, cp=layout.cp) for _ in node.outputs]
    s.emit(node, [*ins, *operands], outs, **changed)


def _context(s: Sharder, node: Node, ins: list[int], changed: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
    """Context parallelism: keys and values of the other ranks arrive by ring or all-gather; causal work is balanced."""
    a, cp = node.attrs, s.mesh.cp
    k, v = (s.out.values[i].type for i in ins[1:3])
    num_bytes = (k.num_bytes + v.num_bytes) * cp
    fn = "ring" if s.ring else "all_gather"
    made = []
    for number, (value, held) in enumerate(zip(ins[1:3], (k, v), strict=True)):
        wide = TensorType((*held.shape[:2], held.shape[2] * (1 if s.ring else cp), held.shape[3]), held.dtype)
        share = num_bytes if number == 0 else 0  # keys and values travel together
        made.append(s.collective(fn, [value], wide, share, "cp", node.module))
    halved = a["causal"] and not a.get("window")
    seen = a["skv"] // 2 if halved else a["skv"]
    changed |= {"s": a["s"] // cp, "skv": seen, "causal": False if halved else a["causal"]}
    return [ins[0], *made], changed


# Rows.


@sharding("norm")
def _norm(s: Sharder, node: Node) -> None:
    x = node.inputs[0]
    s.env[x] = s.settled(x)
    have = s.layout(x)
    if have.tp == s.rank(x) - 1:
        s.env[x] = s.whole(x)
        have = s.layout(x)
    local = s.env[x]
    params = [s.resident(v, WHOLE) if s.is_resident(v) else s.local(v) for v in node.inputs[1:]]
    share = s.share(s.type(x), local)
    flat = Layout(0 if have.cp is not None else None, 0 if have.tp is not None else None)
    changed = {"n": max(1, round(node.attrs["n"] * share))}
    s.emit(node, [local, *params], [have, *[flat] * (len(node.outputs) - 1)], **changed)


@sharding("softmax")
def _softmax(s: Sharder, node: Node) -> None:
    x = node.inputs[0]
    s.env[x] = s.settled(x)
    have, last = s.layout(x), s.rank(x) - 1
    local = s.env[x]
    shape = s.out.values[local].type.shape
    n, c = max(1, math.prod(shape[:-1])), shape[-1]
    if have.tp == last:  # the vocabulary is split: maxima and sums of the rows are exchanged
        num_bytes = 2 * 4 * n
        local = s.out.node("collective", [local], [s.out.value(s.out.values[local].type, alias=local)],
                           module=node.module, fn="all_reduce", num_bytes=num_bytes, num_ranks=s.mesh.tp,
                           group="tp")[0]  # fmt: skip
    s.emit(node, [local], [have], n=n, c=c)


@sharding("loss", "cross_entropy")
def _loss(s: Sharder, node: Node) -> None:
    x = node.inputs[0]
    s.env[x] = s.settled(x)
    shape = s.out.values[s.env[x]].type.shape
    labels = [s.settled(v) for v in node.inputs[1:]]
    size = "c" if "c" in node.attrs else "v"
    changed = {"n": max(1, math.prod(shape[:-1])), size: shape[-1]}
    s.emit(node, [s.env[x], *labels], [WHOLE] * len(node.outputs), **changed)


@sharding("embedding")
def _embedding(s: Sharder, node: Node) -> None:
    """A table of the vocabulary is split by rows; one of positions stays whole."""
    table, indices = node.inputs
    local = (
        s.settled(indices)
        if indices in s.env
        else s.resident(indices, Layout(cp=s.rank(indices) - 1) if s.mesh.cp > 1 else WHOLE)
    )
    have, rank = s.layout(indices), s.rank(node.outputs[0])
    vocabulary = s.mesh.tp > 1 and s.graph.values[indices].kind is Kind.INPUT
    w = s.resident(table, Layout(tp=0) if vocabulary else WHOLE)
    out = Layout(have.cp if have.cp is not None and have.cp < rank else None, partial=vocabulary)
    shape = s.out.values[local].type.shape
    rows = s.out.values[w].type.shape[0]
    s.emit(node, [w, local], [out], rows=rows, num=max(1, math.prod(shape)))
    if vocabulary:
        s.env[node.outputs[0]] = s.settled(node.outputs[0])
    elif s.mesh.sequence and rank >= 3:
        s.env[node.outputs[0]] = s.moved(node.outputs[0], replace(out, tp=s._token_dim(node.outputs[0], out)))
