"""Ways to write a training loop, each run with a model and with its recording: what they leave has to be the same.

A loop takes what it calls, the model itself (whose weights and settings it may change), and a place for what it sees.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from compare import alike, seed
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ridgeline.engine.drop_in import Optimized, Plan
from ridgeline.engine.replay.inference import graph_training

Seen = list[Any]
STEPS = 6


class Data:
    """Batches by their number, the same for everyone who asks."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def x(self, number: int, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 + number)
        return torch.randn(*(shape or (6, 8)), generator=generator).to(self.device)

    def y(self, number: int) -> Tensor:
        return torch.randint(0, 4, (6,), generator=torch.Generator().manual_seed(200 + number)).to(self.device)


def _loss(call: Any, data: Data, number: int) -> Tensor:
    return F.cross_entropy(call(data.x(number)), data.y(number))


def _trained(call: Any, model: Any, data: Data, seen: Seen, between: Callable[[int], Any] = lambda step: None,
             loss: Callable[..., Tensor] = _loss) -> None:  # fmt: skip
    """A plain loop, with something done before every step."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for step in range(STEPS):
        between(step)
        optimizer.zero_grad()
        value = loss(call, data, step)
        value.backward()
        optimizer.step()
        seen.append(value.detach())


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def dropped() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 4))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def constrained() -> nn.Module:
    first = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    return nn.Sequential(first, nn.ReLU(), nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)))


class Waves(nn.Module):
    """A layer whose weights are complex."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(0.3 * torch.randn(5, 5, dtype=torch.complex64)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(torch.fft.irfft(torch.fft.rfft(x) @ self.weight, n=8))
        return found


class Adapted(nn.Module):
    """A frozen layer with a trained one of low rank beside it, which can be switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head, self.on = nn.Linear(8, 8), nn.Linear(8, 4).requires_grad_(False), True
        self.base.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.zeros(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.base(x) + x @ self.down @ self.up if self.on else self.base(x)
        return self.head(torch.relu(hidden))


class Taught(nn.Module):
    """A student beside a teacher that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(8, 4), nn.Linear(8, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(x)
        return self.student(x) - wanted


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = self.cell(x, state)
        return self.out(state), state


def gradients_are_clipped(call: Any, model: Any, data: Data, seen: Seen) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        _loss(call, data, step).backward()
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()


def gradients_add_up_under_a_schedule(call: Any, model: Any, data: Data, seen: Seen) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=4)
    for step in range(12):
        value = _loss(call, data, step) / 3
        value.backward()
        seen.append(value.detach())
        if step % 3 == 2:
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)


