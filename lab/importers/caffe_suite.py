"""Caffe definitions of a folder: each is read, built, and run once with random weights.

    python lab/importers/caffe_suite.py FOLDER [--out FILE.jsonl]

A definition whose pictures lie in a database, with no word of their size, gets one of 224 pixels.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from ridgeline.errors import RidgelineError


def judged(path: Path) -> dict[str, Any]:
    """What happened to a definition, and how long it took."""
    import ridgeline as rl

    torch.manual_seed(0)
    row: dict[str, Any] = {"name": path.stem}
    began = time.process_time()
    try:
        try:
            model = rl.load(path)
        except RidgelineError as error:
            if "lies in a database" not in str(error):
                raise
            name = str(error).split("shape of '")[1].split("'")[0]
            model = rl.load(path, shapes={name: (1, 3, 224, 224)})
        missing = [f"{r.op}: {r.why}" for r in model.survey if r.why]
        if missing:
            return {**row, "state": "unsupported layers", "why": "; ".join(missing)[:300]}
        model.fill()
        with torch.no_grad():
            out = model(*model.example(dict.fromkeys(model.dims, 1)))
        outs = out if isinstance(out, tuple) else (out,)
        row.update(params=model.num_params, layers=sum(r.count for r in model.survey),
                   outputs=[list(t.shape) for t in outs][:4], finite=all(bool(t.isfinite().all()) for t in outs),
                   state="run", cpu_s=round(time.process_time() - began, 2))  # fmt: skip
    except RidgelineError as error:
        row.update(state="refused", why=str(error)[:300])
    except Exception as error:
        row.update(state="failed", why=f"{type(error).__name__}: {str(error)[:300]}")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    states: Counter[str] = Counter()
    for path in sorted(asked.folder.rglob("*.prototxt")):
        row = judged(path)
        states[row["state"]] += 1
        print(json.dumps(row), flush=True)
        if asked.out:
            with asked.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{dict(states)}; peak {peak:.1f} GB", file=sys.stderr)


if __name__ == "__main__":
    main()
