"""Decoders that a GGUF header describes: dimensions from its facts and tensors, weights by their bytes in the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from ridgeline.dtypes import dtype
from ridgeline.errors import ModelError
from ridgeline.graph import Graph, Kind, TensorType
from ridgeline.models.llm import Decoder, Latent, decoder
from ridgeline.models.moe import Experts

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "deepseek2": {"router": "sigmoid_groups"}, "exaone": {}, "gemma": {"act": "gelu", "embed_scale": True},
    "gemma2": {"act": "gelu", "embed_scale": True, "windows": (1, 0), "final_softcap": True, "score_softcap": True},
    "gemma3": {"act": "gelu", "embed_scale": True, "windows": (1, 1, 1, 1, 1, 0)},
    "gpt-oss": {"windows": (1, 0), "router": "pick_first"}, "gpt2": {"act": "gelu_new", "conv1d": True}, "granite": {},
    "internlm2": {}, "llama": {"windows": (1,)}, "minicpm": {}, "phi3": {"windows": (1,)}, "qwen2": {}, "qwen2moe": {},
    "qwen3": {}, "qwen3moe": {}, "smollm3": {}, "starcoder2": {"act": "gelu", "windows": (1,)},
}  # fmt: skip
"""What the tensors of an architecture do not show; a window of 1 stands for the one in the header."""
ROLES = {
    "embed_tokens": ("token_embd",), "wte": ("token_embd",), "wpe": ("position_embd",), "lm_head": ("output",),
    "q_proj": ("attn_q",), "k_proj": ("attn_k",), "v_proj": ("attn_v",), "qkv_proj": ("attn_qkv",),
    "c_attn": ("attn_qkv",), "o_proj": ("attn_output",), "attn.c_proj": ("attn_output",), "c_fc": ("ffn_up",),
    "mlp.c_proj": ("ffn_down",), "gate_proj": ("ffn_gate",), "up_proj": ("ffn_up",), "down_proj": ("ffn_down",),
    "gate_up_proj": ("ffn_gate", "ffn_up"), "experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
    "experts.down_proj": ("ffn_down_exps",), "shared_experts.gate_proj": ("ffn_gate_shexp",),
    "shared_experts.up_proj": ("ffn_up_shexp",), "shared_experts.down_proj": ("ffn_down_shexp",),
    "q_a_proj": ("attn_q_a",), "q_b_proj": ("attn_q_b",), "kv_a_proj_with_mqa": ("attn_kv_a_mqa",),
    "kv_b_proj": ("attn_kv_b", "attn_k_b", "attn_v_b"),
}  # fmt: skip
"""Weights of the zoo's decoder by the ends of their names, and the tensors of a file they are."""

Tensors = Mapping[str, tuple[tuple[int, ...], float]]
"""By name: the shape, outermost dim first, and the bytes in the file."""


