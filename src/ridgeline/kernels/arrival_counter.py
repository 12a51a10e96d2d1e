"""Who of several programs comes last, counted in memory that nobody has cleared.

The last to come may read what all the others have written, and finish the work: a second kernel is saved, and with it a
launch. A counter must be zero before anybody counts, and scratch memory is whatever lay there. So a counter has a mark
of 48 bits above its count. Every program looks at the counter before it counts, and puts the mark there if it did not
see one; only the first succeeds, since the others compare with what they saw. The last one clears it, so that a mark
lies in memory only while programs count: the same scratch in the next call, or a recorded graph played again, starts
from no mark. What lay there before would have to be this very mark to be mistaken for it, one chance in 2⁴⁸.

Counters belong to whoever allocated the scratch they lie in, so calls on other streams have their own.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental.gluon import language as gl

from ridgeline.kernels.function import gluon_jit, jit

MARK = tl.constexpr(0x5A3C9E71D24B0000)
COUNT_BITS = tl.constexpr(16)


@jit
def begin(count_ptr, known):
    """Put the mark where ``known``, what this program saw there, has none; to be called before anybody counts."""
    fresh = tl.where((known >> COUNT_BITS) == (MARK >> COUNT_BITS), known, MARK)
    tl.atomic_cas(count_ptr, known, fresh, sem="relaxed", scope="gpu")


@jit
def comes_last(count_ptr, num):
    """Whether all ``num`` programs have come now; what they wrote before may then be read, past the L1."""
    tl.debug_barrier()  # the count tells of what all threads of this program wrote
    return tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu") - MARK == num - 1


@gluon_jit
def begin_group(count_ptr, known):
    """``begin``, of a group of warps."""
    fresh = gl.where((known >> COUNT_BITS) == (MARK >> COUNT_BITS), known, MARK)
    gl.atomic_cas(count_ptr, known, fresh, sem="relaxed", scope="gpu")


@gluon_jit
def group_comes_last(count_ptr, num):
    """``comes_last``, of a group of warps."""
    gl.thread_barrier()
    return gl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu") - MARK == num - 1
