"""One question asked in two ways has one answer."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

import ridgeline as rl
from ridgeline.cli.app import run
from ridgeline.errors import HardwareError
from ridgeline.sim.serving.compose import Wanted
from ridgeline.sim.serving.metrics import Slo, latencies
from ridgeline.sim.serving.search import Need, search
from ridgeline.sim.serving.workload import closed, opened
from ridgeline.web.data import report_data
from ridgeline.web.serving import served_data
from ridgeline.web.step import step_data

NETWORKS = ("llama3-8b", "bert-large", "gpt2-xl", "mixtral-8x7b")


@pytest.mark.parametrize("model", NETWORKS)
def test_simulating_one_device_agrees_with_predicting_it(model):
    graph = rl.build(model, batch=1, mode="train", seq=512)
    predicted, step = rl.predict(graph, on="h200"), rl.simulate(graph, "h200*1")
    assert step.step_s == pytest.approx(predicted.expected_s, rel=0.02)
    allocated = max(stage.allocated_bytes for stage in step.footprints)
    assert allocated == pytest.approx(predicted.peak_bytes, rel=0.01)


def test_the_outcomes_of_a_plan_search_add_up():
    found = rl.plans("llama3-8b", "h100-sxm*8", global_batch=16, seq=2048)
    assert sum(found.outcomes.values()) == found.num_candidates


def test_a_row_of_a_sweep_is_what_the_table_above_it_says(capsys):
    argv = ["serve", "llama3-8b", "--on", "h200*1", "--concurrency", "16", "--isl", "256", "--osl", "64", "--sweep"]
    assert run([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    row = next(point for point in found["sweep"] if point["concurrency"] == 16)["found"]
    assert row["ttft_s"] == found["ttft_s"] and row["output_tokens_per_s"] == found["output_tokens_per_s"]


def test_the_curve_of_latencies_ends_where_the_percentiles_do():
    made = rl.serve("llama3-8b", "h200*1", closed(8, 256, 64))
    served, found = made.served, made.metrics
    curve = served_data("t", served, found, ())["cdf"]["ttft"]
    values, shares = zip(*curve, strict=True)
    assert np.interp(0.99, shares, values) == pytest.approx(found.ttft_s.percentiles[99], rel=1e-3)
    assert found.num_skipped == 8 and len(latencies(served)[0]) == 80


@pytest.mark.parametrize(("rate", "is_overloaded"), [(2.0, False), (2000.0, True)])
def test_a_deployment_that_cannot_keep_up_says_so(rate, is_overloaded):
    found = rl.serve("llama3-8b", "h200*1", opened(rate, 256, 64, num=400)).metrics
    assert bool(found.waiting_at_end) is is_overloaded


@pytest.mark.parametrize("device", ["h200", "a100-sxm-80gb", "mi300x"])
@pytest.mark.parametrize("model", ["resnet50", "bert-large", "unet3d", "dlrm"])
def test_no_row_names_a_bound_that_its_work_contradicts(model, device):
    for row in rl.predict(model, on=device).rows():
        assert not (row.bound == "compute" and row.flops == 0), row
        assert not (row.bound == "latency" and row.expected_s / row.times > 2e-4), row


def test_a_dtype_that_a_device_cannot_compute_is_refused_with_those_it_can():
    with pytest.raises(HardwareError, match=r"a100-sxm-80gb cannot compute fp8 .* it has tensor"):
        rl.predict("llama3-8b", on="a100-sxm-80gb", precision="fp8", batch=1, seq=128)
    assert rl.predict("llama3-8b", on="a100-sxm-80gb tensor.fp8=600TFLOP/s", precision="fp8", batch=1, seq=128)


DRAWN = [(draw.choice(NETWORKS), draw.choice(("h200", "a100-sxm-80gb", "mi300x", "h200 sms=160 hbm_bandwidth=1.5x")),
          draw.choice(("bf16", "fp16", "fp32")), draw.choice(("eager", "compiled", "cudagraph")), draw.randint(1, 9),
          draw.choice(("prefill", "train"))) for draw in map(random.Random, range(5))]  # fmt: skip


@pytest.mark.parametrize(("model", "device", "precision", "execution", "batch", "mode"), DRAWN)
def test_a_study_a_page_and_the_command_line_say_what_predict_says(
    model, device, precision, execution, batch, mode, capsys
):
    options = {"precision": precision, "seq": 256} | ({"mode": mode} if model != "bert-large" else {})
    p = rl.predict(model, on=device, execution=execution, batch=batch, **options)
    space = rl.Space(model, on=device, execution=execution, options=options, vary={"batch": f"{batch},{batch + 1}"})
    columns = rl.study(space, keep=("step_s", "energy_j", "peak_bytes", "fits")).columns
    told = [columns[name][0] for name in ("step_s", "step_s.low", "step_s.high", "energy_j", "peak_bytes")]
    assert told == pytest.approx([p.expected_s, *p.interval_s, p.energy_j, p.peak_bytes], rel=1e-9)
    assert bool(columns["fits"][0]) is (p.missing_bytes == 0)
    page = report_data(p, None)["totals"]
    assert (page["expected_s"], page["energy_j"]) == (p.expected_s, p.energy_j)
    argv = ["predict", model, "--on", device, "--execution", execution, "--batch", str(batch), "--json"]
    assert run([*argv, *(word for name, value in options.items() for word in (f"--{name}", str(value)))]) == 0
    printed = json.loads(capsys.readouterr().out)
    printed = printed[0] if isinstance(printed, list) else printed
    assert printed["expected_s"] == p.expected_s and printed["interval_s"] == list(p.interval_s)
    assert sum(row.expected_s for row in p.rows()) == pytest.approx(p.busy_s, rel=1e-9)


def test_the_best_plan_is_what_simulating_it_says():
    best = rl.plans("llama3-8b", "h100-sxm*4", global_batch=8, seq=1024).best[0]
    again = rl.simulate("llama3-8b", "h100-sxm*4", best.plan, seq=1024)
    assert (again.step_s, again.peak_bytes, again.interval_s) == (best.step_s, best.peak_bytes, best.interval_s)
    page = step_data(best)
    assert (page["step_s"], page["peak_bytes"]) == (best.step_s, best.peak_bytes)
    assert sum(best.parts.values()) == pytest.approx(best.step_s, rel=1e-6)


def test_a_point_of_a_search_is_what_serving_it_says():
    need = Need(isl=128, osl=16, slo=Slo(tpot_s=0.05))
    point = search("llama3-8b", "h200*1", need, Wanted(precision="bf16")).best
    served = rl.serve("llama3-8b", "h200*1", closed(point.concurrency, 128, 16), precision="bf16", tp=1)
    found = served.metrics
    assert point.found.tpot_s.mean == pytest.approx(found.tpot_s.mean)
    assert point.found.usd_per_million_output == pytest.approx(found.usd_per_million_output)
