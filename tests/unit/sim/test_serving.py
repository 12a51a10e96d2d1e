"""Serving: anatomies, layouts, workloads, the scheduler and what it reports."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from ridgeline.api import serve
from ridgeline.errors import InputError, ModelError
from ridgeline.hardware import device
from ridgeline.sim.serving.anatomy import anatomy, of_config
from ridgeline.sim.serving.compose import Wanted, deployment_of
from ridgeline.sim.serving.deployment import (
    RESERVED_BYTES,
    Layout,
    cache_bytes_per_token,
    cache_tokens,
    check,
    precision,
    weight_bytes,
)
from ridgeline.sim.serving.engine import engine, engines, kernel_factors
from ridgeline.sim.serving.experts import crowding
from ridgeline.sim.serving.metrics import Slo, metrics
from ridgeline.sim.serving.oracle import coefficients_of, knots, weighted
from ridgeline.sim.serving.search import Need, search
from ridgeline.sim.serving.simulate import oracle_of, simulate
from ridgeline.sim.serving.step import attention_side, decode_attention_s, expert_side, rank_of
from ridgeline.sim.serving.workload import Workload, closed, opened, recorded, static


def deployed(model="llama3-8b", on="h200*1", **wanted):
    return deployment_of(model, on, Wanted(**wanted))


PUBLISHED_BILLIONS = {
    "meta-llama/Llama-3.1-70B": 70.6, "deepseek-ai/DeepSeek-R1": 671.0, "moonshotai/Kimi-K2.5": 1026.0,
    "MiniMaxAI/MiniMax-M2.5": 229.0, "Qwen/Qwen3.5-397B-A17B": 397.0, "zhipuai/GLM-5": 744.0,
    "openai/gpt-oss-120b": 117.0, "zai-org/GLM-4.5": 355.0, "meta-llama/Llama-4-Maverick-17B-128E-Instruct": 400.0,
    "meta-llama/Meta-Llama-3.1-70B": 70.6, "mistralai/Mixtral-8x7B-Instruct-v0.1": 46.7,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED_BILLIONS)
def test_anatomies_hold_as_many_parameters_as_published(name):
    assert anatomy(name).num_params() / 1e9 == pytest.approx(PUBLISHED_BILLIONS[name], rel=0.01)


def test_an_unknown_model_suggests_one():
    with pytest.raises(ModelError, match="llama3-70b"):
        anatomy("llama3-71b")


def test_a_hub_config_gives_the_same_anatomy_as_the_zoo():
    config = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
              "intermediate_size": 14336, "vocab_size": 128256}  # fmt: skip
    assert of_config("mine", config).num_params() == anatomy("llama3-8b").num_params()
    with pytest.raises(ModelError, match="vocab_size"):
        of_config("mine", {k: v for k, v in config.items() if k != "vocab_size"})


def test_layouts_a_model_cannot_take_are_refused_with_what_works():
    with pytest.raises(InputError, match="does not divide the 32 heads"):
        check(anatomy("llama3-8b"), Layout(tp=3))
    with pytest.raises(InputError, match="no experts"):
        check(anatomy("llama3-8b"), Layout(tp=2, ep=2))
    with pytest.raises(InputError, match="does not divide the 4 ranks"):
        Layout(tp=4, ep=3)
    with pytest.raises(InputError, match="does not fit"):
        simulate(deployed("llama3-70b", "h100-sxm*1", tp=1), static(1, 8, 8))


def test_weights_and_cache_are_those_of_the_published_model():
    made, layout = anatomy("llama3-70b"), Layout(tp=8)
    assert weight_bytes(made, layout, precision("bf16")) == pytest.approx(70.55e9 * 2 / 8, rel=0.001)
    assert cache_bytes_per_token(made, layout, precision("bf16")) == 80 * 2 * 1 * 128 * 2
    latent = anatomy("deepseek-r1")
    assert cache_bytes_per_token(latent, layout, precision("fp8", "fp8", sparse=True)) == 61 * 576


def test_four_bit_checkpoints_of_sparse_models_keep_attention_wide():
    assert precision("nvfp4", sparse=True).dense.name == "bf16" and precision("nvfp4").dense.name == "nvfp4"
    with pytest.raises(InputError, match="did you mean"):
        precision("fp9")


def test_every_engine_has_coefficients_for_every_gpu():
    for name in engines():
        for where in ("h200", "b200", "a100", "l40s", "rtx-4090"):
            made = engine(name, device(where))
            assert made.coef["gemm"] > 0 and made.width > 0
    with pytest.raises(InputError, match="chunk_tokens"):
        engine("vllm", device("h200")).change(chunk_token=4)


def test_a_larger_batch_costs_more_and_a_wider_group_less():
    made, where = anatomy("deepseek-r1"), device("h200")
    tokens = np.array([1.0, 64.0, 4096.0])
    narrow, wide = (rank_of(made, where, Layout(tp=tp), precision("fp8_block", sparse=True)) for tp in (4, 8))
    for side in (attention_side, expert_side):
        part = side(narrow, tokens).parts["gemm"]
        assert (np.diff(part) > 0).all() and (side(wide, tokens).parts["gemm"] <= part).all()


def test_tables_are_close_to_exact_points_between_their_knots():
    deployment = deployed("minimax-m2.5", "h200*4", tp=4, precision="fp8_block")
    table = oracle_of(deployment, deployment.pool, closed(64, 1024, 64)).joint_s
    where = np.array([n for n in range(20, len(table) - 1, 97) if n not in set(knots(len(table) - 1))], dtype=float)
    rank = rank_of(deployment.anatomy, deployment.device, deployment.pool.layout, deployment.precision)
    total = expert_side(rank, where)
    exact = weighted(total, where, coefficients_of(rank, deployment.engine))
    error = np.abs(np.array([table[int(n)] for n in where]) / exact - 1)
    assert error.max() < 0.05 and error.mean() < 0.012


def test_more_tokens_never_take_less_time_whatever_the_factors_say():
    made = deployed("gpt-oss-120b", "b200*2", tp=2, precision="mxfp4", engine="trtllm")
    odd = {**made.engine.coef, "gemm_many": 0.3, "experts_many": 0.3, "link_many": 0.3}
    tables = oracle_of(replace(made, engine=replace(made.engine, coef=odd)), made.pool, closed(64, 512, 64))
    assert np.all(np.diff(tables.group_s) >= 0) and np.all(np.diff(tables.joint_s) >= 0)


def test_kernels_that_were_not_fitted_are_as_the_cost_model_says():
    assert set(kernel_factors("abacus", "fp8", "fp8", "grouped").values()) == {1.0}
    assert kernel_factors("blackwell", "bf16", "fp8_block", "latent")["experts"] != 1.0


def test_the_fullest_rank_has_more_than_its_share_of_tokens():
    assert crowding(1, 128) == 1.0
    assert 1.0 < crowding(2, 64) < crowding(8, 16) < 1.5
    assert crowding(64, 16) == crowding(8, 16)  # wider groups move popular experts about


def test_prompts_longer_than_the_largest_graph_wait_for_the_host():
    made = deployed("deepseek-ai/DeepSeek-R1", "b200*8", tp=8, precision="nvfp4", engine="vllm")

    def prompt_s(**settings):
        changed = replace(made, engine=made.engine.change(**settings))
        tables = oracle_of(changed, changed.pool, closed(4, 1024, 64))
        return [tables.mixed_s(0, 1, 0.0, [(tokens, 0)], tokens, 1) for tokens in (64, 256, 1024)]

    small, large = prompt_s(graph_tokens=512), prompt_s(graph_tokens=2048)
    assert small[:2] == large[:2] and small[2] > 1.2 * large[2]


def test_norms_over_all_heads_make_ranks_meet_once_more():
    plain = anatomy("minimax-m2.5")
    apart = replace(plain, layers=tuple(replace(g, mixer=replace(g.mixer, normed_across=False)) for g in plain.layers))
    sums = []
    for made in (plain, apart):
        rank = rank_of(made, device("b200"), Layout(tp=4), precision("fp8_block", "fp8", sparse=True))
        sums.append(attention_side(rank, np.array([4.0])))
    assert sums[0].parts["link"][0] > 1.5 * sums[1].parts["link"][0] and sums[0].kernels > sums[1].kernels


def test_a_recurrence_keeps_a_state_behind_every_draft():
    rank = rank_of(anatomy("Qwen/Qwen3.5-397B-A17B"), device("b200"), Layout(tp=4), precision("fp8_block", "fp8"))
    many, context = np.array([256.0]), np.array([128.0])
    assert decode_attention_s(rank, many, context, 4)[0] > 1.8 * decode_attention_s(rank, many, context)[0]


def test_a_static_batch_is_one_prefill_and_the_sum_of_its_steps():
    deployment = deployed(tp=1)
    deployment = replace(deployment, engine=replace(deployment.engine, coef={**deployment.engine.coef, "request_s": 0.0,
                                                                             "token_s": 0.0}))  # fmt: skip
    batch, isl, osl = 4, 256, 33
    work = static(batch, isl, osl)
    found = simulate(deployment, work)
    oracle = oracle_of(deployment, deployment.pool, work)
    first = oracle.mixed_s(0, 1, 0.0, [(isl, 0)] * batch, batch * isl, batch)
    steps = sum(oracle.steps_s(batch, 1, isl + 1 + i, 1) for i in range(osl - 1))
    assert found.first_s.max() == pytest.approx(first, rel=1e-9)
    assert found.done_s.max() == pytest.approx(first + steps, rel=1e-4)
    assert found.iterations == osl


def test_equal_lengths_are_drawn_when_the_ratio_is_one():
    assert set(closed(4, 100, 50).isl) == {100}
    drawn = closed(8, 1000, 50, ratio=0.8).isl
    assert drawn.min() >= 800 and drawn.max() <= 1000 and len(set(drawn)) > 1
    with pytest.raises(InputError, match="ratio"):
        closed(4, 100, 50, ratio=0.0)


def test_bursty_arrivals_have_the_asked_rate_and_more_variation():
    calm, bursty = (np.diff(opened(10, 64, 8, num=20_000, burst=b).arrival_s) for b in (1.0, 4.0))
    assert calm.mean() == pytest.approx(0.1, rel=0.05) and bursty.mean() == pytest.approx(0.1, rel=0.08)
    assert bursty.var() / bursty.mean() ** 2 == pytest.approx(4.0, rel=0.2)


def test_recorded_requests_are_read_from_csv_and_jsonl(tmp_path):
    table = tmp_path / "a.csv"
    table.write_text("timestamp,input_length,output_length\n5.0,100,10\n4.0,200,20\n")
    work = recorded(table)
    assert list(work.arrival_s) == [0.0, 1.0] and list(work.isl) == [200, 100]
    lines = tmp_path / "b.jsonl"
    rows = [{"arrival_ms": 1000 * i, "isl": 64, "osl": 4, "prefix_id": "a", "prefix_tokens": 48} for i in range(3)]
    lines.write_text("\n".join(json.dumps(row) for row in rows))
    assert list(recorded(lines).arrival_s) == [0, 1, 2] and list(recorded(lines).prefix) == [0, 0, 0]
    lines.write_text('{"arrival_ms": 0, "isl": "many", "osl": 1}')
    with pytest.raises(InputError, match=r"request 1.*many"):
        recorded(lines)
    table.write_text("timestamp,input_length\n1,2\n")
    with pytest.raises(InputError, match="no column for osl"):
        recorded(table)


def shared_prefix(num, prefix):
    isl = np.full(num, 2048, dtype=np.int64)
    ids = np.zeros(num, dtype=np.int64)
    return Workload(isl, np.full(num, 16, dtype=np.int64), np.arange(num) * 0.5, prefix=ids,
                    prefix_tokens=np.full(num, prefix, dtype=np.int64))  # fmt: skip


def test_a_shared_prefix_is_computed_once():
    deployment = deployed(tp=1)
    alone, shared = (metrics(simulate(deployment, shared_prefix(20, tokens))) for tokens in (1, 1900))
    assert shared.reused_frac == pytest.approx(19 * 1900 / (20 * 2048), rel=1e-6)
    assert shared.ttft_s.percentiles[50] < alone.ttft_s.percentiles[50]


def test_a_small_cache_preempts_and_still_serves_everyone():
    deployment = replace(deployed(tp=1), cache_tokens=6000)
    found = simulate(deployment, closed(16, 256, 512, num=64))
    assert found.preemptions > 0 and not np.isnan(found.done_s).any() and found.left_tokens == pytest.approx(0)
    with pytest.raises(InputError, match="a whole replica holds 100"):
        simulate(replace(deployment, cache_tokens=100), static(1, 256, 8))


def test_chunked_prefill_bounds_what_others_wait_for():
    small, large = (deployed(tp=1, settings={"chunk_tokens": n}) for n in (512, 16384))
    rng = np.random.default_rng(0)
    isl = np.where(rng.random(200) < 0.1, 16000, 64).astype(np.int64)
    work = Workload(isl, np.full(200, 64, dtype=np.int64), np.arange(200) * 0.05)
    gaps = [max(end - start for _, start, end, prompts, decoding, _ in simulate(d, work, max_spans=10**6).spans
                if prompts and decoding) for d in (small, large)]  # fmt: skip
    assert gaps[0] < gaps[1] / 3


def test_disaggregated_prefill_keeps_decoding_steady():
    work = closed(64, 8192, 256)
    together = metrics(simulate(deployed("llama3-70b", "h200*8", tp=4, precision="fp8"), work))
    split = deployed("llama3-70b", "h200*8", precision="fp8", disaggregated="1x4+1x4")
    apart = metrics(simulate(split, work))
    assert apart.tpot_s.mean < together.tpot_s.mean
    with pytest.raises(InputError, match="takes 6 devices"):
        deployed("llama3-70b", "h200*8", precision="fp8", disaggregated="1x4+1x2")


def test_every_attention_group_takes_a_prompt_that_cannot_be_cut():
    made = deployed("deepseek-r1", "h200*8", engine="trtllm", tp=1, attention_dp=8, precision="fp8")
    long = made.engine.chunk_tokens + 1000
    spans = simulate(made, static(24, long, 2), max_spans=100).spans  # the first comes through the front end alone
    assert max(prompts for _, _, _, prompts, _, _ in spans) == 8


def test_stages_of_a_pipeline_work_on_prompts_at_once():
    one, four = (deployed("llama3-70b", f"h200*{n}", engine="trtllm", tp=1, pp=n, precision="fp8") for n in (1, 4))
    work = static(64, 6000, 64)
    alone, together = (metrics(simulate(d, work)).output_tokens_per_s for d in (one, four))
    assert 2.0 * alone < together < 5.0 * alone


def test_a_host_process_of_an_attention_group_sees_only_its_own_sequences():
    made = deployed("deepseek-r1", "h200*8", engine="sglang", tp=1, attention_dp=8, precision="fp8")
    slow = replace(made, engine=replace(made.engine, coef={**made.engine.coef, "sequence_s": 1e-3}))
    fast = replace(made, engine=replace(made.engine, coef={**made.engine.coef, "sequence_s": 0.0}))
    work = static(64, 16, 200)
    late, early = (metrics(simulate(d, work)).tpot_s.mean for d in (slow, fast))
    assert late - early == pytest.approx(8 * 1e-3, rel=0.1)


def test_drafted_tokens_shorten_decoding_only_when_they_are_accepted():
    work = static(4, 128, 256)
    plain = metrics(simulate(deployed(tp=1), work)).tpot_s.mean
    good = metrics(simulate(deployed(tp=1, draft=3, accept_frac=0.8), work)).tpot_s.mean
    bad = metrics(simulate(deployed(tp=1, draft=3, accept_frac=0.01), work)).tpot_s.mean
    assert good < 0.6 * plain and bad > plain


def test_compiling_at_the_first_full_iteration_delays_the_first_wave_alone():
    made = deployed(engine="sglang")
    cold = replace(made, engine=replace(made.engine, cold_chunk_s=50))
    full, small = closed(32, 1024, 64), closed(4, 1024, 64)
    warm, slow = metrics(simulate(made, full)), metrics(simulate(cold, full))
    assert 0.5 * 5 < slow.ttft_s.mean - warm.ttft_s.mean <= 5.01  # a tenth of the requests wait 50 s
    assert metrics(simulate(cold, small)).ttft_s.mean == metrics(simulate(made, small)).ttft_s.mean


def first_s(made, **settings):
    """The mean first token of a few requests that come one after the other while others decode, and a step's time."""
    changed = replace(made, engine=replace(made.engine, **settings))
    arrival = np.concatenate([np.zeros(8), 5.0 + 0.9137 * np.arange(40)])
    long, short = np.full(8, 9000), np.full(40, 8)
    work = Workload(np.full(48, 64), np.concatenate([long, short]), arrival)
    served = simulate(changed, work)
    late = (served.first_s - served.arrival_s)[8:]
    assert served.arrival_s[-1] < served.done_s[:8].min()  # somebody decodes all the time
    return float(late.mean()), float((served.done_s - served.first_s)[:8].mean() / 9000)


