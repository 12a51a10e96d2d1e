"""Problems in the manner of KernelBench levels 1 to 3: eager, torch.compile and ``ridgeline.optimize`` on each.

The list of problems and their sizes follow the public benchmark (github.com/ScalingIntelligence/KernelBench); the
modules here are our own. Level 1 is one op, level 2 a product or convolution with what follows it, level 3 a network.
Everything is float32 with TF32 left as PyTorch sets it (off for products, on for convolutions), inputs are uniform in
[0, 1), and modules are left in training mode without gradients, as the benchmark runs them: batch norm normalizes by
the batch. A problem counts as faster where ours beats the better of the two others by more than 2 %, as slower where it
loses by more than 2 %. ``--sample`` takes every n-th problem; ``--scale`` shrinks all sizes, for a host without a GPU.

``--way search`` is ``ridgeline.optimize`` with ``--each-s`` seconds. ``--way rewrites`` measures the rewrites alone,
with ``--graphs`` also captured, in a fraction of the time. Problems are spread over ``--jobs`` processes; a process
that is not compiling holds a lock, so that no other uses the device.

``--folder`` takes the public benchmark's own problems instead, from a checkout of it: ``level1`` to ``level3``, files
with a ``Model``, ``get_inputs`` and ``get_init_inputs``. They are named by level and number, ``2/33``.

Searches race shorter here than by default, because all processes wait for the lock.
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import gzip
import importlib
import itertools
import json
import math
import os
import re
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NOISE_FRAC = 0.02
SPARE_BYTES = 4 << 30
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
    spent_s: float = 0.0
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def best_s(self) -> float:
        return min(self.eager_s, self.compiled_s)

    @property
    def verdict(self) -> str:
        if not self.right:
            return "WRONG"
        if math.isnan(self.ours_s):
            return "refused"
        if math.isnan(self.compiled_s):
            return "no rival"
        ratio = self.best_s / self.ours_s
        return "faster" if ratio > 1 + NOISE_FRAC else "slower" if ratio < 1 - NOISE_FRAC else "even"


PROBLEMS: list[Problem] = []
FILES: dict[str, list[Path]] = {}
SIZES = re.compile(r"batch|height|width|depth|length|seq|features|input_size|hidden|^([MNKmnkHWD]|dim\d?)$")
LEAST_SIZE = 8
"""Names of sizes in the public benchmark's files, and the least size that is halved."""


class Of(nn.Module):
    """A function of the inputs and of named layers and parameters."""

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
    """Register a problem: ``shapes(s)`` gives the inputs' sizes (or tensors), ``held`` makes layers for scale ``s``."""

    def make(s: Any) -> Made:
        parts = {key: value(s) for key, value in held.items()}
        inputs = tuple(torch.rand(*x) if isinstance(x, tuple) else x for x in shapes(s))
        return Of(function, **parts), inputs

    PROBLEMS.append(Problem(level, name, make))


