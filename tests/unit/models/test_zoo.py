"""The zoo: every network builds in every mode, holds together, frees its memory and refuses what cannot be."""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.errors import ModelError
from ridgeline.graph import Graph, Kind, Node, Phase
from ridgeline.graph.verify import verify
from ridgeline.models import ModelCard, build, models

_SPEC = importlib.util.spec_from_file_location("liveness", Path(__file__).parent.parent / "graph" / "liveness.py")
assert _SPEC is not None and _SPEC.loader is not None
liveness = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(liveness)

CARDS = {card.name: card for card in models()}
LLMS = [card.name for card in models() if card.family in ("llm", "moe")]


def flops(graph: Graph) -> int:
    return sum(_node_flops(node) * times for node, times in graph.nodes())


def _node_flops(node: Node) -> int:
    a = node.attrs
    if node.op in ("matmul", "grouped_matmul"):
        return 2 * a.get("b", 1) * a["m"] * a["n"] * a["k"]
    if node.op == "attention":
        return 2 * a["b"] * a["h"] * a["s"] * a["skv"] * (a["d"] + a.get("dv", a["d"]))
    if node.op == "conv":
        where = a["spatial"] if a["transposed"] else a["out_spatial"]
        return 2 * a["n"] * math.prod(where) * a["o"] * a["c"] // a["groups"] * math.prod(a["kernel"])
    return 0


def nodes(graph: Graph, op: str) -> list[Node]:
    return [node for node, _ in graph.nodes() if node.op == op]


def test_the_zoo_holds_every_family() -> None:
    families = {card.family for card in models()}
    wanted = "llm moe state-space encoder encoder-decoder vision multimodal detection segmentation diffusion speech"
    assert families >= {*wanted.split(), "recommender", "driving", "gnn"}
    assert len(CARDS) >= 50


@pytest.mark.parametrize("name", CARDS)
def test_every_mode_builds_a_sound_graph_with_the_published_parameters(name: str) -> None:
    card = CARDS[name]
    for mode in card.modes:
        graph = verify(build(name, mode=mode))
        assert graph.num_params == card.num_params
        assert graph.mode == mode
        assert (Phase.OPTIMIZER in {n.phase for n, _ in graph.nodes()}) == (mode == "train")


@pytest.mark.parametrize("name", CARDS)
def test_memory_is_freed_exactly_once_and_never_used_after(name: str) -> None:
    for mode in CARDS[name].modes:
        graph = build(name, mode=mode)
        assert liveness.full_peak_bytes(graph) == liveness.short_peak_bytes(graph)


@pytest.mark.parametrize("name", [name for name, card in CARDS.items() if "train" in card.modes])
def test_every_trained_parameter_has_a_gradient_and_adamw_two_states(name: str) -> None:
    graph = build(name, mode="train")
    trained, with_gradient = Counter[str](), Counter[str]()
    for v in graph.values:
        if v.alias is None and v.kind in (Kind.PARAM, Kind.GRAD):
            counts = trained if v.kind is Kind.PARAM else with_gradient
            counts[v.name.removesuffix(".grad")] += v.type.numel * v.count
    idle = trained - with_gradient
    assert set(idle) <= {"wav2vec2.masked_spec_embed"}  # used only where spans of audio are masked
    assert not with_gradient - trained
    states = sum(v.type.numel * v.count for v in graph.values if v.kind is Kind.STATE)
    assert states == 2 * sum(with_gradient.values())


def test_decode_attends_to_one_more_than_the_cache_and_replaces_it() -> None:
    graph = build("llama3-8b", mode="decode", batch=4, kv=1000)
    (attention,) = nodes(graph, "attention")
    assert (attention.attrs["s"], attention.attrs["skv"], attention.attrs["causal"]) == (1, 1001, False)
    cats = [n for n in nodes(graph, "copy") if n.attrs["fn"] == "cat" and n.attrs["dim"] == -2]
    assert len(cats) == 2
    cache = [v for v in graph.values if v.name.startswith("past_key_values")]
    assert [v.type.shape for v in cache] == [(4, 8, 1000, 128)] * 2 and all(v.count == 32 for v in cache)
    assert {v.id for v in cache} == {f for c in cats for f in c.frees} & {v.id for v in cache}


