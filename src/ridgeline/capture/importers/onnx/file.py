"""ONNX files: the model as plain records, by our own reader of the format."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ridgeline.capture.importers import wire
from ridgeline.capture.importers.weights import Folder, TensorRef, checked_shape, mapped, view_of
from ridgeline.errors import ModelFileError

MAX_DEPTH = 32
"""Graphs inside of control flow inside of graphs."""

ELEMENT_TYPES: dict[int, torch.dtype] = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 4: torch.uint16, 5: torch.int16, 6: torch.int32, 7: torch.int64,
    9: torch.bool, 10: torch.float16, 11: torch.float64, 12: torch.uint32, 13: torch.uint64, 14: torch.complex64,
    15: torch.complex128, 16: torch.bfloat16, 17: torch.float8_e4m3fn, 18: torch.float8_e4m3fnuz,
    19: torch.float8_e5m2, 20: torch.float8_e5m2fnuz, 24: torch.float8_e8m0fnu,
}  # fmt: skip
STRING = 8
PACKED_TYPES = {21: (torch.uint8, 4, False), 22: (torch.int8, 4, True), 25: (torch.uint8, 2, False),
                26: (torch.int8, 2, True)}  # fmt: skip
FLOAT4 = 23
FLOAT4_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
"""int4 and the like are held in the narrowest type PyTorch computes with, 4-bit floats in float32."""

NAMES = {1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 8: "string", 9: "bool",
         10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 14: "complex64", 15: "complex128", 16: "bfloat16",
         17: "float8_e4m3fn", 18: "float8_e4m3fnuz", 19: "float8_e5m2", 20: "float8_e5m2fnuz", 21: "uint4", 22: "int4",
         23: "float4_e2m1", 24: "float8_e8m0", 25: "uint2", 26: "int2"}  # fmt: skip


def torch_type(element: int, where: str) -> torch.dtype:
    """PyTorch's element type for one of ONNX; strings and the like have none."""
    if element in ELEMENT_TYPES:
        return ELEMENT_TYPES[element]
    if element in PACKED_TYPES:
        return PACKED_TYPES[element][0]
    if element == FLOAT4:
        return torch.float32
    raise ModelFileError(f"{where}: element type {NAMES.get(element, element)} cannot be computed with: "
                         "convert the model to another one")  # fmt: skip


@dataclass(frozen=True, slots=True)
class ValueType:
    """What is declared of an input or output: dims are sizes, names, or None where unknown."""

    name: str
    kind: str = "tensor"
    element: int = 0
    dims: tuple[int | str | None, ...] | None = None


@dataclass(slots=True)
class Node:
    op: str
    domain: str
    name: str
    inputs: list[str]
    outputs: list[str]
    attrs: dict[str, Any]
    scope: str = ""
    overload: str = ""

    def told(self) -> str:
        """How errors call this node."""
        return f"node {self.name or (self.outputs[0] if self.outputs else '')!r} ({self.op})"


@dataclass(slots=True)
class OnnxGraph:
    name: str
    nodes: list[Node]
    inputs: list[ValueType]
    outputs: list[ValueType]
    weights: dict[str, TensorRef]
    texts: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)


@dataclass(slots=True)
class Function:
    """A function of the model's own: a body that calls of its name are replaced by."""

    name: str
    domain: str
    inputs: list[str]
    outputs: list[str]
    nodes: list[Node]
    defaults: dict[str, Any]
    opsets: dict[str, int]


@dataclass(slots=True)
class OnnxModel:
    path: str
    ir_version: int
    producer: str
    opsets: dict[str, int]
    graph: OnnxGraph
    functions: dict[tuple[str, str], Function]


@dataclass(frozen=True, slots=True)
class AttrRef:
    """An attribute that takes its value from the call of the function around it."""

    name: str


def read_model(path: Path) -> OnnxModel:
    """The model in a file; its weights stay there."""
    return _Reader(path.name, Folder(path.parent)).model(mapped(path))


def read_bytes(data: bytes, name: str = "model", folder: Path | None = None) -> OnnxModel:
    """The model in memory."""
    return _Reader(name, Folder(folder or Path())).model(memoryview(bytearray(data)))


