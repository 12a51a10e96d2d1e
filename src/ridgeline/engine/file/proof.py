"""The proof of an engine: inputs that anyone can draw again, and what the model returns for them in float64.

It lies in the file, so that a machine without the model can tell whether the engine is right there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.bench.verdict import error_of, judge
from ridgeline.engine.file.execute import interpret
from ridgeline.engine.file.program import Program, Step, kind_of
from ridgeline.errors import EngineError

if TYPE_CHECKING:
    from ridgeline.engine.file.engine import Engine

MAX_ELEMENTS = 1 << 12
"""Elements of each output that are kept, at a regular distance."""
MAX_STORED_BYTES = 1 << 20
"""What inputs that cannot be drawn (masks, offsets) may take in the file."""
MASKED = -1e4


def draw(values: Sequence[Tensor], seed: int) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """How to draw inputs like these, and those that have to be kept: flags, masks, what is in order, other types."""
    made, kept = list[dict[str, Any]](), dict[str, Tensor]()
    for i, x in enumerate(values):
        entry: dict[str, Any] = {
            "dtype": str(x.dtype).removeprefix("torch."),
            "shape": list(x.shape),
            "seed": seed * 1000 + i,
        }
        if x.is_floating_point() and x.numel() and bool((x.float() > MASKED).all()):
            wide = x.double()
            entry |= {"kind": "normal", "mean": float(wide.mean()), "std": float(wide.std(unbiased=False)) or 1.0}
        elif x.dtype in (torch.int64, torch.int32) and x.numel() > 1 and not _in_order(x):
            entry |= {"kind": "integers", "low": int(x.min()), "high": int(x.max())}
        else:
            name = f"case{seed}.input{i}"
            entry |= {"kind": "stored", "name": name}
            kept[name] = x.detach().cpu().contiguous().clone()
        made.append(entry)
    if sum(x.nbytes for x in kept.values()) > MAX_STORED_BYTES:
        raise EngineError("the inputs cannot be drawn again, and are too large to keep")
    return made, kept


def _in_order(x: Tensor) -> bool:
    """Positions, offsets and lengths mean what they are."""
    if x.dim() == 0 or x.shape[-1] < 2:
        return False
    steps = x.diff(dim=-1)
    return bool((steps >= 0).all() or (steps <= 0).all())


def drawn(entries: Sequence[Mapping[str, Any]], kept: Mapping[str, Tensor], device: torch.device) -> list[Tensor]:
    """The inputs themselves. The generator is numpy's legacy one, whose stream is frozen."""
    made = []
    for entry in entries:
        shape, dtype = tuple(entry["shape"]), getattr(torch, entry["dtype"])
        if entry["kind"] == "stored":
            made.append(kept[entry["name"]].to(device))
            continue
        random = np.random.RandomState(entry["seed"] % (1 << 32))
        if entry["kind"] == "normal":
            values = entry["mean"] + entry["std"] * random.standard_normal(shape)
        else:
            values = random.randint(entry["low"], entry["high"] + 1, size=shape, dtype=np.int64)
        made.append(torch.from_numpy(np.asarray(values)).to(dtype).to(device))
    return made


