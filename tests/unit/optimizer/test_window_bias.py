"""Attention of few rows with biases on its scores: windows of images, shifted and not, in every spelling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.optimizer.backend import Report, compiled
from ridgeline.optimizer.rewrites.attention import window_bias as shifted

total = shifted.total_bias
BATCH, WINDOWS, HEADS, ROWS, DIM = 6, 3, 4, 9, 8


class Windows(nn.Module):
    """As Swin writes it: a bias of heads, and in shifted windows a mask that repeats with every image."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.qkv = nn.Linear(HEADS * DIM, 3 * HEADS * DIM)
        self.bias = nn.Parameter(torch.randn(HEADS, ROWS, ROWS))
        self.register_buffer("mask", torch.randn(WINDOWS, ROWS, ROWS).round() * 50)

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(x).reshape(BATCH, ROWS, 3, HEADS, DIM).permute(2, 0, 3, 1, 4).unbind(0)
        if self.kind == "called":
            mask = self.mask.unsqueeze(1).repeat(BATCH // WINDOWS, 1, 1, 1)
            return self._out(F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias.unsqueeze(0) + mask))
        if self.kind == "cosine":
            scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
            scores = scores * self.bias[:, :1, :1].exp() + self.bias
            return self._out(scores.softmax(-1) @ v)
        scores = (q * DIM**-0.5) @ k.transpose(-2, -1)
        if self.kind == "scaled late":
            scores = (scores + self.bias) * 0.5
        elif self.kind == "kept":
            scores = scores + self.bias
            return self._out(scores.softmax(-1) @ v) + scores.mean()
        else:
            scores = scores + self.bias
        if self.kind == "padded":  # as MPNet has it: a bias of heads and a mask of keys
            scores = scores + self.mask[:1, :1].repeat(BATCH, 1, 1).unsqueeze(1)
        if self.kind == "shifted":
            scores = scores.view(-1, WINDOWS, HEADS, ROWS, ROWS) + self.mask.unsqueeze(1).unsqueeze(0)
            scores = scores.view(-1, HEADS, ROWS, ROWS)
        return self._out(scores.softmax(-1) @ v)

    def _out(self, found: Tensor) -> Tensor:
        return found.transpose(1, 2).reshape(BATCH, ROWS, HEADS * DIM) * 2.0


@pytest.mark.parametrize(
    ("kind", "num"),
    [("plain", 1), ("shifted", 1), ("called", 1), ("cosine", 1), ("padded", 1), ("scaled late", 0), ("kept", 0)],
)
def test_biases_go_into_one_call_where_they_are_added_to_scores_alone(
    kind: str, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shifted, "LEAST_PROBLEMS", 1)
    torch.manual_seed(0)
    model, x, report = Windows(kind).bfloat16(), torch.randn(BATCH, ROWS, HEADS * DIM).bfloat16(), Report()
    with torch.no_grad():
        found = compiled(model, rewrites=("window-attention",), report=report)(x)
        own, meant = model(x), model.float()(x.float())
    assert report.counts().get("window-attention", 0) == num, report.refusals
    error, allowed = ((y.float() - meant).square().mean().sqrt() for y in (found, own))
    assert error < 1.2 * allowed + 1e-3


def test_windows_of_other_images_do_not_share_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch elements a period apart share a bias, neighbors do not: a wrong order would show."""
    monkeypatch.setattr(shifted, "LEAST_PROBLEMS", 1)
    model, x = Windows("shifted").bfloat16(), torch.randn(BATCH, ROWS, HEADS * DIM).bfloat16()
    with torch.no_grad():
        fast = compiled(model, rewrites=("window-attention",), report=Report())
        before = fast(x).clone()
        model.mask[1] += torch.eye(ROWS) * 100
        changed = (fast(x) - before).abs().amax((1, 2)) > 0
    assert changed.tolist() == [False, True, False, False, True, False]


def test_layers_that_add_the_same_share_one_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shifted, "LEAST_PROBLEMS", 1)
    first, second = Windows("plain").bfloat16(), Windows("plain").bfloat16()
    second.bias = first.bias
    model, x, report = nn.Sequential(first, second), torch.randn(BATCH, ROWS, HEADS * DIM).bfloat16(), Report()
    seen = []
    monkeypatch.setattr(shifted, "total_bias", lambda *args: seen.append(1) or total(*args))
    with torch.no_grad():
        found = compiled(model, rewrites=("window-attention",), report=report)(x)
        torch.testing.assert_close(found, model(x), rtol=0.1, atol=0.1)
    assert report.counts() == {"window-attention": 2}
    assert len(seen) == 2  # once on stand-ins, once in the call


def test_few_problems_and_many_keys_are_left_to_the_library() -> None:
    model, x, report = Windows("plain").bfloat16(), torch.randn(BATCH, ROWS, HEADS * DIM).bfloat16(), Report()
    with torch.no_grad():
        compiled(model, rewrites=("window-attention",), report=report)(x)
    assert report.counts() == {}
