"""Laws of replays and findings that hold for every run."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.findings.context.gains import recorded_schedule, recorded_step_s, unchanged

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "findings"))

from stage import Stage, healthy

from ridgeline.findings.explain import findings_of
from ridgeline.findings.gate import gate
from ridgeline.findings.replay.critical_path import critical_path
from ridgeline.findings.replay.replay import edited, run
from ridgeline.trace import Kind

MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("kernel"), st.floats(1, 400), st.integers(7, 9)),
        st.tuples(st.just("host"), st.floats(1, 5000), st.just(0)),
        st.tuples(st.just("wait"), st.just(0.0), st.just(0)),
        st.tuples(st.just("copy"), st.floats(1, 900), st.integers(7, 9)),
        st.tuples(st.just("collective"), st.floats(5, 900), st.integers(20, 21)),
        st.tuples(st.just("loader"), st.floats(10, 4000), st.just(0)),
        st.tuples(st.just("healthy"), st.floats(20, 200), st.just(0)),
    ),
    min_size=1,
    max_size=25,
)


def _played(moves, steps: int) -> Stage:
    stage = Stage()
    for _ in range(steps):
        with stage.step():
            for move, us, stream in moves:
                if move == "kernel":
                    stage.kernel("vectorized_elementwise_kernel", us, op="aten::add", stream=stream)
                elif move == "host":
                    stage.host("aten::cpu_op", us)
                elif move == "wait":
                    stage.wait()
                elif move == "copy":
                    stage.copy("HtoD pageable", int(us * 5000), us, stream=stream, waits=us > 400)
                elif move == "collective":
                    stage.collective(us, stream=stream)
                elif move == "loader":
                    stage.host("enumerate(DataLoader)#x.__next__", us, Kind.DATALOADER)
                else:
                    healthy(stage, 5, us)
    return stage


RUNS = st.builds(_played, MOVES, st.integers(1, 3))


@given(RUNS)
def test_the_unchanged_replay_is_what_was_recorded(stage):
    context = stage.context()
    recorded_s = (context.start_ns[context.rows] - context.window.start_ns) / 1e9
    assert np.abs(recorded_schedule(context).work_start_s - recorded_s).max(initial=0.0) < 2e-9


@given(RUNS, st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_more_speed_never_makes_a_run_longer(stage, less, more):
    context = stage.context()
    rng = np.random.default_rng(0)
    chosen = rng.random(context.program.num_works) < 0.5
    slower, faster = max(less, more), min(less, more)
    ends = []
    for keep in (1.0, slower, faster):
        edit = replace(unchanged(context), scale=np.where(chosen, max(keep, 1e-9), 1.0))
        ends.append(run(edited(context.program, edit)).end_s)
    assert ends[0] >= ends[1] - 1e-12 >= ends[2] - 2e-12


@given(RUNS)
def test_dropping_waits_and_host_time_never_makes_a_run_longer(stage):
    context = stage.context()
    edit = unchanged(context)
    freed = replace(edit, freed=np.ones(context.program.num_calls, dtype=bool))
    cut = replace(edit, cut_before=np.full(context.program.num_calls, 0.5))
    base_s = context.base.end_s
    assert run(edited(context.program, freed)).end_s <= base_s + 1e-12
    assert run(edited(context.program, cut)).end_s <= base_s + 1e-12
    assert run(edited(context.program, freed | cut)).end_s <= run(edited(context.program, freed)).end_s + 1e-12


@given(RUNS)
def test_findings_sum_to_at_most_the_step_and_intervals_are_in_order(stage):
    context = stage.context()
    found = findings_of(context)
    assert sum(finding.high_ms for finding in found) <= recorded_step_s(context) * 1e3 * (1 + 1e-9)
    assert all(
        0 <= finding.low_ms <= finding.expected_ms <= finding.high_ms <= finding.later_ms + 1e-9 for finding in found
    )


@given(RUNS)
def test_the_critical_path_has_no_gaps_and_ends_with_the_run(stage):
    context = stage.context()
    path = critical_path(context.program, context.base)
    assert abs(sum(link.duration_s for link in path) - context.base.end_s) < 1e-9


@given(st.lists(st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=8), min_size=1, max_size=5), st.floats(0.001, 0.5))
def test_runs_never_regress_against_themselves(runs, limit):
    found = gate(runs, runs, limit)
    assert not found.failed
    assert found.low_frac <= found.slowdown_frac <= found.high_frac
