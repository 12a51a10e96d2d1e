"""A rank's share of a graph: what is split, which collectives are inserted, and that arithmetic is conserved."""

from __future__ import annotations

import pytest

from ridgeline.errors import PlanError
from ridgeline.graph import Block, Graph, Kind, Phase
from ridgeline.graph.build import Builder
from ridgeline.graph.types import tensor
from ridgeline.graph.verify import verify
from ridgeline.models import build
from ridgeline.plan import Plan, partition
from ridgeline.plan.layout import Mesh, permuted, pieces, reshaped
from ridgeline.plan.partition import forward_of
from ridgeline.plan.shard import shard


def products(graph: Graph, phase: Phase = Phase.FORWARD) -> float:
    """Multiply-adds of plain and grouped products and attention."""
    total = 0.0
    for node, times in graph.nodes():
        a = node.attrs
        if node.phase is not phase:
            continue
        if node.op == "matmul":
            total += a["b"] * a["m"] * a["n"] * a["k"] * times
        elif node.op == "grouped_matmul":
            total += a["m"] * a["n"] * a["k"] * times
        elif node.op == "attention" and a.get("which") != "bwd":
            total += a["b"] * a["h"] * a["s"] * a["skv"] * (0.5 if a["causal"] else 1.0) * 2 * a["d"] * times
    return total


def collectives(graph: Graph, phase: Phase, group: str) -> list[str]:
    """Kinds of the collectives of one layer, in order."""
    nodes = [n for item in graph.items if isinstance(item, Block) for n in item.nodes if n.op == "collective"]
    return [n.attrs["fn"] for n in nodes if n.phase is phase and n.attrs["group"] == group and n.attrs["num_bytes"]]


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        ("llama3-8b", Mesh(tp=2, sequence=True)),
        ("llama3-8b", Mesh(tp=8)),
        ("llama3-8b", Mesh(cp=4)),
        ("llama3-8b", Mesh(tp=4, cp=2, sequence=True)),
        ("gpt3-175b", Mesh(tp=8, sequence=True)),
        ("phi-3-mini", Mesh(tp=4)),
    ],
)
def test_the_shares_of_all_ranks_are_the_whole_arithmetic(model, mesh):
    graph = forward_of(build(model, batch=1, seq=2048, mode="train"))
    local = shard(graph, mesh)
    assert products(local) * mesh.tp * mesh.cp == pytest.approx(products(graph), rel=0.01)


def test_experts_are_spread_and_their_tokens_travel_twice():
    graph = forward_of(build("qwen3-30b-a3b", batch=1, seq=2048, mode="train"))
    local = shard(graph, Mesh(ep=8))
    grouped = [n for n, _ in local.nodes() if n.op == "grouped_matmul"]
    assert {n.attrs["groups"] for n in grouped} == {16}
    assert {n.attrs["m"] for n in grouped} == {2048 * 8}
    assert collectives(local, Phase.FORWARD, "ep") == ["all_to_all", "all_to_all"]
    assert products(local) == pytest.approx(products(graph), rel=1e-9), "every rank has its own tokens"


def test_an_expert_split_over_ranks_gathers_tokens_and_scatters_results():
    graph = forward_of(build("mixtral-8x7b", batch=1, seq=2048, mode="train"))
    local = shard(graph, Mesh(tp=2, ep=4, etp=2, sequence=True))
    assert collectives(local, Phase.FORWARD, "etp") == ["all_gather", "reduce_scatter"]
    sent = {n.attrs["num_bytes"] for n, _ in local.nodes() if n.op == "collective" and n.attrs["group"] == "ep"}
    assert sent == {1024 * 2 * 4096 * 2}, "what goes to the experts comes back"


def test_sequence_parallelism_turns_each_all_reduce_into_a_gather_and_a_scatter():
    graph = forward_of(build("llama3-8b", batch=1, seq=2048, mode="train"))
    plain = shard(graph, Mesh(tp=2))
    split = shard(graph, Mesh(tp=2, sequence=True))
    assert collectives(plain, Phase.FORWARD, "tp") == ["all_reduce"] * 2
    assert collectives(split, Phase.FORWARD, "tp") == ["all_gather", "reduce_scatter"] * 2


def test_backward_exchanges_mirror_the_forward_ones():
    graph = build("llama3-8b", batch=1, seq=2048, mode="train")
    local = partition(graph, Plan(tp=2, sequence_parallel=False)).graph
    assert collectives(local, Phase.BACKWARD, "tp") == ["all_reduce", "all_reduce"]
    split = partition(graph, Plan(tp=2, dp=1)).graph
    found = collectives(split, Phase.BACKWARD, "tp")
    assert found.count("reduce_scatter") == 2
    assert found.count("all_gather") == 4, "two mirrored, two fetched again for weight gradients"


