"""Compilations that run out of time end with that reason, and leave compilers and models as they were."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from ridgeline.optimizer.compile import deadline
from ridgeline.optimizer.compile.deadline import OutOfTime, within


def _step(call: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(call(x).square().sum(), list(call.parameters())))


@pytest.mark.parametrize("module", ["torch._dynamo.symbolic_convert", "torch.fx.interpreter"])
def test_a_compiler_stops_between_two_steps_and_works_again(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(deadline, "STEPS", [step for step in deadline.STEPS if step[0] == module])
    before = [vars(kind)[name] for kind, name in deadline._steps()]
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
    call = torch.compile(model, backend="aot_eager")
    with pytest.raises(OutOfTime, match="not made within 0 s"), within(0.0):
        _step(call, x)
    assert [vars(kind)[name] for kind, name in deadline._steps()] == before
    for mine, meant in zip(_step(call, x), _step(model, x), strict=True):
        torch.testing.assert_close(mine, meant)


def test_what_is_made_in_time_and_other_errors_are_left_alone() -> None:
    with within(60.0):
        assert torch.compile(nn.Linear(4, 4), backend="eager")(torch.randn(2, 4)).shape == (2, 4)
    with pytest.raises(ZeroDivisionError), within(0.0):
        raise ZeroDivisionError
    with within(None):
        pass


def test_every_step_is_one_that_this_release_has() -> None:
    assert len(list(deadline._steps())) == len(deadline.STEPS)
