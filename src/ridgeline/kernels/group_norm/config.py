"""Launch configurations of GroupNorm by shape."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.rows import cdiv, clamp, power_of_two
from ridgeline.kernels.split_rows import MOST_SHARES, Streamed


@dataclass(frozen=True, slots=True)
class Groups:
    """Block and warps of the sums, stretches a group is cut into, block and warps of what is written."""

    block: int
    num_warps: int
    num_stretches: int
    out_block: int
    out_warps: int


def default(groups: int, length: int, positions: int, sms: int) -> Groups:
    """Groups are cut until every SM has eight programs; sixteen elements a thread throughout."""
    block = clamp(power_of_two(length), 32, 2048)
    stretches = clamp(cdiv(8 * sms, max(groups, 1)), 1, max(1, length // (2 * block)))
    out_block = clamp(power_of_two(positions), 32, 2048)
    return Groups(block, clamp(block // 512, 1, 4), min(stretches, 64), out_block, clamp(out_block // 512, 1, 4))


@dataclass(frozen=True, slots=True)
class Images(Streamed):
    """A piece of a channel is at most so many accesses of a lane long, and sums are made a piece; whether the gradient
    before the activation is kept in shared memory or computed twice; whether two sigmoids share an inverse; whether the
    kernel that adds the sums starts while this one ends; elements of a piece, where they are not a power of two."""

    accesses: int = 8
    kept: bool = True
    paired: bool = False
    early: bool = False
    step: int = 0


@dataclass(frozen=True, slots=True)
class Whole:
    """A group of 16-bit numbers a program: its warps, groups that have their place in shared memory, and programs of a
    SM."""

    num_warps: int
    slots: int
    programs_per_sm: int


@dataclass(frozen=True, slots=True)
class Packed:
    """A group of 16-bit numbers a program, or a share of one, two numbers a word, and no next group: its warps, and
    CTAs per SM. ``cluster``: programs that share a group. ``shared``: how many pieces of one wait in
    shared memory instead of registers (backward all do). ``reads``: what the L2 is told of what is read.
    ``paired``: two sigmoids share an inverse. ``early``: the kernel that adds sums starts while this one ends."""

    num_warps: int
    programs_per_sm: int
    cluster: int = 1
    shared: int = 0
    reads: str = ""
    paired: bool = True
    early: bool = False


@dataclass(frozen=True, slots=True)
class Apart:
    """Sums first, then results, in kernels of their own."""


@dataclass(frozen=True, slots=True)
class Flat:
    """A short group a program, read once, wherever its channels start: its warps, and CTAs per SM."""

    num_warps: int
    programs_per_sm: int


@dataclass(frozen=True, slots=True)
class Tile:
    """A short group of the backward pass a program, a channel a line, so many columns at a time."""

    num_warps: int
    width: int


@dataclass(frozen=True, slots=True)
class Walk:
    """A longer group a program, read twice, the second time from the L2: its warps; backward so many channels and
    columns at a time."""

    num_warps: int
    lines: int = 0
    width: int = 0


LONGEST_FLAT, LONGEST_TILE = 20480, 8192
"""Elements of a group that sixteen warps hold in forty registers of a thread, and places of one in the backward pass,
whose two inputs they hold in sixteen each: 64×320×30×30, of 14,848 places, took 97 µs, sums first and results later 80.
"""


LONGEST_PERSISTENT, LEAST_PERSISTENT_ROWS = 81920, 2
"""Elements of a group that is still in the L2 when a program is through with it, all programs of the device together;
and how many of them every SM has at least: several programs share fewer groups."""


def flat(rows: int, length: int, positions: int, sms: int) -> Flat | Walk | None:
    """Forty elements a thread at most; longer groups are walked over. None where groups are longer still and few, or
    channels too short to be told apart."""
    # fewest positions
    if positions < 4:
        return None
    if length > LONGEST_FLAT:
        return Walk(16) if length <= LONGEST_PERSISTENT and rows >= LEAST_PERSISTENT_ROWS * sms else None
    num_warps = clamp(power_of_two(cdiv(length, 1280)), 1, 16)
    return Flat(num_warps, 32 // num_warps)


LEAST_PIECE = 16


def is_ragged(itemsize: int, positions: int) -> bool:
    """Whether channels of four-byte numbers end where hardly any power of two does: pieces of them would be short.

    Backward 64×1024×14×14 takes 67 µs (122 in pieces of four), 64×512×28×28 116 (110 in pieces of sixteen).
    """
    return itemsize == 4 and positions & -positions < LEAST_PIECE


def tile(rows: int, per_group: int, positions: int, sms: int, itemsize: int) -> Tile | Walk | None:
    """Sixteen elements of each input a thread, 32 where there are many; lines of 32 columns, longer where channels are
    few. Groups with more places than sixteen warps hold are walked over; None where these are few or longer still.

    Larger 16-bit groups whose channels are read by fours have 1024 places a warp: 316×384×14×14 in sixteen groups 51.1
    µs, 78.3 on sixteen warps, 60.1 on four, in lines of 64 columns 59 to 71 (a copy as large 41); 210×512×14×14 in 32
    41.8, 45.2 on eight, 60.8 on sixteen. Odd channels do not: 300×640×13×13 148 on sixteen, 169 on eight.
    """
    lines, width = power_of_two(per_group), 32
    places = lines * cdiv(positions, width) * width
    num_warps = clamp(power_of_two(cdiv(places, 256 if places >= 4096 else 512)), 1, 16)
    if itemsize == 2 and positions % 4 == 0 and places > 3072:
        num_warps = clamp(power_of_two(cdiv(places, 1024)), 4, 16)
    while lines * width < 32 * num_warps:
        width *= 2
    if lines * cdiv(positions, width) * width <= LONGEST_TILE:
        return Tile(num_warps, width)
    if per_group * positions > LONGEST_PERSISTENT // 2 or rows < LEAST_PERSISTENT_ROWS * sms:
        return None
    return walked(lines, positions)


def walked(lines: int, positions: int) -> Walk:
    """2048 places at a time; where lines would have 32 columns, and 256 leave little more empty, twice as many of
    those: float32 256×896×14×14 in eight groups 255 µs, 307 in lines of 32, 277 of 128."""
    width = walked_width(positions)
    if width == 32 and cdiv(positions, 256) * 256 * 20 <= cdiv(positions, width) * width * 23:
        return Walk(8, min(lines, 16), 256)
    return Walk(8, min(lines, max(1, 2048 // width)), width)


def walked_width(positions: int) -> int:
    """Columns of a tile: a power of two from 32 to 1024 of which a channel leaves least empty, the longest of those
    that leave little more."""
    places = {width: cdiv(positions, width) * width for width in (1024, 512, 256, 128, 64, 32)}
    return next(width for width, filled in places.items() if filled <= 1.1 * min(places.values()))


LONGEST_WHOLE, LONGEST_OF_MANY = 45056, 20480
"""Elements of a group that sixteen warps hold in eleven accesses of every lane (with twelve they spill), and of one for
which two programs share an SM: where there are many groups, one program waits for itself."""


SHORTEST_PACKED, LONGEST_ALONE, MOST_TOGETHER = 5120, 40960, 16
"""Elements of groups that a program holds two numbers a word, and programs of a cluster, which share a longer one."""


def packed(rows: int, length: int, num_bytes: int, sms: int, silu: bool) -> Packed | None:
    """Groups of 16-bit numbers, a program or a cluster of programs each; None where they are few, short or too long.

    With SiLU 64×640×32×32: 47.3 and 49.8 µs (53.0 where programs walk over groups on their way), 64×1280×16×16 27.0
    (30.2). On sixteen warps with most of a group in shared memory 32×320×64×64 49.0 (54.0 in the persistent kernel, 50
    to 52 in clusters), 32×320×56×56 39.4 (45.9, 40.7). In clusters 8×512×64×64 25.3 (28.3), 16×640×64×64 50.4 (53.6),
    8×320×128×128 52.3 (54.5), 4×512×128×128 44.4 (46.7), 16×512×128×128 154.9 (156.4), without SiLU 41.4 (40.2) and
    149.7 (143.9). Twice as many numbers a thread 48 to 58, half as many 46 to 58.
    """
    if length <= LONGEST_OF_MANY:
        if rows < 4 * sms or length <= SHORTEST_PACKED:
            return None
        num_warps = power_of_two(cdiv(length, 1280))
        return Packed(num_warps, 32 // num_warps)
    if length <= LONGEST_ALONE:
        return Packed(16, 2, 1, cdiv(length, 4096) - 4) if rows > 2 * sms else None
    cluster = power_of_two(cdiv(length, LONGEST_OF_MANY))
    most = MOST_TOGETHER if silu else MOST_TOGETHER // 2
    # smaller images have not been timed in clusters
    if cluster > most or length % (8 * cluster) or num_bytes < 32 << 20:
        return None
    return Packed(8, 4, cluster, cdiv(length // cluster, 2048) - 4)


def whole(rows: int, length: int, sms: int) -> Whole | None:
    """As many warps as hold a group in at most ten accesses of a lane, or more where groups are few; None where it is
    too long.

    With SiLU 64×1280×16×16: 30 µs, 41 in shares; 64×640×32×32 52 and 58; without 8×320×64×64 17 and 20. Many long ones
    lose: 32×320×64×64 56 and 53, 32×320×56×56 46 and 45.
    """
    if length > (LONGEST_WHOLE if rows <= 2 * sms else LONGEST_OF_MANY):
        return None
    num_warps = clamp(power_of_two(cdiv(length, 2560)), 1, 16)
    if rows <= sms:
        num_warps = clamp(power_of_two(cdiv(length, 1024)), num_warps, 16)
    programs = 16 // num_warps
    return Whole(num_warps, 1 if rows <= programs * sms else 2, programs)


def streamed(num_bytes: int, num_inputs: int, itemsize: int, length: int = 0) -> Images | None:
    """Three shares of 64 KB an SM, four programs of four warps; None where the image is small.

    4×512×128×128: 42 µs, 45 with two programs of eight warps, 49 with one of sixteen, 60 in two reads; backward 63.
    With SiLU 47 (48 with an inverse an element) and 67 (backward nothing is gained by pairs); 16×512×128×128 162 (168)
    and 220, with two programs of eight warps 243; in pieces of one access 56 and 78, with its slope computed twice 81.
    Sums added by a kernel that starts early: 64.9 (65.7), 216 (219), without SiLU 62.1 (62.9) and 208 (215).

    Groups that would be cut into more than 64 shares have more warps, so that fewer programs meet: sixteen groups of
    float16 3×320×192×192 45.5 µs on eight warps, 59.8 on four, backward 88 on sixteen (99), of float32 4×1024×96×96 92
    on sixteen (101).
    """
    # from here on a group is worth holding in shared memory: what is smaller is in the L2 when it is read again
    if num_bytes < 16 << 20:
        return None
    chunks = 8 if num_inputs == 1 else 4
    share = chunks * 32 * 16 // itemsize
    num_warps = next((num for num in (4, 8, 16) if length <= MOST_SHARES * share * num), 4)
    if num_inputs == 1:
        return Images(8, num_warps, 3, 16 // num_warps, paired=itemsize == 2)
    return Images(4, num_warps, 3, 16 // num_warps, early=True)


def piece(positions: int, vector: int, accesses: int = 1) -> int:
    """Elements of a piece, which lies in one channel: as many as divide it, of so many accesses of a warp at most."""
    return min(32 * vector * accesses, positions & -positions)


def packed_backward(rows: int, length: int, positions: int, sms: int) -> Packed | None:
    """Groups of 16-bit numbers of the backward pass, a program each; None where they are few, short or long.

    With SiLU 128×640×16×16 43 µs (63 in shares; on eight warps 50), 64×1280×16×16 44.4 (51.6), 128×320×32×32 75
    (83), 64×384×32×32 49.6 (51.3), 64×512×32×32 59.4 (62.8), but 64×640×32×32 80 (77) and 256×256×16×16 35.5 (35.1).
    Longer ones in clusters of programs, x and dy in shared memory, lost as they had with dy in registers:
    4×512×128×128 76 to 83 (66), 16×512×128×128 274 (219), 16×640×64×64 91 (77), 32×320×64×64 89 (78).
    """
    # Elements of groups whose backward pass is a program's, and what their channels must be multiples of.
    if rows < 4 * sms or not 2048 < length <= 16384 or positions % 256:
        return None
    if length <= 5120:
        return Packed(4, 8, early=True)
    return Packed(8, 4 if length <= 12288 else 3, early=True)


def uneven_piece(positions: int, places: int) -> int:
    """Elements of a piece that fills more than three quarters of its places where powers of two hardly divide a
    channel, or five eighths where the largest that does is sixteen; 0 where there is none.

    64×512×28×28 backward: 59 µs in pieces of 784 of 1024, 84 of 16, 66 of 112 of 128; 32×320×56×56 72 of 784, 71 of
    64; 197×128×36×36 in eight groups 130 of 16 (a copy as large 55), of 648 not timed. Channels shorter than that are
    a piece in half as many places: 512×128×20×20 51 µs in pieces of 400 of 512, 86 of 16.
    """
    # a power of two that divides a channel, up to which pieces of another length are better
    if positions & -positions > 32:
        return 0
    least = places * 5 // 8 if positions & -positions <= 16 else places * 3 // 4
    found = next((n for n in range(places, least, -8) if positions % n == 0), 0)
    return found or (positions if places * 3 // 8 < positions <= places // 2 else 0)


def accesses(length: int, positions: int, num_warps: int) -> tuple[int, int]:
    """Accesses of a lane in a group of the packed backward pass, and how many of them are a piece, which lies in one
    channel: the most that divide all of them, and channels."""
    chunks = cdiv(length, 256 * num_warps)
    fits = (n for n in range(chunks, 0, -1) if chunks % n == 0 and positions % (256 * n) == 0)
    return chunks, next(fits)
