"""What differs between two runs: time aligned by module and op, what got slower, by how much, and why."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import FindingError
from ridgeline.findings.context.fact import positive
from ridgeline.findings.context.kernel_name import kernel_name
from ridgeline.findings.replay.window import Window, window_of
from ridgeline.result import Result
from ridgeline.trace.idle import CAUSES, pieces_of
from ridgeline.trace.intervals import Intervals, covered_within, union
from ridgeline.trace.kind import Kind
from ridgeline.trace.table import Trace

MATCHED = 0.6
"""Two runs are aligned by the finest words that at least this share of both runs' time has in common."""
COMPUTE = (Kind.KERNEL, Kind.MEMSET)
SAME = 0.1
_OP_PARTS = re.compile(r"^(aten::|torch::|native_|_)+")
_OP_WORDS = {
    "mm": "matmul", "addmm": "matmul", "bmm": "matmul", "baddbmm": "matmul", "linear": "matmul", "convolution": "conv",
    "cudnn_convolution": "conv", "conv2d": "conv", "scaled_dot_product_attention": "attention",
    "scaled_dot_product_flash_attention": "attention", "flash_attention_forward": "attention",
    "scaled_dot_product_cudnn_attention": "attention", "efficient_attention_forward": "attention",
    "cudnn_attention_forward": "attention", "cudnn_attention": "attention", "flash_attention": "attention",
    "efficient_attention": "attention", "cudnn_batch_norm": "batch_norm", "threshold": "relu", "clamp_min": "relu",
    "fused_adamw": "adamw", "fused_sgd": "sgd", "max_pool2d_with_indices": "max_pool2d",
}  # fmt: skip

_SORTS = tuple(
    (sort, re.compile(pattern))
    for sort, pattern in (
        ("conv", r"^conv"),
        ("norm", r"norm"),
        ("matmul", r"^matmul$"),
        ("attention", r"attention"),
        ("softmax", r"softmax|nll_loss|cross_entropy"),
        ("pool", r"pool"),
        ("embedding", r"embedding"),
        (
            "pointwise",
            r"^(pointwise|add|mul|div|sub|relu|gelu|silu|sigmoid|tanh|exp|pow|neg|fill|copy|to_copy|where|dropout)$",
        ),
        ("reduce", r"^(reduce|sum|mean|max|min|argmax)$"),
    )
)


@dataclass(frozen=True, slots=True)
class Part:
    """Device time of a step under one key in one run."""

    exclusive_s: float = 0.0
    kernels_s: float = 0.0
    num: float = 0.0
    names: tuple[str, ...] = ()

    @property
    def mean_s(self) -> float:
        return self.kernels_s / self.num if self.num else 0.0


@dataclass(frozen=True, slots=True)
class Change:
    """One key in both runs, in milliseconds a step; the changes add up to the difference of the steps."""

    key: str
    kind: str  # compute, communication, copy, idle
    a_ms: float
    b_ms: float
    delta_ms: float
    a_num: float
    b_num: float
    why: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, repr=False)
class Difference(Result):
    """Two runs side by side; ``changes`` has the largest first."""

    a: str
    b: str
    a_step_ms: float
    b_step_ms: float
    aligned_by: str
    matched_frac: float
    changes: tuple[Change, ...]
    notes: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()  # what differs before any kernel does: devices, software, ranks, how it was made
    num_ranks: int = 1

    def summary(self) -> str:
        return f"{self.a} → {self.b}: step {self.a_step_ms:.4g} → {self.b_step_ms:.4g} ms ({self.delta_ms:+.3g} ms)"

    def records(self) -> list[dict[str, Any]]:
        """One row a change, the largest first."""
        return [change.to_dict() for change in self.changes]

    @property
    def delta_ms(self) -> float:
        return self.b_step_ms - self.a_step_ms

    @property
    def ratio(self) -> float:
        return self.b_step_ms / self.a_step_ms if self.a_step_ms > 0 else float("inf")

    def to_dict(self) -> dict[str, Any]:
        return {
            "a": self.a,
            "b": self.b,
            "a_step_ms": self.a_step_ms,
            "b_step_ms": self.b_step_ms,
            "delta_ms": self.delta_ms,
            "aligned_by": self.aligned_by,
            "matched_frac": self.matched_frac,
            "changes": [change.to_dict() for change in self.changes],
            "notes": list(self.notes),
            "settings": list(self.settings),
            "num_ranks": self.num_ranks,
        }


