"""Imagined devices: what changes, what follows, what is refused."""

from __future__ import annotations

import pytest

from ridgeline.basis import Basis
from ridgeline.errors import HardwareError
from ridgeline.hardware import device

H200 = device("h200")


def test_text_and_keywords_mean_the_same() -> None:
    assert device("h200 hbm_bandwidth=2x sms=160") == H200.override(hbm_bandwidth="2x", sms=160)


def test_the_name_shows_the_change_and_the_parent_is_kept() -> None:
    imagined = device("h200 hbm_bandwidth=2x sms=160")
    assert imagined.name == "h200 hbm_bandwidth=2x sms=160"
    assert imagined.parent == "h200" and imagined.is_imagined and not H200.is_imagined


def test_the_name_of_an_imagined_device_describes_it_again() -> None:
    chained = H200.override(sms="2x", hbm_bandwidth=9.6e12).override(bf16="3PFLOP/s", l2="100 MB")
    assert device(chained.name) == chained
    assert chained.parent == "h200"


def test_absolute_values_carry_units() -> None:
    imagined = device("h200 hbm_bandwidth=9.6TB/s l2=100MB tdp=1kW bf16=2PFLOP/s memory=288GB price=$5/h clock=2.1GHz")
    assert imagined.dram.bandwidth_bytes_per_s == 9.6e12
    assert imagined.l2.capacity_bytes == 100e6
    assert imagined.tdp_w == 1000
    assert imagined.peak_flops_per_s("tensor", "bf16") == 2e15
    assert imagined.dram.capacity_bytes == 288e9
    assert imagined.price_usd_per_hour == 5
    assert imagined.boost_hz == 2.1e9


def test_more_cores_raise_every_peak_and_the_l2_bandwidth() -> None:
    wider = H200.override(sms=264)
    assert wider.peaks == {key: pytest.approx(2 * rate) for key, rate in H200.peaks.items()}
    assert wider.l2.bandwidth_bytes_per_s == pytest.approx(2 * H200.l2.bandwidth_bytes_per_s)
    assert wider.shared.bandwidth_bytes_per_s == H200.shared.bandwidth_bytes_per_s
    assert wider.shared.total_bandwidth_bytes_per_s == pytest.approx(2 * H200.shared.total_bandwidth_bytes_per_s)
    assert (wider.dram, wider.links, wider.tdp_w) == (H200.dram, H200.links, H200.tdp_w)


def test_a_faster_clock_raises_every_peak_and_on_chip_bandwidth() -> None:
    faster = H200.override(clock="1.5x")
    assert faster.peaks == {key: pytest.approx(1.5 * rate) for key, rate in H200.peaks.items()}
    for level in ("l2", "shared"):
        before, after = getattr(H200, level), getattr(faster, level)
        assert after.bandwidth_bytes_per_s == pytest.approx(1.5 * before.bandwidth_bytes_per_s)
        assert after.capacity_bytes == before.capacity_bytes
    assert faster.tensor_hz == pytest.approx(1.5 * H200.tensor_hz)


def test_a_peak_given_explicitly_does_not_scale() -> None:
    imagined = device("h200 sms=2x bf16=1x fp8=5PFLOP/s")
    assert imagined.peaks["tensor", "bf16"] == H200.peaks["tensor", "bf16"]
    assert imagined.peaks["tensor", "fp8"] == 5e15
    assert imagined.peaks["tensor", "fp16"] == 2 * H200.peaks["tensor", "fp16"]


def test_what_was_imagined_is_assumed_and_the_rest_keeps_its_basis() -> None:
    imagined = H200.override(sms=160)
    assert imagined.provenance("num_cores") == (Basis.ASSUMED, "imagined: sms=160")
    assert imagined.provenance("tensor.bf16") == (Basis.ASSUMED, "imagined: scaled with sms=160")
    assert imagined.provenance("tdp_w") == H200.provenance("tdp_w")


