"""A decoder's architecture, read from the ``config.json`` of a Hugging Face model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ridgeline.errors import ModelError, nearest

FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "mixtral", "qwen3_moe", "deepseek_v3",
)  # fmt: skip
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary frequencies: the base, the rotated dims, and how they are stretched beyond the trained length."""

    theta: float
    dim: int
    kind: str = "default"
    scaling: Mapping[str, Any] = field(default_factory=dict)
    interleaved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention: keys and values are projected up from one compressed vector a token."""

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """A mixture of experts: how tokens choose experts, and what an expert is."""

    num_experts: int
    top_k: int
    intermediate: int
    score: str  # softmax over all experts, sigmoid, or softmax over the chosen ("chosen")
    normalize: bool
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    shared_intermediate: int = 0
    bias: bool = False  # of the router and of every expert
    correction: bool = False  # a bias that steers the choice of experts, not their weights
    clamp: tuple[float, float] | None = None  # (sigmoid gain, limit) of gpt-oss's gated unit
    aux_coef: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What the decoder computes. ``source`` keeps the ``config.json`` it was read from, for saving."""

    family: str
    vocab_size: int
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope: Rope
    local_rope: Rope | None = None  # of layers with a window, where it differs
    windows: tuple[int, ...] = ()  # a layer: keys a query sees, itself included; 0 is all
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    norm_offset: float = 0.0  # Gemma stores the weights of its norms less one
    post_norms: bool = False  # Gemma also normalizes what attention and MLP return
    activation: str = "silu"
    embed_scale: float = 1.0
    attention_scale: float = 0.0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    latent: Latent | None = None
    moe: Moe | None = None
    moe_layers: tuple[bool, ...] = ()
    init_std: float = 0.02
    eos_ids: tuple[int, ...] = ()
    source: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def load(cls, path: str | Path) -> ModelConfig:
        """Read a ``config.json``, or the one in a folder."""
        path = Path(path)
        file = path / "config.json" if path.is_dir() else path
        try:
            return cls.from_hf(json.loads(file.read_text()))
        except FileNotFoundError:
            raise ModelError(f"no model configuration at {file}: give a config.json or a folder that has one") from None
        except json.JSONDecodeError as error:
            raise ModelError(f"{file} is not JSON: {error}") from None

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> ModelConfig:
        """The architecture that a ``config.json`` describes; what would be computed differently is refused."""
        family = given.get("model_type", "")
        if family == "gemma3" and "text_config" in given:
            given, family = given["text_config"], "gemma3_text"
        if family not in FAMILIES:
            raise ModelError(f"no decoder for model_type {family!r}{nearest(str(family), FAMILIES)}")
        for key in ("quantization_config", "use_bidirectional_attention"):
            if given.get(key):
                raise ModelError(f"config.json sets {key}, which the decoder does not compute; use weights without it")
        try:
            return cls(**_common(given, family), **_BUILDERS[family](given), source=dict(given))
        except KeyError as error:
            raise ModelError(f"config.json of a {family} model has no {error}") from None

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def is_moe(self, layer: int) -> bool:
        return bool(self.moe) and self.moe_layers[layer]

    @property
    def value_dim(self) -> int:
        return self.latent.value_dim if self.latent else self.head_dim


def _common(given: Mapping[str, Any], family: str) -> dict[str, Any]:
    heads, hidden, layers = given["num_attention_heads"], given["hidden_size"], given["num_hidden_layers"]
    if family == "deepseek_v3":
        head_dim = given["qk_nope_head_dim"] + given["qk_rope_head_dim"]
    else:
        head_dim = given.get("head_dim") or {"gpt_oss": 64, "gemma2": 256, "gemma3_text": 256}.get(
            family, hidden // heads
        )
    eos = given.get("eos_token_id")
    return {
        "family": family, "vocab_size": given["vocab_size"], "hidden": hidden, "num_layers": layers,
        "num_heads": heads, "num_kv_heads": given.get("num_key_value_heads") or heads, "head_dim": head_dim,
        "intermediate": given["intermediate_size"],
        "max_positions": given.get("max_position_embeddings", 2048), "norm_eps": given.get("rms_norm_eps", 1e-6),
        "tied": given.get("tie_word_embeddings", family.startswith("gemma")),
        "init_std": given.get("initializer_range", 0.02),
        "eos_ids": tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
    }  # fmt: skip


def _rope(given: Mapping[str, Any], dim: int, default_theta: float, **more: Any) -> Rope:
    """Both spellings: ``rope_parameters`` of today, ``rope_theta`` with ``rope_scaling`` of before."""
    scaling = dict(given.get("rope_parameters") or given.get("rope_scaling") or {})
    return _rope_of(
        scaling, dim, given.get("rope_theta") or default_theta, given.get("max_position_embeddings"), **more
    )


