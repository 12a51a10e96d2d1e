"""Cause: a pass that is not needed."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lab.planted.networks import Tokens
from lab.planted.programs import TRIED, bf16, fused_adamw, ints
from lab.planted.registry import Program, Setting, case


@case("a pass that is not needed", "count hits in what the loss was made of", suite="twenty-fifth", **TRIED)
def pictures_told_twice(s: Setting, fixed: bool) -> Program:
    """Leaves told apart; how often the network is right is asked of the network once more."""
    num, places, piece = s.pick((64, 196, 768), (2, 4, 12))
    model = s.place(lambda: Tokens(piece, s.pick(768, 16), s.pick(12, 2), s.pick(8, 1), 100))
    leaves, kinds, optimizer = bf16(s, num, places, piece), ints(s, 100, num), fused_adamw(model)
    hits = torch.zeros((), device=s.device, dtype=torch.long)

    def step() -> None:
        optimizer.zero_grad()
        out = model(leaves)
        loss = F.cross_entropy(out, kinds)
        hits.add_(((out if fixed else model(leaves)).argmax(1) == kinds).sum())
        loss.backward()
        optimizer.step()

    return Program(step)
