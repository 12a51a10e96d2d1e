"""Launch configurations of cross-entropy by shape."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.rms_norm.config import lanes
from ridgeline.kernels.rows import cdiv, clamp, power_of_two


@dataclass(frozen=True, slots=True)
class Forward:
    """A stretch of a row is read in blocks, the next ones on their way; few long rows are cut into several.
    ``leaves``: what is read leaves the L2 first."""

    block: int
    num_warps: int
    num_stages: int
    num_stretches: int
    leaves: bool = False


@dataclass(frozen=True, slots=True)
class Backward:
    """Elements a program turns into gradients, and its warps."""

    block: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class Short:
    """Rows a program holds whole, in how many pieces, and how many programs walk over all rows. ``leaves``: what is
    read leaves the L2 first, unless it is on its way while another row is worked on."""

    rows: int
    chunks: int
    block: int
    num_warps: int
    num_stages: int = 1
    programs_per_sm: int = 64
    leaves: bool = False


@dataclass(frozen=True, slots=True)
class Packed:
    """A row of 16-bit logits a program, two a word: its warps, and persistent CTAs per SM over all rows.
    ``leaves`` as above."""

    num_warps: int
    programs_per_sm: int
    leaves: bool = False


LEAVING_BYTES = (32 << 20, 288 << 20)
"""Logits of so many bytes leave the L2 first: lines that others have written need not make room for them. 65536×1000:
41 µs, 45 else; 8192×16384 81 and 82; from 500 MB on nothing is gained."""
LONGEST_TILED, LONGEST_TILED_SHIFTED = 512, 2048
"""Columns up to which several rows are a program's work backward; and where rows are unaligned."""
MAX_STRETCHES = 64
SHORTEST_STRETCHED = 2048
MANY_ROWS = 4096
"""From so many rows on each is work enough for a program."""
LINE = 64
"""16-bit numbers of a line of the L2: a warp that reads 512 bytes from inside a line touches five of them."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows and columns of a tile that a program turns into gradients, and its warps; ``ends``: of a row that starts
    inside an access, the few elements outside whole accesses are handled apart."""

    rows: int
    block: int
    num_warps: int
    ends: bool = False


