"""Turns dropout off, so that a random model can be compared element by element.

Means and spreads of a few dozen runs detect a gradient that is off by a fifth, but not one that is off by a twentieth.
With all rates at zero the same candidate, built once more, is judged like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def dropout_off(model: nn.Module) -> Iterator[int]:
    """Set all dropout rates of modules and their configurations to zero; yields how many were not."""
    kept = [(owner, name, value) for owner in _owners(model) for name, value in list(vars(owner).items())
            if _is_rate(owner, name, value)]  # fmt: skip
    try:
        for owner, name, _ in kept:
            object.__setattr__(owner, name, 0.0)
        yield len(kept)
    finally:
        for owner, name, value in kept:
            object.__setattr__(owner, name, value)


def _owners(model: nn.Module) -> list[Any]:
    modules = list(model.modules())
    configs = {id(c): c for m in modules if (c := vars(m).get("config")) is not None and hasattr(c, "__dict__")}
    return [*modules, *configs.values()]


def _is_rate(owner: Any, name: str, value: Any) -> bool:
    drops = isinstance(owner, nn.modules.dropout._DropoutNd) or type(owner).__name__ == "StochasticDepth"  # torchvision
    named = name == "p" if drops else "drop" in name.lower()
    return named and isinstance(value, float) and 0 < value < 1
