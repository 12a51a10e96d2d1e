"""A simulated step as a trace: the same type as a profile, with which every analysis works."""

from __future__ import annotations

import pytest

import ridgeline as rl
from ridgeline.sim.timeline import timeline_of
from ridgeline.trace import Kind, write_chrome


@pytest.fixture(scope="module")
def step():
    return rl.simulate("llama3-8b", "h100-sxm*32", tp=2, pp=4, micro_batch=1, global_batch=64, seq=2048)


@pytest.fixture(scope="module")
def trace(step):
    return timeline_of(step)


def test_it_ends_when_the_step_does_but_for_the_frame_around_it(step, trace):
    assert trace.end_s == pytest.approx(step.step_s - step.parts["other"], rel=1e-6)


def test_every_stage_is_one_rank(step, trace):
    assert sorted(set(trace.rank.tolist())) == [0, 8, 16, 24]


def test_streams_never_run_two_things_at_once(trace):
    for rank in set(trace.rank.tolist()):
        for stream in (7, 20):
            mine = (trace.rank == rank) & (trace.stream == stream)
            order = trace.start_s[mine].argsort(kind="stable")
            starts, ends = trace.start_s[mine][order], (trace.start_s + trace.duration_s)[mine][order]
            assert (starts[1:] >= ends[:-1] - 1e-9).all()


def test_compute_and_exchanges_of_a_rank_are_those_of_its_stage(step, trace):
    for stage, rank in enumerate((0, 8, 16, 24)):
        mine = trace.rank == rank
        computed = trace.duration_s[mine & (trace.kind == Kind.KERNEL)].sum()
        parts = step.stages[stage]
        assert computed == pytest.approx(parts["compute"] + parts["optimizer"], rel=0.02)
        talked = trace.duration_s[mine & (trace.kind == Kind.COMMUNICATION)].sum()
        assert talked == pytest.approx(parts["tp"] + parts["dp"], rel=0.05, abs=1e-4)


def test_the_analyses_of_profiles_work_on_it(step, trace):
    from ridgeline.trace.breakdown import device_shares, stream_shares, totals
    from ridgeline.trace.critical import critical_path
    from ridgeline.trace.idle import idle_causes
    from ridgeline.trace.kernels import work_by
    from ridgeline.trace.quality import quality

    assert totals(trace)
    assert len(device_shares(trace)) == 4, "one for each simulated rank"
    assert len(stream_shares(trace)) == 8
    assert critical_path(trace)
    assert idle_causes(trace)
    assert work_by(trace)
    assert quality(trace)


def test_perfetto_can_open_it(trace, tmp_path):
    import json

    path = write_chrome(trace, tmp_path / "step.json")
    events = json.loads(path.read_text())["traceEvents"]
    assert len(events) > 500


def test_every_kernel_of_a_pass_has_a_floor_of_at_most_its_time(trace):
    works = trace.of_kind(Kind.KERNEL) & trace.matching("phase", ["forward", "backward"])
    floor_s = trace.optional("floor_s")[works]
    assert works.any() and ((floor_s > 0) & (floor_s <= trace.duration_s[works] * (1 + 1e-6))).all()
