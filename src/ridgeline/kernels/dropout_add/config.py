"""Launch configuration of dropout and add by size."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """Calls of the generator in a program, of eight elements each, its warps, and accesses in which these are read: in
    one, the mask of four-byte elements goes through shared memory once."""

    counters: int
    num_warps: int
    parts: int = 1


MANY = 1 << 21


def default(num: int, itemsize: int, unaligned: bool) -> Tile:
    """A counter a thread, two where many elements end inside accesses; few four-byte elements in two accesses, each of
    which leaves half of what it touches to the other, since a barrier is what is left to save there (not timed).

    Backward, in brackets where masks went through shared memory and eager: 169×1912 of float32 4.7 µs (5.3; 4.9),
    1147×13696 19.5 (22.1; 23.3), 20.3 with four counters a thread; 3493×12288 of float32 85.3 (89.1; 94.8) and 87.2;
    1616×2763 9.1 (eager 9.7), on half as many threads 10.0, but 245×1948 4.7 and 4.3 with a counter each (4.7). Forward
    1147×13696 27.5 (29.2; 56.6) and 28.6.
    """
    return Tile(256 if unaligned and num >= MANY else 128, 4, 2 if itemsize == 4 and num < MANY else 1)
