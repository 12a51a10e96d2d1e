"""Recorded training against eager training, on the CPU with a stand-in that has the memory of a CUDA graph."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

import training_checks as checks
from recorder import TapeExecutor

from ridgeline.engine.replay import training

CPU = torch.device("cpu")


@pytest.mark.parametrize("check", checks.CHECKS, ids=[check.__name__ for check in checks.CHECKS])
def test_captured_training(check: Callable[[Any], None]) -> None:
    check(SimpleNamespace(device=CPU, executor=TapeExecutor, exact=True))


def test_gradients_that_lie_where_a_kept_result_does_are_told_from_others() -> None:
    memory = torch.arange(10.0)
    result, inside, beside = memory[2:6], memory[5:7], memory[6:]
    kept = [(result, result.clone())]
    assert training._meets(inside, kept) and not training._meets(beside, kept) and not training._meets(inside, [])


@pytest.mark.parametrize("accumulates", [False, True])
def test_loops_that_clear_gradients_behind_the_forward_take_eager_steps(monkeypatch: Any, accumulates: bool) -> None:
    """Those of the last step are still there when the next is replayed over them; a second pass may add to them."""
    looked: list[Any] = []
    monkeypatch.setattr(training, "_meets", lambda *given: looked.append(given) or False)  # type: ignore[func-returns-value]
    trails = []
    for recorded in (False, True):
        torch.manual_seed(0)
        model: Any = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1)).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x = torch.randn(5, 6)
        call = training.graph_training(model, (x,), {}, model, executor=TapeExecutor()) if recorded else model
        losses = []
        for i in range(8):
            value = call(torch.randn(5, 6, generator=torch.Generator().manual_seed(i))).square().mean()
            if not (accumulates and i % 2):
                optimizer.zero_grad(set_to_none=True)
            value.backward()
            optimizer.step()
            losses.append(float(value.detach()))
        trails.append((losses, [p.detach().clone() for p in model.parameters()]))
        if recorded:
            assert call.replays == 8 and not call.misses
    assert trails[0][0] == trails[1][0] and all(map(torch.equal, trails[0][1], trails[1][1]))
    assert not looked  # where nobody holds a result, nobody looks where gradients lie: thousands of calls a step


def test_a_capture_is_replayed_after_histories_were_renewed() -> None:
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1)).train()
    x = torch.randn(5, 6)
    call = training.graph_training(model, (x,), {}, model, executor=TapeExecutor())
    for parameter in model.parameters():
        training.renew_accumulator(parameter)
    grads = []
    for each in (call, model):
        model.zero_grad(set_to_none=True)
        each(x).square().mean().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert call.replays == 1 and not call.misses and all(map(torch.equal, *grads))


class _Overlapping(TapeExecutor):
    """Its backward leaves the last gradient where a result was, as an allocator may."""

    def vacate(self, tensor: Any) -> Any:
        memory = tensor.detach()
        return lambda holding: memory.detach()

    def record(self, run: Any, *, told: bool) -> Any:
        tape, result = super().record(run, told=told)
        if isinstance(result, list) and result[-1] is not None and result[-1].numel() == 70_000:
            place = self.logits.flatten()[:70_000]
            tape.calls.append((torch.ops.aten.copy_.default, (place, result[-1]), {}, []))
            result[-1] = place
        else:
            self.logits = result["logits"]
        return tape, result


def test_a_gradient_in_the_place_of_a_kept_result_and_the_result_are_both_right() -> None:
    at = SimpleNamespace(device=CPU, executor=_Overlapping, exact=True)
    checks.large_results_may_be_let_go_of_before_the_backward_or_kept(at)


class _Asking(TapeExecutor):
    """Asks, while it records, for the random state that checkpointed parts keep."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    def record(self, run: Any, *, told: bool) -> Any:
        self.told.append(torch.utils.checkpoint.get_device_states)
        return super().record(run, told=told)


@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_a_capture_keeps_no_random_state_and_refuses_parts_that_need_one(drop: float) -> None:
    real, executor = torch.utils.checkpoint.get_device_states, _Asking()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(drop)).train()
    checks.graph_training(model, (torch.randn(2, 8),), {}, model, executor=executor)
    assert len(executor.told) == 2
    for asked in executor.told:
        if drop:
            with pytest.raises(checks.NotGraphable, match="random generator's state is read"):
                asked(torch.ones(1))
        else:
            assert asked(torch.ones(1)) == ([], [])
    assert torch.utils.checkpoint.get_device_states is real


def test_what_a_loss_does_is_no_obstacle_to_capture_its_model(capsys: Any) -> None:
    """Loops call it by themselves: it may draw, seed and print, and the model is recorded all the same."""
    model, x = torch.nn.Linear(8, 4), torch.randn(2, 8)

    def loss(output: Any) -> Any:
        torch.manual_seed(random.randrange(9))
        print("a loss")
        return (output * torch.rand(4)).sum()

    before = torch.get_rng_state()
    call = training.graph_training(model, (x,), {}, model, loss=loss, executor=TapeExecutor())
    assert torch.equal(torch.get_rng_state(), before) and "a loss" in capsys.readouterr().out
    call(x).sum().backward()
    assert torch.equal(model.bias.grad, torch.full((4,), 2.0))


def test_no_history_of_an_observed_step_is_left_when_it_is_captured(monkeypatch: Any) -> None:
    """On a device it would hold the parameters' gradients to another stream than the one that is recorded."""
    model, x = torch.nn.Linear(4, 4), torch.randn(3, 4)
    unseen, record, left = training._unseen, training.TrainingStudio._record, []

    def marked(loss: Any, result: Any) -> Any:
        training.mark_accumulators(list(model.parameters()))
        return unseen(loss, result)

    def recorded(self: Any, *args: Any) -> Any:
        nodes = [training.get_gradient_edge(parameter).node for parameter in model.parameters()]
        left.append([training._BEFORE in node.metadata for node in nodes])
        return record(self, *args)

    monkeypatch.setattr(training, "_unseen", marked)
    monkeypatch.setattr(training.TrainingStudio, "_record", recorded)
    loss = lambda y: y.double().square().sum()
    graphed = training.graph_training(model, (x,), {}, model, loss=loss, executor=TapeExecutor())
    assert left == [[False, False]]
    assert not graphed._studio._externals, "what the loss makes of the result is nobody's to keep"


def test_weights_that_a_forward_writes_are_captured() -> None:
    model = torch.nn.Embedding(11, 8, max_norm=0.5)
    eager, ids = copy.deepcopy(model), torch.tensor([1, 4, 4, 9])
    graphed = training.graph_training(model, (ids,), {}, model, loss=lambda y: y.sum(), executor=TapeExecutor())
    for each, call in ((eager, eager), (model, graphed)):
        for _ in range(3):
            call(ids).square().sum().backward()
            with torch.no_grad():
                each.weight -= each.weight.grad
    assert graphed.replays == 3 and torch.equal(model.weight, eager.weight)
