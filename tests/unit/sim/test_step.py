"""A simulated training step: parts that sum, symmetry that breaks, memory, energy, and agreement with predict."""

from __future__ import annotations

from dataclasses import replace

import pytest

import ridgeline as rl
from ridgeline.errors import InputError, PlanError
from ridgeline.sim.campaign import FAILURES_PER_DEVICE_DAY, RESTART_S, campaign
from ridgeline.sim.compose import layers_at
from ridgeline.sim.generation import default_stack, stack_of, stacks
from ridgeline.sim.step import PARTS, Trouble

PLAN = {"tp": 4, "pp": 4, "vp": 5, "micro_batch": 1, "global_batch": 128, "seq": 8192}


@pytest.fixture(scope="module")
def step():
    return rl.simulate("llama3-70b", "h100-sxm*64", recompute="full", **PLAN)


@pytest.mark.parametrize("execution", ["eager", "compiled", "cudagraph"])
@pytest.mark.parametrize("on", ["h100-sxm", "a100-sxm-80gb"])
def test_one_device_simulated_is_what_predict_says(execution, on):
    told = rl.predict("llama3.2-1b", on=on, batch=2, seq=2048, mode="train", execution=execution)
    found = rl.simulate("llama3.2-1b", f"{on}*1", micro_batch=2, global_batch=2, seq=2048, execution=execution)
    assert found.step_s == pytest.approx(told.expected_s, rel=1e-6)
    assert found.throttle == pytest.approx(told.throttle, rel=1e-6)
    assert found.energy_j == pytest.approx(told.energy_j, rel=1e-6)


def test_the_parts_of_every_stage_sum_to_the_step(step):
    for parts in step.stages:
        assert set(parts) == set(PARTS)
        assert sum(parts.values()) == pytest.approx(step.step_s, rel=1e-9)
        assert min(parts.values()) >= -1e-9


def test_utilization_counts_model_arithmetic_once(step):
    assert step.hfu_frac / step.mfu_frac == pytest.approx(4 / 3, rel=0.06), "full recomputation is a forward more"
    plain = rl.simulate("llama3-70b", "h100-sxm*64", **PLAN)
    assert plain.hfu_frac == pytest.approx(plain.mfu_frac)
    assert plain.model_flops == pytest.approx(step.model_flops)
    params = 6 * 70.55e9 * step.tokens
    assert params < step.model_flops < 1.2 * params


def test_the_interval_holds_the_expectation_and_the_basis_is_named(step):
    assert step.interval_s[0] < step.step_s < step.interval_s[1]
    assert str(step.basis) in ("fitted", "datasheet", "assumed")


def test_more_memory_is_needed_with_less_sharding_and_less_recomputation(step):
    less = rl.simulate("llama3-70b", "h100-sxm*64", recompute="full", zero=0, **PLAN)
    kept = rl.simulate("llama3-70b", "h100-sxm*64", **PLAN)
    assert less.peak_bytes > step.peak_bytes
    assert kept.peak_bytes > step.peak_bytes
    assert step.fits


def test_recomputing_some_layers_lies_between_all_and_none(step):
    none = rl.simulate("llama3-70b", "h100-sxm*64", **PLAN)
    half = rl.simulate("llama3-70b", "h100-sxm*64", recompute="full", recompute_layers=10, **PLAN)
    every = rl.simulate("llama3-70b", "h100-sxm*64", recompute="full", recompute_layers=20, **PLAN)
    assert none.step_s < half.step_s < step.step_s
    assert none.peak_bytes > half.peak_bytes > step.peak_bytes
    assert every.step_s == pytest.approx(step.step_s)


def test_a_straggler_or_a_slow_link_slows_everyone(step):
    slow = rl.simulate("llama3-70b", "h100-sxm*64", recompute="full", trouble=Trouble(3, 1.2, 1.0), **PLAN)
    link = rl.simulate("llama3-70b", "h100-sxm*64", recompute="full", trouble=Trouble(1, 1.0, 20.0), **PLAN)
    assert 1.1 < slow.step_s / step.step_s < 1.21
    assert link.step_s > step.step_s
    assert slow.stages[0]["bubble"] > step.stages[0]["bubble"], "the others wait for the slow stage"


def test_uneven_experts_cost_what_the_busiest_rank_takes():
    plan = {"ep": 8, "micro_batch": 1, "global_batch": 64, "seq": 4096, "dispatch": "hybrid"}  # else the host is all
    even = rl.simulate("qwen3-30b-a3b", "h100-sxm*8", **plan)
    uneven = rl.simulate("qwen3-30b-a3b", "h100-sxm*8", **plan, expert_imbalance=2.0)
    assert uneven.step_s > 1.03 * even.step_s


def test_layers_that_do_not_divide_leave_the_ends_lighter():
    assert layers_at(126, 128)[:2] == [0, 1]
    assert layers_at(126, 128)[-1] == 0
    assert sum(layers_at(61, 16)) == 61
    assert layers_at(8, 4) == [2, 2, 2, 2]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble", "dualpipe"])
def test_every_schedule_simulates(schedule):
    found = rl.simulate("llama3-8b", "h100-sxm*16", pp=4, schedule=schedule, micro_batch=1, global_batch=64, seq=2048)
    assert found.step_s > 0
    assert found.parts["bubble"] > 0


