"""Numbers drawn on the host are answered in a recording only where they decide nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

from recorder import TapeExecutor
from torch import nn

from ridgeline.engine.replay.inference import graph_inference
from ridgeline.engine.replay.training import graph_training
from ridgeline.errors import NotGraphable


class Dropping(nn.Module):
    """Draws a number for every layer and leaves layers out, as encoders do in training."""

    def __init__(self, probability: float, how: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.probability, self.how = probability, how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            drawn = torch.rand([])
            if self.how == "scales":
                x = x * drawn
            if self.how == "more":
                x = x + torch.rand(8)
            if not self.training or drawn >= self.probability:
                x = layer(x)
        return x


class Elsewhere(TapeExecutor):
    """As on an accelerator: what the host draws is another generator's."""

    generator = "cuda"


def _graphed(model: nn.Module, x: torch.Tensor) -> Any:
    return graph_training(model, (x,), {}, model, loss=torch.sum, executor=Elsewhere())


def test_layers_dropped_with_probability_zero_are_captured_and_the_host_draws_on() -> None:
    torch.manual_seed(0)
    model, x = Dropping(0.0).train(), torch.randn(4, 8)
    graphed = _graphed(model, x)
    other = torch.randn(4, 8)
    torch.manual_seed(5)
    expected, after = model(other), torch.get_rng_state()
    expected.sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    found = graphed(other)
    assert torch.equal(found, expected) and torch.equal(torch.get_rng_state(), after) and graphed.replays == 1
    found.sum().backward()
    assert all(torch.equal(p.grad, was) for p, was in zip(model.parameters(), grads, strict=True))


def test_draws_of_a_model_in_evaluation_that_nobody_looks_at_are_captured() -> None:
    """As wav2vec2 draws a number for every layer whether it trains or not."""
    model, x = Dropping(0.1).eval(), torch.randn(4, 8)
    graphed = graph_inference(model, (x,), {}, model, executor=Elsewhere())
    other = torch.randn(4, 8)
    with torch.no_grad():
        torch.manual_seed(5)
        expected, after = model(other), torch.get_rng_state()
        torch.manual_seed(5)
        assert torch.equal(graphed(other), expected) and torch.equal(torch.get_rng_state(), after)
    assert graphed.replays == 1
    scaling = Dropping(0.1, "scales").eval()
    with pytest.raises(NotGraphable, match="on the host"):
        graph_inference(scaling, (x,), {}, scaling, executor=Elsewhere())


def test_a_compiled_call_that_draws_what_nobody_looks_at_is_captured_as_it_was_compiled() -> None:
    """wav2vec2 behind torch.compile was compiled anew for every answer: 54 seconds of a search."""
    made: list[Any] = []

    def backend(gm: Any, inputs: Any) -> Any:
        made.append(gm)
        return gm.forward

    torch._dynamo.reset()
    model, x = Dropping(0.1).eval(), torch.randn(4, 8)
    call = torch.compile(model, backend=backend)
    with torch.no_grad():
        call(x)
        num = len(made)
        graphed = graph_inference(call, (x,), {}, model, executor=Elsewhere())
        other = torch.randn(4, 8)
        assert torch.equal(graphed(other), model(other))
    assert graphed.replays == 1 and len(made) == num


@pytest.mark.parametrize(("probability", "how"), [(0.1, ""), (0.99, ""), (0.0, "scales"), (0.0, "more")])
def test_draws_that_decide_something_are_refused(probability: float, how: str) -> None:
    torch.manual_seed(0)
    model, draw = Dropping(probability, how).train(), torch.rand
    with pytest.raises(NotGraphable, match="on the host"):
        _graphed(model, torch.randn(4, 8))
    assert torch.rand is draw
