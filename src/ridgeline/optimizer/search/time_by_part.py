"""Time of a call by part of the model, before and after, and what separates each part from its floor."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from ridgeline.optimizer.compile.module_labels import labeled
from ridgeline.optimizer.receipt import Part
from ridgeline.optimizer.search.blocks import ATTENTION, CONVOLUTIONS, PRODUCTS, groups, kind_of
from ridgeline.optimizer.search.candidate import Built, Unmasked
from ridgeline.optimizer.search.timing import Track
from ridgeline.profiler.marks import modules_marked
from ridgeline.trace import Kind, Trace
from ridgeline.units import show_seconds

OUTSIDE = "outside of modules"
IDLE = "no kernel running"
LEAST_SEEN_FRAC = 0.5
"""Profiles that cover less of a call than this are dropped: compiled host code is invisible to them."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")

Times = dict[tuple[str, str], float]
"""Seconds by part and kind of kernel."""


@dataclass(frozen=True, slots=True)
class Partition:
    """The parts a model is split into: children of blocks that repeat, and whole modules elsewhere."""
    """The parts of a model: children of repeated blocks, and whole modules elsewhere."""
    names: tuple[str, ...]
    blocks: tuple[str, ...] = ()  # paths of repeated blocks, their numbers as stars
    num_alike: Mapping[str, int] = field(default_factory=dict)

    def of(self, path: str) -> str:
        """The part that a module belongs to; for a block's own code and for the root, the path itself."""
        found = self.starred(path)
        while found and found not in self.names:
            found = found.rpartition(".")[0]
        return found or OUTSIDE

    def starred(self, path: str) -> str:
        """A path with a block's number as a star, as in the names of parts."""
        for block in self.blocks:
            head, _, _ = block.rpartition("*")
            rest = path.removeprefix(head)
            if path.startswith(head) and _NUMBER.match(rest) is not None:
                return block + rest[len(_NUMBER.match(rest).group()) :]  # type: ignore[union-attr]
        return path

    def inside(self, scope: str) -> list[str]:
        """The parts within a scope, or all parts for what belongs to none."""
        found = [name for name in self.names if name == scope or name.startswith(f"{scope}.")]
        return found if scope != OUTSIDE and found else [*self.names, OUTSIDE]

    def shown(self, name: str) -> str:
        num = next((num for block, num in self.num_alike.items() if name == block or name.startswith(f"{block}.")), 0)
        return f"{name} ×{num}" if num else name


def partition(model: nn.Module) -> Partition:
    """Split repeated blocks by their children, everything else by the largest modules without such blocks."""
    alike = {f"{group.paths[0].rpartition('.')[0]}.*".lstrip("."): group for group in groups(model)}
    held = {path for group in alike.values() for path in group.paths}
    names: list[str] = []
    for block, group in alike.items():
        names += [block, *(f"{block}.{name}" for name, _ in group.blocks[0].named_children())]
    _outer(model, "", held, names)
    return Partition(tuple(dict.fromkeys(names)), tuple(alike), {b: len(g.blocks) for b, g in alike.items()})


