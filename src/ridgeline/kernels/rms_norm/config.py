"""Launch configurations of RMSNorm by shape.

A warp reads 16 bytes a lane: ``lanes`` columns at once. Short rows belong to one warp each, so that their sums need no
barrier; longer ones are spread over the warps of a program. Either way a row is held in ``chunks`` pieces, which fits
row lengths that are no powers of two. The measurements behind the numbers: lab/notes/rows.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ridgeline.kernels.rows import cdiv, clamp, power_of_two


@dataclass(frozen=True, slots=True)
class Forward:
    """Rows a program holds, in how many pieces of how many columns, and its warps; no pieces: rows are read twice, in
    blocks.

    ``reads`` and ``writes``: what the L2 is told of rows and results ("evict_first", "evict_last"). ``apart``: rows
    that are unaligned, the few elements at their ends apart, weights from copies that start where rows can.
    ``early``: weights are asked for with the row, not when its sum is known. ``programs_per_sm``: registers are limited
    so that this number of programs is resident on an SM (0: no limit)."""

    rows: int
    chunks: int
    block: int
    num_warps: int
    reads: str = ""
    writes: str = ""
    apart: bool = False
    early: bool = False
    programs_per_sm: int = 0


@dataclass(frozen=True, slots=True)
class Backward:
    """A persistent program's tile, how many tiles are on their way, and how many programs share an SM."""

    rows: int
    chunks: int
    block: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    keep_weight: bool
    ends: bool = False
    """Of unaligned rows, the few elements outside whole accesses are handled apart."""
    early: bool = True
    """The kernel that adds up the shares starts while this one ends: 2048×4096 22.5 µs, 24.0 else; 8192×128 11.6 and
    12.8, LayerNorm 1024×12288 33.2 and 35.2. Let in from this one's start on it is in the way: 23.3, 11.9, 34.0."""
    again: bool = False
    """16-bit rows wait in shared memory, ``num_stages`` of them, and are read there twice; so do weights, unless
    ``keep_weight``."""
    ahead: bool = False
    """Rows wait in shared memory, ``num_stages`` of them, until their sums are taken, and in registers until they are
    finished, while the next one's sums are taken; weights wait in shared memory, unless ``keep_weight``."""
    split: int = 1
    """So many programs, which start together as a cluster, share a row that is finished a turn later."""


@dataclass(frozen=True, slots=True)
class ColumnSums:
    """Shares of columns that a program of the last sum asks for at once, how many columns of them, and its warps."""

    shares: int
    block: int
    num_warps: int


