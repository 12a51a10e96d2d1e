"""Convolutions of every kind, read from a graph in one form."""

from __future__ import annotations

from ridgeline.optimizer.rewrites.words import Call

CONVOLUTIONS = {f"conv{turned}{num}d": num for turned in ("", "_transpose") for num in (1, 2, 3)}
"""Their names and the number of their spatial dims."""
Ints = list[int]
Settings = tuple[Ints, Ints, Ints, Ints, int, bool]


def settings_of(layer: Call) -> Settings | None:
    """(stride, padding, dilation, output padding, groups, transposed); None where padding is "same"."""
    num, found = CONVOLUTIONS[layer.op], []
    for name, default in (("stride", 1), ("padding", 0), ("dilation", 1), ("output_padding", 0)):
        value = layer.get(name, default)
        value = 0 if value == "valid" else value
        each = [value] if isinstance(value, int) else list(value) if isinstance(value, (tuple, list)) else []
        if not all(isinstance(size, int) for size in each) or len(each) not in (1, num):
            return None
        found.append(each * (num if len(each) == 1 else 1))
    return found[0], found[1], found[2], found[3], int(layer.get("groups", 1)), "transpose" in layer.op
