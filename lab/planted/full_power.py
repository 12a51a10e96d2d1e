"""A healthy training loop that draws all the power a device is built for: recorded as a user would, nothing is to be
found in it.

    ridgeline profile --out heavy.json lab/planted/full_power.py && ridgeline explain heavy.json
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BLC: Tensor) -> Tensor:
        batch, length, width = x_BLC.shape
        qkv = self.qkv(self.norm1(x_BLC)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BLC = x_BLC + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x_BLC + self.down(F.gelu(self.up(self.norm2(x_BLC)), approximate="tanh"))


def main(num_steps: int = 70) -> None:
    cuda = torch.cuda.is_available()
    width, batch, length = (2560, 12, 1024) if cuda else (32, 2, 16)
    torch.manual_seed(0)
    with torch.device("cuda" if cuda else "cpu"):
        model = nn.Sequential(*(Block(width, max(1, width // 64)) for _ in range(6))).to(torch.bfloat16)
        x = torch.randn(batch, length, width, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for _ in range(num_steps):
        F.mse_loss(model(x), x).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))
