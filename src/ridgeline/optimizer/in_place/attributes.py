"""Sets attributes on modules and configurations so that copies and saved files do not contain them.

A replaced forward is bound to its module and closes over what it recognized: a shallow copy would compute with the
original's weights, and a model saved as a whole could not be loaded. Registry names in configurations are unknown to
other processes.
"""

from __future__ import annotations

import copyreg
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

_ABSENT = object()
_REDUCE = "__reduce_ex__"
_PROTOCOL = 4
_before: dict[int, tuple[weakref.ref[Any], dict[str, Any]]] = {}
"""By ``id``, because configurations are not hashable: an owner's original values of the names that are ours now."""


def place(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute of a module or a configuration; returns a function that restores it."""
    if isinstance(owner, nn.Module):
        inner = _placed(owner, _REDUCE, types.MethodType(_reduced, owner)) if _REDUCE not in vars(owner) else _nothing
    else:
        copyreg.dispatch_table.setdefault(type(owner), _reduced_plainly)
        inner = _nothing
    outer = _placed(owner, name, value)

    def undo() -> None:
        outer()
        inner()

    return undo


def _nothing() -> None:
    """What has to be done where something was put in before."""


def _placed(owner: Any, name: str, value: Any) -> Callable[[], None]:
    held, kept = vars(owner), _kept_of(owner)
    before = held.get(name, _ABSENT)
    kept.setdefault(name, before)
    held[name] = value

    def undo() -> None:
        _restore(held, name, before)
        if kept.get(name, _ABSENT) is before:
            kept.pop(name, None)

    return undo


def _restore(held: dict[str, Any], name: str, before: Any) -> None:
    if before is _ABSENT:
        held.pop(name, None)
    else:
        held[name] = before


def _kept_of(owner: Any) -> dict[str, Any]:
    key = id(owner)
    if key not in _before:
        _before[key] = (weakref.ref(owner, lambda gone: _before.pop(key, None) and None), {})
    return _before[key][1]


def _reduced(self: Any, protocol: Any) -> Any:
    """``__reduce_ex__`` of a module with attributes of ours: copies and saves the original ones."""
    return _without(self, getattr(type(self), _REDUCE)(self, protocol))


def _reduced_plainly(owner: Any) -> Any:
    """The same for a configuration, through ``copyreg.dispatch_table``."""
    return _without(owner, getattr(type(owner), _REDUCE)(owner, _PROTOCOL))


def _without(owner: Any, made: Any) -> Any:
    kept = _before[id(owner)][1] if id(owner) in _before else {}
    if not kept or not isinstance(made, tuple) or len(made) < 3:
        return made
    state = made[2]
    slotted = isinstance(state, tuple) and len(state) == 2
    held = state[0] if slotted else state
    if not isinstance(held, dict):
        return made
    held = dict(held)
    for name, before in kept.items():
        if name in held:
            _restore(held, name, before)
    return (*made[:2], (held, state[1]) if slotted else held, *made[3:])
