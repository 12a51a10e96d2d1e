"""A study: points of a space evaluated in chunks, kept as they come, with their frontier and what matters."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import InputError, RidgelineError, nearest
from ridgeline.resources import data_dir
from ridgeline.store.record import canonical
from ridgeline.store.store import Store, StudyRow
from ridgeline.study import workers as places
from ridgeline.study.evaluate import MEASURES, WITH_INTERVAL, evaluated, known_names, prediction_at
from ridgeline.study.expression import Expression, parse
from ridgeline.study.frontier import frontier, not_surely_beaten
from ridgeline.study.sampler import SAMPLERS, fixed_points, search
from ridgeline.study.space import Columns, Space

KEPT = {
    "predict": ("step_s", "energy_j", "peak_bytes"), "simulate": ("step_s", "mfu_frac", "peak_bytes"),
    "serve": ("ttft_s", "tpot_s", "tokens_per_s"),
}  # fmt: skip
SHARED_ERROR_FRAC = 0.8
"""Share of an error (its logarithm) that points of one study have in common: one network, one calibration. Assumed."""
CODE = ("cost", "graph", "hardware", "models", "plan", "sim", "study")  # packages that a point depends on
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Spec:
    """What a study is: everything that its table depends on."""

    space: Space
    minimize: tuple[str, ...] = ()
    maximize: tuple[str, ...] = ()
    subject_to: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    budget: int = 10_000
    sampler: str = "auto"
    seed: int = 0
    errors: tuple[tuple[str, float], ...] = ()  # measured output error by precision

    def __post_init__(self) -> None:
        if self.sampler not in SAMPLERS:
            raise InputError(f"no sampler {self.sampler!r}{nearest(self.sampler, SAMPLERS)}")
        if self.budget < 1:
            raise InputError(f"a budget of {self.budget} points: give one or more")
        known = set(known_names(self.space).values())
        for text in (*self.minimize, *self.maximize, *self.subject_to, *self.keep):
            for name in self.parsed(text).names():
                if name not in known:
                    words = {*known_names(self.space), *MEASURES[self.space.evaluator]}
                    raise InputError(f"{self.space.evaluator} gives no {name!r} (in {text!r}){nearest(name, words)}")
        if self.method == "grid" and self.space.size > self.budget:
            raise InputError(
                f"the grid has {self.space.size:,} points, more than the budget of {self.budget:,}: raise --budget, "
                "give fewer levels, or choose --sampler sobol, random or nsga2"
            )

    @property
    def method(self) -> str:
        """The sampler that is used: a grid where the budget holds all of it, else a search for the frontier."""
        if self.sampler != "auto":
            return self.sampler
        if self.space.size <= self.budget:
            return "grid"
        return "nsga2" if self.minimize or self.maximize else "sobol"

    @property
    def searches(self) -> bool:
        return self.method in ("nsga2", "optuna")

    @property
    def num_points(self) -> int:
        return min(self.space.size, self.budget) if self.method in ("grid", "nsga2", "optuna") else self.budget

    @property
    def chunk_size(self) -> int:
        """Points that are evaluated and kept at once."""
        if self.space.evaluator != "predict":
            return max(1, min(16, math.ceil(self.num_points / 16)))
        return max(256, min(16_384, math.ceil(self.num_points / 16)))

    @property
    def num_chunks(self) -> int:
        return 0 if self.searches else math.ceil(self.num_points / self.chunk_size)

    def parsed(self, text: str) -> Expression:
        return parse(text, known_names(self.space))

    def objectives(self) -> list[tuple[str, Expression, float]]:
        """(as written, expression, 1 to minimize or -1 to maximize)."""
        return [(text, self.parsed(text), 1.0) for text in self.minimize] + [
            (text, self.parsed(text), -1.0) for text in self.maximize
        ]

    def needed(self) -> frozenset[str]:
        """Measures that the expressions and the table need."""
        texts = (*self.minimize, *self.maximize, *self.subject_to, *self.keep)
        named = {name for text in texts for name in self.parsed(text).names()}
        return frozenset(named | set(KEPT[self.space.evaluator]))

    def columns(self) -> tuple[str, ...]:
        """Columns of the table: axes, measures with their intervals, reason."""
        axes = [axis.name for axis in self.space.axes]
        measures = sorted(self.needed() - set(axes))
        intervals = [f"{name}{end}" for name in measures if name in WITH_INTERVAL for end in (".low", ".high")]
        return (*axes, *measures, *intervals, "reason")

    def to_dict(self) -> dict[str, Any]:
        return {
            "space": self.space.to_dict(), "minimize": list(self.minimize), "maximize": list(self.maximize),
            "subject_to": list(self.subject_to), "keep": list(self.keep), "budget": self.budget,
            "sampler": self.sampler, "seed": self.seed, "errors": [list(pair) for pair in self.errors],
        }  # fmt: skip

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Spec:
        words = {name: tuple(found[name]) for name in ("minimize", "maximize", "subject_to", "keep")}
        return cls(space=Space(**found["space"]), budget=found["budget"], sampler=found["sampler"], seed=found["seed"],
                   errors=tuple((str(name), float(error)) for name, error in found["errors"]), **words)  # fmt: skip


@lru_cache(maxsize=4)
def _spec_of(text: str) -> Spec:
    import json

    return Spec.from_dict(json.loads(text))


def evaluate_chunk(given: Mapping[str, Any], number: int, genes: Any) -> Columns:
    """The table of one chunk, anywhere; ``genes`` are level numbers where a search chose the points."""
    spec = _spec_of(canonical(given))
    if genes is not None:
        points = spec.space.chosen(np.asarray(genes, dtype=np.intp))
    else:
        start = number * spec.chunk_size
        stop = min(start + spec.chunk_size, spec.num_points)
        points = fixed_points(spec.space, spec.method, spec.seed, start, stop)
    found = evaluated(spec.space, points, spec.needed(), dict(spec.errors))
    num = len(found["reason"])
    table = {**points, **{name: values for name, values in found.items() if name not in points}}
    reason = found["reason"].astype(object)
    for text in spec.subject_to:
        for part in spec.parsed(text).parts():
            holds = np.broadcast_to(part.value(table), num).astype(bool)
            reason = np.where((reason == "") & ~holds, f"not {part.text}", reason)
    table["reason"] = reason.astype(str)
    for name in spec.columns():
        if name not in table:
            table[name] = np.full(num, np.nan)
    return {name: np.asarray(table[name]) for name in spec.columns()}


@cache
def code_version() -> str:
    """A hash of the models' code and data: points of two versions are never mixed."""
    package, made = Path(__file__).resolve().parent.parent, hashlib.blake2b(digest_size=16)
    files = [path for name in CODE for path in sorted((package / name).rglob("*.py"))]
    data = [path for path in sorted(data_dir().rglob("*")) if path.suffix in (".toml", ".json", ".npz")]
    for path in (*files, *(path for path in data if "recordings" not in path.parts)):
        made.update(path.name.encode() + b"\0" + path.read_bytes())
    return made.hexdigest()


