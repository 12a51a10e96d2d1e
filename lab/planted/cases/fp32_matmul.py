"""Cause: fp32 matmul."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.planted.programs import TRIED, adamw, bf16, fused_adamw, language, perceptron, precision, sgd, training
from lab.planted.registry import Program, Setting, case


@case("fp32 matmul", 'torch.set_float32_matmul_precision("high")', suite="planted")
def fp32_matmul(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=1024, layers=6, heads=16, vocab=8192)
    model, batches = language(s, shape, 4, 512, dtype=torch.float32)
    return Program(training(model, adamw(s, model), batches), lambda: precision("high" if fixed else "highest"))


class TwinHead(nn.Module):
    """Two views of the same things should be told alike, and no two numbers should tell the same."""

    def __init__(self, seen: int, wide: int, in_fp32: bool) -> None:
        super().__init__()
        self.project, self.in_fp32 = perceptron(seen, wide, wide, wide), in_fp32

    def forward(self, both: Tensor) -> Tensor:
        z = self.project(both)
        one, other = (F.batch_norm(half, None, None, training=True) for half in z.chunk(2))
        if self.in_fp32:
            one, other = one.float(), other.float()
        matrix = (one / one.size(0)).T @ other
        diagonal = matrix.diagonal()
        apart = torch.linalg.vector_norm(matrix, dtype=torch.float32).square() - diagonal.float().square().sum()
        return (1 - diagonal.float()).square().sum() + 0.005 * apart


@case("fp32 matmul", "the products of both views in bf16, as they come", suite="twenty-fifth", **TRIED)
def twins_correlated_in_fp32(s: Setting, fixed: bool) -> Program:
    """Two views of the same things; how their features go together is worked out in fp32, to be on the safe side."""
    rows, seen, wide = s.pick(4096, 8), s.pick(2048, 8), s.pick(8192, 16)
    head = s.place(lambda: TwinHead(seen, wide, in_fp32=not fixed))
    views, optimizer = bf16(s, rows, seen), sgd(s, head)

    def step() -> None:
        optimizer.zero_grad()
        head(views).backward()
        optimizer.step()

    return Program(step)


class Projector(nn.Module):
    """Two views through the same layers, for a loss that keeps features from saying the same."""

    def __init__(self, seen: int, d: int) -> None:
        super().__init__()
        layer = lambda a: [nn.Linear(a, d, bias=False), nn.BatchNorm1d(d), nn.ReLU(inplace=True)]
        self.net = nn.Sequential(*layer(seen), *layer(d), nn.Linear(d, d, bias=False))
        self.norm = nn.BatchNorm1d(d, affine=False)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        za, zb = self.norm(self.net(a)), self.norm(self.net(b))
        c = za.t() @ zb / len(a)
        on = torch.diagonal(c)
        return (on - 1).square().sum() + 5e-3 * (c.square().sum() - on.square().sum())


@case("fp32 matmul", 'torch.set_float32_matmul_precision("high")', suite="twenty-fourth", **TRIED)
def views_decorrelated_in_fp32(s: Setting, fixed: bool) -> Program:
    """Two views of each sample, and a loss that keeps features from repeating each other, in the default precision."""
    rows, seen, dim = s.pick(2048, 8), s.pick(2048, 8), s.pick(4096, 16)
    with torch.device(s.device):
        model = Projector(seen, dim)
    a, b = (torch.randn(rows, seen, device=s.device) for _ in "ab")
    optimizer = fused_adamw(model)

    def step() -> None:
        optimizer.zero_grad()
        model(a, b).backward()
        optimizer.step()

    return Program(step, functools.partial(precision, "high" if fixed else "highest"))
