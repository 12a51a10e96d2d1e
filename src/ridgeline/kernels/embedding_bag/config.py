"""Launch configurations of embedding bags by row length and mean bag length."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.rows import clamp, power_of_two


@dataclass(frozen=True, slots=True)
class Forward:
    """Bags a program sums, rows of each on their way, its warps, and whether these meet at the end alone."""

    bags: int
    ahead: int
    num_warps: int
    late: bool = False


@dataclass(frozen=True, slots=True)
class Update:
    """Sorted indices of a chunk, how many of their gradients are on their way, and warps that share a row."""

    length: int
    ahead: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class Order:
    """How rows are put in order: all pairs counted (no bits), a digit of so many bits at a time, or PyTorch's sort
    (no block). ``wide``: keys, or counts of blocks, that a program reads at once. ``share``: values of a digit that a
    program of a launch between counts in the blocks before each; without one every block counts by itself."""

    block: int
    bits: int
    wide: int
    num_warps: int
    share: int = 0


FEW_PROGRAMS, MOST_HELD = 132, 4096
"""Programs for which bags are too few to share one, and elements that a program of four warps holds at once."""
LONG_BAG, WIDE_ROW = 16, 512


def few(dim: int, mean_length: float, num_bags: int) -> Forward:
    """Few bags: a program has as few as there are enough of them for, and their rows are on their way together.

    465 bags of 50 rows 10.1 µs, 30 with eight bags a program (``F.embedding_bag`` 24), 426 of eight rows of 384
    columns 11.9, 17.6 with four (10.8). Short rows of short bags lose: 532 of 128 columns 9.0 (7.0), 3295 of 48 12.1
    (8.2).
    """
    wide = power_of_two(dim)
    bags = power_of_two(num_bags // (2 * FEW_PROGRAMS) + 1) // 2 or 1
    ahead = clamp(power_of_two(int(1.5 * mean_length)), 1, max(1, MOST_HELD // (wide * bags)))
    return Forward(bags, ahead, 4)


def forward(dim: int, itemsize: int, mean_length: float, num_bags: int = 1 << 30) -> Forward:
    """Eight rows on their way for each warp: of one bag where bags are long, of several where they are short."""
    found = many(dim, itemsize, mean_length)
    worth = mean_length > LONG_BAG or power_of_two(dim) >= WIDE_ROW
    return few(dim, mean_length, num_bags) if worth and num_bags < FEW_PROGRAMS * found.bags else found


def many(dim: int, itemsize: int, mean_length: float) -> Forward:
    """Bags enough for every multiprocessor."""
    lanes_bytes = 32 * 16
    per_warp = clamp(lanes_bytes // (power_of_two(dim) * itemsize), 1, 32)
    ahead = clamp(power_of_two(int(mean_length)), 1, 8)
    bags = 4 * per_warp * max(1, (4 if itemsize == 4 else 2) // ahead)
    return Forward(bags, ahead, 4)


def update(dim: int, optimizer: int, num_indices: int) -> Update:
    """One warp to 512 columns: its sums need no barrier; fewer rows on their way where the state is large.

    Chunks are short where there are few indices: 32 warps for every multiprocessor come first. A million indices of 128
    columns with row-wise Adagrad: 648 µs with 4 on their way, 643 with 2, 796 with 8; 647 with chunks of 32. Gradients
    that are only written have 8 of up to 128 columns, for which as many warps have registers.
    """
    num_warps = clamp(power_of_two(dim) // 512, 1, 4)
    length = clamp(power_of_two(num_indices // (32 * 132)), 8, 64)
    ahead = 8 if optimizer == 0 and dim <= 128 else 2 if optimizer == 3 else 4
    return Update(length, ahead, num_warps)


MOST_PAIRED, MOST_BY_DIGITS, MOST_BLOCKS = 8192, 1 << 22, 64
"""Indices that are put in order by pairs and by digits, and blocks that each count all the others."""


def order(num_indices: int, num_rows: int) -> Order:
    """Pairs while there are few: twice as many take four times as long. Digits of at most eight bits after them, in
    blocks of 512; PyTorch's sort of many.

    All of a gradient, one table: 11k indices of 474k rows 68 µs by pairs, 86 by digits in blocks of 1024, 116 by
    PyTorch's sort; 14k of 72k rows 53 by digits, 75 in blocks of 1024, 77 by pairs, 83 by the sort; 21k of 166k 64, 86,
    138 and 98; 62k of 4k 75 and 82, 97 by the sort; 524k 370 to 660, 160 by the sort.
    """
    if num_indices <= MOST_PAIRED:
        return Order(32, 0, 256, 4)
    if num_indices > MOST_BY_DIGITS or num_rows >= 1 << 24:
        return Order(0, 0, 0, 0)
    bits = num_rows.bit_length()
    passes = -(-bits // 8)
    return Order(512, max(5, -(-bits // passes)), 16, 4, 8 if num_indices > MOST_BLOCKS * 512 else 0)
