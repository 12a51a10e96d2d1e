"""Networks of the ninth suite: grouped queries, sound with CTC, a pyramid of features, sessions, patches, policies."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# B batch, L length, C width, H heads, G groups of heads, D width of a head


class Grouped(nn.Module):
    """A pre-norm block with grouped queries; by hand as model files spell attention out, or fused."""

    def __init__(self, width: int, heads: int, groups: int, *, causal: bool, by_hand: bool = False) -> None:
        super().__init__()
        self.heads, self.groups, self.causal, self.by_hand = heads, groups, causal, by_hand
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.ask, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.tell = nn.Linear(width, 2 * groups * (width // heads), bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BLC: Tensor) -> Tensor:
        normed = self.norm1(x_BLC)
        q = self.ask(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.tell(normed).unflatten(-1, (2, self.groups, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        x_BLC = x_BLC + self.out(self._mixed(q, k, v).transpose(1, 2).flatten(2))
        return x_BLC + self.down(F.gelu(self.up(self.norm2(x_BLC))))

    def _mixed(self, q_BHLD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor) -> Tensor:
        times, length = self.heads // self.groups, q_BHLD.shape[2]
        if not self.by_hand:
            return F.scaled_dot_product_attention(q_BHLD, k_BGLD, v_BGLD, is_causal=self.causal, enable_gqa=times > 1)
        k, v = (part.repeat_interleave(times, 1) for part in (k_BGLD, v_BGLD))
        scores = torch.matmul(q_BHLD, k.transpose(2, 3)) / math.sqrt(q_BHLD.shape[-1])
        if self.causal:
            after = torch.full((length, length), torch.finfo(scores.dtype).min, device=scores.device).triu(1)
            scores = scores + after.to(scores.dtype)
        return torch.matmul(F.softmax(scores, -1, dtype=torch.float32).to(v.dtype), v)


class Spoken(nn.Module):
    """Frames of sound, halved twice in both directions, through blocks to letters at every place."""

    def __init__(self, bands: int, width: int, layers: int, heads: int, letters: int, recompute: bool = False) -> None:
        super().__init__()
        self.enter = nn.Sequential(
            nn.Conv2d(1, 64, 3, 2, 1), nn.ReLU(inplace=True), nn.Conv2d(64, 64, 3, 2, 1), nn.ReLU(inplace=True)
        )
        self.flat = nn.Linear(64 * (bands // 4), width)
        self.blocks = nn.ModuleList(Grouped(width, heads, heads, causal=False) for _ in range(layers))
        self.head, self.recompute = nn.Linear(width, letters), recompute

    def forward(self, frames_BLF: Tensor) -> Tensor:
        x = self.enter(frames_BLF[:, None].contiguous(memory_format=torch.channels_last))
        x = self.flat(x.permute(0, 2, 3, 1).flatten(2))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def conv(inner: int, outer: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(True))


class Pyramid(nn.Module):
    """Features of several scales, joined from the coarsest down, with one head for all of them."""

    def __init__(self, widths: tuple[int, ...], depth: int, classes: int) -> None:
        super().__init__()
        self.stem = conv(3, widths[0], 2)
        stages = ((i, o) for i, o in pairwise((widths[0], *widths)))
        self.stages = nn.ModuleList(
            nn.Sequential(conv(i, o, 2), *(conv(o, o) for _ in range(depth - 1))) for i, o in stages
        )
        common = widths[1]
        self.sides = nn.ModuleList(nn.Conv2d(width, common, 1) for width in widths[1:])
        self.head = nn.Sequential(conv(common, common), nn.Conv2d(common, classes + 4, 1))

    def forward(self, pictures: Tensor) -> list[Tensor]:
        x, seen = self.stem(pictures), []
        for stage in self.stages:
            x = stage(x)
            seen.append(x)
        joined: Tensor | None = None
        found = []
        for side, level in zip(reversed(self.sides), reversed(seen[1:]), strict=True):
            joined = side(level) + (0 if joined is None else F.interpolate(joined, scale_factor=2.0, mode="nearest"))
            found.append(self.head(joined))
        return found


class Outliner(nn.Module):
    """A class for every point: an encoder of strided convolutions and a decoder that doubles by interpolation."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.down = nn.ModuleList((conv(3, width, 2), conv(width, 2 * width, 2), conv(2 * width, 4 * width, 2)))
        self.deep = nn.Sequential(*(conv(4 * width, 4 * width) for _ in range(4)))
        self.up = nn.ModuleList((conv(4 * width, 2 * width), conv(2 * width, width)))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor, truth: Tensor) -> Tensor:
        seen = []
        for part in self.down:
            x = part(x)
            seen.append(x)
        x = self.deep(x)
        for part, skipped in zip(self.up, reversed(seen[:-1]), strict=True):
            x = part(F.interpolate(x, scale_factor=2.0, mode="bilinear")) + skipped
        return F.cross_entropy(self.head(x), truth)


