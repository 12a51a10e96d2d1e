"""How many rows of logits exist at a time."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.rows import cdiv


@dataclass(frozen=True, slots=True)
class Chunks:
    """Rows whose logits exist at once."""

    rows: int


MOST_CHUNKS = 4


def default(rows: int, cols: int, itemsize: int) -> Chunks:
    """A quarter of the rows, in steps that keep matrix tiles full.

    The weight's gradient is rounded once a chunk: four additions leave 1.6 times the error of one rounding, eight would
    leave more than twice. A quarter of the logits is far under a quarter of what the unfused path holds: three copies.
    """
    return Chunks(max(256, cdiv(cdiv(rows, MOST_CHUNKS), 256) * 256))
