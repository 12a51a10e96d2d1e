"""Registers our mixture of experts with transformers' registry, under the name "ridgeline"."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.kernels import embedding_bag, swiglu
from ridgeline.optimizer.in_place import attention_registry as hooks

FALLBACK = "grouped_mm"
"""transformers' implementation for calls that ours does not support."""
REPLACED = ("eager", "grouped_mm", "batched_mm")


def register() -> bool:
    """Register the function with transformers; False if it has no such registry."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:
        return False
    ALL_EXPERTS_FUNCTIONS.register(hooks.NAME, experts)
    return True


def experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Sort tokens by expert, run two grouped GEMMs with a fused gate, and sum each token's results.

    The sum gathers and weights rows in one pass in float32, as an embedding bag does.
    """
    if not takes(self, hidden_states, top_k_weights):
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        return ALL_EXPERTS_FUNCTIONS[FALLBACK](self, hidden_states, top_k_index, top_k_weights)
    num_tokens, num_chosen = top_k_index.shape
    ids = top_k_index.reshape(-1)
    short = ids.to(torch.int16) if self.num_experts < 2**15 else ids  # a radix sort takes a pass per few bits
    order = torch.argsort(short, stable=True)
    counted = ids.float() if ids.device.type == "cpu" else ids.int()
    ends = torch.histc(counted, bins=self.num_experts, min=0, max=self.num_experts - 1).cumsum(0, dtype=torch.int32)
    rows = hidden_states.index_select(0, torch.div(order, num_chosen, rounding_mode="floor"))
    both = F.grouped_mm(rows, _transposed(self.gate_up_proj, self), offs=ends)
    inner = swiglu(*both.chunk(2, -1)) if is_silu_gate(self) else self._apply_gate(both)
    out = F.grouped_mm(inner, _transposed(self.down_proj, self), offs=ends)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    return _summed(out, places.view(num_tokens, num_chosen), top_k_weights.to(torch.float32))


def _summed(out: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of every token's rows; wide rows are summed in equal pieces."""
    width = out.shape[1]
    # The embedding-bag kernel takes rows of up to so many columns; Mixtral's experts have 4,096.
    num = next(n for n in range(-(-width // 1024), width + 1) if width % n == 0)
    if num > 1:
        pieces = torch.arange(num, device=places.device, dtype=places.dtype)
        places = (num * places.unsqueeze(1) + pieces.unsqueeze(1)).flatten(0, 1)
        weights = weights.unsqueeze(1).expand(-1, num, -1).flatten(0, 1)
    found = embedding_bag(places, out.view(-1, width // num), mode="sum", per_sample_weights=weights)
    return found.view(-1, width)


def takes(self: Any, hidden_states: Tensor, top_k_weights: Tensor) -> bool:
    """Whether these experts are of the plain kind, on one device, without gradients."""
    plain = self.has_gate and not self.has_bias and getattr(self, "is_concatenated", True)
    needs_grad = torch.is_grad_enabled() and (hidden_states.requires_grad or self.down_proj.requires_grad)
    able = hasattr(F, "grouped_mm") and self.down_proj.dtype == hidden_states.dtype == torch.bfloat16
    shared = torch.distributed.is_available() and torch.distributed.is_initialized()
    on_device = hidden_states.device.type in hooks.RUNS_ON
    return bool(plain and able and on_device and not needs_grad and not shared and top_k_weights.dim() == 2)


def _transposed(weight: Tensor, module: Any) -> Tensor:
    return weight if module.is_transposed else weight.transpose(-2, -1)


def is_silu_gate(module: nn.Module) -> bool:
    from transformers.integrations.moe import _default_apply_gate

    own = getattr(type(module), "_apply_gate", None)
    silu = getattr(module, "act_fn", None)
    return own is _default_apply_gate and (isinstance(silu, nn.SiLU) or type(silu).__name__ == "SiLUActivation")
