"""Lists of tensors for one launch: tables of addresses and sizes on the device, and equal chunks for its programs.

A table is made once for a list and kept; what changes from step to step, the addresses of gradients, is written by a
kernel whose arguments they are, so that nothing waits for the device and a captured graph replays with them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor

from ridgeline.kernels import device
from ridgeline.kernels.launcher import INTERPRETING, Kernel, num_sms
from ridgeline.kernels.rows import cdiv, clamp, power_of_two

_WRITE = Kernel(device.write_addresses)
AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Chunks:
    """Where each program works: [num, 2] of a tensor's number and which of its chunks; all are ``length`` long."""

    table: Tensor
    num: int
    length: int


def chunk_length(total: int, least: int, most: int, device: int) -> int:
    """A power of two that gives every SM several chunks, within bounds."""
    # CTAs per SM should get at least before chunks grow
    return clamp(power_of_two(total // (8 * num_sms(device)) + 1), least, most)


def chunked(sizes: Sequence[int], length: int, on: torch.device) -> Chunks:
    """Tensors of these sizes cut into chunks of ``length`` elements, in order; the last of each may be shorter."""
    counts = torch.tensor([cdiv(size, length) for size in sizes], dtype=torch.int64)
    owner = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    before = torch.cumsum(counts, 0) - counts
    part = torch.arange(owner.numel()) - before[owner]
    return Chunks(torch.stack((owner, part), 1).to(torch.int32).to(on), owner.numel(), length)


def numbers(values: Sequence[int], on: torch.device) -> Tensor:
    """Integers on the device."""
    return torch.tensor(values, dtype=torch.int64, device=on)


def addresses(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(map(Tensor.data_ptr, tensors))


def written(found: Sequence[int], on: torch.device) -> Tensor:
    """A table of these addresses, written by kernels."""
    table = torch.empty(cdiv(len(found), AT_ONCE) * AT_ONCE, dtype=torch.int64, device=on)
    if INTERPRETING:
        table[: len(found)] = torch.tensor(found, dtype=torch.int64)
        return table
    index = table.get_device()
    run = _WRITE.bind((table, 0, *repeat(1 << 40, AT_ONCE)), grid=(1,), constants={}, num_warps=1, device=index)
    for start in range(0, len(found), AT_ONCE):
        part = found[start : start + AT_ONCE]
        run(table, start, *part, *repeat(0, AT_ONCE - len(part)))
    return table


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors of one kind that a launch works through: their places in the list, sizes and chunks."""

    kind: Hashable
    members: tuple[int, ...]
    sizes: Tensor
    chunks: Chunks


class Layout:
    """A list of tensors cut into groups of one kind each; address tables are kept for lists seen before."""

    def __init__(self, kinds: Sequence[Hashable], sizes: Sequence[int], length: int, on: torch.device) -> None:
        self.on = on
        found: dict[Hashable, list[int]] = {}
        for i, (kind, size) in enumerate(zip(kinds, sizes, strict=True)):
            if size:
                found.setdefault(kind, []).append(i)
        self.groups = tuple(
            Group(kind, tuple(at), numbers([sizes[i] for i in at], on), chunked([sizes[i] for i in at], length, on))
            for kind, at in found.items()
        )
        self._tables: dict[tuple[int, ...], tuple[Tensor, ...]] = {}

    @property
    def num_chunks(self) -> int:
        return sum(group.chunks.num for group in self.groups)

    def tables(self, found: tuple[int, ...]) -> tuple[Tensor, ...]:
        """A table of addresses for each group, of a list that lies here."""
        known = self._tables.get(found)
        if known is None:
            # max tables
            if len(self._tables) >= 16:
                self._tables.clear()
            known = tuple(written([found[i] for i in group.members], self.on) for group in self.groups)
            self._tables[found] = known
        return known
