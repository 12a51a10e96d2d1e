"""Where CUDA's eager paths differ from the CPU's, the capture holds CUDA's."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn
from torch.nn import functional as F

from ridgeline.capture import capture
from ridgeline.graph import Graph, Node

from .conftest import kernels_of, nodes_of


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: Any) -> Any:
        return self.fn(*args)


def meta(*shape: int, dtype: Any = torch.bfloat16, grad: bool = False) -> Any:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad)


def only(graph: Graph, op: str, phase: str = "forward") -> Node:
    (node,) = [n for n in nodes_of(graph) if n.op == op and n.phase == phase]
    return node


def test_attention_is_one_node_each_way_and_saves_the_log_sum_exp() -> None:
    q, k = meta(2, 8, 64, 32, grad=True), meta(2, 2, 64, 32, grad=True)
    model = Call(lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True))
    graph = capture(model, (q, k), mode="train", optimizer=None)
    forward, backward = only(graph, "attention"), only(graph, "attention", "backward")
    wanted = {"b": 2, "h": 8, "hkv": 2, "s": 64, "skv": 64, "d": 32, "dv": 32, "causal": True, "mask": False}
    assert wanted.items() <= dict(forward.attrs).items()
    assert wanted.items() <= dict(backward.attrs).items()
    assert backward.attrs["which"] == "bwd"
    assert str(graph.out_types(forward)[1]) == "fp32[2,8,64]"
    assert forward.outputs[1] in backward.inputs


def test_attention_writes_its_output_so_that_merging_heads_is_free() -> None:
    model = Call(lambda q: F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(2, 64, 256))
    assert kernels_of(capture(model, (meta(2, 8, 64, 32),))) == ["attention"]


def test_grouped_attention_in_fp32_falls_back_to_math() -> None:
    model = Call(lambda q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True))
    graph = capture(model, (meta(2, 8, 64, 32, dtype=torch.float32), meta(2, 2, 64, 32, dtype=torch.float32)))
    assert "attention" not in kernels_of(graph)
    assert {"matmul", "softmax"} <= set(kernels_of(graph))


def test_a_boolean_mask_is_made_additive_first() -> None:
    model = Call(lambda q, m: F.scaled_dot_product_attention(q, q, q, m))
    graph = capture(model, (meta(2, 8, 64, 32), torch.ones(64, 64, dtype=torch.bool)))
    assert kernels_of(graph)[-1] == "attention"
    assert only(graph, "attention").attrs["mask"]
    assert "masked_fill" in {n.attrs.get("fn") for n in nodes_of(graph)}


def test_dropout_is_fused_and_keeps_a_boolean_mask() -> None:
    graph = capture(nn.Dropout(0.1), (meta(8, 16, grad=True),), mode="train", optimizer=None)
    dropout = next(n for n in nodes_of(graph) if n.attrs.get("fn") == "dropout")
    assert str(graph.out_types(dropout)[1]) == "bool[8,16]"
    assert "native_dropout_backward" in {n.attrs.get("fn") for n in nodes_of(graph) if n.phase == "backward"}


def test_dropout_is_nothing_in_eval() -> None:
    assert kernels_of(capture(nn.Sequential(nn.Dropout(0.1), nn.ReLU()), (meta(8, 16),))) == ["pointwise"]


def test_rms_norm_is_one_node_each_way() -> None:
    graph = capture(nn.RMSNorm(16, dtype=torch.bfloat16), (meta(8, 16, grad=True),), mode="train", optimizer=None)
    forward, backward = only(graph, "norm"), only(graph, "norm", "backward")
    assert {"fn": "rms_norm", "n": 8, "c": 16}.items() <= dict(forward.attrs).items()
    assert backward.attrs["which"] == "bwd"
    assert backward.attrs["grads"] == ["input", "weight"]


def test_a_recurrent_layer_is_one_node_each_way() -> None:
    model = nn.LSTM(16, 32, num_layers=2, batch_first=True, bidirectional=True)
    graph = capture(model, (meta(4, 7, 16, dtype=torch.float32),), mode="train", optimizer=None)
    wanted = {"cell": "lstm", "layers": 2, "hidden": 32, "input": 16, "seq": 7, "batch": 4, "bidirectional": True}
    assert wanted.items() <= dict(only(graph, "rnn").attrs).items()
    assert only(graph, "rnn", "backward").attrs["which"] == "bwd"


@pytest.mark.parametrize("module", [nn.GRU(16, 8), nn.RNN(16, 8), nn.GRU(16, 8, batch_first=True)])
def test_other_cells(module: Any) -> None:
    assert "rnn" in kernels_of(capture(module, (meta(5, 3, 16, dtype=torch.float32),)))


def test_the_encoder_layers_fast_path_is_what_its_kernels_do() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    kernels = kernels_of(capture(layer, (meta(2, 7, 32, dtype=torch.float32),)))
    assert kernels.count("matmul") == 4
    assert kernels.count("attention") == 1
    assert kernels.count("norm") == 2


def test_convolutions_know_layout_and_gradients() -> None:
    conv = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False).to(memory_format=torch.channels_last)
    x = torch.empty(2, 8, 32, 32, device="meta").to(memory_format=torch.channels_last).requires_grad_()
    graph = capture(conv, (x,), mode="train", optimizer=None)
    forward, backward = only(graph, "conv"), only(graph, "conv", "backward")
    assert forward.attrs["layout"] == "channels_last"
    assert forward.attrs["out_spatial"] == [16, 16]
    assert backward.attrs["grads"] == ["input", "weight"]
    assert graph.out_types(forward)[0].layout == "channels_last"


class Cast(nn.Module):
    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.linear, self.norm, self.fn = nn.Linear(16, 16), nn.LayerNorm(16), fn

    def forward(self, x: Any) -> Any:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return self.fn(self, x)


def out_dtype(fn: Any) -> str:
    graph = capture(Cast(fn), (meta(4, 16, dtype=torch.float32),))
    return str(graph.values[graph.outputs[0]].type.dtype)


@pytest.mark.parametrize(("fn", "dtype"), [
    (lambda m, x: m.linear(x), "bf16"),
    (lambda m, x: x @ x.t(), "bf16"),
    (lambda m, x: m.norm(m.linear(x)), "fp32"),
    (lambda m, x: torch.softmax(m.linear(x), -1), "fp32"),
    (lambda m, x: m.linear(x).sum(), "fp32"),
    (lambda m, x: m.linear(x).exp(), "fp32"),
    (lambda m, x: m.linear(x).pow(2), "fp32"),
    (lambda m, x: F.gelu(m.linear(x)), "bf16"),
    (lambda m, x: F.mse_loss(m.linear(x), x), "fp32"),
    (lambda m, x: m.linear(x) + x, "fp32"),
    (lambda m, x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]), "bf16"),
])  # fmt: skip
def test_autocast_follows_cudas_lists(fn: Any, dtype: str) -> None:
    assert out_dtype(fn) == dtype


def test_autocast_casts_a_weight_once_in_a_region() -> None:
    graph = capture(
        Cast(lambda m, x: m.linear(m.linear(x))), (meta(4, 16, dtype=torch.float32),), mode="train", optimizer=None
    )
    casts = [
        n for n in nodes_of(graph) if n.op == "copy" and n.phase == "forward" and graph.in_types(n)[0].shape == (16, 16)
    ]
    assert len(casts) == 1


def test_autocast_can_be_switched_off_inside_and_is_off_afterwards() -> None:
    def inner(m: Any, x: Any) -> Any:
        assert torch.is_autocast_enabled("cuda")
        with torch.autocast("cuda", enabled=False):
            return m.linear(x)

    assert out_dtype(inner) == "fp32"
    assert not torch.is_autocast_enabled("cpu")
    assert torch.softmax(torch.zeros(2), 0).dtype is torch.float32


def test_autocast_by_argument_wraps_the_forward_pass() -> None:
    graph = capture(nn.Linear(16, 16), (meta(4, 16, dtype=torch.float32),), mode="train", autocast="bf16")
    assert str(graph.out_types(next(n for n in nodes_of(graph) if n.op == "matmul"))[0].dtype) == "bf16"


def test_fp16_softmax_widens_in_the_kernel_and_bf16_by_a_copy() -> None:
    widen = Call(lambda x: F.softmax(x, dim=-1, dtype=torch.float32))
    assert kernels_of(capture(widen, (meta(4, 16, dtype=torch.float16),))) == ["softmax"]
    assert kernels_of(capture(widen, (meta(4, 16),))) == ["copy", "softmax"]


def test_statistics_of_half_precision_norms_are_kept_in_fp32() -> None:
    graph = capture(nn.LayerNorm(16, dtype=torch.bfloat16), (meta(8, 16, grad=True),), mode="train", optimizer=None)
    assert [str(t) for t in graph.out_types(only(graph, "norm"))] == ["bf16[8,16]", "fp32[8,1]", "fp32[8,1]"]
    assert "fp32[8,1]" in {str(t) for t in graph.in_types(only(graph, "norm", "backward"))}
