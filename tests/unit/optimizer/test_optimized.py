"""The optimized model as a drop-in: the same object to everyone who looks, the original wherever no plan fits."""

from __future__ import annotations

import copy
import io
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

from recorder import TapeExecutor
from torch import Tensor, nn

from ridgeline.engine.drop_in import Optimized, Plan, RunsEagerly, state_of
from ridgeline.engine.replay.inference import graph_inference
from ridgeline.engine.signature import Signature
from ridgeline.errors import OptimizeError


class Net(nn.Module):
    """A model with a part called ``model``, as language models have."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(4, 4)
        self.config = {"width": 4}

    def forward(self, x: Any) -> Any:
        return self.model(x)

    def twice(self, x: Any) -> Any:
        return self(self(x))


X = torch.randn(3, 4)


def _optimized(model: Any = None) -> tuple[Any, Any]:
    model = Net().eval() if model is None else model
    graphed = graph_inference(model, (X,), {}, model, executor=TapeExecutor())
    return Optimized(model, [Plan(graphed.signature, graphed)]), graphed


def test_it_is_an_instance_of_the_model_with_the_models_own_attributes() -> None:
    fast, _ = _optimized()
    assert isinstance(fast, Net) and isinstance(fast, Optimized)
    assert type(fast).__name__ == "Net" and str(type(fast)) == str(Net)
    assert fast.model is fast.original.model
    assert fast.config is fast.original.config
    assert list(fast.state_dict()) == list(fast.original.state_dict())
    assert all(a is b for a, b in zip(fast.parameters(), fast.original.parameters()))
    fast.extra = 1
    assert fast.original.extra == 1
    fast.original.other = nn.Linear(1, 1)
    assert fast.other is fast.original.other
    assert repr(fast) == repr(fast.original)


def test_methods_of_the_model_call_the_optimized_one() -> None:
    fast, graphed = _optimized()
    with torch.no_grad():
        assert torch.equal(fast.twice(X), fast.original.twice(X))
    assert graphed.replays == 2


def test_as_a_part_of_another_module_it_adds_no_names() -> None:
    fast, graphed = _optimized()
    parent = nn.Sequential(fast)
    assert list(parent.state_dict()) == ["0.model.weight", "0.model.bias"]
    assert dict(parent.named_modules())["0.model"] is fast.original.model
    with torch.no_grad():
        assert torch.equal(parent(X), fast.original(X))
    parent.load_state_dict({name: torch.ones_like(value) for name, value in parent.state_dict().items()})
    with torch.no_grad():
        assert torch.equal(parent(X), fast.original(X))
    assert graphed.replays == 2
    assert not parent.train().training or fast.training
    parent.double()
    assert fast.original.model.weight.dtype is torch.float64


def test_without_gradients_wanted_by_an_input_results_carry_none() -> None:
    fast, graphed = _optimized()
    assert not fast(X).requires_grad
    assert graphed.replays == 1
    with pytest.warns(RunsEagerly, match="an input requires gradients"):
        assert fast(X.clone().requires_grad_()).requires_grad
    assert graphed.replays == 1


def test_another_call_runs_the_model_and_says_so_once() -> None:
    fast, graphed = _optimized()
    with pytest.warns(RunsEagerly, match=r"args\[0\] is a tensor \(2, 4\)"):
        assert torch.equal(fast(X[:2]), fast.original(X[:2]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast(X[:2])
    assert list(fast.fallbacks.values()) == [2]
    assert graphed.replays == 0


def test_calls_that_differ_every_time_are_told_of_a_few_times_only() -> None:
    fast, _ = _optimized()
    with warnings.catch_warnings(record=True) as said, torch.no_grad():
        warnings.simplefilter("always")
        for rows in range(4, 40):
            assert torch.equal(fast(torch.ones(rows, 4)), fast.original(torch.ones(rows, 4)))
    assert len(said) == 8
    assert fast.fallbacks["other calls than those that were verified"] == 28


def test_inference_mode_and_no_grad_share_a_plan() -> None:
    fast, graphed = _optimized()
    with torch.inference_mode():
        assert torch.equal(fast(X), fast.original(X))
    with torch.no_grad():
        fast(X)
    assert graphed.replays == 2


def test_a_plan_that_is_not_captured_sees_hooks_that_come_later() -> None:
    model = Net().eval()
    plan = Plan(Signature.of((X,), {}, model, grad=False), lambda x: model.model(x))
    fast = Optimized(model, [plan])
    with torch.no_grad():
        fast(X)
        fast.model.register_forward_hook(lambda module, args, output: output * 2)
        model.counter = 1  # an attribute is the compiler's business
        with pytest.warns(RunsEagerly, match="hook"):
            assert torch.equal(fast(X), model(X))


def test_with_nothing_better_it_is_the_model() -> None:
    model = Net()
    fast = Optimized(model, [Plan(Signature.of((X,), {}, model, grad=False), model)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(fast(X), model(X))
        assert fast(X).requires_grad


def test_copies_and_saved_files_are_of_the_model() -> None:
    fast, graphed = _optimized()
    other = copy.deepcopy(fast)
    assert isinstance(other, Net) and other.original.model.weight is not fast.original.model.weight
    with torch.no_grad():
        other.original.model.weight.zero_()
        assert torch.equal(other(X), other.original(X))
        assert torch.equal(fast(X), fast.original(X))
    assert graphed.replays == 1
    file = io.BytesIO()
    torch.save(fast.state_dict(), file)
    file.seek(0)
    Net().load_state_dict(torch.load(file))


def test_functions_can_be_optimized_too() -> None:
    weight = torch.randn(4, 4)

    def function(x: Any) -> Any:
        return x @ weight

    fast, graphed = _optimized(function)
    with torch.no_grad():
        assert torch.equal(fast(X), function(X))
        weight.mul_(2)
        assert torch.equal(fast(X), function(X))
    assert graphed.replays == 2
    assert fast.__name__ == "function"


def test_a_scripted_module_can_be_handed_out_too() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.jit.script(nn.Linear(4, 4))
    fast = Optimized(model)
    assert torch.equal(fast(X), model(X))
    assert list(fast.state_dict()) == ["weight", "bias"]


def test_threads_that_call_at_once_get_their_own_results() -> None:
    fast, graphed = _optimized()
    inputs = [torch.randn(3, 4) for _ in range(4)]
    wrong: list[int] = []

    def run(i: int) -> None:
        with torch.no_grad():
            wrong.extend(i for _ in range(25) if not torch.equal(fast(inputs[i]), fast.original(inputs[i])))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert graphed.replays == 100


def test_a_step_needs_an_optimizer_and_a_loss() -> None:
    model = Net()
    with pytest.raises(OptimizeError, match="needs an optimizer"):
        Optimized(model, mode="train").train_step(X)
    fast = Optimized(model, mode="train", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(OptimizeError, match="give loss="):
        fast.train_step(X)
    with pytest.raises(OptimizeError, match="'inference' or 'train'"):
        Optimized(model, mode="fast")


def test_compiling_it_compiles_the_model() -> None:
    fast, graphed = _optimized()
    compiled = torch.compile(fast, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(X), fast.original(X))
    assert graphed.replays == 0


def _behind_the_compiler() -> tuple[Any, Any, list[int]]:
    """A model whose plan is torch.compile with a backend that counts its runs."""
    model, ran = Net(), []

    def counting(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            ran.append(1)
            return graph.forward(*args)

        return run

    with torch.no_grad():
        plan = Plan(Signature.of((X,), {}, model, grad=False), torch.compile(model, backend=counting), "torch.compile")
        return model, Optimized(model, [plan]), ran


def test_torch_compile_is_taken_at_a_glance_for_calls_that_were_verified_and_for_no_others() -> None:
    model, fast, ran = _behind_the_compiler()
    with torch.no_grad():
        torch.testing.assert_close(fast(X), model(X))
        assert len(ran) == 1 and not fast.fallbacks
        for other in (torch.randn(5, 4), torch.randn(4, 3).t(), X.double().float()[:, :]):
            seen, same = len(ran), other.shape == X.shape and other.stride() == X.stride()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.testing.assert_close(fast(other), model(other))
            assert len(ran) == seen + same
    assert not fast(X).requires_grad and len(ran) >= 3, "with gradients on, by the longer way"


def test_torch_compile_taken_at_a_glance_sees_hooks_that_come_later() -> None:
    model, fast, ran = _behind_the_compiler()
    with torch.no_grad():
        fast(X)
        model.model.register_forward_hook(lambda module, args, output: output + 1)
        with pytest.warns(RunsEagerly):
            torch.testing.assert_close(fast(X), model(X))
    assert len(ran) == 1


class OptimizedModule(nn.Module):
    """In the place of what torch.compile returns, known by its name: counts its calls."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = model, 0

    def forward(self, x: Tensor, *, labels: Tensor | None = None, scale: Any = 1) -> Tensor:
        self.calls += 1
        found: Tensor = self.inner(x) * scale
        return found


