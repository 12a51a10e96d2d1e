"""Triton and Gluon functions that are read when they are first used.

Triton reads a function's source where it is decorated, token by token: 500 of them took 0.4 of the 0.6 s that an import
of this room took, in processes that launch none of them too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import triton
from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.jit import JITFunction

_reading = threading.RLock()


class _Unread:
    """What a function has of Triton's before anybody asks for it: itself, and its names."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        vars(self).update(
            {"fn": fn, "unread": True},
            **{
                name: getattr(fn, name) for name in ("__doc__", "__name__", "__qualname__", "__module__", "__globals__")
            },
        )

    def __getattr__(self, name: str) -> Any:
        """Asked for whatever is not there yet: it is read, once, and all of it is there."""
        own = vars(self)
        with _reading:
            if own.get("unread"):
                own["unread"] = False  # what is asked for meanwhile by this thread is not there
                try:
                    super().__init__(own["fn"])  # type: ignore[call-arg]
                except BaseException:
                    own["unread"] = True
                    raise
        if name not in own:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return own[name]


class Function(_Unread, JITFunction):  # type: ignore[misc, type-arg]
    """A Triton function."""


class GluonFunction(_Unread, GluonJITFunction):  # type: ignore[misc, type-arg]
    """A Gluon function."""


def jit(fn: Callable[..., Any]) -> Any:
    """``triton.jit``, later; Triton's interpreter has functions of its own."""
    return triton.jit(fn) if knobs.runtime.interpret else Function(fn)


def gluon_jit(fn: Callable[..., Any]) -> Any:
    """``gluon.jit``, later."""
    return gluon.jit(fn) if knobs.runtime.interpret else GluonFunction(fn)


def names_of(function: Any) -> list[str]:
    """The names of its arguments, for which it need not be read."""
    code = function.fn.__code__
    return list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
