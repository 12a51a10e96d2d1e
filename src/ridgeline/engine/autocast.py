"""Autocast as it is here and now: what it casts to, and the same code with it off or as it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

KINDS = ("cuda", "cpu")
CAST = (torch.float16, torch.bfloat16, torch.float32)
"""What autocast may cast: wider numbers stay as they are."""


def active() -> dict[str, torch.dtype]:
    """The devices that autocast is on for, and the type it casts to."""
    return {kind: torch.get_autocast_dtype(kind) for kind in KINDS if torch.is_autocast_enabled(kind)}


@contextmanager
def off() -> Iterator[None]:
    """Everything as written, on every device.

    Backward passes run so: loops leave autocast after the forward. Inside of it, what a model computes in float32 on
    purpose would have its gradients computed in fewer bits.
    """
    with ExitStack() as stack:
        for kind in active():
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def on(state: Mapping[str, torch.dtype]) -> Iterator[None]:
    """Autocast as it was when ``active`` said so; what is on besides stays on."""
    with ExitStack() as stack:
        for kind, dtype in state.items():
            stack.enter_context(torch.autocast(kind, dtype=dtype))
        yield


def enters(model: nn.Module) -> bool:
    """Whether a model may switch autocast on by itself: its own code speaks of it, or what was put around its code."""
    return any(_speaks(module.__dict__.get("forward", type(module).forward)) for module in model.modules())


def _speaks(function: Any) -> bool:
    while function is not None:
        inner = getattr(function, "__func__", function)
        code = getattr(inner, "__code__", None)
        if code is not None and any("autocast" in name for name in (code.co_name, *code.co_names)):
            return True
        function = getattr(inner, "__wrapped__", None)
    return False


def computed_in(tensor: Tensor) -> torch.dtype:
    """The type that products with this tensor are computed in here: autocast's, where it is on."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if tensor.dtype in CAST and torch.is_autocast_enabled(kind) else tensor.dtype
