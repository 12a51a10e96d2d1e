"""Ops of engines that PyTorch has no single op for, written ``engine::name`` in programs.

Each is a plain function on tensors of any device, and means the same everywhere; on CUDA our kernels may compute it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ridgeline.errors import EngineError, nearest

OPS: dict[str, Callable[..., Any]] = {}


def op(function: Callable[..., Any]) -> Callable[..., Any]:
    """Declare a function as an op of engines, under its own name."""
    assert function.__name__ not in OPS
    OPS[function.__name__] = function
    return function


def function_of(name: str) -> Callable[..., Any]:
    if name not in OPS:
        raise EngineError(f"engines have no op engine::{name[:40]}{nearest(name, OPS)}")
    return OPS[name]


def names_of(name: str) -> set[str]:
    return set(inspect.signature(function_of(name)).parameters)
