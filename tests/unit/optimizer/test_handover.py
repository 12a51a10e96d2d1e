"""What is handed over runs as it was measured."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from ridgeline.engine.example_inputs import Inputs
from ridgeline.optimizer.search.candidate import Candidate, build
from ridgeline.optimizer.search.handover import handed
from ridgeline.optimizer.search.problem import Problem


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(self.norm(x))


def test_compiled_blocks_run_on_every_call() -> None:
    model = nn.Sequential(*[Block() for _ in range(3)]).eval()
    x = torch.randn(2, 8)
    problem = Problem(model=model, inputs=Inputs((x,)), mode="infer", device=torch.device("cpu"))
    candidate = Candidate(name="blocks", rewrites=("identity",), scope="blocks")
    made = handed(problem, build(candidate, model, problem.inputs, "infer"))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        for _ in range(3):
            with made.switched() as call:
                assert torch.allclose(call(x), model(x), atol=1e-6)
    assert type(made.call).fallbacks.fget(made.call) == {}


RUN = """
import torch
from torch import nn

GAIN = 2.0

def shaped(x):
    return torch.relu(x) * GAIN

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + shaped(self.layer(self.norm(x)))
"""


def test_blocks_of_a_file_that_was_run_and_not_imported_are_compiled() -> None:
    """A tracer that meets a function of another module imports that module by name, and this one has none."""
    names = {"__name__": "a_file_that_was_run"}
    exec(RUN, names)
    model = nn.Sequential(*[names["Block"]() for _ in range(3)]).eval()  # type: ignore[operator]
    x = torch.randn(2, 8)
    candidate = Candidate(name="blocks", rewrites=("identity",), scope="blocks")
    with torch.no_grad():
        made = build(candidate, model, Inputs((x,)), "infer")
        with made.switched() as call:
            assert torch.allclose(call(x), model(x), atol=1e-6)
    assert made.report.graphs
