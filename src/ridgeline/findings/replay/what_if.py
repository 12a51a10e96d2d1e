"""What if: a run scheduled again with kernels faster, copies overlapped, links wider, workers added, a cause
removed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ridgeline.errors import FindingError, nearest
from ridgeline.findings.context.context import TraceContext
from ridgeline.findings.context.gains import edit_for, step_after_s, touched_by_s, unchanged
from ridgeline.findings.context.host_time import launching_time
from ridgeline.findings.context.kernels import copies_of_memory
from ridgeline.findings.replay.fix import Fix
from ridgeline.findings.rule import rules
from ridgeline.trace.kind import Kind

_SPEED = re.compile(r"^(.*?)[:=]?\s*(\d+(?:\.\d+)?)\s*[x×]$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A step before and after a change, scheduled again."""

    change: str
    before_ms: float
    after_ms: float
    touched_ms: float  # device or host time that the change was applied to

    @property
    def saved_ms(self) -> float:
        return self.before_ms - self.after_ms

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "saved_ms": self.saved_ms}


def what_if(context: TraceContext, changes: Sequence[str]) -> list[WhatIf]:
    """Each change alone, then all of them together.

    ``kernel=REGEX:2x``, ``op=REGEX:2x`` and ``module=REGEX:2x`` make work faster, ``link=2x`` communication,
    ``pcie=2x`` copies over the host link, ``host=2x`` launching; ``overlap=communication`` or ``overlap=copies`` moves
    them beside the rest; ``workers=4`` divides the data loader's time; ``remove=RULE`` applies what a rule would
    change, at its best.
    """
    fixes = [(change, _fix(context, change)) for change in changes]
    found = [_tried(context, change, [fix]) for change, fix in fixes]
    if len(fixes) > 1:
        found.append(_tried(context, "all of these", [fix for _, fix in fixes]))
    return found


def _tried(context: TraceContext, change: str, fixes: Sequence[Fix]) -> WhatIf:
    edit = unchanged(context)
    for fix in fixes:
        edit = edit | edit_for(context, fix, best=True)
    touched_s = sum(touched_by_s(context, fix) for fix in fixes)
    return WhatIf(change, context.step_s * 1e3, step_after_s(context, edit) * 1e3, touched_s * 1e3)


def _fix(context: TraceContext, change: str) -> Fix:
    name, equals, value = change.partition("=")
    make = _CHANGES.get(name.strip())
    if make is not None and not equals:
        raise FindingError(f"the change {change!r} does not say how much: write {_EXAMPLES[name.strip()]}")
    if make is None:
        raise FindingError(
            f"cannot read the change {change!r}{nearest(name.strip(), _CHANGES)} as kernel=gemm:2x or workers=4"
        )
    return make(context, value.strip())


def _faster(column: str) -> Callable[[TraceContext, str], Fix]:
    def make(context: TraceContext, value: str) -> Fix:
        pattern, times = _speed(value)
        try:
            works = np.flatnonzero(context.named(pattern or ".", column))
        except re.error as error:
            raise FindingError(
                f"{pattern!r} is no pattern: {error}; write a regular expression, as gemm or flash.*fwd"
            ) from error
        if not len(works):
            raise FindingError(f"no {column} matches {pattern!r}: `ridgeline explain --json` lists what ran")
        return Fix(works=works, keep_best=1.0 / times, keep_worst=1.0 / times)

    return make


def _speed(value: str) -> tuple[str, float]:
    match = _SPEED.match(value)
    if not match or float(match.group(2)) <= 0:
        raise FindingError(f"cannot read {value!r} as a speed-up: write 2x, or PATTERN:2x")
    return match.group(1).rstrip(":= "), float(match.group(2))


def _of_kind(*kinds: Kind) -> Callable[[TraceContext, str], Fix]:
    def make(context: TraceContext, value: str) -> Fix:
        _, times = _speed(value)
        works = np.flatnonzero(np.isin(context.work_kind, [int(kind) for kind in kinds]))
        return Fix(works=works, keep_best=1.0 / times, keep_worst=1.0 / times)

    return make


def _pcie(context: TraceContext, value: str) -> Fix:
    _, times = _speed(value)
    works = np.flatnonzero(copies_of_memory(context, "htod") | copies_of_memory(context, "dtoh"))
    return Fix(works=works, keep_best=1.0 / times, keep_worst=1.0 / times)


def _overlap(context: TraceContext, value: str) -> Fix:
    kinds = {"communication": Kind.COMMUNICATION, "copies": Kind.MEMCPY}
    if value not in kinds:
        raise FindingError(f"cannot overlap {value!r}{nearest(value, kinds)}")
    works = np.flatnonzero(context.work_kind == int(kinds[value]))
    chosen = np.zeros(context.program.num_works + 1, dtype=bool)
    chosen[works] = True
    calls = np.flatnonzero(chosen[context.program.waits_for] & (context.program.waits_for >= 0))
    return Fix(aside=works, freed=calls)


def _workers(context: TraceContext, value: str) -> Fix:
    if not value.isdigit() or int(value) < 1:
        raise FindingError(f"workers={value!r} is no count: write workers=4")
    return Fix(
        host=context.time_of(context.of_kind(Kind.DATALOADER)), host_best=1.0 / int(value), host_worst=1.0 / int(value)
    )


def _host(context: TraceContext, value: str) -> Fix:
    _, times = _speed(value)
    return Fix(host=launching_time(context), host_best=1.0 / times, host_worst=1.0 / times)


def _remove(context: TraceContext, value: str) -> Fix:
    known = {rule.name: rule for rule in rules()}
    if value not in known:
        raise FindingError(f"no rule {value!r}{nearest(value, known)}")
    candidate = known[value].detect(context)
    if candidate is None:
        raise FindingError(f"{value} is not found in this trace: there is nothing to remove")
    return candidate.fix


_EXAMPLES = {"overlap": "overlap=copies", "workers": "workers=4", "remove": "remove=RULE"} | {
    name: f"{name}=2x" for name in ("link", "pcie", "host")
} | {name: f"{name}=PATTERN:2x" for name in ("kernel", "op", "module")}  # fmt: skip
_CHANGES: Mapping[str, Callable[[TraceContext, str], Fix]] = {
    "kernel": _faster("name"),
    "op": _faster("op"),
    "module": _faster("module"),
    "link": _of_kind(Kind.COMMUNICATION),
    "pcie": _pcie,
    "overlap": _overlap,
    "workers": _workers,
    "host": _host,
    "remove": _remove,
}
