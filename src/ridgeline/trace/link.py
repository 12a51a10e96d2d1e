"""Links between spans: kernel to launch, launch to op, op to module, source line, phase and step."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ridgeline.trace.columns import Words
from ridgeline.trace.dialect import STEP_NAME, library_tier, module_part, source_of
from ridgeline.trace.intervals import Nanos
from ridgeline.trace.kind import Kind
from ridgeline.trace.nesting import Stacks, stacks_of

Ids = NDArray[np.int32]
_OPTIMIZER = re.compile(r"^Optimizer\.(?:step|zero_grad)#|^(?:## )?optimizer(?:_step| ##)?$", re.IGNORECASE)
_BACKWARD = re.compile(
    r"^autograd::engine::evaluate_function|^(?:## )?(?:loss\.)?backward(?: ##)?$|Backward\d*$|CompiledFunctionBackward"
    r"|torch/_tensor\.py\(\d+\): backward|torch/autograd/__init__\.py\(\d+\): backward",
    re.IGNORECASE,
)
_HIERARCHY = re.compile(r"(\w+)\([^()]*\)")


@dataclass(slots=True)
class Rows:
    """What linking needs of each span, and what it fills in."""

    words: Words
    start: Nanos
    end: Nanos
    kind: NDArray[np.int8]
    name: Ids
    thread: Ids
    device: Ids
    stream: Ids
    correlation: NDArray[np.int64]
    external: NDArray[np.int64]
    sequence: NDArray[np.int64]
    forward_thread: NDArray[np.int64]
    module: Ids
    op: Ids
    phase: Ids
    source: Ids
    step: Ids
    launch: Ids
    clock_ns: int


def link(rows: Rows, *, filled: bool = False) -> Stacks:
    """Fills launch, op, module, source, phase and step (launches alone where the rest is); returns the call stacks."""
    stacks = stacks_of(rows.start, rows.end, rows.kind, rows.thread, rows.clock_ns if rows.clock_ns > 1 else 0)
    rows.launch = np.where(rows.launch >= 0, rows.launch, launches(rows))
    if filled:
        return stacks
    # Numbers of the names that host spans have: words are classified once, not spans
    seen = np.unique(rows.name[(rows.thread >= 0) & (rows.kind != Kind.RUNTIME)])
    own = np.where((rows.kind == Kind.OP) & (rows.op == 0), rows.name, rows.op).astype(np.int32)
    rows.op = stacks.inherit(own)
    parts: dict[int, tuple[str, bool]] = {}
    for number, text in zip(seen.tolist(), rows.words.texts(seen), strict=True):
        part = module_part(text)
        if part[0]:
            parts[number] = part
    if parts:
        _join_paths(rows, stacks, parts)
    rows.module = stacks.inherit(rows.module)
    _backward_modules(rows, stacks)
    _sources(rows, stacks, seen)
    _phases(rows, stacks, seen)
    # A device span has the op, module, line and phase of its launch; without one, of the op with its external id
    caller = rows.launch.copy()
    lost = np.flatnonzero((rows.device >= 0) & (caller < 0) & (rows.external > 0))
    ops = np.flatnonzero((rows.kind == Kind.OP) & (rows.external > 0))
    apart = rows.external[lost] != rows.correlation[lost]  # some dialects repeat the correlation there
    lost = lost[apart]
    if len(lost) and len(ops):
        ops = ops[np.argsort(rows.external[ops], kind="stable")]
        at = np.minimum(np.searchsorted(rows.external[ops], rows.external[lost]), len(ops) - 1)
        hit = rows.external[ops[at]] == rows.external[lost]
        caller[lost[hit]] = ops[at[hit]]
    has = caller >= 0
    for column in (rows.op, rows.module, rows.source, rows.phase):
        take = has & (column == 0)
        column[take] = column[caller[take]]
    _steps(rows)
    return stacks


def launches(rows: Rows) -> Ids:
    """The host call of each device span, by correlation; a graph launch has many."""
    on_device = rows.device >= 0
    calls = np.flatnonzero(~on_device & (rows.correlation >= 0) & (rows.kind != Kind.ANNOTATION))
    calls = calls[np.argsort(rows.correlation[calls], kind="stable")]
    wanted = np.flatnonzero(on_device & (rows.correlation >= 0))
    found = np.full(len(rows.start), -1, dtype=np.int32)
    if not len(calls):
        return found
    keys = rows.correlation[calls]
    at = np.minimum(np.searchsorted(keys, rows.correlation[wanted]), len(calls) - 1)
    hit = keys[at] == rows.correlation[wanted]
    found[wanted[hit]] = calls[at[hit]]
    return found


def _join_paths(rows: Rows, stacks: Stacks, parts: Mapping[int, tuple[str, bool]]) -> None:
    """Frames that enter a module, from the outside in: each adds its part to the path around it."""
    enters = np.isin(rows.name, list(parts)) & (rows.thread >= 0)
    around = np.zeros(len(rows.start), dtype=np.int32)
    texts: dict[int, str] = {0: ""}
    for level in stacks.levels:
        above = stacks.parent[level]
        around[level] = np.where(above >= 0, around[np.maximum(above, 0)], 0)
        for row in level[enters[level]].tolist():
            part, is_whole = parts[int(rows.name[row])]
            outer = texts[int(around[row])]
            path = part if is_whole or not outer else f"{outer}.{part}"
            number = rows.words[path]
            texts[number] = path
            around[row] = number
            rows.module[row] = number


def _backward_modules(rows: Rows, stacks: Stacks) -> None:
    """A backward op has the module and line of the forward op whose sequence number it carries."""
    numbered = (rows.sequence >= 0) & (rows.kind == Kind.OP)
    forward = np.flatnonzero(numbered & (rows.forward_thread <= 0) & (rows.module > 0))
    backward = np.flatnonzero(numbered & (rows.forward_thread > 0) & (rows.module == 0))
    if not len(forward) or not len(backward):
        return
    forward = forward[np.lexsort((rows.start[forward], rows.sequence[forward]))]
    keys = rows.sequence[forward]
    at = np.searchsorted(keys, rows.sequence[backward], side="right") - 1
    hit = (at >= 0) & (keys[np.maximum(at, 0)] == rows.sequence[backward])
    rows.module[backward[hit]] = rows.module[forward[at[hit]]]
    rows.module = stacks.inherit(rows.module)


def _sources(rows: Rows, stacks: Stacks, seen: NDArray[np.intp]) -> None:
    """The nearest line of the user's own code, then of a library, then of the framework."""
    python = rows.kind == Kind.PYTHON
    if not python.any():
        rows.source = stacks.inherit(rows.source)
        return
    frames = np.unique(rows.name[python])
    places = [source_of(text) for text in rows.words.texts(frames)]
    found = rows.source
    for tier in range(3):
        table = np.zeros(len(rows.words) + len(places), dtype=np.int32)
        for number, place in zip(frames.tolist(), places, strict=True):
            if place and library_tier(place) == tier:
                table[number] = rows.words[place]
        own = np.where(python, table[rows.name], 0).astype(np.int32)
        inherited = stacks.inherit(own)
        found = np.where(found > 0, found, inherited).astype(np.int32)
    rows.source = found


