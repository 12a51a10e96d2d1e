"""Biases laid out for fused attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ridgeline.optimizer.backend import Report, compiled


class Biased(nn.Module):
    """Two layers of attention that share a bias made head by head last, as T5 makes it."""

    def __init__(self, write: bool = False) -> None:
        super().__init__()
        self.table, self.write = nn.Embedding(7, 4), write

    def forward(self, q: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        bias = self.table(ids).permute(2, 0, 1).unsqueeze(0)
        if self.write:
            bias = bias.clone()
            bias = bias.transpose(-1, -2)
        x = F.scaled_dot_product_attention(q, q, q, attn_mask=bias)
        if self.write:
            bias.mul_(2)
        return F.scaled_dot_product_attention(x, q, q, attn_mask=bias.expand(2, -1, -1, -1))


def _ran(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor, Report]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    q, ids, report = torch.randn(2, 4, 6, 8), torch.randint(0, 7, (6, 6)), Report()
    with torch.no_grad():
        return compiled(model, rewrites=("attention-bias",), report=report)(q, ids), model(q, ids), report


def test_a_bias_that_lies_across_is_laid_along_before_it_is_read() -> None:
    found, meant, report = _ran(Biased())
    assert report.counts() == {"attention-bias": 2}
    torch.testing.assert_close(found, meant)


def test_a_bias_that_is_written_between_two_readers_is_left_alone() -> None:
    found, meant, report = _ran(Biased(write=True))
    assert not report.counts()
    torch.testing.assert_close(found, meant)
