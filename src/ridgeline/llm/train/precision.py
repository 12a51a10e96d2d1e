"""Linear layers of other precision or with adapters, put into a decoder before it gets its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.graph.declared import cost_of
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

    Scales are those of the current tensors. Weights and what leaves the layer keep the model's type. Layers of one
    input are one product: their weights become the rows of one matrix of codes.
    """

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self.weight, "to_local"):
            return super().forward(x)
        return self.together(x.flatten(0, -2), (self,))[0].unflatten(0, x.shape[:-1])

    @staticmethod
    def together(x: Tensor, layers: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
        outputs = _Fp8Product.apply(x, *(layer.weight for layer in layers))
        pairs = zip(outputs, layers, strict=True)
        return tuple(y if layer.bias is None else y + layer.bias for y, layer in pairs)


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        x8, x8_turned, x_scale = coded([x], False)
        w8, w8_turned, w_scale = coded(list(weights), False)
        ctx.save_for_backward(x8_turned, x_scale, w8_turned, w_scale)
        ctx.sizes = [len(weight) for weight in weights]
        return product(x8, x_scale, w8, w_scale, x.dtype, fast=True).split(ctx.sizes, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        x8_turned, x_scale, w8_turned, w_scale = ctx.saved_tensors
        g8, g8_turned, scale = coded(list(grads), True, 1)
        dx = product(g8, scale, w8_turned, w_scale, grads[0].dtype)
        dw = product(g8_turned, scale, x8_turned, x_scale, grads[0].dtype)
        return dx, *dw.split(ctx.sizes)


@torch.library.custom_op(
    "ridgeline_llm::fp8_codes",
    mutates_args=(),
    schema="(Tensor[] parts, bool wide, int dim=0) -> (Tensor, Tensor, Tensor)",
)
def coded(parts: Sequence[Tensor], wide: bool, dim: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """The matrices side by side along ``dim`` as fp8 codes, the same transposed, and the factor that restores them.

    Codes are e4m3, or e5m2 for a wide range. Both orders, because the matrix units want the summed dim of both operands
    to be the contiguous one.
    """
    dtype = E5M2 if wide else E4M3
    if parts[0].is_cuda:
        from ridgeline.llm.train.fp8_kernel import write_codes

        return write_codes(parts, dtype, dim)
    from ridgeline.kernels import quantize

    codes, scale = quantize(torch.cat(tuple(parts), dim), dtype, per="tensor")
    return codes, codes.t().contiguous(), scale


@coded.register_fake
def _(parts: Sequence[Tensor], wide: bool, dim: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    joined, other = sum(part.shape[dim] for part in parts), parts[0].shape[1 - dim]
    codes = parts[0].new_empty((joined, other) if dim == 0 else (other, joined), dtype=E5M2 if wide else E4M3)
    return codes, codes.new_empty(codes.shape[::-1]), parts[0].new_empty((), dtype=torch.float32)


# Read for the largest magnitude, and for the codes
cost_of("ridgeline_llm::fp8_codes")(lambda inputs, outputs, **_: {"read_bytes": 2 * sum(x.num_bytes for x in inputs)})


def product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """``a @ b.t()`` of codes, sums in float32 (``fast``: of fewer bits); off CUDA in float32, which is as exact."""
    if a.is_cuda:
        return torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=dtype, use_fast_accum=fast)
    return (a.float() @ b.t().float() * (a_scale * b_scale)).to(dtype)


class LoraLinear(nn.Linear):
    """A frozen linear layer and a trained product of two thin matrices beside it (Hu et al., 2021)."""

    def add_adapter(self, rank: int, alpha: float) -> None:
        like = {"device": self.weight.device, "dtype": self.weight.dtype}
        self.lora_a = nn.Parameter(torch.empty(rank, self.in_features, **like))
        self.lora_b = nn.Parameter(torch.empty(self.out_features, rank, **like))
        self.lora_scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(F.linear(x, self.lora_a), self.lora_b) * self.lora_scale
