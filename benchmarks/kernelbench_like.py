"""Problems in the manner of KernelBench levels 1 to 3: eager, torch.compile and ``ridgeline.optimize`` on each.

The list of problems and their sizes follow the public benchmark (github.com/ScalingIntelligence/KernelBench); the
modules here are our own. Level 1 is one op, level 2 a product or convolution with what follows it, level 3 a network.
Everything is float32 with TF32 left as PyTorch sets it (off for products, on for convolutions), inputs are uniform in
[0, 1). A problem counts as faster where ours beats the better of the two others by more than 2 %, as slower where it
loses by more than 2 %. ``--sample`` takes every n-th problem; ``--scale`` shrinks all sizes, for a host without one.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NOISE_FRAC = 0.02
Made = tuple[nn.Module, tuple[Tensor, ...]]


@dataclass(frozen=True)
class Problem:
    level: int
    name: str
    make: Callable[[Any], Made]


@dataclass(frozen=True)
class Result:
    level: int
    name: str
    eager_s: float
    compiled_s: float
    ours_s: float
    winner: str
    right: bool
    error: float
    note: str = ""

    @property
    def best_s(self) -> float:
        return min(self.eager_s, self.compiled_s)

    @property
    def verdict(self) -> str:
        if not self.right:
            return "WRONG"
        if math.isnan(self.ours_s):
            return "refused"
        ratio = self.best_s / self.ours_s
        return "faster" if ratio > 1 + NOISE_FRAC else "slower" if ratio < 1 - NOISE_FRAC else "even"


PROBLEMS: list[Problem] = []


class Of(nn.Module):
    """A function of the inputs and of layers and parameters held by name."""

    def __init__(self, function: Callable[..., Any], **held: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in held.items():
            if isinstance(value, nn.Module):
                self.add_module(name, value)
            else:
                self.register_parameter(name, nn.Parameter(value))

    def forward(self, *args: Tensor) -> Any:
        return self.function(self, *args)


def add(level: int, name: str, function: Callable[..., Any], shapes: Callable[[Any], Any], **held: Any) -> None:
    """A problem: ``shapes(s)`` gives the inputs' sizes (or tensors), ``held`` makes layers when called with ``s``."""

    def make(s: Any) -> Made:
        parts = {key: value(s) for key, value in held.items()}
        inputs = tuple(torch.rand(*x) if isinstance(x, tuple) else x for x in shapes(s))
        return Of(function, **parts), inputs

    PROBLEMS.append(Problem(level, name, make))


