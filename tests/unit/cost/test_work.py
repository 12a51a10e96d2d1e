"""Work rules against counts made by hand: arithmetic and bytes of every kind of op."""

from __future__ import annotations

import pytest

from ridgeline.api import predict
from ridgeline.cost.work import NoWorkRule, Work, attended_pairs, rule, work_of
from ridgeline.errors import CostError
from ridgeline.graph import Builder, OpDecl, ops, tensor

HALF = 2  # bytes of a bf16 element


def counted(work: Work) -> tuple[float, float, float]:
    return work.flops, work.read_bytes, work.written_bytes


def test_work_adds_up_and_scales() -> None:
    one = Work(flops=3.0, read_bytes=5.0, written_bytes=7.0, matrix_flops=2.0, dtype="bf16")
    assert one + one == one * 2
    assert (one * 3).num_bytes == 36.0


def test_a_sum_keeps_the_dtype_of_the_larger_matrix_part() -> None:
    assert (Work(matrix_flops=9.0, dtype="fp8") + Work(matrix_flops=1.0, dtype="bf16")).dtype == "fp8"


def test_matmul_reads_each_operand_once(site) -> None:
    work = work_of(site("matmul", [(8, 16), (16, 32)], [(8, 32)], b=1, m=8, n=32, k=16))
    assert counted(work) == (2 * 8 * 32 * 16, (8 * 16 + 16 * 32) * HALF, 8 * 32 * HALF)
    assert work.matrix_flops == work.flops


def test_a_batched_product_is_as_many_products(site) -> None:
    work = work_of(site("matmul", [(5, 8, 16), (5, 16, 32)], [(5, 8, 32)], b=5, m=8, n=32, k=16))
    assert work.flops == 5 * 2 * 8 * 32 * 16


def test_every_row_of_a_grouped_product_meets_one_group(site) -> None:
    work = work_of(site("grouped_matmul", [(64, 16), (8, 16, 32)], [(64, 32)], groups=8, m=64, n=32, k=16))
    assert counted(work) == (2 * 64 * 32 * 16, (64 * 16 + 8 * 16 * 32) * HALF, 64 * 32 * HALF)


