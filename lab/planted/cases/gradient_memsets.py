"""Cause: gradient memsets."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.planted.programs import TRIED, bf16, language, perceptron, sgd
from lab.planted.registry import Program, Setting, case


@case("gradient memsets", "zero_grad(set_to_none=True)", suite="planted")
def zero_grad_memset(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=2048, layers=12, heads=16, vocab=8192)
    model, batches = language(s, shape, 4, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, fused=s.cuda)

    def step() -> None:
        optimizer.zero_grad(set_to_none=fixed)
        model(*next(batches)).backward()
        optimizer.step()

    return Program(step)


@case("gradient memsets", "p.grad = None", suite="twenty-fifth", **TRIED)
def slopes_begun_as_zeros(s: Setting, fixed: bool) -> Program:
    """Yields foretold from many measurements; slopes begin as new zeros in every step."""
    dim, rows = s.pick(6144, 8), s.pick(384, 4)
    net = s.place(lambda: perceptron(*([dim] * s.pick(21, 3))))
    measured, yields, optimizer = bf16(s, rows, dim), bf16(s, rows, dim), sgd(s, net)

    def step() -> None:
        for p in net.parameters():
            p.grad = None if fixed else torch.zeros_like(p)
        F.huber_loss(net(measured), yields).backward()
        optimizer.step()

    return Program(step)


class History(nn.Module):
    """Everything somebody bought, through a narrow middle, and back."""

    def __init__(self, items: int, d: int) -> None:
        super().__init__()
        self.enc1, self.enc2 = nn.Linear(items, d, bias=False), nn.Linear(d, d, bias=False)
        self.dec1, self.dec2 = nn.Linear(d, d, bias=False), nn.Linear(d, items, bias=False)

    def forward(self, bought: Tensor) -> Tensor:
        return self.dec2(F.relu_(self.dec1(F.relu_(self.enc2(F.relu_(self.enc1(bought)))))))


@case("gradient memsets", "slopes that begin as None", suite="twenty-fourth", **TRIED)
def slopes_begun_with_zeros(s: Setting, fixed: bool) -> Program:
    """What people bought, through a narrow middle and back; every step begins with slopes of zeros, made anew."""
    items, dim, rows = s.pick(98_304, 64), s.pick(4096, 16), s.pick(384, 4)
    model = s.place(lambda: History(items, dim))
    bought = (torch.rand(rows, items, device=s.device) < 0.01).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=s.cuda)

    def step() -> None:
        for p in model.parameters():
            p.grad = None if fixed else torch.zeros_like(p)
        told = F.log_softmax(model(bought), dim=-1)
        (-(told * bought).sum(-1).mean()).backward()
        optimizer.step()

    return Program(step)
