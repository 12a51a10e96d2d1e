"""How far simulated deployments are from published serving runs and static inference, and how fast the simulator is.

    python -m lab.validate.deployments ../shared/published [--csv rows.csv] [--speed]

Prints errors by engine and architecture, model, load and length; aggregated and disaggregated runs apart; and how many
rows were set aside, by reason.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ridgeline.api import serve
from ridgeline.sim.serving.workload import closed
from ridgeline.validation import inference_llm, serving_ttft_tpot
from ridgeline.validation.measurements import read_table
from ridgeline.validation.verdict import Judged, Row, Unused


def scored(rows: Sequence[Judged]) -> str:
    errors = np.array([row.error for row in rows])
    missed, inside = np.abs(errors), np.mean([row.inside for row in rows])
    return (
        f"{len(rows):5d} {missed.mean():7.1%} {np.median(missed):7.1%} {errors.mean():+7.1%} "
        f"{np.median(errors):+7.1%} {inside:6.0%}"
    )


def table(title: str, rows: Sequence[Judged], key: Callable[[Judged], str]) -> None:
    print(f"\n{title:58s}     n    mean  median    bias  median  inside")
    for name in sorted({key(row) for row in rows}):
        print(f"{name:58s} {scored([row for row in rows if key(row) == name])}")


def judged(path: Path, module: object) -> tuple[list[Judged], list[Unused]]:
    rows = [Row(line, record) for line, record in read_table(path)[1]]
    verdicts = list(module.judge(rows))  # type: ignore[attr-defined]
    return [v for v in verdicts if isinstance(v, Judged)], [v for v in verdicts if isinstance(v, Unused)]


def show_unused(unused: Sequence[Unused]) -> None:
    print(f"\n{len(unused)} rows were set aside:")
    for why, count in Counter(u.why[:110] for u in unused).most_common(14):
        print(f"  {count:5d} {why}")


def serving(folder: Path) -> list[Judged]:
    rows, unused = judged(folder / "serving_ttft_tpot.csv", serving_ttft_tpot)
    unique = list({(row.source, row.metric, row.measured): row for row in rows}.values())
    for mode in ("agg", "disagg"):
        for metric in ("tpot_mean", "ttft_mean"):
            chosen = [row for row in unique if row.source.startswith(mode) and row.metric == metric]
            if chosen:
                table(f"{mode} {metric} by engine and system", chosen, lambda row: row.source)
                table(f"{mode} {metric} by model", chosen, lambda row: row.what.split()[0])
                table(f"{mode} {metric}", chosen, lambda row: "all, every measured run once")
    show_unused(unused)
    return rows


def static(folder: Path) -> list[Judged]:
    rows, unused = judged(folder / "inference_llm.csv", inference_llm)
    table("inference by source and metric", rows, lambda row: f"{row.source} {row.metric}")
    table("inference", rows, lambda row: "all")
    show_unused(unused)
    return rows


def speed() -> None:
    began = time.process_time()
    work = closed(256, 512, 256, num=100_000, ratio=0.8)
    found = serve("llama3-8b", "h200*1", work, tp=1, precision="fp8").metrics
    print(f"\n100,000 requests, {found.iterations:,} steps: {time.process_time() - began:.1f} s of one core")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("published", type=Path)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--speed", action="store_true")
    options = parser.parse_args()
    rows = serving(options.published) + static(options.published)
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("key", "source", "what", "metric", "measured_s", "predicted_s", "error"))
            for row in rows:
                writer.writerow((row.key, row.source, row.what, row.metric, row.measured, row.predicted, row.error))
    if options.speed:
        speed()


if __name__ == "__main__":
    main()
