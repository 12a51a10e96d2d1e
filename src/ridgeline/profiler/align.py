"""Two sequences of almost the same things, matched in order."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

MAX_DIFFERENCES = 1_200

Matches = NDArray[np.int64]


def align(left: Sequence[Hashable], right: Sequence[Hashable]) -> Matches:
    """For each item of ``left`` the place of its partner in ``right``, or -1; partners are equal and in order.

    The longest common subsequence while the two differ in no more than some thousand places; beyond that, items are
    matched greedily within a window, which loses partners but never invents one.
    """
    found = np.full(len(left), -1, dtype=np.int64)
    head = _same(left, right)
    tail = _same(left[head:][::-1], right[head:][::-1])
    found[:head] = np.arange(head)
    if tail:
        found[len(left) - tail :] = np.arange(len(right) - tail, len(right))
    inner_left, inner_right = left[head : len(left) - tail], right[head : len(right) - tail]
    if len(inner_left) and len(inner_right):
        inner = _shortest_edit(inner_left, inner_right)
        if inner is None:
            inner = _greedy(inner_left, inner_right)
        found[head : len(left) - tail] = np.where(inner >= 0, inner + head, -1)
    return found


def _same(left: Sequence[Hashable], right: Sequence[Hashable]) -> int:
    """How many items both begin with."""
    num = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        num += 1
    return num


def _shortest_edit(left: Sequence[Hashable], right: Sequence[Hashable]) -> Matches | None:
    """Myers' greedy walk along the diagonals; None when the two differ in too many places."""
    num, other = len(left), len(right)
    reach, history = {1: 0}, list[dict[int, int]]()
    for differences in range(min(num + other, MAX_DIFFERENCES) + 1):
        history.append(dict(reach))
        for diagonal in range(-differences, differences + 1, 2):
            down = diagonal == -differences or (
                diagonal != differences and reach.get(diagonal - 1, -1) < reach.get(diagonal + 1, -1)
            )
            x = reach.get(diagonal + 1, 0) if down else reach.get(diagonal - 1, 0) + 1
            y = x - diagonal
            while x < num and y < other and left[x] == right[y]:
                x, y = x + 1, y + 1
            reach[diagonal] = x
            if x >= num and y >= other:
                return _walk_back(history, num, other)
    return None


def _walk_back(history: list[dict[int, int]], num: int, other: int) -> Matches:
    found = np.full(num, -1, dtype=np.int64)
    x, y = num, other
    for differences in range(len(history) - 1, -1, -1):
        reach, diagonal = history[differences], x - y
        down = diagonal == -differences or (
            diagonal != differences and reach.get(diagonal - 1, -1) < reach.get(diagonal + 1, -1)
        )
        before = diagonal + 1 if down else diagonal - 1
        from_x = reach.get(before, 0)
        from_y = from_x - before
        while x > from_x and y > from_y and x > 0 and y > 0:
            x, y = x - 1, y - 1
            found[x] = y
        x, y = from_x, from_y
    return found


def _greedy(left: Sequence[Hashable], right: Sequence[Hashable]) -> Matches:
    found = np.full(len(left), -1, dtype=np.int64)
    at = 0
    for i, item in enumerate(left):
        # window
        for j in range(at, min(at + 64, len(right))):
            if right[j] == item:
                found[i], at = j, j + 1
                break
    return found
