"""Sizes as symbols: what is done with them is recorded once, and done again with other numbers in a few microseconds.

A ``Symbol`` computes like a number and answers comparisons as its number at the time of recording would; every answer
becomes a guard, which other numbers must give as well for the recording to be theirs. Whatever else would look at the
number (``int``, ``float``, an index, text) is a ``SymbolError``: nothing of it can slip into a result unseen.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, NoReturn

Binary = Callable[[Any, Any], Any]
Guard = tuple[Binary, int, int, bool]
"""A comparison of two numbers by their places, and what it must say."""


class SymbolError(TypeError):
    """Somebody looked at a number that is not known yet: what was to be recorded has to be done without symbols."""


class Symbol:
    """A number that follows from sizes: a place in a recording."""

    __slots__ = ("index", "recording")

    def __init__(self, recording: Recording, index: int) -> None:
        self.recording, self.index = recording, index

    def __add__(self, other: Any) -> Any:
        return self if _is_whole(other, 0) else self.recording.step(operator.add, self, other)

    def __radd__(self, other: Any) -> Any:
        return self if _is_whole(other, 0) else self.recording.step(operator.add, other, self)

    def __sub__(self, other: Any) -> Any:
        return self.recording.step(operator.sub, self, other)

    def __rsub__(self, other: Any) -> Any:
        return self.recording.step(operator.sub, other, self)

    def __mul__(self, other: Any) -> Any:
        return self if _is_whole(other, 1) else self.recording.step(operator.mul, self, other)

    def __rmul__(self, other: Any) -> Any:
        return self if _is_whole(other, 1) else self.recording.step(operator.mul, other, self)

    def __truediv__(self, other: Any) -> Any:
        return self.recording.step(operator.truediv, self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self.recording.step(operator.truediv, other, self)

    def __floordiv__(self, other: Any) -> Any:
        return self.recording.step(operator.floordiv, self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return self.recording.step(operator.floordiv, other, self)

    def __mod__(self, other: Any) -> Any:
        return self.recording.step(operator.mod, self, other)

    def __rmod__(self, other: Any) -> Any:
        return self.recording.step(operator.mod, other, self)

    def __neg__(self) -> Any:
        return self.recording.step(operator.mul, self, -1)

    def __trunc__(self) -> Any:
        if isinstance(self.recording.numbers[self.index], int):  # whole at any size: no division on the way
            return self
        return self.recording.step(_truncated, self, 0)

    def __round__(self, digits: int) -> Any:
        return self.recording.step(round, self, digits)

    def __lt__(self, other: Any) -> bool:
        return self.recording.decide(operator.lt, self, other)

    def __le__(self, other: Any) -> bool:
        return self.recording.decide(operator.le, self, other)

    def __gt__(self, other: Any) -> bool:
        return self.recording.decide(operator.gt, self, other)

    def __ge__(self, other: Any) -> bool:
        return self.recording.decide(operator.ge, self, other)

    def __eq__(self, other: object) -> bool:
        return self is other or self.recording.decide(operator.eq, self, other)

    def __ne__(self, other: object) -> bool:
        return self is not other and self.recording.decide(operator.ne, self, other)

    def __bool__(self) -> bool:
        return self.recording.decide(operator.ne, self, 0)

    __hash__ = object.__hash__  # as what it is: equal numbers of two symbols are no accident to rely on

    def _refuse(self, *_: Any) -> NoReturn:
        raise SymbolError("the number of a symbol is not known yet")

    __int__ = __float__ = __index__ = __complex__ = __str__ = __format__ = _refuse
    __pow__ = __rpow__ = __divmod__ = __rdivmod__ = __abs__ = __floor__ = __ceil__ = _refuse


def _is_whole(value: Any, number: int) -> bool:
    return type(value) is int and value == number


def _truncated(value: float, _: Any) -> int:
    return math.trunc(value)


def _log2(value: Any, _: Any) -> float:
    return math.log2(value)


def largest(values: Iterable[Any]) -> Any:
    """The largest number, 0 of none; of symbols without deciding which one that is."""
    found: Any = 0
    for value in values:
        if isinstance(value, Symbol):
            found = value.recording.step(max, found, value)
        else:
            found = found.recording.step(max, found, value) if isinstance(found, Symbol) else max(found, value)
    return found


def log2(value: Any) -> Any:
    """``math.log2``, of symbols too."""
    return value.recording.step(_log2, value, 0) if isinstance(value, Symbol) else math.log2(value)


class Recording:
    """Numbers by place: sizes first, then constants and what was computed, in the order in which they came up."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.numbers: list[Any] = list(sizes)
        self.sizes = [Symbol(self, place) for place in range(len(sizes))]
        self._steps: list[tuple[int, Binary, int, int]] = []
        self._known: dict[tuple[Binary, int, int], Symbol] = {}
        self._constants: dict[tuple[type, Any], int] = {}
        self._guards: dict[tuple[Binary, int, int], bool] = {}

    def place(self, value: Any) -> int:
        """Where a symbol's number is, or a constant's."""
        if isinstance(value, Symbol):
            return value.index
        if not isinstance(value, int | float | str | None):
            if isinstance(value, tuple | list) and any(isinstance(part, Symbol) for part in value):
                raise SymbolError("symbols inside a constant would never be told their numbers")
            return self._new(value)
        key = (type(value), value)
        found = self._constants.get(key)
        if found is None:
            found = self._constants[key] = self._new(value)
        return found

    def _new(self, value: Any) -> int:
        self.numbers.append(value)
        return len(self.numbers) - 1

    def step(self, compute: Binary, left: Any, right: Any) -> Symbol:
        if not (isinstance(left, Symbol | int | float) and isinstance(right, Symbol | int | float)):
            raise SymbolError("symbols compute with numbers alone")
        a, b = self.place(left), self.place(right)
        found = self._known.get((compute, a, b))
        if found is None:
            found = Symbol(self, self._new(compute(self.numbers[a], self.numbers[b])))
            self._known[compute, a, b] = found
            self._steps.append((found.index, compute, a, b))
        return found

    def decide(self, compare: Binary, left: Any, right: Any) -> bool:
        a, b = self.place(left), self.place(right)
        said = bool(compare(self.numbers[a], self.numbers[b]))
        if a != b:
            self._guards[compare, a, b] = said
        return said

    def take_guards(self) -> tuple[Guard, ...]:
        """What was decided since guards were last taken."""
        taken = tuple([(*key, said) for key, said in self._guards.items()])
        self._guards = {}
        return taken

    def rebase(self, numbers: list[Any]) -> None:
        """Go on recording at the sizes these numbers were replayed for."""
        self.numbers = numbers

    def replay(self, sizes: Sequence[int]) -> list[Any] | None:
        """All numbers at these sizes; none where one of them cannot be computed."""
        steps = self._steps.copy()  # before the numbers: another thread may be recording, and numbers come first
        numbers = self.numbers.copy()
        numbers[: len(sizes)] = sizes
        try:
            for place, compute, a, b in steps:
                numbers[place] = compute(numbers[a], numbers[b])
        except ZeroDivisionError:
            return None
        return numbers


def hold(guards: Iterable[Guard], numbers: Sequence[Any]) -> bool:
    """Whether every comparison says of these numbers what it said when it was recorded."""
    return all(compare(numbers[a], numbers[b]) is said for compare, a, b, said in guards)


Pick = Callable[[Sequence[Any]], tuple[Any, ...]]


def picker(recording: Recording, values: Iterable[Any]) -> Pick:
    """A function from numbers to what these values are then."""
    places = [recording.place(value) for value in values]
    if len(places) > 1:
        return itemgetter(*places)
    return lambda numbers: tuple([numbers[place] for place in places])
