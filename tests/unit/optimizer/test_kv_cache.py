"""Key-value caches of transformers through recorded calls: grown, filled, sliding, made by the call, and generation."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))

from compare import alike
from recorder import TapeExecutor

from ridgeline.engine.drop_in import Optimized, Plan
from ridgeline.engine.replay.inference import Graphed, graph_inference
from ridgeline.optimizer import backend
from ridgeline.optimizer.rewrites import recommended


def _model(sliding: bool) -> Any:
    given = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
             "num_key_value_heads": 1, "vocab_size": 64, "head_dim": 16, "max_position_embeddings": 64}  # fmt: skip
    torch.manual_seed(0)
    if sliding:
        return transformers.MistralForCausalLM(transformers.MistralConfig(**given, sliding_window=6)).eval()
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**given)).eval()


def _dynamic(model: Any) -> Any:
    return transformers.DynamicCache(config=model.config)


def _static(model: Any) -> Any:
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    cache.early_initialization(1, 1, 16, torch.float32, torch.device("cpu"))
    return cache


def _filled(model: Any, make: Callable[[Any], Any], num: int = 4) -> Any:
    cache = make(model)
    with torch.no_grad():
        model(torch.arange(num)[None], past_key_values=cache, use_cache=True)
    return cache


def _recorded(model: Any, *args: Any, **kwargs: Any) -> tuple[Any, Graphed]:
    graphed = graph_inference(model, args, kwargs, model, executor=TapeExecutor())
    return Optimized(model, [Plan(graphed.signature, graphed)]), graphed


def _token(value: int) -> torch.Tensor:
    return torch.tensor([[value]])


@pytest.mark.parametrize("sliding", [False, True], ids=["full", "sliding"])
def test_a_cache_that_grows_holds_the_new_tensors_after_a_replay(sliding: bool) -> None:
    model = _model(sliding)
    fast, graphed = _recorded(model, _token(1), past_key_values=_filled(model, _dynamic), use_cache=True)
    with torch.no_grad():
        for value in range(3):
            mine, theirs = _filled(model, _dynamic), _filled(model, _dynamic)
            a = fast(_token(value), past_key_values=mine, use_cache=True)
            b = model(_token(value), past_key_values=theirs, use_cache=True)
            assert a.past_key_values is mine
            assert mine.get_seq_length() == theirs.get_seq_length() == 5
            assert alike(a.logits, b.logits, exact=True)
            assert alike(mine.layers, theirs.layers, exact=True)
            c = fast(_token(9), past_key_values=mine, use_cache=True)  # one longer: the model itself
            d = model(_token(9), past_key_values=theirs, use_cache=True)
            assert alike(c.logits, d.logits, exact=True)
    assert graphed.replays == 3


def test_a_cache_that_is_filled_is_written_in_place() -> None:
    model = _model(False)
    mine, theirs = _filled(model, _static), _filled(model, _static)
    fast, graphed = _recorded(model, _token(1), past_key_values=mine, use_cache=True)
    with torch.no_grad():
        for value in range(5):
            a = fast(_token(value), past_key_values=mine, use_cache=True)
            b = model(_token(value), past_key_values=theirs, use_cache=True)
            assert alike(a.logits, b.logits, exact=True)
            assert alike(mine.layers, theirs.layers, exact=True)
    assert graphed.replays == 5


def test_a_window_that_counts_in_python_is_replayed_only_at_the_same_count() -> None:
    model = _model(True)
    mine, theirs = _filled(model, _static), _filled(model, _static)
    fast, graphed = _recorded(model, _token(1), past_key_values=mine, use_cache=True)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for value in range(6):  # the window is full on the way
            a = fast(_token(value), past_key_values=mine, use_cache=True)
            b = model(_token(value), past_key_values=theirs, use_cache=True)
            assert alike(a.logits, b.logits, exact=True)
            assert alike(mine.layers, theirs.layers, exact=True)
    assert graphed.replays == 1


def test_a_cache_that_the_call_makes_is_new_every_time() -> None:
    model = _model(False)
    ids = torch.arange(5)[None]
    fast, graphed = _recorded(model, ids, use_cache=True)
    with torch.no_grad():
        results = [fast(ids + i, use_cache=True) for i in range(2)]
        for i, result in enumerate(results):
            theirs = model(ids + i, use_cache=True)
            assert type(result) is type(theirs)
            assert alike(result.logits, theirs.logits, exact=True)
            assert alike(result.past_key_values.layers, theirs.past_key_values.layers, exact=True)
    assert results[0].past_key_values is not results[1].past_key_values
    assert graphed.replays == 2


def test_generation_runs_through_the_optimized_model() -> None:
    model = _model(False)
    prompt = torch.arange(1, 5)[None]
    seen: list[Any] = []
    fast, _ = _recorded(model, prompt)
    plain = model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
    watched = type(fast).__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs)
        return watched(self, *args, **kwargs)

    type(fast).__call__ = call  # type: ignore[method-assign]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert torch.equal(fast.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0), plain)
    finally:
        del type(fast).__call__
    assert len(seen) == 6


def _wide(num_layers: int) -> Any:
    torch.manual_seed(0)
    given = {"num_hidden_layers": num_layers, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 300, "head_dim": 64, "max_position_embeddings": 64}  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**given)).eval()


def _roomy(model: Any) -> Any:
    return transformers.StaticCache(config=model.config, max_cache_len=40)


def _step(num_layers: int, monkeypatch: Any) -> Counter[str]:
    """The calls of a rewritten step, after it was run beside the model for some tokens and agreed."""
    torch._dynamo.reset()
    seen: list[Any] = []
    monkeypatch.setattr(backend, "_lowered", lambda ctx, *_: seen.append(ctx) or ctx.gm.forward)
    model = _wide(num_layers)
    mine, theirs = (_filled(model, _roomy) for _ in range(2))
    fast = backend.compiled(model, rewrites=recommended("inference", "none", "cuda"))
    with torch.no_grad():
        for value in range(4):
            a = fast(_token(value), past_key_values=mine, use_cache=True)
            b = model(_token(value), past_key_values=theirs, use_cache=True)
            torch.testing.assert_close(a.logits, b.logits, rtol=1e-4, atol=1e-5)
    for ours, meant in zip(mine.layers, theirs.layers, strict=True):
        torch.testing.assert_close((ours.keys, ours.values), (meant.keys, meant.values), rtol=1e-4, atol=1e-5)
    assert int(mine.get_seq_length()) == int(theirs.get_seq_length()) == 8
    assert len(seen) == 1, "one graph for all tokens"
    names = (str(getattr(n.target, "__name__", n.target)) for n in seen[0].graph.nodes if n.op.startswith("call"))
    return Counter(names) - Counter({"_log_api_usage_once": 9})


def test_a_layer_of_a_decoding_step_over_a_static_cache_is_seven_launches(monkeypatch: Any) -> None:
    pytest.importorskip("triton")
    two, three = _step(2, monkeypatch), _step(3, monkeypatch)
    views = {"columns", "view", "transpose", "reshape", "getitem", "position_view"}
    layer = {name: num for name, num in (three - two).items() if name not in views}
    assert layer == {"product": 4, "rope_append.default": 1, "attended": 1}  # attention is two
    assert {name: two[name] for name in ("num_seen", "_foreach_add_", "le", "add_", "copied_position")} == {
        "num_seen": 1, "_foreach_add_": 1, "le": 0, "add_": 0, "copied_position": 0,
    }  # fmt: skip
