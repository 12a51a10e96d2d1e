"""The receipt of a search: every candidate with its time, proof and status, and what is left to gain."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from ridgeline.units import show_bytes, show_seconds

WINNER, BEATEN, SLOWER, EQUAL, WRONG, LARGE, FAILED, SKIPPED = (
    "winner", "beaten", "slower", "equal", "wrong", "too large", "failed", "skipped",
)  # fmt: skip
MEASURED = (WINNER, BEATEN, SLOWER, EQUAL)
BARRED = {LARGE: "too large", WRONG: "not as accurate"}
"""Why a measured candidate may not be returned."""
RACES = (
    "times of the result and its rivals are from the last race, called as they are returned; other times are from when "
    "each candidate was tried, beside the best at that time"
)
OVERRAN = "the search was"
"""Prefix of the note on an exceeded budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One candidate: its changes, measurements, status and the reason for it."""

    name: str
    changes: tuple[str, ...]
    status: str
    reason: str = ""
    predicted_s: float | None = None
    price_s: float | None = None  # expected build time, if it was skipped
    build_s: float | None = None
    measured_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    speedup: float | None = None  # against eager, paired rounds
    speedup_low: float | None = None
    speedup_high: float | None = None
    peak_bytes: int | None = None
    verdict: Mapping[str, Any] | None = None
    rewrites: Mapping[str, int] = field(default_factory=dict)
    places: Mapping[str, Sequence[str]] = field(default_factory=dict)
    breaks: Mapping[str, int] = field(default_factory=dict)
    recompiles: int = 0
    last: bool = False  # whether its times are from the last race


@dataclass(frozen=True, slots=True)
class Region:
    """Device time of one kind of kernel before and after."""

    name: str
    eager_s: float
    final_s: float
    stock_s: float | None = None
    num_eager: int = 0
    num_final: int = 0
    num_stock: int | None = None
    eager_kernel: str = ""  # the one that takes the most time
    final_kernel: str = ""
    stock_kernel: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Time of one part of the model before and after, its floor, and how to reduce what remains.

    ``basis`` is "measured" if kernels carry the part's own name, or "shared out" if they span parts and their time is
    divided in proportion to eager's kernels of their kind.
    """

    name: str
    eager_s: float
    final_s: float | None
    floor_s: float | None
    basis: str
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedLayer:
    """A quantized layer: its error at the layer, the estimated error at the outputs, and the gain."""

    name: str
    format: str
    local_frac: float
    error_frac: float
    gain_s: float
    basis: str