class _Reader:
    def __init__(self, where: str, folder: Folder) -> None:
        self.where, self.folder = where, folder

    def model(self, view: memoryview) -> OnnxModel:
        found = wire.fields(view, self.where, {1, 2, 3, 7, 8, 20, 25})
        graphs = found.get(7)
        if not graphs or not isinstance(graphs[-1], memoryview):
            raise ModelFileError(f"{self.where}: no graph inside: it is no ONNX model, or was cut short")
        opsets = self.opsets(found, 8)
        functions = {}
        for body in self.messages(found, 25):
            made = self.function(body)
            functions[made.domain, made.name] = made
        producer = f"{wire.text(found, 2)} {wire.text(found, 3)}".strip()
        return OnnxModel(self.where, wire.integer(found, 1), producer, opsets, self.graph(graphs[-1], 0), functions)

    def opsets(self, found: wire.Fields, number: int) -> dict[str, int]:
        out: dict[str, int] = {}
        for body in self.messages(found, number):
            entry = wire.fields(body, self.where)
            domain = wire.text(entry, 1)
            out["" if domain == "ai.onnx" else domain] = wire.integer(entry, 2, 1)
        return out

    def messages(self, found: wire.Fields, number: int) -> list[memoryview]:
        bodies = found.get(number, [])
        if any(not isinstance(body, memoryview) for body in bodies):
            raise ModelFileError(f"{self.where}: field {number} is a number where a message belongs: it is damaged")
        return bodies

    def function(self, view: memoryview) -> Function:
        found = wire.fields(view, self.where)
        defaults = dict(self.attribute(body, 1) for body in self.messages(found, 11))
        return Function(
            wire.text(found, 1), wire.text(found, 10), self.strings(found, 4), self.strings(found, 5),
            [self.node(body, 1) for body in self.messages(found, 7)], defaults, self.opsets(found, 9),
        )  # fmt: skip

    def strings(self, found: wire.Fields, number: int) -> list[str]:
        return [bytes(body).decode("utf-8", "replace") for body in self.messages(found, number)]

    def graph(self, view: memoryview, depth: int) -> OnnxGraph:
        if depth > MAX_DEPTH:
            raise ModelFileError(f"{self.where}: graphs nest more than {MAX_DEPTH} deep: no model does")
        found = wire.fields(view, self.where, {1, 2, 5, 11, 12, 15})
        weights: dict[str, TensorRef] = {}
        texts: dict[str, Any] = {}
        for body in self.messages(found, 5):
            made = self.tensor(body)
            if isinstance(made, TensorRef):
                weights[made.name] = made
            else:
                texts[made[0]] = made[1]
        for body in self.messages(found, 15):
            sparse = self.sparse(body)
            weights[sparse.name] = sparse
        return OnnxGraph(
            wire.text(found, 2), [self.node(body, depth) for body in self.messages(found, 1)],
            [self.value(body) for body in self.messages(found, 11)],
            [self.value(body) for body in self.messages(found, 12)], weights, texts,
        )  # fmt: skip

    def node(self, view: memoryview, depth: int) -> Node:
        found = wire.fields(view, self.where)
        attrs = dict(self.attribute(body, depth) for body in self.messages(found, 5))
        props = {}
        for body in self.messages(found, 9):
            entry = wire.fields(body, self.where)
            props[wire.text(entry, 1)] = wire.text(entry, 2)
        domain, name = wire.text(found, 7), wire.text(found, 3)
        return Node(wire.text(found, 4), "" if domain == "ai.onnx" else domain, name, self.strings(found, 1),
                    self.strings(found, 2), attrs, _scope(name, props), wire.text(found, 8))  # fmt: skip

    def attribute(self, view: memoryview, depth: int) -> tuple[str, Any]:
        found = wire.fields(view, self.where)
        name, kind = wire.text(found, 1), wire.integer(found, 20)
        if 21 in found:
            return name, AttrRef(wire.text(found, 21))
        if not kind:  # files before IR version 2 leave the type out
            kind = next(
                (k for n, k in ((2, 1), (3, 2), (4, 3), (5, 4), (6, 5), (7, 6), (8, 7), (9, 8)) if n in found), 0
            )
        one = {1: 2, 2: 3, 3: 4, 4: 5, 5: 6, 13: 14, 11: 22}.get(kind)
        if one is not None and one not in found:
            default = {1: 0.0, 2: 0, 3: b""}.get(kind)
            if default is None:
                raise ModelFileError(f"{self.where}: attribute {name!r} has no value: the file is damaged")
            return name, default
        if kind == 1:
            return name, struct.unpack("<f", self.fixed(found[2][-1]))[0]
        if kind == 2:
            return name, wire.integer(found, 3)
        if kind == 3:
            return name, bytes(self.messages(found, 4)[-1])
        if kind == 4:
            return name, self.tensor(self.messages(found, 5)[-1])
        if kind == 5:
            return name, self.graph(self.messages(found, 6)[-1], depth + 1)
        if kind == 6:
            return name, wire.floats(found, 7)
        if kind == 7:
            return name, wire.integers(found, 8, self.where)
        if kind == 8:
            return name, [bytes(body) for body in self.messages(found, 9)]
        if kind == 9:
            return name, [self.tensor(body) for body in self.messages(found, 10)]
        if kind == 10:
            return name, [self.graph(body, depth + 1) for body in self.messages(found, 11)]
        if kind == 11:
            return name, self.sparse(self.messages(found, 22)[-1])
        if kind == 13:
            return name, self.type(self.messages(found, 14)[-1], name, 0)
        raise ModelFileError(f"{self.where}: attribute {name!r} has type {kind}, which ONNX does not define")

    def fixed(self, value: Any) -> bytes:
        if not isinstance(value, memoryview) or len(value) != 4:
            raise ModelFileError(f"{self.where}: a float is not four bytes long: the file is damaged")
        return bytes(value)

    def value(self, view: memoryview) -> ValueType:
        found = wire.fields(view, self.where)
        kinds = self.messages(found, 2)
        return self.type(kinds[-1], wire.text(found, 1), 0) if kinds else ValueType(wire.text(found, 1), "unknown")

    def type(self, view: memoryview, name: str, depth: int) -> ValueType:
        if depth > MAX_DEPTH:
            raise ModelFileError(f"{self.where}: the type of {name!r} nests more than {MAX_DEPTH} deep")
        found = wire.fields(view, self.where)
        for number, kind in ((4, "sequence"), (9, "optional"), (5, "map")):
            if number in found:
                inner = wire.fields(self.messages(found, number)[-1], self.where)
                bodies = self.messages(inner, 1) if kind != "map" else []
                below = self.type(bodies[-1], name, depth + 1) if bodies else ValueType(name)
                return ValueType(name, kind, below.element, below.dims)
        if 1 not in found:
            return ValueType(name, "sparse" if 8 in found else "unknown")
        tensor = wire.fields(self.messages(found, 1)[-1], self.where)
        dims: tuple[int | str | None, ...] | None = None
        if 2 in tensor:
            shape = wire.fields(self.messages(tensor, 2)[-1], self.where)
            dims = tuple(self.dim(body) for body in self.messages(shape, 1))
        return ValueType(name, "tensor", wire.integer(tensor, 1), dims)

    def dim(self, view: memoryview) -> int | str | None:
        found = wire.fields(view, self.where)
        if 1 in found:
            size = wire.integer(found, 1)
            return size if size >= 0 else None
        return wire.text(found, 2) or None

    def sparse(self, view: memoryview) -> TensorRef:
        found = wire.fields(view, self.where)
        values, indices = (self.tensor(self.messages(found, n)[-1]) if found.get(n) else None for n in (1, 2))
        if not isinstance(values, TensorRef) or not isinstance(indices, TensorRef):
            raise ModelFileError(f"{self.where}: a sparse tensor without values or indices: the file is damaged")
        shape = checked_shape(wire.integers(found, 3, self.where), f"{self.where}: tensor {values.name!r}")

        def read() -> torch.Tensor:
            at, given = indices.read(), values.read()
            dense = torch.zeros(shape, dtype=given.dtype)
            if at.numel() and (int(at.min()) < 0 or int(at.max()) >= (dense.numel() if at.dim() == 1 else 1 << 62)):
                raise ModelFileError(f"{self.where}: sparse tensor {values.name!r} has values outside of its shape")
            if at.dim() == 1:
                dense.reshape(-1)[at] = given
            else:
                dense[tuple(at.T)] = given
            return dense

        return TensorRef(values.name, values.dtype, shape, read)

    def tensor(self, view: memoryview) -> TensorRef | tuple[str, np.ndarray[Any, Any]]:
        found = wire.fields(view, self.where)
        name, element = wire.text(found, 8), wire.integer(found, 2)
        where = f"{self.where}: tensor {name!r}"
        shape = checked_shape(wire.integers(found, 1, where), where)
        if element == STRING:
            texts = self.messages(found, 6)
            if len(texts) != int(np.prod(shape, dtype=object)):
                raise ModelFileError(f"{where}: {len(texts)} strings for shape {list(shape)}: the file is damaged")
            made = np.empty(len(texts), dtype=object)
            made[:] = [bytes(t).decode("utf-8", "replace") for t in texts]
            return name, made.reshape(shape)
        dtype = torch_type(element, where)
        if wire.integer(found, 14) == 1 or 13 in found:
            data = self.external(found, where, element, shape)
        elif 9 in found:
            data = self.messages(found, 9)[-1]
        else:
            return TensorRef(name, dtype, shape, lambda: _typed_data(found, element, shape, where), element)
        if element in PACKED_TYPES or element == FLOAT4:
            return TensorRef(
                name, dtype, shape, lambda: _unpacked(np.frombuffer(data, np.uint8), element, shape, where), element
            )
        num_bytes = dtype.itemsize * int(np.prod(shape, dtype=object))
        if len(data) != num_bytes:
            raise ModelFileError(f"{where}: {len(data):,} bytes of data where shape {list(shape)} of {NAMES[element]} "
                                 f"takes {num_bytes:,}: the file is damaged")  # fmt: skip
        return TensorRef(name, dtype, shape, lambda: view_of(data, dtype, shape, where), element)

    def external(self, found: wire.Fields, where: str, element: int, shape: tuple[int, ...]) -> memoryview:
        entries: dict[str, str] = {}
        for body in self.messages(found, 13):
            entry = wire.fields(body, self.where)
            entries[wire.text(entry, 1)] = wire.text(entry, 2)
        try:
            offset, length = int(entries.get("offset") or 0), int(entries.get("length") or -1)
        except ValueError as error:
            raise ModelFileError(f"{where}: offset or length of its external data is no number") from error
        data = self.folder.data(entries.get("location", ""), where)
        if length < 0 and element in ELEMENT_TYPES:
            length = ELEMENT_TYPES[element].itemsize * int(np.prod(shape, dtype=object))
        if offset < 0 or offset + max(length, 0) > len(data):
            raise ModelFileError(f"{where}: its data reaches past the end of {entries.get('location')!r}: "
                                 "the file is cut short, or belongs to another model")  # fmt: skip
        return data[offset : offset + length] if length >= 0 else data[offset:]


