"""Checks of recorded training that hold on any device: each compares with the same steps taken eagerly."""

from __future__ import annotations

import contextlib
import copy
import gc
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from adversarial import Square, Tied
from compare import alike, seed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ridgeline.engine.drop_in import Optimized, Plan
from ridgeline.engine.replay.inference import graph_training
from ridgeline.engine.replay.step import GraphedUpdate
from ridgeline.engine.replay.training import renew_accumulator
from ridgeline.errors import NotGraphable, OptimizeError


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


class Lossy(nn.Module):
    """Returns a loss and what it was made from, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = _mlp()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Any]:
        logits = self.body(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits, "labels": labels, "note": "n"}


def _pair(make: Callable[[], nn.Module], at: Any) -> tuple[nn.Module, nn.Module]:
    seed(3)
    eager = make().to(at.device).train()
    return eager, copy.deepcopy(eager)


def _x(at: Any, call: int, *shape: int, requires_grad: bool = False) -> Tensor:
    seed(50 + call)
    return torch.randn(*(shape or (6, 8)), device=at.device).requires_grad_(requires_grad)


def _fast(model: nn.Module, at: Any, *args: Any, loss: Any = None, **kwargs: Any) -> Any:
    graphed = graph_training(model, args, kwargs, model, loss=loss, executor=at.executor())
    fast = Optimized(model, [Plan(graphed.signature, graphed)], mode="train")
    return fast, graphed


def _grads(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def _same(a: Any, b: Any, at: Any, what: str) -> None:
    assert alike(a, b, exact=at.exact), f"{what} differ"


def _steps(at: Any, make: Callable[[], nn.Module], *, accumulate: int = 1, set_to_none: bool = True,
           early: bool = True, num: int = 5) -> Any:  # fmt: skip
    eager, model = _pair(make, at)
    fast, graphed = _fast(model, at, _x(at, 0))
    _same(list(model.parameters()), list(eager.parameters()), at, "parameters after recording")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (eager, model)]
    for call in range(num):
        seen = []
        for m, optimizer in zip((eager, fast), optimizers):
            if early and call % accumulate == 0:
                optimizer.zero_grad(set_to_none=set_to_none)
            seed(900 + call)
            output = m(_x(at, call))
            if not early and call % accumulate == 0:
                optimizer.zero_grad(set_to_none=set_to_none)
            output.square().mean().backward()
            if (call + 1) % accumulate == 0:
                optimizer.step()
            seen.append((output.detach().clone(), _grads(m)))
        _same(seen[1], seen[0], at, f"step {call}: results or gradients")
        _same(list(model.parameters()), list(eager.parameters()), at, f"step {call}: parameters")
        _same(list(model.buffers()), list(eager.buffers()), at, f"step {call}: buffers")
    return fast, graphed


def steps_of_training_are_those_of_eager_training(at: Any) -> None:
    fast, graphed = _steps(at, _mlp)
    assert graphed.replays == 5
    assert not fast.fallbacks


def gradients_accumulate_over_calls(at: Any) -> None:
    _, graphed = _steps(at, _mlp, accumulate=2, num=6)
    assert graphed.replays == 6


def gradients_may_be_zeroed_instead_of_dropped(at: Any) -> None:
    _, graphed = _steps(at, _mlp, set_to_none=False)
    assert graphed.replays == 5


def gradients_may_be_cleared_after_the_forward(at: Any) -> None:
    _, graphed = _steps(at, _mlp, early=False)
    assert graphed.replays == 5


def batch_statistics_are_updated(at: Any) -> None:
    _steps(at, lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))


def dropout_draws_what_eager_draws(at: Any) -> None:
    _steps(at, lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4)))


class _Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return Square.apply(self.inner(x))


def functions_with_their_own_backward_are_recorded(at: Any) -> None:
    _steps(at, _Squared)


class _TiedScore(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tied = Tied()
        self.into = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.tied.head(x) + F.linear(x, self.tied.embed.weight) + self.into(x)


def a_weight_used_twice_gets_both_gradients(at: Any) -> None:
    _steps(at, _TiedScore)


class _PartlyUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.still = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 4)
        self.still.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) + self.still(x)


def parameters_without_use_get_no_gradient(at: Any) -> None:
    fast, _ = _steps(at, _PartlyUsed)
    assert fast.unused.weight.grad is None
    assert fast.still.weight.grad is None


def inputs_get_gradients(at: Any) -> None:
    eager, model = _pair(_mlp, at)
    fast, graphed = _fast(model, at, _x(at, 0, requires_grad=True))
    kept = []
    for call in range(3):
        grads = []
        for m in (eager, fast):
            x = _x(at, call, requires_grad=True)
            m(x).sum().backward()
            grads.append(x.grad)
        kept.append(grads)
    for mine, theirs in kept:
        _same(theirs, mine, at, "gradients of inputs")
    assert graphed.replays == 3


def gradients_flow_through_to_what_made_the_input(at: Any) -> None:
    eager, model = _pair(_mlp, at)
    seed(9)
    before = [nn.Linear(8, 8).to(at.device) for _ in range(2)]
    before[1].load_state_dict(before[0].state_dict())
    fast, graphed = _fast(model, at, before[1](_x(at, 0)))
    for m, first in zip((eager, fast), before):
        m(first(_x(at, 1))).sum().backward()
    _same(before[1].weight.grad, before[0].weight.grad, at, "gradients before the model")
    assert graphed.replays == 1


def a_loss_among_other_results_is_differentiated_alone(at: Any) -> None:
    eager, model = _pair(Lossy, at)
    labels = torch.tensor([0, 1, 2, 3, 0, 1], device=at.device)
    fast, graphed = _fast(model, at, _x(at, 0), labels=labels)
    for call in range(3):
        results = []
        for m in (eager, fast):
            m.zero_grad()
            result = m(_x(at, call), labels=labels)
            result["loss"].backward()
            results.append((result["loss"].detach(), result["logits"].detach(), result["labels"], _grads(m)))
        _same(results[1], results[0], at, "results")
    assert graphed.replays == 3


def another_result_than_the_loss_can_still_be_differentiated(at: Any) -> None:
    eager, model = _pair(Lossy, at)
    labels = torch.tensor([0, 1, 2, 3, 0, 1], device=at.device)
    fast, graphed = _fast(model, at, _x(at, 0), labels=labels)
    for call in range(4):
        kept = []
        for m in (eager, fast):
            m.zero_grad()
            result = m(_x(at, call), labels=labels)
            (result["loss"] + result["logits"].square().mean()).backward()
            kept.append(result)
        _same(_grads(fast), _grads(eager), at, "gradients")
    assert graphed.replays == 2  # each ran the forward twice: recordings that are used otherwise are given up


def hooks_on_parameters_fire(at: Any) -> None:
    eager, model = _pair(_mlp, at)
    seen: list[list[str]] = [[], []]
    for m, log in zip((eager, model), seen):
        m[0].weight.register_hook(lambda grad, log=log: (log.append("before"), grad * 2)[1])
    fast, _ = _fast(model, at, _x(at, 0))
    assert seen[1] == []
    for m, log in zip((eager, model), seen):
        m[3].bias.register_post_accumulate_grad_hook(lambda p, log=log: log.append("after"))
    for _ in range(2):
        for m in (eager, fast):
            m(_x(at, 1)).sum().backward()
    assert sorted(seen[0]) == sorted(seen[1])
    assert sorted(seen[1]) == ["after", "after", "before", "before"]
    _same(_grads(fast), _grads(eager), at, "gradients")


def two_forwards_before_their_backwards_are_both_right(at: Any) -> None:
    eager, model = _pair(_mlp, at)
    fast, graphed = _fast(model, at, _x(at, 0))
    for m in (eager, fast):
        first, second = m(_x(at, 1)), m(_x(at, 2))
        (first.sum() + second.square().sum()).backward()
    _same(_grads(fast), _grads(eager), at, "gradients")
    assert graphed.replays == 1
    assert "waits for its backward" in str(graphed.misses) or not graphed.misses


def a_forward_that_is_forgotten_does_not_block_the_next(at: Any) -> None:
    _, model = _pair(_mlp, at)
    fast, graphed = _fast(model, at, _x(at, 0))
    fast(_x(at, 1))
    fast(_x(at, 2)).sum().backward()
    assert graphed.replays == 2


def a_second_backward_is_that_of_eager_training(at: Any) -> None:
    eager, model = _pair(_Two, at)
    fast, graphed = _fast(model, at, _x(at, 0))
    for call in range(4):
        for m in (eager, fast):
            m.zero_grad()
            hidden, pooled = m(_x(at, call))
            hidden.square().mean().backward(retain_graph=True)
            pooled.sum().backward()
        _same(_grads(fast), _grads(eager), at, "gradients")
    assert graphed.replays == 2 and "more than once" in str(fast.fallbacks)  # each ran the forward twice: given up


def a_second_backward_is_refused_with_a_reason(at: Any) -> None:
    _, model = _pair(_mlp, at)
    fast, _ = _fast(model, at, _x(at, 0))
    output = fast(_x(at, 1)).sum()
    output.backward()
    with _raises(OptimizeError, "runs once.*retain_graph=True"):  # as eager refuses it
        output.backward()
    _, model = _pair(lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), at)
    fast, _ = _fast(model, at, _x(at, 0))
    output = fast(_x(at, 1)).sum()
    output.backward(retain_graph=True)
    with _raises(OptimizeError, "numbers are drawn"):
        output.backward()


def gradients_of_gradients_are_those_of_eager_training(at: Any) -> None:
    eager, model = _pair(_mlp, at)
    fast, graphed = _fast(model, at, _x(at, 0, requires_grad=True))
    near = SimpleNamespace(exact=False)  # gradients are added up in another order
    for call in range(3):
        found = []
        for m in (eager, fast):
            m.zero_grad()
            x = _x(at, call, requires_grad=True)
            score = m(x).sum()
            (grad,) = torch.autograd.grad(score, x, create_graph=True)
            (score + grad.square().sum()).backward()
            found.append((grad.detach(), _grads(m)))
        _same(found[1], found[0], near, "gradients")
    assert graphed.replays == 1


def weights_changed_before_the_backward_are_noticed(at: Any) -> None:
    for m in _pair(_mlp, at):
        call = _fast(m, at, _x(at, 0))[0]
        output = call(_x(at, 1)).sum()
        with torch.no_grad():
            m[0].weight.mul_(0.5)
        with _raises(OptimizeError, "changed in place between"):  # eager refuses it in its own words
            output.backward()


def results_and_gradients_that_are_kept_do_not_change(at: Any) -> None:
    eager, model = _pair(lambda: nn.Sequential(nn.Linear(8, 70_000), nn.Sigmoid()), at)  # its backward reads its result
    fast, graphed = _fast(model, at, _x(at, 0))
    kept: list[list[Any]] = [[], []]
    for call in range(4):
        for m, held in zip((eager, fast), kept):
            m.zero_grad(set_to_none=True)
            output = m(_x(at, call))
            output.mean().backward()
            held.append((output.detach(), m[0].bias.grad.clone(), m[0].weight.grad.clone()))
    _same(kept[1], kept[0], at, "kept results or gradients")
    assert graphed.replays == 1  # the first result is still held where it was made
    del kept[1][0], held, output
    fast(_x(at, 5)).mean().backward()
    assert graphed.replays == 2


class _Worded(nn.Module):
    """A loss beside logits of a vocabulary, which its backward need not read, and a result of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 70_000)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.body(x)))
        loss = F.cross_entropy(logits, torch.arange(len(x), device=x.device))
        return {"loss": loss, "logits": logits, "chosen": logits.detach().mul(10).to(torch.int64)}


