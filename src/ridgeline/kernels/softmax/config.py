"""Launch configurations of softmax by shape; the measurements: lab/notes/rows.md."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ridgeline.kernels.rms_norm.config import KEPT_BYTES, lanes, narrow_tile, short_tile
from ridgeline.kernels.rows import cdiv, power_of_two
from ridgeline.kernels.split_rows import MOST_SHARES, Streamed


@dataclass(frozen=True, slots=True)
class Softmax:
    """Rows a program holds, in how many pieces; no pieces: a row block by block. No programs given: one a tile.

    ``ends``: of unaligned rows, the few elements outside whole accesses are handled apart. ``reads``
    and ``writes``: what the L2 is told of rows and results."""

    rows: int
    chunks: int
    block: int
    num_warps: int
    num_stages: int = 1
    programs_per_sm: int = 0
    ends: bool = False
    reads: str = ""
    writes: str = ""


@dataclass(frozen=True, slots=True)
class Shares(Streamed):
    """``kept``: powers of a share of 16-bit numbers wait in registers for the sum of their row; else they are computed
    again from shared memory."""

    kept: bool = False


@dataclass(frozen=True, slots=True)
class Packed:
    """A row of 16-bit numbers a program, two numbers a word: its warps, how many of its pieces wait in shared memory
    instead of registers, and CTAs per SM. ``reads`` and ``writes``: what the L2 is told. ``cluster``: so
    many programs share a row and start together."""

    num_warps: int
    shared: int
    programs_per_sm: int
    reads: str = ""
    writes: str = ""
    cluster: int = 1


def forward(rows: int, cols: int, itemsize: int, unaligned: bool = False) -> Softmax:
    """As for the norms: at most 40 elements a thread, 16 warps at most (8192×16384: 146 µs, 150 with 32 warps). Many
    rows are told to stay in the L2: 16384×4096 67.0 µs, 69.0 else."""
    short = narrow_tile(rows, cols, itemsize, 4)
    if unaligned and itemsize == 2 and 384 < cols <= 512 and rows >= 4 * 132:  # 65536×430: 35.6 µs, 37.7 a row a warp
        short = (8, 4, 128, 4)
    reads = "evict_last" if rows * cols * itemsize >= KEPT_BYTES and not unaligned else ""
    if short is not None:
        return Softmax(*short, reads=reads)
    close = fitting(rows, cols)
    if close is not None:
        return replace(close, reads=reads)
    for num_warps, most in ((4, 5), (8, 4), (16, 5), (32, 3)):
        chunks = cdiv(cols, 256 * num_warps)
        # from here on a row is read twice forward: 182 µs for 4096×32768, 191 held
        if chunks <= most and cols < 32768:
            return Softmax(1, chunks, 256 * num_warps, num_warps, reads=reads)
    return twice(itemsize)


MOST_FITTED, LEAST_BETTER = 2560, 1.1


def fitting(rows: int, cols: int) -> Softmax | None:
    """Rows of 1k to 2.5k columns that fill the places of one or two warps, four rows or two a program, where four warps
    would have places for a tenth more at least; None where they would not, or rows are few.

    On four warps 65536×1232 took 101 µs (a copy as large 81), 30111×1162 49.6 (41.2), 18727×1048 30.1 (26.5).
    """
    if cols > MOST_FITTED or rows < 4 * 132:
        return None
    places = {warps: cdiv(cols, 256 * warps) * 256 * warps for warps in (4, 2, 1)}
    able = [warps for warps, most in ((4, 5), (2, 5), (1, 7)) if places[warps] <= most * 256 * warps]
    best = min(able, key=lambda warps: (places[warps], -warps))
    if places[4] < LEAST_BETTER * places[best]:
        return None
    return Softmax(4 // best, places[best] // (256 * best), 256 * best, 4)


def backward(rows: int, cols: int, itemsize: int, unaligned: bool = False) -> Softmax:
    """Two rows are held, in one piece where that fits: 195 against 200 µs for 8192×16384, 205 against 208 for 32768.

    Many rows of 3k to 4k columns have sixteen elements a thread and are told to stay in the L2, results to leave it:
    16384×4096 95.2 µs, 98.1 else. Short ones are two a program: 65536×1024 96.6, 98.0 with four.
    """
    short = short_tile(rows, cols, itemsize, 2 if itemsize == 2 and cols > 512 else 4)
    if short is not None:
        return Softmax(*short)
    if itemsize == 2 and 3072 < cols <= 4096 and rows * cols * itemsize >= KEPT_BYTES and not unaligned:
        return Softmax(1, 2, 2048, 8, reads="evict_last", writes="evict_first")
    if 8192 < cols <= 32768 and power_of_two(cols) == cols:
        return Softmax(1, 1, cols, 32)
    for num_warps, most in ((4, 4), (8, 4), (32, 4)):
        chunks = cdiv(cols, 256 * num_warps)
        if chunks <= most:
            return Softmax(1, chunks, 256 * num_warps, num_warps)
    return Softmax(1, 0, 32768 // itemsize, 32, 1)


def ends_pay(cols: int, itemsize: int) -> bool:
    """Whether unaligned rows have their ends apart forward: not where two share a warp in three
    pieces. Float32 65536×177 27.6 µs with masks, 29.5 with ends; 65536×394 39.2 and 37.5."""
    return cols > lanes(itemsize) * 3 // 2


def with_ends(held: Softmax) -> Softmax:
    """Unaligned rows, chosen for the length of their whole accesses: as many a program as others.

    32768×4097: 140 µs, 184 with masks, backward 189 and 222; 131072×1001 131 and 173, backward 186 both ways. One warp
    and a row a program, of which an SM has 32 at most, 65536×394 took 44 µs and float32 65536×177 44 (copies
    as large 30 and 28).
    """
    return replace(held, ends=True, num_stages=1, programs_per_sm=0)


def twice(itemsize: int) -> Softmax:
    """One program a row, read twice."""
    return Softmax(1, 0, 16384 // itemsize, 16, 1)


SHARE_STEP = 64
"""Shares of a cluster's programs are multiples of so many numbers, a line: all but the last are equal."""


