"""Networks and parts of the sixteenth suite."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from fifteenthnets import Feed
from torch import Tensor, nn


class Convolved(nn.Module):
    """A block for speech: attention, a gated depthwise convolution along time, and a network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out, self.feed = nn.Linear(width, 3 * width), nn.Linear(width, width), Feed(width)
        self.enter, self.leave = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.walk = nn.Conv1d(width, width, 15, 1, 7, groups=width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        y = self.walk(F.glu(self.enter(self.norm2(x))).mT).mT
        return self.feed(x + self.leave(F.silu(y)))


class LatentHeads(nn.Module):
    """Attention whose keys and values are made out of one narrow row."""

    def __init__(self, width: int, heads: int, deep: int, narrow: int) -> None:
        super().__init__()
        self.heads, self.norm, self.feed = heads, nn.LayerNorm(width), Feed(width)
        self.asks, self.kept = nn.Linear(width, heads * deep), nn.Linear(width, narrow)
        self.keys, self.values = nn.Linear(narrow, heads * deep), nn.Linear(narrow, heads * deep)
        self.out = nn.Linear(heads * deep, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        kept = self.kept(y)
        parts = (self.asks(y), self.keys(kept), self.values(kept))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.feed(x + self.out(mixed.transpose(1, 2).flatten(2)))


class Dropped(nn.Module):
    """A block that forgets a tenth of everything while it learns."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1)


class Asking(nn.Module):
    """A few rows that ask many, and then each other."""

    def __init__(self, width: int, heads: int, num: int) -> None:
        super().__init__()
        self.heads, self.rows = heads, nn.Parameter(torch.randn(1, num, width) * 0.02)
        self.asks, self.both, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.norm, self.feed = nn.LayerNorm(width), Feed(width)

    def forward(self, x: Tensor, rows: Tensor | None) -> Tensor:
        rows = self.rows.expand(len(x), -1, -1) if rows is None else rows
        q = self.asks(rows).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.both(self.norm(x)).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.feed(rows + self.out(mixed.transpose(1, 2).flatten(2)))


class Grown(nn.Module):
    """Cells that change by what they see around them."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.see = nn.Conv2d(channels, 3 * channels, 3, 1, 1, groups=channels, bias=False)
        self.think, self.act = nn.Conv2d(3 * channels, hidden, 1), nn.Conv2d(hidden, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(F.relu(self.think(self.see(x)), inplace=True))
