"""Code that asks for more than values is answered as eagerly, or runs as itself: recorded, rewritten, past guards."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

import adversarial_queries
import compare
from adversarial import Case, Lambda
from recorder import TapeExecutor
from test_search_adversarial import _kept_if_right  # noqa: F401  (a fixture: whatever is right is kept)
from torch import nn

import ridgeline as rl
from ridgeline.engine.drop_in import Optimized, Plan, state_of
from ridgeline.engine.replay.compiled import shortcut
from ridgeline.engine.replay.inference import graph_inference
from ridgeline.engine.replay.training import graph_training
from ridgeline.errors import NotGraphable
from ridgeline.optimizer.rewrites import recommended
from ridgeline.optimizer.search.candidate import Candidate
from ridgeline.optimizer.search.facts import Proposal
from ridgeline.optimizer.search.order import Stages

CPU = torch.device("cpu")
X = torch.randn(4, 8)
REWRITES = recommended("inference", "none", "cpu")
KINDS = (
    Candidate(name="graph", graphed=True),
    Candidate(name="rewrites", rewrites=REWRITES),
    Candidate(name="straight", rewrites=REWRITES, straight=True),
)
pytestmark = pytest.mark.filterwarnings("ignore::ridgeline.engine.drop_in.RunsEagerly")


@pytest.fixture(autouse=True)
def _as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(adversarial_queries, "FLAG", tmp_path / "flag")
    adversarial_queries.reset()
    yield
    adversarial_queries.reset()


@pytest.mark.parametrize("case", adversarial_queries.QUERY_CASES, ids=lambda case: case.name)
def test_a_doubt_is_answered_as_it_is_eagerly_or_refused(case: Case) -> None:
    compare.check(case, CPU, TapeExecutor)


def _inference() -> Any:
    return torch.inference_mode()


AROUND: tuple[tuple[str, Callable[..., Any], Callable[[], Any]], ...] = (
    ("gradients", lambda m, x: m.inner(x).detach() * (2.0 if torch.is_grad_enabled() else 3.0), torch.enable_grad),
    ("a result's", lambda m, x: m.inner(x).detach() * (2.0 if m.inner(x).requires_grad else 3.0), torch.enable_grad),
    ("inference", lambda m, x: m.inner(x) * (2.0 if torch.is_inference_mode_enabled() else 3.0), _inference),
)


@pytest.mark.parametrize("candidate", KINDS, ids=lambda candidate: candidate.name)
@pytest.mark.parametrize(("name", "forward", "around"), AROUND, ids=[name for name, *_ in AROUND])
def test_what_code_asks_of_the_state_around_it_holds_for_every_kind_of_plan(
    name: str, forward: Any, around: Any, candidate: Candidate, monkeypatch: Any
) -> None:
    monkeypatch.setattr(Stages, "proposals", lambda self, search: iter([Proposal(candidate, 0.1)]))
    model = Lambda(forward)
    fast = rl.optimize(model, (X,), budget_s=30, use_cache=False)
    assert fast.receipt.winner == candidate.name and fast.receipt.asked
    with torch.no_grad():
        torch.testing.assert_close(fast(X), model(X))
        assert not state_of(fast).fallbacks
    with around():
        torch.testing.assert_close(fast(X), model(X))
    assert any("asks for that" in reason for reason in state_of(fast).fallbacks)


@pytest.mark.parametrize("candidate", KINDS[1:], ids=lambda candidate: candidate.name)
def test_a_name_that_comes_later_is_noticed_behind_guards_that_do_not(candidate: Candidate, monkeypatch: Any) -> None:
    """PyTorch's own guards hold what a module has, and not what it has not."""
    monkeypatch.setattr(Stages, "proposals", lambda self, search: iter([Proposal(candidate, 0.1)]))
    model = Lambda(lambda m, x: m.inner(x) * (2.0 if hasattr(adversarial_queries.SETTINGS, "late") else 3.0))
    with torch.no_grad():
        fast = rl.optimize(model, (X,), budget_s=30, use_cache=False)
        assert fast.receipt.winner == candidate.name
        torch.testing.assert_close(fast(X), model(X))
        adversarial_queries.SETTINGS.late = 1.0
        torch.testing.assert_close(fast(X), model(X))
    assert any("late" in reason for reason in state_of(fast).fallbacks)


def test_what_code_asked_is_remembered_with_the_search(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    receipt = rl.optimize(Lambda(AROUND[0][1]), (X,), budget_s=1, use_cache=False).receipt
    assert receipt.asked == ("gradients",)
    assert type(receipt).from_dict(receipt.to_dict()).asked == ("gradients",)
    assert rl.optimize(nn.Linear(8, 8), (X,), budget_s=1, use_cache=False).receipt.asked == ()


def test_code_of_pytorchs_own_may_ask() -> None:
    """Its layers look for gradients to choose between two ways to the same numbers."""
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 4, 8)
    with torch.no_grad():
        recording = graph_inference(model, (x,), {}, model, executor=TapeExecutor())
    fast = Optimized(model, [Plan(recording.signature, recording)])
    torch.testing.assert_close(fast(x), model(x))
    assert not fast.fallbacks


def test_a_value_that_decides_is_not_taken_for_granted_past_the_guards() -> None:
    """One branch compiles to nothing, so that the call is one graph: the question itself."""
    model = Lambda(lambda m, x: m.inner(x) if m.inner.bias.sum() > 0 else x)
    with torch.no_grad():
        model.inner.bias.fill_(-1.0)
        compiled = torch.compile(model, backend="eager")
        with pytest.raises(NotGraphable, match="waits for a value"):
            shortcut(compiled, (X,), {}, model)


def test_training_that_asks_what_an_input_came_from_is_refused() -> None:
    model = Lambda(lambda m, x: m.inner(x) * (2.0 if x._base is None else 3.0))
    with pytest.raises(NotGraphable, match="came from"):
        graph_training(model, (X.clone(),), {}, model, executor=TapeExecutor())
    plain = Lambda(lambda m, x: m.inner(x) * (2.0 if x.requires_grad else 3.0))
    graph_training(plain, (X.clone(),), {}, plain, executor=TapeExecutor())


def test_a_proxy_that_a_model_holds_is_left_alone_by_a_search() -> None:
    model = adversarial_queries.Weakly(adversarial_queries.weakref.proxy)
    held = model.thing
    with contextlib.suppress(ReferenceError):
        rl.optimize(model, (X,), budget_s=1, use_cache=False)
    assert type(model.thing) is type(held) and model.thing is held
