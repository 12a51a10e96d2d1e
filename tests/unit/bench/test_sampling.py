"""The shapes a calibration measures: the same every time, legal, and everywhere people go."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("torch")

from ridgeline.bench.operators import kinds
from ridgeline.bench.sampling import Point, points
from ridgeline.cost.call import call, family_of
from ridgeline.cost.price import pricer_of
from ridgeline.hardware import device

SAMPLE = list(points(seed=7, scale=0.3))


def as_text(found: list[Point]) -> list[str]:
    return [f"{p.kind} {p.dtype} {p.phase} {p.library} {p.shape}" for p in found]


def test_a_seed_gives_the_same_points_again() -> None:
    assert as_text(list(points(seed=7, scale=0.3))) == as_text(SAMPLE)


def test_another_seed_gives_others() -> None:
    assert as_text(list(points(seed=8, scale=0.3))) != as_text(SAMPLE)


def test_the_scale_is_the_number_of_points() -> None:
    full, half = (Counter(p.kind for p in points(seed=0, scale=s)) for s in (1.0, 0.5))
    assert full["gemm"] == pytest.approx(2 * half["gemm"], rel=0.02)
    assert set(full) == set(half)


def test_every_kind_can_be_made_and_priced() -> None:
    found = {p.kind for p in SAMPLE}
    assert found <= set(kinds())
    assert all(family_of(kind) for kind in found)
    wanted = "gemm bmm attention layer_norm rms_norm softmax gelu add sum_dim0 conv2d embedding_bag cross_entropy topk"
    assert {*wanted.split(), "sort", "cumsum"} <= found


def test_dimensions_are_positive_whole_numbers() -> None:
    flags = {"causal", "nhwc", "mask", "training"}
    for p in SAMPLE:
        for name, value in p.shape.items():
            if name != "layout":
                assert isinstance(value, int) and value >= (0 if name in flags else 1), p


def test_shapes_are_ones_the_libraries_take() -> None:
    for p in SAMPLE:
        s = p.shape
        if p.kind == "attention":
            assert s["h"] % s["hkv"] == 0 and (not s["causal"] or s["s"] == s["skv"]), p
        elif p.kind == "conv2d":
            assert s["c"] % s["groups"] == s["o"] % s["groups"] == 0, p
        elif p.kind == "gemm" and p.dtype in ("fp8", "int8"):
            assert s["n"] % 16 == s["k"] % 16 == 0, p
        elif p.kind == "topk":
            assert s["k"] <= s["v"], p
        elif p.kind == "grouped_gemm":
            assert s["m"] >= s["groups"], p


def test_no_point_needs_more_memory_than_a_device_has() -> None:
    for p in SAMPLE:
        if p.kind in ("gemm", "bmm"):
            s = p.shape
            elements = s.get("b", 1) * (s["m"] * s["n"] + s["m"] * s["k"] + s["n"] * s["k"])
            assert elements * 4 < 8e9, p


def test_both_phases_and_several_dtypes_are_measured() -> None:
    assert {p.phase for p in SAMPLE} == {"fwd", "bwd"}
    assert {"bf16", "fp16", "fp32", "tf32", "fp8"} <= {p.dtype for p in SAMPLE}
    assert {"cublas", "cudnn", "fa2", "aten"} <= {p.library for p in SAMPLE}


def test_compiled_points_ask_for_generated_kernels() -> None:
    found = list(points(compiled=True))
    assert found and {p.library for p in found} == {"inductor"}


def test_a_calibration_fits_its_time() -> None:
    """Predicted device time of one pass over every point, a hundred repetitions each, is a few minutes at most."""
    pricer = pricer_of(device("h200"))
    busy_s = sum(pricer.price(call(p.kind, p.dtype, p.phase, p.library, **p.shape)).time.busy_s for p in points(seed=0))
    assert 0.5 < busy_s < 4.0
