"""Training loops with Python in the backward, odd inputs and odd functions: a recording leaves what eager leaves, or is
refused with a reason."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from adversarial import Lambda
from compare import alike, seed
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils import parametrize

from ridgeline.engine.drop_in import Optimized, Plan
from ridgeline.engine.replay.inference import graph_training
from ridgeline.errors import NotGraphable

STEPS = 4
Step = Callable[[Any, Any, Tensor, int], Any]
"""What is done with a call, the model itself, an input and the number of the step; returns what is to be compared."""


@dataclass(frozen=True)
class Trial:
    name: str
    model: Callable[[], nn.Module]
    step: Step
    refused: str = ""
    missed: str = ""
    raises: str = ""
    """A pattern of the errors that both, or the recording alone, may raise."""
    given: Callable[[Any, Tensor], tuple[Any, ...]] = lambda model, x: (x,)
    exact: bool = True


def _of(function: Callable[..., Any]) -> Callable[[], nn.Module]:
    return lambda: Lambda(function)


def plain(call: Any, model: Any, x: Tensor, number: int) -> Any:
    model.zero_grad()
    value = call(x)
    loss = (value[0] if isinstance(value, tuple) else value).square().mean()
    loss.backward()
    return loss.detach()


# --- Python that runs in the backward -------------------------------------------------------------------------------

LAMBDA = 1.0
SEEN: list[Any] = []


class Reversed(torch.autograd.Function):
    """Turns gradients around, by as much as a global says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return -LAMBDA * grads[0]


class Counting(torch.autograd.Function):
    """Counts its backward passes in Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        SEEN.append(1)
        return grads[0]


class Speaking(torch.autograd.Function):
    """Prints in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        print(end="")
        return grads[0]


class Asking(torch.autograd.Function):
    """Looks which gradients are wanted, and hands one out that is no number's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, w)
        ctx.scale = scale
        mask = x > 0
        ctx.mark_non_differentiable(mask)
        ctx.set_materialize_grads(False)
        return x * w * scale, mask

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, w = ctx.saved_tensors
        given = grads[0]
        if given is None:
            return None, None, None
        return (given * w * ctx.scale if ctx.needs_input_grad[0] else None,
                given * x * ctx.scale if ctx.needs_input_grad[1] else None, None)  # fmt: skip


def _next_lambda(call: Any, model: Any, x: Tensor, number: int) -> Any:
    global LAMBDA
    LAMBDA = 1.0 + number
    return plain(call, model, x, number), model.inner.weight.grad.clone()


class Remembers(nn.Module):
    """Keeps the gradient of a layer's result, as those who ask what a network looks at do."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.inner, self.end, self.where = nn.Linear(8, 8), nn.Linear(8, 4), where
        self.gradient: Tensor | None = None
        self.kept: list[Tensor] = []
        self.scale = 1.0

    def keep(self, grad: Tensor) -> Any:
        if self.where == "attribute":
            self.gradient = grad
        elif self.where == "list":
            self.kept.append(grad)
        return grad * self.scale if self.where == "scale" else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x).relu()
        hidden.register_hook(self.keep)
        if self.where == "retained":
            hidden.retain_grad()
            self.gradient = hidden
        return self.end(hidden)


def _looked_at(call: Any, model: Any, x: Tensor, number: int) -> Any:
    model.scale = 1.0 + number // 2
    found = plain(call, model, x, number)
    kept = model.gradient
    return found, model.inner.weight.grad.clone(), None if kept is None else kept.detach().clone(), len(model.kept)


# --- around a step --------------------------------------------------------------------------------------------------


def _anomalous(call: Any, model: Any, x: Tensor, number: int) -> Any:
    """A root of nothing has no slope, which anomaly detection says."""
    model.zero_grad()
    with torch.autograd.set_detect_anomaly(number > 1):
        loss = call(x * 0).sum()
        loss.backward()
    return loss.detach()


def _packed(call: Any, model: Any, x: Tensor, number: int) -> Any:
    """Somebody packs what the backward will need."""
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor * 2 if tensor.is_floating_point() and number > 1 and tensor.shape == (6, 8) else tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = plain(call, model, x, number)
    return found, model.inner.weight.grad.clone()


