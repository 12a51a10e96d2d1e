"""AdamW's steps by our kernel, over the parameters and the state that PyTorch's own optimizer keeps.

PyTorch's fused step moves 2.5 TB/s of 16-bit parameters and moments on an H200, which copies at 4.2. The numbers are
the same: float32 inside, rounded once. Whatever the kernel does not take is stepped by the optimizer itself.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as _optimizers

from ridgeline.errors import KernelError
from ridgeline.kernels.adamw.op import State, Steps
from ridgeline.kernels.adamw.reference import Rule

ON_DEVICE = ("cuda",)
MOST_PLANS = 8
"""Sets of parameters, states and kinds of gradients that are known; a loop has one or two. Where layers are dropped at
random nearly every step has gradients of other parameters (wav2vec2's), and tables for each would take longer than
PyTorch's own step, which takes all that are not known by then."""
_MARK, _BEFORE = "_ridgeline_launches", "_ridgeline_step"


@dataclass(slots=True)
class Launches:
    """What a step launches for each group, whose settings are read when it does; ``tables`` if gradients stay."""

    groups: list[tuple[dict[str, Any], Steps]]
    tables: list[tuple[Tensor, ...]] | None = None

    def __call__(self) -> None:
        for i, (group, steps) in enumerate(self.groups):
            params = [p for p in group["params"] if p.grad is not None]
            tables = steps.tables([p.grad for p in params]) if self.tables is None else self.tables[i]
            lr = group["lr"]
            steps(tables, _rule(group), lr if isinstance(lr, Tensor) and lr.is_cuda else None)
            torch.autograd.graph.increment_version(params)


def takes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether our kernel can take this optimizer's steps at all: plain Adam or AdamW over parameters on one GPU."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    fit = all(p.device.type in ON_DEVICE and p.dtype in kinds and type(p) is torch.nn.Parameter for p in parameters)
    known = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and steps_itself(optimizer)
    return known and fit and len({p.device for p in parameters}) == 1 and all(map(_plain, optimizer.param_groups))


def steps_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``step`` is its class's, by us or noted by a scheduler of the rate: nobody's own, which does more."""
    step = vars(optimizer).get("step")
    noted = hasattr(step, "_wrapped_by_lr_sched") and getattr(step, "__wrapped__", None) is type(optimizer).step
    return step is None or is_taken(optimizer) or noted


def _plain(group: dict[str, Any]) -> bool:
    """Whether a group's settings are the kernel's: decay of the weights, not in the gradient, and numbers."""
    other = group["amsgrad"] or group["differentiable"] or group["foreach"] or group["fused"] is False
    numbers = (*group["betas"], group["weight_decay"], group["eps"])
    decays = group.get("decoupled_weight_decay", False) or not group["weight_decay"]
    return not other and decays and not any(isinstance(value, Tensor) for value in numbers)


def take_over(optimizer: torch.optim.Optimizer) -> None:
    """From now on ``optimizer.step()`` launches our kernel where it can; its state stays its own."""
    if not is_taken(optimizer) and "step" in vars(optimizer):  # a scheduler of the rate has put its own there
        setattr(optimizer, _BEFORE, vars(optimizer)["step"])
    setattr(optimizer, _MARK, {})
    optimizer.step = types.MethodType(_step, optimizer)  # type: ignore[method-assign]


def give_back(optimizer: torch.optim.Optimizer) -> None:
    """The optimizer's own steps again."""
    if is_taken(optimizer):
        delattr(optimizer, _MARK)
        vars(optimizer).pop("step", None)
        if _BEFORE in vars(optimizer):
            optimizer.step = vars(optimizer).pop(_BEFORE)  # type: ignore[method-assign]


def is_taken(optimizer: torch.optim.Optimizer) -> bool:
    return _MARK in vars(optimizer)


def staying(optimizer: Any) -> Launches | None:
    """A step over the gradients as they lie now, to be recorded by whoever keeps it; None where it is not ours.

    None too before the optimizer's first step, which makes its state, and where somebody watches steps or scales
    gradients.
    """
    found = None if _watched(optimizer) else _made(optimizer)
    if found is not None:
        found.tables = [steps.tables([p.grad for p in group["params"] if p.grad is not None])
                        for group, steps in found.groups]  # fmt: skip
    return found


def _made(optimizer: Any) -> Launches | None:
    found = []
    try:
        for group in optimizer.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            states = [_state(optimizer.state.get(p)) for p in params]
            if params:
                found.append((group, Steps(params, [p.grad for p in params], states, group["maximize"])))
    except (KernelError, LookupError):
        return None
    return Launches(found)


def _watched(optimizer: Any) -> bool:
    """Whether settings are no longer the kernel's, hooks wait for this step, or a gradient scaler left its numbers."""
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks,
             _optimizers._global_optimizer_pre_hooks, _optimizers._global_optimizer_post_hooks)  # fmt: skip
    scaled = (getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None))
    changed = not all(map(_plain, optimizer.param_groups))
    return changed or any(hooks) or any(number is not None for number in scaled)


def _state(box: dict[str, Any] | None) -> State:
    plain = box is not None and set(box) == {"exp_avg", "exp_avg_sq", "step"}
    if box is None or not plain or not all(t.device.type in ON_DEVICE for t in box.values()):
        raise LookupError("no state on the device, or more than the kernel knows")
    return State(box["exp_avg"], box["exp_avg_sq"], box["step"])


def _step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
    """``AdamW.step``, by our kernel if it takes what there is."""
    self._opt_called = True  # what schedulers of the rate ask for
    known = None if closure is not None or _watched(self) else _known(self)
    if known is None:
        return type(self).step(self, closure)
    with torch.no_grad():
        known()
    return None


_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # so that schedulers do not warn of another's step


def _known(optimizer: Any) -> Launches | None:
    """The launches for state as it is now and gradients of these kinds; None where PyTorch's own step is taken."""
    plans = getattr(optimizer, _MARK)
    try:
        key = _places(optimizer)
    except RuntimeError:  # a gradient that is no stretch of memory, a sparse one say
        return None
    if key not in plans and len(plans) < MOST_PLANS:
        plans[key] = _made(optimizer)
    found: Launches | None = plans.get(key)
    return found


def _places(optimizer: Any) -> tuple[Any, ...]:
    """Where everything lies that a step writes, and how gradients lie, wherever."""
    found: list[Any] = []
    state = optimizer.state
    for group in optimizer.param_groups:
        for p in group["params"]:
            grad = p.grad
            if grad is not None:
                box = state.get(p)
                kept = (box["exp_avg"], box["exp_avg_sq"], box["step"]) if box else ()
                found += [p.data_ptr(), *(t.data_ptr() for t in kept), grad.data_ptr() & 15, grad.stride(), grad.dtype]
    return tuple(found)


def _rule(group: dict[str, Any]) -> Rule:
    beta1, beta2 = group["betas"]
    rate = 0.0 if isinstance(group["lr"], Tensor) and group["lr"].is_cuda else float(group["lr"])
    return Rule(rate, float(beta1), float(beta2), float(group["eps"]), float(group["weight_decay"]), group["maximize"])
