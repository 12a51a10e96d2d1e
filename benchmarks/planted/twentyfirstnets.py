"""Networks, data and parts of the twenty-first suite."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator
from typing import IO, Any

import numpy as np
import torch
import torch.nn.functional as F
from nineteenthnets import Layer, layers, perceptron
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["Layer", "layers", "perceptron"]

# ---------------------------------------------------------------- data


class Maps(torch.utils.data.IterableDataset[tuple[Tensor, Tensor]]):
    """Batches of tiles of maps, each cut out, turned and mirrored by the worker that makes the batch."""

    def __init__(self, side: int, num: int) -> None:
        self.side, self.num = side, num
        self.known = np.random.default_rng(0).integers(0, 255, (8, 4 * side, 4 * side, 8), np.uint8)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = torch.utils.data.get_worker_info()
        rng = np.random.default_rng(worker.id if worker else 0)
        while True:
            tiles = np.stack([self.one(rng) for _ in range(self.num)])
            yield torch.from_numpy(tiles), torch.from_numpy(rng.integers(0, 12, self.num))

    def one(self, rng: np.random.Generator) -> np.ndarray:
        top, left = rng.integers(0, 3 * self.side, 2)
        tile = self.known[rng.integers(8), top : top + self.side, left : left + self.side]
        return np.rot90(tile[:, ::-1] if rng.random() < 0.5 else tile, rng.integers(4))


class Diary:
    """Numbers of each step, brought to the host behind the step and written down by a thread."""

    def __init__(self, file: IO[str], room: Callable[[], Tensor], cuda: bool) -> None:
        self.file, self.cuda, self.rooms, self.turn = file, cuda, [room() for _ in range(8)], 0
        self.noted: queue.Queue[Any] = queue.Queue()
        self.thread = threading.Thread(target=self.write, daemon=True)
        self.thread.start()

    def note(self, numbers: Tensor) -> None:
        room = self.rooms[self.turn % len(self.rooms)]
        room.copy_(numbers, non_blocking=True)
        there = torch.cuda.Event(blocking=True) if self.cuda else None
        if there is not None:
            there.record()
        self.noted.put((self.turn, room, there))
        self.turn += 1

    def write(self) -> None:
        while (item := self.noted.get()) is not None:
            turn, room, there = item
            if there is not None:
                there.synchronize()
            self.file.write(json.dumps({"step": turn, "values": room.tolist()}) + "\n")

    def close(self) -> None:
        self.noted.put(None)
        self.thread.join()


def roads(nodes: int, each: int, device: str) -> tuple[Tensor, Tensor]:
    """Crossings and those next to them, both ways: where the neighbors of each begin, and who they are."""
    rng = np.random.default_rng(0)
    one = rng.integers(0, nodes, nodes * each // 2)
    other = (one + rng.integers(1, 200, len(one))) % nodes
    ends, begins = np.concatenate((one, other)), np.concatenate((other, one))
    order = np.argsort(ends, kind="stable")
    offsets = np.concatenate(([0], np.bincount(ends, minlength=nodes).cumsum()))
    return torch.from_numpy(offsets).to(device), torch.from_numpy(begins[order]).to(device)


# ---------------------------------------------------------------- pictures


class Tiles(nn.Module):
    """What a tile of a map shows; runs in channels_last."""

    def __init__(self, widths: tuple[int, ...], deep: int, kinds: int) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for a, b in zip((8, *widths), widths, strict=False):
            parts += [nn.Conv2d(a, b, 3, 2 if a > 8 else 1, 1), nn.ReLU(inplace=True)]
            for _ in range(deep):
                parts += [nn.Conv2d(b, b, 3, padding=1), nn.ReLU(inplace=True)]
        self.parts, self.head = nn.Sequential(*parts), nn.Linear(widths[-1], kinds)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.parts(x).mean((2, 3)))


class Outlined(nn.Module):
    """Which tissues each pixel of one large scan belongs to: down, up, and what was seen on the way down beside it."""

    def __init__(self, channels: int, widths: tuple[int, ...], kinds: int) -> None:
        super().__init__()
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for a, b in zip((channels, *widths), widths, strict=False):
            self.down.append(self.pair(a, b))
        for a, b in zip(widths[1:], widths, strict=False):
            self.up.append(nn.Sequential(nn.Conv2d(a + b, b, 3, padding=1), nn.ReLU(inplace=True)))
        self.out = nn.Conv2d(widths[0], kinds, 1)

    def pair(self, a: int, b: int) -> nn.Module:
        first, second = nn.Conv2d(a, b, 3, padding=1), nn.Conv2d(b, b, 3, padding=1)
        return nn.Sequential(first, nn.ReLU(inplace=True), second, nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        seen = list[Tensor]()
        for part in self.down:
            x = part(F.max_pool2d(x, 2) if seen else x)
            seen.append(x)
        for part, before in zip(reversed(self.up), reversed(seen[:-1]), strict=True):
            x = part(torch.cat((F.interpolate(x, scale_factor=2), before), 1))
        return self.out(x).permute(0, 2, 3, 1).flatten(0, 2)


class Player(nn.Module):
    """How good each move is, from the last eight pictures of a game; runs in channels_last."""

    def __init__(self, wide: int, acts: int) -> None:
        super().__init__()
        sizes = ((8, wide, 1), (wide, wide, 1), (wide, 2 * wide, 2), (2 * wide, 2 * wide, 1), (2 * wide, 4 * wide, 2))
        made = [(nn.Conv2d(a, b, 3, stride, 1), nn.ReLU(inplace=True)) for a, b, stride in sizes]
        self.parts, self.head = nn.Sequential(*(part for pair in made for part in pair)), nn.Linear(4 * wide, acts)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.parts(x).mean((2, 3)))


class Patches(nn.Module):
    """Pictures in patches; each depth has weights of its own rate."""

    def __init__(self, inner: int, wide: int, heads: int, num: int, places: int, kinds: int) -> None:
        super().__init__()
        self.enter, self.places = nn.Linear(inner, wide), nn.Parameter(0.02 * torch.randn(places, wide))
        self.trunk, self.norm, self.head = layers(wide, heads, num), nn.LayerNorm(wide), nn.Linear(wide, kinds)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.trunk(self.enter(x) + self.places)).mean(1))

    def groups(self, rate: float, fall: float) -> list[dict[str, Any]]:
        """Weights by depth, each depth twice: those that decay, and those that do not."""
        found, depths = list[dict[str, Any]](), [self.enter, *self.trunk, self.norm, self.head]
        for depth, part in enumerate(depths):
            for decay, wanted in ((0.05, lambda p: p.dim() > 1), (0.0, lambda p: p.dim() == 1)):
                some = [p for p in part.parameters() if wanted(p)]
                if some:
                    found.append({"params": some, "lr": rate * fall ** (len(depths) - depth), "weight_decay": decay})
        return [*found, {"params": [self.places], "lr": rate * fall ** len(depths), "weight_decay": 0.0}]


class Flow(nn.Module):
    """Which way latents of a picture should go, given what it shows and how far it is."""

    def __init__(self, inner: int, wide: int, heads: int, num: int, kinds: int, places: int) -> None:
        super().__init__()
        self.enter, self.out = nn.Linear(inner, wide), nn.Linear(wide, inner)
        self.kinds, self.when = nn.Embedding(kinds, wide), perceptron(64, wide, wide, act=nn.SiLU)
        self.places = nn.Parameter(0.02 * torch.randn(places, wide))
        self.trunk, self.norm = layers(wide, heads, num), nn.LayerNorm(wide)
        self.register_buffer("rates", torch.exp(torch.linspace(0, 6, 32)), persistent=False)

    def forward(self, x: Tensor, when: Tensor, kinds: Tensor) -> Tensor:
        turned = when[:, None] * self.rates
        told = self.kinds(kinds) + self.when(torch.cat((turned.sin(), turned.cos()), 1))
        return self.out(self.norm(self.trunk(self.enter(x) + self.places + told[:, None])))


# ---------------------------------------------------------------- texts and sounds


class Songs(nn.Module):
    """The next sound, as one code out of each of several books."""

    def __init__(self, books: int, codes: int, wide: int, heads: int, num: int) -> None:
        super().__init__()
        self.books, self.codes = books, nn.Embedding(books * codes, wide)
        self.trunk, self.norm = layers(wide, heads, num, causal=True), nn.LayerNorm(wide)
        self.out = nn.Linear(wide, books * codes, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.norm(self.trunk(self.codes(ids).sum(2)))).unflatten(-1, (self.books, -1))


class Sung(Songs):
    """One more sound for each song; keys and values lie where they were laid out before."""

    def __init__(self, books: int, codes: int, wide: int, heads: int, num: int, batch: int, room: int) -> None:
        super().__init__(books, codes, wide, heads, num)
        self.register_buffer("past", 0.02 * torch.randn(num, 2, batch, heads, room, wide // heads))

    def forward(self, ids: Tensor, place: Tensor, real: Tensor) -> Tensor:
        x = self.codes(ids).sum(2)
        for layer, (keys, values) in zip(self.trunk, self.past, strict=True):
            normed = layer.first(x)
            k, v = (layer.split(part) for part in layer.kv(normed).chunk(2, -1))
            keys.index_copy_(2, place, k)
            values.index_copy_(2, place, v)
            found = F.scaled_dot_product_attention(layer.split(layer.q(normed)), keys, values, attn_mask=real)
            x = x + layer.out(found.transpose(1, 2).flatten(2))
            x = x + layer.down(F.gelu(layer.up(layer.second(x)), approximate="tanh"))
        chances = self.out(self.norm(x)).unflatten(-1, (self.books, -1)).float().softmax(-1)
        return (chances / torch.empty_like(chances).exponential_()).argmax(-1)


class Tagged(nn.Module):
    """What kind of word each word is."""

    def __init__(self, vocab: int, wide: int, heads: int, num: int, tags: int) -> None:
        super().__init__()
        self.words, self.dropped = nn.Embedding(vocab, wide), nn.Dropout(0.1)
        self.trunk, self.norm, self.head = layers(wide, heads, num), nn.LayerNorm(wide), nn.Linear(wide, tags)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.trunk(self.dropped(self.words(ids)))))


class Masked(Layer):
    """A layer that is told who may look at whom."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        normed = self.first(x)
        k, v = self.kv(normed).chunk(2, -1)
        found = F.scaled_dot_product_attention(self.split(self.q(normed)), self.split(k), self.split(v), attn_mask=mask)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x)), approximate="tanh"))


