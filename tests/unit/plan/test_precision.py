"""Narrow recipes: which products become narrow, and that their inputs are kept narrow."""

from __future__ import annotations

import pytest

from ridgeline.errors import PlanError
from ridgeline.models import build
from ridgeline.plan import Plan, partition
from ridgeline.plan.precision import recipe


def dtypes(graph, op):
    return {graph.type_of(n.inputs[0]).dtype.name for n, t in graph.nodes() if n.op == op and t > 1}


def test_all_products_of_layers_are_narrow_and_attention_is_not():
    graph = partition(build("llama3-8b", batch=1, seq=2048, mode="train"), Plan(tp=2, precision="fp8")).graph
    assert dtypes(graph, "matmul") == {"fp8"}
    assert dtypes(graph, "attention") == {"bf16"}
    heads = {graph.type_of(n.inputs[0]).dtype.name for n, _ in graph.nodes() if n.module == "lm_head"}
    assert heads == {"bf16"}


def test_each_operand_is_quantized_once():
    graph = partition(build("llama3-8b", batch=1, seq=2048, mode="train"), Plan(tp=2, precision="fp8")).graph
    sources = [n.inputs[0] for n, _ in graph.nodes() if n.op == "quantize"]
    assert len(sources) == len(set(sources))


def test_inputs_of_narrow_products_are_kept_narrow():
    graph = build("llama3-8b", batch=1, seq=2048, mode="train")
    wide, narrow = (partition(graph, Plan(dp=2, precision=p)).pieces[1].saved_bytes for p in ("bf16", "fp8"))
    two_norms, product, beside = 2 * 2048 * 4096, 2048 * 14336, 2048 * 4096
    assert wide - narrow == two_norms + product - beside, "attention's result is kept wide and narrow"


def test_parameters_are_counted_once_whatever_copies_exist():
    graph = build("deepseek-v3", batch=1, seq=2048, mode="train")
    counts = [[(p.param_numel, p.expert_numel) for p in partition(graph, Plan(dp=8, ep=8, precision=p)).pieces]
              for p in ("bf16", "fp8", "nvfp4")]  # fmt: skip
    assert counts[0] == counts[1] == counts[2]


def test_an_unknown_recipe_suggests_the_nearest():
    with pytest.raises(PlanError, match="mxfp8"):
        recipe("mxfp9")
