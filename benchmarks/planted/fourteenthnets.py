"""Networks of the fourteenth suite: judges of drafts, blocks of one's own kernels, correctors of flows, convolutions
that see what was before, makers of sound."""

from __future__ import annotations

import ninthnets
import thirteenthnets
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn


class FlatSound(thirteenthnets.RawSound):
    """The same cut down as flat pictures."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__(width, heads, layers, lambda w, h: ninthnets.Grouped(w, h, h, causal=False))
        flat = lambda c: nn.Conv2d(c.in_channels, c.out_channels, (1, *c.kernel_size), (1, *c.stride), bias=False)
        self.cut = nn.Sequential(*(flat(part) if isinstance(part, nn.Conv1d) else part for part in self.cut))

    def forward(self, waves: Tensor) -> Tensor:
        return self.blocks(self.enter(self.norm(self.cut(waves)[:, :, 0].transpose(1, 2))))


class Judge(nn.Module):
    """A layer that attends to a long text in memory, of which some words are new."""

    def __init__(self, width: int, heads: int, batch: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("keys", torch.randn(batch, heads, length, width // heads))
        self.register_buffer("values", torch.randn(batch, heads, length, width // heads))

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        self.keys[:, :, -x.shape[1] :] = k
        self.values[:, :, -x.shape[1] :] = v
        mixed = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=seen)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


@triton.jit
def _normed(x_ptr, weight_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(x_ptr + row * width + at, inside, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x) / width + 1e-6)
    weight = tl.load(weight_ptr + at, inside, 0.0).to(tl.float32)
    tl.store(out_ptr + row * width + at, (x * scale * weight).to(out_ptr.dtype.element_ty), inside)


@triton.jit
def _gated(both_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(both_ptr + row * 2 * width + at, inside, 0.0).to(tl.float32)
    up = tl.load(both_ptr + row * 2 * width + width + at, inside, 0.0).to(tl.float32)
    tl.store(out_ptr + row * width + at, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), inside)


class OwnBlock(nn.Module):
    """A norm, a gated network and a sum, the light parts in kernels of one's own."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.enter, self.leave = nn.Linear(width, 2 * hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cuda:
            gate, up = self.enter(F.rms_norm(x, x.shape[-1:], self.weight)).chunk(2, -1)
            return torch.addmm(x, F.silu(gate) * up, self.leave.weight.T)
        rows, width = x.shape
        normed, both = torch.empty_like(x), None
        _normed[(rows,)](x, self.weight, normed, width, BLOCK=triton.next_power_of_2(width))
        both = self.enter(normed)
        gated = both.new_empty(rows, both.shape[1] // 2)
        _gated[(rows, triton.cdiv(gated.shape[1], 1024))](both, gated, gated.shape[1], BLOCK=1024)
        return torch.addmm(x, gated, self.leave.weight.T)


def convolutions(width: int, classes: int) -> nn.Module:
    """Convolutions without norms."""
    part = lambda i, o, stride: (nn.Conv2d(i, o, 3, stride, 1), nn.ReLU(True))
    parts = (
        *part(3, width, 1),
        *part(width, 2 * width, 2),
        *part(2 * width, 2 * width, 1),
        *part(2 * width, 4 * width, 2),
    )
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, classes))


class Corrector(nn.Module):
    """Matches of two pictures, looked up where a flow points to, and convolutions that correct it."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.enter = nn.Conv2d(2 * wide + 2, wide, 3, 1, 1)
        self.think = nn.Sequential(nn.ReLU(True), nn.Conv2d(wide, 2 * wide, 3, 1, 1), nn.ReLU(True))
        self.leave = nn.Conv2d(2 * wide, 2, 3, 1, 1)

    def forward(self, first: Tensor, second: Tensor, start_BYX2: Tensor, rounds: int) -> Tensor:
        flow = start_BYX2
        for _ in range(rounds):
            there = F.grid_sample(second.float(), flow.float(), align_corners=False).to(first.dtype)
            both = torch.cat((first, there, flow.permute(0, 3, 1, 2)), 1).contiguous(memory_format=torch.channels_last)
            flow = flow + self.leave(self.think(self.enter(both))).permute(0, 2, 3, 1)
        return flow


class Before(nn.Conv2d):
    """A convolution whose weights for later places are nothing."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__(inner, outer, 5, 1, 2)
        mask = torch.ones(5, 5)
        mask[2, 3:], mask[3:] = 0.0, 0.0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight * self.mask, self.bias)


def before_only(width: int, layers: int) -> nn.Module:
    sizes = ((8 if not i else width, width) for i in range(layers))
    return nn.Sequential(*(part for i, o in sizes for part in (Before(i, o), nn.ReLU(True))))


def vocoder(width: int) -> nn.Module:
    """Spectra to sound: each stage four times as long and half as wide."""
    parts: list[nn.Module] = [nn.Conv1d(80, width, 7, 1, 3)]
    for i in range(3):
        wide = width >> i
        parts += [nn.LeakyReLU(0.1), nn.ConvTranspose1d(wide, wide // 2, 8, 4, 2)]
        parts += [nn.LeakyReLU(0.1), nn.Conv1d(wide // 2, wide // 2, 7, 1, 3)]
    return nn.Sequential(*parts, nn.LeakyReLU(0.1), nn.Conv1d(width >> 3, 1, 7, 1, 3), nn.Tanh())


def flattened(model: nn.Sequential) -> nn.Sequential:
    """The same convolutions over pictures of height one."""

    def flat(part: nn.Module) -> nn.Module:
        if not isinstance(part, nn.Conv1d | nn.ConvTranspose1d):
            return part
        kind = nn.Conv2d if isinstance(part, nn.Conv1d) else nn.ConvTranspose2d
        sizes = ((1, *part.kernel_size), (1, *part.stride), (0, *part.padding))
        return kind(part.in_channels, part.out_channels, *sizes)

    return nn.Sequential(*map(flat, model))


class Rounded(nn.Module):
    """A layer whose weights and inputs are rounded to 256 values on the way."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.fake_quantize_per_tensor_affine(self.layer.weight, 0.01, 0, -128, 127)
        x = torch.fake_quantize_per_tensor_affine(x, 0.05, 0, -128, 127)
        return F.relu(F.linear(x, weight, self.layer.bias), inplace=True)
