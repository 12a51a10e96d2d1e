"""One program for every size of a dim, from programs that were exported at three of them.

Imported models compute shapes on the host, and what the exporter sees of them are numbers. Where the programs differ in
numbers alone, and those grow with the size in a straight line, the numbers become arithmetic on the size.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ridgeline.engine.file.export import pruned
from ridgeline.engine.file.program import Input, Program, Step


class Unlike(Exception):
    """The programs differ in more than sizes."""


def generalized(
    programs: Sequence[Program], sizes: Sequence[int], name: str, bounds: tuple[int, int]
) -> Program | None:
    """The program for all sizes of a dim within bounds; None where these three are not cases of one."""
    try:
        return _Merge(programs, sizes, name).program(bounds)
    except Unlike:
        return None


class _Merge:
    def __init__(self, programs: Sequence[Program], sizes: Sequence[int], name: str) -> None:
        self.programs, self.sizes, self.name = programs, sizes, name
        self.next = max(program.num_values for program in programs)
        self.before: list[Step] = []  # arithmetic on the size
        self.made: dict[tuple[int, int], int] = {}

    def program(self, bounds: tuple[int, int]) -> Program:
        first = self.programs[0]
        inputs = self.inputs()
        holder = next(((i, axis) for i, given in enumerate(inputs) for axis, size in enumerate(given.shape)
                       if size == self.name), None)  # fmt: skip
        if holder is None or any(len(p.steps) != len(first.steps) for p in self.programs):
            raise Unlike
        self.made[1, 0] = self.size("aten::sym_size.int", {"v": holder[0]}, holder[1])
        steps = tuple(self.step([p.steps[i] for p in self.programs]) for i in range(len(first.steps)))
        if any(p.outputs != first.outputs for p in self.programs):
            raise Unlike
        return pruned(Program(inputs, (*self.before, *steps), first.outputs, {self.name: bounds}))

    def inputs(self) -> tuple[Input, ...]:
        made = []
        for given in zip(*(program.inputs for program in self.programs), strict=True):
            shape = [self.name if at == tuple(self.sizes) else at[0]
                     for at in zip(*(each.shape for each in given), strict=True)]  # fmt: skip
            if any(len({size, each[i]}) > 1 for each in (given[0].shape, given[-1].shape)
                   for i, size in enumerate(shape) if isinstance(size, int)):  # fmt: skip
                raise Unlike
            made.append(replace(given[0], shape=tuple(shape)))
        return tuple(made)

    def step(self, found: Sequence[Step]) -> Step:
        first = found[0]
        if any((s.op, s.out, s.several) != (first.op, first.out, first.several) for s in found):
            raise Unlike
        args, kwargs = self.merged([list(s.args) for s in found]), self.merged([dict(s.kwargs) for s in found])
        types = tuple(self.type_of(each) for each in zip(*(s.types for s in found), strict=True))
        return replace(first, args=tuple(args), kwargs=kwargs, types=types)

    def merged(self, values: Sequence[Any]) -> Any:
        first = values[0]
        if all(type(value) is type(first) and value == first for value in values):
            return first
        if all(isinstance(value, list) and len(value) == len(first) for value in values):
            return [self.merged(each) for each in zip(*values, strict=True)]
        if all(isinstance(value, dict) and value.keys() == first.keys() for value in values) and "v" not in first:
            return {key: self.merged([value[key] for value in values]) for key in first}
        if all(type(value) is int for value in values):
            return {"v": self.line(*self.fitted(values))}
        raise Unlike

    def fitted(self, values: Sequence[int]) -> tuple[int, int]:
        """Slope and offset of a straight line through whole numbers."""
        slope, rest = divmod(values[1] - values[0], self.sizes[1] - self.sizes[0])
        offset = values[0] - slope * self.sizes[0]
        if rest or any(slope * size + offset != value for size, value in zip(self.sizes, values, strict=True)):
            raise Unlike
        return slope, offset

    def line(self, slope: int, offset: int) -> int:
        if (slope, offset) not in self.made:
            if offset:
                made = self.size("size::add", {"v": self.line(slope, 0)}, offset)
            else:
                made = self.size("size::mul", {"v": self.made[1, 0]}, slope)
            self.made[slope, offset] = made
        return self.made[slope, offset]

    def size(self, op: str, *args: Any) -> int:
        self.next += 1
        self.before.append(Step(op, args, {}, (self.next - 1,), types=("int",)))
        return self.next - 1

    def type_of(self, texts: Sequence[str]) -> str:
        """``float32[batch, 64]`` of ``float32[2, 64]`` and ``float32[3, 64]``."""
        if len({re.sub(r"\d+", "#", text.partition("[")[2]) for text in texts}) > 1:
            raise Unlike
        numbers = zip(*(map(int, re.findall(r"\d+", text.partition("[")[2])) for text in texts), strict=True)
        shown = []
        for each in numbers:
            slope, offset = (0, each[0]) if len(set(each)) == 1 else self.fitted(each)
            size = f"{slope}*{self.name}" if slope > 1 else self.name
            shown.append(str(offset) if not slope else f"{size} + {offset}" if offset else size)
        head, _, _ = texts[0].partition("[")
        return f"{head}[{', '.join(shown)}]" if "[" in texts[0] else head
