"""The tables of an attention race as Markdown: every row of what race_attention.py wrote, plain or gzipped.

    python benchmarks/attention_note.py data/recordings/h200/attention_race2.json.gz
"""

from __future__ import annotations

import gzip
import json
import math
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

CUDNN = "CUDNN_ATTENTION"
SHORT = {CUDNN: "cuDNN", "FLASH_ATTENTION": "FlashAttention-2", "EFFICIENT_ATTENTION": "memory-efficient"}


def recorded(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    found: dict[str, Any] = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    return found


def raced(rows: Iterable[dict[str, Any]], unit: str) -> dict[tuple[str, str], dict[str, float]]:
    """(case, phase) → contender → rate, or µs, in the order they ran."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if "median_s" not in row:
            continue
        case = row.get("case") or f"rows={row['rows']} causal={row['causal']}"
        case = f"{case}, {row['lines']} lines" if "lines" in row else case
        value = row["median_s"] * 1e6 if unit == "us" else row[unit]
        found.setdefault((case, row["phase"]), {})[SHORT.get(row["contender"], row["contender"])] = value
    return found


def table(found: dict[tuple[str, str], dict[str, float]], ours: str | None) -> str:
    """One line a case; the last column is ours over cuDNN where both ran."""
    names = list(dict.fromkeys(name for rates in found.values() for name in rates))
    lines = ["| case | phase | " + " | ".join(names) + (" | ours / cuDNN |" if ours else " |")]
    lines.append("|---" * (2 + len(names) + bool(ours)) + "|")
    for (case, phase), rates in found.items():
        cells = [f"{rates[name]:.3g}" if name in rates else "–" for name in names]
        if ours:
            both = ours in rates and "cuDNN" in rates
            cells.append(f"{rates[ours] / rates['cuDNN']:.2f}" if both else "–")
        lines.append(f"| {case} | {phase} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def geometric_mean(found: dict[tuple[str, str], dict[str, float]], ours: str, phase: str, word: str = "") -> float:
    """Ours over cuDNN, over the cases of a phase that contain a word."""
    ratios = [rates[ours] / rates["cuDNN"] for (case, of), rates in found.items()
              if of == phase and word in case and ours in rates and "cuDNN" in rates]  # fmt: skip
    return math.exp(statistics.fmean(map(math.log, ratios)))


def main() -> None:
    found = recorded(Path(sys.argv[1]))
    parts = found["parts"]
    checks = [row for row in parts.get("checks", []) if "ok" in row]
    print(f"{len(checks)} checks, {sum(not row['ok'] for row in checks)} failed\n")
    for name in ("backward", "forward", "encoders", "variants", "stages", "latent"):
        rows = raced([row for row in parts.get(name, []) if row.get("tflops")], "tflops")
        if rows:
            ours = {"backward": "two kernels", "stages": None, "latent": None}.get(name, "ridgeline")
            print(f"## {name} (TFLOP/s)\n\n{table(rows, ours)}\n")
    for name in ("paged", "fed", "leaving", "latent", "columns", "products", "reading", "pieces"):
        rows = raced([row for row in parts.get(name, []) if not row.get("tflops")], "us")
        if rows:
            print(f"## {name} (µs)\n\n{table(rows, None)}\n")


if __name__ == "__main__":
    main()