def large_results_may_be_let_go_of_before_the_backward_or_kept(at: Any) -> None:
    eager, model = _pair(_Worded, at)
    fast, graphed = _fast(model, at, _x(at, 0))
    assert len(graphed._tracks.passing) == 2
    for call, held in enumerate(("nothing", "all", "a view", "later", "nothing", "all")):
        seen = []
        for m in (eager, fast):
            m.zero_grad()
            result = m(_x(at, call))
            loss, logits, chosen = result.pop("loss"), result["logits"], result["chosen"]
            kept = {"nothing": [], "a view": [logits[:, 5:50].detach()], "later": [logits.detach()]}.get(
                held, [logits, chosen])  # fmt: skip
            del result, logits, chosen
            loss.backward()
            seen.append((loss.detach(), [t.detach().clone() for t in kept], _grads(m)))
            if held == "later":  # what is written to it afterwards is nobody's business
                kept[0].zero_()
            del loss, kept
        _same(seen[1], seen[0], at, f"{held} kept: results or gradients")
    assert graphed.replays == 6 and not graphed.misses


def results_outlive_their_recordings(at: Any) -> None:
    eager, model = _pair(_Worded, at)
    fast, _ = _fast(model, at, _x(at, 0))
    wanted, found = (m(_x(at, 1))["logits"].detach() for m in (eager, fast))
    del fast, model, _
    gc.collect()
    if at.device.type == "cuda":
        torch.cuda.empty_cache()
        filler = [torch.full((6, 70_000), 7.0, device=at.device) for _ in range(8)]
        del filler
    _same(found, wanted, at, "results")


