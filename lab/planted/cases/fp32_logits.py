"""Cause: fp32 logits."""

from __future__ import annotations

from lab.planted.programs import adamw, language, training
from lab.planted.registry import Program, Setting, case


@case("fp32 logits", "leave the logits in bf16 for the loss", suite="planted")
def fp32_logits(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=1024, layers=2, heads=16, vocab=128256)
    model, batches = language(s, shape, 8, 1024, fp32_logits=not fixed)
    return Program(training(model, adamw(s, model), batches))