class Scale:
    """Sizes, divided by a factor: ``s(4096)``."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, size: int, least: int = 4) -> int:
        if self.factor == 1:
            return size
        found = max(min(size, least), int(size * self.factor))
        return found // 16 * 16 if found > 16 else found


# level 1: GEMMs -----------------------------------------------------------------------------------------------------

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
add(1, "matrix times number", lambda m, a: a * 3.14, lambda s: ((s(65536), s(16384)),))
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
    ("tanh", torch.tanh),
    ("selu", torch.selu),
    ("hardsigmoid", F.hardsigmoid),
    ("elu", F.elu),
    ("softmax", lambda x: torch.softmax(x, 1)),
    ("log softmax", lambda x: torch.log_softmax(x, 1)),
):
    add(1, _name, lambda m, x, f=_function: f(x), _rows)
_maps = lambda s: ((s(112, 2), 64, s(512), s(512)),)
add(
    1,
    "batch norm",
    lambda m, x: m.norm(x),
    lambda s: ((s(64, 2), 64, s(512), s(512)),),
    norm=lambda s: nn.BatchNorm2d(64),
)
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
    ("argmin over a dim", lambda x: x.argmin(1)),
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
add(
    1,
    "hinge loss",
    lambda m, x, y: torch.clamp(1 - x * y, min=0).mean(),
    lambda s: ((s(32768), s(32768)), torch.randint(0, 2, (s(32768),)).float() * 2 - 1),
)
add(
    1,
    "exclusive cumulative sum",
    lambda m, x: torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1].cumsum(1)), 1),
    _square,
)
add(
    1,
    "attention",
    lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v),
    lambda s: ((s(32, 2), s(32, 2), s(512), s(1024)),) * 3,
)
add(
    1,
    "gelu written out",
    lambda m, x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0)))),
    lambda s: ((s(8192), s(8192)),),
)
add(1, "max pool 1d", lambda m, x: F.max_pool1d(x, 8, 1, 4, 3), lambda s: ((s(64, 2), s(192), s(65536)),))
add(
    1,
    "max pool 3d",
    lambda m, x: F.max_pool3d(x, 3, 2, 1, 3),
    lambda s: ((s(16, 2), 32, s(128, 16), s(128, 16), s(128, 16)),),
)
add(1, "average pool 1d", lambda m, x: F.avg_pool1d(x, 8, 1, 4), lambda s: ((s(64, 2), s(128), s(65536)),))
add(
    1,
    "average pool 3d",
    lambda m, x: F.avg_pool3d(x, 3, 2, 1),
    lambda s: ((s(16, 2), 32, s(128, 16), s(128, 16), s(256, 16)),),
)
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
    lambda s: ((s(8, 2), 64, s(1024, 8), s(1024, 8)),),
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


def _conv(name: str, shape: Callable[[Any], tuple[int, ...]], layer: Callable[[Any], nn.Module]) -> None:
    add(1, name, _apply, lambda s: (shape(s),), conv=layer)


_conv("conv2d 11x11 stride 4", lambda s: (s(256, 2), 3, s(224, 32), s(224, 32)), lambda s: nn.Conv2d(3, 96, 11, 4, 2))
_conv("conv2d wide", lambda s: (8, 64, s(512, 16), s(1024, 16)), lambda s: nn.Conv2d(64, 128, 3, bias=False))
_conv("conv2d 5x9", lambda s: (8, 32, s(512, 16), s(512, 16)), lambda s: nn.Conv2d(32, 64, (5, 9), bias=False))
_conv(
    "conv2d 5x9 dilated",
    lambda s: (8, 32, s(512, 32), s(512, 32)),
    lambda s: nn.Conv2d(32, 64, (5, 9), padding=(2, 4), dilation=(2, 3), bias=False),
)
_conv(
    "conv1d dilated strided",
    lambda s: (s(64, 2), 64, s(524280)),
    lambda s: nn.Conv1d(64, 128, 3, 3, dilation=4, bias=False),
)
_conv("conv3d 3x5x7", lambda s: (s(16, 1), 3, s(64, 8), s(64, 8), s(64, 8)), lambda s: nn.Conv3d(3, 64, (3, 5, 7)))
_conv("conv3d flat", lambda s: (s(16, 1), 3, s(256, 8), s(256, 8), 10), lambda s: nn.Conv3d(3, 64, (3, 3, 1)))
_conv("transposed conv1d", lambda s: (s(64, 2), 128, s(65536)), lambda s: nn.ConvTranspose1d(128, 128, 3, bias=False))
_conv(
    "transposed conv1d dilated",
    lambda s: (s(32, 2), 32, s(131072)),
    lambda s: nn.ConvTranspose1d(32, 64, 5, dilation=3, bias=False),
)
_conv(
    "transposed conv2d 3x5",
    lambda s: (s(64, 2), 64, s(128, 8), s(256, 8)),
    lambda s: nn.ConvTranspose2d(64, 128, (3, 5), bias=False),
)
_conv(
    "transposed conv2d grouped strided",
    lambda s: (s(16, 2), 32, s(128, 8), s(256, 8)),
    lambda s: nn.ConvTranspose2d(32, 64, (3, 5), (2, 3), (1, 2), groups=4, bias=False),
)
_conv(
    "transposed conv2d dilated strided",
    lambda s: (s(16, 2), 32, s(64, 8), s(128, 8)),
    lambda s: nn.ConvTranspose2d(32, 64, 3, 5, 1, dilation=2, bias=False),
)
_conv(
    "transposed conv3d",
    lambda s: (8, 48, s(64, 8), s(64, 8), s(64, 8)),
    lambda s: nn.ConvTranspose3d(48, 48, 3, bias=False),
)
_conv(
    "transposed conv3d grouped strided",
    lambda s: (4, 32, s(32, 8), s(64, 8), s(128, 8)),
    lambda s: nn.ConvTranspose3d(32, 32, 3, 2, 1, groups=4, bias=False),
)
_conv(
    "depthwise conv2d 3x7",
    lambda s: (s(32, 2), 128, s(128, 16), s(256, 16)),
    lambda s: nn.Conv2d(128, 128, (3, 7), groups=128, bias=False),
)
add(
    1,
    "separable conv2d",
    lambda m, x: m.point(m.conv(x)),
    lambda s: ((s(16, 2), 64, s(512, 16), s(512, 16)),),
    conv=lambda s: nn.Conv2d(64, 64, 3, 1, 1, groups=64, bias=False),
    point=lambda s: nn.Conv2d(64, 128, 1, bias=False),
)

# level 2: a GEMM or convolution and its epilogue ----------------------------------------------------------------------

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


def _chain(name: str, shape: Callable[[Any], tuple[int, ...]], layer: Any, function: Any, **held: Any) -> None:
    add(2, name, lambda m, x: function(m, m.conv(x)), lambda s: (shape(s),), conv=layer, **held)


_thin = lambda s: (s(128, 2), 8, s(256, 16), s(256, 16))
_volume = lambda s: (s(128, 2), 3, s(16, 8), s(32, 8), s(32, 8))
_cube3 = lambda s: (s(16, 2), 32, s(16, 8), s(32, 8), s(32, 8))
_thin_conv = lambda s: nn.Conv2d(8, 64, 3)
_chain("thin conv, subtract, subtract, mish", _thin, _thin_conv, lambda m, y: F.mish(y - 0.5 - 0.2))
_chain(
    "thin conv, relu, hardswish written out",
    lambda s: (s(128, 2), 8, s(128, 16), s(128, 16)),
    _thin_conv,
    lambda m, y: (lambda z: z * torch.clamp((z + 3) / 6, 0, 1))(torch.relu(y)),
)
_chain("thin conv, gelu, mean", _thin, _thin_conv, lambda m, y: F.adaptive_avg_pool2d(F.gelu(y), 1).flatten(1))
_chain(
    "thin conv, tanh, scale, bias, max pool",
    _thin,
    _thin_conv,
    lambda m, y: F.max_pool2d(torch.tanh(y) * 2.0 + m.by, 4),
    by=lambda s: torch.rand(64, 1, 1),
)
_chain(
    "thin conv, group norm, scale, max pool, clamp",
    lambda s: (s(128, 2), 8, s(128, 16), s(128, 16)),
    _thin_conv,
    lambda m, y: torch.clamp(F.max_pool2d(m.norm(y) * m.by, 4), 0, 1),
    norm=lambda s: nn.GroupNorm(16, 64),
    by=lambda s: torch.rand(64, 1, 1),
)
_chain(
    "conv, min over channels",
    lambda s: (s(64, 2), 64, s(256, 16), s(256, 16)),
    lambda s: nn.Conv2d(64, 128, 3),
    lambda m, y: (y * 2.0).min(1, keepdim=True)[0],
)
_chain(
    "conv, clamp from above, bias, scale",
    lambda s: (s(128, 2), 64, s(128, 16), s(128, 16)),
    lambda s: nn.Conv2d(64, 128, 3),
    lambda m, y: (torch.min(y, torch.tensor(0.5)) + m.by) * 2.0,
    by=lambda s: torch.rand(128, 1, 1),
)
_chain("conv3d, softmax, pool, pool", _volume, lambda s: nn.Conv3d(3, 16, 3),
       lambda m, y: F.max_pool3d(F.max_pool3d(torch.softmax(y, 1), 2), 2))  # fmt: skip
_chain("conv3d, relu, leaky relu, gelu, sigmoid, bias", lambda s: (s(64, 2), 8, s(32, 8), s(64, 8), s(64, 8)),
       lambda s: nn.Conv3d(8, 32, 3),
       lambda m, y: torch.sigmoid(F.gelu(F.leaky_relu(torch.relu(y), 0.01))) + m.by,
       by=lambda s: torch.rand(32, 1, 1, 1))  # fmt: skip
_chain("conv3d, scale, tanh, scale, sigmoid", lambda s: (s(128, 2), 3, s(16, 8), s(64, 8), s(64, 8)),
       lambda s: nn.Conv3d(3, 16, 3), lambda m, y: torch.sigmoid(torch.tanh(y * m.a) * m.b),
       a=lambda s: torch.rand(16, 1, 1, 1), b=lambda s: torch.rand(16, 1, 1, 1))  # fmt: skip
_chain("conv3d, group norm, mean", lambda s: (s(128, 2), 3, s(24, 8), s(32, 8), s(32, 8)),
       lambda s: nn.Conv3d(3, 24, 3), lambda m, y: m.norm(y).mean((1, 2, 3, 4)),
       norm=lambda s: nn.GroupNorm(8, 24))  # fmt: skip
_chain("transposed conv, tanh", lambda s: (s(32, 2), 64, s(256, 8), s(256, 8)),
       lambda s: nn.ConvTranspose2d(64, 64, 4, 2, 1), lambda m, y: torch.tanh(y - m.by),
       by=lambda s: torch.rand(64, 1, 1))  # fmt: skip
_chain("transposed conv, mish, add, hardtanh, scale", lambda s: (s(128, 2), 64, s(128, 8), s(128, 8)),
       lambda s: nn.ConvTranspose2d(64, 64, 3, 2, 1, 1),
       lambda m, y: F.hardtanh(F.mish(y) + 0.5, -1, 1) * 2)  # fmt: skip
_chain("transposed conv, mean, bias, logsumexp", lambda s: (s(16, 2), 64, s(512, 8), s(512, 8)),
       lambda s: nn.ConvTranspose2d(64, 128, 3),
       lambda m, y: torch.logsumexp(y.mean((2, 3), keepdim=True) + m.by, 1, keepdim=True).sum((2, 3)) * 10,
       by=lambda s: torch.rand(128, 1, 1))  # fmt: skip
_chain("transposed conv, scale, mean, mean", lambda s: (s(16, 2), 64, s(128, 8), s(128, 8)),
       lambda s: nn.ConvTranspose2d(64, 128, 3, 2, 1, 1),
       lambda m, y: (y * 0.5).mean([2, 3], keepdim=True).mean([2, 3], keepdim=True))  # fmt: skip
_chain("transposed conv, batch norm, tanh, pool, group norm", lambda s: (s(512, 2), 64, 32, 32),
       lambda s: nn.ConvTranspose2d(64, 128, 5, 1, 1),
       lambda m, y: m.group(F.max_pool2d(torch.tanh(m.norm(y)), 2)),
       norm=lambda s: nn.BatchNorm2d(128), group=lambda s: nn.GroupNorm(8, 128))  # fmt: skip
_chain("transposed conv3d, softmax, sigmoid", _cube3, lambda s: nn.ConvTranspose3d(32, 64, 3, 2, 1, 1),
       lambda m, y: torch.sigmoid(torch.softmax(y, 1)))  # fmt: skip
_chain("transposed conv3d, residual, multiply, residual", _cube3, lambda s: nn.ConvTranspose3d(32, 64, 3, 2, 1, 1),
       lambda m, y: (lambda z: ((y + m.by) + z) * z + z)(y.clone().detach()),
       by=lambda s: torch.rand(64, 1, 1, 1))  # fmt: skip
_chain("transposed conv3d, clamp, divide", lambda s: (s(16, 2), 64, s(24, 8), s(48, 8), s(48, 8)),
       lambda s: nn.ConvTranspose3d(64, 128, 3, 2, 1), lambda m, y: torch.clamp(y, min=-1.0) / 2.0)  # fmt: skip
_chain("transposed conv3d, relu, group norm", lambda s: (s(16, 2), 64, s(32, 8), s(32, 8), s(32, 8)),
       lambda s: nn.ConvTranspose3d(64, 128, 3, bias=False), lambda m, y: m.norm(torch.relu(y)),
       norm=lambda s: nn.GroupNorm(8, 128))  # fmt: skip
_chain("transposed conv3d, swish, group norm, hardswish", _volume, lambda s: nn.ConvTranspose3d(3, 16, 3, 2, 1),
       lambda m, y: F.hardswish(m.norm(torch.sigmoid(y) * y)), norm=lambda s: nn.GroupNorm(4, 16))  # fmt: skip
_chain("transposed conv3d, batch norm, subtract mean", lambda s: (s(16, 2), 16, s(16, 8), s(32, 8), s(32, 8)),
       lambda s: nn.ConvTranspose3d(16, 32, 3, 2, 1),
       lambda m, y: (lambda z: z - z.mean((2, 3, 4), keepdim=True))(m.norm(y)),
       norm=lambda s: nn.BatchNorm3d(32))  # fmt: skip

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
    """Multi-head attention as separate ops with a mask, as in small GPTs; ``act`` is the score activation."""

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


def _unit(inputs: int, outputs: int, size: int = 3, stride: int = 1, groups: int = 1, act: Any = nn.ReLU) -> list[Any]:
    """Convolution, batch norm, activation."""
    conv = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs), *([act()] if act else [])]


class Beside(nn.Module):
    """Parallel branches, concatenated along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class Dense(nn.Module):
    """A dense block: every layer reads all earlier outputs."""

    def __init__(self, inputs: int, growth: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(inputs + i * growth),
                nn.ReLU(),
                nn.Conv2d(inputs + i * growth, growth, 3, padding=1, bias=False),
            )
            for i in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = [x]
        for layer in self.layers:
            parts.append(layer(torch.cat(parts, 1)))
        return torch.cat(parts, 1)