def _outer(module: nn.Module, path: str, blocks: set[str], names: list[str]) -> None:
    children = [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]
    for name, child in children:
        if name in blocks:
            continue
        holds = any(block.startswith(f"{name}.") for block in blocks)
        only = len(children) == 1 and any(True for _ in child.children())
        if holds or only:
            _outer(child, name, blocks, names)
        else:
            names.append(name)


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of one profiled call by module path and kind of kernel."""

    spent: tuple[tuple[str, str, float], ...]

    @property
    def busy_s(self) -> float:
        return sum(seconds for _, _, seconds in self.spent)

    def within(self, wall_s: float) -> Spent:
        """The same, scaled down if it exceeds the wall time: profiling slows the host, and streams overlap."""
        scale = min(1.0, wall_s / self.busy_s) if self.busy_s else 1.0
        return Spent(tuple((path, kind, scale * seconds) for path, kind, seconds in self.spent))


def recorded(track: Track, built: Built) -> Spent:
    """Profile one call: the code itself, because replays of a CUDA graph carry no module names."""
    from ridgeline.profiler.recorder import Run, Wanted

    compiles = built.candidate.compiles
    call = _uncaptured(built, track.model)
    folder = Path(tempfile.mkdtemp(prefix="ridgeline-parts-"))
    wanted = Wanted(steps=1, shapes=False, power=False, modules=not compiles)
    try:
        with labeled() if compiles else nullcontext(), _around_blocks(built, track.model):
            track.turn_s(call, 1)  # the first call may initialize lazily
            run = Run(folder / "trace.json", track.model, wanted)  # hooks are shared with clones
            track.once(call, run)
            return _spent(run.trace)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _around_blocks(built: Built, model: nn.Module) -> AbstractContextManager[Any]:
    """Label eager modules around blocks that are compiled alone."""
    if not built.candidate.compiles or built.candidate.scope != "blocks":
        return nullcontext()
    inside = [path for group in groups(model) for path in group.paths]
    root = type(model).__name__
    return modules_marked([model], lambda path: path != root and not any(
        path == block or path.startswith(f"{block}.") for block in inside))  # fmt: skip


def _uncaptured(built: Built, model: nn.Module) -> Callable[..., Any]:
    """The call that was captured, behind the same check of masks."""
    inner = model if built.inner is None else built.inner
    if not isinstance(built.call, Unmasked):
        return inner
    before = copy(built.call)
    before.call = inner
    return before


def _spent(trace: Trace) -> Spent:
    """Device time by the module of its launch; without a device, the self time of ops on the host."""
    if trace.gpu.any():
        rows, seconds = np.flatnonzero(trace.gpu), trace.duration_s
    else:
        named = np.fromiter(("::" in word for word in trace.words), dtype=np.bool_, count=len(trace.words))
        ops = trace.of_kind(Kind.OP) & named[trace.name]  # without the tracer's own annotations
        rows, seconds = np.flatnonzero(ops), _own_s(trace, ops)
    return Spent(tuple((trace.text("module", i), kind_of(trace.text("name", i)), float(seconds[i])) for i in rows))


def _own_s(trace: Trace, ops: Any) -> Any:
    """Self time: durations less those of ops directly inside."""
    own = np.where(ops, trace.duration_s, 0.0)
    for i in np.flatnonzero(ops & (trace.parent >= 0)):
        at = int(trace.parent[i])
        while at >= 0 and not ops[at]:
            at = int(trace.parent[at])
        if at >= 0:
            own[at] -= trace.duration_s[i]
    return np.maximum(own, 0.0)


def split(run: Spent, parts: Partition, root: str) -> Times:
    """Seconds by part and kind, of a run in which every module is labeled."""
    found: Times = {}
    for path, kind, seconds in run.spent:
        key = (OUTSIDE if path in ("", root) else parts.of(path), kind)
        found[key] = found.get(key, 0.0) + seconds
    return found


def shared(run: Spent, parts: Partition, root: str, before: Times) -> tuple[Times, dict[str, float]]:
    """Seconds by part and kind of a run whose kernels may span parts, and those labeled with a single part.

    A kernel labeled with a block or with the model alone is divided among the parts in proportion to eager's kernels of
    its kind, or of all kinds if eager had none of that kind.
    """
    found: Times = {}
    sure: dict[str, float] = {}
    for path, kind, seconds in run.spent:
        scope = OUTSIDE if path in ("", root) else parts.of(path)
        inside = parts.inside(scope)
        if len(inside) == 1:
            sure[inside[0]] = sure.get(inside[0], 0.0) + seconds
        for part, frac in _shares(before, inside, kind).items():
            found[part, kind] = found.get((part, kind), 0.0) + frac * seconds
    return found, sure


def _shares(before: Times, inside: list[str], kind: str) -> dict[str, float]:
    if len(inside) == 1:
        return {inside[0]: 1.0}
    weights = {part: before.get((part, kind), 0.0) for part in inside}
    if not any(weights.values()):
        weights = {part: sum(s for (each, _), s in before.items() if each == part) for part in inside}
    total = sum(weights.values())
    return {part: weight / total for part, weight in weights.items() if weight} if total else {inside[0]: 1.0}


def parts_of(track: Track, eager: Built, final: Built, walls_s: tuple[float, float],
             floors: Iterable[tuple[str, str, float]] | None) -> tuple[Part, ...]:  # fmt: skip
    """The table: time in eager and in the result by part, the floor, and how to reduce the rest.

    ``walls_s`` are seconds per call of eager and the result; time without a kernel has a row of its own.
    """
    model = track.model
    found, root = partition(model), type(model).__name__
    first = recorded(track, eager)
    if first.busy_s < LEAST_SEEN_FRAC * walls_s[0] and track.device.type != "cuda":
        return ()
    before = split(first.within(walls_s[0]), found, root)
    light = _floors(floors, found)
    after, sure = before, _totals(before)
    if final is not eager:
        last = recorded(track, final).within(walls_s[1])
        seen = track.device.type == "cuda" or last.busy_s >= LEAST_SEEN_FRAC * walls_s[1]
        if not seen:
            after, sure = {}, {}
        elif final.candidate.compiler != "none":  # compiled kernels span modules
            after, sure = shared(last, found, root, before)
        else:
            after = split(last, found, root)
            sure = _totals(after)
    rows = _rows(found, before, after, light, sure)
    idle = _idle(walls_s, sum(before.values()), sum(after.values()), final.candidate.graphed) if after else None
    return (*rows, *([idle] if idle else []))


def _rows(parts: Partition, before: Times, after: Times, light: Times | None, sure: Mapping[str, float]) -> list[Part]:
    totals, ends = _totals(before), _totals(after)
    floors = _totals(light) if light is not None else {}
    order = sorted({*totals, *ends}, key=lambda part: -max(totals.get(part, 0.0), ends.get(part, 0.0)))
    rows, least_s = [], 0.01 * sum(ends.values())  # smaller gaps need no advice
    for part in order[:16]:
        final_s = ends.get(part, 0.0) if after else None
        by_kind = {kind: s for (each, kind), s in after.items() if each == part}
        its_light = {kind: s for (each, kind), s in (light or {}).items() if each == part}
        floor_s = floors.get(part, 0.0) if light is not None else None
        basis = "" if final_s is None else "measured" if sure.get(part, 0.0) >= 0.9 * final_s else "shared out"
        worth = final_s is not None and final_s - (floor_s or 0.0) >= least_s
        rows.append(Part(name=parts.shown(part), eager_s=totals.get(part, 0.0), final_s=final_s, floor_s=floor_s,
                         basis=basis, fix=fix_of(by_kind, its_light, floor_s) if worth else ""))  # fmt: skip
    if smaller := order[16:]:
        sums = [sum(each.get(name, 0.0) for name in smaller) for each in (totals, ends, floors)]
        rows.append(Part(name=f"{len(smaller)} smaller parts", eager_s=sums[0], final_s=sums[1] if after else None,
                         floor_s=None if light is None else sums[2], basis="measured" if after else "",
                         fix=""))  # fmt: skip
    return rows


def _totals(times: Times | None) -> dict[str, float]:
    found: dict[str, float] = {}
    for (part, _), seconds in (times or {}).items():
        found[part] = found.get(part, 0.0) + seconds
    return found


def _floors(rows: Iterable[tuple[str, str, float]] | None, parts: Partition) -> Times | None:
    """The cost model's floors by part and kind; None if the model was not priced."""
    if rows is None:
        return None
    found: Times = {}
    for module, kind, seconds in rows:
        key = (parts.of(module), kind)
        found[key] = found.get(key, 0.0) + seconds
    return found


