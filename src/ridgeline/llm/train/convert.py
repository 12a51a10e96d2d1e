"""Weights from one layout to another: a run's checkpoint or a Hugging Face folder, to safetensors or PyTorch's DCP."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from ridgeline.errors import InputError, nearest
from ridgeline.llm.model.config import ModelConfig
from ridgeline.llm.model.decoder import Decoder
from ridgeline.llm.model.weights import HfFiles, blocks, hf_tensors, save_hf
from ridgeline.llm.train import adapters
from ridgeline.llm.train.checkpoint import MANIFEST, Checkpoint, newest


def convert(source: str | Path, out: str | Path, dtype: str = "bfloat16", to: str = "hf") -> list[str]:
    """Write the weights of ``source`` to the folder ``out``, whole, as ``hf`` or ``dcp``; returns what to know of it.

    ``source`` is a run's folder (its newest whole checkpoint), one checkpoint, or a folder in the Hugging Face layout.
    """
    for what, value, choices in (("dtype", dtype, ("bfloat16", "float16", "float32")), ("to", to, ("hf", "dcp"))):
        if value not in choices:
            raise InputError(f"{what} is {value!r}{nearest(value, choices)}")
    source, out, kind = Path(source), Path(out), getattr(torch, dtype)
    notes: list[str] = []
    if out.exists() and any(out.iterdir()):
        raise InputError(f"{out} is not empty: give another folder")
    found = Checkpoint(source) if (source / MANIFEST).exists() else None
    if (source / "checkpoints").is_dir():
        found = newest(source / "checkpoints", 0, 1, notes.append)
        if found is None:
            raise InputError(f"{source / 'checkpoints'} has no whole checkpoint")
    if found is not None:
        if damaged := found.damaged():
            raise InputError(f"{found.folder} is damaged ({', '.join(damaged)}): take an older one")
        notes.append(f"weights after step {found.step}")
        config = ModelConfig.from_hf(found.state["config"])
        names, read = adapters.merged(found)
    else:
        config = ModelConfig.load(source)
        files = HfFiles(source, config)
        wholes = {block.name: block.whole for block, _ in blocks(Decoder(config))}
        names, read = list(wholes), lambda name: files(name, (0,) * len(wholes[name]), wholes[name])
    if to == "hf":
        save_hf(out, config, names, read, kind)
        return notes
    from torch.distributed import checkpoint

    whole = {key: tensor.to(kind) for name in names for key, tensor in hf_tensors(config, name, read).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that one process saves, which is what was asked for
        checkpoint.save(whole, checkpoint_id=out, no_dist=True)
    return [*notes, "DCP's .metadata is a pickle: whoever loads it has to trust where it comes from"]