def _rope_of(scaling: dict[str, Any], dim: int, theta: float, positions: int | None, **more: Any) -> Rope:
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    scaling.pop("type", None)
    theta = scaling.pop("rope_theta", None) or theta
    if kind not in ROPE_TYPES:
        raise ModelError(f"no rotary embedding of type {kind!r}{nearest(kind, ROPE_TYPES)}")
    if float(scaling.pop("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError("config.json rotates a part of each head (partial_rotary_factor): no family here does")
    if kind in ("llama3", "yarn"):
        scaling.setdefault("original_max_position_embeddings", positions)
    return Rope(theta=float(theta), dim=dim, kind=kind, scaling=scaling, **more)


def _layer_windows(given: Mapping[str, Any], default: list[bool]) -> tuple[int, ...]:
    """The window of every layer: by ``layer_types``, or else of the layers marked in ``default``."""
    window, types = given.get("sliding_window"), given.get("layer_types")
    sliding = [kind == "sliding_attention" for kind in types] if types else default
    return tuple(window if slides and window else 0 for slides in sliding)


def _llama(given: Mapping[str, Any]) -> dict[str, Any]:
    dim = given.get("head_dim") or given["hidden_size"] // given["num_attention_heads"]
    bias = given.get("attention_bias", False)
    _only_silu(given)
    return {"rope": _rope(given, dim, 10_000.0), "qkv_bias": bias, "o_bias": bias,
            "mlp_bias": given.get("mlp_bias", False)}  # fmt: skip


def _only_silu(given: Mapping[str, Any]) -> None:
    if given.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act {given['hidden_act']!r} is not 'silu', which {given['model_type']} models have")


def _mistral(given: Mapping[str, Any]) -> dict[str, Any]:
    window = given.get("sliding_window")
    return {**_llama(given), "windows": (window or 0,) * given["num_hidden_layers"]}


def _qwen2(given: Mapping[str, Any]) -> dict[str, Any]:
    given = {**given, "sliding_window": given.get("sliding_window") if given.get("use_sliding_window") else None}
    first = given.get("max_window_layers", 28)
    windows = _layer_windows(given, [i >= first for i in range(given["num_hidden_layers"])])
    return {**_llama(given), "qkv_bias": True, "o_bias": False, "mlp_bias": False, "windows": windows}


def _qwen3(given: Mapping[str, Any]) -> dict[str, Any]:
    given = {**given, "head_dim": given.get("head_dim", 128)}
    bias = given.get("attention_bias", False)
    return {**_qwen2(given), "qk_norm": True, "qkv_bias": bias, "o_bias": bias}


def _gemma2(given: Mapping[str, Any]) -> dict[str, Any]:
    bias, layers = given.get("attention_bias", False), given["num_hidden_layers"]
    return {
        "rope": _rope(given, given.get("head_dim", 256), 10_000.0), "qkv_bias": bias, "o_bias": bias,
        "windows": _layer_windows({"sliding_window": 4096, **given}, [i % 2 == 0 for i in range(layers)]),
        "norm_offset": 1.0, "post_norms": True, "activation": "gelu_tanh", "embed_scale": given["hidden_size"] ** 0.5,
        "attention_scale": given.get("query_pre_attn_scalar", 256) ** -0.5,
        "attention_softcap": given.get("attn_logit_softcapping", 50.0) or 0.0,
        "logit_softcap": given.get("final_logit_softcapping", 30.0) or 0.0,
    }  # fmt: skip


def _gemma3(given: Mapping[str, Any]) -> dict[str, Any]:
    layers, dim = given["num_hidden_layers"], given.get("head_dim", 256)
    period = given.get("sliding_window_pattern", 6)
    both = given.get("rope_parameters") or {}
    full = dict(both.get("full_attention") or given.get("rope_scaling") or {})
    local = dict(both.get("sliding_attention") or {})
    caps = {"attn_logit_softcapping": None, "final_logit_softcapping": None, **given}
    found = _gemma2({**caps, "rope_parameters": full, "rope_scaling": None})
    windows = _layer_windows({"sliding_window": 4096, **given}, [bool((i + 1) % period) for i in range(layers)])
    return {
        **found, "windows": windows, "qk_norm": True,
        "rope": _rope_of(dict(full), dim, given.get("rope_theta") or 1e6, given.get("max_position_embeddings")),
        "local_rope": _rope_of(local, dim, given.get("rope_local_base_freq") or 1e4, None),
    }  # fmt: skip


def _gpt_oss(given: Mapping[str, Any]) -> dict[str, Any]:
    layers, dim = given["num_hidden_layers"], given.get("head_dim", 64)
    yarn = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096}  # fmt: skip
    scaling = given.get("rope_parameters") or given.get("rope_scaling") or yarn
    bias = given.get("attention_bias", True)
    moe = Moe(
        num_experts=given.get("num_local_experts", 128), top_k=given.get("num_experts_per_tok", 4),
        intermediate=given["intermediate_size"], score="chosen", normalize=False, bias=True,
        clamp=(given.get("swiglu_alpha", 1.702), given.get("swiglu_limit", 7.0)),
        aux_coef=given.get("router_aux_loss_coef", 0.001),
    )  # fmt: skip
    return {
        "rope": _rope({**given, "rope_parameters": scaling}, dim, 150_000.0), "qkv_bias": bias, "o_bias": bias,
        "sinks": True, "moe": moe, "moe_layers": (True,) * layers,
        "windows": _layer_windows({"sliding_window": 128, **given}, [i % 2 == 0 for i in range(layers)]),
    }  # fmt: skip


def _mixtral(given: Mapping[str, Any]) -> dict[str, Any]:
    moe = Moe(
        num_experts=given.get("num_local_experts", 8), top_k=given.get("num_experts_per_tok", 2),
        intermediate=given["intermediate_size"], score="softmax", normalize=True,
        aux_coef=given.get("router_aux_loss_coef", 0.001),
    )  # fmt: skip
    return {**_mistral(given), "rope": _rope(given, _llama(given)["rope"].dim, 1e6), "moe": moe,
            "moe_layers": (True,) * given["num_hidden_layers"]}  # fmt: skip


def _qwen3_moe(given: Mapping[str, Any]) -> dict[str, Any]:
    bias, layers = given.get("attention_bias", False), given["num_hidden_layers"]
    moe = Moe(
        num_experts=given.get("num_experts", given.get("num_local_experts", 128)),
        top_k=given.get("num_experts_per_tok", 8), intermediate=given["moe_intermediate_size"], score="softmax",
        normalize=given.get("norm_topk_prob", False), aux_coef=given.get("router_aux_loss_coef", 0.001),
    )  # fmt: skip
    step, dense = given.get("decoder_sparse_step", 1), given.get("mlp_only_layers") or []
    window = given.get("sliding_window") if given.get("use_sliding_window") else None
    return {**_llama(given), "qk_norm": True, "qkv_bias": bias, "o_bias": bias, "moe": moe,
            "windows": (window or 0,) * layers,
            "moe_layers": tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))}  # fmt: skip


