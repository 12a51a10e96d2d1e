"""Recorded ops become work: shapes, layouts, arguments and what is read."""

from __future__ import annotations

import json

import pytest

from ridgeline.cost.lower.eager import lower
from ridgeline.profiler.ops import known, layout_of, site_of

BF, F32, I64 = "c10::BFloat16", "float", "long int"


def site(op, shapes, dtypes, strides="", concrete="", in_lists=""):
    texts = [json.dumps(part) if part else "" for part in (shapes, dtypes, strides, concrete)]
    return site_of(op, *texts, in_lists)


def calls(made):
    return [(one.kind, one.dtype, one.phase, one.dims()) for one in lower(made, "hopper")]


def test_a_product_has_its_sizes_and_layout():
    made = site("aten::mm", [[8, 64], [64, 32]], [BF, BF], [[64, 1], [1, 64]])
    assert made.attrs["m"] == 8 and made.attrs["n"] == 32 and made.attrs["k"] == 64 and made.attrs["trans_b"]
    assert calls(made)[0][:3] == ("gemm", "bf16", "fwd")


def test_a_cast_reads_its_source_and_writes_its_target():
    made = site("aten::copy_", [[100], [100], []], [BF, F32, "Scalar"], "", ["", "", "False"])
    assert made.read_bytes == 400 and made.written_bytes == 200


def test_filling_reads_nothing():
    assert site("aten::zero_", [[10, 10]], [F32]).read_bytes == 0


def test_a_broadcast_operand_is_read_once():
    made = site("aten::add", [[8, 100], [8, 100], []], [BF, BF, "Scalar"], [[100, 1], [0, 1], []])
    assert made.in_bytes == (1600.0, 200.0) and made.written_bytes == 1600


def test_a_convolution_knows_its_output_from_stride_and_padding():
    made = site(
        "aten::cudnn_convolution", [[2, 3, 32, 32], [8, 3, 3, 3], [], [], [], [], [], [], []],
        [BF, BF, "ScalarList", "ScalarList", "ScalarList", "Scalar", "Scalar", "Scalar", "Scalar"], "",
        ["", "", "[1, 1]", "[2, 2]", "[1, 1]", "1", "False", "False", "True"],
    )  # fmt: skip
    assert made.attrs["out_spatial"] == [16, 16] and made.attrs["groups"] == 1


@pytest.mark.parametrize(("flag", "causal"), [("True", True), ("False", False)])
def test_attention_is_causal_when_it_was_called_so(flag, causal):
    shapes = [[2, 4, 16, 64]] * 3 + [[]] * 10
    concrete = ["", "", "", "", "", "", "16", "16", "True", "0.", flag, "False", ""]
    made = site("aten::_cudnn_attention_forward", shapes, [BF] * 3 + ["Scalar"] * 10, "", concrete)
    assert made.attrs["causal"] is causal and made.attrs["backend"] == "cudnn" and made.attrs["s"] == 16


def test_lists_need_the_element_type_from_elsewhere():
    shapes, kinds = [[[4, 8], [4, 8]], []], ["TensorList", "Scalar"]
    assert site("aten::cat", shapes, kinds, "", ["", "1"]) is None
    made = site("aten::cat", shapes, kinds, "", ["", "1"], "bf16")
    assert made.outs[0].shape == (4, 16) and made.read_bytes == 128


def test_what_was_not_recorded_or_is_not_known_has_no_price():
    assert site("aten::_fused_adamw_", [[]], ["TensorList"], "", [""], "bf16") is None
    assert site("aten::mm", [[8, 64]], [BF]) is None
    assert site("aten::native_layer_norm", [[4, 8], [], [8]], [BF, "ScalarList", BF]) is None
    assert site("mylib::op", [[8]], [BF]) is None and not known("mylib::op")
    assert site_of("aten::mm", "not json", "[]") is None


def test_generated_kernels_are_priced_by_their_operands_unless_they_read_parts():
    made = site("triton_poi_fused_add_mul_0", [[100], [100], [100], []], [BF, BF, BF, "Scalar"])
    assert made.attrs["read_bytes"] == 400 and made.attrs["written_bytes"] == 200
    assert not known("triton_poi_fused_embedding_0")


@pytest.mark.parametrize(
    ("size", "step", "layout"),
    [
        ((4, 8), [8, 1], "contiguous"), ((4, 8), [1, 4], "transposed"), ((4, 8), [16, 1], "strided"),
        ((2, 3, 4, 4), [48, 1, 12, 3], "channels_last"), ((1, 8), [1, 1], "contiguous"), ((4, 8), None, "contiguous"),
    ],
)  # fmt: skip
def test_strides_are_read_as_layouts(size, step, layout):
    assert layout_of(size, step) == layout