@dataclass(frozen=True, slots=True)
class Step:
    """One improvement on the way from eager to the result."""

    name: str
    measured_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """The result of a search. ``str`` renders it as text, ``to_json`` for machines, ``web.optimize`` as a page."""

    model: str
    mode: str
    device: str
    inputs: str
    environment: Mapping[str, Any]
    winner: str
    changes: tuple[str, ...]
    eager_s: float
    final_s: float
    stock_s: float | None
    speedup: float
    speedup_low: float
    speedup_high: float
    over_best: float  # best of eager and torch.compile over the result, in the last race
    floor_s: float | None
    eager_bytes: int | None
    final_bytes: int | None
    memory_limit_bytes: int | None
    budget_s: float
    spent_s: float
    verdict: Mapping[str, Any] | None
    entries: tuple[Entry, ...]
    steps: tuple[Step, ...]
    regions: tuple[Region, ...] = ()
    parts: tuple[Part, ...] = ()
    error_budget: float | None = None
    narrowed: tuple[QuantizedLayer, ...] = ()
    forecast: Mapping[str, Any] | None = None
    explanations: tuple[str, ...] = ()
    remaining: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()  # queries of the model's code besides tensor values, which calls are guarded by
    cached: bool = False
    stages_left_out: tuple[tuple[str, str], ...] = ()  # skipped stages of the search, and why
    searched_at: str = ""  # UTC

    @property
    def ran_out_of_time(self) -> bool:
        """Whether candidates were skipped that fit into the budget by themselves: another search may find more."""
        return any(entry.status == SKIPPED and (entry.price_s is None or entry.price_s <= self.budget_s)
                   for entry in self.entries)  # fmt: skip

    @property
    def lacks_rival(self) -> bool:
        """Whether there was no time to measure torch.compile."""
        stock = next((entry for entry in self.entries if entry.name == "torch.compile"), None)
        return stock is not None and stock.status == SKIPPED

    @property
    def guarantee(self) -> str:
        """What the result is known not to be slower than."""
        stock = next((entry for entry in self.entries if entry.name == "torch.compile"), None)
        # Times within 2 % count as equal.
        if self.stock_s is not None and self.final_s <= 1.02 * self.stock_s:
            return "not slower than eager or torch.compile, both measured beside it"
        if self.stock_s is not None:
            took = f"{show_seconds(self.stock_s)}, and may not be returned: see the notes"
            return f"not slower than eager but slower than torch.compile ({took})"
        if stock is not None and stock.status in BARRED and stock.measured_s is not None:
            word = "or" if stock.measured_s >= self.final_s else "but slower than"
            took = f"{show_seconds(stock.measured_s)}, {BARRED[stock.status]}: {stock.reason}"
            return f"not slower than eager {word} torch.compile ({took})"
        why = stock.reason if stock is not None and stock.reason else "the search ended before"
        expected_s = (self.forecast or {}).get("expected_s", {}).get("compiled")
        kernels = f"; its kernels alone are expected to take {show_seconds(expected_s)}" if expected_s else ""
        return f"not slower than eager; none against torch.compile, which was not measured: {why}{kernels}"

    def to_dict(self) -> dict[str, Any]:
        return {**_cleaned(asdict(self)), "guarantee": self.guarantee, "legend": legend(self)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Receipt:
        """Read a receipt from its JSON."""
        known = {f.name for f in fields(cls)}
        made = {key: value for key, value in found.items() if key in known}
        made["entries"] = tuple(Entry(**{**entry, "changes": tuple(entry["changes"])}) for entry in found["entries"])
        made["steps"] = tuple(Step(**step) for step in found["steps"])
        made["regions"] = tuple(Region(**region) for region in found["regions"])
        renamed = {"cure": "fix"}  # in recordings until November 2026
        made["parts"] = tuple(Part(**{renamed.get(key, key): value for key, value in part.items()})
                              for part in found.get("parts", ()))  # fmt: skip
        made["narrowed"] = tuple(QuantizedLayer(**layer) for layer in found.get("narrowed", ()))
        for name in ("changes", "explanations", "remaining", "notes"):
            made[name] = tuple(found[name])
        made["asked"] = tuple(found.get("asked", ()))
        made["stages_left_out"] = tuple((name, why) for name, why in found.get("stages_left_out", ()))
        return cls(**made)

    def from_cache(self, spent_s: float) -> Receipt:
        """The same receipt, marked as cached."""
        return replace(self, cached=True, spent_s=spent_s)

    def noted(self, note: str) -> Receipt:
        """The same receipt with a further note."""
        return replace(self, notes=(*self.notes, note))

    def __str__(self) -> str:
        return "\n".join(text_of(self))


def _cleaned(value: Any) -> Any:
    """Replace infinities and NaN, which JSON does not have, by None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _cleaned(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_cleaned(each) for each in value]
    return value


def text_of(receipt: Receipt) -> list[str]:
    """The receipt in lines of plain text."""
    return [
        *_head(receipt),
        "",
        *_way(receipt),
        "",
        *_table(receipt),
        *_section("Computed in fewer bits", _quantized_lines(receipt)),
        *_section("Time by part of the model", _part_lines(receipt)),
        *_section("Device time by kind of kernel, eager → result", _region_lines(receipt)),
        *_section("Why torch.compile is where it is", receipt.explanations),
        *_section("What is left", receipt.remaining),
        *_section("Search stages skipped", [f"{name}: {reason}" for name, reason in receipt.stages_left_out]),
        *_section("Notes", receipt.notes),
    ]


def _head(r: Receipt) -> list[str]:
    cached = f", cached: searched on {r.searched_at or 'an unknown date'}, not now" if r.cached else ""
    lines = [
        f"{r.model}, {r.mode} on {r.device}: {show_seconds(r.eager_s)} → {show_seconds(r.final_s)}, "
        f"{r.speedup:.2f}× eager ({r.speedup_low:.2f}–{r.speedup_high:.2f}, 95 %)",
        f"  kept: {r.winner}: {'; '.join(r.changes)}",
    ]
    if r.stock_s is not None:
        word = f"{r.stock_s / r.final_s:.2f}× torch.compile ({show_seconds(r.stock_s)})"
        lines.append(f"  against others: {word}, {r.over_best:.2f}× the better of eager and torch.compile")
    if r.floor_s:
        lines.append(f"  floor: {show_seconds(r.floor_s)}; the result takes {r.final_s / r.floor_s:.2f}× that")
    if r.final_bytes is not None and r.eager_bytes is not None:
        limit = f", limit {show_bytes(r.memory_limit_bytes)}" if r.memory_limit_bytes else ""
        lines.append(f"  peak memory: {show_bytes(r.eager_bytes)} → {show_bytes(r.final_bytes)}{limit}")
    proof = "eager itself: nothing was changed"
    if (verdict := r.verdict) is not None:
        error, eager, allowed = (verdict[key] for key in ("rms_frac", "eager_rms_frac", "allowed_rms_frac"))
        proof = (f"error {_number(error)} where eager has {_number(eager)} and {_number(allowed)} is allowed, at "
                 f"{verdict['what'] or 'the output'}, the worst of {verdict['num_compared']} results, against "
                 f"{verdict['reference']}")  # fmt: skip
    lines.append(f"  proof: {proof}")
    lines.append(f"  guarantee: {r.guarantee}")
    over = "" if r.cached else next((f" ({note})" for note in r.notes if note.startswith(OVERRAN)), "")
    return [*lines, f"  searched {r.spent_s:.1f} s of {r.budget_s:.0f} s{cached}{over}; inputs {r.inputs}"]


def _number(value: float | None) -> str:
    return "∞" if value is None else f"{value:.1e}"


def _way(r: Receipt) -> list[str]:
    longest_s = max([step.measured_s for step in r.steps], default=1.0)
    width = max([len(step.name) for step in r.steps], default=1)
    bars = ["█" * max(1, round(40 * step.measured_s / longest_s)) for step in r.steps]
    rows = zip(r.steps, bars, strict=True)
    return [f"  {step.name:<{width}}  {show_seconds(step.measured_s):>9}  {bar}" for step, bar in rows]


def _table(r: Receipt) -> list[str]:
    rows: list[tuple[str, ...]] = [("candidate", "time", "× eager", "memory", "build", "status", "why")]
    rows += [_row(entry) for entry in r.entries]
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    made = []
    for row in rows:
        cells = [cell.ljust(w) if i in (0, 5) else cell.rjust(w) for i, (cell, w) in enumerate(zip(row[:6], widths))]
        made.append(("  " + "  ".join(cells) + "  " + row[6]).rstrip())
    return made + [f"  {line}" for line in legend(r)]


def legend(r: Receipt) -> list[str]:
    """Explains from which race the times are, if they are from several."""
    last = [entry.last for entry in r.entries if entry.measured_s is not None]
    return [RACES] if any(last) and not all(last) else []


def _row(e: Entry) -> tuple[str, ...]:
    return (
        e.name,
        "" if e.measured_s is None else show_seconds(e.measured_s),
        "" if e.speedup is None else f"{e.speedup:.2f}",
        "" if e.peak_bytes is None else show_bytes(e.peak_bytes),
        "" if e.build_s is None else f"{e.build_s:.1f} s",
        e.status,
        e.reason,
    )


def _quantized_lines(r: Receipt) -> list[str]:
    """Layers of one kind and format in one line, their numbers as stars."""
    if not r.narrowed:
        return []
    kinds: dict[tuple[str, str], list[QuantizedLayer]] = {}
    for layer in r.narrowed:
        kinds.setdefault((starred(layer.name), layer.format), []).append(layer)
    rows = [("layers", "format", "number", "error at the layer", "at the outputs", "gain")]
    for (name, format), layers in kinds.items():
        local = max(layer.local_frac for layer in layers)
        total = math.sqrt(sum(layer.error_frac**2 for layer in layers))
        gain_s = sum(layer.gain_s for layer in layers)
        rows.append((name, format, str(len(layers)), f"{local:.1e}", f"{total:.1e}", show_seconds(gain_s)))
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    lines = ["  ".join(cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
             for row in rows]  # fmt: skip
    return [f"within an error_budget of {r.error_budget:g}, relative root mean square of every result", *lines]


def starred(name: str) -> str:
    """A path with its numbers as stars."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _part_lines(r: Receipt) -> list[str]:
    if not r.parts:
        return []
    rows: list[tuple[str, ...]] = [("part", "eager", "result", "floor", "left", "told by", "what would close it")]
    for part in r.parts:
        left_s = None if part.final_s is None or part.floor_s is None else max(0.0, part.final_s - part.floor_s)
        times = (part.eager_s, part.final_s, part.floor_s, left_s)
        rows.append((part.name, *("" if s is None else show_seconds(s) for s in times), part.basis, part.fix))
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    lines = []
    for row in rows:
        cells = [cell.rjust(w) if 0 < i < 5 else cell.ljust(w) for i, (cell, w) in enumerate(zip(row[:6], widths))]
        lines.append(("  ".join(cells) + "  " + row[6]).rstrip())
    return lines


def _region_lines(r: Receipt) -> list[str]:
    width = max([len(region.name) for region in r.regions], default=0)
    return [
        f"{region.name:<{width}}  {show_seconds(region.eager_s):>9} → {show_seconds(region.final_s):>9}"
        f"  ({region.num_eager} → {region.num_final} kernels)"
        for region in r.regions
    ]


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return ["", title, *(f"  {line}" for line in lines)] if lines else []
