"""Peak memory by liveness over the schedule, with the allocator's rounding and the libraries' workspaces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from ridgeline.graph import RESIDENT, FlatNode, Graph, Phase, expand, slot_times
from ridgeline.graph.expand import Flat
from ridgeline.graph.template import Template

GRANULE = 512  # PyTorch's caching allocator rounds every block up to this
WORKSPACE_BYTES = 32 << 20  # cuBLAS keeps one per handle on Hopper; each thread and the Lt path have their own


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes over the schedule: what stays, what comes and goes, and what the peak consists of."""

    peak_bytes: int
    resident_bytes: int
    workspace_bytes: int
    by_kind: Mapping[str, int]  # live at the peak
    peak_at: int  # index of the flat node at the peak
    timeline: tuple[tuple[int, int], ...]  # (flat node index, live bytes after its allocations), repeats not unrolled


NEVER = -1
OVERWRITING = frozenset({"pointwise", "copy", "norm", "softmax", "quantize"})


def rounded(num_bytes: int) -> int:
    return -(-num_bytes // GRANULE) * GRANULE


@dataclass(frozen=True, slots=True)
class Fused:
    """What generated kernels change: which values they never write, and when the others come and go."""

    unmade: frozenset[int] = frozenset()  # values kept in registers
    kept: Mapping[int, int] = field(default_factory=dict)  # values that stand for so many bytes instead of their own
    held: Mapping[Flat, int] = field(default_factory=dict)  # storages a kernel reads, the flat node with which it ends
    made: Mapping[Flat, int] = field(default_factory=dict)  # storages a kernel writes, the flat node with which it ends


def memory_of(graph: Graph, fused: Fused | None = None) -> Memory:
    """Live bytes at every node; a repeated block grows or shrinks by the same amount each time, so its ends suffice.

    Eager values live as long as the program holds on to them. In compiled code (``fused``) they die after their last
    use, and a memory-bound op writes over an input that dies with it.
    """
    schedule = schedule_of(graph) if fused is None else _compiled_order(schedule_of(graph))
    walk = _Walk(graph, fused, schedule)
    for index, flat in enumerate(schedule):
        walk.step(index, flat)
    return walk.result()


_schedules: WeakKeyDictionary[Template, list[FlatNode]] = WeakKeyDictionary()


def schedule_of(graph: Graph) -> list[FlatNode]:
    """The graph laid out flat. Storages come and go alike whatever the sizes: graphs of a template share one list."""
    made = graph.__dict__.get("template")
    if made is None:
        return list(expand(graph))
    found = _schedules.get(made[0])
    if found is None:
        found = _schedules[made[0]] = list(expand(made[0].graph))
    return found


def _compiled_order(schedule: list[FlatNode]) -> list[FlatNode]:
    """Compiled backward passes multiply for a weight's gradient before the input's, which frees what was saved for it.

    Autograd does it the other way round; views in between are no work.
    """
    found = list(schedule)
    for at, flat in enumerate(schedule):
        if flat.node.op != "matmul" or flat.node.phase is not Phase.BACKWARD:
            continue
        after = next((j for j in range(at + 1, len(schedule)) if schedule[j].node.op != "view"), at)
        other = schedule[after]
        pair = other.node.op == "matmul" and other.body == flat.body and found[at] is flat
        if pair and set(flat.inputs) & set(other.inputs) and not set(flat.outputs) & set(other.inputs):
            found[at], found[after] = other, flat
    return found


def _last_uses(graph: Graph, schedule: list[FlatNode], fused: Fused) -> dict[int, list[Flat]]:
    """Storages by the flat node after which nobody needs them; the optimizer, never compiled along, keeps its own."""
    last: dict[Flat, int] = {}
    written: dict[int, Flat] = {}  # of a value that every iteration of a block makes, the latest
    for index, flat in enumerate(schedule):
        for storage in (*flat.inputs, *flat.outputs):
            last[storage] = index if flat.node.phase is not Phase.OPTIMIZER else NEVER
        written.update((storage[0], storage) for storage in flat.outputs)
    outputs = {_owner(graph, value) for value in graph.outputs}
    kept = {s for s in last if s[0] in outputs and (graph.values[s[0]].count > 1 or written.get(s[0], s) == s)}
    dead: dict[int, list[Flat]] = {}
    for storage, used in last.items():
        index = used if used == NEVER else max(used, fused.held.get(storage, 0), fused.made.get(storage, 0))
        if index != NEVER and graph.values[storage[0]].kind not in RESIDENT and storage not in kept:
            dead.setdefault(index, []).append(storage)
    return dead


def _owner(graph: Graph, value: int) -> int:
    while (alias := graph.values[value].alias) is not None:
        value = alias
    return value


UNPOOLED = frozenset({"attention", "conv"})
"""Ops of libraries that allocate their results themselves."""


class _Pool:
    """Which buffers compiled code hands on: one that dies is not freed if a later one of its size can take it over."""

    def __init__(self, graph: Graph, fused: Fused) -> None:
        self.graph, self.fused = graph, fused
        self.free: dict[tuple[int, str], list[Flat]] = {}
        self.handed: set[Flat] = set()  # dead buffers that live on as another
        self.taken: set[Flat] = set()  # the others
        self.there: set[Flat] = set()
        self.phase = Phase.FORWARD

    def _key(self, storage: Flat) -> tuple[int, str] | None:
        value = self.graph.values[storage[0]]
        plain = value.kind not in RESIDENT and value.alias is None and value.count == 1
        if not plain or storage[0] in self.fused.unmade or storage[0] in self.fused.kept:
            return None
        return rounded(value.num_bytes), value.type.dtype.name

    def enter(self, phase: Phase) -> None:
        """Forward and backward are two programs: nothing is handed from one to the other."""
        if phase is not self.phase:
            self.phase = phase
            self.free.clear()

    def drop(self, storages: Iterable[Flat]) -> None:
        for storage in storages:
            key = self._key(storage)
            if key is not None and storage in self.there:
                self.there.remove(storage)
                self.free.setdefault(key, []).append(storage)

    def take(self, storages: Iterable[Flat], op: str) -> None:
        for storage in storages:
            key = self._key(storage)
            if key is None or storage in self.there:
                continue
            self.there.add(storage)
            if op not in UNPOOLED and self.free.get(key):
                self.handed.add(self.free[key].pop())
                self.taken.add(storage)


class _Walk:
    """Replays allocations and frees in schedule order."""

    def __init__(self, graph: Graph, fused: Fused | None, schedule: list[FlatNode]) -> None:
        self.dead = None if fused is None else _last_uses(graph, schedule, fused)
        self.values, self.workspace, self.fused = graph.values, workspace_bytes(graph), fused or Fused()
        self.late: dict[int, list[Flat]] = {}  # outputs that appear when their kernel runs, after their own node
        for storage, index in self.fused.made.items():
            self.late.setdefault(index, []).append(storage)
        self.pool = _Pool(graph, self.fused)
        for index, flat in enumerate(schedule if fused is not None else ()):
            self._plan(index, flat)
        self.live: dict[Flat, int] = {}
        self.gone: set[Flat] = set()
        self.kinds: dict[str, int] = {}
        for v in graph.values:
            if v.kind in RESIDENT and v.alias is None:
                self.kinds[v.kind] = self.kinds.get(v.kind, 0) + rounded(v.num_bytes) * v.count
        self.resident = self.current = sum(self.kinds.values())
        self.peak, self.peak_at, self.peak_kinds = self.current, 0, dict(self.kinds)
        self.timeline: list[tuple[int, int]] = []
        self.body, self.times = 0, 1
        self.before: dict[str, int] = {}  # live bytes by kind when the body began
        self.highest: tuple[int, int, dict[str, int]] = (0, 0, {})

    def _plan(self, index: int, flat: FlatNode) -> None:
        """One node of the pass that decides which buffers are handed on."""
        outputs, frees = self._outputs(index, flat), self._frees(index, flat)
        over = flat.node.op in OVERWRITING and not self._grows(outputs)
        self.pool.enter(flat.node.phase)
        if over:
            self.pool.drop(frees)
        self.pool.take(outputs, flat.node.op)
        if not over:
            self.pool.drop(frees)

    def _outputs(self, index: int, flat: FlatNode) -> tuple[Flat, ...]:
        """What appears at a node: its own outputs, or those of the generated kernel that ends with it."""
        return (*(o for o in flat.outputs if o not in self.fused.made), *self.late.get(index, ()))

    def step(self, index: int, flat: FlatNode) -> None:
        if flat.body != self.body:
            self._close_body()
            self.body, self.times, self.before, self.highest = flat.body, flat.times, dict(self.kinds), (0, index, {})
        outputs = self._outputs(index, flat)
        over = self.dead is not None and flat.node.op in OVERWRITING and not self._grows(outputs)
        frees = self._frees(index, flat)
        for gone in frees if over else ():
            self._release(gone)
        for out in outputs:
            self._allocate(out)
        self.timeline.append((index, self.current))
        if self.current > self.highest[0]:
            self.highest = (self.current, index, dict(self.kinds))
        if self.current > self.peak:
            self.peak, self.peak_at, self.peak_kinds = self.current, index, dict(self.kinds)
        for gone in () if over else frees:
            self._release(gone)

    def _grows(self, outputs: tuple[Flat, ...]) -> bool:
        """Whether copies of an output are made, which cannot all be written over an input."""
        return any(self.fused.kept.get(out[0], 0) > self.values[out[0]].num_bytes for out in outputs)

    def _frees(self, index: int, flat: FlatNode) -> tuple[Flat, ...]:
        """What goes after a node: as the program lets go of it, or in compiled code after its last use.

        The caller holds on to what a compiled graph was given, a cache that it replaces too, until it returns.
        """
        if self.dead is None or flat.node.phase is Phase.OPTIMIZER:
            return flat.frees
        return tuple(self.dead.get(index, ()))

    def _close_body(self) -> None:
        """A middle iteration stands for many, each of which changes what is live by the same amount."""
        more = self.times - 1
        if self.body and more:
            growth = {k: (v - self.before.get(k, 0)) * more for k, v in self.kinds.items()}
            live, index, kinds = self.highest
            last = live + sum(growth.values())
            if last > self.peak:
                self.peak, self.peak_at = last, index
                self.peak_kinds = {k: v + growth.get(k, 0) for k, v in kinds.items()}
            self.kinds = {k: v + growth[k] for k, v in self.kinds.items()}
            self.current += sum(growth.values())
        self.times = 1

    def _allocate(self, flat: Flat) -> None:
        value = self.values[flat[0]]
        if flat in self.live or value.kind in RESIDENT or value.alias is not None or flat[0] in self.fused.unmade:
            return
        self.live[flat] = size = rounded(self.fused.kept.get(flat[0], value.num_bytes))
        if flat in self.pool.taken:
            return
        self.current += size
        self.kinds[value.kind] = self.kinds.get(value.kind, 0) + size

    def _release(self, flat: Flat) -> None:
        value = self.values[flat[0]]
        size = self.live.pop(flat, 0)
        if flat in self.pool.handed:
            return
        if value.kind in RESIDENT and value.alias is None and flat not in self.gone:  # a cache the step replaces
            self.gone.add(flat)
            size = rounded(value.num_bytes)
        if value.count > 1 and not self.body:  # freed outside the block: one shown slice stands for several
            size *= slot_times(value.count, 3)[flat[1]]
        self.current -= size
        if size:
            self.kinds[value.kind] -= size

    def result(self) -> Memory:
        self._close_body()
        kinds = {str(k): v for k, v in self.peak_kinds.items() if v}
        if self.workspace:
            kinds["workspace"] = self.workspace
        return Memory(
            self.peak + self.workspace, self.resident, self.workspace, kinds, self.peak_at, tuple(self.timeline)
        )


def workspace_bytes(graph: Graph) -> int:
    """What the matrix libraries keep: a workspace for plain products, another for fused bias or a backward thread."""
    products = {bool(n.attrs.get("bias")) for n, _ in graph.nodes() if n.op == "matmul"}
    if not products:
        return 0
    handles = 2 if graph.mode == "train" or True in products else 1
    return WORKSPACE_BYTES * handles
