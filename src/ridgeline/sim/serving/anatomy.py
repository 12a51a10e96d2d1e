"""What a decoder is made of, layer by layer, as a serving engine shards it; from the zoo or from published figures."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ridgeline.errors import ModelError, nearest
from ridgeline.models.card import catalog
from ridgeline.models.llm import Decoder, Latent, shape_of
from ridgeline.models.moe import Experts


@dataclass(frozen=True, slots=True)
class Index:
    """Sparse attention: a light scorer picks the ``top`` keys that the real attention then reads."""

    heads: int
    dim: int
    top: int


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Gated linear attention: a state of key by value dims a head instead of a cache."""

    key_heads: int
    value_heads: int
    dim: int
    state_itemsize: int = 4  # bytes of an element of the state


@dataclass(frozen=True, slots=True)
class Mixer:
    """How a layer mixes tokens: grouped-query or latent attention, or a recurrence."""

    heads: int
    kv_heads: int
    dim: int
    window: int = 0
    latent: Latent | None = None
    index: Index | None = None
    recurrence: Recurrence | None = None
    gated: bool = False  # the output passes a gate that the query projection makes as well
    normed_across: bool = False  # queries and keys are normed over all heads: ranks that share them have to meet

    def cache_bytes_per_token(self, itemsize: float, tp: int) -> float:
        """Bytes one token adds to the cache of one rank; a recurrence adds none."""
        if self.recurrence:
            return 0.0
        if self.latent:
            indexed = self.index.dim * 1.0 if self.index else 0.0
            return (self.latent.kv_rank + self.latent.rope) * itemsize + indexed
        return 2 * max(1, self.kv_heads // tp) * self.dim * itemsize

    def state_bytes(self, tp: int) -> float:
        """Bytes of recurrent state of one sequence on one rank."""
        if not self.recurrence:
            return 0.0
        r = self.recurrence
        return max(1, r.value_heads // tp) * r.dim**2 * float(r.state_itemsize)


@dataclass(frozen=True, slots=True)
class Layers:
    """``count`` equal layers: a mixer and a feed-forward of width ``ffn`` or experts."""

    count: int
    mixer: Mixer
    ffn: int
    experts: Experts | None = None


@dataclass(frozen=True, slots=True)
class Anatomy:
    """A decoder-only model as serving sees it."""

    name: str
    hidden: int
    vocab: int
    layers: tuple[Layers, ...]
    gated: bool = True
    source: str = ""

    @property
    def num_layers(self) -> int:
        return sum(group.count for group in self.layers)

    @property
    def is_sparse(self) -> bool:
        """Whether experts hold most of the parameters."""
        return any(group.experts for group in self.layers)

    @property
    def attention(self) -> str:
        """The kind of attention kernels it needs: that of its most unusual layers."""
        mixers = [group.mixer for group in self.layers]
        kinds = (("recurrent", any(m.recurrence for m in mixers)), ("windowed", any(m.window for m in mixers)),
                 ("indexed", any(m.index for m in mixers)), ("latent", any(m.latent for m in mixers)))  # fmt: skip
        return next((name for name, found in kinds if found), "grouped")

    def num_params(self) -> int:
        """Parameters of layers and head, without norms."""
        return sum(g.count * (self.mixer_params(g.mixer) + self.ffn_params(g)) for g in self.layers) + (
            2 * self.hidden * self.vocab
        )

    def mixer_params(self, m: Mixer) -> int:
        h = self.hidden
        if m.recurrence:
            r = m.recurrence
            return h * (2 * r.key_heads + 3 * r.value_heads) * r.dim
        if m.latent:
            low = m.latent
            q = h * low.q_rank + low.q_rank * m.heads * (low.nope + low.rope)
            kv = h * (low.kv_rank + low.rope) + low.kv_rank * m.heads * (low.nope + low.value)
            indexed = low.q_rank * m.index.heads * m.index.dim + h * m.index.dim if m.index else 0
            return q + kv + m.heads * low.value * h + indexed
        return h * m.dim * (m.heads * (3 if m.gated else 2) + 2 * m.kv_heads)

    def ffn_params(self, g: Layers) -> int:
        sides = 3 if self.gated else 2
        if g.experts is None:
            return sides * self.hidden * g.ffn
        e = g.experts
        return sides * self.hidden * (e.num * e.ffn + e.shared) + e.num * self.hidden


def of_decoder(name: str, config: Decoder, source: str = "") -> Anatomy:
    """The anatomy of a zoo decoder."""
    across = name in ("minimax-m2", "minimax-m2.5")  # Zoo decoders whose config.json says ``qk_norm_type: per_layer``
    plain = Mixer(config.heads, config.hkv, config.d, latent=config.latent, normed_across=across)
    dense = config.experts.dense_layers if config.experts else 0
    period = config.windows
    whole, rest = divmod(config.layers - dense, len(period))
    groups = [Layers(dense, plain, config.ffn)] if dense else []
    for i, window in enumerate(period):
        count = whole + (i < rest)
        if count:
            groups.append(Layers(count, replace(plain, window=window), config.ffn, config.experts))
    return Anatomy(name, config.hidden, config.vocab, tuple(groups), config.gated, source)


def dense_of(
    name: str, *, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, gated: bool, source: str
) -> Anatomy:
    """An ordinary decoder from the figures of a results table."""
    mixer = Mixer(heads, kv_heads, hidden // heads)
    return Anatomy(name, hidden, vocab, (Layers(layers, mixer, ffn),), gated, source)


def _qwen35() -> Anatomy:
    """Three gated recurrences to one full attention, 512 experts."""
    experts = Experts(512, 10, 1024, shared=1024)
    full = Mixer(32, 2, 256, gated=True)
    linear = Mixer(32, 2, 128, recurrence=Recurrence(16, 64, 128))
    groups = (Layers(45, linear, 1024, experts), Layers(15, full, 1024, experts))
    return Anatomy("qwen3.5-397b-a17b", 4096, 248320, groups, source="Qwen/Qwen3.5-397B-A17B config.json")


def _glm5() -> Anatomy:
    """Latent attention over the 2,048 keys a lightning indexer picks, 256 experts."""
    mixer = Mixer(64, 1, 256, latent=Latent(2048, 512, 192, 64, 256), index=Index(32, 128, 2048))
    experts = Experts(256, 8, 2048, shared=2048, router="sigmoid_groups", dense_layers=3)
    groups = (Layers(3, mixer, 12288), Layers(75, mixer, 12288, experts))
    return Anatomy("glm-5", 6144, 154880, groups, source="zai-org/GLM-5 config.json")


def _deepseek_v32() -> Anatomy:
    base = of_decoder("deepseek-v3.2", shape_of("deepseek-v3"), "deepseek-ai/DeepSeek-V3.2-Exp config.json")
    index = Index(64, 128, 2048)
    return replace(base, layers=tuple(replace(g, mixer=replace(g.mixer, index=index)) for g in base.layers))


def _qwen3_coder() -> Anatomy:
    mixer, experts = Mixer(96, 8, 128), Experts(160, 8, 2560)
    return Anatomy("qwen3-coder-480b", 6144, 151936, (Layers(62, mixer, 8192, experts),),
                   source="Qwen/Qwen3-Coder-480B-A35B-Instruct config.json")  # fmt: skip


def _glm45() -> Anatomy:
    mixer, experts = Mixer(96, 8, 128), Experts(160, 8, 1536, shared=1536, dense_layers=3)
    return Anatomy("glm-4.5", 5120, 151552, (Layers(3, mixer, 12288), Layers(89, mixer, 12288, experts)),
                   source="zai-org/GLM-4.5 config.json")  # fmt: skip


def _llama4(name: str, num_experts: int, every: int) -> Anatomy:
    """One routed expert a token beside a shared one, in every layer or in every other."""
    experts, dense_ffn = Experts(num_experts, 1, 8192, shared=8192), 16384
    # three layers of four attend within chunks of so many tokens
    local, full = Mixer(40, 8, 128, window=8192), Mixer(40, 8, 128)
    sparse = tuple(Layers(count // every, mixer, 8192, experts) for count, mixer in ((36, local), (12, full)))
    dense = tuple(Layers(count // 2, mixer, dense_ffn) for count, mixer in ((36, local), (12, full)) if every == 2)
    return Anatomy(name, 5120, 202048, (*sparse, *dense), source=f"meta-llama/{name} config.json, recalled")


def _gptj() -> Anatomy:
    return Anatomy("gpt-j-6b", 4096, 50400, (Layers(28, Mixer(16, 16, 256), 16384),), gated=False,
                   source="EleutherAI/gpt-j-6b config.json")  # fmt: skip


_HYBRIDS: dict[str, Callable[[], Anatomy]] = {
    "gpt-j-6b": _gptj,
    "qwen3.5-397b-a17b": _qwen35,
    "glm-5": _glm5,
    "deepseek-v3.2": _deepseek_v32,
    "qwen3-coder-480b": _qwen3_coder,
    "glm-4.5": _glm45,
    "llama-4-maverick": partial(_llama4, "llama-4-maverick", 128, 2),
    "llama-4-scout": partial(_llama4, "llama-4-scout", 16, 1),
}
"""Models the zoo has no graph for; serving needs their figures only."""

_SYNONYMS = {
    "deepseek-r1-0528": "deepseek-v3",
    "deepseek-v3-0324": "deepseek-v3",
    "deepseek-v3.1": "deepseek-v3",
    "deepseek-v3.2-exp": "deepseek-v3.2",
    "kimi-k2-instruct": "kimi-k2",
    "kimi-k2-thinking": "kimi-k2",
    "glm-4.6": "glm-4.5",
    "glm-5.1": "glm-5",
    "glm-5-fp8": "glm-5",
    "deepseek-r1-671b": "deepseek-v3",
    "llama-2-7b": "llama2-7b",
    "llama-2-13b": "llama2-13b",
    "llama-2-70b": "llama2-70b",
    "llama-7b": "llama2-7b",
    "llama-70b": "llama2-70b",
    "llama-3.1-70b": "llama3-70b",
    "llama-3.3-70b": "llama3-70b",
    "llama-3.1-8b": "llama3-8b",
    "qwen3-coder-480b-a35b": "qwen3-coder-480b",
    "llama-4-maverick-17b-128e": "llama-4-maverick",
    "llama-4-scout-17b-16e": "llama-4-scout",
    "meta-llama-3-8b": "llama3-8b",
    "meta-llama-3-70b": "llama3-70b",
    "meta-llama-3.1-8b": "llama3-8b",
    "meta-llama-3.1-70b": "llama3-70b",
    "meta-llama-3.1-405b": "llama-3.1-405b",
    "gemma-3-27b": "gemma3-27b",
    "gemma-2-9b": "gemma2-9b",
}
_SUFFIXES = ("-instruct", "-fp8", "-nvfp4", "-fp4", "-hf", "-base", "-it", "-chat", "-fp8-dynamic", "-bf16", "-2507",
             "-v0.1", "-v0.2", "-v0.3", "-kv", "-awq", "-gptq", "-int4", "-v2")  # fmt: skip


def anatomy(name: str) -> Anatomy:
    """The model called ``name``: a zoo name, or a path such as ``meta-llama/Llama-3.1-70B-Instruct``."""
    key = re.sub(r"[\s_]+", "-", name.rpartition("/")[2].strip().lower())
    while True:
        found = _SYNONYMS.get(key, key)
        if found in _HYBRIDS:
            return _HYBRIDS[found]()
        if found in _names():
            return of_decoder(found, shape_of(found), f"zoo: {found}")
        shorter = next((key.removesuffix(end) for end in _SUFFIXES if key.endswith(end)), None)
        if shorter is None:
            known = [*_names(), *_HYBRIDS, *_SYNONYMS]
            raise ModelError(f"no language model {name!r} to serve{nearest(key, known)}; a config.json works too")
        key = shorter


def _names() -> set[str]:
    return {name for card in catalog() if card.family in ("llm", "moe") for name in (card.name, *card.aliases)}


def of_config(name: str, config: Mapping[str, Any]) -> Anatomy:
    """The anatomy a Hugging Face ``config.json`` describes; what it does not say in the usual words is an error."""
    words = config.get("text_config", config)
    try:
        return _of_words(name, words)
    except KeyError as missing:
        raise ModelError(
            f"{name}: its config has no {missing}; serving reads Llama-like and DeepSeek-like decoders"
        ) from None


def _of_words(name: str, c: Mapping[str, Any]) -> Anatomy:
    heads = int(c["num_attention_heads"])
    latent = None
    if c.get("kv_lora_rank"):
        q_rank = int(c["q_lora_rank"])
        latent = Latent(q_rank, int(c["kv_lora_rank"]), int(c["qk_nope_head_dim"]), int(c["qk_rope_head_dim"]),
                        int(c["v_head_dim"]))  # fmt: skip
    dim = int(c.get("head_dim") or c["hidden_size"] // heads)
    words = ("index_n_heads", "index_head_dim", "index_topk")
    index = Index(*(int(c[word]) for word in words)) if "index_topk" in c else None
    across = c.get("qk_norm_type") == "per_layer"
    kv_heads = int(c.get("num_key_value_heads") or heads)
    mixer = Mixer(heads, kv_heads, dim, latent=latent, index=index, normed_across=across)
    experts, dense = _experts_of_words(c)
    ffn, total = int(c["intermediate_size"]), int(c["num_hidden_layers"])
    groups = ([Layers(dense, mixer, ffn)] if dense else []) + [Layers(total - dense, mixer, ffn, experts)]
    return Anatomy(name, int(c["hidden_size"]), int(c["vocab_size"]), tuple(groups), source=f"{name} (config)")


def _experts_of_words(c: Mapping[str, Any]) -> tuple[Experts | None, int]:
    num = next((int(c[key]) for key in ("n_routed_experts", "num_local_experts", "num_experts") if c.get(key)), 0)
    if not num:
        return None, 0
    ffn = int(c.get("moe_intermediate_size") or c["intermediate_size"])
    shared = int(c.get("shared_expert_intermediate_size") or ffn * int(c.get("n_shared_experts") or 0))
    dense = int(c.get("first_k_dense_replace") or 0)
    return Experts(num, int(c["num_experts_per_tok"]), ffn, shared=shared, dense_layers=dense), dense
