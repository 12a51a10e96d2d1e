"""A speech encoder of Hugging Face: ``python examples/optimize_speech.py``."""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

import ridgeline as rl


def make() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Thirty seconds of sound, eight times; without a GPU a tiny encoder and one second."""
    cuda = torch.cuda.is_available()
    width, layers, heads, frames, batch = (1280, 32, 20, 3000, 8) if cuda else (64, 2, 4, 100, 1)
    dtype = torch.bfloat16 if cuda else torch.float32
    config = WhisperConfig(d_model=width, encoder_layers=layers, encoder_attention_heads=heads,
                           encoder_ffn_dim=4 * width, num_mel_bins=80, max_source_positions=frames // 2)  # fmt: skip
    with torch.device("cuda" if cuda else "cpu"):
        return WhisperEncoder(config).to(dtype).eval(), (torch.randn(batch, 80, frames, dtype=dtype),), {}


def main(budget_s: float = 120.0) -> None:
    model, args, kwargs = make()
    fast = rl.optimize(model, args, kwargs, budget_s=budget_s)
    print(fast.receipt)
    print(fast(*args).last_hidden_state.shape)


if __name__ == "__main__":
    main(*map(float, sys.argv[1:2]))
