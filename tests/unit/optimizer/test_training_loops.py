"""Loops as people write them leave the same with recorded steps, on the CPU with a stand-in for CUDA graphs."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

import training_loops
from recorder import TapeExecutor

from ridgeline.engine.drop_in import Optimized, Plan
from ridgeline.engine.replay import training

CPU = torch.device("cpu")


@pytest.mark.filterwarnings("ignore::ridgeline.engine.drop_in.RunsEagerly")
@pytest.mark.parametrize("loop", training_loops.LOOPS, ids=[loop.__name__ for loop in training_loops.LOOPS])
def test_a_loop_leaves_what_it_leaves_without_captures(loop: Callable[..., None]) -> None:
    graphed = training_loops.compared(loop, SimpleNamespace(device=CPU, executor=TapeExecutor, exact=True))
    assert graphed.replays > 0


def test_train_step_hands_the_loss_to_an_optimizer_that_asks_for_it() -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Linear(8, 4), torch.randn(6, 8)
    eager, loss = copy.deepcopy(model), lambda y: (y - 1).square().mean()
    graphed = training.graph_training(model, (x,), {}, model, loss=loss, executor=TapeExecutor())
    ours, theirs = (torch.optim.LBFGS(each.parameters(), max_iter=4) for each in (model, eager))
    fast = Optimized(model, [Plan(graphed.signature, graphed)], mode="train", optimizer=ours, loss=loss)

    def closure() -> torch.Tensor:
        theirs.zero_grad()
        value = loss(eager(x))
        value.backward()
        return value

    losses = [(float(fast.train_step(x)), float(theirs.step(closure))) for _ in range(3)]
    assert all(ours == theirs for ours, theirs in losses) and losses[-1][0] < losses[0][0]
    assert torch.equal(model.weight, eager.weight) and graphed.replays > 3
