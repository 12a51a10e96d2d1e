"""How far predictions of products and attention are from serving frameworks' tables of other GPUs.

    python -m lab.validate.tables ../shared/silicon [--num 400] [--seed 7]

Random rows of each table through ``predict_call``, as ``ridgeline validate`` prices them. About a third to all of the
rows of a table were fitted; ``lab/fit/published_kernels.py`` and ``lab/fit/gemm_correction.py`` print errors of rows
held out.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lab.fit import published_kernels as fit_silicon
from ridgeline.validation.operators import predict_call

DEVICES = ("h100-sxm", "a100-sxm-80gb", "b200", "gb200", "l40s")
ATTENTION = {"h100-sxm": "fa3"}
"""What `validate` calls the tables' attention; where nothing else was measured, any word means those kernels."""


def products(folder: Path, num: int, seed: int) -> list[tuple[str, str, dict[str, int], float]]:
    rows = pd.read_parquet(folder / "gemm.parquet")
    rows = rows[rows.gemm_dtype.isin(fit_silicon.GEMM_DTYPES)].sample(num, random_state=seed)
    return [
        (f"gemm {fit_silicon.GEMM_DTYPES[r.gemm_dtype][0]}", fit_silicon.GEMM_DTYPES[r.gemm_dtype][0],
         {"m": int(r.m), "n": int(r.n), "k": int(r.k)}, r.latency_ms * 1e-3)
        for r in rows.itertuples()
    ]  # fmt: skip


def attentions(folder: Path, decode: bool, num: int, seed: int) -> list[tuple[str, str, dict[str, int], float]]:
    table = fit_silicon._attention_rows(folder / f"{'generation' if decode else 'context'}_attention.parquet")
    table = table[(table.kv_cache_dtype == "bfloat16") & (table.window_size == 0) & (decode | (table.isl > 1))]
    found = []
    for r in table.sample(min(num, len(table)), random_state=seed).itertuples():
        s, skv = (1, int(r.kv_length)) if decode else (int(r.isl), int(r.isl))
        shape = {"b": int(r.batch_size), "h": int(r.num_heads), "hkv": int(r.hkv), "s": s, "skv": skv,
                 "d": int(r.head_dim), "causal": int(not decode)}  # fmt: skip
        found.append(("decode" if decode else "prefill", "bf16", shape, r.measured_s))
    return found


def judged(name: str, row: tuple[str, str, dict[str, int], float]) -> tuple[float, bool]:
    label, dtype, shape, measured_s = row
    kind = "gemm" if label.startswith("gemm") else "attention"
    library = "cublas" if kind == "gemm" else ATTENTION.get(name, "fa2")
    told: Any = predict_call(name, kind, dtype, "fwd", library, shape)
    return told.expected_s / measured_s - 1, told.low_s <= measured_s <= told.high_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", type=Path)
    parser.add_argument("--num", type=int, default=400)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    for name in DEVICES:
        folder, groups = options.tables / fit_silicon.FOLDERS[name], defaultdict(list)
        rows = products(folder, options.num, options.seed)
        rows += [row for decode in (False, True) for row in attentions(folder, decode, options.num, options.seed)]
        for row in rows:
            found = judged(name, row)
            for label in {row[0], row[0].partition(" ")[0]}:
                groups[label].append(found)
        for label in sorted(groups):
            off, inside = np.array([o for o, _ in groups[label]]), np.mean([i for _, i in groups[label]])
            figures = f"mean {np.abs(off).mean():.1%}  median {np.median(np.abs(off)):.1%}  bias {off.mean():+.1%}"
            print(f"{name:14s} {label:10s} n {len(off):4d}  {figures}  inside {inside:.0%}", flush=True)


if __name__ == "__main__":
    main()
