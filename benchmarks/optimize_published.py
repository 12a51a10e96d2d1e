"""Small networks as transformers, diffusers and timm publish them, through what a search does to one, without a GPU.

    python benchmarks/optimize_published.py [NAME …] [--out DIR] [--skip record rewrite search]

Each is recorded by the tests' stand-in for CUDA graphs and replayed on fresh inputs beside eager, bit for bit; traced,
rewritten with every rewrite for a GPU and compared in bfloat16 with float32, relative to eager's own error; and handed
to ``rl.optimize`` with a few seconds. A row is written as it ends; what differs, raises or is not recorded is printed.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import workloads  # noqa: F401  (lets transformers be imported beside a torchvision without its binary)
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/unit/optimizer"))

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
PUBLISHED: dict[str, Callable[[], Built]] = {}
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "dim": 64,
    "embedding_size": 64,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "ffn_dim": 128,
    "d_ff": 128,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "hidden_dim": 128,
    "head_dim": 16,
    "d_kv": 16,
    "max_position_embeddings": 128,
    "image_size": 32,
    "patch_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "ffn_hidden_size": 128,
    "word_embed_proj_dim": 64,
}
"""What a configuration is cut down to, where it has such a name."""
LENGTH, BATCH = 24, 2


def small(config: type, **given: Any) -> Any:
    """A configuration cut down to a size that a core runs in milliseconds."""
    known = config().to_dict()
    return config(**{**{k: v for k, v in SMALL.items() if k in known}, **given})


def entry(name: str, build: Callable[[], Built]) -> None:
    PUBLISHED[name] = build


def listed(name: str) -> Callable[[Callable[[], Built]], None]:
    return lambda build: entry(name, build)


def _ids(high: int = 90, length: int = LENGTH) -> Tensor:
    return torch.randint(5, high, (BATCH, length))


def _padded(ids: Tensor) -> Tensor:
    mask = torch.ones_like(ids)
    mask[1, -7:] = 0
    return mask


def _transformers(model: str, config: str, inputs: Callable[[], dict[str, Any]], **given: Any) -> Callable[[], Built]:
    def build() -> Built:
        import transformers

        made = getattr(transformers, model)(small(getattr(transformers, config), **given))
        return made.eval(), (), inputs()

    return build


def text() -> dict[str, Any]:
    ids = _ids()
    return {"input_ids": ids, "attention_mask": _padded(ids)}


def bare() -> dict[str, Any]:
    return {"input_ids": _ids()}


def pair() -> dict[str, Any]:
    ids = _ids()
    return {"input_ids": ids, "attention_mask": _padded(ids), "decoder_input_ids": _ids(length=9)}


def image(size: int = 32, **more: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"pixel_values": torch.randn(BATCH, 3, size, size), **more}


def wave(num: int = 4000) -> dict[str, Any]:
    return {"input_values": torch.randn(BATCH, num)}


def _encoder(name: str, model: str, config: str, **given: Any) -> None:
    entry(name, _transformers(model, config, text, **given))
    entry(f"{name}-bare", _transformers(model, config, bare, **given))


def _decoder(name: str, model: str, config: str, **given: Any) -> None:
    entry(name, _transformers(model, config, text, **given))
    entry(f"{name}-decode", _decoding(model, config, "static", given))
    entry(f"{name}-growing", _decoding(model, config, "dynamic", given))


def _decoding(model: str, config: str, kind: str, given: dict[str, Any]) -> Callable[[], Built]:
    """One token behind a cache that was filled by a text."""

    def build() -> Built:
        import transformers
        from transformers import DynamicCache, StaticCache

        settings = small(getattr(transformers, config), **given)
        made = getattr(transformers, model)(settings).eval()
        inner = settings.get_text_config(decoder=True)
        cache = StaticCache(config=inner, max_cache_len=32) if kind == "static" else DynamicCache(config=inner)
        with torch.no_grad():
            made(input_ids=_ids(), past_key_values=cache, use_cache=True)
        return (
            made,
            (),
            {
                "input_ids": _ids(length=1),
                "past_key_values": cache,
                "use_cache": True,
                "position_ids": torch.full((BATCH, 1), LENGTH),
            },
        )

    return build


for _name, _model, _config, _given in (
    ("bert", "BertModel", "BertConfig", {}),
    ("bert-classes", "BertForSequenceClassification", "BertConfig", {}),
    ("roberta", "RobertaForMaskedLM", "RobertaConfig", {}),
    ("distilbert", "DistilBertModel", "DistilBertConfig", {}),
    ("electra", "ElectraModel", "ElectraConfig", {}),
    ("albert", "AlbertForMaskedLM", "AlbertConfig", {}),
    ("deberta", "DebertaModel", "DebertaConfig", {"pos_att_type": ["c2p", "p2c"], "relative_attention": True}),
    (
        "deberta-v2",
        "DebertaV2Model",
        "DebertaV2Config",
        {
            "pos_att_type": ["c2p", "p2c"],
            "relative_attention": True,
            "position_buckets": 8,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "position_biased_input": False,
        },
    ),
    ("xlm-roberta", "XLMRobertaForTokenClassification", "XLMRobertaConfig", {}),
    ("mpnet", "MPNetModel", "MPNetConfig", {}),
    ("bigbird", "BigBirdModel", "BigBirdConfig", {"attention_type": "original_full"}),
    ("bigbird-sparse", "BigBirdModel", "BigBirdConfig", {"block_size": 2, "num_random_blocks": 1}),
    ("longformer", "LongformerModel", "LongformerConfig", {"attention_window": 8}),
    ("funnel", "FunnelModel", "FunnelConfig", {"d_head": 16, "n_head": 4, "block_sizes": [2, 2], "d_inner": 128}),
    ("modernbert", "ModernBertForMaskedLM", "ModernBertConfig", {"local_attention": 8}),
    ("squeezebert", "SqueezeBertModel", "SqueezeBertConfig", {}),
    ("fnet", "FNetModel", "FNetConfig", {}),
    ("nystromformer", "NystromformerModel", "NystromformerConfig", {"num_landmarks": 8, "segment_means_seq_len": 24}),
    ("roformer", "RoFormerModel", "RoFormerConfig", {}),
    ("convbert", "ConvBertModel", "ConvBertConfig", {}),
    ("mobilebert", "MobileBertModel", "MobileBertConfig", {"intra_bottleneck_size": 32, "true_hidden_size": 32}),
    ("xlnet", "XLNetModel", "XLNetConfig", {"d_inner": 128}),
    ("camembert", "CamembertModel", "CamembertConfig", {}),
    ("yoso", "YosoModel", "YosoConfig", {"use_expectation": True}),
    ("ibert", "IBertModel", "IBertConfig", {}),
    ("canine", "CanineModel", "CanineConfig", {"local_transformer_stride": 8, "downsampling_rate": 4}),
    ("megatron-bert", "MegatronBertModel", "MegatronBertConfig", {}),
    ("luke", "LukeModel", "LukeConfig", {"entity_vocab_size": 20, "entity_emb_size": 32}),
    ("ernie", "ErnieModel", "ErnieConfig", {}),
    ("esm", "EsmModel", "EsmConfig", {"position_embedding_type": "rotary", "mask_token_id": 3}),
    ("data2vec-text", "Data2VecTextModel", "Data2VecTextConfig", {}),
    ("eurobert", "EuroBertModel", "EuroBertConfig", {}),
    ("rembert", "RemBertModel", "RemBertConfig", {"input_embedding_size": 32, "output_embedding_size": 32}),
    ("flaubert", "FlaubertModel", "FlaubertConfig", {"emb_dim": 64}),
    ("xlm", "XLMModel", "XLMConfig", {"emb_dim": 64}),
):
    _encoder(_name, _model, _config, **_given)

for _name, _model, _config, _given in (
    ("gpt2", "GPT2LMHeadModel", "GPT2Config", {}),
    ("gpt-neo", "GPTNeoForCausalLM", "GPTNeoConfig", {"attention_types": [[["global", "local"], 1]], "window_size": 8}),
    ("gpt-neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", {}),
    ("gptj", "GPTJForCausalLM", "GPTJConfig", {"rotary_dim": 8, "n_positions": 64}),
    ("opt", "OPTForCausalLM", "OPTConfig", {}),
    ("bloom", "BloomForCausalLM", "BloomConfig", {}),
    ("llama", "LlamaForCausalLM", "LlamaConfig", {}),
    ("mistral", "MistralForCausalLM", "MistralConfig", {"sliding_window": 8}),
    ("qwen2", "Qwen2ForCausalLM", "Qwen2Config", {}),
    ("qwen3", "Qwen3ForCausalLM", "Qwen3Config", {}),
    ("gemma", "GemmaForCausalLM", "GemmaConfig", {}),
    ("gemma2", "Gemma2ForCausalLM", "Gemma2Config", {"sliding_window": 8, "query_pre_attn_scalar": 16}),
    ("gemma3", "Gemma3ForCausalLM", "Gemma3TextConfig", {"sliding_window": 8, "query_pre_attn_scalar": 16}),
    ("phi", "PhiForCausalLM", "PhiConfig", {}),
    ("phi3", "Phi3ForCausalLM", "Phi3Config", {}),
    ("falcon", "FalconForCausalLM", "FalconConfig", {}),
    ("falcon-alibi", "FalconForCausalLM", "FalconConfig", {"alibi": True}),
    ("mixtral", "MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 4}),
    ("mixtral-router", "MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 4, "output_router_logits": True}),
    (
        "qwen2-moe",
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
            "num_experts_per_tok": 2,
        },
    ),
    (
        "qwen3-moe",
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2},
    ),
    (
        "deepseek-v3",
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "q_lora_rank": 32,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
        },
    ),
    (
        "deepseek-v2",
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        {
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "q_lora_rank": 32,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
        },
    ),
    ("stablelm", "StableLmForCausalLM", "StableLmConfig", {}),
    ("starcoder2", "Starcoder2ForCausalLM", "Starcoder2Config", {}),
    ("olmo2", "Olmo2ForCausalLM", "Olmo2Config", {}),
    ("olmoe", "OlmoeForCausalLM", "OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    ("cohere", "CohereForCausalLM", "CohereConfig", {}),
    ("granite", "GraniteForCausalLM", "GraniteConfig", {}),
    ("granite-moe", "GraniteMoeForCausalLM", "GraniteMoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("codegen", "CodeGenForCausalLM", "CodeGenConfig", {"rotary_dim": 8, "n_positions": 64}),
    ("mpt", "MptForCausalLM", "MptConfig", {"max_seq_len": 64}),
    ("persimmon", "PersimmonForCausalLM", "PersimmonConfig", {}),
    ("smollm3", "SmolLM3ForCausalLM", "SmolLM3Config", {}),
    ("glm4", "Glm4ForCausalLM", "Glm4Config", {}),
    (
        "gpt-oss",
        "GptOssForCausalLM",
        "GptOssConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
    (
        "llama4",
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {"num_local_experts": 4, "intermediate_size_mlp": 128, "attention_chunk_size": 16},
    ),
    (
        "dbrx",
        "DbrxForCausalLM",
        "DbrxConfig",
        {
            "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
            "max_seq_len": 64,
        },
    ),
    (
        "jetmoe",
        "JetMoeForCausalLM",
        "JetMoeConfig",
        {"num_local_experts": 4, "kv_channels": 16, "num_key_value_heads": 2},
    ),
    ("xglm", "XGLMForCausalLM", "XGLMConfig", {"attention_heads": 4}),
    ("biogpt", "BioGptForCausalLM", "BioGptConfig", {}),
):
    _decoder(_name, _model, _config, **_given)

for _name, _model, _config, _given in (
    ("mamba", "MambaForCausalLM", "MambaConfig", {"state_size": 8}),
    (
        "mamba2",
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16, "chunk_size": 8},
    ),
    ("rwkv", "RwkvForCausalLM", "RwkvConfig", {}),
    (
        "jamba",
        "JambaForCausalLM",
        "JambaConfig",
        {"num_experts": 2, "attn_layer_offset": 1, "attn_layer_period": 2, "use_mamba_kernels": False},
    ),
    (
        "zamba2",
        "Zamba2ForCausalLM",
        "Zamba2Config",
        {
            "hybrid_layer_ids": [1],
            "use_mem_eff_path": False,
            "mamba_headdim": 16,
            "n_mamba_heads": 8,
            "mamba_ngroups": 1,
        },
    ),
    ("bamba", "BambaForCausalLM", "BambaConfig", {"mamba_n_heads": 8, "mamba_d_head": 16, "attn_layer_indices": [1]}),
    ("falcon-mamba", "FalconMambaForCausalLM", "FalconMambaConfig", {"state_size": 8}),
    (
        "recurrent-gemma",
        "RecurrentGemmaForCausalLM",
        "RecurrentGemmaConfig",
        {"lru_width": 64, "block_types": ["recurrent", "attention"]},
    ),
    (
        "qwen3-next",
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "num_experts_per_tok": 2,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    ("xlstm", "xLSTMForCausalLM", "xLSTMConfig", {"num_blocks": 2}),
    ("nemotron", "NemotronForCausalLM", "NemotronConfig", {}),
):
    entry(_name, _transformers(_model, _config, text, **_given))

for _name, _model, _config, _given in (
    ("t5", "T5ForConditionalGeneration", "T5Config", {}),
    ("mt5", "MT5ForConditionalGeneration", "MT5Config", {}),
    ("umt5", "UMT5ForConditionalGeneration", "UMT5Config", {}),
    ("longt5", "LongT5ForConditionalGeneration", "LongT5Config", {"local_radius": 4}),
    ("bart", "BartForConditionalGeneration", "BartConfig", {}),
    ("pegasus", "PegasusForConditionalGeneration", "PegasusConfig", {}),
    ("mbart", "MBartForConditionalGeneration", "MBartConfig", {}),
    ("marian", "MarianMTModel", "MarianConfig", {}),
    ("m2m100", "M2M100ForConditionalGeneration", "M2M100Config", {}),
    (
        "led",
        "LEDForConditionalGeneration",
        "LEDConfig",
        {"attention_window": 8, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
    ),
    ("blenderbot", "BlenderbotForConditionalGeneration", "BlenderbotConfig", {}),
    (
        "prophetnet",
        "ProphetNetForConditionalGeneration",
        "ProphetNetConfig",
        {
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
        },
    ),
    (
        "bigbird-pegasus",
        "BigBirdPegasusForConditionalGeneration",
        "BigBirdPegasusConfig",
        {"attention_type": "original_full"},
    ),
    (
        "switch",
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    ),
    (
        "nllb-moe",
        "NllbMoeForConditionalGeneration",
        "NllbMoeConfig",
        {"num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2},
    ),
    ("fsmt", "FSMTForConditionalGeneration", "FSMTConfig", {"src_vocab_size": 96, "tgt_vocab_size": 96}),
    ("plbart", "PLBartForConditionalGeneration", "PLBartConfig", {}),
    ("t5gemma", "T5GemmaForConditionalGeneration", "T5GemmaConfig", {}),
):
    entry(_name, _transformers(_model, _config, pair, **_given))

_STAGES = {"depths": [1, 1, 1, 1], "embed_dim": 16, "num_heads": [1, 2, 2, 4], "window_size": 4, "patch_size": 4}
_PYRAMID = {"hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1]}
for _name, _model, _config, _size, _given in (
    ("vit", "ViTForImageClassification", "ViTConfig", 32, {}),
    ("deit", "DeiTForImageClassificationWithTeacher", "DeiTConfig", 32, {}),
    ("beit", "BeitForImageClassification", "BeitConfig", 32, {"use_relative_position_bias": True}),
    ("swin", "SwinForImageClassification", "SwinConfig", 128, {**_STAGES, "depths": [2, 2, 1, 1], "image_size": 128}),
    (
        "swinv2",
        "Swinv2ForImageClassification",
        "Swinv2Config",
        128,
        {**_STAGES, "depths": [2, 2, 1, 1], "image_size": 128},
    ),
    ("convnext", "ConvNextForImageClassification", "ConvNextConfig", 64, _PYRAMID),
    ("convnextv2", "ConvNextV2ForImageClassification", "ConvNextV2Config", 64, _PYRAMID),
    (
        "resnet",
        "ResNetForImageClassification",
        "ResNetConfig",
        64,
        {"embedding_size": 16, "hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1]},
    ),
    (
        "efficientnet",
        "EfficientNetForImageClassification",
        "EfficientNetConfig",
        64,
        {"width_coefficient": 0.5, "depth_coefficient": 0.5, "hidden_dim": 640},
    ),
    ("mobilenet-v1", "MobileNetV1ForImageClassification", "MobileNetV1Config", 64, {"depth_multiplier": 0.25}),
    ("mobilenet-v2", "MobileNetV2ForImageClassification", "MobileNetV2Config", 64, {"depth_multiplier": 0.35}),
    (
        "regnet",
        "RegNetForImageClassification",
        "RegNetConfig",
        64,
        {"hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1], "groups_width": 8},
    ),
    (
        "segformer",
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        64,
        {
            "hidden_sizes": [16, 32, 32, 64],
            "depths": [1, 1, 1, 1],
            "decoder_hidden_size": 32,
            "num_attention_heads": [1, 2, 2, 4],
        },
    ),
    ("yolos", "YolosForObjectDetection", "YolosConfig", 32, {"num_detection_tokens": 10, "image_size": [32, 32]}),
    ("dinov2", "Dinov2Model", "Dinov2Config", 32, {}),
    ("dinov2-registers", "Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", 32, {}),
    ("dinov3", "DINOv3ViTModel", "DINOv3ViTConfig", 32, {}),
    ("vit-mae", "ViTMAEModel", "ViTMAEConfig", 32, {}),
    (
        "poolformer",
        "PoolFormerModel",
        "PoolFormerConfig",
        64,
        {"hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1]},
    ),
    (
        "pvt",
        "PvtModel",
        "PvtConfig",
        64,
        {
            "hidden_sizes": [16, 32, 32, 64],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 2, 4],
            "image_size": 64,
        },
    ),
    (
        "pvt-v2",
        "PvtV2Model",
        "PvtV2Config",
        64,
        {"hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4]},
    ),
    ("cvt", "CvtModel", "CvtConfig", 64, {"embed_dim": [16, 32, 32], "num_heads": [1, 2, 2], "depth": [1, 1, 2]}),
    (
        "levit",
        "LevitModel",
        "LevitConfig",
        64,
        {
            "image_size": 64,
            "hidden_sizes": [32, 32, 64],
            "num_attention_heads": [2, 2, 4],
            "depths": [1, 1, 1],
            "key_dim": [8, 8, 8],
        },
    ),
    (
        "mobilevit",
        "MobileViTModel",
        "MobileViTConfig",
        64,
        {
            "hidden_sizes": [32, 48, 64],
            "neck_hidden_sizes": [16, 16, 24, 32, 48, 64, 80],
            "image_size": 64,
            "patch_size": 2,
        },
    ),
    (
        "mobilevit-v2",
        "MobileViTV2Model",
        "MobileViTV2Config",
        64,
        {"image_size": 64, "patch_size": 2, "width_multiplier": 0.25},
    ),
    (
        "focalnet",
        "FocalNetModel",
        "FocalNetConfig",
        64,
        {"embed_dim": 16, "depths": [1, 1, 1, 1], "image_size": 64, "patch_size": 4},
    ),
    ("van", "VanModel", "VanConfig", 64, {"hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1]}),
    (
        "dpt",
        "DPTForDepthEstimation",
        "DPTConfig",
        32,
        {
            "backbone_out_indices": [0, 1, 2, 3],
            "num_hidden_layers": 4,
            "neck_hidden_sizes": [16, 32, 32, 64],
            "fusion_hidden_size": 32,
            "is_hybrid": False,
            "reassemble_factors": [4, 2, 1, 0.5],
        },
    ),
    (
        "glpn",
        "GLPNForDepthEstimation",
        "GLPNConfig",
        64,
        {
            "hidden_sizes": [16, 32, 32, 64],
            "depths": [1, 1, 1, 1],
            "decoder_hidden_size": 32,
            "num_attention_heads": [1, 2, 2, 4],
        },
    ),
    (
        "upernet",
        "UperNetForSemanticSegmentation",
        "UperNetConfig",
        64,
        {"backbone_config": "convnext", "hidden_size": 32, "auxiliary_in_channels": 32, "auxiliary_channels": 16},
    ),
    (
        "swin2sr",
        "Swin2SRForImageSuperResolution",
        "Swin2SRConfig",
        16,
        {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "image_size": 16, "patch_size": 1},
    ),
    (
        "hiera",
        "HieraModel",
        "HieraConfig",
        64,
        {
            "embed_dim": 16,
            "depths": [1, 1, 1, 1],
            "num_heads": [1, 2, 2, 4],
            "image_size": [64, 64],
            "masked_unit_size": [2, 2],
        },
    ),
    (
        "bit",
        "BitModel",
        "BitConfig",
        64,
        {"hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1], "embedding_size": 16, "num_groups": 8},
    ),
    ("ijepa", "IJepaModel", "IJepaConfig", 32, {}),
    (
        "beit-segments",
        "BeitForSemanticSegmentation",
        "BeitConfig",
        32,
        {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "auxiliary_channels": 16, "pool_scales": [1, 2]},
    ),
    ("mgp-str", "MgpstrForSceneTextRecognition", "MgpstrConfig", 32, {"image_size": [32, 32], "max_token_length": 8}),
    ("timesformer", "TimesformerModel", "TimesformerConfig", 0, {"num_frames": 4}),
    ("videomae", "VideoMAEModel", "VideoMAEConfig", 0, {"num_frames": 4}),
    ("vivit", "VivitModel", "VivitConfig", 0, {"num_frames": 4, "tubelet_size": [2, 8, 8]}),
):
    entry(
        _name,
        _transformers(
            _model,
            _config,
            image(_size) if _size else (lambda: {"pixel_values": torch.randn(BATCH, 4, 3, 32, 32)}),
            **_given,
        ),
    )


def _detector(model: str, config: str, **given: Any) -> Callable[[], Built]:
    """A detector behind a small backbone of the same library."""

    def build() -> Built:
        import transformers

        backbone = small(
            transformers.ResNetConfig,
            embedding_size=16,
            hidden_sizes=[16, 32, 32, 64],
            depths=[1, 1, 1, 1],
            out_features=["stage2", "stage3", "stage4"],
        )
        settings = small(
            getattr(transformers, config),
            backbone_config=backbone,
            use_timm_backbone=False,
            backbone=None,
            use_pretrained_backbone=False,
            **given,
        )
        made = getattr(transformers, model)(settings).eval()
        mask = torch.ones(BATCH, 64, 64, dtype=torch.long)
        mask[1, 48:] = 0
        return made, (), {"pixel_values": torch.randn(BATCH, 3, 64, 64), "pixel_mask": mask}

    return build


entry("detr", _detector("DetrForObjectDetection", "DetrConfig", num_queries=10))
entry("conditional-detr", _detector("ConditionalDetrForObjectDetection", "ConditionalDetrConfig", num_queries=10))
entry(
    "deformable-detr",
    _detector("DeformableDetrForObjectDetection", "DeformableDetrConfig", num_queries=10, num_feature_levels=3),
)
entry("dab-detr", _detector("DabDetrForObjectDetection", "DabDetrConfig", num_queries=10, hidden_size=64))
entry("table-transformer", _detector("TableTransformerForObjectDetection", "TableTransformerConfig", num_queries=10))


@listed("rt-detr")
def _() -> Built:
    from transformers import RTDetrConfig, RTDetrForObjectDetection, RTDetrResNetConfig

    backbone = RTDetrResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32, 32, 64],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )
    settings = RTDetrConfig(
        backbone_config=backbone,
        encoder_hidden_dim=32,
        encoder_in_channels=[32, 32, 64],
        d_model=32,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_queries=10,
        decoder_layers=2,
        decoder_in_channels=[32, 32, 32],
        anchor_image_size=None,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        feat_strides=[8, 16, 32],
        num_denoising=0,
    )
    return RTDetrForObjectDetection(settings).eval(), (), image(64)()


@listed("mask2former")
def _() -> Built:
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig

    backbone = SwinConfig(**{**_STAGES, "image_size": 64}, out_features=["stage1", "stage2", "stage3", "stage4"])
    settings = Mask2FormerConfig(
        backbone_config=backbone,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=64,
        dim_feedforward=64,
        encoder_layers=2,
        decoder_layers=3,
        num_attention_heads=4,
        num_queries=10,
    )
    return Mask2FormerForUniversalSegmentation(settings).eval(), (), image(64)()


@listed("maskformer")
def _() -> Built:
    from transformers import DetrConfig, MaskFormerConfig, MaskFormerForInstanceSegmentation, SwinConfig

    backbone = SwinConfig(**{**_STAGES, "image_size": 64}, out_features=["stage1", "stage2", "stage3", "stage4"])
    settings = MaskFormerConfig(
        backbone_config=backbone,
        decoder_config=small(DetrConfig, num_queries=10),
        fpn_feature_size=32,
        mask_feature_size=32,
    )
    return MaskFormerForInstanceSegmentation(settings).eval(), (), image(64)()


@listed("sam")
def _() -> Built:
    from transformers import SamConfig, SamModel

    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 64,
        "patch_size": 8,
        "output_channels": 32,
        "mlp_dim": 64,
        "window_size": 4,
        "global_attn_indexes": [1],
        "num_pos_feats": 16,
    }
    settings = SamConfig(
        vision_config=vision,
        prompt_encoder_config={"hidden_size": 32, "image_size": 64, "patch_size": 8},
        mask_decoder_config={"hidden_size": 32, "mlp_dim": 64, "iou_head_hidden_dim": 32, "num_attention_heads": 4},
    )
    return SamModel(settings).eval(), (), {**image(64)(), "input_points": torch.rand(BATCH, 1, 3, 2) * 64}


def _towers(model: str, config: str, **more: Any) -> Callable[[], Built]:
    def build() -> Built:
        import transformers

        kind = getattr(transformers, config)
        text_config = {k: v for k, v in SMALL.items() if k not in ("image_size", "patch_size")}
        vision = {k: v for k, v in SMALL.items() if k not in ("vocab_size", "head_dim")}
        settings = kind(text_config=text_config, vision_config=vision, projection_dim=32, **more)
        ids = _ids()
        return (
            getattr(transformers, model)(settings).eval(),
            (),
            {"input_ids": ids, "attention_mask": _padded(ids), **image()()},
        )

    return build


for _name, _model, _config in (
    ("clip", "CLIPModel", "CLIPConfig"),
    ("siglip", "SiglipModel", "SiglipConfig"),
    ("siglip2", "Siglip2Model", "Siglip2Config"),
    ("altclip", "AltCLIPModel", "AltCLIPConfig"),
    ("chinese-clip", "ChineseCLIPModel", "ChineseCLIPConfig"),
    ("blip", "BlipForImageTextRetrieval", "BlipConfig"),
    ("blip-caption", "BlipForConditionalGeneration", "BlipConfig"),
    ("metaclip2", "MetaClip2Model", "MetaClip2Config"),
):
    entry(_name, _towers(_model, _config))


@listed("llava")
def _() -> Built:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    settings = LlavaConfig(vision_config=small(CLIPVisionConfig), text_config=small(LlamaConfig), image_token_id=95)
    ids = _ids()
    ids[:, 1:17] = 95
    return (
        LlavaForConditionalGeneration(settings).eval(),
        (),
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), **image()()},
    )


@listed("vilt")
def _() -> Built:
    from transformers import ViltConfig, ViltModel

    ids = _ids()
    return ViltModel(small(ViltConfig)).eval(), (), {"input_ids": ids, "attention_mask": _padded(ids), **image()()}


@listed("layoutlm")
def _() -> Built:
    from transformers import LayoutLMConfig, LayoutLMModel

    ids = _ids()
    return (
        LayoutLMModel(small(LayoutLMConfig)).eval(),
        (),
        {
            "input_ids": ids,
            "attention_mask": _padded(ids),
            "bbox": torch.randint(0, 9, (BATCH, LENGTH, 4)).sort(-1).values,
        },
    )


@listed("trocr-like")
def _() -> Built:
    from transformers import TrOCRConfig, VisionEncoderDecoderConfig, VisionEncoderDecoderModel, ViTConfig

    settings = VisionEncoderDecoderConfig.from_encoder_decoder_configs(small(ViTConfig), small(TrOCRConfig))
    return VisionEncoderDecoderModel(config=settings).eval(), (), {**image()(), "decoder_input_ids": _ids(length=9)}


_CONVS = {
    "conv_dim": [16, 16, 16],
    "conv_kernel": [10, 3, 2],
    "conv_stride": [5, 2, 2],
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
}
for _name, _model, _config, _given in (
    ("wav2vec2", "Wav2Vec2ForCTC", "Wav2Vec2Config", _CONVS),
    ("hubert", "HubertModel", "HubertConfig", _CONVS),
    ("wavlm", "WavLMModel", "WavLMConfig", _CONVS),
    ("data2vec-audio", "Data2VecAudioModel", "Data2VecAudioConfig", {**_CONVS, "num_conv_pos_embeddings": 2}),
    (
        "wav2vec2-conformer",
        "Wav2Vec2ConformerModel",
        "Wav2Vec2ConformerConfig",
        {**_CONVS, "position_embeddings_type": "rotary"},
    ),
    (
        "wav2vec2-conformer-relative",
        "Wav2Vec2ConformerModel",
        "Wav2Vec2ConformerConfig",
        {**_CONVS, "position_embeddings_type": "relative"},
    ),
    ("unispeech-sat", "UniSpeechSatModel", "UniSpeechSatConfig", _CONVS),
    ("sew", "SEWModel", "SEWConfig", {**_CONVS, "squeeze_factor": 2}),
):
    entry(_name, _transformers(_model, _config, wave, **_given))
    entry(
        f"{_name}-masked",
        _transformers(
            _model,
            _config,
            lambda: {**wave(), "attention_mask": (torch.arange(4000)[None] < torch.tensor([[4000], [3000]])).long()},
            **_given,
        ),
    )
entry(
    "whisper",
    _transformers(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        lambda: {"input_features": torch.randn(BATCH, 80, 60), "decoder_input_ids": _ids(length=9)},
        max_source_positions=30,
        max_target_positions=32,
        num_mel_bins=80,
    ),
)
entry(
    "wav2vec2-bert",
    _transformers(
        "Wav2Vec2BertModel",
        "Wav2Vec2BertConfig",
        lambda: {
            "input_features": torch.randn(BATCH, 40, 32),
            "attention_mask": (torch.arange(40)[None] < torch.tensor([[40], [30]])).long(),
        },
        feature_projection_input_dim=32,
    ),
)
entry(
    "ast",
    _transformers(
        "ASTModel",
        "ASTConfig",
        lambda: {"input_values": torch.randn(BATCH, 64, 32)},
        max_length=64,
        num_mel_bins=32,
        patch_size=16,
    ),
)
entry(
    "speech-to-text",
    _transformers(
        "Speech2TextForConditionalGeneration",
        "Speech2TextConfig",
        lambda: {
            "input_features": torch.randn(BATCH, 60, 80),
            "attention_mask": (torch.arange(60)[None] < torch.tensor([[60], [40]])).long(),
            "decoder_input_ids": _ids(length=9),
        },
        max_source_positions=64,
        max_target_positions=32,
    ),
)
entry(
    "encodec",
    _transformers(
        "EncodecModel",
        "EncodecConfig",
        lambda: {"input_values": torch.randn(BATCH, 1, 1280)},
        num_filters=8,
        hidden_size=32,
        codebook_size=32,
        num_lstm_layers=1,
    ),
)
entry(
    "dac",
    _transformers(
        "DacModel",
        "DacConfig",
        lambda: {"input_values": torch.randn(BATCH, 1, 1024)},
        encoder_hidden_size=16,
        decoder_hidden_size=64,
        n_codebooks=2,
        codebook_size=32,
        downsampling_ratios=[2, 4],
        upsampling_ratios=[4, 2],
    ),
)
entry(
    "mimi",
    _transformers(
        "MimiModel",
        "MimiConfig",
        lambda: {"input_values": torch.randn(BATCH, 1, 3840)},
        num_filters=8,
        codebook_size=32,
        num_quantizers=4,
        codebook_dim=16,
        upsampling_ratios=[8, 6, 5, 4],
    ),
)
entry(
    "vits",
    _transformers(
        "VitsModel",
        "VitsConfig",
        text,
        flow_size=32,
        upsample_initial_channel=32,
        spectrogram_bins=33,
        upsample_rates=[4, 4],
        upsample_kernel_sizes=[8, 8],
        window_size=4,
        wavenet_dilation_rate=1,
        prior_encoder_num_flows=2,
        posterior_encoder_num_wavenet_layers=2,
        prior_encoder_num_wavenet_layers=2,
        duration_predictor_filter_channels=32,
        depth_separable_channels=2,
    ),
)
entry(
    "speecht5",
    _transformers(
        "SpeechT5ForTextToSpeech",
        "SpeechT5Config",
        lambda: {
            **text(),
            "decoder_input_values": torch.randn(BATCH, 6, 80),
            "speaker_embeddings": torch.randn(BATCH, 512),
        },
    ),
)
entry(
    "hifigan",
    _transformers(
        "SpeechT5HifiGan",
        "SpeechT5HifiGanConfig",
        lambda: {"spectrogram": torch.randn(BATCH, 12, 80)},
        upsample_initial_channel=32,
    ),
)
entry(
    "fastspeech2-conformer",
    _transformers(
        "FastSpeech2ConformerModel",
        "FastSpeech2ConformerConfig",
        text,
        encoder_num_attention_heads=4,
        decoder_num_attention_heads=4,
        encoder_linear_units=64,
        decoder_linear_units=64,
    ),
)
entry(
    "clap-audio",
    _transformers(
        "ClapAudioModelWithProjection",
        "ClapAudioConfig",
        lambda: {"input_features": torch.randn(BATCH, 1, 64, 32)},
        spec_size=64,
        num_mel_bins=32,
        patch_embeds_hidden_size=16,
        depths=[1, 1],
        num_attention_heads=[2, 2],
        hidden_size=32,
        window_size=4,
        patch_size=4,
        patch_stride=[4, 4],
    ),
)
entry(
    "musicgen-decoder",
    _transformers(
        "MusicgenForCausalLM", "MusicgenDecoderConfig", lambda: {"input_ids": torch.randint(0, 90, (BATCH * 4, 12))}
    ),
)
entry(
    "bark",
    _transformers(
        "BarkSemanticModel", "BarkSemanticConfig", bare, input_vocab_size=96, output_vocab_size=96, block_size=64
    ),
)
entry(
    "moonshine",
    _transformers(
        "MoonshineForConditionalGeneration",
        "MoonshineConfig",
        lambda: {"input_values": torch.randn(BATCH, 4000), "decoder_input_ids": _ids(length=9)},
        encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=2,
        encoder_num_attention_heads=4,
        decoder_num_attention_heads=4,
    ),
)
entry(
    "patchtst",
    _transformers(
        "PatchTSTForPrediction",
        "PatchTSTConfig",
        lambda: {"past_values": torch.randn(BATCH, 32, 3)},
        num_input_channels=3,
        context_length=32,
        patch_length=4,
        patch_stride=4,
        prediction_length=8,
        num_attention_heads=4,
    ),
)
entry(
    "patchtsmixer",
    _transformers(
        "PatchTSMixerForPrediction",
        "PatchTSMixerConfig",
        lambda: {"past_values": torch.randn(BATCH, 32, 3)},
        num_input_channels=3,
        context_length=32,
        patch_length=4,
        patch_stride=4,
        prediction_length=8,
    ),
)


def _series(model: str, config: str) -> Callable[[], Built]:
    def inputs() -> dict[str, Any]:
        return {
            "past_values": torch.randn(BATCH, 23).abs(),
            "past_time_features": torch.randn(BATCH, 23, 2),
            "past_observed_mask": torch.ones(BATCH, 23),
            "future_values": torch.randn(BATCH, 8),
            "future_time_features": torch.randn(BATCH, 8, 2),
        }

    return _transformers(
        model,
        config,
        inputs,
        prediction_length=8,
        context_length=16,
        num_time_features=2,
        lags_sequence=[1, 2, 7],
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
    )


entry("informer", _series("InformerModel", "InformerConfig"))
entry("autoformer", _series("AutoformerModel", "AutoformerConfig"))
entry("time-series-transformer", _series("TimeSeriesTransformerModel", "TimeSeriesTransformerConfig"))
entry(
    "timesfm",
    _transformers(
        "TimesFmModel",
        "TimesFmConfig",
        lambda: {
            "past_values": torch.randn(BATCH, 64),
            "past_values_padding": torch.zeros(BATCH, 64),
            "freq": torch.zeros(BATCH, 1, dtype=torch.long),
        },
        patch_length=8,
    ),
)
entry(
    "decision-transformer",
    _transformers(
        "DecisionTransformerModel",
        "DecisionTransformerConfig",
        lambda: {
            "states": torch.randn(BATCH, 6, 17),
            "actions": torch.randn(BATCH, 6, 4),
            "rewards": torch.randn(BATCH, 6, 1),
            "returns_to_go": torch.randn(BATCH, 6, 1),
            "timesteps": torch.arange(6).expand(BATCH, 6).contiguous(),
            "attention_mask": torch.ones(BATCH, 6),
        },
    ),
)
entry(
    "perceiver",
    _transformers(
        "PerceiverForMaskedLM",
        "PerceiverConfig",
        lambda: {"inputs": _ids(), "attention_mask": torch.ones(BATCH, LENGTH)},
        num_latents=8,
        d_latents=32,
        num_blocks=1,
        num_self_attends_per_block=2,
        num_self_attention_heads=4,
        num_cross_attention_heads=4,
        max_position_embeddings=LENGTH,
    ),
)
entry("vitpose", _transformers("VitPoseForPoseEstimation", "VitPoseConfig", image(32)))
entry("depth-anything", _transformers("DepthAnythingForDepthEstimation", "DepthAnythingConfig", image(28)))


def _diffusers(name: str, inputs: Callable[[], dict[str, Any]], **given: Any) -> Callable[[], Built]:
    def build() -> Built:
        import diffusers

        return getattr(diffusers, name)(**given).eval(), (), inputs()

    return build


entry(
    "unet2d",
    _diffusers(
        "UNet2DModel",
        lambda: {"sample": torch.randn(BATCH, 3, 16, 16), "timestep": torch.tensor([5, 9])},
        sample_size=16,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=8,
    ),
)
entry(
    "unet2d-int",
    _diffusers(
        "UNet2DModel",
        lambda: {"sample": torch.randn(BATCH, 3, 16, 16), "timestep": 7},
        sample_size=16,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=8,
    ),
)
entry(
    "unet-condition",
    _diffusers(
        "UNet2DConditionModel",
        lambda: {
            "sample": torch.randn(BATCH, 4, 16, 16),
            "timestep": torch.tensor(5),
            "encoder_hidden_states": torch.randn(BATCH, 7, 32),
        },
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    ),
)
entry(
    "vae",
    _diffusers(
        "AutoencoderKL",
        lambda: {"sample": torch.randn(BATCH, 3, 32, 32)},
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
        latent_channels=4,
    ),
)
entry(
    "vq",
    _diffusers(
        "VQModel",
        lambda: {"sample": torch.randn(BATCH, 3, 32, 32)},
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
        num_vq_embeddings=32,
    ),
)
entry(
    "tiny-vae",
    _diffusers(
        "AutoencoderTiny",
        lambda: {"sample": torch.randn(BATCH, 3, 32, 32)},
        encoder_block_out_channels=(16, 16),
        decoder_block_out_channels=(16, 16),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
    ),
)
entry(
    "dit",
    _diffusers(
        "DiTTransformer2DModel",
        lambda: {
            "hidden_states": torch.randn(BATCH, 4, 16, 16),
            "timestep": torch.tensor([5, 9]),
            "class_labels": torch.tensor([1, 2]),
        },
        num_attention_heads=4,
        attention_head_dim=16,
        num_layers=2,
        sample_size=16,
        out_channels=8,
        norm_num_groups=4,
    ),
)
entry(
    "sd3",
    _diffusers(
        "SD3Transformer2DModel",
        lambda: {
            "hidden_states": torch.randn(BATCH, 4, 16, 16),
            "encoder_hidden_states": torch.randn(BATCH, 7, 32),
            "pooled_projections": torch.randn(BATCH, 64),
            "timestep": torch.tensor([5.0, 9.0]),
        },
        sample_size=16,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=64,
        pooled_projection_dim=64,
        out_channels=4,
        pos_embed_max_size=16,
    ),
)
entry(
    "flux",
    _diffusers(
        "FluxTransformer2DModel",
        lambda: {
            "hidden_states": torch.randn(BATCH, 16, 4),
            "encoder_hidden_states": torch.randn(BATCH, 7, 32),
            "pooled_projections": torch.randn(BATCH, 32),
            "timestep": torch.tensor([0.5, 0.9]),
            "img_ids": torch.zeros(16, 3),
            "txt_ids": torch.zeros(7, 3),
        },
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    ),
)
entry(
    "pixart",
    _diffusers(
        "PixArtTransformer2DModel",
        lambda: {
            "hidden_states": torch.randn(BATCH, 4, 16, 16),
            "encoder_hidden_states": torch.randn(BATCH, 7, 32),
            "timestep": torch.tensor([5, 9]),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
            "encoder_attention_mask": torch.ones(BATCH, 7),
        },
        num_attention_heads=4,
        attention_head_dim=16,
        num_layers=2,
        sample_size=16,
        out_channels=8,
        cross_attention_dim=64,
        caption_channels=32,
        norm_num_groups=4,
    ),
)
entry(
    "controlnet",
    _diffusers(
        "ControlNetModel",
        lambda: {
            "sample": torch.randn(BATCH, 4, 16, 16),
            "timestep": torch.tensor(5),
            "encoder_hidden_states": torch.randn(BATCH, 7, 32),
            "controlnet_cond": torch.randn(BATCH, 3, 128, 128),
        },
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
        conditioning_embedding_out_channels=(8, 16, 16, 16),
    ),
)
entry(
    "unet3d",
    _diffusers(
        "UNet3DConditionModel",
        lambda: {
            "sample": torch.randn(1, 4, 3, 16, 16),
            "timestep": torch.tensor(5),
            "encoder_hidden_states": torch.randn(1, 7, 32),
        },
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    ),
)
entry(
    "unet1d",
    _diffusers(
        "UNet1DModel",
        lambda: {"sample": torch.randn(BATCH, 14, 16), "timestep": torch.tensor([5])},
        block_out_channels=(32, 64),
        in_channels=14,
        out_channels=14,
        down_block_types=("DownResnetBlock1D",) * 2,
        up_block_types=("UpResnetBlock1D",),
        mid_block_type="MidResTemporalBlock1D",
        out_block_type="OutConv1DBlock",
        flip_sin_to_cos=False,
        use_timestep_embedding=True,
        time_embedding_type="positional",
        act_fn="swish",
        downsample_each_block=False,
        norm_num_groups=8,
        layers_per_block=1,
    ),
)


def _timm(name: str, size: int = 64, **given: Any) -> Callable[[], Built]:
    def build() -> Built:
        import timm

        return (
            timm.create_model(name, pretrained=False, num_classes=10, **given).eval(),
            (torch.randn(BATCH, 3, size, size),),
            {},
        )

    return build


for _name in (
    "efficientvit_b0",
    "fastvit_t8",
    "ghostnet_050",
    "hrnet_w18_small",
    "inception_v4",
    "maxvit_pico_rw_256",
    "mobileone_s0",
    "nfnet_f0",
    "repvgg_a0",
    "res2net50_14w_8s",
    "resnest14d",
    "tf_efficientnetv2_b0",
    "xception41",
    "edgenext_xx_small",
    "coatnet_pico_rw_224",
    "eca_nfnet_l0",
    "lambda_resnet26t",
    "halonet26t",
    "botnet26t_256",
    "gcresnet33ts",
    "rexnet_100",
    "vovnet39a",
    "dla34",
    "dpn48b",
    "selecsls42",
    "skresnet18",
    "tinynet_a",
    "cs3darknet_s",
    "efficientformerv2_s0",
    "repvit_m1",
    "starnet_s1",
    "mambaout_femto",
    "mobilenetv4_conv_small",
    "hgnetv2_b0",
    "inception_next_atto",
    "poolformerv2_s12",
):
    entry(f"timm-{_name}", _timm(_name, 256 if "256" in _name else 224 if "224" in _name else 128))


def fresh(value: Any) -> Any:
    """Arguments like these with other numbers: floats drawn anew, small whole numbers turned around."""
    if not isinstance(value, Tensor):
        return value
    if value.is_floating_point():
        return (
            torch.randn_like(value)
            if value.min() < 0
            else torch.rand_like(value) * (value.max() - value.min()) + value.min()
        )
    return value.flip(0) if value.dim() else value.clone()


def drawn(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments with other numbers; a cache that lies still is the caller's, and grows by every call."""
    return {
        k: v
        if k == "past_key_values" and _lies_still(v)
        else copy.deepcopy(v)
        if k == "past_key_values"
        else tree_map(fresh, v)
        for k, v in kwargs.items()
    }


