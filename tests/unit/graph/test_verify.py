from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ridgeline.errors import GraphError
from ridgeline.graph import Block, Builder, Carry, Graph, Node, problems, tensor, verify


def edit(graph: Graph, at: int, **changes: Any) -> Graph:
    items = list(graph.items)
    items[at] = replace(items[at], **changes)
    return replace(graph, items=tuple(items))


def edit_value(graph: Graph, at: int, **changes: Any) -> Graph:
    values = list(graph.values)
    values[at] = replace(values[at], **changes)
    return replace(graph, values=tuple(values))


def edit_body(graph: Graph, at: int, **changes: Any) -> Graph:
    (index,) = (i for i, item in enumerate(graph.items) if isinstance(item, Block))
    nodes = list(graph.items[index].nodes)
    nodes[at] = replace(nodes[at], **changes)
    return edit(graph, index, nodes=tuple(nodes))


def test_good_graphs_pass_and_come_back(mlp: Graph, trained: Graph):
    assert verify(mlp) is mlp
    assert verify(trained) is trained


def test_the_message_names_graph_node_and_module(mlp: Graph):
    with pytest.raises(GraphError, match=r"graph 'mlp' .*\n  - node 1 \(matmul in layers.\*.fc\) lacks attribute 'k'"):
        verify(edit_body(mlp, 0, attrs={"b": 1, "m": 8, "n": 32}))


def test_ids_out_of_range(mlp: Graph):
    assert "reads %99, which does not exist" in problems(edit(mlp, 0, inputs=(0, 99)))[0]
    assert "writes %-1" in problems(edit(mlp, 0, outputs=(-1,)))[0]
    assert "outputs name %77" in problems(replace(mlp, outputs=(77,)))[0]
    assert "aliases %50" in problems(edit_value(mlp, 2, alias=50))[0]
    assert "calls itself %5" in problems(edit_value(mlp, 2, id=5))[0]


def test_alias_circles(mlp: Graph):
    circle = edit_value(edit_value(mlp, 0, alias=1), 1, alias=0)
    assert problems(circle) == ["aliases form a circle, so nobody owns the storage: %0 → %1 → %0"]
    assert "circle" in problems(edit_value(mlp, 2, alias=2))[0]


def test_reading_before_writing(mlp: Graph):
    assert "reads %6 before anything has written it" in problems(edit(mlp, 0, inputs=(6, 1)))[0]
    first, *rest = mlp.items
    assert any("starts its carry" in p for p in problems(replace(mlp, items=(*rest, first))))


def test_writing_twice(mlp: Graph):
    first = mlp.items[0]
    assert "writes %2 a second time" in problems(replace(mlp, items=(first, *mlp.items)))[0]


def test_an_output_nobody_writes(mlp: Graph):
    assert "output %7 is never written" in problems(replace(mlp, items=mlp.items[:1], outputs=(7,)))[0]


def test_carries_must_be_written_and_keep_their_type(mlp: Graph):
    block = mlp.items[1]
    assert isinstance(block, Block)
    (c,) = block.carries
    assert any("hands it on as bf16[256]" in p for p in problems(edit(mlp, 1, carries=(Carry(c.init, c.inner, 7),))))
    assert any("already written" in p for p in problems(edit(mlp, 1, carries=(Carry(c.init, c.init, c.next),))))


def test_stacks_must_match_the_repeat(mlp: Graph):
    (found,) = problems(edit(mlp, 1, repeat=5))
    assert "uses %4, a stack of 4, in a block that repeats 5 times" in found
    assert "repeats 0 times" in problems(edit(mlp, 1, repeat=0))[0]


def test_attributes_are_checked_against_the_vocabulary(mlp: Graph):
    assert (
        "attribute 'dim', which reduce does not know; did you mean 'dims' or"
        in problems(edit(mlp, 3, attrs={"fn": "sum", "dims": (0,), "dim": 0}))[0]
    )
    assert "unknown op; did you mean 'matmul'" in problems(edit(mlp, 0, op="matmull"))[0]
    assert "is a int64" in problems(edit(mlp, 3, attrs={"fn": "sum", "dims": np.int64(0)}))[0]
    assert problems(edit(mlp, 3, attrs={"fn": "sum", "dims": (0,), "calls": 2})) == []


