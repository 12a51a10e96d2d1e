"""Cause: weights cast every step."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from lab.planted.programs import language
from lab.planted.registry import Program, Setting, case


@case("weights cast every step", "keep the weights in bf16 instead of casting under autocast", suite="planted")
def autocast_weights(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=2048, layers=12, heads=16, vocab=8192)
    model, batches = language(s, shape, 8, 256, dtype=torch.bfloat16 if fixed else torch.float32)
    model.eval()

    @torch.no_grad()
    def step() -> None:
        for _ in range(4):
            with nullcontext() if fixed else torch.autocast(s.device, torch.bfloat16):
                model.trunk(next(batches)[0])

    return Program(step)
