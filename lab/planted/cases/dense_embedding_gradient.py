"""Cause: dense embedding gradient."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from lab.planted.networks import Tower
from lab.planted.registry import Program, Setting, case


@case("dense embedding gradient", "nn.Embedding(..., sparse=True)", suite="planted")
def dense_embedding_gradient(s: Setting, fixed: bool) -> Program:
    rows, width, batch = s.pick(4_000_000, 500), s.pick(256, 16), s.pick(16384, 8)
    table = nn.EmbeddingBag(rows, width, mode="sum", sparse=fixed, device=s.device)
    top = s.place(lambda: Tower(s.pick(4096, 32), s.pick(5, 2), inner=width))
    sgd = torch.optim.SGD(itertools.chain(table.parameters(), top.parameters()), lr=1e-3)
    ids = [torch.randint(0, rows, (batch, s.pick(20, 3)), device=s.device) for _ in range(3)]
    feed, y = itertools.cycle(ids), torch.randn(batch, 8, device=s.device, dtype=torch.bfloat16)

    def step() -> None:
        top(table(next(feed)), y).backward()
        sgd.step()
        sgd.zero_grad(set_to_none=True)

    return Program(step)
