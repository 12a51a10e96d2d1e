"""Laws of whole predictions: better hardware is never slower, more work never faster, nothing beats light.

Wall time and busy time follow the library's choices (tiles, split reductions, one kernel or two), which step; these
may give back a little of what a larger device or batch brings, so that their laws hold up to a stated slack. The floor
has no such choices and its laws are exact.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.api import predict
from ridgeline.cost.estimate import EXECUTIONS
from ridgeline.cost.prediction import Prediction
from ridgeline.hardware import device, devices
from ridgeline.models import models

BUSY_SLACK, WALL_SLACK = 1.005, 1.015
EXACT = 1 + 1e-9
WARM_SLACK = 1.04  # what the L2 still holds of an input is known in eighths
SPLIT_SLACK = 1.05  # attention over few tiles splits its keys and adds the parts; a little longer, it no longer does
DEVICES = ("h200", "h100-sxm", "a100-sxm-80gb", "b200", "l40s", "t4", "mi300x", "tpu-v5p", "grace")
NETS = [("llama3-8b", "infer"), ("llama3-8b", "decode"), ("resnet50", "infer"), ("bert-large", "train"),
        ("dlrm", "infer"), ("vit-l16", "infer"), ("mixtral-8x7b", "decode")]  # fmt: skip
cases = st.tuples(st.sampled_from(NETS), st.sampled_from(DEVICES))
CARDS = models()


def predicted(net: tuple[str, str], on: str, **options: object) -> Prediction:
    name, mode = net
    return predict(name, on=on, mode=mode, **options)


def check_faster(better: Prediction, plain: Prediction) -> None:
    assert better.floor_s <= plain.floor_s * EXACT
    assert better.busy_s <= plain.busy_s * BUSY_SLACK
    assert better.expected_s <= plain.expected_s * WALL_SLACK


@settings(max_examples=30, deadline=None, derandomize=True)
@given(cases, st.integers(1, 16), st.floats(1.01, 4.0), st.sampled_from(EXECUTIONS))
def test_more_dram_bandwidth_is_never_slower(case, batch: int, factor: float, execution: str) -> None:
    net, on = case
    plain, better = (
        predicted(net, f"{on} hbm_bandwidth={f:.3f}x", batch=batch, execution=execution) for f in (1.0, factor)
    )
    check_faster(better, plain)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(cases, st.integers(1, 16), st.floats(1.01, 2.0))
def test_a_higher_clock_is_never_slower(case, batch: int, factor: float) -> None:
    net, on = case
    plain, better = (predicted(net, f"{on} clock={f:.3f}x", batch=batch) for f in (1.0, factor))
    check_faster(better, plain)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(cases, st.integers(1, 16), st.floats(1.05, 2.5))
def test_more_cores_are_never_slower(case, batch: int, factor: float) -> None:
    net, on = case
    plain, better = (predicted(net, f"{on} sms={f:.3f}x", batch=batch) for f in (1.0, factor))
    check_faster(better, plain)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(cases, st.integers(1, 24), st.integers(1, 24))
def test_a_larger_batch_is_never_faster_and_never_smaller(case, batch: int, more: int) -> None:
    net, on = case
    few, many = (predicted(net, on, batch=b) for b in (batch, batch + more))
    assert many.floor_s >= few.floor_s / EXACT
    assert many.busy_s >= few.busy_s / BUSY_SLACK
    assert many.expected_s >= few.expected_s / WALL_SLACK
    assert many.peak_bytes >= few.peak_bytes
    assert many.energy_j >= few.energy_j / WALL_SLACK


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.sampled_from(DEVICES), st.integers(1, 4096), st.integers(1, 4096))
def test_a_longer_sequence_is_never_faster(on: str, seq: int, more: int) -> None:
    short, long = (predict("llama3-8b", on=on, seq=s) for s in (seq, seq + more))
    assert long.peak_bytes >= short.peak_bytes
    assert long.floor_s >= short.floor_s / WARM_SLACK
    assert long.busy_s >= short.busy_s / SPLIT_SLACK


@settings(max_examples=30, deadline=None, derandomize=True)
@given(cases, st.integers(1, 64), st.sampled_from(EXECUTIONS))
def test_everything_is_in_its_bounds(case, batch: int, execution: str) -> None:
    net, on = case
    check_bounds(predicted(net, on, batch=batch, execution=execution))


def check_bounds(p: Prediction) -> None:
    for value in (p.expected_s, p.busy_s, p.floor_s, p.energy_j, p.power_w, p.usd, *p.interval_s):
        assert (math.isfinite(value) and value > 0) or value == p.usd == 0.0
    beside_s = sum(line.busy_s * line.stretch * (line.beside - 1) * line.times for line in p.lines)  # counted twice
    assert p.floor_s <= p.busy_s * EXACT and p.busy_s - beside_s <= p.expected_s * EXACT
    assert p.interval_s[0] <= p.expected_s <= p.interval_s[1]
    assert p.busy_interval_s[0] <= p.busy_s <= p.busy_interval_s[1]
    assert p.energy_j <= p.device.tdp_w * p.expected_s * EXACT
    for row in p.rows():
        assert 0 <= row.floor_s <= row.expected_s * EXACT and row.low_s <= row.expected_s <= row.high_s


@pytest.mark.parametrize("at", range(len(CARDS)), ids=[card.name for card in CARDS])
def test_every_network_is_within_its_bounds_somewhere(at: int) -> None:
    """Each network on one device of the catalog, another in every mode, so that together they meet all of it."""
    card, names = CARDS[at], devices()
    for turn, mode in enumerate(card.modes):
        on = names[(at * len(card.modes) + turn) % len(names)]
        check_bounds(predict(card.name, mode=mode, on=on, execution=EXECUTIONS[(at + turn) % 3]))


AMAX_SMALL = [
    ("llama3-8b", {"mode": "decode", "batch": 1, "kv": 0}),
    ("llama3-8b", {"mode": "prefill", "batch": 512, "seq": 131_072}),
    ("resnet50", {"batch": 100_000}),
    ("dlrm", {"mode": "train", "batch": 1}),
]


@pytest.mark.parametrize("on", devices())
def test_extreme_sizes_stay_finite_on_every_device(on: str) -> None:
    for name, options in AMAX_SMALL:
        check_bounds(predict(name, on=on, **options))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(cases, st.floats(0.3, 1.0))
def test_a_lower_power_limit_is_never_faster_and_is_kept(case, factor: float) -> None:
    net, on = case
    full = predicted(net, on, batch=4)
    if factor * full.device.tdp_w > full.device.idle_w * 1.05:
        limited = predicted(net, f"{on} tdp={factor:.3f}x", batch=4)
        assert limited.busy_s >= full.busy_s / EXACT
        assert limited.power_w <= limited.device.tdp_w * EXACT


def test_the_devices_of_the_laws_are_of_many_kinds() -> None:
    found = [device(name) for name in DEVICES]
    assert len({d.arch for d in found}) >= 8 and {d.kind for d in found} >= {"gpu", "cpu"}
