"""The processes of a parallel training test: forked, so that torch is imported once, they run cases in turn.

The first rank writes the losses.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # optimizers and sharding import it when they are made, which every rank would do again
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

from ridgeline.llm.data.tokens import write_token_file
from ridgeline.llm.train.settings import Settings
from ridgeline.llm.train.trainer import Trainer

DENSE: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64, "eos_token_id": 0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": DENSE,
    "qwen3": {**DENSE, "model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
    "gemma2": {**DENSE, "model_type": "gemma2", "head_dim": 8, "sliding_window": 9, "query_pre_attn_scalar": 8},
    "gpt_oss": {**DENSE, "model_type": "gpt_oss", "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
                "sliding_window": 9, "router_aux_loss_coef": 0.1},
    "mixtral": {**DENSE, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
                "sliding_window": None, "router_aux_loss_coef": 0.1},
    "deepseek": {**DENSE, "model_type": "deepseek_v3", "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4,
                 "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 8, "n_group": 2, "topk_group": 2,
                 "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
                 "aux_loss_alpha": 0.1},
}  # fmt: skip
STEPS = 2


def make_files(folder: Path) -> None:
    """Models and tokens that every case reads."""
    for name, config in MODELS.items():
        (folder / f"{name}.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 64, size=rng.integers(5, 40)).tolist() for _ in range(300)]
    write_token_file(folder / "data.bin", documents, vocab_size=64, eos=0)


def settings_of(folder: Path, case: dict[str, Any]) -> Settings:
    optimizer = {"lr": 1e-2, "warmup": 1, "clip": 0.5, "kind": case.get("optimizer", "adamw")}
    # Adam divides small gradients by small roots, which would enlarge rounding: its eps is not tiny here
    return Settings.of({
        "model": str(folder / f"{case['model']}.json"), "out": str(folder / case.get("out", "out")), "steps": 8,
        "data": {"tokens": str(folder / "data.bin")}, "batch": {"length": 32, "sequences": 4, "micro": 1},
        "optimizer": {**optimizer, "eps": 1e-3}, "precision": {"compute": "float32"}, "device": "cpu",
        "recompute": case.get("recompute", "none"), "plan": case.get("plan", {}),
        "checkpoint": {"resume": bool(case.get("resume"))},
    })  # fmt: skip


def losses_of(folder: Path, case: dict[str, Any]) -> list[float]:
    """Loss, balance loss and gradient norm of every step."""
    trainer = Trainer(settings_of(folder, case))
    found = []
    for _ in range(case.get("steps", STEPS)):
        line, _ = trainer.run_step()
        found += [line.loss, line.norm, line.balance or 0.0]
    if case.get("save"):
        trainer.save()
        trainer.checkpointer.finish()
    return found


def main(folder: Path, out: Path) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, case in json.loads((folder / "cases.json").read_text()).items():
        try:
            found[name] = losses_of(folder, case)
        except Exception:  # the others wait for this rank: end it at once, and its parent ends them
            print(f"case {name!r}:", file=sys.stderr)
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def fork(folder: Path, out: Path, num: int) -> int:
    """Run ``num`` ranks with the environment that torchrun gives them; 1 if one fails, 0 otherwise."""
    port, told = os.pipe()
    children = set[int]()
    for rank in range(num):  # before the store has threads, which a child would not have
        if child := os.fork():
            children.add(child)
            continue
        code = 1
        try:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.read(port, 5).decode(), "RANK": str(rank),
                           "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num), "LOCAL_WORLD_SIZE": str(num),
                           "TORCHELASTIC_USE_AGENT_STORE": "True"}  # fmt: skip
            main(folder, out)
            code = 0
        finally:
            os._exit(code)
    store = dist.TCPStore("127.0.0.1", 0, num, is_master=True, wait_for_workers=False)
    os.write(told, f"{store.port:05}".encode() * num)
    while children:
        child, status = os.wait()
        children.discard(child)
        if status:
            for each in children:
                os.kill(each, signal.SIGKILL)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(fork(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
