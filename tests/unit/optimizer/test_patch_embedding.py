"""Convolutions as products: patches of images, and pointwise ones with what follows them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

import torch.nn.functional as F
from bottlenecks import Bottleneck, settled
from torch import nn

from ridgeline.engine.shallow_clone import shallow_clone
from ridgeline.optimizer.backend import Report, compiled
from ridgeline.optimizer.in_place import attention_registry as hooks
from ridgeline.optimizer.in_place import patch_embedding as patches
from ridgeline.optimizer.in_place.channels_last import make_channels_last
from ridgeline.optimizer.in_place.substitution import apply, revert
from ridgeline.optimizer.rewrites import recommended
from ridgeline.optimizer.rewrites.conv import batch_norm_epilogue as pointwise
from ridgeline.optimizer.rewrites.conv import stem as stems

SHAPES = [((2, 3, 37, 32), (8, 3, 16, 16)), ((3, 4, 10), (5, 4, 5)), ((2, 2, 4, 6, 6), (6, 2, 2, 3, 3))]


@pytest.mark.parametrize(("image", "filters"), SHAPES)
@pytest.mark.parametrize("last", [False, True])
def test_patches_multiplied_are_the_convolution(image: Any, filters: Any, last: bool) -> None:
    torch.manual_seed(0)
    x, w, b = (torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in (image, filters, filters[:1]))
    conv: Any = (F.conv1d, F.conv2d, F.conv3d)[len(image) - 3]
    given = x.contiguous(memory_format=torch.channels_last) if last and len(image) == 4 else x
    found, meant = patches.patched(given, w, b), conv(given, w, b, stride=filters[2:])
    torch.testing.assert_close(found, meant, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(meant)
    for ours, theirs in zip(
        *(torch.autograd.grad((y * weights).sum(), (x, w, b)) for y in (found, meant)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_only_windows_of_few_channels_that_lie_side_by_side_are_products() -> None:
    layers = {
        "patches": nn.Conv2d(3, 8, 16, 16), "tubes": nn.Conv3d(24, 8, 2, 2), "overlapping": nn.Conv2d(3, 8, 16, 8),
        "padded": nn.Conv2d(3, 8, 4, 4, padding=1), "many channels": nn.Conv2d(64, 8, 2, 2),
        "apart": nn.Conv2d(4, 8, 4, 4, groups=2), "spread": nn.Conv2d(3, 8, 4, 4, dilation=2),
        "mirrored": nn.Conv2d(3, 8, 4, 4, padding="valid", padding_mode="reflect"), "tiny": nn.Conv2d(3, 8, 2, 2),
    }  # fmt: skip
    found = [name for name, layer in layers.items() if patches.is_patch_layer(layer.bfloat16())]
    assert found == ["patches", "tubes"]
    assert not patches.is_patch_layer(nn.Conv2d(3, 8, 16, 16))  # in float32 PyTorch rounds convolutions to tf32


def test_apply_puts_patches_in_and_revert_takes_them_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "RUNS_ON", frozenset({"cpu"}))
    monkeypatch.setattr(patches, "LEAST_NUMBERS", 1000)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 16, 16), nn.Flatten(2)).bfloat16()
    x = torch.randn(2, 3, 32, 48, dtype=torch.bfloat16)
    meant = model(x)
    done = apply(model, ("patches",))
    assert [each.by for each in done.replaced] == ["patched"]
    assert model[0](x).grad_fn.name() == "PermuteBackward0"  # a product seen as an image
    torch.testing.assert_close(model(x), meant, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(model(x[:, :, :16, :16]), meant[:, :, :1])  # too small to matter: as it was
    revert(model)
    assert "forward" not in vars(model[0])


def test_under_autocast_patches_of_float32_are_products_in_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "RUNS_ON", frozenset({"cpu"}))
    monkeypatch.setattr(patches, "LEAST_NUMBERS", 1000)
    torch.manual_seed(0)
    layer, x = nn.Conv2d(3, 8, 16, 16), torch.randn(2, 3, 32, 48)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        meant = layer(x)
        assert len(apply(layer, ("patches",)).replaced) == 1
        found = layer(x)
    assert found.grad_fn.name() == "PermuteBackward0" and found.dtype == meant.dtype == torch.bfloat16
    torch.testing.assert_close(found, meant, rtol=2e-2, atol=2e-2)
    assert layer(x).dtype == torch.float32  # outside of autocast: as it was
    revert(layer)


def test_a_patch_embedding_is_rewritten_and_what_follows_sees_the_new_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "LEAST_NUMBERS", 1000)
    torch.manual_seed(0)

    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj, self.norm = nn.Conv2d(3, 8, 16, 16, padding="valid"), nn.LayerNorm(8)

        def forward(self, x: Any) -> Any:
            return self.norm(self.proj(x).flatten(2).transpose(1, 2)) + 1.0

    model, x = Embedding().bfloat16(), torch.randn(2, 3, 32, 48, dtype=torch.bfloat16)
    report = Report()
    with torch.no_grad():
        found = compiled(model, rewrites=("patches",), report=report)(x)
        torch.testing.assert_close(found, model(x), rtol=3e-2, atol=3e-2)
    assert report.counts() == {"patches": 1}


def _image(*size: int) -> Any:
    return torch.randn(*size).bfloat16().to(memory_format=torch.channels_last)


def _error(found: Any, meant: Any) -> float:
    return float((found.float() - meant).square().mean().sqrt() / meant.square().mean().sqrt())


@pytest.mark.parametrize("act", [nn.ReLU(inplace=True), nn.SiLU(), nn.Hardswish(), nn.ReLU6(), nn.GELU()])
def test_norm_sum_and_activation_go_into_convolutions(act: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pointwise, "LEAST_NUMBERS", 0)
    torch.manual_seed(0)
    model, x = settled(Bottleneck(32, 16, act)), _image(2, 32, 6, 5)
    report = Report()
    names = ("in-place", "pointwise", "convolution-end")
    with torch.no_grad():
        found, own = compiled(model, rewrites=names, report=report)(x), model(x)
        meant = model.float()(x.float())
    assert report.counts()["pointwise"] == 2 and report.counts()["convolution-end"] == 1, report.refusals
    assert found.stride() == own.stride()
    assert _error(found, meant) < 1.5 * _error(own, meant) + 1e-3


@pytest.mark.parametrize(("side", "stride"), [(7, 1), (3, 2), ((1, 5), 1)])
def test_convolutions_that_keep_channels_apart_take_their_norm_and_activation(
    side: Any, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pointwise, "LEAST_NUMBERS", 0)
    torch.manual_seed(0)
    layers = [nn.Conv2d(16, 16, side, stride, padding=2, groups=16), nn.BatchNorm2d(16), nn.SiLU()]
    bare = nn.Conv2d(16, 16, side, padding=3, groups=16, bias=False)
    model, x = settled(nn.Sequential(*layers, bare)), _image(2, 16, 11, 9)
    report = Report()
    with torch.no_grad():
        found, own = compiled(model, rewrites=("in-place", "depthwise"), report=report)(x), model(x)
        meant = model.float()(x.float())
    assert report.counts()["depthwise"] == 2, report.refusals
    assert found.stride() == own.stride()
    assert _error(found, meant) < 1.5 * _error(own, meant) + 1e-3


def test_a_first_convolution_takes_its_norm_and_activation_where_no_compiler_follows() -> None:
    layers = [nn.Conv2d(3, 16, 3, 2, padding=1, bias=False), nn.BatchNorm2d(16), nn.SiLU()]
    model, x = settled(nn.Sequential(*layers)), torch.randn(8, 3, 130, 128).bfloat16()
    with torch.no_grad():
        for compiler, name in (("none", "convolution-end"), ("inductor", "stem")):
            scene_report = Report()
            names = [each for each in recommended("inference", compiler, "cuda") if each in ("convolution-end", "stem")]
            compiled(model, rewrites=names, report=scene_report)(x)
            assert scene_report.counts() == {name: 1}


@pytest.mark.parametrize(("groups", "stride"), [(8, 1), (2, 2), (32, 1)])
def test_convolutions_in_groups_take_their_norm_and_activation(
    groups: int, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pointwise, "LEAST_NUMBERS", 0)
    torch.manual_seed(0)
    layers = [nn.Conv2d(64, 64, 3, stride, padding=1, groups=groups), nn.BatchNorm2d(64), nn.ReLU()]
    model, x, report = settled(nn.Sequential(*layers)), _image(2, 64, 9, 7), Report()
    with torch.no_grad():
        found, own = compiled(model, rewrites=("in-place", "grouped"), report=report)(x), model(x)
        meant = model.float()(x.float())
    assert report.counts()["grouped"] == 1, report.refusals
    assert found.stride() == own.stride()
    assert _error(found, meant) < 1.5 * _error(own, meant) + 1e-3


@pytest.mark.parametrize(("channels", "groups", "dilation"), [(464, 2, 1), (12, 2, 1), (64, 8, 2)])
def test_groups_of_other_widths_and_spread_taps_are_left_to_whoever_follows(
    channels: int, groups: int, dilation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pointwise, "LEAST_NUMBERS", 0)
    layers = [nn.Conv2d(channels, channels, 3, padding=dilation, dilation=dilation, groups=groups), nn.ReLU()]
    report = Report()
    with torch.no_grad():
        compiled(settled(nn.Sequential(*layers)), rewrites=("grouped",), report=report)(_image(2, channels, 9, 7))
    assert "grouped" not in report.counts()


class Residual(nn.Module):
    """As diffusion networks have it: GroupNorm and SiLU before every convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(4, channels) for _ in range(2))
        self.convs = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x: Any) -> Any:
        h = self.convs[0](nn.functional.silu(self.norms[0](x)))
        return x + self.convs[1](nn.functional.silu(self.norms[1](h)))


