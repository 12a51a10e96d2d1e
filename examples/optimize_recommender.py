"""A recommender with embedding bags and pairwise interaction: ``python examples/optimize_recommender.py``."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

import ridgeline as rl


class Recommender(nn.Module):
    """Dense features through a network, sparse ones through tables, all pairs multiplied, and a network on top."""

    def __init__(self, tables: int, rows: int, dim: int) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, dim, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, dim), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(pairs + dim, 512), nn.ReLU(), nn.Linear(512, 1))
        self.register_buffer("pairs", torch.triu_indices(tables + 1, tables + 1, 1))

    def forward(self, dense: torch.Tensor, ids: list[torch.Tensor]) -> torch.Tensor:
        x = self.bottom(dense)
        features = torch.stack([x, *(bag(i) for bag, i in zip(self.bags, ids, strict=True))], 1)
        products = torch.bmm(features, features.transpose(1, 2))
        return self.top(torch.cat([x, products[:, self.pairs[0], self.pairs[1]]], 1))


def make() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    cuda = torch.cuda.is_available()
    tables, rows, dim, batch = (26, 200_000, 128, 8192) if cuda else (4, 100, 16, 32)
    dtype = torch.bfloat16 if cuda else torch.float32
    with torch.device("cuda" if cuda else "cpu"):
        model = Recommender(tables, rows, dim).to(dtype).eval()
        return (
            model,
            (torch.randn(batch, 13, dtype=dtype), [torch.randint(0, rows, (batch, 4)) for _ in range(tables)]),
            {},
        )


def main(budget_s: float = 120.0) -> None:
    model, args, kwargs = make()
    fast = rl.optimize(model, args, kwargs, budget_s=budget_s)
    print(fast.receipt)


if __name__ == "__main__":
    main(*map(float, sys.argv[1:2]))
