"""The tables of a note on ``lab/optimize/models.py``, from its recordings: ``python -m lab.optimize.tables FILE…``."""

from __future__ import annotations

import gzip
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

_PATH = re.compile(r"(?:/[\w.+-]+){2,}/")
HEAD = (
    "| model | eager | torch.compile | max-autotune | result | best/result | kept | searched |\n"
    "|---|---|---|---|---|---|---|---|"
)


def load(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)


def cleaned(value: Any) -> Any:
    """The value without folders of the machine it was measured on, and without logs."""
    if isinstance(value, str):
        return _PATH.sub("", value)
    if isinstance(value, list):
        return [cleaned(each) for each in value]
    if isinstance(value, dict):
        return {key: cleaned(each) for key, each in value.items() if key != "log"}
    return value


def row(found: dict[str, Any]) -> str:
    """One model: milliseconds in a plain loop, the better rival over the result, what was kept, seconds of search."""
    if "loop" not in found:
        return f"| {found['model']} | – | – | – | – | – | {found['error'].splitlines()[0][:90]} | – |"
    loop = found["loop"]
    stock, tuned = (f"{1e3 * loop[who]:.2f}" if who in loop else "–" for who in ("torch.compile", "max-autotune"))
    best = min(seconds for who, seconds in loop.items() if who != "ridgeline")
    return (
        f"| {found['model']} | {1e3 * loop['eager']:.2f} | {stock} | {tuned} | {1e3 * loop['ridgeline']:.2f} | "
        f"{best / loop['ridgeline']:.2f} | {found['receipt']['winner']} | {found['optimize_s']:.0f} s |"
    )


def table(document: dict[str, Any]) -> str:
    rows = [row(found) for found in document["models"]]
    ratios = [f["loop"]["eager"] / f["loop"]["ridgeline"] for f in document["models"] if "loop" in f]
    if not ratios:
        return "\n".join([HEAD, *rows, "", "No model got to its loop."])
    mean = f"Geometric mean against eager: {statistics.geometric_mean(ratios):.2f} over {len(ratios)} models."
    return "\n".join([HEAD, *rows, "", mean])


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"{name}\n\n{table(load(Path(name)))}\n")
