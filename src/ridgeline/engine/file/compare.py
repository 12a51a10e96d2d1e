"""Two engines, or an engine and a function: how far their results are apart, and what differs in their steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from ridgeline.bench.verdict import error_of
from ridgeline.engine.file.proof import drawn, flat, names_of
from ridgeline.errors import EngineError
from ridgeline.units import show_bytes

if TYPE_CHECKING:
    from ridgeline.engine.file.engine import Engine


@dataclass(frozen=True, slots=True)
class Difference:
    """One output for one set of inputs."""

    case: int
    output: str
    rms: float
    largest: float
    equal: bool
    agreement: float | None  # of the largest element of each row, as classes are told
    kl: float | None  # of the rows as logits


@dataclass(frozen=True, slots=True)
class Comparison:
    """What differs between A and B."""

    a: str
    b: str
    rows: tuple[Difference, ...]
    structure: tuple[str, ...]

    @property
    def same_bits(self) -> bool:
        return all(row.equal for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "same_bits": self.same_bits}

    def __str__(self) -> str:
        said = [f"{self.a} and {self.b}: " + ("the same bits" if self.same_bits else "results differ")]
        for row in self.rows:
            also = (
                f", top-1 {row.agreement:.1%}, KL {row.kl:.1e}"
                if row.agreement is not None and row.kl is not None
                else ""
            )
            said.append(f"case {row.case} {row.output}: " + ("equal" if row.equal else f"rms {row.rms:.1e}, largest "
                        f"{row.largest:.1e}{also}"))  # fmt: skip
        return "\n".join([*said, *self.structure])


def compare(engine: Engine, other: Any, num_inputs: int = 3) -> Comparison:
    """Run both on inputs of the engine's proof. ``other`` is an engine, or anything that is called as the engine is."""
    from ridgeline.engine.file.engine import Engine as Kind

    cases = engine.contents.proof.get("cases", [])[:num_inputs]
    if not cases:
        raise EngineError(f"{engine.name} has no proof with inputs to compare on")
    rows = list[Difference]()
    names = names_of(engine.contents.programs[-1].outputs)
    for number, case in enumerate(cases):
        inputs = drawn(case["inputs"], engine.contents.proof_values, engine.device)
        ours = flat(engine.on_inputs(inputs))
        with torch.no_grad():
            theirs = flat(other.on_inputs(inputs) if isinstance(other, Kind) else _plain(other(*inputs)))
        if [x.shape for x in ours] != [x.shape for x in theirs]:
            raise EngineError(f"outputs differ in number or shape: {[tuple(x.shape) for x in ours]} and "
                              f"{[tuple(x.shape) for x in theirs]}")  # fmt: skip
        for name, a, b in zip(names, ours, theirs, strict=True):
            error = error_of(b.double(), a.double())
            agreement, kl = class_agreement(a, b)
            rows.append(Difference(number, name, error.rms_frac, error.largest, torch.equal(a, b), agreement, kl))
    return Comparison(engine.name, getattr(other, "name", None) or type(other).__name__, tuple(rows),
                      _structure(engine, other) if isinstance(other, Kind) else ())  # fmt: skip


def _plain(found: Any) -> Any:
    return dict(found) if hasattr(found, "keys") and not isinstance(found, Mapping) else found


def class_agreement(a: torch.Tensor, b: torch.Tensor) -> tuple[float | None, float | None]:
    """Share of rows with the same largest element, and the KL divergence of rows as logits; None for no rows."""
    if a.dim() < 2 or a.shape[-1] < 2 or not a.is_floating_point() or not a.numel():
        return None, None
    rows_a, rows_b = a.reshape(-1, a.shape[-1]).double(), b.reshape(-1, b.shape[-1]).double()
    agreement = float((rows_a.argmax(-1) == rows_b.argmax(-1)).double().mean())
    log_a, log_b = rows_a.log_softmax(-1), rows_b.log_softmax(-1)
    return agreement, max(0.0, float((log_a.exp() * (log_a - log_b)).sum(-1).mean()))


def _structure(a: Engine, b: Engine) -> tuple[str, ...]:
    said = []
    if a.profiles != b.profiles:
        said.append(f"profiles: {'; '.join(a.profiles)} | {'; '.join(b.profiles)}")
    ours, theirs = (Counter(step.op for step in e.contents.programs[-1].steps) for e in (a, b))
    for op in sorted({*ours, *theirs}):
        if ours[op] != theirs[op]:
            said.append(f"{op}: {ours[op]} | {theirs[op]}")
    if a.weight_bytes != b.weight_bytes:
        said.append(f"weights: {show_bytes(a.weight_bytes)} | {show_bytes(b.weight_bytes)}")
    both = set(a.contents.weights) & set(b.contents.weights)
    other = [
        n for n in sorted(both) if not torch.equal(a.contents.weights[n].view(-1), b.contents.weights[n].reshape(-1))
    ]
    if other:
        said.append(f"{len(other)} of {len(both)} weights differ: {', '.join(other[:4])}")
    if a.contents.target != b.contents.target:
        said.append(f"built for: {dict(a.contents.target)} | {dict(b.contents.target)}")
    return tuple(said)
