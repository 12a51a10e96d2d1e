"""Launch configurations of LayerNorm by shape: RMSNorm's, with room for a second column sum."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.kernels.rms_norm import config as rms
from ridgeline.kernels.rms_norm.config import LONG_BLOCK, Backward, Forward
from ridgeline.kernels.rows import cdiv

__all__ = ["LONG_BLOCK", "Backward", "Forward", "apart", "backward", "backward_ends", "forward", "past_words"]


def forward(rows: int, cols: int, itemsize: int) -> Forward:
    """As RMSNorm's, but with thirty-two elements a thread: its sums meet twice, 16384×4096 70.7 µs, 71.8 with sixteen,
    8192×8192 70 and 79. Past 8k columns eight warps hold more each: 56 against 62 µs for 4096×12288. Past 1k columns
    two warps leave fewer lanes idle: 65536×1280 85 µs, 108 on four, 65536×1536 98 and 115. Float32 2287×14336 73 on
    eight warps, 83 on sixteen, 82 on 32."""
    chosen = rms.held(rows, cols, itemsize)
    if 8192 < cols <= 12288 and itemsize == 2:
        chosen = Forward(1, cdiv(cols, 2048), 2048, 8)
    if 12288 < cols <= 14336 and itemsize == 4:  # of more columns an SM has room for one program
        chosen = Forward(1, cdiv(cols, 2048), 2048, 8)
    if 16384 < cols <= 20480 and itemsize == 2:
        chosen = replace(chosen, programs_per_sm=2)
    if 1024 < cols <= 2048 and itemsize == 2 and chosen.rows == 1:
        chosen = Forward(1, cdiv(cols, 512), 512, 2)
    return rms.early(rms.kept(chosen, rows, cols, itemsize), rows, itemsize, vectors=2)


def apart(rows: int, whole: int, itemsize: int) -> Forward | None:
    """As RMSNorm's, float32 rows as well."""
    return rms.apart(rows, whole, itemsize, centered=True)


def backward_ends(rows: int, whole: int, itemsize: int, words: bool = False) -> Backward | None:
    """Unaligned rows, ``whole`` columns of them in whole accesses, their ends apart: a thread has 32
    of each vector. ``words``: what waits may be two numbers a word.

    131072×1001 216 µs and 220 with masks; 65536×2049 226 in shared memory, as it was with its ends apart, 65536×1458
    159 and 193, 65536×2065 228 (239 finished a turn later). Float32 16384×4099 215, 264 with masks.
    """
    if rows < rms.LEAST_PERSISTENT_ROWS or not 512 <= whole <= 4096:
        return None
    if words and itemsize == 2 and 1024 < whole <= 2560:
        return rms.again(whole, 2, 2, 8) if whole <= 2048 else rms.again(whole, 4, 3, 4)
    if itemsize == 4:
        return Backward(1, cdiv(whole, 512), 512, 4, 3, 2, True, True) if 1024 < whole <= 4096 else None
    if whole <= 1024:
        return Backward(1, cdiv(whole, 256), 256, 1, 3, 8, True, True)
    return Backward(1, cdiv(whole, 1024), 1024, 4, 3, 3 if whole <= 2048 else 2, True, True)


def persistent_pipelined(rows: int, cols: int, itemsize: int, unaligned: bool) -> Backward | None:
    """Where rows finished a turn after their sums were taken are the fastest; None elsewhere.

    16384×5003: 137 µs, 170 with what waits in registers until its sums are known; 38416×3771 234 and 235, 65536×734
    90.8 and 95.6, 30000×1001 60.0 and 70.3. Rows that fill accesses: 7519×5376 76.0, 80.2 held, 3758×6848 50.9 and
    52.4, 9000×3200 52.6 and 55.6. Float32 3332×10234 127 and 173, 4849×8632 154 and 167, 15784×768 45.6 and 50.1,
    30525×1910 205 and 209, 65536×450 102 and 108. Since places in memory are counted along, 6676×11752 140 (146 held,
    148 read twice), but 65536×2065 239 (228 read twice) and 65536×440 56.4 (55.5 held). Not 16384×4096 (110, 108 held),
    4501×4280 (47.9, 44.2), 5430×4544 (51.2, 49.2), 18574×2336 (84.4, 76.6), 8192×8192 (111, 110), 2470×12288 (61.1,
    59.9), 9569×12540 (246, 221 read twice), float32 36873×503 (76.5, 70.6), 9119×3722 (125, 122).
    """
    if cols > ((10240 if unaligned else 12288) if itemsize == 4 else 20480):
        return rms.if_enough(rms.split_tile(cols, itemsize, 2), rows)
    if itemsize == 4:
        wanted = 8192 < cols <= 10240 or (1024 < cols <= 2048 or 384 < cols < 512 if unaligned else 512 < cols <= 768)
    elif unaligned:
        wanted = 512 < cols <= 1024 or 2560 < cols <= 6144
    else:
        wanted = 3072 < cols < 4096 or 5120 < cols < 8192 or 11264 < cols < 12288
    return rms.if_enough(rms.ahead_tile(cols, itemsize, 2), rows) if wanted else None