Idle = Callable[[Trace, Window], Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Side:
    """One run as the comparison sees it: its window, its device work and who owns which moment."""

    trace: Trace
    window: Window
    rows: NDArray[np.intp]
    exclusive_s: NDArray[np.float64]
    num_devices: int
    idle_s: Mapping[str, float]

    @property
    def per_step(self) -> float:
        return 1.0 / (self.window.num_steps * max(1, self.num_devices))


def diff(a: Trace, b: Trace, idle: Idle, level: str = "") -> Difference:
    """Align two runs and attribute the difference of their steps; ``idle`` gives seconds a step by cause. ``level`` is
    what to align by, the finest that fits unless given."""
    empty = [trace.title for trace in (a, b) if not trace.gpu.any() and not trace.of_kind(Kind.STEP).any()]
    if empty:
        raise FindingError(f"no steps and no device work in {' and '.join(empty)}: nothing to compare")
    before, after = _side(a, idle), _side(b, idle)
    found, matched = _level(before, after)
    level = level or found
    key = LEVELS[level]
    parts_a, parts_b = _parts(before, key), _parts(after, key)
    changes = [_change(name, parts_a.get(name, Part()), parts_b.get(name, Part())) for name in {**parts_a, **parts_b}]
    changes += _idle_changes(before, after)
    changes.sort(key=lambda change: -abs(change.delta_ms))
    notes = _notes(before, after, level, matched)
    return Difference(
        a.title,
        b.title,
        before.window.step_s * 1e3,
        after.window.step_s * 1e3,
        level,
        matched,
        tuple(changes),
        notes,
        settings_of(a, b),
    )


def over_ranks(found: Sequence[Difference]) -> Difference:
    """Several ranks of two runs as one difference: every number is the mean over the ranks."""
    num = len(found)
    if num == 1:
        return found[0]
    rows: dict[tuple[str, str], list[Change]] = {}
    for one in found:
        for change in one.changes:
            rows.setdefault((change.key, change.kind), []).append(change)
    changes = []
    for (key, kind), own in rows.items():
        a_ms, b_ms, a_num, b_num = (sum(getattr(one, name) for one in own) / num
                                    for name in ("a_ms", "b_ms", "a_num", "b_num"))  # fmt: skip
        most = max(own, key=lambda one: abs(one.delta_ms))
        why = most.why if len({one.why for one in own}) == 1 else f"{most.why} (on the rank it is most)"
        changes.append(Change(key, kind, a_ms, b_ms, b_ms - a_ms, a_num, b_num, why))
    changes.sort(key=lambda change: -abs(change.delta_ms))
    first = found[0]
    return Difference(
        first.a, first.b, sum(one.a_step_ms for one in found) / num, sum(one.b_step_ms for one in found) / num,
        first.aligned_by, min(one.matched_frac for one in found), tuple(changes),
        tuple(dict.fromkeys(note for one in found for note in one.notes)), first.settings, num,
    )  # fmt: skip


def settings_of(a: Trace, b: Trace) -> tuple[str, ...]:
    """Devices, software and ranks of two runs where they differ, and how each was made where that does."""
    facts = [_facts(trace) for trace in (a, b)]
    return tuple(
        f"{name}: {facts[0].get(name, 'not recorded')} → {facts[1].get(name, 'not recorded')}"
        for name in dict.fromkeys([*facts[0], *facts[1]])
        if facts[0].get(name) != facts[1].get(name)
    )


def _facts(trace: Trace) -> dict[str, str]:
    found = {"run": str(trace.meta.get("origin") or "measured")}
    for properties in trace.meta.get("devices") or ():
        name = properties.get("name") if isinstance(properties, dict) else properties
        if name:
            found["device"] = str(name)
            break
    if devices := len(trace.devices()):
        found["devices in the trace"] = str(devices)
    versions = trace.meta.get("versions")
    recorded = trace.meta.get("ridgeline")
    for facts in (versions, recorded.get("versions") if isinstance(recorded, dict) else None):
        if isinstance(facts, dict):
            found |= {name.replace("_", " "): str(value) for name, value in facts.items()}
    world = (trace.meta.get("distributed") or {}).get("world_size")
    return found | ({"ranks of the job": str(world)} if world else {})


def _notes(a: Side, b: Side, level: str, matched: float) -> tuple[str, ...]:
    notes = []
    if not len(a.rows) and not len(b.rows):
        return ("no device work in either run: only the lengths of their steps are compared",)
    if matched < MATCHED:
        notes.append(f"only {matched:.0%} of the time has the same {level} in both runs")
    alone = [_unrecorded_ms(side.trace) for side in (a, b)]
    if all(alone):
        notes.append(f"steps are as recorded; without the recording they took {alone[0]:.4g} and {alone[1]:.4g} ms")
    return tuple(notes)


def _unrecorded_ms(trace: Trace) -> float:
    """What the recorder measured without recording; 0 if it did not."""
    facts = trace.meta.get("ridgeline")
    found = facts.get("unprofiled_step_s") if isinstance(facts, dict) else None
    return (positive(found) or 0.0) * 1e3


def idle_by_cause(trace: Trace, window: Window) -> dict[str, float]:
    """Idle seconds a step and device, by cause, of the steps in the window."""
    pieces = pieces_of(trace)
    inside = np.flatnonzero(pieces.idle & _within(trace, pieces.before, window))
    causes = np.bincount(pieces.cause[inside], weights=pieces.ns[inside], minlength=len(CAUSES))
    devices = max(1, len(np.unique(trace.device[trace.gpu])))
    return {name: float(ns) / 1e9 / window.num_steps / devices for name, ns in zip(CAUSES, causes, strict=True) if ns}


def _within(trace: Trace, spans: NDArray[np.int32], window: Window) -> NDArray[np.bool_]:
    """Whether idle time ended with a span of the window."""
    start = trace.start_ns[np.maximum(spans, 0)]
    return np.asarray((spans >= 0) & (start > window.start_ns) & (start <= window.end_ns), dtype=bool)


def _side(trace: Trace, idle: Idle) -> Side:
    window = window_of(trace)
    start, end = trace.start_ns, trace.end_ns
    rows = np.flatnonzero(trace.gpu & (start < window.end_ns) & (end > window.start_ns))
    owned = np.zeros(len(rows))
    devices = np.unique(trace.device[rows])
    for device in devices:
        own = np.flatnonzero(trace.device[rows] == device)
        owned[own] = exclusive_s(trace, rows[own], window)
    return Side(trace, window, rows, owned, len(devices), idle(trace, window))


def exclusive_s(trace: Trace, rows: NDArray[np.intp], window: Window) -> NDArray[np.float64]:
    """Seconds in which each span of a device counts: the first to start of its kind, compute before communication
    before copies."""
    start = np.clip(trace.start_ns[rows], window.start_ns, window.end_ns)
    end = np.clip(trace.end_ns[rows], window.start_ns, window.end_ns)
    owned = np.zeros(len(rows), dtype=np.int64)
    above = Intervals(np.zeros(0, np.int64), np.zeros(0, np.int64))
    kinds = trace.kind[rows]
    for layer in (COMPUTE, (Kind.COMMUNICATION,), (Kind.MEMCPY,)):
        own = np.flatnonzero(np.isin(kinds, [int(kind) for kind in layer]))
        own = own[np.argsort(start[own], kind="stable")]
        if not len(own):
            continue
        reached = np.maximum.accumulate(np.concatenate(([window.start_ns], end[own][:-1])))
        begin = np.minimum(end[own], np.maximum(start[own], reached))
        owned[own] = (end[own] - begin) - covered_within(above, begin, end[own])
        above = union(np.concatenate((above.start, start[own])), np.concatenate((above.end, end[own])))
    return owned / 1e9


def _word(trace: Trace, column: str, row: int) -> str:
    return trace.words[int(getattr(trace, column)[row])]


def plain_op(op: str) -> str:
    """An op's name without the spelling of a framework, so that predicted and measured runs meet."""
    word = _OP_PARTS.sub("", op).rstrip("_")
    word = word.removesuffix("_backward").removesuffix("_backward_data").removesuffix("_overrideable")
    return _OP_WORDS.get(word, word)


def _by_module(trace: Trace, row: int) -> str:
    module, op = _word(trace, "module", row), plain_op(_word(trace, "op", row))
    return f"{module} · {op}" if module and op else module or op or f"({_by_family(trace, row)})"


def _by_op(trace: Trace, row: int) -> str:
    phase, op = _word(trace, "phase", row), plain_op(_word(trace, "op", row))
    return f"{op} ({phase})" if op and phase else op or f"({_by_family(trace, row)})"


def _by_sort(trace: Trace, row: int) -> str:
    """The graph's word for an op: what a predicted run calls its own."""
    op, phase = plain_op(_word(trace, "op", row)), _word(trace, "phase", row)
    if phase == "optimizer":
        return "foreach (optimizer)"
    sort = next((sort for sort, pattern in _SORTS if pattern.search(op)), "") or _by_family(trace, row)
    return f"{sort} ({phase})" if phase else sort


def _by_kernel(trace: Trace, row: int) -> str:
    return _word(trace, "name", row)


def _by_family(trace: Trace, row: int) -> str:
    kind = Kind(int(trace.kind[row]))
    if kind != Kind.KERNEL:
        return _word(trace, "name", row) if kind == Kind.MEMCPY else kind.name.lower()
    return kernel_name(_word(trace, "name", row)).family


LEVELS: Mapping[str, Callable[[Trace, int], str]] = {
    "module and op": _by_module,
    "op": _by_op,
    "sort of op": _by_sort,
    "kernel": _by_kernel,
    "kernel family": _by_family,
}


def _level(a: Side, b: Side) -> tuple[str, float]:
    """The finest alignment under which the two runs meet, and the share of their time that does."""
    best = ("kernel family", 0.0)
    for level, key in LEVELS.items():
        if level in ("module and op", "op", "sort of op") and not (_has(a, level) and _has(b, level)):
            continue
        matched = _matched(_parts(a, key), _parts(b, key))
        if matched >= MATCHED:
            return level, matched
        best = (level, matched)
    return best


def _has(side: Side, level: str) -> bool:
    column = side.trace.module if level == "module and op" else side.trace.op
    weight = side.exclusive_s
    return float(weight[column[side.rows] > 0].sum()) > 0.5 * float(weight.sum()) if len(side.rows) else False


def _matched(a: Mapping[str, Part], b: Mapping[str, Part]) -> float:
    total_a, total_b = (sum(part.exclusive_s for part in parts.values()) for parts in (a, b))
    both = a.keys() & b.keys()
    shares = [
        sum(parts[key].exclusive_s for key in both) / total if total else 1.0
        for parts, total in ((a, total_a), (b, total_b))
    ]
    return min(shares)


def _parts(side: Side, key: Callable[[Trace, int], str]) -> dict[str, Part]:
    """Time a step under each key."""
    trace, rows = side.trace, side.rows
    code = np.stack([trace.name[rows], trace.module[rows], trace.op[rows], trace.phase[rows], trace.kind[rows]], axis=1)
    distinct, first, inverse = np.unique(code, axis=0, return_index=True, return_inverse=True)
    inverse = inverse.reshape(-1)
    exclusive = np.bincount(inverse, weights=side.exclusive_s, minlength=len(distinct))
    seconds = np.bincount(inverse, weights=trace.duration_s[rows], minlength=len(distinct))
    counts = np.bincount(inverse, minlength=len(distinct))
    sums: dict[str, list[Any]] = {}
    for i, at in enumerate(first.tolist()):
        row = int(rows[at])
        into = sums.setdefault(_kinded(trace, row, key), [0.0, 0.0, 0.0, {}])
        into[0] += exclusive[i] * side.per_step
        into[1] += seconds[i] * side.per_step
        into[2] += counts[i] * side.per_step
        into[3][_word(trace, "name", row)] = into[3].get(_word(trace, "name", row), 0.0) + seconds[i]
    return {
        name: Part(float(s[0]), float(s[1]), float(s[2]), tuple(sorted(s[3], key=lambda n: -s[3][n])[:3]))
        for name, s in sums.items()
    }


def _kinded(trace: Trace, row: int, key: Callable[[Trace, int], str]) -> str:
    """Copies and communication keep their own rows whatever they were called by."""
    kind = Kind(int(trace.kind[row]))
    if kind == Kind.MEMCPY:
        return f"copy: {_word(trace, 'name', row)}"
    if kind == Kind.COMMUNICATION:
        collective = trace.words[int(trace.optional("collective")[row])]
        return f"communication: {collective or _word(trace, 'name', row)}"
    return key(trace, row)


def _change(name: str, a: Part, b: Part) -> Change:
    kind = "copy" if name.startswith("copy: ") else "communication" if name.startswith("communication: ") else "compute"
    delta_ms = (b.exclusive_s - a.exclusive_s) * 1e3
    return Change(name, kind, a.exclusive_s * 1e3, b.exclusive_s * 1e3, delta_ms, a.num, b.num, _why(a, b))


def _why(a: Part, b: Part) -> str:
    """More of them, others, slower ones, or less hidden."""
    if not a.num:
        return f"new: {b.num:.3g} a step"
    if not b.num:
        return f"gone: {a.num:.3g} a step"
    reasons = []
    if abs(b.num / a.num - 1) > SAME:
        reasons.append(f"{'more' if b.num > a.num else 'fewer'} kernels ({a.num:.3g} → {b.num:.3g} a step)")
    if not set(a.names) & set(b.names):
        names = list(dict.fromkeys((_short(a.names[0]), _short(b.names[0]))))
        reasons.append(f"other kernels ({' → '.join(names)})" if len(names) > 1 else f"another variant of {names[0]}")
    if a.mean_s > 0 and abs(b.mean_s / a.mean_s - 1) > SAME / 2:
        pace = "slower" if b.mean_s > a.mean_s else "faster"
        reasons.append(f"{pace} kernels ({_micros(a.mean_s)} → {_micros(b.mean_s)})")
    hidden_a, hidden_b = a.kernels_s - a.exclusive_s, b.kernels_s - b.exclusive_s
    against = (b.kernels_s - a.kernels_s) * (b.exclusive_s - a.exclusive_s) < 0
    if (against or not reasons) and abs(hidden_b - hidden_a) > 0.5 * abs(b.exclusive_s - a.exclusive_s) > 0:
        reasons.append("less overlapped" if hidden_b < hidden_a else "more overlapped")
    return ", ".join(reasons) or "the same kernels"


def _micros(seconds: float) -> str:
    value = seconds * 1e6
    return f"{value:,.0f} µs" if value >= 100 else f"{value:.3g} µs"


def _short(name: str) -> str:
    plain = re.sub(r"<.*|\(.*", "", name.replace("(anonymous namespace)::", "").removeprefix("void ")).split("::")[-1]
    return plain if len(plain) <= 40 else plain[:39] + "…"


def _idle_changes(a: Side, b: Side) -> list[Change]:
    """Idle time by cause; what the causes leave open is so named, so that everything adds up."""
    idle_a, idle_b = _idle_by_cause(a), _idle_by_cause(b)
    return [_idle_change(cause, idle_a.get(cause, 0.0), idle_b.get(cause, 0.0)) for cause in {**idle_a, **idle_b}]


def _idle_change(cause: str, a_s: float, b_s: float) -> Change:
    why = "the device waits longer" if b_s > a_s else "the device waits less"
    return Change(f"idle: {cause}", "idle", a_s * 1e3, b_s * 1e3, (b_s - a_s) * 1e3, 0, 0, why)


def _idle_by_cause(side: Side) -> dict[str, float]:
    total_s = side.window.step_s - float(side.exclusive_s.sum()) * side.per_step
    known = {cause: seconds for cause, seconds in side.idle_s.items() if seconds > 0}
    named = sum(known.values())
    if named > total_s > 0:
        known = {cause: seconds * total_s / named for cause, seconds in known.items()}
    rest = total_s - sum(known.values())
    return known | ({"not attributed": rest} if abs(rest) > 1e-9 else {})
