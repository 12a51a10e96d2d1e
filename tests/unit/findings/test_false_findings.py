"""Programs that were told something false: each test plays one of them and fails without what keeps it from that."""

from __future__ import annotations

import pytest
from stage import Stage, healthy, rules_of

from ridgeline.api import explain
from ridgeline.findings.annotate import link_name
from ridgeline.findings.context.gains import recorded_schedule
from ridgeline.findings.finding import clipped
from ridgeline.findings.replay.critical_path import critical_path
from ridgeline.trace import Kind, Trace, TraceBuilder

HALF = ["c10::BFloat16"] * 2
PRODUCT = "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT"


def _decodes(stage: Stage, steps: int, plan_us: float, first_length: int = 100) -> None:
    """A token a step: the first of 12 layers builds a plan for each new length, which the others find."""
    for step in range(steps):
        with stage.step():
            for layer in range(12):
                for _ in range(3):
                    stage.kernel(PRODUCT, 8.0, op="aten::linear", shapes=[[1, 2048], [2048, 2048]], dtypes=HALF)
                shapes = [[1, 16, 1, 128], *[[1, 16, first_length + step, 128]] * 2]
                stage.kernel("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 9.0, shapes=shapes, dtypes=HALF,
                             op="aten::_scaled_dot_product_cudnn_attention",
                             host_us=20.0 + (plan_us if layer == 0 else 0.0))  # fmt: skip


def test_plans_for_new_shapes_are_first_use_work_and_no_contention():
    stage = Stage()
    _decodes(stage, 8, 3000.0)
    found = stage.findings()
    assert found[0].rule == "first-use" and "host-contention" not in rules_of(found)
    assert found[0].cause.startswith("first-use work: a plan is built") and "bucket" in found[0].change
    assert found[0].low_ms < 3.0 < found[0].high_ms


def test_plans_of_a_warm_up_are_told_nothing():
    """One length, whose plan the first step builds."""
    stage = Stage()
    for _ in range(8):
        with stage.step():
            for layer in range(12):
                first = layer == 0 and stage.step_number == 0
                stage.kernel(PRODUCT, 60.0, op="aten::_scaled_dot_product_cudnn_attention", dtypes=HALF,
                             shapes=[[1, 16, 64, 128]] * 3, host_us=3020.0 if first else 20.0)  # fmt: skip
    assert stage.findings() == []


def test_a_recording_of_a_first_use_has_no_findings():
    """One step most of which compiles, with mistakes that it would be told of otherwise."""
    stage = Stage()
    with stage.step():
        stage.host("_compile.compile_inner (dynamo_timed)", 400_000, Kind.ANNOTATION)
        for _ in range(60):
            stage.kernel(
                "ampere_sgemm_128x64_tn", 500.0, op="aten::mm", shapes=[[4096, 4096]] * 2, dtypes=["float"] * 2
            )
    assert stage.findings() == []
    assert explain(stage.trace()).verdict.startswith("A first use")


def _expert(stage: Stage, rows: int, number: int) -> None:
    """One turn of the loop: which tokens are whose is read from the device."""
    with stage.span("aten::nonzero"):
        stage.copy("DtoH pageable", 8, 2.0, waits=True)
    stage.kernel("indexSelectLargeIndex", 4.0, op="aten::index", shapes=[[1024, 2048], [rows]], host_us=25.0)
    for weight in ([5632, 2048], [5632, 2048], [2048, 5632]):
        given = [[rows, weight[1]], weight]
        stage.kernel(PRODUCT, 9.0, op="aten::linear", shapes=given, dtypes=HALF, host_us=25.0)
    stage.kernel("vectorized_elementwise_kernel<Mul>", 3.0, op="aten::mul", shapes=[[rows, 2048]] * 2, host_us=25.0)
    stage.kernel("indexFuncLargeIndex", 4.0, op="aten::index_add_", shapes=[[1024, 2048], [rows]], host_us=25.0)


@pytest.mark.parametrize(("varied", "is_loop"), [(True, True), (False, False)])
def test_a_loop_over_experts_is_told_as_such_with_what_grouping_them_brings(varied, is_loop):
    """Layers of a network over a graph gather and scatter as well: the same number of rows each time, one after the
    other."""
    stage = Stage()
    for _ in range(2):
        with stage.step():
            for _ in range(4):
                healthy(stage, 4, 60.0)
                for number in range(16):
                    _expert(stage, 32 + 7 * number if varied else 64, number)
    stage.facts = {"unprofiled_step_s": stage.now_s / 2}
    found = stage.findings()[0]
    assert (found.rule == "tensor-loop" and found.cause.startswith("a Python loop over experts")) is is_loop
    if is_loop:
        loop_ms = 4 * 16 * 0.175  # launches and waits of a turn; an expert's share of one grouped product remains
        assert found.low_ms < 0.9 * loop_ms < found.high_ms and "group" in found.change


