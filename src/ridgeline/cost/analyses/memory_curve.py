"""Live memory over the whole step, with the repeats of a block filled in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ridgeline.cost.prediction import Prediction
from ridgeline.graph import Block, Graph, slot_times

SHOWN = 3
"""Iterations of a block that ``memory_of`` walks: the first, the second standing for the middle ones, and the last."""


def live_bytes(prediction: Prediction) -> Iterator[int]:
    """Live bytes after the allocations of every node as run; middle iterations lie on a line between those walked."""
    memory = prediction.memory
    walked = [live + memory.workspace_bytes for _, live in memory.timeline]
    at = 0
    for repeat, num_nodes in _stretches(prediction.graph):
        shown = len(slot_times(repeat, SHOWN))
        yield from _unrolled(walked[at : at + shown * num_nodes], num_nodes, repeat, shown)
        at += shown * num_nodes


def _stretches(graph: Graph) -> Iterator[tuple[int, int]]:
    """(times run, number of nodes) of every item."""
    for item in graph.items:
        yield (item.repeat, len(item.nodes)) if isinstance(item, Block) else (1, 1)


def _unrolled(walked: Sequence[int], num_nodes: int, repeat: int, shown: int) -> Iterator[int]:
    if repeat == shown:
        yield from walked
        return
    first, middle, last = (walked[i * num_nodes : (i + 1) * num_nodes] for i in range(SHOWN))
    yield from first
    num_middle = repeat - 2
    for i in range(num_middle):
        yield from (low + (high - low) * i // num_middle for low, high in zip(middle, last, strict=True))
    yield from last


def memory_curve(prediction: Prediction, called_s: Sequence[float], end_s: float) -> Iterator[tuple[float, int]]:
    """(seconds, live bytes): at the host call of every node where each has one, else spread evenly until ``end_s``."""
    live = list(live_bytes(prediction))
    if len(called_s) == len(live):
        yield from zip(called_s, live, strict=True)
        return
    for i, value in enumerate(live):
        yield end_s * i / max(1, len(live)), value
