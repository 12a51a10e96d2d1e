"""How many heads a program takes, and how many programs share a sequence's keys."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ridgeline.kernels.paged_attention.config import (
    LEAST_BLOCKS,
    MAX_FED_LINED,
    MAX_LINED,
    MAX_SHARES,
    START_BLOCKS,
    by_borders,
    shares_of,
)
from ridgeline.kernels.rows import cdiv, clamp, power_of_two

MAX_ROWS = 64
"""Heads of a program: their sums over 512 latent dims fill the registers of eight warps."""


@dataclass(frozen=True, slots=True)
class Latent:
    """Heads of a program, keys of a block, shares of a sequence, warps and stages; ``fed`` through the copy engine;
    ``roles``: one group of warps makes scores, two make sums."""

    rows: int
    keys: int
    shares: int
    num_warps: int = 8
    num_stages: int = 5
    early: int = 2
    fed: bool = False
    roles: bool = False


LEAVING_KEYS = 350_000
"""Keys of caches that leave the L2 first, as in paged attention."""

FEW_HEADS = 16
"""Heads up to which they are columns of the products: 64 rows would be mostly padding."""


@dataclass(frozen=True, slots=True)
class Few:
    """Keys of a block, programs, warps, stages, when the joining kernel starts, the fewest blocks of a program; ``fed``
    through the copy engine, where the cache may leave the L2 first; ``borders``: parts are joined by borders between
    programs, not by heads. ``ring``: thirds of blocks that are on their way or worked on, where the copy engine is
    asked for thirds. ``roles`` as in ``Latent``; ``narrow``: so have at most 32 heads, which are columns. Then the line
    is cut by ``keys``, blocks have 64, a copy brings ``rows`` of them, ``queries`` sequences' queries are there or on
    their way, and a sequence's end takes as long as ``ends`` times ``keys``."""

    keys: int
    programs: int
    num_warps: int = 4
    num_stages: int = 3
    early: int = 2
    least: int = LEAST_BLOCKS
    fed: bool = False
    leaves: bool = False
    borders: bool = False
    ring: int = 0
    roles: bool = False
    narrow: bool = False
    rows: int = 64
    queries: int = 2
    ends: int = 0


RING, TILE = 7, 16
"""Thirds of blocks in shared memory where pages are no whole blocks, and keys that such pages are made of."""


def takes_few(batch: int, heads: int, longest: int, fed: bool) -> bool:
    """Whether heads are columns: where they are few. 64 rows of mostly padding take 93 µs against 84 at 304 MB."""
    return heads <= FEW_HEADS and batch <= (MAX_FED_LINED if fed else MAX_LINED)


def columns_fit(heads: int, dim: int, more: int, page: int) -> bool:
    """Whether the copy engine can feed few heads, however few they are."""
    return dim == FED_DIM and more == FED_MORE and page % TILE == 0


def choose_few(
    batch: int, heads: int, longest: int, num_sms: int, fed: bool = False, page: int = 64
) -> Few:  # fmt: skip
    """Joined by borders 64 sequences of 16 heads take 49 µs (57 by heads), 128 62 (78), 100 uneven ones 49 (63).

    Pages of whole blocks are fed two blocks at a time to two groups of warps, which is 1 to 3 µs faster than in thirds;
    others in thirds: 40 sequences of 3,001 keys in pages of 16 take 48 µs, 70 where threads read.
    """
    if fed:
        leaves, borders = batch * longest <= LEAVING_KEYS, by_borders(num_sms, batch, batch * heads)
        ring = RING if page % FED_KEYS else 0
        return Few(FED_KEYS, num_sms, 4, 2, leaves=leaves, fed=True, borders=borders, ring=ring)
    return Few(32, 2 * num_sms)


FED_KEYS, FED_DIM, FED_MORE, FED_HEADS = 64, 512, 64, 16
"""What the kernel that the copy engine feeds is for: blocks of 64 keys of 512 + 64 dims; of 64 heads, some may miss."""

MAX_REGISTERS = 168
"""Of a thread when twelve warps start; the computing groups take 240 from there, the feeding warp gives up its own."""


ROLES = "line"
"""Who has more than 32 heads go by roles, one group of warps for scores and two for sums: nobody (""), those who walk
the "line", or those who take "shares" of each sequence. By the line six of eight shapes gain 6 to 73 % over what was
before it (100 uneven ones of 128 heads to 5,603 keys 389.9 → 225.4 µs), one is level, and one is `is_short`."""

NARROW = True
"""Whether at most 32 heads go by roles: 19 of 20 shapes gain, 1.10 times in the geometric mean. 13 uneven ones of 32
heads take 94.3 µs against 109.1, 44 of 20 heads 108.0 against 131.5, 24 of 32 heads 34.9 against 45.1, 23 of 16 heads
99.2 against 100.4; but 16 of 16 heads of which few are long 53.7 against 53.4."""

NARROW_REGISTERS, NARROW_ROWS, NARROW_LONGEST, NARROW_ENDS = 128, 16, 4000, 1
"""Registers when sixteen warps start; keys that a copy brings where sequences are at most so long, as in paged
attention: most of 64 would be read for nobody at a sequence's end; and blocks that such an end takes as long as: where
nobody counts them 232 of which few are long take 81.7 µs against 78.9, 109 even short ones 43.4 against 41.9."""