@pytest.mark.parametrize(("last", "num"), [(True, 2), (False, 0)])
def test_group_norms_between_convolutions_leave_channels_last(last: bool, num: int) -> None:
    torch.manual_seed(0)
    model, x, report = settled(Residual(16)), _image(2, 16, 8, 9), Report()
    model = model.to(memory_format=torch.channels_last if last else torch.contiguous_format)
    x = x if last else x.contiguous()
    with torch.no_grad():
        found, own = compiled(model, rewrites=("group-norm-last",), report=report)(x), model(x)
        meant = model.float()(x.float())
    assert report.counts().get("group-norm-last", 0) == num, report.refusals
    assert found.stride() == own.stride()
    assert _error(found, meant) < 1.5 * _error(own, meant) + 1e-3


def test_channels_that_lie_first_and_norms_in_training_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pointwise, "LEAST_NUMBERS", 0)
    model = settled(nn.Sequential(nn.Conv2d(16, 8, 1), nn.BatchNorm2d(8), nn.ReLU()))
    report = Report()
    with torch.no_grad():
        compiled(model, rewrites=("pointwise",), report=report)(_image(2, 16, 6, 5).contiguous())
        compiled(model.train(), rewrites=("pointwise",), report=report)(_image(2, 16, 6, 5))
    assert report.counts() == {}