def test_a_queue_that_is_looked_at_every_thirty_steps_is_so_whether_or_not_anyone_came_before():
    made = deployed(engine="sglang", tp=1)
    soon, step_s = first_s(made, poll_steps=1, ahead=False)
    late, _ = first_s(made, poll_steps=30, ahead=False)
    assert 12 * step_s < late - soon < 18 * step_s  # half of thirty on average


def test_an_engine_that_plans_ahead_lets_newcomers_wait_for_one_more_step():
    made = deployed(engine="vllm", tp=1)
    at_once, step_s = first_s(made, ahead=False)
    later, _ = first_s(made, ahead=True)
    assert later - at_once == pytest.approx(step_s, rel=0.25)
    alone = [metrics(simulate(replace(made, engine=replace(made.engine, ahead=ahead)), static(1, 512, 8)))
             for ahead in (False, True)]  # fmt: skip
    assert alone[0].ttft_s.mean == alone[1].ttft_s.mean  # nothing is under way


def test_ragged_experts_cost_the_host_where_the_hardware_has_no_four_bit_format():
    def sums(on, ragged):
        made = precision("mxfp4", "bf16", sparse=True)
        return expert_side(rank_of(anatomy("gpt-oss-120b"), device(on), Layout(), made, ragged=ragged), np.array([8.0]))

    assert sums("h200", True).kernels > 2 * sums("h200", False).kernels and sums("h200", True).views > 0
    assert sums("b200", True).kernels == sums("b200", False).kernels and sums("b200", True).views == 0