def _vgg(s: Any) -> nn.Sequential:
    layers: list[nn.Module] = []
    inputs = 3
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU()]
            inputs = width
        layers.append(nn.MaxPool2d(2))
    head = [nn.Linear(512 * 49, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7), nn.Flatten(), *head)


def _alexnet(s: Any) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 96, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(96, 256, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(256, 384, 3, padding=1), nn.ReLU(), nn.Conv2d(384, 384, 3, padding=1), nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Flatten(),
        nn.Linear(9216, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000),
    )  # fmt: skip


def _mobilenet(s: Any) -> nn.Sequential:
    layers = _unit(3, 32, 3, 2)
    steps = ((32, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2),
             *(((512, 512, 1),) * 5), (512, 1024, 2), (1024, 1024, 1))  # fmt: skip
    for inputs, outputs, stride in steps:
        layers += [*_unit(inputs, inputs, 3, stride, inputs), *_unit(inputs, outputs, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 1000))


class Shuffled(nn.Module):
    """Grouped convolutions with channel shuffle, and a residual sum."""

    def __init__(self, inputs: int, outputs: int, groups: int) -> None:
        super().__init__()
        middle = outputs // 4
        self.groups = groups
        self.narrow = nn.Sequential(*_unit(inputs, middle, 1, 1, groups))
        self.rest = nn.Sequential(*_unit(middle, middle, 3, 1, middle, None), *_unit(middle, outputs, 1, 1, groups))
        self.short = nn.Sequential(*_unit(inputs, outputs, 1, 1, 1, None))

    def forward(self, x: Tensor) -> Tensor:
        y = self.narrow(x)
        b, c, h, w = y.shape
        y = y.view(b, self.groups, c // self.groups, h, w).transpose(1, 2).reshape(b, c, h, w)
        return self.rest(y) + self.short(x)


class Recurrent(nn.Module):
    """A plain recurrent network, step by step."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.step, self.out = nn.Linear(inputs + hidden, hidden), nn.Linear(hidden, outputs)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        found = []
        for at in x:
            state = torch.tanh(self.step(torch.cat((at, state), 1)))
            found.append(self.out(state))
        return torch.stack(found)


class Vlad(nn.Module):
    """NetVLAD: features aggregated by soft assignment to clusters."""

    def __init__(self, clusters: int, ghosts: int, width: int) -> None:
        super().__init__()
        self.assign = nn.Parameter(torch.randn(width, clusters + ghosts) / math.sqrt(width))
        self.centers = nn.Parameter(torch.randn(1, width, clusters) / math.sqrt(width))
        self.norm, self.clusters = nn.BatchNorm1d(clusters + ghosts), clusters

    def forward(self, x: Tensor) -> Tensor:
        b, n, width = x.shape
        soft = torch.softmax(self.norm(x.reshape(-1, width) @ self.assign), 1)[:, : self.clusters]
        soft = soft.reshape(b, n, self.clusters)
        total = soft.sum(1, keepdim=True) * self.centers
        found = torch.matmul(soft.transpose(1, 2), x).transpose(1, 2) - total
        return F.normalize(F.normalize(found).reshape(b, -1))


class Double(nn.Module):
    """Two convolutions with batch norm and softmax, a U-Net stage."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        soft = lambda: nn.Softmax(-1)
        self.net = nn.Sequential(*_unit(inputs, outputs, act=soft), *_unit(outputs, outputs, act=soft))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Unet(nn.Module):
    def __init__(self, inputs: int, outputs: int, width: int, depth: int) -> None:
        super().__init__()
        sizes = [width << i for i in range(depth + 1)]
        self.down = nn.ModuleList(Double(a, b) for a, b in zip([inputs, *sizes], sizes, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * size, size, 2, 2) for size in reversed(sizes[:-1]))
        self.join = nn.ModuleList(Double(2 * size, size) for size in reversed(sizes[:-1]))
        self.out = nn.Conv2d(width, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for stage in self.down[:-1]:
            x = stage(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.down[-1](x)
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat((up(x), kept.pop()), 1))
        return self.out(x)


class Pixels(nn.Module):
    """Self-attention over all pixels of an image, with a residual sum and a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attend, self.norm = nn.MultiheadAttention(width, heads), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        y = x.view(b, c, h * w).permute(2, 0, 1)
        y = self.norm(self.attend(y, y, y)[0] + y)
        return y.permute(1, 2, 0).view(b, c, h, w)


_photo = lambda batch, size=224: lambda s: ((batch if s.factor == 1 else 2, 3, s(size, 64), s(size, 64)),)
add(3, "vgg 16", _run, lambda s: ((10 if s.factor == 1 else 1, 3, s(224, 64), s(224, 64)),), net=_vgg)
add(3, "alexnet", _run, lambda s: ((s(1024, 1), 3, 224, 224),), net=_alexnet)
add(3, "mobilenet v1", _run, _photo(10), net=_mobilenet)
add(
    3,
    "inception module",
    _run,
    lambda s: ((10 if s.factor == 1 else 1, 480, s(224, 16), s(224, 16)),),
    net=lambda s: Beside(
        nn.Conv2d(480, 192, 1),
        nn.Sequential(nn.Conv2d(480, 96, 1), nn.Conv2d(96, 208, 3, padding=1)),
        nn.Sequential(nn.Conv2d(480, 16, 1), nn.Conv2d(16, 48, 5, padding=2)),
        nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(480, 64, 1)),
    ),
)
add(3, "dense block", _run, lambda s: ((10 if s.factor == 1 else 1, 32, s(224, 16), s(224, 16)),),
    net=lambda s: Dense(32, 32, 6))  # fmt: skip
add(3, "transition layer", _run, lambda s: ((s(128, 2), 32, s(256, 16), s(256, 16)),),
    net=lambda s: nn.Sequential(nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 1, bias=False),
                                nn.AvgPool2d(2)))  # fmt: skip
add(3, "fire module", _run, lambda s: ((s(128, 2), 3, s(256, 16), s(256, 16)),),
    net=lambda s: nn.Sequential(nn.Conv2d(3, 6, 1), nn.ReLU(), Beside(
        nn.Sequential(nn.Conv2d(6, 64, 1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(6, 64, 3, padding=1), nn.ReLU()))))  # fmt: skip
add(3, "inverted bottleneck", _run, lambda s: ((10 if s.factor == 1 else 1, 112, s(224, 16), s(224, 16)),),
    net=lambda s: nn.Sequential(*_unit(112, 672, 1, act=nn.ReLU6), *_unit(672, 672, 5, 2, 672, nn.ReLU6),
                                *_unit(672, 192, 1, act=None)))  # fmt: skip
add(3, "shuffle unit", _run, lambda s: ((10 if s.factor == 1 else 1, 240, s(224, 16), s(224, 16)),),
    net=lambda s: Shuffled(240, 480, 3))  # fmt: skip
add(3, "u-net with softmax", _run, lambda s: ((8 if s.factor == 1 else 1, 8, 64, s(512, 64)),),
    net=lambda s: Unet(8, 4, 64, 4))  # fmt: skip
add(3, "vlad with ghost clusters", _run, lambda s: ((s(2048), 100, 512),), net=lambda s: Vlad(32, 16, 512))
add(3, "recurrent cell", lambda m, x, h: m.out(torch.tanh(m.step(torch.cat((x, h), 1)))),
    lambda s: ((256, s(16384)), (256, s(16384))), step=lambda s: nn.Linear(2 * s(16384), s(16384)),
    out=lambda s: nn.Linear(s(16384), s(8192)))  # fmt: skip
add(3, "recurrent network", _run, lambda s: ((s(256, 8), 8, 1024), (8, 256)), net=lambda s: Recurrent(1024, 256, 128))
add(3, "attention between pixels", _run, lambda s: ((2, 128, s(128, 8), s(128, 8)),), net=lambda s: Pixels(128, 4))
add(3, "lstm in both directions", lambda m, x: m.net(x)[0], lambda s: ((10, s(512), 128),),
    net=lambda s: nn.LSTM(128, 256, 6, batch_first=True, bidirectional=True))  # fmt: skip


def read_folder(folder: Path) -> None:
    """The problems of a checkout of the public benchmark in place of ours."""
    PROBLEMS.clear()
    FILES.clear()
    for path in sorted(folder.glob("level[123]/*.py"), key=lambda path: int(path.name.split("_")[0])):
        level = int(path.parent.name[-1])
        FILES.setdefault(f"{level}/{path.name.split('_')[0]}", []).append(path)
        PROBLEMS.append(Problem(level, f"{level}/{path.name.split('_')[0]}", lambda s, path=path: _of_file(path)))


def _of_file(path: Path) -> Made:
    named = runpy.run_path(str(path))
    return named["Model"](*named["get_init_inputs"]()), tuple(named["get_inputs"]())


def called(name: str) -> Problem:
    """A problem by its name; of a file also in another type or other sizes: ``2/33:bfloat16``, ``1/7:odd``.

    ``halved`` and ``odd`` are batches, pixels and features of half the size, ``odd`` one more where that is even.
    ``ieee`` is float32 without TensorFloat-32, a setting of the process that is the caller's to make.
    """
    plain, _, kinds = name.partition(":")
    (problem,) = [each for each in PROBLEMS if each.name == plain]
    if not kinds:
        return problem
    (path,) = FILES[plain]
    return Problem(problem.level, name, lambda s: _varied(path, kinds.split(",")))


def _varied(path: Path, kinds: list[str]) -> Made:
    tree = ast.parse(path.read_text())
    for node in tree.body if {"halved", "odd"} & {*kinds} else ():
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            _resize(node.targets[0], node, "odd" in kinds)
    named: dict[str, Any] = {"__name__": "problem"}
    exec(compile(ast.fix_missing_locations(tree), str(path), "exec"), named)
    model, args = named["Model"](*named["get_init_inputs"]()), tuple(named["get_inputs"]())
    for kind in kinds:
        if kind in ("float16", "bfloat16"):
            dtype: torch.dtype = getattr(torch, kind)
            model = model.to(dtype)
            args = tuple(x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in args)
    return model, args


def _resize(target: ast.expr, owner: Any, odd: bool) -> None:
    """Halve a number that is a size, according to its name, in place."""
    if isinstance(target, ast.Tuple) and isinstance(owner.value, ast.Tuple):
        pairs = [(name, ast.Assign([name], value)) for name, value in zip(target.elts, owner.value.elts, strict=True)]
        for name, pair in pairs:
            _resize(name, pair, odd)
        owner.value = ast.Tuple([pair.value for _, pair in pairs], ast.Load())
        return
    if not isinstance(target, ast.Name) or not SIZES.search(target.id):
        return
    size = _number(owner.value)
    if size is not None and size >= LEAST_SIZE:
        owner.value = ast.Constant(size // 2 + (odd and size // 2 % 2 == 0))


def _number(value: ast.expr) -> int | None:
    """A literal number, or a product of such; None otherwise."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult):
        left, right = _number(value.left), _number(value.right)
        return None if left is None or right is None else left * right
    return value.value if isinstance(value, ast.Constant) and type(value.value) is int else None


# running them -------------------------------------------------------------------------------------------------------


class Turn:
    """A lock on the device, released while a process compiles, so that no other kernels run during its timings."""

    def __init__(self, path: str) -> None:
        self.file = open(path, "w") if path else None  # noqa: SIM115  (held as long as the process lives)
        self.held, self.waited_s = False, 0.0

    def take(self) -> None:
        began = time.perf_counter()
        if self.file and not self.held:
            fcntl.flock(self.file, fcntl.LOCK_EX)
        self.held = True
        self.waited_s += time.perf_counter() - began

    def give(self) -> None:
        if self.file and self.held:
            spare = torch.cuda.memory_reserved() - torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
            if spare > SPARE_BYTES:  # release it to other processes
                torch.cuda.empty_cache()
            fcntl.flock(self.file, fcntl.LOCK_UN)
        self.held = False

    @contextmanager
    def apart(self, compiles: bool = True) -> Iterator[None]:
        """Release the device inside the context."""
        held = self.held
        if compiles:
            self.give()
        try:
            yield
        finally:
            if held:
                self.take()

    def here(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call with the device held."""

        def run(*args: Any, **kwargs: Any) -> Any:
            held = self.held
            self.take()
            try:
                return call(*args, **kwargs)
            finally:
                if not held:
                    self.give()

        return run


def seconds(call: Callable[[], Any], device: torch.device, least_s: float = 0.08) -> float:
    """Median seconds of a call, device work included."""
    sync = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    for _ in range(2):
        call()
    sync()
    samples: list[float] = []
    began = time.perf_counter()
    while len(samples) < 3 or (time.perf_counter() - began < least_s and len(samples) < 100):
        start = time.perf_counter()
        call()
        sync()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def interleaved(calls: dict[str, Callable[[], Any]], device: torch.device) -> dict[str, float]:
    """The best of three visits to each, in turn: clocks drift, and other processes compile."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(3):
        for name, call in calls.items():
            found[name].append(seconds(call, device))
    return {name: min(samples) for name, samples in found.items()}


def run(problem: Problem, device: torch.device, asked: argparse.Namespace, turn: Turn) -> Result:
    """Time one problem by eager, torch.compile and ours."""
    if asked.way == "search":
        return searched(problem, device, asked, turn)
    began = time.perf_counter()
    turn.take()
    torch.manual_seed(0)
    model, args, fresh = made(problem, device, asked)
    with torch.no_grad():
        meant = fresh(model)
        calls: dict[str, Callable[[], Any]] = {"eager": lambda: model(*args)}
        if not asked.without_compile:
            stock = torch.compile(model)
            with turn.apart():
                stock(*args)
            calls["compiled"] = lambda: stock(*args)
        ours, winner, more = rewritten(model, args, device, asked, turn)
        errors = {name: alike(fresh(call), meant) for name, call in ours.items()}
        calls |= {name: (lambda call=call: call(*args)) for name, call in ours.items()}
        times = interleaved(calls, device)
    turn.give()
    best = min((name for name in ours if errors[name][0]), key=lambda name: times[name], default=next(iter(ours)))
    more |= {"times": times, "errors": {name: error for name, (_, error) in errors.items()}}
    return Result(
        problem.level, problem.name, times["eager"], times.get("compiled", math.inf), times[best], winner or best,
        all(right for right, _ in errors.values()), max(error for _, error in errors.values()),
        spent_s=time.perf_counter() - began, more=more,
    )  # fmt: skip


Found = tuple[dict[str, Callable[..., Any]], str, dict[str, Any]]


def made(problem: Problem, device: torch.device, asked: argparse.Namespace) -> tuple[nn.Module, Any, Any]:
    """Model, inputs, and a way to call with the same running statistics and random numbers every time."""
    torch.manual_seed(0)
    with torch.device(device):
        model, args = problem.make(Scale(asked.scale))
    model, args = model.to(device), tuple(x.to(device) if isinstance(x, Tensor) else x for x in args)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def fresh(call: Callable[..., Any]) -> Any:
        model.load_state_dict(state)
        torch.manual_seed(7)
        return call(*args)

    return model, args, fresh


def searched(problem: Problem, device: torch.device, asked: argparse.Namespace, turn: Turn) -> Result:
    """Times of ``ridgeline.optimize``'s last race, each call synchronized."""
    import ridgeline

    began = time.perf_counter()
    model, args, fresh = made(problem, device, asked)
    with torch.no_grad():
        meant = fresh(model)
        fast = ridgeline.optimize(model, args, budget_s=asked.each_s, use_cache=False)
        right, error = alike(fresh(fast), meant)
    receipt = fast.receipt
    tried = [{"name": e.name, "status": e.status, "reason": e.reason, "s": e.measured_s, "build_s": e.build_s,
              "rewrites": dict(e.rewrites)} for e in receipt.entries]  # fmt: skip
    more = {"tried": tried, "notes": list(receipt.notes), "contests": contests(), "searched_s": receipt.spent_s,
            "verdict": receipt.verdict}  # fmt: skip
    stock_s = math.nan if receipt.stock_s is None else receipt.stock_s
    return Result(problem.level, problem.name, receipt.eager_s, stock_s, receipt.final_s, receipt.winner, right, error,
                  spent_s=time.perf_counter() - began, more=more)  # fmt: skip


def rewritten(model: nn.Module, args: Any, device: torch.device, asked: argparse.Namespace, turn: Turn) -> Found:
    """The recommended rewrites without a compiler, and all of it as one CUDA graph."""
    from ridgeline.engine.replay.inference import graph_inference
    from ridgeline.optimizer.backend import Report, compiled
    from ridgeline.optimizer.rewrites import recommended

    report = Report()
    call = compiled(model, rewrites=recommended("inference", "none", device.type), report=report)
    with turn.apart():
        call(*args)
    ours: dict[str, Callable[..., Any]] = {"rewrites": call}
    note = {}
    if device.type == "cuda" and asked.graphs:
        try:
            ours["graph"] = graph_inference(call, args, {}, model)
        except Exception as error:
            note = {"graph": repr(error)[:200]}
    matches = [f"{match.rewrite}: {match.what}" for match in report.matches]
    return ours, "", {"matches": matches, "contests": contests()} | note


def contests() -> dict[str, Any]:
    """Results of races inside rewrites since the last call."""
    from ridgeline.optimizer.rewrites.conv import elementwise_epilogue as chains
    from ridgeline.optimizer.rewrites.linear import gemv as vectors
    from ridgeline.optimizer.rewrites.linear import split_gemm as halves
    from ridgeline.optimizer.rewrites.rows import long_rows as lengths
    from ridgeline.optimizer.rewrites.rows import pool_cumsum as windows

    found = {
        str(key): seconds
        for each in (chains, halves, lengths, vectors, windows)
        for key, seconds in each.CONTEST.seconds.items()
    }
    rounded = {str(key): found.rounding for key, found in chains._accuracy.items()}
    for each in (chains, halves, lengths, vectors, windows):
        each.CONTEST.seconds.clear()
    apart = {str(key): found.apart for key, found in chains._accuracy.items()}
    return {"seconds": found, "rounding": rounded, "apart": apart}


def alike(found: Any, meant: Any, tolerance: float = 1e-3) -> tuple[bool, float]:
    """Whether two results agree in every tensor, and the largest difference relative to the largest value."""
    pairs = list(itertools.zip_longest(*(torch.utils._pytree.tree_leaves(each) for each in (found, meant))))
    judged = [_alike(a, b, tolerance) for a, b in pairs if isinstance(b, Tensor)]
    return all(right for right, _ in judged), max((error for _, error in judged), default=0.0)


def _alike(found: Tensor, meant: Tensor, tolerance: float) -> tuple[bool, float]:
    if not isinstance(found, Tensor) or found.shape != meant.shape or found.dtype != meant.dtype:
        return False, math.inf
    if not meant.is_floating_point():
        return bool(torch.equal(found, meant)), float((found != meant).float().mean())
    same_nan = bool(torch.equal(found.isnan(), meant.isnan()))
    scale = meant.nan_to_num(0.0, 0.0, 0.0).abs().max().clamp_min(1e-12)
    error = float((found - meant).nan_to_num(0.0, 0.0, 0.0).abs().max() / scale)
    return same_nan and error <= tolerance, error


def chosen(asked: argparse.Namespace) -> list[Problem]:
    """Every n-th of the selected problems, spread over all classes."""
    if asked.problems:
        named = {p.name: p for p in PROBLEMS}
        return [named[name.strip()] for name in asked.problems.split(";")]
    meant = [
        p for p in PROBLEMS if (not asked.only or asked.only in p.name) and (not asked.level or p.level == asked.level)
    ]
    return [p for start in range(asked.sample) for p in meant[start :: asked.sample]][: asked.most]


def child(asked: argparse.Namespace) -> None:
    """Run a share of the problems; writes a line of JSON for each."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    turn, asked.way_then = Turn(asked.lock), asked.way
    _share_the_device(turn)
    problems = {problem.name: problem for problem in PROBLEMS}
    for place, name in enumerate(json.loads(asked.names)):
        problem = problems[name]
        asked.way = "search" if place < asked.searched else asked.way_then
        if time.time() > asked.until - asked.each_s / 2:
            break
        try:
            result = run(problem, device, asked, turn)
        except Exception as problem_met:  # a failure is a result too
            nan = math.nan
            result = Result(problem.level, problem.name, nan, nan, nan, "", False, nan, repr(problem_met)[:300])
        finally:
            turn.give()
        print(MARK + json.dumps(asdict(result) | {"verdict": result.verdict}, default=str), flush=True)
        torch._dynamo.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()


MARK = "RESULT "


def _share_the_device(turn: Turn) -> None:
    """Hold the device only for timing and proofs; others may compile, trace and capture meanwhile."""
    from ridgeline.engine import autotune as contest
    from ridgeline.optimizer.search import budget, last_race
    from ridgeline.optimizer.search import judge as proof
    from ridgeline.optimizer.search import search as searching

    for name in searching.COMPILERS:  # once a process, before any budget
        importlib.import_module(name)
    left_s = budget.Budget.left_s

    def left(self: Any) -> float:
        return left_s(self) + turn.waited_s - self.__dict__.setdefault("waited_before_s", turn.waited_s)

    budget.Budget.left_s = left
    searching.regions = lambda search, stock: ()  # breakdowns are for people to read, and are not timed here
    searching.parts = lambda search, eager, best: ()
    budget.LEAST_RACE_S, budget.RACE_FRAC, budget.LAST_RACE_FRAC = 0.12, 0.01, 0.03
    last_race.LEAST_RACE_S, last_race.LAST_RACE_FRAC = 0.12, 0.03
    searching.Track.race = turn.here(searching.Track.race)
    proof.Subject.observe = turn.here(proof.Subject.observe)
    contest.raced = turn.here(contest.raced)


def parent(asked: argparse.Namespace) -> None:
    """Start the processes, collect their lines, and print a summary."""
    asked.out.mkdir(parents=True, exist_ok=True)
    lock = os.environ.get("RIDGELINE_DEVICE_LOCK") or str(Path(tempfile.mkdtemp()) / "device.lock")
    until = time.time() + asked.budget_s
    names = [problem.name for problem in chosen(asked)]
    shares = [names[i :: asked.jobs] for i in range(asked.jobs)]
    logs = [Path(tempfile.mkdtemp()) / f"{i}.log" for i in range(asked.jobs)]
    running = [_started(asked, share, lock, until, log) for share, log in zip(shares, logs, strict=True) if share]
    shown = 0
    while any(process.poll() is None for process in running) and time.time() < until:
        time.sleep(0.5)
        shown = _told(asked, logs, shown)
    for process in running:
        if process.poll() is None:
            process.kill()
            process.wait()
    _told(asked, logs, shown)
    results = _gathered(logs)
    for log in logs:
        if not _gathered([log]):
            print(f"nothing came of {log.name}: {log.read_text()[-1500:]}")
    _summed_up(results)


def _started(
    asked: argparse.Namespace, names: list[str], lock: str, until: float, log: Path
) -> subprocess.Popen[bytes]:
    passed = ["--each-s", str(asked.each_s), "--scale", str(asked.scale), "--way", asked.way, "--out", str(asked.out)]
    passed += ["--searched", str(asked.searched)]
    passed += ["--folder", str(asked.folder)] if asked.folder else []
    passed += ["--graphs"] if asked.graphs else []
    passed += ["--without-compile"] if asked.without_compile else []
    command = [sys.executable, "-m", __spec__.name, "--names", json.dumps(names), "--lock", lock,
               "--until", str(until), *passed]  # fmt: skip
    settings = {"TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "2"}
    with log.open("w") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **settings})


def _gathered(logs: list[Path]) -> list[dict[str, Any]]:
    lines = [line for log in logs if log.exists() for line in log.read_text(errors="replace").splitlines()]
    return [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]


def _told(asked: argparse.Namespace, logs: list[Path], shown: int) -> int:
    """Print new results and write all."""
    results = _gathered(logs)
    if len(results) == shown:
        return shown
    with gzip.open(asked.out / "kernelbench_like.json.gz", "wt") as file:
        json.dump(results, file)
    print(f"{time.strftime('%H:%M:%S')} {len(results)} problems", flush=True)
    return len(results)


def _summed_up(results: list[dict[str, Any]]) -> None:
    for r in sorted(results, key=lambda r: (r["level"], r["name"])):
        print(
            f"{r['level']} {r['name']:52} eager {r['eager_s'] * 1e3:9.3f} ms  compiled {r['compiled_s'] * 1e3:9.3f}"
            f"  ours {r['ours_s'] * 1e3:9.3f}  {r['verdict']:8} {r['winner']:28} {r['error']:.1e}"
            f"  {r['spent_s']:.0f} s {r['note']}"
        )
    words = ("faster", "even", "slower", "WRONG", "refused", "no rival")
    counts = {word: sum(r["verdict"] == word for r in results) for word in words}
    print(f"{len(results)} problems: " + ", ".join(f"{num} {word}" for word, num in counts.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, help="a checkout of the public benchmark, whose problems are taken")
    parser.add_argument("--budget-s", type=float, default=600.0)
    parser.add_argument("--each-s", type=float, default=15.0)
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--sample", type=int, default=1)
    parser.add_argument("--most", type=int, default=1000)
    parser.add_argument("--level", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--way", choices=("search", "rewrites"), default="search")
    parser.add_argument("--searched", type=int, default=0, help="problems of each process that are searched first")
    parser.add_argument("--problems", default="", help="names in order, with semicolons between")
    parser.add_argument("--graphs", action="store_true", help="with --way rewrites: record them as well")
    parser.add_argument("--without-compile", action="store_true")
    for name in ("--names", "--lock"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=math.inf, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.folder:
        read_folder(asked.folder)
    child(asked) if asked.names else parent(asked)


if __name__ == "__main__":
    main()
