"""Tiles of the product and of the pass that takes numbers apart."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_DEPTH = 32
"""At 32 terms the error is float32's own (1.1e-7 of the result, emulated); shorter sums were not looked at."""
TOGETHER = 16
"""Blocks of terms that are added up before they go into the whole: one chain of 128 sums of positive terms misses
1.9e-7 of the result (emulated; 1.95e-7 on the device), chains of 16 and 8 miss 1.2e-7, of which the tensor cores have
1.0e-7."""

MOST_THIN_ROWS = 256
"""Rows up to which the other factor is better read once, as it is, than taken apart beforehand."""


@dataclass(frozen=True, slots=True)
class Product:
    """Rows, columns and terms of a tile, tiles of a column handled together, warps and stages."""

    rows: int
    cols: int
    depth: int
    group: int = 8
    num_warps: int = 8
    num_stages: int = 3


@dataclass(frozen=True, slots=True)
class Thin:
    """The same where there are few rows: a tile has all of them or many, and columns to go with them."""

    rows: int
    cols: int
    depth: int = 32
    num_warps: int = 8
    num_stages: int = 4


MOST_TALL_COLS = 64
"""Columns up to which many rows are better read once, as they are."""
LEAST_TALL_ROWS = 8192


def thin(m: int) -> Thin:
    """Tiles as tall as there are rows, so that the large factor is read once."""
    return Thin(128, 128) if m > 64 else Thin(64, 128)


def tall(n: int) -> Thin:
    """The same for many rows and few columns, which take the rows' place."""
    return Thin(64, 128) if n > 32 else Thin(32, 128)


@dataclass(frozen=True, slots=True)
class Pieces:
    """Rows, columns and terms of a tile of few results, and the programs that long sums are cut for.

    256×256 results of 524,288 terms 0.82 ms (PyTorch 1.33, from halves 1.42), 128×128 of 262,144 0.14 (0.22), 512×512
    of 65,536 0.44 (0.70); 0.90, 0.15 and 0.48 with tiles of 64×128, two CTAs per SM.
    """

    rows: int = 128
    cols: int = 128
    depth: int = 32
    num_warps: int = 8
    num_stages: int = 3
    programs_per_sm: int = 1


LEAST_PIECE = 2048
"""Terms of a stretch: adding stretches costs a fraction of them."""


def stretches(m: int, n: int, k: int, chosen: Pieces, num_sms: int) -> tuple[int, int]:
    """Into how many stretches the terms are cut, and how long they are: every program has one."""
    tiles = -(-m // chosen.rows) * -(-n // chosen.cols)
    num = max(1, min(chosen.programs_per_sm * num_sms // tiles, k // LEAST_PIECE))
    length = -(-k // num // chosen.depth) * chosen.depth
    return -(-k // length), length


def split(outer: int, k: int, num: int, num_sms: int) -> tuple[int, int]:
    """Outer indices and terms that a program takes apart at a time where the outer dim is dense: it goes through all
    terms, twice, so that few programs must have many on their way (a weight's gradient of 1,024 columns has 128
    programs of 64 columns and sums of 2,048)."""
    if k < 512:
        return 64, 32
    return (64, 128) if num * -(-outer // 64) >= 2 * num_sms else (32, 128)


def choose(m: int, n: int, k: int, num_sms: int, num: int = 1) -> Product:
    """Smaller tiles where large ones, of ``num`` products together, would leave SMs without work; sums of few
    terms in one block, where small tiles lost (1.55 and 2.07 ms for 32768² results of 32 terms, H200)."""
    depth = 32 if k <= 32 else 64
    if num * -(-m // 128) * -(-n // 128) >= num_sms // 2:
        return Product(128, 128, depth)
    return Product(64, 64, depth, num_warps=4)


def attend(width: int) -> Thin:
    """Queries and keys of a step of attention: digits of all of them lie in shared memory beside what is on its way."""
    if width <= 32:
        return Thin(128, 32, num_stages=2)
    return Thin(64, 64 if width <= 64 else 32, num_warps=4, num_stages=2)
