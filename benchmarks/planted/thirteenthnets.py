"""Networks of the thirteenth suite: slots, soft experts, reversible layers, hashed grids, raw sound, convolutions as
they are written now, and the like."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Slots(nn.Module):
    """Slots that compete for the parts of a picture: weights are shared out among slots, then normalized over parts."""

    def __init__(self, width: int, num: int, rounds: int) -> None:
        super().__init__()
        self.rounds, self.start = rounds, nn.Parameter(torch.randn(num, width) * 0.1)
        self.norm, self.tell = nn.LayerNorm(width), nn.Linear(width, 2 * width, bias=False)
        self.ask, self.cell = nn.Linear(width, width, bias=False), nn.GRUCell(width, width)

    def forward(self, x_BLC: Tensor) -> Tensor:
        keys, values = self.tell(self.norm(x_BLC)).chunk(2, -1)
        slots = self.start.expand(len(x_BLC), -1, -1)
        for _ in range(self.rounds):
            shares = torch.bmm(keys, self.ask(slots).transpose(1, 2)).softmax(-1)
            found = torch.bmm(F.normalize(shares, p=1.0, dim=1).transpose(1, 2), values)
            slots = self.cell(found.flatten(0, 1), slots.flatten(0, 1)).view_as(found)
        return slots


class SoftExperts(nn.Module):
    """Every expert works on mixtures of all tokens: products with a softmax between them that are no heads."""

    def __init__(self, width: int, experts: int, slots: int) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(width, experts * slots) * width**-0.5)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * (2 * width) ** -0.5)
        self.norm, self.experts, self.slots = nn.LayerNorm(width), experts, slots

    def forward(self, x_BLC: Tensor) -> Tensor:
        normed = self.norm(x_BLC)
        scores = normed @ self.places
        given = torch.bmm(scores.softmax(1).transpose(1, 2), normed)
        work = given.unflatten(1, (self.experts, self.slots)).transpose(0, 1).flatten(1, 2)
        done = torch.bmm(F.relu(torch.bmm(work, self.up), inplace=True), self.down)
        done = done.unflatten(1, (len(x_BLC), self.slots)).transpose(0, 1).flatten(1, 2)
        return torch.baddbmm(x_BLC, scores.softmax(-1), done)


class _Reversed(torch.autograd.Function):
    """Two halves that take turns; what went in is worked out again from what came out."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor, left: nn.Module, right: nn.Module) -> tuple[Tensor, Tensor]:
        ctx.parts = left, right
        with torch.no_grad():
            first = first + left(second)
            second = second + right(first)
        ctx.save_for_backward(first, second)
        return first, second

    @staticmethod
    def backward(ctx: Any, d_first: Tensor, d_second: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (first, second), (left, right) = ctx.saved_tensors, ctx.parts
        with torch.enable_grad():
            given = first.detach().requires_grad_()
            moved = right(given)
        torch.autograd.backward(moved, d_second)
        second = second - moved.detach()
        d_first = d_first + given.grad
        with torch.enable_grad():
            given = second.detach().requires_grad_()
            moved = left(given)
        torch.autograd.backward(moved, d_first)
        return d_first, d_second + given.grad, None, None


class Attends(nn.Module):
    """The attending half of a block, without its residual sum."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def thinks(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Reversible(nn.Module):
    """Layers whose activations nobody keeps."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(
            nn.ModuleList([Attends(width, heads), thinks(width)]) for _ in range(layers)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        first = second = x
        for left, right in self.pairs:
            first, second = _Reversed.apply(first, second, left, right)
        return first + second


class Cached(nn.Module):
    """A decoder's layer that writes what it attends to into memory laid out beforehand."""

    def __init__(self, width: int, heads: int, groups: int, batch: int, length: int) -> None:
        super().__init__()
        self.heads, self.groups, deep = heads, groups, width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.ask, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.tell = nn.Linear(width, 2 * groups * deep, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("keys", torch.randn(batch, groups, length, deep))
        self.register_buffer("values", torch.randn(batch, groups, length, deep))

    def forward(self, x: Tensor, at: Tensor, seen: Tensor) -> Tensor:
        normed = self.norm1(x)
        q = self.ask(normed).unflatten(-1, (self.groups, self.heads // self.groups, -1))[:, 0]  # heads of a group ask
        k, v = self.tell(normed).unflatten(-1, (2, self.groups, -1)).permute(2, 0, 3, 1, 4).unbind(0)  # together
        self.keys.index_copy_(2, at, k)
        self.values.index_copy_(2, at, v)
        mixed = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=seen)
        x = x + self.out(mixed.flatten(1)[:, None])
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class HashedGrid(nn.Module):
    """Points in space to features of hashed corners on several levels, and a small network after them."""

    def __init__(self, levels: int, rows: int, wide: int, width: int, indexed: bool = False) -> None:
        super().__init__()
        self.rows, self.indexed = rows, indexed
        self.tables = nn.ParameterList(nn.Parameter(torch.randn(rows, wide) * 1e-2) for _ in range(levels))
        sizes = (levels * wide, width, width, 16)
        parts = ((nn.Linear(i, o), nn.ReLU(True)) for i, o in itertools.pairwise(sizes))
        self.head = nn.Sequential(*(part for pair in parts for part in pair))

    def forward(self, corners_LN: Tensor) -> Tensor:
        read = (lambda t, i: t[i]) if self.indexed else (lambda t, i: F.embedding(i, t))
        found = [read(table, rows) for table, rows in zip(self.tables, corners_LN, strict=True)]
        return self.head(torch.cat(found, 1))


class RawSound(nn.Module):
    """Waves cut down by strided convolutions, then layers that attend."""

    def __init__(self, width: int, heads: int, layers: int, make: Callable[..., nn.Module]) -> None:
        super().__init__()
        steps = ((1, 10, 5), (512, 3, 2), (512, 3, 2), (512, 3, 2), (512, 2, 2))
        deep = 512 if width > 64 else 16
        convs = ((nn.Conv1d(min(i, deep), deep, k, st, bias=False), nn.GELU()) for i, k, st in steps)
        self.cut = nn.Sequential(*(part for pair in convs for part in pair))
        self.norm, self.enter = nn.LayerNorm(deep), nn.Linear(deep, width)
        self.blocks = nn.Sequential(*(make(width, heads) for _ in range(layers)))

    def forward(self, waves: Tensor) -> Tensor:
        return self.blocks(self.enter(self.norm(self.cut(waves).transpose(1, 2))))


class Modern(nn.Module):
    """A block of wide depthwise convolutions, a norm over channels and a small network in every place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 7, 1, 3, groups=width)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(self.conv(x).permute(0, 2, 3, 1))
        return x + self.down(F.gelu(self.up(rows))).permute(0, 3, 1, 2)


def modern_stages(widths: tuple[int, ...], depths: tuple[int, ...]) -> nn.Sequential:
    parts: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4)]
    for i, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        parts += [nn.Conv2d(widths[i - 1], width, 2, 2)] if i else []
        parts += [Modern(width) for _ in range(depth)]
    return nn.Sequential(*parts)


def residual_net(width: int, depth: int, classes: int) -> nn.Module:
    """Plain convolutions with batch norms, a few stages of them."""
    unit = lambda i, o, stride: nn.Sequential(
        nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(True),
        nn.Conv2d(o, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(True),
    )  # fmt: skip
    wide = [width * 2**i for i in range(depth)]
    stages = [unit(3 if not i else wide[i - 1], w, 2) for i, w in enumerate(wide)]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(wide[-1], classes))


class Dreams(nn.Module):
    """A world that is imagined step by step: a state, what is seen of it, and what is done."""

    def __init__(self, width: int, actions: int) -> None:
        super().__init__()
        self.enter, self.cell = nn.Linear(width + actions, width), nn.GRUCell(width, width)
        self.seen, self.act = nn.Linear(width, width), nn.Linear(width, actions)

    def forward(self, state: Tensor, steps: int) -> Tensor:
        sight, action = state, self.act(state)
        for _ in range(steps):
            state = self.cell(F.silu(self.enter(torch.cat((sight, action), -1))), state)
            sight, action = self.seen(state), self.act(state)
        return action


class Written(nn.Module):
    """Weights that another network writes anew for every sample."""

    def __init__(self, told: int, width: int) -> None:
        super().__init__()
        self.width, self.write = width, nn.Linear(told, 2 * width * width)

    def forward(self, about: Tensor, x_BNC: Tensor) -> Tensor:
        first, second = self.write(about).unflatten(-1, (2, self.width, self.width)).unbind(1)
        return torch.bmm(F.relu(torch.bmm(x_BNC, first), inplace=True), second)
