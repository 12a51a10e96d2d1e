"""Sequences are matched in order, and never wrongly."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.profiler import align as room
from ridgeline.profiler.align import align

words = st.lists(st.sampled_from("abcd"), max_size=24)


@settings(max_examples=150, deadline=None)
@given(words, words)
def test_partners_are_equal_and_in_order(left, right):
    found = align(left, right)
    hits = [(i, j) for i, j in enumerate(found.tolist()) if j >= 0]
    assert all(left[i] == right[j] for i, j in hits)
    assert all(a[1] < b[1] for a, b in pairwise(hits))


@settings(max_examples=150, deadline=None)
@given(words, words)
def test_no_longer_common_sequence_exists(left, right):
    table = [[0] * (len(right) + 1) for _ in range(len(left) + 1)]
    for i, a in enumerate(left):
        for j, b in enumerate(right):
            table[i + 1][j + 1] = table[i][j] + 1 if a == b else max(table[i][j + 1], table[i + 1][j])
    assert int((align(left, right) >= 0).sum()) == table[-1][-1]


def test_an_item_that_only_one_side_has_costs_itself_only():
    found = align(["mm", "add", "print", "mm"], ["mm", "add", "mm"])
    assert found.tolist() == [0, 1, -1, 2]


def test_very_different_sequences_are_matched_without_inventing(monkeypatch):
    monkeypatch.setattr(room, "MAX_DIFFERENCES", 3)
    left, right = list("axbycz"), list("1a2b3c4")
    found = align(left, right)
    assert [(left[i], right[j]) for i, j in enumerate(found.tolist()) if j >= 0] == [("a", "a"), ("b", "b"), ("c", "c")]
