"""Tensors that a call brings from the host to the device: constants of a recording, since the host only runs once.

What Python computes on the host from plain values and from tensors that are watched is the same at every call with the
same signature. Copying it to the device, though, makes the host wait, which no capture allows. So the copies are made
once before, and a recording copies them from the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.errors import NotGraphable

_aten = torch.ops.aten
_INDEXING = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._unsafe_index.Tensor)
_FACTORIES = (torch.tensor, torch.as_tensor)
_ITEMS = (Tensor.__getitem__, Tensor.__setitem__)


class Constants:
    """The tensors brought from the host in one call, in the order in which they were brought."""

    def __init__(self, device_type: str, *, factories: bool) -> None:
        self.device_type, self.factories = device_type, factories
        self.held: list[tuple[Tensor, Tensor]] = []

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """A call that brings tensors as it always does; they are kept."""
        self.held.clear()
        with self._modes(_Courier(self, serving=False)):
            yield

    @contextmanager
    def serving(self) -> Iterator[None]:
        """A call that is given those tensors from the device instead."""
        courier = _Courier(self, serving=True)
        with self._modes(courier):
            yield
        if courier.at != len(self.held):
            raise NotGraphable("a call brings other tensors from the host than the one before")

    @contextmanager
    def _modes(self, courier: _Courier) -> Iterator[None]:
        with ExitStack() as stack:
            if self.factories:  # a compiled call would be compiled again for it
                stack.enter_context(_Factories(self.device_type))
            stack.enter_context(courier)
            yield

    def __bool__(self) -> bool:
        return bool(self.held)


class _Courier(TorchDispatchMode):
    """Stands between the host and the device."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled code runs as compiled

    def __init__(self, constants: Constants, *, serving: bool) -> None:
        super().__init__()
        self.constants, self.serving, self.at = constants, serving, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
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


def _listed(index: Any, device: torch.device) -> Any:
    """An index with lists of whole numbers as tensors on the device."""
    if isinstance(index, tuple):
        return tuple(_listed(part, device) for part in index)
    if isinstance(index, list) and index and all(type(item) is int for item in index):
        return torch.tensor(index).to(device)
    return index
