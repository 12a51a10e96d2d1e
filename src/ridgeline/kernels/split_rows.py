"""Long rows cut into shares: programs that are all on the device at once take one each, and meet in words of memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels import device
from ridgeline.kernels.launcher import Kernel, num_sms
from ridgeline.kernels.rows import cdiv, clamp, power_of_two, template

_CLEAR = Kernel(device.clear_words)
CLEARED = 1024
MOST_SHARES = 64
"""Programs that meet in words of memory, up to which waiting for each other takes little."""
REGISTERS, MOST_REGISTERS, QUARTERS = 65536, 255, 4
"""Of an SM, and of a thread; a warp's lie in one quarter of an SM's."""


def registers_of(num_warps: int, programs_per_sm: int) -> int:
    """Registers a thread may have where this number of programs is to be resident on an SM; they come by eight.

    Ten warps of 200 registers are 64,000 in all and do not fit: a quarter has three of them. LayerNorm to int8,
    24000×3584 on five programs of two warps, took 103 µs, on four 73."""
    warps = cdiv(num_warps * programs_per_sm, QUARTERS)
    return min(MOST_REGISTERS, REGISTERS // QUARTERS // (32 * warps) // 8 * 8)


def most_registers(chosen: Any) -> int:
    """The same for a configuration that may leave it to the compiler (0)."""
    return registers_of(chosen.num_warps, chosen.programs_per_sm) if chosen.programs_per_sm else 0


@dataclass(frozen=True, slots=True)
class Streamed:
    """Rows pass through shared memory: a share of a row is at most ``chunks`` accesses of every lane, and ``slots``
    shares have their place there. All programs are on the device at once. A row with several shares is finished ``lag``
    turns later: by then the others' words have arrived; at once, what was computed is still in registers."""

    chunks: int
    num_warps: int
    slots: int
    programs_per_sm: int
    lag: int = 1


@dataclass(frozen=True, slots=True)
class Cut:
    """Elements of a share, shares of a row, rows that are worked on at once; elements of a block and of an access."""

    length: int
    shares: int
    groups: int
    block: int
    vector: int


def cut(
    chosen: Streamed, rows: int, cols: int, device: int, *, vector: int, piece: int = 0, unaligned: bool = False
) -> Cut | None:
    """As many shares as a row's length asks for, or more where rows are few, in accesses of ``vector`` elements a lane.

    ``piece``: a share is made of whole pieces of so many elements. ``unaligned``: rows are unaligned, and rows
    that are worked on at once are a multiple of what an access holds. None where a row takes more programs than there
    are.
    """
    programs = chosen.programs_per_sm * num_sms(device)
    cols = cols + vector - 1 if unaligned else cols
    block = 32 * chosen.num_warps * vector
    step = piece or vector
    room = chosen.chunks * block
    if piece & (piece - 1):  # places are powers of two
        room = room // power_of_two(piece) * piece
    fewest = cdiv(cols, room)
    shares = clamp(programs // rows, fewest, max(fewest, cdiv(cols, block)))
    length = cdiv(cdiv(cols, shares), step) * step
    shares = cdiv(cols, length)
    groups = min(rows, programs // shares)
    if unaligned and groups < rows:
        groups = groups // vector * vector
    return Cut(length, shares, groups, piece or block, vector) if groups else None


def bind(
    kind: Kernel,
    chosen: Streamed,
    found: Cut,
    tensors: tuple[Tensor, ...],
    rows: int,
    cols: int,
    numbers: tuple[Any, ...],
    constants: Mapping[str, Any],
    common: Mapping[str, Any],
) -> Callable[..., None]:
    """A call over tensors and numbers like these: words, sizes and the cut, which stand between them, are put in here.

    Words are cleared before every call; where a row is one share there are none.
    """
    on = common["device"]
    sizes = (rows, cols, found.length, found.shares, found.groups)
    words = template((rows, found.shares), torch.int64, tensors[0].device)
    chunks = power_of_two(cdiv(found.length, found.block))
    even = {"EVEN": found.length == chunks * found.block and found.length * found.shares == cols}
    run = kind.bind(
        (*tensors, words, *sizes, *numbers),
        grid=(found.groups * found.shares,),
        constants={
            **constants,
            **(even if "EVEN" in kind.names else {}),
            "MEET": found.shares > 1,
            "LAG": chosen.lag if found.shares > 1 else 0,
            "SHARES": max(32, power_of_two(found.shares)),
            "CHUNKS": chunks,
            "BLOCK": power_of_two(found.block),
            "SLOTS": chosen.slots,
            "VECTOR": found.vector,
        },
        num_warps=chosen.num_warps,
        max_registers=registers_of(chosen.num_warps, chosen.programs_per_sm),
        **common,
    )
    num = len(tensors)
    if found.shares == 1:
        return lambda *args: run(*args[:num], args[0], *sizes, *args[num:])
    meeting = cleared(words, on)
    return lambda *args: run(*args[:num], meeting(), *sizes, *args[num:])


def cleared(words: Tensor, on: int) -> Callable[[], Tensor]:
    """A call that gives words like these, all zero."""
    count = words.numel()
    clear = _CLEAR.bind(
        (words, count), grid=(cdiv(count, CLEARED),), constants={"BLOCK": CLEARED}, num_warps=4, device=on
    )

    def make() -> Tensor:
        found = torch.empty_like(words, memory_format=torch.contiguous_format)
        clear(found, count)
        return found

    return make
