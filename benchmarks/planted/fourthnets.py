"""Networks of the fourth suite of planted causes: speech with cross-attention, windows with a bias, segmentation,
video, experts found by their mask, policies; each habit that costs time is behind a switch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# B batch, L length, C width, H heads, D width of a head, E experts, W windows


def norm_in_steps(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm as model repositories spell it: up to fp32, op by op, and back."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def norm_fused(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


class GatedBlock(nn.Module):
    """Causal attention and a gated MLP, norms before each and after queries and keys."""

    def __init__(self, width: int, heads: int, hidden: int, norm: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.heads, self.norm = heads, norm
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.before, self.between = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        self.of_q, self.of_k = (nn.Parameter(torch.ones(width // heads)) for _ in range(2))

    def forward(self, x_BLC: Tensor) -> Tensor:
        batch, length, width = x_BLC.shape
        qkv = self.qkv(self.norm(x_BLC, self.before)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(self.norm(q, self.of_q), self.norm(k, self.of_k), v, is_causal=True)
        x_BLC = x_BLC + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        h = self.norm(x_BLC, self.between)
        return x_BLC + self.down(F.silu(self.gate(h)) * self.up(h))


class Listener(nn.Module):
    """One layer of a speech decoder: its own past, then what was heard, then an MLP; one token at a time."""

    def __init__(self, width: int, heads: int, batch: int, room: int, frames: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ask, self.answer = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        for name, size in (("keys", room), ("values", room), ("heard_keys", frames), ("heard_values", frames)):
            self.register_buffer(name, torch.zeros(batch, heads, size, width // heads))

    def forward(self, x_B1C: Tensor, place: Tensor) -> Tensor:
        batch, _, width = x_B1C.shape
        qkv = self.qkv(self.norm1(x_B1C)).view(batch, 1, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        k, v = self.keys.index_copy_(2, place, k), self.values.index_copy_(2, place, v)
        mixed = F.scaled_dot_product_attention(q, k, v)
        x_B1C = x_B1C + self.out(mixed.transpose(1, 2).reshape(batch, 1, width))
        asked = self.ask(self.norm2(x_B1C)).view(batch, 1, self.heads, -1).transpose(1, 2)
        heard = F.scaled_dot_product_attention(asked, self.heard_keys, self.heard_values)
        x_B1C = x_B1C + self.answer(heard.transpose(1, 2).reshape(batch, 1, width))
        return x_B1C + self.down(F.gelu(self.up(self.norm3(x_B1C))))


class Windows(nn.Module):
    """Attention inside windows with a learned bias for every pair of places."""

    def __init__(self, width: int, heads: int, length: int, spelled_out: bool) -> None:
        super().__init__()
        self.heads, self.spelled_out = heads, spelled_out
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.bias = nn.Parameter(torch.zeros(1, heads, length, length))

    def forward(self, x_WLC: Tensor) -> Tensor:
        num, length, width = x_WLC.shape
        qkv = self.qkv(self.norm1(x_WLC)).view(num, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        if self.spelled_out:
            scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1) + self.bias
            mixed = scores.softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)
        x_WLC = x_WLC + self.out(mixed.transpose(1, 2).reshape(num, length, width))
        return x_WLC + self.down(F.gelu(self.up(self.norm2(x_WLC))))


class Careful(nn.Module):
    """An encoder layer that looks for infinities after each of its parts, as half-precision T5 does."""

    def __init__(self, width: int, heads: int, looks: bool) -> None:
        super().__init__()
        self.heads, self.looks = heads, looks
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x_BLC: Tensor) -> Tensor:
        batch, length, width = x_BLC.shape
        qkv = self.qkv(self.norm1(x_BLC)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x_BLC = self._finite(x_BLC + self.out(mixed))
        return self._finite(x_BLC + self.down(F.relu(self.up(self.norm2(x_BLC)))))

    def _finite(self, x: Tensor) -> Tensor:
        if self.looks and torch.isinf(x).any():
            limit = torch.finfo(x.dtype).max - 1000
            x = torch.clamp(x, -limit, limit)
        return x


class Routed(nn.Module):
    """Two experts for every token; ``located`` finds each expert's tokens by its mask, else all are sorted once."""

    def __init__(self, width: int, hidden: int, num: int, located: bool) -> None:
        super().__init__()
        self.router, self.num, self.located = nn.Linear(width, num, bias=False), num, located
        self.norm = nn.LayerNorm(width)
        self.up = nn.ModuleList(nn.Linear(width, hidden, bias=False) for _ in range(num))
        self.down = nn.ModuleList(nn.Linear(hidden, width, bias=False) for _ in range(num))

    def forward(self, x_LC: Tensor) -> Tensor:
        normed = self.norm(x_LC)
        gates_L2, chosen_L2 = self.router(normed).softmax(-1).topk(2, -1)
        return (self._by_mask if self.located else self._sorted)(x_LC, normed, gates_L2, chosen_L2)

    def _by_mask(self, x_LC: Tensor, normed: Tensor, gates_L2: Tensor, chosen_L2: Tensor) -> Tensor:
        mask_E2L = F.one_hot(chosen_L2, self.num).permute(2, 1, 0)
        out = x_LC.clone()
        for e in range(self.num):
            which, tokens = torch.where(mask_E2L[e])
            made = self.down[e](F.silu(self.up[e](normed[tokens])))
            out.index_add_(0, tokens, made * gates_L2[tokens, which, None])
        return out

    def _sorted(self, x_LC: Tensor, normed: Tensor, gates_L2: Tensor, chosen_L2: Tensor) -> Tensor:
        flat = chosen_L2.flatten()
        order = flat.argsort(stable=True)
        counts = torch.zeros(self.num, dtype=torch.long, device=x_LC.device)
        counts = counts.scatter_add_(0, flat, torch.ones_like(flat)).tolist()
        tokens, gates = order // 2, gates_L2.flatten()[order]
        out, parts = x_LC.clone(), (tokens.split(counts), gates.split(counts))
        for up, down, places, weight in zip(self.up, self.down, *parts, strict=True):
            out.index_add_(0, places, down(F.silu(up(normed[places]))) * weight[:, None])
        return out


