"""Cause: logits laid out for the loss."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from lab.planted.networks import NextWord, ResidualLayer
from lab.planted.programs import TRIED, asked, fused_adamw, ints
from lab.planted.registry import Program, Setting, case


def one_hot_surprise(logits: Tensor, wanted: Tensor) -> Tensor:
    """The loss as a book defines it: a sum over all classes, of which one counts."""
    targets = F.one_hot(wanted, logits.size(-1))
    return -(targets * F.log_softmax(logits, dim=-1)).sum(dim=-1).mean()


@case("logits laid out for the loss", "F.cross_entropy", suite="twenty-fifth", **TRIED)
def surprise_by_one_hot(s: Setting, fixed: bool) -> Program:
    """Notes of music foretold; the loss is a sum over all notes that there could be."""
    vocab, batch, length = s.pick(32_000, 48), s.pick(32, 2), s.pick(512, 4)
    model = s.place(lambda: NextWord(vocab, s.pick(512, 16), s.pick(8, 2), s.pick(8, 1)))
    notes, optimizer = ints(s, vocab, batch, length + 1), fused_adamw(model)
    criterion: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy if fixed else one_hot_surprise

    def step() -> None:
        optimizer.zero_grad()
        criterion(model(notes[:, :-1]).flatten(0, 1), notes[:, 1:].flatten()).backward()
        optimizer.step()

    return Program(step)


class Judge(nn.Module):
    """A language model that tells how likely each answer is."""

    def __init__(self, vocab: int, d: int, h: int, depth: int) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocab, d), nn.LayerNorm(d)
        self.layers = nn.ModuleList(ResidualLayer(d, h) for _ in range(depth))
        self.lm_head = nn.Linear(d, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, causal=True)
        return self.lm_head(self.norm(x))


def likelihood_by_one_hot(logits: Tensor, wanted: Tensor) -> Tensor:
    log_probs = F.log_softmax(logits.float(), dim=-1)
    return (F.one_hot(wanted, logits.shape[-1]) * log_probs).sum(-1)


def likelihood_by_cross_entropy(logits: Tensor, wanted: Tensor) -> Tensor:
    return -F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none").view_as(wanted)


@case(
    "logits laid out for the loss",
    "F.cross_entropy(reduction='none') of the logits as they are",
    suite="twenty-fourth",
    **TRIED,
)
def answers_judged_by_one_hot(s: Setting, fixed: bool) -> Program:
    """Which of several answers a language model finds likeliest; its words are picked out by products with one-hots."""
    vocab, batch, length = s.pick(50_304, 64), s.pick(16, 2), s.pick(512, 4)
    model = s.place(lambda: Judge(vocab, s.pick(1024, 16), s.pick(16, 2), s.pick(6, 1))).eval()
    ids = ints(s, vocab, batch, length + 1)
    likelihood = likelihood_by_cross_entropy if fixed else likelihood_by_one_hot
    return asked(lambda: likelihood(model(ids[:, :-1]), ids[:, 1:]).sum(1).view(-1, 2).argmax(1))
