"""What a guard holds of a model: dictionaries, names, values to be read, flags of layers and weights, hooks."""

from __future__ import annotations

import array
import ctypes
import io
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ridgeline.engine.guards.values import GONE, is_alike, raw

HOOKS = ("_backward_pre_hooks", "_backward_hooks", "_forward_hooks", "_forward_pre_hooks")
INNER = ("_parameters", "_buffers", "_modules")
BOOKKEEPING = frozenset((
    *HOOKS, *INNER, "_non_persistent_buffers_set", "_is_full_backward_hook", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
))  # fmt: skip
INNER_DICTS = frozenset((*HOOKS, *INNER))
_INCIDENTAL = ("_is_torch_compile", "_dynamo_")
"""Beginnings of what torch.compile leaves on models and weights, which no model reads."""
C_TYPES = (ctypes._SimpleCData, ctypes.Structure, ctypes.Union, ctypes.Array)
LINEAR_ATTRIBUTES = frozenset((*vars(nn.Linear(1, 1)), "training"))
_HARMLESS_HOOKS = ("transformers.utils.output_capturing", "transformers.utils.generic")
"""Hooks that only collect what the same call returns."""
_FLAGGING_HOOKS = (("transformers.modeling_utils", "make_inputs_require_grads"),)
"""Hooks that only say of a result that gradients flow through it, which a recording has done once for all."""
_MAKING_HOOKS: tuple[type, ...] = (WeightNorm, SpectralNorm)
"""Hooks that make a weight of parameters before every call: what they compute is recorded with the call."""


@dataclass(slots=True)
class NameGuard:
    """A name in a module's or a class's dictionary, and what it stood for; ``owner`` is the class."""

    path: str
    holder: Any
    key: str
    value: Any
    owner: type | None = None


@dataclass(slots=True)
class Probe:
    """Something whose contents have to be read to be compared: sets, arrays, iterators, objects with slots."""

    path: str
    value: Any
    read: Callable[[], Any]
    was: Any
    said: str = "changed"

    def restore(self) -> None:
        """Puts the contents back where that can be done."""
        if self.read() == self.was:
            return
        if isinstance(self.value, set) and isinstance(self.was, set | tuple):
            self.value.clear()
            self.value.update(self.was if isinstance(self.was, set) else self.was[0])
        elif isinstance(self.value, io.BytesIO | io.StringIO):
            self.value.seek(self.was[0])
        elif isinstance(self.value, OrderedDict):
            for key in self.was if self.value.keys() == set(self.was) else ():
                self.value.move_to_end(key)
        elif isinstance(self.value, C_TYPES):
            ctypes.memmove(ctypes.addressof(self.value), self.was, len(self.was))
        elif isinstance(self.value, memoryview):
            self.value.cast("B")[:] = self.was
        elif isinstance(self.value, bytearray | array.array):
            del self.value[:]
            self.value.extend(self.was) if isinstance(self.value, bytearray) else self.value.frombytes(self.was)
        elif isinstance(self.was, bytes):
            self.value[...] = sys.modules["numpy"].ndarray(self.value.shape, self.value.dtype, self.was)
        elif isinstance(self.was, list):
            for name, mark in self.was:
                if isinstance(mark, tuple):
                    object.__setattr__(self.value, name, mark[1])


class TrainingFlag:
    """Whether a linear layer is in training mode, which it does not look at."""

    __slots__ = ("held", "path", "was")

    def __init__(self, held: dict[str, Any]) -> None:
        self.path, self.held = "a linear layer's training", held
        self.was = self.read()

    def read(self) -> Any:
        return self.held.get("training")

    def restore(self) -> None:
        self.held["training"] = self.was


class GradientFlag:
    """Whether a weight asks for a gradient, and which it has."""

    __slots__ = ("path", "tensor", "was")

    def __init__(self, path: str, tensor: Tensor) -> None:
        self.path, self.tensor = f"{path}'s gradient", tensor
        self.was = self.read()

    def read(self) -> tuple[bool, int | None]:
        return self.tensor.requires_grad, None if self.tensor.grad is None else id(self.tensor.grad)

    def restore(self) -> None:
        """What it asked for, and no gradient where there was none; one that was replaced is its holder's."""
        self.tensor.requires_grad_(self.was[0])
        if self.was[1] is None:
            self.tensor.grad = None
Flag = TrainingFlag | GradientFlag


@dataclass(slots=True)
class DictGuard:
    """A dictionary that is watched, the name of who owns it and what was in it."""

    owner: str
    held: dict[Any, Any]
    was: dict[Any, Any]
    derived: frozenset[str] = frozenset()  # names whose values are made anew by every call
    ordered: bool = True
    """Whether the order of its keys counts: not where they are attributes of a module, which nobody goes through."""

    def in_order(self) -> bool:
        """Whether its keys follow each other as they did, but for those that every call binds."""
        now, was = ([key for key in keys if key not in self.derived] for keys in (self.held, self.was))
        return now == was


@dataclass(slots=True)
class NamespaceGuard:
    """Names of a module or a class that were followed to code that ran, and what they stood for."""

    owner: str
    held: dict[str, Any]
    was: dict[str, Any]
    cls: type | None = None

    def replaced(self) -> list[str]:
        return [f"{self.owner}.{key} was replaced" for key, value in self.was.items()
                if self.held.get(key, GONE) is not value]  # fmt: skip


def is_plain_linear(held: dict[str, Any]) -> bool:
    """Whether a linear layer was given nothing but marks: what calls leave on one is looked at as on any other."""
    more = held.keys() - LINEAR_ATTRIBUTES
    return all(isinstance(held[key], (bool, int, str)) for key in more)


def dict_differences(entry: DictGuard) -> list[str]:
    now, was = raw(entry.held), entry.was
    hooked = entry.owner.rpartition(".")[2] in HOOKS
    if hooked and are_harmless(now):
        return []
    if entry.ordered and now.keys() == was.keys() and not entry.in_order():
        return [f"{entry.owner} is in another order"]
    if any(now.get(key) is not was[key] for key in was.keys() & INNER_DICTS):
        return [f"{entry.owner} has other parts, weights or hooks"]
    kept = BOOKKEEPING | entry.derived
    gone = [f"{entry.owner}.{key} is gone" for key in was if key not in now and key not in entry.derived]
    new = [f"{entry.owner}.{key} is new" for key in now
           if key not in was and not str(key).startswith(_INCIDENTAL) and key not in entry.derived]  # fmt: skip
    return gone + new + [f"{entry.owner}.{key} changed" for key in was
                         if key in now and key not in kept and not is_alike(now[key], was[key])]  # fmt: skip


def derived_names(held: dict[str, Any]) -> frozenset[str]:
    """Attributes of a module that hooks of PyTorch's make anew of its parameters before every call of it."""
    hooks = held.get("_forward_pre_hooks", {}).values()
    return frozenset(str(hook.name) for hook in hooks if type(hook) in _MAKING_HOOKS)


def makes_weights(hooks: dict[Any, Any]) -> bool:
    return bool(hooks) and all(type(hook) in _MAKING_HOOKS for hook in hooks.values())


def are_harmless(hooks: dict[Any, Any]) -> bool:
    if makes_weights(hooks):
        return True
    named = [(getattr(hook, "__module__", ""), getattr(hook, "__name__", "")) for hook in hooks.values()]
    known = all(name[0] in _HARMLESS_HOOKS or name in _FLAGGING_HOOKS for name in named)
    return known and all(map(callable, hooks.values()))


def hook_name(hooks: dict[Any, Any]) -> str:
    hook = next(iter(hooks.values()))
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))
