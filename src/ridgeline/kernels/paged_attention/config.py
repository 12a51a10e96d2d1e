"""How many programs share the keys of all sequences, and how many keys they take at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ridgeline.kernels.rows import cdiv, clamp, power_of_two

BLOCK_BYTES = 32768
"""Of keys and values that are asked for at once; a program holds three blocks, two of them on their way."""

START_BLOCKS = 2
"""What a program's first lookups and its last sums take, in blocks of keys."""

MAX_SHARES = 128
LINED = (32, 128, 1024)
MAX_LINED, MAX_FED_LINED = 128, LINED[-1]
"""Sequences whose lengths every program adds up, where threads and where the copy engine reads; of more, each key head
of each is a program of its own. 300 uneven sequences (197 MB) in one line 79 µs against 87, 256 of 500 keys 149 against
153."""

JOINED = (8, 32, 64)
COLUMNS, MOST_COLUMNS = 16, 64
"""Heads that share keys, as columns of the products: sixteen of them, or 32, or at most 64."""

LEAST_DIM, VECTOR = 40, 8
"""Columns of a head below which half of what is laid out would be zeros (32: 62.7 µs against 57.8 where threads compute
too), and those that a thread copies at once."""

SHORT_ROWS, ROWS_LONGEST = 16, 4000
"""Keys that one copy brings where sequences are at most so long: 64 of a large page would be read for a sequence's last
key too. Of few long sequences among many short 147 take 44.0 µs against 45.9, 47 59.7 against 64.3, 42 of heads of 192
66.8 against 71.9."""

FED_KEYS, FED_PROGRAMS, FED_BYTES = 64, 2, 6 << 15
"""Keys of a block, CTAs per SM and bytes of their blocks where the copy engine feeds them: two programs
of three blocks take 27, 42, 73 and 137 µs at 67, 134, 269 and 545 MB, one of six blocks 28, 46, 78 and 149: a block is
worked on for a microsecond, which is as long as it takes to read."""

SHORT_DIM, SHORT_LONGEST, SHORT_EACH = 128, 640, 3
"""Many short sequences, at least three an SM (each key head of each): programs take them whole, as they are
asked for. 300 uneven ones of at most 300 keys take 56.9 µs against 61.0 where the line is cut, 256 of 500 128.0 against
138.3, 128 of 400 57.6 against 59.1, 290 of which a few are long 29.6 against 33.1; but 100 of at most 1,200 keys 68.0
against 66.2, and 147 of at most 1,877 56.6 against 51.2. Of heads of 64, whose blocks are of 128 keys, 213 of at most
678 keys and 8 heads 46.3 against 53.7, 120 of 500 39.3 against 43.9."""

ENDS = 1
"""Blocks that a sequence's end takes as long as (sums, division, writing). Where the line is cut by blocks alone, 147
sequences of which a few are long take 51.2 µs against 45.0, 47 66.6 against 64.0, 24 uneven ones 44.0 against 43.6;
even ones as long. Two blocks are no better."""

NARROW_DIM, NARROW_KEYS, NARROW_LONGEST = 64, 128, 1024
"""Narrow heads take more keys at once, so that blocks are as large: 43.9 against 46.0 µs at 136 MB. Where sequences are
short, most of the last block would be nobody's."""


FED_REGISTERS = 104
"""Of a thread when eight warps start; the computing group takes more from there, the feeding warp gives up its own."""

LONE_REGISTERS = 128
"""The same where no joining kernel has to fit beside two programs."""

WIDE_REGISTERS = 168
"""The same where an SM has one program."""

LEAST_BLOCKS = 2
"""Blocks below which a stretch is not worth a program and its part in the joining."""


