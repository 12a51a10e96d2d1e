"""Telling by one number that no watched dictionary has changed."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import pytest

from ridgeline.engine.guards import dict_version as module
from ridgeline.engine.guards.dict_version import Stillness, entries, stillness, version


def _counted(monkeypatch: pytest.MonkeyPatch) -> tuple[Stillness, Any]:
    """As from Python 3.12 on: every dictionary that is asked for, and every change of one, takes the next number."""
    numbers = itertools.count(1)

    class Watched(dict[str, int]):
        def __setitem__(self, key: str, value: int) -> None:
            next(numbers)
            super().__setitem__(key, value)

    monkeypatch.setattr(module, "_counts", lambda number: True)
    monkeypatch.setattr(sys, "version_info", (3, 12, 0))
    return Stillness(lambda held: next(numbers)), Watched


def test_the_number_stays_until_a_dictionary_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    still, watched = _counted(monkeypatch)
    held = watched()
    first = still.now()
    assert still.now() == first == still.now()
    held["a"] = 1
    second = still.now()
    assert second != first and still.now() == second


def test_without_a_counter_nothing_is_ever_still() -> None:
    never = Stillness(entries)
    assert not never.counts and never.now() != never.now()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="versions have no counter before Python 3.12")
def test_the_interpreters_counter_is_read_right() -> None:
    held = {"a": 1}
    version(held)
    before = stillness.now()
    assert stillness.counts and stillness.now() == before
    held["a"] = 2
    after = stillness.now()
    assert after != before
    held["b"] = 3
    assert stillness.now() != after
