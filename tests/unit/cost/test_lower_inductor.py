"""What Inductor makes of a graph, against kernels counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline.api import predict
from ridgeline.cost.estimate import estimate
from ridgeline.cost.prediction import Prediction
from ridgeline.graph import Builder, Graph, tensor
from ridgeline.hardware import device

X = tensor((1024, 1024))
SIZE = X.num_bytes


def compiled(graph: Graph) -> Prediction:
    return estimate(graph, device("h200"), "compiled")


def kernels(p: Prediction) -> list[tuple[str, int]]:
    return [(row.op, row.times) for row in p.rows()]


def pointwise(b: Builder, fn: str, *inputs: int) -> int:
    return b.node("pointwise", inputs, [X], fn=fn)[0]


def linear(b: Builder, x: int) -> int:
    return b.node("matmul", [x, b.param("w", X)], [X], b=1, m=1024, n=1024, k=1024, trans_b=True)[0]


def norm(b: Builder, x: int) -> int:
    weight = b.param("n", tensor((1024,)))
    return b.node("norm", [x, weight], [X], fn="rms_norm", n=1024, c=1024)[0]


def test_a_chain_is_one_kernel_that_writes_only_its_last_value() -> None:
    b = Builder("chain")
    at = b.input("x", X)
    for fn in ("exp", "relu", "neg", "sqrt"):
        at = pointwise(b, fn, at)
    p = compiled(b.finish([at]))
    assert kernels(p) == [("fused(exp+relu+neg+sqrt)", 1)]
    assert p.rows()[0].bytes == 2 * SIZE and p.num_kernels == 1


def test_what_is_fused_away_is_never_in_memory() -> None:
    b = Builder("chain")
    at = b.input("x", X)
    for fn in ("exp", "relu", "neg"):
        at = pointwise(b, fn, at)
    graph = b.finish([at])
    assert compiled(graph).peak_bytes == 2 * SIZE < estimate(graph, device("h200")).peak_bytes


def test_a_value_that_another_kernel_reads_is_written() -> None:
    b = Builder("shared")
    x = b.input("x", X)
    a = pointwise(b, "exp", x)
    y = pointwise(b, "relu", a)
    z = linear(b, a)
    p = compiled(b.finish([y, z]))
    fused, product = p.rows()
    assert fused.bytes == 3 * SIZE and product.op == "matmul"


def test_the_graph_s_outputs_are_written() -> None:
    b = Builder("outputs")
    a = pointwise(b, "exp", b.input("x", X))
    y = pointwise(b, "relu", a)
    assert compiled(b.finish([a, y])).rows()[0].bytes == 3 * SIZE


def test_an_op_behind_a_product_cannot_join_the_kernel_before_it() -> None:
    b = Builder("gated")
    a = pointwise(b, "exp", b.input("x", X))
    out = pointwise(b, "add", a, linear(b, a))
    assert kernels(compiled(b.finish([out]))) == [("fused(exp)", 1), ("matmul", 1), ("fused(add)", 1)]


def test_a_norm_joins_the_add_before_it_and_the_activation_after() -> None:
    b = Builder("norm")
    x, y = b.input("x", X), b.input("y", X)
    out = pointwise(b, "relu", norm(b, pointwise(b, "add", x, y)))
    p = compiled(b.finish([out]))
    assert kernels(p) == [("fused(add+rms_norm+relu)", 1)]


def test_kernels_of_another_size_stay_apart() -> None:
    b = Builder("sizes")
    x, small = b.input("x", X), b.input("small", tensor((77, 13)))
    y = pointwise(b, "exp", x)
    (z,) = b.node("pointwise", [small], [tensor((77, 13))], fn="exp")
    assert len(compiled(b.finish([y, z])).rows()) == 2


def test_a_sum_over_rows_ends_its_kernel() -> None:
    b = Builder("column")
    x = b.input("x", X)
    (total,) = b.node("reduce", [pointwise(b, "exp", x)], [tensor((1024,))], fn="sum", dims=(0,))
    (scaled,) = b.node("pointwise", [x, total], [X], fn="mul")
    p = compiled(b.finish([scaled]))
    assert len(p.rows()) == 2 and p.rows()[0].kernel == "reduce"


def residual_stack(num: int) -> Graph:
    b = Builder("stack")
    h = b.input("x", X)
    if num == 1:
        return b.finish([norm(b, pointwise(b, "add", h, linear(b, norm(b, h))))])
    with b.repeat(num, "layers"):
        inner = b.carry(h)
        out = pointwise(b, "add", inner, linear(b, norm(b, inner)))
        b.close_carry(inner, out)
    return b.finish([norm(b, out)])


@pytest.mark.parametrize("num", [1, 2, 3, 4, 10])
def test_a_residual_add_fuses_with_the_next_layer_s_norm(num: int) -> None:
    """First norm; then a product and an add with the following norm (the last one's behind the stack) per layer."""
    counts: dict[str, int] = {}
    for op, times in kernels(compiled(residual_stack(num))):
        counts[op] = counts.get(op, 0) + times
    assert counts == {"fused(rms_norm)": 1, "matmul": num, "fused(add+rms_norm)": num}


def transformer_block() -> Graph:
    """Pre-norm attention and gated MLP, as Llama writes them, without rotation."""
    b = Builder("block")
    wide = tensor((1024, 4096))

    def project(x: int, type_: Any) -> int:
        n, k = type_.shape[1], b.values[x].type.shape[1]
        weight = b.param("w", tensor((n, k)))
        return b.node("matmul", [x, weight], [type_], b=1, m=1024, n=n, k=k, trans_b=True)[0]

    x = b.input("x", X)
    h = norm(b, x)
    qkv = [b.view(project(h, X), tensor((1, 8, 1024, 128), layout="strided")) for _ in range(3)]
    shape = {"b": 1, "h": 8, "hkv": 8, "s": 1024, "skv": 1024, "d": 128, "causal": True}
    (attended,) = b.node("attention", qkv, [tensor((1, 8, 1024, 128), layout="strided")], **shape)
    x = pointwise(b, "add", x, project(b.view(attended, X), X))
    h = norm(b, x)
    (gate,) = b.node("pointwise", [project(h, wide)], [wide], fn="silu")
    (gated,) = b.node("pointwise", [gate, project(h, wide)], [wide], fn="mul")
    return b.finish([pointwise(b, "add", x, project(gated, X))])


def test_a_transformer_block_has_the_kernels_of_a_hand_count() -> None:
    """norm · q k v · attention · o · add+norm · gate up · silu+mul · down · add."""
    p = compiled(transformer_block())
    assert len(p.rows()) == 1 + 3 + 1 + 1 + 1 + 2 + 1 + 1 + 1
    assert p.num_kernels == len(p.rows()) + 1  # cuDNN's attention launches two
    fused = [op for op, _ in kernels(p) if op.startswith("fused")]
    assert sorted(fused) == sorted(["fused(rms_norm)", "fused(add+rms_norm)", "fused(silu+mul)", "fused(add)"])


def test_eager_launches_every_op_by_itself() -> None:
    graph = transformer_block()
    launching = [row for row in estimate(graph, device("h200")).rows() if row.num_kernels]
    assert len(launching) == 14 == len(compiled(graph).rows()) + 2


@pytest.mark.parametrize(
    "name",
    ["llama3-8b", "gpt2-xl", "bert-large", "vit-l16", "resnet50", "convnext-b", "sdxl-unet", "mixtral-8x7b", "dlrm",
     "t5-large", "whisper-large-v3", "mamba-2.8b"],
)  # fmt: skip
@pytest.mark.parametrize("mode", ["infer", "train"])
def test_compiling_never_adds_busy_time(name: str, mode: str) -> None:
    """But for what a generated kernel with next to nothing to do starts later than one of ATen's."""
    eager, fast = (predict(name, mode=mode, execution=e) for e in ("eager", "compiled"))
    assert fast.busy_s <= eager.busy_s * 1.003
    assert fast.num_kernels <= eager.num_kernels
    assert fast.expected_s <= eager.expected_s + 600e-6  # entering compiled code costs a fixed time


def test_a_cuda_graph_runs_the_eager_kernels_without_the_host() -> None:
    eager, recorded = (predict("resnet50", execution=e) for e in ("eager", "cudagraph"))
    assert recorded.busy_s == pytest.approx(eager.busy_s) and recorded.num_kernels == eager.num_kernels
    assert all(row.host_s == 0 for row in recorded.rows()) and recorded.expected_s <= eager.expected_s


def test_the_optimizer_is_not_compiled_with_the_model() -> None:
    p = predict("gpt2-xl", mode="train", execution="compiled")
    steps = [row for row in p.rows() if row.phase == "optimizer"]
    assert steps and all(not row.op.startswith("fused") for row in steps)


def test_misaligned_products_are_padded() -> None:
    b = Builder("odd")
    x, w = b.input("x", tensor((1000, 1001))), b.param("w", tensor((1003, 1001)))
    (y,) = b.node("matmul", [x, w], [tensor((1000, 1003))], b=1, m=1000, n=1003, k=1001, trans_b=True)
    graph = b.finish([y])
    assert compiled(graph).busy_s < estimate(graph, device("h200")).busy_s
