"""An engine as C for a GPU: kernels, their order and their memory as tables, and a runner over the CUDA driver alone.

Programs are written whose steps are kernels of the file, kernels of our own (compiled here, on any machine), views,
allocations, fills and copies. What only cuBLAS or cuDNN computes cannot be: those libraries are what the runner does
without.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ridgeline.engine.file.cuda_kernels import Kernels
from ridgeline.engine.file.engine import sizes_of
from ridgeline.engine.file.execute import NO_EFFECT, Resolver, function_of, is_constant, overload_of
from ridgeline.engine.file.lower import ALLOCATIONS, Launch, lowered, waiting_products
from ridgeline.engine.file.program import Program, Step, leaves
from ridgeline.errors import EngineError

if TYPE_CHECKING:
    from ridgeline.engine.file.engine import Engine

ALIGNMENT = 256
FILLS = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1, "full": None,
         "full_like": None, "new_full": None, "scalar_tensor": None}  # fmt: skip
COPIES = ("clone", "contiguous", "_to_copy", "to", "copy", "lift_fresh_copy")
PACKED = {"fp32": "<f", "f32": "<f", "fp64": "<d", "f64": "<d"}


@dataclass(slots=True)
class Buffer:
    """Memory of values: where it lies once that is decided, and the steps between which it holds something."""

    bytes: int
    region: str = "a"  # a: arena, w: weights
    offset: int = 0
    first: int = 0
    last: int = 0


@dataclass(slots=True)
class Command:
    """A launch, a copy or a fill. ``kind``: k, c, or the width in bytes of what is filled in."""

    kind: str
    operands: list[tuple[Buffer, int] | int]  # an address in a buffer, or the bits of a number
    kernel: int = 0
    grid: Sequence[int] = (1, 1, 1)
    count: int = 0
    bits: int = 0


@dataclass(slots=True)
class Layout:
    """A program as commands over buffers."""

    commands: list[Command] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    kernels: list[Mapping[str, Any]] = field(default_factory=list)
    code: list[bytes] = field(default_factory=list)
    inputs: list[tuple[Buffer, int, int]] = field(default_factory=list)  # buffer, offset, bytes
    outputs: list[tuple[Buffer, int, int]] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    arena_bytes: int = 0
    weight_bytes: int = 0


def export_cuda(
    engine: Engine, folder: str | os.PathLike[str], shapes: Sequence[Sequence[int]] | None = None
) -> list[Path]:
    """Write ``engine.c`` and ``engine.bin`` (weights and kernels): the program that was recorded on a GPU, or the one
    for inputs of these shapes.

    ``ridgeline_open``, ``ridgeline_run``, ``ridgeline_close`` and the reason of a failure, ``ridgeline_error``, are
    what the source defines; with ``-DRIDGELINE_MAIN`` it is a program that reads inputs from stdin.
    """
    contents = engine.contents
    program = next((p for p in contents.programs if p.issued), contents.programs[-1])
    if shapes is not None:
        program = next((p for p in contents.programs if sizes_of(p, shapes) is not None), program)
    program = sized(program, shapes)
    recorded = any(step.op.startswith("kernel::") for step in program.steps)
    if recorded and not engine.trusted:
        raise EngineError(f"{engine.name} holds device code of another machine: load it with --trust to export that")
    layout = laid_out(program, contents.weights, Kernels(contents.kernels, contents.cubins))
    if not layout.kernels:
        raise EngineError(f"{engine.name} launches no kernel: export it without --device, as C for the CPU")
    capability = int(str(contents.target.get("capability", "9.0")).replace(".", "")) if recorded else 90
    code = b"".join(map(_padded, layout.code))
    values = [_padded(_raw(contents.weights[name])) for name in layout.weights]
    digest = hashlib.sha256()
    for part in (*values, code):
        digest.update(part)
    source = _source(engine.name, program, layout, capability, digest.digest(), len(code))
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
        (target / "engine.c").write_text(source, encoding="ascii")
        with (target / "engine.bin").open("wb") as file:
            file.write((b"RIDGECU1" + digest.digest()).ljust(64, b"\0"))
            for part in (*values, code):
                file.write(part)
    except OSError as error:
        raise EngineError(f"cannot write {target}: {error.strerror or error}") from error
    return [target / "engine.c", target / "engine.bin"]


def laid_out(program: Program, weights: Mapping[str, Tensor], kernels: Kernels) -> Layout:
    """The program's steps as commands: run on tensors without memory, whose storages say what shares memory."""
    layout, held, resolver = Layout(), dict[int, tuple[Buffer, Any]](), Resolver(torch.device("meta"))
    values, named, numbers = dict[int, Any](), dict[str, Tensor](), dict[Any, int]()
    waiting = waiting_products(program)

    def new(x: Tensor, region: str = "a") -> Buffer:
        buffer = Buffer(x.untyped_storage().nbytes(), region, first=len(layout.commands), last=len(layout.commands))
        held[x.untyped_storage()._cdata] = buffer, x  # the tensor is kept, and with it the storage's address
        if region == "a":
            layout.buffers.append(buffer)
        return buffer

    def weight(name: str) -> Tensor:
        if name not in named:
            real = weights[name]
            made = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")
            named[name], buffer = made, new(made, "w")
            buffer.offset, layout.weight_bytes = layout.weight_bytes, layout.weight_bytes + _up(_extent(real))
            layout.weights.append(name)
        return named[name]

    def read(value: Any) -> Any:
        if is_constant(value):
            return resolver.constant(value)
        if isinstance(value, (list, tuple)):
            return [read(each) for each in value]
        return values[value["v"]] if "v" in value else weight(value["w"])

    def at(x: Tensor) -> tuple[Buffer, int]:
        place = x.untyped_storage()._cdata
        buffer = held[place][0] if place in held else new(x)  # what an op allocates for its kernels
        buffer.last = len(layout.commands)
        return buffer, x.storage_offset() * x.element_size()

    def launch(key: Any, entry: Mapping[str, Any], code: bytes, grid: Sequence[int], args: Sequence[Any]) -> None:
        if key not in numbers:
            numbers[key] = len(layout.kernels)
            layout.kernels.append(entry)
            layout.code.append(code)
        operands = [at(x) if isinstance(x, Tensor) else _bits(kind, x)
                    for kind, x in zip(entry["arguments"], args, strict=True)]  # fmt: skip
        layout.commands.append(Command("k", [*operands, *[0] * entry.get("scratch", 0)], numbers[key], grid))

    def own(made: Launch) -> None:
        entry = {"name": made.name, "shared_bytes": made.shared_bytes, "num_warps": made.num_warps,
                 "arguments": made.kinds, "scratch": 2, "bytes": len(made.cubin)}  # fmt: skip
        launch(made.cubin, entry, made.cubin, made.grid, made.args)

    for number, given in enumerate(program.inputs):
        values[number] = torch.empty(given.shape, dtype=getattr(torch, given.dtype), device="meta")
        layout.inputs.append((new(values[number]), 0, values[number].nbytes))
    for index, step in enumerate(program.steps):
        args = [read(value) for value in step.args]
        if step.op.startswith("kernel::"):
            key, grid = step.op.partition("::")[2], step.kwargs.get("grid")
            entry = kernels.entry(key, grid)
            launch(key, entry, kernels.code(key), step.kwargs["grid"], args)
            continue
        base = step.op.partition("::")[2].partition(".")[0]
        if step.op.startswith("size::") or step.op in NO_EFFECT:
            values[step.out[0]] = function_of(step.op)(*args) if step.op.startswith("size::") else args[0]
            continue
        named_args = {name: read(value) for name, value in step.kwargs.items()}
        if (result := lowered(step, args, named_args, step.out[0] in waiting, own)) is not None:
            found = list(result) if step.several else [result]
            for made in found:
                if isinstance(made, Tensor) and made.untyped_storage()._cdata not in held:
                    new(made)  # an empty result: nothing was launched
            values.update(zip(step.out, found, strict=False))
            continue
        result = function_of(step.op)(*args, **named_args)
        results = list(result) if step.several else [result]
        for made in results:
            if not isinstance(made, Tensor) or made.untyped_storage()._cdata in held:
                continue  # a view
            buffer = new(made)
            if base in FILLS:
                _fill(layout, step, made, buffer)
            elif base in COPIES:
                source = args[1] if base == "copy" else args[0]
                if (source.dtype, source.shape, source.stride()) != (made.dtype, made.shape, made.stride()) or (
                    _extent(made) != made.nbytes
                ):
                    raise EngineError(f"step {index} ({step.op}) copies to another type or layout, which only a kernel "
                                      "does")  # fmt: skip
                layout.commands.append(Command("c", [at(made), at(source)], count=made.nbytes))
            elif base not in ALLOCATIONS:
                where = f" in {step.module}" if step.module else ""
                raise EngineError(f"step {index} ({step.op}{where}) is a library's (cuBLAS, cuDNN or PyTorch), which C "
                                  "over the driver does without: only kernels that were recorded on a GPU, or that "
                                  "Ridgeline has for 16-bit numbers, are written")  # fmt: skip
        values.update(zip(step.out, results, strict=False))
    for leaf in leaves(program.outputs):
        if isinstance(leaf, dict) and ("v" in leaf or "w" in leaf):
            x = read(leaf)
            if not x.is_contiguous():
                raise EngineError("an output is not contiguous: return x.contiguous() for C")
            layout.outputs.append((*at(x), x.nbytes))
    for buffer, _, _ in (*layout.inputs, *layout.outputs):
        buffer.last = len(layout.commands)
    for buffer, _, _ in layout.inputs:
        buffer.first = -1
    layout.arena_bytes = packed(layout.buffers)
    return layout


