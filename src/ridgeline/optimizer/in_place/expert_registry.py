"""Mixtures of experts of Hugging Face models through their official registry, under the name "ridgeline"."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.kernels import embedding_bag, swiglu
from ridgeline.optimizer.in_place import attention_registry as hooks

FALLBACK = "grouped_mm"
"""What computes what we do not: transformers' own grouped products."""
WIDEST = 1024
"""Columns of a bag's rows: Mixtral's experts have 4,096, and no part of the model was replaced for it."""
REPLACED = ("eager", "grouped_mm", "batched_mm")


def register() -> bool:
    """Make the function known to transformers; False where it has no such registry."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:
        return False
    ALL_EXPERTS_FUNCTIONS.register(hooks.NAME, experts)
    return True


def experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Every token through its experts: rows in the order of experts, two grouped products, gate and weighted sum fused.

    The sum over a token's experts gathers and weights rows in one pass, as a bag of an embedding does, in float32.
    """
    if not takes(self, hidden_states, top_k_weights):
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        return ALL_EXPERTS_FUNCTIONS[FALLBACK](self, hidden_states, top_k_index, top_k_weights)
    num_tokens, num_chosen = top_k_index.shape
    ids = top_k_index.reshape(-1)
    short = ids.to(torch.int16) if self.num_experts < 2**15 else ids  # a sort takes a pass for every few bits
    order = torch.argsort(short, stable=True)
    offsets = _ends(ids, self.num_experts)
    rows = hidden_states.index_select(0, torch.div(order, num_chosen, rounding_mode="floor"))
    both = F.grouped_mm(rows, _turned(self.gate_up_proj, self), offs=offsets)
    inner = _gated(self, both)
    out = F.grouped_mm(inner, _turned(self.down_proj, self), offs=offsets)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    return _summed(out, places.view(num_tokens, num_chosen), top_k_weights.to(torch.float32))


def _summed(out: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of every token's rows; rows wider than a bag's are summed in equal pieces."""
    width = out.shape[1]
    num = next(n for n in range(-(-width // WIDEST), width + 1) if width % n == 0)
    if num > 1:
        pieces = torch.arange(num, device=places.device, dtype=places.dtype)
        places = (num * places.unsqueeze(1) + pieces.unsqueeze(1)).flatten(0, 1)
        weights = weights.unsqueeze(1).expand(-1, num, -1).flatten(0, 1)
    found = embedding_bag(places, out.view(-1, width // num), mode="sum", per_sample_weights=weights)
    return found.view(-1, width)


def takes(self: Any, hidden_states: Tensor, top_k_weights: Tensor) -> bool:
    """Whether these experts are the plain kind, on one device, and nobody asks for a gradient."""
    plain = self.has_gate and not self.has_bias and getattr(self, "is_concatenated", True)
    needs_grad = torch.is_grad_enabled() and (hidden_states.requires_grad or self.down_proj.requires_grad)
    able = hasattr(F, "grouped_mm") and self.down_proj.dtype == hidden_states.dtype == torch.bfloat16
    shared = torch.distributed.is_available() and torch.distributed.is_initialized()
    on_device = hidden_states.device.type in hooks.RUNS_ON
    return bool(plain and able and on_device and not needs_grad and not shared and top_k_weights.dim() == 2)


def _ends(ids: Tensor, num_experts: int) -> Tensor:
    """Where each expert's rows end."""
    counted = ids.float() if ids.device.type == "cpu" else ids.int()
    return torch.histc(counted, bins=num_experts, min=0, max=num_experts - 1).cumsum(0, dtype=torch.int32)


def _turned(weight: Tensor, module: Any) -> Tensor:
    return weight if module.is_transposed else weight.transpose(-2, -1)


def _gated(module: Any, both: Tensor) -> Tensor:
    """The gate in one pass where it is SiLU's as transformers writes it; else as the model does it."""
    if is_silu_gate(module):
        gate, up = both.chunk(2, -1)
        return swiglu(gate, up)
    return module._apply_gate(both)


def is_silu_gate(module: nn.Module) -> bool:
    from transformers.integrations.moe import _default_apply_gate

    own = getattr(type(module), "_apply_gate", None)
    silu = getattr(module, "act_fn", None)
    return own is _default_apply_gate and (isinstance(silu, nn.SiLU) or type(silu).__name__ == "SiLUActivation")
