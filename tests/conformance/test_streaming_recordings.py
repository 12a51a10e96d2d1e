"""Recorded operators of an H200 against the time models that stream, reduce, order, index, step and pool."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from ridgeline.cost.call import Call, Time, family_of
from ridgeline.cost.time import recurrent  # noqa: F401  registers them
from ridgeline.cost.time.chip import Chip
from ridgeline.cost.time.rows import reduction  # noqa: F401  registers them
from ridgeline.cost.time.stream import elementwise as stream  # noqa: F401  registers them
from ridgeline.cost.time.stream import (
    indexing,  # noqa: F401  registers them
    pooling,  # noqa: F401  registers them
)
from ridgeline.cost.time.stream import multi_tensor as multitensor  # noqa: F401  registers them
from ridgeline.cost.time.stream import sort_scan_topk as ordering  # noqa: F401  registers them

RECORDINGS = Path(__file__).parents[2] / "data" / "recordings" / "h200"
H200 = Chip(
    name="h200", arch="hopper", num_sms=132, clock_hz=1.98e9, dram_bytes_per_s=4.8e12, l2_bytes=62914560.0,
    l2_bytes_per_s=10.14e12, smem_bytes=233472.0, tensor_flops_per_s={"bf16": 989e12}, vector_flops_per_s=66.9e12,
    tdp_w=700.0, idle_w=75.0,
)  # fmt: skip
LIMITS = {
    "gelu silu relu exp rsqrt cos pow2 gelu_tanh clamp add mul div add_ where fill": 0.04,
    "add_row mul_col add_strided permute0213 cast transpose copy masked_fill cat dropout": 0.05,
    "sum_dim0 sum_dim1 mean_dim1 sum_all argmax_dim1 max_dim1 norm_all adaptive_pool2d": 0.05,
    "sort cumsum topk": 0.055,
    "embedding index_select gather_rows index_add embedding_bag": 0.065,
    "adamw foreach_add foreach_sqrt foreach_mul_ foreach_addcdiv_": 0.08,
    "max_pool2d avg_pool2d upsample2x lstm": 0.08,
}


@cache
def rows() -> list[dict[str, Any]]:
    found = []
    for seed in (0, 1):
        with gzip.open(RECORDINGS / f"operators_seed{seed}.jsonl.gz", "rt") as lines:
            next(lines)
            found += [json.loads(line) for line in lines]
    return [row for row in found if "kernels" in row]


def recorded(kinds: str) -> list[tuple[dict[str, Any], Time]]:
    wanted = set(kinds.split())
    made = []
    for row in rows():
        if row["kind"] in wanted:
            call = Call(row["kind"], row["dtype"], row["phase"], row["library"], tuple(row["shape"].items()))
            made.append((row, family_of(call.kind).model(call, H200, family_of(call.kind).defaults, 0.0)))
    return made


@pytest.mark.parametrize(("kinds", "limit"), LIMITS.items(), ids=lambda value: str(value).split()[0])
def test_event_times_agree_with_the_recordings(kinds: str, limit: float):
    errors = []
    for row, time in recorded(kinds):
        around_s = 3e-6 + 1e-6 * (len(row["kernels"]) - 1)
        errors.append(abs((time.busy_s + around_s) / (sum(k[1] for k in row["kernels"]) + around_s) - 1.0))
    assert len(errors) > 100 and mean(errors) < limit


@pytest.mark.parametrize("kinds", LIMITS, ids=lambda kinds: kinds.split()[0])
def test_no_recording_beats_the_floor(kinds: str):
    for row, time in recorded(kinds):
        assert time.floor_s <= sum(k[1] for k in row["kernels"]), row


@pytest.mark.parametrize("kinds", LIMITS, ids=lambda kinds: kinds.split()[0])
def test_the_kernels_are_counted_as_recorded(kinds: str):
    right = [time.num_kernels == len(row["kernels"]) for row, time in recorded(kinds) if row["kind"] != "lstm"]
    assert mean(right) > 0.97
