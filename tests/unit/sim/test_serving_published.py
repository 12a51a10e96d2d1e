"""Rows of published runs become deployments: widths put right, settings of launch scripts, reasons to refuse."""

from __future__ import annotations

import numpy as np
import pytest

from ridgeline.cost.measurements import read_table
from ridgeline.sim.published import inference_llm, serving_ttft_tpot
from ridgeline.sim.published.verdict import Judged, Row, Unused

RUN = {
    "id": "a", "backend": "vllm", "backend_version": "0.18.0", "model_path": "openai/gpt-oss-120b",
    "system": "h200_sxm", "precision": "fp4", "mode": "agg", "isl": "1024", "osl": "128",
    "gemm_quant_mode": "nvfp4", "moe_quant_mode": "nvfp4",
    "tp_size": "2.0", "pp_size": "1.0", "attention_dp_size": "1.0", "moe_tp_size": "2.0", "moe_ep_size": "1.0",
    "silicon_ttft_ms": "60", "silicon_tpot_ms": "5", "concurrency": "4",
}  # fmt: skip


def layout_of(**changes):
    run = serving_ttft_tpot.run_of_row({**RUN, **changes})
    layout = run.deployment.pool.layout
    return (layout.tp, layout.attention_dp, layout.ep), run.was_repaired


def test_a_run_is_judged_by_its_first_and_its_other_tokens():
    verdicts = list(serving_ttft_tpot.judge([Row(2, RUN)]))
    assert [v.metric for v in verdicts] == ["ttft_mean", "tpot_mean"]
    for verdict in verdicts:
        assert verdict.low < verdict.predicted < verdict.high and verdict.unit == "s"
        assert 0.3 < verdict.predicted / verdict.measured < 3


def test_widths_that_were_multiplied_are_put_right():
    assert layout_of() == ((2, 1, 1), False)
    assert layout_of(tp_size="16.0", moe_tp_size="4.0", moe_ep_size="4.0") == ((4, 1, 4), True)
    assert layout_of(tp_size="4.0", attention_dp_size="4.0", moe_tp_size="1.0", moe_ep_size="16.0") == ((1, 4, 4), True)
    assert layout_of(tp_size="1.0", attention_dp_size="16.0", moe_tp_size="4.0", moe_ep_size="4.0") == ((1, 4, 4), True)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tp_size": "4.0"}, "widths are inconsistent"),
        ({"tp_size": ""}, "width is missing"),
        ({"system": "abacus"}, "unknown system"),
        ({"model_path": "nobody/NoModel-9B"}, "no language model"),
        ({"silicon_tpot_ms": "0"}, "no measured latency"),
        ({"tp_size": "32.0", "moe_tp_size": "32.0"}, "32 devices in one aggregated instance"),
    ],
)
def test_rows_that_cannot_be_used_say_why(changes, why):
    (verdict,) = serving_ttft_tpot.judge([Row(2, {**RUN, **changes})])
    assert isinstance(verdict, Unused) and why in verdict.why


def test_measurements_that_contradict_each_other_are_set_aside():
    light, heavy = {**RUN, "id": "b"}, {**RUN, "concurrency": "64", "silicon_tpot_ms": "3", "silicon_ttft_ms": "90"}
    verdicts = list(serving_ttft_tpot.judge([Row(2, light), Row(3, heavy)]))
    assert [type(v) for v in verdicts] == [Judged, Judged, Unused, Unused] and "quarter of the load" in verdicts[2].why
    stalled = {**light, "silicon_ttft_ms": "900"}
    usual = {**heavy, "silicon_tpot_ms": "9"}
    verdicts = list(serving_ttft_tpot.judge([Row(2, stalled), Row(3, usual)]))
    assert [type(v) for v in verdicts] == [Unused, Judged, Judged, Judged] and "stall" in verdicts[0].why


def test_settings_are_those_of_the_launch_scripts():
    deepseek = {"backend": "trtllm", "system": "b200_sxm", "model_path": "deepseek-ai/DeepSeek-R1", "isl": "8192"}
    made = serving_ttft_tpot.run_of_row({**RUN, **deepseek, "backend_version": "1.2.0rc6.post3"})
    assert made.deployment.engine.chunk_tokens >= 8192 + 4 and made.deployment.speculation.draft == 3
    assert made.deployment.precision.kv == "fp8"
    polled = serving_ttft_tpot.run_of_row({**RUN, "backend": "sglang", "system": "b200_sxm", "concurrency": "64",
                                           "model_path": "deepseek-ai/DeepSeek-V3"})  # fmt: skip
    assert polled.deployment.engine.poll_steps == 30


STATIC = {
    "config_id": "x", "source": "FasterTransformer", "model": "GPT-6.7B", "layers": "32", "hidden": "4096",
    "heads": "32", "kv_heads": "32", "ffn": "16384", "vocab": "51200", "device": "A100-SXM-80GB", "num_devices": "1",
    "tp": "1", "pp": "1", "precision": "fp16", "isl": "128", "osl": "8", "batch": "4", "engine": "FasterTransformer",
    "scenario": "static batch", "metric": "total_latency", "value": "120", "unit": "ms",
}  # fmt: skip


def judged(**changes):
    (verdict,) = inference_llm.judge([Row(2, {**STATIC, **changes})])
    return verdict


def test_static_batches_are_judged_by_the_metric_they_publish():
    total = judged()
    assert isinstance(total, Judged) and total.measured == pytest.approx(0.12)
    first = judged(metric="ttft")
    rate = judged(metric="output_tokens_per_s", value="300", unit="tok/s")
    assert first.predicted < total.predicted
    assert rate.measured == pytest.approx(1 / 300) and rate.predicted == pytest.approx(total.predicted / 32)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"device": "Abacus 9"}, "has no file"),
        ({"device": "AMD Instinct MI300X"}, "no serving kernels"),
        ({"engine": "Megatron-LM generation (baseline)"}, "no serving engine"),
        ({"scenario": "single full forward pass"}, "ridgeline predict"),
        ({"osl": ""}, "output tokens"),
        ({"layers": ""}, "lacks a size"),
    ],
)
def test_static_rows_that_cannot_be_used_say_why(changes, why):
    verdict = judged(**changes)
    assert isinstance(verdict, Unused) and why in verdict.why


def test_a_sample_of_published_runs_is_as_close_as_the_note_says(shared_published):
    records = read_table(shared_published / "serving_ttft_tpot.csv")[1][::37]
    verdicts = list(serving_ttft_tpot.judge([Row(line, record) for line, record in records if record["mode"] == "agg"]))
    apes = {metric: np.array([v.ape for v in verdicts if isinstance(v, Judged) and v.metric == metric])
            for metric in ("tpot_mean", "ttft_mean")}  # fmt: skip
    assert len(apes["tpot_mean"]) > 25
    assert np.median(apes["tpot_mean"]) < 0.12 and np.median(apes["ttft_mean"]) < 0.22


def test_a_sample_of_static_latencies_is_as_close_as_the_note_says(shared_published):
    records = read_table(shared_published / "inference_llm.csv")[1]
    rows = [Row(line, record) for line, record in records if "FasterTransformer" in record["engine"]][::9]
    apes = np.array([v.ape for v in inference_llm.judge(rows) if isinstance(v, Judged)])
    assert len(apes) > 15 and apes.mean() < 0.12
