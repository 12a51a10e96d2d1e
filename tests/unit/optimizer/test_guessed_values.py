"""Values that the host reads inside of a call: guessed to be what they were, compared by every replay."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

from recorder import TapeExecutor
from torch import Tensor, nn

from ridgeline.engine.replay.inference import GUESSED, Graphed, graph_inference
from ridgeline.errors import NotGraphable
from ridgeline.optimizer.backend import Report
from ridgeline.optimizer.search.candidate import Built, Candidate
from ridgeline.optimizer.search.facts import Facts
from ridgeline.optimizer.search.order import Stages
from ridgeline.optimizer.search.stages import WAITS


class Of(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(6, 6), function
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, *args: Tensor) -> Any:
        return self.function(self, *args)


def _masked(self: Of, x: Tensor, lengths: Tensor) -> Tensor:
    places = torch.arange(int(lengths.max()))[None] < lengths[:, None]
    return self.layer(x).masked_fill(~places[..., None], 0.0)


def _branching(self: Of, x: Tensor, lengths: Tensor) -> Tensor:
    hidden = lengths < x.shape[1]
    return self.layer(x) * 2 if hidden.any() else self.layer(x) - 1


def _checked(self: Of, x: Tensor, lengths: Tensor) -> Tensor:
    num = (lengths > 2).sum()
    said = f"{num} of them"
    if num != x.shape[0]:
        raise ValueError(said)
    return self.layer(x)


def _told(self: Of, x: Tensor, lengths: Tensor) -> dict[str, Any]:
    return {"x": self.layer(x), "longest": lengths.max().item(), "mean": lengths.float().mean().item()}


LENGTHS = torch.tensor([3, 5, 4])
FOUND = {"masked": _masked, "branching": _branching, "checked": _checked, "told": _told}


def _recorded(model: nn.Module, *args: Tensor, **given: Any) -> Graphed:
    with torch.no_grad():
        return graph_inference(model, args, {}, model, executor=TapeExecutor(), **{"guesses": True, **given})


def _alike(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("function", FOUND.values(), ids=list(FOUND))
def test_where_values_are_what_they_were_the_capture_is_replayed(function: Any) -> None:
    torch.manual_seed(0)
    model = Of(function).eval()
    graphed = _recorded(model, torch.randn(3, 5, 6), LENGTHS.clone())
    for lengths in (LENGTHS, LENGTHS[[0, 2, 1]]):  # the same longest, as many beyond two
        x = torch.randn(3, 5, 6)
        with torch.no_grad():
            _alike(graphed(x, lengths.clone()), model(x, lengths))
    assert graphed.replays == 2 and not graphed.misses


@pytest.mark.parametrize("function", FOUND.values(), ids=list(FOUND))
def test_where_they_are_others_the_call_is_made_as_it_is(function: Any) -> None:
    torch.manual_seed(0)
    model, x = Of(function).eval(), torch.randn(3, 5, 6)
    graphed = _recorded(model, x, LENGTHS.clone())
    others = torch.tensor([5, 5, 5] if function is _branching else [5, 1, 5])
    with torch.no_grad():
        if function is _checked:
            with pytest.raises(ValueError, match="2 of them"):
                graphed(x, others)
        else:
            _alike(graphed(x, others), model(x, others))
        missed = dict(graphed.misses)
        _alike(graphed(x, LENGTHS.clone()), model(x, LENGTHS))
    if function is not _masked:  # whose longest is the same
        assert missed == {GUESSED: 1} and graphed.replays == 1


@pytest.mark.parametrize("training", [False, True])
def test_means_that_are_only_read_are_no_state_that_a_call_changes(training: bool) -> None:
    """Speech and pictures have batch norms, which announce that they write their means in evaluation too."""

    def function(self: Of, x: Tensor, lengths: Tensor) -> Tensor:
        return self.norm(self.layer(x).transpose(1, 2)) * int(lengths.max())

    model = Of(function)
    model.norm = nn.BatchNorm1d(6)
    model.train(training)
    if training:
        with pytest.raises(NotGraphable, match=WAITS):
            _recorded(model, torch.randn(3, 5, 6), LENGTHS.clone())
        return
    graphed, x = _recorded(model, torch.randn(3, 5, 6), LENGTHS.clone()), torch.randn(3, 5, 6)
    with torch.no_grad():
        _alike(graphed(x, LENGTHS), model(x, LENGTHS))
    assert graphed.replays == 1 and graphed.is_pure


def test_without_being_asked_nothing_is_guessed() -> None:
    with pytest.raises(NotGraphable, match=WAITS):
        _recorded(Of(_masked).eval(), torch.randn(3, 5, 6), LENGTHS.clone(), guesses=False)


def _counting(self: Of, x: Tensor, lengths: Tensor) -> Tensor:
    self.seen += 1
    return self.layer(x) * int(lengths.max())


def _writing(self: Of, x: Tensor, lengths: Tensor) -> Tensor:
    x.mul_(2.0)
    return self.layer(x) * int(lengths.max())


def _rolling(self: Of, x: Tensor, lengths: Tensor) -> Tensor:
    return self.layer(x) * int(lengths.max()) + torch.rand(6)


def _overwriting(self: Of, x: Tensor, lengths: Tensor) -> Tensor:
    total = lengths.sum()
    first = int(total)
    total += 1
    return self.layer(x) * first


def _shaped(self: Of, x: Tensor, lengths: Tensor) -> Tensor:
    return self.layer(x)[lengths > 3]


@pytest.mark.parametrize("function", [_counting, _writing, _rolling, _overwriting, _shaped])
def test_what_cannot_be_taken_back_is_not_guessed(function: Any) -> None:
    """A replay that was wrong must have changed nothing, and drawn nothing."""
    with pytest.raises(NotGraphable):
        _recorded(Of(function).eval(), torch.randn(3, 5, 6), LENGTHS.clone())


@pytest.mark.parametrize("value", [0.0, -0.0, float("nan"), 1.5])
def test_values_are_compared_to_the_sign_of_zero(value: float) -> None:
    def function(self: Of, x: Tensor) -> Tensor:
        return self.layer(x[:, 1:]) * str(x[0, 0].item()).count("-")

    class Narrow(Of):
        def __init__(self) -> None:
            super().__init__(function)
            self.layer = nn.Linear(5, 5)

    model, x = Narrow().eval(), torch.randn(3, 6)
    x[0, 0] = value
    graphed = _recorded(model, x.clone())
    for other in (value, -value, 0.0):
        again = x.clone()
        again[0, 0] = other
        with torch.no_grad():
            _alike(graphed(again), model(again))
    assert graphed.replays >= 1


def test_a_search_guesses_in_all_captures_once_one_has_failed_for_a_value() -> None:
    facts = Facts(mode="infer", cuda=True, eager_s=1e-3, groups=(), num_leaves=100, unlike_frac=1.0, has_conv=False,
                  substitutable=(), unmasked=False, has_cache=False, forecast=None, budget_s=120.0)  # fmt: skip
    for reason, guesses in (("the host waits for a value of a tensor, at a.py:3", True), ("it draws", False)):
        proposed = {}

        class FakeProgress:
            best = Built(Candidate(name="eager"), lambda: None, Report())
            entries: dict[str, Any] = {}

        progress = FakeProgress()
        progress.entries = {}
        for proposal in Stages(facts).proposals(progress):
            failed = proposal.candidate.name == "graph"

            class Entry:
                status, measured_s, rewrites = "failed" if failed else "slower", 1.0, {}
                reason = ""

            Entry.reason = reason if failed else ""
            proposed[proposal.candidate.name], progress.entries[proposal.candidate.name] = proposal.candidate, Entry()
        assert ("graph, guessing" in proposed) is guesses
        assert proposed["torch.compile + graph"].guesses is guesses and not proposed["torch.compile"].guesses