def forward(rows: int, cols: int, itemsize: int, sms: int, unaligned: bool = False) -> Forward | Short:
    """Thirty-two elements a thread, asked for at once; few rows are cut until there are eight waves of programs.

    One wave and a bit is the worst: 2048 rows of 151936 took 189 µs whole, 170 in larger blocks, 160 in four stretches.
    unaligned rows pay for their first and last block: 8192×50257 206 µs in blocks of 2048, 209 of
    4096, 220 of 8192; 25054×3191 61.5 of 1024 on two warps, 75.2 of 2048 (held whole 65.7 to 68.2, a bare read 51.8),
    16384×5003 56.5, 65.3 (55.7 to 66.6, 49.6); in float32 16384×3191 62.0 held whole, 74.3 in blocks (66.0).
    """
    enough = 8 * 8 * sms // max(rows, 1) if rows < MANY_ROWS else 1
    # Columns of many unaligned rows: 16-bit ones in smaller blocks, float32 held whole.
    if unaligned and rows >= MANY_ROWS and itemsize == 2 and cols <= 8192:
        return Forward(1024, 2, 1, 1)
    if unaligned and rows >= MANY_ROWS and itemsize == 4 and cols <= 4096:
        return Short(1, cdiv(cols + 3, 512), 512, 4, 1, 8)
    if unaligned:
        block = min(power_of_two(cols), 2048)
        return Forward(block, 4, 1, clamp(enough, 1, min(MAX_STRETCHES, cdiv(cols, 8 * block))))
    block = fitting(cols)
    stretches = clamp(enough, 1, min(MAX_STRETCHES, cdiv(cols, 2 * block)))
    return Forward(block, clamp(block // 1024, 1, 8), 1, stretches, leaving(rows, cols, itemsize))


def fitting(cols: int) -> int:
    """Blocks of 8192, or of 4096 where those would read a tenth and more past the end of a row."""
    block = min(power_of_two(cols), 8192)
    return block if cdiv(cols, block) * block * 10 <= cols * 11 else block // 2


PACKED = ((2, 16, 8), (4, 8, 10), (8, 4, 8), (8, 3, 10))
"""Warps of a program that holds a row, CTAs per SM, and accesses of a lane that fit in its registers."""


def packed(rows: int, cols: int) -> Packed | None:
    """Many 16-bit rows in accesses of sixteen bytes, two logits a word; None where they are few, short, long, or fill
    blocks of 8192.

    32768×3000: 58.5 µs, 66.4 as float32 numbers with the next rows on their way, a bare read 56.2; 32768×4096 76.8,
    78.4 and 71.4; 16384×5000 49.6, 58.5 and 49.3; 16384×8192 76.0, 79.0 and 71.5; 16384×10000 90.2, 98.8 and 84.9;
    8192×12000 58.4, 61.4 and 56.1; 8192×13000 63.8, 69.8 and 60.1; 8192×20000 92.1, 95.9 and 86.3. Equal: 65536×2048
    76.3 and 76.9, 8192×16384 76.0 and 75.4. Lost: 65536×1000 42.7 and 41.1, 8192×30000 138 and 132 on sixteen warps.
    Logits of 268 MB lose 1 to 3 µs where they leave the L2 first.
    """
    if rows < MANY_ROWS or cols <= SHORTEST_STRETCHED or (cols > 12288 and fitting(cols) == 8192):
        return None
    most = cols if cols % LINE == 0 else cols + LINE - 8
    for num_warps, programs, pieces in PACKED:
        if cdiv(most, 256 * num_warps) <= pieces:
            # leaving packed bytes
            return Packed(num_warps, programs, LEAVING_BYTES[0] <= 2 * rows * cols <= 224 << 20)
    return None


def leaving(rows: int, cols: int, itemsize: int) -> bool:
    return LEAVING_BYTES[0] <= rows * cols * itemsize <= LEAVING_BYTES[1]


def short(rows: int, cols: int, itemsize: int) -> Short:
    """A row inside part of a warp, 64 elements of 16 bits a lane where it is long enough; four warps a program.

    What follows the sums (logarithm, loss) costs a warp as much for four rows as for one: 262144×256 takes 48 µs with a
    row on eight lanes, 54 on sixteen, 74 on all; 65536×1000 47 on sixteen or all.
    """
    wide = lanes(itemsize)
    block = min(power_of_two(cols), clamp(power_of_two(cols) // 8, wide // 4, wide))
    chunks = cdiv(cols, block)
    leaves = leaving(rows, cols, itemsize)
    return Short(4 * wide // block, chunks, block, 4, 1, 32 if chunks >= 8 else 64, leaves)


def backward(cols: int, itemsize: int) -> Backward:
    """Sixteen elements a thread; rows in one piece thirty-two (65536×1000: 67.3 µs, 68.3 with sixteen)."""
    block = min(power_of_two(cols), 4096)
    return Backward(block, clamp(block // (1024 if block <= 1024 else 512), 1, 8))


def backward_rows(cols: int, vector: int, unaligned: bool) -> Rows | None:
    """Several short rows a program, 4096 elements for four warps; None where a row is enough for a program.

    262144×256: one row a program takes 162 µs, a bare copy 70; 131072×1001 130 with its ends apart, 154 with masks,
    160 as one stream.
    """
    if cols > (LONGEST_TILED_SHIFTED if unaligned else LONGEST_TILED):
        return None
    if unaligned and cols // vector * vector > LONGEST_TILED:
        block = power_of_two(cols // vector * vector)
        return Rows(1, block, clamp(block // 1024, 1, 4), True)
    block = power_of_two(cols + vector - 1 if unaligned else cols)
    return Rows(max(1, 4096 // block), block, 4)
