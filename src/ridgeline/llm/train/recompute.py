"""Recomputation of activations in the backward pass: not at all, all but the products, or whole layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ridgeline.llm.model.context import Context
from ridgeline.llm.model.decoder import Decoder, Layer

MODES = ("none", "selective", "full")


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Products and attention are kept: they take most of the time, and norms and activations most of the memory."""
    name = str(op)
    kept = any(word in name for word in ("aten.mm", "aten.addmm", "aten.bmm", "attention", "_grouped_mm", "_scaled_mm"))
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def set_recompute(model: Decoder, mode: str, num_layers: int = 0) -> None:
    """Recompute in every layer of a model, or in its first ``num_layers``."""
    chosen = set(list(model.layers)[: num_layers or None])

    def run(index: int, layer: Layer, x: Tensor, context: Context, update: Tensor | None) -> tuple[Tensor, Tensor]:
        if mode == "none" or str(index) not in chosen or not torch.is_grad_enabled():
            return layer(x, context, update)
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if mode == "selective":
            options["context_fn"] = lambda: create_selective_checkpoint_contexts(_policy)
        elif update is not None:  # one tensor is kept of a layer, not two
            x, update = x + update, None
        return checkpoint(layer, x, context, update, **options)

    model.run_layer = run
