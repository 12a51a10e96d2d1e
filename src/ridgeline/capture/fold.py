"""Repeated structure found and kept once: equal consecutive stretches of a recording become blocks.

A stretch is a run of layers whose operators, types and dataflow are the same. What a layer reads is local to it,
carried from the layer before, the same for all, or its own slice of a stack; anything else leaves the run flat.
The folded graph is unrolled and compared with the recording before it is handed out.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ridgeline.graph import RESIDENT, Block, Carry, Graph, Item, Kind, Node, TensorType, Value, expand, root_of

MIN_REPEAT = 2
_LIST_OPS = frozenset({"foreach", "optimizer"})


def folded(graph: Graph) -> Graph:
    """The same graph with its repeated stretches as blocks; flat where nothing repeats or nothing fits."""
    runs = find_runs(graph)
    tries: Counter[str] = Counter()
    while runs:
        try:
            made = _Folder(graph, runs).fold()
        except _Misfit as misfit:
            tries[misfit.run.prefix] += 1
            runs = misfit.repaired(runs, give_up=tries[misfit.run.prefix] > 8)  # max tries
            continue
        odd = first_difference(made, graph)
        if odd is None:
            return made if frees_once(made) else graph
        # The run that holds a position, or the last before it
        runs = [
            r for r in runs if r is not max((r for r in runs if r.start <= odd), key=lambda r: r.start, default=runs[0])
        ]
    return graph


# --- finding runs ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """``repeat`` equal stretches of ``period`` nodes from ``start``; ``keys`` say which layers each stretch is."""

    start: int
    period: int
    keys: tuple[frozenset[int], ...]
    prefix: str
    reverse: bool

    @property
    def repeat(self) -> int:
        return len(self.keys)

    @property
    def end(self) -> int:
        return self.start + self.period * self.repeat

    def trimmed(self, first: int, last: int) -> Run:
        """Without ``first`` stretches at the front and ``last`` at the back."""
        return replace(self, start=self.start + first * self.period, keys=self.keys[first : len(self.keys) - last])


def find_runs(graph: Graph) -> list[Run]:
    """Maximal runs, the longest first come; runs over the same layers are cut to the layers they share."""
    signs = _signatures(graph)
    candidates = sorted(_layer_runs(graph, signs), key=lambda r: (-(r.end - r.start), r.period, r.start))
    chosen: list[Run] = []
    for run in candidates:
        if not _overlaps(run, chosen):
            chosen.append(run)
    return _aligned([*chosen, *(h for h in _host_runs(graph, signs) if not _overlaps(h, chosen))])


def _overlaps(run: Run, others: Sequence[Run]) -> bool:
    return any(run.start < other.end and other.start < run.end for other in others)


def _signatures(graph: Graph) -> list[int]:
    """One small number per distinct kind of node, whatever the layer it is in."""
    seen: dict[object, int] = {}
    values = graph.values
    signs = []
    for node in graph.items:
        assert isinstance(node, Node)
        attrs = json.dumps(node.attrs, sort_keys=True, default=str)
        ins = tuple([values[i].type for i in node.inputs])
        outs = tuple(
            [(values[o].type, values[o].kind, values[o].storage_bytes, values[o].alias is None) for o in node.outputs]
        )
        found = _STARRED.get(node.module)
        if found is None:
            found = ".".join("*" if part.isdigit() else part for part in node.module.split("."))
            _STARRED[node.module] = found
        key = (node.op, attrs, node.phase, found, node.source, node.target, ins, outs, len(node.frees))
        signs.append(seen.setdefault(key, len(seen)))
    return signs


_STARRED: dict[str, str] = {}


def _layer_runs(graph: Graph, signs: Sequence[int]) -> Iterator[Run]:
    for prefix, cuts in _cuts(graph).items():
        # max layers per period
        for layers in range(1, 8 + 1):
            yield from _runs_of(prefix, cuts, layers, signs)


def _cuts(graph: Graph) -> dict[str, list[tuple[int, int]]]:
    """Where each numbered container moves on to another of its members: (position, member)."""
    cuts: dict[str, list[tuple[int, int]]] = {}
    last: dict[str, int] = {}
    for at, node in enumerate(graph.items):
        assert isinstance(node, Node)
        found = _NUMBERED.get(node.module)
        if found is None:
            parts = node.module.split(".")
            found = tuple((".".join(parts[:i]), int(part)) for i, part in enumerate(parts) if part.isdigit())
            _NUMBERED[node.module] = found
        for prefix, member in found:
            if last.get(prefix) != member:
                cuts.setdefault(prefix, []).append((at, member))
                last[prefix] = member
    return cuts


_NUMBERED: dict[str, tuple[tuple[str, int], ...]] = {}


def _runs_of(prefix: str, cuts: list[tuple[int, int]], layers: int, signs: Sequence[int]) -> Iterator[Run]:
    """Runs that start at a cut and repeat every ``layers`` cuts."""
    at, reach = 0, 0
    while at + layers < len(cuts):
        start, period = cuts[at][0], cuts[at + layers][0] - cuts[at][0]
        repeat = _matching(signs, start, period) // period + 1
        if repeat >= MIN_REPEAT and start + repeat * period > reach:
            keys, after = _keys(cuts, at, start, period, repeat)
            if len(keys) >= MIN_REPEAT:
                reach = start + len(keys) * period
                yield Run(start, period, keys, prefix, max(keys[0]) > max(keys[-1]))
                at = max(after, at + 1)
                continue
        at += 1


def _keys(
    cuts: list[tuple[int, int]], at: int, start: int, period: int, repeat: int
) -> tuple[tuple[frozenset[int], ...], int]:
    """Which members each stretch covers; the last stretch may be cut short of a member's end, never of its start."""
    keys: list[frozenset[int]] = []
    for i in range(repeat):
        end = start + (i + 1) * period
        members = set()
        while at < len(cuts) and cuts[at][0] < end:
            members.add(cuts[at][1])
            at += 1
        if not members or any(members & key for key in keys[-1:]):
            break
        keys.append(frozenset(members))
    return tuple(keys), at