def _timed(unrecorded_ms: float):
    stage = Stage()
    stage.facts = {"unprofiled_step_s": unrecorded_ms * 1e-3, "unprofiled_spread_s": 1e-4}
    for _ in range(4):
        with stage.step():
            stage.host("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 7000, Kind.DATALOADER)
            healthy(stage)
    return stage


def test_a_step_that_is_slower_without_the_profiler_widens_every_interval_and_is_reported():
    steady, unsteady = _timed(8.2), _timed(13.0)
    assert "unsteady" not in explain(steady.trace()).verdict
    told = explain(unsteady.trace())
    assert "The baseline is unsteady: a step took 13 ms without the profiler" in told.verdict
    widths = [found.high_ms - found.low_ms for found in (steady.findings()[0], unsteady.findings()[0])]
    assert widths[1] > widths[0] + 4.0


def test_no_finding_promises_more_than_its_step():
    """Nobody timed the step, so that a slower host is thought possible."""
    stage = Stage()
    for _ in range(3):
        with stage.step():
            for _ in range(200):
                stage.kernel("vectorized_elementwise_kernel<Mul>", 3.0, op="aten::mul", host_us=60.0)
    told = explain(stage.trace())
    assert told.findings
    assert all(max(found.high_ms, found.later_ms, found.in_turn_ms) <= told.step_ms for found in told.findings)


def test_a_finding_is_clipped_to_its_bar():
    found = _timed(8.2).findings()[0]
    assert found.high_ms > 2.0
    less = clipped(found, 2.0)
    assert less.high_ms == less.later_ms == 2.0 and less.low_ms <= less.expected_ms <= 2.0
    assert clipped(found, 1e9) == found


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad"])
def test_advice_for_an_optimizer_is_for_the_one_that_runs(name):
    stage = Stage()
    for _ in range(2):
        with stage.step():
            healthy(stage, 10)
            with stage.span(f"Optimizer.step#{name}.step", Kind.ANNOTATION):
                for _ in range(300):
                    stage.kernel("vectorized_elementwise_kernel<Mul>", 3.0, op="aten::mul_", host_us=15.0)
    found = next(found for found in stage.findings() if found.rule == "unfused-optimizer")
    assert found.change.startswith(f"torch.optim.{name}(…, fused=True)")


@pytest.mark.parametrize(("on", "named"), [("v100", "float16"), ("h200", "bfloat16")])
def test_advice_on_precision_is_for_what_the_device_has(on, named):
    stage = Stage(on=on)
    for _ in range(2):
        with stage.step():
            for _ in range(20):
                stage.kernel("volta_sgemm_128x64_nn", 2700.0, op="aten::mm", shapes=[[4096, 4096]] * 2,
                             dtypes=["float"] * 2)  # fmt: skip
    found = stage.findings()[0]
    assert found.rule == "tensor-cores-unused" and f"dtype=torch.{named})" in found.change


def test_the_loaders_stretch_of_the_critical_path_is_called_after_it():
    stage = Stage()
    for _ in range(3):
        with stage.step():
            stage.host("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 7000, Kind.DATALOADER)
            stage.copy("HtoD pinned", 1_000_000, 20.0)
            healthy(stage, 5)
    context = stage.context()
    path = critical_path(context.wiring.program, recorded_schedule(context))
    longest = [link for link in path if link.duration_s > 5e-3]
    assert len(longest) >= 2
    assert {link_name(context, link) for link in longest} == {
        "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    }


def _served(graphs: bool) -> Trace:
    """A server recorded from a moment on: its device replays graphs whose launches the file does not hold."""
    build = TraceBuilder("served")
    build.describe(format="kineto", devices=[{"name": "NVIDIA H200"}])
    at_s = 0.0
    for step in range(20):
        launch = -1
        if graphs:
            launch = build.add("cudaGraphLaunch", "host", at_s, 20e-6, kind=Kind.RUNTIME, thread=1)
        elif step == 19:
            build.add("cudaStreamQuery", "host", at_s, 5e-6, kind=Kind.RUNTIME, thread=1)
        for _ in range(30):
            build.add("nvjet_tst_64x8", "stream 7", at_s + 30e-6, 10e-6, kind=Kind.KERNEL, device=0, stream=7,
                      launch=launch)  # fmt: skip
            at_s += 11e-6
        at_s += 20e-3
    return build.build()


@pytest.mark.parametrize(("graphs", "missing"), [(False, "the launches of 100% of it"), (True, "CUDA graphs replay")])
def test_a_servers_trace_says_what_was_not_recorded_and_how_to_record_it(graphs, missing):
    found = explain(_served(graphs))
    assert "No known mistake" not in found.verdict and missing in found.verdict
    assert "enforce_eager=True" in found.verdict and "--disable-cuda-graph" in found.verdict
