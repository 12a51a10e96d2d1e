"""Decomposed exports raised back to the calls the network made."""

from __future__ import annotations

from torch import fx


def raised(graph: fx.Graph) -> None:
    """Rewrite in place, pattern by pattern."""
