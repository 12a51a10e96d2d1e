"""Launch configurations of the quantizing norms: RMSNorm's, with blocks that hold whole scale groups."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.launcher import access_of, vector_of
from ridgeline.kernels.rms_norm.config import held
from ridgeline.kernels.rows import cdiv, power_of_two

__all__ = ["Tile", "access", "default"]


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows a program holds, in how many pieces of how many columns, and its warps; tiles that are on their way, and
    persistent CTAs per SM over all tiles. No programs given: one a tile."""

    rows: int
    chunks: int
    block: int
    num_warps: int
    num_stages: int = 1
    programs_per_sm: int = 0


def access(chosen: Tile, pointers: int, itemsize: int, rows: int, cols: int, stride: int) -> tuple[int, bool]:
    """Elements of an access, and whether rows are unaligned all the same: where programs walk over single rows,
    of which there is one for every place where rows can start, those read and written at the same place.

    RMSNorm 44396×3385 to fp8 137 µs, 175 one number at a time. Short rows have more ends than they gain: LayerNorm
    138679×738 130 and 121.
    """
    vector, unaligned = access_of(itemsize, pointers, cols, stride)
    walks = chosen.programs_per_sm > 0 and chosen.rows == 1 and cols > ONE_WARP
    if unaligned and walks and rows >= vector and not (stride - cols) % vector:
        return vector, True
    return vector_of(itemsize, pointers, cols, stride), False


LEAST_ROWS, LEAST_LONG = 8192, 1024
"""From here on programs are persistent over rows: each has a dozen and more; over those that one SM holds one of,
from fewer."""


def default(rows: int, cols: int, itemsize: int, group: int, centered: bool = False) -> Tile:
    """As RMSNorm's forward pass; many 16-bit rows are walked over, so that the next ones are on their way and the
    weights stay. Rows too long for registers have no configuration. ``centered``: LayerNorm, with a bias to hold.

    LayerNorm 16384×4096 to fp8: 58 µs, 65 with a program a row, in blocks of 128 60 and 76; 65536×768 to int8 45 and
    52; RMSNorm of 4096 columns 56 both ways, in blocks of 128 57 and 62, 8192×8192 56 and 59. Fewer rows where
    a program has more to wait for: LayerNorm 4096×4096 19.8 (22.5), 4096×8192 in blocks 32.8 (44.4), 8119×4608 38.4
    (42.8), 2048×4096 12.7 (14.5), 2048×8192 in blocks 20.9 (26.9), RMSNorm in blocks 4096×4096 18.3 (20.5), 6000×7168
    41.0 (45.4), but with one scale a row 7321×5120 35.2 (34.3).
    """
    least = LEAST_ROWS // 4 if centered else LEAST_ROWS // 2 if group else LEAST_ROWS
    if itemsize == 2 and rows >= least and 512 <= cols <= 8192 and group <= 256:
        return walking(cols, group, centered)
    if itemsize == 2 and rows >= LEAST_ROWS // 2 and 8192 < cols <= 10240 and group <= 256 and not centered:
        return Tile(1, cdiv(cols, 2048), 2048, 8, 3, 2)  # 7003×9792 in blocks of 64: 59.3 µs, 90.0 with a program a row
    if itemsize == 2 and rows >= LEAST_LONG and 8192 < cols <= (16384 if centered else 24576) and group <= 256:
        return long(cols, centered)
    if itemsize == 4 and rows >= LEAST_ROWS and 1024 < cols <= 1280 and group <= 256 and centered:
        return Tile(1, cdiv(cols, 256), 256, 2, 3, 8)  # 16384×1280 in blocks: 33.3 µs, 42.9 with a program a row
    if itemsize == 4 and rows >= LEAST_ROWS and 4096 < cols <= 6144 and group <= 256 and centered:
        return Tile(1, cdiv(cols, 2048), 2048, 8, 3, 2)  # 13693×6144 in blocks: 110 µs, 123 with a program a row
    return apiece(rows, cols, itemsize, group)


