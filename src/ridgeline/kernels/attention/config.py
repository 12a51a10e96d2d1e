"""Launch configurations of attention by shape; figures are from one H200 (lab/notes/attention.md)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from operator import add

from ridgeline.kernels.rows import cdiv, clamp

MAX_REGISTERS = 168
"""Of a thread when twelve warps start; the computing groups take 240 from there, the feeding warp gives up its own."""

L2_FOR_KEYS_BYTES = 36_000_000
"""Keys and values that stay in a 50 MB L2 beside the queries that pass through it."""


TILE_BLOCKS, WHOLE_BLOCKS, PART_BLOCKS = 1, 3, 8
"""What starting and ending a tile takes, in blocks; dK and dV written rounded, or in float32 and read once more."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Rows and keys of a block, stages of the ring between the feeding warp and the others."""

    rows: int
    keys: int
    stages: int
    query_stages: int = 1


def padded(head_dim: int) -> int:
    """The head dim a kernel works on; columns past the real one are read as zeros and never written."""
    return 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256


def columns(dim: int, value_dim: int) -> tuple[int, int]:
    """A head's columns as the forward pass multiplies them: a power of two, and 64 more for queries of 136 to 192."""
    return (128, 64) if 128 < dim <= 192 and value_dim <= 192 else (padded(dim), 0)


def value_columns(dim: int, value_dim: int) -> tuple[int, int]:
    """The same for values."""
    return (128, 64) if 128 < value_dim <= 192 and columns(dim, value_dim)[1] else (padded(value_dim), 0)


def forward(dim: int, value_dim: int) -> Attention:
    """Two stages of 128 keys, and the next tile's queries; where a wide head leaves no room, without them or of 64."""
    if value_columns(dim, value_dim)[1]:
        return Attention(128, 64, 3)
    if columns(dim, value_dim)[1]:
        return Attention(128, 128, 2)
    return Attention(128, 64, 2) if is_wide(dim, value_dim) else Attention(128, 128, 2, 2)


def queries(dim: int, value_dim: int, band: int, capped: bool) -> Attention:
    """dQ's blocks: as many keys as registers and shared memory hold beside the scores and their gradient."""
    if dim > 128 and value_dim > 128:
        return Attention(128, 32, 2)
    return Attention(128, 64 if max(dim, value_dim) > 128 or band == 2 or capped else 128, 2)


def keys(dim: int, value_dim: int, capped: bool) -> Attention:
    """dK and dV fill the registers: blocks of 64 query rows are what is left, 32 where a slope has to be kept too.

    In wide heads the two groups share 64 keys, one making dK and the other dV.
    """
    return Attention(32 if capped else 64, 64 if is_wide(dim, value_dim) else 128, 2)


FUSED = Attention(64, 128, 2)


def fits_fused(dim: int, value_dim: int, capped: bool, varlen: bool) -> bool:
    """Whether the kernel that adds dQ to memory was written for this: heads of 72 to 128, one length, no cap."""
    return padded(dim) == padded(value_dim) == 128 and dim == value_dim and not capped and not varlen


def prefers_fused(band: int, rows: int) -> bool:
    """Whether five products with sums through memory are faster than seven without.

    Where every row sees every key: 537 TFLOP/s against 505 at 4,096 rows, 518 against 490 at 2,048, 186 against 217 at
    256; under a causal mask 457 against 475 at 4,096.
    """
    return band == 0 and rows >= 1024  # least fused rows


def is_wide(dim: int, value_dim: int) -> bool:
    return max(dim, value_dim) > 128


