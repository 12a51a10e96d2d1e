"""Numbers of many devices at once in time models that are written for one.

A model runs on ``Lanes``, arrays with one number a device, as it runs on floats. Where a condition holds for some
devices and not for others, the model stops with ``Mixed``, and ``by_path`` runs it again for either part: every device
takes the path through the model that it takes alone, and gets the same number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
Index = NDArray[np.intp]


class Mixed(Exception):
    """A condition that holds for the devices of ``mask`` alone."""

    def __init__(self, mask: NDArray[np.bool_]) -> None:
        super().__init__("a condition holds for some devices and not for others")
        self.mask = mask


class TooManyPaths(Exception):
    """Nearly every device takes a path of its own."""


class Lanes(np.ndarray):
    """One number a device; as a condition or a plain number only where all devices agree."""

    def __bool__(self) -> bool:
        return bool(self._agreed())

    def __float__(self) -> float:
        return float(self._agreed())

    def __int__(self) -> int:
        return int(self._agreed())

    def __index__(self) -> int:
        return int(self._agreed())

    def _agreed(self) -> Any:
        plain = self.view(np.ndarray).reshape(-1)
        same = plain == plain[0]
        if same.all():
            return plain[0]
        raise Mixed(same)

    def __ceil__(self) -> Lanes:
        return cast(Lanes, np.ceil(self))

    def __floor__(self) -> Lanes:
        return cast(Lanes, np.floor(self))

    def __trunc__(self) -> Lanes:
        return cast(Lanes, np.trunc(self))

    def __round__(self, digits: int | None = None) -> Lanes:
        return cast(Lanes, np.round(self, digits or 0))


def lanes(values: Any) -> Any:
    """The array as numbers of devices; a plain number where all are equal, so that no model computes it many times."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim == 0 or (array == array[0]).all():
        return float(array.reshape(-1)[0])
    return array.view(Lanes)


def at(value: Any, index: Index) -> Any:
    """The part of some devices; what all share stays as it is."""
    return lanes(value[index]) if isinstance(value, Lanes) else value


def only(values: NDArray[Any], like: Any) -> Any:
    """The answer of an array model to one problem: a number, or one for each device where ``like`` has those."""
    return values.view(Lanes) if isinstance(like, Lanes) or len(values) > 1 else float(values[0])


def by_path(run: Callable[[Index], T], num: int, piece: int = 0) -> list[tuple[Index, T]]:
    """Run for all devices, and again for parts wherever their paths differ; (devices, result) of every path.

    ``piece`` devices at a time, where given: models that look through a menu are fastest while it stays in the cache.
    """
    pending = [np.arange(start, min(num, start + (piece or num))) for start in range(0, num, piece or num)]
    done, tried = list[tuple[Index, T]](), -len(pending)
    while pending:
        index = pending.pop()
        tried += 1
        if tried > 200:  # a model that splits further than this is left to its caller, device by device
            raise TooManyPaths
        try:
            done.append((index, run(index)))
        except Mixed as mixed:
            pending += [index[~mixed.mask], index[mixed.mask]]
    return done


def merged(parts: list[tuple[Index, Any]], num: int, kind: Any = np.float64) -> NDArray[Any]:
    """One array of what the paths answered."""
    found = np.empty(num, dtype=kind)
    for index, value in parts:
        found[index] = value
    return found
