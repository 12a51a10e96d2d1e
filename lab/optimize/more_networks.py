"""Further networks: state-space models, text to speech, point clouds, tables, image restoration.

Written as public code for each kind has them, at common sizes. Each entry builds (model, args, kwargs) as in
``lab/optimize/zoo.py``, whose table it extends; ``lab/optimize/models.py --models NAME …`` takes their names.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.optimize.zoo import entry
from lab.workloads import Built, _ids

# A state-space model in chunks.


def _summed(x: Tensor) -> Tensor:
    """Sums of all segments of the last dim, minus infinity above the diagonal."""
    length = x.shape[-1]
    x = x[..., None].expand(*x.shape, length)
    below = torch.tril(torch.ones(length, length, device=x.device, dtype=torch.bool), diagonal=-1)
    x = torch.cumsum(x.masked_fill(~below, 0), dim=-2)
    seen = torch.tril(torch.ones(length, length, device=x.device, dtype=torch.bool), diagonal=0)
    return x.masked_fill(~seen, -torch.inf)


def _chunked(x: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk: int) -> Tensor:
    """A selective state space by matmuls inside chunks and a short recurrence between them."""
    x, a, b, c = (t.unflatten(1, (-1, chunk)) for t in (x, a, b, c))
    a = a.permute(0, 3, 1, 2)
    total = torch.cumsum(a, dim=-1)
    inside = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", c, b, torch.exp(_summed(a)), x)
    decay = torch.exp(total[..., -1:] - total)
    states = torch.einsum("bclhn,bhcl,bclhp->bchpn", b, decay, x)
    states = torch.cat([torch.zeros_like(states[:, :1]), states], dim=1)
    between = torch.exp(_summed(F.pad(total[..., -1], (1, 0))))
    states = torch.einsum("bhzc,bchpn->bzhpn", between, states)[:, :-1]
    carried = torch.einsum("bclhn,bchpn,bhcl->bclhp", c, states, torch.exp(total))
    return (inside + carried).flatten(1, 2)


class Gated(nn.Module):
    """RMSNorm of a gated value."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        if gate is not None:
            x = x * F.silu(gate)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class StateSpace(nn.Module):
    def __init__(self, width: int, state: int = 64, head: int = 64, chunk: int = 64) -> None:
        super().__init__()
        self.inner, self.state, self.chunk, self.heads = 2 * width, state, chunk, 2 * width // head
        self.enter = nn.Linear(width, 2 * self.inner + 2 * state + self.heads, bias=False)
        both = self.inner + 2 * state
        self.along = nn.Conv1d(both, both, 4, groups=both, padding=3)
        self.rate, self.skip, self.step = (nn.Parameter(torch.rand(self.heads)) for _ in range(3))
        self.before, self.norm, self.leave = Gated(width), Gated(self.inner), nn.Linear(self.inner, width, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        rate = -torch.exp(self.rate)
        gate, x, step = torch.split(
            self.enter(self.before(u)), [self.inner, self.inner + 2 * self.state, self.heads], dim=-1
        )
        step = F.softplus(step + self.step)
        x = F.silu(self.along(x.transpose(1, 2)).transpose(1, 2)[:, : u.shape[1]])
        x, b, c = torch.split(x, [self.inner, self.state, self.state], dim=-1)
        x = x.unflatten(-1, (self.heads, -1))
        b, c = (t.unsqueeze(2).expand(-1, -1, self.heads, -1) for t in (b, c))
        y = _chunked(x * step.unsqueeze(-1), rate * step, b, c, self.chunk) + x * self.skip.unsqueeze(-1)
        return u + self.leave(self.norm(y.flatten(2), gate))


@entry("ssd-8l-4x1024")
def _() -> Built:
    layers = [StateSpace(1024) for _ in range(8)]
    return nn.Sequential(nn.Embedding(50288, 1024), *layers, Gated(1024)), (_ids(50288, 4, 1024),), {}


# Text to speech.


class Speaking(nn.Module):
    """A post-norm block of attention by batched matmuls and convolutions along the sequence."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.first, self.second = nn.Conv1d(width, inner, 9, padding=4), nn.Conv1d(inner, width, 1)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor, hidden: Tensor, hidden_pairs: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, self.heads, self.size).permute(2, 0, 1, 3).reshape(-1, length, self.size)
            for layer in (self.q, self.k, self.v)
        )
        scores = torch.bmm(q, k.transpose(1, 2)) / self.size**0.5
        scores = scores.masked_fill(hidden_pairs.repeat(self.heads, 1, 1), -torch.inf)
        mixed = torch.bmm(torch.softmax(scores, dim=2), v).view(self.heads, batch, length, self.size)
        mixed = self.drop(self.out(mixed.permute(1, 2, 0, 3).reshape(batch, length, -1)))
        x = self.norm1(mixed + x).masked_fill(hidden.unsqueeze(-1), 0)
        y = self.second(F.relu(self.first(x.transpose(1, 2)))).transpose(1, 2)
        return self.norm2(self.drop(y) + x).masked_fill(hidden.unsqueeze(-1), 0)


class Speech(nn.Module):
    """Phonemes to frames: blocks, binned pitch and energy, length regulation, blocks, a postnet."""

    def __init__(self, width: int = 256, layers: tuple[int, int] = (4, 6)) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(360, width), nn.Parameter(torch.randn(1, 1600, width) * 0.02)
        self.reading = nn.ModuleList(Speaking(width, 2, 1024) for _ in range(layers[0]))
        self.speaking = nn.ModuleList(Speaking(width, 2, 1024) for _ in range(layers[1]))
        self.pitch, self.energy = self._predictor(width), self._predictor(width)
        self.bins = nn.Parameter(torch.linspace(-3, 3, 255), requires_grad=False)
        self.tables = nn.ModuleList(nn.Embedding(256, width) for _ in range(2))
        for table in self.tables:  # small, so that a bin moved by rounding does not dominate the output
            nn.init.normal_(table.weight, std=0.02)
        self.frames = nn.Linear(width, 80)
        sizes = (80, 512, 512, 512, 512, 80)
        self.post = nn.ModuleList(
            nn.Sequential(nn.Conv1d(a, b, 5, padding=2), nn.BatchNorm1d(b))
            for a, b in itertools.pairwise(sizes)
        )

    def _predictor(self, width: int) -> nn.ModuleList:
        convs = [nn.Conv1d(width, width, 3, padding=1) for _ in range(2)]
        return nn.ModuleList([*convs, nn.LayerNorm(width), nn.LayerNorm(width), nn.Linear(width, 1)])

    def _predicted(self, parts: nn.ModuleList, x: Tensor, hidden: Tensor) -> Tensor:
        for i in range(2):
            x = parts[2 + i](F.relu(parts[i](x.transpose(1, 2)).transpose(1, 2)))
        return parts[4](x).squeeze(-1).masked_fill(hidden, 0.0)

    def forward(self, ids: Tensor, lengths: Tensor, where: Tensor, num_frames: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.arange(ids.shape[1], device=ids.device)[None] >= lengths[:, None]
        x = self.words(ids) + self.places[:, : ids.shape[1]]
        for block in self.reading:
            x = block(x, hidden, hidden.unsqueeze(1).expand(-1, ids.shape[1], -1))
        for parts, table in zip((self.pitch, self.energy), self.tables, strict=True):
            x = x + table(torch.bucketize(self._predicted(parts, x, hidden), self.bins))
        x = torch.gather(x, 1, where.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        late = torch.arange(where.shape[1], device=ids.device)[None] >= num_frames[:, None]
        x = x + self.places[:, : where.shape[1]]
        for block in self.speaking:
            x = block(x, late, late.unsqueeze(1).expand(-1, where.shape[1], -1))
        frames = self.frames(x)
        y = frames.transpose(1, 2)
        for i, layer in enumerate(self.post):
            y = layer(y) if i == len(self.post) - 1 else torch.tanh(layer(y))
        return frames, frames + y.transpose(1, 2)


@entry("fastspeech-16x800")
def _() -> Built:
    where = torch.randint(0, 120, (16, 800)).sort(1)[0]
    lengths, num = torch.full((16,), 120) - torch.arange(16), torch.full((16,), 800) - 5 * torch.arange(16)
    return Speech(), (_ids(360, 16, 120), lengths, where, num), {}


# Point clouds.


def _neighborhood(x: Tensor, num: int) -> Tensor:
    """The features of every point and their differences from its neighbors: [batch, 2 × channels, points, nearest]."""
    inner = -2 * torch.matmul(x.transpose(2, 1), x)
    square = torch.sum(x**2, dim=1, keepdim=True)
    nearest = (-square - inner - square.transpose(2, 1)).topk(k=num, dim=-1)[1]
    batch, channels, points = x.shape
    base = torch.arange(0, batch, device=x.device).view(-1, 1, 1) * points
    rows = x.transpose(2, 1).contiguous()
    taken = rows.view(batch * points, -1)[(nearest + base).view(-1), :].view(batch, points, num, channels)
    own = rows.view(batch, points, 1, channels).repeat(1, 1, num, 1)
    return torch.cat((taken - own, own), dim=3).permute(0, 3, 1, 2).contiguous()


class Clouds(nn.Module):
    """A dynamic graph network over points: edge convolutions, and the maximum over each neighborhood."""

    def __init__(self, num: int = 20, classes: int = 40) -> None:
        super().__init__()
        self.num = num
        sizes = ((6, 64), (128, 64), (128, 128), (256, 256))
        self.edges = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.2)) for a, b in sizes
        )
        self.join = nn.Sequential(nn.Conv1d(512, 1024, 1, bias=False), nn.BatchNorm1d(1024), nn.LeakyReLU(0.2))
        self.head = nn.Sequential(
            nn.Linear(2048, 512, bias=False), nn.BatchNorm1d(512), nn.LeakyReLU(0.2), nn.Dropout(0.5),
            nn.Linear(512, 256), nn.BatchNorm1d(256), nn.LeakyReLU(0.2), nn.Dropout(0.5), nn.Linear(256, classes),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.edges:
            x = layer(_neighborhood(x, self.num)).max(dim=-1, keepdim=False)[0]
            kept.append(x)
        x = self.join(torch.cat(kept, dim=1))
        both = [F.adaptive_max_pool1d(x, 1).flatten(1), F.adaptive_avg_pool1d(x, 1).flatten(1)]
        return self.head(torch.cat(both, 1))


@entry("dgcnn-32x1024")
def _() -> Built:
    return Clouds(), (torch.randn(32, 3, 1024),), {}


# Tables.


class Columns(nn.Module):
    """A transformer over the columns of a table: numbers as scaled tokens, gated layers, a class token."""

    def __init__(self, numbers: int = 13, kinds: int = 26, width: int = 192, layers: int = 6, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.weight, self.bias = nn.Parameter(torch.randn(numbers + 1, width)), nn.Parameter(torch.randn(39, width))
        self.kinds = nn.Embedding(kinds * 1000, width)
        self.register_buffer("offsets", torch.arange(kinds) * 1000)
        inner = int(width * 4 / 3)
        self.layers = nn.ModuleList(
            nn.ModuleDict({
                "norm0": nn.LayerNorm(width), "norm1": nn.LayerNorm(width), "out": nn.Linear(width, width),
                "q": nn.Linear(width, width), "k": nn.Linear(width, width), "v": nn.Linear(width, width),
                "up": nn.Linear(width, 2 * inner), "down": nn.Linear(inner, width),
            }) for _ in range(layers)
        )  # fmt: skip
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1)

    def _split(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        size = width // self.heads
        return x.reshape(batch, tokens, self.heads, size).transpose(1, 2).reshape(batch * self.heads, tokens, size)

    def forward(self, numbers: Tensor, kinds: Tensor) -> Tensor:
        numbers = torch.cat([torch.ones_like(numbers[:, :1]), numbers], dim=1)
        x = self.weight[None] * numbers[:, :, None]
        x = torch.cat([x, self.kinds(kinds + self.offsets[None])], dim=1)
        x = x + torch.cat([torch.zeros_like(self.bias[:1]), self.bias])[None]
        for layer in self.layers:
            y = layer["norm0"](x)
            q, k, v = (self._split(layer[name](y)) for name in ("q", "k", "v"))
            weights = F.softmax(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5, dim=-1)
            mixed = (weights @ v).reshape(x.shape[0], self.heads, x.shape[1], -1).transpose(1, 2).flatten(2)
            x = x + layer["out"](mixed)
            a, b = layer["up"](layer["norm1"](x)).chunk(2, dim=-1)
            x = x + layer["down"](a * F.relu(b))
        return self.head(F.relu(self.norm(x[:, 0]))).squeeze(-1)


@entry("columns-4096x39")
def _() -> Built:
    return Columns(), (torch.randn(4096, 13), _ids(1000, 4096, 26)), {}


# Image restoration.


class Channels(nn.Module):
    """LayerNorm over the channels of an image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        var = (x - mean).pow(2).mean(1, keepdim=True)
        return self.weight.view(1, -1, 1, 1) * ((x - mean) / (var + 1e-6).sqrt()) + self.bias.view(1, -1, 1, 1)


class Plain(nn.Module):
    """A block without activations: gated halves, channel attention, scaled residuals."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = Channels(width), Channels(width)
        self.up1, self.up2 = nn.Conv2d(width, 2 * width, 1), nn.Conv2d(width, 2 * width, 1)
        self.apart = nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=2 * width)
        self.mean = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, width, 1))
        self.down1, self.down2 = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
        self.beta, self.gamma = (nn.Parameter(torch.ones(1, width, 1, 1)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.apart(self.up1(self.norm1(x))).chunk(2, dim=1)
        y = a * b
        x = x + self.down1(y * self.mean(y)) * self.beta
        a, b = self.up2(self.norm2(x)).chunk(2, dim=1)
        return x + self.down2(a * b) * self.gamma


class Restoring(nn.Module):
    def __init__(self, width: int = 32, down: tuple[int, ...] = (1, 1, 1, 8), middle: int = 1) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.encoders, self.smaller = nn.ModuleList(), nn.ModuleList()
        self.decoders, self.larger = nn.ModuleList(), nn.ModuleList()
        for num in down:
            self.encoders.append(nn.Sequential(*(Plain(width) for _ in range(num))))
            self.smaller.append(nn.Conv2d(width, 2 * width, 2, 2))
            width *= 2
        self.middle = nn.Sequential(*(Plain(width) for _ in range(middle)))
        for _ in down:
            self.larger.append(nn.Sequential(nn.Conv2d(width, 2 * width, 1, bias=False), nn.PixelShuffle(2)))
            width //= 2
            self.decoders.append(nn.Sequential(Plain(width)))

    def forward(self, images: Tensor) -> Tensor:
        x, kept = self.first(images), []
        for encode, smaller in zip(self.encoders, self.smaller, strict=True):
            x = encode(x)
            kept.append(x)
            x = smaller(x)
        x = self.middle(x)
        for decode, larger, other in zip(self.decoders, self.larger, kept[::-1], strict=True):
            x = decode(larger(x) + other)
        return self.last(x) + images


@entry("nafnet-8x256")
def _() -> Built:
    return Restoring(), (torch.randn(8, 3, 256, 256),), {}


@entry("t5-padded-16x256")
def _() -> Built:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(d_model=1024, d_kv=64, d_ff=2816, num_layers=24, num_heads=16, feed_forward_proj="gated-gelu")
    lengths = 256 - 9 * torch.arange(16)
    mask = (torch.arange(256)[None] < lengths[:, None]).to(torch.int64)
    return T5EncoderModel(config), (), {"input_ids": _ids(32000, 16, 256), "attention_mask": mask}
