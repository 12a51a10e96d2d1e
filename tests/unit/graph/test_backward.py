"""Differentiation: which nodes appear, what stays alive until when, and what the optimizer adds."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from liveness import full_peak_bytes, resident_bytes, short_peak_bytes

from ridgeline.errors import GraphError
from ridgeline.graph import Block, Builder, Graph, Kind, Phase, tensor
from ridgeline.graph.backward import differentiate, gradient

B, D = 4, 8  # rows and width of the small examples
ROW = B * D * 2  # bytes of one bf16 activation
SQUARE = D * D * 2  # bytes of one bf16 weight


def linear(b: Builder, x: int, w: int, bias: int | None = None) -> int:
    operands = [x, w] if bias is None else [x, w, bias]
    return b.node("matmul", operands, [tensor((B, D))], b=1, m=B, n=D, k=D, trans_b=True)[0]


def mean_loss(b: Builder, x: int) -> int:
    target = b.input("target", tensor((B, D)))
    return b.node("loss", [x, target], [tensor(())], fn="mse_loss", n=B, c=D)[0]


def two_layers(act: str = "silu") -> Graph:
    b = Builder("two layers")
    x = b.input("x", tensor((B, D)))
    h = linear(b, x, b.param("w1", tensor((D, D))))
    a = b.node("pointwise", [h], [tensor((B, D))], fn=act)[0]
    y = linear(b, a, b.param("w2", tensor((D, D))))
    return b.finish([mean_loss(b, y)])


def stack(layers: int) -> Graph:
    """x ← x + w·silu(x), ``layers`` times."""
    b = Builder("stack")
    x = b.input("x", tensor((B, D)))
    h = linear(b, x, b.param("first", tensor((D, D))))
    with b.repeat(layers, "layers"):
        inner = b.carry(h)
        a = b.node("pointwise", [inner], [tensor((B, D))], fn="silu")[0]
        y = linear(b, a, b.param("w", tensor((D, D))))
        h = b.node("pointwise", [inner, y], [tensor((B, D))], fn="add")[0]
        b.close_carry(inner, h)
    return b.finish([mean_loss(b, h)])


def ops(graph: Graph, phase: Phase) -> Counter[str]:
    counts: Counter[str] = Counter()
    for node, times in graph.nodes():
        if node.phase is phase:
            counts[f"{node.op}:{node.attrs['fn']}" if "fn" in node.attrs else node.op] += times
    return counts


def test_a_linear_layer_has_a_weight_gradient_and_an_input_gradient_only_where_needed() -> None:
    backward = ops(differentiate(two_layers(), optimizer="none"), Phase.BACKWARD)
    assert backward["matmul"] == 3  # two weight gradients; x itself needs none
    assert backward["pointwise:silu_backward"] == 1


def test_matmul_gradients_are_the_transposed_problems() -> None:
    b = Builder("one")
    x = b.input("x", tensor((16, 32)))
    pre = b.node("pointwise", [x, b.param("scale", tensor((32,)))], [tensor((16, 32))], fn="mul")[0]
    w = b.param("w", tensor((64, 32)))
    y = b.node("matmul", [pre, w], [tensor((16, 64))], b=1, m=16, n=64, k=32, trans_b=True)[0]
    loss = b.node("loss", [y, b.input("t", tensor((16, 64)))], [tensor(())], fn="mse_loss", n=16, c=64)[0]
    graph = differentiate(b.finish([loss]), optimizer="none")
    problems = [(n.attrs["m"], n.attrs["n"], n.attrs["k"]) for n, _ in graph.nodes() if n.op == "matmul"]
    assert problems == [(16, 64, 32), (16, 32, 64), (64, 32, 16)]


def test_a_bias_gradient_is_a_sum_over_rows() -> None:
    b = Builder("bias")
    y = linear(b, b.input("x", tensor((B, D))), b.param("w", tensor((D, D))), b.param("b", tensor((D,))))
    graph = differentiate(b.finish([mean_loss(b, y)]), optimizer="none")
    (total,) = [n for n, _ in graph.nodes() if n.op == "reduce"]
    assert total.attrs["dims"] == (0,) and graph.out_types(total)[0].shape == (D,)


def test_a_broadcast_operand_gets_its_gradient_summed_back() -> None:
    b = Builder("broadcast")
    x = b.input("x", tensor((B, D)))
    y = b.node("pointwise", [x, b.param("shift", tensor((D,)))], [tensor((B, D))], fn="add")[0]
    graph = differentiate(b.finish([mean_loss(b, y)]), optimizer="none")
    assert ops(graph, Phase.BACKWARD)["reduce:sum"] == 1


def test_two_consumers_add_their_gradients_in_place() -> None:
    graph = differentiate(stack(3), optimizer="none")
    adds = [n for n, _ in graph.nodes() if n.phase is Phase.BACKWARD and n.attrs.get("fn") == "add"]
    assert len(adds) == 1 and adds[0].attrs["inplace"]


def test_a_tied_weight_has_one_gradient() -> None:
    b = Builder("tied")
    w = b.param("w", tensor((D, D)))
    y = linear(b, linear(b, b.input("x", tensor((B, D))), w), w)
    graph = differentiate(b.finish([mean_loss(b, y)]), optimizer="sgd")
    owned = [v for v in graph.values if v.kind is Kind.GRAD and v.alias is None]
    assert len(owned) == 1


def test_a_block_is_reversed_with_stacked_gradients() -> None:
    graph = differentiate(stack(5), optimizer="none")
    forward, backward = [i for i in graph.items if isinstance(i, Block)]
    assert not forward.reverse and backward.reverse and backward.repeat == 5
    grads = {v.name: v.count for v in graph.values if v.kind is Kind.GRAD and v.alias is None}
    assert grads == {"first.grad": 1, "layers.*.w.grad": 5}


def test_a_weight_shared_by_all_iterations_sums_its_gradient_over_them() -> None:
    b = Builder("shared")
    w = b.param("w", tensor((D, D)))
    h = linear(b, b.input("x", tensor((B, D))), b.param("first", tensor((D, D))))
    with b.repeat(4, "layers"):
        inner = b.carry(h)
        h = linear(b, inner, w)
        b.close_carry(inner, h)
    graph = differentiate(b.finish([mean_loss(b, h)]), optimizer="none")
    full, short = full_peak_bytes(graph), short_peak_bytes(graph)
    assert full == short
    assert sum(v.num_bytes * v.count for v in graph.values if v.kind is Kind.GRAD) == 2 * SQUARE


def test_peak_of_two_layers_equals_a_count_by_hand() -> None:
    graph = differentiate(two_layers(), optimizer="none")
    resident = 2 * SQUARE + 2 * ROW  # weights, x and target
    assert resident_bytes(graph) == resident
    # What is alive while each backward node runs, beside the resident tensors:
    moments = {
        "loss gradient": 2 * ROW + ROW + 2 + 2 + ROW,  # h, a, y, loss and its gradient, gradient of y
        "input gradient of w2": 2 * ROW + ROW + ROW + 2,  # h, a, gradient of y, gradient of a, loss
        "weight gradient of w2": 2 * ROW + ROW + ROW + 2 + SQUARE,
        "silu gradient": ROW + ROW + ROW + 2 + SQUARE,
        "weight gradient of w1": ROW + 2 + 2 * SQUARE,
    }
    assert full_peak_bytes(graph)[0] == resident + max(moments.values())


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_fused", "sgd", "none"])
@pytest.mark.parametrize("layers", [2, 3, 4, 7, 20])
def test_three_shown_iterations_give_the_peak_of_all(layers: int, optimizer: str) -> None:
    graph = differentiate(stack(layers), optimizer=optimizer)
    assert full_peak_bytes(graph) == short_peak_bytes(graph)


def test_everything_but_the_loss_and_the_gradients_is_freed_at_the_end() -> None:
    graph = differentiate(stack(6), optimizer="none")
    assert full_peak_bytes(graph)[1] == resident_bytes(graph) + 7 * SQUARE + 2


def test_each_layer_more_keeps_what_its_backward_reads() -> None:
    eight, nine = (full_peak_bytes(differentiate(stack(n), optimizer="none"))[0] for n in (8, 9))
    extra = nine - eight
    assert extra == 2 * ROW + SQUARE  # its input, its activation and its weight; the peak comes before its gradient


def test_foreach_adamw_runs_the_ops_of_torch_optim_in_their_order() -> None:
    graph = differentiate(two_layers())
    steps = [n for n, _ in graph.nodes() if n.op == "foreach"]
    assert [n.attrs["fn"] for n in steps] == ["mul", "lerp", "mul", "addcmul", "sqrt", "div", "add", "addcdiv"]
    assert all(n.attrs["num_tensors"] == 2 and n.attrs["numel"] == 2 * D * D for n in steps)
    assert sum(v.num_bytes for v in graph.values if v.kind is Kind.STATE) == 4 * SQUARE


def test_the_square_roots_of_foreach_adamw_are_temporary_memory() -> None:
    graph = differentiate(stack(50))
    params = 51 * SQUARE
    assert full_peak_bytes(graph)[0] == resident_bytes(graph) + 2 * params + 2  # gradients, roots, and the loss


def test_fused_adamw_is_one_node() -> None:
    graph = differentiate(stack(3), optimizer="adamw_fused")
    (step,) = [n for n, _ in graph.nodes() if n.phase is Phase.OPTIMIZER]
    assert step.op == "optimizer" and step.attrs["num_tensors"] == 4


def test_an_op_without_a_rule_is_an_error_that_names_it() -> None:
    b = Builder("odd")
    y = b.node("fft", [b.param("w", tensor((D, D)))], [tensor((D, D))], length=D, batch=D)[0]
    loss = b.node("reduce", [y], [tensor(())], fn="sum", dims=(0, 1))[0]
    with pytest.raises(GraphError, match="no gradient rule for op 'fft'"):
        differentiate(b.finish([loss]))


def test_a_pointwise_fn_without_a_rule_is_an_error_that_names_it() -> None:
    with pytest.raises(GraphError, match="'frobnicate'"):
        differentiate(two_layers("frobnicate"))


def test_a_loss_without_parameters_is_an_error() -> None:
    b = Builder("nothing")
    with pytest.raises(GraphError, match="depends on no parameter"):
        differentiate(b.finish([mean_loss(b, b.input("x", tensor((B, D))))]))


def test_an_unknown_optimizer_suggests_the_nearest() -> None:
    with pytest.raises(GraphError, match="adamw"):
        differentiate(two_layers(), optimizer="adam_w")


def test_a_second_rule_for_an_op_is_an_error() -> None:
    with pytest.raises(GraphError, match="two gradient rules"):
        gradient("matmul")(lambda tape, node, grads: None)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        ("relu", ["threshold_backward"]),
        ("exp", ["mul"]),
        ("log", ["div"]),
        ("sin", ["cos", "mul"]),
        ("sqrt", ["mul", "div"]),
        ("rsqrt", ["pow", "mul", "mul"]),
        ("clamp", ["ge", "where"]),
        ("reciprocal", ["neg", "mul", "mul"]),
    ],
)
def test_gradients_of_functions_are_the_ops_autograd_runs(fn: str, expected: list[str]) -> None:
    graph = differentiate(two_layers(fn), optimizer="none")
    made = [n.attrs["fn"] for n, _ in graph.nodes() if n.phase is Phase.BACKWARD and n.op == "pointwise"]
    assert made == expected


def test_a_quotient_spells_out_the_gradient_of_its_divisor() -> None:
    b = Builder("quotient")
    x, w = b.input("x", tensor((B, D))), b.param("w", tensor((B, D)))
    y = b.node("pointwise", [x, w], [tensor((B, D))], fn="div")[0]
    graph = differentiate(b.finish([mean_loss(b, y)]), optimizer="none")
    made = [n.attrs["fn"] for n, _ in graph.nodes() if n.phase is Phase.BACKWARD and n.op == "pointwise"]
    assert made == ["div", "div", "neg", "mul"]
