"""What an engine is made of: layers and steps with types, memory, precision, measured time and floor."""

from __future__ import annotations

import html
import importlib.util
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ridgeline.engine.file.cuda_kernels import Kernels
from ridgeline.engine.file.execute import compiled, interpret
from ridgeline.engine.file.program import Program, Step, shown
from ridgeline.engine.file.proof import drawn
from ridgeline.errors import EngineError
from ridgeline.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from ridgeline.engine.file.engine import Engine


@dataclass(frozen=True, slots=True)
class Line:
    """One step."""

    index: int
    op: str
    module: str
    types: str
    weights: str
    weight_bytes: int
    runs_as: str  # aten, engine or a kernel's name
    measured_s: float | None = None


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything that can be said of an engine without its model. ``str`` is the text, ``to_html`` a page."""

    name: str
    inputs: Mapping[str, str]
    profiles: Sequence[str]
    target: Mapping[str, Any]
    weight_bytes: int
    weights_by_type: Mapping[str, int]
    peak_bytes: int | None
    floor_s: float | None
    expected_s: float | None
    on: str
    lines: Sequence[Line]
    kernels: Mapping[str, Any]
    receipt: Mapping[str, Any]
    proof: str
    trusted: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        said = [f"{self.name}: built for {', '.join(f'{k} {v}' for k, v in self.target.items())}"]
        said += [f"input   {name}  {kind}" for name, kind in self.inputs.items()]
        said += [f"profile {each}" for each in self.profiles]
        types = ", ".join(f"{name} {show_bytes(size)}" for name, size in self.weights_by_type.items())
        said.append(f"weights {show_bytes(self.weight_bytes)} ({types or 'none'})")
        if self.peak_bytes is not None:
            said.append(f"values  {show_bytes(self.peak_bytes)} at most, at once")
        if self.floor_s is not None and self.expected_s is not None:
            said.append(f"on {self.on}: floor {show_seconds(self.floor_s)}, expected {show_seconds(self.expected_s)}")
        said += [f"proof   {self.proof}", *(f"note    {note}" for note in self.receipt.get("notes", []))]
        counts = Counter(line.op for line in self.lines)
        said.append(f"{len(self.lines)} steps: " + ", ".join(f"{op} ×{num}" for op, num in counts.most_common(8)))
        timed = any(line.measured_s is not None for line in self.lines)
        for line in self.lines:
            took = f"{show_seconds(line.measured_s or 0.0):>10}  " if timed else ""
            said.append(f"{line.index:5}  {took}{line.op:40} {line.types:40} {line.module}")
        return "\n".join(said)

    def to_html(self) -> str:
        """A page that needs nothing else."""
        rows = "".join(
            f"<tr><td>{line.index}</td><td>{html.escape(line.op)}</td><td>{html.escape(line.types)}</td>"
            f"<td>{html.escape(line.module)}</td><td>{html.escape(line.runs_as)}</td><td>{line.weight_bytes or ''}</td>"
            f"<td>{'' if line.measured_s is None else html.escape(show_seconds(line.measured_s))}</td></tr>"
            for line in self.lines
        )
        head = html.escape(str(self).split(f"\n{len(self.lines)} steps")[0])
        return (
            f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(self.name)}</title><style>"
            "body{font:14px system-ui;margin:2rem}table{border-collapse:collapse}td,th{padding:.2rem .6rem;"
            "text-align:left;border-bottom:1px solid #8884}pre{white-space:pre-wrap}</style>"
            f"<h1>{html.escape(self.name)}</h1><pre>{head}</pre><table><thead><tr><th>step<th>op<th>makes<th>module"
            f"<th>runs as<th>weight bytes<th>time</thead><tbody>{rows}</tbody></table></html>\n"
        )


def inspect(engine: Engine, *, times: bool = False, on: str | None = None, program: int = -1) -> Inspection:
    """Look at one program of an engine, the most general one unless told."""
    contents = engine.contents
    chosen = contents.programs[program]
    measured = _times(engine, chosen) if times else {}
    lines = [_line(i, step, contents.weights, measured.get(i)) for i, step in enumerate(chosen.steps)]
    kinds: Counter[str] = Counter()
    for tensor in contents.weights.values():
        kinds[str(tensor.dtype).removeprefix("torch.")] += tensor.nbytes
    floor_s, expected_s = _predicted(engine, chosen, on) if on else (None, None)
    cases = contents.proof.get("cases", [])
    worst = max((o["rms"] for c in cases for o in c["outputs"]), default=0.0)
    proof = f"{len(cases)} cases, at most {worst:.1e} from {contents.proof.get('reference')}" if cases else "none"
    return Inspection(
        engine.name, engine.inputs, engine.profiles, contents.target, engine.weight_bytes, dict(sorted(kinds.items())),
        _peak(engine, chosen), floor_s, expected_s, on or "", lines, contents.kernels,
        contents.receipt, proof, engine.trusted,
    )  # fmt: skip


def _line(index: int, step: Step, weights: Mapping[str, Tensor], measured_s: float | None) -> Line:
    names = list(dict.fromkeys(step.weights()))
    runs_as = "size" if step.op.startswith("size::") else step.op.partition("::")[0]
    return Line(index, step.op, step.module, ", ".join(step.types), ", ".join(names),
                sum(weights[name].nbytes for name in names if name in weights), runs_as, measured_s)  # fmt: skip


def example_of(engine: Engine, program: Program) -> list[Tensor]:
    """Inputs of a proof's case that a program takes."""
    from ridgeline.engine.file.engine import sizes_of

    for case in engine.contents.proof.get("cases", []):
        if sizes_of(program, [entry["shape"] for entry in case["inputs"]]) is not None:
            return drawn(case["inputs"], engine.contents.proof_values, engine.device)
    raise EngineError(f"{engine.name} has no proof with inputs to run: give it some")


