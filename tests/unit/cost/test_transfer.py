"""Copies over the bus cost time, and what a single device cannot price is refused."""

from __future__ import annotations

import pytest

from ridgeline.cost.estimate import estimate
from ridgeline.errors import CostError
from ridgeline.graph import Builder, tensor
from ridgeline.hardware import device


def _graph(op: str, **attrs):
    b = Builder("bus")
    x = b.input("x", tensor((1 << 20,), "fp32"))
    (y,) = b.node(op, [x], [tensor((1 << 20,), "fp32")], module="loader", **attrs)
    return b.finish([y])


def test_a_pinned_copy_runs_at_the_bus_and_a_pageable_one_slower():
    pinned, pageable = (
        estimate(_graph("transfer", fn="to", direction="h2d", pinned=p), device("h200")).busy_s for p in (True, False)
    )
    assert pinned == pytest.approx(4 * 2**20 / 55e9, rel=0.05)
    assert pageable > 3 * pinned


def test_a_collective_is_refused_with_what_to_do():
    with pytest.raises(CostError, match=r"all_reduce over 8 ranks at loader.*without its process group"):
        estimate(_graph("collective", fn="all_reduce", num_bytes=4 << 20, num_ranks=8), device("h200"))