def heads_together(heads: int, ratio: int, keys: int, head_dim: int, lengths: tuple[int, ...], num_sms: int) -> int:
    """Heads whose tiles go side by side; ``lengths`` are those of one head's tiles in the order they are taken.

    Where tiles differ in length, few enough that their keys and values are in the L2 together, and so many that all
    programs end together; where they do not, no more than fill the device, so that a head's keys are read from memory
    once (512 rows of 512 heads: 4 times otherwise).
    """
    most = clamp(L2_FOR_KEYS_BYTES // max(1, keys * head_dim * 4) * ratio, min(ratio, heads), heads)
    if len(set(lengths)) > 1:
        return side_by_side(lengths, heads, min(ratio, heads), most, num_sms)
    return min(most, clamp(cdiv(cdiv(num_sms, max(1, len(lengths))), ratio) * ratio, 1, heads))


def parts_together(parts: int, lengths: tuple[int, ...], num_sms: int) -> int:
    """Groups of heads whose blocks of keys go side by side: so that all programs end together, or fill the device."""
    if len(set(lengths)) > 1:
        return side_by_side(lengths, parts, 1, parts, num_sms)
    return clamp(cdiv(num_sms, max(1, len(lengths))), 1, max(1, parts))


@lru_cache(maxsize=256)
def side_by_side(lengths: tuple[int, ...], heads: int, step: int, most: int, num_sms: int) -> int:
    """The fewest heads, a multiple of ``step``, whose order keeps programs busy within half a percent of the best.

    By counting: 4 × 32 heads of 2,048 causal rows end together to 0.996 with 33 heads and to 0.91 with 34.
    """
    # Orders of tiles that are counted through before one is chosen, and tiles in all of them: some 10 ms at most.
    orders = clamp(100_000 // (heads * len(lengths)), 1, 48)
    every = step * max(1, cdiv(most // step, orders))
    tried = {group: busy_frac(lengths, heads, group, num_sms) for group in (*range(every, most, every), most)}
    best = max(tried.values())
    return min(group for group, busy in tried.items() if busy > best - 0.005)


def busy_frac(lengths: tuple[int, ...], heads: int, group: int, num_sms: int) -> float:
    """Share of the time that programs work when each goes back and forth over tiles in this order, as kernels do."""
    total = heads * (sum(lengths) + len(lengths) * TILE_BLOCKS)
    return total / num_sms / max(1, longest_load(lengths, heads, group, num_sms, TILE_BLOCKS))


def longest_load(lengths: tuple[int, ...], heads: int, group: int, num_sms: int, each: int) -> int:
    """Blocks of the program that ends last; ``each`` is what a tile costs besides its blocks."""
    costs: list[int] = []
    for start in range(0, heads, group):
        width = min(group, heads - start)
        costs += [length + each for length in lengths for _ in range(width)]
    costs += [0] * (-len(costs) % num_sms)
    loads = [0] * num_sms
    for turn in range(len(costs) // num_sms):
        row = costs[turn * num_sms : (turn + 1) * num_sms]
        loads = list(map(add, loads, reversed(row) if turn % 2 else row))
    return max(loads)


def row_lengths(rows: int, keys: int, lo: int, hi: int, of: Attention) -> tuple[int, ...]:
    """Blocks of keys that each block of query rows sees, from the last rows to the first."""
    stops = [cdiv(max(min(start + of.rows + hi, keys), 1), of.keys) for start in range(0, rows, of.rows)]
    firsts = [max(start + lo, 0) // of.keys for start in range(0, rows, of.rows)]
    return tuple(max(1, stop - first) for first, stop in zip(reversed(firsts), reversed(stops), strict=True))


def key_lengths(rows: int, keys: int, lo: int, hi: int, of: Attention) -> tuple[int, ...]:
    """Blocks of query rows that see each block of keys."""
    return tuple(
        max(0, cdiv(min(rows, max(start + of.keys - lo, 0)), of.rows) - max(start - hi, 0) // of.rows)
        for start in range(0, keys, of.keys)
    )


def key_split(lengths: tuple[int, ...], groups: int, ratio: int, num_sms: int) -> int:
    """How many programs share the heads of a block of keys: what ends first, sums over their results included.

    By counting: 8 × 8 heads of 4,096 causal rows end together without; split by 4, results would be written and read
    in float32 four times, a tenth of the time.
    """

    def end(split: int) -> int:
        mine = tuple(length * (ratio // split) for length in lengths)
        return longest_load(mine, groups * split, groups * split, num_sms, PART_BLOCKS if split > 1 else WHOLE_BLOCKS)

    return min((n for n in range(1, ratio + 1) if ratio % n == 0), key=end)


def listed_together(keys: int, key_heads: int, columns: int, batch: int) -> int:
    """Heads of keys of sequences of different length whose tiles go side by side: as many as the L2 has room for."""
    heads = batch * key_heads
    return clamp(int(heads * L2_FOR_KEYS_BYTES / max(1, 2 * keys * key_heads * columns)), 1, heads)


def listed_split(
    longest: tuple[int, ...], others: tuple[int, ...], num_others: int, key_heads: int, ratio: int, num_sms: int
) -> int:
    """The same for a list of tiles, of sequences of which only the longest is known: the others share what is left."""

    def end(split: int) -> float:
        each = PART_BLOCKS if split > 1 else WHOLE_BLOCKS
        costs = [length * (ratio // split) + each for length in longest] * (key_heads * split)
        costs += [length * (ratio // split) + each for length in others] * (key_heads * split * num_others)
        return longest_listed(costs, num_sms)

    return min((n for n in range(1, ratio + 1) if ratio % n == 0), key=end)


def longest_listed(costs: list[int], num_sms: int) -> int:
    """Blocks of the program that ends last where the longest tiles come first."""
    ordered = sorted(costs, reverse=True)
    ordered += [0] * (-len(ordered) % num_sms)
    loads = [0] * num_sms
    for turn in range(len(ordered) // num_sms):
        row = ordered[turn * num_sms : (turn + 1) * num_sms]
        loads = list(map(add, loads, reversed(row) if turn % 2 else row))
    return max(loads)


def programs(tiles: int, num_sms: int) -> int:
    """Persistent programs, one an SM: their registers leave no room for a second."""
    return max(1, min(tiles, num_sms))


def num_tiles(rows: int, heads: int, block: int) -> int:
    return cdiv(rows, block) * heads
