"""Fit the coefficients of collectives for each scale-up technology from tables of NCCL times, and judge them.

    python -m lab.fit.collectives SILICON_DIR [--write] [--published collectives.csv]

SILICON_DIR holds one folder a device with ``nccl.parquet`` (sizes in elements). Half of the sizes are fitted and
the other half judged; devices that share a technology are also judged with the other's coefficients. ``--published``
fits the networks too, on all-reduces of several hosts; those few coefficients are printed, and rounded into the files.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
from scipy.optimize import least_squares

from ridgeline.basis import Basis
from ridgeline.errors import RidgelineError
from ridgeline.hardware import cluster
from ridgeline.resources import data_dir
from ridgeline.sim import collectives
from ridgeline.sim.coefficients import Coefficients, LinkCoefficients, coefficients
from ridgeline.validation import collectives as published
from ridgeline.validation.measurements import read_table
from ridgeline.validation.verdict import Row


def bus_s(num_ranks: int, bus_gigabytes_per_s: float, size: int = 8589934592) -> float:
    return 2 * (num_ranks - 1) / num_ranks * size / (bus_gigabytes_per_s * 1e9)


DEVICES = {"a100_sxm": "a100", "h100_sxm": "h100-sxm", "h200_sxm": "h200", "b200_sxm": "b200", "gb200": "gb200",
           "l40s": "l40s"}
FITTED = ("call_s", "switch_call_s", "ring_frac", "switch_frac", "direct_frac", "direct_step_s", "direct_call_s",
          "eager_bytes_per_s", "copy_frac", "pipeline_s", "chunk_bytes", "switch_pipeline_s",
          "direct_pipeline_s")
PRIOR = 0.02  # pull of the starting value, which matters only where the data say nothing
NCCL = {"a100_sxm": "NCCL 2.27.3", "l40s": "NCCL 2.27.3"}
# Saturated all-reduces beyond the tables' 512 MB: stas00/ml-engineering 744d01e18b79, network/README.md.
ANCHORS = {
    "nvlink3": [("all_reduce", 8, 4294967296, 0.032136, "ring")],
    "nvlink4": [("all_reduce", n, 8589934592, bus_s(n, bus), "ring") for n, bus in ((4, 363.3), (6, 365.1), (7, 365.7))]
    + [("all_reduce", n, 8589934592, bus_s(n, bus), "switch") for n, bus in ((7, 460.0), (8, 473.1))],
    "nvlink5": [("all_reduce", n, 8589934592, bus_s(n, bus), "ring") for n, bus in ((4, 673.2), (6, 677.8), (8, 682.2))]
    + [("all_reduce", n, 8589934592, bus_s(n, bus), "switch") for n, bus in ((6, 778.2), (7, 811.2), (8, 838.0))],
}
Point = tuple[str, int, int, float, str | None]


def read(folder: Path, device: str) -> list[Point]:
    """(kind, ranks, bytes, seconds) of every half-precision row; a host of L40S is sound for two GPUs only."""
    table = parquet.read_table(folder / device / "nccl.parquet").to_pylist()
    return [
        (row["op_name"], row["num_gpus"], row["message_size"] * 2, row["latency_ms"] / 1e3, None)
        for row in table
        if row["nccl_dtype"] == "half" and (device != "l40s" or row["num_gpus"] == 2)
    ]


def predict(points: Sequence[Point], device: str, link: LinkCoefficients, step_s: float | None = None) -> np.ndarray:
    place = cluster(f"{DEVICES[device]}*8")
    if step_s is not None:
        place = replace(place, scale_up=replace(place.scale_up, latency_s=step_s))
    base = coefficients(place)
    found = Coefficients(link=link, network=base.network)
    groups = {n: place.group(n) for _, n, *_ in points}
    times = [collectives.timed(kind, size, groups[n], place, found, way) for kind, n, size, _, way in points]
    return np.array([found.expected_s for found in times])


def fit(points: Sequence[Point], device: str, start: LinkCoefficients) -> LinkCoefficients:
    x0 = np.log([getattr(start, name) for name in FITTED])
    measured = np.log([point[3] for point in points])

    def residual(x: np.ndarray) -> np.ndarray:
        link = replace(start, **{name: float(math.exp(v)) for name, v in zip(FITTED, x)})
        return np.concatenate([np.log(predict(points, device, link)) - measured, PRIOR * (x - x0)])

    found = least_squares(residual, x0, loss="soft_l1", f_scale=0.1, x_scale=0.3, max_nfev=60)
    return replace(start, **{name: float(math.exp(v)) for name, v in zip(FITTED, found.x)})


def errors(points: Sequence[Point], device: str, link: LinkCoefficients) -> np.ndarray:
    return predict(points, device, link) / np.array([point[3] for point in points]) - 1


def show(title: str, points: Sequence[Point], found: np.ndarray) -> None:
    by = {kind: np.abs(found[[p[0] == kind for p in points]]).mean() for kind in sorted({p[0] for p in points})}
    parts = "  ".join(f"{kind} {value:.1%}" for kind, value in by.items())
    print(f"{title:42s} n={len(points):4d}  mean {np.abs(found).mean():.1%}  bias {found.mean():+.1%}   {parts}")


def network_points(path: Path) -> dict[str, list[tuple[Row, published.Question, float, float]]]:
    """Published rows that cross a network, by its kind: (row, cluster and group, bytes, seconds)."""
    found: dict[str, list[tuple[Row, published.Question, float, float]]] = {}
    for line, record in read_table(path)[1]:
        row = Row(line, record)
        if row.text("collective") != "all_reduce":
            continue
        try:
            asked, size = published.question(row), published.message_bytes(row)
            time_s = published.measured_s(row, "all_reduce", asked.group.num_ranks, size)
        except RidgelineError:
            continue
        if asked.group.num_domains > 1:
            more_s = 20e-6 if "torch" in row.text("software") else 0.0
            found.setdefault(asked.cluster.scale_out.kind, []).append((row, asked, size, time_s - more_s))
    return found


Points = Sequence[tuple[Row, published.Question, float, float]]


def network_times(points: Points, x: np.ndarray, systems: Sequence[str]) -> np.ndarray:
    """Seconds of all-reduces between hosts; ``x`` are logarithms of share, chunk cost, chunk size and systems' hops."""
    frac, pipeline_s, chunk_bytes, *latencies = np.exp(x)
    out = []
    for row, asked, size, _ in points:
        start = coefficients(asked.cluster).network
        network = replace(start, frac=min(frac, 0.985), pipeline_s=pipeline_s, chunk_bytes=chunk_bytes)
        hop_s = latencies[systems.index(asked.cluster.system)]
        place = replace(asked.cluster, scale_out=replace(asked.cluster.scale_out, latency_s=hop_s))
        coef = Coefficients(link=coefficients(place).link, network=network)
        way = published.algorithm(row, "all_reduce")
        out.append(collectives.timed("all_reduce", size, asked.group, place, coef, way).expected_s)
    return np.array(out)


