"""Cause: unfused pointwise chain."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.planted.networks import HandNorm
from lab.planted.programs import TRIED, bf16, compiler, fused_adamw, ints
from lab.planted.registry import Program, Setting, case


@case("unfused pointwise chain", "torch.compile the norm, activation and residual", suite="planted", compiles=True)
def pointwise_chain(s: Setting, fixed: bool) -> Program:
    torch._dynamo.reset()
    width, rows, layers = s.pick(2048, 32), s.pick(16384, 8), s.pick(8, 2)
    chains = s.place(lambda: nn.ModuleList(HandNorm(width) for _ in range(layers)))
    linears = s.place(lambda: nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers)))
    model = nn.ModuleList([chains, linears])
    forward = torch.compile(HandNorm.forward, backend=compiler(s), dynamic=False) if fixed else None
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, fused=s.cuda)
    data = torch.randn(rows, width, device=s.device, dtype=torch.bfloat16)

    def step() -> None:
        x = data
        for chain, linear in zip(chains, linears, strict=True):
            y = linear(x)
            x = forward(chain, y, x) if forward else chain(y, x)
        F.mse_loss(x, data).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


SELU_SCALE, SELU_SCALE = 1.6732632423543772, 1.0507009873554805


def selu_reference(x: Tensor) -> Tensor:
    return SELU_SCALE * torch.where(x > 0, x, SELU_SCALE * (torch.exp(x) - 1))


class SelfNormalizing(nn.Module):
    """Dense layers that need no norm, since their activation keeps what goes through them even."""

    def __init__(self, d: int, depth: int, kinds: int, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(d, d) for _ in range(depth))
        self.head, self.act = nn.Linear(d, kinds), act
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=d**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.act(layer(x))
        return self.head(x)


@case("unfused pointwise chain", "F.selu in place of its formula", suite="twenty-fourth", **TRIED)
def selu_of_the_paper(s: Setting, fixed: bool) -> Program:
    """Cells sorted by what shines on them; a network that keeps itself even, by the formula it was published with."""
    dim, rows, kinds = s.pick(1024, 16), s.pick(32_768, 4), s.pick(16, 8)
    act = F.selu if fixed else selu_reference
    net = s.place(lambda: SelfNormalizing(dim, s.pick(10, 2), kinds, act))
    x, labels, optimizer = bf16(s, rows, dim), ints(s, kinds, rows), fused_adamw(net)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(x), labels).backward()
        optimizer.step()

    return Program(step)
