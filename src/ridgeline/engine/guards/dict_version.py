"""A number that changes whenever a dictionary does, from the interpreter where it can be read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def entries(held: dict[Any, Any]) -> Any:
    """What stands for the number where it cannot be read: the keys, and which objects they name."""
    return [id(value) for value in held.values()] + list(held)


try:
    from torch._C._dynamo import guards
except ImportError:
    version: Callable[[dict[Any, Any]], Any] = entries
else:
    version = getattr(guards, "dict_version", entries)


class Stillness:
    """Whether any dictionary that was ever asked for its version has changed, at the price of one.

    From Python 3.12 on versions are handed out by a watcher, from one counter: a dictionary gets the next number when
    it is first asked for and whenever it changes. So a new dictionary is told the number after the last one if nothing
    has changed since. Where versions come from elsewhere nothing can be said, and ``now`` is always another number.
    """

    __slots__ = ("_last", "_moves", "_number", "counts")

    def __init__(self, number: Callable[[dict[Any, Any]], Any]) -> None:
        self._number, self._last, self._moves = number, -1, 0
        self.counts = sys.version_info >= (3, 12) and _counts(number)

    def now(self) -> int:
        """A number that stays the same as long as nothing has changed."""
        number = self._number({}) if self.counts else -1
        if not self.counts or number != self._last + 1:
            self._moves += 1
        self._last = number
        return self._moves


def _counts(number: Callable[[dict[Any, Any]], Any]) -> bool:
    """Whether numbers come from one counter: two in a row, one between for a change of what was asked for before."""
    held: dict[str, int] = {"a": 0}
    if not isinstance(number(held), int):
        return False
    first, second = number({}), number({})
    held["a"] = 1
    return bool(second - first == 1 and number({}) - second == 2)


stillness = Stillness(version)
