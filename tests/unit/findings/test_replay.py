"""A replay reproduces what was recorded, and a changed one is what the changed run would have been."""

from __future__ import annotations

import numpy as np
import pytest
from stage import Stage, healthy

from ridgeline.findings.context.gains import edit_for, recorded_schedule, step_after_s
from ridgeline.findings.context.kernels import copies_of_memory
from ridgeline.findings.context.waits import host_waits
from ridgeline.findings.replay.replay import edited, run
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
    scene = _mixed().scene()
    recorded_s = (scene.start_ns[scene.rows] - scene.window.start_ns) / 1e9
    assert np.abs(recorded_schedule(scene).work_start_s - recorded_s).max() < 1e-9
    assert recorded_schedule(scene).end_s == pytest.approx(scene.window.duration_s, abs=1e-9)


def test_removing_the_loader_replays_to_the_run_without_it():
    scene = _mixed().scene()
    loader = scene.of_kind(Kind.DATALOADER)
    from ridgeline.findings.replay.fix import Cure

    after_s = step_after_s(scene, edit_for(scene, Cure(host=scene.time_of(loader), host_best=0.0), best=True))
    assert after_s == pytest.approx(_mixed(loader=False).scene().step_s, rel=0.01)


def test_dropping_waits_replays_to_the_run_without_them():
    scene = _mixed().scene()
    from ridgeline.findings.replay.fix import Cure

    calls = np.array([wait.call for wait in host_waits(scene)])
    after_s = step_after_s(scene, edit_for(scene, Cure(freed=calls), best=True))
    assert after_s == pytest.approx(_mixed(waits=False).scene().step_s, rel=0.02)
    assert after_s < 0.99 * scene.step_s


def test_faster_kernels_replay_to_the_run_with_faster_kernels():
    scene = _mixed().scene()
    from ridgeline.findings.replay.fix import Cure

    slow = np.flatnonzero(scene.work_s > 50e-6)
    after_s = step_after_s(scene, edit_for(scene, Cure(works=slow, keep_best=0.1), best=True))
    assert after_s == pytest.approx(_mixed(kernel_us=10.0).scene().step_s, rel=0.02)


def test_work_moved_aside_no_longer_holds_its_stream_but_its_own_kind():
    stage = Stage()
    with stage.step():
        for _ in range(4):
            stage.copy("HtoD pinned", 10_000_000, 1000.0)
        healthy(stage, 4, 500.0)
    scene = stage.scene()
    copies = np.flatnonzero(copies_of_memory(scene, "htod"))
    from ridgeline.findings.replay.fix import Cure

    moved = run(edited(scene.program, edit_for(scene, Cure(aside=copies), best=True)))
    assert moved.end_s == pytest.approx(4e-3, rel=0.05)  # the copies still follow one another
    assert scene.base.end_s == pytest.approx(6e-3, rel=0.05)


def test_a_delay_nothing_explains_is_counted_and_kept():
    stage = Stage()
    with stage.step():
        healthy(stage, 3, 100.0)
        stage.free_s[7] += 5e-3  # something outside of the trace held the stream
        healthy(stage, 3, 100.0)
    scene = stage.scene()
    assert scene.wiring.unexplained_s == pytest.approx(5e-3, rel=0.05)
    assert recorded_schedule(scene).end_s == pytest.approx(scene.window.duration_s, abs=1e-9)


def test_work_of_another_stream_that_was_waited_for_is_found():
    stage = Stage()
    with stage.step():
        stage.collective(3000.0)
        stage.free_s[7] = stage.free_s[20] + 2e-6  # the compute stream waits for an event of the other
        healthy(stage, 3, 100.0)
    scene = stage.scene()
    assert (scene.program.depends_on >= 0).sum() == 1
    assert scene.wiring.unexplained_s == 0.0
