"""Behavior that hangs on something far away: noticed or refused, on the CPU with a stand-in for CUDA graphs."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

import adversarial_backward
import adversarial_distant_state
import compare
from adversarial import Case, Lambda
from recorder import TapeExecutor
from torch import nn

import ridgeline as rl
from ridgeline.cli.source import _unpacked
from ridgeline.engine.drop_in import Optimized, Plan, state_of
from ridgeline.engine.example_inputs import Inputs
from ridgeline.engine.replay.inference import graph_inference
from ridgeline.engine.signature import Signature
from ridgeline.errors import InputError, OptimizeError
from ridgeline.optimizer import memo as cache
from ridgeline.optimizer.backend import compiled

CPU = torch.device("cpu")
AT = SimpleNamespace(device=CPU, executor=TapeExecutor, exact=True)
pytestmark = pytest.mark.filterwarnings("ignore::ridgeline.engine.drop_in.RunsEagerly", "ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def _as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(adversarial_distant_state, "FILE", tmp_path / "scale")
    logging.getLogger("adversarial").addHandler(logging.NullHandler())
    adversarial_distant_state.reset()
    adversarial_backward.reset()
    yield
    adversarial_distant_state.reset()


@pytest.mark.parametrize("case", adversarial_distant_state.CASES, ids=lambda case: case.name)
def test_a_hazard_gives_what_it_gives_eagerly_or_is_refused(case: Case) -> None:
    compare.check(case, CPU, TapeExecutor)


@pytest.mark.parametrize("case", adversarial_backward.BACKWARD_CASES, ids=lambda case: case.name)
def test_a_backward_case_leaves_what_it_leaves_eagerly_or_is_refused(case: adversarial_backward.Trial) -> None:
    adversarial_backward.check(case, AT)


# --- a result beside its model --------------------------------------------------------------------------------------

X = torch.randn(4, 8)


def _fast(model: Any) -> Any:
    recording = graph_inference(model, (X,), {}, model, executor=TapeExecutor())
    return Optimized(model, [Plan(recording.signature, recording)])


class Tripled(Lambda):
    """What a function gives, three times."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return 3 * super().forward(*args, **kwargs)


def test_a_model_of_another_class_is_noticed() -> None:
    model = Lambda(lambda m, x: m.inner(x))
    with torch.no_grad():
        fast = _fast(model)
        before = fast(X)
        model.__class__ = Tripled
        torch.testing.assert_close(fast(X), 3 * before)
    assert any("is a Tripled now" in reason for reason in fast.fallbacks)


class Registered(nn.Module):
    """Of every class once."""

    known: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls) -> None:
        assert cls.__name__ not in Registered.known, "is registered twice"
        Registered.known[cls.__name__] = cls


class Net(Registered):
    """Has names of its own that a result has too, a slot, and a way to make another."""

    __slots__ = ("gain",)

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner, self.gain = nn.Linear(8, width), 2.0
        self.register_buffer("plans", torch.ones(3))
        self.original = 7

    def add(self, y: Any) -> Any:
        return y + 1

    @property
    def fallbacks(self) -> str:
        return "own"

    @classmethod
    def wide(cls) -> Any:
        return cls(16)

    def forward(self, x: Any) -> Any:
        return self.add(self.inner(x)) * self.gain

    def twice(self, x: Any) -> Any:
        return self.add(self(self(x)))


def test_a_result_has_the_names_the_slots_and_the_class_of_its_model() -> None:
    model = Net()
    fast = _fast(model)
    with torch.no_grad():
        assert torch.equal(fast(X), model(X)) and torch.equal(fast.twice(X), model.twice(X))
        fast.gain = 3.0
        assert model.gain == 3.0 and torch.equal(fast(X), model(X))
    assert fast.original == 7 and fast.fallbacks == "own" and fast.add(1) == 2 and fast.plans is model.plans
    fast.original = 8
    assert model.original == 8 and Registered.known["Net"] is Net
    assert type(type(fast)(4)) is Net and type(fast.wide()) is Net and fast.wide().inner.out_features == 16
    assert type(fast._replicate_for_data_parallel()) is Net
    again = rl.optimize(fast, (X,), budget_s=0.2, use_cache=False)
    assert state_of(again).model is model and state_of(again).receipt.winner


def test_what_compiles_a_result_finds_the_model_in_one_graph() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    typed: dict[str, Any] = {"__name__": "no_such_module", "nn": nn, "torch": torch}
    exec(  # a model that was typed, and whose module nothing can import
        "class Typed(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.inner = nn.Linear(8, 8)\n"
        "    def forward(self, x):\n        return torch.tanh(self.inner(x))\n", typed)  # fmt: skip
    for model in (nn.Sequential(nn.Linear(8, 8), nn.ReLU()), typed["Typed"]()):
        fast = _fast(model)
        compiled = torch.compile(fast, backend=backend, fullgraph=True)
        with torch.no_grad():
            torch.testing.assert_close(compiled(X), model(X))
    inside = torch.compile(nn.Sequential(_fast(nn.Linear(8, 8)), nn.ReLU()), backend=backend, fullgraph=True)
    inside(X)
    assert len(graphs) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(_fast(nn.Linear(8, 8)))
    assert scripted(X).shape == (4, 8)