def _halved(x: Tensor) -> Tensor:
    return 0.5 * x


class _Own(nn.GELU):
    pass


class _Named(nn.Module):
    """Calls functions by all the names they have."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.act, self.end = nn.Linear(8, 8), _Own(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.silu(self.act(_halved(self.body(x))))
        return self.end(F.softplus(x).exp() + torch.tanh(x))


def functions_and_methods_that_are_replaced_are_noticed(at: Any) -> None:
    here = sys.modules[__name__]
    places = [(here, "_halved"), (F, "silu"), (F, "softplus"), (torch, "tanh"), (Tensor, "exp"), (nn.GELU, "forward"),
              (_Own, "forward"), (_Named, "forward"), (F, "linear"), (nn.Linear, "forward")]  # fmt: skip
    eager, model = _pair(_Named, at)
    fast, graphed = _fast(model, at, _x(at, 0))
    for num, (holder, name) in enumerate(places):
        was, missing = getattr(holder, name), name not in vars(holder)

        def other(*args: Any, was: Any = was) -> Any:
            return 1.5 * was(*args)

        setattr(holder, name, other)
        try:
            seen = [_stepped(m, _x(at, num)) for m in (eager, fast)]
        finally:
            delattr(holder, name) if missing else setattr(holder, name, was)
        _same(seen[1], seen[0], at, f"{name}: results or gradients")
        assert sum(graphed.misses.values()) == num + 1, f"{name} was not noticed"
        _same(_stepped(fast, _x(at, num)), _stepped(eager, _x(at, num)), at, f"{name} put back")
        assert graphed.replays == num + 1


def _stepped(call: Any, x: Tensor) -> Any:
    call.zero_grad()
    output = call(x)
    output.square().mean().backward()
    return output.detach().clone(), [g.clone() for g in _grads(call) if g is not None]


def a_result_changed_in_place_is_never_silently_wrong(at: Any) -> None:
    eager, model = _pair(lambda: nn.Sequential(nn.Linear(8, 70_000), nn.Sigmoid()), at)
    fast, _ = _fast(model, at, _x(at, 0))
    for m in (eager, fast):
        output = m(_x(at, 1))
        output.data.size()
        with contextlib.suppress(RuntimeError, OptimizeError):
            output.mul_(2)
            output.sum().backward()
            raise AssertionError("neither raised nor refused")


def switched_to_eval_it_runs_the_model_itself(at: Any) -> None:
    eager, model = _pair(lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), at)
    fast, graphed = _fast(model, at, _x(at, 0))
    for m in (eager, fast):
        m.eval()
    with torch.no_grad():
        _same(fast(_x(at, 1)), eager(_x(at, 1)), at, "results")
    assert graphed.replays == 0
    assert fast.fallbacks


def other_parameters_asking_for_gradients_are_noticed(at: Any) -> None:
    eager, model = _pair(_mlp, at)
    fast, graphed = _fast(model, at, _x(at, 0))
    for m in (eager, fast):
        m[0].weight.requires_grad_(False)
        m(_x(at, 1)).sum().backward()
    _same(_grads(fast), _grads(eager), at, "gradients")
    assert graphed.replays == 0


def autocast_is_inside_the_recording(at: Any) -> None:
    eager, model = _pair(_mlp, at)
    with torch.autocast(at.device.type, torch.bfloat16):
        fast, graphed = _fast(model, at, _x(at, 0))
    for call in range(3):
        results = []
        for m in (eager, fast):
            m.zero_grad()
            with torch.autocast(at.device.type, torch.bfloat16):
                output = m(_x(at, call))
            output.float().sum().backward()
            results.append((output.detach(), _grads(m)))
            with torch.no_grad():
                m[0].weight.mul_(0.5)
        _same(results[1], results[0], at, "results")
    assert graphed.replays == 3


class _Routed(nn.Module):
    """A part that is computed in float32 whatever autocast says, as routers of experts are."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.body = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(x.device.type, enabled=False):
            shares = self.router(x.float()).softmax(-1)
        hidden = self.body(x)
        return (hidden * shares).square().mean(), hidden