def num_pieces(num_warps: int, cols: int) -> int:
    """Accesses of every lane that hold a row of 16-bit numbers."""
    return cdiv(cols, 256 * num_warps)


SHORTEST_PACKED, LONGEST_PACKED, LONGEST_ON_EIGHT = 12288, 65536, 20480
"""Columns of rows that a program holds two numbers a word, and of those for which eight warps are enough."""
MOST_TOGETHER, LONGEST_SHIFTED_SHARE = 16, 65536
"""Programs of a cluster; columns of one's share where rows are unaligned."""


def clustered(rows: int, cols: int, sms: int, unaligned: bool) -> Packed | None:
    """Rows of 16-bit numbers that a cluster of programs shares, more of them where rows are few; None for rows that are
    too long for sixteen.

    1024×131072: 136 and 137 µs (146 and 143 in the persistent kernel, whose programs wait for words in memory),
    2048×128256 278 and 263 (304, 284), 512×262144 144 and 143 (147, 144), 2048×80000 174 and 159 (186, 178), float16
    2048×151936 327 and 306 (349, 350); sixteen warps lose 3 to 10 %. unaligned rows on sixteen warps:
    1024×131075 146 by two, 149 by four (219), 2048×100003 231, 244 by four (284). Few rows: 64×50304 9.9 by four
    (15.0), 64×50257 10.1 (15.8), 16×65536 6.8 by sixteen (9.6), 128×32768 10.7 by two (11.0), 64×128256 14.9 by eight
    (19.7), 4×262144 7.0 (8.8 in shares).
    """
    sixteen = unaligned and rows >= 2 * sms
    held = cols // 8 * 8  # what is outside of whole accesses is no piece's
    cluster = power_of_two(cdiv(held, LONGEST_SHIFTED_SHARE if sixteen else LONGEST_ON_EIGHT))
    if cluster > MOST_TOGETHER:
        return None
    while not sixteen and cluster < MOST_TOGETHER and 2 * cluster * rows <= 3 * sms and cols >= 8192 * cluster:
        cluster *= 2
    reads = "evict_last" if 2 * rows * cols >= KEPT_BYTES else ""
    length = cdiv(cdiv(held, cluster), SHARE_STEP) * SHARE_STEP
    if sixteen:
        return Packed(16, max(0, num_pieces(16, length) - 4), 2, reads, cluster=cluster)
    return Packed(8, max(0, num_pieces(8, length) - 8), 3, reads, cluster=cluster)


