"""`ridgeline validate` scores what can be used and names what cannot."""

from __future__ import annotations

import json
import statistics

import pytest

from ridgeline.errors import InputError
from ridgeline.validation.operators import call_of, footprint_bytes, predict_call

HEADER = "kind,dtype,phase,library,shape,measured_s"
SHAPES = {
    "gemm": ("cublas", "m=1024;n=2048;k=4096"),
    "bmm": ("cublas", "b=8;m=256;n=256;k=128"),
    "layer_norm": ("aten", "n=4096;c=1024"),
    "attention": ("fa2", "b=2;h=16;hkv=16;s=1024;skv=1024;d=64;causal=1"),
    "rms_norm": ("aten", "n=4096;c=1024"),
    "softmax": ("aten", "n=4096;c=1024"),
    "gelu": ("aten", "n=4096;c=1024"),
    "add": ("aten", "n=4096;c=1024"),
    "sum_dim0": ("aten", "n=4096;c=1024"),
    "conv2d": ("cudnn", "n=8;c=64;h=56;w=56;o=64;k=3;stride=1;groups=1"),
    "embedding_bag": ("aten", "v=100000;d=64;b=2048;l=20"),
    "cross_entropy": ("aten", "n=512;v=32000"),
    "topk": ("aten", "n=64;v=32000;k=10"),
    "sort": ("aten", "n=1000000"),
    "cumsum": ("aten", "n=1000000"),
}


def _shape(text):
    return dict(part.split("=") for part in text.split(";"))


def _csv(tmp_path, *lines, header=HEADER):
    path = tmp_path / "m.csv"
    path.write_text("\n".join((header, *lines)) + "\n")
    return path


def _expected_s(kind):
    library, shape = SHAPES[kind]
    return predict_call("h200", kind, "bf16", "fwd", library, _shape(shape)).expected_s


@pytest.fixture
def all_kinds(tmp_path):
    lines = [f"{kind},bf16,fwd,{library},{shape},{_expected_s(kind)}" for kind, (library, shape) in SHAPES.items()]
    return _csv(tmp_path, *lines)


def test_every_kind_of_the_contract_is_scored(ridgeline, all_kinds):
    document = json.loads(ridgeline("validate", str(all_kinds), "--on", "h200", "--json").out)
    assert set(document["by"]) == set(SHAPES)
    assert document["skipped"] == []
    assert document["all"] == {
        "n": 15,
        "mape": pytest.approx(0),
        "median_ape": pytest.approx(0),
        "bias": pytest.approx(0),
        "coverage": 1.0,
    }
    assert set(document["rows"][0]) >= {
        "kind",
        "shape",
        "predicted_s",
        "low_s",
        "high_s",
        "ape",
        "measured_s",
        "inside",
    }


def test_scores_are_what_their_names_say(ridgeline, tmp_path):
    expected_s = predict_call("h200", "gemm", "bf16", "fwd", "cublas", {"m": 512, "n": 512, "k": 512}).expected_s
    path = _csv(tmp_path, *(f"gemm,bf16,fwd,cublas,m=512;n=512;k=512,{expected_s * f}" for f in (0.5, 1.0, 2.0)))
    found = json.loads(ridgeline("validate", str(path), "--json").out)["by"]["gemm"]
    apes = [1.0, 0.0, 0.5]
    assert found["mape"] == pytest.approx(statistics.fmean(apes))
    assert found["median_ape"] == pytest.approx(0.5)
    assert found["bias"] == pytest.approx((1.0 + 0.0 - 0.5) / 3)
    assert found["coverage"] == pytest.approx(1 / 3)


