"""Findings of recordings and the bars of the waterfall that they are about: no finding promises more than its bars."""

from __future__ import annotations

import pytest

from lab.planted.recordings import InjectedCase, injected_cases, suite_folder, suites
from lab.planted.score import NAMES
from ridgeline.findings.explanation import explained, summary_of

CASES = [
    case
    for suite in suites()
    for case in injected_cases(suite_folder(suite))
    if "planted" in case.files and case.files["planted"].stat().st_size < 250_000
][::4]
"""Every fourth of the recordings that are read in a second."""
GAINS = ("attention_spelled_out", "nchw_conv", "padded_batch", "detector_channels_first", "events_counted_in_numpy")
"""Causes whose evidence is a small part of what their change makes shorter."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_finding_promises_more_than_its_bars(case: InjectedCase) -> None:
    trace = case.trace("planted")
    found = explained(trace, [summary_of(trace)])
    assert found.waterfall is not None
    for finding in found.findings:
        over_ms = max(0.0, found.step_ms - found.waterfall.step_ms) if finding.frees_host else 0.0  # not recorded
        bars_ms = sum(bar.ms for bar in found.waterfall.bars if finding.rule in bar.findings)
        assert finding.high_ms <= (bars_ms + over_ms) * (1 + 1e-9), finding.rule
        assert 0.0 <= finding.low_ms <= finding.expected_ms <= finding.high_ms <= found.step_ms * (1 + 1e-9)


@pytest.mark.parametrize("name", GAINS)
def test_bars_are_those_of_all_that_a_change_makes_shorter(name: str) -> None:
    (case,) = [case for suite in suites() for case in injected_cases(suite_folder(suite)) if case.name == name]
    trace = case.trace("planted")
    found = explained(trace, [summary_of(trace)])
    ours = next(finding for finding in found.findings if finding.rule in NAMES[case.cause])
    assert ours.low_ms <= case.gain_s * 1e3 <= ours.high_ms
