"""Captured graphs against what the GPU really runs: kernels, busy time and peak memory."""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import ridgeline as rl
from ridgeline.bench.clock import kernels_of


def _llama(layers: int = 3):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        intermediate_size=8192,
        vocab_size=32000,
    )
    with torch.device("cuda"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


@pytest.fixture
def before():
    """Bytes that earlier tests left allocated: library workspaces, and what a failure's traceback holds on to."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def _ids():
    return torch.randint(0, 32000, (2, 1024), device="cuda")


def test_inference_busy_time_and_memory_of_a_small_llama(before):
    model, ids = _llama().eval(), _ids()
    prediction = rl.predict(rl.capture(model, kwargs={"input_ids": ids, "use_cache": False}), on="h200")

    def step():
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    busy_s = sum(k[1] for k in kernels_of([step])[0])
    step()
    assert prediction.busy_s == pytest.approx(busy_s, rel=0.2)
    assert prediction.peak_bytes == pytest.approx(torch.cuda.max_memory_allocated() - before, rel=0.05, abs=70e6)


def test_training_peak_memory_of_a_small_llama(before):
    model, ids = _llama(2).train(), _ids()
    graph = rl.capture(
        model, kwargs={"input_ids": ids, "labels": ids, "use_cache": False}, mode="train", optimizer="adamw"
    )
    prediction = rl.predict(graph, on="h200")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        torch.cuda.reset_peak_memory_stats() if _ == 1 else None
    assert prediction.peak_bytes == pytest.approx(torch.cuda.max_memory_allocated() - before, rel=0.05, abs=70e6)