def weights_are_averaged(call: Any, model: Any, data: Data, seen: Seen) -> None:
    mean = AveragedModel(call, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def between(step: int) -> None:
        mean.update_parameters(call)
        seen.append(mean(data.x(99)).detach())

    _trained(call, model, data, seen, between)


def gradients_are_scaled(call: Any, model: Any, data: Data, seen: Seen) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(data.device.type, init_scale=2.0**10, growth_interval=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        value = F.cross_entropy(call(data.x(step) * (float("inf") if step == 3 else 1.0)), data.y(step))
        scaler.scale(value).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        seen.append(torch.tensor(scaler.get_scale()))


def adapters_are_merged_and_switched_off(call: Any, model: Any, data: Data, seen: Seen) -> None:
    def between(step: int) -> None:
        if step == 3:
            with torch.no_grad():
                model.base.weight += (model.down @ model.up).T
                model.up.zero_()
        model.on = step != 4

    def loss(call: Any, data: Data, step: int) -> Tensor:
        return _loss(call, data, step) + 0.1 * model.up.square().sum()

    _trained(call, model, data, seen, between, loss)


def parameters_step_in_the_backward(call: Any, model: Any, data: Data, seen: Seen) -> None:
    optimizers = {p: torch.optim.AdamW([p], lr=0.01) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    hooks = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
    for number in range(STEPS):
        _loss(call, data, number).backward()
    for hook in hooks:
        hook.remove()


def it_is_judged_between_forward_and_backward(call: Any, model: Any, data: Data, seen: Seen) -> None:
    def loss(call: Any, data: Data, step: int) -> Tensor:
        value = _loss(call, data, step)
        call.eval()
        with torch.no_grad():
            seen.append(call(data.x(50 + step)))
        call.train()
        return value

    _trained(call, model, data, seen, loss=loss)


def states_are_saved_and_loaded(call: Any, model: Any, data: Data, seen: Seen) -> None:
    optimizer, kept = torch.optim.AdamW(model.parameters(), lr=0.01), io.BytesIO()
    for step in range(9):
        optimizer.zero_grad()
        _loss(call, data, step).backward()
        optimizer.step()
        if step == 2:
            torch.save({"model": call.state_dict(), "optimizer": optimizer.state_dict()}, kept)
        if step == 5:
            kept.seek(0)
            found = torch.load(kept, map_location=data.device)
            call.load_state_dict(found["model"])
            optimizer.load_state_dict(found["optimizer"])
        if step == 7:  # other tensors, not other values
            call.load_state_dict({name: t.clone() for name, t in call.state_dict().items()}, assign=True)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        seen.append(model(data.x(80)).detach())


def seeds_repeat_it(call: Any, model: Any, data: Data, seen: Seen) -> None:
    for _ in range(2):
        torch.manual_seed(7)
        for step in range(3):
            model.zero_grad()
            value = _loss(call, data, step)
            value.backward()
            seen.append((value.detach(), torch.rand(2, device=data.device)))


def gradients_are_kept(call: Any, model: Any, data: Data, seen: Seen) -> None:
    kept: list[list[Tensor]] = []
    for step in range(4):
        model.zero_grad()
        _loss(call, data, step).backward()
        kept.append([p.grad for p in model.parameters()])
        kept.append(list(torch.autograd.grad(_loss(call, data, step + 9), list(model.parameters()))))
    seen.extend(kept)


def a_list_of_gradients_is_kept(call: Any, model: Any, data: Data, seen: Seen) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    _loss(call, data, 9).backward()
    grads = [p.grad for p in model.parameters()]
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        value = _loss(call, data, step)
        value.backward()
        for grad in grads:
            grad.mul_(0.5)
        optimizer.step()
        seen.append(value.detach())


def views_of_gradients_are_kept(call: Any, model: Any, data: Data, seen: Seen) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _loss(call, data, 9).backward()
    rows = [p.grad.view(-1) for p in model.parameters()]
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        _loss(call, data, step).backward()
        for row in rows:
            row.clamp_(-0.01, 0.01)
        optimizer.step()
        seen.append(torch.cat(rows).clone())


def inputs_are_moved_by_their_gradients(call: Any, model: Any, data: Data, seen: Seen) -> None:
    optimizer = torch.optim.AdamW([{"params": model[0].parameters(), "weight_decay": 0.1},
                                   {"params": model[3].parameters(), "weight_decay": 0.0}], lr=0.01)  # fmt: skip
    for step in range(STEPS):
        x = data.x(step).requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(call(x), data.y(step)), x)
        optimizer.zero_grad()
        value = F.cross_entropy(call((x + 0.1 * slope.sign()).detach()), data.y(step))
        value.backward()
        optimizer.step()
        seen.append((value.detach(), slope))
        if step == 3:
            optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.1})


def some_parameters_are_asked_for(call: Any, model: Any, data: Data, seen: Seen) -> None:
    flat = torch.zeros(sum(p.numel() for p in model.parameters()), device=data.device)
    for parameter, place in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()])):
        parameter.grad = place.view_as(parameter)
    for step in range(4):
        flat.zero_()
        asked = [model[3].weight, model[0].bias]
        _loss(call, data, step).backward(inputs=asked if step % 2 else None)
        seen.append(flat.clone())


def settings_change(call: Any, model: Any, data: Data, seen: Seen) -> None:
    def between(step: int) -> None:
        if step == 2:
            model[2].p = 0.6
        if step == 4:
            model[3] = nn.Linear(16, 4, device=data.device)

    _trained(call, model, data, seen, between)


def statistics_are_frozen(call: Any, model: Any, data: Data, seen: Seen) -> None:
    _trained(call, model, data, seen, lambda step: model[1].train(step < 3))


def weights_move(call: Any, model: Any, data: Data, seen: Seen) -> None:
    def between(step: int) -> None:
        if step == 3:
            for parameter in model.parameters():
                parameter.data = parameter.data * 0.9

    _trained(call, model, data, seen, between)


def other_weights_are_called_with(call: Any, model: Any, data: Data, seen: Seen) -> None:
    for step in range(4):
        others = {name: (p * (1 + 0.1 * step)).detach().requires_grad_() for name, p in model.named_parameters()}
        value = F.cross_entropy(torch.func.functional_call(call, others, (data.x(step),)), data.y(step))
        seen.append((value.detach(), torch.autograd.grad(value, list(others.values()))))
        _loss(call, data, step).backward()


def states_are_carried(call: Any, model: Any, data: Data, seen: Seen) -> None:
    optimizer, state = torch.optim.SGD(model.parameters(), lr=0.1), data.x(1)
    for step in range(STEPS):
        optimizer.zero_grad()
        first, state = call(data.x(step), state.detach())
        second, state = call(data.x(9 + step), state) if step % 2 else (first, state)  # through two calls
        (F.cross_entropy(first, data.y(step)) + F.cross_entropy(second, data.y(step))).backward()
        optimizer.step()
        seen.append(state.detach())


