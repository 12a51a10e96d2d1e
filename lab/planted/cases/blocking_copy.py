"""Cause: blocking copy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from lab.planted.programs import TRIED, Prefetch, bf16, fused_adamw, stack
from lab.planted.registry import Program, Setting, case


class ManyTasks(nn.Module):
    """One trunk and a head for each task."""

    def __init__(self, d: int, out: int, tasks: int) -> None:
        super().__init__()
        self.trunk = stack(d, d, d, last=True)
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(d, d), nn.GELU(), nn.Linear(d, out)) for _ in range(tasks))


@case(
    "blocking copy",
    "all targets a step ahead, with non_blocking=True on a stream of their own",
    suite="twenty-fourth",
    **TRIED,
)
def targets_sent_to_each_head(s: Setting, fixed: bool) -> Program:
    """Two dozen tasks over one trunk; each head's targets go to the device where the head needs them."""
    rows, dim, out, tasks = s.pick(16_384, 4), s.pick(1024, 16), s.pick(128, 8), s.pick(24, 3)
    model = s.place(lambda: ManyTasks(dim, out, tasks))
    x, optimizer = bf16(s, rows, dim), fused_adamw(model)
    batches = [tuple(s.pinned(torch.rand(rows, out)) for _ in range(tasks)) for _ in range(2)]
    endless: Iterator[Any] = itertools.cycle(batches)
    feed = iter(Prefetch(s, endless)) if fixed else endless

    def step() -> None:
        seen, losses = model.trunk(x), []
        for head, target in zip(model.heads, next(feed)):
            losses.append(F.mse_loss(head(seen), target.to(s.device).to(torch.bfloat16)))
        torch.stack(losses).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Program(step)
