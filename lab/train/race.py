"""Whole training steps against rivals, in turns on one GPU: ``python -m lab.train.race --out race.json``.

Contenders of a model see the same random tokens: ours (one CUDA graph a step), ``transformers`` eager and through
``torch.compile``, with Liger's kernels and torchtitan's Llama where they are installed. Each is built, warmed up and
measured alone, because two do not fit; rounds alternate the order. Written: time of a step (median over rounds), MFU,
peak memory, the first losses, and for ours the forecast beside both.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ridgeline.llm.data.tokens import write_token_file
from ridgeline.llm.model.config import ModelConfig
from ridgeline.llm.train import report
from ridgeline.llm.train.settings import Settings
from ridgeline.llm.train.trainer import Trainer

LLAMA = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 8192,
         "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "eos_token_id": 128001, "bos_token_id": 128000}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "1b": {"config": {**LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                      "num_attention_heads": 32, "head_dim": 64, "tie_word_embeddings": True},
           "length": 2048, "micro": 16, "sequences": 16, "optimizer": "adamw"},
    "8b": {"config": {**LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                      "num_attention_heads": 32},
           "length": 8192, "micro": 1, "sequences": 4, "optimizer": "adamw-8bit"},
    "8b-fp8": {"config": {**LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                          "num_attention_heads": 32},
               "length": 8192, "micro": 1, "sequences": 4, "optimizer": "adamw-8bit", "fp8": True},
    "moe": {"config": {"model_type": "qwen3_moe", "vocab_size": 50304, "hidden_size": 1024, "num_hidden_layers": 16,
                       "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64, "intermediate_size": 4096,
                       "moe_intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8,
                       "norm_topk_prob": True, "max_position_embeddings": 8192, "eos_token_id": 0, "bos_token_id": 0},
            "length": 2048, "micro": 8, "sequences": 8, "optimizer": "adamw"},
}  # fmt: skip


@dataclass
class Result:
    model: str
    contender: str
    step_s: list[float]
    losses: list[float]
    peak_bytes: int
    mfu_frac: float
    predicted_s: float | None = None
    predicted_bytes: float | None = None
    error: str = ""


def ours(of: dict[str, Any], folder: Path) -> Callable[[], float]:
    """Steps of the trainer as it is."""
    trainer = Trainer(Settings.of({
        "model": str(folder / "config.json"), "out": str(folder / "out"), "steps": 1_000_000,
        "data": {"tokens": str(folder / "tokens.bin"), "document_mask": False},
        "batch": {name: of[name] for name in ("length", "micro", "sequences")},
        "optimizer": {"kind": of["optimizer"], "lr": 1e-4}, "precision": {"fp8": bool(of.get("fp8"))},
        "checkpoint": {"resume": False},
    }))  # fmt: skip

    def step() -> float:
        return trainer.run_step()[0].loss

    step.forecast = trainer.forecast  # type: ignore[attr-defined]
    return step


def theirs(of: dict[str, Any], folder: Path, prepare: Callable[[Any], Any]) -> Callable[[], float]:
    """``transformers`` with SDPA, bf16 weights and PyTorch's fused AdamW, as its users write it."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.train()
    if of["optimizer"] == "adamw-8bit":
        model.gradient_checkpointing_enable()  # moments of the model's type and activations do not fit otherwise
    model = prepare(model)
    return _loop(of, folder, lambda x, y: model(input_ids=x, labels=x, use_cache=False).loss, model.parameters())


def titan(of: dict[str, Any], folder: Path) -> Callable[[], float]:
    """torchtitan's Llama, each block compiled, with its plain loss."""
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs  # type: ignore[import-not-found]

    config = of["config"]
    args = TransformerModelArgs(
        dim=config["hidden_size"], n_layers=config["num_hidden_layers"], n_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"], vocab_size=config["vocab_size"], max_seq_len=of["length"],
    )  # fmt: skip
    with torch.device("cuda"):
        model = Transformer(args).to(torch.bfloat16)
    model.init_weights()
    for name, block in model.layers.named_children():
        model.layers.register_module(name, torch.compile(block, fullgraph=True))

    def loss(x: Any, y: Any) -> Any:
        return torch.nn.functional.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())

    return _loop(of, folder, torch.compile(loss), model.parameters())