def test_rows_that_cannot_be_used_are_counted_and_named(ridgeline, tmp_path):
    path = _csv(
        tmp_path,
        "gemm,bf16,fwd,cublas,m=512;n=512;k=512,1e-5",
        "warp,bf16,fwd,cublas,m=1,1e-5",
        "gemm,bf16,fwd,cublas,m=512;n=512,1e-5",
        "gemm,bf16,fwd,cublas,m=512;n=512;k=512,0",
        "gemm,bf16,fwd,cublas,m=512;n=512;k=512,nan",
        "gemm,bf17,fwd,cublas,m=1;n=1;k=1,1e-5",
        "gemm,bf16,sideways,cublas,m=1;n=1;k=1,1e-5",
        "gemm,bf16,fwd,mkl,m=1;n=1;k=1,1e-5",
        "gemm,bf16,fwd,cublas,m=-4;n=1;k=1,1e-5",
        "gemm,bf16,fwd,cublas,m=1.5;n=1;k=1,1e-5",
        "gemm,bf16,fwd,cublas,m;n=1;k=1,1e-5",
        "gemm,bf16",
        "",
        "gemm,bf16,fwd,cublas,,1e-5",
        "gemm,bf16,fwd,cublas,m=1;m=2;n=1;k=1,1e-5",
    )
    document = json.loads(ridgeline("validate", str(path), "--json").out)
    assert document["all"]["n"] == 1
    assert [row["line"] for row in document["skipped"]] == [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 16]
    reasons = " | ".join(row["reason"] for row in document["skipped"])
    for hint in (
        "unknown kind 'warp'",
        "gemm needs k",
        "positive time",
        "unknown dtype",
        "unknown phase",
        "unknown library",
        "whole number",
        "cannot read 'm'",
    ):
        assert hint in reasons
    shown = ridgeline("validate", str(path)).out
    assert "13 rows could not be used" in shown


@pytest.mark.parametrize(
    ("spelled", "meant"),
    [
        (("GEMM", "bfloat16", "forward", "cuBLAS"), ("gemm", "bf16", "fwd", "cublas")),
        (("matmul", "torch.float16", "bwd", "cublasLt"), ("gemm", "fp16", "bwd", "cublas")),
        (("mm", "half", "Backward", "cublas"), ("gemm", "fp16", "bwd", "cublas")),
    ],
)
def test_people_spell_things_differently(spelled, meant):
    call = call_of(*spelled, {"m": "16", "n": 16, "k": 16.0})
    assert (call.kind, call.dtype, call.phase, call.library) == meant
    assert call.dims() == {"m": 16, "n": 16, "k": 16}


def test_more_spellings_of_kinds():
    assert call_of("EmbeddingBag", "fp32", "fwd", "aten", _shape(SHAPES["embedding_bag"][1])).kind == "embedding_bag"
    assert call_of("layernorm", "fp32", "fwd", "pytorch", {"n": 4, "c": 4}).kind == "layer_norm"
    assert (
        call_of("flash-attention", "bf16", "fwd", "FlashAttention-2", _shape(SHAPES["attention"][1])).library == "fa2"
    )
    assert call_of("gemm", "bf16", "fwd", "cublas", {"b": 4, "m": 4, "n": 4, "k": 4}).kind == "bmm"
    assert (
        call_of("attention", "bf16", "fwd", "fa2", {**_shape(SHAPES["attention"][1]), "causal": "True"}).dims()[
            "causal"
        ]
        == 1
    )


def test_a_warm_call_is_never_slower_than_a_cold_one():
    for kind, (library, shape) in SHAPES.items():
        cold = predict_call("h200", kind, "bf16", "fwd", library, _shape(shape), "cold")
        warm = predict_call("h200", kind, "bf16", "fwd", library, _shape(shape), "warm")
        assert warm.expected_s <= cold.expected_s * 1.0001, kind
        assert cold.floor_s <= cold.low_s <= cold.expected_s <= cold.high_s


def test_footprints_count_each_tensor_once():
    assert footprint_bytes(call_of("gemm", "bf16", "fwd", "cublas", {"m": 2, "n": 3, "k": 5})) == 2 * (10 + 15 + 6)
    assert footprint_bytes(call_of("add", "fp32", "fwd", "aten", {"n": 2, "c": 3})) == 4 * 6 * 3
    assert footprint_bytes(
        call_of("attention", "bf16", "fwd", "fa2", {"b": 1, "h": 4, "hkv": 2, "s": 8, "skv": 16, "d": 64, "causal": 0})
    ) == 2 * 64 * 2 * (32 + 32)


