"""Numbers and vectors behind a norm go into its weight and bias, where nothing else sees what is in between."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ridgeline.optimizer.backend import Report, compiled
from ridgeline.optimizer.rewrites.rows import norm_affine as affines


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    monkeypatch.setattr(affines, "LEAST_ELEMENTS", 1)


class Normed(nn.Module):
    """A norm whose weight and bias say something, and a function of its result and of a vector."""

    def __init__(self, norm: nn.Module, function: Any, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.norm, self.function, self.by = norm, function, nn.Parameter(torch.randn(shape))
        for parameter in norm.parameters():
            nn.init.uniform_(parameter, 0.5, 2.0)

    def forward(self, x: Any) -> Any:
        return self.function(self.norm(x), self.by)


GROUPS = lambda: nn.GroupNorm(3, 6)
VECTOR = (6, 1, 1)


@pytest.mark.parametrize(
    ("norm", "function", "shape", "num"),
    [
        (GROUPS, lambda y, by: F.max_pool2d(y * by, 2).clamp(0, 1), VECTOR, 1),
        (GROUPS, lambda y, by: (by + y * 2.0) / 3, (1, 6, 1, 1), 3),
        (lambda: nn.GroupNorm(2, 6, affine=False), lambda y, by: y - by, VECTOR, 1),
        (lambda: nn.BatchNorm2d(6), lambda y, by: y * by, VECTOR, 0),
        (lambda: nn.InstanceNorm2d(6, track_running_stats=True), lambda y, by: y * by, VECTOR, 0),
        (lambda: nn.InstanceNorm2d(6), lambda y, by: y / 2.0, VECTOR, 1),
        (GROUPS, lambda y, by: y * by, (1,), 1),
        (GROUPS, lambda y, by: by - y, VECTOR, 0),
        (GROUPS, lambda y, by: y * by, (2, 6, 1, 1), 0),
        (GROUPS, lambda y, by: y * by, (8,), 0),
        (GROUPS, lambda y, by: (y * by, y + 1), VECTOR, 0),
        (GROUPS, lambda y, by: y * y, VECTOR, 0),
        (GROUPS, lambda y, by: torch.add(y, by, alpha=2), VECTOR, 0),
    ],
)
def test_what_a_norm_is_scaled_by_goes_into_it(norm: Any, function: Any, shape: Any, num: int) -> None:
    model, x, report = Normed(norm(), function, shape), torch.randn(2, 6, 8, 8), Report()
    with torch.no_grad():
        state = {name: value.clone() for name, value in model.state_dict().items()}
        meant = model(x)
        after = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state)
        found = compiled(model, rewrites=("norm-affine",), report=report)(x)
    torch.testing.assert_close(found, meant, rtol=1e-5, atol=1e-5)
    assert len(report.matches) == num and not report.refusals
    for name, value in model.state_dict().items():  # running statistics too
        torch.testing.assert_close(value, after[name])


def test_half_types_and_gradients_stay_as_they_are() -> None:
    report = Report()
    model = Normed(GROUPS(), lambda y, by: y * by, VECTOR).bfloat16()
    with torch.no_grad():
        compiled(model, rewrites=("norm-affine",), report=report)(torch.randn(2, 6, 8, 8).bfloat16())
    assert not report.matches


def test_a_weight_that_is_changed_later_is_seen() -> None:
    model, x = Normed(GROUPS(), lambda y, by: y * by, VECTOR), torch.randn(2, 6, 8, 8)
    with torch.no_grad():
        fast = compiled(model, rewrites=("norm-affine",), report=Report())
        fast(x)
        model.by.mul_(3)
        model.norm.bias.add_(1)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)
