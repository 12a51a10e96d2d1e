"""Imported models run, capture and price like modules of one's own."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F
from torch import nn

import ridgeline as rl
from ridgeline.errors import InputError, ModelFileError


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).reshape(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.gelu(self.out(y.transpose(1, 2).reshape(x.shape)))


def program_of(traced):
    """The raised graph of a function of one tensor."""
    from ridgeline.capture.importers.program import Imported

    body = lambda ctx, inputs: [traced(inputs["x"])]
    return Imported("net", "test", body, {"x": None}, ["y"], {})


def calls(model):
    (program,) = model._programs.values()
    return [
        getattr(n.target, "__name__", n.target) for n in program.graph.nodes if n.op in ("call_function", "call_method")
    ]


@pytest.mark.parametrize(
    ("fn", "wanted"),
    [
        (lambda x: torch.mul(torch.mul(x, 0.5), torch.add(torch.erf(torch.div(x, math.sqrt(2))), 1.0)), "gelu"),
        (lambda x: torch.mul(x, torch.sigmoid(x)), "silu"),
        (lambda x: torch.mul(x, torch.reciprocal(torch.sqrt(torch.add(torch.abs(x), 1e-5)))), "rsqrt"),
        (lambda x: torch.div(torch.sub(x, torch.mean(x, [2], keepdim=True)), torch.sqrt(torch.add(torch.mean(
            torch.pow(torch.sub(x, torch.mean(x, [2], keepdim=True)), 2), [2], keepdim=True), 1e-5))), "layer_norm"),
    ],
)  # fmt: skip
def test_decomposed_calls_are_raised_and_compute_the_same(fn, wanted):
    model = program_of(fn)
    x = torch.randn(2, 3, 16)
    got = model(x)
    if wanted != "layer_norm":  # the two means are one node only in exports
        assert wanted in calls(model)
    torch.testing.assert_close(got, fn(x), rtol=1e-5, atol=1e-5)


def test_an_exported_block_comes_back_with_its_attention_norm_and_prices(tmp_path):
    pytest.importorskip("onnxscript")
    net, x = Attend().eval(), torch.randn(2, 8, 64)
    path = tmp_path / "net.onnx"
    torch.onnx.export(net, (x,), str(path), dynamo=True, opset_version=18, external_data=False, verbose=False)
    model = rl.load(path)
    torch.testing.assert_close(model(x), net(x), rtol=1e-5, atol=1e-5)
    kinds = {row.op for row in model.survey}
    assert "Softmax" in kinds and not any(row.why for row in model.survey)
    (program,) = model._programs.values()
    assert program.weight_names
    imported, direct = rl.capture(model, (x,)), rl.capture(net, (x,))
    work = [
        {f"{n.op} {n.attrs.get('fn', '')}" for n, _ in graph.nodes() if n.op != "view"} for graph in (imported, direct)
    ]
    assert work[0] == work[1]
    times = [sum(t for n, t in graph.nodes() if n.op not in ("view", "host")) for graph in (imported, direct)]
    assert times[0] == times[1]
    assert any("norm" in node.module for node, _ in imported.nodes())


def test_a_pt2_archive_is_bit_equal_and_keeps_its_dims(tmp_path):
    net, x = Attend().eval(), torch.randn(2, 8, 64)
    path = tmp_path / "net.pt2"
    torch.export.save(torch.export.export(net, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},)), path)
    model = rl.load(path)
    (dim,) = model.dims
    for batch in (2, 5):
        given = torch.randn(batch, 8, 64)
        assert torch.equal(model(given), net(given))
    assert rl.capture(model, bindings={dim: 3}).num_params == sum(p.numel() for p in net.parameters())
    with pytest.raises(InputError, match="leaves"):
        rl.predict(model, on="h200")
    with pytest.raises(InputError, match="no dim 'bathc'"):
        rl.predict(model, on="h200", dims={"bathc": 3})


def test_caffe_pools_round_up_and_a_scale_after_a_norm_is_its_own(tmp_path):
    path = tmp_path / "net.prototxt"
    path.write_text("""
input: "data" input_dim: 1 input_dim: 2 input_dim: 6 input_dim: 6
layer { name: "bn" type: "BatchNorm" bottom: "data" top: "bn" }
layer { name: "scale" type: "Scale" bottom: "bn" top: "bn" scale_param { bias_term: true } }
layer { name: "pool" type: "Pooling" bottom: "bn" top: "pool" pooling_param { pool: AVE kernel_size: 3 stride: 2 } }
""")
    model = rl.load(path)
    graph = rl.capture(model)
    assert graph.values[graph.outputs[0]].type.shape == (1, 2, 3, 3)
    assert sorted(model.refs) == ["bn.mean", "bn.var", "scale.bias", "scale.weight"]
    assert sum(node.op == "norm" or "norm" in str(node.attrs.get("fn", "")) for node, _ in graph.nodes()) == 1


def test_an_imported_model_trains_in_a_capture(tmp_path):
    net, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(4, 8)
    path = tmp_path / "net.pt2"
    torch.export.save(torch.export.export(net, (x,)), path)
    graph = rl.capture(rl.load(path), mode="train", optimizer="sgd")
    assert {str(node.phase) for node, _ in graph.nodes()} == {"forward", "backward", "optimizer"}


def test_wrong_inputs_are_told_by_name(tmp_path):
    path = tmp_path / "net.pt2"
    torch.export.save(torch.export.export(nn.Linear(8, 2), (torch.randn(4, 8),)), path)
    with pytest.raises(ModelFileError, match="takes input"):
        rl.load(path)(torch.randn(4, 8), torch.randn(1))
