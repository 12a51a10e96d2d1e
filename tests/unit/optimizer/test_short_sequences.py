"""Attention of few rows in large batches, found where it is written out or called, and left where it does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from torch import Tensor

from ridgeline.kernels.short_attention.op import MOST_GROUPS, SHORT_ATTENTION, short_attention
from ridgeline.optimizer.backend import Report, compiled
from ridgeline.optimizer.rewrites.attention import short_sequences as short


def _merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads merged with the batch, as code for tables has it."""
    q, k, v = (each.flatten(0, 1) for each in (q, k, v))
    return F.softmax(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5, dim=-1) @ v


def _called(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5).transpose(1, 2).flatten(2)


def _found(function: Callable[..., Tensor], *given: Tensor) -> tuple[Tensor, Report]:
    torch._dynamo.reset()
    report = Report()
    with torch.no_grad():
        return compiled(function, rewrites=("attention", "short-attention"), report=report)(*given), report


def _given(batch: int = 128, heads: int = 4, rows: int = 12, keys: int = 12, dim: int = 24) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, num, heads, dim).bfloat16().transpose(1, 2) for num in (rows, keys, keys))
    return q, k, v


@pytest.mark.parametrize("function", [_merged, _called, _causal])
def test_few_rows_in_large_batches_are_found(function: Callable[..., Tensor]) -> None:
    given = _given()
    made, report = _found(function, *given)
    assert report.counts()["short-attention"] == 1, report.refusals
    meant = function(*(each.double() for each in given))
    assert float((made.double() - meant).norm() / meant.norm()) < 1e-2


def test_rows_that_look_at_other_keys_are_found() -> None:
    given = _given(rows=7, keys=20)
    made, report = _found(_called, *given)
    assert report.counts() == {"short-attention": 1}
    meant = _called(*(each.double() for each in given))
    assert float((made.double() - meant).norm() / meant.norm()) < 1e-2


def _masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=q[:, :, :, :1] > 0)


def _shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True)


@pytest.mark.parametrize(
    ("function", "sizes"),
    [(_called, {"batch": 100}), (_called, {"keys": 129}), (_called, {"dim": 12}), (_called, {"rows": 1}),
     (_causal, {"rows": 6}), (_masked, {}), (_shared, {})],
)  # fmt: skip
def test_what_does_not_fit_stays(function: Callable[..., Tensor], sizes: dict[str, int]) -> None:
    given = _given(**sizes)
    made, report = _found(function, *given)
    assert "short-attention" not in report.counts()
    torch.testing.assert_close(made, function(*given), rtol=0, atol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_the_bias_says_what_the_call_says(causal: bool) -> None:
    q, k, v = _given(3, 2, 9, 9, 16)
    bias = short.plain_bias(q, 2, 9, 9, causal)
    assert bias.is_contiguous() and bias.dtype is q.dtype
    made = short_attention(q, k, v, bias, 0.25).float()
    meant = short._library(q, k, v, causal, 0.25).float()
    torch.testing.assert_close(made, meant, rtol=2e-2, atol=2e-2)
    mistaken = short._library(q, k, v, not causal, 0.25).float()
    assert float((made - mistaken).abs().max()) > 0.1


def test_more_batch_elements_than_a_grid_has_programs_are_refused() -> None:
    def meta(*shape: int, **options: Any) -> Tensor:
        return torch.empty(shape, device="meta", dtype=torch.bfloat16, **options)

    for batch, refused in ((MOST_GROUPS, False), (MOST_GROUPS + 1, True)):
        given = (meta(batch, 1, 16, 8) for _ in range(3))
        assert (SHORT_ATTENTION.support(*given, meta(1, 1, 16, 16), 1.0) is not None) is refused