def _matching(signs: Sequence[int], start: int, period: int) -> int:
    """How far the sequence equals itself one period later."""
    at, size = start, len(signs) - period
    while at < size and signs[at] == signs[at + period]:
        at += 1
    return at - start


def _host_runs(graph: Graph, signs: Sequence[int]) -> Iterator[Run]:
    """One thing the host does over and over, as optimizers do for every parameter."""
    at = 0
    while at < len(signs) - 1:
        node = graph.items[at]
        assert isinstance(node, Node)
        repeat = _matching(signs, at, 1) + 1 if node.op == "host" and not node.outputs else 1
        # min host repeat
        if repeat >= 4:
            yield Run(at, 1, tuple(frozenset({i}) for i in range(repeat)), f"@{at}", False)
        at += repeat


def _aligned(runs: list[Run]) -> list[Run]:
    """Runs over the same layers hold the same ones, so that stacks have a slice for each."""
    shared: dict[tuple[str, int], set[frozenset[int]]] = {}
    for run in runs:
        group = (run.prefix, max(map(len, run.keys)))
        shared[group] = shared[group] & set(run.keys) if group in shared else set(run.keys)
    made = [_cut_to(run, shared[run.prefix, max(map(len, run.keys))]) for run in runs]
    return sorted((run for run in made if run.repeat >= MIN_REPEAT), key=lambda r: r.start)


def _cut_to(run: Run, keys: set[frozenset[int]]) -> Run:
    inside = [i for i, key in enumerate(run.keys) if key in keys]
    if not inside:
        return run.trimmed(run.repeat, 0)
    return run.trimmed(inside[0], run.repeat - 1 - inside[-1])


