"""Engines in other formats, and calls between static profiles."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

import ridgeline as rl
from ridgeline.engine.file import tensors
from ridgeline.engine.file.convert import to_compressed_tensors, to_qdq_onnx
from ridgeline.engine.file.engine import BetweenProfiles
from ridgeline.errors import EngineError

from .test_precision import Block, build, times  # noqa: F401  (a fixture)


@pytest.mark.usefixtures("times")
def test_qdq_nodes_say_what_the_engine_computes(tmp_path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    engine = build(Block().eval(), 0.05)
    assert any(step.op == "engine::int8_linear" for step in engine.contents.programs[0].steps)
    path = to_qdq_onnx(engine, tmp_path / "m.onnx")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    torch.manual_seed(3)
    x = torch.randn(16, 64)
    found = session.run(None, {"x": x.numpy()})[0]
    ours = engine(x).numpy()
    assert np.linalg.norm(found - ours) < 0.02 * np.linalg.norm(ours)


def test_four_bits_are_written_as_compressed_tensors(tmp_path) -> None:
    from ridgeline.optimizer.quantize import rounding

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounding, "rounded", lambda weight, inputs, held_out: rounding.nearest(weight))
        engine = build(Block().eval(), 0.3, objective="size")
    made, config = to_compressed_tensors(engine, tmp_path / "m")
    found = tensors.unpack(memoryview(bytearray(made.read_bytes())), "m")
    told = json.loads(config.read_text())["quantization_config"]
    assert told["format"] == "pack-quantized" and told["config_groups"]["group_0"]["weights"]["num_bits"] == 4
    words, scale, shape = (found[f"a.weight_{part}"] for part in ("packed", "scale", "shape"))
    q = torch.stack([(words >> (4 * i)) & 15 for i in range(8)], -1).reshape(shape.tolist()).float() - 8
    wide = (q.reshape(*scale.shape, -1) * scale.unsqueeze(-1)).reshape(shape.tolist())
    meant = Block().a.weight.detach()
    assert float((wide - meant).norm() / meant.norm()) < 0.2


def test_an_op_that_is_not_written_is_named(tmp_path) -> None:
    engine = rl.build(nn.Conv2d(3, 4, 3), (torch.randn(1, 3, 8, 8),), level=0)
    with pytest.raises(EngineError, match=r"aten::conv2d.*not written"):
        to_qdq_onnx(engine, tmp_path / "m.onnx")


class Specialized(nn.Module):
    """A model whose batch the exporter cannot leave open."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.mixes, self.layer = mixes, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return torch.cat([row.reshape(1, -1) for row in y.unbind(0)]) - (y.mean(0) if self.mixes else 0)


def test_calls_between_static_profiles_are_padded_and_said_once() -> None:
    model = Specialized(False).eval()
    engine = rl.build(model, (torch.randn(2, 8),), shapes={"batch": (2, 6)}, level=0)
    assert len(engine.profiles) == 2
    x = torch.randn(4, 8)
    with pytest.warns(BetweenProfiles, match="4 rows .* run as 6"):
        found = engine(x)
    assert torch.allclose(found, model(x), atol=1e-6) and len(engine.notes) == 1
    with pytest.raises(EngineError, match="no profile"):
        engine(torch.randn(7, 8))


def test_rows_that_see_each_other_are_not_padded() -> None:
    engine = rl.build(Specialized(True).eval(), (torch.randn(2, 8),), shapes={"batch": (2, 6)}, level=0)
    assert any("depend on each other" in note for note in engine.receipt["notes"])
    with pytest.raises(EngineError, match="no profile"):
        engine(torch.randn(4, 8))


class Classifier(nn.Module):
    """Convolutions, one of them by channel, a pooling and a product."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.channels = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, groups=8, padding=1)
        self.out = nn.Linear(8 * 4 * 4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.channels(torch.relu(self.conv(x))))
        return self.out(nn.functional.max_pool2d(y, 2).flatten(1))


@pytest.mark.parametrize(("activations", "per_channel"), [("QUInt8", True), ("QInt8", False)])
def test_models_that_onnx_runtime_quantized_are_built_with_its_numbers(activations, per_channel, tmp_path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    tools = pytest.importorskip("onnxruntime.quantization")
    x, other = torch.randn(4, 3, 8, 8), torch.randn(4, 3, 8, 8)
    model = Classifier().eval()
    torch.onnx.export(model, (x,), tmp_path / "wide.onnx", input_names=["x"], dynamo=False, opset_version=17)

    class Calibration(tools.CalibrationDataReader):
        calls = iter([{"x": x.numpy()}, {"x": other.numpy()}])

        def get_next(self):
            return next(self.calls, None)

    path = str(tmp_path / "narrow.onnx")
    tools.quantize_static(str(tmp_path / "wide.onnx"), path, Calibration(), quant_format=tools.QuantFormat.QDQ,
                          per_channel=per_channel, activation_type=getattr(tools.QuantType, activations),
                          weight_type=tools.QuantType.QInt8)  # fmt: skip
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL  # the nodes as they stand
    session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    engine = rl.build(rl.load(path), (x,), level=0)
    assert engine.verify()
    (theirs,), (ours,) = session.run(None, {"x": x.numpy()}), engine.run({"x": x}).values()
    assert np.linalg.norm(ours.numpy() - theirs) <= 1e-5 * np.linalg.norm(theirs)
    # They are not the wide model's
    assert np.linalg.norm(model(x).detach().numpy() - theirs) > 1e-3 * np.linalg.norm(theirs)


class Counting(nn.Module):
    """Says its sizes as numbers, as imported models do."""

    def __init__(self, power: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.power, self.out = power, nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        num = int(x.shape[0])
        rows = x.reshape(2 * num, 4).narrow(0, 0, num + 1).sum(0)
        return self.out(x.reshape(2 * num, 4)) + rows.sum() * float(num**self.power > 0) + num**self.power


def test_sizes_that_are_numbers_become_one_program_where_they_grow_in_a_line() -> None:
    model = Counting(1).eval()
    engine = rl.build(model, (torch.randn(3, 8),), shapes={"batch": (1, 3, 9)}, level=0)
    assert engine.profiles == ["x batchx8 (batch 1..9)"] and not engine.receipt["notes"]
    for num in (1, 2, 8, 9):
        x = torch.randn(num, 8)
        assert torch.equal(engine(x), model(x))
    assert engine.contents.programs[0].steps[-1].types == ("float32[2*batch, 3]",)


def test_sizes_that_grow_otherwise_are_profiles_of_their_own() -> None:
    engine = rl.build(Counting(2).eval(), (torch.randn(3, 8),), shapes={"batch": (1, 3)}, level=0)
    assert engine.profiles == ["x 1x8", "x 3x8"] and "no program for every size" in engine.receipt["notes"][0]