class Scale:
    """Sizes as they are, or smaller by a factor: ``s(4096)``."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, size: int, least: int = 4) -> int:
        if self.factor == 1:
            return size
        found = max(min(size, least), int(size * self.factor))
        return found // 16 * 16 if found > 16 else found


# level 1: products --------------------------------------------------------------------------------------------------

_product = lambda m, a, b: a @ b
add(1, "square product", _product, lambda s: ((s(4096), s(4096)), (s(4096), s(4096))))
add(1, "product", _product, lambda s: ((s(2048), s(8192)), (s(8192), s(4096))))
add(
    1,
    "batched product",
    lambda m, a, b: torch.bmm(a, b),
    lambda s: ((s(128), s(512), s(1024)), (s(128), s(1024), s(2048))),
)
add(1, "matrix times vector", _product, lambda s: ((s(2048), s(1048576)), (s(1048576), 1)))
add(1, "matrix times number", lambda m, a: a * 3.14, lambda s: ((s(16384), s(16384)),))
add(1, "product, large inner dim", _product, lambda s: ((s(256), s(524288)), (s(524288), s(256))))
add(1, "product, small inner dim", _product, lambda s: ((s(32768), 64), (64, s(32768))))
add(1, "product, irregular", _product, lambda s: ((s(8205), s(2949)), (s(2949), s(5921))))
add(1, "tall and thin product", _product, lambda s: ((s(32768), 32), (32, s(32768))))
add(1, "3d times matrix", _product, lambda s: ((s(16), s(1024), s(2048)), (s(2048), s(768))))
add(
    1,
    "4d times matrix",
    lambda m, a, b: torch.einsum("bijl,lk->bijk", a, b),
    lambda s: ((s(8), s(256), s(512), s(256)), (s(256), s(768))),
)
add(1, "diagonal times matrix", lambda m, a, b: torch.diag(a) @ b, lambda s: ((s(4096),), (s(4096), s(4096))))
add(
    1,
    "symmetric product",
    _product,
    lambda s: tuple((lambda x: (x + x.T) / 2)(torch.rand(s(4096), s(4096))) for _ in range(2)),
)
add(
    1,
    "upper triangular product",
    lambda m, a, b: torch.triu(a @ b),
    lambda s: tuple(torch.rand(s(4096), s(4096)).triu() for _ in range(2)),
)
add(
    1,
    "lower triangular product",
    lambda m, a, b: torch.tril(a @ b),
    lambda s: tuple(torch.rand(s(4096), s(4096)).tril() for _ in range(2)),
)
add(1, "transposed left", lambda m, a, b: a.T @ b, lambda s: ((s(8192), s(2048)), (s(8192), s(4096))))
add(1, "transposed right", lambda m, a, b: a @ b.T, lambda s: ((s(2048), s(8192)), (s(4096), s(8192))))
add(1, "transposed both", lambda m, a, b: a.T @ b.T, lambda s: ((s(8192), s(2048)), (s(4096), s(8192))))

# level 1: elementwise, norms, reductions, scans, losses ---------------------------------------------------------------

_rows = lambda s: ((s(4096), s(393216)),)
for _name, _function in (
    ("relu", torch.relu),
    ("leaky relu", F.leaky_relu),
    ("sigmoid", torch.sigmoid),
    ("swish", lambda x: x * torch.sigmoid(x)),
    ("gelu", F.gelu),
    ("softplus", F.softplus),
    ("softsign", lambda x: x / (1 + x.abs())),
    ("hardtanh", F.hardtanh),
    ("softmax", lambda x: torch.softmax(x, 1)),
    ("log softmax", lambda x: torch.log_softmax(x, 1)),
):
    add(1, _name, lambda m, x, f=_function: f(x), _rows)
_maps = lambda s: ((s(64, 2), 64, s(512), s(512)),)
add(1, "batch norm", lambda m, x: m.norm(x), _maps, norm=lambda s: nn.BatchNorm2d(64))
add(1, "instance norm", lambda m, x: m.norm(x), _maps, norm=lambda s: nn.InstanceNorm2d(64))
add(1, "group norm", lambda m, x: m.norm(x), _maps, norm=lambda s: nn.GroupNorm(8, 64))
add(1, "rms norm over channels", lambda m, x: x / torch.sqrt(x.square().mean(1, keepdim=True) + 1e-5), _maps)
add(
    1,
    "layer norm over maps",
    lambda m, x: m.norm(x),
    lambda s: ((s(16, 2), 64, s(256), s(256)),),
    norm=lambda s: nn.LayerNorm((64, s(256), s(256))),
)
add(1, "frobenius norm", lambda m, x: x / torch.norm(x), _maps)
_odd = lambda s: ((s(32768), s(65535)),)
add(1, "l1 norm", lambda m, x: x / x.abs().mean(1, keepdim=True), _odd)
add(1, "l2 norm", lambda m, x: x / torch.norm(x, p=2, dim=1, keepdim=True), _odd)
_cube = lambda s: ((s(128, 2), s(4096), s(4095)),)
for _name, _function in (
    ("sum over a dim", lambda x: x.sum(1, keepdim=True)),
    ("mean over a dim", lambda x: x.mean(1)),
    ("max over a dim", lambda x: x.max(1)[0]),
    ("argmax over a dim", lambda x: x.argmax(1)),
    ("min over a dim", lambda x: x.min(1)[0]),
):
    add(1, _name, lambda m, x, f=_function: f(x), _cube)
_square = lambda s: ((s(32768), s(32768)),)
add(1, "cumulative sum", lambda m, x: x.cumsum(1), _square)
add(1, "cumulative product", lambda m, x: x.cumprod(1), _square)
add(1, "reverse cumulative sum", lambda m, x: x.flip(1).cumsum(1).flip(1), _square)
add(
    1,
    "masked cumulative sum",
    lambda m, x, keep: (x * keep).cumsum(1),
    lambda s: ((s(32768), s(32768)), torch.rand(s(32768), s(32768)) < 0.5),
)
add(1, "mean squared error", lambda m, x, y: (x - y).square().mean(), lambda s: ((s(32768), s(32768)),) * 2)
add(
    1,
    "cross entropy",
    lambda m, x, y: F.cross_entropy(x, y),
    lambda s: ((s(32768), s(4096)), torch.randint(0, s(4096), (s(32768),))),
)
add(1, "huber loss", lambda m, x, y: F.smooth_l1_loss(x, y), lambda s: ((s(32768), s(32768)),) * 2)
add(
    1,
    "kl divergence",
    lambda m, x, y: F.kl_div(x.log(), y, reduction="batchmean"),
    lambda s: tuple(torch.rand(s(16384), s(16384)).softmax(1) for _ in range(2)),
)
add(1, "triplet margin loss", lambda m, a, p, n: F.triplet_margin_loss(a, p, n), lambda s: ((s(32768), s(8192)),) * 3)
add(1, "max pool", lambda m, x: F.max_pool2d(x, 4, 1, 1), lambda s: ((s(32, 2), 64, s(512), s(512)),))
add(1, "average pool", lambda m, x: F.avg_pool2d(x, 11), lambda s: ((s(16, 2), 64, s(2048, 64), s(2048, 64)),))

# level 1: convolutions ------------------------------------------------------------------------------------------------

_apply = lambda m, x: m.conv(x)
add(
    1, "conv2d", _apply, lambda s: ((s(16, 2), 16, s(1024), s(1024)),), conv=lambda s: nn.Conv2d(16, 128, 3, bias=False)
)
add(
    1,
    "conv2d 5x7",
    _apply,
    lambda s: ((s(8, 2), 64, s(512, 16), s(256, 16)),),
    conv=lambda s: nn.Conv2d(64, 128, (5, 7), bias=False),
)
add(1, "conv1d", _apply, lambda s: ((s(32, 2), 64, s(131072)),), conv=lambda s: nn.Conv1d(64, 128, 3, bias=False))
add(
    1,
    "conv3d",
    _apply,
    lambda s: ((s(16, 1), 3, 64, s(64, 8), s(64, 8)),),
    conv=lambda s: nn.Conv3d(3, 64, 3, bias=False),
)
add(
    1,
    "transposed conv2d",
    _apply,
    lambda s: ((s(8, 2), 64, s(512, 8), s(512, 8)),),
    conv=lambda s: nn.ConvTranspose2d(64, 64, 3, bias=False),
)
add(
    1,
    "depthwise conv2d",
    _apply,
    lambda s: ((s(16, 2), 64, s(512, 8), s(512, 8)),),
    conv=lambda s: nn.Conv2d(64, 64, 3, groups=64, bias=False),
)
add(
    1,
    "pointwise conv2d",
    _apply,
    lambda s: ((s(16, 2), 64, s(1024, 8), s(1024, 8)),),
    conv=lambda s: nn.Conv2d(64, 128, 1, bias=False),
)

# level 2: a product and what follows ----------------------------------------------------------------------------------

_square_linear = {"fc": lambda s: nn.Linear(s(8192), s(8192))}
_in = lambda s: ((s(1024), s(8192)),)
for _name, _function in (
    ("linear, subtract, multiply, relu", lambda y: torch.relu((y - 2.0) * 1.5)),
    ("linear, multiply, leaky relu", lambda y: F.leaky_relu(y * 2.0, 0.1)),
    ("linear, mish, mish", lambda y: F.mish(F.mish(y))),
    ("linear, relu, divide", lambda y: torch.relu(y) / 2.0),
    ("linear, divide, gelu", lambda y: F.gelu(y / 10.0)),
    ("linear, gelu, softmax", lambda y: torch.softmax(F.gelu(y), 1)),
    (
        "linear, swish, divide, clamp, tanh, clamp",
        lambda y: torch.clamp(torch.tanh(torch.clamp(F.silu(y) / 2, -1, 1)), -1, 1),
    ),
    ("linear, sigmoid, scale, residual", lambda y: torch.sigmoid(y) * 2.0 + y),
    (
        "linear, scale, add, clamp, logsumexp, mish",
        lambda y: (lambda z: z * F.mish(z))(torch.logsumexp(torch.clamp(y * 2.0 + y * 2.0, -10, 10), 1, keepdim=True)),
    ),
    (
        "linear, max, subtract mean, gelu",
        lambda y: F.gelu(y.max(1, keepdim=True)[0] - y.max(1, keepdim=True)[0].mean(1, keepdim=True)),
    ),
    (
        "linear, sum, max, mean, logsumexp",
        lambda y: torch.logsumexp(
            torch.logsumexp(y.sum(1, keepdim=True).max(1, keepdim=True)[0].mean(1, keepdim=True), 1, keepdim=True),
            1,
            keepdim=True,
        ),
    ),
):
    add(2, _name, lambda m, x, f=_function: f(m.fc(x)), _in, **_square_linear)
add(
    2,
    "linear, group norm, hardtanh",
    lambda m, x: F.hardtanh(m.norm(m.fc(x)), -2, 2),
    _in,
    **_square_linear,
    norm=lambda s: nn.GroupNorm(16, s(8192)),
)
add(
    2,
    "linear, group norm, swish, multiply, swish",
    lambda m, x: F.silu(F.silu(m.norm(m.fc(x))) * m.by),
    _in,
    **_square_linear,
    norm=lambda s: nn.GroupNorm(s(256), s(8192)),
    by=lambda s: torch.rand(s(8192)),
)
add(
    2,
    "linear, scale, batch norm",
    lambda m, x: m.norm(m.fc(x) * m.by),
    _in,
    **_square_linear,
    norm=lambda s: nn.BatchNorm1d(s(8192)),
    by=lambda s: torch.rand(s(8192)),
)
add(
    2,
    "linear, batch norm, scale, softmax",
    lambda m, x: torch.softmax(m.by * m.norm(m.fc(x)), 1),
    _in,
    **_square_linear,
    norm=lambda s: nn.BatchNorm1d(s(8192)),
    by=lambda s: torch.rand(1),
)
add(
    2,
    "product, divide, sum, scale",
    lambda m, x: (x @ m.w.T / 2).sum(1, keepdim=True) * 1.5,
    _in,
    w=lambda s: torch.rand(s(8192), s(8192)),
)
add(
    2,
    "linear, batch norm, gelu, relu",
    lambda m, x: torch.relu(F.gelu(m.norm(m.fc(x)))),
    lambda s: ((s(16384), s(4096)),),
    fc=lambda s: nn.Linear(s(4096), s(4096)),
    norm=lambda s: nn.BatchNorm1d(s(4096)),
)
add(
    2,
    "linear, scale, residual",
    lambda m, x: (lambda y: y * 0.5 + y)(m.fc(x)),
    lambda s: ((s(16384), s(4096)),),
    fc=lambda s: nn.Linear(s(4096), s(4096)),
)
add(
    2,
    "linear, sigmoid, linear, logsumexp",
    lambda m, x: torch.logsumexp(m.out(torch.sigmoid(m.fc(x))), 1),
    lambda s: ((s(16384), s(2048)),),
    fc=lambda s: nn.Linear(s(2048), s(4096)),
    out=lambda s: nn.Linear(s(4096), s(1024)),
)
add(
    2,
    "linear, swish, bias, group norm",
    lambda m, x: m.norm(F.silu(m.fc(x)) + m.by),
    lambda s: ((s(32768), s(1024)),),
    fc=lambda s: nn.Linear(s(1024), s(4096)),
    norm=lambda s: nn.GroupNorm(s(64), s(4096)),
    by=lambda s: torch.rand(s(4096)),
)
add(
    2,
    "linear, sigmoid, sum",
    lambda m, x: torch.sigmoid(m.fc(x)).sum(1, keepdim=True),
    lambda s: ((128, s(32768)),),
    fc=lambda s: nn.Linear(s(32768), s(32768)),
)
_conv = {"conv": lambda s: nn.Conv2d(64, 128, 3)}
_image = lambda s: ((s(64, 2), 64, s(128, 16), s(128, 16)),)
for _name, _function in (
    ("conv, mish, mish", lambda y: F.mish(F.mish(y))),
    ("conv, relu, hardswish", lambda y: F.hardswish(torch.relu(y))),
    ("conv, min over channels, tanh, tanh", lambda y: torch.tanh(torch.tanh(y.min(1, keepdim=True)[0]))),
    ("conv, gelu, global mean", lambda y: F.gelu(y).mean((2, 3))),
    ("conv, divide, leaky relu", lambda y: F.leaky_relu(y / 2, 0.01)),
    ("conv, mean pool, sigmoid, sum", lambda y: torch.sigmoid(F.avg_pool2d(y, 4)).sum((1, 2, 3))),
    ("conv, instance norm, divide", lambda y: F.instance_norm(y) / 2),
    ("conv, subtract, hardswish, pool, mish", lambda y: F.mish(F.max_pool2d(F.hardswish(y - 0.5), 2))),
):
    add(2, _name, lambda m, x, f=_function: f(m.conv(x)), _image, **_conv)
add(
    2,
    "conv, batch norm, scale",
    lambda m, x: m.norm(m.conv(x)) * 2.0,
    _image,
    **_conv,
    norm=lambda s: nn.BatchNorm2d(128),
)
add(
    2,
    "conv, group norm, tanh, hardswish, residual, logsumexp",
    lambda m, x: (lambda y: torch.logsumexp(y + F.hardswish(torch.tanh(m.norm(y))), 1, keepdim=True))(m.conv(x)),
    _image,
    **_conv,
    norm=lambda s: nn.GroupNorm(16, 128),
)
add(
    2,
    "conv3d, mish, tanh",
    lambda m, x: torch.tanh(F.mish(m.conv(x))),
    lambda s: ((s(16, 2), 32, s(32, 8), s(64, 8), s(64, 8)),),
    conv=lambda s: nn.Conv3d(32, 64, 3),
)
add(
    2,
    "transposed conv, bias, clamp, scale",
    lambda m, x: torch.clamp(torch.clamp(m.conv(x) + m.by, 0, 1) * 2, 0, 1) / 2,
    lambda s: ((s(64, 2), 64, s(128, 8), s(128, 8)),),
    conv=lambda s: nn.ConvTranspose2d(64, 64, 3, stride=2, padding=1, output_padding=1),
    by=lambda s: torch.rand(64, 1, 1),
)

# level 3: networks ----------------------------------------------------------------------------------------------------


def _mlp(sizes: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
        )
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        self.short = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.first(x)))
        return torch.relu(self.norm2(self.second(y)) + self.short(x))


def _resnet(s: Any) -> nn.Sequential:
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    widths, blocks, inputs = (64, 128, 256, 512), [], 64
    for i, width in enumerate(widths):
        blocks += [Block(inputs, width, 1 if i == 0 else 2), Block(width, width)]
        inputs = width
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


def _convnet(s: Any) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 20),
    )


class CausalAttention(nn.Module):
    """Multi-head attention written out with a mask, as in small GPTs; ``act`` weighs the scores."""

    def __init__(self, width: int, heads: int, longest: int, rectified: bool = False) -> None:
        super().__init__()
        self.qkv, self.out, self.heads, self.rectified = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
            heads,
            rectified,
        )
        self.register_buffer("seen", torch.tril(torch.ones(longest, longest)).view(1, 1, longest, longest))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in self.qkv(x).split(c, 2))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.shape[-1]))
        scores = scores.masked_fill(self.seen[:, :, :t, :t] == 0, float("-inf"))
        weights = torch.relu(scores) if self.rectified else torch.softmax(scores, -1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, t, c))


class GptBlock(nn.Module):
    def __init__(self, width: int, heads: int, longest: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads, longest)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.wide(self.norm2(x))
        y = 0.5 * y * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (y + 0.044715 * torch.pow(y, 3.0))))
        return x + self.narrow(y)


class Vit(nn.Module):
    def __init__(self, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Linear(3 * 256, width)
        self.first, self.places = nn.Parameter(torch.rand(1, 1, width)), nn.Parameter(torch.rand(1, 197, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, depth), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        b = x.shape[0]
        x = x.unfold(2, 16, 16).unfold(3, 16, 16).reshape(b, 196, -1)
        x = torch.cat([self.first.expand(b, -1, -1), self.patches(x)], 1) + self.places
        return self.head(self.body(x)[:, 0])


_run = lambda m, *x: m.net(*x)
add(3, "mlp", _run, lambda s: ((128, s(16384)),), net=lambda s: _mlp([s(16384)] * 3 + [s(8192)]))
add(
    3,
    "deep narrow mlp",
    _run,
    lambda s: ((s(1024), s(8192)),),
    net=lambda s: _mlp([s(8192)] + [s(1024)] * 16 + [s(8192)]),
)
add(3, "lenet", _run, lambda s: ((s(4096), 1, 32, 32),), net=_convnet)
add(3, "residual block", _run, lambda s: ((10, 3, s(224, 32), s(224, 32)),), net=lambda s: Block(3, 64))
add(3, "resnet 18", _run, lambda s: ((2, 3, s(224, 64), s(224, 64)),), net=_resnet)
add(3, "vision transformer", _run, lambda s: ((2, 3, 224, 224),), net=lambda s: Vit(512, 6, 8))
add(3, "causal attention", _run, lambda s: ((s(128, 2), s(512), 768),), net=lambda s: CausalAttention(768, 8, 1024))
add(3, "gpt block", _run, lambda s: ((s(128, 2), s(512), 768),), net=lambda s: GptBlock(768, 8, 1024))
add(
    3,
    "relu attention",
    _run,
    lambda s: ((s(16, 2), s(1024), 768),),
    net=lambda s: CausalAttention(768, 12, 1024, rectified=True),
)
add(
    3,
    "lstm",
    lambda m, x: m.fc(m.net(x)[0][:, -1]),
    lambda s: ((10, s(512), 128),),
    net=lambda s: nn.LSTM(128, 256, 6, batch_first=True),
    fc=lambda s: nn.Linear(256, 10),
)
add(3, "gru", lambda m, x: m.net(x)[0], lambda s: ((s(512), 10, 128),), net=lambda s: nn.GRU(128, 256, 6))


# running them -------------------------------------------------------------------------------------------------------


def seconds(call: Callable[[], Any], device: torch.device, least_s: float = 0.15) -> float:
    """Median seconds of a call, device work included."""
    sync = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    for _ in range(2):
        call()
    sync()
    samples: list[float] = []
    began = time.perf_counter()
    while len(samples) < 5 or (time.perf_counter() - began < least_s and len(samples) < 200):
        start = time.perf_counter()
        call()
        sync()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def interleaved(calls: dict[str, Callable[[], Any]], device: torch.device) -> dict[str, float]:
    """The better of two visits to each, in turn: clocks drift."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(2):
        for name, call in calls.items():
            found[name].append(seconds(call, device))
    return {name: min(samples) for name, samples in found.items()}