def column_sums(shares: int) -> ColumnSums:
    """All shares of a column at once, up to 2048: waiting for 32 at a time took longer than adding them.

    Norms of 65536×608, of 1,320 shares, 69.9 µs, 70.5 where 1024 are asked for at once, 12164×1918 48.5 and 49.4; of
    65536×384, of 2,112 shares, 45.8 in columns of eight, 46.5 in columns of sixteen, 47.0 where 1024 are.
    """
    block = 16 if shares <= 2048 else 8
    shares = clamp(power_of_two(shares), 32, 2048)
    return ColumnSums(shares, block, clamp(shares * block // 1024, 2, 16))


def share_pitch(cols: int) -> int:
    """Numbers from one program's share of column sums to the next: shares start with an access of four, odd columns
    are read four at a time all the same (RMSNorm 12164×1918 50.4 → 49.4 µs, 6906×2942 44.4 → 43.8)."""
    return cdiv(cols, 4) * 4


LONG_BLOCK = 8192


def lanes(itemsize: int) -> int:
    """Columns that one warp reads with one instruction."""
    return 32 * 16 // itemsize


def short_tile(rows: int, cols: int, itemsize: int, num_warps: int) -> tuple[int, int, int, int] | None:
    """(rows, chunks, block, warps) with every row inside one warp, or None where rows are too long for that."""
    block = min(power_of_two(cols), lanes(itemsize))
    chunks = cdiv(cols, block)
    # short chunks
    if chunks * (16 // itemsize) > 4 * 8:
        return None
    per_warp = lanes(itemsize) // block
    num_warps = clamp(power_of_two(cdiv(rows, 132 * per_warp)), 1, num_warps)
    return num_warps * per_warp, chunks, block, num_warps


def narrow_tile(rows: int, cols: int, itemsize: int, num_warps: int) -> tuple[int, int, int, int] | None:
    """As ``short_tile``, two rows a warp in three pieces where a row a warp would leave half of the second idle.

    LayerNorm 65536×312 26.3 µs, 31.1 in two pieces, RMSNorm 65536×304 24.9 and 25.7, softmax 65536×264 22.5 and 25.3,
    float32 65536×177 27.6 and 29.1.
    """
    found = short_tile(rows, cols, itemsize, num_warps)
    if found is None or not lanes(itemsize) < cols <= lanes(itemsize) * 3 // 2:
        return found
    num_warps = clamp(power_of_two(cdiv(rows, 132 * 2)), 1, num_warps)
    return 2 * num_warps, 3, lanes(itemsize) // 2, num_warps


LEAST_PERSISTENT_ROWS = 4096
"""Backward, unaligned rows are walked over where there are so many."""


def apart(rows: int, whole: int, itemsize: int, centered: bool = False) -> Forward | None:
    """Unaligned rows and have ``whole`` columns in whole accesses; None where they are few or long.

    RMSNorm 32768×4099 131 µs (150 where programs walked over rows, 153 with masks), 16384×7001 115 (129), 131072×1001
    128 (145), 65536×2049 130 (159), 8192×12289 105 (143 with masks). LayerNorm (``centered``) 137 (152), 127 (128), 132
    (145), 134 (161) and 119 (282); with fewer numbers a thread 152, 134, 148, 146, 129, with one meeting for both sums
    143, 130, 137, 140. On sixteen warps 3766×18748 76 (127 with masks), LayerNorm 84 (191), 15309×14721 242 (254 on
    eight), LayerNorm 6807×15579 138 and 142. Float32 16384×4099 133 (148), RMSNorm 132 and 130 with masks; 65536×603 79
    and 32725×1035 70 on two warps (143 and 91 on eight). LayerNorm of 65536×2065, of which four warps would fill two
    thirds of their places, 142 on two (166).
    """
    # unaligned rows are worth copies of their weights from so many bytes on, LayerNorm's from half as
    # many: these take 1 to 2 µs
    enough = rows * whole * itemsize * (1 + centered) >= 16 << 20
    if not enough or not 512 <= whole <= 20480 or (itemsize == 4 and not centered):
        return None
    if itemsize == 4:
        num_warps = 2 if whole <= 1280 else 4 if whole <= 2560 else 8
        wide = Forward(1, cdiv(whole, 128 * num_warps), 128 * num_warps, num_warps, apart=True)
        return kept(wide, rows, whole, itemsize) if whole <= 8192 else None
    num_warps = 1 if whole <= 1024 else 2 if whole <= (2560 if centered else 2048) else 4 if whole <= 8192 else 8
    if whole > 14336:
        num_warps = 16
    found = Forward(1, cdiv(whole, 256 * num_warps), 256 * num_warps, num_warps, apart=True)
    return kept(found, rows, whole, itemsize)


KEPT_BYTES = 96 << 20
"""The L2 is told to keep rows from so many bytes on ("evict last"), which it cannot: what has been written goes first
then, early and in its order. 16384×4096 67.8 µs, 70.1 else; LayerNorm 67.5 and 69.8, 65536×768 51.0 and 52.6; nothing
at 84 MB, a loss at 34. Kernels that come after find no less of what is theirs (measured on an H200)."""


def forward(rows: int, cols: int, itemsize: int, added: bool = False) -> Forward:
    """Sixteen 16-bit elements a thread where that fills its pieces: 16384×4096 67.6 and 68.7 µs in two runs, 70.1 and
    69.4 with thirty-two, 8192×8192 67.9 and 70.2, 70.8 and 70.7. Float32 has nothing of it.

    Rows of 1k to 1.5k columns are four a program, a warp each, where four warps of one would have places for 2048:
    65536×1152 74.4 µs and 82.5, 65536×1280 82.5 and 88.2, 65536×1536 97.6 and 99.1 (copies as large 77.1, 85.4, 100.9);
    not timed where something is ``added`` to them."""
    chosen = held(rows, cols, itemsize)
    if itemsize == 2 and 1024 < cols <= 1536 and rows >= LEAST_PERSISTENT_ROWS and not added:
        chosen = Forward(4, cdiv(cols, 256), 256, 4)
    for num_warps in (8, 16):
        if itemsize == 2 and 384 * num_warps < cols <= 512 * num_warps:
            chosen = Forward(1, 2, 256 * num_warps, num_warps)
    return early(kept(chosen, rows, cols, itemsize), rows, itemsize)


def kept(chosen: Forward, rows: int, cols: int, itemsize: int) -> Forward:
    """The same, with rows that the L2 is told to keep where they are many."""
    return replace(chosen, reads="evict_last") if rows * cols * itemsize >= KEPT_BYTES else chosen


EARLY_ELEMENTS, SMS, THREADS, REGISTERS = 24, 132, 2048, 65536
"""16-bit elements a thread up to which a weight that is asked for early costs no program of eight warps its place: 39
registers instead of 34 with sixteen, 48 instead of 47 with twenty-four (72 instead of 63 with forty, which do; so do 39
instead of 32 where a program has sixteen warps). Then the SMs of a device, and what programs share."""


def early(chosen: Forward, rows: int, itemsize: int, vectors: int = 1) -> Forward:
    """The same, with weights (``vectors`` of them) asked for with rows where no program waits for registers then:
    few elements a thread, or programs that are all there at once.

    Asked for after the sum, a piece's weight waits for the store of the piece before, which might have written it: a
    trip to the L2 a piece, between a row's last barrier and its end.
    """
    if not chosen.chunks:
        return chosen
    elements = chosen.rows * chosen.chunks * chosen.block // (32 * chosen.num_warps)
    free = itemsize == 2 and vectors == 1 and elements <= EARLY_ELEMENTS and chosen.num_warps <= 8
    each = cdiv(40 + elements + vectors * elements * itemsize // 4, 8) * 8 * 32 * chosen.num_warps
    at_once = SMS * min(THREADS // (32 * chosen.num_warps), REGISTERS // each)
    return replace(chosen, early=free or cdiv(rows, chosen.rows) <= at_once)


def held(rows: int, cols: int, itemsize: int) -> Forward:
    """At most 40 elements a thread: then two programs or more share an SM up to 16k columns. Of 18,432
    columns 32 warps have places for 24,576 and nobody beside them: 4854×18432 118 µs, on sixteen 87.7 (a copy as large
    90.8), LayerNorm 4096×18432 124 and 81.4 (75.6)."""
    short = narrow_tile(rows, cols, itemsize, 4)
    if short is not None:
        return Forward(*short)
    for num_warps, most in ((4, 5), (8, 4), (16, 5), (32, 4)):
        chunks = cdiv(cols, 256 * num_warps)
        if chunks <= most:
            return Forward(1, chunks, 256 * num_warps, num_warps)
    return Forward(1, 0, 0, 16)


def again(cols: int, num_warps: int, slots: int, programs_per_sm: int, keep_weight: bool = False) -> Backward:
    """Rows of 16-bit numbers that wait in shared memory, in ``slots`` places of a program."""
    block = 256 * num_warps
    return Backward(1, cdiv(cols // 8 * 8, block), block, num_warps, slots, programs_per_sm, keep_weight, again=True)


SHARED_BYTES, PROGRAM_BYTES, EXCHANGE_BYTES = 228 << 10, 1216, 528
"""Shared memory of an SM for programs, and what a program takes besides its rows, and to share them."""


def ahead(
    cols: int,
    num_warps: int,
    slots: int,
    programs_per_sm: int,
    keep_weight: bool = False,
    itemsize: int = 2,
    split: int = 1,
) -> Backward:
    """Rows that are finished while the next one's sums are taken, ``slots`` of them in shared memory."""
    vector = 16 // itemsize
    block = 32 * vector * num_warps
    chunks = cdiv(stretch(cols // vector * vector, itemsize, split), block)
    return Backward(1, chunks, block, num_warps, slots, programs_per_sm, keep_weight, ahead=True, split=split)


def stretch(whole: int, itemsize: int, split: int) -> int:
    """Columns of the longest stretch of a row that ``split`` programs share."""
    step = 128 // itemsize  # programs that share a row have stretches of it that are made of so many bytes
    return whole if split == 1 else cdiv(cdiv(whole, split), step) * step


def shared_bytes(chosen: Backward, itemsize: int, slots: int, weight: bool) -> int:
    """What rows of two tensors, and weights, take of an SM's shared memory."""
    row = chosen.chunks * chosen.block * itemsize
    besides = PROGRAM_BYTES + (chosen.split > 1) * EXCHANGE_BYTES
    return chosen.programs_per_sm * (2 * slots * row + weight * row + besides)


def ahead_tile(cols: int, itemsize: int, num_sums: int) -> Backward | None:
    """Sixteen warps per SM in as many programs as can be, three rows of each in shared memory where they fit
    and two else; twelve programs of one warp. None where registers do not hold a row and its column sums, or shared
    memory two rows.

    65536×642: 79.6 µs with twelve programs, 82.1 with sixteen, LayerNorm 65536×734 90.8 and 93.8.
    """
    for num_warps in (1, 2, 4, 8, 16):
        # warps of an SM that have 128 registers a thread
        found = ahead(cols, num_warps, 3, 16 // num_warps if num_warps > 1 else 12, itemsize=itemsize)
        if found.chunks <= MOST_PIECES[itemsize, num_sums]:
            return with_places(found, itemsize)
    return None


MOST_PIECES = {(2, 1): 4, (2, 2): 3, (4, 1): 7, (4, 2): 5}
"""Pieces of a row, by the bytes of a number and how many sums of columns there are, that 128 registers hold."""


def with_places(found: Backward, itemsize: int) -> Backward | None:
    """A tile with three rows in shared memory where they fit, two else; None where these do not."""
    slots = 3 if shared_bytes(found, itemsize, 3, True) <= SHARED_BYTES else 2
    return replace(found, num_stages=slots) if shared_bytes(found, itemsize, 2, False) <= SHARED_BYTES else None


def split_tile(cols: int, itemsize: int, num_sums: int) -> Backward | None:
    """Two programs of sixteen warps share rows that one does not hold; None where two do not either.

    LayerNorm of float32 5259×15736: 284 µs, 487 read three times (a copy as large 237), 357 by four programs of eight
    warps. Rows that one program holds lose: waiting for each other costs up to 13 % by two (7519×5376 80.7 and 73.7,
    8730×7362 133 and 125, 2470×12288 64.9 and 60.7, RMSNorm 6171×13055 146 and 149, 4543×12243 102 and 102, float32
    4648×13968 235 and 233), 20 to 60 % by four.
    """
    found = ahead(cols, 16, 3, 1, itemsize=itemsize, split=2)
    return with_places(found, itemsize) if found.chunks <= MOST_PIECES[itemsize, num_sums] else None


def if_enough(found: Backward | None, rows: int) -> Backward | None:
    """A tile where its programs have turns enough."""
    # rows of a program from which on the first row's sums and the last row's end are worth it: 600×3771 24.2 µs, 19.5
    # held; 876×11008 of float32, 6.6 turns, 42.6 and 44.7
    return found if found is not None and rows * found.split >= 6 * 132 * found.programs_per_sm else None


def persistent_pipelined(rows: int, cols: int, itemsize: int, unaligned: bool) -> Backward | None:
    """Where rows finished a turn after their sums were taken are the fastest; None elsewhere.

    65536×642: 79.6 µs, 107.8 with masks; 16384×7001 186, 193 read twice in shared memory; 3048×11450 69.9 and 75.0;
    18810×8216 262, 270 held; float32 5441×9584 164 and 179, 876×11008 42.6 and 44.7, 4531×14336 221, 382 read three
    times, 3000×11451 137 and 168. Not 16384×4096 (109, 107 held), 28094×1250 (72.0, 65.7), 6906×2942 (45.1, 43.2;
    20000×2500 93.2, 98.7), 8000×5001 (76.8, 73.9), 9000×6001 (98.1, 95.2), 10576×14008 (263, 247), 3904×15708 (122,
    116). Since places in memory are counted along, 4431×5376 46.2 (47.8 read twice) and 65536×392 51.3 (53.0 held), but
    65536×369 55.6 (52.4) and float32 36830×1204 182 (154).
    """
    if cols > ((12288 if unaligned else 14336) if itemsize == 4 else 24576):
        return if_enough(split_tile(cols, itemsize, 1), rows)
    if itemsize == 4:
        wanted = cols > 8192
    else:
        wanted = 512 < cols <= 768 or 6144 < cols <= 12288 if unaligned else 8192 < cols <= 10240 or 5120 < cols <= 6144
        wanted = wanted or (not unaligned and 256 < cols < 512 and rows >= 16384)
    return if_enough(ahead_tile(cols, itemsize, 1), rows) if wanted else None


def packed_words(rows: int, cols: int, unaligned: bool) -> Backward | None:
    """Rows that wait in shared memory: those that are unaligned, and those too long for registers.

    65536×1588 176 µs (202 with masks), 27327×2241 109 (127; 117 on two warps), 9000×6001 95.2 (109), 3904×15708 116,
    4096×20480 156 (252 read twice). Where rows fill accesses and registers hold them,
    waiting there is faster: 16384×4096 107 µs, 120 so; 16384×3501 100 with masks, 102 to 116. From 12k columns on
    eight warps are enough: 2672×14336 69.6 (70.8 on sixteen, 73.3 held on 32), 11460×14803 301 (319 on sixteen).
    Aligned rows that fill 32 warps are held: 15334×16384 379 (a copy as large 358). 8000×5001 73.1.
    """
    if 1024 < cols <= 1536 and rows >= LEAST_PERSISTENT_ROWS and not unaligned:  # 15218×1248: 38.0, 40.7 µs held
        return again(cols, 2, 2, 8, True)
    if unaligned and 1024 < cols <= 3072 and rows >= LEAST_PERSISTENT_ROWS:
        return again(cols, 2, 2, 8, True) if cols <= 2048 else again(cols, 4, 3, 4, True)
    if unaligned and 4608 < cols <= 8192:
        return again(cols, 8, 3, 2, True)
    if 5120 < cols <= 6144 and rows >= LEAST_PERSISTENT_ROWS:
        # 9000×6001, which starts inside accesses, has 87 % of a copy as large so, 8577×5896 80 % held
        return again(cols, 8, 3, 2, True)
    if unaligned and 8192 < cols <= 12288:  # where they are few
        return again(cols, 16, 3, 1, True)
    if 12288 < cols <= 15360:
        return again(cols, 8, 3 if cols <= 14336 else 2, 1)
    if unaligned and 15360 < cols <= 16384:
        return again(cols, 16, 3, 1, True)
    if 16384 < cols <= 24576:
        return again(cols, 16, 2, 1, cols > 20480)
    return None


def past_words(rows: int, cols: int) -> Backward | None:
    """Aligned 16-bit rows to which a gradient past the norm is added (``add_rms_norm``), where registers hold too much
    beside it; None elsewhere.

    4096×16384 139 µs (151 held on 32 warps, a copy as large 130), LayerNorm 144 (242), 2048×18432 85.6 (148 read three
    times; 74.1), 9001×5376 102 (104.5 held), 7321×6144 95.9 (98.6); not 8192×8192 (137, 136), 4096×12288 (111, 108).
    Two rows in shared memory, not three, where rows are long: what is added comes through the L1, which has what shared
    memory leaves. 3000×14336 98.2 and 105.3 µs, LayerNorm 4096×14336 130 and 143.
    """
    if 5120 < cols <= 6144 and rows >= LEAST_PERSISTENT_ROWS:
        return again(cols, 8, 3, 2, True)
    if 12288 < cols <= 16384:
        return again(cols, 8, 2, 1)
    if 16384 < cols <= 20480:  # 2048×18432 85.6 µs, 90.1 on sixteen warps
        return again(cols, 8, 2, 1)
    return None


def backward(
    rows: int, cols: int, itemsize: int, num_sums: int = 1, unaligned: bool = False, words: bool = False
) -> Backward:
    """Two tiles on their way, and as many programs as the registers of their tiles and column sums allow.

    Short rows that are powers of two share tiles of 4096 elements (131072×128: 38 µs, one warp a row 42); a row of 1024
    has four warps (32768×1024: 60 against 62, LayerNorm 62 against 77). Others have one warp a row, those longer than
    256 in a program of its own: 86 µs against 104 with four warps for LayerNorm of 65536×768, 44 and 61 for 65536×320
    (RMSNorm 43 and 50), 10.8 and 28.7 for 4550×264, 52 and 142 for 65536×305, float32 65536×448 95 and 112.
    """
    found = persistent_pipelined(rows, cols, itemsize, unaligned) if words and num_sums == 1 else None
    if found is None and words and num_sums == 1 and itemsize == 2:
        found = packed_words(rows, cols, unaligned)
    if found is not None:
        return found
    short = short_tile(rows, cols, itemsize, 4)
    if short is not None and cols == 1024 and itemsize == 2:
        return Backward(1, 1, 1024, 4, 3, 5 + num_sums, True)
    if short is not None and num_sums == 1 and power_of_two(cols) == cols:
        tile_rows = clamp(4096 // cols, 1, power_of_two(cdiv(rows, 264)))
        num_warps = clamp(tile_rows * cols // 512, 1, 8)
        return Backward(tile_rows, 1, cols, num_warps, 3, 2 if num_warps == 8 else 4, True)
    if short is not None:
        held = short[1] * (16 // itemsize)
        if held > 16:
            return Backward(1, *short[1:3], 1, 3, 10 if held <= 24 else 8, True)
        if held > 8:
            programs = 8 if rows < 16384 else 12 if itemsize == 4 or unaligned else 16
            return Backward(1, *short[1:3], 1, 3, programs, True)
        fewer = num_sums == 2 and (itemsize == 4 or unaligned)  # all must be there at once, and these take registers
        return Backward(*short, 3, 6 if fewer else 8, True)
    if 1024 < cols <= 1792 and itemsize == 4 and not unaligned:  # LayerNorm 54126×1600: 258 µs, 306 on eight warps
        return Backward(1, cdiv(cols, 512), 512, 4, 3, 4, True)
    if unaligned and num_sums == 1 and cols <= 4096:  # masks take registers: all programs must be there at once
        wide = Backward(1, cdiv(cols, 1024), 1024, 4, 3, 2, True)
        return wide if cols > 2048 else Backward(1, 1, 2048, 8, 3, 3, True)
    if cols <= 4096:
        num_warps = 4 if 2048 < cols <= 3072 else 8
        chunks = cdiv(cols, 256 * num_warps)
        least = itemsize == 4 or unaligned
        programs = {1: 3 if least else 4, 2: 2, 3: 2 if least else 3}[chunks]
        return Backward(1, chunks, 256 * num_warps, num_warps, 3, programs, True)
    if cols <= 5120 and itemsize == 2 and not (unaligned and num_sums == 2):
        # 8192×5120: 70.7 µs, 72.4 in three pieces on eight warps; LayerNorm 16384×5120 132 and 156
        return Backward(1, 5, 1024, 4, 3, 2, True)
    if cols <= 6144:
        return Backward(1, 3, 2048, 8, 3, 2 if itemsize == 2 else 1, False)
    if cols <= 8192:
        return Backward(1, 2, 4096, 16, 3, 1, True)
    if cols <= 12288 and itemsize == 2:
        return Backward(1, cdiv(cols, 2048), 2048, 8, 3, 1, False)
    if cols <= 12288:  # float32 4096×12288: 156 µs, LayerNorm 159; 322 and 309 read twice
        return Backward(1, cdiv(cols, 4096), 4096, 16, 2, 1, False)
    if cols <= 16384 and itemsize == 2:
        return Backward(1, 2, 8192, 32, 1, 1, False)
    return Backward(1, 0, 0, 16, 1, 1, False)
