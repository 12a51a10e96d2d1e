"""Networks and parts of the fifteenth suite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Feed(nn.Module):
    """A norm, two layers with a gate between them, and a sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class MixedHeads(nn.Module):
    """Attention whose heads are mixed before and after the softmax, which no fused kernel does."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out, self.feed = nn.Linear(width, 3 * width), nn.Linear(width, width), Feed(width)
        self.before, self.after = (nn.Parameter(torch.eye(heads)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        scores = torch.einsum("bhqk,hg->bgqk", (q * q.shape[-1] ** -0.5) @ k.mT, self.before)
        mixed = torch.einsum("bhqk,hg->bgqk", scores.softmax(-1), self.after) @ v
        return self.feed(x + self.out(mixed.transpose(1, 2).flatten(2)))


class Seen(nn.Module):
    """Attention that gives its weights away as well, in the mean over its heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.feed = nn.LayerNorm(width), Feed(width)
        self.attend = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(x)
        mixed, weights = self.attend(y, y, y, need_weights=True)
        return self.feed(x + mixed), weights


class Masked(nn.Module):
    """Attention over texts of different lengths."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out, self.feed = nn.Linear(width, 3 * width), nn.Linear(width, width), Feed(width)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.feed(x + self.out(mixed.transpose(1, 2).flatten(2)))


def volumes(width: int, layers: int, classes: int) -> nn.Module:
    """Convolutions over space and time."""
    parts: list[nn.Module] = [nn.Conv3d(8, width, 3, (1, 2, 2), 1), nn.ReLU(True)]
    for _ in range(layers):
        parts += [nn.Conv3d(width, width, 3, 1, 1, bias=False), nn.BatchNorm3d(width), nn.ReLU(True)]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(width, classes))


class Down(torch.optim.Optimizer):
    """Every weight against its gradient, and nothing kept."""

    def __init__(self, weights: Any, lr: float) -> None:
        super().__init__(weights, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                weight.add_(weight.grad, alpha=-group["lr"])


def assigned(found_BA4: Tensor, true_BG4: Tensor, scores_BA: Tensor) -> tuple[Tensor, Tensor]:
    """For every place the box that it should find, and how well it does: overlaps, distances and ranks in small ops."""
    low = torch.maximum(found_BA4[:, :, None, :2], true_BG4[:, None, :, :2])
    high = torch.minimum(found_BA4[:, :, None, 2:], true_BG4[:, None, :, 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    found, true = ((box[..., 2:] - box[..., :2]).clamp(min=0).prod(-1) for box in (found_BA4, true_BG4))
    overlap = shared / (found[:, :, None] + true[:, None, :] - shared + 1e-6)
    middle, center = ((box[..., :2] + box[..., 2:]) / 2 for box in (found_BA4, true_BG4))
    apart = (middle[:, :, None] - center[:, None]).square().sum(-1).sqrt()
    fits = scores_BA.sigmoid()[..., None].pow(0.5) * overlap.pow(6.0) * torch.exp(-apart)
    best = fits.topk(8, dim=1).values[:, -1:]
    chosen = (fits >= best) & (overlap > 0.1)
    which = torch.where(chosen, fits, fits.new_zeros(())).argmax(-1)
    share = fits.amax(1, keepdim=True).clamp(min=1e-6)
    wanted = (fits / share * overlap.amax(1, keepdim=True)).amax(-1) * chosen.any(-1)
    boxes = torch.gather(true_BG4, 1, which[..., None].expand(-1, -1, 4))
    return boxes, wanted


class Boxed(nn.Module):
    """Pictures to boxes and scores at every place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        part = lambda i, o, stride: (nn.Conv2d(i, o, 3, stride, 1), nn.ReLU(True))
        self.body = nn.Sequential(*part(3, width, 2), *part(width, 2 * width, 2), *part(2 * width, 4 * width, 2),
                                  *part(4 * width, 4 * width, 1), *part(4 * width, 4 * width, 1))  # fmt: skip
        self.head = nn.Conv2d(4 * width, 8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.head(self.body(x)).permute(0, 2, 3, 1).flatten(1, 2).float()
        return out[..., :4], out[..., 4]


class Edges(nn.Module):
    """Every node weighs its neighbors by a softmax over its edges."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.layer = heads, nn.Linear(width, width, bias=False)
        self.ask, self.answer = (nn.Parameter(torch.randn(heads, width // heads) * 0.1) for _ in range(2))

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        y_NHD = self.layer(x).unflatten(-1, (self.heads, -1))
        asked, answered = (y_NHD * self.ask).sum(-1), (y_NHD * self.answer).sum(-1)
        weight = F.leaky_relu(asked.index_select(0, target) + answered.index_select(0, source), 0.2).exp()
        total = torch.zeros_like(asked).index_add(0, target, weight)
        told = y_NHD.index_select(0, source) * (weight / total.index_select(0, target))[..., None]
        return F.elu(torch.zeros_like(y_NHD).index_add(0, target, told).flatten(1))


def restyled(width: int, layers: int) -> nn.Module:
    """Pictures in another style: norms of every picture by itself, and edges that are mirrored."""

    def part(i: int, o: int, kernel: int, stride: int = 1) -> tuple[nn.Module, ...]:
        return nn.ReflectionPad2d(kernel // 2), nn.Conv2d(i, o, kernel, stride), nn.InstanceNorm2d(o, affine=True)

    parts: list[nn.Module] = [*part(8, width, 9), nn.ReLU(True), *part(width, 2 * width, 3, 2), nn.ReLU(True)]
    for _ in range(layers):
        parts += [*part(2 * width, 2 * width, 3), nn.ReLU(True)]
    return nn.Sequential(*parts, nn.Upsample(scale_factor=2), *part(2 * width, width, 3), nn.ReLU(True),
                         nn.ReflectionPad2d(4), nn.Conv2d(width, 8, 9), nn.Tanh())  # fmt: skip


class Squeezed(nn.Module):
    """A wide depthwise convolution between two narrow layers, its channels weighed by what the whole picture has."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        wide = 4 * inner
        self.enter = nn.Sequential(nn.Conv2d(inner, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU(True))
        self.walk = nn.Sequential(
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.SiLU(True)
        )
        self.weigh = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, inner, 1), nn.SiLU(True), nn.Conv2d(inner, wide, 1), nn.Sigmoid()
        )
        self.leave = nn.Sequential(nn.Conv2d(wide, outer, 1, bias=False), nn.BatchNorm2d(outer))
        self.stays = stride == 1 and inner == outer

    def forward(self, x: Tensor) -> Tensor:
        y = self.walk(self.enter(x))
        y = self.leave(y * self.weigh(y))
        return x + y if self.stays else y