def sized(program: Program, shapes: Sequence[Sequence[int]] | None) -> Program:
    """A program for exactly these shapes of its inputs."""
    if shapes is None and not program.dims:
        return program
    if shapes is None or sizes_of(program, shapes) is None:
        wanted = ", ".join(f"{i.name}:{'x'.join(map(str, i.shape))}" for i in program.inputs)
        raise EngineError(f"C is written for one shape of each input: give --shapes for {wanted}")
    inputs = tuple(replace(given, shape=tuple(shape)) for given, shape in zip(program.inputs, shapes, strict=True))
    return replace(program, inputs=inputs, dims={})


def packed(buffers: Sequence[Buffer]) -> int:
    """Give buffers that hold something at the same time places apart, the largest first; the size of it all."""
    placed: list[Buffer] = []
    for buffer in sorted(buffers, key=lambda b: (-b.bytes, b.first)):
        at = 0
        meeting = (other for other in placed if other.first <= buffer.last and buffer.first <= other.last)
        for other in sorted(meeting, key=lambda other: other.offset):
            if at + buffer.bytes <= other.offset:
                break
            at = max(at, _up(other.offset + other.bytes))
        buffer.offset = at
        placed.append(buffer)
    return max((_up(b.offset + b.bytes) for b in placed), default=0)


