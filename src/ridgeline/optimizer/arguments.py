"""Arguments that say nothing: a mask of ones that may be left out, with the question to ask before every call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

MASKS = ("attention_mask", "encoder_attention_mask", "decoder_attention_mask", "key_padding_mask", "pixel_mask")
HIDES_WHERE_TRUE = frozenset({"key_padding_mask"})
Guard = Callable[[tuple[Any, ...], Mapping[str, Any]], bool]


def simplified(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Guard] | None:
    """The call without masks that hide nothing, and the guard under which it means the same; None if there are none.

    A mask of ones keeps attention from its fast kernels wherever values cannot be looked at: in compiled code and in
    CUDA graphs. The guard looks at the values before the call, which waits for the device once. Whether the model
    computes the same without them is for a proof on its outputs to say.
    """
    names = _parameter_names(model)
    dropped = [name for name in MASKS if _says_nothing(name, _given(name, names, args, kwargs))]
    if not dropped:
        return None

    def holds(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        return all(_says_nothing(name, _given(name, names, args, kwargs)) for name in dropped)

    left_args = tuple(None if at < len(names) and names[at] in dropped else value for at, value in enumerate(args))
    return left_args, {name: value for name, value in kwargs.items() if name not in dropped}, holds


def _parameter_names(model: Any) -> list[str]:
    forward = getattr(model, "forward", model)
    try:
        return list(inspect.signature(forward).parameters)
    except (TypeError, ValueError):
        return []


def _given(name: str, names: list[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if name in kwargs:
        return kwargs[name]
    return args[names.index(name)] if name in names and names.index(name) < len(args) else None


def _says_nothing(name: str, mask: Any) -> bool:
    """Whether a mask of one number a token hides none of them."""
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.is_floating_point() or mask.is_complex():
        return False
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    seen = mask == 0 if name in HIDES_WHERE_TRUE else mask != 0
    return bool(seen.all())