def _deepseek(given: Mapping[str, Any]) -> dict[str, Any]:
    layers, rope_dim = given["num_hidden_layers"], given["qk_rope_head_dim"]
    latent = Latent(q_rank=given.get("q_lora_rank"), kv_rank=given["kv_lora_rank"], nope_dim=given["qk_nope_head_dim"],
                    rope_dim=rope_dim, value_dim=given["v_head_dim"])  # fmt: skip
    moe = Moe(
        num_experts=given["n_routed_experts"], top_k=given["num_experts_per_tok"],
        intermediate=given["moe_intermediate_size"], score="sigmoid", normalize=given.get("norm_topk_prob", True),
        scale=given.get("routed_scaling_factor", 2.5), num_groups=given.get("n_group") or 1,
        top_groups=given.get("topk_group") or 1, correction=True,
        shared_intermediate=given["moe_intermediate_size"] * given.get("n_shared_experts", 1),
        aux_coef=given.get("aux_loss_alpha", 0.0),
    )  # fmt: skip
    rope = _rope(given, rope_dim, 10_000.0, interleaved=given.get("rope_interleave", True))
    scale = (latent.nope_dim + rope_dim) ** -0.5
    if rope.kind != "default" and rope.scaling.get("mscale_all_dim"):
        from ridgeline.llm.model.rope import yarn_scale

        scale *= yarn_scale(rope.scaling["factor"], rope.scaling["mscale_all_dim"]) ** 2
    bias, dense = given.get("attention_bias", False), given.get("first_k_dense_replace", 3)
    _only_silu(given)
    return {"rope": rope, "latent": latent, "moe": moe, "moe_layers": tuple(i >= dense for i in range(layers)),
            "attention_scale": scale, "qkv_bias": bias, "o_bias": bias}  # fmt: skip


_BUILDERS = {
    "llama": _llama, "mistral": _mistral, "qwen2": _qwen2, "qwen3": _qwen3, "gemma2": _gemma2, "gemma3_text": _gemma3,
    "gpt_oss": _gpt_oss, "mixtral": _mixtral, "qwen3_moe": _qwen3_moe, "deepseek_v3": _deepseek,
}  # fmt: skip
