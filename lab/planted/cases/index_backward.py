"""Cause: index backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.planted.networks import Decoder
from lab.planted.programs import adamw, ids, training
from lab.planted.registry import Program, Setting, Shape, case


class Typed(nn.Module):
    """A decoder whose tokens also have a type (speaker, segment), looked up in a small table."""

    def __init__(self, shape: Shape, max_len: int, by_index: bool, types: int = 4) -> None:
        super().__init__()
        self.decoder = Decoder(shape, max_len)
        self.types = nn.Parameter(torch.zeros(types, shape.width))
        self.by_index = by_index

    def forward(self, ids_BL: Tensor, targets_BL: Tensor, types_BL: Tensor) -> Tensor:
        typed = self.types[types_BL] if self.by_index else F.embedding(types_BL, self.types)
        x = self.decoder.tokens(ids_BL) + typed
        for block in self.decoder.blocks:
            x = block(x)
        logits = self.decoder.head(self.decoder.norm(x)).flatten(0, 1)
        return F.cross_entropy(logits, targets_BL.flatten())


@case("index backward", "F.embedding instead of table[index]", suite="planted")
def index_backward(s: Setting, fixed: bool) -> Program:
    shape, batch, length = s.shape(width=1024, layers=4, heads=16, vocab=16384), s.pick(8, 2), s.pick(1024, 16)
    model = s.place(lambda: Typed(shape, length, by_index=not fixed))
    types = torch.randint(0, 4, (batch, length), device=s.device)
    feed = ((ids, targets, types) for ids, targets in ids(s, batch, length, shape.vocab))
    return Program(training(model, adamw(s, model), feed))
