"""Calls between profiles where there is no program for every size: padded to the next one, if rows are independent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ridgeline.engine.file.program import Program
from ridgeline.engine.file.proof import flat

if TYPE_CHECKING:
    from ridgeline.engine.file.engine import Engine


def rows_are_independent(engine: Engine, program: Program, inputs: Sequence[Tensor], batched: Sequence[int]) -> bool:
    """Whether the first rows' results keep their bits when the last row is another; all outputs have the rows."""
    size = inputs[batched[0]].shape[0]
    if size < 2:
        return False
    others = [torch.cat((x[:-1], x[:1])) if i in batched else x for i, x in enumerate(inputs)]
    ours, theirs = flat(engine.on_inputs(inputs)), flat(engine.on_inputs(others))
    with_rows = all(x.dim() and x.shape[0] == size for x in ours)
    return with_rows and all(torch.equal(a[:-1], b[:-1]) for a, b in zip(ours, theirs, strict=True))


def padded(engine: Engine, shapes: Sequence[tuple[int, ...]]) -> Callable[..., Any] | None:
    """A call of the smallest profile that has room for these rows; None if none has."""
    batched = engine.contents.padding.get("inputs")
    programs = engine.contents.programs
    if (
        not isinstance(batched, list)
        or not batched
        or not all(type(i) is int and 0 <= i < len(shapes) for i in batched)
    ):
        return None
    num = shapes[batched[0]][0] if shapes[batched[0]] else 0
    best: tuple[int, int] | None = None
    for index, program in enumerate(programs):
        wants = [given.shape for given in program.inputs]
        size = wants[batched[0]][0] if wants[batched[0]] else 0
        if program.issued or not isinstance(size, int) or size <= num:
            continue
        meant = [(size, *shape[1:]) if i in batched else shape for i, shape in enumerate(shapes)]
        if meant == wants and (best is None or size < best[0]):
            best = (size, index)
    if best is None or num < 1:
        return None
    size, index = best
    meant = [(size, *shape[1:]) if i in batched else shape for i, shape in enumerate(shapes)]
    call = engine.compiled_for(index, meant)
    engine.note(f"{num} rows of {engine.name} run as {size}: the profile is filled with copies of the last row")

    def run(*inputs: Tensor) -> Any:
        given = [
            torch.cat((x, x[-1:].expand(size - num, *x.shape[1:]))) if i in batched else x for i, x in enumerate(inputs)
        ]
        return _cut(call(*given), num)

    return run


def _cut(found: Any, num: int) -> Any:
    if isinstance(found, Tensor):
        return found[:num]
    if isinstance(found, dict):
        return type(found)({name: _cut(each, num) for name, each in found.items()})
    return type(found)(_cut(each, num) for each in found) if isinstance(found, (list, tuple)) else found
