"""Measurable operators on a processor without a GPU: each makes its inputs, runs, and differentiates."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from ridgeline.bench.operators import kinds, make, maker
from ridgeline.errors import InputError

ROWS = {"n": 6, "c": 16}
IMAGE = {"n": 2, "c": 32, "h": 8, "w": 8}
TABLE = {"v": 20, "d": 8, "n": 5}
HEADS = {"b": 2, "s": 3, "h": 4, "d": 8}
SHAPES = {
    "gemm": {"m": 4, "n": 6, "k": 8},
    "bmm": {"b": 2, "m": 4, "n": 6, "k": 8},
    "attention": {"b": 2, "h": 4, "hkv": 4, "s": 8, "skv": 8, "d": 16, "causal": 1},
    "conv2d": {**IMAGE, "o": 32, "k": 3, "stride": 2, "groups": 32, "nhwc": 1},
    "conv1d": {"n": 2, "c": 8, "l": 20, "o": 8, "k": 3, "stride": 1, "groups": 1},
    "conv3d": {"n": 1, "c": 2, "o": 4, "t": 4, "h": 6, "w": 6, "k": 3, "stride": 1},
    "group_norm": {**IMAGE, "groups": 32},
    "batch_norm": {**IMAGE, "training": 1},
    "max_pool2d": {**IMAGE, "k": 3, "stride": 2},
    "avg_pool2d": {**IMAGE, "k": 2, "stride": 2},
    "adaptive_pool2d": IMAGE,
    "upsample2x": IMAGE,
    "embedding": TABLE,
    "index_select": TABLE,
    "index_add": TABLE,
    "gather_rows": TABLE,
    "embedding_bag": {"v": 20, "d": 8, "b": 3, "l": 4},
    "cross_entropy": {"n": 6, "v": 10},
    "topk": {"n": 6, "v": 10, "k": 3},
    "sort": {"n": 50},
    "index_put": TABLE,
    "weight_norm": {**ROWS, "dim": 1},
    "transfer": {"num_bytes": 64, "pinned": 0, "to_host": 1},
    "cumsum": {"n": 50},
    "cat": {**ROWS, "c2": 5},
    "add_strided": HEADS,
    "permute0213": HEADS,
    "adamw": {"numel": 100, "tensors": 3},
    "lstm": {"input": 8, "hidden": 8, "layers": 1, "seq": 4, "batch": 2},
    **{f"foreach_{fn}": {"numel": 100, "tensors": 3} for fn in ("add", "sqrt", "mul_", "addcdiv_")},
}
GPU_ONLY = {"grouped_gemm"}
DIFFERENTIATED = (
    "gemm bmm attention conv2d layer_norm rms_norm softmax gelu cross_entropy embedding max_pool2d batch_norm lstm"
).split() + ["group_norm"]


def library(kind: str) -> str:
    return "math" if kind == "attention" else "foreach" if kind == "adamw" else "aten"


@pytest.fixture(autouse=True)
def _rounding_as_it_was():
    """Operators are measured in the precision they name, which is a setting of the process."""
    products, convolutions = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = products, convolutions


@pytest.mark.parametrize("kind", sorted(set(kinds()) - GPU_ONLY))
def test_an_operator_runs_on_fresh_inputs(kind: str) -> None:
    run = make(kind, "fp32", "fwd", library(kind), SHAPES.get(kind, ROWS), device="cpu")
    out = run()
    out = out[0] if isinstance(out, (tuple, list)) else out
    if kind not in ("adamw", "foreach_add", "foreach_mul_", "foreach_addcdiv_"):
        assert isinstance(out, torch.Tensor) and out.numel() > 0


@pytest.mark.parametrize("kind", DIFFERENTIATED)
def test_a_backward_operator_gives_gradients_again_and_again(kind: str) -> None:
    run = make(kind, "fp32", "bwd", library(kind), SHAPES.get(kind, ROWS), device="cpu")
    for _ in range(2):
        grads = run()
        assert grads and all(g is not None and torch.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
def test_a_product_multiplies_m_by_k_with_k_by_n_in_every_layout(layout: str) -> None:
    out = make("gemm", "fp32", "fwd", "cublas", {"m": 4, "n": 6, "k": 8, "layout": layout}, device="cpu")()
    assert out.shape == (4, 6)


def test_grouped_query_attention_keeps_the_query_heads() -> None:
    shape = {**SHAPES["attention"], "hkv": 2, "causal": 0}
    assert make("attention", "fp32", "fwd", "math", shape, device="cpu")().shape == (2, 4, 8, 16)


def test_the_dtype_is_that_asked_for() -> None:
    assert make("add", "bf16", "fwd", "aten", ROWS, device="cpu")().dtype is torch.bfloat16
    assert make("cumsum", "int64", "fwd", "aten", {"n": 50}, device="cpu")().dtype is torch.int64


def test_an_unknown_kind_suggests_the_nearest() -> None:
    with pytest.raises(InputError, match=r"unknown operator kind 'sofmax'.*'softmax'"):
        make("sofmax", "fp32", "fwd", "aten", ROWS, device="cpu")


def test_a_kind_has_one_maker() -> None:
    with pytest.raises(InputError, match="kind 'gemm' has two makers"):
        maker("gemm")(lambda request: lambda: None)
