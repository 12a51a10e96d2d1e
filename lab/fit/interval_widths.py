"""Sets the 90 % widths of a family's calls from samples that no fit has seen.

    python -m lab.fit.interval_widths [--family conv] [--device h200] [--write]

Widths from what was fitted are too narrow where a fit is close, and too wide where the model has improved since. Each
sample is left out once: widths come from the others, and it is said how many of its calls they hold. ``--write`` puts
those of all samples into the calibration, for this family alone; the range of measured times stays that of all
recordings.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from typing import Any

import numpy as np

from lab.fit.grouped_conv import trusted
from lab.fit.recordings import DATA, load_operators, update_calibration
from lab.validate.operators import errors
from ridgeline.bench.fitting import intervals
from ridgeline.cost.interval import half_width
from ridgeline.cost.price import pricer_of
from ridgeline.hardware import device

SAMPLES = ("blind_seed*", "unseen_seed*")
Error = dict[str, Any]


def held_out(device_name: str, family: str) -> dict[int, list[Error]]:
    """Errors of the family's calls, by sample."""
    found: dict[int, list[Error]] = defaultdict(list)
    for pattern in SAMPLES:
        for error in errors(load_operators(device_name, pattern), pricer_of(device(device_name))):
            if error["family"] == family and not untold(error["row"]):
                found[error["row"]["seed"]].append(error)
    return found


def untold(row: dict[str, Any]) -> bool:
    """Convolutions in groups of which nothing but the sum of kernels side by side was recorded."""
    return 1 < row["shape"].get("groups", 1) < row["shape"].get("c", 1) and not trusted(row)


def widths(rows: list[Error]) -> dict[str, Any]:
    return intervals((e["sample"], e["busy_s"], e["log"]) for e in rows)


def inside(rows: list[Error], known: dict[str, Any], family: str) -> list[bool]:
    basis = pricer_of(device("h200")).calibration.basis
    return [abs(e["log"]) <= half_width(known, e["sample"].call, family, basis, e["busy_s"]) for e in rows]


def wider(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The old entries with new widths; what no sample has keeps its own."""
    kinds = dict(old["kinds"])
    for name, entry in new["kinds"].items():
        domain = kinds.get(name, entry)["domain_s"]
        low, high = min(domain[0], entry["domain_s"][0]), max(domain[1], entry["domain_s"][1])
        kinds[name] = {**entry, "domain_s": [low, high]}
    return {"kinds": kinds, "families": {**old["families"], **new["families"]}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", default="conv")
    parser.add_argument("--device", default="h200")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    samples = held_out(options.device, options.family)
    held: list[bool] = []
    for seed, rows in sorted(samples.items()):
        others = [e for other, some in samples.items() if other != seed for e in some]
        mine = inside(rows, widths(others), options.family)
        held += mine
        off = np.mean([abs(math.exp(e["log"]) - 1.0) for e in rows])
        print(f"sample {seed}: {len(rows)} calls, mean error {off:.1%}, inside {np.mean(mine):.0%}", flush=True)
    print(f"all: {len(held)} calls, inside {np.mean(held):.1%}")
    if options.write:
        old = json.loads((DATA / "calibrations" / f"{options.device}.json").read_text())["intervals"]
        new = widths([e for rows in samples.values() for e in rows])
        update_calibration(options.device, intervals=wider(old, new))


if __name__ == "__main__":
    main()
