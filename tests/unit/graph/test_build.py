from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from ridgeline.errors import GraphError
from ridgeline.graph import RESIDENT, Block, Builder, Graph, Kind, Node, expand, root_of, tensor, verify

T = tensor((4, 4))


def last_freed(graph: Graph) -> dict[tuple[int, int], int]:
    return {s: at for at, flat in enumerate(expand(graph)) for s in flat.frees}


def unfreed(graph: Graph) -> Iterator[tuple[int, int]]:
    freed = last_freed(graph)
    for flat in expand(graph):
        for storage in flat.outputs:
            if storage not in freed and graph.values[storage[0]].kind not in RESIDENT:
                yield storage


def test_every_activation_is_freed_but_outputs_and_gradients(mlp: Graph, trained: Graph):
    for graph in (mlp, trained):
        verify(graph)
        grads = {v.id for v in graph.values if v.kind is Kind.GRAD}
        assert {root for root, _ in unfreed(graph)} == {root_of(graph.values, o) for o in graph.outputs} | grads


def test_a_donated_input_is_freed_like_an_activation():
    b = Builder("decode", donated=(0,))
    cache = b.input("cache", T)
    (longer,) = b.node("copy", [cache], [tensor((5, 4))], fn="cat")
    graph = verify(b.finish([longer]))
    assert last_freed(graph) == {(cache, 0): 0}


def test_a_stack_that_is_an_output_is_kept_whole():
    b = Builder("hidden states")
    (h,) = b.node("fill", [], [T], fn="zeros")
    with b.repeat(4, "layers"):
        inner = b.carry(h)
        (y,) = b.node("pointwise", [inner], [T], fn="relu")
        b.values[y] = replace(b.values[y], count=4)
        b.close_carry(inner, y)
    graph = verify(b.finish([y]))
    assert {s for f in expand(graph, 9) for s in f.frees} <= {(h, 0)}


def test_a_value_dies_at_its_last_use():
    b = Builder("chain")
    x = b.input("x", T)
    (y,) = b.node("pointwise", [x], [T], fn="relu")
    (z,) = b.node("pointwise", [y], [T], fn="relu")
    (w,) = b.node("pointwise", [y, z], [T], fn="add")
    graph = b.finish([w])
    assert [n.frees for n, _ in graph.nodes()] == [(), (), (y, z)]


def test_what_dies_where_follows_the_structure_not_the_shapes():
    def chain(width: int, reuse: bool) -> Graph:
        b = Builder("chain")
        x = b.input("x", tensor((width, width)))
        (y,) = b.node("pointwise", [x], [tensor((width, width))], fn="relu")
        (z,) = b.node("pointwise", [y], [tensor((width, width))], fn="relu")
        (w,) = b.node("pointwise", [z, y] if reuse else [z], [tensor((width, width))], fn="add")
        return b.finish([w])

    small, large, reused = chain(4, False), chain(8, False), chain(8, True)
    assert [n.frees for n, _ in small.nodes()] == [n.frees for n, _ in large.nodes()] == [(), (1,), (2,)]
    assert [n.frees for n, _ in reused.nodes()] == [(), (), (2, 1)]


def test_a_view_keeps_its_storage_alive():
    b = Builder("view")
    (y,) = b.node("fill", [], [T], fn="zeros")
    v = b.view(y, tensor((16,)))
    (z,) = b.node("pointwise", [v], [tensor((16,))], fn="relu")
    graph = b.finish([z])
    assert [n.frees for n, _ in graph.nodes()] == [(), (), (y,)]


def test_parameters_inside_a_block_are_counted_per_iteration_and_named_by_path(mlp: Graph):
    (stacked,) = (v for v in mlp.values if v.kind is Kind.PARAM and v.count > 1)
    assert (stacked.count, stacked.name) == (4, "layers.*.fc.weight")


def test_module_paths_follow_the_nesting(mlp: Graph):
    assert [n.module for n, _ in mlp.nodes()][:3] == ["proj_in", "layers.*.fc", "layers.*"]


def test_an_input_that_starts_a_carry_is_never_freed():
    b = Builder("from input")
    x = b.input("x", T)
    with b.repeat(3, "layers"):
        inner = b.carry(x)
        (y,) = b.node("pointwise", [inner], [T], fn="relu")
        b.close_carry(inner, y)
    graph = verify(b.finish([y]))
    assert x not in {root for root, _ in last_freed(graph)}
    assert [len(f.frees) for f in expand(graph)] == [0, 1, 1]