class _Misfit(Exception):
    """A run whose dataflow does not fit: which one, and how many stretches to cut at either end (or all)."""

    def __init__(self, run: Run, why: str, *, first: int = 0, last: int = 0) -> None:
        super().__init__(f"{run.prefix or 'top level'} at {run.start}: {why}")
        self.run, self.first, self.last = run, first, last

    def repaired(self, runs: list[Run], *, give_up: bool = False) -> list[Run]:
        if give_up or (not self.first and not self.last):
            return [r for r in runs if r is not self.run]
        cut = self.run.trimmed(min(self.first, self.run.repeat), min(self.last, max(self.run.repeat - self.first, 0)))
        return _aligned([cut if r is self.run else r for r in runs if cut.repeat or r is not self.run])


# --- folding --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Made:
    """A value of the folded graph while it is being built."""

    type: TensorType
    kind: Kind
    alias: int | None
    name: str
    storage_bytes: int | None
    count: int = 1


@dataclass(slots=True)
class _Carried:
    init: int
    inner: int
    next: tuple[int, int]  # node of the body and its output


@dataclass
class _Open:
    """The run being folded."""

    index: int
    run: Run
    slots: dict[tuple[int, ...], int] = field(default_factory=dict)
    carries: list[tuple[tuple[int, ...], _Carried]] = field(default_factory=list)
    views: list[tuple[tuple[int, ...], int]] = field(default_factory=list)  # looks at what is carried
    body: dict[tuple[int, int], int] = field(default_factory=dict)

    def slice_at(self, i: int) -> int:
        return self.run.repeat - 1 - i if self.run.reverse else i


