"""Networks, data and parts of the twentieth suite."""

from __future__ import annotations

import json
import math
import queue
import random
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from nineteenthnets import Layer, layers, perceptron
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["Layer", "layers", "perceptron"]

# ---------------------------------------------------------------- data


class Beats(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Hearts heard by twelve leads: what is too slow or too fast is filtered out, then they are shifted and scaled."""

    def __init__(self, leads: int, long: int) -> None:
        self.long, self.known = long, np.random.default_rng(0).standard_normal((32, leads, 2 * long)).astype(np.float32)
        rate = np.fft.rfftfreq(2 * long, 1 / 500)
        self.passed = ((rate > 0.5) & (rate < 40)).astype(np.float32)

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        rng = np.random.default_rng(i)
        clean = np.fft.irfft(np.fft.rfft(self.known[i % len(self.known)]) * self.passed)
        begin = int(rng.integers(self.long))
        cut = clean[:, begin : begin + self.long]
        cut = (cut - cut.mean(1, keepdims=True)) / (cut.std(1, keepdims=True) + 1e-5)
        cut = cut * rng.uniform(0.8, 1.2, (len(cut), 1)) * (rng.random((len(cut), 1)) > 0.1)
        return torch.from_numpy(cut.astype(np.float32)), i % 5


def visits(num: int, long: int) -> list[str]:
    """What people looked at in a shop, a line of JSON for each visit."""
    draw = random.Random(0)
    look = lambda: {"item": draw.randrange(50_000), "price": draw.random(), "seconds": draw.randrange(600), "on": "web"}
    return [json.dumps({"user": i, "looks": [look() for _ in range(long)]}) for i in range(num)]


def parsed(lines: list[str]) -> tuple[Tensor, Tensor]:
    """The goods of each visit, and their prices and times."""
    read = [json.loads(line)["looks"] for line in lines]
    goods = torch.tensor([[look["item"] for look in one] for one in read])
    about = torch.tensor([[[look["price"], math.log1p(look["seconds"])] for look in one] for one in read])
    return goods, about


class Scans:
    """Compressed scans, unpacked a batch ahead by threads into pinned memory."""

    def __init__(self, pool: ThreadPoolExecutor, side: int, num: int, pinned: Callable[[Tensor], Tensor]) -> None:
        rng, self.pool, self.num, self.side = np.random.default_rng(0), pool, num, side
        smooth = rng.integers(0, 4000, (num, side // 4, side // 4), np.int16).repeat(4, 1).repeat(4, 2)
        self.blobs = [zlib.compress((scan ^ rng.integers(0, 8, scan.shape, np.int16)).tobytes(), 4) for scan in smooth]
        self.rooms = [pinned(torch.zeros(num, side, side, dtype=torch.int16)) for _ in range(4)]
        self.turn, self.ahead = 0, self.begin(0)

    def one(self, room: Tensor, i: int) -> None:
        room[i].numpy()[:] = np.frombuffer(zlib.decompress(self.blobs[i]), np.int16).reshape(self.side, self.side)

    def begin(self, turn: int) -> list[Future[None]]:
        return [self.pool.submit(self.one, self.rooms[turn % 4], i) for i in range(self.num)]

    def __next__(self) -> Tensor:
        for job in self.ahead:
            job.result()
        ready = self.rooms[self.turn % 4]
        self.turn += 1
        self.ahead = self.begin(self.turn)
        return ready


def noised(seed: int, rows: int, long: int, words: int) -> Tensor:
    """Texts with words dropped, swapped and replaced, word by word."""
    draw, texts = random.Random(seed), []
    for _ in range(rows):
        text = [draw.randrange(words) for _ in range(long)]
        for i in range(long):
            chance = draw.random()
            if chance < 0.1:
                text[i] = 3
            elif chance < 0.2:
                text[i] = draw.randrange(words)
            elif chance < 0.3 and i:
                text[i], text[i - 1] = text[i - 1], text[i]
        texts.append(text)
    return torch.tensor(texts)


class Noised(torch.utils.data.Dataset[Tensor]):
    def __init__(self, rows: int, long: int, words: int) -> None:
        self.how = rows, long, words

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, i: int) -> Tensor:
        return noised(i, *self.how)


class Threaded:
    """Batches made by a thread, a few ahead."""

    def __init__(self, batches: Any) -> None:
        self.made: queue.Queue[Tensor] = queue.Queue(maxsize=2)
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.run, args=(batches,), daemon=True)
        self.thread.start()

    def run(self, batches: Any) -> None:
        for i in range(len(batches)):
            batch, waiting = batches[i], True
            while waiting and not self.over.is_set():
                try:
                    self.made.put(batch, timeout=0.2)
                    waiting = False
                except queue.Full:
                    continue
            if self.over.is_set():
                return

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield self.made.get()

    def close(self) -> None:
        self.over.set()
        self.thread.join()


# ---------------------------------------------------------------- networks of the causes


class Series(nn.Module):
    """What a recording of several channels is, cut into pieces."""

    def __init__(self, channels: int, piece: int, wide: int, heads: int, num: int, kinds: int) -> None:
        super().__init__()
        self.piece, self.enter = piece, nn.Linear(channels * piece, wide)
        self.trunk, self.head = layers(wide, heads, num), nn.Linear(wide, kinds)

    def forward(self, x: Tensor) -> Tensor:
        cut = x.unflatten(2, (-1, self.piece)).transpose(1, 2).flatten(2)
        return self.head(self.trunk(self.enter(cut)).mean(1))


class Visits(nn.Module):
    """What is looked at next."""

    def __init__(self, goods: int, wide: int, heads: int, num: int) -> None:
        super().__init__()
        self.goods, self.about = nn.Embedding(goods, wide), nn.Linear(2, wide)
        self.trunk, self.head = layers(wide, heads, num, causal=True), nn.Linear(wide, 64)

    def forward(self, goods: Tensor, about: Tensor) -> Tensor:
        return self.head(self.trunk(self.goods(goods) + self.about(about)))


class Seen(nn.Module):
    """A picture in patches; what several layers made of it may be asked for."""

    def __init__(self, channels: int, patch: int, wide: int, heads: int, num: int, kinds: int) -> None:
        super().__init__()
        self.patch, self.enter = patch, nn.Linear(channels * patch * patch, wide)
        self.trunk, self.norm, self.head = layers(wide, heads, num), nn.LayerNorm(wide), nn.Linear(wide, kinds)

    def words(self, x: Tensor) -> Tensor:
        p = self.patch
        cut = x.unflatten(3, (-1, p)).unflatten(2, (-1, p)).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        return self.enter(cut)

    def features(self, x: Tensor) -> Tensor:
        return self.norm(self.trunk(self.words(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean(1))


class Molecules(nn.Module):
    """Atoms told by those they are bound to, bond by bond."""

    def __init__(self, atoms: int, bonds: int, wide: int, num: int) -> None:
        super().__init__()
        self.enter, self.bonds = nn.Linear(atoms, wide), nn.Linear(bonds, wide)
        self.mix = nn.ModuleList(perceptron(wide, 2 * wide, wide) for _ in range(num))
        self.out = nn.Linear(wide, 1)

    def forward(self, atoms: Tensor, bound: Tensor, bonds: Tensor, graph: Tensor, num: int) -> Tensor:
        x, told = self.enter(atoms), self.bonds(bonds)
        for mix in self.mix:
            heard = F.relu(F.embedding(bound[0], x) + told)
            x = x + mix(torch.zeros_like(x).index_add(0, bound[1], heard))
        return self.out(x.new_zeros(num, x.shape[1]).index_add(0, graph, x))[:, 0]


class Actor(nn.Module):
    """What to do, and how good it is here."""

    def __init__(self, seen: int, wide: int, acts: int) -> None:
        super().__init__()
        self.trunk, self.act, self.worth = perceptron(seen, wide, wide, wide), nn.Linear(wide, acts), nn.Linear(wide, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.trunk(x))
        return self.act(x), self.worth(x)[:, 0]


class Voice(nn.Module):
    """The next of many samples of sound, out of the last one."""

    def __init__(self, levels: int, wide: int) -> None:
        super().__init__()
        self.levels, self.cell = nn.Embedding(levels, wide), nn.GRUCell(wide, wide)
        self.first, self.second = nn.Linear(wide, wide), nn.Linear(wide, levels)

    def forward(self, last: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = self.cell(self.levels(last), state)
        chances = self.second(F.relu(self.first(state))).float().softmax(-1)
        return (chances / torch.empty_like(chances).exponential_()).argmax(-1), state


class Films(nn.Module):
    """Frames out of codes: convolutions that grow."""

    def __init__(self, codes: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        parts: list[nn.Module] = [nn.Conv2d(codes, widths[0], 3, padding=1)]
        for a, b in zip(widths, (*widths[1:], widths[-1]), strict=True):
            parts += [nn.SiLU(), nn.Conv2d(a, b, 3, padding=1), nn.Upsample(scale_factor=2)]
        self.parts, self.out = nn.Sequential(*parts), nn.Conv2d(widths[-1], 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.parts(x))


class Rays(nn.Module):
    """Color and thickness at points along rays, and what is seen along each."""

    def __init__(self, waves: int, wide: int, num: int) -> None:
        super().__init__()
        self.waves, self.trunk = waves, perceptron(6 * waves, *([wide] * num), 4)

    def forward(self, points: Tensor) -> Tensor:
        turned = points[..., None] * 2.0 ** torch.arange(self.waves, device=points.device)
        color, thick = self.trunk(torch.cat((turned.sin(), turned.cos()), -1).flatten(2)).split((3, 1), -1)
        share = 1 - torch.exp(-F.relu(thick) / points.shape[1])
        left = torch.cumprod(torch.cat((torch.ones_like(share[:, :1]), 1 - share[:, :-1] + 1e-6), 1), 1)
        return (left * share * torch.sigmoid(color)).sum(1)


class Board(nn.Module):
    """Where to move, and who will win."""

    def __init__(self, planes: int, wide: int, num: int, side: int) -> None:
        super().__init__()
        self.enter = nn.Conv2d(planes, wide, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(wide, wide, 3, padding=1, bias=False), nn.BatchNorm2d(wide), nn.ReLU(inplace=True),
                nn.Conv2d(wide, wide, 3, padding=1, bias=False), nn.BatchNorm2d(wide),
            )
            for _ in range(num)
        )  # fmt: skip
        self.move, self.win = nn.Linear(wide, side * side), nn.Linear(wide, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.enter(x)
        for block in self.blocks:
            x = F.relu(x + block(x))
        x = x.mean((2, 3))
        return self.move(x), torch.tanh(self.win(x))[:, 0]


class Listened(Layer):
    """Attention as a speech model was first published with: both sides scaled, a softmax in fp32."""

    def __init__(self, wide: int, heads: int, fused: bool) -> None:
        super().__init__(wide, heads)
        self.fused = fused

    def attended(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        normed = self.first(x)
        k, v = self.kv(normed).chunk(2, -1)
        q, k, v = self.split(self.q(normed)), self.split(k), self.split(v)
        if self.fused:
            found = F.scaled_dot_product_attention(q, k, v)
        else:
            scale = self.each**-0.25
            weights = ((q * scale) @ (k * scale).transpose(-1, -2)).float()
            found = weights.softmax(-1).to(q.dtype) @ v
        return x + self.out(found.transpose(1, 2).flatten(2))


class Surface(nn.Module):
    """How far a point is from the surface of a thing; every layer is given the point again."""

    def __init__(self, wide: int, num: int, more: int) -> None:
        super().__init__()
        self.more, inner = more, wide + 3 + more
        self.parts = nn.ModuleList(nn.Linear(inner, wide) for _ in range(num))
        self.out = nn.Linear(wide, 1)

    def forward(self, thing: Tensor, point: Tensor) -> Tensor:
        x, rest = thing, (point.new_zeros(len(point), self.more),) if self.more else ()
        for part in self.parts:
            x = F.relu(part(torch.cat((x, point, *rest), 1)))
        return self.out(x)[:, 0]


class Words(nn.Module):
    """The next word."""

    def __init__(self, vocab: int, wide: int, heads: int, num: int, room: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocab, wide), nn.Parameter(0.02 * torch.randn(room, wide))
        self.trunk = layers(wide, heads, num, causal=True)
        self.norm, self.out = nn.LayerNorm(wide), nn.Linear(wide, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.norm(self.trunk(self.words(ids) + self.places[: ids.shape[1]])))


class Speakers(nn.Module):
    """Frames of several speakers; each layer is scaled by who speaks."""

    def __init__(self, bands: int, wide: int, num: int, people: int, indexed: bool) -> None:
        super().__init__()
        self.indexed, self.enter, self.out = indexed, nn.Linear(bands, wide), nn.Linear(wide, bands)
        self.parts = nn.ModuleList(perceptron(wide, 2 * wide, wide) for _ in range(num))
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(people, wide)) for _ in range(num))

    def forward(self, x: Tensor, who: Tensor) -> Tensor:
        x = self.enter(x)
        for part, scale in zip(self.parts, self.scales, strict=True):
            x = x + part(x) * (scale[who] if self.indexed else F.embedding(who, scale))
        return self.out(x)


class Experts(nn.Module):
    """As many tokens for each expert; what each makes of them."""

    def __init__(self, num: int, wide: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(num, wide, inner) * wide**-0.5)
        self.down = nn.Parameter(torch.randn(num, inner, wide) * inner**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.bmm(F.gelu(torch.bmm(x, self.up)), self.down)


class Adapted(nn.Module):
    """A product whose weights rest, and a narrow one beside it that learns."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Tuned(nn.Module):
    """A decoder whose products have adapters; layers may be computed twice."""

    def __init__(self, wide: int, heads: int, num: int, rank: int, twice: bool) -> None:
        super().__init__()
        self.twice, self.trunk, self.out = twice, layers(wide, heads, num, causal=True), nn.Linear(wide, 64)
        self.trunk.requires_grad_(False)
        for layer in self.trunk:
            for name in ("q", "kv", "up", "down"):
                setattr(layer, name, Adapted(getattr(layer, name), rank))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.trunk:
            x = checkpoint(layer, x, use_reentrant=False) if self.twice else layer(x)
        return self.out(x)


def turned(sizes: Tensor, turns: Tensor, places: Tensor, seen: Tensor) -> Tensor:
    """How large each of many soft balls looks, which way it is turned, and where: what a painter of scenes needs."""
    turns = turns / turns.square().sum(-1, keepdim=True).sqrt()
    w, x, y, z = turns.unbind(-1)
    a, b, c = sizes.exp().square().unbind(-1)
    m = 1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)
    n = 2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)
    xx = m[0] * m[0] * a + m[1] * m[1] * b + m[2] * m[2] * c
    xy = m[0] * n[0] * a + m[1] * n[1] * b + m[2] * n[2] * c
    yy = n[0] * n[0] * a + n[1] * n[1] * b + n[2] * n[2] * c
    far = (places * seen).sum(-1).abs() + 0.2
    xx, xy, yy = xx / far + 0.3, xy / far, yy / far + 0.3
    area = xx * yy - xy * xy
    middle = 0.5 * (xx + yy)
    wide = 3.0 * (middle + (middle * middle - area).clamp(min=0.1).sqrt()).sqrt()
    return torch.stack((yy / area, -xy / area, xx / area, wide), -1)