def choose_narrow(batch: int, heads: int, longest: int, num_sms: int, page: int) -> Few:
    """A stretch an SM, cut by whole blocks: by halves of blocks all of nine shapes are 0 to 5 % slower. Room
    for a second sequence's queries is a third of a block where heads are 32."""
    columns = FEW_HEADS * cdiv(heads, FEW_HEADS)
    rows = math.gcd(page, NARROW_ROWS if longest <= NARROW_LONGEST else FED_KEYS)
    queries = 2 if columns == FEW_HEADS or 2 * batch >= num_sms else 1
    return Few(
        FED_KEYS, num_sms, 4, 2, least=LEAST_BLOCKS, fed=True, leaves=batch * longest <= LEAVING_KEYS,
        borders=by_borders(num_sms, batch, batch * heads), narrow=True, rows=rows, queries=queries, ends=NARROW_ENDS,
        ring=RING if queries * columns <= 2 * FEW_HEADS else RING - 1,
    )  # fmt: skip


HALVES, MORES, ROLE_REGISTERS = 5, 3, 128
"""Halves of blocks and rotary parts in shared memory where warps have roles, and registers when sixteen warps start."""


def by_roles(heads: int, dim: int, more: int, page: int, way: str) -> bool:
    return way == ROLES and heads > 2 * FEW_HEADS and columns_fit(heads, dim, more, page)


def is_short(heads: int, page: int, longest: int) -> bool:
    """Whether sequences are so short that their ends, which the line meets one by one, are much of the work."""
    # keys of a sequence up to which 33 to 64 heads take shares: 64 of 1,800 keys 65.7 µs by shares, 76.4 by the line;
    # 35 uneven ones to 10,263 keys 135.9 and 104.4
    return 2 * FEW_HEADS < heads <= MAX_ROWS and page % FED_KEYS == 0 and longest <= 4096


def takes_blocks(heads: int, dim: int, more: int, page: int) -> bool:
    if by_roles(heads, dim, more, page, "shares"):
        return True
    return heads >= FED_HEADS and dim == FED_DIM and more == FED_MORE and page % FED_KEYS == 0


def takes_line(heads: int, dim: int, more: int, page: int) -> bool:
    """Whether many heads walk the line: as many in every program as in its neighbors, in pages of whole 16 keys. By
    shares of each sequence, which is what is left to others, the longest one decides (162 of 64 heads and 2,063 keys
    280.5 µs, 34 % of the copy). More than 32 heads in pages of whole blocks are left to them as well: 128 heads reach
    284 to 323 TFLOP/s by the line and 390 by shares (other shapes), 32 heads 78 % of the copy by the line."""
    if by_roles(heads, dim, more, page, "line"):
        return True
    even = heads % cdiv(heads, MAX_ROWS) == 0
    shared = heads > 2 * FEW_HEADS and (page % FED_KEYS == 0 or ROLES == "shares")
    return heads > FEW_HEADS and columns_fit(heads, dim, more, page) and even and not shared


def columns_of(heads: int) -> int:
    """Columns of each of two groups of warps that have half of so many heads."""
    return FEW_HEADS if heads <= 2 * FEW_HEADS else MAX_ROWS // 2


def choose_line(batch: int, heads: int, longest: int, num_sms: int) -> Few:
    """One stretch of keys for the programs that all heads take together, one CTA per SM."""
    programs, leaves = max(1, num_sms // cdiv(heads, MAX_ROWS)), batch * longest <= LEAVING_KEYS
    borders = by_borders(programs, batch, batch * heads)
    roles = ROLES == "line" and heads > 2 * FEW_HEADS
    # Blocks that a sequence's end takes as long as where many heads walk the line by roles: 92 uneven ones of 128 heads
    # take 98.5 µs against 113.9, 35 uneven ones of 64 heads 106.0 against 110.6, 27 of which few are long 65.1 against
    # 69.0, even ones of 64 heads 95.5 and 106.4 against 97.5 and 108.7, 32 even ones of 128 heads 77.3 against 75.2.
    ends = 1 if roles else 0
    return Few(FED_KEYS, programs, 4, 2, leaves=leaves, fed=True, borders=borders, roles=roles, ends=ends)


def choose_blocks(batch: int, heads: int, longest: int, num_sms: int) -> Latent:
    """Shares of whole blocks that end soonest, one CTA per SM."""
    programs, blocks = max(1, batch * cdiv(heads, 64)), cdiv(longest, FED_KEYS)

    def waves(shares: int) -> tuple[int, int]:
        return cdiv(programs * shares, num_sms) * (cdiv(blocks, shares) + START_BLOCKS), shares

    shares = min(range(1, clamp(blocks // 4, 1, MAX_SHARES) + 1), key=waves)
    return Latent(64, FED_KEYS, shares, 4, 2, 0, True, ROLES == "shares" and heads > 2 * FEW_HEADS)


def choose(batch: int, heads: int, longest: int, num_sms: int) -> Latent:
    """Few heads: two programs of four warps per SM (2.18 TB/s at 16 heads, 2.00 in eight warps)."""
    rows = max(16, min(MAX_ROWS, power_of_two(heads)))
    sequences = batch * cdiv(heads, rows)
    if rows <= 16:
        return Latent(rows, 32, shares_of(sequences, longest, 32, 2 * num_sms), 4, 3)
    return Latent(rows, 32, shares_of(sequences, longest, 32, num_sms))
