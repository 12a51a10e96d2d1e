"""What calls leave on a model is no obstacle to recording it, on the CPU with a stand-in for CUDA graphs."""

from __future__ import annotations

import gc
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

from recorder import TapeExecutor
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

import ridgeline as rl
from ridgeline.engine.drop_in import RunsEagerly
from ridgeline.engine.replay import inference as graphed
from ridgeline.engine.replay import training
from ridgeline.errors import NotGraphable
from ridgeline.optimizer.search import timing as measure
from ridgeline.optimizer.search.candidate import Candidate
from ridgeline.optimizer.search.facts import Proposal
from ridgeline.optimizer.search.last_race import LastRace
from ridgeline.optimizer.search.order import Stages


class Marking(TapeExecutor):
    """Says which parameters' gradients were bound to the stream of calls before the first that a recording follows."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.parameters, self.held = list(model.parameters()), [0]

    def warm_up(self, run: Any) -> None:
        if len(self.held) == 1:
            training.mark_accumulators(self.parameters)
        super().warm_up(run)

    def record(self, run: Any, *, told: bool) -> Any:
        gc.collect()
        marks = [training._BEFORE in get_gradient_edge(p).node.metadata for p in self.parameters]
        self.held.append(sum(marks))
        return super().record(run, told=told)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm], ids=lambda norm: norm.__name__)
def test_weights_made_by_hooks_hold_no_history_while_a_step_is_captured(norm: Any) -> None:
    """On a device their gradients would go to the default stream, which no capture may do (a judge of images, H200)."""
    model, x = nn.Sequential(norm(nn.Conv1d(2, 4, 3)), nn.Flatten(), norm(nn.Linear(24, 4))), torch.randn(6, 2, 8)
    model(x).sum().backward()
    executor = Marking(model)
    training.graph_training(model, (x,), {}, model, executor=executor)
    assert executor.held[1:] == [0, 0]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weights_of_an_earlier_replay_that_somebody_put_back_are_in_nobodys_way() -> None:
    """They held the memory of a replay: one call as the model makes it, and copies of everything from then on."""
    model, x = nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 4))), torch.randn(6, 8)
    call = training.graph_training(model, (x,), {}, model, executor=TapeExecutor())
    call(x).sum().backward()
    before = model[0].weight
    call(x).sum().backward()  # somebody holds the weight of the replay before
    assert call.misses and not any(call._tracks.lent)
    model[0].weight = before  # as the state of a model is put back
    del before
    call.lend()
    for _ in range(3):
        call(x).sum().backward()
    assert call.replays == 4 and sum(call.misses.values()) == 1 and any(call._tracks.lent)


class Noting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(8, 8), nn.Linear(8, 4)
        self.map: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.map = self.body(x).softmax(-1)
        found: Tensor = self.out(self.map)
        return found


@pytest.mark.filterwarnings("ignore")
def test_a_search_captures_a_model_that_notes_something_and_leaves_it_as_it_was(monkeypatch: Any) -> None:
    for home in (graphed, training):
        monkeypatch.setattr(home, "executor_for", lambda given: TapeExecutor())
    monkeypatch.setattr(measure.Comparison, "faster", property(lambda self: True))
    monkeypatch.setattr(measure.Comparison, "slower", property(lambda self: False))
    monkeypatch.setattr(measure.Comparison, "ahead", property(lambda self: False))
    monkeypatch.setattr(LastRace, "hardly_gains", lambda self, timed: False)
    proposals = [Proposal(Candidate(name="graph", graphed=True), 0.1)]
    monkeypatch.setattr(Stages, "proposals", lambda self, search: iter(proposals))
    model, x = Noting(), torch.randn(6, 8)
    fast = rl.optimize(model, (x,), mode="train", loss=lambda y: y.square().mean(), budget_s=3, use_cache=False)
    assert model.map is None
    assert fast.receipt.winner == "graph", fast.receipt.entries
    for _ in range(3):
        fast(x).square().mean().backward()
        assert torch.equal(model.map, model.body(x).softmax(-1))
    assert fast.plans[0].call.replays > 0


class Leaving(nn.Module):
    """What a model leaves for others in inference: a map, what a router gave, a mean in a dictionary."""

    def __init__(self, wide: int = 8) -> None:
        super().__init__()
        self.body, self.out, self.route = nn.Linear(8, wide), nn.Linear(wide, 4), nn.Linear(8, 3)
        self.attention = self.routed = None
        self.log: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        weights = self.body(x).softmax(-1)
        self.attention = weights
        self.routed = self.route(x).argmax(-1)
        found: Tensor = self.out(weights)
        self.log["mean"] = found.mean()
        return found


def _left(model: Leaving) -> list[Any]:
    return [model.attention, model.routed, model.log["mean"]]


def _recorded(model: nn.Module, *args: Tensor, **given: Any) -> graphed.Graphed:
    with torch.no_grad():
        return graphed.graph_inference(model, args, {}, model, executor=TapeExecutor(), **given)


@pytest.mark.parametrize("wide", [8, 1 << 16], ids=["copied", "lent"])
def test_a_replay_without_gradients_leaves_on_the_model_what_the_call_leaves(wide: int) -> None:
    model = Leaving(wide).eval()
    fast = _recorded(model, torch.randn(6, 8))
    assert model.attention is None and model.routed is None and not model.log, "recording leaves nothing behind"
    kept = []
    with torch.no_grad():
        model(torch.randn(6, 8))  # the code names "mean" and may ask for it: it is replayed where there is one
    for turn in range(8):
        x = torch.randn(6, 8)
        with torch.no_grad():
            result = fast(x)
            mine = [result, *_left(model)]
            expected = [model(x).clone(), *(each.clone() for each in _left(model))]
        for found, wanted in zip(mine, expected, strict=True):
            assert torch.equal(found, wanted), turn
        kept += list(zip(mine, expected)) if turn % 3 == 0 else []
    assert fast.replays == 8 and not fast.misses, fast.misses
    for found, wanted in kept:
        assert torch.equal(found, wanted), "what a caller keeps is not written over"


def test_what_replays_left_is_the_last_ones_while_it_is_replayed_again_and_again() -> None:
    model = Leaving(1 << 16).eval()
    fast = _recorded(model, torch.randn(6, 8))
    with torch.no_grad():
        model(torch.randn(6, 8))
        for _ in range(5):
            x = torch.randn(6, 8)
            fast(x)
            left = model.attention
            assert torch.equal(left, model.body(x).softmax(-1))
    assert fast.replays == 5 and not fast.misses


class Recalling(nn.Module):
    def __init__(self, say: bool) -> None:
        super().__init__()
        self.body, self.before, self.say = nn.Linear(8, 4), None, say

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(x)
        if self.say:
            found = result if self.before is None else result - 1  # asks what it is, not what it holds
        else:
            found = result if self.before is None else result + self.before
        self.before = result
        return found


def test_what_the_next_call_computes_with_is_no_note() -> None:
    with pytest.raises(NotGraphable, match="before changed"):
        _recorded(Recalling(say=False), torch.randn(6, 8))


def test_a_note_that_the_code_asks_for_is_replayed_only_where_there_is_one() -> None:
    model, x = Recalling(say=True).eval(), torch.randn(6, 8)
    fast = _recorded(model, x)
    with torch.no_grad():
        expected = [model.body(x), model.body(x) - 1, model.body(x) - 1]
        found = [fast(x) for _ in expected]
        model.before = None
        found.append(fast(x))
    for mine, theirs in zip(found, [*expected, expected[0]], strict=True):
        assert torch.equal(mine, theirs)
    assert fast.replays == 2 and len(fast.misses) == 1


class Gauging(Leaving):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, : int(x[0, 0].abs() > 1e9) + 8])


def test_a_guess_that_is_wrong_leaves_what_the_call_itself_leaves() -> None:
    model, x = Gauging().eval(), torch.randn(6, 8)
    fast = _recorded(model, x, guesses=True)
    other = x.clone()
    other[0, 0] = 2e9
    with torch.no_grad():
        model(x)
    for given in (x, other, x):
        with torch.no_grad():
            result = fast(given)
            left = [each.clone() for each in _left(model)]
            assert torch.equal(result, model(given)) and all(map(torch.equal, left, _left(model)))
    assert fast.misses == {graphed.GUESSED: 1}


@pytest.mark.filterwarnings("ignore")
def test_a_search_captures_inference_that_leaves_side_effects(monkeypatch: Any) -> None:
    monkeypatch.setattr(graphed, "executor_for", lambda given: TapeExecutor())
    monkeypatch.setattr(measure.Comparison, "faster", property(lambda self: True))
    monkeypatch.setattr(measure.Comparison, "slower", property(lambda self: False))
    monkeypatch.setattr(measure.Comparison, "ahead", property(lambda self: False))
    monkeypatch.setattr(LastRace, "hardly_gains", lambda self, timed: False)
    proposals = [Proposal(Candidate(name="graph", graphed=True), 0.1)]
    monkeypatch.setattr(Stages, "proposals", lambda self, search: iter(proposals))
    model, x = Leaving().eval(), torch.randn(6, 8)
    fast = rl.optimize(model, (x,), budget_s=3, use_cache=False)
    assert fast.receipt.winner == "graph", fast.receipt.entries
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", RunsEagerly)
        for _ in range(3):
            x = torch.randn(6, 8)
            fast(x)
            assert torch.equal(model.attention, model.body(x).softmax(-1))
        assert fast.plans[0].call.replays > 0
        model.log.clear()
        with pytest.raises(RunsEagerly, match="mean is no tensor"):
            fast(x)


class _OnLinear(nn.Module):
    """Leaves its maps on linear layers, which are otherwise looked over in a short way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        for layer in self.layers:
            layer.map = None  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            weights = x.softmax(-1)
            layer.map = weights  # type: ignore[assignment]
            x = layer(x) * weights
        return x


