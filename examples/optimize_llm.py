"""A Hugging Face decoder, one decode step with a key-value cache: ``python examples/optimize_llm.py``.

With a GPU the model has the sizes of an 8B one; without, it is tiny and everything takes seconds. Also a source for the
command line: ``ridgeline optimize examples/optimize_llm.py:make --html receipt.html``.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import ridgeline as rl

LARGE = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
         "intermediate_size": 14336, "vocab_size": 128256}  # fmt: skip
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 128, "vocab_size": 256}  # fmt: skip


def make() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The model, and a decode step behind 2,048 cached tokens (32 without a GPU)."""
    cuda = torch.cuda.is_available()
    device, dtype, length = ("cuda", torch.bfloat16, 2048) if cuda else ("cpu", torch.float32, 32)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**(LARGE if cuda else SMALL))).to(dtype).eval()
        cache = DynamicCache()
        heads, dim = model.config.num_key_value_heads, model.config.hidden_size // model.config.num_attention_heads
        for layer in range(model.config.num_hidden_layers):
            cache.update(*torch.randn(2, 1, heads, length, dim, dtype=dtype).unbind(0), layer)
        token = torch.randint(0, model.config.vocab_size, (1, 1))
        position = torch.full((1, 1), length)
    return model, (), {"input_ids": token, "position_ids": position, "past_key_values": cache, "use_cache": True}


def main(budget_s: float = 120.0) -> None:
    model, args, kwargs = make()
    fast = rl.optimize(model, args, kwargs, budget_s=budget_s)
    print(fast.receipt)
    with torch.no_grad():
        logits = fast(**kwargs).logits
    print("next token", int(logits[0, -1].argmax()), "; cache now holds", kwargs["past_key_values"].get_seq_length())


if __name__ == "__main__":
    main(*map(float, sys.argv[1:2]))
