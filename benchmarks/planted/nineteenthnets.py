"""Networks, data and parts of the nineteenth suite."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

# ---------------------------------------------------------------- data


class Gestures(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Where the joints of a body are, turned, stretched in time and shaken, one recording at a time."""

    def __init__(self, frames: int, joints: int) -> None:
        self.frames, self.known = frames, np.random.default_rng(0).standard_normal((16, 2 * frames, joints, 3))

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        rng = np.random.default_rng(i)
        moved, pace = self.known[i % len(self.known)], rng.uniform(0.8, 1.6)
        at = np.clip(np.arange(self.frames) * pace, 0, len(moved) - 1.001)
        low, share = at.astype(int), (at % 1)[:, None, None]
        moved = moved[low] * (1 - share) + moved[low + 1] * share
        turned, _ = np.linalg.qr(rng.standard_normal((3, 3)))
        moved = moved @ turned + 0.01 * rng.standard_normal(moved.shape)
        speed = np.diff(moved, axis=0, prepend=moved[:1])
        both = np.concatenate((moved - moved.mean(1, keepdims=True), speed), -1)
        return torch.from_numpy(both.reshape(self.frames, -1).astype(np.float32)), i % 60


class Friends:
    """Who knows whom: as lists that Python goes through, and as one row of numbers on a device."""

    def __init__(self, nodes: int, most: int, device: str) -> None:
        draw = random.Random(0)
        self.near = [[draw.randrange(nodes) for _ in range(draw.randrange(2, most))] for _ in range(nodes)]
        counts = torch.tensor([len(row) for row in self.near])
        self.counts, self.begins = counts.to(device), (counts.cumsum(0) - counts).to(device)
        self.flat = torch.tensor([node for row in self.near for node in row]).to(device)
        self.draw = draw

    def by_list(self, nodes: list[int], num: int) -> list[int]:
        return [self.draw.choice(self.near[node]) for node in nodes for _ in range(num)]

    def on_device(self, nodes: Tensor, num: int) -> Tensor:
        shares = torch.rand(len(nodes), num, device=nodes.device)
        places = (shares * self.counts[nodes][:, None]).long() + self.begins[nodes][:, None]
        return self.flat[places].flatten()


# ---------------------------------------------------------------- what several networks share


class Layer(nn.Module):
    """Attention and a wide layer, norms first; queries may have more heads than keys."""

    def __init__(self, wide: int, heads: int, shared: int = 1, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.shared, self.causal, self.each = heads, shared, causal, wide // heads
        self.first, self.second = nn.LayerNorm(wide), nn.LayerNorm(wide)
        self.q, self.kv = nn.Linear(wide, wide), nn.Linear(wide, 2 * wide // shared)
        self.out, self.up, self.down = nn.Linear(wide, wide), nn.Linear(wide, 4 * wide), nn.Linear(4 * wide, wide)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.each)).transpose(1, 2)

    def attended(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        normed = self.first(x)
        k, v = self.kv(normed if seen is None else seen).chunk(2, -1)
        found = F.scaled_dot_product_attention(
            self.split(self.q(normed)), self.split(k), self.split(v), is_causal=self.causal, enable_gqa=self.shared > 1
        )
        return x + self.out(found.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        x = self.attended(x, seen)
        return x + self.down(F.gelu(self.up(self.second(x)), approximate="tanh"))


def layers(wide: int, heads: int, num: int, **how: Any) -> nn.Sequential:
    return nn.Sequential(*(Layer(wide, heads, **how) for _ in range(num)))


def perceptron(*sizes: int, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    parts = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), act())]
    return nn.Sequential(*parts[:-1])


def convolved(inner: int, wide: int, size: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inner, wide, size, stride, size // 2, groups=groups, bias=False), nn.BatchNorm2d(wide), nn.SiLU()
    )


# ---------------------------------------------------------------- networks of the causes