def two_are_compared(call: Any, model: Any, data: Data, seen: Seen) -> None:
    def loss(call: Any, data: Data, step: int) -> Tensor:
        return (call(data.x(step)) - call(data.x(30 + step))).square().mean()

    _trained(call, model, data, seen, loss=loss)


def a_teacher_follows(call: Any, model: Any, data: Data, seen: Seen) -> None:
    def loss(call: Any, data: Data, step: int) -> Tensor:
        value = call(data.x(step)).square().mean()
        with torch.no_grad():  # before the backward, which does not need it
            for slow, quick in zip(model.teacher.parameters(), model.student.parameters()):
                slow.lerp_(quick, 0.1)
        return value

    _trained(call, model, data, seen, loss=loss)


def hooks_come_and_go(call: Any, model: Any, data: Data, seen: Seen) -> None:
    hooks: list[Any] = []

    def between(step: int) -> None:
        if step == 2:
            hooks.append(model[0].register_forward_hook(lambda module, args, result: result * 2))
        if step == 3:
            hooks.append(model[3].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01)))
        if step == 5:
            for hook in hooks:
                hook.remove()

    _trained(call, model, data, seen, between)


def the_last_batch_is_smaller(call: Any, model: Any, data: Data, seen: Seen) -> None:
    def loss(call: Any, data: Data, step: int) -> Tensor:
        rows = 6 if step % 3 < 2 else 4
        return F.cross_entropy(call(data.x(step)[:rows]), data.y(step)[:rows])

    _trained(call, model, data, seen, loss=loss)


def a_closure_is_called_several_times(call: Any, model: Any, data: Data, seen: Seen) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = _loss(call, data, 0)
        value.backward()
        return value

    for _ in range(STEPS):
        seen.append(optimizer.step(closure).detach())


def weights_are_in_the_loss_too(call: Any, model: Any, data: Data, seen: Seen) -> None:
    def loss(call: Any, data: Data, step: int) -> Tensor:
        return _loss(call, data, step) + 1e-2 * sum(p.abs().sum() for p in model.parameters())

    _trained(call, model, data, seen, loss=loss)


def several_forwards_make_one_loss(call: Any, model: Any, data: Data, seen: Seen) -> None:
    def loss(call: Any, data: Data, step: int) -> Tensor:
        return torch.stack([_loss(call, data, 10 * step + i) for i in range(3)]).mean()

    _trained(call, model, data, seen, loss=loss)


def frequencies_are_weighed(call: Any, model: Any, data: Data, seen: Seen) -> None:
    _trained(call, model, data, seen)


LOOPS: dict[Callable[..., None], Callable[[], nn.Module]] = {
    gradients_are_clipped: constrained, gradients_add_up_under_a_schedule: dropped, weights_are_averaged: mlp,
    gradients_are_scaled: mlp, adapters_are_merged_and_switched_off: Adapted, parameters_step_in_the_backward: mlp,
    it_is_judged_between_forward_and_backward: normed, states_are_saved_and_loaded: normed, seeds_repeat_it: dropped,
    gradients_are_kept: mlp, a_list_of_gradients_is_kept: mlp, views_of_gradients_are_kept: mlp,
    inputs_are_moved_by_their_gradients: normed, some_parameters_are_asked_for: mlp, settings_change: dropped,
    statistics_are_frozen: normed, weights_move: mlp, other_weights_are_called_with: mlp,
    states_are_carried: Recurrent, two_are_compared: mlp, a_teacher_follows: Taught, hooks_come_and_go: mlp,
    the_last_batch_is_smaller: normed, a_closure_is_called_several_times: mlp, weights_are_in_the_loss_too: mlp,
    several_forwards_make_one_loss: mlp, frequencies_are_weighed: Waves,
}  # fmt: skip


def compared(loop: Callable[..., None], at: Any) -> Any:
    """Runs a loop twice, and holds what the recording leaves to what the model leaves; returns the recording."""
    data = Data(at.device)
    seed(3)
    eager = LOOPS[loop]().to(at.device).train()
    model = copy.deepcopy(eager)
    args = (data.x(0), data.x(1)) if LOOPS[loop] is Recurrent else (data.x(0),)
    graphed = graph_training(model, args, {}, model, executor=at.executor())
    fast = Optimized(model, [Plan(graphed.signature, graphed)], mode="train")
    left: list[Any] = []
    for call, held in ((eager, eager), (fast, model)):
        seen: Seen = []
        seed(11)
        loop(call, held, data, seen)
        grads = [None if p.grad is None else p.grad.clone() for p in held.parameters()]
        left.append((seen, list(held.state_dict().values()), grads))
    for ours, theirs, what in zip(left[1], left[0], ("what was seen", "weights", "gradients")):
        assert alike(ours, theirs, exact=at.exact), f"{what} differ"
    return graphed
