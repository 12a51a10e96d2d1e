"""A fleet of imagined devices is priced as each device alone is, to 1e-9, whatever the network and the execution."""

from __future__ import annotations

import numpy as np
import pytest

from ridgeline.cost import fleet as fleets
from ridgeline.cost.estimate import estimate
from ridgeline.cost.fleet import FleetCache, device_at, estimate_fleet
from ridgeline.cost.time.lanes import Lanes, Mixed, by_path, lanes
from ridgeline.hardware import device
from ridgeline.hardware.fleet import fleet
from ridgeline.models import build

SHARED = fleets._Shared
NETWORKS = [
    ("llama3-8b", {"mode": "decode", "batch": 8}, "h200", "eager"),
    ("llama3-8b", {"mode": "decode", "batch": 64, "precision": "fp8"}, "h200", "cudagraph"),
    ("llama3-8b", {"mode": "prefill", "seq": 512}, "b200", "compiled"),
    ("llama3-8b", {"mode": "train", "seq": 512}, "h100-sxm", "compiled"),
    ("mixtral-8x7b", {"mode": "decode", "batch": 4}, "h200", "eager"),
    ("bert-large", {"batch": 4, "seq": 128}, "a100-sxm-80gb", "eager"),
    ("bert-base", {"batch": 4, "seq": 128, "mode": "train"}, "l40s", "compiled"),
    ("vit-l16", {"batch": 4}, "h200", "eager"),
    ("gpt2-xl", {"mode": "prefill", "seq": 256}, "mi300x", "eager"),
    ("gpt2-xl", {"mode": "decode"}, "rtx-5090", "cudagraph"),
    ("gpt2-xl", {"mode": "decode"}, "tpu-v5p", "eager"),
    ("resnet50", {"batch": 4}, "h200", "eager"),
]


def imagined(parent, num, seed):
    draw = np.random.default_rng(seed)
    changes = {
        "hbm_bandwidth": (draw.uniform(0.3, 5.0, num), True),
        "sms": (draw.choice([0.75, 1.0, 1.3], num), True),
        "l2": (draw.uniform(0.2, 6.0, num), True),
        "tdp": (draw.uniform(0.5, 2.0, num), True),
        "clock": (draw.choice([1.0, 0.9, 1.2], num), True),
        "bf16": (draw.uniform(0.5, 3.0, num), True),
    }
    return fleet(parent, {k: v for k, v in changes.items() if k != "bf16" or "tensor.bf16" in parent.numbers()}, num)


@pytest.mark.parametrize(("name", "options", "on", "execution"), NETWORKS, ids=lambda value: str(value))
def test_every_device_of_a_fleet_is_predicted_as_if_alone(name, options, on, execution):
    graph, num = build(name, **options), 40
    made = imagined(device(on), num, 7)
    found = estimate_fleet(graph, made, execution)
    for at in range(0, num, 7):
        alone = estimate(graph, device_at(made, at), execution)
        expected = (alone.expected_s, *alone.interval_s, alone.busy_s, alone.floor_s, alone.host_s, alone.energy_j,
                    alone.usd, alone.throttle, alone.peak_bytes, alone.capacity_bytes)  # fmt: skip
        got = [values[at] for name, values in found.columns().items() if name != "basis"]
        np.testing.assert_allclose(got, expected, rtol=1e-9)
        assert list(type(alone.basis))[found.basis[at]] == alone.basis


def test_a_fleet_has_the_numbers_that_override_gives():
    parent, num = device("h200"), 30
    made = imagined(parent, num, 3)
    for at in range(num):
        alone = device_at(made, at)
        for field, value in alone.numbers().items():
            assert made.numbers[field][at] == pytest.approx(value, rel=1e-12), field


def test_devices_that_cannot_be_say_why_and_do_not_stop_the_others():
    made = fleet(device("h200"), {"idle": (np.array([50.0, 900.0]), False), "l2": (np.array([1.0, 1e9]), True)}, 2)
    assert made.wrong[0] == ""
    assert "a capacity" in made.wrong[1] or "idle power" in made.wrong[1]


def test_the_device_that_changes_nothing_is_the_measured_one():
    made = fleet(device("h200"), {"hbm_bandwidth": (np.array([1.0, 2.0]), True)}, 2)
    found = estimate_fleet(build("gpt2-xl", mode="decode"), made)
    assert found.basis[0] < found.basis[1]


def test_paths_part_where_conditions_do_and_meet_again():
    values = lanes(np.arange(10.0))

    def model(index):
        x = lanes(np.asarray(values)[index])
        return x * 2 if x > 4.5 else x + (1 if x > 2.5 else 0)

    found = np.empty(10)
    for index, part in by_path(model, 10):
        found[index] = part
    assert found.tolist() == [0, 1, 2, 4, 5, 10, 12, 14, 16, 18]
    with pytest.raises(Mixed):
        bool(np.array([1.0, 0.0]).view(Lanes))


def test_caches_of_many_sizes_hold_what_each_alone_holds():
    from ridgeline.cost.estimate import Cache

    draw = np.random.default_rng(0)
    sizes = np.array([10.0, 100.0, 1000.0, 250.0])
    many, alone = FleetCache(sizes, 4), [Cache(size) for size in sizes]
    for _ in range(200):
        reads, writes = draw.integers(0, 12, 2).tolist(), draw.integers(0, 12, 1).tolist()
        read, written = draw.uniform(1, 90, 2).tolist(), draw.uniform(1, 90, 1).tolist()
        shares = many.walk((reads, writes), read, written)
        expected = [cache.walk((reads, writes), read, written) for cache in alone]
        np.testing.assert_allclose(np.broadcast_to(shares, 4), expected, rtol=1e-12)


@pytest.mark.parametrize("axis", ["hbm_bandwidth", "l2", "tdp", "clock", "sms", "l2_bandwidth"])
def test_no_model_of_a_decoding_step_is_run_device_by_device(axis, monkeypatch):
    """Equal numbers collapse: a model that takes all arrays must take one alone too."""
    made = fleet(device("h200"), {axis: (np.linspace(1.0, 2.0, 40), True)}, 40)
    levels = {}
    monkeypatch.setattr("ridgeline.cost.fleet._Shared", lambda *given: _kept(levels, *given))
    estimate_fleet(build("llama3-8b", mode="decode", batch=8), made, "cudagraph")
    assert {kind for kind, level in levels["made"].levels.items() if level == 2} == set()


def _kept(levels, *given):
    levels["made"] = SHARED(*given)
    return levels["made"]