def widened(program: Program) -> Program:
    """The same program in float64."""

    def wide(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [wide(each) for each in value]
        if isinstance(value, dict) and value.get("dtype") in ("float32", "float16", "bfloat16"):
            return {"dtype": "float64"}
        return value

    steps = tuple(Step(s.op, tuple(map(wide, s.args)), {n: wide(v) for n, v in s.kwargs.items()}, s.out, s.several)
                  for s in program.steps)  # fmt: skip
    return Program(program.inputs, steps, program.outputs, program.dims)


def flat(found: Any) -> list[Tensor]:
    """The tensors of an output, in order."""
    if isinstance(found, Tensor):
        return [found]
    if isinstance(found, Mapping):
        return [x for each in found.values() for x in flat(each)]
    return [x for each in found for x in flat(each)] if isinstance(found, (list, tuple)) else []


def names_of(outputs: Any) -> list[str]:
    """Paths of the tensors of an output."""
    made: list[str] = []

    def walk(item: Any, path: str) -> None:
        kind = kind_of(item)
        if kind in ("tuple", "list"):
            for i, each in enumerate(item[kind]):
                walk(each, f"{path}.{i}" if path else str(i))
        elif kind in ("dict", "record"):
            for name, each in item[kind]:
                walk(each, f"{path}.{name}" if path else name)
        elif isinstance(item, dict) and ("v" in item or "w" in item):
            made.append(path or "output")

    walk(outputs, "")
    return made


class Reference:
    """What a program returns in float64, or in its own types where an op has no wider one; its weights widened once."""

    def __init__(self, program: Program, weights: Mapping[str, Tensor]) -> None:
        self.program, self.weights, self.wide_program = program, weights, widened(program)
        self.wide = {name: weights[name].double() if weights[name].is_floating_point() else weights[name]
                     for name in program.weight_names()}  # fmt: skip
        self.types = "float64"

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        device = inputs[0].device if inputs else torch.device("cpu")
        with torch.no_grad():
            if self.types == "float64":
                given = [x.double() if x.is_floating_point() else x for x in inputs]
                try:
                    return flat(interpret(self.wide_program, given, self.wide.__getitem__, device))
                except (RuntimeError, TypeError, NotImplementedError):
                    self.types = "the model's own types"
            return flat(interpret(self.program, inputs, self.weights.__getitem__, device))


def sampled(x: Tensor) -> Tensor:
    """Elements of a tensor at a regular, odd distance."""
    values = x.detach().reshape(-1)
    stride = values.numel() // MAX_ELEMENTS | 1 if values.numel() > MAX_ELEMENTS else 1
    return values[::stride].cpu().clone()


Case = tuple[list[dict[str, Any]], dict[str, Tensor]]
"""How to draw the inputs of a case, and those that are kept."""


def fitting(bases: Sequence[Program], inputs: Sequence[Tensor]) -> Program:
    """The program of several that takes these inputs."""
    from ridgeline.engine.file.engine import sizes_of

    shapes = [tuple(x.shape) for x in inputs]
    return next((base for base in bases if sizes_of(base, shapes) is not None), bases[-1])


def cases_like(
    examples: Sequence[Sequence[Tensor]], bases: Sequence[Program], weights: Mapping[str, Tensor], num_draws: int = 2,
    seed: int = 0,
) -> list[Case]:  # fmt: skip
    """Cases like each example, which the model takes; where it takes nothing that is drawn, the example itself."""
    made = list[Case]()
    for example in examples:
        takes_drawn = True
        for turn in range(num_draws):
            try:
                entries, kept = draw(example, seed + len(made))
                if turn == 0:
                    device = example[0].device if example else torch.device("cpu")
                    with torch.no_grad():
                        inputs = drawn(entries, kept, device)
                        interpret(fitting(bases, inputs), inputs, weights.__getitem__, device)
            except (EngineError, RuntimeError, IndexError):  # integers that mean something
                takes_drawn = False
            made.append((entries, kept) if takes_drawn else _stored(example, seed + len(made)))
    return made


def cases_of(proof: Mapping[str, Any], values: Mapping[str, Tensor]) -> list[Case]:
    """The cases of a proof, to be proved again."""
    made = list[Case]()
    for case in proof.get("cases", []):
        kept = {entry["name"]: values[entry["name"]] for entry in case["inputs"] if entry["kind"] == "stored"}
        made.append((case["inputs"], kept))
    return made


def prove(
    engine: Engine, bases: Sequence[Program], weights: Mapping[str, Tensor], cases: Sequence[Case],
    error_budget: float | None,
) -> tuple[dict[str, Any], dict[str, Tensor], list[str]]:  # fmt: skip
    """The proof of an engine, its values, and what it found wrong.

    ``bases`` are the model's own program, or one for each profile, ``weights`` its weights: eager's error is that of
    the base program in its own types, on the same inputs.
    """
    made, kept, wrong = list[dict[str, Any]](), dict[str, Tensor](), list[str]()
    names, references = names_of(bases[-1].outputs), dict[int, Reference]()
    against = ""
    for number, (entries, own) in enumerate(cases):
        inputs = drawn(entries, own, engine.device)
        base = fitting(bases, inputs)
        with torch.no_grad():
            eager = flat(interpret(base, inputs, weights.__getitem__, engine.device))
        if id(base) not in references:
            references[id(base)] = Reference(base, weights)
        reference = references[id(base)]
        meant, against = reference(inputs), reference.types
        kept |= own
        outputs = list[dict[str, Any]]()
        for name, ours, theirs, wide in zip(names, flat(engine.on_inputs(inputs)), eager, meant, strict=True):
            entry, value, ok = _judged(ours, theirs, wide, error_budget)
            where = f"case{number}.{len(outputs)}"
            outputs.append({"name": name, **entry, "values": where})
            kept[where] = value
            if not ok:
                wrong.append(
                    f"output {name} is {entry['rms']:.1e} from {against}, and {entry['allowed_rms']:.1e} is "
                    "allowed"
                )
        made.append({"inputs": entries, "outputs": outputs})
    return {"reference": against, "error_budget": error_budget, "cases": made}, kept, wrong


def _stored(example: Sequence[Tensor], seed: int) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    kept = {f"case{seed}.input{i}": x.detach().cpu().contiguous().clone() for i, x in enumerate(example)}
    if sum(x.nbytes for x in kept.values()) > MAX_STORED_BYTES:
        raise EngineError("the model takes no drawn inputs, and those that were given are too large to keep: "
                          "build with smaller examples")  # fmt: skip
    return [{"dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape), "seed": seed, "kind": "stored",
             "name": name} for name, x in kept.items()], kept  # fmt: skip


def _judged(ours: Tensor, eager: Tensor, wide: Tensor, budget: float | None) -> tuple[dict[str, Any], Tensor, bool]:
    """Errors of one output, the reference's values that are kept, and whether it is right."""
    entry: dict[str, Any] = {"dtype": str(ours.dtype).removeprefix("torch."), "shape": list(ours.shape)}
    if not eager.is_floating_point():
        ok = torch.equal(ours, eager)
        num = int((ours != eager).sum()) if ours.shape == eager.shape else ours.numel()
        return {**entry, "rms": num / max(1, ours.numel()), "allowed_rms": 0.0}, sampled(eager), ok
    verdict = judge(ours, eager, wide)
    allowed = max(verdict.allowed_rms_frac, budget or 0.0)
    largest = max(verdict.allowed_largest, 4 * (budget or 0.0) * float(wide.abs().max()) if wide.numel() else 0.0)
    ok = verdict.ok if budget is None else (
        verdict.error.rms_frac <= allowed and verdict.error.largest <= largest
        and verdict.error.num_misplaced <= verdict.eager.num_misplaced
    )  # fmt: skip
    entry |= {"rms": verdict.error.rms_frac, "eager_rms": verdict.eager.rms_frac, "allowed_rms": allowed,
              "allowed_largest": largest}  # fmt: skip
    return entry, sampled(wide), ok


@dataclass(frozen=True, slots=True)
class Checked:
    """One output of one case, here."""

    case: int
    output: str
    shape: str
    rms: float
    allowed_rms: float
    at_build: float
    ok: bool
    why: str = ""


@dataclass(frozen=True, slots=True)
class Verification:
    """What the proof says on this machine."""

    name: str
    device: str
    reference: str
    rows: tuple[Checked, ...]
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.rows) and all(row.ok for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "device": self.device, "ok": bool(self), "reference": self.reference,
                "notes": list(self.notes), "rows": [asdict(row) for row in self.rows]}  # fmt: skip

    def __str__(self) -> str:
        worst = max(
            self.rows, key=lambda row: row.rms / row.allowed_rms if row.allowed_rms else float(not row.ok), default=None
        )
        if worst is None:
            return f"{self.name}: the file has no proof"
        why = f"; {worst.why}" if worst.why else ""
        word = "verified" if self else "WRONG"
        said = f"{word} on {self.device}: {sum(r.ok for r in self.rows)} of {len(self.rows)} outputs"
        return (f"{said}; the worst, {worst.output} of case {worst.case}, is {worst.rms:.1e} from {self.reference} "
                f"({worst.allowed_rms:.1e} allowed, {worst.at_build:.1e} when built){why}")  # fmt: skip


