"""Control programs, without a cause."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, Dataset

from lab.planted.networks import SelfAttention
from lab.planted.programs import Prefetch, asked, bf16, end_workers, perceptron, precision, sgd, stack
from lab.planted.registry import Program, Setting, case

HEALTHY: dict[str, Any] = {"variants": ("fixed",), "stack": False, "steps": 10}
"""One version, timed and recorded as the fixed one of a case."""


LINES: dict[str, Any] = HEALTHY | {"stack": True}
"""Programs thought to be well are also recorded with their Python stack, as many people do."""


def _learned(optimizer: torch.optim.Optimizer, losses: Callable[[], Iterator[Tensor]]) -> Callable[[], None]:
    """Slopes of all losses, added up."""

    def step() -> None:
        for loss in losses():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def large_filters(width: int, depth: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Conv2d(width, width, 5, padding=2, bias=False) for _ in range(depth)))


@case("none", "nothing", suite="twenty-fifth", **LINES)
def healthy_large_filters(s: Setting, fixed: bool) -> Program:
    """Textures described by wide filters of five by five, in channels_last."""
    wide, num, side = s.pick(1024, 8), s.pick(32, 2), s.pick(32, 8)
    net = s.place(lambda: large_filters(wide, s.pick(4, 1))).to(memory_format=torch.channels_last).eval()
    x = bf16(s, num, wide, side, side).to(memory_format=torch.channels_last)
    return asked(lambda: net(x))


@case("none", "nothing", suite="twenty-fifth", **LINES)
def healthy_two_broad_batches(s: Setting, fixed: bool) -> Program:
    """A broad network whose slopes are added up over two batches, each as large as the device likes."""
    rows, wide = s.pick(8192, 4), s.pick(16_384, 16)
    net = s.place(lambda: perceptron(wide, wide, wide // 4))
    parts, optimizer = bf16(s, 2, rows, wide), sgd(s, net)
    return Program(_learned(optimizer, lambda: (net(part).square().mean() / 2 for part in parts)))


@case("none", "nothing", suite="twenty-fifth", **LINES)
def healthy_demand_in_tf32(s: Setting, fixed: bool) -> Program:
    """Demand foretold by a broad network whose numbers stay in fp32, and its products on tensor cores."""
    rows, wide = s.pick(8192, 4), s.pick(12_288, 16)
    with torch.device(s.device):
        net = perceptron(wide, wide, 256)
    past, soon = torch.randn(rows, wide, device=s.device), torch.randn(rows, 256, device=s.device)
    step = _learned(sgd(s, net), lambda: iter([F.mse_loss(net(past), soon)]))
    return Program(step, functools.partial(precision, "high"))


class BroadBlock(nn.Module):
    """A layer of a very broad model that attends over long texts."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attn = SelfAttention(dim, heads, causal=True)
        self.wide, self.narrow = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.narrow(F.relu(self.wide(x)))


@case("none", "nothing", suite="twenty-fifth", **LINES)
def healthy_prompts_of_a_broad_model(s: Setting, fixed: bool) -> Program:
    """Two long prompts through layers of a very broad model, all at once."""
    dim = s.pick(8192, 16)
    model = s.place(lambda: nn.Sequential(*(BroadBlock(dim, s.pick(64, 2)) for _ in range(s.pick(2, 1))))).eval()
    prompts = bf16(s, 2, s.pick(4096, 4), dim)
    return asked(lambda: model(prompts))


@case("none", "nothing", suite="twenty-fifth", **LINES)
def healthy_scores_read_a_turn_later(s: Setting, fixed: bool) -> Program:
    """Rows scored; scores go to pinned memory on a stream of their own, and are read when the next batch runs."""
    rows, wide, answers = s.pick(16_384, 4), s.pick(8192, 16), s.pick(256, 4)
    net = s.place(lambda: perceptron(wide, wide, answers)).eval()
    x, side = bf16(s, rows, wide), torch.cuda.Stream() if s.cuda else None
    rooms = itertools.cycle([s.pinned(torch.zeros(rows, answers, dtype=torch.bfloat16)) for _ in range(2)])
    sent, told = list[tuple[Any, Tensor]](), list[float]()

    def send(scores: Tensor) -> None:
        room = next(rooms)
        if side is None:
            sent.append((None, room.copy_(scores)))
            return
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            room.copy_(scores, non_blocking=True)
            sent.append((side.record_event(), room))
        scores.record_stream(side)

    def step() -> None:
        send(net(x))
        if len(sent) > 1:
            done, room = sent.pop(0)
            if done is not None:
                done.synchronize()
            told.append(float(room[0, 0]))

    return asked(step)