def decoder_of(name: str, facts: Mapping[str, Any], tensors: Tensors) -> Decoder:
    """The decoder of a header; an architecture that is not known is an error that says which are."""
    arch = str(facts.get("general.architecture", ""))
    if arch not in ARCHITECTURES:
        raise ModelError(f"{name}: no network for architecture {arch!r}; known are {', '.join(ARCHITECTURES)}")
    known = dict(ARCHITECTURES[arch])
    router = known.pop("router", "softmax_first")
    last = f"blk.{int(facts.get(f'{arch}.block_count', 1)) - 1}."  # the first may be dense in a mixture of experts

    def fact(key: str, default: int = 0) -> int:
        value = facts.get(f"{arch}.{key}", default)
        return int(value) if isinstance(value, (int, float)) else default

    def rows(tensor: str, axis: int = 0) -> int:
        found = tensors.get(tensor)
        if found is None or len(found[0]) <= axis:
            raise ModelError(f"{name}: a {arch} model without {tensor}: this variant is not known here")
        return found[0][axis]

    def has(tensor: str) -> bool:
        return last + tensor in tensors

    heads, hidden = fact("attention.head_count"), rows("token_embd.weight", 1)
    if heads < 1 or fact("block_count") < 1:
        raise ModelError(f"{name}: the header says nothing of the model's layers or heads")
    latent, experts, wide = None, None, hidden
    if has("attn_kv_a_mqa.weight"):
        rope = fact("rope.dimension_count")
        key = fact("attention.key_length_mla") or fact("attention.key_length")
        value = fact("attention.value_length_mla") or fact("attention.value_length")
        latent = Latent(rows(f"{last}attn_q_a.weight"), fact("attention.kv_lora_rank"), key - rope, rope, value)
        kv_heads, head_dim = heads, key
    elif has("attn_qkv.weight"):
        head_dim = fact("attention.key_length") or hidden // heads
        kv_heads = (rows(f"{last}attn_qkv.weight") // head_dim - heads) // 2
    else:
        head_dim = rows(f"{last}attn_q.weight") // heads
        kv_heads = rows(f"{last}attn_k.weight") // max(head_dim, 1)
    if has("ffn_down_exps.weight"):
        num, _, width = (rows(f"{last}ffn_down_exps.weight", i) for i in range(3))
        shared = rows(f"{last}ffn_up_shexp.weight") if has("ffn_up_shexp.weight") else 0
        experts = Experts(num, fact("expert_used_count", 1), width, shared, has("ffn_down_exps.bias"), router,
                          max(fact("expert_group_count", 1), 1), max(fact("expert_group_used_count", 1), 1),
                          fact("leading_dense_block_count"))  # fmt: skip
        wide = fact("feed_forward_length", width)
    else:
        wide = rows(f"{last}ffn_down.weight", 1)
    is_joined = not has("ffn_gate.weight") and has("ffn_up.weight") and rows(f"{last}ffn_up.weight") == 2 * wide
    window = fact("attention.sliding_window")
    known["windows"] = tuple(window if part else 0 for part in known.get("windows", (0,)))
    return Decoder(
        layers=fact("block_count"), hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim, ffn=wide,
        vocab=rows("token_embd.weight"), tied="output.weight" not in tensors,
        gated=experts is not None or has("ffn_gate.weight") or is_joined, fused=has("attn_qkv.weight") and is_joined,
        norm="layer_norm" if has("attn_norm.bias") else "rms_norm",
        qkv_bias=has("attn_q.bias") or has("attn_qkv.bias"), o_bias=has("attn_output.bias"),
        mlp_bias=has("ffn_up.bias"), qk_norm=has("attn_q_norm.weight"), sinks=has("attn_sinks.weight"),
        post_norms=has("post_ffw_norm.weight"), latent=latent, experts=experts,
        positions=rows("position_embd.weight") if "position_embd.weight" in tensors else 0, **known,
    )  # fmt: skip


def network(name: str, facts: Mapping[str, Any], tensors: Tensors, *, batch: int = 1, seq: int = 512,
            kv: int | None = None, mode: str = "infer", precision: str = "bf16") -> Graph:  # fmt: skip
    """The graph of a file's decoder: activations in ``precision``, each weight as many bytes as in the file."""
    if mode not in ("infer", "prefill", "decode"):
        raise ModelError(f"{name}: mode {mode!r} is not one of infer, prefill and decode: a GGUF file is for inference")
    made = decoder(name, decoder_of(name, facts, tensors), batch=batch, seq=seq if kv is None else max(kv, 1),
                   mode=mode, precision=precision)  # fmt: skip
    stored = sum(prod(shape) for key, (shape, _) in tensors.items() if not key.startswith("rope_"))
    if abs(made.num_params - stored) > 0.01 * stored:
        raise ModelError(f"{name}: the file holds {stored:,} parameters where {facts['general.architecture']} of its "
                         f"dimensions has {made.num_params:,}: this variant is not known here")  # fmt: skip
    sizes: dict[str, tuple[int, float]] = {}
    for key, (shape, num_bytes) in tensors.items():
        parts = key.removesuffix(".weight").split(".")
        elements, total = sizes.get(parts[-1], (0, 0.0))
        sizes[parts[-1]] = (elements + prod(shape), total + num_bytes)
    values = []
    for value in made.values:
        role = value.name.removesuffix(".weight") if value.kind is Kind.PARAM else ""
        ends = [end for end in ROLES if role == end or role.endswith("." + end)]
        found = [sizes[part] for part in ROLES[max(ends, key=len)] if part in sizes] if ends else []
        bits = 8 * sum(total for _, total in found) / max(sum(n for n, _ in found), 1)
        if 0 < bits < 16:
            value = replace(value, type=TensorType(value.type.shape, dtype(f"packed{bits:.4g}"), value.type.layout))
        values.append(value)
    return replace(made, values=tuple(values), meta={**made.meta, "file_bytes": sum(b for _, b in tensors.values())})

