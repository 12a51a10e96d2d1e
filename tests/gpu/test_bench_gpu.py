"""The measuring side on a real GPU: clocks, markers, power, and predictions beside fresh measurements."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from ridgeline.bench.clock import Clock, host_time, kernels_of
from ridgeline.bench.operators import make
from ridgeline.bench.power import Board, sustained
from ridgeline.validation.operators import predict_call


def _name() -> str:
    return "h200" if "H200" in torch.cuda.get_device_name(0) else ""


CASES = [
    ("gemm", "bf16", "cublas", {"m": 4096, "n": 4096, "k": 4096}, 0.15),
    ("gemm", "bf16", "cublas", {"m": 16, "n": 8192, "k": 8192}, 0.2),
    ("gemm", "bf16", "cublas", {"m": 777 * 8, "n": 1544, "k": 2056}, 0.2),
    ("attention", "bf16", "cudnn", {"b": 4, "h": 32, "hkv": 8, "s": 2048, "skv": 2048, "d": 128, "causal": 1}, 0.2),
    ("layer_norm", "bf16", "aten", {"n": 8192, "c": 4096}, 0.15),
    ("softmax", "fp32", "aten", {"n": 4096, "c": 1000}, 0.2),
    ("gelu", "bf16", "aten", {"n": 8192, "c": 11008}, 0.15),
    ("add", "bf16", "aten", {"n": 16384, "c": 4096}, 0.1),
    ("sum_dim0", "bf16", "aten", {"n": 16384, "c": 4096}, 0.25),
    ("cross_entropy", "fp32", "aten", {"n": 2048, "v": 50304}, 0.2),
    (
        "conv2d",
        "bf16",
        "cudnn",
        {"n": 32, "c": 256, "h": 28, "w": 28, "o": 256, "k": 3, "stride": 1, "groups": 1, "nhwc": 1},
        0.4,
    ),
]


@pytest.mark.parametrize(("kind", "dtype", "library", "shape", "tolerance"), CASES, ids=lambda v: str(v)[:40])
def test_predictions_are_near_fresh_measurements(kind, dtype, library, shape, tolerance):
    if not _name():
        pytest.skip("recorded for an H200")
    measured = Clock().cold(make(kind, dtype, "fwd", library, shape), 0.02, 0.08).median_s
    predicted = predict_call(_name(), kind, dtype, "fwd", library, shape).expected_s
    assert abs(math.log(predicted / measured)) < tolerance, (
        f"{predicted * 1e6:.1f} us predicted, {measured * 1e6:.1f} us measured"
    )


def test_a_wrong_prediction_would_fail():
    measured = Clock().cold(make("add", "bf16", "fwd", "aten", {"n": 16384, "c": 4096}), 0.02, 0.05).median_s
    assert abs(math.log(2 * measured / measured)) > max(case[-1] for case in CASES)


def test_cold_is_not_faster_than_warm_for_what_fits_in_l2():
    run = make("add", "fp32", "fwd", "aten", {"n": 1024, "c": 1024})
    clock = Clock()
    assert clock.cold(run, 0.01, 0.05).median_s > 0.95 * clock.warm(run, 0.01, 0.05).median_s


def test_kernels_are_told_apart_by_markers():
    x = torch.randn(1024, 1024, device="cuda")
    found = kernels_of([lambda: x + 1, lambda: (x @ x).relu(), lambda: x.sum(0)])
    assert len(found) == 3
    assert len(found[0]) == 1 and len(found[1]) >= 2


def test_the_power_meter_sees_work():
    board = Board()
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    loop = sustained(lambda: x @ x, board, 2.0, 0.2)  # the board counts energy ten times a second
    assert 100 < loop.power_w <= 1.1 * board.limit_w()
    assert loop.num > 10


def test_host_time_of_an_eager_call_is_microseconds():
    x = torch.randn(16, device="cuda")
    assert 1e-6 < host_time(lambda: x + 1) < 1e-3
