"""Rows of megabytes that pass through shared memory, and few results of long sums: right however they are cut."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor

from ridgeline.kernels.convolution.config import Tile
from ridgeline.kernels.convolution.op import planned as planned_convolution
from ridgeline.kernels.convolution.reference import forward as convolved
from ridgeline.kernels.long_norm.op import in_registers, long_norm
from ridgeline.kernels.split_gemm.op import planned
from ridgeline.optimizer.rewrites.rows.long_rows import _library

pytestmark = pytest.mark.usefixtures("packed")
CASES = [("softmax", 40, 393216, 0, 0), ("log_softmax", 33, 120006, 0, 0), ("norm", 8, 2097152, 8, 64),
         ("norm", 32, 532512, 8, 64), ("norm", 9, 98304, 0, 98304), ("l2", 300, 65536, 0, 0), ("l1", 5, 70002, 0, 0),
         ("softmax", 3, 4194304, 0, 0), ("softmax", 64, 131072, 1, 32)]  # fmt: skip


SUMS = [(256, 256, 131072), (300, 70, 20001), (64, 500, 30000), (1, 128, 65536)]
IMAGES = [((6, 64, 61, 47), (128, 64, 3, 3), 1, 0, False), ((3, 32, 100, 90), (64, 32, 5, 9), 1, 2, False),
          ((4, 64, 20, 33), (64, 128, 4, 4), 2, 1, True), ((2, 32, 8, 16, 16), (32, 64, 4, 4, 4), 2, 1, True),
          ((3, 96, 500), (200, 96, 5), 2, 2, False)]  # fmt: skip
ROUNDINGS = ("nearest", "exact")
ODD_KINDS = ("softmax", "log_softmax", "norm")


def wanted_variants() -> list[Any]:
    """What this file launches, for a pack."""
    from ridgeline.kernels.launcher import collecting

    with collecting() as found, torch.device("meta"):
        for args in [_args(*case, on="meta") for case in (*CASES, *((kind, 6, 131072, 0, 0) for kind in ODD_KINDS))]:
            long_norm(*args)
            in_registers(*args)
        for m, n, k in SUMS:
            for turned in (False, True):
                a, b = _factors(m, n, k, turned, "meta")
                planned(a, b, None, pieces=True)(a, b, None)
        for case in IMAGES:
            x, w = torch.empty(case[0]), torch.empty(case[1])
            for rounding in ROUNDINGS:
                _turned(x, w, *case[2:], rounding)(x, w, None, None)
    return list(dict.fromkeys(found))


def _args(kind: str, rows: int, cols: int, channels: int, weights: int, on: str = "cuda") -> tuple[Any, ...]:
    torch.manual_seed(0)
    x = torch.rand(rows, cols, device=on) * 3 + 5
    weight = torch.randn(weights, device=on) if weights else None
    bias = torch.randn(weights, device=on) if weights and kind == "norm" else None
    return x, kind, cols, weight, bias, channels, 1e-5


def _factors(m: int, n: int, k: int, turned: bool, on: str = "cuda") -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    a, b = torch.rand(m, k, device=on), torch.rand(k, n, device=on)
    return (a.t().contiguous().t(), b.t().contiguous().t()) if turned else (a, b)


def _settings(x: Tensor, stride: int, padding: int, turned: bool) -> tuple[Any, ...]:
    num = x.dim() - 2
    return [stride] * num, [padding] * num, [1] * num, [0] * num, 1, turned


def _turned(x: Tensor, w: Tensor, stride: int, padding: int, turned: bool, rounding: str) -> Any:
    tile = Tile(128, 64, 32, 4, 4, rounding, last=True)
    return planned_convolution(x, w, None, None, *_settings(x, stride, padding, turned), "relu", tile=tile)


def _apart(found: Tensor, meant: Tensor) -> float:
    return float((found.double() - meant).norm() / meant.norm())


@pytest.mark.parametrize("case", CASES)
def test_long_rows_are_as_right_as_pytorchs(case: tuple[Any, ...]) -> None:
    args = _args(*case)
    meant = _library(*(x.double() if isinstance(x, Tensor) else x for x in args))
    allowed = 2 * _apart(_library(*args), meant) + 2e-7
    assert _apart(long_norm(*args), meant) <= allowed
    assert _apart(in_registers(*args), meant) <= allowed


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", ODD_KINDS)
def test_what_is_no_number_is_seen_in_its_row_alone(kind: str, odd: float) -> None:
    x, *rest = _args(kind, 6, 131072, 0, 0)
    x[2, 70000] = odd
    found, meant = long_norm(x, *rest), _library(x, *rest)
    assert torch.equal(found.isfinite(), meant.isfinite())
    assert torch.equal(found[2].isnan(), meant[2].isnan())


def test_a_row_of_nothing_but_minus_infinity_is_no_number() -> None:
    x, *rest = _args("softmax", 3, 131072, 0, 0)
    x[1] = float("-inf")
    found = long_norm(x, *rest)
    assert found[1].isnan().all() and found[0].isfinite().all() and found[2].isfinite().all()


def test_calls_of_long_rows_are_recorded_and_replayed() -> None:
    x, *rest = _args("softmax", 40, 393216, 0, 0)
    long_norm(x, *rest)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = long_norm(x, *rest)
    for seed in (1, 2):
        torch.manual_seed(seed)
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.testing.assert_close(y, x.softmax(-1))


@pytest.mark.parametrize(("m", "n", "k"), SUMS)
@pytest.mark.parametrize("turned", [False, True])
def test_long_sums_are_as_right_as_pytorchs(m: int, n: int, k: int, turned: bool) -> None:
    a, b = _factors(m, n, k, turned)
    meant = a.double() @ b.double()
    found = planned(a, b, None, pieces=True)(a, b, None)
    assert _apart(found, meant) <= 2 * _apart(a @ b, meant) + 2e-7


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(("image", "filters", "stride", "padding", "turned"), IMAGES)
def test_convolutions_of_turned_images_are_right(
    image: tuple[int, ...], filters: tuple[int, ...], stride: int, padding: int, turned: bool, rounding: str
) -> None:
    """Numbers of few digits, which TensorFloat-32 keeps: sums alone may differ."""
    torch.manual_seed(0)
    x, w = ((torch.randn(*shape, device="cuda") * 16).round() / 16 for shape in (image, filters))
    plan = _turned(x, w, stride, padding, turned, rounding)
    assert plan.last
    meant = convolved(x.double(), w.double(), None, None, *_settings(x, stride, padding, turned), "relu")
    torch.testing.assert_close(plan(x, w, None, None), meant.float(), rtol=1e-5, atol=1e-4)
