"""Cause: unfused optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.planted.networks import ResidualLayer, Tokens
from lab.planted.programs import SHORT, TRIED, adamw, bf16, language, training
from lab.planted.registry import Program, Setting, case


@case("unfused optimizer", "AdamW(..., fused=True)", suite="planted")
def adamw_loop(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=1024, layers=12, heads=16, vocab=16384)
    model, batches = language(s, shape, 8, 1024)
    options = {"fused": True} if fixed else {"foreach": False}
    return Program(training(model, adamw(s, model, **options), batches))


class AmsGrad(torch.optim.Optimizer):
    """Adam that never forgets its largest second moment, a weight at a time, after the paper."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"] = 0
            state["m"], state["v"], state["v_max"] = (torch.zeros_like(p) for _ in range(3))
        state["step"] += 1
        beta1, beta2 = group["betas"]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        state["m"].mul_(beta1).add_(grad, alpha=1 - beta1)
        state["v"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        torch.maximum(state["v_max"], state["v"], out=state["v_max"])
        root = state["v_max"].sqrt().div_(math.sqrt(1 - beta2 ** state["step"])).add_(group["eps"])
        p.addcdiv_(state["m"], root, value=-group["lr"] / (1 - beta1 ** state["step"]))


@case("unfused optimizer", "torch.optim.AdamW(amsgrad=True, fused=True)", suite="twenty-fifth", **SHORT)
def amsgrad_after_the_paper(s: Setting, fixed: bool) -> Program:
    """Traffic foretold; an optimizer that somebody typed in from a paper, weight by weight."""
    batch, places, piece = s.pick((24, 256, 64), (2, 4, 8))
    model = s.place(lambda: Tokens(piece, s.pick(768, 16), s.pick(12, 2), s.pick(12, 2), 64))
    if fixed:
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, amsgrad=True, fused=True)
    else:
        optimizer = AmsGrad(model.parameters(), lr=1e-4)
    past, soon = bf16(s, batch, places, piece), bf16(s, batch, 64)

    def step() -> None:
        optimizer.zero_grad()
        F.mse_loss(model(past), soon).backward()
        optimizer.step()

    return Program(step)


class AdaptedLayer(nn.Module):
    """A layer that rests, with two narrow networks that learn behind its halves."""

    def __init__(self, d: int, h: int, narrow: int) -> None:
        super().__init__()
        self.base = ResidualLayer(d, h)
        self.downs = nn.ModuleList(nn.Linear(d, narrow) for _ in range(2))
        self.ups = nn.ModuleList(nn.Linear(narrow, d) for _ in range(2))

    def adapt(self, i: int, x: Tensor) -> Tensor:
        return x + self.ups[i](F.relu(self.downs[i](x), inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.adapt(0, self.base.attn(self.base.n1(x)))
        return x + self.adapt(1, self.base.fc2(F.gelu(self.base.fc1(self.base.n2(x)))))


def learning_parts(layers: nn.Module) -> list[nn.Parameter]:
    """Adapters, norms and biases learn; everything else rests."""
    learning = []
    for name, p in layers.named_parameters():
        p.requires_grad_("downs" in name or "ups" in name or ".n1" in name or ".n2" in name or name.endswith("bias"))
        learning += [p] if p.requires_grad else []
    return learning


class Adan(torch.optim.Optimizer):
    """Momentum of slopes and of how they change, weight by weight as in the paper, or over lists of weights."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-4, lists: bool = False) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.02, 0.08, 0.01), "eps": 1e-8})
        self.lists = lists

    def _begin(self, p: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        state = self.state[p]
        if not state:
            state["m"], state["v"], state["n"] = (torch.zeros_like(p) for _ in range(3))
            state["before"] = p.grad.clone()
        return state["m"], state["v"], state["n"], state["before"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            (self._all if self.lists else self._each)(params, group)

    def _each(self, params: list[Tensor], group: dict[str, Any]) -> None:
        b1, b2, b3 = group["betas"]
        for p in params:
            m, v, n, before = self._begin(p)
            change = p.grad - before
            m.mul_(1 - b1).add_(p.grad, alpha=b1)
            v.mul_(1 - b2).add_(change, alpha=b2)
            foreseen = p.grad + (1 - b2) * change
            n.mul_(1 - b3).addcmul_(foreseen, foreseen, value=b3)
            p.addcdiv_(m + (1 - b2) * v, n.sqrt().add_(group["eps"]), value=-group["lr"])
            before.copy_(p.grad)

    def _all(self, params: list[Tensor], group: dict[str, Any]) -> None:
        b1, b2, b3 = group["betas"]
        grads = [p.grad for p in params]
        ms, vs, ns, befores = (list(column) for column in zip(*(self._begin(p) for p in params)))
        changes = torch._foreach_sub(grads, befores)
        torch._foreach_mul_(ms, 1 - b1)
        torch._foreach_add_(ms, grads, alpha=b1)
        torch._foreach_mul_(vs, 1 - b2)
        torch._foreach_add_(vs, changes, alpha=b2)
        foreseen = torch._foreach_add(grads, changes, alpha=1 - b2)
        torch._foreach_mul_(ns, 1 - b3)
        torch._foreach_addcmul_(ns, foreseen, foreseen, value=b3)
        below = torch._foreach_sqrt(ns)
        torch._foreach_add_(below, group["eps"])
        torch._foreach_addcdiv_(params, torch._foreach_add(ms, vs, alpha=1 - b2), below, value=-group["lr"])
        torch._foreach_copy_(befores, grads)


@case("unfused optimizer", "the same update over lists of weights", suite="twenty-fourth", **TRIED | {"steps": 7})
def adan_of_the_paper(s: Setting, fixed: bool) -> Program:
    """Adapters, norms and biases of a network that rests otherwise, moved by an optimizer out of a paper."""
    dim, heads, narrow = s.pick(1024, 16), s.pick(16, 2), s.pick(64, 8)
    layers = s.place(lambda: nn.Sequential(*(AdaptedLayer(dim, heads, narrow) for _ in range(s.pick(14, 2)))))
    optimizer = Adan(learning_parts(layers), lr=1e-4, lists=fixed)
    x, y = bf16(s, s.pick(12, 2), s.pick(512, 4), dim), bf16(s, s.pick(12, 2), s.pick(512, 4), dim)

    def step() -> None:
        F.mse_loss(layers(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Program(step)
