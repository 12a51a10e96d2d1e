from __future__ import annotations

from itertools import pairwise

from ridgeline.graph import Builder, Graph, expand, slot_times, tensor


def test_short_blocks_are_shown_in_full_and_long_ones_by_first_middle_and_last():
    assert slot_times(2, 3) == [1, 1]
    assert slot_times(3, 3) == [1, 1, 1]
    assert slot_times(80, 3) == [1, 78, 1]
    assert slot_times(80, 1) == [80]


def test_weighted_nodes_add_up_to_the_whole(mlp: Graph, trained: Graph):
    for graph in (mlp, trained):
        for shown in (1, 2, 3, 5, 100):
            assert sum(flat.times for flat in expand(graph, shown)) == graph.num_nodes


def test_each_iteration_reads_what_the_one_before_wrote(mlp: Graph):
    adds = [flat for flat in expand(mlp, 100) if flat.node.op == "pointwise"]
    assert len(adds) == 4
    for before, after in pairwise(adds):
        assert after.inputs[0] == before.outputs[0]


def test_after_a_block_its_value_is_that_of_the_last_iteration(mlp: Graph):
    flats = list(expand(mlp, 100))
    last_add = [f for f in flats if f.node.op == "pointwise"][-1]
    view, loss = flats[-2:]
    assert view.inputs == last_add.outputs
    assert loss.inputs == last_add.outputs  # through the view


def test_a_reverse_block_meets_the_slices_in_reverse(trained: Graph):
    flats = list(expand(trained, 100))
    forward = [f for f in flats if f.node.phase == "forward" and f.node.op == "matmul"]
    weight_grads = [f for f in flats if f.node.attrs.get("trans_a")]
    assert [f.inputs[0] for f in weight_grads] == [f.inputs[0] for f in reversed(forward)]
    input_grads = [f for f in flats if f.node.attrs.get("trans_b")]
    assert [f.inputs[1] for f in input_grads] == [f.inputs[1] for f in reversed(forward)]


def test_a_plain_node_frees_every_slice_of_a_stack():
    b = Builder("stack")
    x = b.input("x", tensor((4,)))
    with b.repeat(5, "layers"):
        y = b.value(tensor((4,)), count=5)
        b.node("pointwise", [x], [y], fn="relu")
    (z,) = b.node("copy", [y], [tensor((20,))], fn="cat")
    *_, last = expand(b.finish([z]), 100)
    assert set(last.frees) == {(y, slot) for slot in range(5)}


def test_bodies_are_numbered_and_plain_nodes_are_zero(mlp: Graph):
    assert [flat.body for flat in expand(mlp)] == [0, 1, 1, 2, 2, 3, 3, 0, 0]


def test_the_middle_of_a_reverse_block_stands_for_the_same_slices_as_forward():
    b = Builder("even")
    x = b.input("x", tensor((4,)))
    with b.repeat(9, "layers", reverse=True):
        b.node("pointwise", [x], [tensor((4,))], fn="relu")
    assert [(flat.outputs[0][1], flat.times) for flat in expand(b.finish(), 2)] == [(1, 8), (0, 1)]


def test_a_view_of_a_stacked_parameter_is_of_the_slice_of_its_iteration():
    b = Builder("transposed weight")
    x = b.input("x", tensor((4, 4)))
    with b.repeat(3, "layers"):
        w = b.param("w", tensor((4, 4)))
        t = b.view(w, tensor((4, 4)), "t")
        b.node("matmul", [x, t], [tensor((4, 4))], b=1, m=4, n=4, k=4)
    flats = list(expand(b.finish()))
    assert [f.inputs[-1] for f in flats] == [(w, 0), (w, 0), (w, 1), (w, 1), (w, 2), (w, 2)]
