"""Decoding over caches whose windows slide: every token replayed, bit for bit what the model computes by itself."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))

from compare import alike
from recorder import TapeExecutor

from ridgeline.engine.compat import transformers as sliding
from ridgeline.engine.compat.transformers import Sliding, Standing, stood_in
from ridgeline.engine.drop_in import Optimized, Plan, RunsEagerly, slide
from ridgeline.engine.example_inputs import Inputs
from ridgeline.engine.replay.inference import Graphed, graph_inference
from ridgeline.errors import NotGraphable
from ridgeline.optimizer.request import optimize

WINDOW = 6
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "head_dim": 16,
    "num_key_value_heads": 1, "vocab_size": 64, "max_position_embeddings": 128,
}  # fmt: skip
TYPES = ["sliding_attention", "full_attention"]


def _mistral(window: int) -> Any:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=window))


def _gemma2(window: int) -> Any:
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, sliding_window=window, layer_types=TYPES))


def _gemma3(window: int) -> Any:
    config = transformers.Gemma3TextConfig(**SIZES, sliding_window=window, layer_types=TYPES)
    return transformers.Gemma3ForCausalLM(config)


def _gpt_oss(window: int) -> Any:
    config = transformers.GptOssConfig(
        **SIZES, sliding_window=window, layer_types=TYPES, num_local_experts=4, num_experts_per_tok=2
    )
    return transformers.GptOssForCausalLM(config)


def _llama4(window: int) -> Any:
    config = transformers.Llama4TextConfig(
        **SIZES, intermediate_size_mlp=48, attention_chunk_size=window, num_local_experts=2, num_experts_per_tok=1,
        layer_types=["chunked_attention", "full_attention"],
    )  # fmt: skip
    return transformers.Llama4ForCausalLM(config)


FAMILIES = {"mistral": _mistral, "gemma2": _gemma2, "gemma3": _gemma3, "gpt-oss": _gpt_oss, "llama4": _llama4}


def _model(family: str = "mistral", window: int = WINDOW) -> Any:
    torch.manual_seed(0)
    return FAMILIES[family](window).eval()


def _filled(model: Any, num: int, batch: int = 1, room: int = 64) -> Any:
    cache = transformers.StaticCache(config=model.config, max_cache_len=room)
    with torch.no_grad():
        model(torch.arange(num * batch).view(batch, num) % 64, past_key_values=cache, use_cache=True)
    return cache


def _token(value: int, batch: int = 1) -> torch.Tensor:
    return torch.tensor([[value % 64], [(7 * value + 3) % 64]][:batch])


def _record(*given: Any) -> Graphed:
    return graph_inference(*given, executor=TapeExecutor())


def _fast(model: Any, cache: Any, batch: int = 1, **more: Any) -> Any:
    stood = stood_in(model, Inputs((_token(1, batch),), {"past_key_values": cache, "use_cache": True, **more}))
    assert stood is not None
    graphed = _record(model, stood.args, stood.kwargs, model)
    return slide(Optimized(model, [Plan(graphed.signature, graphed)]), Sliding(model, stood, _record))


def _replays(fast: Any) -> int:
    return sum(plan.call.replays for plan in fast.plans)


def _beside(fast: Any, model: Any, mine: Any, theirs: Any, values: Any, batch: int = 1) -> None:
    """Decodes with both, and compares results, caches and counts after every token."""
    with torch.no_grad():
        for value in values:
            a = fast(_token(value, batch), past_key_values=mine, use_cache=True)
            b = model(_token(value, batch), past_key_values=theirs, use_cache=True)
            assert a.past_key_values is mine and a["past_key_values"] is mine
            assert alike(a.logits, b.logits, exact=True), value
            assert alike(mine.layers, theirs.layers, exact=True), value
            assert type(mine.get_seq_length()) is type(theirs.get_seq_length())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_token_is_replayed_before_and_after_the_window_fills(family: str) -> None:
    model, batch = _model(family), 2
    mine, theirs = (_filled(model, 3, batch) for _ in range(2))
    fast = _fast(model, mine, batch)
    _beside(fast, model, mine, theirs, range(3 * WINDOW), batch)
    assert _replays(fast) == 3 * WINDOW and not fast.fallbacks
    assert len(fast.plans) == 2


@pytest.mark.parametrize(("window", "room", "prompt"), [(6, 4, 2), (40, 64, 3), (6, 64, 6), (6, 64, 9), (1, 64, 2)])
def test_windows_smaller_and_larger_than_the_tokens_are_replayed_alike(window: int, room: int, prompt: int) -> None:
    model = _model(window=window)
    mine, theirs = (_filled(model, prompt, room=room) for _ in range(2))
    fast = _fast(model, mine)
    _beside(fast, model, mine, theirs, range(14))
    assert _replays(fast) == 14 and not fast.fallbacks


def test_a_cache_that_is_reset_begins_anew_and_needs_no_third_capture() -> None:
    model = _model("gemma3")
    mine, theirs = (_filled(model, 4) for _ in range(2))
    fast = _fast(model, mine)
    for _ in range(3):
        _beside(fast, model, mine, theirs, range(10))
        for cache in (mine, theirs):
            cache.reset()
    assert _replays(fast) == 30 and len(fast.plans) == 2


def test_two_caches_in_turns_at_different_counts_are_told_apart() -> None:
    model = _model("gemma2")
    pairs = [tuple(_filled(model, num) for _ in range(2)) for num in (2, 5)]
    fast = _fast(model, pairs[0][0])
    for value in range(12):
        for mine, theirs in pairs:
            _beside(fast, model, mine, theirs, [value])
    assert _replays(fast) >= 20


def test_a_call_that_returns_a_tuple_returns_the_cache_itself_in_it() -> None:
    model = _model()
    mine, theirs = (_filled(model, 3) for _ in range(2))
    fast = _fast(model, mine, return_dict=False)
    with torch.no_grad():
        for value in range(WINDOW):
            a, b = (run(_token(value), past_key_values=cache, use_cache=True, return_dict=False)
                    for run, cache in ((fast, mine), (model, theirs)))  # fmt: skip
            assert type(a) is tuple and a[1] is mine and torch.equal(a[0], b[0])
    assert _replays(fast) == WINDOW


def test_a_mask_that_the_host_compares_with_the_window_is_not_captured_once_it_is_full() -> None:
    model, mask = _model(), torch.ones(1, 64, dtype=torch.long)
    mine, theirs = (_filled(model, 3) for _ in range(2))
    fast = _fast(model, mine, attention_mask=mask)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RunsEagerly)
        for value in range(2 * WINDOW):
            a, b = (run(_token(value), past_key_values=cache, use_cache=True, attention_mask=mask)
                    for run, cache in ((fast, mine), (model, theirs)))  # fmt: skip
            assert torch.equal(a.logits, b.logits)
            assert alike(mine.layers, theirs.layers, exact=True)
    assert _replays(fast) == WINDOW - 3 and fast.fallbacks


def test_a_count_that_somebody_sets_is_the_count_of_the_next_token() -> None:
    model = _model()
    mine, theirs = (_filled(model, 3) for _ in range(2))
    fast = _fast(model, mine)
    _beside(fast, model, mine, theirs, range(2))
    for cache in (mine, theirs):
        for layer in cache.layers:
            layer.cumulative_length_int += 20
    _beside(fast, model, mine, theirs, range(3))
    assert _replays(fast) == 5


def test_tensors_that_are_replaced_are_those_that_are_written() -> None:
    model = _model()
    mine, theirs = (_filled(model, 3) for _ in range(2))
    fast = _fast(model, mine)
    _beside(fast, model, mine, theirs, range(2))
    for layer in mine.layers:
        layer.keys = layer.keys.clone()
    _beside(fast, model, mine, theirs, range(4))


def test_layers_that_do_not_agree_on_their_count_run_as_the_model() -> None:
    model = _model()
    mine, theirs = (_filled(model, 3) for _ in range(2))
    fast = _fast(model, mine)
    for cache in (mine, theirs):
        cache.layers[1].cumulative_length_int += 1
    with pytest.warns(RunsEagerly):
        _beside(fast, model, mine, theirs, [1])
    assert _replays(fast) == 0


def test_several_tokens_at_once_run_as_the_model_and_count() -> None:
    model = _model()
    mine, theirs = (_filled(model, 3) for _ in range(2))
    fast = _fast(model, mine)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RunsEagerly)
        for num in (2, 5, 1, 4):
            ids = torch.arange(num)[None]
            a, b = (run(ids, past_key_values=cache, use_cache=True) for run, cache in ((fast, mine), (model, theirs)))
            assert alike(a.logits, b.logits, exact=True)
            assert alike(mine.layers, theirs.layers, exact=True)
    assert _replays(fast) == 1


def test_a_model_that_has_changed_runs_as_it_is_and_is_not_captured_over() -> None:
    model = _model()
    mine, theirs = (_filled(model, 3) for _ in range(2))
    fast = _fast(model, mine)
    _beside(fast, model, mine, theirs, range(1))
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 2)
    with pytest.warns(RunsEagerly, match="lm_head"):
        _beside(fast, model, mine, theirs, range(2))
    assert _replays(fast) == 1 and len(fast.plans) == 1


def test_a_warning_names_the_window_and_the_line_of_the_call() -> None:
    model = _model()
    mine = _filled(model, 3)
    fast = _fast(model, mine)
    with torch.no_grad(), pytest.warns(RunsEagerly, match="a tensor") as said:
        fast(torch.arange(2)[None], past_key_values=mine, use_cache=True)
    assert {Path(each.filename).name for each in said} == {Path(__file__).name}


def test_an_optimized_model_decodes_past_its_window_as_eager_does() -> None:
    model = _model("gemma3")
    mine, theirs = (_filled(model, 4) for _ in range(2))
    given = {"past_key_values": mine, "use_cache": True}
    fast = optimize(model, (_token(1),), given, budget_s=2, use_cache=False)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RunsEagerly)  # without a GPU a full window is not recorded
        for value in range(2 * WINDOW):
            a = fast(_token(value), past_key_values=mine, use_cache=True)
            b = model(_token(value), past_key_values=theirs, use_cache=True)
            assert a.past_key_values is mine
            torch.testing.assert_close(a.logits, b.logits, rtol=1e-4, atol=1e-5)
    for ours, meant in zip(mine.layers, theirs.layers, strict=True):
        torch.testing.assert_close((ours.keys, ours.values), (meant.keys, meant.values), rtol=1e-4, atol=1e-5)
    assert mine.get_seq_length() == theirs.get_seq_length() == 4 + 2 * WINDOW
    assert not fast.plans or any("sliding windows are counted" in note for note in fast.receipt.notes)


def test_a_method_that_is_replaced_is_called() -> None:
    model = _model()
    mine = _filled(model, 3)
    fast = _fast(model, mine)
    cls = type(mine.layers[0])
    kept, called = cls.update, []
    cls.update = lambda self, *given, **named: called.append(1) or kept(self, *given, **named)
    try:
        with torch.no_grad(), pytest.warns(RunsEagerly):
            fast(_token(1), past_key_values=mine, use_cache=True)
    finally:
        cls.update = kept
    assert len(called) == 2 and _replays(fast) == 0


def test_what_is_not_known_word_for_word_is_not_stood_in_for(monkeypatch: Any) -> None:
    model = _model()
    cache = _filled(model, 3)
    assert Standing.of(cache) is not None
    cache.layers[0].update = lambda *given: None
    assert Standing.of(cache) is None
    cache = _filled(model, 3)
    cache.update = cache.update  # a method that knows the cache itself
    assert Standing.of(cache) is None
    monkeypatch.setattr(sliding, "KNOWN", frozenset())
    sliding.kind.cache_clear()
    try:
        assert Standing.of(_filled(model, 3)) is None
    finally:
        sliding.kind.cache_clear()


def test_a_prompt_is_optimized_with_the_cache_itself() -> None:
    model = _model()
    cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    cache.early_initialization(1, 1, 16, torch.float32, torch.device("cpu"))
    prompt = torch.arange(4)[None]
    assert stood_in(model, Inputs((prompt,), {"past_key_values": cache, "use_cache": True})) is None
    assert stood_in(model, Inputs((_token(1),), {"past_key_values": cache, "use_cache": True})) is not None
    assert cache.get_seq_length() == 0 and not cache.layers[0].keys.any()


def test_a_window_that_cannot_be_captured_runs_as_the_model_and_is_not_tried_again() -> None:
    model = _model()
    mine, theirs = (_filled(model, 3) for _ in range(2))
    fast, tried = _fast(model, mine), []

    def refuse(*given: Any) -> Graphed:
        tried.append(1)
        raise NotGraphable("no room")

    stood = stood_in(model, Inputs((_token(1),), {"past_key_values": mine, "use_cache": True}))
    assert stood is not None
    slide(fast, Sliding(model, stood, refuse))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RunsEagerly)
        _beside(fast, model, mine, theirs, range(8))
    assert _replays(fast) == 3 and len(tried) == 1 and fast.fallbacks


def test_other_layers_of_a_cache_are_the_ones_of_the_cache() -> None:
    model = _model("gemma3")
    cache = _filled(model, 3)
    standing = Standing.of(cache)
    assert standing is not None
    assert standing.cache.layers[1] is cache.layers[1] and standing.cache.layers[0] is not cache.layers[0]
    assert standing.cache.layers[0].keys is cache.layers[0].keys
