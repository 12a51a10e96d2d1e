"""Decoding over windows that slide on a real GPU: every token replayed, with what eager computes, and faster."""

import importlib
import time

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
transformers = pytest.importorskip("transformers")

import ridgeline
from ridgeline.engine.compat.transformers import HOME, KNOWN, digest
from ridgeline.engine.drop_in import RunsEagerly
from ridgeline.engine.replay.inference import Graphed

WINDOW, NUM_TOKENS, PROMPT = 16, 40, 5
SIZES = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 320, "head_dim": 64, "max_position_embeddings": 256}  # fmt: skip
TYPES = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]


def _model(family):
    torch.manual_seed(0)
    if family == "mistral":
        made = transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=WINDOW))
    else:
        config = transformers.Gemma3TextConfig(**SIZES, sliding_window=WINDOW, layer_types=TYPES)
        made = transformers.Gemma3ForCausalLM(config)
    return made.eval().to("cuda", torch.bfloat16)


def _filled(model):
    cache = transformers.StaticCache(config=model.config, max_cache_len=128)
    with torch.no_grad():
        model(torch.arange(PROMPT, device="cuda")[None], past_key_values=cache, use_cache=True)
    return cache


def _token(value):
    return torch.tensor([[(37 * value + 5) % 320]], device="cuda")


def _decoded(run, cache):
    """The logits of some tokens in a row, and seconds a token in the second half of them, when the window is full."""
    logits = []
    with torch.no_grad():
        for value in range(NUM_TOKENS):
            if value == NUM_TOKENS // 2:
                torch.cuda.synchronize()
                began = time.perf_counter()
            found = run(_token(value), past_key_values=cache, use_cache=True)
            assert found.past_key_values is cache
            logits.append(found.logits.float().clone())
        torch.cuda.synchronize()
    return torch.cat(logits, 1), (time.perf_counter() - began) / (NUM_TOKENS - NUM_TOKENS // 2)


def test_the_layers_of_this_transformers_are_known():
    assert digest(importlib.import_module(HOME).StaticSlidingWindowLayer) in KNOWN


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_tokens_past_the_window_are_replayed_and_agree_with_eager(family):
    model = _model(family)
    caches = [_filled(model) for _ in range(3)]
    meant, eager_s = _decoded(model, caches[1])
    fast = ridgeline.optimize(model, (_token(1),), {"past_key_values": caches[0], "use_cache": True}, budget_s=30,
                              use_cache=False)  # fmt: skip
    assert int(caches[0].get_seq_length()) == PROMPT
    before = _replays(fast)
    found, fast_s = _decoded(fast, caches[0])
    wide, _ = _decoded(_model(family).float(), _as_float(caches[2]))
    plans = [plan for plan in fast.plans if isinstance(plan.call, Graphed)]
    print(f"{family}: eager {eager_s * 1e3:.2f} ms, {fast_s * 1e3:.2f} ms a token with a full window; "
          f"plans {[(plan.name, plan.call.replays, plan.call.misses) for plan in plans]}")  # fmt: skip
    off, own = ((each.double() - wide.double()).norm() / wide.double().norm() for each in (found, meant))
    assert off <= 2 * own + 1e-3, (off, own)
    assert int(caches[0].get_seq_length()) == int(caches[1].get_seq_length()) == PROMPT + NUM_TOKENS
    assert not fast.fallbacks
    assert _replays(fast) - before == NUM_TOKENS or len(plans) < len(fast.plans)
    assert fast_s < eager_s


def test_what_was_recorded_for_a_full_window_is_bit_for_bit_what_eager_computes():
    """The second half of the decoding is the model itself, recorded, where the search's own answer is of no concern."""
    from ridgeline.engine.compat.transformers import Sliding, stood_in
    from ridgeline.engine.drop_in import Optimized, Plan, slide
    from ridgeline.engine.example_inputs import Inputs
    from ridgeline.engine.replay.inference import graph_inference

    model = _model("gemma3")
    mine, theirs = _filled(model), _filled(model)
    stood = stood_in(model, Inputs((_token(1),), {"past_key_values": mine, "use_cache": True}))
    assert stood is not None
    made = graph_inference(model, stood.args, stood.kwargs, model)
    fast = slide(Optimized(model, [Plan(made.signature, made)]), Sliding(model, stood))
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("warnings.warn", _raise)
            (found, _), (meant, _) = _decoded(fast, mine), _decoded(model, theirs)
        assert torch.equal(found, meant)
        for ours, other in zip(mine.layers, theirs.layers, strict=True):
            assert torch.equal(ours.keys, other.keys) and torch.equal(ours.values, other.values)
        mine.reset(), theirs.reset()
    assert _replays(fast) == 2 * NUM_TOKENS


def _replays(fast):
    return sum(plan.call.replays for plan in fast.plans if isinstance(plan.call, Graphed))


def _raise(said, category=UserWarning, *given, **named):
    if category is RunsEagerly:
        raise AssertionError(said)


def _as_float(cache):
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.float(), layer.values.float()
        layer.dtype = torch.float32
    return cache
