"""Reading recordings and writing calibrations: what the fit scripts share."""

from __future__ import annotations

import gzip
import json
from typing import Any

from lab import ROOT
from ridgeline.bench.fitting import sample

LEAN_S, LEANEST_S = 3e-7, 6e-7
"""Events around products that write into buffers made before (``lab/record/products.py``) read so much less than around
others (median over single kernels 2.8 instead of 3.1 to 3.4 µs), and the others are how people measure. The last such
recording, of odd products alone, read 2.6 µs (eight recordings of calls as people make them 3.1 to 3.3)."""
LEANEST = 6051
DATA = ROOT / "data"


def load_operators(device: str, pattern: str = "operators_seed*") -> list[dict[str, Any]]:
    """Measured operators; ``busy_s`` is the sum of kernel durations, ``seed`` which run they come from.

    Fits read ``operators_seed*``; ``unseen_seed*`` was recorded after the models were made and is for judging only.
    """
    rows = []
    for path in sorted((DATA / "recordings" / device).glob(f"{pattern}.jsonl.gz")):
        with gzip.open(path, "rt") as lines:
            next(lines)
            for row in map(json.loads, lines):
                if "error" not in row and row.get("kernels"):
                    row["busy_s"], row["seed"] = (
                        sum(k[1] for k in row["kernels"]),
                        int(path.stem.partition("seed")[2].partition(".")[0]),
                    )
                    if "grids" in row:
                        row["cold_s"] += LEANEST_S if row["seed"] == LEANEST else LEAN_S
                    rows.append(row)
    return rows


def event_to_busy_s(row: dict[str, Any]) -> float:
    """Kernel time as the events saw it; where the two disagree (a host hiccup), the profiler's word counts."""
    return sample(row).target_s


def load_models(device: str) -> list[dict[str, Any]]:
    with gzip.open(DATA / "recordings" / device / "models.jsonl.gz", "rt") as lines:
        next(lines)
        return [row for row in map(json.loads, lines) if "error" not in row]


def update_calibration(device: str, **parts: Any) -> None:
    """Replace parts of a calibration file (one level deep for ``families``), keeping the rest."""
    path = DATA / "calibrations" / f"{device}.json"
    found = (
        json.loads(path.read_text())
        if path.is_file()
        else {"device": device, "basis": "fitted", "source": f"data/recordings/{device}"}
    )
    for name, value in parts.items():
        if name == "families":
            found.setdefault("families", {}).update(value)
        else:
            found[name] = value
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
