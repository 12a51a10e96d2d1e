"""Who still reads what a recording has lent: streams that ``Tensor.record_stream`` names, and other processes.

PyTorch's allocator hands a block out again when the streams named for it are done, and when no other process holds it.
A recording's memory never goes back to the allocator, so it is the recording that has to ask, before a replay writes
there. Both are said through PyTorch's own methods, which are listened to here.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

_lent: weakref.WeakValueDictionary[int, Readers] = weakref.WeakValueDictionary()
"""Who asks for the streams of which storage."""


class Readers:
    """The streams named for some tensors, as long as their memory may still be read."""

    __slots__ = ("__weakref__", "_events", "abroad", "streams")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.streams: list[Any] = []
        self.abroad = False  # another process was handed the memory, which nobody here hears of again
        self._events: list[Any] = []
        for tensor in tensors:
            _lent[tensor.untyped_storage()._cdata] = self

    def __bool__(self) -> bool:
        return bool(self.streams or self._events or self.abroad)

    def done(self) -> bool:
        """Whether nobody reads any more; to be asked when nobody holds the tensors either."""
        while self.streams:
            self._events.append(self.streams.pop().record_event())
        self._events = [event for event in self._events if not event.query()]
        return not self._events and not self.abroad

    def wait(self) -> None:
        """What is put on the current stream from now on comes after what the others have to read."""
        for stream in list(self.streams):
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def forget(self) -> None:
        """Once they were waited for, and nobody holds the tensors."""
        self.streams.clear()


def name_reader(tensor: Tensor, stream: Any) -> None:
    """A stream reads a tensor, which may lie in memory that a recording has lent."""
    if not _lent or not torch._C._has_storage(tensor):
        return
    readers = _lent.get(tensor.untyped_storage()._cdata)
    if readers is not None and stream not in readers.streams:
        readers.streams.append(stream)


def name_abroad(storage: Any) -> None:
    """Another process is handed a storage, which may be one that a recording has lent."""
    readers = _lent.get(storage._cdata)
    if readers is not None:
        readers.abroad = True


_record_stream, _share = Tensor.record_stream, torch.UntypedStorage._share_cuda_


@wraps(_record_stream)
def _heard(self: Tensor, s: Any) -> None:
    name_reader(self, s)
    _record_stream(self, s)


@wraps(_share)
def _shared(self: Any, *args: Any, **kwargs: Any) -> Any:
    name_abroad(self)
    return _share(self, *args, **kwargs)


if not hasattr(_record_stream, "__wrapped__"):
    Tensor.record_stream = _heard  # type: ignore[method-assign, assignment]
    torch.UntypedStorage._share_cuda_ = _shared  # type: ignore[method-assign, assignment]