def _cast_steps(at: Any, eager: Any, fast: Any, differentiate: Callable[[Any], None]) -> None:
    """Steps with autocast around the forward alone, as loops have it."""
    for call in range(3):
        results = []
        for m in (eager, fast):
            m.zero_grad()
            with torch.autocast(at.device.type, torch.bfloat16):
                outputs = m(_x(at, call))
            differentiate(outputs)
            results.append((outputs[0].detach(), _grads(m)))
        _same(results[1], results[0], at, "results")


def backward_passes_run_outside_of_autocast(at: Any) -> None:
    eager, model = _pair(_Routed, at)
    with torch.autocast(at.device.type, torch.bfloat16):
        fast, graphed = _fast(model, at, _x(at, 0))
    _cast_steps(at, eager, fast, lambda outputs: (outputs[0] + outputs[1].float().mean()).backward())
    assert graphed.replays == 3


def a_second_backward_is_that_of_a_forward_under_autocast(at: Any) -> None:
    eager, model = _pair(_Routed, at)
    with torch.autocast(at.device.type, torch.bfloat16):
        fast, graphed = _fast(model, at, _x(at, 0))

    def twice(outputs: Any) -> None:
        outputs[0].backward(retain_graph=True)
        outputs[1].float().mean().backward()

    _cast_steps(at, eager, fast, twice)
    assert graphed.replays == 2 and "more than once" in str(fast.fallbacks)


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if self.inner(x).sum() > 0 else self.inner(x) * 2


class _Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.end = nn.Embedding(10, 8, sparse=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.rows((x.abs() * 3).long().clamp(max=9)).mean(1))


def sparse_gradients_are_refused(at: Any) -> None:
    _, model = _pair(_Sparse, at)
    with _raises(NotGraphable, "a gradient is sparse"):
        _fast(model, at, _x(at, 0))


def branches_on_values_are_refused(at: Any) -> None:
    _, model = _pair(_Branches, at)
    with _raises(NotGraphable, "host"):
        _fast(model, at, _x(at, 0))


def a_step_with_an_optimizer_is_that_of_eager_training(at: Any) -> None:
    eager, model = _pair(Lossy, at)
    labels = torch.tensor([0, 1, 2, 3, 0, 1], device=at.device)
    graphed = graph_training(model, (_x(at, 0),), {"labels": labels}, model, executor=at.executor())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (eager, model)]
    fast = Optimized(model, [Plan(graphed.signature, graphed)], mode="train", optimizer=optimizers[1])
    plain = Optimized(eager, mode="train", optimizer=optimizers[0])
    for call in range(4):
        _same(fast.train_step(_x(at, call), labels=labels), plain.train_step(_x(at, call), labels=labels), at, "losses")
        _same(list(model.parameters()), list(eager.parameters()), at, "parameters")
    assert graphed.replays == 4


class Checkpointed(nn.Module):
    """Parts whose insides are computed again in the backward."""

    def __init__(self, *, reentrant: bool = False, drop: float = 0.0) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(drop), nn.Linear(16, 8))
                                   for _ in range(2))  # fmt: skip
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_() if self.reentrant else x
        for part in self.parts:
            x = x + checkpoint(part, x, use_reentrant=self.reentrant)
        return x


def parts_that_are_computed_again_are_recorded(at: Any) -> None:
    _, graphed = _steps(at, Checkpointed)
    assert graphed.replays == 5


class _Turned(torch.autograd.Function):
    """A product whose gradient for the weight lies in columns where the weight lies in rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad @ weight, (x.T @ grad).T


class _TurnedLayer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return _Turned.apply(x, self.weight) + self.bias


def gradients_lie_as_their_parameters_do(at: Any) -> None:
    fast, graphed = _steps(at, lambda: nn.Sequential(_TurnedLayer(8, 8), nn.Tanh(), _TurnedLayer(8, 4)))
    places = {id(p): grad.data_ptr() for p, grad in graphed.gradients() if grad is not None}
    assert len(places) == 4 and all(p.grad.data_ptr() == places[id(p)] for p in fast.parameters())


class CheckpointedDraws(nn.Module):
    """Numbers are drawn before, inside and between parts that are computed again, and in one part of a part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Checkpointed(drop=0.3), nn.Linear(8, 4)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(nn.functional.dropout(x, 0.2))
        x = nn.functional.dropout(x, 0.1) + checkpoint(self._outer, x, use_reentrant=False)
        return self.last(nn.functional.dropout(x, 0.2))

    def _outer(self, x: Tensor) -> Tensor:
        x = checkpoint(self.inner, nn.functional.dropout(x, 0.3), use_reentrant=False)
        heads = nn.functional.scaled_dot_product_attention(*[x.view(1, 2, -1, 4)] * 3, dropout_p=0.2)
        return heads.reshape(x.shape) + nn.functional.dropout(x, 0.5)


