"""Leave rows and whole sources out of every line of published results, and say how well the rest predicts them.

    python -m lab.fit.left_out ../shared/published [--only training static collectives other serving]
                                  [--derivatives d.npz] [--linear]

Every line is fitted again without the rows it is then judged on: language-model training and compiled engines on rows
linearized around the fit to all of them, the solution beginning at the priors (training then simulates what was left
out), networks other than language models and serving from scratch, collectives by fitting each network without the
source. Serving simulates what was left out; ``--linear`` takes its times by
derivatives instead, which is a hundred times faster and within half a point. Sources are those `ridgeline validate`
groups by, or finer. Prints one table, and for training one of biases by source and by publisher.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lab.fit import collectives as fit_collectives
from lab.fit import engines as fit_engines
from lab.fit import serving as fit_serving
from lab.fit import software_stacks as fit_stacks
from lab.fit import training as fit_training
from ridgeline.validation import inference_llm
from ridgeline.validation.measurements import read_table
from ridgeline.validation.verdict import Row

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
DRAWS = 3  # random thirds leave every row out once


@dataclass(frozen=True)
class Found:
    """One row of the table: relative errors of what was left out."""

    line: str
    asked: str
    out: str
    errors: Floats

    def words(self) -> str:
        used = self.errors[np.isfinite(self.errors)]
        mean, median = np.abs(used).mean(), np.median(np.abs(used))
        told = (f"{len(used)}", f"{mean:.1%}", f"{median:.1%}", f"{used.mean():+.1%}")
        return f"| {' | '.join((self.line, self.asked, self.out, *told))} |"


def masks(names: Sequence[str]) -> Iterator[Mask]:
    """The rows of each name, name by name."""
    given = np.array(names)
    yield from (given == name for name in sorted(set(names)))


def thirds(num: int, seed: int = 0) -> list[str]:
    return [str(part) for part in np.random.default_rng(seed).permutation(num) % DRAWS]


@dataclass(frozen=True)
class Biases:
    """A second table: the bias of every source, and its rows, under each way of leaving out."""

    ways: tuple[str, ...]
    rows: list[tuple[str, int, tuple[float, ...]]]
    listed: bool = True

    def words(self) -> str:
        if not self.listed:
            return f"\nBy file:\n\n{self._counts()}"
        head = f"\n| source | rows | {' | '.join(self.ways)} |\n|---|---|{'---|' * len(self.ways)}\n"
        each = (f"| {name} | {num} | {' | '.join(f'{b:+.1%}' for b in found)} |" for name, num, found in self.rows)
        return head + "\n".join(each) + f"\n\n{self._counts()}"

    def _counts(self) -> str:
        told = []
        for at, way in enumerate(self.ways):
            for least in (5, 3, 1):
                found = [abs(bias[at]) for _, num, bias in self.rows if num >= least]
                told.append(f"- {way}: {sum(b > 0.08 for b in found)} of {len(found)} sources of {least} rows or more "
                            "biased by over 8 %")  # fmt: skip
        return "\n".join(told) + "\n"


def training(options: argparse.Namespace) -> Iterator[Found | Biases]:
    """Steps of language models: thirds, sources, publishers and whole generations; then biases by source."""
    data = fit_training.Data(options.published / "training_llm.csv")
    joint = fit_training.Joint(data)
    x, rows = fit_training.fit(data, joint=joint)
    everything = np.ones(len(data.cases), bool)
    errors = {"nothing": fit_training.errors(data, joint, x, everything)}
    for seed in range(options.seeds):
        errors[f"thirds, draw {seed + 1}"] = fit_training.left_out(data, joint, rows, thirds(len(data.cases), seed))
    for how in ("source", "file", "publisher", "generation"):
        errors[f"each {how}"] = fit_training.left_out(data, joint, rows, data.names(how))
    for title, found in errors.items():
        yield Found("training, step time", "10 %, median 6 %", title, found)
    for how in ("source", "publisher"):
        yield _biases(data.names(how), errors)
    yield _biases(data.names("file"), errors, listed=False)


def _biases(names: Sequence[str], errors: Mapping[str, Floats], *, listed: bool = True) -> Biases:
    given = np.array(names)
    told = [(name, int((given == name).sum()), tuple(float(found[given == name].mean()) for found in errors.values()))
            for name in sorted(set(names))]  # fmt: skip
    return Biases(tuple(errors), sorted(told, key=lambda item: -item[1]), listed)


def static(options: argparse.Namespace) -> Iterator[Found]:
    """Compiled engines: batches of FasterTransformer and TensorRT-LLM, MLPerf offline and server."""
    engines = {row.text("config_id"): _publisher(row) for row in _rows(options.published / "inference_llm.csv")}
    errors: dict[str, list[Floats]] = {name: [] for name in ("nothing", "thirds", "models", "sources")}
    for group in fit_serving.COMPILED:
        state = fit_serving.kept(group, fit_serving.compiled_samples(options.published, group))
        errors["nothing"].append(np.expm1(state.rest[:, 0]))
        keys = {
            "thirds": thirds(len(state.samples)), "models": [sample.model for sample in state.samples],
            "sources": [engines[sample.key] for sample in state.samples],
        }  # fmt: skip
        for title, names in keys.items():
            errors[title].append(np.expm1(fit_serving.left_out(state, names)[:, 0]))
    for title, found in errors.items():
        yield Found("static inference", "12 %", title, np.concatenate(found))


def _rows(path: Path) -> list[Row]:
    return [Row(line, record) for line, record in read_table(path)[1]]


def _publisher(row: Row) -> str:
    """A source of static inference; MLPerf by its round."""
    name = inference_llm.source_of(row)
    return row.text("config_id").partition("-")[0] if name == "MLPerf" else name


def collectives(options: argparse.Namespace) -> Iterator[Found]:
    """All-reduces between hosts, each network fitted without the source that is then judged."""
    kept, fresh = [], []
    for points in fit_collectives.network_points(options.published / "collectives.csv").values():
        sources = [row.text("source") for row, *_ in points]
        kept.append(fit_collectives.network_errors(points, fit_collectives.solve_network(points)))
        if len(set(sources)) < 2:
            continue
        for out in masks(sources):
            rest = [point for point, left in zip(points, out, strict=True) if not left]
            mine = [point for point, left in zip(points, out, strict=True) if left]
            fresh.append(fit_collectives.network_errors(mine, fit_collectives.solve_network(rest, points)))
    yield Found("collectives between hosts", "12 %", "nothing", np.concatenate(kept))
    yield Found("collectives between hosts", "12 %", "sources", np.concatenate(fresh))


def other(options: argparse.Namespace) -> Iterator[Found]:
    """Networks other than language models: thirds, fifths of the sources, whole documents."""
    folder = options.published
    points = fit_stacks.read(folder / "training_other.csv", folder / "inference_other.csv")
    fit = fit_stacks.Fit(points)
    yield Found("other networks", "15 %", "nothing", fit.errors(fit.solve(np.ones(len(points), bool))))
    for title, folds in (
        ("thirds", fit_stacks.thirds(points)), ("sources", fit_stacks.groups(points, str, 5, 1)),
        ("documents", fit_stacks.groups(points, fit_stacks.document, 10, 3)),
    ):  # fmt: skip
        yield Found("other networks", "15 %", title, fit_stacks.held_out(fit, folds))


def serving(options: argparse.Namespace) -> Iterator[Found]:
    """Aggregated serving: thirds, models, sources (an engine on a system), architectures."""
    served = fit_engines.samples(options.published)
    rows = [*served, *fit_engines.loaded(options.published)]
    joint = fit_engines.Joint.of(rows, fit_engines.slopes(rows, options.derivatives))
    rest, _ = fit_engines.search(rows, joint, options.rounds)
    leave = fit_engines.left_out_linear if options.linear else fit_engines.left_out
    for title, how in (("nothing", ""), ("thirds", "third"), ("models", "model"), ("sources", "source")):
        found = np.expm1(leave(rows, joint, rest, how) if how else rest)[: len(served)]
        yield Found("serving, first token", "20 %", title, found[:, 0])
        yield Found("serving, each token", "12 %", title, found[:, 1])


LINES: dict[str, Callable[[argparse.Namespace], Iterator[Found | Biases]]] = {
    "training": training, "static": static, "collectives": collectives, "other": other, "serving": serving,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("published", type=Path)
    parser.add_argument("--only", nargs="+", choices=LINES, default=list(LINES))
    parser.add_argument("--derivatives", type=Path, help="those of serving, kept by fit_engines.py")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=4, help="draws of random thirds, for training")
    parser.add_argument("--linear", action="store_true", help="serving by derivatives, without simulations")
    options = parser.parse_args()
    print("| line | asked | left out | rows | mean | median | bias |\n|---|---|---|---|---|---|---|")
    for name in options.only:
        for found in LINES[name](options):
            print(found.words(), flush=True)


if __name__ == "__main__":
    main()
