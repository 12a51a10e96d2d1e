"""Predictions pause the collector of cycles, and only as long as they last."""

from __future__ import annotations

import gc

import pytest

import ridgeline as rl
from ridgeline import api as journeys
from ridgeline.errors import RidgelineError


def test_a_prediction_works_with_the_collector_paused_and_leaves_it_running(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, estimate = [], journeys.estimate

    def watched(*args: object) -> object:
        seen.append(gc.isenabled())
        return estimate(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(journeys, "estimate", watched)
    rl.predict("bert-large", batch=1, seq=128)
    assert seen == [False] and gc.isenabled()


def test_a_prediction_that_fails_leaves_the_collector_running() -> None:
    with pytest.raises(RidgelineError):
        rl.predict("bert-large", execution="eagerly")
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        rl.predict("bert-large", batch=1, seq=128)
        assert not gc.isenabled()
    finally:
        gc.enable()