@pytest.mark.parametrize("mode", ["train", "inference"])
def test_a_plan_of_torch_compile_is_told_at_a_glance_and_by_the_same_rules(mode: str, monkeypatch: Any) -> None:
    """The longer look takes 35 µs behind compiled code, this one a third: steps that the host holds up feel it."""
    model, x, labels = nn.Sequential(nn.Linear(4, 4)).train(mode == "train"), torch.randn(2, 4), torch.randn(2)
    call, grad = OptimizedModule(model), mode == "train"
    with torch.set_grad_enabled(grad):
        signature = Signature.of((x,), {"labels": labels, "scale": 1}, model, grad=grad)
        fast = Optimized(model, [Plan(signature, call, "torch.compile")], mode=mode)
        monkeypatch.setattr(type(state_of(fast)), "run", lambda self, args, kwargs: "a longer look")
        assert isinstance(fast(x, labels=labels, scale=1), Tensor) and call.calls == 1
        others: dict[str, Callable[[], Any]] = {
            "another shape": lambda: fast(x[:1], labels=labels, scale=1),
            "another type": lambda: fast(x.double(), labels=labels, scale=1),
            "other strides": lambda: fast(torch.randn(4, 2).t(), labels=labels, scale=1),
            "another value": lambda: fast(x, labels=labels, scale=2),
            "no tensor": lambda: fast(x, labels=None, scale=1),
            "another name": lambda: fast(x, scale=1),
            "a parameter": lambda: fast(nn.Parameter(x), labels=labels, scale=1),
        }
        if grad:
            asking = x.clone().requires_grad_()
            others["an input that asks for gradients"] = lambda: fast(asking, labels=labels, scale=1)
        for name, other in others.items():
            assert other() == "a longer look", name
        with torch.autocast("cpu", torch.bfloat16):
            assert fast(x, labels=labels, scale=1) == "a longer look"
        with torch.set_grad_enabled(not grad):
            assert fast(x, labels=labels, scale=1) == "a longer look"
        model.train(mode != "train")
        assert fast(x, labels=labels, scale=1) == "a longer look"
        model.train(mode == "train")
        assert isinstance(fast(x, labels=labels, scale=1), Tensor) and call.calls == 2
        model[0].register_forward_hook(lambda *given: None)
        assert fast(x, labels=labels, scale=1) == "a longer look"
