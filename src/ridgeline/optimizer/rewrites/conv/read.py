"""Reads convolutions of every kind from a graph in one form."""

from __future__ import annotations

from typing import Any

from ridgeline.optimizer.rewrites.context import GraphContext
from ridgeline.optimizer.rewrites.op_names import Call, call

CONVOLUTIONS = {f"conv{turned}{num}d": num for turned in ("", "_transpose") for num in (1, 2, 3)}
"""Names of convolutions and the number of their spatial dims."""
MOST_KINDS = 4
"""The most different convolutions in a graph: each is a kernel to compile and a race."""
Ints = list[int]
Settings = tuple[Ints, Ints, Ints, Ints, int, bool]


def settings_of(layer: Call) -> Settings | None:
    """(stride, padding, dilation, output padding, groups, transposed); None for padding "same"."""
    num, found = CONVOLUTIONS[layer.op], []
    for name, default in (("stride", 1), ("padding", 0), ("dilation", 1), ("output_padding", 0)):
        value = layer.get(name, default)
        value = 0 if value == "valid" else value
        each = [value] if isinstance(value, int) else list(value) if isinstance(value, (tuple, list)) else []
        if not all(isinstance(size, int) for size in each) or len(each) not in (1, num):
            return None
        found.append(each * (num if len(each) == 1 else 1))
    return found[0], found[1], found[2], found[3], int(layer.get("groups", 1)), "transpose" in layer.op


def convolutions(ctx: GraphContext) -> list[Call]:
    """All convolutions of a graph."""
    return [read for node in ctx.nodes if (read := call(node)) is not None and read.op in CONVOLUTIONS]


def num_kinds(ctx: GraphContext, layers: list[Call]) -> int:
    """The number of convolutions with different shapes."""
    return len({(ctx.shape(read["input"]), ctx.shape(read["weight"])) for read in layers})


def ints(value: Any, num: int) -> Ints | None:
    """One number per dim, from one for all or from as many as there are."""
    each = [value] if isinstance(value, int) else list(value) if isinstance(value, (tuple, list)) else []
    if len(each) not in (1, num) or not all(isinstance(size, int) for size in each):
        return None
    return each * (num if len(each) == 1 else 1)
