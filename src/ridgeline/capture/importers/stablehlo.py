"""StableHLO programs of JAX: MLIR text, portable artifacts and ``jax.export`` files, read by jaxlib's MLIR bindings."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ridgeline.capture.importers import (
    mlir,
    stablehlo_regions,  # noqa: F401  (registers its ops)
)
from ridgeline.capture.importers.program import Context, Host, Imported, NeedsData, OpRow, plain
from ridgeline.capture.importers.stablehlo_ops import CARRIED, CONTROL, OPS, Call, TensorType, left_out, native
from ridgeline.capture.importers.weights import TensorRef, checked_shape, mapped
from ridgeline.capture.inputs import Dim, spec
from ridgeline.errors import MissingExtra, ModelFileError, RidgelineError, nearest

MAX_DEPTH = 200
"""Calls and regions inside of each other."""


@dataclass(slots=True)
class Node:
    """One operation: its operands and results are numbers of values."""

    op: str
    inputs: list[int]
    outputs: list[int]
    in_types: list[TensorType]
    out_types: list[TensorType]
    attrs: dict[str, Any]
    regions: list[Block]
    where: str
    scope: str = ""


@dataclass(slots=True)
class Block:
    """A function's or a region's body: parameters, operations, and the values it returns."""

    params: list[int] = field(default_factory=list)
    types: list[TensorType] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    results: list[int] = field(default_factory=list)


def load_stablehlo(path: Path, **_: Any) -> Imported:
    """The program of a file: its ``main`` as the forward."""
    data = bytes(mapped(path))
    name = path.name
    if data[:4] != mlir.BYTECODE and is_exported(data):
        data = exported_module(data, name)
    return made_of(Reader(name).read(data), path.stem)


def is_exported(data: bytes) -> bool:
    """Whether a file's beginning may be the flatbuffer of ``jax.export``."""
    if len(data) < 64 or b"\0" not in data[:64]:
        return False
    (root,) = struct.unpack_from("<I", data)
    if not 4 <= root <= len(data) - 4:
        return False
    table = root - int(struct.unpack_from("<i", data, root)[0])
    return 0 <= table <= len(data) - 4 and 32 <= struct.unpack_from("<H", data, table)[0] <= 256


def exported_module(data: bytes, name: str) -> bytes:
    """The MLIR bytes of a ``jax.export`` artifact.

    ``jax.export.deserialize`` calls functions that were registered for types by name and trusts every offset; of the
    flatbuffer's root table one field is all that is needed, so it is read here and nothing else is opened.
    """
    broken = f"{name} is no complete jax.export artifact: write Exported.serialize() again"
    try:
        (root,) = struct.unpack_from("<I", data)
        table = root - struct.unpack_from("<i", data, root)[0]
        if table < 0:
            raise ModelFileError(broken)
        (size,) = struct.unpack_from("<H", data, table)
        at = struct.unpack_from("<H", data, table + 4 + 2 * 13)[0] if size > 4 + 2 * 13 else 0  # field 13: the module
        start = root + at + struct.unpack_from("<I", data, root + at)[0]
        (length,) = struct.unpack_from("<I", data, start)
    except struct.error as error:
        raise ModelFileError(broken) from error
    if not at or start + 4 + length > len(data) or data[start + 4 : start + 8] != mlir.BYTECODE:
        raise ModelFileError(broken)
    return data[start + 4 : start + 4 + length]


def made_of(body: Program, name: str) -> Imported:
    """The module of a program that was read."""
    main = body.functions["main"]
    inputs: dict[str, Any] = {}
    for at, (label, kind) in enumerate(zip(body.names, main.types)):
        if kind.element not in CARRIED or kind.shape is None:
            raise ModelFileError(f"{body.where}: input {label!r} has type {kind}: export a function of ranked tensors "
                                 "without tokens or quantized types")  # fmt: skip
        dims = [Dim(f"{label}.{i}") if d < 0 else d for i, d in enumerate(checked_shape_of(kind, body.where))]
        named = kind.element if kind.element not in ("ui16", "ui32", "ui64") else f"int{kind.element[2:]}"
        dtype = str(native(named if named.startswith("int") else kind.element))
        inputs[label if label not in inputs else f"{label}_{at}"] = spec(dims, dtype)
    outputs = [f"result_{i}" if len(main.results) > 1 else "result" for i in range(len(main.results))]
    made = Imported(name, "stablehlo", body, inputs, outputs, body.refs)
    made.survey = body.survey()
    return made