class Sessions(nn.Module):
    """What somebody looked at, in order, to what comes next: scored against a few drawn items."""

    def __init__(self, items: int, width: int, layers: int, heads: int, room: int) -> None:
        super().__init__()
        self.items, self.places = nn.Embedding(items, width), nn.Parameter(torch.zeros(room, width))
        self.blocks = nn.ModuleList(Grouped(width, heads, heads, causal=True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, seen_BL: Tensor, asked_K: Tensor) -> Tensor:
        x = self.items(seen_BL) + self.places[: seen_BL.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x).flatten(0, 1) @ self.items(asked_K).T


class Masked(nn.Module):
    """Pictures cut into patches, of which a quarter is read and all are painted."""

    def __init__(self, patch: int, num: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        inner, self.patch = 3 * patch * patch, patch
        self.enter, self.leave = nn.Linear(inner, width), nn.Linear(width // 2, inner)
        self.places, self.hidden = nn.Parameter(torch.zeros(num, width)), nn.Parameter(torch.zeros(width // 2))
        self.read = nn.Sequential(*(Grouped(width, heads, heads, causal=False) for _ in range(layers)))
        self.narrow = nn.Linear(width, width // 2)
        self.paint = nn.Sequential(*(Grouped(width // 2, heads // 2, heads // 2, causal=False) for _ in range(2)))

    def forward(self, patches_BLP: Tensor) -> Tensor:
        batch, num, _ = patches_BLP.shape
        order = torch.rand(batch, num, device=patches_BLP.device).argsort(1)
        kept = order[:, : num // 4, None]
        x = self.enter(patches_BLP.gather(1, kept.expand(-1, -1, patches_BLP.shape[2]))) + self.places[kept[..., 0]]
        x = self.narrow(self.read(x))
        whole = self.hidden.expand(batch, num, -1).scatter(1, kept.expand(-1, -1, x.shape[2]), x)
        return F.mse_loss(self.leave(self.paint(whole)), patches_BLP)


class Policy(nn.Module):
    """States to what to do and what it is worth."""

    def __init__(self, states: int, width: int, actions: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(states, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.act, self.worth = nn.Linear(width, actions), nn.Linear(width, 1)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(states)
        return self.act(x), self.worth(x)


class Mobile(nn.Module):
    """Depthwise and pointwise convolutions with hard swishes, in one op or in steps."""

    def __init__(self, width: int, depth: int, in_steps: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 2, 1, bias=False)
        self.each = nn.ModuleList(nn.Conv2d(width, width, 3, 1, 1, groups=width, bias=False) for _ in range(depth))
        self.mix = nn.ModuleList(nn.Conv2d(width, width, 1, bias=False) for _ in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2 * depth + 1))
        self.bend, self.head = _hard_in_steps if in_steps else F.hardswish, nn.Linear(width, 1000)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.bend(self.norms[0](self.stem(x)))
        for i, (each, mix) in enumerate(zip(self.each, self.mix, strict=True)):
            x = self.bend(self.norms[2 * i + 1](each(x)))
            x = self.bend(self.norms[2 * i + 2](mix(x)))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def _hard_in_steps(x: Tensor) -> Tensor:
    return x * (F.relu6(x + 3.0) / 6.0)


class Scans(nn.Module):
    """Volumes through convolutions in three directions to a class."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = (8, width, 2 * width, 4 * width)
        self.parts = nn.ModuleList(nn.Conv3d(i, o, 3, 2, 1) for i, o in pairwise(sizes))
        self.more = nn.ModuleList(nn.Conv3d(o, o, 3, 1, 1) for o in sizes[1:])
        self.head = nn.Linear(4 * width, 16)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x.to(self.head.weight.dtype).contiguous(memory_format=torch.channels_last_3d)
        for part, more in zip(self.parts, self.more, strict=True):
            x = F.relu(more(F.relu(part(x), inplace=True)), inplace=True)
        return F.cross_entropy(self.head(x.mean((2, 3, 4))), labels)


class Deep(nn.Module):
    """Every point of large pictures by itself; what is inside of a block is computed again when it is needed."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, width, 1), nn.Conv2d(width, 3, 1)
        make = lambda: nn.Sequential(nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True))
        self.blocks = nn.ModuleList(make() for _ in range(depth))

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.enter(pictures)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return F.mse_loss(self.leave(x), pictures)
