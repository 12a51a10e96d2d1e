"""Tiles of the product and of the pass that takes numbers apart."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_DEPTH = 256
"""Below this many terms a sum rounds so little that 22 bits of each factor would show."""


@dataclass(frozen=True, slots=True)
class Product:
    """Rows, columns and terms of a tile, tiles of a column handled together, warps and stages."""

    rows: int
    cols: int
    depth: int
    group: int = 8
    num_warps: int = 8
    num_stages: int = 3


def choose(m: int, n: int, k: int, num_sms: int) -> Product:
    """Smaller tiles where large ones would leave processors without work."""
    if -(-m // 128) * -(-n // 128) >= num_sms // 2:
        return Product(128, 128, 64)
    return Product(64, 64, 64, num_warps=4)
