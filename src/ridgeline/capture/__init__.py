"""PyTorch models captured as graphs, on fake tensors: no weights in memory, no GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ridgeline.capture.inputs import Dim, Spec, spec
from ridgeline.graph.declared import cost_of

if TYPE_CHECKING:
    from ridgeline.graph import Graph

__all__ = ["Dim", "Spec", "capture", "cost_of", "decode_kwargs", "spec"]


def capture(
    model: Any,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    mode: str = "infer",
    optimizer: str | Callable[..., Any] | None = "adamw",
    loss: Callable[..., Any] | None = None,
    name: str | None = None,
    bindings: Mapping[str, int] | None = None,
    *,
    autocast: str | None = None,
    fold: bool = True,
) -> Graph:
    """The operators eager PyTorch on CUDA would run for one step of ``model``.

    ``mode="infer"`` is a forward pass in eval mode without gradients; ``"train"`` is forward, backward and a
    steady-state optimizer step. ``args`` and ``kwargs`` may hold real or meta tensors, ``spec(...)`` placeholders
    (their named dims bound by ``bindings``) and objects that hold tensors, such as a KV cache. ``optimizer`` is a
    name, a function of the parameters, or None; ``loss`` a function of the output. ``autocast="bf16"`` wraps the
    forward pass in CUDA autocast. The model and the inputs are left as they were.
    """
    from ridgeline.capture.step import capture_step

    if not args and not kwargs:
        args = getattr(model, "input_specs", ())  # an imported model says what it takes
    return capture_step(
        model, tuple(args), dict(kwargs or {}), mode, optimizer, loss, name, dict(bindings or {}), autocast, fold
    )


def decode_kwargs(model_or_config: Any, batch: int, kv_len: int) -> dict[str, Any]:
    """Keyword arguments of one Hugging Face decode step with a KV cache of ``kv_len`` tokens."""
    from ridgeline.capture.generation import decode_kwargs as build

    return build(model_or_config, batch, kv_len)


class _Room(ModuleType):
    """``ridgeline.capture`` is this package once anything imported it, and the verb before: both can be called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Graph:
        return capture(*args, **kwargs)


sys.modules[__name__].__class__ = _Room
