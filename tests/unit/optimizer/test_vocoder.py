"""Chains of convolutions along sequences: laid with channels last from the first to the last, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.optimizer.backend import Report, compiled
from ridgeline.optimizer.rewrites.conv import vocoder as sounds


class Residual(nn.Module):
    def __init__(self, width: int, taps: int) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Conv1d(width, width, taps, padding=d * (taps // 2), dilation=d) for d in (1, 3))
        self.second = nn.ModuleList(nn.Conv1d(width, width, taps, padding=taps // 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for a, b in zip(self.first, self.second, strict=True):
            x = x + b(F.leaky_relu(a(F.leaky_relu(x, 0.1)), 0.1))
        return x


class Vocoder(nn.Module):
    """Sound from frames: made longer twice, sums of what is added to itself, one channel in the end."""

    def __init__(self, width: int = 64, between: Callable[[Tensor], Tensor] = F.leaky_relu) -> None:
        super().__init__()
        self.first, self.last, self.between = (
            nn.Conv1d(40, width, 7, padding=3),
            nn.Conv1d(16, 1, 7, padding=3),
            between,
        )
        self.ups = nn.ModuleList(
            nn.ConvTranspose1d(width >> i, width >> (i + 1), 5, 2, padding=2, output_padding=1) for i in range(2)
        )
        self.sums = nn.ModuleList(
            nn.ModuleList(Residual(width >> (i + 1), taps) for taps in (3, 7)) for i in range(2)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for up, sums in zip(self.ups, self.sums, strict=True):
            x = up(self.between(x))
            x = sum(each(x) for each in sums) / len(sums)
        return torch.tanh(self.last(F.leaky_relu(x)))


def _found(model: nn.Module, x: Tensor, monkeypatch: Any, **options: Any) -> tuple[Tensor, Report]:
    monkeypatch.setattr(sounds, "SMALL", 0)
    torch._dynamo.reset()
    report = Report()
    with torch.no_grad():
        return compiled(model, rewrites=("identity", "sequence-chain"), report=report, **options)(x), report


def _error(found: Tensor, meant: Tensor) -> float:
    return float((found.double() - meant.double()).norm() / meant.double().norm())


@pytest.mark.parametrize("compiler", ["none", "inductor"])
def test_a_whole_vocoder_keeps_channels_last_and_is_as_right_as_eager(monkeypatch: Any, compiler: str) -> None:
    torch.manual_seed(0)
    model, x = Vocoder().eval(), torch.randn(2, 40, 30)
    with torch.no_grad():
        meant = model.double()(x.double())
        model, x = model.bfloat16(), x.bfloat16()
        own = model(x)
    found, report = _found(model, x, monkeypatch, compiler=compiler)
    assert report.counts()["sequence-chain"] == 1 + 2 + 16, report.refusals
    assert found.stride() == own.stride()
    assert _error(found, meant) < 1.3 * _error(own, meant)


def test_a_chain_that_begins_with_a_sum_over_the_graphs_own_input_stays(monkeypatch: Any) -> None:
    class Laid(Residual):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).contiguous()

    model, x = Laid(16, 3).eval().bfloat16(), torch.randn(2, 16, 30).bfloat16()
    found, report = _found(model, x, monkeypatch)
    assert not report.counts()
    with torch.no_grad():
        torch.testing.assert_close(found, model(x), rtol=0, atol=0)


def _softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, dim=1)


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x.transpose(1, 2), (x.shape[1],)).transpose(1, 2)


@pytest.mark.parametrize("between", [_softmax, _norm])
def test_a_chain_that_something_else_reads_stays(monkeypatch: Any, between: Callable[[Tensor], Tensor]) -> None:
    """Of two halves of a network, the one before what is not known stays; the one behind it is whole by itself."""
    torch.manual_seed(0)
    model, x = Vocoder(between=between).eval().bfloat16(), torch.randn(2, 40, 30).bfloat16()
    found, report = _found(model, x, monkeypatch)
    assert report.counts().get("sequence-chain", 0) < 19
    with torch.no_grad():
        torch.testing.assert_close(found, model(x), rtol=3e-2, atol=3e-2)


def test_results_that_are_returned_keep_their_layout(monkeypatch: Any) -> None:
    class Returned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.body = nn.Conv1d(16, 16, 3, padding=1), Residual(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(self.first(x))

    model, x = Returned().eval().bfloat16(), torch.randn(2, 16, 30).bfloat16()
    found, report = _found(model, x, monkeypatch)
    assert not report.counts()
    assert found.stride() == (480, 30, 1)


@pytest.mark.parametrize(("stride", "more", "dilation"), [(2, 1, 1), (3, 0, 2), (4, 2, 1), (1, 0, 3)])
def test_transposed_convolutions_with_channels_last_are_what_they_were(stride: int, more: int, dilation: int) -> None:
    x, weight = torch.randn(2, 8, 11), torch.randn(8, 6, 4)
    meant = F.conv_transpose1d(x, weight, None, stride, 1, more, 1, dilation)
    for way in (sounds._by_library, sounds._as_image, sounds.raised):
        made = way(x, weight, stride, 1, more, dilation)
        torch.testing.assert_close(made, meant)
        assert made.stride(1) == 1
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = torch.ops.ridgeline_optimizer.raised(
            mode.from_tensor(x), mode.from_tensor(weight), stride, 1, more, dilation
        )
    assert fake.shape == meant.shape and fake.stride() == made.stride()
