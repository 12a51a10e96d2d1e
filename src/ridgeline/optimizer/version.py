"""A number that changes whenever a dictionary does, from the interpreter where it can be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def entries(held: dict[Any, Any]) -> Any:
    """What stands for the number where it cannot be read: the keys, and which objects they name."""
    return [id(value) for value in held.values()] + list(held)


try:
    from torch._C._dynamo import guards
except ImportError:
    version: Callable[[dict[Any, Any]], Any] = entries
else:
    version = getattr(guards, "dict_version", entries)
