"""Causes planted in programs on an H200: named first or second, the gain within its interval, gone with the fix."""

from __future__ import annotations

import pytest

from ridgeline.errors import InputError
from ridgeline.findings.score import GENERAL, NAMES, score
from ridgeline.profiler.recordings import planted_cases


@pytest.fixture(scope="module")
def scores():
    try:
        cases = planted_cases()
    except InputError as error:
        pytest.skip(str(error))
    return [score(case) for case in cases]


def test_nine_of_ten_causes_are_named_first_or_second(scores):
    missed = [found.case for found in scores if not found.named]
    assert len(scores) >= 20 and len(missed) <= len(scores) // 10, missed


def test_four_of_five_intervals_hold_the_realized_gain(scores):
    missed = [(found.case, round(found.gain_ms, 2)) for found in scores if not found.held]
    assert len(missed) <= len(scores) // 5, missed


def test_a_cause_is_no_longer_named_once_it_is_fixed(scores):
    """Padding is halved by its fix, not gone; a host-bound program may stay host-bound."""
    still = [found.case for found in scores if found.still_named and found.cause not in ("padding", "host-bound")]
    assert still == []


def test_fixed_runs_have_next_to_no_other_findings(scores):
    """What is left is true: copies on the compute stream, padding that remains, and a slow host."""
    others = [(found.case, rule) for found in scores for rule, _ in found.others if rule not in GENERAL]
    assert len(others) <= 4, others


def test_every_planted_cause_has_a_rule(scores):
    assert {found.cause for found in scores} <= NAMES.keys()
