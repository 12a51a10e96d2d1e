"""The search for plans: legal ones only, the best first, nothing pruned that could win."""

from __future__ import annotations

from dataclasses import replace

import pytest

import ridgeline as rl
from ridgeline.errors import PlanError
from ridgeline.hardware import cluster
from ridgeline.plan.legality import facts_of, problems
from ridgeline.sim.search import Space, candidates

SPACE = Space(tp=(1, 2), pp=(1, 2), cp=(1,), vp=(1, 2), micro_batch=(1, 2), zero=(1, 3), recompute=("none", "full"))


@pytest.fixture(scope="module")
def found():
    return rl.plans("llama3-8b", "h100-sxm*16", global_batch=64, seq=4096, space=SPACE, top=3)


def test_the_best_come_first_and_fit(found):
    times = [step.step_s for step in found.best]
    assert times == sorted(times)
    assert all(step.fits for step in found.best)
    assert sum(found.outcomes.values()) >= found.num_candidates


def test_nothing_that_was_pruned_would_have_won(found):
    machine = cluster("h100-sxm*16")
    graph = rl.build("llama3-8b", batch=1, seq=4096, mode="train")
    base = rl.Plan(global_batch=64, attention=found.best[0].plan.attention)
    everyone = list(candidates(facts_of(graph), machine, base, SPACE))
    assert len(everyone) == found.num_candidates
    steps = [rl.simulate("llama3-8b", machine, plan, seq=4096) for plan in everyone]
    best = min(step.step_s for step in steps if step.fits)
    assert found.best[0].step_s == pytest.approx(best)


def test_every_candidate_is_legal(found):
    machine = cluster("h100-sxm*16")
    facts = facts_of(rl.build("llama3-8b", batch=1, seq=4096, mode="train"))
    for plan in candidates(facts, machine, rl.Plan(global_batch=64), SPACE):
        assert problems(plan, facts, machine) == []


def test_sensitivity_says_what_a_change_costs_or_why_it_cannot_be(found):
    assert {one.choice for one in found.sensitivity} >= {"tp", "micro_batch", "zero", "recompute"}
    for one in found.sensitivity:
        assert one.why
        if one.step_s is not None and one.choice == "overlap_grads":
            assert one.step_s >= found.best[0].step_s


def test_the_frontier_is_not_dominated(found):
    times = [t for t, _, _ in found.frontier]
    memory = [b for _, b, _ in found.frontier]
    assert times == sorted(times)
    assert memory == sorted(memory, reverse=True)


def test_what_cannot_fit_is_said():
    with pytest.raises(PlanError, match=r"none of .* legal plans fits"):
        rl.plans("llama3.1-405b", "h100-sxm*8", global_batch=8, seq=8192, space=replace(SPACE, recompute=("full",)))


def test_images_are_planned_as_replicas_in_batches_that_fill_a_device():
    found = rl.plans("resnet50", "h100-sxm*8", global_batch=2048)
    best = found.best[0]
    assert (best.plan.dp, best.plan.tp, best.plan.cp) == (8, 1, 1) and best.plan.micro_batch >= 64
    assert (best.tokens, best.unit) == (2048, "sample")
    assert "selective" not in {step.plan.recompute for step in found.best}


def test_one_device_recomputes_what_cannot_be_split():
    plain, again = (rl.simulate("resnet50", "h100-sxm*1", micro_batch=64, global_batch=64, recompute=name)
                    for name in ("none", "full"))  # fmt: skip
    assert again.step_s > plain.step_s and again.peak_bytes < plain.peak_bytes