def test_custom_ops_may_carry_what_their_owner_likes():
    b = Builder("custom")
    x = b.input("x", tensor((4,)))
    (y,) = b.node("custom", [x], [tensor((4,))], name="mine", anything=3)
    assert problems(b.finish([y])) == []


@pytest.mark.parametrize("attrs", [{"m": 9}, {"n": 33}, {"k": 15}, {"b": 2}])
def test_a_matmul_must_fit_its_tensors(mlp: Graph, attrs: dict):
    found = problems(edit(mlp, 0, attrs={**mlp.items[0].attrs, **attrs}))
    assert found and "node 0 (matmul in proj_in)" in found[0]


def attention(**changes: Any) -> Graph:
    b = Builder("attention")
    q, k, v = (b.input(name, tensor((2, heads, 16, 8))) for name, heads in (("q", 4), ("k", 2), ("v", 2)))
    attrs = {"b": 2, "h": 4, "hkv": 2, "s": 16, "skv": 16, "d": 8, "causal": True} | changes
    (out,) = b.node("attention", [q, k, v], [tensor((2, 4, 16, 8))], **attrs)
    return b.finish([out])


def test_attention_must_fit_its_tensors():
    assert problems(attention()) == []
    assert "input with b×h×s×d = 2×4×15×8" in problems(attention(s=15))[0]
    assert "do not divide" in problems(attention(hkv=3))[0]
    assert problems(attention(s=15, varlen=True)) == []


def conv(out: tuple[int, ...], **changes: Any) -> Graph:
    b = Builder("conv")
    x, w = b.input("x", tensor((2, 8, 14, 14))), b.param("w", tensor((16, 8, 3, 3)))
    attrs = {
        "n": 2,
        "c": 8,
        "o": 16,
        "spatial": (14, 14),
        "kernel": (3, 3),
        "stride": (2, 2),
        "padding": (1, 1),
        "dilation": (1, 1),
        "groups": 1,
        "transposed": False,
        "which": "fwd",
    } | changes
    (y,) = b.node("conv", [x, w], [tensor(out)], **attrs)
    return b.finish([y])


def test_a_convolution_must_fit_its_output():
    assert problems(conv((2, 16, 7, 7))) == []
    assert "n×o×spatial = 2×16×7×7" in problems(conv((2, 16, 14, 14)))[0]
    assert problems(conv((2, 16, 14, 14), out_spatial=(14, 14))) == []
    assert "do not divide over groups=3" in problems(conv((2, 16, 7, 7), groups=3))[0]


def test_frees_are_checked_where_every_iteration_is_apart(mlp: Graph):
    assert "frees %0, a input, which outlives" in problems(edit(mlp, 0, frees=(0,)))[0]
    assert "uses the storage of %2 after it was freed" in problems(edit(mlp, 0, frees=(2,)))[0]
    assert any("a second time" in p for p in problems(edit(mlp, 3, frees=(6, 6))))
    assert any("output %8 is freed" in p for p in problems(edit(mlp, 3, frees=(8,))))
    every_iteration = edit_body(mlp, 1, frees=(2,))
    assert any("%2 a second time" in p for p in problems(every_iteration))


def test_many_problems_are_counted_and_cut_short(mlp: Graph):
    bad = Node("matmul", (99,) * 30, ())
    with pytest.raises(GraphError, match=r"30 problem(.|\n)*… and 18 more"):
        verify(replace(mlp, items=(bad,)))


@pytest.mark.parametrize("m", ["8", None, 8.0, -8, True, (8,)])
def test_a_size_that_is_no_size_is_a_problem_not_a_crash(mlp: Graph, m: object):
    assert "is not a whole number" in problems(edit(mlp, 0, attrs={**mlp.items[0].attrs, "m": m}))[0]
    assert problems(conv((2, 16, 7, 7), groups=m))


def test_a_convolution_with_named_padding_or_no_stride_is_not_judged():
    assert problems(conv((2, 16, 14, 14), padding="same")) == []
    assert problems(conv((2, 16, 14, 14), stride=(0, 0))) == []


def test_donated_must_be_a_list_of_values(mlp: Graph):
    assert "meta 'donated' is 3" in problems(replace(mlp, meta={"donated": 3}))[0]
