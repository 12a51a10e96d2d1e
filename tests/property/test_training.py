"""Laws of simulated training that hold for every plan: critical path, bandwidth, conservation, one device."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import ridgeline as rl
from ridgeline.graph import Phase
from ridgeline.hardware import cluster
from ridgeline.plan import Plan, partition
from ridgeline.plan.legality import facts_of, nearest_legal, problems
from ridgeline.plan.schedule import schedule
from ridgeline.sim.generation import stack_of
from ridgeline.sim.pipeline import Pass, run_pipeline, run_steady
from ridgeline.sim.step import simulate_step

GRAPHS = {batch: rl.build("llama3.2-1b", batch=batch, seq=2048, mode="train") for batch in (1, 2)}
MOE = rl.build("qwen3-30b-a3b", batch=1, seq=1024, mode="train")
SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much]
FEW = settings(max_examples=20, deadline=None, suppress_health_check=SLOW)
seconds = st.floats(1e-4, 2.0)


@st.composite
def pipelines(draw):
    name = draw(st.sampled_from(["1f1b", "gpipe", "interleaved", "zero-bubble", "dualpipe"]))
    pp = draw(st.sampled_from([1, 2, 4, 6] if name != "dualpipe" else [2, 4]))
    vp = draw(st.sampled_from([1, 2, 3])) if name in ("interleaved", "gpipe") and pp > 1 else 1
    num = draw(st.integers(1, 14)) * (2 if name == "dualpipe" else 1)
    order = schedule(name, pp, num, vp)
    passes = [Pass(draw(seconds), draw(seconds), draw(seconds), draw(st.floats(0.0, 0.2)))
              for _ in range(order.num_positions)]  # fmt: skip
    return name, pp, num, vp, order, passes


@FEW
@given(pipelines())
def test_no_schedule_beats_its_critical_path_or_its_busiest_stage(made):
    _, pp, num, _, order, passes = made
    done = run_pipeline(order, passes)
    through = sum(p.forward_s + p.backward_s for p in passes) + 2 * sum(p.send_s for p in passes[:-1])
    assert done.last_s >= through * (1 - 1e-9)
    busiest = max(done.busy_s(s) for s in range(pp))
    assert done.last_s >= busiest * (1 - 1e-9)
    work = sum(p.forward_s + p.backward_s + p.weight_s for p in passes) * num
    assert sum(done.busy_s(s) for s in range(pp)) == pytest.approx(work)


@FEW
@given(pipelines(), st.floats(0.0, 1.0))
def test_faster_transfers_never_lengthen_a_pipeline(made, factor):
    _, _, _, _, order, passes = made
    quick = [Pass(p.forward_s, p.backward_s, p.weight_s, p.send_s * factor) for p in passes]
    assert run_pipeline(order, quick).last_s <= run_pipeline(order, passes).last_s * (1 + 1e-12)


@FEW
@given(pipelines(), st.integers(1, 5))
def test_walking_a_steady_stretch_or_skipping_it_is_the_same(made, rounds):
    name, pp, num, vp, _, passes = made
    many = num + rounds * 4 * pp * (2 if name == "dualpipe" else 1)
    whole = run_pipeline(schedule(name, pp, many, vp), passes)
    _, skipped = run_steady(name, pp, many, vp, passes)
    assert skipped.last_s == pytest.approx(whole.last_s, rel=1e-9)
    assert skipped.busy_s(0) == pytest.approx(whole.busy_s(0), rel=1e-9)


@st.composite
def plans(draw, devices=16):
    plan = Plan(
        tp=draw(st.sampled_from([1, 2, 4])), pp=draw(st.sampled_from([1, 2, 4])), cp=draw(st.sampled_from([1, 2])),
        vp=draw(st.sampled_from([1, 2])), zero=draw(st.integers(0, 3)), micro_batch=draw(st.sampled_from([1, 2])),
        global_batch=draw(st.sampled_from([16, 32, 64])), recompute=draw(st.sampled_from(["none", "full"])),
        sequence_parallel=draw(st.booleans()), overlap_grads=draw(st.booleans()), overlap_params=draw(st.booleans()),
        overlap_tp=draw(st.booleans()), schedule=draw(st.sampled_from(["1f1b", "gpipe", "zero-bubble", "dualpipe"])),
        precision=draw(st.sampled_from(["bf16", "fp8"])), cp_kind=draw(st.sampled_from(["ring", "all-gather"])),
    )  # fmt: skip
    machine = cluster(f"h100-sxm*{devices}")
    legal = nearest_legal(plan, facts_of(GRAPHS[plan.micro_batch]), machine)
    assume(legal is not None)
    assert legal is not None
    return legal


@FEW
@given(plans())
def test_the_nearest_legal_plan_is_legal(plan):
    machine = cluster("h100-sxm*16")
    assert problems(plan, facts_of(GRAPHS[plan.micro_batch]), machine) == []


@FEW
@given(plans(), st.sampled_from(["nvlink=2x", "scaleout=800Gb", "nvlink=4x scaleout=1600Gb"]))
def test_more_bandwidth_never_makes_a_step_slower(plan, change):
    base, wide = cluster("h100-sxm*16"), cluster(f"h100-sxm*16 {change}")
    stack = stack_of("plain", base.device)
    graph = GRAPHS[plan.micro_batch]
    assert simulate_step(graph, plan, wide, stack).step_s <= simulate_step(graph, plan, base, stack).step_s * (1 + 1e-9)


@FEW
@given(plans())
def test_parts_sum_to_the_step_and_no_part_is_negative(plan):
    machine = cluster("h100-sxm*16")
    step = simulate_step(GRAPHS[plan.micro_batch], plan, machine, stack_of("plain", machine.device))
    for parts in step.stages:
        assert sum(parts.values()) == pytest.approx(step.step_s, rel=1e-9)
        assert min(parts.values()) >= -1e-9 * step.step_s


@FEW
@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.booleans())
def test_what_ranks_exchange_forward_they_exchange_backward(tp, cp, sequence):
    """A gather's bytes come back as a scatter's, an expert's tokens go both ways: nothing is lost."""
    plan = Plan(tp=tp, cp=cp, sequence_parallel=sequence, dp=1)
    graph = partition(GRAPHS[1], plan).graph
    sent = {phase: sum(n.attrs["num_bytes"] * t for n, t in graph.nodes()
                       if n.op == "collective" and n.attrs["group"] == "tp" and n.phase is phase
                       and n.target != "recompute" and n.attrs["num_bytes"] > 65536)
            for phase in (Phase.FORWARD, Phase.BACKWARD)}  # fmt: skip
    assert sent[Phase.FORWARD] == sent[Phase.BACKWARD]


@FEW
@given(st.sampled_from([1, 2, 4, 8, 16]))
def test_tokens_that_go_to_experts_come_home(ep):
    graph = partition(MOE, Plan(dp=16, ep=ep)).graph
    sizes = [n.attrs["num_bytes"] for n, _ in graph.nodes() if n.op == "collective" and n.attrs["group"] == "ep"]
    assert len(sizes) == (0 if ep == 1 else 4)
    assert len(set(sizes)) <= 1
    params = sum(v.type.numel * v.count for v in graph.values if v.name.endswith("experts.gate_up_proj"))
    assert params * ep == 128 * 2 * 768 * 2048 * 48
