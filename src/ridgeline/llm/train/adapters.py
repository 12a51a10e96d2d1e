"""LoRA adapters in files: their first values, the layout of PEFT, and weights with adapters merged in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.llm.model.config import ModelConfig
from ridgeline.llm.model.tensor_file import write_tensors, write_text
from ridgeline.llm.model.weights import Shape, hf_name
from ridgeline.llm.train.checkpoint import Checkpoint, whole_names
from ridgeline.llm.train.settings import LoraSettings


def is_adapter(name: str) -> bool:
    return name.endswith(("lora_a", "lora_b"))


def first_values(name: str, shape: Shape, seed: int) -> Tensor:
    """Of A uniform as PEFT's, of B zero: a new adapter changes nothing."""
    if name.endswith("lora_b"):
        return torch.zeros(shape)
    drawn = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1
    bound = shape[1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=torch.Generator().manual_seed(drawn))


def merged(found: Checkpoint) -> tuple[list[str], Callable[[str], Tensor]]:
    """The whole weights of a checkpoint: their names, and a reader that adds each one's adapter."""
    lora = found.state["lora"]

    def read(name: str) -> Tensor:
        whole = found.wholes[name]
        weight = found.read(name, (0,) * len(whole), whole)
        stem = name.removesuffix("weight")
        if lora is None or f"{stem}lora_a" not in found:
            return weight
        a, b = (_whole(found, f"{stem}{part}") for part in ("lora_a", "lora_b"))
        return (weight.float() + b.float() @ a.float() * (lora["alpha"] / lora["rank"])).to(weight.dtype)

    return [name for name in whole_names(found) if not is_adapter(name)], read


def save_adapter(folder: Path, found: Checkpoint, config: ModelConfig, lora: LoraSettings) -> None:
    """Adapters as PEFT writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name in whole_names(found):
        if is_adapter(name):
            stem, _, part = name.rpartition(".")
            key = f"base_model.model.{hf_name(config, stem)}.lora_{part[-1].upper()}.weight"
            tensors[key] = _whole(found, name)
    write_tensors(folder / "adapter_model.safetensors", tensors, {"format": "pt"})
    about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": lora.rank, "lora_alpha": lora.alpha,
             "target_modules": list(lora.targets), "bias": "none", "lora_dropout": 0.0}  # fmt: skip
    write_text(folder / "adapter_config.json", json.dumps(about, indent=2))


def _whole(found: Checkpoint, name: str) -> Tensor:
    return found.read(name, (0,) * len(found.wholes[name]), found.wholes[name])
