"""Every device file loads, is physically possible, and is found by the names people type."""

from __future__ import annotations

import tomllib
from collections.abc import Callable

import pytest

from ridgeline.basis import Basis
from ridgeline.errors import HardwareError
from ridgeline.hardware import Device, device, devices
from ridgeline.hardware.files import load_device
from ridgeline.resources import data_dir

ASKED_FOR = """
p100-sxm2 p100-pcie v100-sxm2-16gb v100-sxm2-32gb v100-pcie t4 a10 a30 a40 a100-pcie-40gb a100-pcie-80gb
a100-sxm-40gb a100-sxm-80gb l4 l40 l40s rtx-3090 rtx-4090 rtx-5090 rtx-6000-ada rtx-pro-6000 h100-pcie h100-sxm h100-nvl
h200 h20 gh200 b200 b300 gb200 gb300 mi210 mi250x mi300x mi300a mi325x mi355x tpu-v4 tpu-v5e tpu-v5p tpu-v6e tpu-v7
gaudi2 gaudi3 trainium1 trainium2 inferentia2 epyc-9654 epyc-9755 xeon-8480+ xeon-6980p graviton4 grace
"""


@pytest.fixture(params=devices())
def each(request: pytest.FixtureRequest) -> Device:
    return device(request.param)


def test_every_device_asked_for_has_a_file() -> None:
    assert set(ASKED_FOR.split()) <= set(devices())


def test_every_number_has_a_basis_and_a_source(each: Device) -> None:
    for field in each.numbers():
        basis, source = each.provenance(field)
        assert isinstance(basis, Basis) and source.strip()
    assert set(each.provenances) == set(each.numbers())


def test_memories_get_faster_and_smaller_toward_the_cores(each: Device) -> None:
    assert each.dram.capacity_bytes > each.l2.capacity_bytes >= each.shared.capacity_bytes
    assert each.l2.bandwidth_bytes_per_s > each.dram.bandwidth_bytes_per_s
    assert each.shared.total_bandwidth_bytes_per_s >= each.l2.bandwidth_bytes_per_s * 0.9


def test_narrower_numbers_are_never_slower(each: Device) -> None:
    vector_fp32 = each.peak_flops_per_s("vector", "fp32")
    assert each.peak_flops_per_s("tensor", "bf16") >= vector_fp32
    assert each.peak_flops_per_s("tensor", "fp16") >= vector_fp32
    for wide, narrow in (("fp64", "fp32"), ("tf32", "fp16"), ("bf16", "fp8"), ("fp8", "fp6"), ("fp6", "fp4")):
        for unit in ("tensor", "vector"):
            if (unit, wide) in each.peaks and (unit, narrow) in each.peaks:
                assert each.peaks[unit, narrow] >= each.peaks[unit, wide]


def test_power_clock_and_price_are_possible(each: Device) -> None:
    assert 0 < each.idle_w < each.tdp_w
    assert each.base_hz <= each.boost_hz and each.tensor_hz <= each.boost_hz
    assert 0.05 < each.price_usd_per_hour < 20
    assert each.price_date[:4].isdigit() and int(each.price_date[:4]) >= each.release_year - 1


NVIDIA_GPUS = [name for name in devices() if (device(name).vendor, device(name).kind) == ("NVIDIA", "gpu")]


@pytest.mark.parametrize("name", NVIDIA_GPUS)
def test_nvidia_vector_peaks_are_those_of_their_lanes(name: str) -> None:
    each = device(name)
    lanes = 64 if each.arch in ("pascal", "volta", "turing", "ampere") else 128
    expected = each.num_cores * lanes * 2 * each.boost_hz
    slack = 0.15 if each.name == "h20" else 0.06
    assert each.peak_flops_per_s("vector", "fp32") == pytest.approx(expected, rel=slack)


