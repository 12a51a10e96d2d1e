"""Laws of graphs, on random small ones with blocks, carries, stacks, views and in-place ops."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.errors import GraphError
from ridgeline.graph import (
    RESIDENT,
    Block,
    Builder,
    Graph,
    Node,
    dumps,
    expand,
    loads,
    problems,
    root_of,
    tensor,
    to_text,
    verify,
)

T = tensor((4, 8))


class _Sketch:
    """Draws a graph: plain stretches, forward blocks, and reverse blocks that read what those have stacked."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.b = Builder("random", size=draw(st.integers(0, 9)))
        self.live = [self.b.input("x", T), self.b.param("w", T)]
        self.stacks: dict[int, list[int]] = {}  # repeat → stacked values
        self.repeat: int | None = None  # of the open block

    def pick(self, extra: list[int] | None = None) -> int:
        fitting = [v for v in self.live if self.repeat is None or self.b.values[v].count in (1, self.repeat)]
        return self.draw(st.sampled_from([*fitting, *(extra or [])]))

    def op(self, extra: list[int] | None = None) -> int:
        form = self.draw(st.sampled_from(["unary", "binary", "view", "in-place", "matmul"]))
        x = self.pick(extra)
        if form == "view":
            return self.b.view(x, T)
        if form == "in-place":
            out = self.b.value(T, alias=x)
            return self.b.node("pointwise", [x], [out], fn="relu", inplace=True)[0]
        if form == "matmul":
            w = self.b.param("w", tensor((8, 8)))
            return self.b.node("matmul", [x, w], [T], b=1, m=4, n=8, k=8)[0]
        inputs = [x] if form == "unary" else [x, self.pick(extra)]
        return self.b.node("pointwise", inputs, [T], fn="add")[0]

    def plain(self) -> None:
        for _ in range(self.draw(st.integers(1, 3))):
            self.live.append(self.op())

    def block(self) -> None:
        repeat = self.repeat = self.draw(st.integers(1, 7))
        reverse = bool(self.stacks.get(repeat)) and self.draw(st.booleans())
        saved = self.stacks.get(repeat, []) if reverse else []
        inits = [self.pick() for _ in range(self.draw(st.integers(0, 2)))]
        with self.b.repeat(repeat, "layers", reverse=reverse):
            inner = [self.b.carry(init) for init in inits]
            made = [self.b.node("pointwise", [*inner, self.pick()], [T], fn="add")[0]]
            for _ in range(self.draw(st.integers(0, 3))):
                made.append(self.op([*inner, *made, *saved]))
            fresh = [m for m in made if self.b.values[m].alias is None]
            for i in inner:
                fitting = [m for m in made if self.start(m, inner) in {i, *fresh}]
                self.b.close_carry(i, self.draw(st.sampled_from(fitting)))
        self.repeat = None
        self._stack(repeat, [*inner, *fresh])
        self.live.extend(fresh)

    def start(self, value: int, inner: list[int]) -> int:
        """Where a chain of aliases ends: a carry's next is new, or its placeholder updated in place."""
        while value not in inner and (alias := self.b.values[value].alias) is not None:
            value = alias
        return value

    def _stack(self, repeat: int, candidates: list[int]) -> None:
        if repeat > 1 and candidates and self.draw(st.booleans()):
            value = self.draw(st.sampled_from(candidates))
            self.b.values[value] = replace(self.b.values[value], count=repeat)
            self.stacks.setdefault(repeat, []).append(value)

    def graph(self) -> Graph:
        for _ in range(self.draw(st.integers(1, 4))):
            self.plain()
            if self.draw(st.booleans()):
                self.block()
        (last,) = self.b.node("reduce", [self.pick()], [tensor((), "fp32")], fn="sum", dims=(0, 1))
        return self.b.finish([last])


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    return _Sketch(draw).graph()


@given(graphs())
def test_what_the_builder_makes_is_well_formed(graph: Graph):
    assert verify(graph) is graph


@given(graphs(), st.integers(1, 5))
def test_a_folded_expansion_weighs_as_much_as_the_full_one(graph: Graph, shown: int):
    def weigh(limit: int) -> Counter[str]:
        total: Counter[str] = Counter()
        for flat in expand(graph, limit):
            total[flat.node.op] += flat.times
        return total

    assert weigh(shown) == weigh(1000)
    assert sum(weigh(shown).values()) == graph.num_nodes