def _lies_still(cache: Any) -> bool:
    return type(cache).__name__ == "StaticCache"


def tensors(result: Any) -> list[Tensor]:
    if hasattr(result, "items") and not isinstance(result, dict):
        result = dict(result.items())
    found = []
    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif hasattr(leaf, "layers"):  # a cache
            found += [t for layer in leaf.layers for t in vars(layer).values() if isinstance(t, Tensor)]
    return found


def compared(mine: Any, theirs: Any) -> str:
    a, b = tensors(mine), tensors(theirs)
    if type(mine) is not type(theirs) or len(a) != len(b):
        return f"{type(mine).__name__} of {len(a)} tensors instead of {type(theirs).__name__} of {len(b)}"
    for i, (x, y) in enumerate(zip(a, b)):
        if x.shape != y.shape or x.dtype != y.dtype:
            return f"result {i}: {x.dtype} {tuple(x.shape)} instead of {y.dtype} {tuple(y.shape)}"
        if not torch.equal(x, y) and not torch.allclose(x, y, rtol=0, atol=0, equal_nan=True):
            return f"result {i} differs by {(x.double() - y.double()).abs().max():.3g}"
    return ""


def recorded(built: Built) -> dict[str, Any]:
    """Whether the stand-in records the call, and replays are eager's on other inputs."""
    from recorder import TapeExecutor

    from ridgeline.engine.replay.inference import graph_inference
    from ridgeline.errors import NotGraphable

    model, args, kwargs = built
    with torch.no_grad():
        found: dict[str, Any] = {}
        for guesses in (False, True):
            try:
                graphed = graph_inference(model, args, kwargs, model, executor=TapeExecutor(), guesses=guesses)
                found["recorded"] = "guessed" if guesses else "whole"
                break
            except NotGraphable as error:
                found["refused"] = str(error)
        else:
            return found
        for turn in range(3):
            given, again = (tree_map(fresh, args), drawn(kwargs)) if turn else (args, drawn(kwargs))
            twin = copy.deepcopy((given, again))
            torch.manual_seed(turn)
            mine = graphed(*given, **again)
            torch.manual_seed(turn)
            if wrong := compared(mine, model(*twin[0], **twin[1])):
                return {**found, "wrong": f"turn {turn}: {wrong}"}
        return {**found, "replays": graphed.replays, "misses": dict(graphed.misses)}


