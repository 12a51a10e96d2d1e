"""Recorded steps as rounds of a loop: the steady state, the recording taken out, and workers that set the pace."""

from __future__ import annotations

import numpy as np
import pytest
from stage import Stage, healthy

from ridgeline.findings.context.gains import edit_for, gains_s, recorded_frac, recorded_step_s, step_after_s
from ridgeline.findings.context.host_time import launching_time, loading_spans
from ridgeline.findings.context.waits import host_waits
from ridgeline.findings.replay.fix import Fix
from ridgeline.findings.rule import rule_named
from ridgeline.trace import Kind


def _steps(num: int, *, host_us: float = 10.0, kernel_us: float = 100.0, loader_us: float = 0.0, **how) -> Stage:
    """Steps of thirty kernels; ``read`` ends each with a value read, ``last_wait`` the whole with a synchronization."""
    stage = Stage()
    stage.facts = how.get("facts", {})
    for _ in range(num):
        with stage.step():
            if loader_us:
                stage.host("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", loader_us, Kind.DATALOADER)
            for _ in range(30):
                stage.kernel("nvjet_tst_64x8", kernel_us, op="aten::mm", host_us=host_us)
            if how.get("read"):
                with stage.span("aten::item"):
                    stage.wait()
            if how.get("last_wait") and stage.step_number == num - 1:
                stage.wait("cudaDeviceSynchronize")
    return stage


def test_two_recorded_steps_repeat_as_forty_do():
    for how in ({}, {"read": True}, {"host_us": 60.0, "kernel_us": 5.0}, {"host_us": 60.0, "read": True}):
        few, many = _steps(2, **how).context(), _steps(40, **how).context()
        assert few.step_s == pytest.approx(many.base.end_s / 40, rel=0.02), how


def test_a_first_step_without_a_queue_is_not_counted():
    """One step alone begins with an empty device and ends with a full one; a loop does neither."""
    stage = _steps(2, host_us=60.0, kernel_us=65.0)
    assert stage.context().step_s == pytest.approx(30 * 66e-6, rel=0.01)


def test_the_wait_with_which_a_recording_ends_is_not_the_programs():
    ended, plain = _steps(2, last_wait=True).context(), _steps(2).context()
    assert ended.step_s == pytest.approx(plain.step_s, rel=1e-3)
    assert len(ended.loop.last_waits) == 1 and len(plain.loop.last_waits) == 0


def test_a_value_read_at_the_end_of_every_step_is_the_programs():
    context = _steps(2, read=True, host_us=80.0, kernel_us=45.0).context()
    assert len(context.loop.last_waits) == 0
    calls = np.array([wait.call for wait in host_waits(context)])
    freed_s = step_after_s(context, edit_for(context, Fix(freed=calls), best=True))
    assert freed_s == pytest.approx(_steps(2, host_us=80.0, kernel_us=45.0).context().step_s, rel=0.02)
    assert freed_s < 0.98 * context.step_s


def test_a_long_recording_and_one_without_steps_are_taken_as_they_are():
    stage = Stage()
    healthy(stage, 30)
    assert stage.context().loop.end_call == -1
    assert _steps(20).context().loop.end_call == -1


def test_every_host_that_is_kept_explains_the_measured_step():
    context = _steps(3, host_us=60.0, kernel_us=5.0, facts={"unprofiled_step_s": 30 * 50e-6}).context()
    assert context.step_s == pytest.approx(30 * 50e-6, rel=0.01)
    assert len(context.hosts.others) == 1
    assert context.loop.step_s(context.hosts.others[0]) == pytest.approx(30 * 50e-6, rel=0.01)
    assert 0.75 < recorded_frac(context) < 0.9


def test_a_host_that_the_device_hides_may_be_faster_than_recorded():
    """The device decides the step, so the gain of faster kernels depends on a host that nobody could measure."""
    context = _steps(3, host_us=60.0, kernel_us=100.0, facts={"unprofiled_step_s": 30 * 101e-6}).context()
    won_s = gains_s(
        context, edit_for(context, Fix(works=np.arange(context.program.num_works), keep_best=0.1), best=True)
    )
    assert recorded_frac(context) == 1.0 and len(won_s) == 2
    assert won_s[0] == pytest.approx(30 * 41e-6, rel=0.05)  # down to the recorded host
    assert won_s[1] == pytest.approx(30 * 74e-6, rel=0.05)  # down to one that takes 0.45 of it


def test_what_a_step_varies_by_widens_what_is_promised():
    """Without a measurement a step is taken to vary by 1.2 %."""
    step_ms = 30 * 61e-3
    facts = {"unprofiled_step_s": step_ms * 1e-3}
    plain = _steps(3, host_us=60.0, kernel_us=20.0, facts=facts).findings()[0]
    spread = _steps(3, host_us=60.0, kernel_us=20.0, facts={**facts, "unprofiled_spread_s": 1e-4}).findings()[0]
    more_ms = 0.1 - 0.012 * step_ms
    assert spread.high_ms == pytest.approx(
        plain.high_ms + more_ms * (1.0 + rule_named(plain.rule).more_at_best), abs=1e-6
    )
    assert spread.low_ms == pytest.approx(plain.low_ms - more_ms, abs=1e-6)
    assert spread.step_frac == pytest.approx(plain.step_frac)
    assert spread.expected_ms == pytest.approx(plain.expected_ms)


def test_while_workers_set_the_pace_nothing_but_more_of_them_helps():
    context = _steps(3, host_us=60.0, kernel_us=40.0, loader_us=5000.0).context()
    launching = edit_for(context, Fix(host=launching_time(context), host_best=0.1), best=True)
    loading = edit_for(context, Fix(host=context.time_of(loading_spans(context)), host_best=0.0), best=True)
    assert gains_s(context, launching) == (0.0,)
    assert max(gains_s(context, loading)) > 4e-3
    assert max(gains_s(context, loading | launching)) > max(gains_s(context, loading))


def test_time_that_the_recording_took_is_waited_for_workers_without_it():
    """Two recorded steps took longer than they do, and waited less for their batches than they do."""
    facts = {"unprofiled_step_s": 5e-3}
    finding = _steps(3, host_us=60.0, kernel_us=10.0, loader_us=4000.0, facts=facts).findings()[0]
    assert finding.rule == "data-loader"
    assert finding.high_ms > 4.0 * 1.02  # more than was waited while recording


@pytest.mark.parametrize("shapes", [[[64, 64]] * 2, None])
def test_an_untimed_step_has_the_host_that_recordings_leave(shapes):
    stage, frac = Stage(), 0.5
    for _ in range(3):
        with stage.step():
            for _ in range(30):
                stage.kernel("nvjet_tst_64x8", 5.0, op="aten::mm", host_us=60.0, shapes=shapes)
    context = stage.context()
    assert recorded_frac(context) == frac and not context.is_timed
    assert context.step_s == pytest.approx(30 * frac * 60e-6, rel=0.02)
    assert recorded_step_s(context) == pytest.approx(30 * 60e-6, rel=0.02)
    assert len(context.hosts.others) == 2