def test_the_start_of_a_carry_survives_while_others_need_it():
    b = Builder("long skip")
    x = b.input("x", T)
    (h,) = b.node("pointwise", [x], [T], fn="relu")
    with b.repeat(4, "layers"):
        inner = b.carry(h)
        (y,) = b.node("pointwise", [inner], [T], fn="relu")
        b.close_carry(inner, y)
    (z,) = b.node("pointwise", [y, h], [T], fn="add")
    graph = verify(b.finish([z]))
    assert last_freed(graph)[h, 0] == len(list(expand(graph))) - 1


def test_what_every_iteration_reads_is_freed_after_the_block():
    b = Builder("cross attention")
    x, memory = b.input("x", T), b.node("fill", [], [T], fn="zeros")[0]
    with b.repeat(4, "layers"):
        inner = b.carry(x)
        (y,) = b.node("pointwise", [inner, memory], [T], fn="add")
        b.close_carry(inner, y)
    (z,) = b.node("pointwise", [y], [T], fn="relu")
    graph = verify(b.finish([z]))
    last = list(expand(graph))[-1]
    assert (memory, 0) in last.frees


def test_two_carries_may_start_from_one_value():
    b = Builder("twins")
    (h,) = b.node("fill", [], [T], fn="zeros")
    with b.repeat(4, "layers"):
        left, right = b.carry(h), b.carry(h)
        (y,) = b.node("pointwise", [left, right], [T], fn="add")
        (z,) = b.node("pointwise", [right], [T], fn="relu")
        b.close_carry(left, y)
        b.close_carry(right, z)
    (out,) = b.node("pointwise", [y, z], [T], fn="add")
    graph = verify(b.finish([out]))
    assert {root for root, _ in unfreed(graph)} == {out}


def test_writing_into_an_outside_value_from_a_block_makes_no_new_storage():
    b = Builder("accumulate")
    (total,) = b.node("fill", [], [T], fn="zeros")
    x = b.input("x", T)
    with b.repeat(6, "layers"):
        (y,) = b.node("pointwise", [x], [T], fn="relu")
        b.node("pointwise", [total, y], [total], fn="add", inplace=True)
    graph = verify(b.finish([total]))
    written = {flat.outputs[0] for flat in expand(graph) if total in flat.node.outputs}
    assert written == {(total, 0)}


def test_blocks_do_not_nest_and_carries_must_close():
    b = Builder("bad")
    x = b.input("x", T)
    with pytest.raises(GraphError, match="do not nest"), b.repeat(2, "a"), b.repeat(2, "b"):
        pass
    b = Builder("bad")
    x = b.input("x", T)
    with pytest.raises(GraphError, match="'layers' has a carried value that was never closed"), b.repeat(2, "layers"):
        b.carry(x)


def test_a_block_of_zero_iterations_is_left_out():
    b = Builder("none")
    x = b.input("x", T)
    with b.repeat(0, "layers"):
        b.node("pointwise", [x], [T], fn="relu")
    assert not any(isinstance(item, Block | Node) for item in b.finish([x]).items)


def test_a_carry_updated_in_place_is_one_storage_through_all_blocks():
    b = Builder("accumulated gradient")
    (total,) = b.node("fill", [], [T], fn="zeros")
    x = b.input("x", T)
    for name in ("decoder", "encoder"):
        with b.repeat(4, name, reverse=True):
            inner = b.carry(total)
            (g,) = b.node("pointwise", [x], [T], fn="relu")
            out = b.value(T, alias=inner)
            b.node("pointwise", [inner, g], [out], fn="add", inplace=True)
            b.close_carry(inner, out)
        total = out
    (z,) = b.node("pointwise", [total], [T], fn="relu")
    graph = verify(b.finish([z]))
    assert {f.outputs[0] for f in expand(graph, 9) if f.node.attrs.get("inplace")} == {(0, 0)}
    assert last_freed(graph)[0, 0] == len(list(expand(graph))) - 1


def test_two_carries_may_start_from_views_of_one_storage_and_end_with_it():
    b = Builder("halves")
    (whole,) = b.node("fill", [], [tensor((8, 4))], fn="zeros")
    halves = [b.view(whole, T, "slice") for _ in range(2)]
    with b.repeat(3, "layers"):
        inner = [b.carry(half) for half in halves]
        outs = [b.value(T, alias=i) for i in inner]
        for i, out in zip(inner, outs, strict=True):
            b.node("pointwise", [i], [out], fn="relu", inplace=True)
            b.close_carry(i, out)
    b.node("pointwise", [outs[0]], [T], fn="relu")
    (z,) = b.node("pointwise", [outs[1]], [T], fn="relu")
    graph = verify(b.finish([z]))
    assert [n.frees for n, _ in graph.nodes()][-1] == (whole,)
