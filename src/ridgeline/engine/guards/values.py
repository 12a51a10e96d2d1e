"""Values that a guard compares: which are alike, and how to read those that have no version number."""

from __future__ import annotations

import array
import io
import itertools
import math
import random
import sys
import threading
import types
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.engine.guards.code_reads import CODE, PLAIN, file_of, installed
from ridgeline.engine.pytree import slots_of
from ridgeline.errors import NotGraphable

MAX_COMPARED_ITEMS = 1024
"""Lists longer than this are compared by length, and larger arrays by shape, unless the code that runs names them."""
_RUNTIME = frozenset("logging threading _thread weakref torch re functools concurrent asyncio multiprocessing".split())
_MODELED = ("torch.distributions", "torch.nn.utils.rnn")
"""Parts of PyTorch whose objects are a model's settings."""
FEW_ITEMS = 64
GONE = object()


def is_addressable(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return False
    if type(tensor) not in (Tensor, nn.Parameter) and not isinstance(tensor, nn.Parameter):
        raise NotGraphable(f"the model holds a tensor of type {type(tensor).__name__}, which has no one address")
    return True


def is_alike(now: Any, was: Any) -> bool:
    if now is was:
        return True
    return type(now) is type(was) and isinstance(now, (*PLAIN, tuple, frozenset)) and bool(_equal(now, was))


def looks_equal(now: Any, was: Any) -> bool:
    """Whether two plain values are equal and not alike, such as zeros of either sign."""
    plain = isinstance(now, (*PLAIN, tuple, frozenset)) and type(now) is type(was)
    return plain and not is_alike(now, was) and bool(now == was)


def _equal(now: Any, was: Any) -> bool:
    if isinstance(now, tuple):
        return len(now) == len(was) and all(map(is_alike, now, was))
    if isinstance(now, frozenset):
        return len(now) == len(was) and all(map(is_alike, now, was))  # in order: that is what code goes through
    if isinstance(now, float):
        return (now == was and math.copysign(1.0, now) == math.copysign(1.0, was)) or (now != now and was != was)
    if isinstance(now, complex):
        return _equal(now.real, was.real) and _equal(now.imag, was.imag)
    return bool(now == was)


def raw(held: dict[Any, Any]) -> dict[Any, Any]:
    """What a dictionary holds; one that makes something of it whenever it is asked is not asked."""
    return dict(dict.items(held))


def is_runtime_object(value: Any) -> bool:
    """Objects of the interpreter and of PyTorch's runtime that reach everywhere and that no model branches on."""
    home = type(value).__module__
    return home.partition(".")[0] in _RUNTIME and not home.startswith(_MODELED)


def reader_of(value: Any) -> Callable[[], Any] | None:
    """How to read what has no version number, as something that can be compared; None for what is seen otherwise."""
    if isinstance(value, set):
        if len(value) < FEW_ITEMS and any(isinstance(item, int | float | complex) for item in value):
            return lambda: (tuple(value), tuple(map(type, value)))  # in order and by type: 1 equals True
        # Compared in place: no copy at every call.
        return lambda: value if len(value) < MAX_COMPARED_ITEMS else len(value)
    if _is_array(value):
        return value.tobytes if value.nbytes < 64 * MAX_COMPARED_ITEMS else lambda: (value.shape, str(value.dtype))
    if isinstance(value, io.BytesIO | io.StringIO):
        return lambda: (value.tell(), value.getvalue())
    if type(value).__module__ == "numpy.random.mtrand":
        return lambda: repr(value.get_state(legacy=False))
    if isinstance(value, bytearray | array.array):
        return lambda: bytes(value) if len(value) < 8 * MAX_COMPARED_ITEMS else len(value)
    if isinstance(value, random.Random):
        return value.getstate
    if type(value).__module__ == "numpy.random._generator":
        return lambda: repr(value.bit_generator.state)
    if type(value).__module__ == "itertools":
        return lambda: repr(value)
    if slots := slots_of(type(value)):
        return lambda: [(name, mark_of(getattr(value, name, None))) for name in slots]
    return None


def is_long(value: Any) -> bool:
    """Whether a list or an array is compared by its size, where no code is known to read it."""
    if isinstance(value, list | deque | bytearray | array.array):
        return len(value) >= MAX_COMPARED_ITEMS
    return _is_array(value) and value.nbytes >= 64 * MAX_COMPARED_ITEMS


def digest(value: Any) -> int:
    """A number that changes with what a long list or a large array holds."""
    return hash(tuple(map(id, value))) if isinstance(value, list | deque) else zlib.crc32(bytes(value))


def context_objects(value: Any) -> list[Any] | None:
    """What differs by thread or by context holds here that is more than a plain value; None for all else."""
    if isinstance(value, ContextVar):
        return [held for held in (value.get(None),) if not isinstance(held, PLAIN)]
    if isinstance(value, threading.local):
        return [held for held in vars(value).values() if not isinstance(held, PLAIN)]
    return None


def context_value(value: Any) -> Any:
    """The same as something that can be compared."""
    if isinstance(value, ContextVar):
        return _plainly(value.get(None))
    return tuple((name, _plainly(held)) for name, held in vars(value).items())


def _plainly(value: Any) -> Any:
    return (type(value), value) if isinstance(value, PLAIN) else (type(value), id(value))


def is_consumed_by_reading(value: Any) -> bool:
    """Whether reading something changes it, and nothing shows how far it was read."""
    known = isinstance(value, io.IOBase | itertools.count | itertools.repeat)
    return isinstance(value, Iterator) and not known and not hasattr(value, "__dict__") and not slots_of(type(value))


def is_shared_memory(value: Any) -> bool:
    """Whether a number or an array lies in memory that several processes see."""
    return type(value).__module__ == "multiprocessing.sharedctypes" and hasattr(value, "get_obj")


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray | numpy.generic)


def is_setting(value: Any) -> bool:
    """Whether an attribute of a library's module is a value that somebody may set, and code go by."""
    plain = isinstance(value, PLAIN) and not isinstance(value, torch.dtype | torch.device)
    return plain or (isinstance(value, list | set | dict) and len(value) < FEW_ITEMS)


def is_class_object(value: Any, part: Any) -> bool:
    """Whether a class of the model's own holds an object: one for all, or one that is asked for an attribute."""
    if not isinstance(part, type) or installed(file_of(part)):
        return False
    return not isinstance(value, (*CODE, staticmethod, classmethod, property, types.MemberDescriptorType,
                                  types.GetSetDescriptorType))  # fmt: skip


def log_level(log: Any) -> tuple[Any, ...]:
    return log.getEffectiveLevel(), log.disabled, log.manager.disable


def mark_of(value: Any) -> Any:
    return (type(value), value) if isinstance(value, PLAIN) else id(value)


def is_dead(reference: weakref.ref[Any]) -> bool:
    return reference() is None


def gradient_state(tensor: Tensor) -> tuple[bool, bool]:
    return tensor.requires_grad, tensor.is_leaf and tensor.grad is not None
