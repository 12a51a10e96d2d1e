"""How far GEMM and attention predictions are from kernel tables that serving frameworks measured on other GPUs.

    python -m lab.validate.serving ../shared/silicon [--rows 400]

Rows are drawn at random from all of a table, those the coefficients were fitted on among them; fit_silicon.py prints
the error on rows that were held out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ridgeline.validation.operators import predict_call

FOLDERS = {
    "h100-sxm": "h100_sxm",
    "a100-sxm-80gb": "a100_sxm",
    "b200": "b200_sxm",
    "gb200": "gb200",
    "l40s": "l40s",
}
LIBRARY = {"h100-sxm": "fa3"}


def gemm_rows(folder: Path, num: int) -> Iterator[tuple[str, dict[str, Any], float]]:
    table = pd.read_parquet(folder / "gemm.parquet")
    for row in table[table.gemm_dtype == "bfloat16"].sample(num, random_state=1).itertuples():
        yield "cublas", {"m": row.m, "n": row.n, "k": row.k}, row.latency_ms * 1e-3


def attention_rows(path: Path, num: int, library: str) -> Iterator[tuple[str, dict[str, Any], float]]:
    table = pd.read_parquet(path)
    decoding = path.stem.startswith("generation")
    usual = (table.head_dim <= 256) & ~table.kernel_source.str.contains("triton") & (table.kv_cache_dtype == "bfloat16")
    table = table[usual & (table.get("window_size", 0) == 0) & (decoding | (table.isl > 1))]
    for row in table.sample(num, random_state=2).itertuples():
        s, skv = (1, row.step + 1) if decoding else (row.isl, row.isl)
        heads = row.num_key_value_heads or row.num_heads
        shape = {"b": row.batch_size, "h": row.num_heads, "hkv": heads, "s": s, "skv": skv, "d": row.head_dim}
        yield library, {**shape, "causal": 1}, row.latency_ms * 1e-3


def judge(device: str, kind: str, label: str, rows: Iterator[tuple[str, dict[str, Any], float]]) -> None:
    ratios, inside = [], []
    for library, shape, measured_s in rows:
        found = predict_call(device, kind, "bf16", "fwd", library, shape)
        ratios.append(found.expected_s / measured_s - 1)
        inside.append(found.low_s <= measured_s <= found.high_s)
    mean, median, bias = np.mean(np.abs(ratios)), np.median(np.abs(ratios)), np.mean(ratios)
    held = f"inside {np.mean(inside):.0%}"
    print(f"{device:14s} {label:10s} mean {mean:.1%}  median {median:.1%}  bias {bias:+.1%}  {held}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", type=Path)
    parser.add_argument("--rows", type=int, default=400)
    options = parser.parse_args()
    for device, folder in FOLDERS.items():
        place, library = options.tables / folder, LIBRARY.get(device, "fa2")
        judge(device, "gemm", "gemm", gemm_rows(place, options.rows))
        for stem, label in (("context_attention", "prefill"), ("generation_attention", "decode")):
            judge(device, "attention", label, attention_rows(place / f"{stem}.parquet", options.rows, library))


if __name__ == "__main__":
    main()