def _twice_given(call: Any, model: Any, x: Tensor, number: int) -> Any:
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = x if number % 2 else torch.ones_like(x).requires_grad_()
    loss = call(x, y).square().mean()
    loss.backward()
    return loss.detach(), x.grad, y.grad


def _own_weight_given(call: Any, model: Any, x: Tensor, number: int) -> Any:
    model.zero_grad()
    loss = call(model.inner.weight if number % 2 else model.inner.weight.detach()).square().mean()
    loss.backward()
    return loss.detach(), model.inner.weight.grad.clone()


def _grad_of_result(call: Any, model: Any, x: Tensor, number: int) -> Any:
    model.zero_grad()
    x = x.clone().requires_grad_(number % 2 == 0)
    y = call(x * 1)
    y.retain_grad()
    seen: list[Tensor] = []
    y.register_hook(lambda grad: seen.append(grad) or grad * 3)
    y.square().mean().backward()
    return y.detach().clone(), y.grad, seen, x.grad, model.inner.weight.grad.clone()


def _lbfgs(call: Any, model: Any, x: Tensor, number: int) -> Any:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    seen: list[Tensor] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = call(x).square().mean()
        loss.backward()
        seen.append(loss.detach())
        return loss

    optimizer.step(closure)
    return seen, [p.detach().clone() for p in model.parameters()]


def _in_two_threads(call: Any, model: Any, x: Tensor, number: int) -> Any:
    import threading

    model.zero_grad()
    loss = call(x).square().mean()
    worker = threading.Thread(target=loss.backward)
    worker.start()
    worker.join()
    return loss.detach(), model.inner.weight.grad.clone()


def _several_losses(call: Any, model: Any, x: Tensor, number: int) -> Any:
    model.zero_grad()
    a, b = call(x)
    a.square().mean().backward(retain_graph=True)
    first = model.inner.weight.grad.clone()
    b.mean().backward()
    return first, model.inner.weight.grad.clone()


def _frozen_on_the_way(call: Any, model: Any, x: Tensor, number: int) -> Any:
    model.inner.bias.requires_grad_(number % 2 == 0)
    found = plain(call, model, x, number)
    return found, None if model.inner.bias.grad is None else model.inner.bias.grad.clone()


def _swapped(call: Any, model: Any, x: Tensor, number: int) -> Any:
    optimizer: Any = (torch.optim.SGD if number % 2 else torch.optim.Adam)(model.parameters(), lr=0.01)
    found = plain(call, model, x, number)
    for group in optimizer.param_groups:
        group["lr"] = 0.1 / (1 + number)
    optimizer.step()
    return found, model.inner.weight.detach().clone()


def _hooked_module(call: Any, model: Any, x: Tensor, number: int) -> Any:
    hook = None
    if number > 1:
        hook = model.inner.register_full_backward_hook(lambda module, given, out: tuple(g * 2 for g in given))
    found = plain(call, model, x.requires_grad_(), number)
    if hook is not None:
        hook.remove()
    return found, x.grad, model.inner.weight.grad.clone()


def _graph_between(call: Any, model: Any, x: Tensor, number: int) -> Any:
    """Gradients of one call through another: the second reads what the first made."""
    model.zero_grad()
    first = call(x)
    second = call(first)
    (first.square().mean() + second.square().mean()).backward()
    return first.detach().clone(), second.detach().clone(), model.inner.weight.grad.clone()


def _cast_outside(call: Any, model: Any, x: Tensor, number: int) -> Any:
    with torch.autocast(x.device.type, torch.bfloat16, enabled=number % 2 == 1):
        return plain(call, model, x, number), model.inner.weight.grad.clone()


def _without_gradients(call: Any, model: Any, x: Tensor, number: int) -> Any:
    with torch.no_grad():
        before = call(x).clone()
    with torch.inference_mode():
        inside = call(x).clone()
    return before, torch.as_tensor(inside).clone(), plain(call, model, x, number)


def _hidden_gradient(call: Any, model: Any, x: Tensor, number: int) -> Any:
    model.hidden[0].weight.grad = None
    return plain(call, model, x, number), model.hidden[0].weight.grad.clone()


