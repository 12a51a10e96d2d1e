"""Launch configurations of the cross layer: when the product carries its epilogue itself, and with which tiles."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.rows import cdiv, clamp, power_of_two


@dataclass(frozen=True, slots=True)
class Product:
    """Tile of the result and step along the inner dim; no tile: cuBLAS multiplies and one pass follows."""

    bm: int
    bn: int
    bk: int
    num_warps: int
    num_stages: int
    early: bool = False  # what the epilogue reads is asked for before the product begins


@dataclass(frozen=True, slots=True)
class Resident:
    """Chunks of the weight on their way and tiles that are ended at once; no stages: every tile reads its own rows."""

    stages: int
    ends: int = 0


@dataclass(frozen=True, slots=True)
class Pass:
    """Rows and columns of a tile of the backward pass, its warps, and CTAs per SM."""

    rows: int
    block: int
    num_warps: int
    programs_per_sm: int


def product(m: int, n: int, k: int, itemsize: int) -> Product:
    """128×128 tiles on eight warps, 64 of the inner dim three deep; smaller ones where these are less than most of the
    SMs.

    16384×512×512: 29.2 µs, 30.5 on four warps, 33 with tiles of 128×256, 37 of 128×64, 39 for cuBLAS and a pass; what
    the epilogue reads asked for before the product: 36. 4096×1024² 23.6 in 256 tiles, 2048×1024² 22.1 in 512 small
    ones: 128 large ones have an SM each, and were not timed. In float32 with TensorFloat-32 16384×256² 29.6
    (cuBLAS and a pass 34.7), but 16384×1024² 200 (167), and nobody compared its rounding: left to cuBLAS.
    """
    # inner dims up to here are multiplied by our kernel: what its epilogue saves is more than cuBLAS's lead
    if itemsize != 2 or k > 1024 or k < 16:
        return Product(0, 0, 0, 0, 0)
    # of 128×128, which have an SM each
    if cdiv(m, 128) * cdiv(n, 128) < 100:
        return Product(64, 64, 64, 4, 4)
    return Product(128, 128, 64, 8, 3)


SHARED_BYTES = 232448 - 1024
"""Of a program, less its barriers."""

LEAST_ROWS, LONGEST_RESIDENT = 16384, 256
"""Rows stay in shared memory from so many on (1,000 rows of 512 take 22 µs, in tiles 8) and for sums up to so long
(16384×512² takes 29 µs, in tiles 26)."""


def chunks(k: int) -> int:
    """Chunks of 64 of the inner dim, an even number."""
    return 2 * cdiv(k, 128)


def fits(chosen: Resident, k: int) -> bool:
    """Whether a program has room for all that."""
    return (chunks(k) + chosen.stages + 2 * chosen.ends) * (128 * 64 * 2) <= SHARED_BYTES  # chunk bytes


def resident(m: int, n: int, k: int, itemsize: int) -> Resident:
    """For ``a w + x``: 65536×256² 31 µs (38 in tiles), 16384×1024 of 64 terms 26 (30), 16384×3456 of 256 94 (112).

    The layer's forward pass lost by it, 41 µs against 30 for 16384×512²: what its end reads besides waits for room.
    """
    if itemsize != 2 or m < LEAST_ROWS or k > LONGEST_RESIDENT:
        return Resident(0)
    return Resident(6, 1) if n > 512 and k > 128 else Resident(4, 2)


LEAST_FLOPS, LEAST_FORWARD, LEAST_INNER, LEAST_OUTER = 4e9, 2e9, 32, 200
"""Of float32 products that are made of halves on the tensor cores, backward and forward: with the rest of the layer
16384×1024² takes 309 µs (770 by cuBLAS), 65536×256² 174 (272), 16384×256² 57 (70), 16384×1024 of rank 64 184 (206), but
4096×256² 28 (27). Four products backward of 2048×3456 of rank 256 take the host longer than the device: 529 (449).
A weight's gradient of 256×256 by pieces of long sums lost to cuBLAS, of 512×512 to halves (419 and 344, all of it)."""


def is_large(m: int, n: int, k: int, least: float = LEAST_FLOPS) -> bool:
    """Whether a float32 product of [m, k] and [k, n] is worth the launches of halves."""
    return 2.0 * m * n * k >= least and k >= LEAST_INNER


def is_wide(m: int, n: int) -> bool:
    """Whether taking factors apart first pays: each is read for as many products as the other has rows or columns."""
    return m * n >= LEAST_OUTER * (m + n)


def cuts(m: int, n: int, k: int, num_sms: int) -> int:
    """Stretches of a long inner dim that are multiplied side by side, so that all SMs have tiles of 128×128;
    a power of two that divides it into at least 512 each."""
    num = 1
    while num * cdiv(m, 128) * cdiv(n, 128) < 2 * num_sms and k % (2 * num) == 0 and k // (2 * num) >= 512:
        num *= 2
    return num


