"""What layers compute anew from the same tensors, once; and what only looks the same, as often as it is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.optimizer.backend import Report, compiled


def _counted(function: Callable[..., Any], *args: Tensor) -> tuple[Any, dict[str, int]]:
    torch._dynamo.reset()
    report = Report()
    with torch.no_grad():
        return compiled(function, rewrites=("once",), report=report)(*args), report.counts()


def _layers(x: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
    for _ in range(3):
        added = bias + mask.to(x.dtype)[:, None, None]
        x = x + F.scaled_dot_product_attention(x, x, x, attn_mask=added)
    return x


def test_a_sum_that_every_layer_makes_is_made_once() -> None:
    x, mask, bias = torch.randn(2, 4, 8, 16), torch.arange(16).reshape(2, 8) < 12, torch.randn(1, 4, 8, 8)
    made, counts = _counted(_layers, x, mask, bias)
    torch.testing.assert_close(made, _layers(x, mask, bias), rtol=0, atol=0)
    assert counts["once"] >= 4  # casts and sums of the second layer and the third


def _written(x: Tensor, y: Tensor) -> Tensor:
    first = x + y
    x.add_(1)
    return first @ (x + y)


def _written_into(x: Tensor, y: Tensor) -> Tensor:
    first, second = x + y, x + y
    second.mul_(2)
    return first @ second


def _returned(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x + y, x + y


def _returned_views(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return (x + y).transpose(0, 1), (x + y)[1:]


def _other_types(x: Tensor, y: Tensor) -> Tensor:
    return (x * 1).double() @ (x * 1.0).double() + (x * True).double() + y


def _drawn(x: Tensor, y: Tensor) -> Tensor:
    return F.dropout(x, 0.5, True) - F.dropout(x, 0.5, True) + y


@pytest.mark.parametrize("function", [_written, _written_into, _returned, _returned_views, _other_types, _drawn])
def test_what_only_looks_the_same_stays(function: Callable[..., Any]) -> None:
    given = torch.randn(4, 4), torch.randn(4, 4)
    torch.manual_seed(0)
    meant = function(*(each.clone() for each in given))
    torch.manual_seed(0)
    made, counts = _counted(function, *(each.clone() for each in given))
    torch.testing.assert_close(made, meant, rtol=0, atol=0)
    assert not counts
    if isinstance(made, tuple):
        assert made[0].untyped_storage().data_ptr() != made[1].untyped_storage().data_ptr()


def test_numbers_of_other_types_are_others() -> None:
    whole = torch.arange(6)
    made, counts = _counted(lambda x: (x * 1, (x * 1.0).sum(), (x * 1.0).sum() + 1), whole)
    assert made[0].dtype is torch.int64 and made[1].dtype is torch.float32
    assert counts == {"once": 1}  # of the three only those two are the same


class Switching(nn.Module):
    """What is the same under another mode is not the same."""

    def forward(self, x: Tensor) -> Tensor:
        first = x * 2
        with torch.autocast("cpu", dtype=torch.bfloat16):
            second = (x * 2) @ x
        return second.float() + first


def test_nothing_is_moved_past_a_switch() -> None:
    x = torch.randn(4, 4)
    made, _ = _counted(Switching(), x)
    torch.testing.assert_close(made, Switching()(x), rtol=0, atol=0)


class Speaking(nn.Module):
    """Attention with heads before the batch, behind a mask of keys that was made for every pair and every head."""

    def __init__(self, heads: int = 2, width: int = 32) -> None:
        super().__init__()
        self.heads, self.qkv = heads, nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(3))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        batch, length, width = x.shape
        hidden = torch.arange(length)[None] >= lengths[:, None]
        pairs = hidden.unsqueeze(1).expand(-1, length, -1)
        for layer in self.qkv:
            q, k, v = (
                each.reshape(batch, length, self.heads, -1).permute(2, 0, 1, 3).reshape(-1, length, width // self.heads)
                for each in layer(x).chunk(3, -1)
            )
            scores = torch.bmm(q, k.transpose(1, 2)) / (width // self.heads) ** 0.5
            weights = torch.softmax(scores.masked_fill(pairs.repeat(self.heads, 1, 1), -torch.inf), dim=2)
            mixed = torch.bmm(weights, v).view(self.heads, batch, length, -1).permute(1, 2, 0, 3)
            x = x + mixed.reshape(batch, length, -1)
        return x


def test_a_mask_of_keys_made_for_every_pair_and_head_is_one_of_keys() -> None:
    torch.manual_seed(0)
    model, x, lengths = Speaking().eval(), torch.randn(3, 70, 32), torch.tensor([70, 40, 3])
    torch._dynamo.reset()
    report = Report()
    with torch.no_grad():
        meant = model(x, lengths)
        fast = compiled(model.bfloat16(), rewrites=("attention", "attention-kernel", "once"), report=report)
        found, own = fast(x.bfloat16(), lengths), model(x.bfloat16(), lengths)
        other = fast(x.bfloat16(), torch.tensor([1, 70, 33]))
        torch.testing.assert_close(other, model(x.bfloat16(), torch.tensor([1, 70, 33])), rtol=5e-2, atol=5e-2)
    errors = [float((each.float() - meant).norm() / meant.norm()) for each in (found, own)]
    assert report.counts()["attention-kernel"] == 3, report.refusals
    assert errors[0] < 1.3 * errors[1]


def _rows_differ(q: Tensor, seen: Tensor) -> Tensor:
    mask = ~(~seen).unsqueeze(1).repeat(1, 2, 1, 1)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


def test_a_mask_whose_rows_differ_is_none_of_keys() -> None:
    torch.manual_seed(0)
    q, seen = torch.randn(2, 2, 70, 16), torch.rand(2, 70, 70) > 0.3
    torch._dynamo.reset()
    report = Report()
    with torch.no_grad():
        found = compiled(_rows_differ, rewrites=("attention-kernel",), report=report)(q, seen)
    assert not report.counts()
    torch.testing.assert_close(found, _rows_differ(q, seen), rtol=0, atol=0)
