"""Convolutions along sequences in groups, and weights with a norm of their own, as speech encoders have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.optimizer.backend import Report, compiled
from ridgeline.optimizer.rewrites.conv import positional_conv as positions


class Positions(nn.Module):
    """As wav2vec2 places its steps: a normed weight, many taps, the last step dropped, GELU."""

    def __init__(self, channels: int, taps: int, groups: int, *, turned: bool = True, **options: Any) -> None:
        super().__init__()
        layer = nn.Conv1d(channels, channels, taps, padding=taps // 2, groups=groups, **options)
        self.conv = nn.utils.parametrizations.weight_norm(layer, name="weight", dim=2)
        self.turned = turned

    def forward(self, x: Tensor) -> Tensor:
        found = self.conv(x.transpose(1, 2) if self.turned else x)[:, :, :-1]
        return nn.functional.gelu(found).transpose(1, 2) * 2.0


def _error(found: Tensor, meant: Tensor) -> float:
    return float((found.float() - meant).square().mean().sqrt() / meant.square().mean().sqrt())


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({"groups": 2}, {"sequence-convolution": 1, "weight-norm": 1}),
        ({"groups": 2, "turned": False}, {"sequence-convolution": 1, "weight-norm": 1}),
        ({"groups": 1}, {"weight-norm": 1}),
        ({"groups": 2, "dilation": 2}, {"weight-norm": 1}),
    ],
)
def test_positions_become_one_kernel_where_they_have_groups_and_many_taps(options: Any, counts: dict[str, int]) -> None:
    torch.manual_seed(0)
    model, report = Positions(32, 8, **options).bfloat16(), Report()
    x = torch.randn(2, 21, 32).bfloat16()
    x = x if options.get("turned", True) else x.transpose(1, 2).contiguous()
    with torch.no_grad():
        found = compiled(model, rewrites=("sequence-convolution", "weight-norm"), report=report)(x)
        own, meant = model(x), model.float()(x.float())
    assert report.counts() == counts, report.refusals
    assert found.stride() == own.stride()
    assert _error(found, meant) < 1.3 * _error(own, meant) + 1e-3


class Front(nn.Module):
    """As encoders of sound begin: convolutions along time, GELU, norms of steps, and rows at the end."""

    def __init__(self, *, norms: bool, viewed: bool) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(64, 64, 3, stride, padding=1) for stride in (1, 2, 2))
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(3)) if norms else None
        self.last, self.viewed = nn.Linear(64, 8), viewed

    def forward(self, x: Tensor) -> Tensor:
        for i, conv in enumerate(self.convs):
            x = conv(x)
            x = x if self.norms is None else self.norms[i](x.transpose(-2, -1)).transpose(-2, -1)
            x = nn.functional.gelu(x)
        if self.viewed:
            return x.view(x.shape[0], -1)
        return self.last(x.transpose(1, 2))


@pytest.mark.parametrize(("norms", "viewed", "num"), [(False, False, 3), (True, False, 3), (False, True, 2)])
def test_convolutions_along_sequences_leave_channels_last_where_nobody_asks(
    norms: bool, viewed: bool, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(positions, "SMALL", 0)
    torch.manual_seed(0)
    model, x, report = Front(norms=norms, viewed=viewed).bfloat16(), torch.randn(2, 64, 41).bfloat16(), Report()
    with torch.no_grad():
        found = compiled(model, rewrites=("sequence-last",), report=report)(x)
        own, meant = model(x), model.float()(x.float())
    assert report.counts() == {"sequence-last": num}, report.refusals
    assert found.stride() == own.stride()
    assert _error(found, meant) < 1.3 * _error(own, meant) + 1e-3


class Points(nn.Module):
    """Layers over points as convolutions of one tap, batch norm and an activation between them."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(64, 64, 1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(64) for _ in range(3))
        self.last = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nn.functional.leaky_relu(norm(conv(x)), 0.1)
        return self.last(x.transpose(1, 2))


def test_convolutions_of_one_tap_leave_channels_last_past_batch_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions, "SMALL", 0)
    torch.manual_seed(0)
    model, x, report = Points().eval().bfloat16(), torch.randn(2, 64, 41).bfloat16(), Report()
    with torch.no_grad():
        found = compiled(model, rewrites=("sequence-last",), report=report)(x)
        own, meant = model(x), model.float()(x.float())
    assert report.counts() == {"sequence-last": 3}, report.refusals
    assert found.stride() == own.stride()
    assert _error(found, meant) < 1.3 * _error(own, meant) + 1e-3


@pytest.mark.parametrize("bias", [True, False])
def test_one_tap_is_a_product(bias: bool) -> None:
    layer, x = nn.Conv1d(24, 40, 1, bias=bias), torch.randn(3, 24, 17)
    with torch.no_grad():
        found = positions._as_product(x, layer.weight, layer.bias)
        torch.testing.assert_close(found, layer(x), rtol=1e-5, atol=1e-5)


def test_a_norm_along_the_first_dim_is_left_to_pytorch() -> None:
    model, report = nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)), Report()
    with torch.no_grad():
        compiled(model, rewrites=("weight-norm",), report=report)(torch.randn(3, 8))
    assert report.counts() == {}
