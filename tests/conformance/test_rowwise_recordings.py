"""The normalization and softmax time models against the recorded H200 kernels."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest

from ridgeline.cost.call import Call
from ridgeline.cost.time.chip import Chip
from ridgeline.cost.time.rows import norm, softmax
from ridgeline.resources import data_dir

H200 = Chip(
    name="h200", arch="hopper", num_sms=132, clock_hz=1.98e9, dram_bytes_per_s=4.8e12, l2_bytes=60e6,
    l2_bytes_per_s=10.14e12, smem_bytes=233472.0, tensor_flops_per_s={}, vector_flops_per_s=67e12, tdp_w=700.0,
    idle_w=75.0,
)  # fmt: skip
LARGEST_MEAN_ERROR = {"layer_norm": 0.055, "rms_norm": 0.055, "group_norm": 0.06, "batch_norm": 0.06, "softmax": 0.05,
                      "log_softmax": 0.07, "cross_entropy": 0.05}  # fmt: skip


def recorded(kind: str) -> Iterator[tuple[Call, dict[str, Any]]]:
    for path in sorted((data_dir() / "recordings" / "h200").glob("operators_seed*.jsonl.gz")):
        with gzip.open(path, "rt") as lines:
            rows = [json.loads(line) for line in list(lines)[1:]]
        for row in rows:
            if row.get("kind") == kind and "kernels" in row:
                yield Call(kind, row["dtype"], row["phase"], row["library"], tuple(row["shape"].items())), row


@pytest.mark.parametrize("kind", LARGEST_MEAN_ERROR)
def test_recorded_times_are_predicted(kind):
    module = norm if kind.endswith("_norm") else softmax
    errors, below_floor = [], []
    for made, row in recorded(kind):
        time = module.model(made, H200, module.DEFAULTS, 0.0)
        measured_s = sum(seconds for _, seconds in row["kernels"])
        overhead_s = 3e-6 + 1e-6 * (len(row["kernels"]) - 1)
        errors.append(abs((time.busy_s + overhead_s) / (measured_s + overhead_s) - 1.0))
        if measured_s < 0.98 * time.floor_s:
            below_floor.append((made, measured_s, time.floor_s))
    assert not below_floor
    assert sum(errors) / len(errors) < LARGEST_MEAN_ERROR[kind]
