"""Registers our attention and masks with transformers' registries, under the name "ridgeline"."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.kernels import attention as ridgeline_attention
from ridgeline.optimizer.rewrites.attention.backends import kernel_arguments, kernel_refusal, wins

NAME = "ridgeline"
RUNS_ON = frozenset({"cuda"})
"""Devices on which a replaced module calls a kernel; elsewhere it runs as before."""
TAKES_KEY_MASKS = "key_mask" in kernel_arguments()
_OWN = ("softcap", "s_aux", "sinks", "position_bias", "cache", "head_mask", "output_attentions")
"""Arguments for which the model's own attention function is called."""


def register() -> None:
    """Register both functions with transformers; idempotent."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask)


def mask(
    batch_size: int, q_length: Any, kv_length: int, q_offset: Any = 0, kv_offset: int = 0, mask_function: Any = None,
    attention_mask: Tensor | None = None, local_size: int | None = None, allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False, **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """None if only causality hides anything; a mask of keys if one is enough; otherwise PyTorch's mask.

    A mask of keys is [B, 1, 1, S], or [B, S] on top of causality as for flash attention: what transformers would
    expand to all rows. It allows the fast kernels, also in a CUDA graph, where values cannot be read. Under a compiler
    causal masks stay expanded, because rewrites recognize them.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

    rest = {
        "batch_size": batch_size, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset,
        "kv_offset": kv_offset, "mask_function": mask_function, "attention_mask": attention_mask,
        "local_size": local_size, "allow_is_causal_skip": allow_is_causal_skip,
        "allow_is_bidirectional_skip": allow_is_bidirectional_skip, **kwargs,
    }  # fmt: skip
    window = local_size is not None and kv_length >= local_size
    both_ways = mask_function is bidirectional_mask_function and allow_is_bidirectional_skip and not window
    from_start = isinstance(q_offset, int) and q_offset == 0 and q_length == kv_length
    causal = mask_function is causal_mask_function and allow_is_causal_skip and not window and from_start
    causal = causal and TAKES_KEY_MASKS and not torch.compiler.is_compiling()
    if attention_mask is None or not (both_ways or causal):
        return sdpa_mask(**rest)
    padding = _padding(attention_mask, kv_length, kv_offset)
    from torch._subclasses import FakeTensor

    readable = not torch.compiler.is_compiling() and not isinstance(padding, FakeTensor) and not padding.is_meta
    readable = readable and not (padding.is_cuda and torch.cuda.is_current_stream_capturing())
    if readable and bool(padding.all()):
        return None
    return padding[:, None, None, :] if both_ways else padding


def _padding(attention_mask: Tensor, kv_length: int, kv_offset: int) -> Tensor:
    """The [B, keys] mask of the present keys; keys beyond its end are hidden."""
    found = attention_mask[:, kv_offset : kv_offset + kv_length]
    missing = kv_length - found.shape[-1]
    return F.pad(found, (0, missing)) if missing > 0 else found


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention with transformers' signature: our kernel if it supports the arguments, otherwise PyTorch's."""
    special = any(kwargs.get(name) is not None and kwargs.get(name) is not False for name in _OWN)
    if not special and not dropout and query.device.type in RUNS_ON and not torch.compiler.is_compiling():
        found = _by_kernel(module, query, key, value, attention_mask, scaling, is_causal)
        if found is not None:
            return found.transpose(1, 2), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(
        module, query, key, value, _whole(attention_mask, query.shape[2]), dropout=dropout, scaling=scaling,
        is_causal=is_causal, **kwargs,
    )  # fmt: skip


def _whole(found: Tensor | None, rows: int) -> Tensor | None:
    """A mask for PyTorch's function: causality is written into a [B, S] one."""
    if found is None or found.dim() != 2:
        return found
    return found[:, None, None, :] & torch.ones(rows, found.shape[1], dtype=torch.bool, device=found.device).tril()


def _by_kernel(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None,
    is_causal: bool | None,
) -> Tensor | None:  # fmt: skip
    """The kernel's result, or None if it does not support these arguments."""
    options: dict[str, Any] = {"scale": scaling}
    rows, keys = query.shape[2], key.shape[2]
    if attention_mask is None:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        options["is_causal"] = bool(causal) and rows > 1
        if options["is_causal"] and keys > rows:  # unwritten slots of a cache: PyTorch aligns at the upper left
            key, value = key[:, :, :rows], value[:, :, :rows]
    elif not TAKES_KEY_MASKS or attention_mask.dtype is not torch.bool or not (
            attention_mask.dim() == 2 or (attention_mask.dim() == 4 and attention_mask.shape[1:3] == (1, 1))):
        return None
    elif attention_mask.dim() == 2:
        options |= {"key_mask": attention_mask, "is_causal": True}
    else:
        options["key_mask"] = attention_mask[:, 0, 0, :]
    training = torch.is_grad_enabled() and query.requires_grad
    if not wins(query, bool(options.get("is_causal")), "key_mask" in options, training):
        return None
    if kernel_refusal(query, key, value, **options) is not None:
        return None
    return ridgeline_attention(query, key, value, **options)
