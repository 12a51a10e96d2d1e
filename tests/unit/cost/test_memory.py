"""Peak memory against counts made by hand, and blocks against the same layers written out."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.api import predict
from ridgeline.cost.memory import GRANULE, WORKSPACE_BYTES, Fused, Memory, memory_of, rounded, workspace_bytes
from ridgeline.graph import Builder, Graph, Kind, tensor, with_frees
from ridgeline.graph.backward import differentiate
from ridgeline.models import build

_SPEC = importlib.util.spec_from_file_location("liveness", Path(__file__).parent.parent / "graph" / "liveness.py")
assert _SPEC is not None and _SPEC.loader is not None
liveness = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(liveness)

T = tensor((1024,), "fp32")  # 4096 bytes
SIZE = T.num_bytes


def test_the_allocator_rounds_every_block_up() -> None:
    assert [rounded(n) for n in (0, 1, GRANULE, GRANULE + 1)] == [0, GRANULE, GRANULE, 2 * GRANULE]


def test_a_chain_holds_its_input_and_two_neighbors() -> None:
    b = Builder("chain")
    at = b.input("x", T)
    for _ in range(5):
        (at,) = b.node("pointwise", [at], [T], fn="relu")
    memory = memory_of(b.finish([at]))
    assert memory.peak_bytes == 3 * SIZE
    assert memory.by_kind == {"input": SIZE, "activation": 2 * SIZE}
    assert memory.resident_bytes == SIZE and memory.workspace_bytes == 0


def test_a_residual_is_held_until_it_is_added() -> None:
    b = Builder("residual")
    x = b.input("x", T)
    (kept,) = b.node("pointwise", [x], [T], fn="relu")
    (h,) = b.node("pointwise", [kept], [T], fn="exp")
    (h,) = b.node("pointwise", [h], [T], fn="exp")
    (out,) = b.node("pointwise", [kept, h], [T], fn="add")
    assert memory_of(b.finish([out])).peak_bytes == SIZE * (1 + 1 + 2)


def test_views_and_in_place_ops_own_nothing() -> None:
    b = Builder("views")
    x = b.input("x", T)
    seen = b.view(x, tensor((32, 32), "fp32"))
    again = b.value(T, alias=seen)
    b.node("pointwise", [seen], [again], fn="relu", inplace=True)
    assert memory_of(b.finish([again])).peak_bytes == SIZE


def test_small_tensors_still_take_a_granule() -> None:
    b = Builder("small")
    x = b.input("x", tensor((), "fp32"))
    (y,) = b.node("pointwise", [x], [tensor((), "fp32")], fn="exp")
    assert memory_of(b.finish([y])).peak_bytes == 2 * GRANULE


def cache_update(donated: bool) -> Graph:
    b = Builder("cache", donated=(0,) if donated else ())
    old = b.input("past", T)
    (new,) = b.node("copy", [old], [tensor((1536,), "fp32")], fn="cat", dim=0)
    (out,) = b.node("pointwise", [new], [tensor((1536,), "fp32")], fn="exp")
    return b.finish([out])


def test_a_donated_input_is_given_back_where_it_is_last_read() -> None:
    kept, given = memory_of(cache_update(donated=False)), memory_of(cache_update(donated=True))
    assert kept.peak_bytes == SIZE + 2 * 6144
    assert given.peak_bytes == 2 * 6144  # the old cache is gone before the second result is made
    assert given.by_kind == {"activation": 2 * 6144}


@pytest.mark.parametrize(
    ("mode", "bias", "handles"), [("infer", False, 1), ("infer", True, 2), ("train", False, 2), ("train", True, 2)]
)
def test_matrix_products_bring_their_library_s_workspace(mode: str, bias: bool, handles: int) -> None:
    b = Builder("linear", mode)
    x, w = b.input("x", tensor((8, 16))), b.param("w", tensor((32, 16)))
    (y,) = b.node("matmul", [x, w], [tensor((8, 32))], b=1, m=8, n=32, k=16, bias=bias)
    memory = memory_of(b.finish([y]))
    assert memory.workspace_bytes == handles * WORKSPACE_BYTES == memory.by_kind["workspace"]
    assert memory.peak_bytes == memory.workspace_bytes + 512 + 1024 + 512


def test_no_product_no_workspace() -> None:
    assert workspace_bytes(cache_update(donated=False)) == 0


def test_what_a_fused_kernel_keeps_to_itself_is_never_made() -> None:
    b = Builder("fused")
    x = b.input("x", T)
    (inner,) = b.node("pointwise", [x], [T], fn="exp")
    (out,) = b.node("pointwise", [inner], [T], fn="relu")
    graph = b.finish([out])
    assert memory_of(graph).peak_bytes == 3 * SIZE
    assert memory_of(graph, Fused(frozenset({inner}))).peak_bytes == 2 * SIZE


WIDE = tensor((4096,), "fp32")


def _two_layers() -> Graph:
    """Two layers, each with a wide activation and then narrow ones, as perceptrons and attentions alternate."""
    b = Builder("layers")
    x = b.input("x", T)
    for _ in range(2):
        (up,) = b.node("pointwise", [x], [WIDE], fn="relu")
        (x,) = b.node("pointwise", [up], [T], fn="relu")
        held = x
        for _ in range(2):
            (x,) = b.node("pointwise", [x], [T], fn="exp")
        (x,) = b.node("pointwise", [x, held], [T], fn="add")
    return b.finish([x])


def test_compiled_code_hands_a_dead_buffer_to_the_next_of_its_size() -> None:
    """The first layer's wide buffer is still there while narrow ones are at work: the second layer takes it over."""
    memory = memory_of(_two_layers(), Fused())
    between = [live for index, live in memory.timeline if 2 <= index <= 4]
    assert min(between) >= SIZE + WIDE.num_bytes
    assert memory.peak_bytes < memory_of(_two_layers()).peak_bytes + WIDE.num_bytes