def test_a_nested_tensor_given_to_a_captured_model_runs_as_the_model() -> None:
    fast = _fast(nn.Linear(8, 8))
    with torch.no_grad():
        found = fast(torch.nested.nested_tensor([X, X[:2]]))
        assert all(torch.equal(ours, fast(rows)) for ours, rows in zip(found.unbind(), (X, X[:2])))


class Base:
    """Settings that are a class."""

    scale = 2.0


class Settings(Base):
    """Settings that inherit them."""


class Set(nn.Module):
    """Reads settings of a class, an object and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.settings, self.made = nn.Linear(8, 8), Settings, Settings()

    def forward(self, x: Any) -> Any:
        factor = 2 if self.inner.training else 1
        return self.inner(x) * self.settings.scale * self.made.scale * factor * _static.factor


def _static() -> None:
    """A function that keeps a number."""


_static.factor = 1.0  # type: ignore[attr-defined]


def test_settings_of_classes_functions_and_layers_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Set().eval()
    changes = (
        lambda: monkeypatch.setattr(Base, "scale", 3.0),
        lambda: monkeypatch.setattr(Settings, "scale", 5.0, False),
        lambda: monkeypatch.setattr(_static, "factor", 2.0),
        model.inner.train,
    )
    for num, change in enumerate(changes):
        fast = _fast(model)
        with torch.no_grad():
            assert torch.equal(fast(X), model(X)) and not fast.fallbacks
            change()
            assert torch.equal(fast(X), model(X)) and fast.fallbacks, f"change {num} was not noticed"


def test_methods_replaced_behind_a_compiled_plan_are_noticed() -> None:
    model = adversarial_distant_state.Methodical()
    with torch.no_grad():
        fast = Optimized(model, [Plan(Signature.of((X,), {}, model, grad=False), compiled(model, compiler="none"))])
        for call in range(1, 4):
            adversarial_distant_state._patch_method(model, call)
            torch.testing.assert_close(fast(X), model(X))
    assert list(fast.fallbacks) == ["Methodical.shape was replaced"]


# --- questions ------------------------------------------------------------------------------------------------------

QUESTIONS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"budget_s": "10"}, "budget_s"), ({"budget_s": None}, "budget_s"), ({"memory_limit": -5}, "memory_limit"),
    ({"memory_limit": [1]}, "memory_limit"), ({"kwargs": [1]}, "kwargs"), ({"kwargs": {1: 2}}, "kwargs"),
    ({"mode": None}, "no mode"), ({"mode": "train", "loss": "mse"}, "loss is a str"), ({"say": "x"}, "say is a str"),
    ({"mode": "train", "loss": lambda y: y}, "one number"), ({"mode": "train", "loss": lambda y: 1.0}, "a float"),
    ({"mode": "train", "loss": lambda y: y.detach().sum()}, "requires gradients"),
    ({"mode": "train", "optimizer": torch.optim.SGD}, "the class SGD"),
    ({"mode": "train", "optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)}, "another model"),
)  # fmt: skip


@pytest.mark.parametrize(("asked", "told"), QUESTIONS, ids=[f"{i} {told}" for i, (_, told) in enumerate(QUESTIONS)])
def test_a_question_that_cannot_be_answered_is_told(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(OptimizeError, match=told):
        rl.optimize(nn.Linear(8, 8), (X,), **{"budget_s": 1, "use_cache": False, **asked})


def test_a_loss_that_fails_is_told_in_a_line_with_its_cause() -> None:
    with pytest.raises(OptimizeError, match="the loss fails on these inputs: ZeroDivisionError") as told:
        rl.optimize(nn.Linear(8, 8), (X,), mode="train", loss=lambda y: 1 / 0, budget_s=1, use_cache=False)
    assert isinstance(told.value.__cause__, ZeroDivisionError)


def test_parts_and_options_that_are_none_are_told() -> None:
    with pytest.raises(OptimizeError, match="list of names"):
        rl.apply(nn.Linear(8, 8), "norm")
    with pytest.raises(OptimizeError, match="not NoneType"):
        rl.revert(None)
    with pytest.raises(Exception, match="no option 'rewrite'"):
        torch.compile(nn.Linear(8, 8), backend="ridgeline", options={"compiler": "none", "rewrite": []})(X)


def test_losses_and_functions_held_are_told_apart_by_what_they_compute() -> None:
    assert cache.described(lambda y: y.sum()) != cache.described(lambda y: y.mean())
    first, second = (Lambda(function) for function in (lambda m, x: x.exp(), lambda m, x: x.log()))
    assert cache.key_of(first, Inputs((X,), {}), {}) != cache.key_of(second, Inputs((X,), {}), {})


def test_a_script_may_return_a_model_with_its_arguments_alone() -> None:
    model = nn.Linear(8, 8)
    assert _unpacked(Path("s.py"), "f", (model, (X,))) == (model, (X,), {})
    assert _unpacked(Path("s.py"), "f", model) == (model, (), {})
    with pytest.raises(InputError, match="a tuple of 4"):
        _unpacked(Path("s.py"), "f", (model, (X,), {}, 1))
