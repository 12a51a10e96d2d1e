"""Tensors as rows: what the kernels that work along the last dim need to know of a tensor."""

from __future__ import annotations

import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def as_rows(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """``x`` as rows of its last dim, and how far apart they are; copies only where rows are not evenly spaced."""
    cols = x.shape[-1]
    if x.is_contiguous():
        return x, cols
    flat = x.reshape(-1, cols)
    if cols != 1 and flat.stride(1) != 1:
        flat = flat.contiguous()
    if flat.shape[0] <= 1 or flat.stride(0) < cols:  # one row, or rows that overlap: an expanded tensor
        flat = flat.contiguous()
        return flat, cols
    return flat, flat.stride(0)


def template(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One element that looks like a whole tensor: ``empty_like`` it, which costs the host half of ``empty``."""
    return torch.empty((), dtype=dtype, device=device).expand(shape)


def power_of_two(n: int) -> int:
    """The least power of two that is not less than ``n``."""
    return 1 << max(0, n - 1).bit_length()


def clamp(value: int, least: int, most: int) -> int:
    return max(least, min(most, value))


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def float_reason(**tensors: torch.Tensor | None) -> str | None:
    """Why a tensor's type has no kernel, or None."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in FLOATS:
            return f"{name} is {tensor.dtype}; kernels take float32, float16 and bfloat16"
    return None
