"""[R, N] with rows ``step`` elements apart → the same without gaps, whatever N is.

A row of an odd number of elements begins anywhere in the result, so that wide pieces of the result belong to no wide
pieces of its source. Programs are cut by the result: their stores are wide and aligned, their loads start where they
start, and the few that reach over a row's ends are masked.
"""

from __future__ import annotations

import triton.language as tl

from ridgeline.kernels.function import jit


@jit
def tighten_forward(x_ptr, out_ptr, n, step, blocks, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    row = program // blocks
    start = row.to(tl.int64) * n  # of the row in the result
    first = tl.multiple_of((start // PIECE) * PIECE + (program - row * blocks) * BLOCK, PIECE)
    col = (first - start).to(tl.int32) + tl.arange(0, BLOCK)
    from_ptr = x_ptr + row.to(tl.int64) * step
    if (first >= start) & (first + BLOCK <= start + n):
        tl.store(out_ptr + first + tl.arange(0, BLOCK), tl.load(from_ptr + col))
    else:
        inside = (col >= 0) & (col < n)
        tl.store(out_ptr + first + tl.arange(0, BLOCK), tl.load(from_ptr + col, mask=inside), mask=inside)
