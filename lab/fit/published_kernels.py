"""Fit the GEMM and attention time models to published kernel timings of six GPUs and write their calibrations.

The tables come from ai-dynamo/aiconfigurator (Apache-2.0) as Parquet files, one folder per device; they are read, never
copied. Every shape is either in the fit or in the held-out set the printed errors are of. Run from the repository root:

    python -m lab.fit.published_kernels ../shared/silicon [--only h200] [--unseen]

Architectures left out whole, as a device with only a datasheet is: ``lab/fit/unmeasured.py``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from ridgeline.cost.time.attention import tiles as attention
from ridgeline.cost.time.chip import Chip, Floats, chip_of
from ridgeline.cost.time.gemm import tiles as gemm
from ridgeline.cost.unmeasured.related_device import adapted
from ridgeline.hardware import device

SOURCE = "ai-dynamo/aiconfigurator kernel timings (Apache-2.0, snapshot 095f58a51c4c), short bursts, clocks free"
FOLDERS = {"h200": "h200_sxm", "h100-sxm": "h100_sxm", "a100-sxm-80gb": "a100_sxm", "b200": "b200_sxm",
           "gb200": "gb200", "l40s": "l40s"}  # fmt: skip
NUM_FIT, NUM_HELD_OUT = 1200, 4000
NUM_WEIGHT_COPIES = 6  # the harness multiplies by six weights in turn, so that a weight is cold unless six fit in L2

Predict = Callable[[Mapping[str, float], pd.DataFrame], Floats]


@dataclass(frozen=True)
class Suite:
    """One coefficient set: which rows it is fitted to, how they are predicted and where the search starts."""

    family: str
    key: str
    rows: pd.DataFrame
    predict: Predict
    start: dict[str, float]
    protocol: tuple[str, ...]  # coefficients that describe the harness, not the kernel
    fixed: tuple[str, ...] = ()
    note: str = ""
    device: str = ""


@dataclass
class Fit:
    """Fitted coefficients and the errors on shapes the fit has not seen."""

    coef: dict[str, float]
    errors: Floats
    held_out: pd.DataFrame
    seconds: float = 0.0
    figures: dict[str, object] = field(default_factory=dict)


def fit(suite: Suite, *, num_fit: int = NUM_FIT, seed: int = 0) -> Fit:
    """Minimize the log error, robustly, over a random subset; measure on another."""
    began = time.time()
    order = np.random.default_rng(seed).permutation(len(suite.rows))
    train = suite.rows.iloc[order[:num_fit]]
    held = suite.rows.iloc[order[num_fit : num_fit + NUM_HELD_OUT]]
    names = [name for name in suite.start if name not in suite.fixed]
    measured = np.log(train["measured_s"].to_numpy())
    start = np.log([suite.start[name] for name in names])

    def coefficients(x: Floats) -> dict[str, float]:
        return {**suite.start, **dict(zip(names, np.exp(x).tolist(), strict=True))}

    def residuals(x: Floats) -> Floats:
        pull = 0.02 * (x - start)  # keeps a coefficient that no row depends on where it started
        return np.concatenate([np.log(suite.predict(coefficients(x), train)) - measured, pull])

    found = least_squares(residuals, start, loss="soft_l1", f_scale=0.06, diff_step=3e-3, max_nfev=40, x_scale=0.3)
    coef = coefficients(found.x)
    errors = suite.predict(coef, held) / held["measured_s"].to_numpy() - 1
    return Fit(coef, errors, held, time.time() - began, _figures(errors, len(train)))


def _figures(errors: Floats, num_fit: int) -> dict[str, object]:
    q05, q95 = np.quantile(np.log1p(errors), [0.05, 0.95])
    return {
        "n": len(errors), "num_fit": num_fit, "mape": round(float(np.abs(errors).mean()), 4),
        "median_ape": round(float(np.median(np.abs(errors))), 4), "bias": round(float(errors.mean()), 4),
        "log_quantiles": {"q05": round(float(q05), 4), "q95": round(float(q95), 4)},
    }  # fmt: skip


# GEMM

GEMM_DTYPES = {"bfloat16": ("bf16", "cublas"), "fp8": ("fp8", "cutlass"), "nvfp4": ("fp4", "cutlass")}
GEMM_PROTOCOL = {"x_held_frac": 0.8, "w_held_frac": 0.85}
ONE_L2 = ("ada",)  # elsewhere L2 has two halves, each with its own copy of what both read
QUANTIZE = {"quantize_launch_s": 2.5e-6, "quantize_row_s": 7e-9, "quantize_block_s": 4e-9}


def _dims(rows: pd.DataFrame, names: str) -> list[Floats]:
    return [rows[name].to_numpy(dtype=np.float64) for name in names.split()]


def loop_warm_frac(chip: Chip, coef: Mapping[str, float], rows: pd.DataFrame, dtype: str) -> Floats:
    """Share of input bytes a timing loop finds in L2: the activations always, a weight only if all copies stay."""
    m, n, k = _dims(rows, "m n k")
    x, w = m * k * gemm.itemsize(dtype), n * k * gemm.itemsize(dtype)
    y = m * n * gemm.itemsize(gemm.out_dtype_of(dtype))
    x_warm = gemm.held_frac(x + w + y, coef["x_held_frac"] * chip.l2_bytes)
    distinct_bytes = chip.l2_bytes if chip.arch in ONE_L2 else chip.l2_bytes / 2
    w_warm = gemm.held_frac(x + NUM_WEIGHT_COPIES * w + y, coef["w_held_frac"] * distinct_bytes)
    return (x * x_warm + w * w_warm) / (x + w)


def _quantize_s(coef: Mapping[str, float], rows: pd.DataFrame) -> Floats | float:
    """The per-token quantization that scaled products run first: a block of threads a row, 2048 elements a turn."""
    if "quantize_launch_s" not in coef:
        return 0.0
    m, k = _dims(rows, "m k")
    turns = np.ceil(k / 2048)
    return coef["quantize_launch_s"] + m * (coef["quantize_row_s"] + coef["quantize_block_s"] * (turns - 1))


def gemm_suites(name: str, folder: Path, chip: Chip) -> list[Suite]:
    table = pd.read_parquet(folder / "gemm.parquet")
    return [_gemm_suite(chip, table, kind) for kind in GEMM_DTYPES if (table.gemm_dtype == kind).any()]


def _gemm_suite(chip: Chip, table: pd.DataFrame, kind: str) -> Suite:
    dtype, library = GEMM_DTYPES[kind]
    rows = table[table.gemm_dtype == kind].assign(measured_s=lambda t: t.latency_ms * 1e-3)
    extra = {} if library == "cublas" else QUANTIZE
    protocol = {**GEMM_PROTOCOL, **extra}
    kernel = {k: v for k, v in gemm.defaults(chip.arch, library).items() if k != "unaligned_frac"}

    def predict(coef: Mapping[str, float], rows: pd.DataFrame) -> Floats:
        m, n, k = _dims(rows, "m n k")
        warm = loop_warm_frac(chip, coef, rows, dtype)
        times = gemm.gemm_timing(chip, coef, m=m, n=n, k=k, dtype=dtype, warm_frac=warm, library=library)
        return times.expected_s + _quantize_s(coef, rows)

    rows = _possible(rows, chip, dtype)
    fixed = ("ramp_s", "ramp_bytes", *(("splitk_s",) if library == "cutlass" else ()))
    return Suite("gemm", dtype, rows, predict, {**kernel, **protocol}, tuple(protocol), fixed, library, chip.name)


def _possible(rows: pd.DataFrame, chip: Chip, dtype: str) -> pd.DataFrame:
    """Rows that do not beat the datasheet: tensor peak, and DRAM for what cannot be in L2."""
    m, n, k = _dims(rows, "m n k")
    moved = np.maximum((m + n) * k * gemm.itemsize(dtype) + m * n * 2 - chip.l2_bytes, 0)
    floor_s = np.maximum(2 * m * n * k / chip.peak_flops_per_s(dtype), moved / chip.dram_bytes_per_s)
    kept = rows[rows.measured_s.to_numpy() >= floor_s]
    if len(kept) < len(rows):
        print(f"  {chip.name} {dtype}: dropped {len(rows) - len(kept)} of {len(rows)} rows that beat the datasheet")
    return kept.reset_index(drop=True)


# Attention

ATTENTION_LIBRARIES = {"h200": "fa3", "h100-sxm": "fa3", "a100-sxm-80gb": "flashinfer", "l40s": "fa2_paged",
                       "b200": "trtllm", "gb200": "trtllm"}  # fmt: skip
DECODERS = {"l40s": "fa2_decode", "b200": "trtllm_decode", "gb200": "trtllm_decode"}
KV_DTYPES = {"bfloat16": "bf16", "fp8": "fp8"}
CACHE_LAUNCH_S = 2.5e-6
CACHE = {"cache_token_s": 5e-9, "cache_frac": 0.6, "io_held_frac": 0.5}
PREFILL = ("launch_s", "tile_s", "row_s", "pack_frac", "tensor_frac", "exp_per_clock", "serial_frac", "tail_frac",
           "uneven_frac", "dram_frac", "exposed_frac", "split_s", "power_frac", "power_tau_s")  # fmt: skip
DECODE = ("launch_s", "fanout_s", "tile_s", "row_s", "dram_frac", "exposed_frac", "split_s", "split_each_s",
          "load_frac", "l2_frac")  # fmt: skip
DECODE_PROTOCOL = {"kv_held_frac": 0.7, "scan_s": 0.4e-6, "regroup_s": 0.5e-6}
SCAN_WIDTH, SCAN_MAX_BATCH = 31, 992  # sequences a scheduler warp looks through at once, and up to how many it does


def attention_suites(name: str, folder: Path, chip: Chip) -> list[Suite]:
    prefill = _attention_rows(folder / "context_attention.parquet")
    decode = _attention_rows(folder / "generation_attention.parquet")
    suites = []
    for kind, kv_dtype in KV_DTYPES.items():
        suffix = "" if kv_dtype == "bf16" else f"_{kv_dtype}kv"
        for window in (False, True):
            key = ("_window" if window else "") + suffix
            rows = prefill[(prefill.kv_cache_dtype == kind) & ((prefill.window_size > 0) == window) & (prefill.isl > 1)]
            if len(rows):
                suites.append(_prefill_suite(name, chip, rows, "prefill" + key, kv_dtype))
            rows = decode[(decode.kv_cache_dtype == kind) & ((decode.window_size > 0) == window)]
            if len(rows):
                suites.append(_decode_suite(name, chip, rows, "decode" + key, kv_dtype))
    return suites


def _attention_rows(path: Path) -> pd.DataFrame:
    rows = pd.read_parquet(path)
    rows = rows[(rows.head_dim <= 256) & ~rows.kernel_source.str.contains("triton")]
    heads = np.where(rows.num_key_value_heads == 0, rows.num_heads, rows.num_key_value_heads)
    return rows.assign(
        measured_s=rows.latency_ms * 1e-3, hkv=heads, window_size=rows.get("window_size", 0), kv_length=rows.step + 1
    ).reset_index(drop=True)


def _cache_write_s(chip: Chip, coef: Mapping[str, float], rows: pd.DataFrame, kv_bytes: Floats) -> Floats:
    """The copy of new keys and values into the paged cache: a block a token, of as many threads as elements."""
    b, s, hkv, d = _dims(rows, "batch_size isl hkv head_dim")
    blocks_s = b * s * coef["cache_token_s"] * (np.minimum(hkv * d, 512) / 512) ** 1.3
    return CACHE_LAUNCH_S + gemm.overlapped(blocks_s, kv_bytes / (coef["cache_frac"] * chip.dram_bytes_per_s), 0.5)


def _prefill_suite(name: str, chip: Chip, rows: pd.DataFrame, key: str, kv_dtype: str) -> Suite:
    library = "flashinfer" if (name, kv_dtype) == ("l40s", "fp8") else ATTENTION_LIBRARIES[name]

    def predict(coef: Mapping[str, float], rows: pd.DataFrame) -> Floats:
        b, h, hkv, s, d, window = _dims(rows, "batch_size num_heads hkv isl head_dim window_size")
        kv_bytes = b * s * hkv * d * 2 * (2 + gemm.itemsize(kv_dtype))
        warm = gemm.held_frac(kv_bytes + b * s * h * d * 4, coef["io_held_frac"] * chip.l2_bytes)
        times = attention.attention_timing(
            chip, coef, b=b, h=h, hkv=hkv, s=s, skv=s, d=d, window=window, library=library,
            kv_dtype=kv_dtype, warm_frac=warm,
        )  # fmt: skip
        return times.expected_s + _cache_write_s(chip, coef, rows, kv_bytes * (1 - warm))

    start = {k: attention.defaults(chip.arch, library)[k] for k in PREFILL} | CACHE
    fixed = ("split_s",) if not attention.LIBRARIES[library].splits else ()
    return Suite("attention", key, rows.reset_index(drop=True), predict, start, tuple(CACHE), fixed, library, name)


def _decode_suite(name: str, chip: Chip, rows: pd.DataFrame, key: str, kv_dtype: str) -> Suite:
    library = "decode" if (name, kv_dtype) == ("l40s", "fp8") else DECODERS.get(name, "decode")

    def predict(coef: Mapping[str, float], rows: pd.DataFrame) -> Floats:
        b, h, hkv, skv, d, window = _dims(rows, "batch_size num_heads hkv kv_length head_dim window_size")
        seen = np.where(window > 0, np.minimum(window, skv), skv)
        kv_bytes = b * hkv * seen * d * 2 * gemm.itemsize(kv_dtype)
        warm = gemm.held_frac(kv_bytes, coef["kv_held_frac"] * chip.l2_bytes)
        times = attention.attention_timing(
            chip, coef, b=b, h=h, hkv=hkv, s=1, skv=skv, d=d, window=window, library=library,
            kv_dtype=kv_dtype, warm_frac=warm,
        )  # fmt: skip
        steps = np.minimum(np.ceil(chip.num_sms / hkv / SCAN_WIDTH), np.ceil(b / SCAN_WIDTH)) * (b < SCAN_MAX_BATCH)
        regrouped = (b > 1) & (hkv > 1) & (h > hkv) & (window == 0)  # queries copied to put a group's heads together
        waves = np.ceil(b * hkv / chip.num_sms)
        return times.expected_s + coef["regroup_s"] * regrouped + coef["scan_s"] * steps * waves

    start = {k: attention.defaults(chip.arch, library)[k] for k in DECODE} | DECODE_PROTOCOL
    protocol = tuple(DECODE_PROTOCOL)
    return Suite("attention", key, rows.reset_index(drop=True), predict, start, protocol, (), library, name)


def report(name: str, suite: Suite, found: Fit) -> None:
    f = found.figures
    errors = f"MAPE {100 * f['mape']:5.2f} %  median {100 * f['median_ape']:5.2f} %  bias {100 * f['bias']:+5.2f} %"
    print(f"{name:21} {suite.family:9} {suite.key:21} n={f['n']:5} {errors}  {found.seconds:4.0f} s", flush=True)


def write(path: Path, name: str, fits: list[tuple[Suite, Fit]]) -> None:
    """Add the coefficients to the device's calibration file; what was fitted to other measurements stays."""
    content = json.loads(path.read_text()) if path.is_file() else {"device": name, "basis": "fitted", "source": SOURCE}
    families = content.setdefault("families", {})
    for suite, found in fits:
        entries = families.setdefault(suite.family, {})
        if suite.key not in entries or entries[suite.key].get("source") == SOURCE:
            entries[suite.key] = _entry(suite, found)
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def _entry(suite: Suite, found: Fit) -> dict[str, object]:
    rounded = {k: float(f"{v:.4g}") for k, v in found.coef.items()}
    return {
        "library": suite.note, "source": SOURCE, "heldout": found.figures,
        "coef": {k: v for k, v in rounded.items() if k not in suite.protocol},
        "protocol": {k: rounded[k] for k in suite.protocol},
    }  # fmt: skip


