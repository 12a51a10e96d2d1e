"""Traces that other projects ship, explained: the verdicts that their makers or a real fix confirmed."""

from __future__ import annotations

import pytest

from ridgeline.api import diff, explain
from ridgeline.findings.explanation import Explanation

REAL_FIX_MS = 177.592 - 141.068
"""What four loader workers brought the ResNet-50 of Kineto's former viewer, by that viewer's own step times."""


@pytest.fixture(scope="module")
def shared_traces(shared_dir):
    return shared_dir / "traces"


@pytest.fixture(scope="module")
def resnet(shared_traces) -> Explanation:
    return explain(shared_traces / "kineto_resnet50" / "num_workers_0.json.gz")


def _rules(found: Explanation) -> list[str]:
    return [finding.rule for finding in found.findings]


def test_the_loader_is_first_and_its_interval_holds_the_real_fix(resnet):
    first = resnet.findings[0]
    assert first.rule == "data-loader"
    assert first.low_ms <= REAL_FIX_MS <= first.high_ms
    assert "69.3 ms" in first.what and first.high_ms < 69.3  # no more than is waited for it


def test_unused_tensor_cores_are_named_with_what_they_bring_later(resnet):
    found = next(finding for finding in resnet.findings if finding.rule == "tensor-cores-unused")
    assert "67%" in found.what and found.later_ms > 40.0  # what waits behind the host now
    assert found.expected_ms < 1.0 and found.high_ms < found.later_ms


def test_the_fixed_run_no_longer_waits_for_its_loader(shared_traces):
    assert "data-loader" not in _rules(explain(shared_traces / "kineto_resnet50" / "num_workers_4.json.gz"))


def test_the_difference_of_the_pair_is_the_loader_less_a_slower_host(shared_traces):
    folder = shared_traces / "kineto_resnet50"
    found = diff(folder / "num_workers_0.json.gz", folder / "num_workers_4.json.gz")
    assert found.delta_ms == pytest.approx(-REAL_FIX_MS, abs=0.1)
    moved = {change.key: change.delta_ms for change in found.changes[:2]}
    assert moved["idle: dataloader"] < -40 and moved["idle: launch_bound"] > 10


def test_streamed_weights_are_not_called_idle(shared_traces):
    found = explain(shared_traces / "nsys" / "h100_2gpu_1s.sqlite")
    assert found.verdict.startswith("Streaming weights over PCIe, and TF32/BF16 off")
    assert _rules(found)[:2] == ["weight-streaming", "tensor-cores-unused"]


def test_a_healthy_trace_is_left_alone(shared_traces):
    found = explain(shared_traces / "nsys" / "healthy_1pct.sqlite")
    assert found.findings == () and found.verdict.startswith("Healthy")


def test_the_rank_that_comes_last_is_named(shared_traces):
    found = explain(shared_traces / "dlrm_8ranks")
    late = next(finding for finding in found.findings if finding.rule == "rank-imbalance")
    assert len(found.ranks) == 8 and late.where.rank == 7


def test_host_bound_inference_is_launch_bound(shared_traces):
    for name in ("bert_small", "falconsai_vit"):
        found = explain(shared_traces / "h100" / f"{name}.json.gz")
        assert _rules(found)[0] == "launch-bound" and found.findings[0].step_frac > 0.5


def test_attention_spelled_out_on_odd_lengths_is_seen(shared_traces):
    """Its odd products go with it: a fused kernel has none."""
    rules = _rules(explain(shared_traces / "h100" / "owlv2_large.json.gz"))
    assert "attention" in rules and "misaligned-sizes" not in rules


@pytest.mark.parametrize("name", ["cpu_only", "rank_non_gpu"])
def test_no_device_is_a_clear_answer(shared_traces, name):
    found = explain(shared_traces / "hta" / f"{name}.json.gz")
    assert found.findings == () and "No device work" in found.verdict


@pytest.mark.parametrize(
    "path",
    [
        "kineto_resnet50/num_workers_0",
        "hta/ns_resolution_v100_ddp",
        "hta/nccl_a100_ddp",
        "h100/owlv2_large",
        "dlrm_8ranks/rank3",
    ],
)
def test_the_replay_of_the_unchanged_run_is_the_recorded_one(shared_traces, path):
    assert explain(shared_traces / f"{path}.json.gz").replay.error_frac < 0.001