class Hiding(nn.Module):
    """Trains a layer that no list of parameters finds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.hidden = nn.Linear(8, 8), (nn.Linear(8, 4),)

    def _apply(self, function: Any, recurse: bool = True) -> Any:
        self.hidden[0]._apply(function)
        return super()._apply(function, recurse)

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden[0](self.inner(x).relu())


class Physics(nn.Module):
    """Differentiates itself by its input, inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.inner(x).tanh().sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return slope + energy


class Clipped(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.clamp(-0.1, 0.1)


def _parametrized() -> nn.Module:
    model = Lambda(lambda m, x: m.inner(x))
    parametrize.register_parametrization(model.inner, "weight", Clipped())
    return model


def _cached(call: Any, model: Any, x: Tensor, number: int) -> Any:
    model.zero_grad()
    with parametrize.cached():
        loss = call(x).square().mean() + call(x + 1).square().mean()
        loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


def _written_input(call: Any, model: Any, x: Tensor, number: int) -> Any:
    return plain(call, model, x, number), x.clone()


def _write(m: Any, x: Tensor) -> Tensor:
    y = m.inner(x)
    x.add_(1)
    return y


def _aliased_results(m: Any, x: Tensor) -> Any:
    y = m.inner(x)
    return y, x, y.detach(), m.inner.weight, (x > 0)


def _many_results(call: Any, model: Any, x: Tensor, number: int) -> Any:
    model.zero_grad()
    y, same, fixed, weight, mask = call(x)
    assert same is x and weight is model.inner.weight
    (y.square().mean() + weight.sum()).backward()
    return y.detach().clone(), fixed.clone(), mask, model.inner.weight.grad.clone(), fixed.requires_grad


def _next_to(call: Any, model: Any, x: Tensor, number: int) -> Any:
    """A gradient that is there already, of another layout."""
    model.zero_grad()
    model.inner.weight.grad = torch.ones(8, 8, device=x.device).t() if number % 2 else None
    loss = call(x).square().mean()
    loss.backward()
    return loss.detach(), model.inner.weight.grad.clone()


def _double(call: Any, model: Any, x: Tensor, number: int) -> Any:
    model.zero_grad()
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
    (slope.norm(dim=1) - 1).square().mean().backward()
    return slope.detach(), model.inner.weight.grad.clone()


def _complex_layer() -> nn.Module:
    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8, dtype=torch.complex64)

        def forward(self, x: Tensor) -> Tensor:
            return torch.view_as_real(self.inner(torch.complex(x, x.sin()))).square().sum(-1)

    return Waves()


