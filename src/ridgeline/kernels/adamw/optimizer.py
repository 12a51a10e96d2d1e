"""AdamW as a ``torch.optim.Optimizer``: the same arguments and state dict, two or three launches a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import KernelError
from ridgeline.kernels import tensor_lists
from ridgeline.kernels.adamw import reference
from ridgeline.kernels.adamw.op import Rule, Scaling, State, UpdatePlan, on_host, state_reason
from ridgeline.kernels.grad_norm import reference as norm_reference
from ridgeline.kernels.grad_norm.op import NormPlan, dense
from ridgeline.kernels.launcher import launchable

SMALLEST_8BIT = 4096
"""Parameters with fewer elements keep float32 moments: there is nothing to save."""


@dataclass(slots=True)
class _Plan:
    """Launches for one set of parameters that have gradients; ``copies`` hold gradients laid out in another order."""

    updates: list[tuple[dict[str, Any], list[int], UpdatePlan]]
    norm: NormPlan
    copies: dict[int, Tensor] = field(default_factory=dict)


class AdamW(torch.optim.Optimizer):
    """``torch.optim.AdamW`` with gradient clipping fused in, moments in float32 or eight bits, and master weights.

    ``max_norm`` clips by the norm of all gradients without writing them; ``norm`` has it after a step. Moments are
    float32 for parameters of any type, or eight-bit codes with ``state_bits=8``; ``master_weights=True`` keeps a
    float32 copy of 16-bit parameters. State dicts have ``torch.optim.AdamW``'s form, eight-bit moments as float32.
    The learning rate may be a tensor; steps are counted on the device, so that a captured graph replays.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        max_norm: float | None = None,
        state_bits: int = 32,
        master_weights: bool = False,
        maximize: bool = False,
    ) -> None:
        if state_bits not in (32, 8):
            raise KernelError(f"AdamW: state_bits is 32 or 8, not {state_bits}")
        if not (0 < betas[0] < 1 and 0 < betas[1] < 1) or eps <= 0 or (not isinstance(lr, Tensor) and lr < 0):
            raise KernelError(f"AdamW: betas {betas} must lie between 0 and 1, eps {eps} above 0, lr {lr} not below")
        if max_norm is not None and max_norm < 0:
            raise KernelError(f"AdamW: max_norm {max_norm} is below zero")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize,
                    "amsgrad": False, "foreach": None, "capturable": True, "differentiable": False, "fused": None,
                    "decoupled_weight_decay": True}  # fmt: skip
        self.max_norm = None if max_norm is None else float(max_norm)
        self.state_bits, self.master_weights = state_bits, master_weights
        self.norm: Tensor | None = None
        self._plans: dict[Any, _Plan] = {}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; no parameter is read by the host."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not params:
            return loss
        grads = [p.grad for p in params]
        if not launchable(params[0]):
            self._step_on_host()
            return loss
        found = tuple(map(Tensor.data_ptr, grads))
        key = (*map(Tensor.data_ptr, params),)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._plan(params, grads)
        self._run(plan, params, grads, found)
        return loss

    def _run(self, plan: _Plan, params: list[Tensor], grads: list[Tensor], found: tuple[int, ...]) -> None:
        if plan.copies:
            for i, copy in plan.copies.items():
                grads[i] = copy.copy_(grads[i])
            found = tuple(map(Tensor.data_ptr, grads))
        scaling = None
        inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if inf is not None:
            scaling = Scaling(inf, torch.ones_like(inf) if scale is None else scale)
        share, bound = None, -1.0
        if self.max_norm is not None:
            share, bound = plan.norm.shares(grads, plan.norm.layout.tables(found)), self.max_norm
        for group, at, update in plan.updates:
            whole = len(at) == len(params)
            own = params if whole else [params[i] for i in at]
            own_grads = grads if whole else [grads[i] for i in at]
            own_found = found if whole else tuple(found[i] for i in at)
            lr = group["lr"] if isinstance(group["lr"], Tensor) and group["lr"].device == own[0].device else None
            update.run(own, own_grads, update.layout.tables(own_found), share, _rule(group, lr), bound, lr, scaling)
        if share is not None:
            self.norm = plan.updates[-1][2].shared[0]

    def _plan(self, params: list[Tensor], grads: list[Tensor]) -> _Plan:
        """Tables for these parameters; state is made where there is none."""
        plan_copies = {}
        for i, (p, g) in enumerate(zip(params, grads, strict=True)):
            if g.is_sparse:
                raise KernelError("AdamW: a gradient is sparse; use ridgeline.kernels.EmbeddingBags for such tables")
            if not dense(p):
                raise KernelError(f"AdamW: parameter {i} has gaps between its elements; make it contiguous")
            if g.stride() != p.stride():
                plan_copies[i] = torch.empty_like(p, dtype=g.dtype)
        laid = [plan_copies.get(i, g) for i, g in enumerate(grads)]
        updates = []
        place = {id(p): i for i, p in enumerate(params)}
        for group in self.param_groups:
            at = [place[id(p)] for p in group["params"] if id(p) in place]
            if at:
                states = [self._state(params[i]) for i in at]
                own, own_grads = [params[i] for i in at], [laid[i] for i in at]
                reason = state_reason(own, own_grads, states)
                if reason is not None:
                    raise KernelError(f"AdamW: {reason}")
                updates.append((group, at, UpdatePlan(own, own_grads, states)))
        return _Plan(updates, NormPlan(laid, tensor_lists.addresses(laid)), plan_copies)

    def _state(self, p: Tensor) -> State:
        """A parameter's state in its own terms, made anew where there is none."""
        state = self.state[p]
        if "exp_avg" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            bits = 8 if self.state_bits == 8 and p.numel() >= SMALLEST_8BIT and p.is_contiguous() else 32
            kinds = (torch.float32, torch.float32) if bits == 32 else (torch.int8, torch.uint8)
            state["exp_avg"] = torch.zeros_like(p, dtype=kinds[0])
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=kinds[1])
            if bits == 8:
                num = -(-p.numel() // reference.GROUP)
                for name in ("exp_avg_scale", "exp_avg_sq_scale"):
                    state[name] = torch.zeros(num, dtype=torch.float32, device=p.device)
        if self.master_weights and p.dtype != torch.float32 and "master" not in state:
            state["master"] = p.detach().float()
        return State(state["exp_avg"], state["exp_avg_sq"], state["step"], state.get("master"),
                     state.get("exp_avg_scale"), state.get("exp_avg_sq_scale"))  # fmt: skip

    def _step_on_host(self) -> None:
        bound = -1.0 if self.max_norm is None else self.max_norm
        inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if inf is not None and bool(inf):
            return
        unscale = 1.0 if scale is None else 1.0 / float(scale)
        grads = [p.grad * unscale for group in self.param_groups for p in group["params"] if p.grad is not None]
        factor: Tensor | float = 1.0
        if bound >= 0:
            self.norm = norm_reference.norm(grads).to(torch.float32)
            factor = (bound / (self.norm + 1e-6)).clamp(max=1.0)
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            own = [p.grad.float() * unscale * factor for p in params]
            if params:
                on_host(params, own, [self._state(p) for p in params], _rule(group, None), -1.0)

    def state_dict(self) -> dict[str, Any]:
        """``torch.optim.AdamW``'s form; eight-bit moments are written as the float32 numbers they stand for."""
        found = super().state_dict()
        found["state"] = {key: _widened(state) for key, state in found["state"].items()}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of this class or of ``torch.optim.AdamW``; moments stay float32 or become codes."""
        super().load_state_dict(state_dict)
        self._plans.clear()
        numbered = [key for group in state_dict["param_groups"] for key in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for key, p in zip(numbered, params, strict=True):
            if key in state_dict["state"]:
                self._load(p, state_dict["state"][key])

    def _load(self, p: Tensor, given: dict[str, Any]) -> None:
        """Moments as float32 on the parameter's device, not in its type as the base class leaves them."""
        own: dict[str, Any] = {"step": torch.as_tensor(given["step"], dtype=torch.float32, device=p.device).clone()}
        # state that must not be cast to the parameter's type when it is loaded
        for name in ("exp_avg", "exp_avg_sq", "master"):
            if name in given:
                own[name] = torch.empty_like(p, dtype=torch.float32).copy_(given[name])
        if self.state_bits == 8 and p.numel() >= SMALLEST_8BIT and p.is_contiguous():
            codes = reference.coded(own["exp_avg"], own["exp_avg_sq"])
            own |= dict(zip(("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"), codes, strict=True))
        self.state[p] = own


def _rule(group: dict[str, Any], lr: Tensor | None) -> Rule:
    beta1, beta2 = group["betas"]
    fixed = 0.0 if lr is not None else float(group["lr"])
    return Rule(fixed, float(beta1), float(beta2), float(group["eps"]), float(group["weight_decay"]), group["maximize"])


def _widened(state: dict[str, Any]) -> dict[str, Any]:
    if "exp_avg_scale" not in state:
        return state
    names = ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")
    wide = reference.decoded(*(state[name] for name in names))
    rest = {name: value for name, value in state.items() if name not in names}
    return rest | dict(zip(names[:2], wide, strict=True))