# A device nobody measured: coefficients of its siblings, adapted to its datasheet (strangers: fit_strangers.py)

SIBLINGS = {"h200": ("h100-sxm",), "h100-sxm": ("h200",), "b200": ("gb200",), "gb200": ("b200",)}


def pooled(suites: list[Suite]) -> Suite:
    """One suite over several devices, fitted with one coefficient set; every row keeps its own device's physics."""
    rows = [suite.rows.assign(member=i) for i, suite in enumerate(suites)]
    devices = [device(suite.device) for suite in suites]

    def predict(coef: Mapping[str, float], rows: pd.DataFrame) -> Floats:
        times = np.empty(len(rows))
        for i, suite in enumerate(suites):
            mine = (rows["member"] == i).to_numpy()
            if mine.any():
                times[mine] = suite.predict(adapted(coef, devices[0], devices[i]), rows[mine])
        return times

    sizes = min(len(part) for part in rows)
    mixed = pd.concat([part.sample(sizes, random_state=0) for part in rows], ignore_index=True)
    return replace(suites[0], rows=mixed, predict=predict)


def transfer(name: str, suites: Mapping[str, list[Suite]], donors: tuple[str, ...]) -> None:
    """Predict a device with coefficients fitted to others alone, and print the error."""
    for suite in suites[name]:
        same = (suite.family, suite.key)
        others = [other for donor in donors for other in suites[donor] if (other.family, other.key) == same]
        if not others:
            print(f"{name:21} {suite.family:9} {suite.key:21} no donor has it")
            continue
        found = fit(pooled(others))
        coef = {**suite.start, **adapted(found.coef, device(others[0].device), device(name))}
        errors = suite.predict(coef, suite.rows) / suite.rows["measured_s"].to_numpy() - 1
        report(f"{name} < {donors[0]}", suite, Fit(coef, errors, suite.rows, found.seconds, _figures(errors, 0)))


