"""What stands in for a peak that a device does not have, and how honestly."""

from __future__ import annotations

import pytest

from ridgeline.basis import Basis
from ridgeline.errors import HardwareError
from ridgeline.hardware import device, devices


def test_volta_runs_bf16_as_fp32_and_says_so() -> None:
    peak = device("v100").peak("tensor", "bf16")
    assert peak.flops_per_s == device("v100").peak_flops_per_s("vector", "fp32")
    assert (peak.unit, peak.dtype, peak.basis) == ("vector", "fp32", Basis.ASSUMED)
    assert "converted to fp32" in peak.source
    assert device("v100").provenance("tensor.bf16").basis is Basis.ASSUMED


def test_fp32_matmul_uses_the_vector_units_unless_the_matrix_units_do_it() -> None:
    assert device("h200").peak("tensor", "fp32").unit == "vector"
    assert device("mi300x").peak("tensor", "fp32").unit == "tensor"


def test_tf32_has_its_own_peak() -> None:
    assert device("a100").peak_flops_per_s("tensor", "tf32") == 156e12
    assert device("v100").peak("tensor", "tf32").dtype == "fp32"


def test_pascal_halves_run_on_the_vector_units() -> None:
    assert device("p100").peak("tensor", "fp16")[3:] == ("vector", "fp16")


def test_dtype_names_of_torch_are_understood() -> None:
    peak = device("h200").peak_flops_per_s
    assert peak("tensor", "torch.bfloat16") == peak("tensor", "bf16")
    assert peak("tensor", "fp8_e5m2") == peak("tensor", "fp8")


@pytest.mark.parametrize(("name", "dtype"), [("a100", "fp8"), ("h200", "fp4"), ("v100", "int4"), ("rtx-4090", "fp6")])
def test_an_impossible_dtype_is_an_error_that_names_what_there_is(name: str, dtype: str) -> None:
    with pytest.raises(HardwareError, match=rf"cannot compute {dtype} on its tensor units; it has tensor\.\w+, "):
        device(name).peak("tensor", dtype)


def test_an_unknown_unit_is_an_error() -> None:
    with pytest.raises(HardwareError, match="unknown unit 'tensors'"):
        device("h200").peak("tensors", "bf16")


@pytest.mark.parametrize("name", devices())
@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16", "bf16"])
def test_every_device_multiplies_matrices_in_the_common_dtypes(name: str, dtype: str) -> None:
    assert device(name).peak_flops_per_s("tensor", dtype) > 0


@pytest.mark.parametrize("name", devices())
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "fp8", "int64", "int32", "int8", "bool", "complex64"])
def test_every_device_computes_elementwise_in_every_common_dtype(name: str, dtype: str) -> None:
    assert device(name).peak_flops_per_s("vector", dtype) > 0


def test_the_basis_of_several_fields_is_the_worst() -> None:
    h200 = device("h200")
    assert h200.basis_of("tensor.bf16", "dram.bandwidth_bytes_per_s") is Basis.DATASHEET
    assert h200.basis_of("tensor.bf16", "l2.bandwidth_bytes_per_s") is Basis.ASSUMED
    assert h200.basis is Basis.ASSUMED


def test_an_unknown_field_or_link_is_an_error() -> None:
    with pytest.raises(HardwareError, match=r"no number 'tdp'.*'tdp_w'"):
        device("h200").provenance("tdp")
    with pytest.raises(HardwareError, match="no 'scale_up' link; it has pcie"):
        device("l4").link("scale_up")
