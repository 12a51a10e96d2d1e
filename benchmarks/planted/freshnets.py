"""Networks of the second suite of planted causes: encoders, a decoder with rotary positions, convolutions, a diffusion
UNet, rankers, experts, graphs and sound; each habit that costs time is behind a switch."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# B batch, L length, C width, H heads, D width of a head, N nodes, E edges


def rotated(x_BHLD: Tensor, turn_LD: Tensor) -> Tensor:
    """Rotary positions: pairs of channels turned by an angle that grows with the place."""
    first, second = x_BHLD.chunk(2, -1)
    cos, sin = turn_LD.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def turns(length: int, width: int) -> Tensor:
    angle = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, width // 2) / (width // 2))
    return torch.cat((angle.cos(), angle.sin()), -1)


class RotaryBlock(nn.Module):
    """Grouped queries, RMS norms, a gated MLP; keys and values are kept in place if there is room for them."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int, batch: int = 0, room: int = 0) -> None:
        super().__init__()
        self.heads, self.groups, self.head_dim = heads, groups, width // heads
        self.norm1, self.norm2 = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * groups * self.head_dim, bias=False)
        self.gate_up, self.down = nn.Linear(width, 2 * hidden, bias=False), nn.Linear(hidden, width, bias=False)
        self.register_buffer("keys", torch.zeros(batch, groups, room, self.head_dim))
        self.register_buffer("values", torch.zeros(batch, groups, room, self.head_dim))

    def forward(self, x_BLC: Tensor, turn_LD: Tensor, place: Tensor | None = None) -> Tensor:
        batch, length, width = x_BLC.shape
        h = F.rms_norm(x_BLC, (width,), self.norm1)
        q = rotated(self.q(h).view(batch, length, self.heads, -1).transpose(1, 2), turn_LD)
        k, v = self.kv(h).view(batch, length, 2, self.groups, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        k = rotated(k, turn_LD)
        if place is not None:
            k, v = self.keys.index_copy_(2, place, k), self.values.index_copy_(2, place, v)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=place is None, enable_gqa=True)
        x_BLC = x_BLC + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        gate, up = self.gate_up(F.rms_norm(x_BLC, (width,), self.norm2)).chunk(2, -1)
        return x_BLC + self.down(F.silu(gate) * up)


