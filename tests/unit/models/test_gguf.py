"""Graphs of GGUF headers: dimensions from tensors, weights by their bytes."""

from __future__ import annotations

import pytest

from ridgeline.cost.estimate import estimate
from ridgeline.errors import ModelError
from ridgeline.hardware import device
from ridgeline.models import build
from ridgeline.models.gguf import decoder_of, network
from ridgeline.models.llm import shape_of

BITS = {"q4_k": 4.5, "q6_k": 6.5625, "f16": 16.0}


def header(arch="llama", kind="q4_k", *, layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=128256):
    """The facts and tensors of llama3.2-1b, or of a network like it."""
    head = hidden // heads
    shapes = {"token_embd": (vocab, hidden)}
    for layer in range(layers):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in {
            "attn_q": (hidden, hidden), "attn_k": (kv_heads * head, hidden), "attn_v": (kv_heads * head, hidden),
            "attn_output": (hidden, hidden), "ffn_gate": (ffn, hidden), "ffn_up": (ffn, hidden),
            "ffn_down": (hidden, ffn)}.items()}  # fmt: skip
    tensors = {f"{name}.weight": (s, s[0] * s[1] * BITS["q6_k" if "attn_v" in name else kind] / 8) for name, s in
               shapes.items()}  # fmt: skip
    norms = ["output_norm", *(f"blk.{i}.{name}" for i in range(layers) for name in ("attn_norm", "ffn_norm"))]
    tensors |= {f"{name}.weight": ((hidden,), hidden * 4.0) for name in norms} | {"rope_freqs.weight": ((32,), 128.0)}
    facts = {"block_count": layers, "attention.head_count": heads, "embedding_length": hidden}
    return {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in facts.items()}, tensors


def busy_s(graph):
    return estimate(graph, device("h200"), "eager").busy_s


def test_a_header_of_a_network_of_the_zoo_makes_its_shape_and_its_price():
    facts, tensors = header(kind="f16")
    made, zoo = decoder_of("llama", facts, tensors), shape_of("llama3.2-1b")
    assert (made.layers, made.hidden, made.hkv, made.d, made.ffn, made.vocab, made.tied) == (
        zoo.layers, zoo.hidden, zoo.hkv, zoo.d, zoo.ffn, zoo.vocab, zoo.tied)  # fmt: skip
    graph = network("llama", facts, {k: (s, 2.0 * s[0] * (s[1] if len(s) > 1 else 1)) for k, (s, _) in tensors.items()},
                    seq=512)  # fmt: skip
    assert busy_s(graph) == pytest.approx(busy_s(build("llama3.2-1b", seq=512)), rel=1e-6)


def test_quantized_weights_are_priced_by_their_bytes():
    facts, narrow = header()
    wide = network("llama", *header(kind="f16"), mode="decode", kv=512)
    packed = network("llama", facts, narrow, mode="decode", kv=512)
    assert packed.num_params == wide.num_params
    stored = sum(size for name, (shape, size) in narrow.items() if len(shape) == 2)
    assert packed.param_bytes == pytest.approx(stored, rel=0.01)
    assert busy_s(packed) < 0.7 * busy_s(wide)
    long = [network("llama", *header(kind=kind), seq=2048) for kind in ("q4_k", "f16")]
    assert busy_s(long[0]) > busy_s(long[1])  # many rows: weights are unpacked before the product


def test_what_is_not_known_is_said_with_what_is():
    facts, tensors = header("rwkv6")
    with pytest.raises(ModelError, match=r"'rwkv6'; known are deepseek2.*llama.*qwen3"):
        network("m", facts, tensors)
    facts, tensors = header()
    with pytest.raises(ModelError, match="this variant is not known here"):
        network("m", facts, {**tensors, "blk.0.extra.weight": ((8192, 8192), 1e8)})
    with pytest.raises(ModelError, match="for inference"):
        network("m", facts, tensors, mode="train")
