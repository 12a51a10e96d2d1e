"""Masks of ones among the arguments, which may be dropped, with the check that every later call needs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

MASKS = ("attention_mask", "encoder_attention_mask", "decoder_attention_mask", "key_padding_mask", "pixel_mask")
HIDES_WHERE_TRUE = frozenset({"key_padding_mask"})


class Masks:
    """The masks of a call that hide nothing, by name, and the check of those of another call."""

    def __init__(self, names: list[str], dropped: list[str]) -> None:
        self._names, self._dropped = names, dropped
        self._room: Tensor | None = None

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        return all(_says_nothing(name, _given(name, self._names, args, kwargs)) for name in self._dropped)

    def asked(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], bool] | None:
        """The same check started on the device now and read later, so that work can be queued behind it meanwhile.

        None where only the host can check: masks of another kind, on the host, or during a capture. Read the answer
        before the next check is started.
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
    """The call without masks that hide nothing, and the check under which that is valid; None if there are none.

    Where values cannot be read, in compiled code and CUDA graphs, a mask of ones prevents the fast attention kernels.
    The check reads the values before the call, which synchronizes once. Whether the model computes the same without
    them is proved on its outputs.
    """
    try:
        names = list(inspect.signature(getattr(model, "forward", model)).parameters)
    except (TypeError, ValueError):
        names = []
    dropped = [name for name in MASKS if _says_nothing(name, _given(name, names, args, kwargs))]
    if not dropped:
        return None

    left_args = tuple(None if at < len(names) and names[at] in dropped else value for at, value in enumerate(args))
    return left_args, {name: value for name, value in kwargs.items() if name not in dropped}, Masks(names, dropped)


def _given(name: str, names: list[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if name in kwargs:
        return kwargs[name]
    return args[names.index(name)] if name in names and names.index(name) < len(args) else None


def _says_nothing(name: str, mask: Any) -> bool:
    """Whether a [batch, tokens] mask hides none of them."""
    if not _is_mask(mask) or (mask.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    return bool(_seen(name, mask).all())


def _is_mask(mask: Any) -> bool:
    return isinstance(mask, Tensor) and mask.dim() == 2 and not mask.is_floating_point() and not mask.is_complex()


def _seen(name: str, mask: Tensor) -> Tensor:
    return mask == 0 if name in HIDES_WHERE_TRUE else mask != 0
