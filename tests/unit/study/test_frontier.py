"""Frontiers against their definition; NSGA-II against exhaustive search."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.study.frontier import frontier, hypervolume, not_surely_beaten
from ridgeline.study.sampler import Nsga2
from ridgeline.study.space import Axis


def beaten(rows, row):
    return bool(((rows <= row).all(axis=1) & (rows < row).any(axis=1)).any())


@given(st.integers(1, 4), st.integers(0, 60), st.integers(0, 10**6))
def test_the_frontier_is_what_no_other_beats(dims, num, seed):
    rows = np.random.default_rng(seed).integers(0, 6, (num, dims)).astype(float)
    expected = [at for at, row in enumerate(rows) if not beaten(rows, row)]
    assert frontier(rows).tolist() == expected
    order = np.random.default_rng(seed).permutation(num)
    assert sorted(order[frontier(rows[order])].tolist()) == expected, "whatever the order"
    assert frontier(np.exp(rows)).tolist() == expected, "whatever the scale"


def test_unknown_costs_are_on_no_frontier():
    assert frontier(np.array([[np.nan, 0.0], [1.0, 1.0]])).tolist() == [1]


def test_the_sure_frontier_keeps_what_is_beaten_only_within_the_intervals():
    middle = np.array([[1.0, 1.0], [1.05, 1.05], [2.0, 2.0]])
    assert frontier(middle).tolist() == [0]
    assert not_surely_beaten(middle * 0.9, middle * 1.1).tolist() == [0, 1]
    assert not_surely_beaten(middle, middle).tolist() == [0]


@given(st.integers(2, 3), st.integers(1, 25), st.integers(0, 10**6))
def test_hypervolume_counts_the_cells_that_a_frontier_covers(dims, num, seed):
    rows = np.random.default_rng(seed).integers(0, 5, (num, dims)).astype(float)
    cells = np.stack(np.meshgrid(*[np.arange(5) + 0.5] * dims, indexing="ij"), axis=-1).reshape(-1, dims)
    covered = sum(bool((rows <= cell).all(axis=1).any()) for cell in cells)
    assert hypervolume(rows, np.full(dims, 5.0)) == covered


class Grid:
    """Axes alone: all that a search needs of a space."""

    def __init__(self, *sizes):
        self.axes = [Axis(str(at), "device", tuple(range(size))) for at, size in enumerate(sizes)]


def test_a_search_draws_no_point_twice_and_the_same_again():
    def walk():
        sampler, seen = Nsga2(Grid(30, 40, 5), 3), []
        for _ in range(6):
            genes = sampler.ask()
            sampler.tell(genes, genes[:, :2] * np.array([1.0, -1.0]), np.zeros(len(genes)))
            seen += [tuple(row) for row in genes.tolist()]
        return seen

    first = walk()
    assert len(set(first)) == len(first) == 600
    assert walk() == first


def test_points_that_keep_the_constraints_come_first():
    sampler = Nsga2(Grid(50, 50), 0)
    for _ in range(12):
        genes = sampler.ask()
        sampler.tell(genes, genes.astype(float), np.maximum(0, 60.0 - genes.sum(axis=1)))
    assert (sampler.broken == 0).all()
    assert sampler.genes.sum(axis=1).min() == 60
