"""The clock of races in these tests: reading it takes a millisecond, ``sleep`` what it is told, and work nothing."""

from __future__ import annotations

_spent: list[float] = []
_now_s = [0.0]
sleep = _spent.append
"""A builtin method, as ``time.sleep`` is a builtin function: what a search looks for in Python code is not in it."""


def perf_counter() -> float:
    _now_s[0] += 1e-3 + sum(_spent)
    _spent.clear()
    return _now_s[0]
