"""Images resized by lines between pixels: what becomes our kernel, what does not, and that it is right."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import torch.nn.functional as F
from torch import nn

from ridgeline.kernels.resize import reference
from ridgeline.kernels.resize.op import RESIZE
from ridgeline.optimizer.backend import Report, compiled
from ridgeline.optimizer.rewrites.conv import resize as resizes


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    monkeypatch.setattr(resizes, "LEAST_ELEMENTS", 1)


def ran(call: Any, x: Any) -> tuple[Any, Any, list[str]]:
    """Rewritten, as written, and what was found."""
    report = Report()
    with torch.no_grad():
        found = compiled(call, rewrites=("resizes",), compiler="none", report=report)(x)
        return found, call(x), [match.what for match in report.matches]


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize(
    ("call", "num"),
    [
        (lambda x: F.interpolate(x, size=(9, 14), mode="bilinear", align_corners=False), 1),
        (lambda x: F.interpolate(x, size=(3, 4), mode="bilinear", align_corners=True), 1),
        (lambda x: F.interpolate(x, size=(1, 1), mode="bilinear", align_corners=True), 1),
        (nn.Upsample(scale_factor=2, mode="bilinear"), 1),
        (nn.UpsamplingBilinear2d(scale_factor=3), 1),
        (lambda x: F.interpolate(x, scale_factor=(1.7, 2.3), mode="bilinear"), 1),
        (lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear", recompute_scale_factor=True), 0),
        (lambda x: F.interpolate(x, size=(9, 14), mode="bilinear", antialias=True), 0),
        (lambda x: F.interpolate(x, scale_factor=2), 0),
        (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), 0),
        (lambda x: F.interpolate(x[:, :, ::2], size=(9, 14), mode="bilinear"), 0),
    ],
)
def test_what_is_found_gives_what_was_written(call: Any, num: int, last: bool) -> None:
    x = torch.randn(2, 5, 6, 7)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    found, meant, whats = ran(call, x)
    assert len(whats) == num
    torch.testing.assert_close(found, meant)
    assert found.stride() == meant.stride()


@pytest.mark.parametrize(
    ("h", "w", "corners"), [(9, 14, False), (3, 4, True), (1, 1, True), (6, 7, False), (23, 2, False)]
)
def test_the_reference_is_what_pytorch_computes(h: int, w: int, corners: bool) -> None:
    x = torch.randn(2, 3, 6, 7)
    scales = [resizes._apart(a, b) if corners else a / b for a, b in ((6, h), (7, w))]
    meant = F.interpolate(x, size=(h, w), mode="bilinear", align_corners=corners)
    torch.testing.assert_close(reference.forward(x, h, w, corners, *scales).float(), meant)
    torch.testing.assert_close(RESIZE.on_host(x, h, w, corners, *scales).float(), meant)


def test_training_is_left_alone() -> None:
    report, x = Report(), torch.randn(2, 5, 6, 7, requires_grad=True)
    call = nn.Upsample(scale_factor=2, mode="bilinear")
    compiled(call, rewrites=("resizes",), compiler="none", report=report)(x).sum().backward()
    assert not report.matches and x.grad is not None


@pytest.mark.parametrize(("last", "num"), [(False, 0), (True, 1)])
def test_a_compiler_is_left_images_whose_channels_come_first(last: bool, num: int) -> None:
    from ridgeline.optimizer.backend import rewritten

    report, x = Report(), torch.randn(2, 5, 6, 7)
    x = x.contiguous(memory_format=torch.channels_last) if last else x

    def look(gm: Any, inputs: Any) -> Any:
        rewritten(gm, inputs, rewrites=("resizes",), compiler="inductor", report=report)
        return gm.forward

    with torch.no_grad():
        torch.compile(lambda x: F.interpolate(x, size=(9, 14), mode="bilinear"), backend=look)(x)
    assert len(report.matches) == num