@dataclass(frozen=True)
class Study:
    """The points that were evaluated. Numbers of points count rows of the table."""

    spec: Spec
    row: StudyRow
    columns: Columns

    def __len__(self) -> int:
        return len(self.columns["reason"])

    @property
    def name(self) -> str:
        return self.row.name

    def table(self) -> Columns:
        """All points by column."""
        return self.columns

    @cached_property
    def feasible(self) -> NDArray[np.intp]:
        """Points that can be built and keep every constraint."""
        return np.flatnonzero(self.columns["reason"] == "")

    @cached_property
    def outcomes(self) -> Counter[str]:
        """How many points failed for which reason; the feasible ones under an empty reason."""
        words, counts = np.unique(self.columns["reason"], return_counts=True)
        return Counter(dict(zip(words.tolist(), counts.tolist(), strict=True)))

    def costs(self, end: str = "") -> NDArray[np.float64]:
        """The objectives of the feasible points, all to be made small; at the ``low`` or ``high`` end of what is sure.

        Errors of one model move together: an expression is taken with all of its measures at the same end, and of an
        interval only the part that points do not share counts against another point.
        """
        found = []
        for _, expression, sign in self.spec.objectives():
            if not end:
                found.append(sign * self._value(expression, ""))
            else:
                ends = [sign * self._value(expression, which) for which in (".low", ".high")]
                found.append(np.minimum(*ends) if end == "low" else np.maximum(*ends))
        return np.stack(found, axis=1) if found else np.empty((len(self.feasible), 0))

    def _value(self, expression: Expression, end: str) -> NDArray[np.float64]:
        part = {}
        for name in expression.names():
            part[name] = self.columns[name][self.feasible]
            if end and f"{name}{end}" in self.columns:
                ratio = self.columns[f"{name}{end}"][self.feasible] / part[name]
                part[name] = part[name] * ratio ** (1.0 - SHARED_ERROR_FRAC)
        return np.broadcast_to(expression.value(part).astype(np.float64), len(self.feasible))

    def frontier(self, sure: bool = False) -> NDArray[np.intp]:
        """Points that no other beats; ``sure`` keeps those that some other beats only within the intervals."""
        if not self.spec.objectives():
            raise InputError("a frontier needs an objective: give --minimize or --maximize")
        found = not_surely_beaten(self.costs("low"), self.costs("high")) if sure else frontier(self.costs())
        return np.asarray(self.feasible[found])

    def point(self, number: int) -> dict[str, Any]:
        """One row of the table."""
        if not 0 <= number < len(self):
            raise InputError(f"no point {number}: the study has {len(self):,}, counted from 0")
        return {name: values[number].item() for name, values in self.columns.items()}

    def sensitivities(self) -> dict[str, dict[str, float]]:
        """Share of each objective's variance that each axis explains alone (of logarithms where all are positive)."""
        found: dict[str, dict[str, float]] = {}
        for text, expression, _ in self.spec.objectives():
            values = self._value(expression, "")
            index = self.feasible[np.isfinite(values)]
            values = values[np.isfinite(values)]
            if len(values) < 2:
                continue
            values = np.log(values) if (values > 0).all() else values
            total = float(values.var())
            found[text] = {}
            for axis in self.spec.space.axes:
                column = self.columns[axis.name][index]
                if axis.bounds is not None or len(axis.levels) > 64:  # a range, in sixteen parts
                    edges = np.quantile(column.astype(float), np.linspace(0, 1, 17)[1:-1])
                    groups = np.searchsorted(edges, column.astype(float))
                else:
                    groups = np.unique(column, return_inverse=True)[1].reshape(-1)
                counts = np.bincount(groups)
                sums = np.bincount(groups, weights=values)
                means = sums[counts > 0] / counts[counts > 0]
                between = float((counts[counts > 0] * (means - values.mean()) ** 2).sum() / len(values))
                num = int(np.count_nonzero(counts))  # groups that say nothing still differ as values within them do
                chance = (num - 1) * max(0.0, total - between) / max(len(values) - num, 1)
                found[text][axis.name] = float(max(0.0, between - chance) / total) if total > 0 else 0.0
        return found

    def why(self, a: int, b: int) -> list[dict[str, Any]]:
        """What differs between two points, op by op, the largest difference first."""
        if self.spec.space.evaluator != "predict":
            raise InputError("why compares points of predict op by op; compare others by their measures")
        sides = [prediction_at(self.spec.space, {axis.name: self.point(n)[axis.name] for axis in self.spec.space.axes})
                 for n in (a, b)]  # fmt: skip
        groups: dict[tuple[str, str], list[Any]] = {}
        for side, prediction in enumerate(sides):
            for row in prediction.rows():
                group = groups.setdefault((row.module or row.name, row.op), [0.0, 0.0, "", ""])
                group[side] += row.expected_s
                group[2 + side] = row.bound
            waits = groups.setdefault(("", "waiting for the host"), [0.0, 0.0, "host", "host"])
            waits[side] += prediction.idle_s
        made = [{"module": module, "op": op, "a_s": v[0], "b_s": v[1], "delta_s": v[1] - v[0], "a_bound": v[2],
                 "b_bound": v[3]} for (module, op), v in groups.items()]  # fmt: skip
        return sorted(made, key=lambda row: -abs(row["delta_s"]))


