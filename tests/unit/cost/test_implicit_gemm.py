"""Time of a convolution kernel told its tile: clusters, waves and slices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.cost.time.conv.implicit_gemm import Choice, Problem, clusters_at_once, implicit_s, is_shared, waves_of
from ridgeline.cost.time.conv.problem import DEFAULTS, pass_choice

from .test_conv import H200

PLAIN = Problem(rows=128 * 90, columns=128, channels=256, taps=9.0, read_bytes=1e6, written_bytes=1e6, itemsize=2.0)
TILE = Choice("tma", 128, 128, 64)


def seconds(problem: Problem, choice: Choice, op: str = "fwd") -> float:
    return implicit_s(H200, pass_choice(DEFAULTS, f"{choice.way}.{op}"), problem, choice, "bf16")


def test_fewer_large_clusters_fit_than_their_blocks_would_say():
    assert clusters_at_once(132, 1) == 132
    assert clusters_at_once(132, 8) == 15  # not 16: a GPC of twelve SMs holds one
    assert clusters_at_once(132, 4) == 31
    assert clusters_at_once(66, 8) == 7


def test_a_cluster_wider_than_the_output_doubles_the_waves():
    narrow, wide = TILE, replace(TILE, cluster_rows=4, cluster_columns=2)
    assert waves_of(H200, PLAIN, narrow) < 1.0  # 90 blocks
    assert 1.0 < waves_of(H200, PLAIN, wide) < 2.0  # 23 clusters of eight, every second block idle
    deep = replace(PLAIN, channels=2048)
    assert seconds(deep, wide) > 1.25 * seconds(deep, narrow)  # twice the waves, less loaded by each


def test_time_steps_up_where_another_wave_begins():
    within, beyond = (seconds(replace(PLAIN, rows=128 * tiles, channels=2048), TILE) for tiles in (131, 132))
    assert within < beyond < 1.02 * within
    assert seconds(replace(PLAIN, rows=128 * 133, channels=2048), TILE) > 1.3 * beyond


def test_a_last_wave_less_than_half_full_is_shared_where_the_kernel_may():
    may = replace(TILE, shared=True)
    assert is_shared(may, 2.3, 80) and not is_shared(may, 2.7, 80) and not is_shared(may, 2.0, 80)
    assert not is_shared(may, 2.3, 10) and not is_shared(TILE, 2.3, 80)
    long = replace(PLAIN, rows=128 * 140, channels=2048)
    assert seconds(long, may) < 0.8 * seconds(long, TILE)


def test_slices_shorten_a_long_loop_of_few_tiles():
    deep = Problem(rows=64, columns=576, channels=100_000, taps=1.0, read_bytes=1e6, written_bytes=1e5, itemsize=2.0)
    whole = Choice("copy", 64, 64, 64)
    assert seconds(deep, replace(whole, split=16), "wgrad") < 0.3 * seconds(deep, whole, "wgrad")


@pytest.mark.parametrize("way", ["tma", "copy", "warp"])
def test_more_of_anything_never_costs_less(way: str):
    choice = replace(TILE, way=way)
    small = seconds(PLAIN, choice)
    for name in ("rows", "columns", "channels", "taps", "read_bytes", "written_bytes"):
        assert seconds(replace(PLAIN, **{name: getattr(PLAIN, name) * 3}), choice) >= small, name
