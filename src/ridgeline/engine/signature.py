"""Which calls are alike: structure, shapes, plain values and the state around the call, as one hashable value."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ridgeline.engine.pytree import Flat, Token, TooLarge, flatten, paths, told
from ridgeline.errors import NotGraphable
from ridgeline.kernels.tensorfloat import settings

_NAMES = (
    "gradients recorded", "model.training", "inference mode", "autocast", "deterministic algorithms", "default dtype",
    "float32 precision", "flash attention", "memory-efficient attention", "math attention", "cuDNN attention",
    "cuDNN", "cuDNN's determinism", "dispatch modes", "function modes", "function transforms",
)  # fmt: skip
_any_autocast = torch._C._is_any_autocast_enabled
_flash, _efficient = torch._C._get_flash_sdp_enabled, torch._C._get_mem_efficient_sdp_enabled
_math, _cudnn_attention = torch._C._get_math_sdp_enabled, torch._C._get_cudnn_sdp_enabled
_cudnn, _cudnn_repeats = torch._C._get_cudnn_enabled, torch._C._get_cudnn_deterministic
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_transforms = torch._C._functorch.maybe_current_level


@dataclass(frozen=True, slots=True)
class Signature:
    """A call's structure and the state it is made in; equal signatures may share a plan."""

    tokens: tuple[Token, ...]
    ambient: tuple[Any, ...]
    flat: Flat = field(compare=False, repr=False)
    _hash: int = field(compare=False, repr=False)

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], model: Any, *, grad: bool | None = None) -> Signature:
        """The signature of ``model(*args, **kwargs)`` here and now.

        ``grad`` says whether gradients are wanted; by default what the caller's grad mode says. A plan for inference
        asks with ``grad=False``: the same call with gradients recorded or not then has one signature.
        """
        wanted = torch.is_grad_enabled() if grad is None else grad
        flat = flatten((args, kwargs), grad=wanted)
        tokens = tuple(flat.tokens)
        around = ambient(model, wanted)
        return cls(tokens, around, flat, hash((tokens, around)))

    def __hash__(self) -> int:
        return self._hash

    def detached(self) -> Signature:
        """The same signature without hold on the tensors it was made from: what a table of plans keeps."""
        return Signature(self.tokens, self.ambient, Flat(), self._hash)


def ambient(model: Any, grad: bool) -> tuple[Any, ...]:
    """The state around a call that changes what it computes; in inference mode that is what no gradients give."""
    return (
        grad, getattr(model, "training", None), grad and torch.is_inference_mode_enabled(),
        _any_autocast() and _autocast(), torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype(),
        settings(), _flash(), _efficient(), _math(), _cudnn_attention(), _cudnn(), _cudnn_repeats(), _dispatch_modes(),
        _function_modes() and _by_default(), _transforms(),
    )  # fmt: skip


def _by_default() -> str:
    """Where tensors are made, and by what modes."""
    others = [type(mode).__name__ for mode in _get_current_function_mode_stack() if not isinstance(mode, DeviceContext)]
    return " under ".join([str(torch.get_default_device()), *others])


def _autocast() -> tuple[Any, ...]:
    return tuple(torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in ("cuda", "cpu"))


def _modes() -> list[Any]:
    """What stands between Python and PyTorch's operators here."""
    return [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]


def recordable(
    args: tuple[Any, ...], kwargs: dict[str, Any], model: Any, *, grad: bool | None = None
) -> Signature:
    """The signature of a call that is to be recorded; one that would take long to compare is refused."""
    if mode := next((mode for mode in _modes() if not isinstance(mode, DeviceContext)), None):
        raise NotGraphable(f"a {type(mode).__name__} is active, which hears of every call and of no replay")
    try:
        return Signature.of(args, kwargs, model, grad=grad)
    except TooLarge:
        raise NotGraphable("an argument holds too many objects to compare at every call") from None


def difference(a: Signature, b: Signature) -> str:
    """What keeps ``b`` from being served as ``a``, in words; empty if nothing does."""
    for name, ours, theirs in zip(_NAMES, a.ambient, b.ambient):
        if ours != theirs:
            return f"{name} is {theirs}, not {ours}"
    for ours, theirs in zip_longest(paths(a.tokens, "call"), paths(b.tokens, "call")):
        if ours == theirs:
            continue
        if ours is None or theirs is None:
            return "there is more in one of the calls than in the other"
        where = _where((theirs if len(theirs[0]) > len(ours[0]) else ours)[0])
        now, before = told(theirs[1]), told(ours[1])
        return f"{where} is {now}, not {before}" if now != before else f"{where} is another than it was: {now}"
    return ""


def _where(path: str) -> str:
    """``call[0][1]`` is the second positional argument, ``call[1]['mask']`` a keyword one."""
    inside = path.removeprefix("call")
    if inside.startswith("[0]"):
        return "args" + inside[3:]
    return "kwargs" + inside[3:] if inside.startswith("[1]") else "the call"


__all__ = ["Signature", "TooLarge", "ambient", "difference"]
