"""Networks people have, in small configurations, captured for inference and training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from ridgeline.capture import capture, decode_kwargs, spec
from ridgeline.capture.fold import first_difference, folded
from ridgeline.graph import Block, Graph
from ridgeline.graph.verify import problems

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 96}
Case = tuple[Any, tuple[Any, ...], dict[str, Any]]
CASES: dict[str, Callable[[], Case]] = {}


def case(fn: Callable[[], Case]) -> Callable[[], Case]:
    CASES[fn.__name__] = fn
    return fn


def tokens(batch: int = 2, seq: int = 32, vocab: int = 90) -> Any:
    return torch.arange(batch * seq).reshape(batch, seq) % vocab


def meta(*shape: int, dtype: Any = None) -> Any:
    return torch.empty(*shape, dtype=dtype, device="meta")


def built(kind: str, config: Any, dtype: Any = torch.bfloat16) -> Any:
    with torch.device("meta"):
        return getattr(transformers, kind)(config).to(dtype)


def causal(kind: str, config: Any) -> Case:
    ids = tokens()
    return built(kind, config), (), {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


@case
def llama() -> Case:
    return causal("LlamaForCausalLM", transformers.LlamaConfig(**SMALL, num_hidden_layers=6, num_key_value_heads=2))


@case
def mixtral() -> Case:
    config = transformers.MixtralConfig(**SMALL, num_hidden_layers=4, num_key_value_heads=2, num_local_experts=4)
    return causal("MixtralForCausalLM", config)


@case
def mixtral_with_a_loop_over_experts() -> Case:
    config = transformers.MixtralConfig(**SMALL, num_hidden_layers=4, num_key_value_heads=2, num_local_experts=4)
    config._experts_implementation = "eager"
    return causal("MixtralForCausalLM", config)


@case
def qwen3_moe() -> Case:
    config = transformers.Qwen3MoeConfig(
        **SMALL,
        num_hidden_layers=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        output_router_logits=True,
    )
    return causal("Qwen3MoeForCausalLM", config)


@case
def deepseek_v3() -> Case:
    config = transformers.DeepseekV3Config(
        **SMALL,
        num_hidden_layers=5,
        num_key_value_heads=4,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=1,
    )
    return causal("DeepseekV3ForCausalLM", config)


@case
def gemma2() -> Case:
    config = transformers.Gemma2Config(
        **SMALL, num_hidden_layers=8, num_key_value_heads=2, head_dim=16, sliding_window=16
    )
    return causal("Gemma2ForCausalLM", config)


@case
def mamba() -> Case:
    return causal(
        "MambaForCausalLM", transformers.MambaConfig(hidden_size=64, num_hidden_layers=3, vocab_size=96, state_size=8)
    )


@case
def bert() -> Case:
    ids = tokens()
    model = built("BertForMaskedLM", transformers.BertConfig(**SMALL, num_hidden_layers=4), torch.float32)
    return model, (), {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


@case
def t5() -> Case:
    config = transformers.T5Config(
        d_model=64, d_ff=128, d_kv=16, num_layers=4, num_heads=4, vocab_size=96, decoder_start_token_id=0
    )
    return built("T5ForConditionalGeneration", config), (), {"input_ids": tokens(), "labels": tokens()}


@case
def vit() -> Case:
    config = transformers.ViTConfig(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=32,
        patch_size=8,
        num_labels=10,
    )
    model = built("ViTForImageClassification", config, torch.float32)
    return model, (), {"pixel_values": meta(2, 3, 32, 32), "labels": torch.tensor([1, 2])}


@case
def clip() -> Case:
    text = {**SMALL, "num_hidden_layers": 2, "eos_token_id": 89}
    vision = {
        **{k: v for k, v in SMALL.items() if k != "vocab_size"},
        "num_hidden_layers": 2,
        "image_size": 32,
        "patch_size": 8,
    }
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=32)
    model = built("CLIPModel", config, torch.float32)
    return model, (), {"input_ids": tokens(), "pixel_values": meta(2, 3, 32, 32), "return_loss": True}


@case
def whisper() -> Case:
    config = transformers.WhisperConfig(
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        vocab_size=96,
        num_mel_bins=16,
        max_source_positions=50,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    model = built("WhisperForConditionalGeneration", config, torch.float32)
    return model, (), {"input_features": meta(2, 16, 100), "labels": tokens()}


@case
def wav2vec2() -> Case:
    config = transformers.Wav2Vec2Config(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        conv_dim=(32, 32, 32),
        conv_kernel=(10, 3, 3),
        conv_stride=(5, 2, 2),
        num_feat_extract_layers=3,
        vocab_size=32,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        mask_time_length=2,
    )
    return (
        transformers.Wav2Vec2ForCTC(config),
        (),
        {"input_values": torch.zeros(2, 3200), "labels": tokens(2, 6, 30) + 1},
    )


def timm_model(name: str) -> Case:
    timm = pytest.importorskip("timm")
    with torch.device("meta"):
        return timm.create_model(name), (meta(2, 3, 224, 224),), {}


@case
def resnet50() -> Case:
    return timm_model("resnet50")


@case
def convnext() -> Case:
    return timm_model("convnext_atto")


@case
def swin() -> Case:
    return timm_model("swin_tiny_patch4_window7_224")


@case
def unet() -> Case:
    diffusers = pytest.importorskip("diffusers")
    with torch.device("meta"):
        model = diffusers.UNet2DConditionModel(
            sample_size=16,
            block_out_channels=(32, 64),
            layers_per_block=1,
            cross_attention_dim=32,
            attention_head_dim=8,
            norm_num_groups=8,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        )
    return model, (meta(2, 4, 16, 16), torch.tensor([1, 2]), meta(2, 8, 32)), {}


@case
def dit() -> Case:
    diffusers = pytest.importorskip("diffusers")
    with torch.device("meta"):
        model = diffusers.DiTTransformer2DModel(
            num_attention_heads=4, attention_head_dim=16, num_layers=4, sample_size=16, norm_num_groups=8
        )
    inputs = {"timestep": torch.tensor([1, 2]), "class_labels": torch.tensor([3, 4])}
    return model, (meta(2, 4, 16, 16),), inputs


def blocks(graph: Graph) -> list[Block]:
    return [item for item in graph.items if isinstance(item, Block) and item.module]


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("mode", ["infer", "train"])
def test_captures_are_well_formed_and_unroll_to_their_recording(name: str, mode: str) -> None:
    model, args, kwargs = CASES[name]()
    flat = capture(model, args, kwargs, mode=mode, fold=False)
    made = folded(flat)
    assert not problems(made)
    assert first_difference(made, flat) is None
    assert made.num_params == sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
    phases = {node.phase.value for node, _ in made.nodes()}
    assert phases == ({"forward"} if mode == "infer" else {"forward", "backward", "optimizer"})


@pytest.mark.parametrize("name", ["llama", "mixtral", "deepseek_v3", "gemma2", "bert", "t5", "vit", "dit"])
def test_layers_of_transformers_fold_in_both_directions(name: str) -> None:
    model, args, kwargs = CASES[name]()
    directions = {block.reverse for block in blocks(capture(model, args, kwargs, mode="train"))}
    assert directions == {False, True}


def test_a_mask_of_ones_is_skipped_as_in_a_real_run() -> None:
    model, args, kwargs = CASES["llama"]()
    attention = [n for n, _ in capture(model, args, kwargs).nodes() if n.op == "attention"]
    assert all(n.attrs["causal"] and not n.attrs["mask"] for n in attention)


def test_a_padded_batch_keeps_its_mask() -> None:
    model, args, kwargs = CASES["llama"]()
    kwargs["attention_mask"][0, :5] = 0
    attention = [n for n, _ in capture(model, args, kwargs).nodes() if n.op == "attention"]
    assert all(n.attrs["mask"] for n in attention)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "mamba", "t5"])
def test_a_decode_step_grows_the_cache_it_was_given(name: str) -> None:
    model, _, _ = CASES[name]()
    graph = capture(model, kwargs=decode_kwargs(model, 2, 100))
    assert not problems(graph)
    attention = [n for n, _ in graph.nodes() if n.op == "attention"]
    if name != "mamba":
        assert {n.attrs["s"] for n in attention} == {1}
        assert 101 in {n.attrs["skv"] for n in attention}
        grown = [n for n, _ in graph.nodes() if n.attrs.get("fn") == "cat" and graph.out_types(n)[0].shape[-2] == 101]
        assert len(grown) >= 2
        assert graph.meta["donated"]


def test_a_decode_step_from_a_configuration_is_the_same() -> None:
    model, _, _ = CASES["llama"]()
    by_model = capture(model, kwargs=decode_kwargs(model, 1, 64))
    by_config = capture(model, kwargs=decode_kwargs(model.config, 1, 64))
    assert [n.op for n, _ in by_model.nodes()] == [n.op for n, _ in by_config.nodes()]


def test_a_cache_of_the_callers_own_is_read_and_left_alone() -> None:
    model, _, _ = CASES["llama"]()
    cache = transformers.DynamicCache()
    for layer in range(6):
        cache.update(meta(1, 2, 10, 16, dtype=torch.bfloat16), meta(1, 2, 10, 16, dtype=torch.bfloat16), layer)
    graph = capture(model, kwargs={"input_ids": tokens(1, 1), "past_key_values": cache, "use_cache": True})
    assert cache.get_seq_length() == 10
    assert {n.attrs["skv"] for n, _ in graph.nodes() if n.op == "attention"} == {11}


def test_a_deep_model_costs_what_a_layer_costs() -> None:
    config = transformers.LlamaConfig(**SMALL, num_hidden_layers=48, num_key_value_heads=2)
    graph = capture(
        built("LlamaForCausalLM", config), kwargs={"input_ids": spec((1, 32)), "labels": spec((1, 32))}, mode="train"
    )
    assert graph.num_nodes > 10_000
    assert len(graph.items) < 600
    assert max(block.repeat for block in blocks(graph)) >= 46
