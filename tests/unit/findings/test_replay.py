"""A replay reproduces what was recorded, and a changed one is what the changed run would have been."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from stage import Stage, healthy

from ridgeline.findings.context.gains import edit_for, recorded_schedule, step_after_s
from ridgeline.findings.context.kernels import copies_of_memory
from ridgeline.findings.context.waits import host_waits
from ridgeline.findings.replay.replay import NONE, Program, edited, no_edit, run
from ridgeline.trace import Kind


def _mixed(*, loader: bool = True, waits: bool = True, kernel_us: float = 100.0) -> Stage:
    stage = Stage()
    for _ in range(3):
        with stage.step():
            if loader:
                stage.host("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 2000, Kind.DATALOADER)
            for i in range(30):
                stage.kernel("elementwise_kernel", kernel_us if i % 3 else 4.0, op="aten::add")
                if waits and i % 10 == 9:
                    with stage.span("aten::item"):
                        stage.wait()
    return stage


def test_the_unchanged_replay_is_the_recorded_run():
    context = _mixed().context()
    recorded_s = (context.start_ns[context.rows] - context.window.start_ns) / 1e9
    assert np.abs(recorded_schedule(context).work_start_s - recorded_s).max() < 1e-9
    assert recorded_schedule(context).end_s == pytest.approx(context.window.duration_s, abs=1e-9)


def test_removing_the_loader_replays_to_the_run_without_it():
    context = _mixed().context()
    loader = context.of_kind(Kind.DATALOADER)
    from ridgeline.findings.replay.fix import Fix

    after_s = step_after_s(context, edit_for(context, Fix(host=context.time_of(loader), host_best=0.0), best=True))
    assert after_s == pytest.approx(_mixed(loader=False).context().step_s, rel=0.01)


def test_dropping_waits_replays_to_the_run_without_them():
    context = _mixed().context()
    from ridgeline.findings.replay.fix import Fix

    calls = np.array([wait.call for wait in host_waits(context)])
    after_s = step_after_s(context, edit_for(context, Fix(freed=calls), best=True))
    assert after_s == pytest.approx(_mixed(waits=False).context().step_s, rel=0.02)
    assert after_s < 0.99 * context.step_s


def test_faster_kernels_replay_to_the_run_with_faster_kernels():
    context = _mixed().context()
    from ridgeline.findings.replay.fix import Fix

    slow = np.flatnonzero(context.work_s > 50e-6)
    after_s = step_after_s(context, edit_for(context, Fix(works=slow, keep_best=0.1), best=True))
    assert after_s == pytest.approx(_mixed(kernel_us=10.0).context().step_s, rel=0.02)


def test_work_moved_aside_no_longer_holds_its_stream_but_its_own_kind():
    stage = Stage()
    with stage.step():
        for _ in range(4):
            stage.copy("HtoD pinned", 10_000_000, 1000.0)
        healthy(stage, 4, 500.0)
    context = stage.context()
    copies = np.flatnonzero(copies_of_memory(context, "htod"))
    from ridgeline.findings.replay.fix import Fix

    moved = run(edited(context.program, edit_for(context, Fix(aside=copies), best=True)))
    assert moved.end_s == pytest.approx(4e-3, rel=0.05)  # the copies still follow one another
    assert context.base.end_s == pytest.approx(6e-3, rel=0.05)


def test_a_delay_nothing_explains_is_counted_and_kept():
    stage = Stage()
    with stage.step():
        healthy(stage, 3, 100.0)
        stage.free_s[7] += 5e-3  # something outside of the trace held the stream
        healthy(stage, 3, 100.0)
    context = stage.context()
    assert context.wiring.unexplained_s == pytest.approx(5e-3, rel=0.05)
    assert recorded_schedule(context).end_s == pytest.approx(context.window.duration_s, abs=1e-9)


def test_work_of_another_stream_that_was_waited_for_is_found():
    stage = Stage()
    with stage.step():
        stage.collective(3000.0)
        stage.free_s[7] = stage.free_s[20] + 2e-6  # the compute stream waits for an event of the other
        healthy(stage, 3, 100.0)
    context = stage.context()
    assert (context.program.depends_on >= 0).sum() == 1
    assert context.wiring.unexplained_s == 0.0


def _two_streams() -> Program:
    """Two launches, the second on another stream behind the first; then a call that waits for it."""
    def index(*values: int) -> np.ndarray:
        return np.array(values, dtype=np.int64)

    return Program(
        after=index(NONE, 0, 1), gap_s=np.array([0.0, 1.0, 1.0]), own_s=np.array([1.0, 1.0, 1.0]),
        waits_for=index(NONE, NONE, 1), return_s=np.array([0.0, 0.0, 0.5]), call=index(0, 1), stream=index(0, 1),
        latency_s=np.array([2.0, 2.0]), stream_gap_s=np.array([0.0, 0.0]), depends_on=index(NONE, 0),
        depend_gap_s=np.array([0.0, 0.25]), duration_s=np.array([10.0, 5.0]),
    )  # fmt: skip


def test_gaps_behind_another_stream_and_after_a_wait_are_kept():
    made = run(_two_streams())
    assert made.call_start_s.tolist() == [0.0, 2.0, 4.0]
    assert made.work_start_s.tolist() == [2.0, 12.25]
    assert made.call_end_s.tolist() == [1.0, 3.0, 17.75]


def test_time_cut_between_calls_and_inside_them_is_told_apart_and_never_below_nothing():
    program = _two_streams()
    before = replace(no_edit(program), cut_before=np.array([0.0, 0.5, 2.0]))
    inside = replace(no_edit(program), cut_inside=np.array([0.25, 2.0, 0.0]))
    made = edited(program, before | inside)
    assert made.gap_s.tolist() == [0.0, 0.5, 0.0]
    assert made.own_s.tolist() == [0.75, 0.0, 1.0]


def test_two_changes_of_the_same_work_multiply():
    program = _two_streams()
    half = replace(no_edit(program), scale=np.array([0.5, 1.0]))
    assert edited(program, half | half).duration_s.tolist() == [2.5, 5.0]


def test_work_that_is_gone_leaves_no_gap_on_its_stream():
    program = replace(_two_streams(), stream_gap_s=np.array([0.0, 3.0]))
    gone = replace(no_edit(program), scale=np.array([1.0, 0.0]))
    assert edited(program, gone).stream_gap_s.tolist() == [0.0, 0.0]
    closed = replace(no_edit(program), closed=np.array([False, True]))
    assert edited(program, closed).stream_gap_s.tolist() == [0.0, 0.0]
    assert edited(program, closed).latency_s.tolist() == [2.0, 0.0]


def test_a_gap_behind_another_stream_counts_though_that_work_had_ended():
    program = replace(_two_streams(), latency_s=np.array([2.0, 10.1]))
    assert run(program).work_start_s.tolist() == [2.0, 12.25]
