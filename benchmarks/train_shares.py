"""Where the device's time goes in recorded training steps, eager and compiled, by kind of kernel.

    python benchmarks/train_shares.py [--only gpt2]

Reads the kernels of whole steps (update included) in ``data/recordings/h200``: what a better kernel of one kind could
bring over ``torch.compile`` is bounded by its share there.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ridgeline.optimizer.search.blocks import tallied

FOLDER = Path(__file__).resolve().parent.parent / "data" / "recordings" / "h200"
FILES = ("models.jsonl.gz", "compiled.jsonl.gz")
KINDS = ("products", "convolutions", "attention", "optimizer", "norms", "softmax and losses", "reductions", "pointwise",
         "embeddings", "copies")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="train", help="a word in the model's name")
    print("\n".join(table(parser.parse_args().only)))


def table(word: str) -> list[str]:
    """Milliseconds by kind, a row for every recorded step."""
    heads = ("step", "wall", "busy", "kernels", *KINDS)
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for found in steps():
        if "train" in found["name"] and word in found["name"]:
            lines.append(row(found))
    return lines


def steps() -> Iterator[dict[str, Any]]:
    for name in FILES:
        with gzip.open(FOLDER / name, "rt", encoding="utf-8") as file:
            yield from (found for line in file if "kernels" in (found := json.loads(line)) and "name" in found)


def row(found: dict[str, Any]) -> str:
    kinds = tallied((name, 1e-6 * microseconds) for name, microseconds in found["kernels"])
    shown = [f"{1e3 * kinds[kind].seconds:.2f}" if kind in kinds else "–" for kind in KINDS]
    times = [f"{1e3 * found[name]:.1f}" for name in ("wall_s", "busy_s")]
    cells = (f"{found['name']}, {found['execution']}", *times, str(found["num_kernels"]), *shown)
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
