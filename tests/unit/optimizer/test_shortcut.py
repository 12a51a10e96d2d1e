"""Compiled calls past their guards: the same results, and whatever guards would have noticed is noticed."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch import nn

from ridgeline.engine.drop_in import Optimized, Plan
from ridgeline.engine.example_inputs import Inputs
from ridgeline.engine.replay.compiled import Shortcut, shortcut
from ridgeline.engine.signature import Signature
from ridgeline.errors import NotGraphable
from ridgeline.optimizer.backend import compiled
from ridgeline.optimizer.search.candidate import Candidate, Traces, build


class Scaled(nn.Module):
    """A linear layer, scaled by an attribute; several results in containers."""

    def __init__(self, several: bool = False) -> None:
        super().__init__()
        self.fc, self.by, self.several = nn.Linear(6, 4), 2.0, several

    def forward(self, x: Any, *, shift: Any = None) -> Any:
        y = torch.relu(self.fc(x)) * self.by
        y = y if shift is None else y + shift
        return {"y": y, "parts": [y + 1, x]} if self.several else y


def made(model: nn.Module, *args: Any, **kwargs: Any) -> Shortcut:
    return shortcut(compiled(model, rewrites=()), args, kwargs, model)


def same(found: Any, meant: Any) -> None:
    torch.testing.assert_close(found, meant, rtol=1e-6, atol=1e-6)


def test_results_are_the_models_and_new_at_every_call() -> None:
    model, x = Scaled(), torch.randn(3, 6)
    fast = made(model, x)
    first, second = fast(x), fast(2 * x)
    same(first, model(x).detach())
    same(second, model(2 * x).detach())
    assert first.data_ptr() != second.data_ptr() and not fast.misses


def test_several_results_come_in_the_containers_they_came_in_and_inputs_are_the_callers() -> None:
    model, x, shift = Scaled(several=True), torch.randn(3, 6), torch.randn(4)
    found = made(model, x, shift=shift)(x, shift=shift)
    meant = model(x, shift=shift)
    assert list(found) == ["y", "parts"] and found["parts"][1] is x
    same(found["y"], meant["y"].detach())
    same(found["parts"][0], meant["parts"][0].detach())


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_results_are_the_same_in_every_mode_and_carry_no_gradients(mode: Any) -> None:
    model, x = Scaled(), torch.randn(3, 6)
    fast = made(model, x)
    with mode():
        found = fast(x)
        same(found, model(x).detach())
    assert not found.requires_grad and not fast.misses


def test_weights_that_change_in_place_are_seen_and_no_miss() -> None:
    model, x = Scaled(), torch.randn(3, 6)
    fast = made(model, x)
    with torch.no_grad():
        model.fc.weight.mul_(3.0)
    same(fast(x), model(x).detach())
    assert not fast.misses


class Doubled(nn.Linear):
    """A linear layer and twice what it gives."""

    def forward(self, x: Any) -> Any:
        return 2 * super().forward(x)


@pytest.mark.parametrize("change", ["attribute", "parameter", "memory", "class", "hook"])
def test_what_guards_would_have_noticed_is_noticed(change: str) -> None:
    model, x = Scaled(), torch.randn(3, 6)
    fast = made(model, x)
    fast(x)
    if change == "attribute":
        model.by = 5.0
    elif change == "parameter":
        model.fc.weight = nn.Parameter(torch.randn(4, 6))
    elif change == "memory":
        model.fc.weight.data = torch.randn(4, 6)
    elif change == "class":
        model.fc.__class__ = Doubled
    else:
        model.fc.register_forward_hook(lambda module, given, out: out + 100)
    with torch.no_grad():
        meant = model(x)
    same(fast(x), meant)
    assert fast.misses


def test_other_shapes_go_through_the_guards() -> None:
    model = Scaled()
    fast = made(model, torch.randn(3, 6))
    x = torch.randn(5, 6)
    same(fast(x).detach(), model(x).detach())
    assert fast.misses


def test_statistics_of_batches_are_counted_once_a_call() -> None:
    model, twin = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
    x = torch.randn(8, 6)
    fast = made(model, x)
    model.load_state_dict(twin.state_dict())
    for scale in (1.0, 2.0):
        with torch.no_grad():
            same(fast(scale * x), twin(scale * x))
    for name, value in twin.state_dict().items():
        same(model.state_dict()[name], value)


class Breaks(nn.Module):
    def forward(self, x: Any) -> Any:
        y = torch.relu(x)
        torch._dynamo.graph_break()
        return y + 1


class Writes(nn.Module):
    def forward(self, x: Any) -> Any:
        x.add_(1)
        return x * 2


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def forward(self, x: Any) -> Any:
        self.num += 1
        return x * self.num


@pytest.mark.parametrize(
    ("model", "why"),
    [(Breaks(), "2 compiled graphs"), (Writes(), "writes to its inputs"), (Counts(), "changes the model's state")],
)
def test_what_is_more_than_one_graph_is_refused(model: nn.Module, why: str) -> None:
    with pytest.raises(NotGraphable, match=why):
        made(model, torch.randn(3, 6))


def test_a_candidate_that_cannot_go_past_its_guards_stays_behind_them() -> None:
    inputs = Inputs((torch.randn(3, 6),), {})
    candidate = Candidate(name="rewrites", rewrites=("identity",), straight=True)
    with torch.no_grad():
        built = build(candidate, Breaks(), inputs, "infer", traces=Traces())
        straight = build(candidate, Scaled(), inputs, "infer", traces=Traces())
        same(built.call(*inputs.args), torch.relu(inputs.args[0]) + 1)
    assert not isinstance(built.call, Shortcut) and isinstance(straight.call, Shortcut)


def test_a_drop_in_calls_past_the_guards_and_says_when_a_hook_sends_it_back() -> None:
    model, x = Scaled(), torch.randn(3, 6)
    fast = Optimized(model, [Plan(Signature.of((x,), {}, model, grad=False), made(model, x))])
    with torch.no_grad():
        same(fast(x), model(x))
        model.fc.register_forward_hook(lambda module, given, out: out + 100)
        with pytest.warns(UserWarning, match="runs as the original model"):
            same(fast(x), model(x))


def test_dropout_under_inductor_drops_what_eager_would_with_the_same_seed() -> None:
    model, x = nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.4)), torch.randn(3, 6)
    candidate = Candidate(name="compiled", compiler="inductor", options=(("fallback_random", True),), straight=True)
    with torch.no_grad():
        built = build(candidate, model, Inputs((x,), {}), "infer", traces=Traces())
        for seed in (0, 1):
            torch.manual_seed(seed)
            meant = model(x)
            torch.manual_seed(seed)
            same(built.call(x), meant)
    assert isinstance(built.call, Shortcut)