class Moved(nn.Module):
    """Which gesture it is."""

    def __init__(self, seen: int, wide: int, heads: int, num: int, kinds: int) -> None:
        super().__init__()
        self.enter, self.trunk, self.head = nn.Linear(seen, wide), layers(wide, heads, num), nn.Linear(wide, kinds)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(self.enter(x)).mean(1))


class Weather(nn.Module):
    """Fields over the globe, cut into squares, and what they are like six hours later."""

    def __init__(self, fields: int, square: int, wide: int, heads: int, num: int) -> None:
        super().__init__()
        self.square, inner = square, fields * square * square
        self.enter, self.trunk, self.out = nn.Linear(inner, wide), layers(wide, heads, num), nn.Linear(wide, inner)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        s = self.square
        cut = x.unflatten(3, (-1, s)).unflatten(2, (-1, s)).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        return self.out(self.trunk(self.enter(cut))), cut


class Clips(nn.Module):
    """Films in small cubes, each a word."""

    def __init__(self, inner: int, wide: int, heads: int, num: int, kinds: int) -> None:
        super().__init__()
        self.enter, self.trunk, self.head = nn.Linear(inner, wide), layers(wide, heads, num), nn.Linear(wide, kinds)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(self.enter(x)).mean(1))


class Weighed(nn.Module):
    """A block around PyTorch's own attention, called as its documentation calls it."""

    def __init__(self, wide: int, heads: int, weights: bool) -> None:
        super().__init__()
        self.weights, self.attend = weights, nn.MultiheadAttention(wide, heads, batch_first=True)
        self.first, self.second = nn.LayerNorm(wide), nn.LayerNorm(wide)
        self.feed = nn.Sequential(nn.Linear(wide, 4 * wide), nn.GELU(), nn.Linear(4 * wide, wide))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.first(x)
        found, _ = self.attend(normed, normed, normed, need_weights=self.weights)
        x = x + found
        return x + self.feed(self.second(x))


class Dropping(Layer):
    """A layer that is left out now and then while it learns."""

    def __init__(self, wide: int, heads: int, chance: float) -> None:
        super().__init__(wide, heads)
        self.chance = chance

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        x = self.attended(x, seen)
        if self.training and torch.rand(()) < self.chance:
            return x
        return x + self.down(F.gelu(self.up(self.second(x))))


