"""An optimizer is fused or recorded only where training goes the same way, and otherwise left as it was."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

from recorder import TapeExecutor
from torch import nn

from ridgeline.engine.drop_in import Optimized, Plan
from ridgeline.engine.example_inputs import Inputs
from ridgeline.engine.replay import fused_adamw as stepping
from ridgeline.engine.replay.training import graph_training
from ridgeline.optimizer.search.timing import Comparison, Timed, Track
from ridgeline.optimizer.training import optimizer_update as update


def _made() -> tuple[Any, Inputs]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).train()
    inputs = Inputs((torch.randn(6, 8),))
    graphed = graph_training(model, inputs.args, {}, model, executor=TapeExecutor())
    return Optimized(model, [Plan(graphed.signature, graphed)], mode="train", loss=_loss), inputs


def _loss(output: torch.Tensor) -> torch.Tensor:
    return (output - 1).square().mean()


def _settled(made: Any, inputs: Inputs, optimizer: Any, left_s: float = 60.0) -> list[str]:
    return update.settle(made, optimizer, inputs, _loss, 1e-3, left_s)


def test_an_update_that_follows_eager_training_is_captured_and_the_weights_stay() -> None:
    made, inputs = _made()
    before = [p.detach().clone() for p in made.parameters()]
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2, fused=True)
    notes = _settled(made, inputs, optimizer)
    assert update.RECORDED in notes and any("50 steps of AdamW" in note for note in notes)
    assert all(torch.equal(a, b) for a, b in zip(before, made.parameters(), strict=True)) and not optimizer.state
    again, _ = _made()
    update.again(again, torch.optim.AdamW(again.parameters(), lr=1e-2, fused=True), tuple(notes))
    assert object.__getattribute__(again, "_ridgeline_state").update is not None


def test_too_little_time_leaves_the_optimizer_as_it_is() -> None:
    made, inputs = _made()
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2, fused=True)
    (note,) = _settled(made, inputs, optimizer, left_s=1e-6)
    assert "left as it is" in note and object.__getattribute__(made, "_ridgeline_state").update is None


def test_a_fused_step_that_strays_is_taken_back(monkeypatch: Any) -> None:
    class Straying(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            if self.param_groups[0]["fused"]:
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.grad.neg_()
            return super().step(closure)

    made, inputs = _made()
    monkeypatch.setattr(update, "_KNOWN", (Straying,))
    monkeypatch.setattr(update, "fusible", lambda optimizer: optimizer.param_groups[0]["fused"] is None)
    monkeypatch.setattr(update, "fastest", lambda optimizer: ("fused", Comparison(2.0, 1.9, 2.1, 7)))
    monkeypatch.setattr(update, "in_whole_steps", lambda *given: Comparison(1.1, 1.0, 1.2, 5))
    optimizer = Straying(made.parameters(), lr=1e-2)
    (note,) = _settled(made, inputs, optimizer)
    assert "left as it is" in note and "50 steps" in note and optimizer.param_groups[0]["fused"] is None


def test_an_optimizer_that_has_stepped_keeps_its_state_when_it_is_fused(monkeypatch: Any) -> None:
    made, _ = _made()
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    _loss(made.original(torch.randn(6, 8))).backward()
    optimizer.step()
    moments = {p: state["exp_avg"] for p, state in optimizer.state.items()}
    monkeypatch.setattr(update, "fusible", lambda each: True)
    assert update.fuse(optimizer) and all(optimizer.state[p]["exp_avg"] is m for p, m in moments.items())
    assert all(float(state["step"]) == 1 for state in optimizer.state.values())
    optimizer.step()


def test_clones_share_parameters_and_settings_but_no_state() -> None:
    made, _ = _made()
    halves = [{"params": [p], "lr": 0.1 * (i + 1)} for i, p in enumerate(made.parameters())]
    optimizer = torch.optim.SGD(halves, momentum=0.9)
    clone = update.cloned(optimizer, weight_decay=0.5)
    assert [g["lr"] for g in clone.param_groups] == [g["lr"] for g in optimizer.param_groups]
    assert all(g["weight_decay"] == 0.5 and g["momentum"] == 0.9 for g in clone.param_groups) and not clone.state
    assert type(update.cloned(torch.optim.RMSprop(made.parameters()))) is torch.optim.AdamW


def _faster_alone(monkeypatch: Any, whole: float) -> None:
    """The fused way is twice as fast by itself, and whole steps with it take ``whole`` times as long."""
    monkeypatch.setattr(update, "fastest", lambda optimizer: ("fused", Comparison(2.0, 1.9, 2.1, 7)))
    monkeypatch.setattr(update, "fusible", lambda optimizer: True)
    seconds = {"given": 1.0, "fused": whole, "kernel": 1.1}

    def looped(steps: Any, device: Any, rounds: int) -> dict[str, Timed]:
        for step in steps.values():
            step()
        return {name: Timed((seconds[name],) * 5) for name in steps}

    monkeypatch.setattr(update, "_looped", looped)


def test_a_way_to_update_that_is_faster_alone_and_not_in_the_loop_is_not_taken(monkeypatch: Any) -> None:
    for whole, taken in ((1.04, None), (0.99, True)):
        made, inputs = _made()
        before = [p.detach().clone() for p in made.parameters()]
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
        with monkeypatch.context() as patched:
            _faster_alone(patched, whole)
            notes = _settled(made, inputs, optimizer)
        assert optimizer.param_groups[0]["fused"] is taken
        assert any("whole steps with it are 0.962× as fast" in note for note in notes) is (taken is None)
        assert all(torch.equal(a, b) for a, b in zip(before, made.parameters(), strict=True)) and not optimizer.state
        assert all(p.grad is None for p in made.parameters())


def test_where_our_kernel_loses_in_the_loop_pytorchs_is_tried(monkeypatch: Any) -> None:
    made, inputs = _made()
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    _faster_alone(monkeypatch, 0.9)
    monkeypatch.setattr(update, "fastest", lambda optimizer: ("kernel", Comparison(2.0, 1.9, 2.1, 7)))
    notes = _settled(made, inputs, optimizer)
    assert optimizer.param_groups[0]["fused"] and not stepping.is_taken(optimizer)
    assert notes[0] == "optimizer: kernel is faster alone, and whole steps with it are 0.909× as fast"
    assert update.FUSED in notes and update.RECORDED in notes
    again, _ = _made()
    remembered = torch.optim.AdamW(again.parameters(), lr=1e-2)
    update.again(again, remembered, tuple(notes))
    assert remembered.param_groups[0]["fused"] and not stepping.is_taken(remembered)


def test_ways_to_update_are_timed_in_whole_steps_that_leave_no_trace() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)).train()
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    made, inputs = Optimized(model, [], mode="train", loss=_loss), Inputs((torch.randn(6, 8),))
    found = update.in_whole_steps(made, torch.optim.AdamW(model.parameters(), lr=1e-2), "fused", inputs, _loss)
    assert found.num_rounds == update.LOOP_ROUNDS and found.speedup > 0
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())


class _Laid:
    """A contender that keeps weights of its own, as one that lays them channels last does."""

    def __init__(self, model: nn.Module, last: bool) -> None:
        self.model = model
        self.own = [p.data.clone(memory_format=torch.channels_last) if last and p.dim() == 4 else p.data.clone()
                    for p in model.parameters()]  # fmt: skip

    @contextlib.contextmanager
    def switched(self) -> Any:
        before = [p.data for p in self.model.parameters()]
        for p, own in zip(self.model.parameters(), self.own, strict=True):
            p.data = own
        yield self.model
        for p, was in zip(self.model.parameters(), before, strict=True):
            p.data = was


@pytest.mark.parametrize("given", [False, True])
def test_turns_with_an_update_put_weights_back_even_where_gradients_are_no_numbers(given: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(36, 2)).train()
    kept = [p.detach().clone() for p in model.parameters()]
    track = Track(model, Inputs((torch.full((2, 3, 5, 5), float("inf")),)), "train", None, torch.device("cpu"))
    track.settle(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) if given else None
    runners = {name: _Laid(model, name == "last") for name in ("kept", "last")}
    with update.updating(track, optimizer, runners) as (name, updated):
        for i in range(4):
            with updated["last" if i % 2 else "kept"].switched() as call:
                track.turn_s(call, 2)
                assert not all(torch.isfinite(p).all() for p in model.parameters())  # else nothing is put back
        states = [next(iter(each.trial.state.values())) for each in updated.values() if each.trial is not None]
        strides = [next(v for v in box.values() if v.dim() == 4).stride() for box in states]
        assert strides[0] != strides[1]  # PyTorch's fused step refuses a state that lies otherwise than its weights
    assert name == ("SGD" if given else "AdamW") and track.update is None
    for each in ([p.data for p in model.parameters()], *(runner.own for runner in runners.values())):
        assert all(torch.equal(a, b) for a, b in zip(kept, each, strict=True))
    assert all(p.grad is None for p in model.parameters()) and (optimizer is None or not optimizer.state)