def parts_that_are_computed_again_draw_the_same_numbers(at: Any) -> None:
    _steps(at, lambda: Checkpointed(drop=0.5))
    eager, model = _pair(CheckpointedDraws, at)
    fast, graphed = _fast(model, at, _x(at, 0))
    ends = []
    for m in (eager, fast):
        batches = [_x(at, call) for call in range(4)]
        seed(7)
        found = []
        for x in batches:
            m.zero_grad(set_to_none=True)
            output = m(x)
            output.square().mean().backward()
            found.append((output.detach().clone(), _grads(m)))
        ends.append((found, torch.rand(3, device=at.device)))
    _same(ends[1], ends[0], at, "results, gradients or the number drawn next")
    assert graphed.replays == 4 and not graphed.misses


def parts_that_give_gradients_away_by_themselves_are_refused(at: Any) -> None:
    _, model = _pair(lambda: Checkpointed(reentrant=True), at)
    with _raises(NotGraphable, "use_reentrant"):
        _fast(model, at, _x(at, 0))


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.pooler = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        return hidden, self.pooler(hidden)


def what_a_loss_does_not_reach_gets_no_gradient(at: Any) -> None:
    eager, model = _pair(_Two, at)
    fast, graphed = _fast(model, at, _x(at, 0))
    for used in ((0,), (1,), (0, 1)):
        for m in (eager, fast):
            m.zero_grad(set_to_none=True)
            outputs = m(_x(at, 1))
            sum(outputs[i].square().mean() for i in used).backward()
        assert (fast.pooler.weight.grad is None) == (eager.pooler.weight.grad is None) == (1 not in used)
        _same(_grads(fast), _grads(eager), at, "gradients")
    assert graphed.replays == 3


class _Results(dict[str, Any]):
    """Holds by name and by attribute, as results of transformers do."""

    def __init__(self, **held: Any) -> None:
        super().__init__(held)
        self.__dict__.update(held)


class _Nested(nn.Module):
    """Returns a loss beside results in a container of their own, which is held twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body = _mlp()

    def forward(self, x: Tensor) -> _Results:
        hidden = self.body(x)
        return _Results(loss=hidden.square().mean(), inner=_Results(hidden=hidden, doubled=2 * hidden))


def results_in_containers_of_their_own_are_let_go_of(at: Any) -> None:
    """A recording that held the last ones would take them for somebody's, and never be replayed again."""
    eager, model = _pair(_Nested, at)
    shape = (70_000, 8)  # results of a megabyte are handed out without a copy
    fast, graphed = _fast(model, at, _x(at, 0, *shape))
    for call in range(4):
        kept = []
        for m in (eager, fast):
            m.zero_grad()
            result = m(_x(at, call, *shape))
            assert result.inner is result["inner"]
            result.loss.backward()
            kept.append((result.loss.detach(), result.inner.doubled.detach().clone(), _grads(m)))
            del result
        _same(kept[1], kept[0], at, "results")
    assert graphed.replays == 4 and not graphed.misses, graphed.misses


def histories_that_are_held_are_no_obstacle(at: Any) -> None:
    """The last loss of a loop, say: its history ends in nodes of the stream it was made on."""
    eager, model = _pair(_mlp, at)
    held = [m(_x(at, 9)).square().mean() for m in (eager, model)]
    fast, graphed = _fast(model, at, _x(at, 0))
    for call in range(2):
        for m in (eager, fast):
            m.zero_grad()
            m(_x(at, call)).square().mean().backward()
        _same(_grads(fast), _grads(eager), at, "gradients")
    for value in held:
        value.backward()
    _same(_grads(fast), _grads(eager), at, "gradients of an older history")
    assert graphed.replays == 2


def accumulators_are_renewed(at: Any) -> None:
    weight = nn.Parameter(torch.randn(3, device=at.device))
    older, place = (weight * 2).sum(), weight.data_ptr()
    node = older.grad_fn.next_functions[0][0].next_functions[0][0]
    assert weight.view_as(weight).grad_fn.next_functions[0][0] is node
    renew_accumulator(weight)
    newer = (weight * 3).sum()
    assert newer.grad_fn.next_functions[0][0].next_functions[0][0] is not node
    assert weight.data_ptr() == place and weight.dtype == torch.float32
    for value in (newer, older):
        value.backward()
    _same(weight.grad, torch.full_like(weight, 5.0), at, "gradients")


