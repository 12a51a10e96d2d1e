"""Cause: activations kept on the host."""

from __future__ import annotations

import contextlib

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from lab.planted.networks import Trunk
from lab.planted.programs import SHORT, bf16, fused_adamw
from lab.planted.registry import Program, Setting, case


class Offloading(nn.Module):
    """A trunk whose first layers keep what they need for their slopes on the host."""

    def __init__(self, dim: int, heads: int, depth: int, away: bool) -> None:
        super().__init__()
        self.first, self.rest = Trunk(dim, heads, 2), Trunk(dim, heads, depth)
        self.away = away

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.autograd.graph.save_on_cpu(pin_memory=True) if self.away else contextlib.nullcontext()
        with kept:
            x = self.first(x)
        return self.rest(x)


@case("activations kept on the host", "no save_on_cpu: memory is free", suite="twenty-fifth", **SHORT)
def activations_saved_on_the_host(s: Setting, fixed: bool) -> Program:
    """Weather learned; what the first layers need for their slopes is kept on the host, as a recipe advises."""
    dim, batch, places = s.pick(1024, 16), s.pick(8, 2), s.pick(1024, 4)
    model = s.place(lambda: Offloading(dim, s.pick(16, 2), s.pick(10, 1), away=not fixed))
    now, later, optimizer = bf16(s, batch, places, dim), bf16(s, batch, places, dim), fused_adamw(model)

    def step() -> None:
        loss = F.mse_loss(model(now), later)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return Program(step)
