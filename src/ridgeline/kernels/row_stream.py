"""Pieces of Gluon device code for rows that pass through shared memory, and for programs that share a row.

What a loop carries from turn to turn must not start as the same value under two names (``before = now``): Triton 3.6
looks for what a turn changes by comparing values, finds that the second name has the value of the first as it had
before, and leaves it for ever as it began.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ridgeline.kernels.function import gluon_jit

MINUS_LOG2_E = gl.constexpr(-1.4426950408889634)
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon_jit
def let_next_start(EARLY: gl.constexpr):
    """Lets the kernel launched after this one start while this one ends; that one waits for results itself."""
    if EARLY:
        start: gl.constexpr = "griddepcontrol.launch_dependents; // $0"
        gl.inline_asm_elementwise(start, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon_jit
def join_cluster(SHARES: gl.constexpr):
    """Room in shared memory for two numbers of every program of a cluster of at most 32, and a barrier that waits for
    so many bytes. Says that this program has begun: nobody writes into the shared memory of one that has not."""
    join: gl.constexpr = """{ .shared .align 8 .b8 told[264]; .reg .pred %first; .reg .b32 %t; .reg .b64 %s;
        mov.u32 $0, told; mov.u32 %t, %tid.x; setp.eq.u32 %first, %t, 0;
        @%first mbarrier.init.shared::cta.b64 [$0+256], 1;
        @%first mbarrier.arrive.expect_tx.shared::cta.b64 %s, [$0+256], $1;
        @%first fence.mbarrier_init.release.cluster;
        barrier.cluster.arrive.relaxed.aligned; }"""
    return gl.inline_asm_elementwise(join, "=&r,r", [SHARES * 8], gl.int32, is_pure=False, pack=1)


@gluon_jit
def told_by_cluster(room, a, b, SHARES: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Two numbers of every program of a cluster that all have joined: (whose, first numbers, second numbers).

    Every program writes its own into the room of all, whose barriers count the bytes, so that none waits for more than
    its numbers; every warp has all of them. A program that has all is written to no more, and may end.
    """
    tell: gl.constexpr = """{ .reg .pred %near, %far, %done; .reg .b32 %t, %at, %to, %r;
        barrier.cluster.wait.acquire.aligned;
        mov.u32 %t, %tid.x; mov.u32 %r, %cluster_ctarank; setp.lt.u32 %far, %t, $6;
        shl.b32 %r, %r, 3; add.u32 %r, $2, %r; add.u32 %to, $2, 256;
        @%far mapa.shared::cluster.u32 %at, %r, %t;
        @%far mapa.shared::cluster.u32 %to, %to, %t;
        @%far st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%at], {$3, $4}, [%to];
        again: mbarrier.try_wait.parity.shared::cta.b64 %done, [$2+256], 0;
        @!%done bra again;
        setp.lt.u32 %near, $5, $6; shl.b32 %t, $5, 3; add.u32 %t, $2, %t;
        mov.f32 $0, 0f00000000; mov.f32 $1, 0f00000000;
        @%near ld.shared.v2.f32 {$0, $1}, [%t]; }"""
    k = gl.arange(0, 32, gl.BlockedLayout([1], [32], [NUM_WARPS], [0]))
    none = k.to(gl.float32) * 0.0
    given = [k * 0 + room, none + a, none + b, k, k * 0 + SHARES]
    first, second = gl.inline_asm_elementwise(
        tell, "=&f,=&f,r,f,f,r,r", given, (gl.float32, gl.float32), is_pure=False, pack=1
    )
    return k, first, second


@gluon_jit
def share_pitch(cols):
    """As ``device.share_pitch``."""
    return (cols + 3) // 4 * 4


