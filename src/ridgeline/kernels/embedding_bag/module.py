"""Embedding tables as a module: all of them in one launch, trained by the backward pass itself."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import KernelError, nearest
from ridgeline.kernels.embedding_bag.op import MODES, embedding_bags
from ridgeline.kernels.embedding_bag.reference import OPTIMIZERS, coded_rows
from ridgeline.kernels.embedding_bag.step import state_shapes, update_bags


class _Fused(torch.autograd.Function):
    """Bags forward; backward is the optimizer's step on the tables. ``handle`` only asks for a backward pass."""

    @staticmethod
    def forward(ctx: Any, handle: Tensor, module: EmbeddingBags, indices: Tensor, offsets: Tensor, weights: Any) -> Any:
        ctx.module = module
        ctx.save_for_backward(indices, offsets, weights)
        return module.bags(indices, offsets, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        ctx.module.update(grad, *ctx.saved_tensors)
        return None, None, None, None, None


class EmbeddingBags(torch.nn.Module):
    """Tables of ``rows[t]`` rows and ``dim`` columns; bags of all of them are looked up in one launch.

    With an ``optimizer`` ("sgd", "rowwise_adagrad" or "adam") the backward pass takes its step on the rows that were
    used, in place, with sums in a fixed order; the tables are no parameters then and no gradient is ever written. With
    ``None`` they are one parameter with a dense gradient. ``quantize()`` turns trained tables into eight-bit codes.
    """

    def __init__(
        self,
        rows: Sequence[int],
        dim: int,
        *,
        mode: str = "sum",
        optimizer: str | None = "rowwise_adagrad",
        lr: float = 0.01,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        dtype: torch.dtype = torch.float32,
        device: Any = None,
    ) -> None:
        super().__init__()
        if mode not in MODES:
            raise KernelError(f"EmbeddingBags: mode is one of {', '.join(MODES)}, not {mode!r}")
        if optimizer is not None and optimizer not in OPTIMIZERS[1:]:
            raise KernelError(f"EmbeddingBags: no optimizer {optimizer!r}{nearest(optimizer, OPTIMIZERS[1:])}")
        self.rows, self.dim, self.mode, self.optimizer = tuple(rows), dim, mode, optimizer
        self.lr, self.eps, self.weight_decay = float(lr), float(eps), float(weight_decay)
        self.betas = (float(betas[0]), float(betas[1]))
        total = sum(rows)
        weight = torch.empty(total, dim, dtype=dtype, device=device).uniform_(-(dim**-0.5), dim**-0.5)
        starts = torch.tensor([0, *accumulate(self.rows[:-1])], dtype=torch.int64, device=device)
        self.register_buffer("starts", starts, persistent=False)
        self.register_buffer("scale_shift", None)
        if optimizer is None:
            self.weight = torch.nn.Parameter(weight)
            return
        self.register_buffer("weight", weight)
        for name, shape in zip(("first", "second"), state_shapes(optimizer, total, dim), strict=True):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float32, device=device))
        self.register_buffer("step", torch.zeros((), dtype=torch.float32, device=device))
        self.register_buffer("handle", torch.zeros((), device=device).requires_grad_(), persistent=False)

    def forward(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None) -> Tensor:
        """[B, T·dim]; ``indices`` of all bags of the first table, then of the second; ``offsets`` has T·B + 1."""
        if self.optimizer is None or self.scale_shift is not None or not (self.training and torch.is_grad_enabled()):
            return self.bags(indices, offsets, per_sample_weights)
        if per_sample_weights is not None and per_sample_weights.requires_grad:
            raise KernelError("EmbeddingBags: weights of samples get no gradient where the step is fused")
        found: Tensor = _Fused.apply(self.handle, self, indices, offsets, per_sample_weights)
        return found

    def bags(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None) -> Tensor:
        """The lookup alone."""
        return embedding_bags(self.weight, indices, offsets, self.starts, mode=self.mode,
                              per_sample_weights=per_sample_weights, scale_shift=self.scale_shift)  # fmt: skip

    def update(self, grad: Tensor, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None) -> None:
        """The optimizer's step for the gradient of a lookup's result."""
        update_bags(
            self.weight, self.first, self.second, self.step, grad, indices, offsets, self.starts, per_sample_weights,
            len(self.rows), self.mode == "mean", self.optimizer or "sgd", self.lr, self.eps, self.weight_decay,
            *self.betas,
        )  # fmt: skip

    @torch.no_grad()
    def quantize(self) -> EmbeddingBags:
        """Tables as eight-bit codes with a scale and a shift for each row: for serving, no longer trained."""
        codes, self.scale_shift = coded_rows(self.weight)
        del self.weight
        self.register_buffer("weight", codes)
        return self
