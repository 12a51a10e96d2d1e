"""Networks, data and parts of the seventeenth suite."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from fifteenthnets import Feed
from torch import Tensor, nn

NOWHERE = io.StringIO()
"""Where lines go that nobody reads."""


class Texts(torch.utils.data.Dataset[tuple[list[int], int]]):
    """Texts of different lengths, cut into pieces word by word as a tokenizer does."""

    def __init__(self, vocab: int, longest: int) -> None:
        self.vocab, self.longest = vocab, longest

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, i: int) -> tuple[list[int], int]:
        rng = np.random.default_rng(i)
        length = int(rng.integers(int(0.7 * self.longest), self.longest))
        text = " ".join(f"w{word}" for word in rng.integers(0, 10_000, length).tolist())
        return [4 + sum(map(ord, word)) * 31 % (self.vocab - 4) for word in text.split()], i % 2


def padded(rows: list[tuple[list[int], int]]) -> dict[str, Tensor]:
    """A batch as long as its longest text, with a mask of what is real."""
    ids = [torch.tensor(row) for row, _ in rows]
    together = nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=1)
    return {
        "input_ids": together,
        "attention_mask": (together != 1).long(),
        "labels": torch.tensor([kind for _, kind in rows]),
    }


class Adapted(nn.Module):
    """A layer at rest, and two small ones beside it that learn."""

    def __init__(self, inner: nn.Linear, rank: int) -> None:
        super().__init__()
        self.inner, kind = inner, inner.weight.dtype
        self.down = nn.Linear(inner.in_features, rank, bias=False, dtype=kind)
        self.up = nn.Linear(rank, inner.out_features, bias=False, dtype=kind)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.up(self.down(x))


class Cells(nn.Module):
    """Words, cells with gates, and the next word."""

    def __init__(self, vocab: int, wide: int, layers: int) -> None:
        super().__init__()
        self.words, self.cells = nn.Embedding(vocab, wide), nn.LSTM(wide, wide, layers, batch_first=True)
        self.out = nn.Linear(wide, vocab)

    def forward(self, ids: Tensor, said: Tensor, state: tuple[Tensor, Tensor]) -> Tensor:
        found, _ = self.cells(F.dropout(self.words(ids), 0.1), state)
        return F.cross_entropy(self.out(found).flatten(0, 1), said.flatten())


class _Convolutions(nn.Module):
    def __init__(self, wide: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, wide), nn.GroupNorm(8, wide)
        self.first, self.second = nn.Conv2d(wide, wide, 3, 1, 1), nn.Conv2d(wide, wide, 3, 1, 1)
        self.time = nn.Linear(time, wide)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.first(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return x + self.second(F.silu(self.norm2(y)))


class Denoiser(nn.Module):
    """Convolutions at two sizes, told how much noise there is."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.wide, self.enter, self.leave = wide, nn.Conv2d(4, wide, 3, 1, 1), nn.Conv2d(wide, 4, 3, 1, 1)
        self.time = nn.Sequential(nn.Linear(wide, wide), nn.SiLU(), nn.Linear(wide, wide))
        self.down, self.up = nn.Conv2d(wide, wide, 3, 2, 1), nn.Conv2d(wide, wide, 3, 1, 1)
        self.parts = nn.ModuleList(_Convolutions(wide, wide) for _ in range(6))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        rates = torch.arange(self.wide // 2, device=x.device) / self.wide
        waves = time[:, None] * 1000 * (-9.2 * rates).exp()
        known = self.time(torch.cat((waves.sin(), waves.cos()), 1))
        x = self.enter(x)
        for part in self.parts[:2]:
            x = part(x, known)
        y = self.down(x)
        for part in self.parts[2:4]:
            y = part(y, known)
        x = x + self.up(F.interpolate(y, scale_factor=2.0))
        for part in self.parts[4:]:
            x = part(x, known)
        return self.leave(x)


class _Bottleneck(nn.Module):
    """One point, three by three, one point, and a way around them."""

    def __init__(self, inner: int, wide: int, stride: int) -> None:
        super().__init__()
        shapes = ((inner, wide, 1, 1), (wide, wide, 3, stride), (wide, 4 * wide, 1, 1))
        self.parts = nn.ModuleList(nn.Conv2d(a, b, k, by, k // 2, bias=False) for a, b, k, by in shapes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _, _ in shapes)
        same = inner == 4 * wide and stride == 1
        around = (nn.Conv2d(inner, 4 * wide, 1, stride, bias=False), nn.BatchNorm2d(4 * wide))
        self.around = nn.Identity() if same else nn.Sequential(*around)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for i, (part, norm) in enumerate(zip(self.parts, self.norms, strict=True)):
            y = F.relu(norm(part(y)), inplace=True) if i < 2 else norm(part(y))
        return F.relu(y + self.around(x), inplace=True)


class Residual(nn.Module):
    """A residual network of bottlenecks."""

    def __init__(self, depths: tuple[int, ...], wide: int, classes: int) -> None:
        super().__init__()
        self.enter, self.norm = nn.Conv2d(3, wide, 7, 2, 3, bias=False), nn.BatchNorm2d(wide)
        parts, inner = list[nn.Module](), wide
        for stage, depth in enumerate(depths):
            for i in range(depth):
                parts.append(_Bottleneck(inner, wide << stage, 2 if stage and not i else 1))
                inner = 4 * wide << stage
        self.parts, self.head = nn.Sequential(*parts), nn.Linear(inner, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.enter(x)), inplace=True), 3, 2, 1)
        return self.head(self.parts(x).mean((2, 3)))


class Restorer(nn.Module):
    """Residual convolutions, then one that becomes pixels."""

    def __init__(self, wide: int, layers: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, wide, 3, 1, 1), nn.Conv2d(wide, 12, 3, 1, 1)
        pair = lambda: nn.Sequential(nn.Conv2d(wide, wide, 3, 1, 1), nn.ReLU(True), nn.Conv2d(wide, wide, 3, 1, 1))
        self.parts = nn.ModuleList(pair() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for part in self.parts:
            x = x + part(x)
        return F.pixel_shuffle(self.leave(x), 2)


class Block(nn.Module):
    """Attention and a network, norms first."""

    def __init__(self, wide: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(wide)
        self.qkv, self.out, self.feed = nn.Linear(wide, 3 * wide), nn.Linear(wide, wide), Feed(wide)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.feed(x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))


class Columns(nn.Module):
    """Every column of a table a token, and one more that is asked."""

    def __init__(self, num: int, wide: int, heads: int, layers: int) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(0.02 * torch.randn(num, wide)) for _ in range(2))
        self.asked = nn.Parameter(torch.zeros(1, 1, wide))
        self.parts = nn.Sequential(*(Block(wide, heads) for _ in range(layers)))
        self.out = nn.Linear(wide, 1)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.addcmul(self.bias, x[..., None], self.weight)
        return self.out(self.parts(torch.cat((self.asked.expand(len(x), -1, -1), tokens), 1))[:, 0])[:, 0]


class Patched(nn.Module):
    """Each channel of a series by itself: normed, cut into patches, looked over, and continued."""

    def __init__(self, length: int, patch: int, wide: int, heads: int, layers: int) -> None:
        super().__init__()
        self.patch, num = patch, length // patch
        self.enter, self.places = nn.Linear(patch, wide), nn.Parameter(0.02 * torch.randn(num, wide))
        self.parts = nn.Sequential(*(Block(wide, heads) for _ in range(layers)))
        self.out = nn.Linear(num * wide, 96)

    def forward(self, x: Tensor, ahead: int) -> Tensor:
        spread, middle = torch.std_mean(x, -1, keepdim=True)
        patches = ((x - middle) / (spread + 1e-5)).flatten(0, 1).unflatten(-1, (-1, self.patch))
        found = self.out(self.parts(self.enter(patches) + self.places).flatten(1))
        return found[:, :ahead].unflatten(0, x.shape[:2]) * spread + middle


class Actor(nn.Module):
    """What to do, and what it is worth."""

    def __init__(self, seen: int, wide: int, num: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(seen, wide), nn.Tanh(), nn.Linear(wide, wide), nn.Tanh(), nn.Linear(wide, wide), nn.Tanh()
        )
        self.chances, self.value = nn.Linear(wide, num), nn.Linear(wide, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x)
        return self.chances(x), self.value(x)


class _Flat(nn.Module):
    """A convolution along time as one over pictures of height one, in channels_last."""

    def __init__(self, along: nn.Conv1d) -> None:
        super().__init__()
        size: Any = along.kernel_size[0]
        self.inner = nn.Conv2d(
            along.in_channels, along.out_channels, (1, size), 1, (0, size // 2), groups=along.groups
        ).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.unsqueeze(2).contiguous(memory_format=torch.channels_last)
        return self.inner(flat).squeeze(2)


def flattened(block: Any) -> nn.Module:
    """The block with its convolution along time as a flat picture."""
    block.walk = _Flat(block.walk)
    return block
