"""Arguments that say nothing: a mask of ones that may be left out, with the question to ask before every call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

MASKS = ("attention_mask", "encoder_attention_mask", "decoder_attention_mask", "key_padding_mask", "pixel_mask")
HIDES_WHERE_TRUE = frozenset({"key_padding_mask"})
class Masks:
    """The masks of a call that hide nothing, by name, and the question whether those of another call do."""

    def __init__(self, names: list[str], dropped: list[str]) -> None:
        self._names, self._dropped = names, dropped
        self._room: Tensor | None = None

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        return all(_says_nothing(name, _given(name, self._names, args, kwargs)) for name in self._dropped)

    def asked(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], bool] | None:
        """The same question put to the device now and answered later, so that work may be queued behind it meanwhile.

        None where only a look can tell: masks of another kind, on the host, or while a graph is recorded. The answer is
        to be read before the next question is put.
        """
        masks = [_given(name, self._names, args, kwargs) for name in self._dropped]
        if not all(_is_mask(mask) and mask.is_cuda for mask in masks) or torch.cuda.is_current_stream_capturing():
            return None
        hidden = [_seen(name, mask).all() for name, mask in zip(self._dropped, masks, strict=True)]
        if self._room is None:
            self._room = torch.empty(len(hidden), dtype=torch.bool, pin_memory=True)
        room, done = self._room, torch.cuda.Event()
        for i, each in enumerate(hidden):
            room[i].copy_(each, non_blocking=True)
        done.record()

        def answer() -> bool:
            done.synchronize()
            return bool(room.all())

        return answer


def simplified(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Masks] | None:
    """The call without masks that hide nothing, and the guard under which it means the same; None if there are none.

    A mask of ones keeps attention from its fast kernels wherever values cannot be looked at: in compiled code and in
    CUDA graphs. The guard looks at the values before the call, which waits for the device once. Whether the model
    computes the same without them is for a proof on its outputs to say.
    """
    names = _parameter_names(model)
    dropped = [name for name in MASKS if _says_nothing(name, _given(name, names, args, kwargs))]
    if not dropped:
        return None

    left_args = tuple(None if at < len(names) and names[at] in dropped else value for at, value in enumerate(args))
    return left_args, {name: value for name, value in kwargs.items() if name not in dropped}, Masks(names, dropped)


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
    if not _is_mask(mask) or (mask.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    return bool(_seen(name, mask).all())


def _is_mask(mask: Any) -> bool:
    return isinstance(mask, Tensor) and mask.dim() == 2 and not mask.is_floating_point() and not mask.is_complex()


def _seen(name: str, mask: Tensor) -> Tensor:
    return mask == 0 if name in HIDES_WHERE_TRUE else mask != 0
