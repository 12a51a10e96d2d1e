"""Work that is given out as it is asked for: a warp that feeds others draws tickets, and says what it got.

Tickets are numbers of a counter in memory that nobody has cleared (``arrivals``): everybody puts the mark there who saw
none, and whoever draws the last ticket clears it. A ticket is drawn before a sequence is fed and looked at afterwards,
so that nobody waits for memory.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl

from ridgeline.kernels.arrival_counter import MARK
from ridgeline.kernels.function import gluon_jit


@gluon_jit
def mark_tickets(count_ptr, known):
    """Puts the mark where ``known``, what this program saw there, has none; one lane does."""
    mark: gl.constexpr = """{ .reg .pred %first, %none; .reg .b32 %lane; .reg .b64 %high, %was;
        mov.u32 %lane, %laneid; setp.eq.u32 %first, %lane, 0;
        and.b64 %high, $2, 0xffffffffffff0000; setp.ne.and.b64 %none, %high, $3, %first;
        @%none atom.relaxed.gpu.global.cas.b64 %was, [$1], $2, $3;
        bar.warp.sync 0xffffffff; mov.u32 $0, 0; }"""
    fresh = known * 0 + MARK
    gl.inline_asm_elementwise(mark, "=r,l,l,l", [count_ptr, known, fresh], gl.int32, is_pure=False, pack=1)


@gluon_jit
def draw_ticket(count_ptr, turn):
    """Asks for the next number, which one lane of the warp will have."""
    draw: gl.constexpr = """{ .reg .pred %first; .reg .b32 %lane; .reg .b64 %was; // $2
        mov.u32 %lane, %laneid; setp.eq.u32 %first, %lane, 0; mov.u64 %was, 0;
        @%first atom.relaxed.gpu.global.add.u64 %was, [$1], 1;
        cvt.u32.u64 $0, %was; }"""
    return gl.inline_asm_elementwise(draw, "=r,l,r", [count_ptr, turn], gl.int32, is_pure=False, pack=1)


@gluon_jit
def ticket_drawn(ticket):
    """The number that was asked for, known to all lanes."""
    look: gl.constexpr = "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff; and.b32 $0, $0, 0xffff;"
    return gl.inline_asm_elementwise(look, "=r,r", [ticket], gl.int32, is_pure=False, pack=1)


@gluon_jit
def room_for_words(NUM: gl.constexpr):
    """Where the feeding warp says what it feeds, NUM sequences ahead."""
    return gl.allocate_shared_memory(gl.int64, [NUM, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon_jit
def say(room, which, unit, length):
    """A sequence and its length; to be said before the barrier is arrived at that others wait for."""
    both = (unit.to(gl.int64) << 32) | length.to(gl.int64)
    room.index(which).store(gl.full([1], both, gl.int64, gl.BlockedLayout([1], [32], [1], [0])))
    together: gl.constexpr = "bar.warp.sync 0xffffffff; mov.u32 $0, $1;"
    gl.inline_asm_elementwise(together, "=r,r", [which], gl.int32, is_pure=False, pack=1)


@gluon_jit
def heard(room, which):
    """What was said."""
    both = gl.max(room.index(which).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    return (both >> 32).to(gl.int32), both.to(gl.int32)