def test_decode_at_a_sequence_length_means_that_many_cached_tokens() -> None:
    (attention,) = nodes(build("llama3-8b", mode="decode", seq=77), "attention")
    assert attention.attrs["skv"] == 78


def test_decode_with_an_empty_cache_is_the_first_token() -> None:
    (attention,) = nodes(build("llama3-8b", mode="decode", kv=0), "attention")
    assert attention.attrs["skv"] == 1


def test_prefill_computes_the_logits_of_the_last_token_alone() -> None:
    def rows(mode: str) -> int:
        return int(nodes(build("llama3-8b", mode=mode, batch=3, seq=128), "matmul")[-1].attrs["m"])

    assert (rows("infer"), rows("prefill")) == (3 * 128, 3)


def test_windows_bound_attention_and_cache() -> None:
    local, full = nodes(build("gemma2-9b", mode="decode", kv=10_000), "attention")
    assert (local.attrs["skv"], full.attrs["skv"]) == (4096, 10_001)


def test_an_expert_layer_runs_its_chosen_experts_as_two_grouped_products() -> None:
    graph = build("mixtral-8x7b", batch=2, seq=100)
    problems = [(n.attrs["groups"], n.attrs["m"], n.attrs["n"], n.attrs["k"]) for n in nodes(graph, "grouped_matmul")]
    assert problems == [(8, 400, 2 * 14336, 4096), (8, 400, 4096, 14336)]


def test_eight_bit_precision_halves_the_weights_and_quantizes_activations() -> None:
    wide, narrow = build("llama3-8b"), build("llama3-8b", precision="fp8")
    assert narrow.num_params == wide.num_params
    assert 0.5 < narrow.param_bytes / wide.param_bytes < 0.6  # embeddings, norms and the head stay wide
    assert len(nodes(narrow, "quantize")) == len(nodes(wide, "matmul")) - 1


@pytest.mark.parametrize("name", [name for name in CARDS if "infer" in CARDS[name].modes])
def test_eight_bit_precision_keeps_the_parameters(name: str) -> None:
    assert verify(build(name, precision="fp8")).num_params == CARDS[name].num_params


def test_precision_sets_every_weight() -> None:
    assert build("resnet50", precision="fp32").param_bytes == 2 * build("resnet50", precision="fp16").param_bytes


def test_spelled_out_norms_have_no_norm_node() -> None:
    graph = build("llama3-8b", fused_norms=False)
    assert not nodes(graph, "norm") and graph.num_params == CARDS["llama3-8b"].num_params


def test_aliases_and_spelling_are_forgiven() -> None:
    assert build("llama3-405b").content_hash == build("LLaMA3.1_405B").content_hash


def test_equal_requests_give_equal_graphs() -> None:
    assert build("mixtral-8x7b", mode="train").content_hash == build("mixtral-8x7b", mode="train").content_hash