def test_key_value_heads_fewer_than_ranks_are_repeated():
    graph = forward_of(build("llama3-70b", batch=1, seq=2048, mode="train"))
    local = shard(graph, Mesh(tp=16, sequence=True))
    attention = next(n for n, _ in local.nodes() if n.op == "attention")
    assert (attention.attrs["h"], attention.attrs["hkv"]) == (4, 1)


def test_latent_projections_stay_whole_and_work_on_their_own_tokens():
    graph = forward_of(build("deepseek-v3", batch=1, seq=2048, mode="train"))
    local = shard(graph, Mesh(tp=2, sequence=True))
    down = next(n for n, _ in local.nodes() if n.op == "matmul" and n.module.endswith("q_a_proj"))
    up = next(n for n, _ in local.nodes() if n.op == "matmul" and n.module.endswith("q_b_proj"))
    assert (down.attrs["m"], down.attrs["n"]) == (1024, 1536)
    assert (up.attrs["m"], up.attrs["n"]) == (2048, 128 * 192 // 2)


def test_the_vocabulary_is_split_and_only_row_statistics_are_exchanged():
    graph = forward_of(build("llama3-8b", batch=1, seq=2048, mode="train"))
    local = shard(graph, Mesh(tp=2, sequence=True))
    tables = [v for v in local.values if v.kind is Kind.PARAM and v.type.shape[0] == 128256 // 2]
    assert len(tables) == 2
    logits = [n for n, _ in local.nodes() if n.op == "softmax"]
    assert logits[0].attrs["c"] == 128256 // 2
    stats = [n.attrs["num_bytes"] for n, t in local.nodes() if n.op == "collective" and n.attrs["fn"] == "all_reduce"]
    assert stats == [2 * 4 * 2048]


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("llama3-8b", Plan(tp=2, cp=2, recompute="full")),
        ("gpt2-xl", Plan(tp=5, recompute="selective")),
        ("deepseek-v3", Plan(tp=2, dp=4, ep=8, precision="fp8", recompute="selective:mla_up_proj+mlp")),
        ("gpt-oss-120b", Plan(dp=8, ep=8, precision="mxfp8")),
        ("mixtral-8x7b", Plan(tp=2, dp=4, ep=4, etp=2)),
        ("gemma3-27b", Plan(tp=4)),
    ],
)
def test_every_sharded_training_graph_is_well_formed(model, plan):
    seq = 1024 if model == "gpt2-xl" else 2048
    verify(partition(build(model, batch=1, seq=seq, mode="train"), plan).graph)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_inference_graphs_are_sharded_too_with_their_caches(mode):
    sizes = {"kv": 1024} if mode == "decode" else {"seq": 1024}
    graph = build("llama3-8b", batch=4, mode=mode, **sizes)
    local = shard(graph, Mesh(tp=4))
    verify(local)
    assert products(local) * 4 == pytest.approx(products(graph), rel=0.01)
    if mode == "decode":
        caches = [v for v in local.values if v.name.startswith("past_key_values")]
        assert {v.type.shape[1] for v in caches} == {2}


def test_an_op_without_a_rule_is_refused_by_name():
    made = Builder("odd")
    x = made.input("x", tensor((8, 8)))
    made.node("linalg", [x], [tensor((8, 8))], fn="qr", n=8, batch=1)
    with pytest.raises(PlanError, match="no sharding rule for op 'linalg'"):
        shard(made.finish(), Mesh(tp=2))


def test_dims_are_followed_through_views():
    assert reshaped((2, 2048, 4096), (4096, 4096), 1, 2048) == 0
    assert reshaped((4096, 4096), (2, 2048, 4096), 0, 2048) == 1
    assert reshaped((1, 2048, 4096), (1, 2048, 32, 128), 2, 2048) == 2
    assert permuted((1, 2048, 32, 128), (1, 32, 2048, 128), 2) == 1
    assert pieces(1024, 16, 128) == 128
    assert pieces(1024, 4, 128) == 256


def test_a_gather_over_tensor_ranks_carries_the_whole_activation():
    graph = forward_of(build("llama3-8b", batch=1, seq=2048, mode="train"))
    for tp in (2, 8):
        local = shard(graph, Mesh(tp=tp, sequence=True))
        layer = [n for item in local.items if isinstance(item, Block) for n in item.nodes if n.op == "collective"]
        assert {n.attrs["num_bytes"] for n in layer if n.attrs["fn"] == "all_gather"} == {2048 * 4096 * 2}
        assert {n.attrs["num_bytes"] for n in layer if n.attrs["fn"] == "reduce_scatter"} == {2048 * 4096 * 2}