@dataclass(frozen=True, slots=True)
class Paged:
    """Keys of a block, programs (0: one a sequence and key head), warps, stages, when the joining kernel starts, the
    fewest blocks of a program. ``fed``: through the copy engine, where the cache may leave the L2 first and threads
    start with so many registers. ``borders``: parts are joined by borders between programs, not by heads; ``inside``:
    by the last program of a sequence, without a kernel of their own. ``queries``: sequences whose queries are there or
    on their way: with three of them 300 uneven sequences of at most 300 keys take 66.4 µs (70.9 with two). ``skips``:
    pages without keys are not copied. ``even``: where the longest sequence has at most so many quarters of what all
    have on average, one key head of each is taken by ``together`` programs, a cluster. ``units``: programs take one
    whole after the other, whichever nobody has taken. ``ends``: blocks that a sequence's end takes as long as.
    ``rows``: keys that one copy brings, at most. ``gathered``: threads feed, which know the page of every key.
    ``tall``: heads of a key are so many rows of the products, 64 or 128; 0 where they are columns. ``beside``: as many
    neighbors as there are key heads take the same keys at a time, a head each."""

    keys: int
    programs: int
    num_warps: int = 4
    num_stages: int = 3
    early: int = 2
    least: int = LEAST_BLOCKS
    fed: bool = False
    leaves: bool = False
    max_registers: int = 0
    borders: bool = False
    inside: bool = False
    queries: int = 3
    skips: bool = False
    together: int = 1
    even: int = 0
    units: bool = False
    ends: int = 0
    rows: int = 64
    gathered: bool = False
    tall: int = 0
    beside: bool = False


def takes_columns(batch: int, ratio: int, head_dim: int, page: int) -> bool:
    """Whether the kernel that the copy engine feeds is written for these."""
    widths = head_dim % VECTOR == 0 and head_dim >= LEAST_DIM
    heads = ratio <= most_columns(head_dim, page) or tall_rows(ratio, head_dim) > 0
    return batch <= MAX_FED_LINED and heads and widths and page > 0


def takes_gathered(head_dim: int, page: int) -> bool:
    """Whether threads feed: where heads are no whole stripes or pages no runs of 16 keys. In pages of 8 keys they take
    120.9 µs, the copy engine 123.9; heads of 80 and 96 take the copy engine as long as threads that also compute."""
    return head_dim % NARROW_DIM > 0 or page % SHORT_ROWS > 0


def padded(head_dim: int) -> int:
    """Columns of a head in shared memory, whole stripes of 64; what is beyond is zero and not read."""
    return cdiv(head_dim, NARROW_DIM) * NARROW_DIM


def most_columns(head_dim: int, page: int = 16) -> int:
    """Heads that share keys whose sums fit into the registers of four warps; threads that feed leave fewer of them."""
    return MOST_COLUMNS if head_dim <= 128 and not takes_gathered(head_dim, page) else 2 * COLUMNS


TALL_FROM, TALL_MOST, GROUP_ROWS = 33, 128, 64
"""Heads that share keys, from and to, that are rows of the products, and how many a group of four warps has. 71 of 128
columns take 60.8 µs as rows and 71.7 by threads that also compute, 64 38.4 and as columns 45.8, 64 of 256 columns 46.2
and by threads 68.2; 24 and 32 as long as columns do (94.4 and 95.1, 86.2 and 86.5, 119.4 and 120.0)."""


def tall_rows(ratio: int, head_dim: int) -> int:
    """Rows for so many heads that share keys, one or two groups of warps; 0 where they are columns, or too many."""
    if not TALL_FROM <= ratio <= TALL_MOST or padded(head_dim) == 192:
        return 0
    return GROUP_ROWS * cdiv(ratio, GROUP_ROWS)


