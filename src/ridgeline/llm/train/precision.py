"""Linear layers of other precision or with adapters, put into a decoder before it gets its weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.llm.model.decoder import Decoder
from ridgeline.llm.train.settings import Settings

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def prepare_modules(part: Decoder, settings: Settings) -> None:
    """Replace the linear layers of every block that fp8 or adapters were asked for."""
    for layer in part.layers.values():
        for module in list(layer.modules()):
            for name, child in list(module.named_children()):
                if type(child) is not nn.Linear:
                    continue
                if settings.precision.fp8 and child.in_features % 16 == 0 and child.out_features % 16 == 0:
                    child.__class__ = Fp8Linear
                elif settings.lora is not None and name in settings.lora.targets:
                    child.__class__ = LoraLinear
                    child.add_adapter(settings.lora.rank, settings.lora.alpha)  # type: ignore[operator]
    if settings.lora is not None:
        for name, param in part.named_parameters():
            param.requires_grad_(name.endswith(("lora_a", "lora_b")))


class Fp8Linear(nn.Linear):
    """A linear layer whose three products are fp8: e4m3 forward, e5m2 for gradients, one scale a tensor.

    Scales are those of the current tensors. Weights and what leaves the layer keep the model's type.
    """

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if hasattr(weight, "to_local"):
            return super().forward(x)
        y = _Fp8Product.apply(x, weight)
        return y if self.bias is None else y + self.bias


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        x8, w8 = quantized(rows, E4M3), quantized(weight, E4M3)
        ctx.save_for_backward(*x8, *w8)
        ctx.shape = x.shape
        return product(x8, (w8[0].t(), w8[1]), x.dtype).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x8, xs, w8, ws = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        g8, gs = quantized(rows, E5M2)
        dx = product((g8, gs), (_column_major(w8), ws), grad.dtype)
        dw = product((g8.t().contiguous(), gs), (_column_major(x8), xs), grad.dtype)
        return dx.view(ctx.shape), dw


def quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """fp8 codes and the factor that makes numbers of them."""
    largest = torch.finfo(dtype).max
    scale = (x.detach().abs().amax().float() / largest).clamp(min=1e-12)
    return (x.detach().float() / scale).clamp(-largest, largest).to(dtype), scale


def product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """``a @ b`` of codes; off CUDA by way of float32, which sums them as exactly."""
    if a[0].is_cuda:
        return torch._scaled_mm(a[0], b[0], scale_a=a[1], scale_b=b[1], out_dtype=dtype, use_fast_accum=False)
    return (a[0].float() @ b[0].float() * (a[1] * b[1])).to(dtype)


def _column_major(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


class LoraLinear(nn.Linear):
    """A frozen linear layer and a trained product of two thin matrices beside it (Hu et al., 2021)."""

    def add_adapter(self, rank: int, alpha: float) -> None:
        like = {"device": self.weight.device, "dtype": self.weight.dtype}
        self.lora_a = nn.Parameter(torch.empty(rank, self.in_features, **like))
        self.lora_b = nn.Parameter(torch.empty(self.out_features, rank, **like))
        self.lora_scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(F.linear(x, self.lora_a), self.lora_b) * self.lora_scale
