"""Matrices to fp8 codes in both orders: one read for the largest magnitude, one for the codes.

Shapes: R rows, C columns of a part; parts lie side by side in the codes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def code_tile(
    x_ptr, largest_ptr, code_ptr, turned_ptr, scale_ptr, rows, cols, x_stride, code_stride, turned_stride,
    MOST: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """From x [R, C] to codes [R, C] and [C, R], by the largest of all parts' magnitudes."""
    largest = tl.load(largest_ptr).to(tl.float32)
    for i in tl.static_range(1, PARTS):
        largest = tl.maximum(largest, tl.load(largest_ptr + i).to(tl.float32))
    largest = tl.maximum(largest, 1e-12)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_ptr, largest / MOST)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1).to(tl.int64) * COLS + tl.arange(0, COLS)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    x = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
    code = (x * (MOST / largest)).to(code_ptr.dtype.element_ty)
    tl.store(code_ptr + row[:, None] * code_stride + col[None, :], code, mask=inside)
    turned = (col < cols)[:, None] & (row < rows)[None, :]
    tl.store(turned_ptr + col[:, None] * turned_stride + row[None, :], tl.trans(code), mask=turned)


def write_codes(parts: Sequence[Tensor], dtype: torch.dtype, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of the parts side by side along ``dim``, the same transposed, and their factor."""
    parts = [part.detach() if part.stride(1) == 1 else part.detach().contiguous() for part in parts]
    sizes, other = [part.shape[dim] for part in parts], parts[0].shape[1 - dim]
    shape = (sum(sizes), other) if dim == 0 else (other, sum(sizes))
    on = parts[0].device
    codes, turned = torch.empty(shape, dtype=dtype, device=on), torch.empty(shape[::-1], dtype=dtype, device=on)
    largest, scale = torch.empty(len(parts), dtype=parts[0].dtype, device=on), torch.empty((), device=on)
    for i, part in enumerate(parts):
        torch.linalg.vector_norm(part, float("inf"), out=largest[i])
    places = zip(parts, codes.split(sizes, dim), turned.split(sizes, 1 - dim), strict=True)
    with torch.cuda.device(on):
        for part, to, to_turned in places:
            rows, cols = part.shape
            code_tile[(triton.cdiv(rows, 64), triton.cdiv(cols, 128))](
                part, largest, to, to_turned, scale, rows, cols, part.stride(0), to.stride(0), to_turned.stride(0),
                MOST=torch.finfo(dtype).max, PARTS=len(parts), ROWS=64, COLS=128, num_warps=8,
            )  # fmt: skip
    return codes, turned, scale
