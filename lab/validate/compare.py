"""Do two checkouts predict the same? Every figure, row, call, note and graph of a few hundred predictions.

PYTHONPATH=before/src python -m lab.validate.compare --write before.json
PYTHONPATH=after/src  python -m lab.validate.compare --against before.json [--tolerance 1e-12]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from itertools import product
from pathlib import Path
from typing import Any

import ridgeline as rl

DECODERS = ("llama3-8b", "llama3-70b", "llama3-405b", "llama2-7b", "mistral-7b", "qwen2.5-7b", "qwen3-8b", "gemma2-9b",
            "gemma3-27b", "gpt2-xl", "mixtral-8x7b", "mixtral-8x22b", "qwen3-30b-a3b", "gpt-oss-20b", "gpt-oss-120b",
            "deepseek-v3")  # fmt: skip
OTHERS = (
    "bert-large",
    "resnet50",
    "vit-l16",
    "dit-xl2",
    "t5-large",
    "mamba-2.8b",
    "whisper-large-v3",
    "dlrm",
    "sd15-unet",
)
DEVICES = ("h200", "h100-sxm", "a100-sxm-80gb", "b200", "l40s", "mi300x", "v100-sxm2-32gb", "tpu-v5p", "rtx-4090",
           "h200 hbm_bandwidth=2x")  # fmt: skip
EXECUTIONS = ("eager", "compiled", "cudagraph")
FIGURES = ("expected_s", "busy_s", "floor_s", "host_s", "peak_bytes", "energy_j", "power_w", "usd", "throttle",
           "num_kernels", "flops", "num_params")  # fmt: skip
NUMBERS = ("flops", "bytes", "floor_s", "expected_s", "low_s", "high_s", "host_s", "energy_j")
WORDS = ("name", "module", "op", "phase", "bound", "times", "num_kernels", "basis", "kernel", "source")


def cases() -> list[dict[str, Any]]:
    """Decoders in every mode and execution on devices drawn once, and some of everything else."""
    draw = random.Random(7)
    found = list[dict[str, Any]]()
    for model, execution in product(DECODERS, EXECUTIONS):
        asked = {"model": model, "execution": execution}
        found += [
            {**asked, "on": "h200", "batch": draw.choice((1, 2, 3, 8, 17)), "seq": draw.choice((1, 2, 64, 128, 333))},
            {**asked, "on": draw.choice(DEVICES), "batch": 5, "seq": draw.randint(2, 900), "mode": "prefill"},
            {**asked, "on": draw.choice(DEVICES), "batch": draw.choice((1, 7)), "kv": draw.choice((0, 1, 127, 900)),
             "mode": "decode"},
            {**asked, "on": draw.choice(DEVICES), "batch": 2, "seq": draw.choice((128, 500)), "mode": "train",
             "optimizer": draw.choice(("adamw", "adamw_fused", "sgd"))},
            {**asked, "on": draw.choice(DEVICES), "seq": 256, "precision": draw.choice(("fp8", "fp16", "fp32"))},
        ]  # fmt: skip
        found.append({**asked, "on": "h200", "batch": 4, "seq": 700, "use_cache": False, "fused_norms": False})
    for model, execution, mode in product(OTHERS, EXECUTIONS, ("infer", "train")):
        found.append({"model": model, "execution": execution, "on": draw.choice(DEVICES), "batch": 2, "mode": mode})
    return found


def answer(case: dict[str, Any]) -> dict[str, Any]:
    p = rl.predict(**case)
    calls = [[(c.kind, c.dtype, c.phase, c.library, c.shape) for c in line.calls] for line in p.lines]
    words = [[str(row[name]) for name in WORDS] for row in p.rows()]
    said = repr((words, calls, p.notes, str(p.basis), p.graph.content_hash, sorted(p.graph.meta.items(), key=str)))
    numbers = [*(getattr(p, name) for name in FIGURES), *p.interval_s, *p.busy_interval_s]
    numbers += [row[name] for row in p.rows() for name in NUMBERS]
    return {"case": case, "said": hashlib.sha256(said.encode()).hexdigest(), "numbers": numbers}


def difference(before: dict[str, Any], after: dict[str, Any]) -> float:
    """The largest relative one of all numbers; infinite where words, calls or graphs differ."""
    if before["said"] != after["said"] or len(before["numbers"]) != len(after["numbers"]):
        return float("inf")
    pairs = zip(before["numbers"], after["numbers"], strict=True)
    return max(abs(a - b) / max(abs(a), 1e-300) for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--tolerance", type=float, default=1e-12)
    options = parser.parse_args()
    found = json.loads(json.dumps([answer(case) for case in cases()]))
    if options.write:
        options.write.write_text(json.dumps(found))
    if options.against:
        known = json.loads(options.against.read_text())
        off = [(difference(before, after), after["case"]) for before, after in zip(known, found, strict=True)]
        print(
            f"{len(off)} predictions, {sum(d == 0 for d, _ in off)} bit for bit, largest {max(off, key=lambda o: o[0])}"
        )
        sys.exit(any(d > options.tolerance for d, _ in off))


if __name__ == "__main__":
    main()
