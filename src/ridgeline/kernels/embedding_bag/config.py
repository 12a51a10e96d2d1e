"""Launch configurations of embedding bags by row length and mean bag length."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.rows import clamp, power_of_two


@dataclass(frozen=True, slots=True)
class Forward:
    """Bags a program sums, rows of each on their way, its warps, whether these meet at the end alone, and the columns
    that it sums, where these are not all."""

    bags: int
    ahead: int
    num_warps: int
    late: bool = False
    columns: int = 0


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


FEW_BAGS, LEAST_LENGTH, LONG_BAG = 64 * 132, 4, 64
"""Bags up to which each has a program, the mean length that is worth one, and the one from which more rows are on their
way. 53,739 bags of 20 rows of 32 columns take 44 µs in as many programs, 34 in programs of 32 bags."""


SHORT_BAG, WIDE = 8, 128
"""Rows of a bag that are on their way at once, and columns from which several programs share a bag's."""


def apart(dim: int, itemsize: int, mean_length: float) -> Forward:
    """A program a bag, or a part of its columns: one or two warps with up to 32 sums a thread, since what meets across
    warps costs more than turns do, and few bags leave room for more programs.

    Columns shared out: 381 bags of 50 rows of 192 columns 8.6 µs, 14.8 by a program each (``F.embedding_bag`` 18); 370
    of 20 of 384 7.9, 11.0 (14); 426 of 8 of 384 7.1, 10.0 (10); 722 of 20 of 192 9.5, 14.8 (15); 256 of 100 of 512
    16.4, 22.9 (54); of four-byte numbers 612 of 50 of 192 13.3, 24.6 (29), 4100 of 8 of 128 12.1, 22.6 (21), 2677 of 20
    of 256 25.2, 27.0 (41), 1451 of 50 of 256 34.4, 34.1 (63). All of a long bag's rows at once on more warps lost.
    2834 of 50 of 32 9.6 with 16 rows on one warp, 12.9 with 64 on two, 38 in programs of 16 bags (23); 3100 of 20 of
    64 10.3 with eight, 11.9 with sixteen (17). Short bags of few columns share a warp: 5179 of 8 of 16 6.2, 7.6 alone
    (10).
    """
    wide = power_of_two(dim)
    if mean_length <= SHORT_BAG and wide <= 32:
        return Forward(64 // wide, SHORT_BAG, 1)
    if dim >= WIDE:
        return shared_out(dim, itemsize, mean_length)
    if mean_length >= LONG_BAG:
        ahead = clamp(16384 // wide, 1, 32)
        return Forward(1, ahead, clamp(ahead * wide // 1024, 1, 8), True)
    ahead = min(clamp(power_of_two(int(1.5 * mean_length)), 4, 16), max(1, 4096 // wide))
    if itemsize == 4 and mean_length > SHORT_BAG and wide == 64:
        ahead = 8
    num_warps = clamp(ahead * wide // 1024, 1, 4)
    return Forward(1, ahead, num_warps, num_warps == 1 or mean_length > ahead)


def shared_out(dim: int, itemsize: int, mean_length: float) -> Forward:
    """Columns by 128, or by 64 where those end inside; of four-byte numbers half as many rows where bags are short."""
    columns = WIDE if dim % WIDE == 0 and mean_length < LONG_BAG else WIDE // 2
    if mean_length <= SHORT_BAG:
        return Forward(1, SHORT_BAG, 1, False, columns)
    rows = 2048 // columns
    return Forward(1, rows // 2 if itemsize == 4 and mean_length <= 24 else rows, 2, True, columns)


def forward(dim: int, itemsize: int, mean_length: float, num_bags: int = 1 << 30) -> Forward:
    """A program a bag where bags are few, and several bags a program where they are many or short."""
    if num_bags <= FEW_BAGS and mean_length >= LEAST_LENGTH:
        return apart(dim, itemsize, mean_length)
    return many(dim, itemsize, mean_length)


def many(dim: int, itemsize: int, mean_length: float) -> Forward:
    """Eight rows on their way for each warp: of one bag where bags are long, of several where they are short."""
    lanes_bytes = 32 * 16
    per_warp = clamp(lanes_bytes // (power_of_two(dim) * itemsize), 1, 32)
    ahead = clamp(power_of_two(int(mean_length)), 1, 8)
    bags = 4 * per_warp * max(1, (4 if itemsize == 4 else 2) // ahead)
    return Forward(bags, ahead, 4)


def update(dim: int, optimizer: int, num_indices: int) -> Update:
    """One warp to 512 columns: its sums need no barrier; fewer rows on their way where the state is large.

    Chunks are short where there are few indices: 32 warps for every SM come first. A million indices of 128
    columns with row-wise Adagrad: 648 µs with 4 on their way, 643 with 2, 796 with 8; 647 with chunks of 32. Gradients
    that are only written have 8 of up to 128 columns, for which as many warps have registers.
    """
    num_warps = clamp(power_of_two(dim) // 512, 1, 4)
    length = clamp(power_of_two(num_indices // (32 * 132)), 8, 64)
    ahead = 8 if optimizer == 0 and dim <= 128 else 2 if optimizer == 3 else 4
    return Update(length, ahead, num_warps)


def merged(dim: int) -> int:
    """Parts of a row's sum that are added at once: a row that half of all indices name has hundreds, one program adds
    them, and what it waits for is their latency."""
    return clamp(8192 // power_of_two(dim), 8, 64)


def order(num_indices: int, num_rows: int) -> Order:
    """Pairs while there are few: twice as many take four times as long. Digits of at most eight bits after them, in
    blocks of 512; PyTorch's sort of many.

    All of a gradient, one table: 11k indices of 474k rows 68 µs by pairs, 86 by digits in blocks of 1024, 116 by
    PyTorch's sort; 14k of 72k rows 53 by digits, 75 in blocks of 1024, 77 by pairs, 83 by the sort; 62k of 4k rows 68
    where every block counts all, 54 where a launch counts for them; 348k of 4k 89 (91 with eight values a program of
    that launch, 101 in blocks of 1024, 126 to 223 by the sort), 142k of 26k 60 (160 to 239), 1.07 million of 96k 270
    (246 to 312), 1.3 million of 2k 231 (292 to 463). On the device alone the sort of a million takes 82 of 223: it is
    a dozen launches that the host has to make.
    """
    # Indices that are put in order by pairs, and blocks that each count all the others.
    if num_indices <= 8192:
        return Order(32, 0, 256, 4)
    bits = num_rows.bit_length()
    passes = -(-bits // 8)
    # Indices that are put in order by digits, of two and of three passes.
    if passes > 3 or num_indices > ((1 << 21) if passes == 3 else (1 << 22)):
        return Order(0, 0, 0, 0)
    return Order(512, max(5, -(-bits // passes)), 16, 4, 2 if num_indices > 64 * 512 else 0)
