"""Element types by the names people write, with their widths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ridgeline.errors import GraphError, nearest


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """An element type: its canonical short name, width in bits and family (float, int, bool, complex, packed).

    Packed weights are quantized in blocks: ``packed4.5`` takes 4.5 bits an element, its block's scales included.

    There is one of each, in the table below: they are compared and hashed as what they are, copied to themselves.
    """

    name: str
    bits: float
    family: str

    @property
    def itemsize(self) -> float:
        """Bytes per element; fractional below one byte."""
        return self.bits / 8

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Callable[[str | DType], DType], tuple[str]]:
        return dtype, (self.name,)


_TABLE = {
    name: DType(name, bits, family)
    for name, bits, family in [
        ("fp64", 64, "float"), ("fp32", 32, "float"), ("tf32", 32, "float"), ("fp16", 16, "float"),
        ("bf16", 16, "float"), ("fp8", 8, "float"), ("fp8_e5m2", 8, "float"), ("fp6", 6, "float"),
        ("fp4", 4, "float"), ("int64", 64, "int"), ("int32", 32, "int"), ("int16", 16, "int"),
        ("int8", 8, "int"), ("uint8", 8, "int"), ("int4", 4, "int"), ("bool", 8, "bool"),
        ("complex64", 64, "complex"), ("complex128", 128, "complex"),
    ]
}  # fmt: skip

_ALIASES = {
    "float64": "fp64", "double": "fp64", "float32": "fp32", "float": "fp32", "f32": "fp32", "float16": "fp16",
    "half": "fp16", "f16": "fp16", "bfloat16": "bf16", "float8": "fp8", "float8_e4m3fn": "fp8", "fp8_e4m3": "fp8",
    "float8_e4m3fnuz": "fp8", "float8_e5m2": "fp8_e5m2", "float8_e5m2fnuz": "fp8_e5m2", "nvfp4": "fp4", "mxfp4": "fp4",
    "long": "int64", "int": "int32", "short": "int16", "uint16": "int16", "uint32": "int32", "uint64": "int64",
    "float8_e8m0fnu": "uint8", "float4_e2m1fn_x2": "uint8",
}  # fmt: skip


def dtype(name: str | DType) -> DType:
    """The element type called ``name`` (``bf16``, ``bfloat16``, ``torch.bfloat16`` are one)."""
    if isinstance(name, DType):
        return name
    found = _TABLE.get(name)
    if found is not None:
        return found
    key = name.removeprefix("torch.").lower()
    key = _ALIASES.get(key, key)
    if key.startswith("packed") and key[6:].replace(".", "", 1).isdigit():
        return _TABLE.setdefault(key, DType(key, float(key[6:]), "packed"))
    if key not in _TABLE:
        raise GraphError(f"unknown dtype {name!r}{nearest(key, [*_TABLE, *_ALIASES])}")
    return _TABLE[key]
