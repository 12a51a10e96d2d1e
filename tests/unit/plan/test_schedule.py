"""Pipeline schedules: complete, in a feasible order, with the memory and the bubble they are known for."""

from __future__ import annotations

from collections import Counter

import pytest

from ridgeline.errors import PlanError
from ridgeline.plan.schedule import BACKWARD, FORWARD, WEIGHT, Work, in_flight, schedule
from ridgeline.sim.pipeline import Pass, program, run_pipeline

CASES = [("1f1b", 4, 16, 1), ("gpipe", 4, 16, 1), ("interleaved", 4, 16, 4), ("zero-bubble", 4, 16, 1),
         ("dualpipe", 4, 16, 1), ("1f1b", 1, 3, 1), ("interleaved", 4, 10, 2)]  # fmt: skip


@pytest.mark.parametrize(("name", "pp", "num", "vp"), CASES)
def test_every_stage_runs_every_pass_exactly_once(name, pp, num, vp):
    made = schedule(name, pp, num, vp)
    each = num // 2 if made.mirrored else num
    for order in made.orders:
        found = Counter(order)
        assert set(found.values()) == {1}
        kinds = Counter(work.kind for work in order)
        assert kinds[FORWARD] == kinds[BACKWARD] == each * made.num_chunks
        assert kinds[WEIGHT] == (kinds[BACKWARD] if made.split else 0)


@pytest.mark.parametrize(("name", "pp", "num", "vp"), CASES)
def test_no_schedule_deadlocks(name, pp, num, vp):
    made = schedule(name, pp, num, vp)
    assert len(program(made).work) == sum(map(len, made.orders))


def test_one_forward_one_backward_holds_as_many_micro_batches_as_stages_follow():
    made = schedule("1f1b", 8, 64)
    assert [max(in_flight(order, False)) for order in made.orders] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert max(in_flight(schedule("gpipe", 8, 64).orders[0], False)) == 64


def equal(made, vp):
    return [Pass(1.0 / vp, 1.0 / vp, 1.0 / vp, 0.0)] * made.num_positions


def test_the_bubble_is_what_theory_says():
    for name, vp in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4)):
        made = schedule(name, 4, 16, vp)
        assert run_pipeline(made, equal(made, vp)).last_s == pytest.approx(16 * 3 + (4 - 1) * 3 / vp)


def test_weight_gradients_apart_shrink_the_bubble():
    plain, apart = schedule("1f1b", 8, 32), schedule("zero-bubble", 8, 32)
    assert run_pipeline(apart, equal(apart, 1)).last_s < run_pipeline(plain, equal(plain, 1)).last_s - 4


def test_impossible_schedules_are_refused_with_the_nearest_legal():
    with pytest.raises(PlanError, match="did you mean 'dualpipe'"):
        schedule("dualpip", 4, 8)
    with pytest.raises(PlanError, match="even number"):
        schedule("dualpipe", 4, 7)
    with pytest.raises(PlanError, match="vp=1"):
        schedule("zero-bubble", 4, 8, 2)


def test_activations_of_a_split_backward_are_held_until_the_weight_gradient():
    order = (Work(FORWARD, 0, 0), Work(FORWARD, 1, 0), Work(BACKWARD, 0, 0), Work(WEIGHT, 0, 0))
    assert in_flight(order, True) == [1, 2, 2, 1]
    assert in_flight(order, False) == [1, 2, 1, 1]


def test_zero_bubble_starts_no_more_forwards_than_stages_follow():
    for stage, order in enumerate(schedule("zero-bubble", 4, 16).orders):
        assert max(in_flight(order, False)) == 4 - stage


def test_interleaved_stages_warm_up_by_two_forwards_for_every_stage_that_follows():
    for stage, order in enumerate(schedule("interleaved", 4, 16, 4).orders):
        first = next(i for i, work in enumerate(order) if work.kind == BACKWARD)
        assert first == (4 - stage - 1) * 2 + (4 - 1) * 4 + 1


def test_dual_pipe_has_as_many_micro_batches_under_way_as_it_has_stages():
    made = schedule("dualpipe", 4, 32)
    assert [max(in_flight(order, False)) for order in made.orders] == [4] * 4


def test_a_deep_dual_pipe_never_holds_more_than_one_micro_batch_beyond_its_stages():
    """Without the limit, two stages of twenty would hold 22."""
    made = schedule("dualpipe", 20, 74)
    assert max(max(in_flight(order, False)) for order in made.orders) == 21


def test_the_second_chunk_of_a_dual_pipe_runs_through_the_stages_backward():
    made = schedule("dualpipe", 4, 16)
    assert [made.position(stage, 0) for stage in range(4)] == [0, 1, 2, 3]
    assert [made.position(stage, 1) for stage in range(4)] == [3, 2, 1, 0]


def test_activations_and_gradients_travel_over_the_link_between_their_stages():
    passes = [Pass(1.0, 1.0, 1.0, send_s) for send_s in (5.0, 7.0, 100.0)]
    assert run_pipeline(schedule("1f1b", 3, 1), passes).last_s == pytest.approx(3 * 3 + 2 * (5 + 7))
