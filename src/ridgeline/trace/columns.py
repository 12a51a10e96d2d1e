"""Values of JSON events as numpy columns: quick where they are what they should be, careful where they are not."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.trace.decode import UNSET, text_of

Ints = NDArray[np.int64]
#: Later than the year 2096 nothing has been recorded; sums and differences of times within it fit 64 bits.
MAX_NS = 4 * 10**18
_MAX_US = MAX_NS / 1e3
#: A clock above this many microseconds since 1970 (the year 5138) counts nanoseconds.
BAD_TIME = np.iinfo(np.int64).min


class Words(dict[Any, int]):
    """Numbers for words in the order they are first seen; word 0 is empty."""

    def __init__(self) -> None:
        super().__init__({"": 0})

    def __missing__(self, word: Any) -> int:
        number = self[word] = len(self)
        return number

    def ids(self, values: Sequence[Any]) -> NDArray[np.int32]:
        try:
            return np.fromiter(map(self.__getitem__, values), dtype=np.int32, count=len(values))
        except TypeError:  # a list or an object where a word should be
            return np.array([self[_word(value)] for value in values], dtype=np.int32)

    def texts(self, numbers: Iterable[int]) -> list[str]:
        """The words of some numbers."""
        spelled = tuple(self)
        return [_word(spelled[number]) for number in numbers]

    def frozen(self) -> tuple[str, ...]:
        words = tuple(word if type(word) is str else _word(word) for word in self)
        try:
            "".join(words).encode()
        except UnicodeEncodeError:  # half of a surrogate pair
            words = tuple(word.encode("utf-8", "replace").decode() for word in words)
        return words


def _word(value: Any) -> str:
    return "" if value is None else str(value)


class Texts(dict[Any, int]):
    """Numbers, among the words, for lists that come as JSON text."""

    def __init__(self, words: Words) -> None:
        super().__init__()
        self._words = words

    def __missing__(self, text: Any) -> int:
        number = self[text] = self._words[text_of(text)]
        return number

    def ids(self, values: Sequence[Any]) -> NDArray[np.int32]:
        return np.array([self[v if type(v) is str else bytes(v)] if is_given(v) else 0 for v in values], dtype=np.int32)


def is_given(value: Any) -> bool:
    """Whether an event has the argument."""
    return value is not None and value is not UNSET


def ints(values: Sequence[Any], absent: int = -1) -> Ints:
    """Whole numbers; what is none is ``absent``."""
    try:
        return np.fromiter(values, dtype=np.int64, count=len(values))
    except (TypeError, ValueError, OverflowError):
        return np.array([_int(value, absent) for value in values], dtype=np.int64)


def _int(value: Any, absent: int) -> int:
    if isinstance(value, bool) or value is None:
        return absent
    try:
        number = int(value) if not isinstance(value, str) else int(value, 10)
    except (ValueError, TypeError, OverflowError):
        return absent
    return number if -(2**62) < number < 2**62 else absent


def floats(values: Sequence[Any]) -> NDArray[np.float64]:
    """Numbers; what is none is nan."""
    return np.array([_float(value) for value in values], dtype=np.float64)


def _float(value: Any) -> float:
    if value is None or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except (ValueError, TypeError, OverflowError):
        return math.nan


def instants_ns(values: Sequence[Any], *, exact: bool) -> Ints:
    """Microseconds, as numbers or as their text, in whole nanoseconds; BAD_TIME where there is none."""
    if exact:
        return np.array([_exact_ns(value) for value in values], dtype=np.int64)
    if any(isinstance(value, int) and value > 1e17 for value in values[:1]):  # a clock in nanoseconds
        whole = ints(values, BAD_TIME)
        return np.where(np.abs(whole) < MAX_NS, whole, BAD_TIME)
    column = _numbers(values)
    good = np.isfinite(column) & (np.abs(column) < _MAX_US)
    column = np.where(good, column, 0.0)
    whole = np.floor(column)  # the fraction is exact, so that rounding it gives the nanosecond that was written
    nanos = whole.astype(np.int64) * 1000 + np.rint((column - whole) * 1000).astype(np.int64)
    return np.where(good, nanos, BAD_TIME)


def _numbers(values: Sequence[Any]) -> NDArray[np.float64]:
    try:
        return np.fromiter(values, dtype=np.float64, count=len(values))
    except (TypeError, ValueError, OverflowError):
        return floats(values)


def _exact_ns(value: Any) -> int:
    """The nanoseconds a decimal text says, which a float would round."""
    text = (
        value
        if isinstance(value, str)
        else str(value)
        if isinstance(value, (int, float))
        else ("" if isinstance(value, (list, dict)) or not is_given(value) else bytes(value).decode("utf-8", "replace"))
    )
    whole, _, fraction = text.strip('" ').partition(".")
    try:
        micros = int(whole)
        nanos = round(int(fraction) / 10 ** (len(fraction) - 3)) if len(fraction) > 3 else int((fraction + "000")[:3])
    except ValueError:
        number = _float(text)
        return round(number * 1000) if math.isfinite(number) and abs(number) < _MAX_US else BAD_TIME
    return (micros * 1000 + (nanos if micros >= 0 else -nanos)) if abs(micros) < _MAX_US else BAD_TIME


def durations_ns(values: Sequence[Any], *, in_ns: bool) -> tuple[Ints, int]:
    """Microseconds (or nanoseconds) in whole nanoseconds; absent and negative ones are 0, and negative ones counted."""
    unit = 1.0 if in_ns else 1000.0
    said = _numbers(values)
    lasts = np.clip(np.nan_to_num(said, nan=0.0), 0.0, (10**18) / unit)  # max duration ns
    return np.rint(lasts * unit).astype(np.int64), int(np.count_nonzero(said < 0.0))


def triples(texts: Iterable[str]) -> NDArray[np.int32]:
    """``[x, y, z]`` texts as rows of three; -1 where there is none."""
    rows = []
    for text in texts:
        try:
            row = [int(x) for x in json.loads(text)][:3] if text else []
        except (ValueError, TypeError, OverflowError, RecursionError):
            row = []
        rows.append([max(-1, min(x, 2**31 - 1)) for x in row] + [1 if row else -1] * (3 - len(row)))
    return np.array(rows, dtype=np.int32).reshape(-1, 3)