def checked_shape_of(kind: TensorType, where: str) -> tuple[int, ...]:
    checked_shape([max(d, 0) for d in kind.shape or ()], where)
    return kind.shape or ()


class Reader:
    """Takes a module apart into a program of plain Python values; no MLIR object outlives it."""

    def __init__(self, where: str) -> None:
        try:
            self.ir, stablehlo, self.context = mlir.open_context()
        except ImportError as error:
            raise MissingExtra("jaxlib", "jax", "importing StableHLO") from error
        self.where = where
        self.records = {"#stablehlo.conv<": stablehlo.ConvDimensionNumbers, "#stablehlo.dot<":
                        stablehlo.DotDimensionNumbers, "#stablehlo.gather<": stablehlo.GatherDimensionNumbers,
                        "#stablehlo.scatter<": stablehlo.ScatterDimensionNumbers}  # fmt: skip
        self.numbers: dict[Any, int] = {}
        self.types: dict[Any, TensorType] = {}
        self.refs: dict[str, TensorRef] = {}
        self.constants: dict[int, Any] = {}

    def read(self, data: bytes) -> Program:
        try:
            text = mlir.text_of(data) if data[:4] == mlir.BYTECODE else data.decode("utf-8")
            module = self.ir.Module.parse(text, self.context)
        except (self.ir.MLIRError, ValueError, RuntimeError) as error:
            told = next((line for line in str(error).splitlines() if "error:" in line), str(error)[:200])
            raise ModelFileError(f"{self.where} cannot be read as StableHLO: {told[:300]}; export it with the version "
                                 "of JAX that is installed here, or one before") from error  # fmt: skip
        attributes: Any = module.operation.attributes
        parts = attributes["mhlo.num_partitions"].value if "mhlo.num_partitions" in attributes else 1
        if parts > 1:
            raise ModelFileError(f"{self.where} is partitioned over {parts} devices: "
                                 "export the function of one device")  # fmt: skip
        functions: dict[str, Block] = {}
        names: list[str] = []
        public: list[str] = []
        for entry in module.body.operations:
            op: Any = entry.operation
            if op.name != "func.func":
                raise ModelFileError(f"{self.where}: {op.name} stands beside functions: export plain StableHLO")
            label = op.attributes["sym_name"].value
            if len(op.regions[0].blocks) != 1:
                raise ModelFileError(f"{self.where}: function {label!r} has {len(op.regions[0].blocks)} blocks: export "
                                     "it with structured control flow")  # fmt: skip
            functions[label] = self.block(op.regions[0].blocks[0], 0)
            if "sym_visibility" not in op.attributes:
                public.append(label)
            if "sym_visibility" not in op.attributes or label == "main" or not names:
                names = [self.argument_name(a.location, i) for i, a in enumerate(op.regions[0].blocks[0].arguments)]
                last = label
            if label == "main":
                break_name = names
        if not functions:
            raise ModelFileError(f"{self.where} has no function: it is no program")
        if "main" not in functions:
            if len(public) != 1 and len(functions) != 1:
                raise ModelFileError(f"{self.where} has functions {', '.join(functions)[:200]}: name one of them main")
            functions["main"] = functions[public[0] if len(public) == 1 else last]
        else:
            names = break_name
        return Program(self.where, functions, names, self.refs)

    @staticmethod
    def argument_name(location: Any, at: int) -> str:
        found = re.fullmatch(r'loc\("([A-Za-z_][\w.\[\]\']{0,80})"\)', str(location))
        return re.sub(r"\W+", "_", found[1]).strip("_") if found else f"arg{at}"

    def number(self, value: Any) -> int:
        return self.numbers.setdefault(value, len(self.numbers))

    def type(self, kind: Any) -> TensorType:
        found = self.types.get(kind)
        if found is None:
            text = str(kind)
            match = re.fullmatch(r"tensor<((?:(?:\d+|\?)x)*)([a-zA-Z]\w*(?:<\w+>)?)(?:, .*)?>", text)
            if match is None:
                found = TensorType(None, text[:80])
            else:
                sizes = tuple(-1 if d == "?" else int(d) for d in match[1].split("x")[:-1])
                found = TensorType(sizes, match[2])
            self.types[kind] = found
        return found

    def block(self, body: Any, depth: int) -> Block:
        if depth > MAX_DEPTH:
            raise ModelFileError(f"{self.where}: regions nest more than {MAX_DEPTH} deep: export it again")
        made = Block([self.number(a) for a in body.arguments], [self.type(a.type) for a in body.arguments])
        for entry in body.operations:
            op = entry.operation
            inputs = [self.number(v) for v in op.operands]
            if op.name in ("func.return", "stablehlo.return"):
                made.results = inputs
                continue
            made.nodes.append(self.node(op, inputs, depth))
        return made

    def node(self, op: Any, inputs: list[int], depth: int) -> Node:
        location = re.sub(r"#loc\d*", "", str(op.location))[4:-1]
        scope = re.match(r'"(?:jit\([^)]*\)/)*([\w./()\[\]-]{1,200})/[^/"]*"', location)
        where = f"{self.where}: {op.name} at {location[:160]}"
        out_types = [self.type(v.type) for v in op.results]
        attrs: dict[str, Any] = {}
        if op.name == "stablehlo.constant":
            attrs["value"] = self.constant(op, out_types[0], where)
        else:
            for name in self.attribute_names(op):
                attrs[name] = self.attribute(op.attributes[name], where)
        regions = []
        for region in op.regions:
            if len(region.blocks) != 1:
                raise ModelFileError(f"{where} has a region of {len(region.blocks)} blocks: export it again")
            regions.append(self.block(region.blocks[0], depth + 1))
        return Node(op.name, inputs, [self.number(v) for v in op.results], [self.type(v.type) for v in op.operands],
                    out_types, attrs, regions, where, scope[1] if scope else "")  # fmt: skip

    @staticmethod
    def attribute_names(op: Any) -> Iterable[str]:
        return [item if isinstance(item, str) else item.name for item in op.attributes]

    def attribute(self, value: Any, where: str) -> Any:
        """An attribute as Python numbers, lists, texts, or a mapping of a dialect's record."""
        ir = self.ir
        if isinstance(value, (ir.IntegerAttr, ir.FloatAttr, ir.BoolAttr, ir.StringAttr, ir.FlatSymbolRefAttr)):
            return value.value
        if isinstance(value, (ir.DenseI64ArrayAttr, ir.DenseI32ArrayAttr, ir.DenseBoolArrayAttr, ir.ArrayAttr)):
            return [item if isinstance(item, (int, bool)) else self.attribute(item, where) for item in value]
        if isinstance(value, ir.TypeAttr):
            return self.type(value.value)
        text = str(value)
        record = next((r for r in self.records if text.startswith(r)), None)
        if record is not None:
            held = self.records[record](value)
            return {name: getattr(held, name) for name in dir(type(held))
                    if not name.startswith("_") and ("dim" in name or name.endswith("map"))}  # fmt: skip
        if hasattr(value, "shape") or type(value).__name__.startswith("Dense"):
            return np.array(value).tolist()
        found = re.fullmatch(r"#\w+(?:\.\w+)?<(?:\w+ )?(\w+)>", text)
        return found[1] if found else text

    def constant(self, op: Any, kind: TensorType, where: str) -> Any:
        """A constant: a tensor while small, else the name of a weight."""
        if kind.shape is None or kind.element not in CARRIED:
            raise ModelFileError(f"{where} has type {kind}: element types here are {', '.join(CARRIED)}")
        if prod(kind.shape) > 1 << 31:
            checked_shape(list(kind.shape), where)
        try:
            value = op.attributes["value"]
            if value.is_splat:
                text = str(value)
                t = _from_text(text, TensorType((), kind.element), where)
                return t.expand(kind.shape)
            if kind.element in ("bf16", "i1") or kind.element.startswith("complex"):
                raise TypeError
            array = np.array(value)
            t = torch.from_numpy(array.reshape(kind.shape)).to(CARRIED[kind.element])
        except TypeError:
            t = _from_text(op.get_asm(large_elements_limit=1 << 62), kind, where)
        if kind.element in ("ui16", "ui32"):
            t = t & (0xFFFF if kind.element == "ui16" else 0xFFFFFFFF)
        if t.numel() <= (4096 if not (t.is_floating_point() or t.is_complex()) else 16):
            return t
        name = f"constant_{len(self.refs)}"
        self.refs[name] = TensorRef(name, t.dtype, tuple(t.shape), lambda: t)
        return name


