"""Safetensors files: read by memory map, written so that a file is either whole or not there."""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import InputError

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorFile:
    """The tensors of one file; what is not used is not read from the disk."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with open(self.path, "rb") as file:
                # A private map: PyTorch wants memory it may write, the file never changes
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            size = int.from_bytes(self._map[:8], "little")
            header = json.loads(self._map[8 : 8 + size])
            self._start = 8 + size
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            self._entries: dict[str, Any] = header
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                wanted = math.prod(entry["shape"]) * DTYPES[entry["dtype"]].itemsize
                if not 0 <= begin <= end <= len(self._map) - self._start or end - begin != wanted:
                    raise ValueError(f"tensor {name!r} does not fit the file")
        except FileNotFoundError:
            raise InputError(f"no file {self.path}") from None
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise InputError(f"{self.path} is no whole safetensors file: {error}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entries[name]["shape"])

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        offset = self._start + entry["data_offsets"][0]
        if offset % dtype.itemsize:  # the format does not promise alignment
            raw = torch.frombuffer(self._map, dtype=torch.uint8, count=count * dtype.itemsize, offset=offset)
            return raw.clone().view(dtype).view(shape)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).view(shape)


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> str:
    """Write a file, wait until the disk has it, and only then give it its name; returns its SHA-256."""
    path = Path(path)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    temporary = path.with_name(path.name + ".partial")
    with open(temporary, "wb") as file:
        for piece in (len(text).to_bytes(8, "little"), text):
            file.write(piece)
            digest.update(piece)
        for tensor in tensors.values():
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            file.write(data)
            digest.update(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)
    return digest.hexdigest()


def write_text(path: str | Path, text: str) -> None:
    """The same for a text file."""
    path = Path(path)
    temporary = path.with_name(path.name + ".partial")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """A rename is on the disk when its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