def packed_words(rows: int, cols: int, unaligned: bool) -> Backward | None:
    """Rows that wait in shared memory, those too long for registers and those that would leave lanes idle.

    8107×7538: 106 µs (121 finished a turn later on sixteen warps, 113 by two programs), 14076×8482 232 (313 on
    sixteen), 19128×13006 402 and 6807×15579 196 (427 and 203 on sixteen), 4096×14336 102 (202 on thirty-two warps,
    held), 7756×16384 198 (314 finished a turn later), 4096×20480 186 (341 read twice). 65536×1458 159, 65536×1600 180,
    but 65536×2048 211 and 204. Where registers hold rows they win: 16384×4096 108 µs, 122 so, 16384×6144 173 and 181.
    """
    if 1280 < cols <= 1792 and rows >= 8192 and not unaligned:
        return rms.again(cols, 2, 2, 8)
    if (6144 if unaligned else 12288) < cols <= 16384:
        return rms.again(cols, 8, 3 if cols <= 14336 else 2, 1)
    if 16384 < cols <= 20480:  # 1088×18432 47.4 µs, 61.0 on sixteen warps, which spill
        return rms.again(cols, 8, 2, 1)
    return None


def past_words(rows: int, cols: int) -> Backward | None:
    """As RMSNorm's, and where it holds rows of 11k to 12k columns.

    2048×18432 89.3 µs (140 on sixteen warps, 201 read three times), 4096×14336 130 (226 held), 9001×5376 105.2 (107.3),
    2470×12288 73.8 (75.2); not 4001×8192 (80.8, 76.2), 20000×1600 (81.1, 73.9).
    """
    if 5120 < cols <= 6144 and rows >= rms.LEAST_PERSISTENT_ROWS:
        return rms.again(cols, 8, 3, 2)
    if 11264 < cols <= 12288:
        return rms.again(cols, 8, 3, 1)
    return rms.past_words(rows, cols)


def backward(rows: int, cols: int, itemsize: int, unaligned: bool = False, words: bool = False) -> Backward:
    """As RMSNorm's; two column sums leave room for fewer programs, and for fewer rows on their way.

    unaligned rows reach into one piece more: 32768×4099 306 µs on four warps, 376 to 443 on eight.
    """
    found = persistent_pipelined(rows, cols, itemsize, unaligned) if words else None
    if found is None and words and itemsize == 2:
        found = packed_words(rows, cols, unaligned)
    if found is not None:
        return found
    if 256 < cols <= 512 and itemsize == 2 and rows >= 16384 and not unaligned:  # 65536×480: 56.1 µs, 59.4 a row a warp
        return Backward(2, cdiv(cols, 128), 128, 1, 3, 8, True)
    if 1024 < cols <= 1280 and itemsize == 2 and rows >= 8192 and not unaligned:  # 65536×1280: 134, 187 on eight warps
        return Backward(1, cdiv(cols, 256), 256, 1, 3, 8, True)
    if unaligned and 2048 < cols <= 5112 and itemsize == 2:
        return Backward(1, cdiv(cols, 1024), 1024, 4, 3, 2, False)
    chosen = rms.backward(rows, cols, itemsize, num_sums=2, unaligned=unaligned)
    if chosen.num_warps == 8 and chosen.chunks == 3:
        return replace(chosen, programs_per_sm=1)
    return chosen