def _phases(rows: Rows, stacks: Stacks, seen: NDArray[np.intp]) -> None:
    ids = {phase: rows.words[phase] for phase in ("forward", "backward", "optimizer", "dataloader")}

    def phase_of(name: str) -> int:
        if _OPTIMIZER.search(name):
            return ids["optimizer"]
        return ids["backward"] if _BACKWARD.search(name) else 0

    # A number for each span from its name; 0 for names that were not asked about
    texts = rows.words.texts(seen)
    answers = {int(i): phase_of(text) for i, text in zip(seen, texts, strict=True)}
    table = np.zeros(len(rows.words), dtype=np.int32)
    table[list(answers)] = list(answers.values())
    own = np.where(rows.thread >= 0, table[rows.name], 0).astype(np.int32)
    own[rows.kind == Kind.DATALOADER] = ids["dataloader"]
    own[(rows.sequence >= 0) & (rows.forward_thread > 0)] = ids["backward"]
    inherited = stacks.inherit(np.where(rows.phase > 0, rows.phase, own).astype(np.int32))
    computes = (rows.op > 0) & (rows.thread >= 0) & (inherited == 0)
    rows.phase = np.where(computes, ids["forward"], inherited).astype(np.int32)


def _steps(rows: Rows) -> None:
    """Host spans belong to the step that is running when they start, device spans to that of their launch."""
    marks = np.flatnonzero((rows.kind == Kind.STEP) & (rows.device < 0))
    if not len(marks):  # a trace of the device alone has them there
        ranges = np.flatnonzero((rows.kind == Kind.ANNOTATION) & (rows.device >= 0))
        texts = rows.words.texts(rows.name[ranges])
        marks = ranges[[i for i, text in enumerate(texts) if STEP_NAME.match(text)]]
    if not len(marks):
        return
    marks = marks[np.argsort(rows.start[marks], kind="stable")]
    numbers = np.array([_step_number(text, i) for i, text in enumerate(rows.words.texts(rows.name[marks]))], np.int32)
    at = np.searchsorted(rows.start[marks], rows.start, side="right") - 1
    inside = (at >= 0) & (rows.start < np.maximum(rows.end[marks], rows.start[marks] + 1)[np.maximum(at, 0)])
    by_time = np.where(inside, numbers[np.maximum(at, 0)], -1)
    linked = rows.launch >= 0
    found = np.where(linked, by_time[np.maximum(rows.launch, 0)], by_time)
    rows.step = np.where(rows.step >= 0, rows.step, found).astype(np.int32)


def _step_number(name: str, position: int) -> int:
    found = STEP_NAME.search(name)
    return min(int(found.group(1)), 2**31 - 1) if found else position


def module_path(hierarchy: str) -> str:
    """``TOP(Net)::forward.layer1(Block)::forward`` as ``layer1``: the names, without classes and methods."""
    names = [name for name in _HIERARCHY.findall(hierarchy) if name not in ("TOP", "SELF")]
    return ".".join(names)


def user_line(stack: str) -> str:
    """The first line of the user's own in a recorded call stack, innermost frame first."""
    places = [place for place in map(source_of, re.split(r"[;\n]", stack)) if place]
    tiers: Sequence[list[str]] = [[p for p in places if library_tier(p) == tier] for tier in range(3)]
    return next((found[0] for found in tiers if found), "")
