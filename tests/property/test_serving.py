"""Laws of serving that hold for every load: tokens, cache, order, and faster hardware."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.sim.serving.compose import Wanted, deployment_of
from ridgeline.sim.serving.metrics import PERCENTILES, metrics
from ridgeline.sim.serving.simulate import simulate
from ridgeline.sim.serving.workload import Workload, closed, static

FEW = settings(max_examples=15, deadline=None)
ENGINES = st.sampled_from(["vllm", "sglang", "trtllm"])


@st.composite
def workloads(draw):
    num = draw(st.integers(1, 60))
    seed = draw(st.integers(0, 10_000))
    rng = np.random.default_rng(seed)
    isl, osl = rng.integers(1, 3000, num), rng.integers(1, 300, num)
    concurrency = draw(st.sampled_from([0, 1, 7, 40]))
    arrival = np.sort(rng.random(num)) * draw(st.sampled_from([0.0, 1.0, 20.0]))
    return Workload(isl.astype(np.int64), osl.astype(np.int64), arrival, concurrency)


@FEW
@given(workloads(), ENGINES, st.sampled_from([0, 8000, 40_000]), st.sampled_from([0, 2]))
def test_everyone_is_served_in_order_and_the_cache_is_empty_at_the_end(work, engine, cache, draft):
    wanted = Wanted(tp=1, engine=engine, cache_tokens=cache, draft=draft)
    found = simulate(deployment_of("llama3-8b", "h200*1", wanted), work)
    assert (found.first_s >= found.arrival_s).all() and (found.done_s >= found.first_s).all()
    assert found.left_tokens == pytest.approx(0, abs=1e-6)
    assert max(found.samples["held"], default=0) <= found.capacity_tokens + 1e-9
    assert min(found.samples["held"], default=0) >= -1e-6
    assert found.iterations >= (int(work.osl.max()) - 1) // (1 + draft)


@FEW
@given(workloads(), ENGINES)
def test_percentiles_are_ordered_and_rates_add_up(work, engine):
    served = simulate(deployment_of("llama3-8b", "h200*1", Wanted(tp=1, engine=engine)), work)
    found = metrics(served)
    for spread in (found.ttft_s, found.tpot_s, found.e2e_s):
        values = [spread.percentiles[p] for p in PERCENTILES]
        assert values == sorted(values) and values[-1] <= spread.largest
        assert spread.low <= spread.mean <= spread.high
    assert found.output_tokens_per_s * found.wall_s == pytest.approx(work.osl.sum())


@FEW
@given(st.integers(1, 200), st.integers(1, 4000), st.integers(1, 400), st.sampled_from(["llama3-8b", "gpt-oss-20b"]))
def test_more_bandwidth_is_never_slower(batch, isl, osl, model):
    work = static(batch, isl, osl)
    slow, fast = (
        simulate(deployment_of(model, f"h200*1{change}", Wanted(tp=1)), work).done_s.max()
        for change in ("", " hbm_bandwidth=2x")
    )
    assert fast <= slow * (1 + 1e-9)


@FEW
@given(st.integers(1, 64), st.integers(16, 2000), st.integers(2, 200))
def test_a_run_of_steps_takes_as_long_however_it_is_cut(batch, isl, osl):
    """Arrivals that cut a run of equal steps change nothing for those who run, but for the steps they share."""
    deployment = deployment_of("llama3-8b", "h200*1", Wanted(tp=1))
    whole = simulate(deployment, static(batch, isl, osl))
    again = simulate(deployment, static(batch, isl, osl), max_spans=10_000)
    assert (whole.done_s == again.done_s).all()
    assert sum(steps for *_, steps in again.spans) <= again.iterations


@FEW
@given(st.integers(1, 40), st.integers(1, 3))
def test_more_replicas_never_lower_throughput_at_full_load(concurrency, replicas):
    work = closed(concurrency * 4, 256, 64, num=concurrency * 8)
    one, more = (
        metrics(simulate(deployment_of("llama3-8b", f"h200*{n}", Wanted(tp=1)), work)).output_tokens_per_s
        for n in (1, 1 + replicas)
    )
    assert more >= one * 0.999
