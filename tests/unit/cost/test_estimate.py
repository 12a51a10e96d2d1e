"""From a graph to a prediction: what adds up, what waits, what is remembered, and what the basis says."""

from __future__ import annotations

import math

import pytest

from ridgeline.api import predict
from ridgeline.basis import Basis, worst
from ridgeline.cost.estimate import EXECUTIONS, Cache, estimate
from ridgeline.errors import CostError
from ridgeline.graph import Builder, Graph, tensor
from ridgeline.hardware import device
from ridgeline.models import build
from ridgeline.models.card import PRECISIONS
from ridgeline.units import show_bytes

H200 = device("h200")
CASES = [
    ("llama3-8b", "infer"),
    ("llama3-8b", "decode"),
    ("resnet50", "train"),
    ("dlrm", "infer"),
    ("bert-large", "train"),
]


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_rows_add_up_to_the_totals(name: str, mode: str, execution: str) -> None:
    p = predict(name, mode=mode, execution=execution)
    rows = p.rows()
    assert sum(row.expected_s for row in rows) == pytest.approx(p.busy_s)
    assert sum(row.floor_s for row in rows) == pytest.approx(p.floor_s)
    assert sum(row.num_kernels for row in rows) == p.num_kernels
    assert sum(row.flops for row in rows) == pytest.approx(p.flops)
    for key in ("op", "module", "phase", "bound"):
        assert sum(group["expected_s"] for group in p.by(key)) == pytest.approx(p.busy_s)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_no_row_is_faster_than_light_and_every_interval_holds_its_expectation(name, mode, execution) -> None:
    p = predict(name, mode=mode, execution=execution)
    for row in p.rows():
        assert row.floor_s <= row.expected_s * (1 + 1e-9), row
        assert row.low_s <= row.expected_s <= row.high_s, row
    assert p.floor_s <= p.busy_s <= p.expected_s
    assert p.interval_s[0] <= p.expected_s <= p.interval_s[1]
    assert p.busy_interval_s[0] <= p.busy_s <= p.busy_interval_s[1]


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b", "resnet50", "dlrm", "whisper-large-v3"])
def test_every_precision_of_the_zoo_is_priced(name: str, precision: str, execution: str) -> None:
    p = predict(name, precision=precision, execution=execution)
    assert 0 < p.floor_s <= p.busy_s


def test_narrow_weights_make_a_language_model_faster_and_smaller() -> None:
    half, narrow = (predict("llama3-8b", batch=4, precision=precision) for precision in ("bf16", "fp8"))
    assert narrow.busy_s < half.busy_s and narrow.peak_bytes < half.peak_bytes


def test_groups_come_largest_first_with_the_worst_basis_in_them() -> None:
    p = predict("llama3-8b", on="h200 sms=160")
    groups = p.by("op")
    assert [g["expected_s"] for g in groups] == sorted((g["expected_s"] for g in groups), reverse=True)
    assert worst(g["basis"] for g in groups) is p.basis is Basis.ASSUMED


def test_repeated_layers_cost_as_often_as_they_run() -> None:
    p = predict("llama3-8b")
    by_times = {row.times for row in p.rows()}
    assert by_times == {1, 32}
    (attention,) = [row for row in p.rows() if row.op == "attention"]
    assert attention.times == 32 and attention.module == "model.layers.*.self_attn"


def pair(num_rows: int, ops: int) -> Graph:
    b = Builder("chain")
    at = b.input("x", tensor((num_rows, 4096)))
    for _ in range(ops):
        (at,) = b.node("pointwise", [at], [tensor((num_rows, 4096))], fn="relu")
    return b.finish([at])


def test_small_kernels_leave_the_device_idle_and_large_ones_do_not() -> None:
    small, large = estimate(pair(1, 200), H200), estimate(pair(65536, 200), H200)
    assert small.idle_s > 0.5 * small.expected_s
    assert large.idle_s < 0.05 * large.expected_s
    assert small.expected_s == pytest.approx(small.host_s, rel=0.05)


def test_a_host_bound_step_runs_faster_as_a_graph() -> None:
    eager, recorded = (estimate(pair(1, 200), H200, e) for e in ("eager", "cudagraph"))
    assert recorded.expected_s < 0.5 * eager.expected_s
    assert recorded.busy_s == pytest.approx(eager.busy_s)


def test_a_sync_in_the_middle_makes_the_host_start_over() -> None:
    def graph(sync: bool) -> Graph:
        b = Builder("synced")
        at = b.input("x", tensor((65536, 4096)))
        (at,) = b.node("pointwise", [at], [tensor((65536, 4096))], fn="exp")
        if sync:
            b.node("sync", [at], [], fn="item")
        y = b.input("y", tensor((1, 64)))
        for _ in range(20):
            (y,) = b.node("pointwise", [y], [tensor((1, 64))], fn="relu")
        return b.finish([at, y])

    free, synced = estimate(graph(False), H200), estimate(graph(True), H200)
    assert synced.expected_s > free.expected_s + 20 * 5e-6


def test_what_the_last_kernel_wrote_is_read_from_the_cache() -> None:
    """A value that fits in the L2 is warm for its consumer; one that does not is not."""
    fits, streams = estimate(pair(1024, 2), H200).rows(), estimate(pair(65536, 2), H200).rows()
    assert fits[1].expected_s < 0.97 * fits[0].expected_s
    assert streams[1].expected_s == pytest.approx(streams[0].expected_s)


