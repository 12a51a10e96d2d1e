"""Rates of dropout are found where models keep them, and put back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from ridgeline.optimizer.search.dropout_off import dropout_off


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(attention_dropout=0.3, hidden_size=8)
        self.drop, self.hidden_dropout_prob, self.p = nn.Dropout(0.1), 0.2, 0.7
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.25)


def test_all_rates_are_zero_inside_and_as_they_were_after() -> None:
    block = Block()
    with dropout_off(block) as num:
        assert num == 4
        assert (block.drop.p, block.hidden_dropout_prob, block.config.attention_dropout, block.attention.dropout) == (
            0.0, 0.0, 0.0, 0.0,
        )  # fmt: skip
        assert block.p == 0.7 and block.config.hidden_size == 8, "only rates of dropout"
    assert (block.drop.p, block.hidden_dropout_prob, block.config.attention_dropout, block.attention.dropout) == (
        0.1, 0.2, 0.3, 0.25,
    )  # fmt: skip


def test_a_failure_inside_puts_them_back() -> None:
    model = nn.Sequential(nn.Dropout(0.5))
    with pytest.raises(RuntimeError), dropout_off(model):
        raise RuntimeError
    assert model[0].p == 0.5
    with dropout_off(nn.Linear(2, 2)) as num:
        assert num == 0
