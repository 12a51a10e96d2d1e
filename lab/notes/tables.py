"""The tables of the notes: each function reads recordings and returns lines of Markdown."""

from __future__ import annotations

import gzip
import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from lab import ROOT
from lab.fit.recordings import load_models, load_operators
from lab.optimize.tables import HEAD
from lab.optimize.tables import row as model_row
from lab.planted.recordings import injected_cases, suite_folder
from lab.validate.operators import class_of, errors
from ridgeline.bench.race import Row, paired
from ridgeline.cost.price import pricer_of
from ridgeline.hardware import device

FOLDER = ROOT / "data" / "recordings" / "h200"
TABLES: dict[str, Callable[..., Iterable[str]]] = {}


def table(function: Callable[..., Iterable[str]]) -> Callable[..., Iterable[str]]:
    TABLES[function.__name__.replace("_", "-")] = function
    return function


def recorded(name: str) -> Any:
    return json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()))


def every(prefix: str) -> list[tuple[Path, Any]]:
    """All recordings of a series, in the order they were made."""
    paths = sorted(FOLDER.glob(f"{prefix}*.json.gz"), key=lambda path: int(re.findall(r"\d+", path.stem)[-1]))
    if not paths:
        raise FileNotFoundError(f"no recording {prefix}* in {FOLDER}")
    return [(path, recorded(path.name.removesuffix(".json.gz"))) for path in paths]


def cells(*row: object) -> str:
    return f"| {' | '.join(map(str, row))} |"


def head(*names: str) -> list[str]:
    return [cells(*names), cells(*["---"] * len(names))]


def geometric_mean(ratios: Iterable[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))


@table
def models_optimized() -> Iterator[str]:
    """Inference: each network by its last search."""
    last: dict[str, tuple[dict[str, Any], str]] = {}
    for path, document in every("optimize_models_"):
        for found in document["models"]:
            if "loop" in found:
                last[found["model"]] = found, re.findall(r"\d+", path.stem)[-1]
    first, second = HEAD.split("\n")
    yield from (f"{first} run |", f"{second}---|")
    for name in sorted(last):
        found, run = last[name]
        yield f"{model_row(found)} {run} |"
    ratios = [found["loop"]["eager"] / found["loop"]["ridgeline"] for found, _ in last.values()]
    yield ""
    yield f"Geometric mean against eager: {geometric_mean(ratios):.2f} over {len(ratios)} networks."


@table
def steps_optimized() -> Iterator[str]:
    """Training: each network by its last search, whole steps."""
    last: dict[str, dict[str, Any]] = {}
    for path, document in every("optimize_train_"):
        parts = document["parts"]
        for name, found in parts.items():
            stock = parts.get(f"stock:{name}", {})
            loop = {**found.get("loop", {}), **stock.get("loop", {})}
            if "receipt" in found and "result" in loop:
                last[name] = {"loop": loop, "winner": found.get("winner", ""), "peak": found.get("peak_bytes", {}),
                              "run": re.findall(r"\d+", path.stem)[-1]}  # fmt: skip
    yield from head("network", "eager ms", "torch.compile ms", "result ms", "best of both / result",
                    "reserved GB, eager", "reserved GB, result", "kept", "run")  # fmt: skip
    ratios = []
    for name in sorted(last):
        loop, peak = last[name]["loop"], last[name]["peak"]
        best = min(loop["eager"], loop.get("torch.compile", loop["eager"]))
        ratios.append(best / loop["result"])
        times = [f"{1e3 * loop[who]:.2f}" if who in loop else "–" for who in ("eager", "torch.compile", "result")]
        memory = [f"{peak[who][1] / 1e9:.2f}" if peak.get(who) else "–" for who in ("eager", "result")]
        yield cells(name, *times, f"{ratios[-1]:.2f}", *memory, last[name]["winner"], last[name]["run"])
    yield ""
    yield f"Geometric mean against the better of both: {geometric_mean(ratios):.2f} over {len(ratios)} networks."