def apiece(rows: int, cols: int, itemsize: int, group: int) -> Tile:
    """A program for every tile of rows."""
    chosen = held(rows, cols, itemsize)
    if group and chosen.block and chosen.block < group:
        block = max(group, power_of_two(min(cols, 256)))
        return Tile(chosen.num_warps, cdiv(cols, block), block, chosen.num_warps)
    return Tile(chosen.rows, chosen.chunks, chosen.block, chosen.num_warps)


def long(cols: int, centered: bool) -> Tile:
    """One CTA per SM, on eight warps where they hold a row, its weights and what LayerNorm adds to them.

    RMSNorm 7926×13696 in blocks of 64 99.9 µs (104 on sixteen warps, 121 with a program a row, which waits for itself),
    LayerNorm 10468×12288 in blocks of 128 130 (138, 153), 10468×16384 156 on sixteen (275), RMSNorm 1053×22016 33.4
    (35.6 on 32, 37.5).
    """
    num_warps = 8 if cols <= (12288 if centered else 14336) else 16
    return Tile(1, cdiv(cols, 256 * num_warps), 256 * num_warps, num_warps, 3 if cols <= 16384 else 2, 1)


ONE_WARP = 1280
"""Columns of rows that have a warp each."""


def walking(cols: int, group: int, centered: bool) -> Tile:
    """One row at a time, two more on their way: 24 to 40 numbers a thread, as many programs as registers allow.

    Rows with scales of blocks are one piece where they are powers of two: LayerNorm 4096 columns 60 µs, 61 in four
    whose scales are stored at once, 65 piece by piece; 8192 66, 70 piece by piece; 5120 76 at once, 86 piece by piece.
    LayerNorm of 8192 columns with one scale a row 59 on four warps, 63 on eight; of 6144 in blocks 45.5 on four, 52 on
    eight (RMSNorm 44.4 and 45.8). Three rows on their way, not two, where LayerNorm has scales of blocks: 8192 columns
    58.8 and 60.9 µs, 6144 44.5 and 45.7, 5120 68.9 and 70.9, but 4096 59.2 and 56.9.

    Rows that leave much of four warps idle have fewer: LayerNorm 49495×1920 in blocks 84 µs on one, 92 on two, 114 on
    four; RMSNorm 85849×2432 160 on two, 186 on four, 238 on one; odd rows of 3385 columns 137 and 147 on two and four.
    LayerNorm 11106×6144 with one scale a row 57 on four warps, 69 on eight, 8200×7168 55.7 and 61.1, in blocks 55.5 and
    61.6, RMSNorm in blocks 51.6 and 52.8. LayerNorm 24000×3584 to int8 on two warps 73.1, on four, an eighth of whose
    places are empty, 79.4; 30000×2880 79.1 and 83.3 (16384×4096 57.2 and 57.6, 16384×3072 in blocks 48.9 and 48.2).
    """
    stages = 4 if centered and group and cols > 4096 else 3
    if cols <= ONE_WARP:  # four warps have places for 2048: 21829×1130 took 68 µs, a copy as large 25
        return Tile(1, cdiv(cols, 256), 256, 1, 3, 16 if cols <= 1024 else 12)
    if cols <= 2048 and centered and not cols % 8:
        return Tile(1, cdiv(cols, 256), 256, 1, 3, 8)
    if cols <= 2560 or (cols % 8 and cols <= 3576 and not centered):
        return Tile(1, cdiv(cols, 512), 512, 2, 3, 6 if centered else 8)
    if centered and (3072 < cols <= 3584 or (2560 < cols < 3072 and not group)) and not cols % 8:
        return Tile(1, cdiv(cols, 512), 512, 2, 3, 4)
    if group and cols in (4096, 8192):
        return Tile(1, 1, cols, cols // 1024, stages, 16384 // cols)
    if cols <= 6144:
        return Tile(1, cdiv(cols, 1024), 1024, 4, stages, 4 if cols <= 4096 else 3)
    if cols <= 7168 or (centered and not group):  # RMSNorm 28494×6816 152 µs, 159 on eight
        return Tile(1, cdiv(cols, 1024), 1024, 4, 3, 2)
    return Tile(1, cdiv(cols, 2048), 2048, 8, 3, 2)
