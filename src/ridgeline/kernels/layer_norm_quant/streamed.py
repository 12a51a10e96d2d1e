"""LayerNorm of 16-bit rows to fp8 in Gluon: a lane has sixteen columns side by side, read and held two a word.

Sixteen columns are one access of the result, and a block's largest number is found among a few lanes of one warp:
nothing is rearranged, and no warp waits for another but for the row's two sums.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ridgeline.kernels.stream import halves, paired, sum_of


@gluon.jit
def largest_of_lanes(x, STEPS: gl.constexpr):
    """The largest number of 2^STEPS neighboring lanes, in each of them."""
    by_1: gl.constexpr = "{ .reg .b32 %t; shfl.sync.bfly.b32 %t, $1, 1, 31, 0xffffffff; max.f32 $0, $1, %t; }"
    by_2: gl.constexpr = "{ .reg .b32 %t; shfl.sync.bfly.b32 %t, $1, 2, 31, 0xffffffff; max.f32 $0, $1, %t; }"
    by_4: gl.constexpr = "{ .reg .b32 %t; shfl.sync.bfly.b32 %t, $1, 4, 31, 0xffffffff; max.f32 $0, $1, %t; }"
    by_8: gl.constexpr = "{ .reg .b32 %t; shfl.sync.bfly.b32 %t, $1, 8, 31, 0xffffffff; max.f32 $0, $1, %t; }"
    if STEPS > 0:
        x = gl.inline_asm_elementwise(by_1, "=f,f", [x], gl.float32, is_pure=False, pack=1)
    if STEPS > 1:
        x = gl.inline_asm_elementwise(by_2, "=f,f", [x], gl.float32, is_pure=False, pack=1)
    if STEPS > 2:
        x = gl.inline_asm_elementwise(by_4, "=f,f", [x], gl.float32, is_pure=False, pack=1)
    if STEPS > 3:
        x = gl.inline_asm_elementwise(by_8, "=f,f", [x], gl.float32, is_pure=False, pack=1)
    return x


@gluon.jit
def two_bytes(low, high, E5M2: gl.constexpr):
    """Two numbers as fp8 in 16 bits, two of these at a time."""
    e4m3: gl.constexpr = """{ .reg .b16 %a, %b; cvt.rn.satfinite.e4m3x2.f32 %a, $3, $1;
        cvt.rn.satfinite.e4m3x2.f32 %b, $4, $2; mov.b32 $0, {%a, %b}; }"""
    e5m2: gl.constexpr = """{ .reg .b16 %a, %b; cvt.rn.satfinite.e5m2x2.f32 %a, $3, $1;
        cvt.rn.satfinite.e5m2x2.f32 %b, $4, $2; mov.b32 $0, {%a, %b}; }"""
    if E5M2:
        return gl.inline_asm_elementwise(e5m2, "=r,f,f,f,f", [low, high], gl.int16, True, 2)
    else:
        return gl.inline_asm_elementwise(e4m3, "=r,f,f,f,f", [low, high], gl.int16, True, 2)


@gluon.jit
def words_of(pointer, at, there, I: gl.constexpr, FULL: gl.constexpr):
    """Words of piece I at these places, zero past a row's end."""
    if I < FULL:
        return gl.load(pointer + at)
    else:
        return gl.load(pointer + at, mask=there, other=0)