def test_what_calls_leave_on_linear_layers_is_left_by_replays() -> None:
    model, x = _OnLinear().eval(), torch.randn(4, 8)
    fast = graphed.graph_inference(model, (x,), {}, model, executor=TapeExecutor())
    assert [layer.map for layer in model.layers] == [None, None]
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(4, 8)
            found = [fast(x), *(layer.map for layer in model.layers)]
            torch.testing.assert_close(found, [model(x), *(layer.map for layer in model.layers)])
    assert fast.replays == 3, fast.misses


class _Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.map = nn.Linear(8, 1 << 16), None

    def forward(self, x: Tensor) -> Tensor:
        self.map = self.body(x).square()  # type: ignore[assignment]
        return self.map.mean()  # type: ignore[union-attr]


@pytest.mark.parametrize(("room", "name", "make"), [(training, "counts", training.graph_training),
                                                    (graphed, "holders", graphed.graph_inference)])  # fmt: skip
def test_a_note_is_not_counted_among_the_holders_of_a_result(monkeypatch: Any, room: Any, name: str, make: Any) -> None:
    """It is let go of when the recording is done, and would have hidden who keeps one later (H200)."""
    model, x = _Mapped(), torch.randn(4, 8)
    model(x)
    counted, count = [], getattr(room, name)

    def looked(outputs: list[Tensor]) -> Any:
        places = {output.untyped_storage()._cdata for output in outputs}
        assert isinstance(model.map, Tensor)
        counted.append(model.map.untyped_storage()._cdata in places)
        return count(outputs)

    monkeypatch.setattr(room, name, looked)
    make(model, (x,), {}, model, executor=TapeExecutor())
    assert counted
    assert not any(counted[-2:] if room is training else counted)  # training counts gradients first