def run(problem: Problem, device: torch.device, scale: float, each_s: float, compile_stock: bool) -> Result:
    """One problem, three ways."""
    import ridgeline

    torch.manual_seed(0)
    with torch.device(device):
        model, args = problem.make(Scale(scale))
    model = model.eval()
    with torch.no_grad():
        meant = model(*args)
        calls: dict[str, Callable[[], Any]] = {"eager": lambda: model(*args)}
        if compile_stock:
            stock = torch.compile(model)
            stock(*args)
            calls["compiled"] = lambda: stock(*args)
        fast = ridgeline.optimize(model, args, budget_s=each_s, use_cache=False)
        found = fast(*args)
        right, error = alike(found, meant)
        calls["ours"] = lambda: fast(*args)
        times = interleaved(calls, device)
    winner = str(getattr(fast.receipt, "winner", ""))
    return Result(
        problem.level,
        problem.name,
        times["eager"],
        times.get("compiled", math.inf),
        times["ours"],
        winner,
        right,
        error,
    )


def alike(found: Tensor, meant: Tensor, tolerance: float = 1e-3) -> tuple[bool, float]:
    """Whether two results agree, and the largest difference relative to the largest value."""
    if found.shape != meant.shape or found.dtype != meant.dtype:
        return False, math.inf
    if not meant.is_floating_point():
        return bool(torch.equal(found, meant)), float((found != meant).float().mean())
    same_nan = bool(torch.equal(found.isnan(), meant.isnan()))
    scale = meant.nan_to_num(0.0, 0.0, 0.0).abs().max().clamp_min(1e-12)
    error = float((found - meant).nan_to_num(0.0, 0.0, 0.0).abs().max() / scale)
    return same_nan and error <= tolerance, error