def _fill(layout: Layout, step: Step, made: Tensor, buffer: Buffer) -> None:
    base = step.op.partition("::")[2].partition(".")[0]
    value: Any = FILLS[base]
    if value is None:
        names = [argument.name for argument in overload_of(step.op)._schema.arguments]
        name = "fill_value" if "fill_value" in names else "s"
        value = step.kwargs[name] if name in step.kwargs else step.args[names.index(name)]
        value = Resolver(torch.device("cpu")).constant(value)
    raw = bytes(torch.full((1,), value, dtype=made.dtype).view(torch.uint8).tolist())
    width = next((w for w in (1, 2, 4) if w <= len(raw) and raw == raw[:w] * (len(raw) // w)), 0)
    if not width:
        raise EngineError(f"{step.op} fills with {value!r}, whose 8 bytes differ: no fill of the driver does that")
    if made.nbytes:
        bits = int.from_bytes(raw[:width], "little")
        layout.commands.append(Command(str(width), [(buffer, 0)], count=buffer.bytes // width, bits=bits))


def _bits(kind: str, value: Any) -> int:
    """A number as the eight bytes from which the driver reads a kernel's argument."""
    if kind.startswith("*"):
        return int(value or 0)
    if kind in PACKED:
        return int.from_bytes(struct.pack(PACKED[kind], value), "little")
    return int(value) & (2**64 - 1)


def _up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _extent(x: Tensor) -> int:
    """Bytes from a tensor's first element to behind its last one."""
    spread = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return (spread + 1) * x.element_size() if x.numel() else 0


def _raw(x: Tensor) -> bytes:
    """A tensor's memory as it is laid out, gaps included."""
    num = _extent(x) // x.element_size()
    flat = x.detach().cpu().as_strided((num,), (1,))
    return flat.view(torch.uint8).numpy().tobytes() if num else b""


def _padded(data: bytes) -> bytes:
    return data + bytes(_up(len(data)) - len(data))


def _source(name: str, program: Program, layout: Layout, capability: int, digest: bytes, num_code: int) -> str:
    """The tables and the runner."""
    safe = lambda text: re.sub(r"[^A-Za-z0-9._-]", "_", text)
    arguments, steps, offset, kernels = list[str](), list[str](), 0, list[str]()
    for entry in layout.kernels:
        kernels.append(f'{{"{safe(entry["name"])}", {offset}u, {entry["shared_bytes"]}u, {32 * entry["num_warps"]}u}}')
        offset += _up(entry["bytes"])
    for command in layout.commands:
        x, y, z = command.grid
        steps.append(f"{{'{command.kind}', {command.kernel}, {{{x}u, {y}u, {z}u}}, {len(arguments)}, {command.count}u, "
                     f"{command.bits}u}}")  # fmt: skip
        for operand in command.operands:
            kind, value = (("s", operand) if isinstance(operand, int)
                           else (operand[0].region, operand[0].offset + operand[1]))  # fmt: skip
            arguments.append(f"{{'{kind}', {value}u}}")
    host, tables = 0, {"inputs": list[str](), "outputs": list[str]()}
    for title, found in (("inputs", layout.inputs), ("outputs", layout.outputs)):
        for buffer, start, size in found:
            tables[title].append(f"{{'{buffer.region}', {buffer.offset + start}u, {size}u, {host}u}}")
            host += _up(size)
    wanted = ", ".join(f"{safe(i.name)} {i.dtype}[{'x'.join(map(str, i.shape))}]" for i in program.inputs)
    rows = lambda found: ",\n  ".join(found) if found else "{0}"
    constants = {"CAPABILITY": capability, "WEIGHT_BYTES": layout.weight_bytes, "ARENA_BYTES": layout.arena_bytes,
                 "PINNED_BYTES": host, "CODE_BYTES": num_code, "NUM_KERNELS": len(kernels), "NUM_STEPS": len(steps),
                 "NUM_INPUTS": len(layout.inputs), "NUM_OUTPUTS": len(layout.outputs)}  # fmt: skip
    defines = "\n".join(f"#define {key} {value}u" if key.startswith("NUM") or key.endswith("BYTES")
                        else f"#define {key} {value}" for key, value in constants.items())  # fmt: skip
    runner = Path(__file__).with_name("runner.c").read_text(encoding="ascii")
    return f"""/* {safe(name)}: written by ridgeline; cc -O2 -DRIDGELINE_MAIN engine.c -ldl
   inputs: {wanted} */
#include <stdint.h>
{defines}
#define DIGEST "{"".join(f"{chr(92)}x{byte:02x}" for byte in digest)}"
static const struct kernel {{
  const char *name;
  uint64_t offset;
  unsigned shared, threads;
}} kernels[] = {{
  {rows(kernels)}}};
/* w: an offset in the weights, a: in the values, s: the number itself */
static const struct argument {{
  char kind;
  uint64_t value;
}} arguments[] = {{
  {rows(arguments)}}};
/* k: a launch, c: a copy, 1, 2, 4: a fill of so many bytes at a time */
static const struct step {{
  char kind;
  int kernel;
  unsigned grid[3];
  int first;
  uint64_t count;
  unsigned bits;
}} steps[] = {{
  {rows(steps)}}};
static const struct port {{
  char region;
  uint64_t offset, bytes, host;
}} inputs[] = {{
  {rows(tables["inputs"])}}}, outputs[] = {{
  {rows(tables["outputs"])}}};

{runner}"""
