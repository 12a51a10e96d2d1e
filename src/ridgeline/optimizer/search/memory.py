"""Memory limits of a search: what eager needs, and whether a candidate fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ridgeline.optimizer.search.candidate import Built
from ridgeline.optimizer.search.problem import Problem

if TYPE_CHECKING:
    from ridgeline.optimizer.search.search import Search

WORKSPACE_BYTES = 32 << 20
"""What a capture may reserve beyond eager's steps: static inputs, and segments that are allocated whole."""


class Memory:
    """Memory that eager needs, and the limit for candidates."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.eager_bytes: int | None = None
        self.base_bytes = self.base_reserved = self.eager_reserved = 0
        self.limit_bytes = problem.memory_limit_bytes

    def fits(self, built: Built, peak: int | None) -> bool:
        """Whether a candidate is within the limit; a graph's pool, which has gaps, may be as large as eager's pool."""
        if peak is None or not self.limit_bytes:
            return True
        if self.problem.memory_limit_bytes is None and built.candidate.graphed:
            return peak <= self.limit_bytes or built.reserved_bytes <= self.eager_reserved + WORKSPACE_BYTES
        return peak <= 1.01 * self.limit_bytes  # the allocator rounds up

    def outgrows(self, built: Built) -> bool:
        """Whether the capture of a training step reserves more than eager's steps do, gaps included."""
        own_limit = self.problem.memory_limit_bytes is None and self.problem.mode == "train"
        recorded = built.candidate.graphed and not built.candidate.grows
        return own_limit and recorded and built.reserved_bytes > self.eager_reserved > 0

    def why_large(self, built: Built) -> str:
        limit = f"{(self.limit_bytes or 0) / 1e9:.2f} GB"
        if self.problem.memory_limit_bytes is not None:
            return f"the limit is {limit}"
        if not built.candidate.graphed:
            return f"training must not need more than eager does, {limit}"
        return (f"training must not need more than eager does: {built.reserved_bytes / 1e9:.2f} GB reserved with its "
                f"graphs, {self.eager_reserved / 1e9:.2f} by eager")  # fmt: skip

    def tell(self, search: Search) -> None:
        """Note that a graph's pool is compared with what eager's allocator reserves, not with what eager uses of it."""
        peak = search.entries[search.best.candidate.name].peak_bytes
        if search.best.candidate.graphed and peak is not None and self.problem.mode == "train":
            held, eager = search.best.reserved_bytes / 1e9, self.eager_reserved / 1e9
            search.notes.append(
                f"memory: {held:.2f} GB reserved with its graphs, gaps included, {eager:.2f} GB by eager; peak memory "
                "is what is allocated, and of graphs all that they reserve"
            )
