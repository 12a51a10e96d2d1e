"""What a call issues, recorded as a program: ops by the dispatcher, kernels by their launches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ridgeline as rl
from ridgeline.engine.file.cuda_kernels import Kernels
from ridgeline.engine.file.execute import compiled
from ridgeline.engine.file.program import Program
from ridgeline.errors import EngineError
from ridgeline.optimizer.record_engine import Recording, record

from .conftest import attention, convolutional, perceptron

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("make", "shape"), [(perceptron, (4, 16)), (convolutional, (2, 3, 20, 20)), (attention, (2, 6, 32))]
)
def test_a_recorded_call_returns_the_same_bits(make, shape) -> None:
    model, x, other = make(), torch.randn(shape), torch.randn(shape)
    weights = {name: t.detach() for name, t in [*model.named_parameters(), *model.named_buffers()]}
    program, recording = record(model, [x], ["x"], weights, (x,), {})
    assert program.issued and not recording.constants
    again = Program.from_json(program.to_json(), set(weights), "recorded")
    run = compiled(again, weights, CPU)
    with torch.no_grad():
        for each in (x, other):
            found, meant = run(each), model(each)
            pairs = zip(found.values(), meant.values(), strict=True) if isinstance(meant, dict) else [(found, meant)]
            assert all(torch.equal(a, b) for a, b in pairs)


def test_what_writes_to_its_own_results_is_recorded_and_to_its_input_refused() -> None:
    class Writing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            y.add_(1).relu_()
            return y + x

    x, other = torch.randn(5), torch.randn(5)
    program, _ = record(Writing(), [x], ["x"], {}, (x,), {})
    assert torch.equal(compiled(program, {}, CPU)(other), Writing()(other))
    with pytest.raises(EngineError, match="writes to its input"):
        record(lambda x: x.add_(1), [x], ["x"], {}, (x,), {})


def test_launches_with_buffers_that_nobody_announced_are_replayed() -> None:
    """As generated code does it: buffers from outside of the dispatcher, views of them, numbers, and a grid."""
    x, weight = torch.randn(8), torch.randn(8)

    def fused(a, b, out, factor, num) -> None:
        out[:num] = (a * b * factor)[:num]

    def call(x):
        with torch.utils._python_dispatch._disable_current_modes():
            buffer = torch.zeros(16)
            half = buffer[8:]
        recording.launched("fused", b"cubin of fused", ["*", "*", "*", "fp32", "i32"], (1, 1, 1), 4, 0, 2,
                           (x, weight, half, 3.0, 8))  # fmt: skip
        with torch.utils._python_dispatch._disable_current_modes():
            fused(x, weight, half, 3.0, 8)
        return half + 1

    with torch.no_grad(), Recording([x], {"weight": weight}) as recording:
        found = call(x)
    program = recording.program(["x"], found)
    index, code = recording.index()
    assert code == b"cubin of fused" and index["kernels"][0]["arguments"] == ["*", "*", "*", "fp32", "i32"]
    assert [step.op.partition("::")[0] for step in program.steps] == ["aten", "aten", "kernel", "aten"]

    class Launchers:
        def launcher(self, key, grid, device):
            assert key == index["kernels"][0]["key"] and grid == [1, 1, 1]
            return fused

    other = torch.randn(8)
    again = Program.from_json(program.to_json(), {"weight"}, "recorded")
    assert torch.equal(compiled(again, {"weight": weight}, CPU, Launchers())(other), other * weight * 3.0 + 1)
    with pytest.raises(EngineError, match="device code"):
        compiled(again, {"weight": weight}, CPU)


@pytest.mark.parametrize(
    "change", [{"bytes": 99}, {"offset": -1}, {"num_warps": 64}, {"arguments": ["object"]}, {"name": 3}]
)
def test_an_index_of_kernels_that_is_none_is_refused(change) -> None:
    entry = {
        "key": "k0",
        "name": "f",
        "offset": 0,
        "bytes": 4,
        "shared_bytes": 0,
        "num_warps": 4,
        "arguments": ["*", "i32"],
    }
    Kernels({"kernels": [entry]}, b"code")
    with pytest.raises(EngineError):
        Kernels({"kernels": [{**entry, **change}]}, b"code")


def test_a_refit_leaves_out_recorded_programs_whose_derived_weights_have_no_recipe() -> None:
    from dataclasses import replace

    model, other, x = perceptron(), perceptron(1), torch.randn(4, 16)
    engine = rl.build(model, (x,), level=0)
    turned = model[0].weight.detach().t().contiguous()  # as a search lays weights its own way
    weights = dict(model.state_dict())
    call = lambda x: model[2](torch.nn.functional.gelu(x @ turned + model[0].bias))
    program, recording = record(call, [x], ["input"], weights, (x,), {})
    assert list(recording.constants) == ["constant.0"]
    contents = replace(engine.contents, programs=(program, *engine.contents.programs), weights={
        **engine.contents.weights, **recording.constants}, constants=frozenset(recording.constants))  # fmt: skip
    engine = engine.with_contents(contents)
    assert engine.refit(other).profiles == ["input 4x16"] and torch.equal(engine(x), other(x))
    assert "build again" in engine.receipt["notes"][-1] and "constant.0" not in engine.contents.weights