@pytest.mark.parametrize(
    "choices",
    [
        {"zero": 3}, {"zero": 3, "shard_group": 8}, {"zero": 2}, {"zero": 0}, {"cp": 2},
        {"cp": 2, "cp_kind": "all-gather"},
        {"tp": 2, "sequence_parallel": False}, {"offload": "optimizer"}, {"offload": "activations"},
        {"precision": "fp8"}, {"overlap_grads": False}, {"overlap_params": False}, {"optimizer": "sgd"},
        {"recompute": "selective"}, {"attention": "cudnn"}, {"attention": "fa2"}, {"execution": "eager"},
    ],
)  # fmt: skip
def test_every_choice_simulates_and_keeps_its_sum(choices):
    found = rl.simulate("llama3-8b", "h100-sxm*16", micro_batch=1, global_batch=64, seq=2048, **choices)
    assert sum(found.parts.values()) == pytest.approx(found.step_s)
    assert found.peak_bytes > 0


def test_offloaded_activations_save_memory_and_cost_what_the_host_link_cannot_hide():
    asked = {"micro_batch": 1, "global_batch": 64, "seq": 2048}
    here = rl.simulate("llama3-8b", "h100-sxm*16", **asked)
    away = rl.simulate("llama3-8b", "h100-sxm*16", offload="activations", **asked)
    slow = rl.simulate("llama3-8b", "h100-sxm*16 pcie_bandwidth=0.1x", offload="activations", **asked)
    assert away.peak_bytes < here.peak_bytes and here.step_s <= away.step_s < slow.step_s


def test_hybrid_sharding_trades_memory_for_traffic():
    whole = rl.simulate("llama3-8b", "h100-sxm*64", zero=3, global_batch=64, seq=2048)
    groups = rl.simulate("llama3-8b", "h100-sxm*64", zero=3, shard_group=8, global_batch=64, seq=2048)
    assert groups.peak_bytes > whole.peak_bytes


def test_illegal_plans_and_odd_graphs_are_refused():
    with pytest.raises(PlanError, match="nearest legal plan"):
        rl.simulate("llama3-8b", "h100-sxm*16", tp=3)
    with pytest.raises(PlanError, match="did you mean 'tp'"):
        rl.simulate("llama3-8b", "h100-sxm*16", tpp=3)
    with pytest.raises(InputError, match="training graph"):
        rl.simulate(rl.build("llama3-8b"), "h100-sxm*16")


def test_a_graph_can_be_handed_in_instead_of_a_name():
    graph = rl.build("llama3-8b", batch=1, seq=2048, mode="train")
    by_name = rl.simulate("llama3-8b", "h100-sxm*16", tp=2, global_batch=8, seq=2048)
    assert rl.simulate(graph, "h100-sxm*16", tp=2, global_batch=8).step_s == pytest.approx(by_name.step_s)


def test_a_campaign_adds_failures_and_checkpoints(step):
    run = campaign(step, 1e12)
    assert run.num_steps == -(-(10**12) // step.tokens)
    bare = run.num_steps * step.step_s / 86400
    assert run.days == pytest.approx(bare / run.goodput_frac)
    assert run.num_failures == pytest.approx(FAILURES_PER_DEVICE_DAY * 64 * run.days)
    with pytest.raises(InputError, match="less than one step"):
        campaign(step, 1000)


def test_stacks_are_known_by_name_and_borrowed_by_architecture():
    from ridgeline.hardware import device

    assert "plain" in stacks()
    with pytest.raises(InputError, match="unknown training stack"):
        stack_of("megatron-1999", device("h100-sxm"))
    assert default_stack(device("h100-sxm"), 1) == "plain"
    for name in stacks()[1:]:
        found = stack_of(name, device("h200"))
        assert set(found.coef) >= {"matrix", "attention", "memory", "up", "out"}


def test_an_imagined_cluster_with_faster_links_is_never_slower(step):
    fast = rl.simulate("llama3-70b", "h100-sxm*64 nvlink=2x scaleout=800Gb", recompute="full", **PLAN)
    assert fast.step_s <= step.step_s


def test_json_is_plain(step):
    import json

    text = json.dumps(step.to_dict(), allow_nan=False)
    assert json.loads(text)["plan"]["tp"] == 4
    assert replace(step.plan) == step.plan


def test_trouble_in_a_stage_that_is_not_there_is_refused():
    with pytest.raises(PlanError, match="no stage 4: the plan has 4, counted from 0"):
        rl.simulate("llama3-8b", "h100-sxm*16", tp=4, pp=4, global_batch=8, seq=2048,
                    trouble=Trouble(stage=4, slow_compute=2.0))  # fmt: skip


def test_states_are_shared_out_over_context_ranks_unless_told():
    step = rl.simulate("llama3-8b", "h100-sxm*8", cp=8, global_batch=1, seq=32768, recompute="full")
    whole = rl.simulate("llama3-8b", "h100-sxm*8", cp=8, global_batch=1, seq=32768, recompute="full", zero=0)
    assert step.plan.zero == 1 and step.peak_bytes < 0.6 * whole.peak_bytes


def test_a_campaign_loses_half_an_interval_a_failure_and_pays_by_the_hour(step):
    run = campaign(step, 1e12)
    per_s = FAILURES_PER_DEVICE_DAY * 64 / 86400
    assert run.checkpoint_every_s == pytest.approx((2 * run.checkpoint_s / per_s) ** 0.5)
    lost = run.checkpoint_s / run.checkpoint_every_s + per_s * (RESTART_S + run.checkpoint_every_s / 2)
    assert 1 / run.goodput_frac == pytest.approx(1 + lost)
    assert run.usd == pytest.approx(run.days * 24 * step.cluster.price_usd_per_hour)
    assert run.usd > 0