class PackedRows(Dataset[tuple[Tensor, Tensor]]):
    """Columns of a table that lie in memory as bytes, a batch at a time."""

    def __init__(self, rows: int, columns: int, length: int = 100_000) -> None:
        self.table = np.random.default_rng(1).integers(0, 255, (2 * rows, columns), np.uint8)
        self.rows, self.length = rows, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * 131 % self.rows
        part = torch.from_numpy(self.table[start : start + self.rows].copy())
        return part, part[:, 0].long() % 8


@case("none", "nothing", suite="twenty-fifth", **LINES | {"rounds": 1, "warmup": 8, "steps": 14})
def healthy_columns_by_workers(s: Setting, fixed: bool) -> Program:
    """Columns of a table by workers enough, copied a step ahead, for a network that takes longer."""
    rows, columns, wide = s.pick(8192, 4), s.pick(2048, 8), s.pick(12_288, 16)
    loader = DataLoader(
        PackedRows(rows, columns), None, num_workers=s.pick(6, 1), pin_memory=s.cuda, persistent_workers=True,
        prefetch_factor=3,
    )  # fmt: skip
    feed: Any = iter(loader)
    ahead = iter(Prefetch(s, feed))
    net = s.place(lambda: perceptron(columns, wide, wide, 8))

    def losses() -> Iterator[Tensor]:
        x, kinds = next(ahead)
        yield F.cross_entropy(net(x.to(torch.bfloat16)), kinds)

    return Program(_learned(sgd(s, net), losses), close=lambda: end_workers(feed))


