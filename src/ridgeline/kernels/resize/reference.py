"""Lines between pixels as they are meant, and some that would be wrong."""

from __future__ import annotations

import torch
from torch import Tensor


def forward(x: Tensor, h: int, w: int, corners: bool, scale_y: float, scale_x: float) -> Tensor:
    high = x.double()
    top, bottom, down = _between(h, scale_y, x.shape[2], corners, x.device)
    left, right, along = _between(w, scale_x, x.shape[3], corners, x.device)
    upper = high[:, :, top][..., left] * (1 - along) + high[:, :, top][..., right] * along
    lower = high[:, :, bottom][..., left] * (1 - along) + high[:, :, bottom][..., right] * along
    return upper * (1 - down[:, None]) + lower * down[:, None]


def _between(num: int, scale: float, size: int, corners: bool, on: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    at = torch.arange(num, device=on, dtype=torch.float32)  # as PyTorch does: places are numbers of 32 bits
    place = at * scale if corners else ((at + 0.5) * scale - 0.5).clamp(min=0)
    low = place.long().clamp(max=size - 1)
    return low, (low + 1).clamp(max=size - 1), (place - low).double()


def nearest(x: Tensor, h: int, w: int, corners: bool, scale_y: float, scale_x: float) -> Tensor:
    """Without the second pixel of every line."""
    top, left = (_between(*each, corners, x.device)[0] for each in ((h, scale_y, x.shape[2]), (w, scale_x, x.shape[3])))
    return x.double()[:, :, top][..., left]


def turned(x: Tensor, h: int, w: int, corners: bool, scale_y: float, scale_x: float) -> Tensor:
    """Rows taken for columns."""
    return forward(x.transpose(2, 3), h, w, corners, scale_y, scale_x)
