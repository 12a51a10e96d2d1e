"""Two runs are aligned by what they computed, and the changes add up to the difference."""

from __future__ import annotations

import numpy as np
import pytest
from stage import Stage, healthy

from ridgeline.errors import FindingError
from ridgeline.findings.diff import diff, exclusive_s, idle_by_cause, plain_op
from ridgeline.findings.replay.window import window_of
from ridgeline.trace import Kind, TraceBuilder


def _run(
    *, softmax_us: float = 100.0, extra: int = 0, loader_us: float = 0.0, softmax: str = "softmax_a", modules=True
):
    stage = Stage()
    for _ in range(3):
        with stage.step():
            if loader_us:
                stage.host("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", loader_us, Kind.DATALOADER)
            healthy(stage, 8)
            stage.kernel(softmax, softmax_us, op="aten::_softmax", module="model.head" if modules else "")
            for _ in range(extra):
                stage.kernel("elementwise", 20.0, op="aten::add", module="model.head" if modules else "")
            if loader_us:
                stage.wait()
    return stage.trace()


def _change(found, part: str):
    return next(change for change in found.changes if part in change.key)


@pytest.mark.parametrize(
    "other", [{"softmax_us": 400.0}, {"extra": 12}, {"loader_us": 2000.0}, {"softmax": "softmax_b"}]
)
def test_the_changes_add_up_to_the_difference(other):
    found = diff(_run(), _run(**other), idle_by_cause)
    assert sum(change.delta_ms for change in found.changes) == pytest.approx(found.delta_ms, abs=1e-6)


def test_slower_kernels_are_called_slower():
    found = diff(_run(), _run(softmax_us=400.0), idle_by_cause)
    assert found.changes[0].key.endswith("softmax") or "softmax" in found.changes[0].key
    assert found.changes[0].delta_ms == pytest.approx(0.3, rel=0.01)
    assert "slower kernels (100 µs → 400 µs)" in found.changes[0].why


def test_more_kernels_are_called_more():
    found = _change(diff(_run(extra=4), _run(extra=12), idle_by_cause), "add")
    assert "more kernels (4 → 12 a step)" in found.why


def test_other_kernels_for_the_same_op_are_named():
    found = _change(diff(_run(), _run(softmax="softmax_b", softmax_us=300.0), idle_by_cause), "softmax")
    assert "other kernels (softmax_a → softmax_b)" in found.why


def _beside(ms: float, from_ms: float):
    """Steps of a product of 4 ms, and an exchange on another stream that begins after so many."""
    build = TraceBuilder("run")
    for i in range(3):
        at = i * 10e-3
        build.add(f"ProfilerStep#{i}", "host", at, 10e-3, kind=Kind.STEP, thread=1, step=i)
        for name, start_ms, long_ms, stream in (("nvjet", 0.0, 4.0, 7), ("exchange", from_ms, ms, 20)):
            op = {"nvjet": "aten::mm", "exchange": "aten::copy_"}[name]
            build.add(name, f"stream {stream}", at + start_ms * 1e-3, long_ms * 1e-3, kind=Kind.KERNEL, device=0,
                      stream=stream, step=i, op=op)  # fmt: skip
    return build.build()


def test_what_takes_longer_and_costs_less_is_more_overlapped():
    """Slower kernels alone would say the opposite of the change."""
    change = _change(diff(_beside(3.0, 4.0), _beside(3.7, 2.0), idle_by_cause), "copy")
    assert change.delta_ms == pytest.approx(-1.3, abs=0.01)
    assert "slower kernels" in change.why and "more overlapped" in change.why


def test_idle_time_is_a_change_with_its_cause():
    found = diff(_run(), _run(loader_us=2000.0), idle_by_cause)
    assert _change(found, "dataloader").delta_ms > 1.0


def test_runs_without_modules_are_aligned_by_op():
    assert diff(_run(modules=False), _run(modules=False), idle_by_cause).aligned_by == "op"


def test_a_run_is_no_different_from_itself():
    found = diff(_run(), _run(), idle_by_cause)
    assert found.delta_ms == 0 and max(abs(change.delta_ms) for change in found.changes) < 1e-9


def test_a_file_without_steps_and_device_work_is_refused():
    """Memory alone was called fourteen billion percent faster than a run."""
    build = TraceBuilder("memory")
    build.count("memory_bytes", 0.0, 1e9)
    with pytest.raises(FindingError, match="no device work in memory: nothing to compare"):
        diff(build.build(), _beside(3.0, 4.0), idle_by_cause)


def test_steps_of_the_host_alone_are_compared_by_their_length():
    sides = []
    for ms in (4.0, 5.0):
        build = TraceBuilder("host")
        for i in range(3):
            build.add(f"ProfilerStep#{i}", "host", i * ms * 1e-3, ms * 1e-3, kind=Kind.STEP, thread=1, step=i)
        sides.append(build.build())
    found = diff(*sides, idle_by_cause)
    assert found.delta_ms == pytest.approx(1.0, rel=1e-3)
    assert found.notes == ("no device work in either run: only the lengths of their steps are compared",)


def test_no_moment_is_counted_twice():
    stage = Stage()
    with stage.step():
        healthy(stage, 4)
        stage.collective(500.0)
        stage.copy("HtoD pinned", 1_000_000, 300.0, stream=9)
        stage.kernel("other", 250.0, stream=11)
        healthy(stage, 4)
    trace = stage.trace()
    rows = np.flatnonzero(trace.gpu)
    owned_s = exclusive_s(trace, rows, window_of(trace))
    assert owned_s.sum() == pytest.approx(trace.busy(trace.gpu).total / 1e9, abs=1e-9)
    assert (owned_s >= 0).all() and (owned_s <= trace.duration_s[rows] + 1e-12).all()


def test_spellings_of_an_op_meet():
    assert plain_op("aten::addmm") == plain_op("matmul") == plain_op("aten::bmm")
    assert plain_op("aten::_softmax") == "softmax"


def test_a_predicted_run_meets_a_measured_one_by_the_sort_of_op():
    from ridgeline.trace import TraceBuilder

    build = TraceBuilder("predicted")
    for i, (op, us) in enumerate((("norm", 80.0), ("conv", 50.0), ("pointwise", 40.0))):
        build.add(op, "device", i * 1e-3, us * 1e-6, op=op, phase="forward")
    stage = Stage()
    with stage.step():
        for op, us in (("aten::cudnn_batch_norm", 100.0), ("aten::cudnn_convolution", 60.0), ("aten::relu_", 40.0)):
            stage.kernel("kernel", us, op=op)
    measured = stage.trace().with_words(phase=["forward"] * len(stage.trace()))
    found = diff(build.build(), measured, idle_by_cause)
    assert found.aligned_by == "sort of op" and found.matched_frac == pytest.approx(1.0)
    assert _change(found, "norm (forward)").delta_ms == pytest.approx(0.02, abs=1e-3)
