"""Logits against ``transformers`` on small random weights: error at most twice its own against float64."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from ridgeline.llm.model.config import ModelConfig
from ridgeline.llm.model.decoder import packed_inputs
from ridgeline.llm.model.weights import load_model, save_model

DENSE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 1,
    "bos_token_id": 2,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 16}  # fmt: skip
MLA = {"kv_lora_rank": 24, "q_lora_rank": 40, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
       "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
       "first_k_dense_replace": 1, "n_shared_experts": 2, "num_key_value_heads": 4}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True}),
    "llama linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e3, "factor": 2.0}}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2,
                        "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "gemma2": ("Gemma2", {"sliding_window": 6, "query_pre_attn_scalar": 24}),
    "gemma3": ("Gemma3Text", {"sliding_window": 6, "sliding_window_pattern": 2, "query_pre_attn_scalar": 24}),
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6,
                           "rope_parameters": {**YARN, "truncate": False}}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
                               "decoder_sparse_step": 2, "norm_topk_prob": True}),
    "deepseek_v3": ("DeepseekV3", {**MLA, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}}),
    "deepseek_v3 without query latent": ("DeepseekV3", {**MLA, "q_lora_rank": None, "rope_interleave": False}),
}  # fmt: skip
LENGTHS = (24, 24)


def _model_class(kind: str) -> Any:
    return getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")


def _theirs(kind: str, options: dict[str, Any]) -> Any:
    """A model of theirs with weights large enough that every part of it matters."""
    given = {**DENSE, **options}
    if kind in ("DeepseekV3", "Qwen2"):  # the former's own head dim is that of its rotary part, the latter has none
        del given["head_dim"]
    config = getattr(transformers, f"{kind}Config")(**given)
    config._attn_implementation = "eager"
    model = _model_class(kind)(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name or "embed_scale" in name:
                continue
            drawn = torch.randn(tensor.shape, generator=generator)
            if "norm" in name:
                tensor.copy_((0.0 if "Gemma" in kind else 1.0) + 0.2 * drawn)
            else:
                tensor.copy_(drawn * (0.3 if "bias" in name or "sinks" in name else 0.15))
    return model


def _loaded(kind: str, folder: Any, dtype: Any) -> Any:
    return _model_class(kind).from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def _logits(model: Any, tokens: Any) -> Any:
    with torch.no_grad():
        return model(tokens, use_cache=False).logits.flatten(0, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_agree_with_transformers(family: str, tmp_path: Any) -> None:
    kind, options = FAMILIES[family]
    tokens = torch.randint(0, 96, (len(LENGTHS), LENGTHS[0]), generator=torch.Generator().manual_seed(2))
    for dtype in (torch.float32, torch.bfloat16):
        _theirs(kind, options).to(dtype).save_pretrained(tmp_path / "given")
        ours = load_model(tmp_path / "given", dtype=dtype)
        stored = _loaded(kind, tmp_path / "given", dtype)
        expected = _logits(stored, tokens)
        with torch.no_grad():
            found = ours(tokens.flatten(), **packed_inputs(LENGTHS))
        save_model(ours, tmp_path / "saved", dtype=dtype)
        assert torch.equal(_logits(_loaded(kind, tmp_path / "saved", dtype), tokens), expected), "weights changed"
        with pytest.MonkeyPatch.context() as patch:  # float64 where they take float32 whatever the model's type is
            double = torch.float64
            patch.setattr(torch, "float32", double)
            patch.setattr(torch, "float", double)
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            stored.config._experts_implementation = "eager"
            precise = _model_class(kind)(stored.config).eval().double()  # anew, so that its rotary tables are too
            precise.load_state_dict(stored.state_dict())
            exact = _logits(precise, tokens)
        own, error = ((x.double() - exact).norm() / exact.norm() for x in (expected, found))
        assert error <= 2 * own, f"{dtype}: {error:.3g} against {own:.3g} of transformers"
        assert own < (1e-4 if dtype == torch.float32 else 0.25)


def test_a_window_and_packed_documents_are_seen_by_none_of_their_neighbors(tmp_path: Any) -> None:
    _theirs(*FAMILIES["gemma2"]).save_pretrained(tmp_path)
    ours = load_model(tmp_path, dtype=torch.float32)
    tokens = torch.randint(0, 96, (30,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        packed = ours(tokens, **packed_inputs((11, 1, 18)))
        alone = [ours(part, **packed_inputs((len(part),))) for part in tokens.split((11, 1, 18))]
    assert torch.allclose(packed, torch.cat(alone), rtol=1e-5, atol=1e-6)


def test_both_spellings_of_a_configuration_are_read_alike() -> None:
    modern = ModelConfig.from_hf({**DENSE, "model_type": "llama", "rope_parameters": LLAMA3})
    old = {**DENSE, "model_type": "llama", "rope_theta": 500.0,
           "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}}  # fmt: skip
    assert ModelConfig.from_hf(old).rope == modern.rope
