"""Pareto frontiers and hypervolume; every objective is to be made small."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def frontier(costs: Floats) -> NDArray[np.intp]:
    """Rows that no other row beats: as small in every objective and smaller in one. Equal rows stay together."""
    finite = np.flatnonzero(np.isfinite(costs).all(axis=1))
    rows = costs[finite]
    if costs.shape[1] == 1:
        return finite[rows[:, 0] == rows[:, 0].min()] if len(rows) else finite
    if costs.shape[1] == 2:
        order = np.lexsort((rows[:, 1], rows[:, 0]))
        first, second = rows[order, 0], rows[order, 1]
        best = np.minimum.accumulate(second)
        keep = np.ones(len(order), dtype=bool)
        keep[1:] = second[1:] < best[:-1]
        tied = np.zeros(len(order), dtype=bool)
        tied[1:] = (first[1:] == first[:-1]) & (second[1:] == second[:-1])
        for at in np.flatnonzero(tied):  # a row equal to the one before shares its fate
            keep[at] = keep[at - 1]
        return np.sort(finite[order[keep]])
    # Equal values have equal ranks: then a row that beats another has the smaller sum.
    ranks = sum(np.unique(column, return_inverse=True)[1].reshape(-1) for column in rows.T) + np.zeros(len(rows))
    rows, finite = rows[np.argsort(ranks, kind="stable")], finite[np.argsort(ranks, kind="stable")]
    kept = list[int]()
    while len(rows):  # the row best by its ranks has no other that beats it
        lead = rows[0]
        kept += finite[(rows == lead).all(axis=1)].tolist()
        left = (rows < lead).any(axis=1)
        rows, finite = rows[left], finite[left]
    return np.sort(np.array(kept, dtype=np.intp))


def not_surely_beaten(lows: Floats, highs: Floats) -> NDArray[np.intp]:
    """Rows that no other beats beyond both intervals: with its high ends below their low ends, in every objective."""
    finite = np.flatnonzero(np.isfinite(lows).all(axis=1) & np.isfinite(highs).all(axis=1))
    rivals = highs[finite][frontier(highs[finite])]
    beaten = np.zeros(len(finite), dtype=bool)
    low = lows[finite]
    for rival in rivals[np.argsort(rivals.sum(axis=1))]:
        alive = np.flatnonzero(~beaten)
        beaten[alive] = (rival <= low[alive]).all(axis=1) & (rival < low[alive]).any(axis=1)
    return np.asarray(finite[~beaten])


def hypervolume(costs: Floats, reference: Floats) -> float:
    """Volume between a frontier of two or three objectives and a reference point that is worse in all of them."""
    rows = costs[np.isfinite(costs).all(axis=1) & (costs < reference).all(axis=1)]
    if not len(rows):
        return 0.0
    rows = rows[frontier(rows)]
    if rows.shape[1] == 2:
        rows = rows[np.argsort(rows[:, 0])]
        widths = np.append(rows[1:, 0], reference[0]) - rows[:, 0]
        return float((widths * (reference[1] - np.minimum.accumulate(rows[:, 1]))).sum())
    rows = rows[np.argsort(rows[:, -1])]
    depths = np.append(rows[1:, -1], reference[-1]) - rows[:, -1]
    return float(sum(
        depth * hypervolume(rows[: at + 1, :-1], reference[:-1]) for at, depth in enumerate(depths) if depth > 0
    ))  # fmt: skip