class Warming(nn.Module):
    """Gates that open as time goes by, which the module counts."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.turn, self.norm = 0, nn.LayerNorm(wide)

    def forward(self, x: Tensor, gate: Tensor, share: Tensor | None = None) -> Tensor:
        if share is None:
            self.turn += 1
            share = 1.0 / (1 + self.turn)  # type: ignore[assignment]
        return self.norm(x + torch.sigmoid(gate) * gate * share)


class Painted(nn.Module):
    """Pictures as words out of a book of codes, some of them hidden."""

    def __init__(self, codes: int, wide: int, heads: int, num: int, room: int) -> None:
        super().__init__()
        self.codes, self.places = nn.Embedding(codes, wide), nn.Parameter(0.02 * torch.randn(room, wide))
        self.trunk, self.norm, self.out = layers(wide, heads, num), nn.LayerNorm(wide), nn.Linear(wide, codes)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.norm(self.trunk(self.codes(ids) + self.places)))


class Told(nn.Module):
    """The next word, small or large."""

    def __init__(self, vocab: int, wide: int, heads: int, num: int, room: int, shared: int = 1) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocab, wide), nn.Parameter(0.02 * torch.randn(room, wide))
        self.trunk = layers(wide, heads, num, causal=True, shared=shared)
        self.norm, self.out = nn.LayerNorm(wide), nn.Linear(wide, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.norm(self.trunk(self.words(ids) + self.places[: ids.shape[1]])))


class Heard(nn.Module):
    """Frames of sound with a mask of what was said, PyTorch's own layers."""

    def __init__(self, bands: int, wide: int, heads: int, num: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(wide, heads, 4 * wide, 0.0, "gelu", batch_first=True, norm_first=True)
        self.enter = nn.Linear(bands, wide)
        self.trunk, self.out = nn.TransformerEncoder(layer, num, enable_nested_tensor=False), nn.Linear(wide, 64)

    def forward(self, frames: Tensor, real: Tensor) -> Tensor:
        return self.out(self.trunk(self.enter(frames), src_key_padding_mask=~real))


class Bonds(nn.Module):
    """Atoms that hear from all others, more from near ones."""

    def __init__(self, wide: int, bells: int, num: int) -> None:
        super().__init__()
        self.kinds = nn.Embedding(100, wide)
        self.filters = nn.ModuleList(perceptron(bells, wide, wide, act=nn.SiLU) for _ in range(num))
        self.mix = nn.ModuleList(perceptron(wide, wide, wide, act=nn.SiLU) for _ in range(num))
        self.register_buffer("centers", torch.linspace(0, 5, bells))
        self.out = nn.Linear(wide, 1)

    def forward(self, kinds: Tensor, places: Tensor, real: Tensor) -> Tensor:
        far = torch.cdist(places.float(), places.float())[..., None]
        bells = torch.exp(-2 * (far - self.centers.float()).square()).to(places.dtype)
        shown = (real[:, :, None] & real[:, None, :])[..., None].to(places.dtype)
        x = self.kinds(kinds)
        for kernel, mix in zip(self.filters, self.mix, strict=True):
            x = x + mix((kernel(bells) * shown * x[:, None]).sum(2))
        return (self.out(x)[..., 0] * real).sum(1)


class Context(nn.Module):
    """Nodes of many graphs, each told what its whole graph is like."""

    def __init__(self, wide: int, num: int, indexed: bool) -> None:
        super().__init__()
        self.indexed = indexed
        self.nodes = nn.ModuleList(perceptron(wide, 2 * wide, wide) for _ in range(num))
        self.whole = nn.ModuleList(nn.Linear(wide, wide) for _ in range(num))

    def forward(self, x: Tensor, graph: Tensor, num: int, each: int) -> Tensor:
        for node, whole in zip(self.nodes, self.whole, strict=True):
            told = whole(x.view(num, each, -1).mean(1))
            x = x + node(x + (told[graph] if self.indexed else F.embedding(graph, told)))
        return x


class Voices(nn.Module):
    """Who speaks, from a spectrogram."""

    def __init__(self, bands: int, wide: int, heads: int, num: int) -> None:
        super().__init__()
        self.enter, self.trunk = nn.Linear(bands, wide), layers(wide, heads, num)
        self.pay, self.out = nn.Linear(wide, 1), nn.Linear(wide, 192)

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(self.enter(x))
        return F.normalize(self.out((self.pay(x).softmax(1) * x).sum(1)), dim=-1)


def changed_colors(x: Tensor, by: Tensor) -> Tensor:
    """Brightness, contrast, saturation, gamma and noise of pictures, each picture by its own."""
    bright, contrast, full, power, loud = by.view(5, -1, 1, 1, 1).unbind(0)
    x = (x * (0.8 + 0.4 * bright)).clamp(0, 1)
    x = ((x - 0.5) * (0.8 + 0.4 * contrast) + 0.5).clamp(0, 1)
    gray = 0.299 * x[:, :1] + 0.587 * x[:, 1:2] + 0.114 * x[:, 2:]
    x = torch.lerp(gray.expand_as(x), x, 0.8 + 0.4 * full).clamp(1e-4, 1)
    x = torch.exp(torch.log(x) * (0.8 + 0.4 * power))
    return (x + 0.05 * loud * torch.sin(37.0 * x) - 0.45) / 0.225


# ---------------------------------------------------------------- networks thought to be well


class Mobile(nn.Module):
    """Wide inside, one filter for each channel, narrow outside."""

    def __init__(self, widths: tuple[int, ...], num: int, kinds: int) -> None:
        super().__init__()
        self.enter, inner, parts = convolved(3, widths[0], 3, 2), widths[0], list[nn.Module]()
        for wide in widths:
            for i in range(num):
                parts.append(_Inverted(inner, wide, 1 if i else 2))
                inner = wide
        self.parts, self.head = nn.Sequential(*parts), nn.Linear(inner, kinds)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.parts(self.enter(x)).mean((2, 3)))


