"""Recomputation: what is kept, what runs again, and that published activation formulas come out."""

from __future__ import annotations

import pytest

from ridgeline.graph import Phase
from ridgeline.models import build
from ridgeline.models.llm import Decoder, decoder
from ridgeline.plan import Plan, partition
from ridgeline.plan.recompute import AGAIN

GPT22B = Decoder(layers=48, hidden=6144, heads=64, ffn=24576, vocab=51200, act="gelu", gated=False, norm="layer_norm",
                 qkv_bias=True, o_bias=True, mlp_bias=True, conv1d=True, positions=2048, tied=True, core="unfused",
                 dropout=True)  # fmt: skip


def saved(**choices) -> float:
    graph = decoder("gpt-22b", GPT22B, batch=4, seq=2048, precision="fp16")
    layer = partition(graph, Plan(tp=8, **choices)).pieces[1]
    return layer.saved_bytes


SBH = 2048 * 4 * 6144


@pytest.mark.parametrize(
    ("choices", "times"),
    [  # bytes over s·b·h, Korthikanti et al. 2022, table 2 (t = 8, 5as/h = 106.7)
        ({"sequence_parallel": False}, 10 + 24 / 8 + 106.7 / 8),
        ({"sequence_parallel": True}, 34 / 8 + 106.7 / 8),
        ({"sequence_parallel": True, "recompute": "selective"}, 34 / 8),
        ({"sequence_parallel": False, "recompute": "selective"}, 10 + 24 / 8),
        ({"sequence_parallel": False, "recompute": "full"}, 2),
    ],
)
def test_kept_activations_are_those_of_the_published_formula(choices, times):
    assert saved(**choices) == pytest.approx(times * SBH, rel=0.02)


def test_full_recomputation_runs_the_forward_of_each_layer_once_more():
    graph = build("llama3-8b", batch=1, seq=2048, mode="train")
    plain, full = (partition(graph, Plan(tp=2, recompute=r)).graph for r in ("none", "full"))
    again = [n for n, _ in full.nodes() if n.target == AGAIN and n.op in ("matmul", "attention")]
    forward = [n for n, t in plain.nodes() if n.phase is Phase.FORWARD and t > 1 and n.op in ("matmul", "attention")]
    assert len(again) == len(forward)
    assert all(n.phase is Phase.BACKWARD for n in again)


def test_eager_checkpointing_stops_when_all_that_is_read_is_there():
    graph = build("llama3-8b", batch=1, seq=2048, mode="train")
    full = partition(graph, Plan(tp=2, recompute="full", execution="eager"), fused=False).graph
    again = {n.module.rsplit(".", 1)[-1] for n, _ in full.nodes() if n.target == AGAIN and n.op == "matmul"}
    assert "up_proj" in again
    assert "down_proj" not in again


def test_fused_elementwise_results_are_not_kept():
    graph = build("llama3-8b", batch=1, seq=2048, mode="train")
    eager = partition(graph, Plan(tp=2), fused=False).pieces[1].saved_bytes
    fused = partition(graph, Plan(tp=2), fused=True).pieces[1].saved_bytes
    assert eager - fused == 2048 * 14336 // 2 * 2, "the activated gate is recomputed from the gate"


def test_modules_are_recomputed_by_name():
    graph = build("deepseek-v3", batch=1, seq=2048, mode="train")
    none = partition(graph, Plan(dp=8, ep=8)).pieces[2].saved_bytes
    less = partition(graph, Plan(dp=8, ep=8, recompute="selective:mla_up_proj")).pieces[2].saved_bytes
    least = partition(graph, Plan(dp=8, ep=8, recompute="full")).pieces[2].saved_bytes
    assert none > less > least == 2048 * 7168 * 2
