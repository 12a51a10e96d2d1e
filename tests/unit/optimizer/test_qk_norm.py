"""Head norms and the rotary embedding behind them: found as one, in both layouts, and left alone where they differ."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch import nn

from ridgeline.optimizer.backend import Report, compiled
from ridgeline.optimizer.rewrites import rewrites

B, S, H, K, D = 2, 5, 4, 2, 16


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


class Norm(nn.Module):
    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(D) + 0.5), eps

    def forward(self, x: Any) -> Any:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def turned(x: Any, cos: Any, sin: Any, at: int) -> Any:
    half = torch.cat((-x[..., D // 2 :], x[..., : D // 2]), dim=-1)
    return x * cos.unsqueeze(at) + half * sin.unsqueeze(at)


class Heads(nn.Module):
    """Queries and keys as Qwen 3 makes them; ``shared`` returns the normalized keys too."""

    def __init__(self, eps: float = 1e-6, first: bool = True, shared: bool = False) -> None:
        super().__init__()
        self.q_norm, self.k_norm, self.first, self.shared = Norm(), Norm(eps), first, shared

    def forward(self, q: Any, k: Any, freqs: Any) -> Any:
        table = torch.cat((freqs, freqs), dim=-1)
        cos, sin = table.cos(), table.sin()
        q, k = self.q_norm(q.view(B, S, H, D)), self.k_norm(k.view(B, S, K, D))
        if self.first:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        at = 1 if self.first else 2
        found = turned(q, cos, sin, at), turned(k, cos, sin, at)
        return (*found, k * 2) if self.shared else found


def given(dtype: Any = torch.float32) -> tuple[Any, ...]:
    freqs = torch.randn(1, S, D // 2)
    return torch.randn(B, S, H * D, dtype=dtype), torch.randn(B, S, K * D, dtype=dtype), freqs.to(dtype)


def ran(model: Any, args: Any) -> tuple[Any, int]:
    report = Report()
    with torch.no_grad():
        found = compiled(model, rewrites=("identity", "head-norms"), compiler="none", report=report)(*args)
    return found, report.counts().get("head-norms", 0)


@pytest.mark.parametrize("first", [True, False], ids=["heads first", "places first"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_steps_are_one_kernel(first: bool, dtype: Any) -> None:
    model, args = Heads(first=first).to(dtype), given(dtype)
    found, num = ran(model, args)
    assert num == 1
    close = {"rtol": 2e-2, "atol": 4e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    for ours, meant in zip(found, model(*args), strict=True):
        torch.testing.assert_close(ours, meant.detach(), **close)


@pytest.mark.parametrize("model", [Heads(eps=1e-3), Heads(shared=True)], ids=["other eps", "read by others"])
def test_norms_that_differ_or_are_read_by_others_are_left_alone(model: Any) -> None:
    args = given()
    found, num = ran(model, args)
    assert num == 0
    for ours, meant in zip(found, model(*args), strict=True):
        torch.testing.assert_close(ours, meant.detach())


def test_they_are_looked_for_before_norms_and_turns_are_taken_apart() -> None:
    names = list(rewrites())
    assert names.index("head-norms") < min(names.index("norm"), names.index("rotary"))