class _Inverted(nn.Module):
    def __init__(self, inner: int, wide: int, stride: int) -> None:
        super().__init__()
        self.around, hidden = stride == 1 and inner == wide, 4 * inner
        self.body = nn.Sequential(
            convolved(inner, hidden, 1), convolved(hidden, hidden, 3, stride, hidden),
            nn.Conv2d(hidden, wide, 1, bias=False), nn.BatchNorm2d(wide),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.around else self.body(x)


class Critic(nn.Module):
    """How real a picture is, as a number."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        pairs = zip((3, *widths), widths, strict=False)
        parts = [part for a, b in pairs for part in (nn.Conv2d(a, b, 4, 2, 1), nn.LeakyReLU(0.2))]
        self.parts, self.out = nn.Sequential(*parts), nn.Linear(widths[-1], 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.parts(x).mean((2, 3)))


def merged(x: Tensor, gone: int) -> Tensor:
    """Of every other word, those most like one of the rest are added to it."""
    left, right = x[:, ::2], x[:, 1::2]
    near = F.normalize(left, dim=-1) @ F.normalize(right, dim=-1).transpose(1, 2)
    how, which = near.max(-1)
    order = how.argsort(1, descending=True)
    wide = x.shape[-1]
    pick = lambda rows, at: rows.gather(1, at[..., None].expand(-1, -1, wide))
    into = which.gather(1, order[:, :gone])[..., None].expand(-1, -1, wide)
    right = right.scatter_reduce(1, into, pick(left, order[:, :gone]), "mean")
    return torch.cat((pick(left, order[:, gone:]), right), 1)


class Cropped(nn.Module):
    """Pictures of any size in patches."""

    def __init__(self, wide: int, heads: int, num: int, out: int) -> None:
        super().__init__()
        self.enter, self.trunk = nn.Conv2d(3, wide, 16, 16), layers(wide, heads, num)
        self.norm, self.head = nn.LayerNorm(wide), nn.Linear(wide, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.trunk(self.enter(x).flatten(2).transpose(1, 2))).mean(1))


class Captions(nn.Module):
    """What is written under a picture, word after word, each looking at the picture."""

    def __init__(self, vocab: int, wide: int, heads: int, num: int, room: int) -> None:
        super().__init__()
        self.enter, self.sight = nn.Conv2d(3, wide, 16, 16), layers(wide, heads, num)
        self.words, self.places = nn.Embedding(vocab, wide), nn.Parameter(0.02 * torch.randn(room, wide))
        self.own = nn.ModuleList(Layer(wide, heads, causal=True) for _ in range(num))
        self.look = nn.ModuleList(Layer(wide, heads) for _ in range(num))
        self.out = nn.Linear(wide, vocab, bias=False)

    def forward(self, pictures: Tensor, ids: Tensor) -> Tensor:
        seen = self.sight(self.enter(pictures).flatten(2).transpose(1, 2))
        x = self.words(ids) + self.places
        for own, look in zip(self.own, self.look, strict=True):
            x = look(own(x), seen)
        return self.out(x)


class Spoken(nn.Module):
    """Letters, how long each sounds, and the sound."""

    def __init__(self, letters: int, wide: int, heads: int, num: int, bands: int) -> None:
        super().__init__()
        self.letters, self.before, self.after = nn.Embedding(letters, wide), *(layers(wide, heads, num) for _ in "ab")
        self.long, self.out = nn.Linear(wide, 1), nn.Linear(wide, bands)

    def forward(self, ids: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        x = self.before(self.letters(ids))
        heard = x.gather(1, place[..., None].expand(-1, -1, x.shape[-1]))
        return self.out(self.after(heard)), self.long(x)[..., 0]
