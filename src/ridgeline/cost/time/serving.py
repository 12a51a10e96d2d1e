"""Calls as serving frameworks run and time them: in a warm loop, attention with its write into the paged KV cache.

Devices whose only measurements come from such frameworks are priced this way; the coefficients that describe the
harness rather than the kernel are kept apart in the calibration, under ``protocol``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ridgeline.cost.call import ITEMSIZE, Call, Time
from ridgeline.cost.correction import gemm_attention as residue
from ridgeline.cost.time.attention.tiles import attention_timing
from ridgeline.cost.time.chip import Chip, bound_of
from ridgeline.cost.time.gemm.tiles import gemm_timing, held_frac, itemsize, out_dtype_of, overlapped
from ridgeline.cost.time.lanes import only

Entry = Mapping[str, Any]

DECODE_ROWS = 16  # queries of a sequence up to which a call is a decoding step
ONE_L2 = ("ampere-ga10x", "ada", "blackwell-consumer")
"""Elsewhere the L2 has two halves, each with its own copy of what both read."""
SCAN_WIDTH = 31  # sequences a scheduler warp looks through at once, and up to how many it does


def _entry_name(dims: Mapping[str, Any]) -> str:
    decoding = dims["s"] <= DECODE_ROWS < dims["skv"] or dims["s"] == 1
    return ("decode" if decoding else "prefill") + ("_window" if dims.get("window") else "")


def entry_of(entries: Mapping[str, Entry], call: Call) -> Entry | None:
    """The calibration entry of an attention call: prefill or decode, with or without a window."""
    name = _entry_name(call.dims())
    found = entries.get(name) or entries.get(name.partition("_")[0])
    return found if call.phase == "fwd" else None


def gemm(call: Call, chip: Chip, entry: Entry, warm_frac: float) -> Time:
    """A product by the frameworks' library; scaled ones quantize their activations first."""
    dims, protocol = call.dims(), entry.get("protocol", {})
    timing = gemm_timing(
        chip, entry["coef"], b=dims.get("b", 1), m=dims["m"], n=dims["n"], k=dims["k"], dtype=call.dtype,
        warm_frac=warm_frac, library=entry["library"],
    )  # fmt: skip
    quantize_s = 0.0
    if "quantize_launch_s" in protocol:  # a block of threads a row, 2048 elements a turn
        turns = -(-dims["k"] // 2048)
        row_s = protocol["quantize_row_s"] + protocol["quantize_block_s"] * (turns - 1)
        quantize_s = protocol["quantize_launch_s"] + dims["m"] * row_s
    floor_s, expected_s = only(timing.floor_s, chip.clock_hz), only(timing.expected_s, chip.clock_hz) + quantize_s
    if share := entry["coef"].get("residue_frac", 0.0):
        problem = dims.get("b", 1), dims["m"], dims["n"], dims["k"], "nt"
        rows = [residue.features(problem, call.dtype, 8, chip.num_sms)]
        expected_s *= math.exp(share * residue.logs(residue.trees_of(chip, residue.pool_of(call.dtype, 8)), rows)[0])
    return Time(max(floor_s, expected_s), floor_s, bound_of(timing))


def attention(call: Call, chip: Chip, entry: Entry, warm_frac: float) -> Time:
    """Prefill with its cache write, or a decoding step with its scheduler."""
    dims, coef = call.dims(), {**entry["coef"], **entry.get("protocol", {})}
    decoding = entry["library"].endswith("decode")
    shape = {k: dims[k] for k in ("b", "h", "hkv", "s", "skv", "d")}
    dtype = call.dtype if call.dtype in chip.tensor_flops_per_s else "fp32"
    timing = attention_timing(
        chip, entry["coef"], **shape, causal=True if decoding else dims.get("causal", 1), window=dims.get("window", 0),
        library=entry["library"], dtype=dtype, warm_frac=warm_frac,
    )  # fmt: skip
    extra_s = _decode_extra_s(dims, chip, coef) if decoding else _cache_write_s(dims, chip, coef, warm_frac, call.dtype)
    floor_s, expected_s = only(timing.floor_s, chip.clock_hz), only(timing.expected_s, chip.clock_hz) + extra_s
    if share := coef.get("residue_frac", 0.0):
        expected_s *= math.exp(share * residue.attention_log(_entry_name(dims), dims, chip))
    return Time(max(floor_s, expected_s), floor_s, bound_of(timing), 2)


def _cache_write_s(dims: Mapping[str, Any], chip: Chip, coef: Entry, warm_frac: float, dtype: str) -> float:
    """New keys and values into the paged cache: a block a token, of as many threads as elements."""
    if "cache_token_s" not in coef:
        return 0.0
    tokens, width = dims["b"] * dims["s"], dims["hkv"] * dims["d"]
    blocks_s = tokens * coef["cache_token_s"] * (min(width, 512) / 512) ** 1.3
    moved = tokens * width * 4.0 * ITEMSIZE.get(dtype, 2.0) * (1 - warm_frac)
    bytes_s = moved / (coef["cache_frac"] * chip.dram_bytes_per_s)
    both_s: float = only(overlapped(np.atleast_1d(blocks_s), np.atleast_1d(max(bytes_s, 1e-12)), 0.5), bytes_s)
    return 2.5e-6 + both_s  # the kernel that copies new keys and values into the cache


def _decode_extra_s(dims: Mapping[str, Any], chip: Chip, coef: Entry) -> float:
    b, h, hkv = dims["b"], dims["h"], dims["hkv"]
    steps = min(-(-chip.num_sms // hkv // SCAN_WIDTH), -(-b // SCAN_WIDTH)) if b < 992 else 0
    regrouped = b > 1 and hkv > 1 and h > hkv and not dims.get("window")
    waves = -(-b * hkv // chip.num_sms)
    return float(coef.get("regroup_s", 0.0) * regrouped + coef.get("scan_s", 0.0) * max(steps, 0) * waves)


def loop_warm_frac(call: Call, chip: Chip, entry: Entry) -> float:
    """Share of a call's input bytes that a timing loop of the frameworks finds in L2."""
    protocol, dims = entry["protocol"], call.dims()
    if call.kind in ("gemm", "bmm"):
        size, out = itemsize(call.dtype), itemsize(out_dtype_of(call.dtype))
        x, w, y = dims["m"] * dims["k"] * size, dims["n"] * dims["k"] * size, dims["m"] * dims["n"] * out
        distinct = chip.l2_bytes if chip.arch in ONE_L2 else chip.l2_bytes / 2
        x_warm = _held(x + w + y, protocol["x_held_frac"] * chip.l2_bytes)
        w_warm = _held(x + 6 * w + y, protocol["w_held_frac"] * distinct)  # weights a timing loop rotates through
        return float((x * x_warm + w * w_warm) / (x + w))
    size = ITEMSIZE.get(call.dtype, 2.0)
    if "kv_held_frac" in protocol:
        seen = min(dims["skv"], dims.get("window") or dims["skv"])
        return _held(dims["b"] * dims["hkv"] * seen * dims["d"] * 2 * size, protocol["kv_held_frac"] * chip.l2_bytes)
    tokens = dims["b"] * dims["s"] * dims["d"]
    return _held(tokens * (dims["hkv"] * 4 * size + dims["h"] * 4), protocol["io_held_frac"] * chip.l2_bytes)


def _held(footprint_bytes: float, held_bytes: float) -> float:
    return float(held_frac(np.array([footprint_bytes]), held_bytes)[0])