class _Views(nn.Module):
    """Returns a result, and parts of it as results of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = _mlp()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.body(x) * 2
        return {"turned": hidden.t(), "hidden": hidden, "first": hidden[:, 0], "sum": hidden.sum()}


def results_that_are_views_of_others_stay_so(at: Any) -> None:
    eager, model = _pair(_Views, at)
    fast, graphed = _fast(model, at, _x(at, 0))
    for call, used in enumerate((("first",), ("turned", "hidden"), ("hidden",), ("sum", "first", "turned")), start=1):
        found = []
        for m in (eager, fast):
            m.zero_grad(set_to_none=True)
            outputs = m(_x(at, call))
            assert outputs["turned"].data_ptr() == outputs["hidden"].data_ptr()
            sum((outputs[name] * (i + 1)).square().sum() for i, name in enumerate(used)).backward()
            found.append({name: tensor.detach().clone() for name, tensor in outputs.items()})
        _same(found[1], found[0], at, "results")
        few = SimpleNamespace(exact=at.exact and len(used) < 3)  # gradients of several are added up in another order
        _same(_grads(fast), _grads(eager), few, "gradients")
    assert graphed.replays == 4, graphed.misses


class _Halves(nn.Module):
    """Returns a drawing, and the means and spreads it was drawn from, halves of one tensor, as autoencoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.into(x).chunk(2, -1)
        return self.out(mean + torch.randn_like(mean) * (spread / 2).exp()), mean, spread


def results_that_are_halves_of_one_tensor_are_recorded(at: Any) -> None:
    eager, model = _pair(_Halves, at)
    fast, graphed = _fast(model, at, _x(at, 0))
    kept = []
    for call, used in enumerate(((0, 1, 2), (0, 1, 2), (0, 2), (1,)), start=1):
        found = []
        for m in (eager, fast):
            m.zero_grad(set_to_none=True)
            seed(900 + call)
            outputs = m(_x(at, call))
            assert outputs[1].untyped_storage()._cdata == outputs[2].untyped_storage()._cdata
            sum((outputs[i] * (i + 1)).square().mean() for i in used).backward()
            found.append([output.detach() for output in outputs])
        kept.append(found)
        _same(_grads(fast), _grads(eager), SimpleNamespace(exact=at.exact and len(used) < 3), "gradients")
    for mine, theirs in kept:
        _same(theirs, mine, at, "results")
    assert graphed.replays == 4, graphed.misses


class _Seen(nn.Module):
    """Returns complex numbers and the same memory as pairs of real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        turned = torch.complex(self.body(x), x)
        return turned, torch.view_as_real(turned)


def results_that_are_views_in_another_type_are_refused(at: Any) -> None:
    _, model = _pair(_Seen, at)
    with _raises(NotGraphable, "share memory"):
        _fast(model, at, _x(at, 0))


def _stepping(make: Callable[..., Any], at: Any, **settings: Any) -> Any:
    """The same model with the same optimizer, eagerly and with a recorded update."""
    labels = torch.tensor([0, 1, 2, 3, 0, 1], device=at.device)
    eager, model = _pair(Lossy, at)
    optimizers = [make(m.parameters(), lr=0.01, **settings) for m in (eager, model)]
    graphed = graph_training(model, (_x(at, 0),), {"labels": labels}, model, executor=at.executor())
    update = GraphedUpdate(optimizers[1], graphed)
    plan = [Plan(graphed.signature, graphed)]
    fast = Optimized(model, plan, mode="train", optimizer=optimizers[1], update=update)
    plain = Optimized(eager, mode="train", optimizer=optimizers[0])

    def step(call: int) -> None:
        x = _x(at, call)
        _same(fast.train_step(x, labels=labels), plain.train_step(x, labels=labels), at, "losses")
        _same(list(model.parameters()), list(eager.parameters()), at, f"parameters after step {call}")
        _same(_grads(model), _grads(eager), at, "gradients")

    return step, update, optimizers


_FUSED = ((torch.optim.AdamW, {"fused": True, "weight_decay": 0.1}), (torch.optim.Adam, {"fused": True}),
          (torch.optim.SGD, {}), (torch.optim.SGD, {"momentum": 0.9, "fused": True}))  # fmt: skip


def whole_steps_are_those_of_eager_training(at: Any) -> None:
    for make, settings in _FUSED:
        step, update, _ = _stepping(make, at, **settings)
        for call in range(6):
            step(call)
        made = 0 if settings == {} else 1  # the first step makes the state
        assert update.replays == 6 - made and sum(update.misses.values()) == made, update.misses


def learning_rates_may_follow_a_schedule(at: Any) -> None:
    near = SimpleNamespace(device=at.device, executor=at.executor, exact=False)  # rates on the device are float32
    for make, settings in _FUSED:
        step, update, optimizers = _stepping(make, near, **settings)
        for call in range(8):
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = 0.01 * 0.9 ** max(0, call - 2)
            step(call)
        assert update.replays == (3 if settings == {} else 7), update.misses
        assert optimizers[1].param_groups[0]["lr"] == 0.01 * 0.9**5


class _Noting(nn.Module):
    """Leaves what others read: a map on the way to the result, a loss beside it, a mean for the log."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.route = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(8, 3)
        self.map: Any = None
        self.aux: Any = None
        self.log: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.map = self.body(x).softmax(-1)
        self.aux = self.route(x).softmax(-1).mean(0).square().sum()
        result: Tensor = self.head(self.map)
        self.log["mean"] = result.detach().mean()
        return result


def _noted(model: Any) -> list[Tensor]:
    return [model.map.detach().clone(), model.aux.detach().clone(), model.log["mean"].clone()]


