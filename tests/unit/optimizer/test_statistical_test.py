"""Random models whose elements move together: what is right is not called wrong by chance, and mistakes are seen."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from ridgeline.engine.example_inputs import Inputs, State
from ridgeline.optimizer.search import prepare
from ridgeline.optimizer.search.dropout_off import dropout_off
from ridgeline.optimizer.search.judge import Prover, Subject
from ridgeline.optimizer.search.loss import Loss
from ridgeline.optimizer.search.problem import Problem
from ridgeline.optimizer.search.search import Search
from ridgeline.optimizer.search.statistical_test import Runs, beyond_chance


class Path(nn.Module):
    """A residual path that is dropped for whole samples, as vision models do in training."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate, self.kept = rate, 1.0
        self.layer = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x.new_empty((len(x), 1, 1)).bernoulli_(1 - self.rate)
        return x + self.layer(x) * mask * self.kept / (1 - self.rate)


class Paths(nn.Module):
    def __init__(self, rate: float = 0.1, kept: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.paths = nn.Sequential(*[Path(rate) for _ in range(4)])
        self.head = nn.Linear(64, 5)
        for path in self.paths:
            path.kept = kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.paths(x).mean(1))


def _prover(model: nn.Module, draws: int) -> Prover:
    torch.manual_seed(7)
    subject = Subject(model, Inputs((torch.randn(4, 6, 64),)), "train", Loss(None), State(model))
    return Prover(subject, random=True, num_draws=draws)


def test_dropped_paths_of_few_samples_are_not_called_wrong_by_chance() -> None:
    model, first = Paths().train(), 1000
    prover = _prover(model, 16)
    moments = prover._moments

    def elsewhere(call: Any, inputs: Inputs, start: int, num: int) -> Any:
        return moments(call, inputs, start + first, num)

    prover._moments = elsewhere  # type: ignore[method-assign]
    for first in range(1000, 9000, 2000):  # noqa: B007  (read by the function above)
        prover._eager_moments.clear()
        assert prover.judge(model), prover.judge(model).reason


@pytest.mark.parametrize("wrong", [Paths(kept=0.6), Paths(rate=0.4), Paths(rate=1e-9)])
def test_paths_scaled_or_dropped_otherwise_are_seen(wrong: nn.Module) -> None:
    model = Paths().train()
    wrong.load_state_dict(model.state_dict())

    def call(x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(wrong.train(), dict(model.named_parameters()), (x,))

    assert not _prover(model, 32).judge(call)


def test_elements_that_move_together_are_counted_as_few() -> None:
    torch.manual_seed(0)
    alone, together = Runs(), Runs()
    for _ in range(32):
        alone.add(torch.randn(400))
        together.add(torch.randn(1) * torch.ones(400))
    assert alone.moments().freedom > 100 and together.moments().freedom < 2
    kinds = [runs.moments() for runs in (alone, together)]
    assert beyond_chance(kinds[0], kinds[0], kinds[0], 1e-7)[2] < 2.2 < 10 < beyond_chance(
        kinds[1], kinds[1], kinds[1], 1e-7)[2]  # fmt: skip


class Normed(nn.Module):
    """A bias in front of batch norm has no effect: its gradient is rounding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, noise: float = 1.0, scale: float = 1.0) -> torch.Tensor:
        weight, bias = self.layer.weight, self.layer.bias
        y = self.norm(torch.nn.functional.linear(x, weight, _scaled(bias, noise)))
        return self.last(_scaled(self.drop(y.relu()), scale))


def _scaled(x: torch.Tensor, times: float) -> torch.Tensor:
    """The same, with another gradient."""
    return x.detach() + times * (x - x.detach())


def test_a_gradient_that_is_rounding_may_be_other_rounding_and_nothing_else_may() -> None:
    model = Normed().train()
    torch.manual_seed(3)
    subject = Subject(model, Inputs((torch.randn(32, 8),)), "train", Loss(None), State(model))
    prover = Prover(subject, random=True, num_draws=16)
    assert prover._rounding_noise() == {"gradient of layer.bias"}
    assert prover.judge(lambda x: model(x, noise=5.0)), "another kernel's rounding"
    assert not prover.judge(lambda x: model(x, noise=1e3)), "more than rounding"
    assert not prover.judge(lambda x: model(x, scale=3.0)), "a mistake"


def _is_random(model: nn.Module, x: torch.Tensor) -> bool:
    search = Search(Problem(model=model, inputs=Inputs((x,)), mode="train", device=torch.device("cpu"), budget_s=5.0))
    prepare.prepare(search)
    search.track.hand_back()
    return search.random


def test_a_model_that_changes_its_buffers_may_be_random_too() -> None:
    """Its state is put back after a call, generators included, and drawing was looked for after that."""
    layers = [nn.Linear(8, 8), nn.BatchNorm1d(8)]
    assert not _is_random(nn.Sequential(*layers).train(), torch.randn(6, 8))
    assert _is_random(nn.Sequential(*layers, nn.Dropout(0.5)).train(), torch.randn(6, 8))


def test_what_is_seldom_dropped_is_random_too() -> None:
    assert _is_random(Paths(rate=0.03).train(), torch.randn(2, 6, 64))
    assert not _is_random(Paths(rate=0.0).train(), torch.randn(2, 6, 64))


def test_paths_of_torchvision_are_stilled() -> None:
    class StochasticDepth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = 0.2

    model = nn.Sequential(StochasticDepth(), nn.Dropout(0.1))
    with dropout_off(model) as num:
        assert num == 2 and model[0].p == 0.0 and model[1].p == 0.0
    assert model[0].p == 0.2
