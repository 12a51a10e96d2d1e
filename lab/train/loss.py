"""The loss after 2,000 steps, ours against a plain PyTorch loop, for three seeds: ``python -m lab.train loss``.

A small Llama on the bytes of this repository's documentation, float32, AdamW with clipping and a cosine schedule. The
plain loop shares nothing with ours but the first weights and the order of sequences: its model is the forty lines
below, its logits are whole, its optimizer and its clipping are PyTorch's. Compared: the mean loss of the last hundred
steps and the loss of held-out pages, against how far seeds lie apart. Takes about four CPU minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.llm.data.loader import TokenLoader
from ridgeline.llm.data.tokens import TokenFile, write_token_file
from ridgeline.llm.model.config import ModelConfig
from ridgeline.llm.model.decoder import Decoder
from ridgeline.llm.model.weights import fill, seeded
from ridgeline.llm.train.settings import Settings
from ridgeline.llm.train.trainer import Trainer

DOCS = Path(__file__).resolve().parents[2] / "docs"
CONFIG = {"model_type": "llama", "vocab_size": 257, "hidden_size": 48, "intermediate_size": 128, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 64,
          "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "bos_token_id": 256,
          "eos_token_id": 256}  # fmt: skip
LENGTH, SEQUENCES, LR, WARMUP, FINAL, DECAY, EPS = 64, 4, 1e-3, 100, 0.1, 0.1, 1e-6


def plain_loss(weights: dict[str, Tensor], rows: Tensor) -> Tensor:
    """Llama in plain PyTorch: the mean loss of sequences [B, length + 1]."""
    x, heads, kv_heads, dim = F.embedding(rows[:, :-1], weights["embed_tokens.weight"]), 4, 2, 12
    num, length = rows.shape[0], rows.shape[1] - 1
    angles = torch.arange(length)[:, None] / 10000.0 ** (torch.arange(0, dim, 2) / dim)
    cos, sin = angles.cos(), angles.sin()

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weights[f"{name}.weight"]

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    for i in range(CONFIG["num_hidden_layers"]):
        y = norm(x, f"layers.{i}.input_layernorm")
        q, k, v = (
            (y @ weights[f"layers.{i}.self_attn.{name}_proj.weight"].t()).view(num, length, -1, dim).transpose(1, 2)
            for name in "qkv"
        )
        q, k = turned(q), turned(k)
        k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
        scores = (q @ k.transpose(2, 3) / math.sqrt(dim)).masked_fill(
            torch.ones(length, length).triu(1).bool(), -torch.inf
        )
        o = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + o @ weights[f"layers.{i}.self_attn.o_proj.weight"].t()
        y = norm(x, f"layers.{i}.post_attention_layernorm")
        gate, up = (y @ weights[f"layers.{i}.mlp.{name}_proj.weight"].t() for name in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ weights[f"layers.{i}.mlp.down_proj.weight"].t()
    logits = norm(x, "norm") @ weights["embed_tokens.weight"].t()
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def plain(folder: Path, seed: int, steps: int) -> tuple[list[float], float]:
    """Losses of every step and of held-out text, by PyTorch's own parts."""
    config = ModelConfig.load(folder / "config.json")
    first = Decoder(config, device="cpu")
    fill(first, seeded(config, seed))
    weights = {name: p.detach().clone().requires_grad_() for name, p in first.named_parameters()}
    groups = [{"params": [p for p in weights.values() if p.dim() > 1], "weight_decay": DECAY},
              {"params": [p for p in weights.values() if p.dim() < 2], "weight_decay": 0.0}]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=EPS)
    loader = TokenLoader(TokenFile(folder / "train.bin"), LENGTH, SEQUENCES, seed)
    losses = []
    for step in range(steps):
        done = (step - WARMUP) / (steps - WARMUP)
        share = (step + 1) / WARMUP if step < WARMUP else FINAL + (1 - FINAL) * 0.5 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = LR * share
        loss = plain_loss(weights, torch.from_numpy(loader.rows(step, range(SEQUENCES))))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    held = TokenLoader(TokenFile(folder / "held-out.bin"), LENGTH, 16, 0, shuffle=False)
    with torch.no_grad():
        found = [float(plain_loss(weights, torch.from_numpy(held.rows(i, range(16))))) for i in range(4)]
    return losses, statistics.mean(found)


def ours(folder: Path, seed: int, steps: int) -> tuple[list[float], float]:
    trainer = Trainer(Settings.of({
        "model": str(folder / "config.json"), "out": str(folder / f"out-{seed}"), "steps": steps, "seed": seed,
        "device": "cpu", "data": {"tokens": str(folder / "train.bin"), "document_mask": False},
        "batch": {"length": LENGTH, "sequences": SEQUENCES, "micro": SEQUENCES}, "precision": {"compute": "float32"},
        "optimizer": {"lr": LR, "warmup": WARMUP, "final": FINAL, "weight_decay": DECAY, "eps": EPS},
    }))  # fmt: skip
    losses = [trainer.run_step()[0].loss for _ in range(steps)]
    held = TokenLoader(TokenFile(folder / "held-out.bin"), LENGTH, 16, 0, shuffle=False)
    batches = [trainer.batch(held, i, 16, 16) for i in range(4)]
    total = sum(float(trainer.train_step.evaluate(batch)) for batch in batches)
    return losses, total / sum(batch.num_targets for batch in batches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        pages = [list(page.read_bytes()) for page in sorted(DOCS.glob("**/*.md"))]
        for part, some in (("train", [p for i, p in enumerate(pages) if i % 8]), ("held-out", pages[::8])):
            write_token_file(folder / f"{part}.bin", some, vocab_size=257, eos=256)
        print(f"{'seed':>4} {'who':>5} {'last 100 steps':>15} {'held out':>9} {'CPU s':>7}")
        for seed in range(given.seeds):
            for who, run in (("plain", plain), ("ours", ours)):
                began = time.process_time()
                losses, held = run(folder, seed, given.steps)
                rows.append({"seed": seed, "who": who, "last": statistics.mean(losses[-100:]), "held_out": held,
                             "cpu_s": time.process_time() - began, "losses": losses[::20]})  # fmt: skip
                row = rows[-1]
                print(f"{seed:4} {who:>5} {row['last']:15.5f} {held:9.5f} {row['cpu_s']:7.0f}", flush=True)
    for what in ("last", "held_out"):
        gaps = [abs(a[what] - b[what]) for a, b in zip(rows[::2], rows[1::2], strict=True)]
        spread = statistics.pstdev([row[what] for row in rows[::2]])
        print(f"{what}: ours from plain at most {max(gaps):.5f}; seeds lie {spread:.5f} (standard deviation) apart")
    if given.out is not None:
        given.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