def test_an_unknown_cache_state_is_an_error():
    with pytest.raises(InputError, match="cache state 'lukewarm'"):
        predict_call("h200", "gemm", "bf16", "fwd", "cublas", {"m": 1, "n": 1, "k": 1}, "lukewarm")


def test_the_cache_column_is_read(ridgeline, tmp_path):
    path = _csv(
        tmp_path,
        "add,bf16,fwd,aten,n=1024;c=1024,1e-5,warm",
        "add,bf16,fwd,aten,n=1024;c=1024,1e-5,",
        "add,bf16,fwd,aten,n=1;c=1,1e-5,hot",
        header=HEADER + ",cache",
    )
    document = json.loads(ridgeline("validate", str(path), "--json").out)
    assert document["rows"][0]["cache"] == "warm" != document["rows"][1]["cache"]
    assert document["rows"][0]["predicted_s"] <= document["rows"][1]["predicted_s"]
    assert "cache state 'hot'" in document["skipped"][0]["reason"]


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        ("", "the file is empty"),
        ("kind,dtype\n", "has no column 'phase'"),
        (f"{HEADER}\n", "no row of the measurements can be used"),
        (f"{HEADER},kind\ngemm", "twice"),
    ],
)
def test_a_file_that_is_not_one_is_refused_with_a_reason(ridgeline, tmp_path, content, hint):
    path = tmp_path / "m.csv"
    path.write_text(content)
    said = ridgeline("validate", str(path))
    assert said.code == 2
    assert hint in said.err
    assert "cannot read" in ridgeline("validate", str(tmp_path / "none.csv")).err
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00\x80")
    assert "is not text" in ridgeline("validate", str(tmp_path / "b.csv")).err


@pytest.mark.parametrize("width", [80, 140])
def test_the_tables_fit_the_terminal(ridgeline, all_kinds, width):
    out = ridgeline("validate", str(all_kinds), width=width).out
    assert max(len(line) for line in out.splitlines()) <= width
    assert "Worst" in out and "inside 90 %" in out


def test_a_convolution_of_fp32_tensors_is_what_pytorch_runs_unless_told_otherwise() -> None:
    shape = _shape(SHAPES["conv2d"][1])
    rounded, full, said = (
        call_of("conv2d", dtype, "fwd", "cudnn", {**shape, **more}).dtype
        for dtype, more in (("fp32", {}), ("fp32", {"tf32": 0}), ("tf32", {}))
    )
    assert (rounded, full, said) == ("tf32", "fp32", "tf32")
    assert call_of("gemm", "fp32", "fwd", "cublas", {"m": 2, "n": 3, "k": 5}).dtype == "fp32"


def test_flash_attention_2_on_an_h100_is_not_priced_as_what_serving_frameworks_run() -> None:
    shape = {"b": 4, "h": 16, "hkv": 16, "s": 4096, "skv": 4096, "d": 128, "causal": 0}
    work = 4 * 4 * 16 * 4096**2 * 128
    old, new = (predict_call("h100-sxm", "attention", "fp16", "fwd", library, shape) for library in ("fa2", "fa3"))
    assert work / old.expected_s == pytest.approx(368e12, rel=0.08)  # FlashAttention's own figure
    assert new.expected_s < 0.75 * old.expected_s


def test_a_dimension_that_a_kind_does_not_have_is_an_error_with_the_ones_it_has():
    conv = {"n": 1, "c": 8, "h": 8, "w": 8, "o": 8, "k": 3, "stride": 1, "groups": 1}
    with pytest.raises(InputError, match=r"conv2d has no 'layout' in its shape; known: .*nhwc"):
        call_of("conv2d", "bf16", "fwd", "cudnn", {**conv, "layout": "nhwc"})
    assert call_of("conv2d", "bf16", "fwd", "cudnn", {**conv, "nhwc": 1}).dims()["nhwc"] == 1