@pytest.mark.parametrize("synonyms", [
    ("hbm_bandwidth", "dram_bandwidth", "memory_bandwidth", "dram.bandwidth_bytes_per_s"), ("memory", "hbm", "dram"),
    ("sms", "cores", "cus", "num_cores"), ("clock", "boost_clock"), ("tdp", "power"),
    ("bf16", "tensor.bf16", "bfloat16"), ("nvlink", "link", "nvlink-bandwidth"), ("L2", "llc"),
])  # fmt: skip
def test_synonyms_change_the_same_number(synonyms: tuple[str, ...]) -> None:
    numbers = [device(f"h200 {word}=1.5x").numbers() for word in synonyms]
    assert all(number == numbers[0] for number in numbers) and numbers[0] != H200.numbers()


def test_vector_and_tensor_peaks_are_told_apart() -> None:
    imagined = device("h200 vector.fp32=2x")
    assert imagined.peaks["vector", "fp32"] == 2 * H200.peaks["vector", "fp32"]
    assert imagined.peaks["tensor", "tf32"] == H200.peaks["tensor", "tf32"]


def test_a_peak_the_device_lacks_can_be_imagined() -> None:
    assert device("h200 fp4=4PFLOP/s").peak_flops_per_s("tensor", "fp4") == 4e15
    with pytest.raises(HardwareError, match=r"no tensor\.fp4 to multiply"):
        device("h200 fp4=2x")


def test_changing_nothing_returns_the_device_itself() -> None:
    assert H200.override() is H200
    assert device("h200 sms=132 hbm_bandwidth=1x") is H200


@pytest.mark.parametrize(("text", "complaint"), [
    ("h200 hbm_bandwith=2x", "unknown override 'hbm_bandwith'; did you mean 'hbm_bandwidth'"),
    ("h200 sms=0", "'0' cannot be a count"),
    ("h200 sms=-3", "'-3' cannot be a count"),
    ("h200 sms=13.5", "whole number"),
    ("h200 sms=-1x", "'-1x' cannot be a count"),
    ("h200 hbm_bandwidth=0x", "'0x' cannot be a bandwidth"),
    ("h200 hbm_bandwidth=4.8", "'4.8' cannot be a bandwidth"),
    ("h200 hbm_bandwidth=4.8TB", "cannot read '4.8TB' as a bandwidth"),
    ("h200 l2=100", "'100' cannot be a capacity"),
    ("h200 l2=1TB", "more than the whole memory"),
    ("h200 l2=lots", "cannot read 'lots'"),
    ("h200 tdp=50W", "must be below TDP"),
    ("h200 base_clock=3GHz", "base clock is above"),
    ("h200 sms=160 cores=170", "already changes num_cores"),
    ("h200 sms=160 sms=170", "write each change once"),
    ("h200 sms=", "write each change once"),
    ("h200 sms=160; h100", "write a device name and then its changes"),
    ("l4 nvlink=900GB/s", "no scale_up.bandwidth_bytes_per_s to change"),
    ("h200 bf17=2x", "unknown override 'bf17'; did you mean 'bf16'"),
])  # fmt: skip
def test_impossible_changes_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(HardwareError, match=complaint):
        device(text)


def test_a_faster_clock_raises_the_base_clock_too() -> None:
    assert H200.override(clock="1.5x").base_hz == pytest.approx(1.5 * H200.base_hz)
    assert H200.override(clock="1.5x", base_clock="1.2GHz").base_hz == 1.2e9


def test_a_multiple_of_a_count_is_rounded_to_at_least_one() -> None:
    assert H200.override(sms="0.001x").num_cores == 1
    assert H200.override(sms="0.51x").num_cores == 67


def test_limits_that_meet_are_refused() -> None:
    with pytest.raises(HardwareError, match="must be below TDP"):
        H200.override(idle="200W", tdp="200W")
    with pytest.raises(HardwareError, match="more than the whole memory"):
        H200.override(l2="1GB", memory="1GB")
