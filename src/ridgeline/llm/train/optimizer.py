"""Optimizers over the local parts of parameters, the learning rate's schedule, and the norm of all gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ridgeline.errors import InputError
from ridgeline.llm.model.weights import Block, blocks
from ridgeline.llm.train.settings import OptimizerSettings


@dataclass(slots=True)
class Held:
    """A parameter, the part of it that this rank updates, and how many ranks hold the same part."""

    block: Block
    param: nn.Parameter
    part: nn.Parameter
    copies: int

    @property
    def is_matrix(self) -> bool:
        return len(self.block.whole) >= 2

    @property
    def is_hidden_matrix(self) -> bool:
        """What Muon updates: matrices between hidden states, stacked ones of experts too."""
        return self.is_matrix and "layers." in self.block.name and not self.block.name.endswith(("bias", "gate.weight"))


def held_parameters(parts: Iterable[nn.Module], ranks: int) -> list[Held]:
    """The trained parameters of this rank's stages; ``ranks`` share a stage."""
    found = []
    for model in parts:
        local = {block.name: (block, mine) for block, mine in blocks(model)}
        for name, param in model.named_parameters():
            if param.requires_grad:
                block, mine = local[name]
                part = nn.Parameter(mine)  # the same memory: FSDP reads what the optimizer writes
                part.grad_dtype = None  # float32 sums are gradients of bfloat16 weights too
                found.append(Held(block, param, part, ranks // block.num_parts))
    return found


def hand_over_gradients(held: Iterable[Held], sums: Mapping[str, Tensor]) -> None:
    """Give each part its gradient: the sum over micro-batches where one was kept, else the parameter's own."""
    for one in held:
        grad = sums.get(one.block.name, one.param.grad)
        one.part.grad = None if grad is None else local_gradient(one.param, grad)


def local_gradient(param: Tensor, grad: Tensor) -> Tensor:
    """This rank's part of a gradient. One that DTensor left as a sum to be made, or whole, is laid out first."""
    if not hasattr(grad, "to_local"):
        return grad
    if grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return grad.to_local()


def gradient_norm(held: Iterable[Held], world: int, device: torch.device) -> Tensor:
    """The norm of all gradients: a part held by several ranks counts once."""
    grads = [(one.part.grad, one.copies) for one in held if one.part.grad is not None and one.part.grad.numel()]
    norms = torch._foreach_norm([g for g, _ in grads], dtype=torch.float32) if grads else []
    shares = [norm.square() / copies for norm, (_, copies) in zip(norms, grads, strict=True)]
    total = torch.stack(shares).sum() if shares else torch.zeros((), device=device)
    if world > 1:
        dist.all_reduce(total)
    return total.sqrt()


def scale_gradients(held: Iterable[Held], norm: Tensor, limit: float) -> None:
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([one.part.grad for one in held if one.part.grad is not None], factor)


def learning_rate(step: int, steps: int, of: OptimizerSettings) -> float:
    """The share of the largest learning rate that a step has."""
    if step < of.warmup:
        return (step + 1) / of.warmup
    if of.schedule == "constant":
        return 1.0
    if of.schedule == "wsd":
        start = max(of.warmup, int(steps * (1 - of.decay)))
        done = (step - start) / max(1, steps - start)
        return 1.0 - (1.0 - of.final) * max(0.0, done)
    done = (step - of.warmup) / max(1, steps - of.warmup)
    return of.final + (1.0 - of.final) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))


# --- optimizers ----------------------------------------------------------------------------------------------------


class StochasticAdamW(torch.optim.Optimizer):
    """AdamW on bfloat16 weights without masters: each update is rounded up or down at random, right in the mean."""

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float], eps: float, generator: torch.Generator
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.generator = generator

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                        state["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
                        state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)
                    (beta1, beta2), grad = group["betas"], p.grad.float()
                    step, mean, square = state["step"], state["exp_avg"], state["exp_avg_sq"]
                    step += 1
                    mean.lerp_(grad, 1 - beta1)
                    square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                    root = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
                    kept = p.float() * (1 - group["lr"] * group["weight_decay"])
                    new = kept - group["lr"] / (1 - beta1**step) * mean / root
                    p.copy_(new if p.dtype == torch.float32 else round_at_random(new, self.generator))


def round_at_random(x: Tensor, generator: torch.Generator) -> Tensor:
    """float32 to one of its two bfloat16 neighbors, the nearer one more often."""
    low = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    bits = (x.view(torch.int32) + low) & -65536
    return bits.view(torch.float32).to(torch.bfloat16)


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal (Jordan et al.), scaled so that its updates are as large as Adam's usually are.

    ``whole`` gives a part's matrix from all ranks, ``cut`` its part of an update: each rank orthogonalizes whole
    matrices, which costs products and no second exchange. Stacked matrices of experts are orthogonalized one by one.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.95,
        whole: Callable[[Tensor, Tensor], Tensor] = lambda p, x: x,
        cut: Callable[[Tensor, Tensor], Tensor] = lambda p, x: x,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})
        self.whole, self.cut, self.generator = whole, cut, generator

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p, dtype=torch.float32)
                    if p.dtype != torch.float32 and self.generator is None:
                        state["master"] = p.detach().float()
                grad = p.grad.float()
                momentum = state["momentum"].mul_(group["momentum"]).add_(grad)
                update = self.whole(p, grad.add(momentum, alpha=group["momentum"]))
                update = orthogonal(update) * max(1.0, update.shape[-2] / update.shape[-1]) ** 0.5
                old = state.get("master", p.float())
                new = old * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * self.cut(p, update)
                if "master" in state:
                    state["master"].copy_(new)
                p.copy_(new if p.dtype == torch.float32 or self.generator is None
                        else round_at_random(new, self.generator))  # fmt: skip


