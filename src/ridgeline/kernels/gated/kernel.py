"""Gated units on the device: act(gate) · up, element by element.

Shapes: R rows, C columns; contiguous inputs come as one long row.
"""

from __future__ import annotations

import triton.language as tl

from ridgeline.kernels.function import jit

SILU = tl.constexpr(0)
GELU_TANH = tl.constexpr(1)
GELU_ERF = tl.constexpr(2)


@jit
def activation(x, KIND: tl.constexpr):
    """act(x) and its derivative."""
    if KIND == SILU:
        s = 1.0 / (1.0 + tl.exp(-x))
        y = x * s
        slope = s + y * (1.0 - s)
    elif KIND == GELU_TANH:
        # (1 + tanh(u)) / 2 is the sigmoid of 2u, and as that it loses nothing where it is small
        u = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        e = tl.exp(-u)
        s = 1.0 / (1.0 + e)
        y = x * s
        # 1 - s as e·s: a difference from one would be off by its last bit, times twenty at x = 4
        slope = s + y * (tl.minimum(e, 1e34) * s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    else:
        share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        y = x * share
        slope = share + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return y, slope


@jit
def _place(blocks_per_row, BLOCK: tl.constexpr, FLAT: tl.constexpr):
    """A program's row and columns. One long row has no row to find, and a division ahead of every load is not free."""
    pid = tl.program_id(0).to(tl.int64)
    if FLAT:
        return pid * 0, pid * BLOCK + tl.arange(0, BLOCK)
    else:
        return pid // blocks_per_row, (pid % blocks_per_row) * BLOCK + tl.arange(0, BLOCK)


@jit
def loaded(at, inside, MASKED: tl.constexpr, READS: tl.constexpr):
    if MASKED:
        return tl.load(at, mask=inside, other=0.0, eviction_policy=READS).to(tl.float32)
    else:
        return tl.load(at, eviction_policy=READS).to(tl.float32)


@jit
def stored(to, value, inside, MASKED: tl.constexpr, WRITES: tl.constexpr):
    if MASKED:
        tl.store(to, value.to(to.dtype.element_ty), mask=inside, eviction_policy=WRITES)
    else:
        tl.store(to, value.to(to.dtype.element_ty), eviction_policy=WRITES)


@jit
def forward_part(
    gate_at, up_at, out_at, inside, KIND: tl.constexpr, MASKED: tl.constexpr, READS: tl.constexpr, WRITES: tl.constexpr
):
    y, _ = activation(loaded(gate_at, inside, MASKED, READS), KIND)
    stored(out_at, y * loaded(up_at, inside, MASKED, READS), inside, MASKED, WRITES)


@jit
def backward_part(
    dy_at, gate_at, up_at, dgate_at, dup_at, inside, KIND: tl.constexpr, MASKED: tl.constexpr, READS: tl.constexpr,
    WRITES: tl.constexpr,
):  # fmt: skip
    gate = loaded(gate_at, inside, MASKED, READS)
    up = loaded(up_at, inside, MASKED, READS)
    dy = loaded(dy_at, inside, MASKED, READS)
    y, slope = activation(gate, KIND)
    stored(dgate_at, dy * up * slope, inside, MASKED, WRITES)
    stored(dup_at, dy * y, inside, MASKED, WRITES)


@jit
def gated_forward(
    gate_ptr,
    up_ptr,
    out_ptr,
    cols,
    gate_stride,
    up_stride,
    blocks_per_row,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    FLAT: tl.constexpr,
    UNALIGNED: tl.constexpr,  # one long row that ends inside an access: only its last block needs a mask
    READS: tl.constexpr,
    WRITES: tl.constexpr,
):
    row, col = _place(blocks_per_row, BLOCK, FLAT)
    inside = col < cols
    if UNALIGNED:
        if (tl.program_id(0).to(tl.int64) + 1) * BLOCK <= cols:
            forward_part(gate_ptr + col, up_ptr + col, out_ptr + col, inside, KIND, False, READS, WRITES)
        else:
            forward_part(gate_ptr + col, up_ptr + col, out_ptr + col, inside, KIND, True, READS, WRITES)
    else:
        gate_at = gate_ptr + row * gate_stride + col
        up_at = up_ptr + row * up_stride + col
        forward_part(gate_at, up_at, out_ptr + row * cols + col, inside, KIND, True, READS, WRITES)


@jit
def gated_backward(
    dy_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    cols,
    gate_stride,
    up_stride,
    blocks_per_row,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    FLAT: tl.constexpr,
    UNALIGNED: tl.constexpr,
    READS: tl.constexpr,
    WRITES: tl.constexpr,
):
    row, col = _place(blocks_per_row, BLOCK, FLAT)
    inside = col < cols
    if UNALIGNED:
        dy_at, gate_at, up_at = dy_ptr + col, gate_ptr + col, up_ptr + col
        dgate_at, dup_at = dgate_ptr + col, dup_ptr + col
        if (tl.program_id(0).to(tl.int64) + 1) * BLOCK <= cols:
            backward_part(dy_at, gate_at, up_at, dgate_at, dup_at, inside, KIND, False, READS, WRITES)
        else:
            backward_part(dy_at, gate_at, up_at, dgate_at, dup_at, inside, KIND, True, READS, WRITES)
    else:
        at = row * cols + col
        gate_at = gate_ptr + row * gate_stride + col
        up_at = up_ptr + row * up_stride + col
        backward_part(dy_ptr + at, gate_at, up_at, dgate_ptr + at, dup_ptr + at, inside, KIND, True, READS, WRITES)