def test_after_its_last_use_of_that_size_a_buffer_is_freed() -> None:
    memory = memory_of(_two_layers(), Fused())
    assert memory.timeline[-1][1] < SIZE + WIDE.num_bytes


def test_what_a_generated_kernel_reads_lives_until_it_ends_and_its_output_appears_then() -> None:
    b = Builder("late")
    x = b.input("x", T)
    (read,) = b.node("pointwise", [x], [T], fn="relu")
    (inner,) = b.node("pointwise", [read], [T], fn="exp")
    (other,) = b.node("pointwise", [x], [WIDE], fn="relu")
    (out,) = b.node("pointwise", [inner, other], [WIDE], fn="add")
    graph = b.finish([out])
    early, late = Fused(frozenset({inner})), Fused(frozenset({inner}), {}, {(read, 0): 3}, {(out, 0): 3})
    assert memory_of(graph, late).peak_bytes == memory_of(graph, early).peak_bytes + SIZE


def test_an_output_that_every_layer_makes_is_kept_of_the_last_layer_alone() -> None:
    few, many = (memory_of(layers(n, folded=True, kept=False), Fused()).by_kind["activation"] for n in (4, 16))
    assert few == many


# Blocks.


def layers(num: int, *, folded: bool, kept: bool) -> Graph:
    """Layers with a residual; ``kept`` saves one activation of each for the end, as training does."""
    b = Builder("layers")
    x = b.input("x", T)
    (h,) = b.node("copy", [x], [T], fn="clone")
    saved: list[int] = []
    if folded:
        with b.repeat(num, "layers"):
            inner = b.carry(h)
            (mid,) = b.node("pointwise", [inner, b.param("w", T)], [tensor((3072,), "fp32")], fn="exp")
            if kept:
                b.values[mid] = replace(b.values[mid], count=num)
            (out,) = b.node("pointwise", [inner, mid], [T], fn="add")
            b.close_carry(inner, out)
        h = out
        if kept:
            with b.repeat(num, "layers", reverse=True):
                back = b.carry(h)
                (out,) = b.node("pointwise", [back, mid], [T], fn="mul")
                b.close_carry(back, out)
            h = out
    else:
        for i in range(num):
            w = b.param(f"w{i}", T)
            (mid,) = b.node("pointwise", [h, w], [tensor((3072,), "fp32")], fn="exp")
            saved.append(mid)
            (h,) = b.node("pointwise", [h, mid], [T], fn="add")
        for mid in reversed(saved if kept else []):
            (h,) = b.node("pointwise", [h, mid], [T], fn="mul")
    (y,) = b.node("reduce", [h], [tensor((), "fp32")], fn="sum", dims=(0,))
    return with_frees(b.finish([y]))


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("num", [2, 3, 4, 5, 9, 40])
def test_a_block_peaks_where_the_unrolled_layers_do(num: int, kept: bool) -> None:
    folded, unrolled = (memory_of(layers(num, folded=f, kept=kept)) for f in (True, False))
    assert folded.peak_bytes == unrolled.peak_bytes
    assert folded.by_kind == unrolled.by_kind


def test_saved_activations_grow_with_the_layers_and_passing_ones_do_not() -> None:
    passing = [memory_of(layers(n, folded=True, kept=False)).by_kind["activation"] for n in (4, 8)]
    saved = [memory_of(layers(n, folded=True, kept=True)).by_kind["activation"] for n in (4, 8)]
    assert passing[0] == passing[1]
    assert saved[1] - saved[0] == 4 * 3072 * 4


