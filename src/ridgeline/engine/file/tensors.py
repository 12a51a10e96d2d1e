"""Tensors as a safetensors member: a header in JSON, then the values, which are read where they lie."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ridgeline.engine.file.container import ALIGNMENT, from_json, to_json
from ridgeline.engine.file.program import shown
from ridgeline.errors import EngineError

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip
TYPES = {name: dtype for dtype, name in NAMES.items()}
MAX_HEADER_BYTES = 100 << 20


def pack(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> list[Any]:
    """Buffers of a safetensors file. Tensors of multiples of 64 bytes come first, so that all of those are aligned."""
    order = sorted(
        tensors, key=lambda name: (tensors[name].nbytes % ALIGNMENT > 0, -tensors[name].element_size(), name)
    )
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end, parts = 0, list[Any]()
    for name in order:
        tensor = tensors[name].detach()
        if tensor.dtype not in NAMES:
            raise EngineError(f"weight {name!r} is {tensor.dtype}, which safetensors cannot hold")
        flat = tensor.cpu().resolve_conj().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy() if flat.numel() else b""
        start, end = end, end + flat.nbytes
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        parts.append(data)
    text = to_json(header)
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return [struct.pack("<Q", len(text)) + text, *parts]


def unpack(data: memoryview, what: str) -> dict[str, Tensor]:
    """Tensors over the member's own memory, or copies where they lie unaligned: products may round otherwise there."""
    return {name: _tensor(data, entry) for name, entry in layout(data, what).items()}


def _tensor(data: memoryview, entry: tuple[torch.dtype, tuple[int, ...], int, int]) -> Tensor:
    dtype, shape, start, end = entry
    if start == end:
        return torch.empty(shape, dtype=dtype)
    count = (end - start) // dtype.itemsize
    if start % ALIGNMENT == 0:
        return torch.frombuffer(data, dtype=dtype, count=count, offset=start).reshape(shape)
    made = torch.empty(shape, dtype=dtype)
    made.view(-1).view(torch.uint8).copy_(torch.frombuffer(data, dtype=torch.uint8, count=end - start, offset=start))
    return made


def layout(data: memoryview, what: str) -> dict[str, tuple[torch.dtype, tuple[int, ...], int, int]]:
    """Type, shape, start and end of every tensor of a safetensors file: no overlap, no gap, nothing behind the end."""
    if len(data) < 8:
        raise EngineError(f"{what} is too short for tensors")
    (length,) = struct.unpack("<Q", data[:8])
    if length > min(MAX_HEADER_BYTES, len(data) - 8):
        raise EngineError(f"{what} is not safetensors: its header would have {length:,} bytes, more than there are")
    header = from_json(data[8 : 8 + length], f"{what}: header")
    if not isinstance(header, dict):
        raise EngineError(f"{what} has no header of tensors")
    begin, found = 8 + length, {}
    ends: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (start, end) = TYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise EngineError(f"{what}: tensor {shown(name)} has no known dtype, shape and place") from None
        if not all(type(n) is int and 0 <= n < 1 << 40 for n in (*shape, start, end)) or len(shape) > 64:
            raise EngineError(f"{what}: tensor {shown(name)} has an impossible shape or place")
        if start > end or begin + end > len(data) or math.prod(shape) * dtype.itemsize != end - start:
            raise EngineError(f"{what}: tensor {shown(name)} of {shape} does not fit its place")
        found[name] = (dtype, shape, begin + start, begin + end)
        ends.append((start, end, name))
    at = 0
    for start, end, name in sorted(ends):
        if start != at:
            raise EngineError(f"{what}: tensor {shown(name)} overlaps another one, or leaves a gap")
        at = end
    if begin + at != len(data):
        raise EngineError(f"{what} has {len(data) - begin - at:,} bytes behind its last tensor")
    return found
