"""How far whole-model predictions are from the recordings: busy and wall time, peak memory, power.

    python -m lab.validate.models [--device h200] [--only NAME,…] [--markdown FILE]

Captures every workload of workloads.py on the meta device, predicts it, and prints it beside what was measured.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch

import ridgeline as rl
from lab.fit.recordings import load_models
from lab.workloads import WORKLOADS
from ridgeline.cost.prediction import Prediction

COLUMNS = ("busy", "wall", "memory", "power")


def captured(name: str) -> rl.Graph:
    work = WORKLOADS[name]
    with torch.device("meta"):
        model, args, kwargs = work.build()
    return rl.capture(model, args, kwargs, mode=work.mode, optimizer=work.optimizer, name=name)


def compared(row: dict[str, Any], prediction: Prediction) -> dict[str, float]:
    """Predicted over measured; wall time against the quieter of the synchronized and the free-running loop."""
    wall_s = min(row["wall_s"], row["loop_s"])
    low, high = prediction.busy_interval_s
    wall_low, wall_high = prediction.interval_s
    return {
        "busy": prediction.busy_s / row["busy_s"],
        "wall": prediction.expected_s / wall_s,
        "memory": prediction.peak_bytes / row["peak_bytes"],
        "power": prediction.power_w / row["power_w"],
        "artifact": float("artifact" in row),
        "busy_inside": float(low <= row["busy_s"] <= high),
        "wall_inside": float(wall_low <= wall_s <= wall_high),
    }


def line(row: dict[str, Any], p: Prediction, ratio: dict[str, float]) -> str:
    cells = [
        f"{row['name']} ({row['execution']})" + (" †" if "artifact" in row else ""),
        f"{p.busy_s * 1e3:.3g} / {row['busy_s'] * 1e3:.3g} ms {ratio['busy'] - 1:+.1%}",
        f"{p.expected_s * 1e3:.3g} / {min(row['wall_s'], row['loop_s']) * 1e3:.3g} ms {ratio['wall'] - 1:+.1%}",
        f"{p.peak_bytes / 1e9:.3g} / {row['peak_bytes'] / 1e9:.3g} GB {ratio['memory'] - 1:+.1%}",
        f"{p.power_w:.0f} / {row['power_w']:.0f} W {ratio['power'] - 1:+.1%}",
        f"{p.num_kernels} / {row['num_kernels']}",
        "yes" if ratio["busy_inside"] else "no",
    ]
    return "| " + " | ".join(cells) + " |"


def _mean_error(found: list[dict[str, float]], column: str) -> float:
    """Over the rows whose figure means something: an artifact of the recording spoils wall time and power."""
    clean = [r for r in found if not (r["artifact"] and column in ("wall", "power"))]
    return sum(abs(r[column] - 1) for r in clean) / len(clean)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="h200")
    parser.add_argument("--only", default="")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_default_dtype(torch.bfloat16)
    wanted = set(options.only.split(",")) if options.only else set(WORKLOADS)
    graphs: dict[str, rl.Graph] = {}
    lines = ["| workload | busy | wall | peak memory | power | kernels | in interval |", "|---" * 7 + "|"]
    ratios: dict[str, list[dict[str, float]]] = {"eager": [], "compiled": []}
    for row in load_models(options.device):
        if row["name"] not in wanted:
            continue
        if row["name"] not in graphs:
            graphs[row["name"]] = captured(row["name"])
        prediction = rl.predict(graphs[row["name"]], on=options.device, execution=row["execution"])
        ratio = compared(row, prediction)
        ratios[row["execution"]].append(ratio)
        lines.append(line(row, prediction, ratio))
        print(lines[-1], flush=True)
    for execution, found in ratios.items():
        if found:
            means = ", ".join(f"{c} {_mean_error(found, c):.1%}" for c in COLUMNS)
            inside = sum(r["busy_inside"] for r in found) / len(found)
            lines.append(f"\n{execution}: mean absolute error {means}; busy time inside its interval {inside:.0%}")
            print(lines[-1])
    if options.markdown:
        options.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
