"""Channels of larger images are mixed before they are made larger: what is found, and that it is the same."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from torch import nn

from ridgeline.optimizer.backend import Report, compiled
from ridgeline.optimizer.rewrites.conv import upsample as enlarged


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    monkeypatch.setattr(enlarged, "LEAST_ELEMENTS", 1)


class Head(nn.Module):
    """Maps of several sizes, made as large as the first, side by side, and mixed."""

    def __init__(self, mode: str = "bilinear", bias: bool = False, groups: int = 1, taps: int = 1, **how: Any) -> None:
        super().__init__()
        self.mode, self.how = mode, how
        self.mix = nn.Conv2d(16, 8, taps, bias=bias, groups=groups)

    def larger(self, x: Any, size: Any) -> Any:
        corners = {} if self.mode == "nearest" else {"align_corners": False}
        return F.interpolate(x, size=size, mode=self.mode, **(corners | self.how))

    def forward(self, *maps: Any) -> Any:
        size = maps[0].shape[2:]
        return F.relu(self.mix(torch.cat([self.larger(each, size) for each in reversed(maps)], dim=1)))


def maps(last: bool = False, sizes: tuple[int, ...] = (16, 8, 4, 2)) -> list[Any]:
    found = [torch.randn(2, 4, size, size) for size in sizes]
    return [each.contiguous(memory_format=torch.channels_last) for each in found] if last else found


def ran(model: Any, given: list[Any]) -> tuple[Any, int]:
    report = Report()
    with torch.no_grad():
        found = compiled(model, rewrites=("enlarged-products",), compiler="none", report=report)(*given)
    return found, len(report.matches)


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize(
    "model",
    [Head(), Head(bias=True), Head("nearest", bias=True), Head(align_corners=True)],
    ids=["lines", "shifted", "repeated", "corners"],
)
def test_maps_are_mixed_before_they_are_made_larger(model: Any, last: bool) -> None:
    given = maps(last)
    found, num = ran(model, given)
    assert num == 1
    torch.testing.assert_close(found, model(*given).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: F.conv2d(F.interpolate(x, scale_factor=2.0, mode="bilinear"), w),
        lambda x, w: F.conv2d(nn.Upsample(scale_factor=2)(x), w),
        lambda x, w: F.conv2d(F.interpolate(x, scale_factor=1.7, mode="bilinear"), w),
    ],
)
def test_one_map_alone_is_mixed_before_too(call: Any) -> None:
    given = [torch.randn(2, 4, 6, 7), torch.randn(5, 4, 1, 1)]
    found, num = ran(call, given)
    assert num == 1
    torch.testing.assert_close(found, call(*given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "model",
    [Head(taps=3), Head(groups=2), Head("bicubic"), Head(antialias=True)],
    ids=["taps", "groups", "other lines", "blurred"],
)
def test_what_does_not_commute_is_left_alone(model: Any) -> None:
    given = maps()
    found, num = ran(model, given)
    assert not num
    torch.testing.assert_close(found, model(*given).detach())


@pytest.mark.parametrize("sizes", [(16, 16, 16, 16), (4, 8, 8, 16), (16, 16, 16, 8)])
def test_maps_that_save_little_are_left_alone(sizes: tuple[int, ...]) -> None:
    _, num = ran(Head(), maps(sizes=sizes))
    assert not num


def test_a_larger_map_that_others_read_too_is_made_once() -> None:
    def call(x: Any, w: Any) -> Any:
        large = F.interpolate(x, scale_factor=2.0, mode="bilinear")
        return F.conv2d(large, w) + large.mean()

    given = [torch.randn(2, 4, 6, 7), torch.randn(5, 4, 1, 1)]
    found, num = ran(call, given)
    assert not num
    torch.testing.assert_close(found, call(*given))


def test_a_map_of_its_own_size_with_a_factor_of_its_own_is_made_again() -> None:
    def call(x: Any, small: Any, w: Any) -> Any:
        same = F.interpolate(x, scale_factor=1.01, mode="bilinear")
        large = F.interpolate(small, size=same.shape[2:], mode="bilinear")
        return F.conv2d(torch.cat([same, large], 1), w)

    given = [torch.randn(2, 2, 8, 8), torch.randn(2, 6, 2, 2), torch.randn(5, 8, 1, 1)]
    found, num = ran(call, given)
    assert num == 1
    torch.testing.assert_close(found, call(*given), rtol=1e-5, atol=1e-5)
