"""Weights: where each parameter's part lies in the whole, values from a seed or from files in the Hugging Face layout.

Everything that fills parameters is a *source*: a function of (name, offset, shape) that returns that block of the whole
parameter. A rank asks for the blocks it holds, whatever the parallelism.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.errors import InputError, ModelError, nearest
from ridgeline.llm.model.config import ModelConfig
from ridgeline.llm.model.decoder import Decoder
from ridgeline.llm.model.tensor_file import TensorFile, write_tensors, write_text

Shape = tuple[int, ...]
Source = Callable[[str, Shape, Shape], Tensor]


@dataclass(frozen=True, slots=True)
class Block:
    """The part of a parameter that this rank holds; ``num_parts`` different parts make up the whole."""

    name: str
    whole: Shape
    offset: Shape
    shape: Shape
    num_parts: int = 1


def blocks(model: nn.Module) -> Iterator[tuple[Block, Tensor]]:
    """Every parameter and kept buffer with the block of the whole that its local tensor is."""
    slices = {}
    for path, module in model.named_modules():
        for name, block in getattr(module, "blocks", {}).items():
            slices[f"{path}.{name}" if path else name] = block
    held = list(model.named_parameters()) + [(n, b) for n, b in model.named_buffers() if n.endswith("correction_bias")]
    for name, tensor in held:
        whole, offset, parts = tuple(tensor.shape), (0,) * tensor.dim(), 1
        mine = tensor.detach()
        if hasattr(mine, "to_local"):
            from torch.distributed.tensor import Shard
            from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

            mesh, placements = mine.device_mesh, mine.placements
            shape, offset = compute_local_shape_and_global_offset(whole, mesh, placements)
            offset = tuple(offset)
            for i, placement in enumerate(placements):
                # Strided shards, of tensor parallelism under sharded data parallelism, are shards too
                parts *= mesh.size(i) if isinstance(placement, Shard) or hasattr(placement, "split_factor") else 1
            mine = mine.to_local()
            if tuple(shape) != tuple(mine.shape):
                raise ModelError(f"the part of {name} on this rank is no block of the whole: {tuple(mine.shape)}")
        if name in slices:
            larger, first = slices[name]
            for a, b in zip(larger, whole, strict=True):
                parts *= a // b
            whole, offset = larger, tuple(a + b for a, b in zip(first, offset, strict=True))
        yield Block(name, whole, offset, tuple(mine.shape), parts), mine


@torch.no_grad()
def fill(model: nn.Module, source: Source, prefix: str = "") -> None:
    """Copy every block this model holds from a source, converted to the parameter's type."""
    for block, mine in blocks(model):
        if mine.numel():
            mine.copy_(source(prefix + block.name, block.offset, block.shape))


def cut(tensor: Tensor, offset: Shape, shape: Shape) -> Tensor:
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def seeded(config: ModelConfig, seed: int) -> Source:
    """Initial values, drawn for each parameter by its name: the same on any number of ranks."""
    wholes = {block.name: block.whole for block, _ in blocks(Decoder(config))}
    wholes.setdefault("lm_head.weight", (config.vocab_size, config.hidden))

    def source(name: str, offset: Shape, shape: Shape) -> Tensor:
        if name.endswith(("norm.weight", "layernorm.weight")):
            return torch.full(shape, 1.0 - config.norm_offset)
        if name.endswith(("bias", "sinks")):
            return torch.zeros(shape)
        key = "embed_tokens.weight" if config.tied and name == "lm_head.weight" else name
        drawn = int.from_bytes(hashlib.sha256(f"{seed}:{key}".encode()).digest()[:8], "little") >> 1
        generator = torch.Generator().manual_seed(drawn)
        return cut(torch.empty(wholes[name]).normal_(0.0, config.init_std, generator=generator), offset, shape)

    return source


# --- the Hugging Face layout ------------------------------------------------------------------------------------------

_EXPERT = re.compile(r"(layers\.\d+)\.mlp\.experts\.(gate|up|down)_(proj|bias)$")
_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}


def hf_name(config: ModelConfig, name: str) -> str:
    """What a parameter that is no expert is called in files."""
    if name.startswith("lm_head."):
        return name
    if config.family == "mixtral":
        name = name.replace(".mlp.", ".block_sparse_moe.")
    if config.family == "gpt_oss":
        name = name.replace(".mlp.gate.", ".mlp.router.")
    return f"model.{name}"


def _expert_name(config: ModelConfig, layer: str, kind: str, expert: int) -> str:
    if config.family == "mixtral":
        return f"model.{layer}.block_sparse_moe.experts.{expert}.{_MIXTRAL[kind]}.weight"
    return f"model.{layer}.mlp.experts.{expert}.{kind}_proj.weight"


