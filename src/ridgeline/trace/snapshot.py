"""PyTorch memory snapshots (``torch.cuda.memory._dump_snapshot``): memory over time and who holds the peak."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import InputError
from ridgeline.trace.payload import read_bytes
from ridgeline.trace.pickled import plain_data
from ridgeline.trace.table import Trace, TraceBuilder

MAX_ROWS = 20_000_000
BEFORE = "allocated before the recording began"
NO_STACK = "no Python stack (backward pass, or stacks were not recorded)"
_SIZES = {"alloc": 1, "free_requested": -1, "free": -1}
_SEGMENTS = {"segment_alloc": 1, "segment_free": -1, "segment_map": 1, "segment_unmap": -1}


@dataclass(frozen=True, slots=True)
class Frame:
    """A line of code on a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}"

    @property
    def ours(self) -> bool:
        """Whether it is a line of the program rather than of a library under it."""
        return not any(
            part in self.file
            for part in ("/torch/", "torch/", "<frozen", "importlib", "/transformers/", "/accelerate/", "/lightning/")
        ) and self.file not in ("", "??")


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes in use, by whom."""

    address: int
    num_bytes: int
    stack: int


@dataclass(frozen=True, slots=True)
class Event:
    """One action of the allocator; ``at_us`` is -1 where the snapshot has no clock."""

    action: str
    address: int
    num_bytes: int
    stream: int
    at_us: int
    stack: int


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds how much: the innermost line of the program, and what kind of memory it is."""

    where: str
    category: str
    num_bytes: int
    num_blocks: int
    stack: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class Curve:
    """Bytes in use and bytes reserved from each time to the next."""

    at_s: NDArray[np.float64]
    allocated_bytes: NDArray[np.int64]
    reserved_bytes: NDArray[np.int64]


@dataclass(frozen=True)
class Memory:
    """One device: what is in use at the end, what it is cut from, and every action before."""

    device: int
    blocks: tuple[Block, ...]
    reserved_bytes: int
    events: tuple[Event, ...]
    stacks: tuple[tuple[Frame, ...], ...]

    @property
    def allocated_bytes(self) -> int:
        """In use when the snapshot was taken."""
        return sum(block.num_bytes for block in self.blocks)

    @cached_property
    def curve(self) -> Curve:
        """Walked back from the end, where the totals are known: the recording may have begun in the middle."""
        size = _steps(self.events, _SIZES)
        segment = _steps(self.events, _SEGMENTS)
        allocated = self.allocated_bytes - np.append(np.cumsum(size[::-1])[::-1], 0)
        reserved = self.reserved_bytes - np.append(np.cumsum(segment[::-1])[::-1], 0)
        at_us = np.array([event.at_us for event in self.events], dtype=np.int64)
        at_us = at_us if len(at_us) and (at_us >= 0).all() else np.arange(len(self.events))
        at_us = np.concatenate((at_us[:1], at_us)) if len(at_us) else np.zeros(1, dtype=np.int64)
        return Curve((at_us - at_us[0]) * 1e-6, allocated, reserved)

    def at_peak(self) -> list[Holder]:
        """Who holds memory when most is in use, largest first."""
        after = int(np.argmax(self.curve.allocated_bytes))
        # Blocks in use once the first `after` events have happened: later ones are undone, newest first
        live = {block.address: block for block in self.blocks}
        made_by = _origins(self.events)
        for i in range(len(self.events) - 1, after - 1, -1):
            event = self.events[i]
            if event.action == "alloc":
                live.pop(event.address, None)
            elif event.action in ("free_requested", "free"):
                origin = made_by.get(i)
                stack = self.events[origin].stack if origin is not None else -1
                live[event.address] = Block(event.address, event.num_bytes, stack)
        return _holders(live.values(), self.stacks)

    def at_end(self) -> list[Holder]:
        """Who holds memory when the snapshot was taken, largest first."""
        return _holders(self.blocks, self.stacks)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Every device's memory."""

    devices: tuple[Memory, ...]

    def trace(self, title: str) -> Trace:
        """Allocated and reserved bytes as counters of a trace, and who holds them where they are most."""
        build = TraceBuilder(title)
        several = len(self.devices) > 1
        holders = {
            str(memory.device if several else 0): [
                [one.category, one.where, one.num_bytes, one.num_blocks] for one in memory.at_peak()
            ]
            for memory in self.devices
        }
        build.describe(format="memory_snapshot", memory_holders=holders)
        for memory in self.devices:
            tail = "" if len(self.devices) == 1 else f" (GPU {memory.device})"
            curve = memory.curve
            for name, column in (("memory_bytes", curve.allocated_bytes), ("reserved_bytes", curve.reserved_bytes)):
                for at_s, value in zip(curve.at_s.tolist(), column.tolist(), strict=True):
                    build.count(name + tail, at_s, value)
        return build.build()


def is_snapshot(head: bytes) -> bool:
    """Whether a file that begins like this is a pickle of protocol 2 or later."""
    return len(head) > 2 and head[0] == 0x80 and 2 <= head[1] <= 5


def read_snapshot(path: str | os.PathLike[str]) -> Snapshot:
    """A memory snapshot; decoded as plain data, nothing in it is run."""
    found = plain_data(read_bytes(path), str(path))
    if not isinstance(found, dict) or not isinstance(found.get("segments"), list):
        raise InputError(f"{path} is a pickle, but no memory snapshot: it has no list of segments")
    return _Maker(str(path)).snapshot(found)


