"""Small programs to record on a machine without a GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(2))
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x, attention_mask=None):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def train(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step():
        mask = torch.ones(2, 4, dtype=torch.long)
        mask[:, 2:] = 0
        net(torch.randn(4, 8), attention_mask=mask).logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