class _Folder:
    def __init__(self, graph: Graph, runs: list[Run]) -> None:
        self.old, self.runs = graph.values, runs
        self.nodes: list[Node] = [n for n in graph.items if isinstance(n, Node)]
        self.graph = graph
        self.made: list[_Made] = []
        self.flat: dict[int, int] = {}  # old value → new, for what is defined outside runs
        self.home: dict[int, tuple[int, int, int, int]] = {}  # old value → run, stretch, node, output
        self.bodies: list[dict[tuple[int, int], int]] = []
        self.stacks: dict[int, tuple[int, ...]] = {}  # new value → old ones by slice
        self.named: dict[int, list[int]] = {}  # old value → stacks that hold it
        self.defined: set[int] = set()
        self.linked: dict[int, list[int]] = {}  # storages at one position of list ops
        self.inners: set[int] = set()  # placeholders of carries
        self.bundles: dict[int, set[int]] = {}  # value of a list op → members still alive
        for node in self.nodes:
            self.defined.update(node.outputs)
        for index, run in enumerate(self.runs):
            for at in range(run.start, run.end):
                i, j = divmod(at - run.start, run.period)
                for o, value in enumerate(self.nodes[at].outputs):
                    self.home[value] = (index, i, j, o)
        self._link_lists()

    def fold(self) -> Graph:
        items: list[Item] = []
        at = 0
        for index, run in enumerate(self.runs):
            items.extend(self._flat_node(self.nodes[k]) for k in range(at, run.start))
            items.append(self._block(index, run))
            at = run.end
        items.extend(self._flat_node(node) for node in self.nodes[at:])
        outputs = tuple(dict.fromkeys(self._whole(self.graph.outputs)))
        # Parameters, states and inputs no node touches still occupy memory
        for value in self.old:
            if (
                value.kind in RESIDENT
                and value.alias is None
                and value.id not in self.flat
                and value.id not in self.named
            ):
                self._flat(value.id)
        values = tuple(
            Value(i, m.type, m.kind, m.alias, m.count, m.name, m.storage_bytes) for i, m in enumerate(self.made)
        )
        inputs = tuple(i for i, m in enumerate(self.made) if m.kind is Kind.INPUT and m.alias is None)
        meta = dict(self.graph.meta)
        if "donated" in meta:
            meta["donated"] = sorted(
                {(self.flat[old] if old in self.flat else self.named[old][0]) for old in meta["donated"]}
            )
        return replace(self.graph, values=values, items=tuple(items), inputs=inputs, outputs=outputs, meta=meta)

    # --- values outside runs ----------------------------------------------------------------------------------------

    def _new(self, old: int, alias: int | None, *, count: int = 1, name: str | None = None) -> int:
        seen = self.old[old]
        self.made.append(
            _Made(seen.type, seen.kind, alias, seen.name if name is None else name, seen.storage_bytes, count)
        )
        return len(self.made) - 1

    def _flat(self, old: int) -> int:
        """What a node outside runs calls a value: its own, or that of the last stretch."""
        found = self.flat.get(old)
        if found is not None:
            return found
        home = self.home.get(old)
        if home is not None:
            return self._last_of(home)
        if old in self.named:
            stack = self.named[old][0]
            slice_ = self.stacks[stack].index(old)
            run = next(r for r in self.runs if r.repeat == len(self.stacks[stack]))
            raise self._single(run, run.repeat - 1 - slice_ if run.reverse else slice_)
        alias = self.old[old].alias
        self.flat[old] = self._new(old, None if alias is None else self._flat(alias))
        return self.flat[old]

    def _last_of(self, home: tuple[int, int, int, int]) -> int:
        index, i, j, o = home
        run = self.runs[index]
        if i != run.repeat - 1:
            raise self._single(run, i)
        return self.bodies[index][j, o]

    @staticmethod
    def _single(run: Run, i: int) -> _Misfit:
        """One stretch's value is wanted by itself: cut so that this stretch is the last, or out of the run."""
        before, after = i + 1, run.repeat - 1 - i
        if after <= before:
            return _Misfit(run, f"stretch {i} of {run.repeat} is used by itself", last=after)
        return _Misfit(run, f"stretch {i} of {run.repeat} is used by itself", first=before)

    def _flat_node(self, node: Node) -> Node:
        if node.op in _LIST_OPS:
            return self._list_node(node)
        inputs = tuple([self._flat(v) for v in node.inputs])
        outputs = tuple([self._flat(v) for v in node.outputs])
        return replace(node, inputs=inputs, outputs=outputs, frees=tuple(self._whole(node.frees)))

    def _whole(self, olds: Sequence[int]) -> list[int]:
        """Values named one by one, where all slices of a stack occur named as the stack."""
        present: set[int] = set(olds)
        covered: dict[int, int] = {}
        for stack in dict.fromkeys(s for old in olds for s in self.named.get(old, ())):
            slices = self.stacks[stack]
            if present.issuperset(slices) and covered.keys().isdisjoint(slices):
                covered.update(dict.fromkeys(slices, self._stacked(stack)))
        return list(dict.fromkeys(covered[old] if old in covered else self._flat(old) for old in olds))

    # --- optimizers over lists --------------------------------------------------------------------------------------

    def _link_lists(self) -> None:
        """Tensors at one position of a list op belong together: a parameter, its gradient, its states."""
        for node in self.nodes:
            if node.op in _LIST_OPS:
                lists = _lists(node)
                for position in range(len(lists[0]) if lists else 0):
                    first = root_of(self.old, lists[0][position])
                    for olds in lists[1:]:
                        self._link(first, root_of(self.old, olds[position]))

    def _link(self, a: int, b: int) -> None:
        one, other = self.linked.setdefault(a, [a]), self.linked.setdefault(b, [b])
        if one is not other:
            one.extend(other)
            for member in other:
                self.linked[member] = one

    def _list_node(self, node: Node) -> Node:
        """Lists over all parameters: a stack of one tensor per layer is named once, new tensors are one value."""
        lists = _lists(node)
        inputs = [new for olds in lists for new in self._listed(olds)]
        inputs += [self._flat(v) for v in node.inputs[len(lists) * len(lists[0]) if lists else 0 :]]
        fresh = [o for o in node.outputs if self.old[o].alias is None]
        for out in node.outputs:
            alias = self.old[out].alias
            if alias is not None:
                self.flat[out] = self._list_name(alias)
        outputs = dict.fromkeys(self.flat[o] for o in node.outputs if self.old[o].alias is not None)
        if fresh:
            # What a list op makes anew, as one value of all elements
            types = [self.old[old].type for old in fresh]
            owned = sum(self.old[old].num_bytes for old in fresh)
            bundle = self._new(fresh[0], None, name="")
            made = self.made[bundle]
            made.type = TensorType((sum(t.numel for t in types),), types[0].dtype)
            made.storage_bytes = None if owned == made.type.num_bytes else owned
            self.flat.update(dict.fromkeys(fresh, bundle))
            self.bundles[bundle] = set(fresh)
            outputs[bundle] = None
        return replace(node, inputs=tuple(inputs), outputs=tuple(outputs), frees=tuple(self._list_frees(node.frees)))

    def _list_frees(self, olds: Sequence[int]) -> list[int]:
        """A bundle dies with its last member."""
        bundled = [old for old in olds if self.flat.get(old) in self.bundles]
        made = self._whole([old for old in olds if old not in set(bundled)])
        for old in bundled:
            left = self.bundles[self.flat[old]]
            left.discard(old)
            if not left:
                made.append(self.flat[old])
        return made

    def _list_name(self, old: int) -> int:
        if old in self.flat:
            return self.flat[old]
        stack = next((s for s in self.named.get(old, ()) if self.made[s].count > 1), None)
        return self._flat(old) if stack is None else stack

    def _listed(self, olds: Sequence[int]) -> list[int]:
        """The names of a list's tensors, each once."""
        groups: dict[int, dict[int, int]] = {}
        for old in olds:
            anchor = None if old in self.flat else self._anchor(old)
            if anchor is not None:
                groups.setdefault(anchor[0], {})[anchor[1]] = old
        stacked: dict[int, int] = {}
        for stack, slices in groups.items():
            if len(slices) == len(self.stacks[stack]):
                ordered = tuple(slices[i] for i in range(len(slices)))
                stacked.update(dict.fromkeys(ordered, self._stack_of(ordered)))
        return list(dict.fromkeys(stacked[old] if old in stacked else self._flat(old) for old in olds))

    def _anchor(self, old: int) -> tuple[int, int] | None:
        """The oldest stack that holds a tensor linked with this one, and the slice."""
        members = [old, *self.linked.get(root_of(self.old, old), ())]
        stacks = [(s, m) for m in members for s in self.named.get(m, ())]
        if not stacks:
            return None
        stack, member = min(stacks)
        return stack, self.stacks[stack].index(member)

    def _stack_of(self, olds: tuple[int, ...]) -> int:
        """The stack with exactly these slices, made of residents where there is none yet."""
        for stack in self.named.get(olds[0], ()):
            if self.stacks[stack] == olds:
                return self._stacked(stack)
        odd = [old for old in olds if old in self.flat or old in self.home or self.old[old].kind not in RESIDENT]
        if odd or self.old[olds[0]].alias is not None:
            homes = [self.home[old][0] for old in olds if old in self.home]
            raise _Misfit(self.runs[homes[0]] if homes else self.runs[0], "a list holds values that are no stack")
        return self._new_stack(olds, None)

    def _new_stack(self, olds: tuple[int, ...], alias: int | None) -> int:
        name = _common_name([self.old[old].name for old in olds])
        stack = self._new(olds[0], alias, count=len(olds), name=name)
        self._name(stack, olds)
        return stack

    def _stacked(self, stack: int) -> int:
        """Keep a slice per stretch of this value and of all it looks at."""
        at: int | None = stack
        while at is not None and at in self.stacks:
            self.made[at].count = len(self.stacks[at])
            at = None if at in self.inners else self.made[at].alias
        return stack

    def _name(self, stack: int, olds: tuple[int, ...]) -> None:
        self.stacks[stack] = olds
        for old in olds:
            self.named.setdefault(old, []).append(stack)

    # --- values inside runs -----------------------------------------------------------------------------------------

    def _block(self, index: int, run: Run) -> Block:
        open_ = _Open(index, run)
        self.bodies.append(open_.body)
        nodes = []
        for j in range(run.period):
            stretch = [self.nodes[run.start + i * run.period + j] for i in range(run.repeat)]
            inputs = tuple([self._slot(open_, refs) for refs in zip(*[n.inputs for n in stretch], strict=True)])
            outputs = []
            for o, olds in enumerate(zip(*[n.outputs for n in stretch], strict=True)):
                alias = self._alias_slot(open_, olds)
                open_.body[j, o] = self._new(olds[0], alias, name=_common_name([self.old[v].name for v in olds]))
                outputs.append(open_.body[j, o])
            frees = self._frees(open_, [n.frees for n in stretch])
            module = _common_name([n.module for n in stretch])
            nodes.append(replace(stretch[0], inputs=inputs, outputs=tuple(outputs), frees=frees, module=module))
        carries = tuple(Carry(c.init, c.inner, open_.body[c.next]) for _, c in open_.carries)
        self._name_bodies(open_)
        return Block(
            tuple(nodes), run.repeat, carries, run.reverse, run.prefix if not run.prefix.startswith("@") else ""
        )

    def _name_bodies(self, open_: _Open) -> None:
        run = open_.run
        order = [open_.slice_at(i) for i in range(run.repeat)]
        for (j, o), new in open_.body.items():
            olds = [self.nodes[run.start + i * run.period + j].outputs[o] for i in order]
            self._name(new, tuple(olds))
        looks = [(refs, carried.inner) for refs, carried in open_.carries] + open_.views
        for refs, new in looks:
            self._name(new, tuple(refs[i] for i in order))

    def _alias_slot(self, open_: _Open, olds: tuple[int, ...]) -> int | None:
        aliases = [self.old[v].alias for v in olds]
        if all(a is None for a in aliases):
            return None
        if any(a is None for a in aliases):
            raise _Misfit(open_.run, "only some stretches share storage")
        return self._slot(open_, tuple(a for a in aliases if a is not None))

    def _slot(self, open_: _Open, refs: tuple[int, ...]) -> int:
        """The one name inside the body for what stretch i calls ``refs[i]``."""
        found = open_.slots.get(refs)
        if found is None:
            found = open_.slots[refs] = self._resolve(open_, refs)
        return found

    def _resolve(self, open_: _Open, refs: tuple[int, ...]) -> int:
        places = [self._place(open_, i, ref) for i, ref in enumerate(refs)]
        last = places[-1]
        if last is not None and last[0] == 0:
            self._expect_all(open_, places, last)
            return open_.body[last[1], last[2]]
        if last is not None and last[0] == 1:
            self._expect_all(open_, places[1:], last, first=1)
            if places[0] is not None:
                raise _Misfit(open_.run, "the first stretch reads its own where others read the one before", first=1)
            next_ = (last[1], last[2])
            roots = tuple(root_of(self.old, ref) for ref in refs)
            if roots != refs and self._carried_on(open_, roots):
                view = self._new(refs[1], self._slot(open_, roots), name="")
                self.made[view].kind = Kind.ACTIVATION
                open_.views.append((refs, view))
                return view
            if self.old[refs[0]].type.shape != self.old[refs[1]].type.shape:
                raise _Misfit(open_.run, "the first stretch is handed another shape", first=1)
            init = self._flat(refs[0])
            inner = self._new(refs[1], init, name="")
            self.made[inner].kind = Kind.ACTIVATION
            self.inners.add(inner)
            open_.carries.append((refs, _Carried(init, inner, next_)))
            return inner
        if any(place is not None for place in places):
            bad = next(i for i, place in enumerate(places) if place is not None)
            raise self._edge(open_.run, bad, "a value from two stretches back")
        return self._outer(open_, refs)

    def _place(self, open_: _Open, i: int, ref: int) -> tuple[int, int, int] | None:
        """(stretches back, node, output) of what stretch i reads, or None for what comes from outside the run."""
        home = self.home.get(ref)
        if home is None or home[0] != open_.index:
            return None
        return i - home[1], home[2], home[3]

    def _expect_all(self, open_: _Open, places: Sequence[object], wanted: object, first: int = 0) -> None:
        for i, place in enumerate(places):
            if place != wanted:
                raise self._edge(open_.run, i + first, "one stretch reads from elsewhere")

    @staticmethod
    def _edge(run: Run, i: int, why: str) -> _Misfit:
        """Cut the odd stretch off when it is near an end; else give the run up."""
        if i <= 1 and run.repeat - i - 1 >= MIN_REPEAT:
            return _Misfit(run, why, first=i + 1)
        if i >= run.repeat - 2 and i >= MIN_REPEAT:
            return _Misfit(run, why, last=run.repeat - i)
        return _Misfit(run, why)

    def _carried_on(self, open_: _Open, roots: tuple[int, ...]) -> bool:
        """Whether storages are handed from stretch to stretch as a whole, so that looks at them can share one carry."""
        places = [self._place(open_, i, root) for i, root in enumerate(roots)]
        last = places[-1]
        alike = len({self.old[root].type.shape for root in roots}) == 1
        return alike and places[0] is None and last is not None and last[0] == 1 and all(p == last for p in places[1:])

    def _outer(self, open_: _Open, refs: tuple[int, ...]) -> int:
        """From outside: the same for all stretches, slices of a stack, or looks at such."""
        if all(ref == refs[0] for ref in refs):
            return self._flat(refs[0])
        ordered = tuple(refs[open_.slice_at(s)] for s in range(len(refs)))
        for stack in self.named.get(ordered[0], ()):
            if self.stacks[stack] == ordered:
                return self._stacked(stack)
        if all(ref not in self.defined and self.old[ref].alias is not None for ref in refs):
            alias = self._alias_slot(open_, refs)
            return self._new(refs[0], alias, name="")
        return self._resident_stack(open_, ordered)

    def _resident_stack(self, open_: _Open, ordered: tuple[int, ...]) -> int:
        for s, old in enumerate(ordered):
            resident = self.old[old].kind in RESIDENT and self.old[old].alias is None
            if not resident or old in self.flat or old in self.named:
                raise self._edge(open_.run, open_.slice_at(s), f"value {old} is no slice of a stack")
        if len(set(ordered)) != len(ordered):
            raise _Misfit(open_.run, "some stretches share a tensor that others do not")
        return self._new_stack(ordered, None)

    # --- frees ------------------------------------------------------------------------------------------------------

    def _frees(self, open_: _Open, frees: list[tuple[int, ...]]) -> tuple[int, ...]:
        """What every stretch frees here, matched by where it came from."""
        if not frees[0]:
            return ()
        made: list[int] = []
        outside = [set(f) for f in frees]
        for old in frees[-1]:
            place = self._place(open_, len(frees) - 1, old)
            if place is None:
                continue
            refs = self._freed_alike(open_, frees, place)
            for i, ref in enumerate(refs):
                if ref not in outside[i]:
                    raise self._edge(open_.run, i, "one stretch frees something else")
                outside[i].discard(ref)
            made.append(self._freed_name(open_, refs))
        made += self._freed_slices(open_, outside)
        return tuple(made)

    def _freed_name(self, open_: _Open, refs: tuple[int, ...]) -> int:
        """A storage goes by the carry that already looks at it, where there is one."""
        for carried, carry in open_.carries:
            if all(root_of(self.old, a) == b for a, b in zip(carried, refs, strict=True)):
                return carry.inner
        return self._slot(open_, refs)

    def _freed_alike(self, open_: _Open, frees: list[tuple[int, ...]], place: tuple[int, int, int]) -> tuple[int, ...]:
        back, j, o = place
        run = open_.run
        if back > 1:
            raise _Misfit(run, "something lives for more than two stretches")
        refs = [self.nodes[run.start + (i - back) * run.period + j].outputs[o] for i in range(back, run.repeat)]
        if back == 0:
            return tuple(refs)
        return (self._freed_first(open_, frees[0], refs[0]), *refs)

    def _freed_first(self, open_: _Open, frees: tuple[int, ...], sample: int) -> int:
        """What the first stretch frees in place of the value the others got from the stretch before."""
        roots = [refs[0] for refs, c in open_.carries if root_of(self.old, refs[1]) == sample]
        for root in (root_of(self.old, ref) for ref in roots):
            if root in frees and self.home.get(root, (-1,))[0] != open_.index:
                return root
        alike = [f for f in frees if self._place(open_, 0, f) is None and self.old[f].type == self.old[sample].type]
        if len(alike) == 1 and not roots:
            return alike[0]
        raise _Misfit(open_.run, "the first stretch frees something else", first=1)

    def _freed_slices(self, open_: _Open, outside: list[set[int]]) -> list[int]:
        made = []
        for old in sorted(outside[0]):
            made.append(self._freed_slice(open_, outside, old))
        if any(len(o) != len(outside[0]) for o in outside):
            bad = next(i for i, o in enumerate(outside) if len(o) != len(outside[0]))
            raise self._edge(open_.run, bad, "one stretch frees more than another")
        return made

    def _freed_slice(self, open_: _Open, outside: list[set[int]], old: int) -> int:
        for stack in self.named.get(old, ()):
            olds = self.stacks[stack]
            if len(olds) != open_.run.repeat:
                continue
            if all(olds[open_.slice_at(i)] in outside[i] for i in range(len(olds))):
                return self._stacked(stack)
        raise _Misfit(open_.run, "the first stretch frees what is no slice of a stack", first=1)


