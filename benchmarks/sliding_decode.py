"""Decoding over windows that slide: milliseconds a token of eager and of the optimized model, filling and full.

Models are of random weights, in the sizes of published ones with fewer layers. Every token is compared with eager's
before anything is timed. A row is written as soon as it is measured.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import ridgeline

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MIXED = [*["sliding_attention"] * 5, "full_attention"]
NUM_TIMED = 30


def mistral(tiny: bool) -> tuple[Any, int]:
    window = 16 if tiny else 1024
    sizes = _tiny() if tiny else {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
                                  "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32768}  # fmt: skip
    config = transformers.MistralConfig(**sizes, num_hidden_layers=8, sliding_window=window)
    return transformers.MistralForCausalLM(config), window


def gemma3(tiny: bool) -> tuple[Any, int]:
    window = 16 if tiny else 512
    sizes = _tiny() if tiny else {"hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 8,
                                  "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 32768}  # fmt: skip
    layers = {"num_hidden_layers": 6, "sliding_window": window, "layer_types": MIXED}
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes, **layers)), window


def _tiny() -> dict[str, int]:
    return {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1,
            "head_dim": 32, "vocab_size": 128}  # fmt: skip


def _filled(model: Any, num: int, room: int) -> Any:
    cache = transformers.StaticCache(config=model.config, max_cache_len=room)
    with torch.no_grad():
        model(torch.arange(num, device=DEVICE)[None] % 100, past_key_values=cache, use_cache=True)
    return cache


def _decoded(run: Any, cache: Any, num: int) -> tuple[torch.Tensor, float]:
    """The logits of some tokens, and milliseconds a token over all of them."""
    tokens = [torch.tensor([[7 * i % 100]], device=DEVICE) for i in range(num)]
    _settle()
    began = time.perf_counter()
    with torch.no_grad():
        found = [run(token, past_key_values=cache, use_cache=True).logits.clone() for token in tokens]
    _settle()
    return torch.cat(found, 1), (time.perf_counter() - began) / num * 1e3


def _settle() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def measure(name: str, model: Any, window: int, searched: str, budget_s: float) -> dict[str, Any]:
    """One model optimized with a window in one state, and decoding in both."""
    prompts = {"filling": 4, "full": window + 2}
    room = window + 3 * NUM_TIMED + 8
    cache = _filled(model, prompts[searched], room)
    token = torch.tensor([[1]], device=DEVICE)
    fast = ridgeline.optimize(model, (token,), {"past_key_values": cache, "use_cache": True}, budget_s=budget_s,
                              use_cache=False)  # fmt: skip
    row: dict[str, Any] = {"model": name, "searched": searched, "winner": fast.receipt.winner}
    for state, prompt in prompts.items():
        num = min(NUM_TIMED, window - prompt) if state == "filling" else NUM_TIMED
        mine, theirs = _filled(model, prompt, room), _filled(model, prompt, room)
        for _ in range(2):  # a state and a cache are recorded when they are first met, and met again
            found, _ = _decoded(fast, mine, num // 3)
            meant, _ = _decoded(model, theirs, num // 3)
            row[f"{state}_error"] = float((found.double() - meant.double()).norm() / meant.double().norm())
        row[f"{state}_eager_ms"] = _decoded(model, theirs, num // 3)[1]
        row[f"{state}_ms"] = _decoded(fast, mine, num // 3)[1]
        row[f"{state}_agrees"] = row[f"{state}_error"] < 0.05 and mine.get_seq_length() == theirs.get_seq_length()
    return {**row, "fallbacks": fast.fallbacks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=40)
    parser.add_argument("--tiny", action="store_true", help="sizes for a machine without a GPU")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for name, make in {"mistral": mistral, "gemma3": gemma3}.items():
        torch.manual_seed(0)
        with DEVICE:
            made, window = make(asked.tiny)
        model = made.eval().to(torch.bfloat16 if DEVICE.type == "cuda" else torch.float32)
        for searched in ("full", "filling"):
            rows.append(measure(name, model, window, searched, asked.budget_s))
            (asked.out / "sliding_decode.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
        del made, model
    print(f"{'model':8} {'searched':8} {'state':8} {'eager ms':>9} {'ms':>7} {'agrees':>7}  winner")
    for row in rows:
        for state in ("filling", "full"):
            print(f"{row['model']:8} {row['searched']:8} {state:8} {row[f'{state}_eager_ms']:9.3f} "
                  f"{row[f'{state}_ms']:7.3f} {row[f'{state}_agrees']!s:>7}  {row['winner']}")  # fmt: skip


if __name__ == "__main__":
    main()