def test_host_and_device_wait_for_each_other_in_a_recurrence():
    made = deployed("Qwen/Qwen3.5-397B-A17B", "b200*8", tp=8, engine="sglang", precision="fp8_block")
    slow = replace(made, engine=replace(made.engine, coef={**made.engine.coef, "call_s": 1e-9}))
    prompt_s, device_s = (
        oracle_of(d, d.pool, closed(4, 8192, 64)).mixed_s(0, 1, 0.0, [(8192, 0)], 8192, 1) for d in (made, slow)
    )
    floor_s = oracle_of(made, made.pool, closed(4, 8192, 64)).host_floor_s
    assert prompt_s == pytest.approx(device_s + floor_s, rel=1e-3)


def test_goodput_counts_what_keeps_the_slo():
    made = serve("llama3-8b", "h200*1", closed(32, 512, 128), Slo(ttft_s=1e-6))
    served, found = made.served, made.metrics
    assert made.to_dict()["slo"] == {"ttft_s": 1e-6} and made.to_dict()["goodput_per_s"] == 0
    assert found.good_frac == 0 and found.goodput_per_s == 0
    assert metrics(served).good_frac == 1
    with pytest.raises(InputError, match="above 0"):
        Slo(tpot_s=0.0)


def test_the_timeline_has_a_lane_a_replica_and_counts_the_cache():
    made = serve("llama3-8b", "h200*2", closed(8, 256, 64), tp=1, spans=10_000)
    trace, served = made.trace(), made.served
    assert trace.lanes() == ["replica 0", "replica 1"] and "cache_tokens" in trace.counters
    assert trace.end_s <= served.done_s.max() + 1e-9