def squeezed(widths: tuple[int, ...], depth: int, classes: int) -> nn.Module:
    parts: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, 2, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.SiLU(True)]
    for inner, outer in zip((widths[0], *widths), widths, strict=False):
        parts += [Squeezed(inner, outer, 2), *(Squeezed(outer, outer, 1) for _ in range(depth - 1))]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))


class Carried(torch.autograd.Function):
    """A state carried along a learned field; on the way back it is carried back, and nothing is kept."""

    @staticmethod
    def forward(ctx: Any, field: nn.Module, steps: int, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.field, ctx.steps, ctx.weights = field, steps, weights
        with torch.no_grad():
            for _ in range(steps):
                x = torch.add(x, field(x), alpha=1 / steps)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Any, ...]:
        (x,), total = ctx.saved_tensors, [torch.zeros_like(weight) for weight in ctx.weights]
        for _ in range(ctx.steps):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                y = ctx.field(x)
            back, *more = torch.autograd.grad(y, (x, *ctx.weights), slope)
            x = torch.sub(x.detach(), y.detach(), alpha=1 / ctx.steps)
            slope = torch.add(slope, back, alpha=1 / ctx.steps)
            torch._foreach_add_(total, more, alpha=1 / ctx.steps)
        return None, None, slope, *total


def layers_of(weights: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """A network that is given its weights from outside."""

    def run(x: Tensor) -> Tensor:
        for i in range(0, len(weights) - 2, 2):
            x = F.relu(F.linear(x, weights[i], weights[i + 1]), inplace=True)
        return F.linear(x, weights[-2], weights[-1])

    return run


class Sent(nn.Module):
    """Tokens put into groups by a router, and each group through a layer of its own."""

    def __init__(self, width: int, num: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, num, bias=False)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num))

    def forward(self, x: Tensor, sizes: list[int] | None) -> Tensor:
        """``sizes`` of the groups where they are fixed beforehand, else as the router has it."""
        wanted = self.router(x).argmax(-1)
        order = wanted.argsort(stable=True)
        if sizes is None:
            sizes = torch.bincount(wanted, minlength=len(self.layers)).tolist()
        groups = x.index_select(0, order).split(sizes)
        y = torch.cat([layer(group) for layer, group in zip(self.layers, groups, strict=True)])
        return torch.empty_like(x).index_copy(0, order, F.gelu(y))