def _scope(name: str, props: dict[str, str]) -> str:
    """The module a node came from, as exporters write it: name scopes of torch, or slashes in the node's name."""
    for key in ("pkg.torch.onnx.name_scopes", "namespace"):
        if key in props:
            import ast

            if key == "namespace":
                parts = [part.split(":")[0].strip() for part in props[key].split("/")]
            else:
                try:
                    parts = [str(part) for part in ast.literal_eval(props[key])]
                except (ValueError, SyntaxError, RecursionError, MemoryError):
                    continue
            kept = [part for part in parts[:-1] if part]
            return kept[-1][:200] if kept else ""
    parts = name.strip("/").split("/")
    return ".".join(parts[:-1])[:200]


def _typed_data(found: wire.Fields, element: int, shape: tuple[int, ...], where: str) -> torch.Tensor:
    """Data in the typed fields, which small tensors use."""
    dtype = torch_type(element, where)
    num = int(np.prod(shape, dtype=object))
    if element in (1, 14):
        values: Any = np.array(wire.floats(found, 4), dtype=np.float32)
    elif element in (11, 15):
        values = np.array(wire.floats(found, 10, "<d"), dtype=np.float64)
    elif element == 7:
        values = np.array(wire.integers(found, 7, where), dtype=np.int64)
    elif element in (12, 13):
        values = np.array(wire.integers(found, 11, where), dtype=np.int64)
    else:
        values = np.array(wire.integers(found, 5, where), dtype=np.int64)
    if element in (14, 15):
        values = values.view(np.complex64 if element == 14 else np.complex128) if values.size % 2 == 0 else values
    if element in PACKED_TYPES or element == FLOAT4:
        return _unpacked(values.astype(np.uint8), element, shape, where)
    if values.size != num:
        raise ModelFileError(f"{where}: {values.size:,} values for shape {list(shape)}: the file is damaged")
    if element in (10, 16):
        return torch.from_numpy(values.astype(np.uint16).view(np.int16).copy()).view(dtype).reshape(shape)
    if element in (17, 18, 19, 20, 24):
        return torch.from_numpy(values.astype(np.uint8)).view(dtype).reshape(shape)
    if element == 13:
        return torch.from_numpy(values.astype(np.uint64)).reshape(shape)
    return torch.from_numpy(values).to(dtype).reshape(shape)


def _unpacked(raw: np.ndarray[Any, Any], element: int, shape: tuple[int, ...], where: str) -> torch.Tensor:
    """Types below a byte, two or four in each, low bits first."""
    num = int(np.prod(shape, dtype=object))
    dtype, bits, is_signed = PACKED_TYPES.get(element, (torch.float32, 4, False))
    per = 8 // bits
    if raw.size != -(-num // per):
        raise ModelFileError(f"{where}: {raw.size:,} bytes for shape {list(shape)} of {NAMES[element]}: it is damaged")
    spread = np.stack([(raw >> (bits * i)) & ((1 << bits) - 1) for i in range(per)], axis=1).reshape(-1)[:num]
    if element == FLOAT4:
        signs = np.where(spread & 8, -1.0, 1.0)
        return torch.from_numpy((np.array(FLOAT4_VALUES)[spread & 7] * signs).astype(np.float32)).reshape(shape)
    if is_signed:
        spread = spread.astype(np.int8)
        spread = np.where(spread >= 1 << (bits - 1), spread - (1 << bits), spread).astype(np.int8)
    return torch.from_numpy(np.ascontiguousarray(spread)).to(dtype).reshape(shape)