class Prefixed(nn.Module):
    """The next word behind a prefix, all of which may be seen by all of its words."""

    def __init__(self, vocab: int, wide: int, heads: int, num: int) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(vocab, wide), nn.Linear(wide, vocab, bias=False)
        self.trunk, self.norm = nn.ModuleList(Masked(wide, heads) for _ in range(num)), nn.LayerNorm(wide)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.trunk:
            x = layer(x, mask)
        return self.out(self.norm(x))


class Gated(nn.Module):
    """A layer with rotated keys, norms by their mean square and a gate; its sizes are whatever they are."""

    def __init__(self, wide: int, heads: int, inner: int, turns: bool = True) -> None:
        super().__init__()
        self.heads, self.turns = heads, turns
        self.first, self.second = nn.RMSNorm(wide), nn.RMSNorm(wide)
        self.qkv, self.out = nn.Linear(wide, 3 * wide, bias=False), nn.Linear(wide, wide, bias=False)
        self.up, self.down = nn.Linear(wide, 2 * inner, bias=False), nn.Linear(inner, wide, bias=False)

    def forward(self, x: Tensor, turned: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        if turned is not None:
            q, k = (self.turn(part, *turned.unbind(0)) for part in (q, k))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        gate, up = self.up(self.second(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Spared(nn.Module):
    """Layers of which only the entries are kept for the way back."""

    def __init__(self, wide: int, heads: int, num: int) -> None:
        super().__init__()
        self.trunk = layers(wide, heads, num)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.trunk:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


# ---------------------------------------------------------------- columns, graphs, fields


class Crossed(nn.Module):
    """Who clicks: rows of one large table, crossed with each other, and a network behind."""

    def __init__(self, columns: int, each: int, deep: int, wide: int) -> None:
        super().__init__()
        inner = columns * each
        self.cross = nn.ModuleList(nn.Linear(inner, inner) for _ in range(deep))
        self.top = perceptron(inner, wide, wide, 8)

    def forward(self, found: Tensor) -> Tensor:
        x = found
        for cross in self.cross:
            x = torch.addcmul(x, found, cross(x))
        return self.top(x).sum(1)


class Summed(torch.autograd.Function):
    """What the neighbors of each say, summed; roads go both ways, so that slopes are summed alike."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, offsets: Tensor, near: Tensor) -> Tensor:
        ctx.save_for_backward(offsets, near)
        return torch.segment_reduce(x.index_select(0, near), "sum", offsets=offsets, unsafe=True, initial=0)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        offsets, near = ctx.saved_tensors
        heard = slope.contiguous().index_select(0, near)
        return torch.segment_reduce(heard, "sum", offsets=offsets, unsafe=True, initial=0), None, None


class Crossings(nn.Module):
    """How busy each crossing will be, from those around it."""

    def __init__(self, inner: int, wide: int, num: int) -> None:
        super().__init__()
        self.enter, self.out = nn.Linear(inner, wide), nn.Linear(wide, 8)
        self.parts = nn.ModuleList(perceptron(wide, 4 * wide, wide) for _ in range(num))

    def forward(self, x: Tensor, offsets: Tensor, near: Tensor) -> Tensor:
        x = self.enter(x)
        for part in self.parts:
            x = x + part(Summed.apply(x, offsets, near))
        return self.out(x)


class Fields(nn.Module):
    """What a field is at many points, from how it was measured at a few: one network for each, and their product."""

    def __init__(self, seen: int, wide: int, num: int, shared: int) -> None:
        super().__init__()
        self.branch = perceptron(seen, *([wide] * num), shared, act=nn.GELU)
        self.trunk = perceptron(16, *([wide] * num), shared, act=nn.GELU)

    def forward(self, seen: Tensor, points: Tensor) -> Tensor:
        return self.branch(seen) @ self.trunk(points).T
