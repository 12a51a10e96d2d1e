"""Cause: weights streamed from the host."""

from __future__ import annotations

import torch
from torch import Tensor

from lab.planted.programs import language
from lab.planted.registry import Program, Setting, case


@case("weights streamed from the host", "keep the layers on the device", suite="planted")
def streamed_weights(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=2048, layers=12, heads=16, vocab=8192)
    model, batches = language(s, shape, 4, 1024)
    model.eval()
    away: list[dict[str, Tensor]] = [{} for _ in model.blocks]
    if not fixed:
        away = [{name: s.pinned(p.detach().cpu()) for name, p in block.named_parameters()} for block in model.blocks]

    @torch.no_grad()
    def step() -> None:
        x = model.tokens(next(batches)[0])
        for block, weights in zip(model.blocks, away, strict=True):
            if fixed:
                x = block(x)
                continue
            here = {name: w.to(s.device, non_blocking=True) for name, w in weights.items()}
            x = torch.func.functional_call(block, here, (x,))
        model.norm(x)

    return Program(step)
