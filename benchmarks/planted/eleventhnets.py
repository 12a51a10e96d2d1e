"""Networks of the eleventh suite: long convolutions, recurrences in chunks, experts side by side, operators in waves,
atoms and their neighbors, video, tables, translation, depths of pictures."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from ninthnets import Grouped, conv
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# B batch, L length, C width, H heads, D width of a head, N chunks, T frames, P places of a frame


class LongConv(nn.Module):
    """A state-space layer: every channel convolved with its own decaying filter, by Fourier transforms."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.norm, self.enter, self.leave = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.rate, self.size = nn.Parameter(torch.rand(width, 1)), nn.Parameter(torch.rand(width, 1))
        self.register_buffer("time", torch.arange(length)[None].float() / length)

    def forward(self, x_BLC: Tensor) -> Tensor:
        u, gate = self.enter(self.norm(x_BLC)).chunk(2, -1)
        length = x_BLC.shape[1]
        kernel = self.size.float() * torch.exp(-self.rate.float().exp() * self.time.float())
        waves = torch.fft.rfft(u.transpose(1, 2).float(), n=2 * length)
        waves = waves * torch.fft.rfft(kernel, n=2 * length, norm="forward")
        y = torch.fft.irfft(waves, n=2 * length, norm="forward")[..., :length]
        return x_BLC + self.leave(y.transpose(1, 2).to(x_BLC.dtype) * F.silu(gate))


class Retention(nn.Module):
    """Attention without a softmax, in chunks: inside of each by products, between them by a decayed sum of states."""

    def __init__(self, width: int, heads: int, chunk: int, num: int) -> None:
        super().__init__()
        self.heads, self.chunk = heads, chunk
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        inside, between = torch.arange(chunk), torch.arange(num)
        apart = inside[:, None] - inside
        self.register_buffer("near", torch.where(apart >= 0, 0.98 ** apart.float(), 0.0))
        steps = between[:, None] - between
        self.register_buffer("far", torch.where(steps > 0, 0.5 ** (steps.float() - 1), 0.0))

    def forward(self, x_BLC: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x_BLC)).unflatten(-1, (3, self.heads, -1)).unflatten(1, (-1, self.chunk))
        q, k, v = qkv.permute(3, 0, 4, 1, 2, 5).unbind(0)  # BHNcD
        mixed = ((q @ k.transpose(-1, -2)) * self.near) @ v
        states = k.transpose(-1, -2) @ v  # BHNDD
        before = (self.far @ states.flatten(3)).view_as(states)
        mixed = torch.add(mixed, q @ before).permute(0, 2, 3, 1, 4).reshape(x_BLC.shape)
        x_BLC = x_BLC + self.out(mixed)
        return x_BLC + self.down(F.gelu(self.up(self.norm2(x_BLC))))


