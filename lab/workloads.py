"""Real networks at real sizes, the same on the machine that measures them and on the one that predicts them.

Each workload is a function that builds (model, args, kwargs, mode) with torch's current default device and dtype:
on a GPU it allocates, under ``torch.device("meta")`` it costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ridgeline.capture.vision_ops import allow_unmatched_torchvision

allow_unmatched_torchvision()
Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Workload:
    name: str
    build: Callable[[], Built]
    mode: str = "infer"
    optimizer: str | None = None
    compiled: bool = False
    loss: Callable[[Any], torch.Tensor] | None = field(default=None, compare=False)


WORKLOADS: dict[str, Workload] = {}


def workload(
    name: str, mode: str = "infer", optimizer: str | None = None, compiled: bool = False
) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
    def register(build: Callable[[], Built]) -> Callable[[], Built]:
        optimizer_ = optimizer or ("adamw" if mode == "train" else None)
        WORKLOADS[name] = Workload(name, build, mode, optimizer_, compiled)
        return build

    return register


def _ids(vocab: int, *size: int) -> torch.Tensor:
    return torch.randint(0, vocab, size)


def _llama(
    layers: int, *, hidden: int = 4096, heads: int = 32, kv: int = 8, inter: int = 14336, vocab: int = 128256
) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv,
            intermediate_size=inter,
            vocab_size=vocab,
            max_position_embeddings=8192,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        )
    )


def _cache(model: nn.Module, batch: int, length: int) -> Any:
    from transformers import DynamicCache

    config = model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = DynamicCache()
    for layer in range(config.num_hidden_layers):
        k, v = torch.randn(2, batch, config.num_key_value_heads, length + 1, dim).unbind(0)
        cache.update(k.contiguous(), v.contiguous(), layer)
    cache.crop(-1)  # a view without the last token, as the measuring loop leaves it after every step
    return cache


def _decode(model: nn.Module, batch: int, length: int) -> Built:
    """One decode step; the cache is cropped back by the measuring loop, so the length stays as given."""
    positions = torch.full((batch, 1), length, dtype=torch.int64)
    return (
        model,
        (),
        {
            "input_ids": _ids(1000, batch, 1),
            "position_ids": positions,
            "past_key_values": _cache(model, batch, length),
            "use_cache": True,
        },
    )


@workload("llama8b-8l-prefill-1x2048", compiled=True)
def _() -> Built:
    return _llama(8), (), {"input_ids": _ids(128256, 1, 2048), "use_cache": False}


@workload("llama8b-8l-prefill-8x1024")
def _() -> Built:
    return _llama(8), (), {"input_ids": _ids(128256, 8, 1024), "use_cache": False}


@workload("llama8b-decode-1x2048")
def _() -> Built:
    return _decode(_llama(32), 1, 2048)


@workload("llama8b-8l-decode-32x1024", compiled=True)
def _() -> Built:
    return _decode(_llama(8), 32, 1024)


@workload("llama8b-4l-train-2x2048", mode="train", compiled=True)
def _() -> Built:
    ids = _ids(128256, 2, 2048)
    return _llama(4), (), {"input_ids": ids, "labels": ids, "use_cache": False}


@workload("llama1b-train-4x1024", mode="train", optimizer="adamw_fused")
def _() -> Built:
    ids = _ids(128256, 4, 1024)
    return _llama(16, hidden=2048, kv=8, inter=8192), (), {"input_ids": ids, "labels": ids, "use_cache": False}


@workload("gpt2-medium-train-8x512", mode="train", compiled=True)
def _() -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    ids = _ids(50257, 8, 512)
    return (
        GPT2LMHeadModel(GPT2Config(n_embd=1024, n_layer=24, n_head=16)),
        (),
        {"input_ids": ids, "labels": ids, "use_cache": False},
    )


@workload("qwen3moe-4l-prefill-2x1024")
def _() -> Built:
    return _moe(4), (), {"input_ids": _ids(32000, 2, 1024), "use_cache": False}


@workload("qwen3moe-4l-train-2x1024", mode="train")
def _() -> Built:
    ids = _ids(32000, 2, 1024)
    return _moe(4), (), {"input_ids": ids, "labels": ids, "use_cache": False}


def _moe(layers: int) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            hidden_size=2048,
            num_hidden_layers=layers,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_experts=64,
            num_experts_per_tok=8,
            vocab_size=32000,
        )
    )


def _bert(batch: int, seq: int) -> Built:
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    return (
        BertModel(config),
        (),
        {"input_ids": _ids(30522, batch, seq), "attention_mask": torch.ones(batch, seq, dtype=torch.int64)},
    )


@workload("bert-large-32x512", compiled=True)
def _() -> Built:
    return _bert(32, 512)


@workload("bert-large-1x128")
def _() -> Built:
    return _bert(1, 128)


@workload("bert-large-train-16x512", mode="train")
def _() -> Built:
    return _bert(16, 512)


@workload("t5-large-8x512")
def _() -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=1024, d_kv=64, d_ff=4096, num_layers=24, num_decoder_layers=24, num_heads=16, vocab_size=32128
    )
    return (
        T5ForConditionalGeneration(config),
        (),
        {"input_ids": _ids(32128, 8, 512), "decoder_input_ids": _ids(32128, 8, 128), "use_cache": False},
    )


@workload("whisper-large-encoder-8")
def _() -> Built:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(
        d_model=1280, encoder_layers=32, encoder_attention_heads=20, encoder_ffn_dim=5120, num_mel_bins=128
    )
    return WhisperEncoder(config), (torch.randn(8, 128, 3000),), {}


@workload("wav2vec2-large-4x160000")
def _() -> Built:
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    config = Wav2Vec2Config(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    return Wav2Vec2Model(config), (torch.randn(4, 160000),), {}


def _timm(name: str, batch: int, size: int = 224, channels_last: bool = False) -> Built:
    import timm

    model, image = timm.create_model(name), torch.randn(batch, 3, size, size)
    if channels_last:
        model, image = model.to(memory_format=torch.channels_last), image.to(memory_format=torch.channels_last)
    return model, (image,), {}


@workload("resnet50-128", compiled=True)
def _() -> Built:
    return _timm("resnet50", 128)


@workload("resnet50-128-nhwc")
def _() -> Built:
    return _timm("resnet50", 128, channels_last=True)


@workload("resnet50-train-64-nhwc", mode="train", optimizer="sgd_momentum")
def _() -> Built:
    return _timm("resnet50", 64, channels_last=True)


@workload("convnext-base-64", compiled=True)
def _() -> Built:
    return _timm("convnext_base", 64)


@workload("efficientnet-b0-64")
def _() -> Built:
    return _timm("efficientnet_b0", 64)


@workload("vit-large-64", compiled=True)
def _() -> Built:
    return _timm("vit_large_patch16_224", 64)


@workload("vit-base-train-64", mode="train")
def _() -> Built:
    return _timm("vit_base_patch16_224", 64)


@workload("swin-base-32")
def _() -> Built:
    return _timm("swin_base_patch4_window7_224", 32)


class DiTBlock(nn.Module):
    """A transformer block conditioned by adaptive layer norm, as in DiT."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim))
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.ada(c).unsqueeze(1).chunk(6, -1)
        b, s, d = x.shape
        h = self.norm1(x) * (1 + scale1) + shift1
        q, k, v = self.qkv(h).view(b, s, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + gate1 * self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, d))
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    def __init__(self, depth: int = 28, dim: int = 1152, heads: int = 16) -> None:
        super().__init__()
        self.patch = nn.Conv2d(4, dim, 2, 2)
        self.blocks = nn.ModuleList(DiTBlock(dim, heads) for _ in range(depth))
        self.norm, self.out = nn.LayerNorm(dim, elementwise_affine=False), nn.Linear(dim, 32)

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x, c)
        return self.out(self.norm(x))


