"""Calls that wait for the device, and what they wait for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ridgeline.findings.context.context import TraceContext, derived
from ridgeline.findings.context.kernels import copy_word
from ridgeline.findings.replay.replay import Mask
from ridgeline.trace.kind import Kind


@dataclass(frozen=True, slots=True)
class Wait:
    """A call that waited: its place in the program, its span, the names around it from inside out, and its copy, if
    any."""

    call: int
    row: int
    names: tuple[str, ...]
    copy: str
    source: str
    num_bytes: int


@derived
def host_waits(context: TraceContext) -> tuple[Wait, ...]:
    """Calls that held their thread until the device was done, with what they were part of."""
    calls = np.flatnonzero((context.program.waits_for >= 0) & (context.wiring.call_rows >= 0))
    # The copy made under each host span that makes one directly.
    copies = {parent: copy_word(context, works[-1]) for parent, works in _copies_under(context).items()}
    return tuple(_wait(context, call, copies) for call in calls.tolist())


def _wait(context: TraceContext, call: int, copies: dict[int, str]) -> Wait:
    row = int(context.wiring.call_rows[call])
    path = context.trace.path(row)
    own = context.program.waits_for[call]
    copy = copy_word(context, int(own)) if context.program.call[own] == call else ""
    copy = copy or copies.get(int(context.trace.parent[row]), "") if context.trace.parent[row] >= 0 else copy
    names = tuple(context.trace.words[int(context.trace.name[at])] for at in path)
    source = next((context.trace.words[int(context.trace.source[at])] for at in path if context.trace.source[at]), "")
    return Wait(
        call,
        row,
        names,
        copy,
        source,
        _copied_bytes(context, row, int(own) if context.program.call[own] == call else -1),
    )


def _copied_bytes(context: TraceContext, row: int, own: int) -> int:
    """Bytes of the copy that a call waited for: its own, or the one made under the same op; 0 if unknown."""
    moved = context.trace.optional("bytes")
    if own >= 0:
        return max(0, int(moved[context.rows[own]]))
    works = _copies_under(context).get(int(context.trace.parent[row]), ())
    return max((int(moved[context.rows[work]]) for work in works), default=0)


def copies_of(context: TraceContext, wait: Wait) -> Sequence[int]:
    """The copies made under the op that a wait belongs to."""
    return (
        _copies_under(context).get(int(context.trace.parent[wait.row]), ())
        if context.trace.parent[wait.row] >= 0
        else ()
    )


@derived
def _copies_under(context: TraceContext) -> dict[int, list[int]]:
    found = dict[int, list[int]]()
    for work in np.flatnonzero(context.work_kind == int(Kind.MEMCPY)).tolist():
        launch = int(context.trace.launch[context.rows[work]])
        if launch >= 0 and context.trace.parent[launch] >= 0:
            found.setdefault(int(context.trace.parent[launch]), []).append(work)
    return found


def next_launch(context: TraceContext, call: int) -> int | None:
    """The next call of the same chain that launches or waits for something."""
    for _ in range(4):
        followers = _followers(context).get(call)
        if not followers:
            return None
        call = followers[0]
        if context.wiring.call_rows[call] < 0 and call == context.program.num_calls - 1:
            return None  # the end of the window
        if float(context.wiring.program.gap_s[call]) > 100e-6 or _launches(context)[call]:
            return call
    return call


def launches_between(context: TraceContext, first: int, last: int, but: Sequence[int] = ()) -> bool:
    """Whether kernels are launched between two calls, beside some that do not count."""
    low, high = np.searchsorted(context.program.call, (first + 1, last)).tolist()
    counted = int((context.work_kind[low:high] == int(Kind.KERNEL)).sum())
    aside = {work for work in but if low <= work < high and context.work_kind[work] == int(Kind.KERNEL)}
    return counted > len(aside)


@derived
def _followers(context: TraceContext) -> dict[int, list[int]]:
    found = dict[int, list[int]]()
    for call, after in enumerate(context.program.after.tolist()):
        found.setdefault(after, []).append(call)
    return found


@derived
def _launches(context: TraceContext) -> Mask:
    launches = np.zeros(context.program.num_calls, dtype=bool)
    launches[context.program.call] = True
    return launches