def chosen(only: str, sample: int, level: int) -> Iterator[Problem]:
    for i, problem in enumerate(PROBLEMS):
        if (not only or only in problem.name) and (not level or problem.level == level) and i % sample == 0:
            yield problem


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=600.0)
    parser.add_argument("--each-s", type=float, default=15.0)
    parser.add_argument("--sample", type=int, default=1)
    parser.add_argument("--level", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--without-compile", action="store_true")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    began, results = time.monotonic(), []
    given.out.mkdir(parents=True, exist_ok=True)
    for problem in chosen(given.only, given.sample, given.level):
        if time.monotonic() - began > given.budget_s - given.each_s:
            print("out of time", flush=True)
            break
        try:
            result = run(problem, device, given.scale, given.each_s, not given.without_compile)
        except Exception as problem_met:  # what fails is a result too
            nan = math.nan
            result = Result(problem.level, problem.name, nan, nan, nan, "", False, nan, repr(problem_met)[:300])
        results.append(result)
        print(
            f"{result.level} {result.name:52} eager {result.eager_s * 1e3:9.3f} ms"
            f"  compiled {result.compiled_s * 1e3:9.3f}  ours {result.ours_s * 1e3:9.3f}"
            f"  {result.verdict:8} {result.winner:28} {result.error:.1e} {result.note}",
            flush=True,
        )
        with gzip.open(given.out / "kernelbench_like.json.gz", "wt") as file:
            json.dump([asdict(r) | {"verdict": r.verdict} for r in results], file)
        torch._dynamo.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    counts = {
        word: sum(r.verdict == word for r in results) for word in ("faster", "even", "slower", "WRONG", "refused")
    }
    print(f"{len(results)} problems: " + ", ".join(f"{num} {word}" for word, num in counts.items()))


if __name__ == "__main__":
    main()
