"""Every ATen family ends in an op of the vocabulary with the problem it poses."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn
from torch.nn import functional as F

from ridgeline.capture import capture
from ridgeline.capture.translate import base_name, meaning_of
from ridgeline.graph import op
from ridgeline.graph.verify import problems

from .conftest import nodes_of


class Call(nn.Module):
    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: Any) -> Any:
        return self.fn(*args)


A = torch.empty(4, 8, device="meta")
B = torch.empty(8, 16, device="meta")
IMAGE = torch.empty(2, 6, 16, 16, device="meta")
INDEX = torch.tensor([0, 2, 1])


@pytest.mark.parametrize(("fn", "args", "name", "attrs"), [
    (torch.mm, (A, B), "matmul", {"b": 1, "m": 4, "n": 16, "k": 8, "trans_a": False, "trans_b": False}),
    (lambda a, b: torch.mm(a, b.t()), (A, torch.empty(16, 8, device="meta")), "matmul", {"trans_b": True}),
    (torch.bmm, (A.expand(3, 4, 8), B.expand(3, 8, 16)), "matmul", {"b": 3, "m": 4, "n": 16, "k": 8}),
    (lambda a, b: torch.addmm(torch.zeros(4, 16, device="cuda"), a, b), (A, B), "matmul", {"accumulate": True}),
    (torch.mv, (A, torch.empty(8, device="meta")), "matmul", {"m": 4, "n": 1, "k": 8}),
    (lambda a: torch.dot(a[0], a[1]), (A,), "matmul", {"m": 1, "n": 1, "k": 8}),
    (lambda a: a.softmax(-1), (A,), "softmax", {"n": 4, "c": 8, "log": False}),
    (lambda a: a.log_softmax(0), (A,), "softmax", {"n": 8, "c": 4, "log": True, "inner": 8}),
    (lambda a: a.sum(0), (A,), "reduce", {"fn": "sum", "dims": [0], "keepdim": False}),
    (lambda a: a.mean((0, 1), keepdim=True), (A,), "reduce", {"fn": "mean", "dims": [0, 1], "keepdim": True}),
    (lambda a: a.max(1).values, (A,), "reduce", {"fn": "max", "dims": [1]}),
    (lambda a: torch.linalg.vector_norm(a), (A,), "reduce", {"fn": "linalg_vector_norm"}),
    (lambda a: a.cumsum(1), (A,), "scan", {"fn": "cumsum", "n": 4, "c": 8}),
    (lambda a: a.sort(0).values, (A,), "sort", {"n": 8, "c": 4}),
    (lambda a: a.topk(3).values, (A,), "topk", {"n": 4, "v": 8, "k": 3}),
    (lambda a: a[INDEX], (A,), "gather", {"fn": "index", "num": 24}),
    (lambda a: a.index_select(0, INDEX), (A,), "gather", {"fn": "index_select", "dim": 0}),
    (lambda a: a.gather(1, torch.zeros(4, 2, dtype=torch.int64)), (A,), "gather", {"dim": 1, "num": 8}),
    (lambda a: a.scatter_add(1, torch.zeros(4, 2, dtype=torch.int64), a), (A,), "scatter", {"reduce": "sum", "dim": 1}),
    (lambda a: a.index_add(0, INDEX, a[:3]), (A,), "scatter", {"fn": "index_add", "num": 24, "reduce": "sum"}),
    (lambda a: torch.cat([a, a], 1), (A,), "copy", {"fn": "cat", "dim": 1}),
    (lambda a: a.t().contiguous(), (A,), "copy", {"fn": "clone", "transposed": True}),
    (lambda a: a.half(), (A,), "copy", {"fn": "to"}),
    (lambda a: F.pad(a, (1, 1)), (A,), "copy", {"fn": "constant_pad_nd"}),
    (lambda a: torch.randn_like(a), (A,), "random", {"fn": "randn_like"}),
    (lambda a: a.zero_(), (A,), "fill", {"fn": "zero", "inplace": True}),
    (lambda a: a.add_(1), (A,), "pointwise", {"fn": "add", "inplace": True}),
    (lambda a: F.hardswish(a, inplace=True), (A,), "pointwise", {"fn": "hardswish", "inplace": True}),
    (lambda x: F.max_pool2d(x, 3, 2, 1), (IMAGE,), "pool", {"fn": "max_pool2d", "kernel": [3, 3], "stride": [2, 2]}),
    (lambda x: F.avg_pool2d(x, 2), (IMAGE,), "pool", {"fn": "avg_pool2d", "out_spatial": [8, 8], "n": 2, "c": 6}),
    (lambda x: F.adaptive_avg_pool2d(x, 4), (IMAGE,), "pool", {"fn": "adaptive_avg_pool2d", "kernel": [4, 4]}),
    (lambda x: F.interpolate(x, scale_factor=2), (IMAGE,), "resize", {"fn": "upsample_nearest2d"}),
    (lambda x: F.grid_sample(x, torch.empty(2, 4, 4, 2, device="cuda"), align_corners=False), (IMAGE,), "resize",
     {"fn": "grid_sampler_2d"}),
    (lambda x: F.group_norm(x, 3), (IMAGE,), "norm", {"fn": "group_norm", "n": 6, "c": 512, "channels": 6}),
    (lambda x: F.instance_norm(x), (IMAGE,), "norm", {"fn": "batch_norm", "training": True}),
    (lambda x: torch.fft.rfft2(x), (IMAGE,), "fft", {"length": 256, "batch": 12, "real": True, "inverse": False}),
    (lambda a: torch.linalg.cholesky(a @ a.t()), (A,), "linalg", {"n": 4, "batch": 1}),
    (lambda a: F.embedding(INDEX, a), (A,), "embedding", {"rows": 4, "cols": 8, "num": 3}),
    (lambda a: F.embedding_bag(INDEX, a, torch.tensor([0, 1]), mode="sum"), (A,), "embedding_bag",
     {"v": 4, "d": 8, "b": 2, "l": 1.5, "fn": "sum"}),
    (lambda a: F.nll_loss(a, torch.tensor([0, 1, 2, 3])), (A,), "loss", {"fn": "nll_loss", "n": 4, "c": 8}),
    (lambda a: F.mse_loss(a, a), (A,), "loss", {"fn": "mse_loss"}),
    (lambda a: torch.nonzero(INDEX), (A,), "nonzero", {"num": 2}),
    (lambda x: F.conv_transpose2d(x, torch.empty(6, 4, 2, 2, device="cuda"), stride=2), (IMAGE,), "conv",
     {"transposed": True, "c": 6, "o": 4, "out_spatial": [32, 32], "which": "fwd"}),
])  # fmt: skip
def test_an_op_and_the_problem_it_poses(fn: Any, args: tuple[Any, ...], name: str, attrs: dict[str, Any]) -> None:
    graph = capture(Call(fn), args)
    found = [n for n in nodes_of(graph) if n.op == name]
    assert found, [n.op for n in nodes_of(graph)]
    assert attrs.items() <= dict(found[-1].attrs).items(), found[-1].attrs
    assert not problems(graph)


def test_every_overload_with_a_meaning_means_an_op_of_the_vocabulary() -> None:
    for name in (
        "add",
        "relu_",
        "sum",
        "mm",
        "convolution_backward",
        "native_layer_norm",
        "_foreach_add_",
        "view",
        "zeros",
    ):
        func = next(getattr(getattr(torch.ops.aten, name), o) for o in getattr(torch.ops.aten, name).overloads())
        assert meaning_of(func) is not None, name


@pytest.mark.parametrize("name", ["pointwise", "copy", "matmul", "norm", "attention", "custom", "transfer", "host"])
def test_ops_that_captures_end_in_are_declared(name: str) -> None:
    assert op(name).name == name


def test_base_names_drop_the_mark_of_in_place() -> None:
    assert base_name(torch.ops.aten.add_.Tensor) == "add"
    assert base_name(torch.ops.aten.__and__.Tensor) == "__and__"


def _is_dispatched(func: Any) -> bool:
    try:
        return bool(func._schema.returns) and not func._can_decompose()
    except RuntimeError:  # an op of the scripting language only
        return False


def test_most_of_aten_has_a_meaning() -> None:
    """Overloads eager CUDA can dispatch on dense tensors; what is left is sparse, quantized, jvp and vendors'."""
    known, missing = 0, []
    skipped = (
        "sparse",
        "quantize",
        "mkldnn",
        "miopen",
        "mps",
        "jvp",
        "nested",
        "coo",
        "csr",
        "xnnpack",
        "fbgemm",
        "_copy",
    )
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        if not hasattr(packet, "overloads") or any(s in name for s in skipped):
            continue
        func = getattr(packet, packet.overloads()[0])
        if not _is_dispatched(func):
            continue
        known += meaning_of(func) is not None
        missing += [name] if meaning_of(func) is None else []
    assert known > 0.8 * (known + len(missing)), missing
