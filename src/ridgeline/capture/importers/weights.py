"""Weights as references into mapped files: shape, element type and place are known, bytes are read when used."""

from __future__ import annotations

import mmap
import os
import stat
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from ridgeline.errors import ModelFileError

MAX_ELEMENTS = 1 << 48


def mapped(path: Path, *, follow: bool = True) -> memoryview:
    """A whole file as memory: pages are read on first use, writes stay private."""
    try:
        fd = os.open(path, os.O_RDONLY | (0 if follow else os.O_NOFOLLOW))
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"cannot read {path}: not a regular file")
        if not follow and status.st_nlink > 1:
            raise ModelFileError(f"cannot read {path}: it is a hard link, so it may be any file of this machine; "
                                 f"copy it with `cp --no-preserve=links`")  # fmt: skip
        if status.st_size == 0:
            return memoryview(b"")
        private = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        try:
            found = mmap.mmap(fd, status.st_size, flags=private, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError:  # no room to promise private pages for: read-only
            found = mmap.mmap(fd, status.st_size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        return memoryview(found)
    except OSError as error:
        raise ModelFileError(f"cannot map {path}: {error.strerror}") from error
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor of a file that nobody has read yet."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    element: int = 0  # the file's own type number, where several share one of PyTorch

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


def view_of(data: memoryview, dtype: torch.dtype, shape: tuple[int, ...], where: str) -> torch.Tensor:
    """The bytes as a tensor that shares them."""
    needed = prod(shape) * dtype.itemsize
    if len(data) != needed:
        raise ModelFileError(f"{where}: {len(data):,} bytes of data for shape {list(shape)} of {dtype}, "
                             f"which takes {needed:,}: the file is damaged")  # fmt: skip
    if not needed:
        return torch.empty(shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # read-only memory: nothing here writes to weights
        found = torch.frombuffer(data, dtype=torch.uint8)
        # Protobuf puts bytes anywhere. x86 and Arm load unaligned elements; what is small is copied all the same.
        if needed <= 1 << 16 and found.data_ptr() % dtype.itemsize:
            found = found.clone()
            return found.view(dtype).reshape(shape)
        return torch.frombuffer(data, dtype=dtype).reshape(shape)


def checked_shape(dims: list[int], where: str) -> tuple[int, ...]:
    """A shape that can be: no negative dims, a number of elements that 64 bits hold."""
    if len(dims) > 64 or any(d < 0 for d in dims) or prod(d for d in dims if d) > MAX_ELEMENTS:
        raise ModelFileError(f"{where}: shape {dims[:8]} cannot be: the file is damaged")
    return tuple(dims)


class Folder:
    """Files beside a model that its weights may lie in: inside its folder, no links, each mapped once."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.files: dict[str, memoryview] = {}

    def data(self, location: str, where: str) -> memoryview:
        if location not in self.files:
            parts = location.replace("\\", "/").split("/")
            if not location or location.startswith(("/", "\\")) or ".." in parts or ":" in parts[0] or "\0" in location:
                raise ModelFileError(f"{where}: external data at {location!r} lies outside of the model's folder: "
                                     "put it beside the model and save the relative path")  # fmt: skip
            path = self.root / location
            try:
                real = path.resolve()
            except (OSError, RuntimeError) as error:
                raise ModelFileError(f"{where}: cannot find external data {location!r}: {error}") from error
            if real != path:
                raise ModelFileError(f"{where}: external data {location!r} is a symbolic link, which may point "
                                     "anywhere: copy the file itself beside the model (cp -L)")  # fmt: skip
            if not path.exists():
                raise ModelFileError(f"{where}: external data {location!r} is missing: it belongs beside the model, "
                                     f"in {self.root}")  # fmt: skip
            self.files[location] = mapped(path, follow=False)
        return self.files[location]