@given(graphs(), st.sampled_from([3, 1000]))
def test_no_storage_is_used_after_it_is_freed_nor_freed_twice(graph: Graph, shown: int):
    freed: set[tuple[int, int]] = set()
    for flat in expand(graph, shown):
        assert not freed & {*flat.inputs, *flat.outputs}
        assert len(set(flat.frees)) == len(flat.frees)
        assert not freed & set(flat.frees)
        freed |= set(flat.frees)


@given(graphs())
def test_nothing_is_forgotten(graph: Graph):
    """At the end only residents and outputs are left."""
    written: set[tuple[int, int]] = set()
    for flat in expand(graph, 1000):
        written |= set(flat.outputs)
        written -= set(flat.frees)
    left = {root for root, _ in written if graph.values[root].kind not in RESIDENT}
    assert left <= {root_of(graph.values, o) for o in graph.outputs}


@given(graphs())
def test_files_give_back_the_same_graph_and_bytes(graph: Graph):
    again = loads(dumps(graph))
    assert again == graph
    assert again.content_hash == graph.content_hash
    assert dumps(again) == dumps(graph)


@given(graphs())
def test_the_text_has_a_line_for_every_node(graph: Graph):
    lines = to_text(graph).splitlines()
    assert sum(" = " in line and "(%" in line for line in lines) == sum(1 for _ in graph.nodes())


def _with_node(graph: Graph, at: int, change: dict[str, Any] | None) -> Graph:
    """The graph with its node number ``at`` changed, or dropped."""
    count = -1

    def edited(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        nonlocal count
        out = []
        for node in nodes:
            count += 1
            if count != at:
                out.append(node)
            elif change is not None:
                out.append(replace(node, **change))
        return tuple(out)

    items: list[Any] = []
    for item in graph.items:
        if isinstance(item, Block):
            items.append(replace(item, nodes=edited(item.nodes)))
        else:
            items.extend(edited((item,)))
    return replace(graph, items=tuple(items))


@given(graphs(), st.data())
def test_a_broken_node_is_always_noticed(graph: Graph, data: st.DataObject):
    nodes = [node for node, _ in graph.nodes()]
    at = data.draw(st.integers(0, len(nodes) - 1))
    changes: list[dict[str, Any]] = [
        {"inputs": (len(graph.values),)},
        {"outputs": (-1,)},
        {"op": "nonsense"},
        {"attrs": {**nodes[at].attrs, "nonsense": 1}},
        {"frees": (0,)},  # the input, which is not ours
        {"frees": (*nodes[at].frees, graph.outputs[0])},
    ]
    assert problems(_with_node(graph, at, data.draw(st.sampled_from(changes))))


@given(graphs(), st.data())
def test_a_missing_node_is_noticed_when_its_result_is_used(graph: Graph, data: st.DataObject):
    nodes = [node for node, _ in graph.nodes()]
    used = {i for n in nodes for i in n.inputs} | set(graph.outputs)
    owners = [at for at, n in enumerate(nodes) if any(o in used and graph.values[o].alias is None for o in n.outputs)]
    at = data.draw(st.sampled_from(owners))
    assert problems(_with_node(graph, at, None))


@given(graphs(), st.data())
def test_damaged_files_are_refused_or_read_but_never_crash(graph: Graph, data: st.DataObject):
    content = bytearray(dumps(graph))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    _read_or_refuse(bytes(content[: data.draw(st.integers(0, len(content)))]))
    _read_or_refuse(bytes(content))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(graphs(), json_values, st.data())
def test_any_json_in_any_place_is_refused_or_read_but_never_crashes(graph: Graph, junk: Any, data: st.DataObject):
    document = json.loads(dumps(graph))
    at: Any = document
    while True:
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        if not at[key] or not isinstance(at[key], dict | list) or data.draw(st.booleans()):
            break
        at = at[key]
    at[key] = junk
    _read_or_refuse(json.dumps(document).encode())


def _read_or_refuse(content: bytes) -> None:
    with contextlib.suppress(GraphError):
        verify(loads(content))


@given(st.binary(max_size=200))
def test_noise_is_no_graph(noise: bytes):
    with pytest.raises(GraphError):
        loads(noise)
    with pytest.raises(GraphError):
        loads(gzip.compress(noise))
