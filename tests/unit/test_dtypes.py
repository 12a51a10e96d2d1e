from __future__ import annotations

import pytest

from ridgeline.dtypes import DType, dtype
from ridgeline.errors import GraphError


@pytest.mark.parametrize(("name", "short", "itemsize"), [
    ("bf16", "bf16", 2), ("bfloat16", "bf16", 2), ("torch.bfloat16", "bf16", 2), ("BF16", "bf16", 2),
    ("half", "fp16", 2), ("float32", "fp32", 4), ("double", "fp64", 8), ("float8_e4m3fn", "fp8", 1),
    ("float8_e5m2", "fp8_e5m2", 1), ("nvfp4", "fp4", 0.5), ("int4", "int4", 0.5), ("fp6", "fp6", 0.75),
    ("long", "int64", 8), ("torch.bool", "bool", 1), ("complex64", "complex64", 8),
])  # fmt: skip
def test_every_name_people_write_leads_to_one_type(name: str, short: str, itemsize: float):
    assert dtype(name).name == short
    assert dtype(name).itemsize == itemsize
    assert dtype(dtype(name)) is dtype(short)


def test_types_print_as_their_short_name():
    assert str(dtype("bfloat16")) == "bf16"
    assert isinstance(dtype("bf16"), DType)


def test_an_unknown_type_suggests_the_nearest():
    with pytest.raises(GraphError, match="unknown dtype 'bf17'; did you mean 'bf16'"):
        dtype("bf17")