def orthogonal(x: Tensor, steps: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrix, roughly: five Newton–Schulz steps of degree five."""
    wide = x.shape[-2] > x.shape[-1]
    y = x.to(torch.bfloat16) if x.is_cuda else x
    y = y.mT if wide else y
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = 3.4445, -4.7750, 2.0315  # chosen for a steep slope at zero (Jordan, 2024)
    for _ in range(steps):
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    return (y.mT if wide else y).float()


def make_optimizers(
    held: list[Held],
    of: OptimizerSettings,
    weights: str,
    generator: torch.Generator | None,
    device: torch.device,
    alone: bool = True,
) -> list[torch.optim.Optimizer]:
    """Muon for hidden matrices where it was asked for, AdamW for the rest; weight decay for matrices alone."""
    found: list[torch.optim.Optimizer] = []
    rest = held
    random = generator if weights == "stochastic" else None
    if of.kind == "muon":
        matrices = [one for one in held if one.is_hidden_matrix]
        rest = [one for one in held if not one.is_hidden_matrix]
        place = {id(one.part): one for one in matrices}

        def whole(p: Tensor, x: Tensor) -> Tensor:
            param = place[id(p)].param
            if not hasattr(param, "to_local"):
                return x
            from torch.distributed.tensor import DTensor

            return DTensor.from_local(
                x, param.device_mesh, param.placements, shape=param.shape, stride=param.stride(), run_check=False
            ).full_tensor()

        def cut(p: Tensor, x: Tensor) -> Tensor:
            one = place[id(p)]
            # An expert-parallel rank's whole is its slice of the experts
            start = [o - f for o, f in zip(one.block.offset, _first(one), strict=True)]
            for dim, (at, length) in enumerate(zip(start, one.part.shape, strict=True)):
                x = x.narrow(dim, at, length)
            return x

        groups = [{"params": [one.part for one in matrices], "weight_decay": of.weight_decay}]
        found.append(Muon(groups, of.muon_lr, whole=whole, cut=cut, generator=random))
    groups = [
        {"params": [one.part for one in rest if one.is_matrix == matrix], "weight_decay": of.weight_decay * matrix}
        for matrix in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    betas = (of.betas[0], of.betas[1])
    if not groups:
        return found
    narrow = any(one.part.dtype != torch.float32 for one in rest)
    if random is not None:
        found.append(StochasticAdamW(groups, of.lr, betas, of.eps, random))
    elif device.type == "cuda" or of.kind == "adamw-8bit" or narrow:
        from ridgeline.kernels import AdamW

        # A kernel that has all gradients clips them while it updates; on the CPU it is a plain one in PyTorch
        clips = of.clip if device.type == "cuda" and alone and not found and of.clip > 0 else None
        found.append(AdamW(groups, of.lr, betas, of.eps, state_bits=8 if of.kind == "adamw-8bit" else 32,
                           master_weights=narrow, max_norm=clips))  # fmt: skip
    else:
        found.append(torch.optim.AdamW(groups, of.lr, betas, of.eps, foreach=True))
    for optimizer in found:
        for group in optimizer.param_groups:
            group["largest_lr"] = float(group["lr"])
            if device.type == "cuda":  # a captured step reads it from the device
                group["lr"] = torch.tensor(group["largest_lr"], device=device)
    return found


def _first(one: Held) -> tuple[int, ...]:
    """Where the tensor that a parameter shards begins in the whole: other than zero for slices of experts alone."""
    shape = one.param.shape
    return tuple(offset // n * n if n else 0 for offset, n in zip(one.block.offset, shape, strict=True))


def set_learning_rate(optimizers: Iterable[torch.optim.Optimizer], share: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(group["largest_lr"] * share)
            else:
                group["lr"] = group["largest_lr"] * share


def optimizer_state(optimizers: Iterable[torch.optim.Optimizer], held: Iterable[Held]) -> dict[str, Tensor]:
    """Every state tensor as ``<parameter>/<state>``; eight-bit moments as the float32 numbers they stand for."""
    names = {id(one.part): one.block.name for one in held}
    found = {}
    for optimizer in optimizers:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        for index, state in optimizer.state_dict()["state"].items():
            for key, value in state.items():
                found[f"{names[id(params[index])]}/{key}"] = torch.as_tensor(value)
    return found


def load_optimizer_state(
    optimizers: Iterable[torch.optim.Optimizer], held: Iterable[Held], read: Callable[[Held, str], Tensor | None]
) -> None:
    """Put states back; ``read`` returns this rank's part of a state, or None where there is none."""
    by_part = {id(one.part): one for one in held}
    for optimizer in optimizers:
        whole = optimizer.state_dict()
        names = ("momentum", "master") if isinstance(optimizer, Muon) else ("step", "exp_avg", "exp_avg_sq", "master")
        params = [p for group in optimizer.param_groups for p in group["params"]]
        states: dict[int, dict[str, Tensor]] = {}
        for index, p in enumerate(params):
            found = {name: read(by_part[id(p)], name) for name in names}
            states[index] = {name: value for name, value in found.items() if value is not None}
            if not states[index]:
                raise InputError(
                    f"the checkpoint has no optimizer state of {by_part[id(p)].block.name}: it was another optimizer's"
                )
        settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        optimizer.load_state_dict({"state": states, "param_groups": whole["param_groups"]})
        for group, kept in zip(optimizer.param_groups, settings, strict=True):
            group.update(kept)
        if isinstance(optimizer, (Muon, StochasticAdamW)):  # the base class casts states to the parameter's type
            for index, p in enumerate(params):
                optimizer.state[p] = {k: v.to(p.device).float().clone() for k, v in states[index].items()}