def _idle(walls_s: tuple[float, float], eager_busy_s: float, final_busy_s: float, graphed: bool) -> Part | None:
    before, after = (max(0.0, wall - busy) for wall, busy in zip(walls_s, (eager_busy_s, final_busy_s), strict=True))
    if max(before / walls_s[0], after / walls_s[1]) < 0.01:
        return None
    word = "fewer and larger kernels: each starts and ends with idle units" if graphed else (
        "one recorded graph, or fewer and larger kernels: the host cannot launch them faster")  # fmt: skip
    return Part(name=IDLE, eager_s=before, final_s=after, floor_s=0.0, basis="measured",
                fix=word if after > 0.02 * walls_s[1] else "")  # fmt: skip


FIXES = {
    PRODUCTS: "larger or tuned GEMMs (more rows a call), or fewer bits within an error_budget",
    ATTENTION: "a faster attention kernel, or a mask that it can skip blocks by",
    CONVOLUTIONS: "convolutions by another algorithm or layout, or fewer bits within an error_budget",
    "norms": "the norm fused into the GEMM before or after it",
    "copies": "layouts that need no copies",
    "softmax and losses": "the softmax fused into its GEMM",
    "embeddings": "rows gathered once, in the order of their use",
    "optimizer": "one fused optimizer step",
}


def fix_of(spent: Mapping[str, float], light: Mapping[str, float], floor_s: float | None) -> str:
    """How to reduce the time of a part, by the kind of kernel that is farthest above its own floor."""
    total_s = sum(spent.values())
    if floor_s is None or not spent or total_s <= 1.1 * floor_s:
        return ""
    heavy = (PRODUCTS, ATTENTION, CONVOLUTIONS)
        # Elementwise kernels have no floor of their own: they share the part's floor beyond that of the heavy kernels.
    rest_s = sum(light.values()) - sum(light.get(kind, 0.0) for kind in heavy)
    passes = {kind: s for kind, s in spent.items() if kind not in heavy}
    share = rest_s / sum(passes.values()) if passes and sum(passes.values()) else 0.0
    excess = {kind: s - (light.get(kind, 0.0) if kind in heavy else s * share) for kind, s in spent.items()}
    kind = max(excess, key=lambda each: excess[each])
    if kind in heavy and light.get(kind, 0.0) == 0.0 and light.get(ATTENTION, 0.0) > 0.0:
        return f"{kind} {show_seconds(spent[kind])}: an attention kernel in place of GEMMs and softmax"
    advice = FIXES.get(kind, "its elementwise kernels fused into the GEMMs around them")
    return f"{kind} {show_seconds(excess[kind])} above their floor: {advice}"
