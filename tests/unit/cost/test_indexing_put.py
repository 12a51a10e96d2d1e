"""Accumulating assignment, weight normalization and host transfers."""

from __future__ import annotations

import pytest

from ridgeline.cost.call import call
from ridgeline.cost.price import pricer_of
from ridgeline.hardware import device


def busy_s(kind: str, dtype: str, library: str = "aten", phase: str = "fwd", **shape: int) -> float:
    return pricer_of(device("h200")).price(call(kind, dtype, phase, library, **shape)).time.busy_s


def test_adding_the_same_position_over_and_over_takes_longer_than_spreading_out() -> None:
    hot, spread = (busy_s("index_put", "fp32", count=100_000, width=1, sets=1, rows=rows) for rows in (100, 1_000_000))
    assert hot > 1.5 * spread


def test_a_recorded_assignment_says_the_same_in_its_own_words() -> None:
    ours = busy_s("index_put", "fp32", count=325, width=1, sets=8192, rows=27 * 27)
    assert busy_s("index_put", "fp32", b=8192, f=27, pairs=325) == pytest.approx(ours)
    assert ours == pytest.approx(634e-6, rel=0.1)  # recorded


def test_pageable_copies_are_slow_once_they_outgrow_the_driver_s_staging() -> None:
    def rate(num_bytes: int, pinned: int) -> float:
        return num_bytes / busy_s("transfer", "uint8", "driver", num_bytes=num_bytes, pinned=pinned)

    assert rate(100_000_000, 1) == pytest.approx(55e9, rel=0.02)
    assert rate(100_000_000, 0) == pytest.approx(12e9, rel=0.02)
    assert rate(1_000_000, 0) > 30e9


def test_norms_over_the_last_dim_walk_every_row_and_those_over_the_first_do_not() -> None:
    last, first = (busy_s("weight_norm", "fp32", n=14624, c=256, dim=dim) for dim in (1, 0))
    assert last == pytest.approx(135e-6, rel=0.1)  # recorded
    assert first < 0.5 * last