class Rotary(nn.Module):
    """A decoder of the LLaMA kind: ids and targets to the loss, or with a place to the next token's logits."""

    def __init__(
        self, width: int, layers: int, heads: int, groups: int, hidden: int, vocab: int, room: int, batch: int = 0
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(
            RotaryBlock(width, heads, groups, hidden, batch, room if batch else 0) for _ in range(layers)
        )
        self.norm, self.head = nn.Parameter(torch.ones(width)), nn.Linear(width, vocab, bias=False)
        self.register_buffer("turn", turns(room, width // heads))

    def forward(self, ids_BL: Tensor, targets_BL: Tensor) -> Tensor:
        x = self.tokens(ids_BL)
        for block in self.blocks:
            x = block(x, self.turn[: ids_BL.shape[1]])
        logits = self.head(F.rms_norm(x, x.shape[-1:], self.norm))
        return F.cross_entropy(logits.flatten(0, 1), targets_BL.flatten())

    def following(self, ids_B1: Tensor, place: Tensor) -> Tensor:
        x, turn = self.tokens(ids_B1), self.turn.index_select(0, place)
        for block in self.blocks:
            x = block(x, turn, place)
        return self.head(F.rms_norm(x, x.shape[-1:], self.norm))[:, -1]


def by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * (1.0 / math.sqrt(q.shape[-1]))
    scores = scores if mask is None else scores.masked_fill(~mask, -1e4)
    return torch.einsum("bhqk,bhkd->bhqd", F.softmax(scores, -1), v)


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class EncoderBlock(nn.Module):
    """Norms after the residual, biases everywhere, as BERT has it."""

    def __init__(self, width: int, heads: int, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BLC: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, width = x_BLC.shape
        parts = (part(x_BLC).view(batch, length, self.heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = self.attend(*parts, mask).transpose(1, 2).reshape(batch, length, width)
        x_BLC = self.norm1(x_BLC + self.out(mixed))
        return self.norm2(x_BLC + self.down(F.gelu(self.up(x_BLC))))


class Encoder(nn.Module):
    """Token ids to the loss of a classifier over the mean of the tokens, or over every token."""

    def __init__(
        self,
        width: int,
        layers: int,
        heads: int,
        vocab: int,
        room: int,
        classes: int = 0,
        attend: Callable[..., Tensor] = fused,
        fp32_logits: bool = False,
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(room, width)
        self.blocks = nn.ModuleList(EncoderBlock(width, heads, attend) for _ in range(layers))
        self.head, self.pooled, self.fp32 = nn.Linear(width, classes or vocab), classes > 0, fp32_logits

    def trunk(self, ids_BL: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.tokens(ids_BL) + self.places.weight[: ids_BL.shape[1]]
        for block in self.blocks:
            x = block(x, mask)
        return x

    def forward(self, ids_BL: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.trunk(ids_BL, mask)
        logits = self.head(x.mean(1) if self.pooled else x.flatten(0, 1))
        return F.cross_entropy(logits.float() if self.fp32 else logits, targets.flatten())


class Sound(nn.Module):
    """Spectrogram frames through two strided convolutions and an encoder to a class."""

    def __init__(self, bands: int, width: int, layers: int, heads: int, classes: int = 512) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(bands, width, 5, 1, 2), nn.Conv1d(width, width, 5, 2, 2)
        self.blocks = nn.ModuleList(EncoderBlock(width, heads, fused) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, frames_BCL: Tensor, labels_B: Tensor) -> Tensor:
        x = F.gelu(self.conv2(F.gelu(self.conv1(frames_BCL.to(self.head.weight.dtype))))).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean(1)), labels_B)


class Stream(nn.Module):
    """Recurrent cells over the frames of a sound, one frame and one layer after another."""

    def __init__(self, inner: int, width: int, layers: int) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.GRUCell(inner if not i else width, width) for i in range(layers))

    def forward(self, frames_LBC: Tensor) -> Tensor:
        states = [frames_LBC.new_zeros(frames_LBC.shape[1], cell.hidden_size) for cell in self.cells]
        for x in frames_LBC:
            for i, cell in enumerate(self.cells):
                states[i] = x = cell(x, states[i])
        return states[-1]


class Plain(nn.Module):
    """Stages of 3×3 convolutions with batch norms, a VGG without its large head."""

    def __init__(
        self, widths: tuple[int, ...], depth: int, classes: int = 1000, recompute: bool = False, between: object = None
    ) -> None:
        super().__init__()
        stages, inner = [], 3
        for width in widths:
            parts: list[nn.Module] = []
            for _ in range(depth):
                parts += [nn.Conv2d(inner, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True)]
                inner = width
            stages.append(nn.Sequential(*parts, nn.MaxPool2d(2)))
        self.stages, self.head = nn.ModuleList(stages), nn.Linear(inner, classes)
        self.recompute, self.between = recompute, between

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = images.to(self.head.weight.dtype)
        for i, stage in enumerate(self.stages):
            x = checkpoint(stage, x, use_reentrant=False) if self.recompute and i else stage(x)
            if callable(self.between):
                self.between()
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class Inverted(nn.Module):
    """Widen, filter each channel, squeeze; with a gate over channels."""

    def __init__(self, inner: int, outer: int, stride: int, times: int = 4) -> None:
        super().__init__()
        wide = inner * times
        self.wide, self.bn1 = nn.Conv2d(inner, wide, 1, bias=False), nn.BatchNorm2d(wide)
        self.each = nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False)
        self.bn2, self.bn3 = nn.BatchNorm2d(wide), nn.BatchNorm2d(outer)
        self.squeeze, self.excite = nn.Conv2d(wide, inner // 4, 1), nn.Conv2d(inner // 4, wide, 1)
        self.narrow = nn.Conv2d(wide, outer, 1, bias=False)
        self.keeps = stride == 1 and inner == outer

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.bn1(self.wide(x)))
        y = F.silu(self.bn2(self.each(y)))
        y = y * torch.sigmoid(self.excite(F.silu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        y = self.bn3(self.narrow(y))
        return x + y if self.keeps else y


class Efficient(nn.Module):
    """Inverted bottlenecks in stages: many small tensors of weights."""

    def __init__(self, widths: tuple[int, ...], depth: int, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, widths[0], 3, 2, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.SiLU())
        blocks, inner = [], widths[0]
        for width in widths:
            for j in range(depth):
                blocks.append(Inverted(inner, width, 2 if not j else 1))
                inner = width
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(inner, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(self.stem(images)).mean((2, 3))), labels)


def group_norm_by_hand(x: Tensor, groups: int, weight: Tensor, bias: Tensor) -> Tensor:
    """Group norm and SiLU op by op."""
    batch, width, high, wide = x.shape
    parts = x.float().view(batch, groups, -1)
    centered = parts - parts.mean(-1, keepdim=True)
    normed = centered * torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + 1e-5)
    normed = normed.view(batch, width, high, wide).to(x.dtype) * weight[:, None, None] + bias[:, None, None]
    return normed / (1.0 + torch.exp(-normed))


class ResBlock(nn.Module):
    def __init__(self, inner: int, outer: int, spelled_out: bool) -> None:
        super().__init__()
        self.groups, self.spelled_out = min(32, inner), spelled_out
        self.norm1, self.norm2 = nn.GroupNorm(min(32, inner), inner), nn.GroupNorm(min(32, outer), outer)
        self.conv1, self.conv2 = nn.Conv2d(inner, outer, 3, 1, 1), nn.Conv2d(outer, outer, 3, 1, 1)
        self.time = nn.Linear(256, outer)
        self.skip = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def _bent(self, x: Tensor, norm: nn.GroupNorm) -> Tensor:
        if self.spelled_out:
            return group_norm_by_hand(x, norm.num_groups, norm.weight, norm.bias)
        return F.silu(norm(x))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(self._bent(x, self.norm1)) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.conv2(self._bent(y, self.norm2))


class UNet(nn.Module):
    """The network of a diffusion model: down, attention in the middle, up again with skips."""

    def __init__(
        self, width: int, times: tuple[int, ...] = (1, 2, 4), depth: int = 2, spelled_out: bool = False
    ) -> None:
        super().__init__()
        widths = [width * t for t in times]
        self.enter, self.leave = nn.Conv2d(4, widths[0], 3, 1, 1), nn.Conv2d(widths[0], 4, 3, 1, 1)
        block = lambda inner, outer: ResBlock(inner, outer, spelled_out)
        chain = lambda inner, outer: nn.ModuleList(block(inner if not i else outer, outer) for i in range(depth))
        self.downs = nn.ModuleList(chain(widths[max(0, i - 1)], w) for i, w in enumerate(widths))
        self.middle = EncoderBlock(widths[-1], max(1, widths[-1] // 64), fused)
        self.ups = nn.ModuleList(chain(w * 2, widths[max(0, i - 1)]) for i, w in reversed(list(enumerate(widths))))

    def forward(self, x: Tensor, time_B256: Tensor) -> Tensor:
        x, kept = self.enter(x), []
        for i, blocks in enumerate(self.downs):
            x = F.avg_pool2d(x, 2) if i else x
            for block in blocks:
                x = block(x, time_B256)
            kept.append(x)
        batch, width, high, wide = x.shape
        x = self.middle(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(batch, width, high, wide)
        for i, blocks in enumerate(self.ups):
            x = torch.cat((F.interpolate(x, scale_factor=2.0) if i else x, kept.pop()), 1)
            for block in blocks:
                x = block(x, time_B256)
        return self.leave(x)


class Ranker(nn.Module):
    """Numbers and looked-up categories, their dot products, and a tower on top."""

    def __init__(self, rows: int, width: int, tables: int, numbers: int, tower: int, layers: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Linear(numbers, width)
        pairs = (tables + 1) * tables // 2
        sizes = [width + pairs, *([tower] * layers)]
        self.top = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.out = nn.Linear(tower, 1)
        corner = torch.triu_indices(tables + 1, tables + 1, 1)
        self.register_buffer("corner", corner[0] * (tables + 1) + corner[1])

    def forward(self, numbers_BC: Tensor, ids_TBL: Tensor, clicked_B: Tensor) -> Tensor:
        first = F.relu(self.bottom(numbers_BC.to(self.out.weight.dtype)))
        rows = [table(ids).to(first.dtype) for table, ids in zip(self.tables, ids_TBL, strict=True)]
        stacked = torch.stack([first, *rows], 1)
        dots = (stacked @ stacked.transpose(1, 2)).flatten(1).index_select(1, self.corner)
        x = torch.cat((first, dots), 1)
        for layer in self.top:
            x = F.relu(layer(x))
        return F.binary_cross_entropy_with_logits(self.out(x).float().squeeze(1), clicked_B)


class Experts(nn.Module):
    """A layer of experts, each with the same room for tokens; ``asked`` looks on the host whether one has any."""

    def __init__(self, width: int, hidden: int, num: int, asked: bool) -> None:
        super().__init__()
        self.router, self.num, self.asked = nn.Linear(width, num, bias=False), num, asked
        self.norm = nn.LayerNorm(width)
        self.up = nn.ModuleList(nn.Linear(width, hidden, bias=False) for _ in range(num))
        self.down = nn.ModuleList(nn.Linear(hidden, width, bias=False) for _ in range(num))

    def forward(self, x_NC: Tensor) -> Tensor:
        normed = self.norm(x_NC)
        gates_NE = self.router(normed).softmax(-1)
        room = x_NC.shape[0] // self.num
        out = x_NC
        for e in range(self.num):
            best, places = gates_NE[:, e].topk(room)
            if self.asked and not (best > 0).any():
                continue
            made = self.down[e](F.gelu(self.up[e](normed.index_select(0, places))))
            out = out.index_add(0, places, made * best[:, None])
        return out


class Mixture(nn.Module):
    def __init__(self, width: int, hidden: int, num: int, layers: int, vocab: int, asked: bool) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab, bias=False)
        self.layers = nn.ModuleList(Experts(width, hidden, num, asked) for _ in range(layers))

    def forward(self, ids_BL: Tensor, targets_BL: Tensor) -> Tensor:
        x = self.tokens(ids_BL.flatten())
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), targets_BL.flatten())


class Messages(nn.Module):
    """Nodes of a graph send along edges, sum what arrives and mix it."""

    def __init__(self, width: int, layers: int, classes: int, indexed: bool) -> None:
        super().__init__()
        self.sends, self.mixes = (nn.ModuleList(nn.Linear(width, width) for _ in range(layers)) for _ in range(2))
        self.head, self.indexed = nn.Linear(width, classes), indexed

    def forward(self, x_NC: Tensor, source_E: Tensor, target_E: Tensor, labels_N: Tensor) -> Tensor:
        for send, mix in zip(self.sends, self.mixes, strict=True):
            sent = send(x_NC)
            along = sent[source_E] if self.indexed else sent.index_select(0, source_E)
            arrived = torch.zeros_like(x_NC).index_add(0, target_E, F.relu(along))
            x_NC = x_NC + F.relu(mix(arrived)) * 0.1
        return F.cross_entropy(self.head(x_NC), labels_N)
