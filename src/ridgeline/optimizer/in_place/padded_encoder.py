"""Replaces the forward of ``nn.TransformerEncoder`` by one without nested tensors, which can be traced and captured.

In evaluation the encoder packs the rows that a padding mask leaves into a nested tensor, which reads their lengths from
the device at every call, and fills padded rows with zeros. Traced, it does neither: padded rows have other values, and
no compiled candidate passed a proof. Here padded rows are computed like all others and set to zero after the last
layer where PyTorch would have packed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def packs_rows(module: nn.Module) -> bool:
    """Whether a module is an encoder that would pack padded rows, with unmodified layers."""
    if type(module) is not nn.TransformerEncoder or not getattr(module, "use_nested_tensor", False) or module.training:
        return False
    return all(type(layer) is nn.TransformerEncoderLayer and "forward" not in layer.__dict__ for layer in module.layers)


def forward_of(original: Callable[..., Any], runs_on: frozenset[str]) -> Callable[..., Any]:
    """The forward over all rows; calls that would not be packed go to the original."""

    def forward(
        self: Any, src: Tensor, mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:  # fmt: skip
        asks = torch.is_grad_enabled() and (src.requires_grad or any(p.requires_grad for p in self.parameters()))
        packs = src.dim() == 3 and not src.is_nested and not self.training and not asks and src.device.type in runs_on
        packs = packs and torch.backends.mha.get_fastpath_enabled()
        packs = packs and not torch.is_autocast_enabled(src.device.type)
        if mask is not None or src_key_padding_mask is None or not packs:
            return original(self, src, mask, src_key_padding_mask, is_causal)
        keep = src_key_padding_mask.logical_not()
        x = src
        for layer in self.layers:
            x = _layer(layer, x, keep.logical_not())
        shown = keep
        if getattr(self, "mask_check", True):  # PyTorch packs only rows whose tokens come first
            shown = keep | (keep[:, 1:] <= keep[:, :-1]).all().logical_not()
        x = torch.where(shown.unsqueeze(-1), x, x.new_zeros(()))
        return x if self.norm is None else self.norm(x)

    return forward


def _layer(layer: Any, x: Tensor, hidden: Tensor) -> Tensor:
    if layer.norm_first:
        x = x + layer._sa_block(layer.norm1(x), None, hidden)
        return x + layer._ff_block(layer.norm2(x))
    x = layer.norm1(x + layer._sa_block(x, None, hidden))
    return layer.norm2(x + layer._ff_block(x))