def test_language_models_build_in_about_a_millisecond(num_calls: Callable[..., int]) -> None:
    assert num_calls(lambda: build("llama3.1-405b")) < 13_000  # 6,551 without anything remembered


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"name": "llama3-8bb"}, "no network 'llama3-8bb' in the zoo; did you mean 'llama3-8b'"),
        ({"name": "resnet-50"}, "did you mean 'resnet50'"),
        ({"name": "llama3-8b", "mode": "training"}, "no mode 'training'; did you mean 'train'"),
        ({"name": "resnet50", "mode": "decode"}, "no mode 'decode'"),
        ({"name": "llama3-8b", "precision": "bf61"}, "no precision 'bf61'; did you mean 'bf16'"),
        ({"name": "llama3-8b", "optimizer": "adamv"}, "no optimizer 'adamv'; did you mean 'adamw'"),
        ({"name": "llama3-8b", "use_cash": True}, "has no option 'use_cash'; did you mean 'use_cache'"),
        ({"name": "llama3-8b", "use_cache": 3}, "use_cache=3 is a int, not a bool"),
        ({"name": "llama3-8b", "image": 224}, "llama3-8b has no image"),
        ({"name": "llama3-8b", "batch": 0}, "batch=0 must be a whole number ≥ 1, 1 too few"),
        ({"name": "llama3-8b", "seq": -5}, "seq=-5 must be a whole number ≥ 1, 6 too few"),
        ({"name": "llama3-8b", "seq": 3.5}, "seq=3.5 must be a whole number"),
        ({"name": "gpt2-xl", "seq": 1025}, "seq=1025 is 1 more than transformer.wpe.weight holds"),
        ({"name": "gpt2-xl", "mode": "decode", "kv": 1030}, "kv=1030 is 7 more than transformer.wpe.weight holds"),
        ({"name": "bert-large", "seq": 600}, "seq=600 is 88 more than embeddings.position_embeddings.weight holds"),
        ({"name": "vit-b16", "image": 225}, "image=225 is 1 over a multiple of 16"),
        ({"name": "bert-base", "head": "mlp"}, "no head 'mlp'; did you mean 'mlm'"),
        ({"name": "wav2vec2-large", "seq": 100}, "seq=100 samples are 300 fewer than one frame"),
        ({"name": "gcn", "nodes": 0}, "nodes=0 is 1 below the least legal value"),
        ({"name": "llama3-8b", "mode": "train", "precision": "fp8"}, "no fp8 recipe"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(call: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as refused:
        build(**call)
    assert message in str(refused.value)


def _small(card: ModelCard) -> dict[str, int]:
    small = {"seq": 64, "kv": 64}
    sizes = {size: small.get(size, default) for size, default in card.defaults.items()}
    return sizes | ({"seq": 4000} if card.name == "wav2vec2-large" else {})


_NOT_PROPORTIONAL = {"clip-vit-l14", "transformer-xl-base", "transformer-xl-large"}


@given(st.sampled_from(sorted(set(CARDS) - _NOT_PROPORTIONAL)), st.integers(1, 64))
def test_flops_grow_in_proportion_to_the_batch(name: str, batch: int) -> None:
    # CLIP compares every picture with every text: the square of the batch. Rotary tables are made once for all, and so
    # are Transformer-XL's projected positions.
    sizes = _small(CARDS[name])
    one, many = flops(build(name, **sizes)), flops(build(name, batch=batch, **sizes))
    assert many == pytest.approx(batch * one, rel=1e-3)


@given(st.sampled_from(LLMS), st.integers(1, 40), st.integers(1, 1000), st.data())
def test_language_models_build_at_any_legal_size(name: str, batch: int, seq: int, data: st.DataObject) -> None:
    mode = data.draw(st.sampled_from(CARDS[name].modes))
    precision = data.draw(st.sampled_from(["bf16", "fp16", "fp32"]))
    graph = verify(build(name, batch=batch, seq=seq, mode=mode, precision=precision, optimizer="sgd"))
    assert graph.num_params == CARDS[name].num_params


@given(
    st.sampled_from(["vit-b16", "swin-b", "convnext-b", "resnet50", "unet", "dit-xl2"]),
    st.integers(1, 20),
    st.integers(1, 8),
)
def test_vision_models_build_at_any_legal_size(name: str, steps: int, batch: int) -> None:
    verify(build(name, image=32 * steps, batch=batch, mode="train", optimizer="none"))


@given(st.integers(1, 300), st.integers(1, 16))
def test_longer_sequences_never_take_fewer_flops(seq: int, more: int) -> None:
    assert flops(build("mamba2-2.7b", seq=seq + more)) >= flops(build("mamba2-2.7b", seq=seq))
    assert flops(build("llama3.2-1b", seq=seq + more)) > flops(build("llama3.2-1b", seq=seq))


def test_the_guide_lists_every_network_with_its_parameters() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "guide" / "zoo.md").read_text()
    for card in models():
        assert f"`{card.name}`" in guide and f"{card.num_params:,}" in guide
