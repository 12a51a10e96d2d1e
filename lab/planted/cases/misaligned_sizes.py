"""Cause: misaligned sizes."""

from __future__ import annotations

import torch.nn.functional as F

from lab.planted.programs import TRIED, adamw, bf16, fused_adamw, ints, language, perceptron, training
from lab.planted.registry import Program, Setting, case


@case("misaligned sizes", "pad the vocabulary from 50257 to 50304", suite="planted")
def vocab_50257(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=1024, layers=4, heads=16, vocab=50304 if fixed else 50257)
    model, batches = language(s, shape, 8, 1024)
    return Program(training(model, adamw(s, model), batches))


@case("misaligned sizes", "round the hidden width from 2731 up to 2752", suite="planted")
def hidden_2731(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=1024, layers=8, heads=16, vocab=16384, hidden=2752 if fixed else 2731)
    model, batches = language(s, shape, 8, 1024)
    return Program(training(model, adamw(s, model), batches))


@case("misaligned sizes", "47 bins more, in which nothing lies", suite="twenty-fifth", **TRIED)
def masses_in_10001_bins(s: Setting, fixed: bool) -> Program:
    """Molecules told by their mass spectra, from 0 to 1,000 by tenths, both ends included."""
    bins, rows, wide = s.pick(10_001, 17), s.pick(32_768, 4), s.pick(2048, 16)
    more = s.pick(47, 7) if fixed else 0
    net = s.place(lambda: perceptron(bins + more, wide, wide, 512))
    spectra = F.pad(bf16(s, rows, bins).abs_(), (0, more))
    kinds, optimizer = ints(s, 512, rows), fused_adamw(net)

    def step() -> None:
        F.cross_entropy(net(spectra), kinds).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Program(step)