def what_calls_leave_on_the_model_is_left_by_replays(at: Any) -> None:
    eager, model = _pair(_Noting, at)

    def loss(result: Tensor, own: Any) -> Tensor:
        return result.square().mean() + 0.1 * own.aux + 0.01 * own.map.square().sum()

    fast, graphed = _fast(model, at, _x(at, 0), loss=lambda result: loss(result, model))
    assert model.map is None and model.aux is None and not model.log  # recording leaves nothing behind
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (eager, model)]
    for call in range(6):
        seen = []
        for m, own, optimizer in ((eager, eager, optimizers[0]), (fast, model, optimizers[1])):
            optimizer.zero_grad()
            value = loss(m(_x(at, call)), own)
            before = _noted(own)
            value.backward()
            seen.append((value.detach().clone(), before, _noted(own), _grads(own)))
            optimizer.step()
        _same(seen[1], seen[0], at, f"step {call}: loss, notes or gradients")
    assert graphed.replays == 5, graphed.misses  # the first call found no tensor where the model's code asks for one


def notes_that_are_kept_do_not_change(at: Any) -> None:
    eager, model = _pair(_Noting, at)
    fast, graphed = _fast(model, at, _x(at, 0), loss=lambda result: result.square().mean())
    kept: list[list[Any]] = [[], []]
    for call in range(5):
        for m, own, held in ((eager, eager, kept[0]), (fast, model, kept[1])):
            own.zero_grad()
            m(_x(at, call)).square().mean().backward()
            held += [own.map, own.log["mean"]]
    _same([each.detach() for each in kept[1]], [each.detach() for each in kept[0]], at, "notes of earlier steps")
    assert graphed.replays >= 3, graphed.misses


def gradients_of_notes_on_the_way_are_refused(at: Any) -> None:
    """They are computed inside of a recorded backward: who asks for one outside would get none, without a word."""
    _, model = _pair(_Noting, at)
    fast, graphed = _fast(model, at, _x(at, 0), loss=lambda result: result.square().mean())
    fast(_x(at, 0)).square().mean().backward()
    value = fast(_x(at, 1)).square().mean()
    model.map.retain_grad()
    with _raises(OptimizeError, "gradient of _Noting.map"):
        value.backward()
    assert graphed.replays == 1


class _Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 1 << 16)

    def forward(self, x: Tensor) -> Tensor:
        large = self.body(x)
        self.map = large.square()
        return self.map.mean()


def large_notes_are_lent_while_nobody_keeps_them(at: Any) -> None:
    eager, model = _pair(_Mapped, at)
    for m in (eager, model):
        m(_x(at, 0))
    fast, graphed = _fast(model, at, _x(at, 0))
    kept: list[Any] = []
    for call in range(8):
        for m, own in ((eager, eager), (fast, model)):
            own.zero_grad()
            m(_x(at, call)).backward()
        _same(model.map.detach(), eager.map.detach(), at, f"step {call}: the note")
        _same(_grads(model), _grads(eager), at, f"step {call}: gradients")
        if call == 4:
            assert graphed.replays == 5, graphed.misses
            kept = [eager.map, model.map]
    _same(kept[1].detach(), kept[0].detach(), at, "a note that was kept")


class _Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 4)
        self.before: Any = None

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(x)
        found = result if self.before is None else result + self.before
        self.before = result.detach()
        return found


def notes_that_the_next_call_reads_are_refused(at: Any) -> None:
    _, model = _pair(_Remembering, at)
    with _raises(NotGraphable, "before changed"):
        graph_training(model, (_x(at, 0),), {}, model, executor=at.executor())
    assert model.before is None


def weights_that_hooks_make_are_made_by_replays(at: Any) -> None:
    """Old spellings of weight and spectral norms, in which most vocoders and judges of images are written."""
    norms = (nn.utils.weight_norm, nn.utils.spectral_norm)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for norm in norms:
            models = []
            for _ in range(2):  # which cannot be copied: its weight has a history
                seed(3)
                models.append(nn.Sequential(norm(nn.Linear(8, 16)), nn.ReLU(), norm(nn.Linear(16, 4))).to(at.device))
            eager, model = models
            fast, graphed = _fast(model, at, _x(at, 0))
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
            for call in range(5):
                for m, optimizer in zip((eager, fast), optimizers):
                    optimizer.zero_grad()
                    m(_x(at, call)).square().mean().backward()
                    optimizer.step()
                _same(list(model.state_dict().values()), list(eager.state_dict().values()), at, f"step {call}: state")
                _same(model[0].weight.detach(), eager[0].weight.detach(), at, f"step {call}: the weight made")
            assert graphed.replays == 5, graphed.misses


def optimizers_that_are_changed_are_recorded_again(at: Any) -> None:
    step, update, optimizers = _stepping(torch.optim.AdamW, at, fused=True)
    for call in range(8):
        if call == 3:  # another decay is another step
            for optimizer in optimizers:
                optimizer.param_groups[0]["weight_decay"] = 0.5
        if call == 5:  # as after loading a checkpoint
            for optimizer in optimizers:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        step(call)
    assert update.replays == 7, update.misses


def a_state_that_is_loaded_is_the_one_used(at: Any) -> None:
    step, update, optimizers = _stepping(torch.optim.AdamW, at, fused=True)
    kept: list[Any] = []
    for call in range(8):
        if call == 2:
            kept = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
        if call == 5:  # back to what it was three steps ago
            for optimizer, state in zip(optimizers, kept):
                optimizer.load_state_dict(state)
        step(call)
        counts = [[float(box["step"]) for box in optimizer.state.values()] for optimizer in optimizers]
        assert counts[0] == counts[1] == [call + 1.0 - 3.0 * (call >= 5)] * len(counts[0])
    assert update.replays == 7, update.misses