def choose_tall(found: Paged, rows: int, wide: int, num_sms: int) -> Paged:
    """The same with heads as rows: two CTAs per SM where their sums fit into its registers, and as many
    blocks as fit into its shared memory."""
    num = FED_PROGRAMS if rows == GROUP_ROWS and wide <= SHORT_DIM else 1
    # Shared memory of an SM, and what a program takes of it besides its blocks and queries.
    left = (228 << 10) // num - 1536 - 2 * rows * wide
    return replace(
        found, programs=min(found.programs, num * num_sms), num_stages=left // (4 * found.keys * wide), queries=1,
        inside=False, tall=rows, max_registers=LONE_REGISTERS if num > 1 else WIDE_REGISTERS,
    )  # fmt: skip


SECTOR_BYTES, BESIDE_LONGEST = 64, ROWS_LONGEST
"""What memory answers with at least, and keys of a sequence beyond which neighbors take key heads of the same keys
where a head is no whole number of it: 44.7 against 48.2 µs (heads of 112, 124 MB), 106.6 against 110.8, 92.7 against
97.2 and 290.8 against 303.8 (of 80, 297 to 960 MB), 96.0 against 97.7 (112, two key heads). With at most 3,900 keys
38.0 against 37.7, with 280 77.0 against 73.2: there more parts have to be joined."""


def takes_beside(key_heads: int, longest: int, head_dim: int, programs: int, ratio: int) -> bool:
    """Whether programs whose threads copy their keys take key heads side by side."""
    # Of all programs, what neighbors that are no whole rows may leave without work; and heads that are joined at once.
    split, heads = 2 * head_dim % SECTOR_BYTES > 0, key_heads > 1 and key_heads * ratio <= 512
    return split and heads and longest > BESIDE_LONGEST and programs % key_heads <= 0.1 * programs


