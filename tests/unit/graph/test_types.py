from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from ridgeline.dtypes import dtype
from ridgeline.errors import GraphError
from ridgeline.graph import Graph, Kind, Node, declare, op, ops, tensor, typed


def test_a_tensor_type_knows_its_bytes_down_to_four_bits():
    assert tensor((3, 5), "bf16").num_bytes == 30
    assert tensor((3, 5), "fp4").num_bytes == 8  # 7.5 rounded up: half a byte cannot be allocated
    assert tensor((), "fp32").num_bytes == 4
    assert str(tensor((2, 3), "float16", "channels_last")) == "fp16[2,3]:channels_last"


def test_equal_types_share_a_number_and_copies_share_their_element_type():
    one, other = tensor((2, 3)), tensor((2, 4))
    assert typed((2, 3), dtype("bf16")) is typed((2, 3), dtype("bf16"))
    assert one.number == typed((2, 3), dtype("bf16")).number != other.number
    assert copy.deepcopy(one) == one
    assert copy.deepcopy(one).dtype is one.dtype
    assert replace(one, layout="strided").number != one.number


def test_an_alias_owns_no_memory(mlp: Graph):
    views = [v for v in mlp.values if v.alias is not None]
    assert views and all(v.num_bytes == 0 for v in views)


def test_storage_may_be_larger_than_the_tensor(mlp: Graph):
    assert replace(mlp.values[0], storage_bytes=4096).num_bytes == 4096


def test_stacked_parameters_count_once_per_iteration(mlp: Graph):
    assert mlp.num_params == 16 * 32 + 4 * 32 * 32
    assert mlp.param_bytes == 2 * mlp.num_params


def test_num_nodes_counts_repeats(mlp: Graph):
    assert mlp.num_nodes == 1 + 4 * 2 + 2
    assert sum(1 for _ in mlp.nodes()) == 5


def test_the_hash_ignores_names_and_source_lines(mlp: Graph):
    first = mlp.items[0]
    renamed = replace(mlp, name="other", items=(replace(first, source="model.py:3", module="a.b"), *mlp.items[1:]))
    assert renamed.content_hash == mlp.content_hash


@pytest.mark.parametrize(
    "change",
    [
        {"attrs": {"b": 1, "m": 8, "n": 32, "k": 17}},
        {"op": "pointwise"},
        {"frees": (2,)},
        {"inputs": (1, 0)},
        {"phase": "backward"},
        {"target": "aten.mm.default"},
    ],
)
def test_the_hash_sees_every_change_that_could_change_a_price(mlp: Graph, change: dict):
    first = mlp.items[0]
    assert isinstance(first, Node)
    changed = replace(mlp, items=(replace(first, **change), *mlp.items[1:]))
    assert changed.content_hash != mlp.content_hash


def test_the_hash_sees_types_and_kinds(mlp: Graph):
    for swap in ({"type": tensor((8, 17))}, {"type": tensor((8, 16), "fp16")}, {"kind": Kind.BUFFER}, {"count": 2}):
        values = (replace(mlp.values[0], **swap), *mlp.values[1:])
        assert replace(mlp, values=values).content_hash != mlp.content_hash


def test_an_op_cannot_be_declared_twice_and_an_unknown_one_suggests_the_nearest():
    with pytest.raises(GraphError, match="'matmul' is declared twice"):
        declare("matmul", "again")
    with pytest.raises(GraphError, match="did you mean 'matmul'"):
        op("matmull")
    assert op("view").free and not op("matmul").free
    assert ops()["conv"].required[0] == "n"