def test_a_result_that_is_read_twice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pointwise, "LEAST_NUMBERS", 0)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(16, 8, 1), nn.BatchNorm2d(8)

        def forward(self, x: Any) -> Any:
            y = self.norm(self.conv(x))
            return F.relu(y) + y

    torch.manual_seed(0)
    model, x, report = settled(Twice()), _image(2, 16, 6, 5), Report()
    with torch.no_grad():
        found = compiled(model, rewrites=("pointwise",), report=report)(x)
        torch.testing.assert_close(found, model(x), rtol=3e-2, atol=3e-2)
    assert [match.what for match in report.matches] == ["(8, 16, 1, 1) with norm and none"]


@pytest.mark.parametrize(
    ("sides", "filters", "padding"),
    [((21, 30), (7, 7), [3, 3]), ((16, 17), (3, 3), [1, 1]), ((18, 12), (4, 5), [0, 2]), ((13, 9), (3, 6), [0, 0])],
)
@pytest.mark.parametrize("own", [False, True])
def test_a_stem_over_squares_is_the_convolution(sides: Any, filters: Any, padding: Any, own: bool) -> None:
    torch.manual_seed(0)
    x, w, b = torch.randn(2, 3, *sides), torch.randn(8, 3, *filters), torch.randn(8)
    meant = F.conv2d(x, w, b, 2, padding)
    found = stems.squares(x, w, b, padding, own=own)
    torch.testing.assert_close(found, meant, rtol=1e-5, atol=1e-5)
    assert found.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("names", [("stem",), ("convolution-end",)])
def test_the_first_convolution_of_a_network_is_found(names: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stems, "LEAST_NUMBERS", 0)
    monkeypatch.setattr(pointwise, "LEAST_NUMBERS", 0)
    torch.manual_seed(0)
    model = settled(nn.Sequential(nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU()))
    x, report = torch.randn(2, 3, 20, 24).bfloat16(), Report()
    with torch.no_grad():
        found, own = compiled(model, rewrites=names, report=report)(x), model(x)
        meant = model.float()(x.float())
    assert report.counts() == {names[0]: 1}, report.refusals
    assert found.stride() == own.stride()
    assert _error(found, meant) < 1.5 * _error(own, meant) + 1e-3


def test_a_stem_that_does_not_halve_or_has_many_channels_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stems, "LEAST_NUMBERS", 0)
    report = Report()
    for layer, channels in ((nn.Conv2d(3, 8, 3, 1), 3), (nn.Conv2d(8, 8, 3, 2), 8), (nn.Conv2d(3, 8, 1, 2), 3)):
        with torch.no_grad():
            compiled(settled(layer), rewrites=("stem",), report=report)(torch.randn(2, channels, 12, 12).bfloat16())
    assert report.counts() == {}


def test_weights_of_clips_are_laid_channels_last_too() -> None:
    model = nn.Sequential(nn.Conv3d(4, 8, 3), nn.Conv2d(4, 8, 3), nn.Conv1d(4, 8, 3))
    clone = shallow_clone(model)
    laid = make_channels_last(clone, model, differentiable=False)
    assert laid is not None and len(laid.pairs) == 2
    assert clone[0].weight.is_contiguous(memory_format=torch.channels_last_3d)
    assert clone[1].weight.is_contiguous(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 5, 6, 7)
    assert clone[0](x).is_contiguous(memory_format=torch.channels_last_3d)
    assert model[0].weight.is_contiguous()

