"""The zoo's networks as their own libraries build them, on the meta device: no weights, no downloads."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

Reference = Callable[[], Any]


def hf(model_class: str, config_class: str, **config: Any) -> Reference:
    """A transformers model from its published configuration."""

    def make() -> Any:
        with torch.device("meta"):
            return getattr(transformers, model_class)(getattr(transformers, config_class)(**config)).eval()

    return make


def vision(name: str, **options: Any) -> Reference:
    """A timm model; timm imports torchvision where present, which needs two ops that its CPU build lacks."""

    def make() -> Any:
        timm = pytest.importorskip("timm")
        with torch.device("meta"):
            return timm.create_model(name, **options).eval()

    return make


def diffusion(model_class: str, **config: Any) -> Reference:
    def make() -> Any:
        diffusers = pytest.importorskip("diffusers")
        with torch.device("meta"):
            return getattr(diffusers, model_class)(**config).eval()

    return make


def _llama(
    layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int = 128256, tied: bool = False
) -> Reference:
    return hf(
        "LlamaForCausalLM",
        "LlamaConfig",
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        intermediate_size=ffn,
        vocab_size=vocab,
        tie_word_embeddings=tied,
    )


def _qwen3(layers: int, hidden: int, heads: int, kv: int, ffn: int) -> Reference:
    return hf(
        "Qwen3ForCausalLM",
        "Qwen3Config",
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        head_dim=128,
        num_key_value_heads=kv,
        intermediate_size=ffn,
        vocab_size=151936,
        tie_word_embeddings=False,
    )


def _qwen3_moe(layers: int, hidden: int, heads: int, ffn: int) -> Reference:
    return hf(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        head_dim=128,
        num_key_value_heads=4,
        moe_intermediate_size=ffn,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=151936,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )


def _qwen25(layers: int, hidden: int, heads: int, kv: int, ffn: int) -> Reference:
    return hf(
        "Qwen2ForCausalLM",
        "Qwen2Config",
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        intermediate_size=ffn,
        vocab_size=152064,
        tie_word_embeddings=False,
    )


def _mixtral(layers: int, hidden: int, heads: int, ffn: int) -> Reference:
    return hf(
        "MixtralForCausalLM",
        "MixtralConfig",
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=8,
        intermediate_size=ffn,
        vocab_size=32000,
        num_local_experts=8,
        num_experts_per_tok=2,
    )


def _gpt(layers: int, hidden: int, heads: int, positions: int) -> Reference:
    return hf("GPT2LMHeadModel", "GPT2Config", n_layer=layers, n_embd=hidden, n_head=heads, n_positions=positions)


def _gpt_oss(layers: int, experts: int) -> Reference:
    return hf("GptOssForCausalLM", "GptOssConfig", num_hidden_layers=layers, num_local_experts=experts)


REFERENCES: dict[str, Reference] = {
    "llama3-8b": _llama(32, 4096, 32, 8, 14336),
    "llama3-70b": _llama(80, 8192, 64, 8, 28672),
    "llama3.1-405b": _llama(126, 16384, 128, 8, 53248),
    "llama3.2-1b": _llama(16, 2048, 32, 8, 8192, tied=True),
    "llama3.2-3b": _llama(28, 3072, 24, 8, 8192, tied=True),
    "llama2-7b": _llama(32, 4096, 32, 32, 11008, 32000),
    "llama2-13b": _llama(40, 5120, 40, 40, 13824, 32000),
    "llama2-70b": _llama(80, 8192, 64, 8, 28672, 32000),
    "mistral-7b": hf("MistralForCausalLM", "MistralConfig"),
    "qwen2.5-7b": _qwen25(28, 3584, 28, 4, 18944),
    "qwen2.5-72b": _qwen25(80, 8192, 64, 8, 29568),
    "qwen3-8b": _qwen3(36, 4096, 32, 8, 12288),
    "qwen3-32b": _qwen3(64, 5120, 64, 8, 25600),
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 32, 768),
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, 64, 1536),
    "gemma2-9b": hf(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        num_hidden_layers=42,
        hidden_size=3584,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
        intermediate_size=14336,
        vocab_size=256000,
    ),
    "gemma3-27b": hf(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        num_hidden_layers=62,
        hidden_size=5376,
        num_attention_heads=32,
        num_key_value_heads=16,
        head_dim=128,
        intermediate_size=21504,
        vocab_size=262208,
    ),
    "gpt2-xl": _gpt(48, 1600, 25, 1024),
    "gpt3-175b": _gpt(96, 12288, 96, 2048),
    "phi-3-mini": hf("Phi3ForCausalLM", "Phi3Config", sliding_window=2047),
    "mixtral-8x7b": _mixtral(32, 4096, 32, 14336),
    "mixtral-8x22b": _mixtral(56, 6144, 48, 16384),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "deepseek-v3": hf("DeepseekV3ForCausalLM", "DeepseekV3Config"),
    "mamba-2.8b": hf("MambaForCausalLM", "MambaConfig", num_hidden_layers=64, hidden_size=2560, vocab_size=50280),
    "mamba2-2.7b": hf(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        num_hidden_layers=64,
        hidden_size=2560,
        vocab_size=50288,
        num_heads=80,
        n_groups=1,
        tie_word_embeddings=True,
    ),
    "bert-base": hf("BertForMaskedLM", "BertConfig"),
    "bert-large": hf(
        "BertForMaskedLM",
        "BertConfig",
        num_hidden_layers=24,
        hidden_size=1024,
        num_attention_heads=16,
        intermediate_size=4096,
    ),
    "roberta-large": hf(
        "RobertaForMaskedLM",
        "RobertaConfig",
        num_hidden_layers=24,
        hidden_size=1024,
        num_attention_heads=16,
        intermediate_size=4096,
        vocab_size=50265,
        max_position_embeddings=514,
        type_vocab_size=1,
    ),
    "t5-large": hf("T5ForConditionalGeneration", "T5Config", d_model=1024, d_ff=4096, num_layers=24, num_heads=16),
    "whisper-large-v3": hf(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        d_model=1280,
        encoder_layers=32,
        decoder_layers=32,
        encoder_attention_heads=20,
        decoder_attention_heads=20,
        encoder_ffn_dim=5120,
        decoder_ffn_dim=5120,
        num_mel_bins=128,
        vocab_size=51866,
    ),
    "wav2vec2-large": hf(
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        num_hidden_layers=24,
        hidden_size=1024,
        num_attention_heads=16,
        intermediate_size=4096,
    ),
    "clip-vit-l14": hf(
        "CLIPModel",
        "CLIPConfig",
        projection_dim=768,
        text_config={"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12},
        vision_config={
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "patch_size": 14,
            "image_size": 224,
        },
    ),
    "vit-b16": vision("vit_base_patch16_224"),
    "vit-l16": vision("vit_large_patch16_224"),
    "deit-s16": vision("deit_small_patch16_224"),
    "swin-b": vision("swin_base_patch4_window7_224"),
    "convnext-b": vision("convnext_base"),
    "resnet50": vision("resnet50"),
    "resnet152": vision("resnet152"),
    "resnext101-32x4d": vision("resnext101_32x4d"),
    "se-resnext101-32x4d": vision("seresnext101_32x4d"),
    "efficientnet-b0": vision("efficientnet_b0"),
    "efficientnet-b4": vision("efficientnet_b4"),
    "segformer-b5": hf(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        depths=[3, 6, 40, 3],
        hidden_sizes=[64, 128, 320, 512],
        decoder_hidden_size=768,
        num_labels=150,
    ),
    "detr-r50": hf("DetrForObjectDetection", "DetrConfig", use_pretrained_backbone=False, num_labels=91),
    "sd15-unet": diffusion("UNet2DConditionModel", cross_attention_dim=768),
    "sd2-unet": diffusion(
        "UNet2DConditionModel",
        cross_attention_dim=1024,
        attention_head_dim=(5, 10, 20, 20),
        use_linear_projection=True,
    ),
    "sdxl-unet": diffusion(
        "UNet2DConditionModel",
        block_out_channels=(320, 640, 1280),
        cross_attention_dim=2048,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2, 10),
        attention_head_dim=(5, 10, 20),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
    ),
    "sd3-medium": diffusion(
        "SD3Transformer2DModel",
        num_layers=24,
        num_attention_heads=24,
        caption_projection_dim=1536,
        pos_embed_max_size=192,
    ),
    "flux-dev": diffusion("FluxTransformer2DModel", guidance_embeds=True),
}
