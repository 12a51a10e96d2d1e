"""A search leaves what lies beside the model as it was: a loss with a state of its own, weights of others."""

from __future__ import annotations

import copy
import functools
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

import torch.nn.functional as F
from torch import Tensor, nn

import ridgeline as rl
from ridgeline.engine.drop_in import Optimized
from ridgeline.engine.example_inputs import Inputs
from ridgeline.optimizer.search.timing import Track
from ridgeline.optimizer.training import optimizer_update as update

CPU = torch.device("cpu")
LABELS = torch.tensor([0, 1, 2, 3, 0, 1])
HEAD, SEEN = nn.BatchNorm1d(4), []


class Centered(nn.Module):
    """A loss that follows the data, has weights and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.calls = nn.Parameter(torch.ones(4)), 0
        self.register_buffer("center", torch.zeros(4))

    def forward(self, found: Tensor) -> Tensor:
        self.calls += 1
        with torch.no_grad():
            self.center.mul_(0.9).add_(found.mean(0), alpha=0.1)
        return F.cross_entropy((found - self.center) * self.scale, LABELS)


CRITERION = Centered()


def _by_name(found: Tensor) -> Tensor:
    SEEN.append(float(found.detach().mean()))
    return CRITERION(found)


def _closed(criterion: Centered, log: list[float]) -> Any:
    def loss(found: Tensor) -> Tensor:
        log.append(1.0)
        return criterion(found)

    return loss


def _left(criterion: Centered) -> tuple[Any, ...]:
    grad = None if criterion.scale.grad is None else criterion.scale.grad.clone()
    return criterion.center.clone(), criterion.scale.detach().clone(), grad, criterion.calls


def _same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in zip(a, b, strict=True))


def _turns(model: nn.Module, loss: Any, x: Tensor, others: tuple[Tensor, ...] = ()) -> None:
    track = Track(model, Inputs((x,)), "train", loss, CPU, others)
    track.settle(model)
    for _ in range(3):
        track.turn_s(model, 2)
    track.hand_back()


@pytest.mark.parametrize("way", ["module", "method", "closure", "partial", "global"])
def test_what_a_loss_keeps_is_put_back(way: str) -> None:
    criterion, log = (CRITERION if way == "global" else Centered()), (SEEN if way == "global" else [])
    criterion(torch.randn(6, 4)).backward()  # gradients that the caller gathers already
    ways = {"module": criterion, "method": criterion.forward, "closure": _closed(criterion, log), "global": _by_name}
    loss = ways.get(way, functools.partial(lambda found, by: by(found), by=criterion))
    held, before, noted = criterion.scale.grad, _left(criterion), len(log)
    _turns(nn.Linear(8, 4), loss, torch.randn(6, 8))
    assert _same(_left(criterion), before)
    assert criterion.scale.grad is held and len(log) == noted


class Outside(nn.Module):
    """Knows a layer by a global name, and another in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.hidden = nn.Linear(8, 4), [nn.Linear(4, 4)]

    def forward(self, x: Tensor) -> Tensor:
        return HEAD(self.hidden[0](self.body(x)))


def test_layers_that_are_no_parts_of_the_model_are_put_back() -> None:
    model = Outside()
    before = copy.deepcopy(HEAD.state_dict())
    _turns(model, lambda found: found.square().mean() + found.sum(), torch.randn(6, 8))
    assert all(torch.equal(value, HEAD.state_dict()[name]) for name, value in before.items())
    assert all(p.grad is None for p in (*HEAD.parameters(), *model.hidden[0].parameters()))


def test_what_else_an_optimizer_steps_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a proof move everything an optimizer has: a loss's weights, another model that waits for its turn."""
    torch.manual_seed(0)
    model, criterion, other, x = nn.Linear(8, 4), Centered(), nn.Linear(8, 4), torch.randn(6, 8)
    other(x).square().mean().backward()
    waiting, weights, before = other.weight.grad, other.weight.detach().clone(), _left(criterion)
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters(), *other.parameters()], lr=0.1)
    made = Optimized(model, [], mode="train", loss=criterion)

    def proved(*given: Any) -> list[str]:
        update._tracked(made, optimizer, optimizer, Inputs((x,)), criterion, 8)
        assert not _same(_left(criterion), before)  # they are moved, and put back by whoever asked for the proof
        assert other.weight.grad is None
        return []

    monkeypatch.setattr(update, "_settled", proved)
    assert update.settle(made, optimizer, Inputs((x,)), criterion, 1e-3, 10.0) == []
    assert _same(_left(criterion), before)
    assert other.weight.grad is waiting and torch.equal(other.weight, weights)


@pytest.mark.filterwarnings("ignore")
def test_a_whole_search_leaves_no_trace_on_a_loss() -> None:
    torch.manual_seed(0)
    model, criterion = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 4)), Centered()
    before = _left(criterion)
    optimizer = torch.optim.AdamW([*model.parameters(), *criterion.parameters()])
    rl.optimize(model, (torch.randn(6, 8),), mode="train", loss=criterion, optimizer=optimizer, budget_s=1,
                use_cache=False)  # fmt: skip
    assert _same(_left(criterion), before)
    assert not optimizer.state


class Forces(nn.Module):
    """Differentiates inside of its forward, where something is drawn too."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        near = (x + 0.1 * torch.randn_like(x)).detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.body(near).sum(), near, create_graph=True)
        return slope.square().mean()


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_differentiates_and_draws_is_searched() -> None:
    fast = rl.optimize(Forces(), (torch.randn(6, 8),), mode="train", budget_s=1, use_cache=False)
    assert fast.receipt.entries, fast.receipt.notes


@pytest.mark.filterwarnings("ignore")
def test_scripted_parts_are_searched_and_keep_no_hooks() -> None:
    model = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.GELU())), nn.Linear(8, 4))
    fast = rl.optimize(model, (torch.randn(6, 8),), mode="train", budget_s=1, use_cache=False)
    assert fast.receipt.entries, fast.receipt.notes
    assert not model._forward_pre_hooks and not model._forward_hooks