def side_by_side(found: Paged, batch: int, key_heads: int, ratio: int) -> Paged:
    """The same where neighbors take key heads of the same keys: as many stretches as there are whole rows of them."""
    stretches = max(1, found.programs // key_heads)
    borders = by_borders(stretches, batch, batch * key_heads * ratio)
    return replace(
        found, programs=stretches * key_heads, inside=False, borders=borders, beside=True,
        max_registers=max(found.max_registers, LONE_REGISTERS),
    )  # fmt: skip


def columns_of(ratio: int) -> int:
    """Columns for so many heads that share keys."""
    return max(COLUMNS, power_of_two(ratio))


def takes_short(sequences: int, longest: int, head_dim: int, num_sms: int, ratio: int) -> bool:
    """Whether sequences (each key head of each) are short, and enough of them to be taken whole."""
    many = sequences >= SHORT_EACH * num_sms and ratio <= COLUMNS
    if head_dim == NARROW_DIM:
        return many and longest < NARROW_LONGEST
    return head_dim == SHORT_DIM and longest <= SHORT_LONGEST and many and ratio > 1


def choose(
    batch: int,
    key_heads: int,
    longest: int,
    head_dim: int,
    num_sms: int,
    itemsize: int = 2,
    ratio: int = 1,
    fed: bool = False,
    together: bool = True,
    page: int = 16,
) -> Paged:
    """``together``: clusters may be asked for, which have to be on the device all at once."""
    keys = clamp(BLOCK_BYTES // (2 * max(16, power_of_two(head_dim)) * itemsize), 32, 128)
    programs = 0 if batch > MAX_LINED else 2 * num_sms
    if fed:
        wide = padded(head_dim)
        gathered, short = takes_gathered(head_dim, page), takes_short(batch * key_heads, longest, wide, num_sms, ratio)
        tall = tall_rows(ratio, head_dim)
        narrow = wide == NARROW_DIM and (longest >= NARROW_LONGEST or short) and (ratio <= COLUMNS or tall > 0)
        keys = NARROW_KEYS if narrow else FED_KEYS
        blocks = FED_BYTES // (2 * keys * wide * itemsize)
        # Caches up to this leave the L2 first. Behind a flush that leaves dirty lines 30 against 33 µs at 67 MB, 47
        # against 51 at 134, 80 against 82 at 269, but 151 against 147 at 545; behind one that does not one per cent
        # better everywhere.
        leaves = 2 * batch * key_heads * longest * head_dim * itemsize <= 400_000_000
        if short and not gathered:
            return Paged(
                keys, FED_PROGRAMS * num_sms, 4, blocks // FED_PROGRAMS, fed=True, leaves=leaves, inside=True,
                skips=True, units=True, max_registers=LONE_REGISTERS, rows=SHORT_ROWS,
            )  # fmt: skip
        num = FED_PROGRAMS if blocks >= 2 * FED_PROGRAMS else 1
        programs = min(num * num_sms, max(1, batch * key_heads * cdiv(longest, keys) // LEAST_BLOCKS))
        borders = by_borders(programs, batch * key_heads, batch * key_heads * ratio)
        inside = by_the_last(programs, batch * key_heads, ratio, programs == num * num_sms)
        found = Paged(
            keys, programs, 4, blocks // num, fed=True, leaves=leaves, borders=borders, inside=inside,
            max_registers=fed_registers(num, wide, ratio, inside, gathered), ends=ENDS, gathered=gathered,
            queries=2 if wide == 192 else 3, rows=SHORT_ROWS if longest <= ROWS_LONGEST else FED_KEYS,
        )  # fmt: skip
        if tall:
            chosen = choose_tall(found, tall, wide, num_sms)
            return replace(chosen, borders=by_borders(chosen.programs, batch * key_heads, batch * key_heads * ratio))
        if gathered and takes_beside(key_heads, longest, head_dim, programs, ratio):
            found = side_by_side(found, batch, key_heads, ratio)
        if ratio > COLUMNS:  # queries and probabilities take the room of two queries' more, then of a block
            return replace(found, queries=1, num_stages=found.num_stages - (columns_of(ratio) > 2 * COLUMNS))
        size = programs_together(batch * key_heads, head_dim, ratio, num_sms) if together and not gathered else 0
        if size and cdiv(longest, keys) >= LEAST_TOGETHER * size:
            return joined_together(found, batch * key_heads, size, ratio)
        return found
    if itemsize == 4 or rows_of(ratio) >= 64:  # sums of more registers than four warps have
        return Paged(keys, programs, 8, 3)
    # three of two blocks take 30, 46, 78 and 142 µs at 67, 134, 269 and 545 MB of cache, two of three blocks 32, 46, 80
    # and 145; with uneven lengths (414 MB) 114 and 125
    return Paged(keys, 3 * num_sms if programs else 0)


def fed_registers(programs: int, wide: int, ratio: int, inside: bool, gathered: bool) -> int:
    """Registers of a thread when a program starts, of which an SM has so many: as many as its sums want, or
    so few that a joining kernel fits beside it."""
    if programs == 1 and (gathered or ratio > COLUMNS):
        return WIDE_REGISTERS
    many = ratio > 2 * COLUMNS or (ratio > COLUMNS and (gathered or wide > 128)) or (gathered and wide > 128)
    return LONE_REGISTERS if inside or many else FED_REGISTERS


BESIDE = dict(zip(range(2, 17), (132, 79, 62, 47, 39, 32, 30, 23, 21, 16, 16, 14, 14, 14, 14), strict=True))
"""Clusters that are resident on an H200 together by their number of programs, two CTAs per SM: a cluster lies in a
group of 14 to 18 SMs. Where the driver says that fewer fit, none are asked for."""

EVEN_QUARTERS, LONE_QUARTERS = 7, 5
"""Of the average, up to which the longest sequence is one cluster's: 6 uneven ones of at most 1.7 times as many keys
take 50.8 µs by clusters of five and by stretches alike, 57.5 where four fifths of the programs cut the line. Where a
SM has one program of a cluster, 65.9 against 50.9: there lengths have to be more even."""

LEAST_TOGETHER, TOGETHER_DIM, TOGETHER_SMS = 10, 128, 132
"""Blocks of a program, head dim and SMs with which clusters were raced."""

LONE = {2: (57, 79), 4: (22, 27)}
"""Sequences (each key head of each), from and to, that clusters of two or four programs take where there is about one
CTA per SM."""


def programs_together(sequences: int, head_dim: int, ratio: int, num_sms: int) -> int:
    """Programs that take a sequence (each key head of each) together, 1 where one takes it whole, 0 where the line is
    cut.

    Two: 128 sequences 53.1 against 54.8 µs (197 MB), 38.9 against 41.5 (138 MB, heads that share no keys); 64 of four
    heads 38.2 against 41.2 (134 MB), of eight 30.3 against 34.2 (99 MB), of 16 24.7 against 29.1 (by three 26.1), 72 of
    heads of 64 40.6 against 43.0 (136 MB). Three: 40 36.5 against 37.9, which is less than uneven ones
    lose. Four: 56 41.9 against 43.2, 24 31.1 against 33.6. Six: 32 38.9 against 41.1 (seven 39.8). Fourteen of 16 or 8
    lose 4 to 9 µs.
    """
    if num_sms != TOGETHER_SMS or head_dim not in (NARROW_DIM, TOGETHER_DIM) or ratio > COLUMNS:
        return 0
    if lone_size(sequences):
        return lone_size(sequences) if head_dim == TOGETHER_DIM or lone_size(sequences) == 2 else 0
    if head_dim != TOGETHER_DIM:
        return 0
    # of all places for programs, from which on sequences are a program's each: 256 take 123.6 µs instead of 127.6 (525
    # MB), 192 as long as by stretches
    if 0.95 * FED_PROGRAMS * num_sms <= sequences <= FED_PROGRAMS * num_sms:
        return 1
    fits = {2: sequences >= 113, 4: ratio <= 8 and sequences >= 49, 6: sequences >= 28}
    return next((size for size, enough in fits.items() if enough and sequences <= BESIDE[size]), 0)


def lone_size(sequences: int) -> int:
    """Programs of a cluster of which an SM has about one; 0 where that was no faster."""
    return next((size for size, (least, most) in LONE.items() if least <= sequences <= most), 0)


def joined_together(found: Paged, sequences: int, num: int, ratio: int, even: int = 0) -> Paged:
    """The same where sequences (each key head of each) are a cluster's of ``num`` programs, or a program's; there are
    as many as fit, since uneven ones are cut for all of them."""
    programs = max(BESIDE[num], sequences) * num if num > 1 else sequences
    even = even or (LONE_QUARTERS if lone_size(sequences) == num else EVEN_QUARTERS)
    queries = found.queries if num == 1 else 2 if ratio <= 8 else 1  # parts are told where other queries would be
    return replace(
        found, programs=programs, inside=True, borders=False, queries=queries, together=num, even=even,
        max_registers=LONE_REGISTERS,
    )  # fmt: skip


def lined(batch: int) -> int:
    """Lengths that are added up, of which some belong to nobody: few sizes, so that there are few kernels."""
    return next(size for size in LINED if size >= batch)


def parts_of(programs: int, sequences: int) -> int:
    """Parts that are joined at once: those of sequences of even lengths, where they are few enough."""
    return next(size for size in JOINED if size > cdiv(programs, sequences) or size == JOINED[-1])


MANY_HEADS = 2048
"""Heads of a batch beyond which a joining program takes all that share keys: most of them find nothing to join, and
finding that out takes a microsecond."""


def joined_columns(heads: int) -> int:
    """Columns of a head that a joining program takes: few where there are few heads, so that more programs join."""
    return 32 if heads <= 64 else 128


def by_borders(programs: int, sequences: int, heads: int) -> bool:
    """Whether parts of so many sequences (each key head of each) are joined by borders between programs.

    100 uneven sequences of 8 key heads 68 µs against 82, 64 of 1,000 keys 71 against 75, 256 of 500 138 against 148, 64
    of one key head for 16 29.3 against 29.8; 16 of 8 key heads even, 4 of them 42 against 40, one 29 against 26: there
    a border has many parts to join, and few borders have any.
    """
    return 2 * sequences >= programs or (heads >= 1024 and 5 * sequences >= programs)


def by_the_last(programs: int, sequences: int, ratio: int, all_read: bool) -> bool:
    """Whether the parts of a sequence (each key head of each) are few enough for its last program to join them.

    16 of 8 key heads take 55.1 µs against 57.1 where a kernel joins, 24 uneven ones 44.2 against 46.1, 100 67.7 against
    69.1, 300 71.2 against 72.3; but 8 of them 73.2 against 71.4, 64 of one key head for 16 30.8 against 29.4, one 29.8
    against 26.5: behind a full memory every turn to it takes long. Where keys are few, 4 parts 10.8 against 12.0. Heads
    that share no keys lose with three parts already (43.8 against 42.4), and are left to the kernel.
    """
    # Parts of a sequence that its last program joins itself; more where keys are too few for all programs.
    few = cdiv(programs, sequences) <= (3 if all_read else 8)
    return 1 < ratio <= COLUMNS and few


def joined_at_once(ratio: int, dim: int) -> int:
    """Parts that a program joins at once, of as many heads as share keys."""
    # of parts that are joined at once, in a kernel whose threads have other things to keep
    return clamp(4096 // (power_of_two(ratio) * power_of_two(dim)), 1, 8)


WIDE_DIM = 256
"""Head dims beyond which parts are so large that joining programs are few and wide: of 512 columns 1,024 programs were
1.3 µs in coming and took three more, since each read a few parts of a masked tile."""

MOST_ELEMENTS = 8192


def wide_tile(programs: int, sequences: int, heads: int, dim: int) -> tuple[int, int, int]:
    """Parts and columns of a head that are joined at once, and warps: all parts of a sequence of even length where they
    fit, in about two CTAs per SM."""
    parts = clamp(power_of_two(cdiv(programs, sequences) + 1), 8, 256)
    columns = 2 ** (max(16, heads * dim // 256).bit_length() - 1)
    columns = clamp(columns, 16, min(power_of_two(dim), MOST_ELEMENTS // parts))
    return parts, columns, 8 if parts * columns == MOST_ELEMENTS or columns == 512 else 4


BORDER_TILES = ((2, 2048, 4), (4, 2048, 8))
"""Parts, columns times heads, and warps of a border of wide heads, where sequences are as many as programs and where
they are fewer."""


def wide_border(programs: int, sequences: int, rows: int = 16) -> tuple[int, int, int]:
    """Parts and columns of a border of wide heads, and warps: fewer columns where there are many heads."""
    parts, elements, warps = BORDER_TILES[sequences < programs]
    return parts, clamp(elements // rows, 16, 128), warps


def border_tile(programs: int, sequences: int, rows: int) -> tuple[int, int]:
    """Parts and columns of a border that are joined at once: two parts are the rule where there are more sequences
    than programs; where there are fewer, there are more parts and fewer borders to join."""
    if rows > COLUMNS:
        return 2, 2048 // rows
    if sequences >= programs:
        return (4, 128) if rows <= 8 else (2, 128)
    return (8, 32) if rows > 4 else (8, 64)


def shares_of(sequences: int, longest: int, keys: int, slots: int) -> int:
    """Shares of a sequence that end soonest: whole waves of programs, each its keys and what starting one costs."""

    def waves(shares: int) -> tuple[int, int]:
        mine = cdiv(longest, shares) + START_BLOCKS * keys
        return cdiv(max(1, sequences) * shares, slots) * mine, shares

    most = clamp(longest // (4 * keys), 1, MAX_SHARES)
    return min(range(1, most + 1), key=waves)


def rows_of(ratio: int) -> int:
    """Heads that share keys, padded to what a product takes."""
    return max(16, power_of_two(ratio))
