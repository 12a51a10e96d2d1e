"""Fused attention as calls: forward, backward and decoding by each library, on the attention time model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from ridgeline.cost.attention import attention_timing
from ridgeline.cost.call import Call, Coef, Time, family
from ridgeline.cost.chip import BOUND_NAMES, Chip, Floats, Timing

DECODE_ROWS = 16
"""Queries of a sequence up to which a call is a decoding step: keys are split over the SMs instead of query tiles."""

BLOCK = 128
"""Sequences that are no multiple of this take the kernels that guard every access."""

OWN = frozenset({"side_frac", "ragged"})
"""Coefficients of this module; the others belong to the tile model."""

KERNELS = {("cudnn", "bwd"): 3, ("fa2", "bwd"): 3, ("efficient", "bwd"): 3, ("decode", "fwd"): 2}


HEAD_DIMS = {"cudnn": (64, 128, 192, 256), "fa2": (32, 64, 96, 128, 192, 256), "fa3": (64, 96, 128, 192, 256), "efficient": (32, 64, 128, 256)}
"""Head dims for which a library has kernels; others are padded up."""


@family("attention", "attention", {})
def model(call: Call, chip: Chip, coef: Coef, warm_frac: float) -> Time:
    dims = call.dims()
    decoding = call.phase == "fwd" and dims["s"] <= DECODE_ROWS and call.library in ("fa2", "cudnn")
    used = _split(tuple(coef.items()), f"{call.library}_decode" if decoding else f"{call.library}_{call.phase}")
    timing, extra = priced(chip, used, dims, call.phase, call.library, _matrix_dtype(call, chip), warm_frac)
    d, dv = dims["d"], dims.get("dv", dims["d"])
    floor_s = float(timing.floor_s[0]) * (d + dv) / (padded(call.library, d) + padded(call.library, dv))
    kernel = "decode" if decoding else call.library
    return Time(float(extra[0]), floor_s, BOUND_NAMES[int(timing.bound[0])], KERNELS.get((kernel, call.phase), 1))


def priced(chip: Chip, coef: Coef, dims: Mapping[str, Any], phase: str, library: str, dtype: str, warm_frac: float = 0.0) -> tuple[Timing, Floats]:
    """The main kernel's timing, and the seconds of the whole call; ``dims`` may hold numbers or equally long arrays.

    A backward kernel owns blocks of keys and walks over queries, so the two change places.
    """
    s, skv = np.asarray(dims["s"], float), np.asarray(dims["skv"], float)
    decoding = phase == "fwd" and library in ("fa2", "cudnn") and bool(np.all(s <= DECODE_ROWS))
    rows, keys = (skv, s) if phase == "bwd" else (s, skv)
    d = np.vectorize(lambda v: padded(library, int(v)))(dims["d"])
    dv = np.vectorize(lambda v: padded(library, int(v)))(dims.get("dv", dims["d"]))
    timing = attention_timing(chip, {k: v for k, v in coef.items() if k not in OWN}, b=dims["b"], h=dims["h"], hkv=dims["hkv"], s=rows, skv=keys,
                              d=d, dv=dv, causal=dims.get("causal", 0), window=dims.get("window", 0), phase=phase,
                              library="decode" if decoding else library, dtype=dtype, warm_frac=warm_frac)
    ragged = (s % BLOCK != 0) | (skv % BLOCK != 0)
    busy_s = timing.expected_s * (1 + coef.get("ragged", 0.0) * ragged)
    return timing, busy_s + side_bytes(dims, phase) / (coef.get("side_frac", 0.7) * chip.dram_bytes_per_s)


def padded(library: str, d: int) -> int:
    """The head dim of the kernel that runs."""
    return next((size for size in HEAD_DIMS.get(library, ()) if size >= d), d)


def side_bytes(dims: Mapping[str, Any], phase: str) -> Any:
    """Traffic beside the main kernel: the mask; in backward the row sums, the fp32 gradient of q, and, with grouped
    heads, gradients of every query head's keys and values that are added up afterwards."""
    b, h, s, skv, d = (np.asarray(dims[k], float) for k in ("b", "h", "s", "skv", "d"))
    mask = 2.0 * b * s * skv * np.asarray(dims.get("mask", 0), float)
    if phase == "fwd":
        return mask
    return mask + 14.0 * b * h * s * d + 8.0 * b * h * skv * d * (h != np.asarray(dims["hkv"]))


def _matrix_dtype(call: Call, chip: Chip) -> str:
    wanted = "tf32" if call.dtype == "fp32" else call.dtype  # fp32 kernels of this kind use the narrower matrix mode
    return wanted if wanted in chip.tensor_flops_per_s else "fp32"


@lru_cache(maxsize=256)
def _split(coef: tuple[tuple[str, float], ...], group: str) -> dict[str, float]:
    return {k.partition(".")[2]: v for k, v in coef if k.startswith(group + ".")}