@workload("dit-xl2-32", compiled=True)
def _() -> Built:
    return DiT(), (torch.randn(32, 4, 32, 32), torch.randn(32, 1152)), {}


@workload("dit-xl2-train-16", mode="train")
def _() -> Built:
    return DiT(), (torch.randn(16, 4, 32, 32), torch.randn(16, 1152)), {}


class DLRM(nn.Module):
    """Bottom MLP, embedding bags, pairwise dot interaction, top MLP."""

    def __init__(self, tables: int = 26, rows: int = 200_000, dim: int = 128) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, dim, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(
            nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, dim), nn.ReLU()
        )
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(
            nn.Linear(pairs + dim, 1024),
            nn.ReLU(),
            nn.Linear(1024, 1024),
            nn.ReLU(),
            nn.Linear(1024, 512),
            nn.ReLU(),
            nn.Linear(512, 1),
        )
        self.rows_cols = torch.triu_indices(tables + 1, tables + 1, 1, device="cpu")

    def forward(self, dense: torch.Tensor, ids: list[torch.Tensor]) -> torch.Tensor:
        x = self.bottom(dense)
        features = torch.stack([x, *(bag(i) for bag, i in zip(self.bags, ids, strict=True))], 1)
        dots = torch.bmm(features, features.transpose(1, 2))
        i, j = self.rows_cols.to(dots.device)
        return self.top(torch.cat([x, dots[:, i, j]], 1))


@workload("dlrm-8192")
def _() -> Built:
    return DLRM(), (torch.randn(8192, 13), [_ids(200_000, 8192, 4) for _ in range(26)]), {}


@workload("dlrm-train-4096", mode="train", optimizer="sgd")
def _() -> Built:
    return DLRM(), (torch.randn(4096, 13), [_ids(200_000, 4096, 4) for _ in range(26)]), {}
