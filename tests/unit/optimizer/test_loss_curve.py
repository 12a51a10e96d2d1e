"""A training run that goes the same way is told from one that does not, and the weights come back."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from ridgeline.engine.example_inputs import Inputs, State
from ridgeline.optimizer.search.loss import Loss
from ridgeline.optimizer.search.loss_curve import track


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4)).train()


def test_a_drop_in_tracks_eager_and_leaves_the_weights() -> None:
    model = _model()
    before = [p.detach().clone() for p in model.parameters()]
    loss = Loss(lambda y: (y - 1).square().mean())
    found = track(model, lambda x: model(x), Inputs((torch.randn(16, 8),)), loss, State(model), steps=20)
    assert found.ok and found.found[-1] < found.found[0] and "20 steps" in str(found)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_one_layer_that_does_not_learn_is_noticed() -> None:
    model = _model()
    loss = Loss(lambda y: (100 * y - 100).square().mean())

    def frozen(x: torch.Tensor) -> torch.Tensor:
        hidden = model[2](model[1](model[0](x)))
        return nn.functional.linear(hidden, model[3].weight.detach(), model[3].bias.detach()) + 0 * model[3](hidden)

    found = track(model, frozen, Inputs((torch.randn(16, 8),)), loss, State(model), steps=50)
    assert not found.ok
