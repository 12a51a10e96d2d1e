"""What is said of a run adds up, sorts, names its place, and stops where the trace stops."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest
from stage import Stage, healthy, rules_of

from ridgeline.api import annotated, explain
from ridgeline.errors import FindingError, InputError
from ridgeline.findings.context.evidence import memory_frac
from ridgeline.findings.context.gains import recorded_frac, recorded_step_s, step_noise_s
from ridgeline.findings.context.kernel_name import kernel_name
from ridgeline.findings.explain import _fitted, findings_of
from ridgeline.findings.explanation import explained, summary_of
from ridgeline.findings.finding import Finding, Where
from ridgeline.findings.replay.critical_path import critical_path
from ridgeline.findings.replay.what_if import what_if
from ridgeline.trace import Kind, TraceBuilder, read, write_chrome


def _troubled() -> Stage:
    stage = Stage()
    for _ in range(3):
        with stage.step():
            stage.host("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 4000, Kind.DATALOADER)
            for _ in range(6):
                stage.kernel("cutlass_80_simt_sgemm_128x64", 400.0, op="aten::mm", dtypes=["float"] * 2,
                             shapes=[[2048, 1024], [1024, 1024]], module="model.layers.0")  # fmt: skip
            with stage.span("aten::item"):
                stage.wait()
            with stage.span("Optimizer.step#AdamW.step", Kind.ANNOTATION):
                for _ in range(80):
                    stage.kernel("vectorized_elementwise_kernel", 4.0, op="aten::add_", host_us=12.0)
    return stage


@pytest.fixture(scope="module")
def troubled():
    trace = _troubled().trace()
    return explained(trace, [summary_of(trace)])


def test_findings_are_sorted_and_sum_to_at_most_the_step(troubled):
    gains = [finding.expected_ms for finding in troubled.findings]
    assert len(gains) >= 3 and gains == sorted(gains, reverse=True)
    assert sum(finding.high_ms for finding in troubled.findings) <= troubled.replay.recorded_ms + 1e-9
    assert all(0 <= finding.low_ms <= finding.high_ms for finding in troubled.findings)


def test_no_span_is_evidence_of_two_findings(troubled):
    rows = [row for finding in troubled.findings for row in finding.rows if finding.rule != "launch-bound"]
    assert len(rows) == len(set(rows))


def test_the_document_has_what_was_promised(troubled):
    document = json.loads(json.dumps(troubled.to_dict(), allow_nan=False))
    assert {"quality", "totals", "steps", "idle_causes", "findings"} <= document.keys()
    keys = "total_ms busy_ms compute_ms exposed_comm_ms exposed_memcpy_ms idle_ms num_gpu_events".split()
    assert list(document["totals"]["all"]) == keys and list(document["totals"]["linked"]) == keys
    assert len(document["steps"]) == 3
    for finding in document["findings"]:
        assert {
            "rule",
            "version",
            "what",
            "where",
            "cause",
            "low_ms",
            "high_ms",
            "change",
            "evidence",
        } <= finding.keys()


def test_a_finding_names_its_module(troubled):
    found = next(finding for finding in troubled.findings if finding.rule == "tensor-cores-unused")
    assert found.where.module == "model.layers.0" and "aten::mm" in str(found.where)
    assert found.evidence[0]["times_a_step"] == 6


def test_a_hidden_gain_shows_once_the_first_is_fixed():
    stage = Stage()
    for _ in range(3):
        with stage.step():
            stage.host("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 9000, Kind.DATALOADER)
            for _ in range(20):
                stage.kernel("cutlass_80_simt_sgemm_128x64", 400.0, op="aten::mm")
    found = {finding.rule: finding for finding in stage.findings()}
    hidden = found["tensor-cores-unused"]
    assert hidden.later_ms > 1.8 * hidden.high_ms


def test_a_trace_without_device_work_is_answered():
    build = TraceBuilder("host alone")
    build.add("aten::add", "thread", 0.0, 1e-3, kind=Kind.OP, thread=1)
    trace = build.build()
    found = explained(trace, [summary_of(trace)])
    assert found.findings == () and "No device work" in found.verdict


def test_an_empty_trace_is_answered():
    trace = TraceBuilder("empty").build()
    assert explained(trace, [summary_of(trace)]).findings == ()


def test_device_work_without_a_host_is_answered():
    build = TraceBuilder("device alone")
    for i in range(20):
        build.add("kernel", "stream 7", i * 1e-3, 0.9e-3, kind=Kind.KERNEL, device=0, stream=7)
    trace = build.build()
    found = explained(trace, [summary_of(trace)])
    assert found.replay.error_frac < 1e-6 and found.findings == ()


def test_the_recorded_overhead_is_taken_out():
    stage = Stage()
    stage.facts = {"unprofiled_step_s": 0.7e-3}
    for _ in range(3):
        with stage.step():
            for _ in range(60):
                stage.kernel("nvjet_tst_64x8", 4.0, op="aten::mm", host_us=20.0)
    context = stage.context()
    assert context.window.step_s > 1.1e-3
    assert context.step_s == pytest.approx(0.7e-3, rel=0.01)
    assert 0.4 < recorded_frac(context) < 0.8


def test_the_critical_path_is_as_long_as_the_run(troubled):
    context = troubled.context
    path = critical_path(context.program, context.base)
    assert sum(link.duration_s for link in path) == pytest.approx(context.base.end_s, abs=1e-9)
    assert all(abs(a.end_s - b.start_s) < 1e-9 for a, b in pairwise(path))


def test_the_path_by_what_it_is_adds_up_to_the_step(troubled):
    assert sum(troubled.path_ms.values()) == pytest.approx(recorded_step_s(troubled.context) * 1e3)


def test_ops_stand_beside_what_is_expected_of_them(troubled):
    gap = troubled.gaps[0]
    assert gap.op == "aten::mm" and gap.num == 6
    assert gap.measured_ms == pytest.approx(2.4) and 0 < gap.floor_ms <= gap.expected_ms < gap.measured_ms


def test_what_if_says_what_is_left(troubled):
    alone, both, together = what_if(troubled.context, ["workers=4", "kernel=sgemm:4x"])
    assert alone.after_ms < alone.before_ms and together.after_ms < min(alone.after_ms, both.after_ms)
    assert both.saved_ms < both.touched_ms


@pytest.mark.parametrize(
    "change", ["kernel=sgemm", "nothing=2x", "kernel=[:2x", "workers=0", "remove=nothing", "op=zzz:2x"]
)
def test_a_change_that_cannot_be_read_says_so(troubled, change):
    with pytest.raises(FindingError):
        what_if(troubled.context, [change])


def test_the_annotated_trace_has_the_path_and_the_findings(troubled, tmp_path):
    again = read(write_chrome(annotated(troubled), tmp_path / "a.json"), cache=False)
    assert "critical path" in again.lanes()
    assert sum(lane.startswith("finding ") for lane in again.lanes()) >= len(troubled.findings) - 1


def _rank(rank: int, late_us: float, name: str = "ncclDevKernel_AllReduce_Sum") -> Stage:
    """Ranks that meet in collectives: who comes early waits inside."""
    stage = Stage(rank=rank)
    for _ in range(3):
        with stage.step():
            for _ in range(4):
                healthy(stage, 3)
                stage.kernel("nvjet_tst_128x256", 100.0 + late_us, op="aten::mm")
                stage.collective(200.0 + 800.0 - late_us, stream=7, name=name)
    return stage


@pytest.mark.parametrize(
    ("cause", "kernel"),
    [
        ("waiting for a straggler", "ncclDevKernel_AllReduce_Sum"),
        ("imbalance of stages", "ncclDevKernel_SendRecv"),
        ("imbalance of experts", "ncclDevKernel_AllToAll"),
    ],
)
def test_ranks_that_wait_are_told_for_whom(cause, kernel, tmp_path):
    lateness = [0.0, 0.0, 0.0, 800.0] if "straggler" in cause else None
    stages = [_rank(rank, late, kernel) for rank, late in enumerate(lateness or [0.0, 800.0, 0.0, 0.0])]
    traces = [stage.trace() for stage in stages]
    if lateness is None:  # the last to come changes from one collective to the next
        traces = [_shuffled(rank, kernel) for rank in range(4)]
    for rank, trace in enumerate(traces):
        write_chrome(trace, tmp_path / f"rank{rank}.json")
    found = explain(tmp_path)
    assert len(found.ranks) == 4
    late = next(finding for finding in found.findings if finding.rule == "rank-imbalance")
    assert late.cause.startswith(cause)


def _shuffled(rank: int, name: str):
    stage = Stage(rank=rank)
    for step in range(4):
        with stage.step():
            for i in range(4):
                late = 800.0 if (step + i) % 4 == rank else 0.0
                healthy(stage, 3)
                stage.kernel("nvjet_tst_128x256", 100.0 + late, op="aten::mm")
                stage.collective(200.0 + 800.0 - late, stream=7, name=name)
    return stage.trace()


def test_ranks_in_step_have_no_straggler(tmp_path):
    for rank in range(3):
        write_chrome(_rank(rank, 800.0).trace(), tmp_path / f"rank{rank}.json")
    assert "rank-imbalance" not in rules_of(list(explain(tmp_path).findings))


def test_a_folder_without_traces_says_so(tmp_path):
    with pytest.raises(InputError, match="no trace"):
        explain(tmp_path)


@pytest.mark.parametrize(
    ("name", "family", "precision"),
    [
        ("volta_sgemm_128x64_nn", "gemm", "fp32"),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "gemm", "half"),
        ("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_256x64_16x4_tn_align1>", "gemm", "tf32"),
        ("sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16", "conv", "tf32"),
        ("void cudnn::ops::nchwToNhwcKernel<float, float, float>", "layout", ""),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, c10::BFloat16>", "softmax", ""),
        ("void fbgemm_gpu::permute_2D_data_kernel<false, int>", "index", ""),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "communication", ""),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "pointwise", ""),
    ],
)
def test_kernels_are_known_by_their_names(name, family, precision):
    assert kernel_name(name) == (family, precision)


def _pipeline(bubble_us: float):
    """A simulated step of two stages in one table, as a simulator writes it: no host, bubbles marked."""
    build = TraceBuilder("two stages, simulated")
    for rank in range(2):
        at = 0.0
        for micro in range(8):
            if bubble_us and micro in (0, 4):
                build.add(
                    "bubble",
                    f"stage {rank}",
                    at,
                    bubble_us * 1e-6,
                    kind=Kind.BUBBLE,
                    device=0,
                    stream=7,
                    rank=rank,
                    step=0,
                )
                at += bubble_us * 1e-6
            build.add(
                f"forward {micro}", f"stage {rank}", at, 1e-3, kind=Kind.KERNEL, device=0, stream=7, rank=rank, step=0
            )
            at += 1e-3
        build.add("step", f"stage {rank} step", 0.0, at, kind=Kind.STEP, rank=rank, step=0, device=-1, thread=0)
    return build.build()


def test_bubbles_of_a_simulated_pipeline_are_found():
    found = explain(_pipeline(500.0))
    assert len(found.ranks) == 2 and rules_of(list(found.findings)) == ["rank-imbalance"]
    assert found.findings[0].low_ms == 0 and found.findings[0].high_ms >= 0.5


def test_a_simulated_pipeline_without_bubbles_is_healthy():
    found = explain(_pipeline(0.0))
    assert found.findings == () and found.verdict.startswith("Healthy")


@pytest.mark.parametrize("value", ["x", -3, 0, True, None, [1], {"a": 1}, float("nan"), float("inf"), 10**40])
def test_facts_that_are_not_what_they_are_called_are_passed_over(value):
    names = ("unprofiled_step_s", "unprofiled_spread_s", "num_cores", "num_usable_cores", "padding",
             "peak_allocated_bytes", "total_bytes")  # fmt: skip
    stage = Stage()
    stage.facts = {**dict.fromkeys(names, value), "padding": [{"real_frac": value}, value]}
    with stage.step():
        healthy(stage)
    context = stage.context()
    assert (
        step_noise_s(context) == pytest.approx(0.012 * context.step_s)
        and not context.is_timed
        and memory_frac(context) is None
    )
    assert findings_of(context) == []


def test_a_change_without_an_amount_says_how_to_write_it():
    stage = Stage()
    healthy(stage)
    with pytest.raises(FindingError, match="workers=4"):
        what_if(stage.context(), ["workers"])


def _promise(rule: str, low_ms: float, high_ms: float, step_frac: float) -> Finding:
    return Finding(
        rule=rule, version=1, what="", where=Where(), cause="", change="", low_ms=low_ms, high_ms=high_ms,
        expected_ms=(low_ms + high_ms) / 2, later_ms=high_ms, step_frac=step_frac,
    )  # fmt: skip


def test_what_exceeds_the_step_is_taken_from_all_but_the_first_alike():
    others = [_promise("a", 0.0, 12.0, 0.1), _promise("b", 0.0, 8.0, 0.07)]
    made = _fitted([_promise("first", 40.0, 90.0, 0.85), *others], 100.0)
    assert [round(finding.high_ms, 6) for finding in made] == [90.0, 6.0, 4.0]
    assert [finding.step_frac for finding in made] == [0.85, 0.1, 0.07]  # what each brings on its own
    assert _fitted(others, 100.0) == others


def test_the_first_gives_way_where_others_would_keep_less_than_a_quarter():
    made = _fitted([_promise("first", 40.0, 99.0, 0.85), _promise("a", 0.0, 20.0, 0.1)], 100.0)
    assert [round(finding.high_ms, 6) for finding in made] == [95.0, 5.0]


def test_what_lies_beside_traces_in_a_folder_is_set_aside_and_said(tmp_path):
    write_chrome(_troubled().trace(), tmp_path / "rank0.json")
    (tmp_path / "settings.json").write_text('{"batch": 8}')
    found = explain(tmp_path)
    (issue,) = [issue for issue in found.quality["issues"] if issue["code"] == "set_aside"]
    assert "settings.json" in issue["what"] and found.quality["verdict"] != "good" and len(found.ranks) == 1
    with pytest.raises(InputError, match="no list of trace events"):
        explain(tmp_path / "settings.json")
    (tmp_path / "rank0.json").unlink()
    with pytest.raises(InputError, match="no list of trace events"):
        explain(tmp_path)


def test_text_of_16_bits_is_told_as_such(tmp_path):
    (tmp_path / "wide.json").write_bytes('{"traceEvents": []}'.encode("utf-16"))
    with pytest.raises(InputError, match="UTF-16"):
        explain(tmp_path / "wide.json")


def test_two_findings_that_free_the_same_time_are_not_won_back_twice():
    """Two reads follow each other: without either the other still waits, so that only both bring the host ahead."""
    stage = Stage()
    for _ in range(3):
        with stage.step():
            for _ in range(10):
                healthy(stage, 3, 60.0)
                with stage.span("aten::item"), stage.span("aten::_local_scalar_dense"):
                    stage.wait()
                stage.work(160)
                with stage.span("log_metrics", Kind.ANNOTATION):
                    stage.wait()
                stage.work(40)
            stage.host("gc: gen 2", 600.0, Kind.GC)
    stage.facts["unprofiled_step_s"] = stage.now_s / 3  # the host is as fast as it was recorded
    trace = stage.trace()
    found = explained(trace, [summary_of(trace)])
    device_ms = 10 * 3 * 0.060
    assert len(found.findings) >= 2
    assert found.recoverable_ms <= found.step_ms - device_ms + 1e-9
    assert found.recoverable_ms <= sum(finding.expected_ms for finding in found.findings) + 1e-9


def test_shares_of_recorded_time_are_of_the_recorded_step():
    """69 ms of a step of 178 were called 56 % of it: of what the step might take without its recording."""
    found = findings_of(_troubled().context())
    (said,) = [finding.what for finding in found if finding.rule == "data-loader"]
    ms, share = re.search(r"waits ([\d.,]+) ms \((\d+)%\)", said).groups()
    step_ms = _troubled().context().window.step_s * 1e3
    assert int(share) == round(100 * float(ms) / step_ms)
