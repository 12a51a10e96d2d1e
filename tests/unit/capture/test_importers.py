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


def onnx_product(tmp_path):
    onnx = pytest.importorskip("onnx")
    from onnx import helper, numpy_helper

    w, b = torch.randn(32, 8), torch.randn(8)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"], name="lin"), helper.make_node("Add", ["p", "b"], ["y"])]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", 1, ["batch", 4, 32])],
                              [helper.make_tensor_value_info("y", 1, None)],
                              [numpy_helper.from_array(w.numpy(), "w"), numpy_helper.from_array(b.numpy(), "b")])
    path = tmp_path / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), path)
    return path, w, b


def test_a_linear_layer_s_weight_is_laid_out_as_the_layer_had_it(tmp_path):
    path, w, b = onnx_product(tmp_path)
    model = rl.load(path)
    graph = rl.capture(model, bindings={"batch": 2})
    (product,) = [node for node, _ in graph.nodes() if node.op == "matmul"]
    assert product.attrs["trans_b"] and product.attrs["bias"]
    assert not model.tensor("w").is_contiguous()  # nothing was read for that
    x = torch.randn(2, 4, 32)
    torch.testing.assert_close(model(x), x @ w + b)
    assert model.tensor("w").shape == (8, 32) and model.tensor("w").is_contiguous()


@pytest.mark.parametrize("name", ["batch", "N"])
def test_batch_is_the_first_dim_whatever_an_exporter_calls_it(name, tmp_path):
    from ridgeline.capture.importers import bindings_of
    from ridgeline.capture.importers.program import Imported
    from ridgeline.capture.inputs import spec

    model = Imported("net", "test", lambda ctx, inputs: [], {"x": spec(("s77", 4)), "y": spec(("s77", "s78"))}, [], {})
    if name == "batch":
        assert bindings_of(model, {"dims": {"batch": 3, "s78": 2}}) == {"s77": 3, "s78": 2}
    else:
        with pytest.raises(InputError, match="no dim 'N'"):
            bindings_of(model, {"dims": {"N": 3}})


def test_gelu_in_the_order_exporters_write_it_and_attention_without_a_scale_are_raised():
    half = lambda x: torch.mul(x, torch.mul(torch.add(torch.tanh(torch.mul(torch.add(x, torch.mul(
        torch.pow(x, 3), 0.044715)), math.sqrt(2 / math.pi))), 1.0), 0.5))  # fmt: skip
    model, x = program_of(half), torch.randn(2, 3, 16)
    torch.testing.assert_close(model(x), half(x))
    assert calls(model) == ["gelu"]

    def attend(x):
        keys = torch.transpose(torch.reshape(x, (-1, 5, 16)), 1, 2).reshape(2, 3, 16, 5)
        return torch.matmul(torch.softmax(torch.matmul(x, keys), dim=-1), x)

    model, x = program_of(attend), torch.randn(2, 3, 5, 16)
    torch.testing.assert_close(model(x), attend(x))
    assert calls(model) == ["scaled_dot_product_attention"]


def test_ssd_detections_are_those_of_greedy_suppression():
    from ridgeline.capture.importers.caffe.layers import LAYERS, Params

    num, classes, keep = 12, 3, 8
    loc, conf = torch.randn(1, num * 4) / 3, torch.rand(1, num, classes)
    middle, half = torch.rand(num, 2), torch.rand(num, 2) / 4 + 0.05
    prior = torch.cat([middle - half, middle + half], -1)
    spread = torch.tensor([0.1, 0.1, 0.2, 0.2])
    section = {"num_classes": [classes], "nms_param": [{"nms_threshold": [0.3], "top_k": [10]}],
               "code_type": ["CENTER_SIZE"], "keep_top_k": [keep], "confidence_threshold": [0.4]}  # fmt: skip
    layer = Params("d", "DetectionOutput", {"detection_output_param": [section]}, lambda *_: None, "net")
    priors = torch.stack([prior.reshape(-1), spread.repeat(num)]).unsqueeze(0)
    got = LAYERS["DetectionOutput"](layer, loc, conf.reshape(1, -1), priors)[0, 0]
    delta = loc.reshape(num, 4) * spread
    center, size = delta[:, :2] * 2 * half + middle, torch.exp(delta[:, 2:]) * half
    boxes = torch.cat([center - size, center + size], -1)
    found = []
    for label in range(1, classes):
        kept = []
        for i in torch.argsort(conf[0, :, label], descending=True).tolist()[:10]:
            overlap = lambda j, i=i: (torch.minimum(boxes[i, 2:], boxes[j, 2:]) - torch.maximum(
                boxes[i, :2], boxes[j, :2])).clamp(min=0).prod()  # fmt: skip
            area = lambda j: (boxes[j, 2:] - boxes[j, :2]).prod()
            if conf[0, i, label] > 0.4 and all(
                    overlap(j) <= 0.3 * (area(i) + area(j) - overlap(j)) for j in kept):  # fmt: skip
                kept.append(i)
        found += [torch.cat([torch.tensor([0.0, label, conf[0, i, label]]), boxes[i]]) for i in kept]
    best = sorted(sorted(found, key=lambda row: -row[2])[:keep], key=lambda row: row[1])
    torch.testing.assert_close(got[: len(best)], torch.stack(best))
    assert bool((got[len(best) :] == -1).all())


def test_a_saved_model_is_converted_by_the_python_that_has_tensorflow(tmp_path, monkeypatch):
    path, w, b = onnx_product(tmp_path)
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "saved_model.pb").write_bytes(b"")
    stand_in = tmp_path / "python"  # takes tf2onnx's arguments and hands back a model made before
    stand_in.write_text(f'#!/bin/sh\n[ "$2 $3" = "tf2onnx.convert --saved-model" ] && cp {path} "$8"\n')
    stand_in.chmod(0o755)
    monkeypatch.setenv("RIDGELINE_TENSORFLOW_PYTHON", str(stand_in))
    model, x = rl.load(folder), torch.randn(2, 4, 32)
    assert (model.import_format, model.import_name) == ("tensorflow", "saved")
    torch.testing.assert_close(model(x), x @ w + b)
    stand_in.write_text("#!/bin/sh\necho 'no such op: Foo' >&2\nexit 1\n")
    with pytest.raises(ModelFileError, match=r"cannot convert .*no such op: Foo"):
        rl.load(folder)
    monkeypatch.setenv("RIDGELINE_TENSORFLOW_PYTHON", str(tmp_path / "nothing"))
    with pytest.raises(ModelFileError, match="does not run"):
        rl.load(folder)