def _times(engine: Engine, program: Program) -> dict[int, float]:
    """The median of a few runs of each step by itself, synchronized."""
    inputs, rounds = example_of(engine, program), 5
    took: dict[int, list[float]] = {}
    last = [0.0]

    def each(index: int, step: Step, results: list[Any]) -> None:
        if engine.device.type == "cuda":
            torch.cuda.synchronize(engine.device)
        now = time.perf_counter()
        took.setdefault(index, []).append(now - last[0])
        last[0] = time.perf_counter()

    def weight(name: str) -> Any:
        held = engine._weights[name]
        return held if isinstance(held, Tensor) else held()

    with torch.no_grad():
        for _ in range(rounds):
            last[0] = time.perf_counter()
            interpret(program, inputs, weight, engine.device, each)
    return {index: sorted(found)[len(found) // 2] for index, found in took.items()}


def _peak(engine: Engine, program: Program) -> int | None:
    from ridgeline.engine.file.dry_run import peak_bytes

    try:
        shapes = [tuple(x.shape) for x in example_of(engine, program)]
        return peak_bytes(program, shapes, engine.contents.weights, 1 << 60, engine.name)
    except EngineError:
        return None


class AsModule(nn.Module):
    """A program as a module that calls ATen: whatever takes models takes it."""

    def __init__(self, engine: Engine, program: Program) -> None:
        super().__init__()
        for i, (_, tensor) in enumerate(sorted(engine.contents.weights.items())):
            self.register_buffer(f"w{i}", tensor)
        names = {name: i for i, name in enumerate(sorted(engine.contents.weights))}
        used = sorted(program.weight_names())
        self.names = [f"w{names[name]}" for name in used]
        wrapped = {name: (lambda key=f"w{names[name]}": self._buffers[key]) for name in used}
        self.call = compiled(program, wrapped, torch.device("cpu"))

    def forward(self, *inputs: Tensor) -> Any:
        return self.call(*inputs)


def _predicted(engine: Engine, program: Program, on: str) -> tuple[float | None, float | None]:
    """Floor and expected time of a program on a device."""
    from ridgeline.capture import capture
    from ridgeline.cost.estimate import estimate
    from ridgeline.hardware import device

    graph = capture(AsModule(engine, program), tuple(example_of(engine, program)), mode="infer")
    found = estimate(graph, device(on), "cudagraph")
    return found.floor_s, found.expected_s


def ir_of(engine: Engine, kind: str, kernel: str | None = None) -> str:
    """Intermediate code of the kernels in the file, one after another: ``ttgir`` and ``ptx`` as they were recorded,
    ``sass`` disassembled from the cubins."""
    listed = engine.contents.kernels.get("kernels", [])
    if kind not in ("ttgir", "ptx", "sass"):
        raise EngineError(f"no form of code {kind!r}: ttgir, ptx or sass")
    if not listed:
        raise EngineError(
            f"{engine.name} holds no kernels of its own: its steps are ATen's, and --ir has nothing to show"
        )
    found = [entry for entry in listed if kernel is None or entry.get("name") == kernel]
    if not found:
        raise EngineError(f"{engine.name} has no kernel {shown(kernel)}: it has "
                          f"{', '.join(shown(e.get('name')) for e in listed[:8])}")  # fmt: skip
    if kind == "sass":
        if not engine.trusted:
            raise EngineError(f"{engine.name} holds device code of another machine: load it with --trust to see that")
        kernels = Kernels(engine.contents.kernels, engine.contents.cubins)
        return "\n".join(disassembled(kernels.code(entry["key"])) for entry in found)
    texts = [str(entry.get(kind, "")) for entry in found]
    if not any(texts):
        raise EngineError(f"the file holds no {kind} of these: Triton's cache had none when they were recorded. "
                          "Their machine code is --ir sass")  # fmt: skip
    return "\n".join(texts)


def disassembled(cubin: bytes) -> str:
    """The machine code of a cubin as text, by CUDA's nvdisasm or the one in Triton's wheel."""
    tool, spec = shutil.which("nvdisasm"), importlib.util.find_spec("triton")
    if tool is None and spec is not None and spec.origin is not None:
        own = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
        tool = str(own) if own.exists() else None
    if tool is None:
        raise EngineError("showing machine code needs nvdisasm: install the CUDA toolkit or Triton, whose wheel has it")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        done = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise EngineError(f"nvdisasm does not read a kernel of the file: {ascii(done.stderr.strip()[-200:])[1:-1]}")
    return done.stdout