CONV = {
    "n": 2, "c": 4, "o": 6, "spatial": (8, 8), "kernel": (3, 3), "stride": (2, 2), "padding": (1, 1),
    "dilation": (1, 1), "groups": 2, "transposed": False, "out_spatial": (4, 4),
}  # fmt: skip
CONV_MACS = 2 * 16 * 6 * (4 // 2) * 9


def test_convolution_counts_output_positions_channels_and_window(site) -> None:
    work = work_of(site("conv", [(2, 4, 8, 8), (6, 2, 3, 3)], [(2, 6, 4, 4)], which="fwd", **CONV))
    assert counted(work) == (2 * CONV_MACS, (2 * 4 * 64 + 6 * 2 * 9) * HALF, 2 * 6 * 16 * HALF)


@pytest.mark.parametrize(("grads", "products"), [(("input", "weight"), 2), (("weight", "bias"), 1), (("bias",), 0)])
def test_convolution_gradients_cost_a_convolution_each(site, grads, products) -> None:
    types = [(2, 6, 4, 4), (2, 4, 8, 8), (6, 2, 3, 3)]
    work = work_of(site("conv", types, types[1:], which="bwd", grads=grads, **CONV))
    assert work.flops == products * 2 * CONV_MACS


def test_a_transposed_convolution_scatters_from_its_input_positions(site) -> None:
    attrs = {**CONV, "transposed": True, "out_spatial": (16, 16)}
    work = work_of(site("conv", [(2, 4, 8, 8), (4, 3, 3, 3)], [(2, 6, 16, 16)], which="fwd", **attrs))
    assert work.flops == 2 * (2 * 64 * 6 * 2 * 9)


ATTENTION = {"b": 2, "h": 8, "hkv": 2, "s": 16, "skv": 16, "d": 4, "causal": False}
QKVO = [(2, 8, 16, 4), (2, 2, 16, 4), (2, 2, 16, 4)], [(2, 8, 16, 4)]


def test_attention_is_two_products_over_all_pairs(site) -> None:
    work = work_of(site("attention", *QKVO, **ATTENTION))
    read_bytes = (2 * 8 * 16 * 4 + 2 * (2 * 2 * 16 * 4)) * HALF  # grouped-query keys and values are read once
    assert counted(work) == (2 * 8 * (16 * 16) * 2 * (4 + 4), read_bytes, 2 * 8 * 16 * 4 * HALF)


def test_causal_attention_counts_only_what_the_mask_leaves(site) -> None:
    work = work_of(site("attention", *QKVO, **{**ATTENTION, "causal": True}))
    assert work.flops == 2 * 8 * (16 * 17 / 2) * 2 * (4 + 4)


def test_attention_backward_is_five_products(site) -> None:
    forward = work_of(site("attention", *QKVO, **ATTENTION))
    backward = work_of(site("attention", *QKVO, which="bwd", **ATTENTION))
    assert backward.flops == 2.5 * forward.flops


def test_values_of_another_width_count_as_such(site) -> None:
    work = work_of(site("attention", *QKVO, **{**ATTENTION, "d": 12, "dv": 4}))
    assert work.flops == 2 * 8 * (16 * 16) * 2 * (12 + 4)


@pytest.mark.parametrize("window", [None, 1, 3, 5, 8, 100])
@pytest.mark.parametrize(("s", "skv"), [(8, 8), (1, 9), (4, 10), (7, 7)])
def test_attended_pairs_equal_a_count_over_the_mask(s: int, skv: int, window: int | None) -> None:
    pairs = 0
    for position in range(skv - s, skv):
        first = 0 if window is None else max(0, position + 1 - window)
        pairs += position + 1 - first
    assert attended_pairs(s, skv, True, window) == pairs


def test_more_causal_queries_than_keys_see_at_most_all_keys() -> None:
    assert attended_pairs(6, 4, True) == 1 + 2 + 3 + 4 + 4 + 4


def test_an_lstm_multiplies_four_gates_by_input_and_state(site) -> None:
    attrs = {"cell": "lstm", "layers": 2, "hidden": 8, "input": 16, "seq": 5, "batch": 3}
    work = work_of(site("rnn", [(5, 3, 16)], [(5, 3, 8)], **attrs))
    assert work.flops == 2 * 5 * 3 * 4 * 8 * (16 + 8) + 2 * 5 * 3 * 4 * 8 * (8 + 8)


def test_pointwise_reads_every_input_and_writes_every_output(site) -> None:
    work = work_of(site("pointwise", [(4, 8), (4, 8)], [(4, 8)], fn="add"))
    assert counted(work) == (32, 2 * 32 * HALF, 32 * HALF)


def test_a_norm_reads_its_input_once(site) -> None:
    work = work_of(site("norm", [(4, 8), (8,), (8,)], [(4, 8)], fn="layer_norm", n=4, c=8))
    assert counted(work) == (5 * 32, (32 + 16) * HALF, 32 * HALF)


def test_a_norm_gradient_does_twice_the_arithmetic(site) -> None:
    types = {"ins": [(4, 8), (4, 8)], "outs": [(4, 8)], "fn": "layer_norm", "n": 4, "c": 8}
    assert work_of(site("norm", which="bwd", **types)).flops == 2 * work_of(site("norm", **types)).flops


def test_a_reduction_writes_only_its_result(site) -> None:
    work = work_of(site("reduce", [(4, 8)], [(4,)], fn="sum", dims=(1,)))
    assert counted(work) == (32, 32 * HALF, 4 * HALF)


def test_an_embedding_reads_the_rows_it_picks_not_the_table(site) -> None:
    ids = tensor((10,), "int64")
    work = work_of(site("embedding", [(50_000, 16), ids], [(10, 16)], rows=50_000, cols=16, num=10))
    assert counted(work) == (0, 10 * 16 * HALF + 10 * 8, 10 * 16 * HALF)


def test_an_embedding_gradient_is_as_large_as_the_table(site) -> None:
    ids = tensor((10,), "int64")
    work = work_of(site("embedding", [(10, 16), ids], [(500, 16)], rows=500, cols=16, num=10, which="bwd"))
    assert work.written_bytes == (500 * 16 + 10 * 16) * HALF


def test_a_bag_reads_all_its_rows_and_writes_one(site) -> None:
    work = work_of(site("embedding_bag", [(1000, 16)], [(3, 16)], dtype="fp32", v=1000, d=16, b=3, l=5))
    assert counted(work) == (3 * 5 * 16, 3 * 5 * 16 * 4 + 3 * 5 * 8, 3 * 16 * 4)


def test_a_gather_reads_what_it_picks_and_its_indices(site) -> None:
    work = work_of(site("gather", [(1000, 16), tensor((3,), "int64")], [(3, 16)], fn="index_select"))
    assert counted(work) == (0, 3 * 16 * HALF + 3 * 8, 3 * 16 * HALF)


def test_a_scatter_reads_its_source_and_the_rows_it_lands_on(site) -> None:
    ins = [(1000, 16), tensor((3,), "int64"), (3, 16)]
    work = work_of(site("scatter", ins, [(1000, 16)], fn="index_add"))
    assert (work.read_bytes, work.written_bytes) == (3 * 8 + 2 * 3 * 16 * HALF, 3 * 16 * HALF)


def test_a_copy_in_place_reads_its_source_only(site) -> None:
    work = work_of(site("copy", [(4, 8), (4, 8)], [(4, 8)], fn="copy_", inplace=True))
    assert counted(work) == (0, 32 * HALF, 32 * HALF)


def test_a_broadcast_view_is_read_as_often_as_it_is_stored(site) -> None:
    work = work_of(site("copy", [(64, 8)], [(64, 8)], fn="clone", held_bytes=[8 * HALF]))
    assert (work.read_bytes, work.written_bytes) == (8 * HALF, 64 * 8 * HALF)


def test_fills_and_random_numbers_read_nothing(site) -> None:
    assert counted(work_of(site("fill", [], [(4, 8)], fn="zeros"))) == (0, 0, 32 * HALF)
    assert work_of(site("random", [], [(4, 8)], fn="normal")).read_bytes == 0


def test_a_likelihood_loss_looks_at_one_element_of_each_row(site) -> None:
    ins = [(32, 50_000), tensor((32,), "int64")]
    assert work_of(site("loss", ins, [()], fn="nll_loss", n=32, c=50_000)).read_bytes < 32 * 64
    assert work_of(site("loss", ins, [(32, 50_000)], fn="nll_loss", n=32, c=50_000, which="bwd")).written_bytes == (
        32 * 50_000 * HALF
    )


def test_foreach_touches_what_it_says_per_element(site) -> None:
    work = work_of(site("foreach", [(100,)], [(100,)], dtype="fp32", fn="addcdiv", num_tensors=4, numel=1000, reads=3))
    assert counted(work) == (1000, 3 * 1000 * 4, 1000 * 4)


def test_a_fused_adamw_reads_four_and_writes_three(site) -> None:
    work = work_of(site("optimizer", [(100,)], [(100,)], dtype="fp32", fn="adamw", num_tensors=4, numel=1000))
    assert (work.read_bytes, work.written_bytes) == (4 * 1000 * 4, 3 * 1000 * 4)


def test_a_declared_op_does_what_its_owner_says(site) -> None:
    declared = {"name": "mine", "flops": 7.0, "matrix_flops": 3.0, "read_bytes": 11.0, "written_bytes": 13.0}
    work = work_of(site("custom", [(4,)], [(4,)], **declared))
    assert (*counted(work), work.matrix_flops) == (7.0, 11.0, 13.0, 3.0)


def test_free_ops_are_free(site) -> None:
    free = [name for name, declared in ops().items() if declared.free]
    assert {"view", "alloc", "host"} <= set(free)
    for name in free:
        assert work_of(site(name, [(4, 8)], [(4, 8)], fn="x")) == Work()


def test_every_op_of_the_vocabulary_has_a_rule(site) -> None:
    for name, declared in ops().items():
        if not declared.free:
            try:
                work_of(site(name, [(4, 8)], [(4, 8)]))
            except NoWorkRule as error:
                pytest.fail(str(error))
            except KeyError:
                pass  # its rule asks for an attribute this bare site lacks


def test_an_op_without_a_rule_names_the_op_the_node_and_the_cure(site, monkeypatch) -> None:
    monkeypatch.setitem(ops(), "levitate", OpDecl("levitate", "rises"))
    with pytest.raises(NoWorkRule, match=r"'levitate' at net\.layer.*cost/work\.py"):
        work_of(site("levitate", [(4, 8)], [(4, 8)]))


def test_a_graph_with_such_an_op_is_not_predicted(monkeypatch) -> None:
    monkeypatch.setitem(ops(), "levitate", OpDecl("levitate", "rises"))
    b = Builder("odd")
    x = b.input("x", tensor((4, 8)))
    with b.module("blocks.3.rise"):
        (y,) = b.node("levitate", [x], [tensor((4, 8))])
    with pytest.raises(NoWorkRule, match=r"levitate.*blocks\.3\.rise"):
        predict(b.finish([y]))


def test_two_rules_for_an_op_are_refused() -> None:
    with pytest.raises(CostError, match="'matmul' has two work rules"):
        rule("matmul")(lambda site: Work())