def packed(rows: int, cols: int, sms: int, unaligned: bool) -> Packed | None:
    """Rows of 16-bit numbers in accesses of sixteen bytes, a program each, several CTAs per SM; longer
    ones a cluster each; None for others.

    8192×24000: 189, 207 and 216 µs in three runs (copies 189, 207 and unknown: where memory lies decides; one program
    that walks over rows on their way 210, shares 229),
    8192×28000 221 (252), 4096×32768 133 (145), 4096×40000 163 (175), 4096×50304 204 (223), 4096×50257 207 and 213 (246,
    250), 2048×65536 136 and 140 (144, 145), 600×50257 38 (48), 300×24000 15.5 (19.8). On eight warps 8192×16384 129 and
    130 (140 as float32 numbers on sixteen), 8192×20000 159 (163), but 300×20000 12.7 (12.2).
    At most 24 words a thread are in registers, or 16 where others wait in shared memory: 2048×80000 spills, 211 (185 in
    shares). Rows that the L2 is told to keep gain 1 to 3 µs.
    """
    if cols > LONGEST_PACKED or (cols > LONGEST_ON_EIGHT and rows < 2 * sms):
        return clustered(rows, cols, sms, unaligned)
    eight = SHORTEST_PACKED < cols <= LONGEST_ON_EIGHT and not unaligned
    if rows < (4 if eight else 2) * sms or (cols <= LONGEST_ON_EIGHT and not eight):
        return None
    reads = "evict_last" if 2 * rows * cols >= KEPT_BYTES else ""
    if eight:
        return Packed(8, 2 if cols > 16384 else 0, 3, reads)
    pieces = num_pieces(16, cols // 8 * 8)  # what is outside of whole accesses is in none
    if pieces > 14:
        return Packed(16, 13, 2)
    return Packed(16, max(0, pieces - 4) if pieces > 7 or unaligned else 2 * (pieces == 7), 2, reads)


def streamed_forward(cols: int, itemsize: int) -> Shares | None:
    """Few rows, and those longer than 128 KB: a row of 64 KB in one program, longer ones in shares of 16 KB. None where
    a row fits in registers.

    16-bit rows on three programs of four warps, powers kept: 2048×65536 146 µs, 512×262144 145, 4096×50257 250;
    computed again on four programs 148, 152, 261; kept in shares of 8 KB 152, 158, 263. Float32 2048×50257 227.
    """
    # Longer rows pass through shared memory where their accesses can be sixteen bytes wide. 8192×20000: 170 µs held,
    # 228 through shared memory; backward 235 and 293.
    if cols * itemsize <= 40960:
        return None
    if cols * itemsize <= 65536:
        return Shares(8, 16, 3, 1)
    return Shares(8, 4, 4, 3, kept=True) if itemsize == 2 else Shares(8, 4, 3, 4)


def streamed_backward(cols: int, itemsize: int) -> Streamed | None:
    """Shares of 32 KB of both inputs: 196 to 199 µs for 2¹⁷ KB at every length, 203 to 320 held or read twice. Where
    shares do not fill their place four programs of four warps: 4096×50257 315 µs, 348 with two of eight, 390 with one
    of sixteen. Longer shares where rows would have more than 64: float32 64×250880 58 µs, 112 in 123 shares."""
    if cols * itemsize <= 49152:
        return None
    long = cols * itemsize > MOST_SHARES * 8192
    return Streamed(4, 16, 3, 1) if long or power_of_two(cols) == cols else Streamed(4, 4, 3, 4)
