"""Tensors that a call brings from the host to the device: constants of a recording, since the host only runs once.

What Python computes on the host from plain values and from tensors that are watched is the same at every call with the
same signature. Copying it to the device, though, makes the host wait, which no capture allows. So the copies are made
once before, and a recording copies them from the device. The other way round, a value that the host reads from the
device is the same at every call if it was computed from nothing but plain values (positions, masks made of positions):
the host is given what it read before. Any other value that it reads may be guessed, where a recording changes nothing
but its results: it is given what it read before, and every replay tells whether that was right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ridgeline.errors import NotGraphable

_aten = torch.ops.aten
_INDEXING = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._unsafe_index.Tensor)
_FACTORIES = (torch.tensor, torch.as_tensor)
_ITEMS = (Tensor.__getitem__, Tensor.__setitem__)
_UNSET = ("aten::empty", "aten::empty_strided", "aten::empty_permuted", "aten::empty_like", "aten::new_empty")
"""What these return holds whatever was there before."""
READ = _aten._local_scalar_dense.default


class Constants:
    """The tensors brought from the host in one call, in the order in which they were brought."""

    def __init__(self, device_type: str, *, factories: bool, guessing: bool = False) -> None:
        self.device_type, self.factories, self.guessing = device_type, factories, guessing
        self.held: list[tuple[Tensor, Tensor]] = []
        self.read: list[Any] = []
        self.guessed: list[Any] = []
        self._courier: _Courier | None = None

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """A call that brings tensors as it always does; they are kept."""
        self.held.clear()
        self.read.clear()
        self.guessed.clear()
        with self._modes(_Courier(self, serving=False)):
            yield

    @contextmanager
    def serving(self, part: str = "whole") -> Iterator[None]:
        """A call that is given those tensors from the device instead; or its ``first`` part, and then its ``last``."""
        if part != "last" or self._courier is None:
            self._courier = _Courier(self, serving=True)
        courier = self._courier
        try:
            with self._modes(courier):
                yield
        finally:
            if part != "first":
                self._courier = None  # it holds memory of the recording
        unlike = courier.at != len(self.held) or courier.num_read != len(self.read)
        if part != "first" and (unlike or len(courier.guesses) != len(self.guessed)):
            raise NotGraphable("a call brings other tensors from the host than the one before, or reads other values")

    @contextmanager
    def _modes(self, courier: _Courier) -> Iterator[None]:
        with ExitStack() as stack:
            if self.factories:  # a compiled call would be compiled again for it
                stack.enter_context(_Factories(self.device_type))
            stack.enter_context(courier)
            yield

    def __bool__(self) -> bool:
        return bool(self.held) or bool(self.read) or bool(self.guessed)

    def right(self) -> Tensor | None:
        """While a call is served: whether all that was guessed in it is so, computed on the device."""
        found: Tensor | None = None
        for tensor, version, value in self._courier.guesses if self._courier is not None else ():
            if tensor._version != version:
                raise NotGraphable("a value that the host read is written over behind it")
            same = _is(tensor, value).reshape(())
            found = same if found is None else found & same
        return found


class _Courier(TorchDispatchMode):
    """Stands between the host and the device."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled code runs as compiled

    def __init__(self, constants: Constants, *, serving: bool) -> None:
        super().__init__()
        self.constants, self.serving, self.at, self.num_read = constants, serving, 0, 0
        self.fixed: dict[int, Tensor] = {}  # by storage: tensors computed from nothing but plain values
        self.guesses: list[tuple[Tensor, int, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is READ and args[0].device.type == self.constants.device_type:
            return self._value(args[0])
        result = self._run(func, args, kwargs)
        self._follow(func, args, kwargs, result)
        return result

    def _follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """What comes from plain values alone is fixed, and what anything else is written to no longer."""
        if not isinstance(func, torch._ops.OpOverload):
            return  # an operator of higher order: nothing is known of it
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        name, drawn = func._schema.name, torch.Tag.nondeterministic_seeded in func.tags
        fixed = not drawn and name not in _UNSET and all(_storage(t) in self.fixed for t in given)
        if func._schema.is_mutable and not fixed:
            for tensor in given:
                self.fixed.pop(_storage(tensor), None)
        elif fixed or name == "aten::lift_fresh":
            self.fixed |= {_storage(t): t for t in tree_leaves(result) if isinstance(t, Tensor)}

    def _value(self, tensor: Tensor) -> Any:
        if _storage(tensor) not in self.fixed:
            if self.constants.guessing:
                return self._guess(tensor)
            if self.serving:
                raise NotGraphable("the host waits for a value of a tensor")
            return READ(tensor)
        read = self.constants.read
        if not self.serving:
            read.append(READ(tensor))
            return read[-1]
        self.num_read += 1
        if self.num_read > len(read):
            raise NotGraphable("a call reads other values than the one before")
        return read[self.num_read - 1]

    def _guess(self, tensor: Tensor) -> Any:
        """What was read before in its place; the tensor is kept, to be compared with it."""
        guessed = self.constants.guessed
        if not self.serving:
            guessed.append(READ(tensor))
            return guessed[-1]
        if len(self.guesses) >= len(guessed):
            raise NotGraphable("a call reads other values than the one before")
        value = guessed[len(self.guesses)]
        self.guesses.append((tensor, tensor._version, value))
        return value

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is _aten._to_copy.default and self._leaves_host(args[0], kwargs.get("device")):
            return self._brought(args[0], lambda: func(*args, **kwargs)).clone()
        if func is _aten.copy_.default and self._leaves_host(args[1], args[0].device):
            return args[0].copy_(self._brought(args[1], lambda: args[1].to(args[0].device)))
        if func in _INDEXING:
            return func(args[0], [self._index(i, args[0].device) for i in args[1]], *args[2:], **kwargs)
        return func(*args, **kwargs)

    def _leaves_host(self, source: Tensor, target: Any) -> bool:
        here = self.constants.device_type
        return source.device.type == "cpu" and target is not None and torch.device(target).type == here != "cpu"

    def _index(self, index: Any, device: torch.device) -> Any:
        if not isinstance(index, Tensor) or index.dtype is torch.bool or not self._leaves_host(index, device):
            return index
        return self._brought(index, lambda: index.to(device))

    def _brought(self, source: Tensor, bring: Any) -> Tensor:
        held = self.constants.held
        if not self.serving:
            held.append((source.detach().clone(), bring()))
            return held[-1][1]
        self.at += 1
        if self.at > len(held):
            raise NotGraphable("a call brings other tensors from the host than the one before")
        was, there = held[self.at - 1]
        if was.dtype != source.dtype or was.shape != source.shape or not _equal(was, source):
            raise NotGraphable("a tensor on the host has other contents at every call")
        return there


def _is(tensor: Tensor, value: Any) -> Tensor:
    """Whether a tensor holds a value, the sign of zero included."""
    if value != value:
        return tensor.isnan()
    same = tensor == value
    if isinstance(value, float) and value == 0.0:
        same = same & (tensor.signbit() == (math.copysign(1.0, value) < 0))
    return same


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else -1


def _equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, so that NaN equals itself."""
    return torch.equal(a, b) or torch.equal(a.contiguous().view(-1).view(torch.uint8),
                                            b.contiguous().view(-1).view(torch.uint8))  # fmt: skip


class _Factories(TorchFunctionMode):
    """Makes ``torch.tensor([…], device="cuda")`` and ``x[[…]]`` on the host first, so that the copy is seen."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _ITEMS and args[0].device.type == self.device_type:
            return func(args[0], _listed(args[1], args[0].device), *args[2:], **kwargs)
        device = kwargs.get("device")
        if func in _FACTORIES and device is not None and torch.device(device).type == self.device_type:
            if not isinstance(args[0] if args else kwargs.get("data"), Tensor):
                del kwargs["device"]
                return func(*args, **kwargs, device="cpu").to(device)
        return func(*args, **kwargs)


def compiled_as_ever() -> AbstractContextManager[Any]:
    """Inside, nothing is seen of ours by compiled code, which would be compiled anew for a mode around it."""
    return _pop_mode_temporarily() if type(_get_current_function_mode()) is _Factories else nullcontext()


def _listed(index: Any, device: torch.device) -> Any:
    """An index with lists of whole numbers as tensors on the device."""
    if isinstance(index, tuple):
        return tuple(_listed(part, device) for part in index)
    if isinstance(index, list) and index and all(type(item) is int for item in index):
        return torch.tensor(index).to(device)
    return index