@table
def kernelbench_by_level(which: str) -> Iterator[str]:
    """How problems stand by their first or by their last run."""
    found: dict[str, dict[str, Any]] = {}
    for _, rows in every("kernelbench_apart"):
        for row in rows:
            if ":" not in row["name"] and (which == "last" or row["name"] not in found):
                found[row["name"]] = row
    words = ("faster", "even", "slower", "no rival", "WRONG")
    yield from head("level", "problems", *(word.lower() for word in words), "over the better rival, geometric mean")
    for level in ("1", "2", "3", ""):
        rows = [row for name, row in found.items() if name.startswith(level)]
        best = [min(row["over_eager"], row["over_compiled"]) for row in rows if row["verdict"] in words[:3]]
        counts = (sum(row["verdict"] == word for row in rows) for word in words)
        yield cells(level or "all", len(rows), *counts, f"{geometric_mean([x for x in best if x > 0]):.2f}")


@table
def injected_suite(suite: str) -> Iterator[str]:
    """What each fix of a suite brought, by step times alone."""
    yield from head("case", "cause", "change", "step ms", "fixed ms", "gain ms")
    for case in injected_cases(suite_folder(suite)):
        steps = (f"{1e3 * timed.median_s:.2f}" for timed in (case.injected, case.fixed))
        gain = f"{1e3 * case.gain_s:.2f} ± {1e3 * case.uncertainty_s:.2f}"
        yield cells(case.name, case.cause, case.change.replace("|", "\\|"), *steps, gain)


@table
def operators_blind(*seeds: str) -> Iterator[str]:
    """Fresh samples of calls, priced with today's code."""
    yield from head("sample", "class", "calls", "mean error", "median", "inside the 90 % interval")
    pricer = pricer_of(device("h200"))
    for seed in seeds:
        groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for error in errors(load_operators("h200", f"blind_seed{seed}"), pricer):
            groups[class_of(error["row"])].append(error)
            groups["all"].append(error)
        for name in sorted(groups):
            apart = [abs(math.exp(error["log"]) - 1.0) for error in groups[name]]
            inside = statistics.fmean(abs(error["log"]) <= error["width"] for error in groups[name])
            label = re.sub(r"^\d ", "", name)
            figures = f"{statistics.fmean(apart):.1%}", f"{statistics.median(apart):.1%}", f"{inside:.0%}"
            yield cells(seed, label, len(apart), *figures)


@table
def models_measured() -> Iterator[str]:
    """Whole networks as they were measured: what predictions are compared with."""
    yield from head("network", "execution", "busy ms", "wall ms", "peak GB", "power W")
    for row in load_models("h200"):
        wall, peak, power = (row.get(key) for key in ("wall_s", "peak_bytes", "power_w"))
        yield cells(row["name"], row["execution"], f"{1e3 * row['busy_s']:.2f}", f"{1e3 * wall:.2f}" if wall else "–",
                    f"{peak / 1e9:.2f}" if peak else "–", f"{power:.0f}" if power else "–")  # fmt: skip


@table
def drawn_rows(*seeds: str) -> Iterator[str]:
    """Norms and softmax on shapes drawn from seeds."""
    from lab.race.drawn_rows import shares

    yield from head("seed", "function", "phase", "shapes", "over 64 MB", "reach the figure",
                    "reach it of a copy as large", "best rival / ours", "lost")  # fmt: skip
    for seed in seeds:
        for row in shares(recorded(f"rows_random{seed}")):
            yield cells(seed, row["primitive"], row["phase"], row["num"], row["large"], row["reach"],
                        row["reach_as_large"], f"{row['over_best']:.2f}", row["lost"])  # fmt: skip


@table
def drawn_families(*seeds: str) -> Iterator[str]:
    """Every other family on shapes drawn from seeds."""
    from lab.race.drawn_families import shares

    yield from head("seed", "family", "phase", "cases", "best rival / ours", "slower than a rival", "worst")
    for seed in seeds:
        for row in shares(recorded(f"families_random{seed}")):
            ratios = ("–" if math.isnan(row[key]) else f"{row[key]:.2f}" for key in ("over_best", "worst"))
            over, worst = ratios
            yield cells(seed, row["family"], row["phase"], row["num"], over, row["lost"], worst)