class Segmenter(nn.Module):
    """Down by strided convolutions, up by transposed ones with skips: a class for every pixel."""

    def __init__(self, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        pairs = list(zip((3, *widths[:-1]), widths, strict=True))
        self.down = nn.ModuleList(self._block(a, b, 2 if i else 1) for i, (a, b) in enumerate(pairs))
        back = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in back)
        self.mix = nn.ModuleList(self._block(2 * b, b, 1) for _, b in back)
        self.head = nn.Conv2d(widths[0], classes, 1)

    @staticmethod
    def _block(inner: int, outer: int, stride: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(True),
            nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(True),
        )  # fmt: skip

    def forward(self, pictures: Tensor, classes: Tensor) -> Tensor:
        x, kept = pictures, []
        for block in self.down:
            x = block(x)
            kept.append(x)
        kept.pop()
        for up, mix in zip(self.up, self.mix, strict=True):
            x = mix(torch.cat((up(x), kept.pop()), 1))
        return F.cross_entropy(self.head(x), classes)


class Clip(nn.Module):
    """Convolutions over the frames of a clip, to one of some actions."""

    def __init__(self, widths: tuple[int, ...], classes: int = 400) -> None:
        super().__init__()
        pairs = zip((3, *widths[:-1]), widths, strict=True)
        self.convs = nn.ModuleList(nn.Conv3d(a, b, 3, (1, 2, 2), 1) for a, b in pairs)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, frames: Tensor, labels: Tensor) -> Tensor:
        x = frames.to(self.head.weight.dtype)
        for conv in self.convs:
            x = F.relu(conv(x))
        return F.cross_entropy(self.head(x.mean((2, 3, 4))), labels)


class Detector(nn.Module):
    """Stages of convolutions and a head with a score and four sides for every place and class."""

    def __init__(self, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        pairs = zip((3, *widths[:-1]), widths, strict=True)
        self.stages = nn.Sequential(*(Segmenter._block(a, b, 2) for a, b in pairs))
        self.head, self.classes = nn.Conv2d(widths[-1], 9 * (4 + classes), 1), classes

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        made = self.head(self.stages(pictures)).permute(0, 2, 3, 1).flatten(1).unflatten(1, (-1, 4 + self.classes))
        return made[..., :4], made[..., 4:]


class Policy(nn.Module):
    """A small network for actions and values, its loss that of clipped policy updates."""

    def __init__(self, inner: int, width: int, actions: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(inner, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.action, self.value = nn.Linear(width, actions), nn.Linear(width, 1)

    def forward(self, seen: Tensor, taken: Tensor, before: Tensor, gained: Tensor) -> Tensor:
        h = self.trunk(seen)
        logp = self.action(h).log_softmax(-1).gather(1, taken[:, None])[:, 0]
        ratio = (logp - before).exp()
        clipped = torch.min(ratio * gained, ratio.clamp(0.8, 1.2) * gained).mean()
        return (self.value(h)[:, 0] - gained).pow(2).mean() * 0.5 - clipped + 0.01 * logp.mean()