class _Maker:
    """Turns the snapshot's dicts into rows; whatever is missing or of another type is refused by name."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.stacks: dict[tuple[Frame, ...], int] = {(): 0}
        self.num_rows = 0

    def snapshot(self, found: dict[str, Any]) -> Snapshot:
        segments = [self.row(segment, "segment") for segment in found["segments"]]
        traces = found.get("device_traces", [])
        if not isinstance(traces, list):
            raise self.broken("device_traces is not a list")
        events = [tuple(self.events(trace)) for trace in traces]
        used = {self.whole(segment, "device", 0) for segment in segments} | {i for i, e in enumerate(events) if e}
        blocks = {device: tuple(self.blocks(segments, device)) for device in sorted(used)}
        reserved = {device: self.reserved(segments, device) for device in used}
        stacks = tuple(self.stacks)
        return Snapshot(
            tuple(
                Memory(device, blocks[device], reserved[device], events[device] if device < len(events) else (), stacks)
                for device in sorted(used)
            )
        )

    def broken(self, why: str) -> InputError:
        return InputError(f"{self.where} is no memory snapshot as PyTorch writes them: {why}")

    def row(self, value: Any, what: str) -> dict[str, Any]:
        self.num_rows += 1
        if self.num_rows > MAX_ROWS:
            raise self.broken(f"more than {MAX_ROWS:,} rows; record with a smaller max_entries")
        if not isinstance(value, dict):
            raise self.broken(f"a {what} is a {type(value).__name__}")
        return value

    def whole(self, row: dict[str, Any], key: str, absent: int | None = None) -> int:
        value = row.get(key, absent)
        if not isinstance(value, int):
            raise self.broken(f"{key} is {type(value).__name__}, not a whole number")
        return value

    def reserved(self, segments: list[dict[str, Any]], device: int) -> int:
        mine = (segment for segment in segments if self.whole(segment, "device", 0) == device)
        return sum(self.whole(segment, "total_size") for segment in mine)

    def blocks(self, segments: list[dict[str, Any]], device: int) -> Iterator[Block]:
        for segment in segments:
            if self.whole(segment, "device", 0) != device:
                continue
            at = self.whole(segment, "address", 0)
            inner = segment.get("blocks", [])
            for block in inner if isinstance(inner, list) else []:
                block = self.row(block, "block")
                size = self.whole(block, "size")
                asked = self.whole(block, "requested_size", size)
                if block.get("state") in ("active_allocated", "active_awaiting_free"):
                    yield Block(self.whole(block, "address", at), size if asked > size else asked, self.stack(block))
                at += size

    def events(self, trace: Any) -> Iterator[Event]:
        for entry in trace if isinstance(trace, list) else []:
            entry = self.row(entry, "trace entry")
            yield Event(
                str(entry.get("action", "")),
                self.whole(entry, "addr", 0),
                self.whole(entry, "size", 0),
                self.whole(entry, "stream", 0),
                self.whole(entry, "time_us", -1),
                self.stack(entry),
            )

    def stack(self, row: dict[str, Any]) -> int:
        """The number of the stack that made it; older snapshots keep it in a history."""
        frames = row.get("frames")
        if not frames and isinstance(row.get("history"), list) and row["history"]:
            frames = self.row(row["history"][0], "history entry").get("frames")
        # max frames
        found = tuple(self.frame(frame) for frame in (frames if isinstance(frames, list) else [])[:256])
        return self.stacks.setdefault(found, len(self.stacks))

    def frame(self, frame: Any) -> Frame:
        frame = frame if isinstance(frame, dict) else {}
        line = frame.get("line", 0)
        return Frame(str(frame.get("filename", "")), line if isinstance(line, int) else 0, str(frame.get("name", "")))


def _steps(events: tuple[Event, ...], signs: dict[str, int]) -> NDArray[np.int64]:
    return np.array([signs.get(event.action, 0) * event.num_bytes for event in events], dtype=np.int64)


def _origins(events: tuple[Event, ...]) -> dict[int, int]:
    """Which allocation each free ends, where it was recorded."""
    opened: dict[int, int] = {}
    ended: dict[int, int] = {}
    for i, event in enumerate(events):
        if event.action == "alloc":
            opened[event.address] = i
        elif event.action in ("free_requested", "free") and event.address in opened:
            ended[i] = opened.pop(event.address)
    return ended


def _holders(blocks: Iterable[Block], stacks: tuple[tuple[Frame, ...], ...]) -> list[Holder]:
    sums: dict[tuple[str, str], list[Any]] = {}
    for block in blocks:
        stack = stacks[block.stack] if block.stack >= 0 else ()
        where = _where(stack) if block.stack >= 0 else BEFORE
        row = sums.setdefault((where, category_of(stack) if block.stack >= 0 else "unknown"), [0, 0, stack])
        row[0] += block.num_bytes
        row[1] += 1
    holders = [Holder(where, category, row[0], row[1], row[2]) for (where, category), row in sums.items()]
    return sorted(holders, key=lambda holder: (-holder.num_bytes, holder.where))


def _where(stack: tuple[Frame, ...]) -> str:
    """The innermost line of the program itself, else the innermost line."""
    if not stack:
        return NO_STACK
    return str(next((frame for frame in stack if frame.ours), stack[0]))


def category_of(stack: tuple[Frame, ...]) -> str:
    """What kind of memory a stack allocates, told by the lines on it."""
    files = [frame.file for frame in stack]
    functions = {frame.function for frame in stack}
    if not stack:
        return "backward or unknown"
    if any("torch/optim/" in file for file in files):
        return "optimizer state"
    if functions & {"backward", "_engine_run_backward"} or any("torch/autograd/" in file for file in files):
        return "gradient"
    if functions & {"forward", "_call_impl", "_wrapped_call_impl"}:
        return "activation"
    if functions & {"reset_parameters", "_apply", "convert", "__init__"}:
        return "parameter"
    return "other"