_NUMPY = {"bf16": np.uint16, "i1": np.uint8, "f16": np.float16, "f32": np.float32, "f64": np.float64,
          "complex<f32>": np.complex64, "complex<f64>": np.complex128, "i8": np.int8, "i16": np.int16, "i32": np.int32,
          "i64": np.int64, "ui8": np.uint8, "ui16": np.uint16, "ui32": np.uint32, "ui64": np.uint64}  # fmt: skip


def _from_text(text: str, kind: TensorType, where: str) -> torch.Tensor:
    """The elements of ``dense<…>`` as MLIR prints them: numbers, or bits in hexadecimal."""
    start = text.find("dense<")
    body = text[start + 6 : text.rfind("> : ", start)]
    dtype, shape = np.dtype(_NUMPY[kind.element]), kind.shape or ()
    if body.startswith('"0x'):
        raw = bytes.fromhex(body[3:].strip('"'))
        array = np.frombuffer(raw, dtype).copy()
        if array.size == 1:
            array = np.broadcast_to(array, prod(shape)).copy()
    else:
        words = re.findall(r"true|false|0x[0-9A-Fa-f]+|-?\d[\d.]*(?:[eE][+-]?\d+)?", body)
        real = np.dtype(np.float32 if kind.element in ("complex<f32>", "bf16") else np.float64
                        if kind.element == "complex<f64>" else dtype)  # fmt: skip
        numbers: list[Any] = []
        for word in words:
            if word in ("true", "false"):
                numbers.append(word == "true")
            elif word.startswith("0x") and real.kind == "f":
                pattern = int(word, 16) << (16 if kind.element == "bf16" else 0)
                numbers.append(np.array(pattern, dtype=f"u{real.itemsize}").view(real)[()])
            elif real.kind == "f":
                numbers.append(float(word))
            else:
                numbers.append(int(word, 0) if word.startswith("0x") else int(word))
        array = np.array(numbers, dtype=real if real.kind == "f" else dtype)
        if kind.element == "bf16":
            found = torch.from_numpy(array).to(torch.bfloat16)
            return (found.expand(prod(shape)) if found.numel() == 1 else found).reshape(shape)
        if dtype.kind == "c":
            array = array.view(dtype)
        if array.size == 1:
            array = np.broadcast_to(array, prod(shape)).copy()
    if array.size != prod(shape):
        raise ModelFileError(f"{where} has {array.size} elements for type {kind}: the file is damaged")
    if kind.element == "bf16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).reshape(shape)
    if kind.element == "ui64":
        array = array.view(np.int64)
    return torch.from_numpy(array.reshape(shape)).to(CARRIED[kind.element])