class HfFiles:
    """The weights of a folder in the Hugging Face layout: one safetensors file, or shards and their index."""

    def __init__(self, folder: str | Path, config: ModelConfig) -> None:
        self.folder, self.config = Path(folder), config
        index = self.folder / "model.safetensors.index.json"
        if index.exists():
            shards = json.loads(index.read_text())["weight_map"]
            names = set(shards.values())
            if any(Path(name).name != name for name in names):
                raise InputError(f"{index} names files outside of its folder")
            files = {name: TensorFile(self.folder / name) for name in names}
            self._where = {key: files[name] for key, name in shards.items()}
        elif (self.folder / "model.safetensors").exists():
            file = TensorFile(self.folder / "model.safetensors")
            self._where = dict.fromkeys(file, file)
        else:
            raise InputError(
                f"no weights in {self.folder}: model.safetensors or model.safetensors.index.json is missing"
            )

    def tensor(self, name: str) -> Tensor:
        for spelled in (name, name.replace("model.", "model.language_model.", 1), f"language_model.{name}"):
            if spelled in self._where:
                return self._where[spelled][spelled]
        raise ModelError(f"the weights in {self.folder} have no {name!r}{nearest(name, self._where)}")

    def __call__(self, name: str, offset: Shape, shape: Shape) -> Tensor:
        """The block of a parameter of ours, put together from the files' tensors."""
        config = self.config
        found = _EXPERT.search(name)
        if not found:
            if name == "lm_head.weight" and config.tied:
                name = "embed_tokens.weight"
            return self._cut(hf_name(config, name), self.tensor(hf_name(config, name)), offset, shape)
        layer, kind, what = found.groups()
        if config.family != "gpt_oss":
            rows = []
            for e in range(offset[0], offset[0] + shape[0]):
                expert = _expert_name(config, layer, kind, e)
                rows.append(self._cut(expert, self.tensor(expert), offset[1:], shape[1:]))
            return torch.stack(rows)
        ending = "" if what == "proj" else "_bias"
        stem = "down_proj" if kind == "down" else "gate_up_proj"
        whole = self.tensor(f"model.{layer}.mlp.experts.{stem}{ending}")
        if kind != "down":  # gates and ups take turns
            whole = whole[..., (kind == "up") :: 2]
        return self._cut(name, whole if what == "bias" else whole.transpose(1, 2), offset, shape)

    def _cut(self, name: str, tensor: Tensor, offset: Shape, shape: Shape) -> Tensor:
        if tensor.dim() != len(shape) or any(o + s > n for o, s, n in zip(offset, shape, tensor.shape, strict=True)):
            raise ModelError(f"{name} in {self.folder} has shape {tuple(tensor.shape)}, which config.json does not fit")
        return cut(tensor, offset, shape)


def hf_tensors(config: ModelConfig, name: str, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """A parameter of ours as the tensors that files have; empty where another parameter's answer has it."""
    found = _EXPERT.search(name)
    if not found:
        return {hf_name(config, name): read(name)}
    layer, kind, what = found.groups()
    if config.family != "gpt_oss":
        return {_expert_name(config, layer, kind, e): weight for e, weight in enumerate(read(name))}
    ending = "" if what == "proj" else "_bias"
    if kind == "up":
        return {}
    if kind == "down":
        whole, stem = read(name), "down_proj"
        whole = whole.transpose(1, 2) if what == "proj" else whole
    else:
        pair = torch.stack((read(name), read(name.replace("experts.gate_", "experts.up_"))), -1)
        stem = "gate_up_proj"  # [E, I, M, 2] to [E, M, 2 I]; of biases [E, I, 2] to [E, 2 I]
        whole = pair.permute(0, 2, 1, 3).flatten(2) if what == "proj" else pair.flatten(1)
    return {f"model.{layer}.mlp.experts.{stem}{ending}": whole}


def save_hf(
    folder: str | Path,
    config: ModelConfig,
    names: Iterable[str],
    read: Callable[[str], Tensor],
    dtype: torch.dtype = torch.bfloat16,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Write weights and ``config.json`` as ``transformers`` does, one shard in memory at a time."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[tuple[Path, list[str]]] = []
    waiting: dict[str, Tensor] = {}
    total = held = 0

    def flush() -> None:
        nonlocal held
        path = folder / f"part-{len(shards)}.safetensors"
        write_tensors(path, waiting, {"format": "pt"})
        shards.append((path, list(waiting)))
        waiting.clear()
        held = 0

    for name in names:
        for key, tensor in hf_tensors(config, name, read).items():
            kept = tensor if key.endswith("correction_bias") else tensor.to(dtype)
            size = kept.numel() * kept.element_size()
            if waiting and held + size > shard_bytes:
                flush()
            waiting[key] = kept
            held, total = held + size, total + size
    flush()
    if len(shards) == 1:
        shards[0][0].replace(folder / "model.safetensors")
    else:
        weight_map: dict[str, str] = {}
        for i, (path, keys) in enumerate(shards):
            name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
            path.replace(folder / name)
            weight_map |= dict.fromkeys(keys, name)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_text(folder / "model.safetensors.index.json", json.dumps(index, indent=1))
    source = {**config.source, "dtype": str(dtype).removeprefix("torch.")}
    source.pop("torch_dtype", None)
    write_text(folder / "config.json", json.dumps(source, indent=2))


def save_model(model: Decoder, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a whole model's weights and configuration in the Hugging Face layout."""
    held = {block.name: mine for block, mine in blocks(model)}
    save_hf(folder, model.config, held, held.__getitem__, dtype)


def load_model(folder: str | Path, device: Any = "cpu", dtype: torch.dtype = torch.bfloat16) -> Decoder:
    """A decoder with the weights of a folder in the Hugging Face layout."""
    config = ModelConfig.load(folder)
    model = Decoder(config, device=device, dtype=dtype)
    fill(model, HfFiles(folder, config))
    return model