def systems_of(points: Points) -> list[str]:
    return sorted({asked.cluster.system for _, asked, _, _ in points})


def solve_network(points: Points, everyone: Points = ()) -> tuple[np.ndarray, list[str]]:
    """Share, chunk cost, chunk size and the latency of each system's hops; systems of ``everyone`` that are not among
    the points keep the latency they have."""
    systems = systems_of(everyone or points)
    start = coefficients(points[0][1].cluster).network
    hops = {asked.cluster.system: asked.cluster.scale_out.latency_s for _, asked, _, _ in everyone or points}
    x0 = np.log([start.frac, start.pipeline_s, start.chunk_bytes, *(hops[name] for name in systems)])
    measured = np.log([point[3] for point in points])

    def residual(x: np.ndarray) -> np.ndarray:
        return np.concatenate([np.log(network_times(points, x, systems)) - measured, 0.05 * (x - x0)])

    return least_squares(residual, x0, loss="soft_l1", f_scale=0.1, x_scale=0.3, max_nfev=80).x, systems


def network_errors(points: Points, found: tuple[np.ndarray, list[str]]) -> np.ndarray:
    return network_times(points, *found) / np.array([point[3] for point in points]) - 1


def fit_network(kind: str, points: Points) -> None:
    x, systems = solve_network(points)
    error = network_errors(points, (x, systems))
    names = ["frac", "pipeline_s", "chunk_bytes", *systems]
    values = {name: float(f"{value:.3g}") for name, value in zip(names, np.exp(x))}
    print(f"{kind}: n={len(points)}  mean {np.abs(error).mean():.1%}  bias {error.mean():+.1%}  {values}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("silicon", type=Path)
    parser.add_argument("--write", action="store_true", help="put the coefficients into data/collectives.json")
    parser.add_argument("--published", type=Path, help="collectives.csv, to fit the networks")
    args = parser.parse_args()
    path = data_dir() / "collectives.json"
    tables = json.loads(path.read_text())
    groups = {"nvlink3": ["a100_sxm"], "nvlink4": ["h100_sxm", "h200_sxm"], "nvlink5": ["b200_sxm", "gb200"],
              "pcie4": ["l40s"]}
    for kind, members in groups.items():
        start = coefficients(cluster(f"{DEVICES[members[0]]}*8")).link
        points = [p for member in members for p in read(args.silicon, member)]
        sizes = sorted({p[2] for p in points})
        seen = set(sizes[::2])
        train = [p for p in points if p[2] in seen]
        held = [p for p in points if p[2] not in seen]
        anchors = ANCHORS.get(kind, [])
        half = fit(train + anchors, members[0], start)
        show(f"{kind}: fitted on every other size", train, errors(train, members[0], half))
        show(f"{kind}: the sizes between", held, errors(held, members[0], half))
        for member in members if len(members) > 1 else []:
            others = [p for other in members if other != member for p in read(args.silicon, other)]
            mine = read(args.silicon, member)
            show(f"{kind}: {member} by the others", mine, errors(mine, member, fit(others + anchors, member, half)))
        final = fit(points + anchors * 3, members[0], half)
        found = errors(points, members[0], final)
        show(f"{kind}: all", points, found)
        if anchors:
            show(f"{kind}: saturated", anchors, errors(anchors, members[0], final))
        spread = float(np.sqrt(np.mean(np.log1p(found) ** 2)))
        final = replace(final, spread_frac=spread, basis=Basis.FITTED)
        values = {f.name: getattr(final, f.name) for f in fields(final)}
        rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in values.items()}
        names = ", ".join(m.replace("_", " ").upper() for m in members)
        tables["links"][kind] = rounded | {
            "basis": "fitted",
            "source": f"{len(points)} times of {names} with {NCCL.get(members[0], 'NCCL 2.29.2')}"
            " (ai-dynamo/aiconfigurator 095f58a51c4c), one host; lab/fit/collectives.py",
        }
        print({k: v for k, v in rounded.items() if k in FITTED})
    for kind, rows in network_points(args.published).items() if args.published else ():
        fit_network(kind, rows)
    if args.write:
        path.write_text(json.dumps(tables, indent=1) + "\n")


if __name__ == "__main__":
    main()