def rewritten(built: Built) -> dict[str, Any]:
    """What every rewrite for a GPU makes of it in bfloat16, farther from float32 than eager or not."""
    from ridgeline.optimizer.backend import Report, compiled
    from ridgeline.optimizer.rewrites import recommended

    model, args, kwargs = built
    exact = copy.deepcopy(built)
    half = model.to(torch.bfloat16)
    args, kwargs = _cast((args, kwargs), torch.bfloat16)
    wide = _cast((args, kwargs), torch.float32)
    report = Report()
    torch._dynamo.reset()
    with torch.no_grad():
        reference = tensors(exact[0].to(torch.bfloat16).float()(*wide[0], **wide[1]))
        eager = tensors(half(*copy.deepcopy(args), **copy.deepcopy(kwargs)))
        fast = compiled(half, rewrites=recommended("inference", "none", "cuda"), report=report)
        mine = tensors(fast(*copy.deepcopy(args), **copy.deepcopy(kwargs)))
    errors = [(_error(m, r), _error(e, r)) for m, e, r in zip(mine, eager, reference, strict=True)]
    worst = max(errors, key=lambda pair: pair[0] / max(pair[1], 1e-3), default=(0.0, 0.0))
    return {"error": worst[0], "eager": worst[1], "rewrites": report.counts(), "graphs": report.graphs}


