"""PyTorch's encoder over padded rows without nested tensors: the same result, in calls that can be traced and recorded.

In evaluation ``nn.TransformerEncoder`` packs the rows that a padding mask leaves into a nested tensor, which asks the
device for their lengths at every call, and puts zeros where nothing was kept. Traced, it does neither: what
``torch.compile`` makes of it has other values in padded rows than eager code, and no compiled candidate passed a proof.
Here padded rows are computed like any other and put to zero behind the last layer, where PyTorch would have packed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def packs_rows(module: nn.Module) -> bool:
    """Whether a module is an encoder that would pack padded rows, of layers as PyTorch has them."""
    if type(module) is not nn.TransformerEncoder or not getattr(module, "use_nested_tensor", False) or module.training:
        return False
    return all(type(layer) is nn.TransformerEncoderLayer and "forward" not in layer.__dict__ for layer in module.layers)


def forward_of(original: Callable[..., Any], runs_on: frozenset[str]) -> Callable[..., Any]:
    """The forward of an encoder over all rows; calls that would not be packed go to the original."""

    def forward(
        self: Any, src: Tensor, mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:  # fmt: skip
        if mask is not None or src_key_padding_mask is None or not _would_pack(self, src, runs_on):
            return original(self, src, mask, src_key_padding_mask, is_causal)
        return _over_all(self, src, src_key_padding_mask)

    return forward


def _would_pack(encoder: Any, src: Tensor, runs_on: frozenset[str]) -> bool:
    asks = torch.is_grad_enabled() and (src.requires_grad or any(p.requires_grad for p in encoder.parameters()))
    plain = src.dim() == 3 and not src.is_nested and not encoder.training and not asks
    return plain and src.device.type in runs_on and torch.backends.mha.get_fastpath_enabled() and not _casts(src)


def _casts(src: Tensor) -> bool:
    return torch.is_autocast_enabled(src.device.type)


def _over_all(encoder: Any, src: Tensor, hidden: Tensor) -> Tensor:
    """All rows through all layers; zeros where rows are padding, if padding is behind what is kept."""
    keep = hidden.logical_not()
    x = src
    for layer in encoder.layers:
        x = _layer(layer, x, keep.logical_not())
    shown = keep
    if getattr(encoder, "mask_check", True):  # PyTorch packs rows that begin at the first place, and no others
        shown = keep | (keep[:, 1:] <= keep[:, :-1]).all().logical_not()
    x = torch.where(shown.unsqueeze(-1), x, x.new_zeros(()))
    return x if encoder.norm is None else encoder.norm(x)


def _layer(layer: Any, x: Tensor, hidden: Tensor) -> Tensor:
    if layer.norm_first:
        x = x + layer._sa_block(layer.norm1(x), None, hidden)
        return x + layer._ff_block(layer.norm2(x))
    x = layer.norm1(x + layer._sa_block(x, None, hidden))
    return layer.norm2(x + layer._ff_block(x))
