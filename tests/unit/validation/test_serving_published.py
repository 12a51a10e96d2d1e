"""Rows of published runs become deployments: widths put right, settings of launch scripts, reasons to refuse."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ridgeline.sim.serving.metrics import metrics
from ridgeline.sim.serving.simulate import simulate
from ridgeline.validation import inference_llm, serving_ttft_tpot
from ridgeline.validation.measurements import read_table
from ridgeline.validation.verdict import Judged, Row, Unused

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
    split = {"backend": "trtllm", "system": "b200_sxm", "backend_version": "1.2.0rc2"}
    wide = {"tp_size": "4.0", "attention_dp_size": "4.0", "moe_tp_size": "1.0", "moe_ep_size": "16.0"}
    assert layout_of(**split, **wide) == ((1, 4, 4), True)
    assert layout_of(**wide) == ((4, 1, 4), True)  # of vLLM, whose scripts did not split requests
    wide = {"tp_size": "1.0", "attention_dp_size": "16.0", "moe_tp_size": "4.0", "moe_ep_size": "4.0"}
    assert layout_of(**split, **wide) == ((1, 4, 4), True)


DEEPSEEK = {
    "backend": "trtllm", "backend_version": "", "model_path": "deepseek-ai/DeepSeek-R1", "system": "b200_sxm",
    "tp_size": "8", "moe_tp_size": "8", "osl": "1024",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "widths"),
    [
        ({"concurrency": "8"}, (8, 1, 1)),
        ({"concurrency": "16"}, (8, 1, 8)),
        ({"concurrency": "256"}, (1, 8, 8)),
        ({"concurrency": "64", "isl": "8192"}, (1, 8, 8)),
        ({"concurrency": "64", "isl": "8192", "backend_version": "1.2.0rc6.post2"}, (8, 1, 1)),
        ({"moe_quant_mode": "fp8_block", "concurrency": "4"}, (8, 1, 8)),
        ({"moe_quant_mode": "fp8_block", "concurrency": "64"}, (1, 8, 8)),
        ({"moe_quant_mode": "fp8_block", "concurrency": "64", "system": "h200_sxm"}, (8, 1, 8)),
        ({"model_path": "openai/gpt-oss-120b", "system": "h200_sxm"}, (8, 1, 8)),
        ({"backend": "sglang"}, (8, 1, 8)),
    ],
)
def test_widths_that_early_scripts_chose_unrecorded_are_theirs(changes, widths):
    assert layout_of(**{**DEEPSEEK, **changes})[0] == widths


def test_scripts_that_ignore_a_width_or_always_set_it_are_followed():
    kimi = {"model_path": "moonshotai/Kimi-K2.5", "system": "b200_sxm", "backend_version": "0.17.0"}
    assert layout_of(**kimi, tp_size="4", moe_tp_size="1", moe_ep_size="4")[0] == (4, 1, 1)
    minimax = {"model_path": "MiniMaxAI/MiniMax-M2.5", "moe_quant_mode": "fp8_block"}
    assert layout_of(**minimax, tp_size="8", moe_tp_size="8")[0] == (8, 1, 8)
    assert layout_of(**minimax, tp_size="4", moe_tp_size="4")[0] == (4, 1, 1)


def test_a_load_that_the_script_did_not_take_is_refused():
    known = {**RUN, "system": "h100_sxm", "concurrency": "512", "silicon_tpot_ms": "5"}
    (verdict,) = serving_ttft_tpot.judge([Row(2, {**known, "backend_version": "0.11.2"})])
    assert isinstance(verdict, Unused) and "512 in flight whatever was asked" in verdict.why
    assert all(isinstance(v, Judged) for v in serving_ttft_tpot.judge([Row(2, known)]))


def test_experts_said_to_be_sliced_finer_than_their_scales_are_dealt_out_whole():
    wide = {"mode": "disagg", "model_path": "deepseek-ai/DeepSeek-R1", "system": "gb200"}
    for side, dp in (("prefill_", "8"), ("decode_", "32")):
        sizes = {"tp_size": "1", "pp_size": "1", "attention_dp_size": dp, "moe_tp_size": dp, "moe_ep_size": "1"}
        wide |= {side + name: size for name, size in sizes.items()} | {side + "num_workers": "1"}
    run = serving_ttft_tpot.run_of_row({**RUN, **wide})
    assert run.was_repaired and run.deployment.pool.layout.ep == 32
    assert run.deployment.prefill is not None and run.deployment.prefill.layout.ep == 1  # 256 columns: as it says


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


def loaded(**latencies):
    """Runs of one deployment: load → (ttft, tpot) in milliseconds."""
    return [Row(i, {**RUN, "concurrency": load[1:], "silicon_ttft_ms": str(ttft), "silicon_tpot_ms": str(tpot)})
            for i, (load, (ttft, tpot)) in enumerate(latencies.items())]  # fmt: skip


def doubted(**latencies):
    return set(serving_ttft_tpot.contradictions([row.columns for row in loaded(**latencies)]))


def test_measurements_that_two_others_contradict_are_set_aside():
    usual = {"c4": (60, 5), "c8": (65, 6), "c64": (90, 9), "c128": (120, 12)}
    assert doubted(**usual) == set()
    assert doubted(**usual, c512=(20_000, 4)) == {(4, "tpot_mean"), (4, "ttft_mean")}
    assert doubted(**{**usual, "c8": (900, 6)}) == {(1, "ttft_mean")}
    assert doubted(c4=(60, 5), c64=(90, 3)) == set()  # one against one says nothing
    verdicts = list(serving_ttft_tpot.judge(loaded(**{**usual, "c8": (900, 6)})))
    assert [v.why for v in verdicts if isinstance(v, Unused)] == [
        "two runs of the same deployment contradict its first token: a stall"
    ]


def engine_of(**changes):
    return serving_ttft_tpot.run_of_row({**RUN, **changes}).deployment.engine


def test_settings_are_those_of_the_launch_scripts():
    deepseek = {**DEEPSEEK, "isl": "8192", "backend_version": "1.2.0rc6.post3"}
    made = serving_ttft_tpot.run_of_row({**RUN, **deepseek})
    assert made.deployment.engine.chunk_tokens == 8320 and made.deployment.speculation.draft == 3
    assert made.deployment.precision.kv == "fp8"
    assert engine_of(**DEEPSEEK, concurrency="64").chunk_tokens == 1152  # one prompt an iteration
    assert engine_of(**{**DEEPSEEK, "backend_version": "1.2.0rc6.post2"}, concurrency="64").chunk_tokens == 8192
    sglang = {**DEEPSEEK, "backend": "sglang", "backend_version": "0.5.9", "moe_quant_mode": "fp8_block"}
    polled = engine_of(**sglang, concurrency="64")
    assert (polled.poll_steps, polled.max_sequences, polled.chunk_tokens) == (30, 128, 32768)
    drafted = serving_ttft_tpot.run_of_row({**RUN, **sglang, "concurrency": "256"}).deployment
    assert drafted.speculation is not None and drafted.engine.max_sequences == 512


def test_states_of_quantized_hybrids_are_short():
    def state(**changes):
        row = {**RUN, "backend": "sglang", "model_path": "Qwen/Qwen3.5-397B-A17B", "backend_version": "0.5.9"} | changes
        made = serving_ttft_tpot.run_of_row({**row, "tp_size": "8", "moe_tp_size": "8"}).deployment.anatomy
        return max(group.mixer.state_bytes(8) for group in made.layers)

    assert state(moe_quant_mode="bf16", gemm_quant_mode="bf16") == 2 * state(moe_quant_mode="fp8_block")


def test_generations_follow_versions():
    def named(backend, version, **more):
        return engine_of(backend=backend, backend_version=version, **more).name

    assert [named("vllm", v) for v in ("", "0.11.2", "0.15.1", "0.16.0", "0.17.0", "0.19.0")] == [
        "vllm-0.11", "vllm-0.11", "vllm-0.17", "vllm-0.17", "vllm-0.17", "vllm",
    ]  # fmt: skip
    assert named("sglang", "") == named("sglang", "0.5.6") == "sglang-0.5.6" and named("sglang", "0.5.9") == "sglang"
    assert [named("trtllm", v) for v in ("", "1.1.0rc2.post2", "1.2.0rc2")] == ["trtllm-1.1", "trtllm-1.1", "trtllm"]


STATIC = {
    "config_id": "x", "source": "FasterTransformer", "model": "GPT-6.7B", "layers": "32", "hidden": "4096",
    "heads": "32", "kv_heads": "32", "ffn": "16384", "vocab": "51200", "device": "A100-SXM-80GB", "num_devices": "1",
    "tp": "1", "pp": "1", "precision": "fp16", "isl": "128", "osl": "8", "batch": "4", "engine": "FasterTransformer",
    "scenario": "static batch", "metric": "total_latency", "value": "120", "unit": "ms",
}  # fmt: skip


GPTJ = {
    "model": "GPT-J 6B", "device": "H100-SXM-80GB", "precision": "fp8", "engine": "TensorRT", "num_devices": "8",
    "scenario": "MLPerf Offline (gptj-99)", "metric": "throughput", "unit": "Samples/s", "value": "240",
}  # fmt: skip


def test_beams_cost_more_than_one_sequence_and_static_rounds_more_than_later_ones():
    (early,) = inference_llm.judge([Row(2, {**STATIC, **GPTJ, "config_id": "mlpinf3.1-x"})])
    (later,) = inference_llm.judge([Row(2, {**STATIC, **GPTJ, "config_id": "mlpinf4.1-x"})])
    case = inference_llm.case_of(Row(2, {**STATIC, **GPTJ, "config_id": "mlpinf4.1-x"}))
    alone = metrics(simulate(replace(case.deployment, speculation=None), case.workload))
    assert early.predicted > 1.8 * later.predicted
    assert 1.5 < later.predicted / inference_llm.seconds_of(case, alone) < 4


LOADED = {
    "model": "Qwen3-235B-A22B", "device": "H200-SXM-141GB", "num_devices": "8", "tp": "8", "precision": "fp8",
    "engine": "TensorRT-LLM v1.0 (PyTorch backend)", "scenario": "max-load throughput", "isl": "1000", "osl": "1000",
    "metric": "output_tokens_per_s", "value": "20000", "unit": "tokens/s total", "batch": "auto",
}  # fmt: skip


def test_maximum_load_is_set_up_as_the_engines_overview_says():
    sparse = inference_llm.case_of(Row(2, {**STATIC, **LOADED}))
    layout = sparse.deployment.pool.layout
    assert (layout.tp, layout.attention_dp, layout.ep) == (1, 8, 8) and len(sparse.workload) == 3000
    assert sparse.deployment.engine.memory_frac == 0.9
    dense = inference_llm.case_of(Row(2, {**STATIC, **LOADED, "model": "Llama-3.3-70B"}))
    assert dense.deployment.pool.layout.tp == 8 and dense.deployment.pool.layout.attention_dp == 1
    said = inference_llm.case_of(Row(2, {**STATIC, **LOADED, "notes": "parallelism label TEP8"})).deployment.pool.layout
    assert (said.tp, said.attention_dp, said.ep) == (8, 1, 8)


def test_caches_of_gpt_oss_are_narrow_on_blackwell_alone():
    def kv(device):
        row = Row(2, {**STATIC, **LOADED, "model": "GPT-OSS-120B", "device": device, "num_devices": "1", "tp": "1"})
        return inference_llm.case_of(row).deployment.precision.kv

    assert kv("B200-180GB") == "fp8" and kv("H200-SXM-141GB") == "bf16"


def test_compiled_engines_attend_to_everything():
    old = {"engine": "TensorRT-LLM v0.17 (TensorRT engine)", "model": "Mistral-7B", "num_devices": "1", "tp": "1"}
    case = inference_llm.case_of(Row(2, {**STATIC, **LOADED, **old}))
    assert all(group.mixer.window == 0 for group in case.deployment.anatomy.layers)


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


def test_a_sample_of_maximum_loads_is_as_close_as_the_note_says(shared_published):
    """The sets of TensorRT-LLM 1.x were fitted on other sources."""
    records = read_table(shared_published / "inference_llm.csv")[1]
    late = [Row(line, record) for line, record in records if record["config_id"].startswith("trtllm1")][::9]
    apes = np.array([v.ape for v in inference_llm.judge(late) if isinstance(v, Judged)])
    assert len(apes) > 15 and apes.mean() < 0.18


def test_a_sample_of_disaggregated_runs_is_as_close_as_the_note_says(shared_published):
    """Nothing was fitted on them."""
    records = read_table(shared_published / "serving_ttft_tpot.csv")[1]
    apart = [Row(line, record) for line, record in records if record["mode"] == "disagg"
             and record["decode_num_workers"] and float(record["concurrency"]) <= 600]  # fmt: skip
    verdicts = serving_ttft_tpot.judge(apart[::5])
    apes = np.array([v.ape for v in verdicts if isinstance(v, Judged) and v.metric == "tpot_mean"])
    assert len(apes) > 15 and apes.mean() < 0.2
