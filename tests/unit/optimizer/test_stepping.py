"""AdamW's steps by our kernel leave what PyTorch's own leave, in the optimizer's own state."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch import nn

from ridgeline.engine.replay import fused_adamw as stepping


def _model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def test_parameters_on_a_host_are_left_to_pytorch() -> None:
    assert not stepping.takes(torch.optim.AdamW(_model().parameters()))


def test_decay_in_the_gradient_is_left_to_pytorch(monkeypatch: Any) -> None:
    monkeypatch.setattr(stepping, "ON_DEVICE", ("cpu",))
    parameters = list(_model().parameters())
    taken = [torch.optim.AdamW(parameters, weight_decay=0.1), torch.optim.Adam(parameters)]
    assert all(map(stepping.takes, taken))
    left = [torch.optim.Adam(parameters, weight_decay=0.1), torch.optim.AdamW(parameters, amsgrad=True),
            torch.optim.AdamW(parameters, foreach=True), torch.optim.SGD(parameters)]  # fmt: skip
    assert not any(map(stepping.takes, left))
    optimizer = torch.optim.Adam(parameters)
    optimizer.param_groups[0]["weight_decay"] = 0.1  # later than it was taken over
    assert stepping._watched(optimizer)


def test_an_optimizer_that_was_taken_over_and_given_back_is_its_own() -> None:
    optimizer = torch.optim.AdamW(_model().parameters())
    stepping.take_over(optimizer)
    assert stepping.is_taken(optimizer) and not stepping.is_taken(copy.deepcopy(optimizer))
    stepping.give_back(optimizer)
    assert not stepping.is_taken(optimizer) and "step" not in vars(optimizer)


def test_a_step_of_somebodys_own_is_left_alone(monkeypatch: Any) -> None:
    monkeypatch.setattr(stepping, "ON_DEVICE", ("cpu",))
    optimizer = torch.optim.AdamW(_model().parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert schedule is not None and stepping.takes(optimizer)  # noted by a schedule, and still its own
    before = vars(optimizer)["step"]
    stepping.take_over(optimizer)
    stepping.take_over(optimizer)
    stepping.give_back(optimizer)
    assert vars(optimizer)["step"] is before
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    assert not stepping.takes(optimizer) and not stepping.steps_itself(optimizer)


@pytest.mark.filterwarnings("error")
def test_a_schedule_made_before_an_optimizer_was_taken_over_is_not_alarmed() -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    stepping.take_over(optimizer)
    for _ in range(2):
        model(torch.randn(2, 5)).sum().backward()
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)


def test_steps_whose_gradients_are_of_other_parameters_every_time_are_left_to_pytorch(monkeypatch: Any) -> None:
    """Layers that are dropped at random have none: tables for every set would be made anew and anew."""
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(6)]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    stepping.take_over(optimizer)
    made: list[int] = []
    monkeypatch.setattr(stepping, "_made", lambda optimizer: made.append(1) or (lambda: None))  # type: ignore[func-returns-value]
    own: list[int] = []
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, closure=None: own.append(1))
    for turn in range(2):
        for which in range(1, 33):
            for i, parameter in enumerate(parameters):
                parameter.grad = torch.ones(3) if which >> i & 1 or not i else None
            optimizer.step()
        assert len(made) <= stepping.MOST_PLANS and len(own) >= (turn + 1) * 8
    assert len(own) < 2 * 32  # those that are known are taken still


def test_a_schedule_may_be_made_for_an_optimizer_that_was_taken_over() -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    stepping.take_over(optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05) and len(optimizer.state) == 4


_INTERPRETED = """
    import torch
    from torch import nn
    from ridgeline.engine.replay import fused_adamw as stepping

    stepping.ON_DEVICE = ("cpu",)
    torch.manual_seed(0)
    models = []
    for taken in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(33, 40), nn.Tanh(), nn.Linear(40, 3)).to(torch.float16)
        groups = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2].parameters(), "weight_decay": 0.3}]
        optimizer = torch.optim.AdamW(groups, lr=0.02, betas=(0.8, 0.9), fused=True)
        if taken:
            assert stepping.takes(optimizer)
            stepping.take_over(optimizer)
        for i in range(5):
            optimizer.zero_grad()
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).to(p.dtype)
            before = [p._version for p in model.parameters()]
            optimizer.step()
            if taken and i:  # the first step makes the state, and is PyTorch's
                assert all(p._version > was for p, was in zip(model.parameters(), before))
            if i == 3:
                optimizer.load_state_dict(optimizer.state_dict())
        if taken:
            assert sum(found is not None for found in vars(optimizer)["_ridgeline_launches"].values()) > 0
        models.append((model, optimizer))
    (a, first), (b, second) = models
    for p, q in zip(a.parameters(), b.parameters()):
        assert (p - q).abs().max() <= 2e-3 * p.abs().max(), (p - q).abs().max()
        for name in ("exp_avg", "exp_avg_sq", "step"):
            x, y = first.state[p][name], second.state[q][name]
            assert x.dtype == y.dtype and (x - y).abs().max() <= 2e-3 * x.abs().max(), name
    print("alike")
"""


def test_steps_by_the_kernel_are_pytorchs_steps() -> None:
    import os

    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(_INTERPRETED)],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert run.stdout.strip().endswith("alike"), run.stdout + run.stderr[-3000:]