def run(
    spec: Spec,
    store: Store,
    name: str,
    *,
    workers: int = 1,
    ray: str = "",
    resume: bool = False,
    progress: Progress | None = None,
) -> Study:
    """Evaluate what is missing of a study and return all of it."""
    row = _begun(spec, store, name, resume)
    given = spec.to_dict()
    done = store.chunk_numbers(row.id)
    if spec.searches:
        _searched(spec, given, store, row, workers, ray, progress)
    else:
        missing = [(number, None) for number in range(spec.num_chunks) if number not in done]
        points = len(done) * spec.chunk_size
        for number, columns in _placed(given, missing, workers, ray):
            store.add_chunk(row.id, number, columns)
            points += len(columns["reason"])
            if progress:
                progress(min(points, spec.num_points), spec.num_points)
    return finished(spec, store, row)


def finished(spec: Spec, store: Store, row: StudyRow) -> Study:
    """The study as the store has it."""
    columns = store.table(row.id)
    if row.state != "done":
        store.set_state(row.id, "done", len(columns["reason"]))
    return Study(spec, store.study(row.id), columns)


def opened(store: Store, name: str) -> Study:
    """A study that was kept, as far as it got."""
    row = store.study(name)
    columns = store.table(row.id)
    if not columns:
        raise InputError(f"study {row.name!r} has no point yet: run it with --resume")
    return Study(Spec.from_dict(row.spec), row, columns)