LEAST_WIDENED, LEAST_WIDENED_BACK, ALIGNED = 1 << 20, 1 << 18, 8
"""Elements from which odd rows of 16 bits are multiplied in longer ones, forward and backward, and what the length of
those is a multiple of. cuBLAS and our own tiles read rows that start inside accesses element by element, and a copy
costs less: 65536×429 174 µs (eager 371), 8192×845 66 (157), 2605×429 25 (35, one launch 30), backward 495 (647). Called
from Python the host's launches took longer than the device's work below 4 million elements and backward below 17
(738×845 61 to 110 µs where one launch takes 26, backward of 19960×429 211 to 483 and 266); repeated they do not. Less
than these are few launches, whatever they read: four forward where one is as fast, eight backward.
"""


def pitch(m: int, n: int, itemsize: int, backward: bool = False) -> int:
    """Columns of the rows in which m rows of n columns are multiplied."""
    least = LEAST_WIDENED_BACK if backward else LEAST_WIDENED
    return cdiv(n, ALIGNED) * ALIGNED if itemsize == 2 and m * n >= least else n


def backward(n: int) -> Pass:
    """Sixteen bytes a lane and few programs that share a column's sum: 78.5 µs with two of eight warps, 82.8 with four.
    Where columns fill their blocks, four of four warps: all of the backward pass of 16384×512 72.4 µs, 75.6, 22230×128
    33.8 and 34.4, but 64950×200 118 and 115."""
    block = clamp(power_of_two(n), 64, 512)
    return Pass(2048 // block, block, 4, 4) if n % block == 0 else Pass(4096 // block, block, 8, 2)


RANKS, LEAST_AGAIN = (16, 32, 64), 4096
"""Ranks for which the backward pass computes the second product again, and the rows that are worth it."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and columns of a tile whose product has a few terms, its warps, and programs that an SM has
    registers for; no rows: another way."""

    rows: int
    columns: int
    num_warps: int
    programs_per_sm: int


NO_TILE = Tile(0, 0, 0, 0)


def is_short(n: int, rank: int, itemsize: int) -> bool:
    """Whether a low-rank layer's second product can be computed again: rows of 16 bits in whole accesses."""
    return itemsize == 2 and rank in RANKS and n % ALIGNED == 0


def again(m: int, n: int, rank: int) -> Tile:
    """Tiles in which the backward pass computes the second product again; none where it reads what was saved.

    All of the backward pass of 52115×1504 of rank 64: 439 µs, 461 where it is read, 451 to 586 in other tiles, 496 on
    eight warps; 38758×2048 of 32 406, 434; 11568×640 of 64 65, 72. One program for all columns of its rows, with the
    product behind: 546 to 635. Rank 128 on eight warps lost, 112 for 20857×512 (95), and is read.
    """
    return Tile(64, 64, 4, 4) if m >= LEAST_AGAIN else NO_TILE


MOST_TERMS, SHORT_TERMS, FEW_ROWS = 256, 128, 2048
"""Of a product that a tile's program reads all at once, of one for which that pays whatever the rows, and rows that are
few for tiles."""


def can_end(n: int, terms: int, itemsize: int) -> bool:
    """Whether tiles that read all their terms at once can end such a layer: rows of 16 bits in whole accesses."""
    return itemsize == 2 and 16 <= terms <= MOST_TERMS and n % ALIGNED == 0 and terms % ALIGNED == 0


def end(m: int, n: int, terms: int, cross: bool) -> Tile:
    """Tiles of a product of few terms, with the rest of the layer (``cross``) or what is added behind it.

    Forward 52115×1504 of rank 64 178 µs (193 in tiles that ask for x0 and x after their product; all of the layer by
    one program 207 to 245), 38758×2048 of 32 168 (199), 20857×512 of 128 36 (39), 3158×2048 of 32 22 (26), 691×1504 of
    128 14 (17) on four warps; the full layer of 22230×128 9.8 (11.7), of 1500×256 5.8 (6.7), but of 13913×256 16 (13)
    and of 64950×200 46 (46). Backward four warps are better: 489, 496 on eight, 423 and 435.
    """
    if terms > SHORT_TERMS:
        return Tile(64, 64, 8, 2) if m <= FEW_ROWS else NO_TILE
    if n <= 128:
        return Tile(64, 128, 8, 2)
    return Tile(64, 64, 8, 4) if cross and m > FEW_ROWS else Tile(64, 64, 4, 4)


@dataclass(frozen=True, slots=True)
class Weights:
    """Columns of a program that adds up gradients of a low-rank layer's weights, rows at a time, its warps, how many of
    these are on their way, and CTAs per SM; no columns: two products."""

    columns: int
    step: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


def weights(m: int, n: int, rank: int) -> Weights:
    """A CTA per SM, whose sums leave it once: more of them are more shares to be added up.

    With the rest of the backward pass 52115×1504 of rank 64 496 µs, 499 as two products, 11568×640 70 and 74; with two
    programs 506 and 76.
    """
    return Weights(128, 64, 8, 4 if rank <= 64 else 3, 1)