@pytest.mark.parametrize("name", ["llama3-8b", "gpt2-xl", "resnet50", "bert-large", "sd15-unet", "dlrm"])
@pytest.mark.parametrize("mode", ["infer", "train"])
def test_the_zoo_peaks_where_a_plain_count_of_every_layer_does(name: str, mode: str) -> None:
    graph = build(name, mode=mode, batch=2)
    memory = memory_of(graph)
    plain, _ = liveness.full_peak_bytes(graph)
    granules = GRANULE * sum(v.count for v in graph.values)
    assert 0 <= memory.peak_bytes - memory.workspace_bytes - plain <= min(granules, 0.005 * plain)


# Training.


def mlp(optimizer: str) -> Graph:
    b = Builder("mlp", "train")
    x, target = b.input("x", tensor((64, 256))), b.input("target", tensor((64, 128)))
    w1, w2 = b.param("w1", tensor((512, 256))), b.param("w2", tensor((128, 512)))
    (h,) = b.node("matmul", [x, w1], [tensor((64, 512))], b=1, m=64, n=512, k=256, trans_b=True)
    (a,) = b.node("pointwise", [h], [tensor((64, 512))], fn="relu")
    (y,) = b.node("matmul", [a, w2], [tensor((64, 128))], b=1, m=64, n=128, k=512, trans_b=True)
    (loss,) = b.node("loss", [y, target], [tensor(())], fn="mse_loss", n=64, c=128, reduction="mean")
    return differentiate(b.finish([loss]), optimizer=optimizer)


PARAMS = (512 * 256 + 128 * 512) * 2
INPUTS = (64 * 256 + 64 * 128) * 2
HIDDEN = 64 * 512 * 2


def at_peak(memory: Memory) -> dict[str, int]:
    return {kind: size for kind, size in memory.by_kind.items() if kind != "workspace"}


def test_adamw_peaks_in_its_step_with_parameters_gradients_states_and_a_temporary() -> None:
    memory = memory_of(mlp("adamw"))
    assert at_peak(memory) == {
        "param": PARAMS, "grad": PARAMS, "state": 2 * PARAMS, "input": INPUTS,
        "activation": PARAMS + GRANULE,  # the square roots of all second moments, and the loss
    }  # fmt: skip


def test_a_fused_adamw_needs_no_temporary_so_the_backward_pass_peaks() -> None:
    memory = memory_of(mlp("adamw_fused"))
    assert at_peak(memory) == {
        "param": PARAMS, "grad": PARAMS, "state": 2 * PARAMS, "input": INPUTS,
        "activation": HIDDEN + GRANULE,  # the hidden gradient while the first weight's is made
    }  # fmt: skip


def test_plain_sgd_keeps_no_states() -> None:
    memory = memory_of(mlp("sgd"))
    assert "state" not in memory.by_kind
    assert memory.peak_bytes == memory_of(mlp("adamw_fused")).peak_bytes - 2 * PARAMS


# What the result says.


def test_kinds_at_the_peak_add_up_to_it() -> None:
    for mode in ("infer", "train"):
        memory = memory_of(build("gpt2-xl", mode=mode))
        assert sum(memory.by_kind.values()) == memory.peak_bytes


def test_training_holds_gradients_and_two_states_for_every_parameter() -> None:
    graph = build("gpt2-xl", mode="train")
    kinds = memory_of(graph).by_kind
    assert kinds["param"] == pytest.approx(graph.param_bytes, rel=1e-3)
    assert kinds["state"] == pytest.approx(2 * graph.param_bytes, rel=1e-3)
    assert kinds["grad"] == pytest.approx(graph.param_bytes, rel=1e-3)


def test_a_decode_step_does_not_hold_its_cache_twice() -> None:
    graph = build("llama3-8b", mode="decode", batch=8, kv=8192)
    cache_bytes = sum(v.num_bytes * v.count for v in graph.values if v.name.startswith("past_key_values"))
    memory = memory_of(graph)
    assert cache_bytes < memory.peak_bytes - graph.param_bytes < 1.2 * cache_bytes


def test_compiled_execution_never_needs_more_memory_than_eager() -> None:
    for name in ("gpt2-xl", "resnet50", "vit-l16"):
        eager, compiled = (predict(name, batch=4, execution=e).peak_bytes for e in ("eager", "compiled"))
        assert compiled <= eager


def test_gradients_are_kept_to_the_end() -> None:
    graph = mlp("none")
    assert memory_of(graph).timeline[-1][1] >= PARAMS * 2 + INPUTS
    assert {v.kind for v in graph.values} >= {Kind.GRAD}
