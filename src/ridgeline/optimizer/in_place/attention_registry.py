"""Attention and masks for Hugging Face models through their official registries, under the name "ridgeline"."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.kernels import attention as ridgeline_attention
from ridgeline.optimizer.rewrites.attention.backends import kernel_arguments, kernel_refusal, wins

NAME = "ridgeline"
RUNS_ON = frozenset({"cuda"})
"""Devices on which a substituted module calls a kernel; elsewhere what the model came with runs."""
TAKES_KEY_MASKS = "key_mask" in kernel_arguments()
_OWN = ("softcap", "s_aux", "sinks", "position_bias", "cache", "head_mask", "output_attentions")
"""Arguments under which attention is more than a mask: handed to the function the model came with."""


def register() -> None:
    """Make the two functions known to transformers; doing it again changes nothing."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask)


def mask(
    batch_size: int, q_length: Any, kv_length: int, q_offset: Any = 0, kv_offset: int = 0, mask_function: Any = None,
    attention_mask: Tensor | None = None, local_size: int | None = None, allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False, **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """None where nothing is hidden but by causality; else a mask of keys where one says it all; else PyTorch's mask.

    A mask of keys is [B, 1, 1, S] where every row sees alike: what transformers expands to all rows, unexpanded. It
    is [B, S] on top of causality, as for flash attention. An attention that takes masks of keys keeps its fast kernel,
    in a CUDA graph too, where values cannot be seen. Under a compiler causal masks stay whole: rewrites look through.
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
    if not _is_traced(padding) and bool(padding.all()):
        return None
    return padding[:, None, None, :] if both_ways else padding


def _padding(attention_mask: Tensor, kv_length: int, kv_offset: int) -> Tensor:
    """The [B, keys] mask for the keys at hand; keys past its end are hidden."""
    found = attention_mask[:, kv_offset : kv_offset + kv_length]
    missing = kv_length - found.shape[-1]
    return F.pad(found, (0, missing)) if missing > 0 else found


def _is_traced(value: Tensor) -> bool:
    """Whether values cannot be looked at here: in a tracer, or while a CUDA graph is captured."""
    from torch._subclasses import FakeTensor

    if torch.compiler.is_compiling() or isinstance(value, FakeTensor) or value.is_meta:
        return True
    return value.is_cuda and torch.cuda.is_current_stream_capturing()


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention as transformers calls it: by our kernel where it takes these arguments, by PyTorch's otherwise."""
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
    """A mask as PyTorch's function takes it: with causality written into a [B, S] one."""
    if found is None or found.dim() != 2:
        return found
    return found[:, None, None, :] & torch.ones(rows, found.shape[1], dtype=torch.bool, device=found.device).tril()


def _by_kernel(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None,
    is_causal: bool | None,
) -> Tensor | None:  # fmt: skip
    """The kernel's result, or None where it has none for these arguments."""
    options: dict[str, Any] = {"scale": scaling}
    rows, keys = query.shape[2], key.shape[2]
    if attention_mask is None:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        options["is_causal"] = bool(causal) and rows > 1
        if options["is_causal"] and keys > rows:  # the keys of a cache that are not written yet: PyTorch's alignment
            key, value = key[:, :, :rows], value[:, :, :rows]
    elif not TAKES_KEY_MASKS or not _is_key_mask(attention_mask):
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


def _is_key_mask(found: Tensor) -> bool:
    """A boolean of keys: [B, S], or [B, 1, 1, S]."""
    return found.dtype is torch.bool and (
        found.dim() == 2 or (found.dim() == 4 and found.shape[1] == found.shape[2] == 1)
    )
