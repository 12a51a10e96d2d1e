"""The memory a recording reads its inputs from: copies with the same layout and aliasing, and how they are filled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from sys import getrefcount

import torch
from torch import Tensor, nn

_ALIGNMENT = 256


@dataclass(slots=True, frozen=True)
class Group:
    """Inputs that share one storage, and the bytes of it that they reach."""

    indices: tuple[int, ...]
    low: int
    high: int
    lead: int
    """How far from the first of these bytes the first of the tensors begins."""
    plain: bool
    """One tensor of which no two elements share memory: it can be copied as a tensor."""

    @property
    def num_bytes(self) -> int:
        return self.high - self.low


def extent(tensor: Tensor) -> tuple[int, int]:
    """First byte and one past the last byte a tensor reaches in its storage."""
    start = tensor.storage_offset() * tensor.element_size()
    if tensor.numel() == 0:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return start, start + (last + 1) * tensor.element_size()


def _holders(tensor: Tensor) -> tuple[int, int]:
    """How many hold a tensor's storage, and its storage as an object of Python's."""
    memory = tensor.untyped_storage()
    return torch._C._storage_Use_Count(memory._cdata), getrefcount(memory)


_ALONE = _holders(nn.Parameter(torch.empty(1)))


def is_alone(tensor: Tensor) -> bool:
    """Whether nobody else holds a tensor's memory: others would write where the tensor no longer lies if it moved."""
    storages, objects = _holders(tensor)
    return storages <= _ALONE[0] and objects <= _ALONE[1]


def grouped(tensors: Sequence[Tensor], indices: Iterable[int]) -> list[Group]:
    """Groups inputs by storage."""
    shared: dict[int, list[int]] = {}
    for i in indices:
        shared.setdefault(tensors[i].untyped_storage()._cdata, []).append(i)
    return [_group(tensors, members) for members in shared.values()]


def _group(tensors: Sequence[Tensor], members: list[int]) -> Group:
    extents = [extent(tensors[i]) for i in members]
    plain = len(members) == 1 and not _folded(tensors[members[0]])
    low = min(low for low, _ in extents)
    return Group(tuple(members), low, max(high for _, high in extents), extents[0][0] - low, plain)


def _folded(tensor: Tensor) -> bool:
    """Whether elements of a tensor share memory other than along dims of stride 0."""
    dims = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride()) if size > 1 and stride > 0)
    reach = 0
    for stride, size in dims:
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


class Statics:
    """Memory of our own for some groups of inputs."""

    def __init__(self, tensors: Sequence[Tensor], groups: Sequence[Group]) -> None:
        self.groups = list(groups)
        self.tensors: dict[int, Tensor] = {}
        self._spans: list[tuple[Tensor, int, Group]] = []
        self._whole: list[int] = []
        self._squeezed: list[tuple[int, Tensor, tuple[int, ...]]] = []
        for group in groups:
            self._allocate(tensors, group)

    def _allocate(self, tensors: Sequence[Tensor], group: Group) -> None:
        first = tensors[group.indices[0]]
        pad = (first.data_ptr() - extent(first)[0] + group.low) % _ALIGNMENT if group.num_bytes else 0
        memory = torch.zeros(pad + group.num_bytes, dtype=torch.uint8, device=first.device)
        for i in group.indices:
            tensor = tensors[i]
            offset = pad + tensor.storage_offset() * tensor.element_size() - group.low
            self.tensors[i] = view_of(memory, tensor.dtype, offset, tensor.shape, tensor.stride())
        self._arrange(group, memory[pad:], tensors)

    def _arrange(self, group: Group, memory: Tensor, tensors: Sequence[Tensor]) -> None:
        if not group.num_bytes:
            return
        i = group.indices[0]
        if not group.plain:
            self._spans.append((memory, i, group))
        elif _stretched(tensors[i]):
            sizes = tuple(1 if stride == 0 else size for size, stride in zip(tensors[i].shape, tensors[i].stride()))
            self._squeezed.append((i, self.tensors[i].as_strided(sizes, tensors[i].stride()), sizes))
        else:
            self._whole.append(i)

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copies the callers' inputs in."""
        _copy([self.tensors[i] for i in self._whole], [tensors[i] for i in self._whole])
        for i, mine, sizes in self._squeezed:
            mine.copy_(tensors[i].as_strided(sizes, tensors[i].stride()))
        for memory, i, group in self._spans:
            memory.copy_(_span(tensors[i], group))

    def write_back(self, tensors: Sequence[Tensor], written: Iterable[Group]) -> None:
        """Copies what a replay wrote to its inputs out to the callers' tensors."""
        for group in written:
            theirs, mine = tensors[group.indices[0]], self.tensors[group.indices[0]]
            if group.plain and not _stretched(theirs):
                theirs.copy_(mine)
            elif group.num_bytes:
                _span(theirs, group).copy_(_span(mine, group))


def _copy(mine: list[Tensor], theirs: list[Tensor]) -> None:
    if len(mine) == 1:
        mine[0].copy_(theirs[0])
    elif mine:
        torch._foreach_copy_(mine, theirs)


def _stretched(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride()))


def _span(tensor: Tensor, group: Group) -> Tensor:
    """The bytes of a group, given its first tensor wherever that lies."""
    return view_of(tensor, torch.uint8, extent(tensor)[0] - group.lead, (group.num_bytes,), (1,))


def view_of(base: Tensor, dtype: torch.dtype, offset_bytes: int, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """A tensor of any dtype over the memory of another; the offset counts from the start of the storage."""
    made = torch.empty(0, dtype=dtype, device=base.device)
    itemsize = made.element_size()
    return made.set_(base.untyped_storage(), offset_bytes // itemsize, tuple(size), tuple(stride))  # type: ignore[call-overload]
