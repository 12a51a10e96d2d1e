"""Rows as long as models have them where kernels change their way: right beside float64, and the same twice."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ridgeline.bench.check import check_case
from ridgeline.kernels.contract import case
from ridgeline.kernels.variants import variants_of

pytestmark = pytest.mark.usefixtures("packed")
FP8 = "float8_e4m3fn"
CASES = [
    *((name, case(dtype, rows=300, cols=18432)) for dtype in ("bfloat16", "float16")
      for name in ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm")),
    *((name, case("bfloat16", rows=4200, cols=cols)) for cols in (5376, 6144)
      for name in ("add_rms_norm", "add_layer_norm")),
    ("add_layer_norm", case("float16", rows=600, cols=12288)), ("add_rms_norm", case("bfloat16", rows=600, cols=14336)),
    *(("quantize", case("float16", rows=300, cols=cols, kind=kind, per="row", block=0))
      for cols, kind in ((17408, FP8), (18432, "int8"), (29568, FP8), (53248, "int8"), (17409, FP8))),
    ("layer_norm_quant", case("bfloat16", rows=4100, cols=3584, kind="int8", block=0)),
    ("layer_norm_quant", case("bfloat16", rows=4100, cols=7168, kind=FP8, block=128)),
    ("layer_norm_quant", case("float16", rows=4100, cols=4608, kind=FP8, block=128)),
    ("rms_norm_quant", case("bfloat16", rows=4100, cols=7168, kind=FP8, block=128)),
    ("layer_norm_quant", case("bfloat16", rows=2051, cols=4096, kind=FP8, block=0)),
    ("layer_norm_quant", case("bfloat16", rows=4100, cols=2880, kind="int8", block=0)),
    ("layer_norm_quant", case("float32", rows=8200, cols=1280, kind=FP8, block=128)),
    ("rms_norm_quant", case("bfloat16", rows=300, cols=18432, kind="int8", block=0)),
    *(("rms_norm", case(dtype, rows=4101, cols=cols)) for dtype, cols in
      (("bfloat16", 1152), ("float16", 1536), ("bfloat16", 1033))),
    *(("cross_entropy", case(dtype, rows=515, cols=50265)) for dtype in ("bfloat16", "float16", "float32")),
]  # fmt: skip


def wanted_variants() -> list[Any]:
    """What this file launches, for a pack."""
    return list(dict.fromkeys(variant for name, of in CASES for variant in variants_of(name, [of])))


@pytest.mark.parametrize(("name", "of"), CASES, ids=lambda value: str(value).replace(" ", "-"))
def test_rows_of_models_agree_with_float64(name, of):
    found = check_case(name, of, torch.device("cuda"), 1)
    wrong = [finding for finding in found if not finding.ok]
    assert found and not wrong, wrong