@gluon_jit
def open_exchange(COUNT: gl.constexpr):
    """Room in shared memory where programs of a cluster tell each other two numbers a warp, turn after turn, COUNT
    pairs of at most 32 in all, and two barriers that wait for so many bytes, for every second turn each. All programs
    have begun when this is done."""
    begin: gl.constexpr = """{ .shared .align 16 .b8 told[528]; .reg .pred %first; .reg .b32 %t; .reg .b64 %s;
        mov.u32 $0, told; mov.u32 %t, %tid.x; setp.eq.u32 %first, %t, 0;
        @%first mbarrier.init.shared::cta.b64 [$0+512], 1;
        @%first mbarrier.init.shared::cta.b64 [$0+520], 1;
        @%first mbarrier.arrive.expect_tx.shared::cta.b64 %s, [$0+512], $1;
        @%first mbarrier.arrive.expect_tx.shared::cta.b64 %s, [$0+520], $1;
        @%first fence.mbarrier_init.release.cluster;
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; }"""
    return gl.inline_asm_elementwise(begin, "=&r,r", [COUNT * 8], gl.int32, is_pure=False, pack=1)


@gluon_jit
def tell_cluster(room, turn, a, b, SHARES: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Two numbers of every warp, which all of its lanes have, to all programs of the cluster.

    Numbers of a turn lie where those of the turn before the last did: whoever writes them has heard the last turn's
    from every warp, each of which had read the ones before by then.
    """
    tell: gl.constexpr = """{ .reg .pred %far; .reg .b32 %t, %at, %to, %r;
        mov.u32 %t, %tid.x; shr.u32 %t, %t, 5; mov.u32 %r, %cluster_ctarank;
        mad.lo.u32 %r, %r, $6, %t; shl.b32 %r, %r, 3; mov.u32 %t, %laneid; setp.lt.u32 %far, %t, $5;
        and.b32 %to, $2, 1; shl.b32 %at, %to, 8; shl.b32 %to, %to, 3;
        add.u32 %at, %at, $1; add.u32 %at, %at, %r; add.u32 %to, %to, $1; add.u32 %to, %to, 512;
        @%far mapa.shared::cluster.u32 %at, %at, %t;
        @%far mapa.shared::cluster.u32 %to, %to, %t;
        @%far st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%at], {$3, $4}, [%to];
        mov.u32 $0, 0; }"""
    k = gl.arange(0, 32 * NUM_WARPS, gl.BlockedLayout([1], [32], [NUM_WARPS], [0])) * 0
    given = [k + room, k + turn, a, b, k + SHARES, k + NUM_WARPS]
    gl.inline_asm_elementwise(tell, "=r,r,r,f,f,r,r", given, gl.int32, is_pure=False, pack=1)


@gluon_jit
def heard_from_cluster(room, turn, SHARES: gl.constexpr, NUM_WARPS: gl.constexpr):
    """The sums of the two numbers that all warps of a cluster told in a turn, once all have; the same bits for all."""
    hear: gl.constexpr = """{ .reg .pred %done, %near, %first; .reg .b32 %at, %to, %p; .reg .b64 %s;
        and.b32 %to, $3, 1; shl.b32 %at, %to, 8; shl.b32 %to, %to, 3; add.u32 %to, %to, $2; add.u32 %to, %to, 512;
        shr.u32 %p, $3, 1; and.b32 %p, %p, 1;
        again: mbarrier.try_wait.parity.shared::cta.b64 %done, [%to], %p;
        @!%done bra again;
        mov.u32 %p, %tid.x; setp.eq.u32 %first, %p, 0; shl.b32 %p, $5, 3;
        @%first mbarrier.arrive.expect_tx.shared::cta.b64 %s, [%to], %p;
        setp.lt.u32 %near, $4, $5; shl.b32 %p, $4, 3; add.u32 %at, %at, $2; add.u32 %at, %at, %p;
        mov.f32 $0, 0f00000000; mov.f32 $1, 0f00000000;
        @%near ld.volatile.shared.v2.f32 {$0, $1}, [%at]; }"""
    k = gl.arange(0, 32, gl.BlockedLayout([1], [32], [NUM_WARPS], [0]))
    given = [k * 0 + room, k * 0 + turn, k, k * 0 + SHARES * NUM_WARPS]
    first, second = gl.inline_asm_elementwise(
        hear, "=&f,=&f,r,r,r,r", given, (gl.float32, gl.float32), is_pure=False, pack=1
    )
    return gl.sum(first, axis=0), gl.sum(second, axis=0)


@gluon.constexpr_function
def spread(VECTOR, NUM_WARPS):
    """One access of VECTOR elements a lane; a thread has the same columns of every piece."""
    return gl.BlockedLayout([1, VECTOR], [1, 32], [1, NUM_WARPS], [1, 0])


@gluon.constexpr_function
def by_piece(VECTOR, BLOCK, NUM_WARPS):
    """One access of VECTOR elements a lane; a piece of BLOCK elements belongs to one warp, or to part of one."""
    lanes = min(32, BLOCK // VECTOR)
    return gl.BlockedLayout([1, VECTOR], [32 // lanes, lanes], [NUM_WARPS, 1], [1, 0])


@gluon_jit
def sum_of(x, SIZE: gl.constexpr):
    """The sum of a tile: a thread adds what it has before it meets any other."""
    return gl.sum(x.reshape([SIZE]), axis=0)


@gluon_jit
def widened(x):
    """16-bit numbers as float32; two of bfloat16 at a time, an instruction each, where the compiler takes three."""
    halves: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(halves, "=r,=r,r", [x], gl.float32, True, 2)
    else:
        return x.to(gl.float32)


@gluon_jit
def halves(words, BF16: gl.constexpr):
    """The two 16-bit numbers of each word, as float32: the one at the lower address first."""
    if BF16:
        low = (words << 16).to(gl.float32, bitcast=True)
        return low, (words & -65536).to(gl.float32, bitcast=True)
    else:
        both: gl.constexpr = "{ .reg .b16 %a, %b; mov.b32 {%a, %b}, $2; cvt.f32.f16 $0, %a; cvt.f32.f16 $1, %b; }"
        return gl.inline_asm_elementwise(both, "=f,=f,r", [words], (gl.float32, gl.float32), True, 1)


@gluon_jit
def paired(low, high, BF16: gl.constexpr):
    """Two numbers rounded to 16 bits, as one word."""
    if BF16:
        return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], gl.int32, True, 1)
    else:
        return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], gl.int32, True, 1)


@gluon_jit
def higher_bf16(a, b):
    """The larger of two pairs of bfloat16, a pair a word, in one instruction."""
    return gl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], gl.int32, True, 1)


@gluon_jit
def higher_fp16(a, b):
    return gl.inline_asm_elementwise("max.f16x2 $0, $1, $2;", "=r,r,r", [a, b], gl.int32, True, 1)


@gluon_jit
def sigmoid(x, PAIRED: gl.constexpr):
    """1 / (1 + exp(−x)) in a product, a power of two, a sum and an inverse, each of them one instruction.

    Powers and inverses are an eighth as fast as sums: paired, two sums have one inverse, that of their product, and
    numbers below −43 the share of −43, so that no product is too large.
    """
    inverse: gl.constexpr = "rcp.approx.ftz.f32 $0, $1;"
    two: gl.constexpr = """{ .reg .f32 %a, %b, %r;
        ex2.approx.ftz.f32 %a, $2; ex2.approx.ftz.f32 %b, $3;
        add.f32 %a, %a, 0f3F800000; add.f32 %b, %b, 0f3F800000;
        mul.f32 %r, %a, %b; rcp.approx.ftz.f32 %r, %r;
        mul.f32 $0, %r, %b; mul.f32 $1, %r, %a; }"""
    if PAIRED:
        low = gl.minimum(x * MINUS_LOG2_E, 62.0)
        return gl.inline_asm_elementwise(two, "=f,=f,f,f", [low], gl.float32, True, 2)
    else:
        return gl.inline_asm_elementwise(inverse, "=f,f", [1.0 + gl.exp2(x * MINUS_LOG2_E)], gl.float32, True, 1)


@gluon_jit
def two_sigmoids(x, y):
    """The same of two tensors, an inverse for both."""
    two: gl.constexpr = """{ .reg .f32 %a, %b, %r;
        ex2.approx.ftz.f32 %a, $2; ex2.approx.ftz.f32 %b, $3;
        add.f32 %a, %a, 0f3F800000; add.f32 %b, %b, 0f3F800000;
        mul.f32 %r, %a, %b; rcp.approx.ftz.f32 %r, %r;
        mul.f32 $0, %r, %b; mul.f32 $1, %r, %a; }"""
    low = gl.minimum(x * MINUS_LOG2_E, 62.0)
    high = gl.minimum(y * MINUS_LOG2_E, 62.0)
    return gl.inline_asm_elementwise(two, "=f,=f,f,f", [low, high], (gl.float32, gl.float32), True, 1)


@gluon_jit
def columns(CHUNKS: gl.constexpr, BLOCK: gl.constexpr, L: gl.constexpr):
    """Where in a share the elements of a tile [CHUNKS, BLOCK] lie."""
    piece = gl.arange(0, CHUNKS, gl.SliceLayout(1, L))[:, None]
    return piece * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, L))[None, :]


@gluon_jit
def word_of(high, low):
    """Two float32 in one word, which is written and read whole; its lowest bit says that it is there.

    The second number is rounded to make room for it, to even: what is rounded alike for all shares adds up.
    """
    bits = low.to(gl.int32, bitcast=True)
    bits += gl.where(low == low, (bits >> 1) & 1, 0)  # a NaN of nothing but ones would become zero
    low = bits.to(gl.int64) & 0xFFFFFFFE
    return (high.to(gl.int32, bitcast=True).to(gl.int64) << 32) | low | 1


@gluon.constexpr_function
def words_layout(SHARES, NUM_WARPS):
    """At most four words a lane, the same in every warp."""
    return gl.BlockedLayout([min(SHARES // 32, 4)], [32], [NUM_WARPS], [0])


@gluon_jit
def words_when_there(word_ptr, num, SHARES: gl.constexpr, NUM_WARPS: gl.constexpr):
    """The words of all shares of a row, once the last of them is written: (which share, first numbers, second).

    The bit that says so is taken off again: a sum of nothing is zero, not the smallest number there is. Every warp has
    all words, so that none waits for another, unless they are more than 128.
    """
    k = gl.arange(0, SHARES, words_layout(SHARES, NUM_WARPS))
    words = gl.load(word_ptr + k, mask=k < num, other=1, volatile=True)
    while gl.min((words != 0).to(gl.int32), axis=0) == 0:
        words = gl.load(word_ptr + k, mask=k < num, other=1, volatile=True)
    high = (words >> 32).to(gl.int32).to(gl.float32, bitcast=True)
    return k, high, (words.to(gl.int32) & -2).to(gl.float32, bitcast=True)


@gluon_jit
def both_added(a, b, more_a, more_b):
    """Two sums at once: warps meet once for both."""
    return a + more_a, b + more_b


@gluon_jit
def halves_here(words, BF16: gl.constexpr):
    """The two numbers of each word, now and not before: the compiler would keep what it has computed once."""
    brain: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    half: gl.constexpr = "{ .reg .b16 %a, %b; mov.b32 {%a, %b}, $2; cvt.f32.f16 $0, %a; cvt.f32.f16 $1, %b; }"
    if BF16:
        return gl.inline_asm_elementwise(brain, "=r,=r,r", [words], (gl.float32, gl.float32), False, 1)
    else:
        return gl.inline_asm_elementwise(half, "=f,=f,r", [words], (gl.float32, gl.float32), False, 1)


@gluon_jit
def words_of(pointer, c, left):
    """Numbers that start anywhere, two a word: read one by one."""
    low = gl.load(pointer + 2 * c, mask=2 * c < left, other=0.0).to(gl.int16, bitcast=True).to(gl.int32)
    high = gl.load(pointer + 2 * c + 1, mask=2 * c < left, other=0.0).to(gl.int16, bitcast=True).to(gl.int32)
    return (low & 65535) | (high << 16)