class Experts(nn.Module):
    """As many tokens for each expert, all experts in one product."""

    def __init__(self, num: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(num, dim, hidden) * dim**-0.5)
        self.down = nn.Parameter(torch.randn(num, hidden, dim) * hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(F.relu(torch.bmm(x, self.up)), self.down)


@case("none", "nothing", suite="twenty-fifth", **LINES)
def healthy_experts_side_by_side(s: Setting, fixed: bool) -> Program:
    """Eight experts, as many tokens for each, all of them in one product; three layers."""
    num, dim, hidden = s.pick(8, 2), s.pick(6144, 8), s.pick(16_384, 16)
    layers = s.place(lambda: nn.Sequential(*(Experts(num, dim, hidden) for _ in range(s.pick(3, 1))))).eval()
    tokens = bf16(s, num, s.pick(1024, 4), dim)
    return asked(lambda: layers(tokens))


@case("none", "nothing", suite="twenty-fifth", **LINES)
def healthy_inverse_by_products(s: Setting, fixed: bool) -> Program:
    """The inverse of a large matrix by nothing but products, each round of which doubles its digits."""
    size = s.pick(8192, 16)
    a = torch.randn(size, size, device=s.device)
    a = torch.eye(size, device=s.device) + a @ a.T / (4 * size)

    @torch.no_grad()
    def inverse() -> Tensor:
        x = a.T / 4
        for _ in range(s.pick(5, 2)):
            x = torch.addmm(x, x @ a, x, beta=2, alpha=-1)
        return x

    return Program(inverse, functools.partial(precision, "high"))


def _descended(optimizer: torch.optim.Optimizer, losses: Callable[[], Iterator[Tensor]]) -> Callable[[], None]:
    def step() -> None:
        for loss in losses():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


class Memory(nn.Module):
    """Questions that look through a very long memory, twice."""

    def __init__(self, d: int, h: int) -> None:
        super().__init__()
        self.h = h
        self.to_q, self.to_kv = nn.Linear(d, d, bias=False), nn.Linear(d, 2 * d, bias=False)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        split = lambda t: t.unflatten(-1, (self.h, -1)).transpose(1, 2)
        keys, values = (split(t) for t in self.to_kv(memory).chunk(2, -1))
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
            for _ in range(2):
                x = F.scaled_dot_product_attention(split(self.to_q(x)), keys, values).transpose(1, 2).flatten(2)
        return x


@case("none", "nothing", suite="twenty-fourth", **LINES)
def healthy_long_memory(s: Setting, fixed: bool) -> Program:
    """Questions look twice through a memory of 65,536 places."""
    dim = s.pick(2048, 16)
    model = s.place(lambda: Memory(dim, s.pick(16, 2))).eval()
    x, memory = bf16(s, 1, s.pick(16_384, 4), dim), bf16(s, 1, s.pick(65_536, 8), dim)
    return asked(lambda: model(x, memory))


class Committee:
    """Networks of one shape that vote, their weights in one block."""

    def __init__(self, members: int, d: int, depth: int, device: str) -> None:
        draw = lambda *size: torch.randn(*size, device=device, dtype=torch.bfloat16)
        self.weights = [draw(members, d, d) * math.sqrt(2 / d) for _ in range(depth)]
        self.members = members

    def __call__(self, x: Tensor) -> Tensor:
        x = x.expand(self.members, *x.shape)
        for weight in self.weights[:-1]:
            x = torch.bmm(x, weight).relu_()
        return torch.bmm(x, self.weights[-1])


@case("none", "nothing", suite="twenty-fourth", **LINES)
def healthy_committee_in_blocks(s: Setting, fixed: bool) -> Program:
    """Four broad networks vote on very many rows, all of them in one product a layer."""
    dim = s.pick(8192, 16)
    committee = Committee(s.pick(4, 2), dim, s.pick(4, 2), s.device)
    x = bf16(s, s.pick(4096, 4), dim)
    return asked(lambda: committee(x).mean(0))


@case("none", "nothing", suite="twenty-fourth", **LINES)
def healthy_vectors_fetched_beside(s: Setting, fixed: bool) -> Program:
    """Vectors of everything there is, fetched into pinned memory on a stream of their own while the next are made."""
    rows, dim = s.pick(8192, 4), s.pick(8192, 16)
    net = s.place(lambda: stack(*([dim] * s.pick(9, 3)), s.pick(1024, 8))).eval()
    x, side = bf16(s, rows, dim), torch.cuda.Stream() if s.cuda else None
    room = [s.pinned(torch.empty(rows, s.pick(1024, 8), dtype=torch.bfloat16)) for _ in range(2)]
    turn = itertools.cycle(room)

    def embed() -> None:
        found = net(x)
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
            found.record_stream(side)
        with torch.cuda.stream(side) if side is not None else nullcontext():
            next(turn).copy_(found, non_blocking=True)

    return asked(embed)


@case("none", "nothing", suite="twenty-fourth", **LINES)
def healthy_modes_in_tf32(s: Setting, fixed: bool) -> Program:
    """The slowest modes of a large structure by repeated products in fp32 tensors, which TF32 may round."""
    size, modes = s.pick(16_384, 8), s.pick(4096, 4)
    a = torch.randn(size, size, device=s.device) / (2 * size**0.5)
    x = torch.randn(size, modes, device=s.device)

    @torch.no_grad()
    def iterate() -> Tensor:
        y = x
        for _ in range(s.pick(3, 2)):
            y = a @ y
        return y

    return Program(iterate, functools.partial(precision, "high"))


@case("none", "nothing", suite="twenty-fourth", **LINES)
def healthy_two_halves_of_a_batch(s: Setting, fixed: bool) -> Program:
    """A broad network over two halves of a batch, each of which fills the device."""
    rows, wide = s.pick(16_384, 4), s.pick(8192, 16)
    net = s.place(lambda: stack(wide, wide, wide, wide // 8))
    halves = [bf16(s, rows, wide) for _ in range(2)]
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, fused=s.cuda)
    return Program(_descended(optimizer, lambda: (0.5 * net(half).square().mean() for half in halves)))