def _cast(value: Any, dtype: torch.dtype) -> Any:
    def one(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(dtype) if leaf.is_floating_point() else leaf.clone()
        if hasattr(leaf, "layers"):
            leaf = copy.deepcopy(leaf)
            for layer in leaf.layers:
                for name, held in vars(layer).items():
                    if isinstance(held, Tensor) and held.is_floating_point():
                        setattr(layer, name, held.to(dtype))
                    if name == "dtype":
                        layer.dtype = dtype
        return leaf

    return tree_map(one, value)


def _error(x: Tensor, reference: Tensor) -> float:
    if not x.is_floating_point():
        return float((x.long() != reference.long()).double().mean()) if x.shape == reference.shape else 9.0
    x, reference = x.double(), reference.double()
    seen = reference.isfinite() & (reference.abs() < 1e30)
    if not torch.equal(seen, x.isfinite() & (x.abs() < 1e30)):
        return float("inf")
    norm = reference[seen].square().mean().sqrt()
    return float((x[seen] - reference[seen]).square().mean().sqrt() / norm.clamp_min(1e-9)) if seen.any() else 0.0


def searched(built: Built) -> dict[str, Any]:
    """What a search of a few seconds returns, with the stand-in in the place of CUDA graphs."""
    from recorder import TapeExecutor

    import ridgeline as rl
    from ridgeline.engine.replay import inference as graphed

    model, args, kwargs = built
    graphed.executor_for = lambda given: TapeExecutor()
    twin = copy.deepcopy((args, kwargs))
    with torch.no_grad():
        fast = rl.optimize(model, args, kwargs, budget_s=6, use_cache=False)
        if wrong := compared_loosely(fast(*copy.deepcopy(args), **copy.deepcopy(kwargs)), model(*twin[0], **twin[1])):
            return {"wrong": wrong}
    receipt = fast.receipt
    return {"winner": receipt.winner, "entries": [str(e)[:300] for e in receipt.entries]}


def compared_loosely(mine: Any, theirs: Any) -> str:
    a, b = tensors(mine), tensors(theirs)
    if type(mine) is not type(theirs) or len(a) != len(b):
        return f"{type(mine).__name__} of {len(a)} tensors instead of {type(theirs).__name__} of {len(b)}"
    errors = [_error(x, y) for x, y in zip(a, b)]
    return f"{max(errors):.3g} from eager" if errors and not max(errors) < 1e-4 else ""


STEPS = {"record": recorded, "rewrite": rewritten, "search": searched}


def check(name: str, skip: list[str]) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name}
    for step, run in STEPS.items():
        if step in skip:
            continue
        began = time.perf_counter()
        try:
            torch.manual_seed(0)
            built = PUBLISHED[name]()
        except Exception as error:
            return {**row, "unbuilt": f"{type(error).__name__}: {error}"[:300]}
        try:
            row[step] = run(built)
        except Exception as error:
            row[step] = {"raised": f"{type(error).__name__}: {error}"[:500], "where": traceback.format_exc()[-2000:]}
        row[step]["took_s"] = round(time.perf_counter() - began, 1)
    return row


def told(row: dict[str, Any]) -> str:
    parts = [row.get("unbuilt", "")]
    for step in STEPS:
        found = {
            k: v for k, v in row.get(step, {}).items() if k not in ("rewrites", "graphs", "entries", "where", "took_s")
        }
        if step == "rewrite" and "error" in found:
            found = {"ratio": round(found["error"] / max(found["eager"], 1e-4), 2), "eager": f"{found['eager']:.2g}"}
        parts.append(f"{step}: {found}" if found else "")
    return f"{row['name']:28} " + "  ".join(part for part in parts if part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path, default=Path("published"))
    parser.add_argument("--skip", nargs="*", default=[])
    parser.add_argument("--share", type=int, nargs=2, default=(0, 1), help="of so many processes, which this one is")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    names = given.names or list(PUBLISHED)
    for name in names[given.share[0] :: given.share[1]]:
        row = check(name, given.skip)
        (given.out / f"{name.replace('/', '_')}.json").write_text(json.dumps(row, indent=1, default=str))
        print(told(row), flush=True)


if __name__ == "__main__":
    main()
