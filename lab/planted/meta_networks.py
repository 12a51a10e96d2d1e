"""Networks and training loops of the programs that run on the stand-in GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[[], object]
BF16 = torch.bfloat16


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.one(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.two(x))))


class Language(nn.Module):
    def __init__(self, width: int = 2048, layers: int = 6, heads: int = 16, vocab: int = 32000) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(vocab, width), nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def placed(module: nn.Module, dtype: torch.dtype = BF16) -> nn.Module:
    return module.to(dtype)


def numbers(*size: int, dtype: torch.dtype = BF16) -> Tensor:
    """Random numbers on the device of the program."""
    made = torch.empty(size, dtype=dtype)
    if made.is_meta:
        return made
    return made.normal_(0.0, 0.02) if dtype.is_floating_point else made.random_(0, 2)


def ids(*size: int) -> Tensor:
    """Indices that every table and every class has."""
    made = torch.empty(size, dtype=torch.long)
    return made if made.is_meta else made.random_(0, 64)


class FusedAdamW:
    """torch.optim.AdamW(fused=True), which does not know meta tensors."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.one, self.two = [[torch.empty_like(p) for p in self.parameters] for _ in range(2)]
        self.steps = [numbers(dtype=torch.float32) for _ in self.parameters]

    def step(self) -> None:
        with torch.no_grad(), torch.profiler.record_function("Optimizer.step#AdamW.step"):
            chosen = [i for i, p in enumerate(self.parameters) if p.grad is not None]
            lists = ([own[i] for i in chosen] for own in (
                self.parameters, [p.grad for p in self.parameters], self.one, self.two))  # fmt: skip
            torch._foreach_add_([self.steps[i] for i in chosen], 1)
            torch._fused_adamw_(*lists, [], [self.steps[i] for i in chosen], lr=1e-3, beta1=0.9, beta2=0.999,
                                weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False)  # fmt: skip

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None


def trainer(model: nn.Module, loss: Callable[[], Tensor], after: Callable[[Tensor], object] = lambda _: None) -> Step:
    optimizer = FusedAdamW(list(model.parameters()))

    def step() -> None:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        after(value)

    return step


def next_token(model: nn.Module, batch: int = 4, length: int = 1024, vocab: int = 32000) -> Callable[[], Tensor]:
    tokens, target = ids(batch, length), ids(batch * length)
    return lambda: F.cross_entropy(model(tokens).flatten(0, 1), target)