class Program:
    """The body of an imported program: its functions, run from ``main``."""

    def __init__(self, where: str, functions: dict[str, Block], names: Sequence[str],
                 refs: dict[str, TensorRef]) -> None:  # fmt: skip
        self.where, self.functions, self.names, self.refs = where, functions, list(names), refs

    def survey(self) -> list[OpRow]:
        found: dict[str, list[Node]] = {}
        todo = list({id(block): block for block in self.functions.values()}.values())
        while todo:
            for node in todo.pop().nodes:
                label = node.op
                if label == "stablehlo.custom_call":
                    label += f" @{node.attrs.get('call_target_name')}"
                found.setdefault(label, []).append(node)
                todo.extend(node.regions)
        return [OpRow(label, len(nodes), self.missing(nodes[0]), nodes[0].where) for label, nodes in sorted(
            found.items())]  # fmt: skip

    @staticmethod
    def missing(node: Node) -> str:
        if why := left_out(node):
            return why
        if node.op in OPS or node.op in CONTROL or node.op in (
            "stablehlo.constant", "func.call", "stablehlo.composite"):  # fmt: skip
            return ""
        return f"not an op that is known here{nearest(node.op, OPS)}"

    def __call__(self, ctx: Context, inputs: Mapping[str, Any]) -> Sequence[Any]:
        main = self.functions["main"]
        given = []
        for value, kind, name in zip(inputs.values(), main.types, inputs):
            shape = value.t.shape if isinstance(value, Host) else value.shape
            if len(shape) != len(kind.shape or ()) or any(d not in (s, -1) for s, d in zip(shape, kind.shape or ())):
                raise ModelFileError(f"{self.where}: input {name!r} has shape {list(shape)} and the program takes "
                                     f"{kind}: give what it was exported for")  # fmt: skip
            t = value.t if isinstance(value, Host) else value
            if t.dtype != CARRIED[kind.element]:
                t = t.to(CARRIED[kind.element])
                if kind.element in ("ui16", "ui32"):
                    t = t & (0xFFFF if kind.element == "ui16" else 0xFFFFFFFF)
            given.append(Host(t) if isinstance(value, Host) else t)
        outs = self.run(ctx, main, given, {}, 0)
        kinds = self.result_types(main)
        made = []
        for value, result in zip(outs, main.results):
            t = on_device(ctx, value)
            wanted = native(kinds[result].element)
            made.append(t.to(wanted) if t.dtype != wanted else t)
        return made

    @staticmethod
    def result_types(block: Block) -> dict[int, TensorType]:
        found = dict(zip(block.params, block.types))
        for node in block.nodes:
            found.update(zip(node.outputs, node.out_types))
        return found

    def run(self, ctx: Context, block: Block, args: Sequence[Any], env: dict[int, Any], depth: int) -> list[Any]:
        """The results of a block; what it reads from around it is in ``env``."""
        if depth > MAX_DEPTH:
            raise ModelFileError(f"{self.where}: functions call each other more than {MAX_DEPTH} deep: they recurse")
        env.update(zip(block.params, args))
        for node in block.nodes:
            ctx.step(node.where)
            if ctx.trace is not None:
                ctx.trace.scope = node.scope
            outs = self.apply(ctx, node, env, depth)
            env.update(zip(node.outputs, outs))
        return [env[value] for value in block.results]

    def apply(self, ctx: Context, node: Node, env: dict[int, Any], depth: int) -> Sequence[Any]:
        if node.op == "stablehlo.constant":
            value = node.attrs["value"]
            return [ctx.weight(value) if isinstance(value, str) else Host(value)]
        args = [env[value] for value in node.inputs]
        if node.op in ("func.call", "stablehlo.composite"):
            name = node.attrs.get("callee") or node.attrs.get("decomposition")
            if name not in self.functions:
                raise ModelFileError(f"{node.where} calls {name!r}, which the file does not have: export it again")
            return self.run(ctx, self.functions[name], args, {}, depth + 1)

        def region(at: int, given: Sequence[Any]) -> list[Any]:
            return self.run(ctx, node.regions[at], given, dict(env), depth + 1)

        call = Call(node, ctx, region, args)
        if node.op in CONTROL:
            return CONTROL[node.op](call, *args)
        fn = OPS.get(node.op)
        if fn is None:
            why = self.missing(node)
            raise ModelFileError(f"{node.where} is not supported: {why}; export the function without it")
        try:
            if all(isinstance(a, Host) for a in args) and self.folds(node):
                with plain():
                    out = fn(call, *[a.t for a in args])
                return [Host(t) for t in (out if isinstance(out, (tuple, list)) else [out])]
            out = fn(call, *[on_device(ctx, a) for a in args])
        except (RidgelineError, NeedsData):
            raise
        except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, NotImplementedError,
                OverflowError) as error:  # fmt: skip
            told = next(iter(str(error).splitlines()), "") or type(error).__name__
            shapes = ", ".join(map(str, node.in_types))
            raise ModelFileError(f"{node.where} does not take {shapes or 'nothing'}: {told[:200]}; export the function "
                                 "with another form of it") from error  # fmt: skip
        outs = out if isinstance(out, (tuple, list)) else [out]
        if not args or node.op == "stablehlo.get_dimension_size":  # made of sizes alone
            return [Host(t) for t in outs]
        return outs

    @staticmethod
    def folds(node: Node) -> bool:
        """Whether results are small enough to be made while planning."""
        if node.op in ("stablehlo.broadcast_in_dim", "stablehlo.reshape"):
            return True  # of a scalar it is a view
        return all(
            kind.shape is not None
            and prod(max(d, 0) for d in kind.shape) <= (4 if kind.element[0] in "fbc" else 1 << 20)
            for kind in (*node.out_types, *node.in_types)
        )


def on_device(ctx: Context, value: Any) -> Any:
    """A value as calls take it; what was spread from one element is spread there."""
    if not isinstance(value, Host):
        return value
    t = value.t
    if t.numel() > 1 and not any(t.stride()):
        return ctx.constant(t[(0,) * t.dim()]).expand(t.shape)
    return ctx.constant(t)
