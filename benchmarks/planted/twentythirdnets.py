"""Networks, data sets and small tools of the twenty-third suite, each written as its author would have."""

from __future__ import annotations

import functools
import gc
import itertools
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import Dataset

# ---------------------------------------------------------------- what several programs share


class SelfAttention(nn.Module):
    """Queries, keys and values by one product, mixed by the fused kernel."""

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.to_qkv, self.to_out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.to_out(self.mix(q, k, v).transpose(1, 2).flatten(2))


class FeedForward(nn.Sequential):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__(nn.Linear(width, inner), nn.ReLU(inplace=True), nn.Linear(inner, width))


class Block(nn.Module):
    """A layer of a transformer, norms first."""

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.norm_a, self.norm_f = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.feed = SelfAttention(width, heads, causal), FeedForward(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_a(x))
        return x + self.feed(self.norm_f(x))


def stack(width: int, heads: int, layers: int, causal: bool = False) -> nn.Sequential:
    return nn.Sequential(*(Block(width, heads, causal) for _ in range(layers)))


class MlpBlock(nn.Module):
    """A residual layer without attention."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.feed = nn.LayerNorm(width), FeedForward(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.feed(self.norm(x))


# ---------------------------------------------------------------- vision


class Tomograms(Dataset[tuple[Tensor, int]]):
    """Volumes of eight bits, turned, brightened by a power and speckled, one by one."""

    def __init__(self, side: int, num: int = 8, length: int = 100_000) -> None:
        self.volumes = np.random.default_rng(0).integers(0, 256, (num, side, side, side), np.uint8)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        rng = np.random.default_rng(index)
        volume = self.volumes[index % len(self.volumes)]
        turned = np.rot90(volume, int(rng.integers(4)), axes=(1, 2)).astype(np.float32) / 255
        speckle = rng.random(turned.shape, np.float32)
        bright = np.power(turned, np.float32(rng.uniform(0.7, 1.4))) * (1 - 0.1 * speckle)
        return torch.from_numpy((bright * 255).astype(np.uint8)), index % 4


class VolumeNet(nn.Module):
    """Which organ a volume shows, by cubes of it."""

    def __init__(self, cube: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.cube, self.embed = cube, nn.Linear(cube**3, width)
        self.layers, self.head = stack(width, heads, layers), nn.Linear(width, 8)

    def forward(self, volumes: Tensor) -> Tensor:
        c, (batch, side) = self.cube, volumes.shape[:2]
        cubes = volumes.view(batch, side // c, c, side // c, c, side // c, c).permute(0, 1, 3, 5, 2, 4, 6)
        return self.head(self.layers(self.embed(cubes.reshape(batch, -1, c**3))).mean(1))


class CropNet(nn.Module):
    """What a crop shows, of whatever size."""

    def __init__(self, patch: int, width: int, heads: int, layers: int, out: int) -> None:
        super().__init__()
        self.patch, self.embed = patch, nn.Linear(3 * patch * patch, width)
        self.layers, self.norm, self.head = stack(width, heads, layers), nn.LayerNorm(width), nn.Linear(width, out)

    def forward(self, images: Tensor) -> Tensor:
        p = self.patch
        tiles = images.unfold(2, p, p).unfold(3, p, p).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        return self.head(self.norm(self.layers(self.embed(tiles)).mean(1)))


def crops_apart(net: nn.Module, crops: Sequence[Tensor]) -> Tensor:
    """Every crop of every picture by a pass of its own."""
    return torch.cat([net(crop) for crop in crops])


def crops_by_size(net: nn.Module, crops: Sequence[Tensor]) -> Tensor:
    """A pass for each size: crops of one size are joined."""
    grouped = itertools.groupby(crops, key=lambda crop: crop.shape[-1])
    return torch.cat([net(torch.cat(list(some))) for _, some in grouped])


class ResBlock(nn.Module):
    """Two convolutions beside a way around them."""

    def __init__(self, inp: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inp, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.down = nn.Conv2d(inp, out, 1, stride, bias=False) if inp != out or stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(y)) + self.down(x), inplace=True)


class PoseNet(nn.Module):
    """Where each joint of a person is: down by strides, up by transposed convolutions."""

    def __init__(self, widths: tuple[int, ...], joints: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(8, widths[0], 4, 4, bias=False)
        self.down = nn.Sequential(*(ResBlock(a, b, 2) for a, b in itertools.pairwise(widths)))
        ups: list[nn.Module] = []
        for b, a in itertools.pairwise(reversed(widths)):
            ups += [nn.ConvTranspose2d(b, a, 4, 2, 1, bias=False), nn.BatchNorm2d(a), nn.ReLU(inplace=True)]
        self.up, self.final = nn.Sequential(*ups), nn.Conv2d(widths[0], joints, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.final(self.up(self.down(self.stem(images))))


class AnchorNet(nn.Module):
    """A detector of one level: what is in each of many boxes."""

    def __init__(self, width: int, layers: int, boxes: int, classes: int) -> None:
        super().__init__()
        convs = ((nn.Conv2d(width, width, 3, padding=1), nn.ReLU(inplace=True)) for _ in range(layers))
        self.classes, self.tower = classes, nn.Sequential(*itertools.chain.from_iterable(convs))
        self.out = nn.Conv2d(width, boxes * classes, 1)

    def forward(self, features: Tensor) -> Tensor:
        scores = self.out(self.tower(features)).permute(0, 2, 3, 1)
        return scores.reshape(len(features), -1, self.classes)


def mined_by_image(losses: Tensor, labels: Tensor, ratio: int = 3) -> Tensor:
    """The losses of things, and for each of them of the three worst places without one, picture by picture."""
    total, things = losses.new_zeros(()), 0
    for loss, label in zip(losses, labels):
        thing = label > 0
        num = int(thing.sum())
        worst = loss.masked_fill(thing, 0).topk(min(ratio * num, len(loss))).values
        total = total + (loss * thing).sum() + worst.sum()
        things += num
    return total / things


def mined_by_rank(losses: Tensor, labels: Tensor, ratio: int = 3) -> Tensor:
    """The same out of the rank of each loss in its picture, with nothing asked of the device."""
    thing = labels > 0
    ranks = losses.detach().masked_fill(thing, 0).argsort(1, descending=True).argsort(1)
    kept = thing | (ranks < ratio * thing.sum(1, keepdim=True))
    return (losses * kept).sum() / thing.sum()


class Projector(nn.Sequential):
    """Features of a picture made ready to be compared."""

    def __init__(self, seen: int, width: int) -> None:
        super().__init__(
            nn.Linear(seen, width, bias=False), nn.ReLU(inplace=True),
            nn.Linear(width, width, bias=False), nn.ReLU(inplace=True), nn.Linear(width, width, bias=False),
        )  # fmt: skip


def redundancy(a: Tensor, b: Tensor, weight: float = 0.005) -> Tensor:
    """How far two views' correlations are from one for the same feature and none for others."""
    a, b = (F.batch_norm(z.float(), None, None, training=True) for z in (a, b))
    c = a.T @ b / len(a)
    diagonal = c.diagonal()
    return (diagonal - 1).square().sum() + weight * (c.square().sum() - diagonal.square().sum())


