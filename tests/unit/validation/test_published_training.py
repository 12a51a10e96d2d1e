"""Published training rows as they are read where they are silent: dispatch, replayed steps, software generations."""

from __future__ import annotations

import pytest

import ridgeline as rl
from ridgeline.basis import Basis
from ridgeline.hardware import device
from ridgeline.sim.generation import stack_of, stacks
from ridgeline.validation.training_llm import case_of, source_of
from ridgeline.validation.verdict import Row

ROW = {"model": "Qwen3_30B_a3B", "layers": "48", "hidden": "2048", "heads": "32", "kv_heads": "4", "ffn": "768",
       "vocab": "151936", "experts": "128", "topk": "8", "seq": "4096", "device": "GB200 (NVL72)", "num_devices": "8",
       "tp": "1", "pp": "1", "cp": "1", "ep": "8", "mbs": "4", "gbs": "512", "precision": "MXFP8",
       "software": "Megatron-Bridge NeMo 25.11", "notes": "task=pretrain"}  # fmt: skip
RECIPE = "recipe QWEN3 in scripts/performance/configs/qwen.py@v0.4.2 (matched on all parallel sizes): "
CALLS = "recipe qwen3 in src/megatron/bridge/perf_recipes/qwen/gb300/qwen3_moe.py@v0.6.0: "


def plan_of(**columns: str):
    return case_of(Row(2, ROW | columns)).plan


@pytest.mark.parametrize(("columns", "dispatch", "beside"), [
    ({}, "hybrid", False),
    ({"device": "DGX-B200"}, "all-to-all", False),
    ({"device": "DGX-H100", "num_devices": "16"}, "all-to-all", True),
    ({"model": "GPT OSS 120B"}, "all-to-all", False),
    ({"model": "Qwen3_235B_a22B", "device": "B300", "software": "Megatron-Bridge NeMo 26.02.01"}, "all-to-all", True),
    ({"software": "Megatron-Bridge NeMo 26.04"}, "hybrid", False),
    ({"notes": "variant: tokendrop"}, "drop", False),
    ({"notes": RECIPE + "moe_a2a_overlap=True"}, "all-to-all", True),
    ({"notes": RECIPE + "moe_flex_dispatcher_backend=deepep"}, "deep", False),
    ({"notes": CALLS, "software": "Megatron-Bridge NeMo 26.08"}, "hybrid", True),
    ({"software": "somebody's trainer"}, "all-to-all", False),
])  # fmt: skip
def test_dispatch_is_what_the_recipe_says_else_what_the_release_did(columns, dispatch, beside):
    plan = plan_of(**columns)
    assert (plan.dispatch, plan.overlap_ep) == (dispatch, beside)


def test_steps_are_replayed_where_a_recipe_records_them_whole():
    assert plan_of(notes=RECIPE + "cuda_graph_impl=full_iteration").replayed
    assert plan_of(notes=CALLS, software="Megatron-Bridge NeMo 26.08").replayed
    assert not plan_of(notes=RECIPE + "cuda_graph_impl=transformer_engine, cuda_graph_scope=['attn']").replayed
    assert not plan_of(notes=RECIPE + "cuda_graph_impl=none, cuda_graph_scope=full_iteration").replayed
    assert not plan_of().replayed


def test_a_replayed_step_waits_for_no_host():
    plan = {"ep": 8, "micro_batch": 1, "global_batch": 64, "seq": 4096}
    launched = rl.simulate("qwen3-30b-a3b", "h100-sxm*8", **plan)
    replayed = rl.simulate("qwen3-30b-a3b", "h100-sxm*8", **plan, replayed=True)
    assert replayed.step_s < 0.7 * launched.step_s
    assert replayed.step_s > 0.9 * replayed.parts["compute"]


def test_a_source_is_a_document_and_a_submitter_of_a_round():
    page = "github:NVIDIA-NeMo/Megatron-Bridge/docs/performance-summary.md@1 (26.08 NeMo Container / LoRA Performance)"
    assert source_of(Row(2, {"source": page})) == page
    round_ = "github:mlcommons/training_results_v5.0/Lambda"
    assert source_of(Row(2, {"source": f"{round_}/results/b200_n1/llama2_70b_lora@2"})) == round_


def test_a_generation_on_an_unseen_device_takes_its_architectures_coefficients():
    seen, unseen = stack_of("mlperf-2025b", device("gb200")), stack_of("mlperf-2025b", device("b200"))
    assert (seen.basis, unseen.basis) == (Basis.FITTED, Basis.ASSUMED)
    assert unseen.device == "b200"
    assert unseen["matrix"] == pytest.approx(seen["matrix"], rel=0.2)
    assert stack_of("mlperf-2025b", device("a100-sxm-80gb"))["matrix"] != unseen["matrix"]


@pytest.mark.parametrize("name", stacks()[1:])
def test_coefficients_stay_where_they_are_possible(name):
    for where in ("h100-sxm", "b200", "a100-sxm-80gb", "mi300x", "l40s"):
        coef = stack_of(name, device(where)).coef
        assert 0.6 < coef["matrix"] < 1.7, where
        assert coef["step_s"] < 0.1, where
        assert coef["micro_s"] < 5e-3, where
        assert coef["layer_s"] < 5e-4, where


def test_attention_in_eight_bits_shortens_a_step_by_less_than_attention():
    plan = {"micro_batch": 1, "global_batch": 16, "seq": 8192, "precision": "fp8", "tp": 2}
    wide, narrow = (rl.simulate("llama3-8b", "b200*8", **plan, narrow_attention=how) for how in (False, True))
    assert 0.9 < narrow.step_s / wide.step_s < 0.99
