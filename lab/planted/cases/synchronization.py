"""Cause: synchronization."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.planted.programs import TRIED, adamw, asked, bf16, graphed, language, stack, training
from lab.planted.registry import Program, Setting, case


@case("synchronization", "keep the statistics on the device and read them every 100 steps", suite="planted")
def item_each_layer(s: Setting, fixed: bool) -> Program:
    kept: list[Any] = []

    def watch(i: int, x: Tensor) -> None:
        size = x.detach().norm()
        kept.append(size if fixed else size.item())

    shape = s.shape(width=1024, layers=12, heads=16, vocab=16384)
    model, batches = language(s, shape, 8, 1024, watch=watch)
    train = training(model, adamw(s, model), batches)

    def step() -> None:
        kept.clear()
        train()

    return Program(step)


@case("synchronization", "clip_grad_norm_ once instead of .item() for every parameter", suite="planted")
def item_each_gradient(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=1024, layers=12, heads=16, vocab=16384)
    model, batches = language(s, shape, 8, 1024)
    optimizer, params = adamw(s, model), list(model.parameters())

    def step() -> None:
        model(*next(batches)).backward()
        if fixed:
            nn.utils.clip_grad_norm_(params, 1.0)
        else:
            total = sum(p.grad.norm().item() ** 2 for p in params) ** 0.5
            if total > 1.0:
                torch._foreach_mul_([p.grad for p in params], 1.0 / total)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case("synchronization", "drop the torch.cuda.synchronize() around every block", suite="planted")
def synchronize_each_block(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=1024, layers=12, heads=16, vocab=16384)
    watch = None if fixed else lambda i, x: s.synchronize()
    model, batches = language(s, shape, 8, 1024, watch=watch)
    return Program(training(model, adamw(s, model), batches))


class SkippingLayer(nn.Module):
    """Of all tokens those that stand out most are thought about; the rest go by."""

    def __init__(self, dim: int, keep_frac: float, by_mask: bool) -> None:
        super().__init__()
        self.norm, self.keep_frac, self.by_mask = nn.LayerNorm(dim), keep_frac, by_mask
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        loud = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
        values, index = loud.topk(int(self.keep_frac * x.size(0)), sorted=False)
        if self.by_mask:
            keep = loud >= values.min()
            chosen = x[keep]
            x[keep] = chosen + self.mlp(self.norm(chosen))
            return x
        chosen = x.index_select(0, index)
        return x.index_copy_(0, index, chosen + self.mlp(self.norm(chosen)))


@case("synchronization", "index_select and index_copy_ by the indices that topk gives", suite="twenty-fifth", **TRIED)
def tokens_that_stand_out_by_mask(s: Setting, fixed: bool) -> Program:
    """Tokens of a film; half of them go by each layer, which is said by a mask."""
    num, dim = s.pick(8192, 16), s.pick(1024, 16)
    layers = s.place(
        lambda: nn.Sequential(*(SkippingLayer(dim, 0.5, by_mask=not fixed) for _ in range(s.pick(32, 2))))
    ).eval()
    x = bf16(s, num, dim)
    return asked(lambda: layers(x.clone()))


class HopEnhancer(nn.Module):
    """One hop of sound at a time: gates that remember what came before."""

    def __init__(self, hop: int, dim: int, depth: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(hop, dim), nn.Linear(dim, hop)
        self.heard = nn.ModuleList(nn.Linear(dim, 2 * dim, bias=False) for _ in range(depth))
        self.kept = nn.ModuleList(nn.Linear(dim, 2 * dim) for _ in range(depth))

    def forward(self, hop: Tensor, states: Tensor) -> Tensor:
        x = self.enter(hop)
        for heard, kept, state in zip(self.heard, self.kept, states):
            x = F.glu(torch.addmm(kept(state), x, heard.weight.T))
            state.copy_(x)
        return self.leave(x)


@case("synchronization", "the caller waits once, for all hops", suite="twenty-fifth", **TRIED)
def hops_waited_for(s: Setting, fixed: bool) -> Program:
    """Voices freed of noise hop by hop, each out of a graph; every hop is waited for by an event."""
    hops, voices, hop, dim, depth = s.pick((64, 512, 256, 2048, 3), (3, 2, 8, 16, 2))
    model = s.place(lambda: HopEnhancer(hop, dim, depth)).eval()
    noisy, clean = bf16(s, hops, voices, hop), bf16(s, hops, voices, hop)
    states, x = torch.zeros_like(bf16(s, depth, voices, dim)), bf16(s, voices, hop)
    out = torch.zeros_like(x)

    @torch.no_grad()
    def enhance() -> None:
        out.copy_(model(x, states))

    run = graphed(enhance) if s.cuda else enhance

    @torch.no_grad()
    def step() -> None:
        for i in range(hops):
            x.copy_(noisy[i])
            run()
            clean[i].copy_(out)
            if s.cuda and not fixed:
                done = torch.cuda.Event()
                done.record()
                done.synchronize()

    return Program(step)


class Potential(nn.Module):
    """How much energy each walker of each replica has."""

    def __init__(self, coords: int, wide: int, depth: int) -> None:
        super().__init__()
        self.net = stack(coords, *([wide] * depth), 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).float().mean(-1)


def swap_in_turn(beta: Tensor, energy: Tensor, u: Tensor, first: int) -> None:
    """Neighbors on the ladder exchange their temperatures, each pair if its die says so."""
    for k, i in enumerate(range(first, len(beta) - 1, 2)):
        if u[k] < torch.exp((beta[i] - beta[i + 1]) * (energy[i] - energy[i + 1])):
            beta[i : i + 2] = beta[i : i + 2].flip(0)


def swap_together(beta: Tensor, energy: Tensor, u: Tensor, first: int) -> None:
    num = (len(beta) - first) // 2
    b, e = (t[first : first + 2 * num].view(num, 2) for t in (beta, energy))
    chance = torch.exp((b[:, 0] - b[:, 1]) * (e[:, 0] - e[:, 1]))
    b.copy_(torch.where((u[:num] < chance)[:, None], b.flip(1), b))


@case("synchronization", "all pairs decided together by torch.where", suite="twenty-fourth", **TRIED)
def replicas_swapped_in_turn(s: Setting, fixed: bool) -> Program:
    """Replicas of a system at sixteen temperatures walk by a learned energy, and neighbors exchange theirs."""
    replicas, walkers, coords = s.pick(16, 4), s.pick(1024, 4), s.pick(256, 8)
    potential = s.place(lambda: Potential(coords, s.pick(2048, 16), s.pick(3, 1))).eval()
    x = bf16(s, replicas, walkers, coords)
    beta = torch.linspace(1.0, 0.1, replicas, device=s.device)
    swap = swap_together if fixed else swap_in_turn

    @torch.no_grad()
    def sweep(first: int, x: Tensor, energy: Tensor) -> tuple[Tensor, Tensor]:
        moved = x + 0.05 * torch.randn_like(x)
        tried = potential(moved)
        accept = torch.rand_like(tried).log() < beta[:, None] * (energy - tried)
        x, energy = torch.where(accept[..., None], moved, x), torch.where(accept, tried, energy)
        swap(beta, energy.mean(1), torch.rand(replicas // 2, device=s.device), first)
        return x, energy

    @torch.no_grad()
    def step() -> Tensor:
        here, energy = x, potential(x)
        for i in range(s.pick(12, 2)):
            here, energy = sweep(i % 2, here, energy)
        x.copy_(here)
        return energy

    return Program(step)