def test_the_search_keeps_refused_layouts_with_their_reason_and_finds_the_cheapest():
    found = search("llama3-70b", "h200*4", Need(512, 128, Slo(ttft_s=2.0, tpot_s=0.05)), Wanted(precision="fp8"))
    assert found.best is not None and found.best.keeps
    keeping = [c.found.usd_per_million_output for c in found.candidates if c.found and c.keeps]
    assert found.best.found.usd_per_million_output == min(keeping)
    devices = [c.found.output_tokens_per_s_per_device for c in found.frontier]
    assert devices == sorted(devices)
    none = search("llama3-70b", "h100-sxm*1", Need(512, 128, Slo()), Wanted(precision="bf16", tp=1))
    assert none.best is None and "does not fit" in none.candidates[0].why


def test_a_rate_is_met_with_as_few_replicas_as_keep_the_slo():
    need = Need(512, 64, Slo(ttft_s=0.5), rate_per_s=60.0)
    found = search("llama3-8b", "h200*8", need, Wanted(tp=1, precision="fp8"))
    assert found.best is not None
    fewer = [c for c in found.candidates if c.num_devices < found.best.num_devices]
    assert all(not c.keeps for c in fewer)


def test_every_limit_of_an_slo_alone_makes_a_request_bad():
    served = simulate(deployed(), closed(4, 128, 32))
    for limit in ("ttft_s", "tpot_s", "e2e_s"):
        assert metrics(served, Slo(**{limit: 1e-6})).good_frac == 0
        assert metrics(served, Slo(**{limit: 1e6})).good_frac == 1


