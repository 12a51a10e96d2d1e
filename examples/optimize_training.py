"""A training loop: ``python examples/optimize_training.py``. The step is optimized, the loop stays yours."""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import ridgeline as rl


def make() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    cuda = torch.cuda.is_available()
    width, layers, heads, vocab, batch, length = (1024, 24, 16, 50257, 8, 512) if cuda else (32, 2, 4, 100, 2, 16)
    config = GPT2Config(n_embd=width, n_layer=layers, n_head=heads, vocab_size=vocab, n_positions=length)
    with torch.device("cuda" if cuda else "cpu"):
        model = GPT2LMHeadModel(config).to(torch.bfloat16 if cuda else torch.float32).train()
        ids = torch.randint(0, vocab, (batch, length))
    return model, (), {"input_ids": ids, "labels": ids, "use_cache": False}


def main(budget_s: float = 120.0, steps: int = 50) -> None:
    model, args, kwargs = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    fast = rl.optimize(model, args, kwargs, mode="train", optimizer=optimizer, budget_s=budget_s)
    print(fast.receipt)
    for step in range(steps):
        loss = fast.train_step(*args, **kwargs)  # or your own: fast(...).loss.backward(); optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {float(loss):.4f}")


if __name__ == "__main__":
    main(*map(float, sys.argv[1:2]))
