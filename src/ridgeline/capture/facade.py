"""What the model's own code sees of the fake tensors: an accelerator, where the machinery below sees CPU fakes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

ACCELERATOR = torch.device("cuda", 0)
HOST = torch.device("cpu")


@dataclass
class _Facade:
    inside: bool = True  # whether the machinery, not the model, is asking


facade = _Facade()


def _seen_device(t: Any) -> torch.device:
    if t.fake_mode.in_kernel_invocation:
        return torch.device("meta")
    if facade.inside or "_rl_host" in t.__dict__:
        return t.fake_device  # type: ignore[no-any-return]
    return ACCELERATOR


def _seen_is_cuda(t: Any) -> bool:
    return not facade.inside and "_rl_host" not in t.__dict__


def _seen_is_cpu(t: Any) -> bool:
    return facade.inside or "_rl_host" in t.__dict__


def _indexed(device: Any) -> Any:
    """``cuda`` as ``cuda:0``: without a driver PyTorch cannot look up which one is current."""
    if isinstance(device, str) and device.split(":")[0] == "cuda":
        return ACCELERATOR
    if isinstance(device, torch.device) and device.type == "cuda":
        return ACCELERATOR
    return device


def _to(t: Any, *args: Any, **kwargs: Any) -> Any:
    return torch.Tensor.to(t, *map(_indexed, args), **{key: _indexed(value) for key, value in kwargs.items()})


def _cuda(t: Any, *args: Any, **kwargs: Any) -> Any:
    return torch.Tensor.to(t, ACCELERATOR)


@contextmanager
def accelerator_facade() -> Iterator[None]:
    """Fakes answer ``cuda:0`` to the model's code for the time being."""
    device = FakeTensor.__dict__["device"]
    made = {"device": property(_seen_device, device.fset), "is_cuda": property(_seen_is_cuda),
            "is_cpu": property(_seen_is_cpu), "to": _to, "cuda": _cuda}  # fmt: skip
    kept = {name: FakeTensor.__dict__.get(name) for name in made}
    for name, seen in made.items():
        setattr(FakeTensor, name, seen)
    facade.inside = False
    try:
        yield
    finally:
        facade.inside = True
        for name, original in kept.items():
            if original is None:
                delattr(FakeTensor, name)
            else:
                setattr(FakeTensor, name, original)
