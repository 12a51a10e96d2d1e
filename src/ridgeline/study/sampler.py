"""Which points come next: a grid, random numbers, a Sobol sequence, NSGA-II, or Optuna where it is installed.

A chunk of points follows from the seed, its number and, for the searching samplers, what the chunks before it gave:
a study that was killed draws the same points again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import InputError, MissingExtra
from ridgeline.study.space import Columns, Space

SAMPLERS = ("auto", "grid", "random", "sobol", "nsga2", "optuna")
Floats = NDArray[np.float64]


def fixed_points(space: Space, sampler: str, seed: int, start: int, stop: int) -> Columns:
    """Points ``start`` to ``stop`` of a sampler that asks for no results."""
    if sampler == "grid":
        return space.grid(np.arange(start, stop))
    if sampler == "random":
        rows = [np.random.default_rng([seed, number]).random(len(space.axes)) for number in range(start, stop)]
        return space.drawn(np.array(rows))
    try:
        from scipy.stats import qmc
    except ImportError as error:
        raise MissingExtra("SciPy", "study", "the sobol sampler") from error
    sequence = qmc.Sobol(len(space.axes), scramble=True, seed=seed)
    if start:
        sequence.fast_forward(start)
    import warnings

    with warnings.catch_warnings():  # that a part of the sequence is no power of two is meant
        warnings.simplefilter("ignore", UserWarning)
        return space.drawn(sequence.random(stop - start))


class Nsga2:
    """NSGA-II on the numbers of levels: constrained dominance, crowding, uniform crossover, steps to nearby levels."""

    def __init__(self, space: Space, seed: int, population: int = 100) -> None:
        self.sizes = np.array([len(axis.levels) for axis in space.axes])
        self.seed, self.population, self.generation = seed, population, 0
        self.genes = np.empty((0, len(self.sizes)), dtype=np.intp)
        self.costs: Floats = np.empty((0, 0))
        self.broken: Floats = np.empty(0)
        self.seen = set[bytes]()

    def ask(self) -> NDArray[np.intp]:
        """Level numbers of the next generation; none when nothing new is left."""
        draw = np.random.default_rng([self.seed, self.generation])
        made, tries = list[NDArray[np.intp]](), 0
        while len(made) < self.population and tries < 60:
            tries += 1
            for row in self._children(draw) if self.generation else draw.integers(0, self.sizes, (
                    self.population, len(self.sizes))):  # fmt: skip
                if (key := row.tobytes()) not in self.seen and len(made) < self.population:
                    self.seen.add(key)
                    made.append(row)
        self.generation += 1
        return np.array(made, dtype=np.intp).reshape(-1, len(self.sizes))

    def _children(self, draw: np.random.Generator) -> NDArray[np.intp]:
        num, dims = len(self.genes), len(self.sizes)
        # Parents are ordered best first: of two drawn, the one that stands earlier wins.
        a, b = (np.minimum(*draw.integers(0, num, (2, self.population))) for _ in range(2))
        child = np.where(draw.random((self.population, dims)) < 0.5, self.genes[a], self.genes[b])
        reach = np.maximum(1, self.sizes * 0.1)
        step = np.rint(draw.standard_cauchy((self.population, dims)) * reach * 0.5).astype(np.int64)
        step = np.where(step == 0, draw.choice([-1, 1], (self.population, dims)), step)
        moved = draw.random((self.population, dims)) < max(1.5 / dims, 0.2)
        return np.asarray(np.clip(child + np.where(moved, np.clip(step, -self.sizes, self.sizes), 0), 0,
                                  self.sizes - 1), dtype=np.intp)  # fmt: skip

    def tell(self, genes: NDArray[np.intp], costs: Floats, broken: Floats) -> None:
        """Costs of a generation, and by how much each point breaks its constraints (0: not at all)."""
        if len(self.genes):
            genes, costs = np.concatenate([self.genes, genes]), np.concatenate([self.costs, costs])
            broken = np.concatenate([self.broken, broken])
        order = _ranked(costs, broken)[: self.population]
        self.genes, self.costs, self.broken = genes[order], costs[order], broken[order]


def _ranked(costs: Floats, broken: Floats) -> NDArray[np.intp]:
    """Rows best first: by front, the less crowded first within one; those that break constraints by how much."""
    fine = np.flatnonzero(broken <= 0)
    order, rest = list[int](), fine
    while len(rest):
        part = costs[rest]
        beaten = np.array([((part <= row).all(axis=1) & (part < row).any(axis=1)).any() for row in part])
        front = rest[~beaten]
        crowd = np.zeros(len(front))
        for column in costs[front].T:
            by, span = np.argsort(column, kind="stable"), np.ptp(column) or 1.0
            crowd[by[[0, -1]]] = np.inf
            crowd[by[1:-1]] += (column[by[2:]] - column[by[:-2]]) / span
        order += front[np.argsort(-crowd, kind="stable")].tolist()
        rest = rest[beaten]
    bad = np.flatnonzero(broken > 0)
    return np.array([*order, *bad[np.argsort(broken[bad], kind="stable")]], dtype=np.intp)


class Optuna:
    """Optuna's multivariate TPE by ask and tell, in memory; for evaluators that take a tenth of a second and more."""

    def __init__(self, space: Space, seed: int, num_objectives: int, population: int = 16) -> None:
        try:
            import optuna
        except ImportError as error:
            raise MissingExtra("Optuna", "search", "the optuna sampler") from error
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.space, self.population = space, population
        self.study = optuna.create_study(
            directions=["minimize"] * num_objectives, sampler=optuna.samplers.TPESampler(seed=seed)
        )
        self.trials: list[Any] = []

    def ask(self) -> NDArray[np.intp]:
        self.trials = [self.study.ask() for _ in range(self.population)]
        rows = [[trial.suggest_int(axis.name, 0, len(axis.levels) - 1) for axis in self.space.axes]
                for trial in self.trials]  # fmt: skip
        return np.array(rows, dtype=np.intp)

    def tell(self, genes: NDArray[np.intp], costs: Floats, broken: Floats) -> None:
        for trial, cost, bad in zip(self.trials, costs, broken, strict=True):
            self.study.tell(trial, (cost if bad <= 0 else np.full_like(cost, 1e30)).tolist())


def search(space: Space, sampler: str, seed: int, num_objectives: int) -> Nsga2 | Optuna:
    """A sampler that asks for results."""
    if not num_objectives:
        raise InputError(f"the {sampler} sampler needs an objective: give --minimize")
    return Nsga2(space, seed) if sampler == "nsga2" else Optuna(space, seed, num_objectives)