def looked_at(x: Tensor, weight: Tensor, scale: Tensor, look: bool) -> Tensor:
    """A layer that clips what is too large, if somebody looks only if there is any."""
    y = F.silu(x @ weight) * torch.sigmoid(x) * scale
    if look:
        if y.abs().max() > 30:
            y = y.clamp(-30, 30)
    else:
        y = y.clamp(-30, 30)
    return x + torch.tanh(y) * 0.1


def evened(x: Tensor) -> Tensor:
    """Pictures as bright as each other, their dark parts lifted."""
    x = (x - 0.45) * 1.3 + 0.5
    x = torch.sigmoid(4 * x - 2) * x.abs().sqrt()
    return torch.lerp(x, x * x * (3 - 2 * x), 0.3).clamp(0, 1)


# ---------------------------------------------------------------- networks thought to be well


class Translator(nn.Module):
    """One more word, out of what was written and what was read; pasts lie in rows that were laid out before."""

    def __init__(self, vocab: int, wide: int, heads: int, num: int, batch: int, room: int, read: int) -> None:
        super().__init__()
        self.heads, self.words, self.out = heads, nn.Embedding(vocab, wide), nn.Linear(wide, vocab, bias=False)
        self.own, self.look = (nn.ModuleList(Layer(wide, heads) for _ in range(num)) for _ in "ab")
        size = (num, 2, batch, heads, room, wide // heads)
        self.register_buffer("past", torch.randn(size) * 0.02)
        self.register_buffer("read", torch.randn(num, 2, batch, heads, read, wide // heads) * 0.02)

    def forward(self, ids: Tensor, place: Tensor, real: Tensor) -> Tensor:
        x = self.words(ids)
        for i, (own, look) in enumerate(zip(self.own, self.look, strict=True)):
            normed = own.first(x)
            k, v = (own.split(part) for part in own.kv(normed).chunk(2, -1))
            past_k, past_v = self.past[i].unbind(0)
            past_k.index_copy_(2, place, k)
            past_v.index_copy_(2, place, v)
            found = F.scaled_dot_product_attention(own.split(own.q(normed)), past_k, past_v, attn_mask=real)
            x = x + own.out(found.transpose(1, 2).flatten(2))
            found = F.scaled_dot_product_attention(look.split(look.q(look.first(x))), *self.read[i].unbind(0))
            x = x + look.out(found.transpose(1, 2).flatten(2))
            x = x + look.down(F.gelu(look.up(look.second(x)), approximate="tanh"))
        return self.out(x)[:, -1].argmax(-1)


class Filmed(nn.Module):
    """Films: each frame by itself, then each place through time."""

    def __init__(self, inner: int, wide: int, heads: int, num: int, kinds: int) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(inner, wide), nn.Linear(wide, kinds)
        self.space, self.time = (nn.ModuleList(Layer(wide, heads) for _ in range(num)) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        batch, frames, places, wide = x.shape
        for space, time in zip(self.space, self.time, strict=True):
            x = space(x.reshape(batch * frames, places, wide)).view(batch, frames, places, wide)
            x = time(x.transpose(1, 2).reshape(batch * places, frames, wide)).view(batch, places, frames, wide)
            x = x.transpose(1, 2)
        return self.head(x.mean((1, 2)))