def _lists(node: Node) -> list[tuple[int, ...]]:
    """The equally long tensor lists a list op reads."""
    num = int(node.attrs["num_tensors"])
    return [node.inputs[k : k + num] for k in range(0, len(node.inputs) - num + 1, num)] if num else []


def _common_name(names: Sequence[str]) -> str:
    """Dotted names with what differs replaced by a star; nothing where they are not of one shape."""
    if all(name == names[0] for name in names):
        return names[0]
    split = [name.split(".") for name in names]
    if any(len(parts) != len(split[0]) for parts in split):
        return ""
    return ".".join(parts[0] if all(p == parts[0] for p in parts) else "*" for parts in zip(*split, strict=True))


# --- proof ----------------------------------------------------------------------------------------------------------


def unrolls_to(made: Graph, flat: Graph) -> bool:
    """Whether unrolling ``made`` gives the nodes, storages and lifetimes of ``flat`` one for one."""
    return first_difference(made, flat) is None


def frees_once(made: Graph) -> bool:
    """Whether lifetimes stay sound when blocks are shown by a few iterations only."""
    gone: set[tuple[int, int]] = set()
    for shown in expand(made):
        if not gone.isdisjoint((*shown.inputs, *shown.outputs, *shown.frees)) or len(set(shown.frees)) < len(
            shown.frees
        ):
            return False
        gone.update(shown.frees)
    return True


def first_difference(made: Graph, flat: Graph) -> int | None:
    """The first node at which unrolling ``made`` departs from ``flat``; list ops are compared by what they are."""
    there: dict[tuple[int, int], int] = {}
    back: dict[int, tuple[int, int]] = {}

    def same(news: Sequence[tuple[int, int]], olds: Sequence[int]) -> bool:
        if len(news) != len(olds):
            return False
        roots = [root_of(flat.values, v) for v in olds]
        return all(there.setdefault(n, o) == o and back.setdefault(o, n) == n for n, o in zip(news, roots, strict=True))

    at = -1
    for at, shown in enumerate(expand(made, max_iterations=10**9)):
        node, mine = flat.items[at] if at < len(flat.items) else None, shown.node
        if not isinstance(node, Node) or (node.op, node.attrs, node.target) != (mine.op, mine.attrs, mine.target):
            return at
        if node.op in _LIST_OPS:
            continue
        if not same(shown.inputs, node.inputs) or not same(shown.outputs, node.outputs):
            return at
        if {there.get(f) for f in shown.frees} != set(node.frees):
            return at
    return None if at + 1 == len(flat.items) else at + 1