def _begun(spec: Spec, store: Store, name: str, resume: bool) -> StudyRow:
    """The row of a new study or the one that goes on; what changed since it was kept is refused."""
    kept, code = store.studies(name), code_version()
    if kept and kept[-1].spec != spec.to_dict():
        changed = ", ".join(_changes(kept[-1].spec, spec.to_dict()))
        raise InputError(
            f"study {name!r} was kept with another spec ({changed}): give it another --name; nothing was changed"
        )
    if kept and kept[-1].code != code and kept[-1].state != "done":
        raise InputError(
            f"study {name!r} was begun with other model code: points of two versions never mix; "
            "give it another --name, or remove it"
        )
    same = [row for row in kept if row.code == code]
    if same and same[-1].state != "done" and store.chunk_numbers(same[-1].id) and not resume:
        num = len(store.chunk_numbers(same[-1].id))
        raise InputError(f"study {name!r} was interrupted after {num} chunks: give --resume, or another --name")
    return store.add_study(name, spec.to_dict(), code, spec.columns(), num_chunks=spec.num_chunks,
                           num_points=spec.num_points)  # fmt: skip


def _changes(a: Mapping[str, Any], b: Mapping[str, Any], where: str = "") -> Iterator[str]:
    for key in {**a, **b}:
        old, new = a.get(key), b.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _changes(old, new, f"{key}." if key != "space" else "")
        elif old != new:
            yield f"{where}{key}: {old} → {new}"


def _placed(
    given: Mapping[str, Any], tasks: Sequence[places.Task], workers: int, ray: str
) -> Iterator[tuple[int, Columns]]:
    if ray:
        return places.on_ray(evaluate_chunk, given, tasks, ray, workers)
    if workers > 1 and len(tasks) > 1:
        return places.processes(evaluate_chunk, given, tasks, workers)
    return places.here(evaluate_chunk, given, tasks)


def _searched(
    spec: Spec, given: Mapping[str, Any], store: Store, row: StudyRow, workers: int, ray: str, progress: Progress | None
) -> None:
    """Generations one after another: those that are kept are told to the sampler instead of being evaluated."""
    sampler = search(spec.space, spec.method, spec.seed, len(spec.objectives()))
    kept, number, total = dict(store.chunks(row.id)), 0, 0
    while total < spec.num_points:
        genes = sampler.ask()[: spec.num_points - total]
        if not len(genes):
            return
        columns = kept.get(number)
        if columns is None:
            pieces = max(1, min(workers if workers > 1 or ray else 1, len(genes)))
            if spec.space.evaluator == "predict" and not ray:
                pieces = 1
            parts = dict(_placed(given, list(enumerate(np.array_split(genes, pieces))), workers, ray))
            columns = {name: np.concatenate([parts[at][name] for at in range(pieces)]) for name in parts[0]}
            store.add_chunk(row.id, number, columns)
        study = Study(spec, row, columns)
        costs = np.full((len(genes), len(spec.objectives())), np.inf)
        costs[study.feasible] = study.costs()
        # How badly a point fails: constraints come before building it at all.
        reasons = columns["reason"]
        broken = np.where(reasons == "", 0.0, np.where(np.char.startswith(reasons, "not "), 1.0, 2.0))
        broken = np.where((broken == 0) & ~np.isfinite(costs).all(axis=1), 2.0, broken)
        sampler.tell(genes, costs, broken)
        total, number = total + len(genes), number + 1
        if progress:
            progress(total, spec.num_points)


def infeasible(study: Study) -> str:
    """One line for a study without a feasible point: what excludes how many, and how near the nearest came."""
    parts = []
    for reason, count in study.outcomes.most_common(3):
        near = ""
        if reason.startswith("not "):
            try:
                expression = study.spec.parsed(reason.removeprefix("not "))
                names = [name for name in expression.names() if study.columns[name].dtype.kind == "f"]
                if names and np.isfinite(study.columns[names[0]]).any():
                    low, high = np.nanmin(study.columns[names[0]]), np.nanmax(study.columns[names[0]])
                    near = f" ({names[0]} from {low:.4g} to {high:.4g})"
            except (RidgelineError, KeyError):
                near = ""
        parts.append(f"{count:,}: {reason}{near}")
    return f"all {len(study):,} points are infeasible: {'; '.join(parts)}; all of them are kept"