@pytest.mark.parametrize(("name", "bf16_flops_a_clock_and_sm"), [
    ("a100-sxm-80gb", 2048), ("h100-sxm", 4096), ("h200", 4096), ("b200", 8192), ("l4", 1024), ("l40s", 1024),
    ("rtx-4090", 512), ("rtx-3090", 512), ("a10", 1024), ("a40", 1024), ("h100-pcie", 4096), ("h100-nvl", 4096),
])  # fmt: skip
def test_tensor_peaks_are_dense(name: str, bf16_flops_a_clock_and_sm: int) -> None:
    found = device(name)
    a_clock_and_sm = found.peak_flops_per_s("tensor", "bf16") / found.num_cores / found.tensor_hz
    assert a_clock_and_sm == pytest.approx(bf16_flops_a_clock_and_sm, rel=0.07)


def test_the_h200_is_what_its_vendor_says() -> None:
    h200 = device("h200")
    assert (h200.num_cores, h200.boost_hz, h200.tdp_w) == (132, 1.98e9, 700)
    assert h200.peak_flops_per_s("tensor", "bf16") == 989.4e12
    assert h200.dram.bandwidth_bytes_per_s == 4.8e12
    assert h200.l2.capacity_bytes == 60 * 2**20
    assert h200.shared.total_capacity_bytes == 132 * 228 * 2**10
    assert h200.link("scale_up").bandwidth_bytes_per_s == 450e9 and h200.link("scale_up").domain_size == 8
    assert h200.provenance("tensor.bf16").basis is Basis.DATASHEET
    assert h200.provenance("idle_w").basis is Basis.ASSUMED


@pytest.mark.parametrize(("typed", "name"), [
    ("H200", "h200"), ("h200-sxm", "h200"), ("h100", "h100-sxm"), ("a100", "a100-sxm-80gb"), ("v100", "v100-sxm2-16gb"),
    ("A100_SXM_80GB", "a100-sxm-80gb"), ("4090", "rtx-4090"), ("rtx 4090", "rtx-4090"), ("b200-sxm", "b200"),
    ("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100-sxm"), ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
    ("Tesla V100-SXM2-32GB", "v100-sxm2-32gb"), ("NVIDIA GeForce RTX 3090", "rtx-3090"), ("Tesla T4", "t4"),
    ("AMD Instinct MI300X", "mi300x"), ("mi300", "mi300x"), ("tpu_v5p", "tpu-v5p"), ("ironwood", "tpu-v7"),
    ("trn2", "trainium2"), ("gaudi-3", "gaudi3"), ("xeon-8480", "xeon-8480+"), ("epyc 9654", "epyc-9654"),
    ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"), ("AMD EPYC 9755", "epyc-9755"), ("grace", "grace"),
])  # fmt: skip
def test_people_find_devices_by_the_names_they_type(typed: str, name: str) -> None:
    assert device(typed).name == name


def test_every_alias_leads_to_a_file_and_hides_none() -> None:
    aliases = tomllib.loads((data_dir() / "devices" / "aliases.toml").read_text(encoding="utf-8"))
    words = [word for typed in aliases.values() for word in typed]
    assert set(aliases) <= set(devices())
    assert len(words) == len(set(words)) and not set(words) & set(devices())


@pytest.mark.parametrize(("typed", "suggestion"), [("h20o", "h200"), ("mi300xx", "mi300x"), ("rtx-4091", "rtx-4090")])
def test_an_unknown_device_names_its_neighbors(typed: str, suggestion: str) -> None:
    with pytest.raises(HardwareError, match=f"unknown device '{typed}'.*'{suggestion}'"):
        device(typed)


@pytest.mark.parametrize("typed", ["", "  ", "../h200", "aliases", "sms=160", "/etc/passwd"])
def test_what_is_no_name_is_refused(typed: str) -> None:
    with pytest.raises(HardwareError):
        device(typed)


def test_a_device_passes_through() -> None:
    assert device(device("h200")) is device("h200")


def test_devices_are_values() -> None:
    assert hash(device("h200")) == hash(load_device(data_dir() / "devices" / "h200.toml"))
    assert device("h200") == load_device(data_dir() / "devices" / "h200.toml")
    assert device("h200") != device("h100")


def test_loading_one_device_takes_milliseconds(num_calls: Callable[..., int]) -> None:
    path = data_dir() / "devices" / "h200.toml"
    assert num_calls(lambda: load_device(path)) < 10_000  # 3,680, and a millisecond
