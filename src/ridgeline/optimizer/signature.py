"""Which calls are alike: structure, shapes, plain values and the state around the call, as one hashable value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from ridgeline.optimizer.tree import Flat, Token, TooLarge, flatten, paths, told

_AMBIENT: tuple[tuple[str, Callable[[], Any]], ...] = (
    ("inference mode", torch.is_inference_mode_enabled),
    ("autocast on CUDA", lambda: torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")),
    ("autocast on the CPU", lambda: torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")),
    ("deterministic algorithms", torch.are_deterministic_algorithms_enabled),
    ("default dtype", torch.get_default_dtype),
    ("float32 matmul precision", torch.get_float32_matmul_precision),
    ("flash attention", torch._C._get_flash_sdp_enabled),
    ("memory-efficient attention", torch._C._get_mem_efficient_sdp_enabled),
    ("math attention", torch._C._get_math_sdp_enabled),
    ("cuDNN attention", torch._C._get_cudnn_sdp_enabled),
    ("cuDNN", torch._C._get_cudnn_enabled),
    ("dispatch modes", torch._C._len_torch_dispatch_stack),
    ("function modes", lambda: torch._C._len_torch_function_stack() and str(torch.get_default_device())),
    ("function transforms", torch._C._functorch.maybe_current_level),
)
_NAMES = ("gradients recorded", "model.training", *(name for name, _ in _AMBIENT))
_READERS = tuple(read for _, read in _AMBIENT)


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
    """The state around a call that changes what it computes."""
    training = model.training if isinstance(model, nn.Module) else None
    # An inference-mode call computes what a call without gradients does.
    first = False if not grad else _READERS[0]()
    return (grad, training, first, *[read() for read in _READERS[1:]])


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
        return f"{where} is {told(theirs[1])}, not {told(ours[1])}"
    return ""


def _where(path: str) -> str:
    """``call[0][1]`` is the second positional argument, ``call[1]['mask']`` a keyword one."""
    inside = path.removeprefix("call")
    if inside.startswith("[0]"):
        return "args" + inside[3:]
    return "kwargs" + inside[3:] if inside.startswith("[1]") else "the call"


__all__ = ["Signature", "TooLarge", "ambient", "difference"]
