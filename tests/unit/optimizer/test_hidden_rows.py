"""Rows of attention that see no key: the mean of all values where it is written out, and so by kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.optimizer.backend import Report, compiled
from ridgeline.optimizer.rewrites.attention import fused as attention

B, H, L, D = 2, 4, 12, 16
LOWEST = torch.finfo(torch.float32).min


class OnGpu:
    """PyTorch's functions, with attention as its kernels on a GPU compute it: in powers of two, where the lowest number
    is infinite, and a row of nothing but such numbers is zero."""

    def __getattr__(self, name: str) -> Any:
        return getattr(F, name)

    @staticmethod
    def scaled_dot_product_attention(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None,
    ) -> Tensor:  # fmt: skip
        assert attn_mask is not None and not is_causal
        bits = (q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale) + attn_mask) * 1.4426950408
        top = bits.amax(-1, keepdim=True)
        weights = torch.exp2(bits - torch.where(top == float("-inf"), torch.zeros_like(top), top))
        return (weights / weights.sum(-1, keepdim=True).clamp_min(1e-30)) @ v


class Layer(nn.Module):
    def __init__(self, scores: Callable[..., Tensor]) -> None:
        super().__init__()
        self.scores = scores

    def forward(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        return self.scores(q, k, hidden).softmax(-1) @ v


def added(q: Tensor, k: Tensor, hidden: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) * 0.25 + hidden * LOWEST


def filled(q: Tensor, k: Tensor, hidden: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) * 0.25).masked_fill(hidden > 0, LOWEST)


class Merged(nn.Module):
    """Heads merged with the batch around a product with a bias, as BLOOM has them."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        q, k, v = (x.reshape(B * H, L, D) for x in (q, k, v))
        bias = hidden.new_zeros(B * H, 1, L)
        scores = bias.baddbmm(batch1=q, batch2=k.transpose(-1, -2), beta=1.0, alpha=0.25).view(B, H, L, L)
        return torch.bmm((scores + hidden * LOWEST).softmax(-1).view(B * H, L, L), v).view(B, H, L, D)


def _found(model: nn.Module) -> tuple[Tensor, Tensor, Report]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    hidden = torch.ones(L, L).triu(1).expand(B, 1, L, L).clone()
    hidden[1, :, :3] = 1.0
    args, report = (*(torch.randn(B, H, L, D) for _ in range(3)), hidden), Report()
    with torch.no_grad():
        fast = compiled(model, rewrites=("attention",), options={"attention": "always"}, report=report)
        return fast(*args), model(*args), report


@pytest.mark.parametrize("model", [Layer(added), Layer(filled), Merged()], ids=["added", "filled", "merged"])
def test_rows_that_see_nothing_get_the_mean_of_all_values(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "F", OnGpu())
    found, meant, report = _found(model)
    assert report.counts() == {"attention": 1}
    torch.testing.assert_close(found, meant)
    assert meant[1, :, :3].abs().amin() > 0


@pytest.mark.parametrize("model", [Layer(added), Layer(filled), Merged()], ids=["added", "filled", "merged"])
def test_the_lowest_number_itself_would_leave_them_nothing(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "F", OnGpu())
    monkeypatch.setattr(attention, "LOWEST", LOWEST)
    found, meant, _ = _found(model)
    assert found[1, :, :3].count_nonzero() == 0
    torch.testing.assert_close(found[0], meant[0])


def test_what_is_infinite_stays_and_halves_are_left_alone() -> None:
    mask = torch.tensor([0.0, -3.0, -1e9, LOWEST, float("-inf")])
    assert attention.finite_mask(mask).tolist() == torch.tensor([0.0, -3.0, -1e9, -1e30, float("-inf")]).tolist()
    half = torch.tensor([0.0, -65504.0], dtype=torch.float16)
    assert attention.finite_mask(half) is half