BACKWARD_CASES: tuple[Trial, ...] = (
    Trial("a backward that reads a global", _of(lambda m, x: Reversed.apply(m.inner(x))), _next_lambda,
          missed="LAMBDA"),
    Trial("a backward that counts", _of(lambda m, x: Counting.apply(m.inner(x))), plain, refused="SEEN"),
    Trial("a backward that prints", _of(lambda m, x: Speaking.apply(m.inner(x))), plain, refused="prints"),
    Trial("a backward that asks what is wanted", _of(lambda m, x: Asking.apply(x, m.inner(x), 2.0)), plain),
    Trial("a gradient kept by a hook inside", lambda: Remembers("attribute"), _looked_at, refused="gradient"),
    Trial("gradients collected by a hook inside", lambda: Remembers("list"), _looked_at, refused="kept"),
    Trial("gradients scaled by a hook inside", lambda: Remembers("scale"), _looked_at, missed="scale"),
    Trial("a result inside that keeps its gradient", lambda: Remembers("retained"), _looked_at, refused="gradient"),
    Trial("anomalies are looked for", _of(lambda m, x: m.inner(x).sub(m.inner(x)).sqrt()), _anomalous, missed="anomal",
          raises="nan"),
    Trial("what is saved is packed", _of(lambda m, x: m.inner(x).tanh()), _packed, missed="saved|hooks"),
    Trial("one tensor as two inputs", _of(lambda m, x, y: m.inner(x) * y), _twice_given,
          given=lambda model, x: (x.requires_grad_(), x.clone().requires_grad_()), missed="args"),
    Trial("its own weight as its input", _of(lambda m, x: m.inner(x)), _own_weight_given,
          given=lambda model, x: (torch.randn_like(model.inner.weight).requires_grad_(),), missed="args|lies"),
    Trial("a result that keeps its gradient", _of(lambda m, x: m.inner(x).tanh()), _grad_of_result,
          given=lambda model, x: (x.requires_grad_(),), missed="args"),
    Trial("L-BFGS", _of(lambda m, x: m.inner(x).tanh()), _lbfgs),
    Trial("a backward in another thread", _of(lambda m, x: m.inner(x).tanh()), _in_two_threads),
    Trial("several losses", _of(lambda m, x: (m.inner(x).tanh(), m.inner(x).exp())), _several_losses,
          missed="more than once"),
    Trial("a bias frozen on the way", _of(lambda m, x: m.inner(x).tanh()), _frozen_on_the_way, missed="require"),
    Trial("optimizers swapped", _of(lambda m, x: m.inner(x).tanh()), _swapped),
    Trial("a backward hook on a layer later", _of(lambda m, x: m.inner(x).tanh()), _hooked_module, missed="hook",
          given=lambda model, x: (x.requires_grad_(),)),
    Trial("a call on the result of another", _of(lambda m, x: m.inner(x).tanh()), _graph_between, missed="args|waits"),
    Trial("autocast now and then", _of(lambda m, x: m.inner(x).tanh()), _cast_outside, missed="autocast"),
    Trial("without gradients in between", _of(lambda m, x: m.inner(x).tanh()), _without_gradients, missed="gradients"),
    Trial("a layer that no list finds", Hiding, _hidden_gradient),
    Trial("a model that differentiates itself", Physics, plain),
    Trial("a parametrized weight, cached", _parametrized, _cached, missed="cach|waits|global"),
    Trial("writes to its input", _of(_write), _written_input, refused="modified", raises="modified"),
    Trial("results of all kinds", _of(_aliased_results), _many_results),
    Trial("a gradient of another layout", _of(lambda m, x: m.inner(x).tanh()), _next_to),
    Trial("gradients of gradients", _of(lambda m, x: m.inner(x).tanh()), _double,
          given=lambda model, x: (x.requires_grad_(),), missed="differentiated", exact=False),
    Trial("complex weights", _complex_layer, plain),
)  # fmt: skip


def outcome(case: Trial, at: Any) -> tuple[str, str]:
    """Takes the steps with a model and with its recording; what was done and said, or AssertionError."""
    seed(3)
    eager = case.model().to(at.device).train()
    model = copy.deepcopy(eager)
    reason, graphed = "", None
    try:
        given = case.given(model, _input(at, 0))
        graphed = graph_training(model, given, {}, model, executor=at.executor())
        fast = Optimized(model, [Plan(graphed.signature, graphed)], mode="train")
    except NotGraphable as error:
        reason, fast = str(error), Optimized(model, mode="train")
    for number in range(STEPS):
        found = [_taken(case, call, held, at, number) for call, held in ((eager, eager), (fast, model))]
        assert alike(found[1], found[0], exact=at.exact and case.exact), f"step {number}: what is left differs"
    if graphed is None:
        return "refused", reason
    missed = " | ".join([*fast.fallbacks, *graphed.misses])
    return ("missed", missed) if missed else ("replayed", str(graphed.replays))


def _taken(case: Trial, call: Any, model: Any, at: Any, number: int) -> Any:
    seed(900 + number)
    x = _input(at, number)
    try:
        found = case.step(call, model, x, number)
    except RuntimeError as error:
        if not case.raises or not re.search(case.raises, str(error)):
            raise
        found = "raised"
    return found, [p.detach().clone() for p in model.parameters()]


def _input(at: Any, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + number)
    return torch.randn(6, 8, generator=generator).to(at.device)


def check(case: Trial, at: Any) -> None:
    """The outcome is the expected one."""
    what, said = outcome(case, at)
    wanted = "refused" if case.refused else "missed" if case.missed else "replayed"
    assert what == wanted, f"{what}: {said}"
    assert re.search(case.refused or case.missed, said), said


__all__ = ["BACKWARD_CASES", "check", "outcome", "reset"]


def reset() -> None:
    """What cases change for everybody, as it was."""
    global LAMBDA
    LAMBDA = 1.0
    SEEN.clear()