def _loop(of: dict[str, Any], folder: Path, loss_of: Callable[[Any, Any], Any], params: Any) -> Callable[[], float]:
    params = list(params)
    optimizer = torch.optim.AdamW(params, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens = np.memmap(folder / "tokens.bin", dtype=np.uint32 if of["config"]["vocab_size"] > 65536 else np.uint16)
    rng = np.random.default_rng(0)

    def step() -> float:
        total = 0.0
        num = of["sequences"] // of["micro"]
        for _ in range(num):
            starts = rng.integers(0, len(tokens) - of["length"] - 1, size=of["micro"])
            rows = np.stack([tokens[s : s + of["length"] + 1] for s in starts]).astype(np.int64)
            rows_on = torch.from_numpy(rows).pin_memory().to("cuda", non_blocking=True)
            loss = loss_of(rows_on[:, :-1].contiguous(), rows_on[:, 1:].contiguous()) / num
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(total)

    return step


def _liger(model: Any) -> Any:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model)
    return model


CONTENDERS: dict[str, Callable[[dict[str, Any], Path], Callable[[], float]]] = {
    "ridgeline": ours,
    "transformers": lambda of, folder: theirs(of, folder, lambda model: model),
    "transformers compiled": lambda of, folder: theirs(of, folder, torch.compile),
    "transformers liger": lambda of, folder: theirs(of, folder, _liger),
    "torchtitan": titan,
}


def measure(model: str, contender: str, folder: Path, steps: int) -> Result:
    of, config = MODELS[model], ModelConfig.from_hf(MODELS[model]["config"])
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    found = Result(model, contender, [], [], 0, 0.0)
    try:
        step = CONTENDERS[contender](of, folder)
        for _ in range(6):
            found.losses.append(step())
        for _ in range(steps):
            torch.cuda.synchronize()
            started = time.perf_counter()
            step()
            torch.cuda.synchronize()
            found.step_s.append(time.perf_counter() - started)
    except Exception as error:  # a rival that cannot run is a row that says why
        found.error = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return found
    found.peak_bytes = torch.cuda.max_memory_allocated()
    tokens = of["sequences"] * of["length"]
    here = report.device_model(torch.device("cuda"))
    peak = here.peak_flops_per_s("tensor", "bf16") if here else float("nan")
    found.mfu_frac = report.flops_per_token(config, of["length"]) * tokens / statistics.median(found.step_s) / peak
    if forecast := getattr(step, "forecast", None):
        found.predicted_s, found.predicted_bytes = forecast.step_s, forecast.peak_bytes
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="1b,moe,8b,8b-fp8")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    rows = []
    for model in given.models.split(","):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            config = MODELS[model]["config"]
            (folder / "config.json").write_text(json.dumps(config))
            ids = np.random.default_rng(0).integers(1, config["vocab_size"], size=(64, MODELS[model]["length"] * 8))
            write_token_file(folder / "tokens.bin", (row.tolist() for row in ids), vocab_size=config["vocab_size"],
                             eos=config["eos_token_id"])  # fmt: skip
            order = given.contenders.split(",")
            for turn in range(given.rounds):
                for contender in order if turn % 2 == 0 else reversed(order):
                    found = measure(model, contender, folder, given.steps)
                    rows.append(asdict(found))
                    given.out.write_text(json.dumps(rows, indent=1))
                    time_ms = 1e3 * statistics.median(found.step_s) if found.step_s else float("nan")
                    print(f"{model} {contender}: {time_ms:.1f} ms, MFU {100 * found.mfu_frac:.1f} %, "
                          f"{found.peak_bytes / 1e9:.1f} GB {found.error}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
