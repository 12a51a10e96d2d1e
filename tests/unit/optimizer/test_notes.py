"""What calls leave on a model is no obstacle to recording it, on the CPU with a stand-in for CUDA graphs."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

from recorder import TapeExecutor
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

import ridgeline as rl
from ridgeline.optimizer import graphed, measure, training
from ridgeline.optimizer.candidate import Candidate
from ridgeline.optimizer.ladder import Ladder, Rung
from ridgeline.optimizer.search import Search


class Marking(TapeExecutor):
    """Says which parameters' gradients were bound to the stream of calls before the first that a recording follows."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.parameters, self.held = list(model.parameters()), [0]

    def warm_up(self, run: Any) -> None:
        if len(self.held) == 1:
            training.mark_accumulators(self.parameters)
        super().warm_up(run)

    def record(self, run: Any, *, told: bool) -> Any:
        gc.collect()
        marks = [training._BEFORE in get_gradient_edge(p).node.metadata for p in self.parameters]
        self.held.append(sum(marks))
        return super().record(run, told=told)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm], ids=lambda norm: norm.__name__)
def test_weights_made_by_hooks_hold_no_history_while_a_step_is_recorded(norm: Any) -> None:
    """On a device their gradients would go to the default stream, which no capture may do (a judge of images, H200)."""
    model, x = nn.Sequential(norm(nn.Conv1d(2, 4, 3)), nn.Flatten(), norm(nn.Linear(24, 4))), torch.randn(6, 2, 8)
    model(x).sum().backward()
    executor = Marking(model)
    training.graph_training(model, (x,), {}, model, executor=executor)
    assert executor.held[1:] == [0, 0]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weights_of_an_earlier_replay_that_somebody_put_back_are_in_nobodys_way() -> None:
    """They held the memory of a replay: one call as the model makes it, and copies of everything from then on."""
    model, x = nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 4))), torch.randn(6, 8)
    call = training.graph_training(model, (x,), {}, model, executor=TapeExecutor())
    call(x).sum().backward()
    before = model[0].weight
    call(x).sum().backward()  # somebody holds the weight of the replay before
    assert call.misses and not any(call._tracks.lent)
    model[0].weight = before  # as the state of a model is put back
    del before
    call.lend()
    for _ in range(3):
        call(x).sum().backward()
    assert call.replays == 4 and sum(call.misses.values()) == 1 and any(call._tracks.lent)


class Noting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(8, 8), nn.Linear(8, 4)
        self.map: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.map = self.body(x).softmax(-1)
        found: Tensor = self.out(self.map)
        return found


@pytest.mark.filterwarnings("ignore")
def test_a_search_records_a_model_that_notes_something_and_leaves_it_as_it_was(monkeypatch: Any) -> None:
    for home in (graphed, training):
        monkeypatch.setattr(home, "executor_for", lambda given: TapeExecutor())
    monkeypatch.setattr(measure.Comparison, "faster", property(lambda self: True))
    monkeypatch.setattr(measure.Comparison, "slower", property(lambda self: False))
    monkeypatch.setattr(measure.Comparison, "ahead", property(lambda self: False))
    monkeypatch.setattr(Search, "_hardly_gains", lambda self, timed: False)
    rungs = [Rung(Candidate(name="graph", graphed=True), 0.1)]
    monkeypatch.setattr(Ladder, "rungs", lambda self, search: iter(rungs))
    model, x = Noting(), torch.randn(6, 8)
    fast = rl.optimize(model, (x,), mode="train", loss=lambda y: y.square().mean(), budget_s=3, use_cache=False)
    assert model.map is None
    assert fast.receipt.winner == "graph", fast.receipt.entries
    for _ in range(3):
        fast(x).square().mean().backward()
        assert torch.equal(model.map, model.body(x).softmax(-1))
    assert fast.plans[0].call.replays > 0