POOLS = {"hopper": ("h200", "h100-sxm"), "blackwell": ("b200", "gb200"), "ampere": ("a100-sxm-80gb",), "ada": ("l40s",),
         "generic": ("h200", "b200", "a100-sxm-80gb", "l40s")}  # fmt: skip
DEFAULT_KEYS = ("bf16", "fp8", "prefill", "decode")


def print_defaults(suites: Mapping[str, list[Suite]]) -> None:
    """The architecture defaults of gemm.py and attention.py, as rows of their tables."""
    for pool, names in POOLS.items():
        for key in DEFAULT_KEYS:
            members = [suite for name in names for suite in suites[name] if suite.key == key]
            if not members:
                continue
            found = fit(pooled(members))
            library = members[0].note
            kernel = {k: v for k, v in found.coef.items() if k not in members[0].protocol}
            values = ", ".join(f'"{k}": {float(f"{v:.3g}")!r}' for k, v in kernel.items())
            print(f'    "{pool}/{library}": {{{values}}},  # {100 * found.figures["mape"]:.1f} %', flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", type=Path, help="folder with one folder of Parquet tables per device")
    parser.add_argument("--only", default="", help="comma-separated devices")
    parser.add_argument("--family", default="", help="gemm or attention")
    parser.add_argument("--key", default="", help="only suites whose key contains this")
    parser.add_argument("--unseen", action="store_true", help="instead, predict a device from its siblings")
    parser.add_argument("--defaults", action="store_true", help="instead, print one coefficient set per architecture")
    parser.add_argument("--out", type=Path, default=Path("data/calibrations"))
    options = parser.parse_args()
    suites = {name: _suites(name, options) for name in FOLDERS}
    if options.defaults:
        print_defaults(suites)
        return
    for name in options.only.split(",") if options.only else FOLDERS:
        if options.unseen:
            if name in SIBLINGS:
                transfer(name, suites, SIBLINGS[name])
            continue
        fits = []
        for suite in suites[name]:
            found = fit(suite)
            report(name, suite, found)
            fits.append((suite, found))
        options.out.mkdir(parents=True, exist_ok=True)
        write(options.out / f"{name}.json", name, fits)


def _suites(name: str, options: argparse.Namespace) -> list[Suite]:
    chip, folder = chip_of(device(name)), options.tables / FOLDERS[name]
    every = gemm_suites(name, folder, chip) + attention_suites(name, folder, chip)
    return [suite for suite in every if options.family in suite.family and options.key in suite.key]


if __name__ == "__main__":
    main()
