"""Launch configuration of the rotary embedding by shape."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.rows import clamp, power_of_two


@dataclass(frozen=True, slots=True)
class Rope:
    """Warps that rotate one token's heads; ``pieces``: by accesses instead of tiles of powers of two."""

    num_warps: int
    pieces: bool = False


def default(heads: int, head_dim: int, keys: int = 0, vector: int = 1) -> Rope:
    """Sixteen elements of the query a thread; in pieces where a tile would be less than half full and they are fuller.

    ``vector``: elements of an access that halves of heads are whole numbers of, 1 where they are not. 40 heads of 80
    dims fill 39 % of a tile: 113 µs where a copy as large takes 75.
    """
    half = head_dim // 2
    filled = heads * half / (power_of_two(heads) * power_of_two(half))
    num = (heads + keys) * half // vector
    if vector > 1 and filled < 0.5 and num / power_of_two(num) > filled:
        return Rope(clamp(power_of_two(num) * vector // 256, 1, 16), True)
    return Rope(clamp(power_of_two(heads) * power_of_two(head_dim) // 512, 1, 16))
