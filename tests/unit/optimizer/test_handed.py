"""What is handed over runs as it was measured: switches that stay on are part of what a plan watches."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from ridgeline.optimizer.candidate import Candidate, build
from ridgeline.optimizer.inputs import Inputs
from ridgeline.optimizer.search import Problem, handed


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(self.norm(x))


def test_compiled_blocks_run_through_their_forks_after_being_switched_off_and_on() -> None:
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
