"""Pricing calls: the same call costs the same, warm inputs never cost more, families answer for their kinds."""

from __future__ import annotations

import math

import pytest

from ridgeline.basis import Basis
from ridgeline.cost.call import Time, call, family, family_of, kinds, memory_floor_s
from ridgeline.cost.price import Pricer, pricer_of
from ridgeline.errors import CostError
from ridgeline.hardware import device

GEMM = call("gemm", "bf16", "fwd", "cublas", m=4096, n=4096, k=4096)
SMALL_ADD = call("add", "bf16", n=1024, c=1024)


def test_a_device_has_one_pricer() -> None:
    assert pricer_of(device("h200")) is pricer_of(device("h200"))
    assert pricer_of(device("h200")) is not pricer_of(device("h200 sms=160"))


def test_a_price_is_remembered() -> None:
    pricer = Pricer(device("h200"))
    assert pricer.price(GEMM) is pricer.price(call("gemm", "bf16", "fwd", "cublas", m=4096, n=4096, k=4096))


def test_a_price_has_family_basis_and_width() -> None:
    price = pricer_of(device("h200")).price(GEMM)
    assert (price.family, price.basis) == ("gemm", Basis.FITTED)
    assert 0 < price.width < 0.5 and price.time.bound == "compute"


def test_nothing_is_faster_than_its_floor() -> None:
    for made in (GEMM, SMALL_ADD, call("softmax", "fp32", n=4096, c=1000)):
        time = pricer_of(device("h200")).price(made).time
        assert 0 < time.floor_s <= time.busy_s


def test_warm_inputs_never_cost_more() -> None:
    pricer = pricer_of(device("h200"))
    times = [pricer.price(SMALL_ADD, step / 8).time.busy_s for step in range(9)]
    assert times == sorted(times, reverse=True) and times[-1] < times[0]


def test_warmth_is_told_apart_in_eighths() -> None:
    pricer = Pricer(device("h200"))
    assert pricer.price(SMALL_ADD, 0.50) is pricer.price(SMALL_ADD, 0.52)
    assert pricer.price(SMALL_ADD, 0.50) is not pricer.price(SMALL_ADD, 0.60)


def test_an_unknown_kind_suggests_the_nearest() -> None:
    with pytest.raises(CostError, match=r"no time model for operator kind 'sofmax'.*'softmax'"):
        pricer_of(device("h200")).price(call("sofmax", "bf16", n=4, c=4))


def test_a_kind_has_one_time_model() -> None:
    with pytest.raises(CostError, match="kind 'gemm' has two time models"):
        family("mine", "gemm", {})(lambda *_: Time(1.0, 1.0, "compute"))
    assert family_of("gemm").name == "gemm"


def test_the_kinds_people_measure_all_have_a_model() -> None:
    wanted = "gemm bmm attention layer_norm rms_norm softmax gelu add sum_dim0 conv2d embedding_bag cross_entropy topk"
    assert {*wanted.split(), "sort", "cumsum"} <= set(kinds())


def test_cold_reads_come_from_dram_and_everything_passes_the_l2() -> None:
    chip = pricer_of(device("h200")).chip
    read = 1e9
    assert memory_floor_s(chip, read, 0, 0.0) == read / chip.dram_bytes_per_s
    assert memory_floor_s(chip, read, 0, 1.0) == read / chip.l2_bytes_per_s
    assert memory_floor_s(chip, 0, chip.l2_bytes, 0.0) == chip.l2_bytes / chip.l2_bytes_per_s  # writes may stay there


def test_a_declared_op_reaches_a_practical_share_of_its_roofline() -> None:
    made = call("roofline", "bf16", library="mine", flops=int(1e12), read_bytes=1000, written_bytes=1000)
    time = pricer_of(device("h200")).price(made).time
    assert time.bound == "compute" and math.isclose(
        time.floor_s, 1e12 / pricer_of(device("h200")).chip.vector_flops_per_s
    )
    assert 1.3 < time.busy_s / time.floor_s < 2.0