def test_figures_of_a_run_follow_from_its_requests():
    served = simulate(deployed(), static(1, 128, 11))
    found = metrics(served)
    assert found.tpot_s.mean == pytest.approx((found.e2e_s.mean - found.ttft_s.mean) / 10), "the first token is apart"
    hours = found.wall_s / 3600
    assert found.usd == pytest.approx(hours * served.deployment.device.price_usd_per_hour)
    assert found.usd_per_million_tokens == pytest.approx(found.usd / (128 + 11) * 1e6)
    assert found.usd_per_million_output == pytest.approx(found.usd / 11 * 1e6)


def test_the_mean_of_the_cache_weighs_each_level_by_how_long_it_lasted():
    served = simulate(deployed(), static(1, 128, 16))
    made = replace(served, samples={"at_s": [0.0, 3.0, 4.0], "held": [100, 200, 0], "running": [1, 2, 0]},
                   capacity_tokens=400)  # fmt: skip
    found = metrics(made)
    assert (found.cache_peak_frac, found.cache_mean_frac) == (0.5, (3 * 0.25 + 1 * 0.5) / 4)
    assert found.mean_running == (3 * 1 + 1 * 2) / 4


def test_lengths_are_drawn_from_both_ends_of_their_range():
    drawn = opened(1.0, 10, 4, num=500, ratio=0.5)
    assert (set(drawn.isl.tolist()), set(drawn.osl.tolist())) == (set(range(5, 11)), {2, 3, 4})


def test_the_cache_has_what_weights_and_the_runtime_leave_of_the_memory():
    made, layout, narrow = anatomy("llama3-8b"), Layout(), precision("bf16")
    on, per_token = device("h200"), cache_bytes_per_token(anatomy("llama3-8b"), Layout(), precision("bf16"))
    taken = RESERVED_BYTES + weight_bytes(made, layout, narrow)
    whole = on.dram.capacity_bytes
    share, of_free = (cache_tokens(made, layout, narrow, on, 0.9, free, 0) for free in (False, True))
    assert share == int((0.9 * whole - taken) / per_token)
    assert of_free == int(0.9 * (whole - taken) / per_token)


def test_stages_of_a_pipeline_share_weights_and_cache():
    made, narrow = anatomy("llama3-8b"), precision("bf16")
    ends = 2 * made.hidden * made.vocab * 2.0
    one, two = (weight_bytes(made, Layout(pp=pp), narrow) - ends for pp in (1, 2))
    assert one == pytest.approx(2 * two)
    one, two = (cache_bytes_per_token(made, Layout(pp=pp), narrow) for pp in (1, 2))
    assert one == pytest.approx(2 * two)
