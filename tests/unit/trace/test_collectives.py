"""Collectives of several ranks against figures made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from ridgeline.trace.collectives import Calls, bus_factor, collectives, stragglers


def calls(rank: int, *spans: tuple[int, int], num_bytes: int = 800) -> Calls:
    """All-gathers of two ranks, by their starts and ends in nanoseconds."""
    num = len(spans)
    start, end = (np.array(side, dtype=np.int64) for side in zip(*spans, strict=True))
    return Calls(rank=rank, sort=("all_gather",) * num, group=("0",) * num, start=start, end=end,
                 num_bytes=np.full(num, num_bytes), group_size=np.full(num, 2, dtype=np.int32),
                 exposed=(end - start) // 2, span=np.arange(num, dtype=np.int32))  # fmt: skip


def test_the_busiest_link_carries_each_byte_of_an_all_reduce_twice_and_of_others_once() -> None:
    assert bus_factor("all_reduce", 8) == 2 * 7 / 8
    assert {bus_factor(sort, 8) for sort in ("reduce_scatter", "all_gather", "all_to_all")} == {7 / 8}
    assert bus_factor("broadcast", 8) == 1.0
    assert np.isnan(bus_factor("", 8))


def test_an_operation_lasts_from_its_first_start_and_transfers_from_its_last() -> None:
    (found,) = collectives([calls(0, (100, 500)), calls(1, (300, 600), num_bytes=400)])
    assert (found.skew_s, found.duration_s, found.transfer_s) == pytest.approx((200e-9, 500e-9, 300e-9))
    assert (found.last_rank, found.num_bytes, found.group_size) == (1, 800, 2)
    assert found.exposed_s == pytest.approx((200 + 150) / 2 * 1e-9)
    assert found.bus_bytes_per_s == pytest.approx(800 / 2 / 300e-9)


def test_the_rank_that_comes_late_is_the_straggler_and_its_lateness_is_positive() -> None:
    ranks = [calls(0, (100, 500), (1000, 1500)), calls(1, (100, 500), (1000, 1500)), calls(2, (300, 500), (1400, 1500))]
    first, *others = stragglers(ranks)
    assert (first.rank, first.num_last, first.num_collectives) == (2, 2, 2)
    assert first.waited_s == pytest.approx(600e-9)
    assert first.mean_lateness_s == pytest.approx(300e-9)
    assert [row.mean_lateness_s for row in others] == [0.0, 0.0]
