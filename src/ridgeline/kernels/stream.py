"""Pieces of Gluon device code for rows that pass through shared memory, and for programs that share a row."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.constexpr_function
def spread(VECTOR, NUM_WARPS):
    """One access of VECTOR elements a lane; a thread has the same columns of every piece."""
    return gl.BlockedLayout([1, VECTOR], [1, 32], [1, NUM_WARPS], [1, 0])


@gluon.jit
def columns(CHUNKS: gl.constexpr, BLOCK: gl.constexpr, L: gl.constexpr):
    """Where in a share the elements of a tile [CHUNKS, BLOCK] lie."""
    piece = gl.arange(0, CHUNKS, gl.SliceLayout(1, L))[:, None]
    return piece * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, L))[None, :]


@gluon.jit
def word_of(high, low):
    """Two float32 in one word, which is written and read whole; its lowest bit says that it is there."""
    low = low.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF
    return (high.to(gl.int32, bitcast=True).to(gl.int64) << 32) | low | 1


@gluon.jit
def words_when_there(word_ptr, num, SHARES: gl.constexpr, NUM_WARPS: gl.constexpr):
    """The words of all shares of a row, once the last of them is written: (which share, first numbers, second).

    The bit that says so is taken off again: a sum of nothing is zero, not the smallest number there is.
    """
    k = gl.arange(0, SHARES, gl.BlockedLayout([1], [32], [NUM_WARPS], [0]))
    words = gl.load(word_ptr + k, mask=k < num, other=1, volatile=True)
    while gl.min((words != 0).to(gl.int32), axis=0) == 0:
        words = gl.load(word_ptr + k, mask=k < num, other=1, volatile=True)
    high = (words >> 32).to(gl.int32).to(gl.float32, bitcast=True)
    return k, high, (words.to(gl.int32) & -2).to(gl.float32, bitcast=True)
