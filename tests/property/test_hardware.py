"""Laws of imagined devices: factors compose, one changes nothing, order does not matter."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ridgeline.basis import Basis
from ridgeline.hardware import Device, device, devices

every_device = st.sampled_from(devices()).map(device)
SMOOTH = "hbm_bandwidth l2_bandwidth shared_bandwidth clock price bf16 vector.fp32"
smooth_keys = st.sampled_from(SMOOTH.split())
any_key = st.sampled_from(["sms", "memory", "l2", "tdp", "idle", "pcie", *SMOOTH.replace("bf16 ", "").split()])
factors = st.floats(0.25, 4.0).map(lambda factor: float(f"{factor:.4g}"))


def changed(found: Device, key: str, factor: float) -> Device:
    assume(key != "bf16" or ("tensor", "bf16") in found.peaks)
    return found.override(**{key: f"{factor!r}x"})


@given(every_device, st.lists(any_key, unique=True))
def test_one_times_is_the_device_itself(found: Device, keys: list[str]) -> None:
    assert found.override(**dict.fromkeys(keys, "1x")) is found


@given(every_device, smooth_keys, factors, factors)
def test_factors_compose(found: Device, key: str, first: float, second: float) -> None:
    chained = changed(changed(found, key, first), key, second).numbers()
    at_once = changed(found, key, first * second).numbers()
    assert chained == {field: pytest.approx(number, rel=1e-9) for field, number in at_once.items()}


@given(every_device, factors, factors)
def test_the_order_of_changes_does_not_matter(found: Device, bandwidth: float, clock: float) -> None:
    one = found.override(hbm_bandwidth=f"{bandwidth!r}x", clock=f"{clock!r}x")
    other = found.override(clock=f"{clock!r}x", hbm_bandwidth=f"{bandwidth!r}x")
    assert one.numbers() == other.numbers()


@given(every_device, smooth_keys, factors)
def test_an_imagined_device_is_found_again_by_its_name(found: Device, key: str, factor: float) -> None:
    imagined = changed(found, key, factor)
    assert device(imagined.name) == imagined


@given(every_device, smooth_keys, factors)
def test_changed_numbers_are_assumed_and_the_others_keep_their_basis(found: Device, key: str, factor: float) -> None:
    imagined = changed(found, key, factor)
    before = found.numbers()
    for field, number in imagined.numbers().items():
        if number != before[field]:
            assert imagined.provenance(field).basis is Basis.ASSUMED
        else:
            assert imagined.provenance(field) == found.provenance(field)


@given(every_device, st.integers(1, 1000), st.sampled_from(["fp32", "bf16"]))
def test_more_cores_are_never_slower(found: Device, more: int, dtype: str) -> None:
    wider = found.override(sms=found.num_cores + more)
    assert wider.peak_flops_per_s("tensor", dtype) > found.peak_flops_per_s("tensor", dtype)
