"""Parallel plans and what they make of a graph."""

from ridgeline.plan.partition import Partition, Piece, partition, rank_graph
from ridgeline.plan.plan import Plan

__all__ = ["Partition", "Piece", "Plan", "partition", "rank_graph"]