def test_the_cache_forgets_the_least_recently_used_first() -> None:
    cache = Cache(100.0)
    for storage in (1, 2, 3):
        cache.touch({storage: 40.0})
    assert [cache.warm_frac([(s, 40.0)]) for s in (1, 2, 3)] == [0.0, 1.0, 1.0]
    cache.touch({2: 40.0})
    cache.touch({4: 40.0})
    assert [cache.warm_frac([(s, 40.0)]) for s in (2, 3, 4)] == [1.0, 0.0, 1.0]


def test_a_walk_larger_than_the_cache_leaves_a_share_of_each_tensor() -> None:
    cache = Cache(100.0)
    cache.touch({1: 40.0})
    cache.touch({2: 150.0, 3: 50.0})
    assert cache.warm_frac([(1, 40.0)]) == 0.0
    assert cache.warm_frac([(2, 150.0)]) == cache.warm_frac([(3, 50.0)]) == 0.5
    assert cache.used == 100.0


def test_warmth_is_the_share_of_the_bytes() -> None:
    cache = Cache(100.0)
    cache.touch({1: 30.0})
    assert cache.warm_frac([(1, 30.0), (2, 90.0)]) == 0.25
    assert cache.warm_frac([]) == 0.0


def test_an_unknown_execution_suggests_the_nearest() -> None:
    with pytest.raises(CostError, match=r"unknown execution mode 'compild'.*'compiled'"):
        estimate(pair(1, 1), H200, "compild")


def test_an_attribute_that_is_no_plain_value_is_named() -> None:
    b = Builder("odd")
    x = b.input("x", tensor((4, 8)))
    with b.module("layer"):
        (y,) = b.node("pointwise", [x], [tensor((4, 8))], fn="relu", scalars={"a": 1})
    with pytest.raises(CostError, match=r"pointwise.*layer.*no plain value"):
        estimate(b.finish([y]), H200)


def test_an_empty_graph_takes_no_device_time() -> None:
    p = estimate(Builder("nothing").finish(), H200)
    assert (p.busy_s, p.floor_s, p.num_kernels, p.peak_bytes) == (0.0, 0.0, 0, 0)
    assert math.isfinite(p.power_w) and p.rows() == []


# Basis.


def test_a_measured_device_is_fitted_throughout() -> None:
    p = predict("llama3-8b")
    assert p.basis is Basis.FITTED and p.calibrated_on == "h200"
    assert not any("calibrat" in note for note in p.notes)


def test_an_unmeasured_device_is_its_datasheet_and_says_so() -> None:
    p = predict("llama3-8b", on="p100-sxm2")
    assert p.basis >= Basis.DATASHEET and p.calibrated_on == ""
    assert any("p100-sxm2 is not calibrated" in note for note in p.notes)


def test_an_imagined_device_is_assumed_and_names_the_calibration_it_borrows() -> None:
    p = predict("llama3-8b", on="h200 hbm_bandwidth=2x")
    assert p.basis is Basis.ASSUMED and p.calibrated_on == "h200"
    assert any(note.startswith("calibration of h200 used for") for note in p.notes)


def test_worse_bases_have_wider_intervals() -> None:
    def width(on: str) -> float:
        low, high = predict("llama3-8b", batch=8, on=on).busy_interval_s
        return math.log(high / low)

    assert width("h200") < width("v100-sxm2-32gb")
    assert width("h200") < width("h200 hbm_bandwidth=1.01x")


# Memory and money.


def test_a_model_that_does_not_fit_says_by_how_much_and_what_would_help() -> None:
    p = predict("llama3-405b", on="h200")
    assert p.missing_bytes == p.peak_bytes - p.device.dram.capacity_bytes > 0
    (note,) = [n for n in p.notes if "does not fit" in n]
    ranks = math.ceil(p.peak_bytes / (0.92 * p.capacity_bytes))
    assert f"misses {show_bytes(p.missing_bytes)}" in note and f"shard over {ranks} devices" in note
    assert p.expected_s > 0  # predicted all the same


def test_training_that_does_not_fit_suggests_what_training_can_do() -> None:
    (note,) = [n for n in predict("llama3-70b", mode="train").notes if "does not fit" in n]
    assert "recompute activations" in note and "ZeRO" in note


def test_a_model_that_fits_says_nothing_of_it() -> None:
    p = predict("bert-large")
    assert p.missing_bytes == 0 and not any("fit" in note for note in p.notes)


def test_money_is_time_at_the_hourly_price() -> None:
    p = predict("llama3-8b")
    assert p.usd == pytest.approx(p.expected_s / 3600 * H200.price_usd_per_hour)
    twice = predict("llama3-8b", on="h200 price=2x")
    assert twice.usd == pytest.approx(2 * p.usd)


def test_power_is_energy_over_time() -> None:
    p = predict("resnet50", batch=32)
    assert p.power_w == pytest.approx(p.energy_j / p.expected_s) and p.power_w < H200.tdp_w


# The dictionary a machine reads.


def test_the_dictionary_holds_what_the_prediction_says() -> None:
    p = predict("gpt2-xl", mode="train", execution="compiled")
    found = p.to_dict()
    for key in ("expected_s", "busy_s", "floor_s", "peak_bytes", "energy_j", "usd", "num_params", "missing_bytes"):
        assert found[key] == getattr(p, key)
    assert (found["device"], found["execution"], found["mode"], found["basis"]) == (
        "h200",
        "compiled",
        "train",
        "fitted",
    )
    assert len(found["rows"]) == len(p.rows()) and found["rows"][0]["basis"] in ("fitted", "measured")
    assert sum(found["memory"].values()) == p.peak_bytes


def test_predictions_are_the_same_every_time() -> None:
    graph = build("mixtral-8x7b", seq=512)
    first, again = (estimate(graph, H200).to_dict() for _ in range(2))
    assert first == again
