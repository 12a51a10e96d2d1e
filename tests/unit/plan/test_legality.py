"""Illegal plans are refused with every reason and the nearest plan that is legal."""

from __future__ import annotations

import re

import pytest

from ridgeline.errors import PlanError
from ridgeline.hardware import cluster
from ridgeline.models import build
from ridgeline.plan import Plan
from ridgeline.plan.legality import check, facts_of, nearest_legal, problems

LLAMA = facts_of(build("llama3-8b", batch=1, seq=8192, mode="train"))
MOE = facts_of(build("qwen3-30b-a3b", batch=1, seq=4096, mode="train"))
H100 = cluster("h100-sxm*64")
GOOD = Plan(dp=8, tp=4, pp=2, zero=1, global_batch=64)


def test_facts_are_read_off_the_graph():
    assert (LLAMA.layers, LLAMA.heads, LLAMA.kv_heads, LLAMA.seq, LLAMA.experts, LLAMA.vocab) == (
        32, 32, 8, 8192, 0, 128256)  # fmt: skip
    assert MOE.experts == 128
    assert facts_of(build("gpt-oss-120b", batch=1, seq=2048, mode="train")).layers == 36


def test_a_good_plan_has_no_problem():
    assert problems(GOOD, LLAMA, H100) == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tp": 3}, "tp=3 does not divide 32 heads"),
        ({"dp": 4}, "32 ranks on 64 devices"),
        ({"ep": 2}, "the model has no experts"),
        ({"pp": 64, "tp": 1, "dp": 1}, "pp=64 stages for 32 layers"),
        ({"vp": 3, "global_batch": 24}, "groups of pp=2"),
        ({"vp": 2, "pp": 1, "dp": 16}, "there is none"),
        ({"global_batch": 63}, "no multiple of dp·micro-batch = 8"),
        ({"precision": "mxfp8"}, "mxfp8 needs Blackwell"),
        ({"precision": "nvfp4"}, "no fp4 matrix units"),
        ({"schedule": "1b1f"}, "unknown schedule '1b1f'"),
        ({"zero": 4}, "stages are 0 to 3"),
        ({"shard_group": 3, "zero": 3}, "group of 3 does not divide 8"),
        ({"micro_batch": 0}, "micro_batch=0 is below 1"),
        ({"recompute": "some"}, "unknown recompute 'some'"),
    ],
)
def test_each_mistake_is_named_and_cured(change, why):
    from dataclasses import replace

    plan = replace(GOOD, **change)
    with pytest.raises(PlanError, match=re.escape(why)):
        check(plan, LLAMA, H100)
    near = nearest_legal(plan, LLAMA, H100)
    assert near is not None
    assert problems(near, LLAMA, H100) == []


def test_experts_need_ranks_that_they_divide():
    plan = Plan(dp=8, ep=3, global_batch=8)
    with pytest.raises(PlanError, match="ep=3 does not divide 128 experts"):
        check(plan, MOE, cluster("h100-sxm*8"))
    with pytest.raises(PlanError, match="need sequence parallelism"):
        check(Plan(dp=4, tp=2, ep=4, global_batch=4, sequence_parallel=False), MOE, cluster("h100-sxm*8"))


def test_a_model_nobody_can_split_is_only_replicated():
    facts = facts_of(build("resnet50", batch=8, mode="train"))
    assert facts.seq == 0 and "'conv' at conv1" in facts.whole and not LLAMA.whole
    plan = Plan(dp=32, tp=2, global_batch=64)
    with pytest.raises(PlanError, match=r"tp=2: nothing says how to split the 'conv' at conv1.*nearest.*dp=64"):
        check(plan, facts, H100)