class MaskedCodes(nn.Module):
    """Hidden codes of pictures guessed from those that are left."""

    def __init__(self, codes: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(codes, width), stack(width, heads, layers)
        self.norm, self.logits = nn.LayerNorm(width), nn.Linear(width, codes, bias=False)

    def forward(self, codes: Tensor) -> Tensor:
        return self.logits(self.norm(self.layers(self.embed(codes))))


# ---------------------------------------------------------------- diffusion


class SlicedAttention(SelfAttention):
    """Attention of a few heads at a time, as painters on small cards have it."""

    def __init__(self, width: int, heads: int, slices: int) -> None:
        super().__init__(width, heads)
        self.slices = slices

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.slices:
            return super().mix(q, k, v)
        batch, scale = len(q), q.shape[-1] ** -0.5
        found = []
        for query, key, value in zip(*(t.flatten(0, 1).chunk(self.slices) for t in (q, k, v))):
            scores = torch.bmm(query * scale, key.transpose(1, 2))
            found.append(torch.bmm(scores.softmax(dim=-1), value))
        return torch.cat(found).unflatten(0, (batch, -1))


class Painter(nn.Module):
    """The noise in latents of large pictures."""

    def __init__(self, channels: int, width: int, heads: int, layers: int, slices: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(channels, width), nn.Linear(width, channels)
        self.layers = stack(width, heads, layers)
        for layer in self.layers:
            layer.attention = SlicedAttention(width, heads, slices)

    def forward(self, latents: Tensor) -> Tensor:
        return self.leave(self.layers(self.enter(latents)))


class Denoiser(nn.Module):
    """The noise in pictures, by their patches, and how noisy they are."""

    def __init__(self, pixels: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.enter, self.leave, self.level = nn.Linear(pixels, width), nn.Linear(width, pixels), nn.Linear(8, width)
        self.layers = stack(width, heads, layers)

    def forward(self, patches: Tensor, level: Tensor) -> Tensor:
        return self.leave(self.layers(self.enter(patches) + self.level(level)[:, None]))


def pictured(patches: Tensor, file: Any) -> None:
    """A picture written to a file that a browser of results can show."""
    pixels = patches.float().clamp(-1, 1).cpu().numpy()
    file.seek(0)
    file.write(zlib.compress(((pixels + 1) * 127.5).astype(np.uint8).tobytes(), 6))
    file.flush()


class Recomputed(torch.autograd.Function):
    """A function whose middle is not kept, written before there was one in the library."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], num: int, *args: Tensor) -> Tensor:
        ctx.run, ctx.inputs, ctx.weights = run, list(args[:num]), list(args[num:])
        with torch.no_grad():
            return run(*ctx.inputs)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Any, ...]:
        ctx.inputs = [x.detach().requires_grad_(True) for x in ctx.inputs]
        with torch.enable_grad():
            out = ctx.run(*(x.view_as(x) for x in ctx.inputs))
        found = torch.autograd.grad(out, ctx.inputs + ctx.weights, slopes, allow_unused=True)
        del ctx.inputs, ctx.weights, out
        return (None, None, *found)


class Weather(nn.Module):
    """The weather of a globe some hours later, from patches of it."""

    def __init__(self, variables: int, width: int, heads: int, layers: int, use_checkpoint: bool) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(variables, width), nn.Linear(width, variables)
        self.layers, self.use_checkpoint = stack(width, heads, layers), use_checkpoint

    def forward(self, now: Tensor) -> Tensor:
        x = self.enter(now)
        for layer in self.layers:
            x = Recomputed.apply(layer, 1, x, *layer.parameters()) if self.use_checkpoint else layer(x)
        return self.leave(x)


# ---------------------------------------------------------------- sound


class Tremors(Dataset[Tensor]):
    """What a station felt, filtered by its spectrum and made even."""

    def __init__(self, samples: int, length: int = 1_000_000) -> None:
        self.records = np.random.default_rng(0).standard_normal((16, 3, samples)).astype(np.float32)
        band = np.arange(samples // 2 + 1) / samples
        self.response, self.length = 1 / (1 + (band / 0.2) ** 8), length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        record = np.roll(self.records[index % len(self.records)], index % 997, axis=-1)
        smooth = np.fft.irfft(np.fft.rfft(record) * self.response, n=record.shape[-1])
        even = (smooth - smooth.mean(-1, keepdims=True)) / smooth.std(-1, keepdims=True)
        return torch.from_numpy(even.astype(np.float16))


class TremorNet(nn.Module):
    """Which kind of tremor, by short pieces of what was felt."""

    def __init__(self, piece: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.piece, self.embed = piece, nn.Linear(3 * piece, width)
        self.layers, self.head = stack(width, heads, layers), nn.Linear(width, 8)

    def forward(self, records: Tensor) -> Tensor:
        pieces = records.unflatten(2, (-1, self.piece)).transpose(1, 2).flatten(2)
        return self.head(self.layers(self.embed(pieces)).mean(1))


class FrameCoder(nn.Module):
    """Frames of sound squeezed and restored."""

    def __init__(self, bins: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(bins, width), nn.Linear(width, bins)
        self.layers = stack(width, heads, layers)

    def forward(self, frames: Tensor) -> Tensor:
        return self.leave(self.layers(self.enter(frames)))


class SampleNet(nn.Module):
    """How likely each value of the next samples is, as a mixture of ten for each of them."""

    def __init__(self, samples: int, width: int, layers: int, parts: int) -> None:
        super().__init__()
        self.shape, self.embed = (samples, 3, parts), nn.Linear(samples, width)
        self.layers = nn.Sequential(*(MlpBlock(width, 4 * width) for _ in range(layers)))
        self.head = nn.Linear(width, samples * 3 * parts)

    def forward(self, before: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(before))).unflatten(-1, self.shape)


def mixture_loss(params: Tensor, x: Tensor) -> Tensor:
    """How unlikely samples of 256 levels are under mixtures of logistic distributions."""
    weights, means, log_scales = params.float().unbind(-2)
    log_scales = log_scales.clamp(min=-7.0)
    centered = x.float().unsqueeze(-1) - means
    inverse = torch.exp(-log_scales)
    upper, lower = inverse * (centered + 1 / 255), inverse * (centered - 1 / 255)
    mass = torch.sigmoid(upper) - torch.sigmoid(lower)
    middle = inverse * centered
    density = middle - log_scales - 2 * F.softplus(middle)
    inside = torch.where(mass > 1e-5, mass.clamp(min=1e-12).log(), density - 4.85)
    at_top = torch.where(x.unsqueeze(-1) > 0.999, -F.softplus(lower), inside)
    at_end = torch.where(x.unsqueeze(-1) < -0.999, upper - F.softplus(upper), at_top)
    return -torch.logsumexp(at_end + F.log_softmax(weights, -1), -1).mean()


# ---------------------------------------------------------------- language


class Promptable(nn.Module):
    """A language model that takes what its words became, so that a prompt may be learned."""

    def __init__(self, vocab: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(vocab, width), stack(width, heads, layers, causal=True)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, embedded: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(embedded)))


class Stopwatch:
    """How long parts of a network take, by the clock of the host."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def lap(self) -> None:
        self.seconds.append(time.perf_counter())
        del self.seconds[:-64]


def gated_layer(x: Tensor, update: Tensor, gate: Tensor, gain: Tensor, watch: Stopwatch | None) -> Tensor:
    """What a layer does between its products: gates, a norm, an activation."""
    y = update * torch.sigmoid(gate + 1)
    if watch is not None:
        watch.lap()
    y = y * torch.rsqrt(y.float().square().mean(-1, keepdim=True) + 1e-6).to(y.dtype) * gain
    if watch is not None:
        watch.lap()
    return x + F.silu(y) * 0.5


class GatedText(nn.Module):
    """Words mixed by gated layers; what lies between products is compiled."""

    def __init__(self, width: int, layers: int, between: Callable[..., Tensor], watch: Stopwatch | None) -> None:
        super().__init__()
        self.enter = nn.Linear(width, width, bias=False)
        self.products = nn.ModuleList(nn.Linear(width, 2 * width, bias=False) for _ in range(layers))
        self.gains = nn.ParameterList(torch.ones(width) for _ in range(layers))
        self.between, self.watch = between, watch

    def forward(self, words: Tensor) -> Tensor:
        x = self.enter(words)
        for product, gain in zip(self.products, self.gains):
            update, gate = product(x).chunk(2, -1)
            x = self.between(x, update, gate, gain, self.watch)
        return x


# ---------------------------------------------------------------- films of two scales


class FineAndCoarse(nn.Module):
    """Many small patches by narrow layers, then few large ones by wide layers."""

    def __init__(self, pixels: int, fine: int, coarse: int, depths: tuple[int, int], scope: Callable[[], Any]) -> None:
        super().__init__()
        self.enter, self.fine = nn.Linear(pixels, fine), stack(fine, max(fine // 64, 1), depths[0])
        self.merge, self.coarse = nn.Linear(4 * fine, coarse), stack(coarse, max(coarse // 128, 1), depths[1])
        self.head, self.scope = nn.Linear(coarse, 16), scope

    def forward(self, patches: Tensor) -> Tensor:
        with self.scope():
            x = self.fine(self.enter(patches))
        x = self.merge(x.unflatten(1, (-1, 4)).flatten(2))
        return self.head(self.coarse(x).mean(1))


# ---------------------------------------------------------------- policies and values


class ScreenValues(nn.Module):
    """How good each move is, from four screens, by patches."""

    def __init__(self, patch: int, width: int, layers: int, moves: int) -> None:
        super().__init__()
        self.patch, self.embed = patch, nn.Linear(4 * patch * patch, width)
        self.layers = nn.Sequential(*(MlpBlock(width, 4 * width) for _ in range(layers)))
        self.head = nn.Linear(width, moves)

    def forward(self, screens: Tensor) -> Tensor:
        p = self.patch
        tiles = screens.unfold(2, p, p).unfold(3, p, p).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        return self.head(self.layers(self.embed(tiles.to(torch.bfloat16).mul_(1 / 255))).mean(1))


class ReplayMemory:
    """What was played, in arrays of bytes; batches come out as they were drawn."""

    def __init__(self, batch: int, side: int, moves: int, num: int = 3) -> None:
        rng = np.random.default_rng(0)
        draw = lambda: rng.integers(0, 256, (batch, 4, side, side), np.uint8)
        facts = lambda: (rng.integers(0, moves, batch), rng.standard_normal(batch).astype(np.float32))
        self.batches = [(draw(), draw(), *facts()) for _ in range(num)]


class Imitator(nn.Module):
    """What to do at each moment of an episode, from all before it."""

    def __init__(self, seen: int, width: int, heads: int, layers: int, acts: int) -> None:
        super().__init__()
        self.enter, self.layers = nn.Linear(seen, width), stack(width, heads, layers, causal=True)
        self.act = nn.Linear(width, acts)

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        return self.act(self.layers(self.enter(states) * mask.unsqueeze(-1)))


# ---------------------------------------------------------------- science and graphs


class Automaton(nn.Module):
    """Cells that grow a picture: each looks at its neighbors and changes a little, or rests."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.see, self.change = nn.Linear(3 * channels, hidden), nn.Linear(hidden, channels, bias=False)

    def forward(self, cells: Tensor, steps: int) -> Tensor:
        for _ in range(steps):
            dx = cells.roll(1, 1) - cells.roll(-1, 1)
            dy = cells.roll(1, 2) - cells.roll(-1, 2)
            move = self.change(F.relu(self.see(torch.cat([cells, dx, dy], -1))))
            awake = torch.rand_like(cells[..., :1]) < 0.5
            cells = cells + 0.1 * move * awake
        return cells


class Residues(nn.Module):
    """Which amino acid was hidden, from all around it."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.letters, self.layers = nn.Embedding(32, width), stack(width, heads, layers)
        self.head = nn.Linear(width, 32)

    def forward(self, chain: Tensor) -> Tensor:
        return self.head(self.layers(self.letters(chain)))


class GraphLayers(nn.Module):
    """Nodes of many small graphs: each is told the mean of its neighbors, then thinks."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.messages = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.thoughts = nn.ModuleList(MlpBlock(width, 4 * width) for _ in range(layers))

    def forward(self, nodes: Tensor, near: Tensor) -> Tensor:
        for message, think in zip(self.messages, self.thoughts):
            nodes = think(nodes + torch.bmm(near, message(nodes)))
        return nodes


# ---------------------------------------------------------------- recommenders


class Shelf(nn.Module):
    """Very broad layers over what somebody bought."""

    def __init__(self, width: int, inner: int, layers: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, inner, bias=False) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(inner, width, bias=False) for _ in range(layers))

    def forward(self, bought: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down):
            bought = bought + down(F.relu(up(bought), inplace=True))
        return bought


# ---------------------------------------------------------------- tools


def tidied(step: Callable[[], None]) -> Callable[[], None]:
    """What a step left behind is looked for after it."""

    @functools.wraps(step)
    def run() -> None:
        step()
        gc.collect()

    return run


def captions(num: int) -> list[dict[str, Any]]:
    """What is said of every picture, as its file was read."""
    return [
        {"file": f"{i:08d}.webp", "said": [f"picture {i}", "a street"], "box": [i, i + 1, 4, 4], "more": {"tags": [i]}}
        for i in range(num)
    ]


# ---------------------------------------------------------------- what is well

QUICKEST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


class Score(nn.Module):
    """Long pieces of music by layers that only attend."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SelfAttention(width, heads, causal=True) for _ in range(layers))

    def forward(self, notes: Tensor) -> Tensor:
        with sdpa_kernel(QUICKEST, set_priority=True):
            for layer in self.layers:
                notes = layer(notes)
        return notes


class DenseGraph(nn.Module):
    """A graph of which everything is near everything, by how much: two products a layer."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, near: Tensor, nodes: Tensor) -> Tensor:
        for layer in self.layers:
            nodes = F.relu(near @ layer(nodes), inplace=True)
        return nodes


def wide(*sizes: int) -> nn.Sequential:
    """Products and what lies between them, which overwrites what it is given."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b, bias=False), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers[:-1])


def filters(width: int, layers: int, classes: int) -> nn.Sequential:
    """Wide convolutions, every other one of which halves the picture's side."""
    parts: list[nn.Module] = []
    for i in range(layers):
        parts += [nn.Conv2d(width, width, 3, 1 + i % 2, 1, bias=False), nn.ReLU(inplace=True)]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))
