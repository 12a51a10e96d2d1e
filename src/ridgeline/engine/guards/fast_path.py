"""A call like the last one, told at a glance: what stands between a caller and a recording's start, in three C calls.

A recorded call of a millisecond or two is felt by everything the host does before it starts it; after a wait for the
device, its caches are cold, and a look from Python takes half a millisecond. So once a call was looked at in full, the
next is compared with it: the same arguments in form, the same object such as a cache, the same surroundings, and by one
number that no dictionary has changed. Whatever is not plainly the same goes the long way.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ridgeline.engine.guards.call_match import Late, Matcher
from ridgeline.engine.guards.check import Watch
from ridgeline.engine.guards.dict_version import stillness
from ridgeline.engine.guards.native import Named, glance, native
from ridgeline.engine.pytree import PLAIN, Flat, Piece
from ridgeline.engine.replay.static_inputs import extent
from ridgeline.kernels.tensorfloat import ASKED as PRECISIONS

_TENSOR, _PLAIN, _PIECE = range(3)
_QUESTIONS = (
    torch._C._is_any_autocast_enabled, torch._C._get_deterministic_algorithms, torch.get_default_dtype,
    torch._C._get_flash_sdp_enabled, torch._C._get_mem_efficient_sdp_enabled, torch._C._get_math_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled, torch._C._get_cudnn_enabled, torch._C._get_cudnn_deterministic,
    torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack, torch._C._functorch.maybe_current_level,
    torch._C._get_tracing_state, *PRECISIONS,
)  # fmt: skip
"""All that ``ambient`` compares besides the model's own, and what keeps an optimized model from being called at all."""
_AROUND: tuple[Named, ...] = ((vars(forward_ad), "_current_level", -1),)


class Lane:
    """One call that was looked at in full, and the question whether another is like it."""

    __slots__ = ("__weakref__", "_around", "_call", "_matcher", "_piece", "_spans", "_value", "_watch", "number")

    def __init__(self, matcher: Matcher, watch: Watch, flat: Flat, number: int) -> None:
        args, kwargs = flat.root
        values = [*args, *kwargs.values()]
        self._matcher, self._watch, self.number = matcher, watch, number
        value: Any = None
        self._piece: Piece | None = None
        if isinstance(flat, Late):
            self._piece, value = flat.piece
        self._value = None if self._piece is None else weakref.ref(value, partial(_over, weakref.ref(self)))
        forms = glance([each for each in values if isinstance(each, Tensor)], weak=True)
        inside = (None, []) if self._piece is None else (self._piece.glance, self._piece.lists)
        rows = [(_PIECE, self._value) if self._piece and each is value else _row(each) for each in values]
        self._call: Any = native().Call(len(args), tuple(kwargs), rows, forms, *inside)
        self._spans = array("q", [high - low for low, high in map(extent, flat.tensors)]).tobytes()
        self._around = glance([], names=_AROUND, asks=[(ask, ask()) for ask in _QUESTIONS])

    @classmethod
    def of(cls, matcher: Matcher | None, watch: Watch, flat: Flat) -> Lane | None:
        """A lane for calls like one that was just looked at in full and found to be as recorded; None if it is rare."""
        if matcher is None or not stillness.counts or not _is_native(watch) or _unusual():
            return None
        number = _number(watch, flat)
        try:
            return None if number is None else cls(matcher, watch, flat, number)
        except (TypeError, ValueError):  # a tensor or an argument of an unusual kind
            return None

    def renewed(self, flat: Flat) -> bool:
        """Whether this lane holds for a call that was looked at in full because some dictionary had changed."""
        piece = flat.piece[0] if isinstance(flat, Late) else None
        alike = piece is self._piece and self._call is not None and self._around.same()
        number = _number(self._watch, flat) if alike else None
        if number is not None:
            self.number = number
        return number is not None

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Flat | None:
        """The call as a walk would have it, if it is like the last."""
        call = self._call
        tensors = call.take(args, kwargs) if call is not None and self._around.same() else None
        if tensors is None or stillness.now() != self.number or not self._watch.still(self.number):
            return None
        if self._piece is None or self._value is None:
            return self._matcher.flat(args, kwargs, tensors, None)
        value = self._value()
        return self._matcher.flat(args, kwargs, tensors, (0, self._piece, value)) if self._piece.owns(value) else None

    def end(self) -> None:
        """Lets go of an object that is gone: its lists are held, and what they hold."""
        self._call = self._piece = None

    def apart(self, tensors: Sequence[Tensor], free: bytes) -> bool:
        """Whether those inputs that are copied share no memory with others, nor with the model."""
        model = self._watch
        return not free or (_is_native(model) and native().apart(tensors, self._spans, free, model.glance))


def _over(lane: weakref.ref[Lane], gone: Any) -> None:
    found = lane()
    if found is not None:
        found.end()


def _row(value: Any) -> tuple[int, Any]:
    if isinstance(value, Tensor):
        return _TENSOR, None
    if type(value) in PLAIN or type(value) is float:
        return _PLAIN, value
    raise TypeError(f"an argument of type {type(value).__name__}")


def _is_native(watch: Watch) -> bool:
    """Whether the model's tensors are looked at in C: complex ones are not, since any may be a conjugate."""
    made = native()
    return made is not None and isinstance(watch.glance, made.Glance)


def _unusual() -> bool:
    """Surroundings that only a full look can compare."""
    return bool(torch._C._is_any_autocast_enabled() or torch._C._len_torch_dispatch_stack()
                or torch._C._len_torch_function_stack())  # fmt: skip


def _number(watch: Watch, flat: Flat) -> int | None:
    """The number under which the model and the object among the arguments were last found as they were."""
    now = stillness.now()
    if watch.counted != now or (isinstance(flat, Late) and flat.piece[0].counted != now):
        return None
    return now