@gluon.jit
def layer_norm_quantized_words(
    x_ptr,  # [R, C] of 16 bits, rows x_stride apart
    residual_ptr,  # [R, C]
    weight_ptr,  # [C]
    bias_ptr,  # [C]
    q_ptr,  # [R, C] fp8
    scale_ptr,  # [R, scales] fp32: y ≈ q · scale
    h_ptr,  # [R, C] x + residual
    cols,  # a multiple of 16
    x_stride,
    scales,
    eps,
    largest,
    HAS_WEIGHT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    E5M2: gl.constexpr,
    BLOCKS: gl.constexpr,  # a scale belongs to a block; else to a row
    STEPS: gl.constexpr,  # 2^STEPS lanes have a block
    CHUNKS: gl.constexpr,  # any number: no piece but the last is filled up
    FULL: gl.constexpr,  # pieces that rows fill
):
    """A row a program and no next one."""
    NUM_WARPS: gl.constexpr = gl.num_warps()
    BF16: gl.constexpr = x_ptr.dtype.element_ty == gl.bfloat16
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [NUM_WARPS, 1], [1, 0])  # lanes, words of one
    LANES: gl.constexpr = 32 * NUM_WARPS
    PIECE: gl.constexpr = LANES * 8
    lane = gl.arange(0, LANES, gl.SliceLayout(1, L))
    c = lane[:, None] * 8 + gl.arange(0, 8, gl.SliceLayout(0, L))[None, :]
    own = lane[:, None] * 8 + gl.zeros([LANES, 8], gl.int32, L)
    width = cols // 2
    x_words = x_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    h_words = h_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    more_words = residual_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    w_words = weight_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    b_words = bias_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    q_pairs = q_ptr.to(gl.pointer_type(gl.int16), bitcast=True)
    inverse = 1.0 / cols
    row = gl.program_id(0)
    x_at = row.to(gl.int64) * (x_stride // 8 * 4) + c
    at = row.to(gl.int64) * (width // 8 * 8) + c
    held = ()
    for i in gl.static_range(CHUNKS):
        there = own < width - i * PIECE
        word = words_of(x_words, x_at + i * PIECE, there, i, FULL)
        if HAS_RESIDUAL:
            low, high = halves(word, BF16)
            more, other = halves(words_of(more_words, at + i * PIECE, there, i, FULL), BF16)
            word = paired(low + more, high + other, BF16)
            gl.store(h_words + at + i * PIECE, word, mask=there)
        held = held + (word,)  # type: ignore[assignment]
    total = gl.zeros([LANES, 8], gl.float32, L)
    for i in gl.static_range(CHUNKS):
        low, high = halves(held[i], BF16)
        total += low + high
    mean = sum_of(total, PIECE) * inverse
    square = gl.zeros([LANES, 8], gl.float32, L)
    for i in gl.static_range(CHUNKS):
        low, high = halves(held[i], BF16)
        low -= mean
        high -= mean
        if i >= FULL:
            low = gl.where(own < width - i * PIECE, low, 0.0)
            high = gl.where(own < width - i * PIECE, high, 0.0)
        square += low * low + high * high
    weights = ()
    biases = ()
    for i in gl.static_range(CHUNKS):
        if HAS_WEIGHT:
            weights = weights + (words_of(w_words, c + i * PIECE, own < width - i * PIECE, i, FULL),)  # type: ignore[assignment]
        if HAS_BIAS:
            biases = biases + (words_of(b_words, c + i * PIECE, own < width - i * PIECE, i, FULL),)  # type: ignore[assignment]
    rstd = gl.rsqrt(sum_of(square, PIECE) * inverse + eps)
    shift = -mean * rstd
    normed = ()
    tops = ()
    for i in gl.static_range(CHUNKS):
        low, high = halves(held[i], BF16)
        low = low * rstd + shift
        high = high * rstd + shift
        if HAS_WEIGHT:
            a, b = halves(weights[i], BF16)
            low *= a
            high *= b
        if HAS_BIAS:
            a, b = halves(biases[i], BF16)
            low += a
            high += b
        if i >= FULL:  # the padding of a row is no candidate for its largest
            low = gl.where(own < width - i * PIECE, low, 0.0)
            high = gl.where(own < width - i * PIECE, high, 0.0)
        top = gl.max(gl.maximum(gl.abs(low), gl.abs(high)), axis=1)
        tops = tops + (top,)  # type: ignore[assignment]
        normed = normed + (low, high)  # type: ignore[assignment]
    if not BLOCKS:
        top = tops[0]
        for i in gl.static_range(1, CHUNKS):
            top = gl.maximum(top, tops[i])
        most = gl.maximum(gl.max(top, axis=0), 1e-12)
        gl.store(scale_ptr + row, most * (1.0 / largest))
        times = largest / most
    for i in gl.static_range(CHUNKS):
        there = own < width - i * PIECE
        if BLOCKS:
            most = gl.maximum(largest_of_lanes(tops[i], STEPS), 1e-12)
            block = lane + i * LANES
            first = (block & ((1 << STEPS) - 1)) == 0
            to = scale_ptr + row.to(gl.int64) * scales + (block >> STEPS)
            gl.store(to, most * (1.0 / largest), mask=first & (lane * 8 < width - i * PIECE))
            root = gl.rsqrt(most)
            times = (largest * root * root)[:, None]
        pairs = two_bytes(normed[2 * i] * times, normed[2 * i + 1] * times, E5M2)
        gl.store(q_pairs + at + i * PIECE, pairs, mask=there)