def verify(engine: Engine) -> Verification:
    """Run the cases of the proof and compare with the values in the file."""
    contents, rows = engine.contents, list[Checked]()
    proof = contents.proof
    try:
        for number, case in enumerate(proof.get("cases", [])):
            inputs = drawn(_sane(case["inputs"], engine), contents.proof_values, engine.device)
            found = flat(engine.on_inputs(inputs))
            if len(found) != len(case["outputs"]):
                raise EngineError(f"the proof has {len(case['outputs'])} outputs, and the engine {len(found)}")
            for entry, ours in zip(case["outputs"], found, strict=True):
                rows.append(_row(number, entry, ours, contents.proof_values[entry["values"]]))
        return Verification(
            engine.name, str(engine.device), str(proof.get("reference", "")), tuple(rows), tuple(engine.notes)
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise EngineError(f"{engine.name}: the proof in the file is not readable: {ascii(str(error))[1:80]}") from None


def _sane(entries: Any, engine: Engine) -> Any:
    """Only inputs of a size that the engine takes are drawn."""
    from ridgeline.engine.file.engine import sizes_of

    shapes = [tuple(entry["shape"]) for entry in entries]
    wants = engine.contents.programs
    if len(shapes) != len(wants[0].inputs) or all(sizes_of(program, shapes) is None for program in wants):
        raise EngineError(f"{engine.name}: the proof has inputs that the engine does not take")
    total = sum(int(np.prod(shape, dtype=np.float64)) * 8 for shape in shapes)
    if total > engine.limit_bytes:
        raise EngineError(f"{engine.name}: the proof's inputs need more memory than is allowed")
    return entries


def _row(number: int, entry: Mapping[str, Any], ours: Tensor, kept: Tensor) -> Checked:
    name, shape, allowed = str(entry["name"]), "x".join(map(str, ours.shape)), float(entry["allowed_rms"])
    if list(ours.shape) != entry["shape"]:
        return Checked(number, name, shape, float("inf"), allowed, float(entry["rms"]), False, "has another shape")
    mine = sampled(ours)
    if mine.shape != kept.shape:
        return Checked(number, name, shape, float("inf"), allowed, float(entry["rms"]), False, "has other elements")
    if not mine.is_floating_point():
        share = float((mine != kept).double().mean()) if mine.numel() else 0.0
        return Checked(number, name, shape, share, 0.0, float(entry["rms"]), share == 0.0, "differs" if share else "")
    found = error_of(mine.double(), kept.double())
    why = "has NaN or infinity where the reference has none" if found.num_misplaced else ""
    why = why or ("has an element too far off" if found.largest > entry["allowed_largest"] else "")
    return Checked(
        number, name, shape, found.rms_frac, allowed, float(entry["rms"]), not why and found.rms_frac <= allowed, why
    )
