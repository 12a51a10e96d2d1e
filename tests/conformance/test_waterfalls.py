"""Waterfalls of recordings and of traces that others ship: they sum to the step, and idle time has a named activity."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.errors import InputError
from ridgeline.findings.accounting.account import account
from ridgeline.resources import data_dir
from ridgeline.trace import Kind, read

RECORDED = sorted((data_dir() / "recordings").rglob("*.json.xz"))
SHIPPED = (
    *("h100/bert_small.json.gz", "h100/falconsai_vit.json.gz", "h100/owlv2_large.json.gz"),
    *("hta/a100_rank0_of_16.json.gz", "hta/cpu_only.json.gz", "hta/critical_path_simple_add.json.gz"),
    *("hta/diff_control_a100.json.gz", "hta/diff_test_v100.json.gz", "hta/nccl_a100_ddp.json.gz"),
    *("hta/ns_resolution_v100_ddp.json.gz", "hta/rank_non_gpu.json.gz", "kineto_resnet50/num_workers_0.json.gz"),
    *("kineto_resnet50/num_workers_4.json.gz", "nsys/h100_2gpu_1s.sqlite", "nsys/healthy_1pct.sqlite"),
    *(f"dlrm_8ranks/rank{rank}.json.gz" for rank in range(8)),
)


def _checked(path: Path, least_named: float) -> None:
    trace = read(path, cache=False)
    found = account(trace)
    assert sum(bar.ns for bar in found.bars) == found.total_ns, path
    assert all(bar.ns > 0 for bar in found.bars), path
    if trace.of_kind(Kind.OP, Kind.RUNTIME, Kind.PYTHON).any():
        idle = sum(bar.frac for bar in found.bars if bar.stage == "idle")
        assert found.named_idle_frac >= least_named or idle < 0.05, (path, found.named_idle_frac)


@pytest.mark.parametrize("name", SHIPPED)
def test_traces_of_other_projects_add_up_and_their_idle_time_has_a_name(shared_dir, name):
    _checked(shared_dir / "traces" / name, 0.95)


def test_recordings_add_up_and_their_idle_time_has_a_name():
    read_ones = 0
    for path in RECORDED[::20]:
        try:
            _checked(path, 0.9)
        except InputError:  # a recording of another kind
            continue
        read_ones += 1
    assert read_ones or not RECORDED
