"""Autocast written out computes what autocast computes, gradients too, and is left alone where it cannot be told."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.optimizer.backend import Report, compiled


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


class Mixed(nn.Module):
    """Products, norms, losses, sums, convolutions, attention, and stretches with another autocast inside."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(32, 64), nn.Linear(64, 32, bias=False), nn.LayerNorm(64)
        self.conv = nn.Conv1d(32, 32, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.norm(F.gelu(self.a(x)))
        z = self.b(y) + x
        with torch.autocast("cpu", enabled=False):
            exact = z.float() @ z.float().transpose(-1, -2)
        q = z.unflatten(-1, (2, 16)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
        folded = self.conv(mixed.transpose(1, 2)).transpose(1, 2)
        loss = F.cross_entropy(self.b(self.a(folded)).flatten(0, 1), torch.arange(z.shape[0] * z.shape[1]) % 32)
        return y, exact, torch.softmax(folded, -1), loss, torch.einsum("bij,bkj->bik", z, y[..., :32]), z.pow(2).sum()


def _pair(model: nn.Module) -> tuple[Any, Report]:
    report = Report()
    return compiled(model, rewrites=("identity", "views"), report=report, fullgraph=True), report


def test_every_result_has_the_type_and_value_it_has_under_autocast() -> None:
    model, x = Mixed().eval(), torch.randn(2, 5, 32)
    fast, report = _pair(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found, meant = fast(x), model(x)
    assert report.casts > 5 and not report.refusals
    for a, b in zip(found, meant, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_gradients_are_those_under_autocast() -> None:
    model, x = Mixed(), torch.randn(2, 5, 32)
    fast, report = _pair(model)
    grads = []
    for call in (fast, model):
        with torch.autocast("cpu", torch.bfloat16):
            outputs = call(x)
        grads.append(torch.autograd.grad(sum(o.float().sum() for o in outputs), list(model.parameters())))
    assert report.casts > 5
    for a, b in zip(*grads, strict=True):
        assert a.dtype == torch.float32 and torch.allclose(a, b, rtol=2e-2, atol=2e-2 * float(b.abs().max()))


def test_autocast_inside_the_model_alone_is_as_separate_ops_too() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y = self.a(x)
                with torch.autocast("cpu", enabled=False):
                    y = self.a(y.float())
                y = self.a(y)
            return self.a(y.float())

    model, x = Inner().eval(), torch.randn(4, 32)
    fast, report = _pair(model)
    with torch.no_grad():
        assert torch.equal(fast(x), model(x))
    assert report.casts >= 3


def test_a_weight_used_twice_is_cast_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(32, 32, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(self.a(x))

    fast, report = _pair(Twice().eval())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        fast(torch.randn(4, 32))
    assert report.casts == 2  # x, and the weight


def test_without_autocast_nothing_is_cast() -> None:
    fast, report = _pair(Mixed().eval())
    with torch.no_grad():
        fast(torch.randn(2, 5, 32))
    assert report.casts == 0


def test_the_same_code_serves_calls_with_and_without_autocast() -> None:
    model, x = Mixed().eval(), torch.randn(2, 5, 32)
    fast, _ = _pair(model)
    with torch.no_grad():
        plain = fast(x)
        with torch.autocast("cpu", torch.bfloat16):
            cast = fast(x)
        again = fast(x)
        meant = model(x)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(plain, again, meant, strict=True))
    assert plain[4].dtype is torch.float32 and cast[4].dtype is torch.bfloat16