def hooks_of_an_optimizer_are_called(at: Any) -> None:
    step, update, optimizers = _stepping(torch.optim.AdamW, at, fused=True)
    seen: list[int] = []
    for call in range(6):
        if call == 3:
            hooks = [o.register_step_post_hook(lambda o, *_: seen.append(id(o))) for o in optimizers]
        if call == 5:
            for hook in hooks:
                hook.remove()
        step(call)
    assert sorted(seen) == sorted([id(o) for o in optimizers] * 2)
    assert update.replays == 3, update.misses


def gradients_that_were_changed_are_the_ones_applied(at: Any) -> None:
    labels = torch.tensor([0, 1, 2, 3, 0, 1], device=at.device)
    step, update, optimizers = _stepping(torch.optim.AdamW, at, fused=True)
    step(0)
    models = [[p for g in o.param_groups for p in g["params"]] for o in optimizers]
    for call in (1, 2):
        for parameters, act in zip(models, (optimizers[0].step, update)):
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.grad = parameter.grad * 0.5 if call == 2 else parameter.grad.mul_(0.5)
            act()
        _same(*models, at, "parameters")
        step(2 + call)
    assert "elsewhere" in " ".join(update.misses) and labels.numel() == 6


def _with_own_step(optimizer: Any) -> Any:
    optimizer.step = lambda closure=None: None
    return optimizer


def whole_steps_that_cannot_be_replayed_are_refused(at: Any) -> None:
    _, model = _pair(_mlp, at)
    graphed = graph_training(model, (_x(at, 0),), {}, model, loss=torch.mean, executor=at.executor())
    for optimizer, pattern in ((torch.optim.AdamW(model.parameters(), foreach=True), "fused=True"),
                               (torch.optim.RMSprop(model.parameters()), "RMSprop"),
                               (_with_own_step(torch.optim.SGD(model.parameters())), "replaced by another"),
                               (torch.optim.SGD([nn.Parameter(torch.ones(1))]), "not the model's")):  # fmt: skip
        with _raises(NotGraphable, pattern):
            GraphedUpdate(optimizer, graphed)


@contextlib.contextmanager
def _raises(kind: type[Exception], pattern: str) -> Iterator[None]:
    said = None
    try:
        yield
    except kind as error:
        said = str(error)
    assert said is not None, f"did not raise {kind.__name__}"
    assert re.search(pattern, said), said


CHECKS: tuple[Callable[[Any], None], ...] = (
    steps_of_training_are_those_of_eager_training, gradients_accumulate_over_calls,
    gradients_may_be_zeroed_instead_of_dropped, gradients_may_be_cleared_after_the_forward,
    batch_statistics_are_updated, dropout_draws_what_eager_draws, functions_with_their_own_backward_are_recorded,
    a_weight_used_twice_gets_both_gradients, parameters_without_use_get_no_gradient, inputs_get_gradients,
    gradients_flow_through_to_what_made_the_input, a_loss_among_other_results_is_differentiated_alone,
    another_result_than_the_loss_can_still_be_differentiated, hooks_on_parameters_fire,
    two_forwards_before_their_backwards_are_both_right, a_forward_that_is_forgotten_does_not_block_the_next,
    a_second_backward_is_that_of_eager_training, a_second_backward_is_refused_with_a_reason,
    gradients_of_gradients_are_those_of_eager_training, weights_changed_before_the_backward_are_noticed,
    results_and_gradients_that_are_kept_do_not_change, large_results_may_be_let_go_of_before_the_backward_or_kept,
    results_outlive_their_recordings, functions_and_methods_that_are_replaced_are_noticed,
    a_result_changed_in_place_is_never_silently_wrong,
    switched_to_eval_it_runs_the_model_itself, other_parameters_asking_for_gradients_are_noticed,
    autocast_is_inside_the_recording, backward_passes_run_outside_of_autocast,
    a_second_backward_is_that_of_a_forward_under_autocast, sparse_gradients_are_refused, branches_on_values_are_refused,
    a_step_with_an_optimizer_is_that_of_eager_training, what_a_loss_does_not_reach_gets_no_gradient,
    results_in_containers_of_their_own_are_let_go_of, histories_that_are_held_are_no_obstacle,
    accumulators_are_renewed, results_that_are_views_of_others_stay_so,
    results_that_are_halves_of_one_tensor_are_recorded,
    results_that_are_views_in_another_type_are_refused, parts_that_are_computed_again_are_recorded,
    gradients_lie_as_their_parameters_do,
    parts_that_are_computed_again_draw_the_same_numbers, parts_that_give_gradients_away_by_themselves_are_refused,
    whole_steps_are_those_of_eager_training, learning_rates_may_follow_a_schedule,
    optimizers_that_are_changed_are_recorded_again, a_state_that_is_loaded_is_the_one_used,
    hooks_of_an_optimizer_are_called, gradients_that_were_changed_are_the_ones_applied,
    whole_steps_that_cannot_be_replayed_are_refused, what_calls_leave_on_the_model_is_left_by_replays,
    notes_that_are_kept_do_not_change, large_notes_are_lent_while_nobody_keeps_them,
    gradients_of_notes_on_the_way_are_refused,
    notes_that_the_next_call_reads_are_refused,
    weights_that_hooks_make_are_made_by_replays,
)  # fmt: skip
