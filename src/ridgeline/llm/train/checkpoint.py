"""Checkpoints: safetensors files and a JSON manifest, written last. No pickle is read or written.

``step-00000100/rank-00003.safetensors`` holds the blocks of rank 3: parameters under their names, optimizer states
under ``<parameter>/<state>``. ``checkpoint.json`` lists every file with its hash, where every block lies in its whole,
and the state of the run. A folder without it, or with a file that differs from its hash, is no checkpoint. Any number
of ranks can load: each asks for the blocks it needs, and they are put together from those that were saved.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.errors import InputError
from ridgeline.llm.model.tensor_file import TensorFile, write_tensors, write_text
from ridgeline.llm.model.weights import Block, Shape

MANIFEST = "checkpoint.json"


class Checkpointer:
    """Writes checkpoints behind the running steps, and finds the newest whole one."""

    def __init__(self, folder: str | Path, keep: int, rank: int = 0, world: int = 1) -> None:
        self.folder, self.keep, self.rank, self.world = Path(folder), keep, rank, world
        self._thread: threading.Thread | None = None
        self._failed: list[BaseException] = []
        self._pending: tuple[Path, Mapping[str, Any]] | None = None

    def save(
        self, step: int, tensors: Mapping[str, tuple[Block, Tensor]], state: Mapping[str, Any], device: torch.device
    ) -> None:
        """Copy what this rank holds and write it in the background; ``finish`` waits for it."""
        self.finish()
        folder = self.folder / f"step-{step:08d}"
        if self.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        if self.world > 1:
            dist.barrier()
        mine = _first_of_copies(tensors, self.rank, self.world, device)
        copies = {name: tensors[name][1].detach().to("cpu", copy=True) for name in mine}
        places = {name: [list(tensors[name][0].whole), list(tensors[name][0].offset)] for name in mine}
        self._pending = folder, dict(state)
        self._thread = threading.Thread(target=self._write, args=(folder, copies, places), name="checkpoint")
        self._thread.start()

    def _write(self, folder: Path, tensors: Mapping[str, Tensor], places: Mapping[str, Any]) -> None:
        try:
            name = f"rank-{self.rank:05d}"
            digest = write_tensors(folder / f"{name}.safetensors", tensors)
            written = {"file": f"{name}.safetensors", "sha256": digest, "blocks": places}
            write_text(folder / f"{name}.json", json.dumps(written))
            if self.world == 1:
                self._commit()
        except BaseException as error:
            self._failed.append(error)

    def _commit(self) -> None:
        """All files are on the disk: name them in the manifest, which makes them a checkpoint."""
        assert self._pending is not None
        folder, state = self._pending
        files = [json.loads((folder / f"rank-{r:05d}.json").read_text()) for r in range(self.world)]
        write_text(folder / MANIFEST, json.dumps({"state": state, "files": files}))
        for old in steps_in(self.folder)[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)

    def poll(self, wait: bool = False) -> None:
        """Between steps, on all ranks alike: commit once every rank has written its file."""
        if self._thread is None:
            return
        if wait:
            self._thread.join()
        done = not self._thread.is_alive()
        if self.world > 1:
            flag = torch.tensor([done and not self._failed, bool(self._failed)], dtype=torch.int32)
            every = flag.clone()
            dist.all_reduce(every[:1], dist.ReduceOp.MIN)
            dist.all_reduce(every[1:], dist.ReduceOp.MAX)
            done = bool(every[0]) or bool(every[1])
            if bool(every[0]) and self.rank == 0:
                self._commit()
            if bool(every[1]) and not self._failed:
                self._failed.append(InputError("another rank could not write its part"))
        if done:
            self._thread, self._pending = None, None
            if self._failed:
                raise InputError(f"a checkpoint could not be written to {self.folder}: {self._failed.pop()}")
            if self.world > 1:
                dist.barrier()

    def finish(self) -> None:
        while self._thread is not None:
            self.poll(wait=True)


def _first_of_copies(
    tensors: Mapping[str, tuple[Block, Tensor]], rank: int, world: int, device: torch.device
) -> list[str]:
    """The blocks that no lower rank holds too."""
    names = [name for name, (_, tensor) in tensors.items() if tensor.numel()]
    if world == 1:
        return names

    def key(name: str) -> int:
        text = f"{name}{tensors[name][0].offset}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)

    keys = [key(name) for name in names]
    most = torch.tensor([len(keys)], device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    own = torch.zeros(int(most), dtype=torch.int64, device=device)
    own[: len(keys)] = torch.tensor(keys, dtype=torch.int64)
    every = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(every, own)
    lower = {k for held in every[:rank] for k in held.tolist()}
    return [name for name, k in zip(names, keys, strict=True) if k not in lower]


def steps_in(folder: Path) -> list[Path]:
    """Folders with a manifest, oldest first."""
    return sorted(path.parent for path in folder.glob(f"step-*/{MANIFEST}"))


class Checkpoint:
    """A whole checkpoint, read block by block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        manifest = json.loads((folder / MANIFEST).read_text())
        self.state: dict[str, Any] = manifest["state"]
        self.files: dict[str, str] = {}
        self._where: dict[str, list[tuple[TensorFile, Shape]]] = {}
        self.wholes: dict[str, Shape] = {}
        for entry in manifest["files"]:
            if Path(entry["file"]).name != entry["file"]:
                raise InputError(f"{folder / MANIFEST} names a file outside of its folder")
            self.files[entry["file"]] = entry["sha256"]
            file = TensorFile(folder / entry["file"])
            for name, (whole, offset) in entry["blocks"].items():
                self._where.setdefault(name, []).append((file, tuple(offset)))
                self.wholes[name] = tuple(whole)

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def damaged(self, rank: int = 0, world: int = 1) -> list[str]:
        """Files that differ from their hash; each rank looks at some."""
        found = []
        for name, digest in list(self.files.items())[rank::world]:
            with open(self.folder / name, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    found.append(name)
        return found

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def read(self, name: str, offset: Shape, shape: Shape) -> Tensor:
        """A block, put together from the saved ones that overlap it."""
        if name not in self._where:
            raise InputError(f"the checkpoint {self.folder} has no {name!r}")
        result: Tensor | None = None
        filled = 0
        for file, start in self._where[name]:
            saved = file.shape(name)
            low = [max(a, b) for a, b in zip(offset, start, strict=True)]
            high = [min(a + n, b + m) for a, n, b, m in zip(offset, shape, start, saved, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            piece = file[name]
            for dim, (a, b, s) in enumerate(zip(low, high, start, strict=True)):
                piece = piece.narrow(dim, a - s, b - a)
            if piece.shape == shape:
                return piece
            result = torch.empty(shape, dtype=piece.dtype) if result is None else result
            target = result
            for dim, (a, b, o) in enumerate(zip(low, high, offset, strict=True)):
                target = target.narrow(dim, a - o, b - a)
            target.copy_(piece)
            filled += piece.numel()
        if result is None or filled != result.numel():
            raise InputError(f"the checkpoint {self.folder} lacks a part of {name!r}")
        return result


def newest(folder: str | Path, rank: int, world: int, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint whose files are what was written; a damaged one is named and passed over."""
    for path in reversed(steps_in(Path(folder))):
        try:
            found = Checkpoint(path)
            damaged = found.damaged(rank, world)
        except (InputError, OSError, ValueError, KeyError) as error:
            found, damaged = None, [str(error)]
        bad = torch.tensor([len(damaged)])
        if world > 1:
            dist.all_reduce(bad)
        if found is not None and not int(bad):
            return found
        warn(
            f"checkpoint {path.name} is damaged ({', '.join(damaged) or 'found by another rank'}); trying an older one"
        )
    return None


def whole_names(checkpoint: Checkpoint) -> Iterable[str]:
    return [name for name in checkpoint.wholes if "/" not in name]