class SideBySide(nn.Module):
    """Experts whose tokens, sorted by expert, go through one grouped product: nothing is asked on the host."""

    def __init__(self, width: int, hidden: int, experts: int, chosen: int = 2) -> None:
        super().__init__()
        self.norm, self.route, self.chosen = nn.LayerNorm(width), nn.Linear(width, experts, bias=False), chosen
        self.up = nn.Parameter(torch.randn(experts, width, hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * hidden**-0.5)

    def forward(self, x_TC: Tensor) -> Tensor:
        normed = self.norm(x_TC)
        weight, which = self.route(normed).softmax(-1).topk(self.chosen, -1)
        order = which.flatten().argsort()
        ends = (which.flatten()[:, None] == torch.arange(len(self.up), device=x_TC.device)).sum(0).cumsum(0)
        rows, ends = order // self.chosen, ends.to(torch.int32)
        hidden = F.gelu(torch._grouped_mm(normed.index_select(0, rows), self.up, offs=ends))
        found = torch._grouped_mm(hidden, self.down, offs=ends) * weight.flatten().index_select(0, order)[:, None]
        return x_TC.index_add(0, rows, found.to(x_TC.dtype))


class Cached(nn.Module):
    """A block that keeps keys and values in place and attends to all that is kept."""

    def __init__(self, width: int, heads: int, batch: int, room: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("kept", torch.randn(2, batch, heads, room, width // heads))

    def forward(self, x_BLC: Tensor, place: Tensor, mask: object = None, upto: int | None = None) -> Tensor:
        q, k, v = self.qkv(self.norm1(x_BLC)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        self.kept.index_copy_(3, place, torch.stack((k, v)))
        k, v = self.kept[:, :, :, :upto].unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x_BLC = x_BLC + self.out(mixed.transpose(1, 2).flatten(2))
        return x_BLC + self.down(F.gelu(self.up(self.norm2(x_BLC))))


class SpaceAndTime(nn.Module):
    """A video block: every place attends over its frame, then over time; the whole of it computed again or not."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.space, self.time = (Grouped(width, heads, heads, causal=False) for _ in range(2))

    def forward(self, x_BTPC: Tensor) -> Tensor:
        batch, frames, places, width = x_BTPC.shape
        x = self.space(x_BTPC.flatten(0, 1)).view(batch, frames, places, width)
        x = self.time(x.transpose(1, 2).reshape(-1, frames, width))
        return x.view(batch, places, frames, width).transpose(1, 2)


class Video(nn.Module):
    def __init__(self, width: int, heads: int, layers: int, recompute: bool = False) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(3 * 16 * 16, width), nn.Linear(width, 400)
        self.blocks, self.recompute = nn.ModuleList(SpaceAndTime(width, heads) for _ in range(layers)), recompute

    def forward(self, x_BTPI: Tensor, labels: Tensor) -> Tensor:
        x = self.enter(x_BTPI)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return F.cross_entropy(self.head(x.mean((1, 2))), labels)


class Answering(nn.Module):
    """A decoder block without a causal past: queries attend to each other and to what was seen."""

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.own = heads, Grouped(width, heads, heads, causal=causal)
        self.norm, self.ask, self.out = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.tell = nn.Linear(width, 2 * width)

    def forward(self, x_BLC: Tensor, seen_BPC: Tensor) -> Tensor:
        x_BLC = self.own(x_BLC)
        q = self.ask(self.norm(x_BLC)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.tell(seen_BPC).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return x_BLC + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Crossed(nn.Module):
    """Features multiplied with each other layer by layer, beside a tower."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.cross = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.tower = nn.Sequential(nn.Linear(width, width), nn.ReLU(True), nn.Linear(width, width // 2), nn.ReLU(True))
        self.head = nn.Linear(width + width // 2, 1)

    def forward(self, x0: Tensor) -> Tensor:
        x = x0
        for part in self.cross:
            x = torch.addcmul(x, x0, part(x))
        return self.head(torch.cat((x, self.tower(x0)), 1))[:, 0]


class Atoms(nn.Module):
    """Messages between neighbors, weighed by a small network of their distance."""

    def __init__(self, width: int, bands: int, layers: int) -> None:
        super().__init__()
        self.kinds = nn.Embedding(100, width)
        make = lambda: nn.Sequential(nn.Linear(bands, width), nn.SiLU(), nn.Linear(width, width))
        self.filters = nn.ModuleList(make() for _ in range(layers))
        self.before = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.after = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.SiLU()) for _ in range(layers))
        self.head = nn.Linear(width, 1)

    def forward(self, kinds: Tensor, bands: Tensor, source: Tensor, target: Tensor) -> Tensor:
        x = self.kinds(kinds)
        for make, before, after in zip(self.filters, self.before, self.after, strict=True):
            sent = before(x).index_select(0, source) * make(bands)
            x = x + after(torch.zeros_like(x).index_add_(0, target, sent))
        return self.head(x).square().mean()


class Wavy(nn.Module):
    """A layer of a Fourier neural operator: the lowest waves mixed over channels, beside a product for every point."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes, self.point = modes, nn.Conv2d(width, width, 1)
        self.weight = nn.Parameter(torch.randn(2 * modes, modes, width, width, 2) / width)

    def forward(self, x: Tensor) -> Tensor:
        modes, side = self.modes, x.shape[-1]
        waves = torch.fft.rfft2(x, norm="forward")
        low = torch.cat((waves[:, :, :modes, :modes], waves[:, :, -modes:, :modes]), 2)
        mixed = torch.einsum("bixy,xyio->boxy", low, torch.view_as_complex(self.weight))
        full = torch.zeros_like(waves)
        full[:, :, :modes, :modes], full[:, :, -modes:, :modes] = mixed[:, :, :modes], mixed[:, :, modes:]
        return F.gelu(torch.fft.irfft2(full, s=(side, side), norm="forward") + self.point(x))


class Depths(nn.Module):
    """A depth for every point: strided stages with residual blocks, then doubled back by transposed convolutions."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        sizes = (width, 2 * width, 4 * width)
        self.stem = conv(3, width, 2)
        self.down = nn.ModuleList(conv(i, o, 2) for i, o in pairwise(sizes))
        self.same = nn.ModuleList(nn.Sequential(*(conv(o, o) for _ in range(depth))) for o in sizes[1:])
        self.up = nn.ModuleList(nn.ConvTranspose2d(i, o, 2, 2) for o, i in pairwise(sizes))
        self.head = nn.Conv2d(width, 8, 3, 1, 1)

    def forward(self, pictures: Tensor, truth: Tensor) -> Tensor:
        x, seen = self.stem(pictures), []
        for down, same in zip(self.down, self.same, strict=True):
            seen.append(x)
            x = down(x)
            x = x + same(x)
        for up, skipped in zip(reversed(self.up), reversed(seen), strict=True):
            x = F.relu(up(x) + skipped, inplace=True)
        return F.l1_loss(self.head(x), truth)


class Biased(nn.Module):
    """A block as T5 has it: no scale, a learned bias for every head and distance, by hand or fused."""

    def __init__(self, width: int, heads: int, length: int, by_hand: bool) -> None:
        super().__init__()
        self.heads, self.by_hand = heads, by_hand
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.register_buffer("bias", torch.randn(1, heads, length, length) * 0.1)

    def forward(self, x_BLC: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x_BLC)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        if self.by_hand:
            scores = torch.matmul(q, k.transpose(3, 2))
            scores += self.bias
            weights = F.softmax(scores.float(), dim=-1).type_as(scores)
            mixed = torch.matmul(F.dropout(weights, 0.0, self.training), v)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias, scale=1.0)
        x_BLC = x_BLC + self.out(mixed.transpose(1, 2).flatten(2))
        return x_BLC + self.down(F.relu(self.up(self.norm2(x_BLC))))


class Judge(nn.Module):
    """A network over positions of a board: a tower of small convolutions, a policy and a value."""

    def __init__(self, width: int, depth: int, moves: int) -> None:
        super().__init__()
        self.enter, self.tower = conv(24, width), nn.ModuleList(
            nn.Sequential(conv(width, width), conv(width, width)) for _ in range(depth)
        )  # fmt: skip
        self.moves, self.value = nn.Linear(width, moves), nn.Linear(width, 1)

    def forward(self, boards: Tensor) -> tuple[Tensor, Tensor]:
        x = self.enter(boards)
        for block in self.tower:
            x = x + block(x)
        x = x.mean((2, 3))
        return self.moves(x).softmax(-1), self.value(x).tanh()


class Listening(nn.Module):
    """Speech of different lengths: every layer hides what is past the end of each."""

    def __init__(self, width: int, heads: int, layers: int, asks: bool) -> None:
        super().__init__()
        self.asks, self.heads = asks, heads
        self.blocks = nn.ModuleList(Grouped(width, heads, heads, causal=False) for _ in range(layers))
        self.mixed = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x_BLC: Tensor, lengths: Tensor, longest: int) -> Tensor:
        for block, mix in zip(self.blocks, self.mixed, strict=True):
            upto = int(lengths.max()) if self.asks else longest
            inside = torch.arange(upto, device=x_BLC.device) < lengths[:, None]
            x_BLC = block(x_BLC[:, :upto]) * inside[..., None]
            x_BLC = x_BLC + F.gelu(mix(x_BLC))
        return x_BLC.square().mean()


class Isomorphic(nn.Module):
    """Graph layers as benchmarks of molecules have them: neighbors added, then two products and a norm."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        make = lambda: nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(True), nn.Linear(2 * width, width))
        self.parts = nn.ModuleList(make() for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.head = nn.Linear(width, 128)

    def forward(self, x: Tensor, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        for part, norm in zip(self.parts, self.norms, strict=True):
            x = norm(x + part(x.index_add(0, target, x.index_select(0, source))))
        return F.cross_entropy(self.head(x), labels)