@table
def model_rows(*seeds: str) -> Iterator[str]:
    """Shapes that published models have."""
    from lab.race.model_rows import standings

    yield from head("seed", "family", "phase", "cases", "over 64 MB", "a bare copy reaches it", "ours",
                    "of as many bytes", "rival / ours", "lost")  # fmt: skip
    for seed in seeds:
        for row in standings(recorded(f"rows_real{seed}")):
            beside = f"{geometric_mean(row['beside']):.2f}" if row["beside"] else "–"
            yield cells(seed, row["family"], row["phase"], row["num"], row["large"], row["possible"], row["reach"],
                        row["reach_as_large"], beside, sum(ratio < 1.0 for ratio in row["beside"]))  # fmt: skip


@table
def kernels_raced(*names: str) -> Iterator[str]:
    """Our kernels beside the best rival of one run, by function and phase."""
    yield from head("recording", "function", "phase", "cases", "best rival / ours", "lost", "worst")
    for name in names:
        rows = [Row(**{key: math.nan if value is None else value for key, value in row.items()})
                for row in recorded(name)["race"]]  # fmt: skip
        groups: dict[tuple[str, str], list[float]] = defaultdict(list)
        for ours, best in paired(rows):
            groups[ours.primitive, ours.phase].append(best.median_s / ours.median_s)
        for (function, phase), ratios in sorted(groups.items()):
            lost = sum(ratio < 1.0 for ratio in ratios)
            yield cells(name, function, phase, len(ratios), f"{geometric_mean(ratios):.2f}", lost, f"{min(ratios):.2f}")


@table
def attention_heads(*names: str) -> Iterator[str]:
    """Attention by head dim, beside cuDNN and FlashAttention-2, in TFLOP/s."""
    yield from head("recording", "batch, heads, key heads, length, head dim, causal", "phase",
                    "ours", "cuDNN", "FlashAttention-2", "ours / best")  # fmt: skip
    for name in names:
        rates: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
        for row in recorded(name):
            if "tflops" in row and row["case"].count(",") == 5:
                rates[row["case"], row["phase"]][row["contender"]] = row["tflops"]
        for (case, phase), by in rates.items():
            rivals = [by.get(who, math.nan) for who in ("CUDNN_ATTENTION", "FLASH_ATTENTION")]
            best = max(rate for rate in rivals if not math.isnan(rate))
            shown = ("–" if math.isnan(rate) else f"{rate:.0f}" for rate in rivals)
            ours = by["ridgeline"]
            yield cells(name, case.strip("()"), phase, f"{ours:.0f}", *shown, f"{ours / best:.2f}")


@table
def grouped_convolutions() -> Iterator[str]:
    """Convolutions in groups with batch norm and ReLU: the library's way and our kernel's fastest tile."""
    yield from head("shape", "library µs", "our first tile µs", "our fastest tile µs", "library / ours")
    ways: dict[tuple[Any, ...], dict[str, float]] = defaultdict(dict)
    for row in recorded("grouped_convolutions")["rows"]:
        if "shape" in row and "s" in row:
            ways[tuple(row["shape"])][row["way"]] = 1e6 * row["s"]
    for shape, took in ways.items():
        tiles = [us for way, us in took.items() if way.startswith("Tile")]
        yield cells(" × ".join(map(str, shape)), f"{took['library']:.1f}", f"{tiles[0]:.1f}", f"{min(tiles):.1f}",
                    f"{took['library'] / min(tiles):.2f}")  # fmt: skip


@table
def paged_decoding(name: str) -> Iterator[str]:
    """Decoding over a paged cache beside a bare read and a copy of as many bytes."""
    yield from head("kernel", "batch", "heads", "key heads", "head dim", "page", "keys", "lengths", "MB",
                    "ours µs", "bare read µs", "read / ours")  # fmt: skip
    for row in recorded(name)["rows"]:
        took = row.get("s_by") or {}
        if {"ours", "bare read"} <= took.keys():
            shape = (row["name"], row["b"], row["h"], row.get("k", ""), row["d"], row["page"], row["s"], row["lengths"])
            times = (f"{1e6 * took[who]:.1f}" for who in ("ours", "bare read"))
            yield cells(*shape, f"{row['num_bytes'] / 1e6:.0f}", *times, f"{took['bare read'] / took['ours']:.2f}")
