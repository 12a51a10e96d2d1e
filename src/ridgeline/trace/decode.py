"""Trace events out of JSON text: typed and fast with msgspec, the same answers with the standard library without it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

try:
    import msgspec
except ImportError:  # a GPU host has what its image has
    msgspec = None  # type: ignore[assignment]

#: What an event without a text argument has; None in the plain reader.
UNSET: Any = msgspec.UNSET if msgspec is not None else None

#: Fields of an event, and what an event without them has.
EVENT: Mapping[str, Any] = {
    "ph": "", "cat": "", "name": "", "pid": "", "tid": "", "ts": None, "dur": None, "id": None, "args": None,
}  # fmt: skip
#: Arguments that are read: our name, the names dialects give them.
ARGS: Mapping[str, tuple[str, ...]] = {
    "external": ("External id", "External ID", "external id"),
    "correlation": ("correlation", "correlation_id"),
    "device": ("device",),
    "stream": ("stream",),
    "bytes": ("bytes",),
    "grid": ("grid",),
    "block": ("block",),
    "registers": ("registers per thread",),
    "shared_bytes": ("shared memory",),
    "occupancy": ("est. achieved occupancy %",),
    "shapes": ("Input Dims", "Input dims"),
    "dtypes": ("Input type",),
    "strides": ("Input Strides",),
    "stack": ("Call stack",),
    "hierarchy": ("Module Hierarchy",),
    "sequence": ("Sequence number",),
    "forward_thread": ("Fwd thread id",),
    "collective": ("Collective name",),
    "in_elements": ("In msg nelems",),
    "out_elements": ("Out msg nelems",),
    "group_size": ("Group size",),
    "dtype": ("dtype",),
    "group": ("Process Group Name", "Process Group ID"),
    "flops": ("flops", "Flops"),
    "graph_node": ("graph node id",),
    "wait_stream": ("wait_on_stream",),
    "wait_event": ("wait_on_cuda_event_id",),
    "addr": ("Addr",),
    "size": ("Bytes",),
    "device_type": ("Device Type",),
    "device_id": ("Device Id",),
    "allocated": ("Total Allocated",),
    "reserved": ("Total Reserved",),
    "name": ("name",),
    "labels": ("labels",),
}
#: Arguments that only our own files have, all under our names.
OWN_ARGS = (
    *ARGS, "module", "op", "phase", "source", "step", "node", "copy", "message_bytes", "floor_s", "expected_s",
    "energy_j", "read_bytes", "written_bytes", "microbatch", "stage", "link", "occupancy_frac",
)  # fmt: skip
#: Arguments kept as text: lists whose text is read once for each different one.
_TEXTS = ("shapes", "dtypes", "strides", "grid", "block")


def _slots(own: bool) -> dict[str, str]:
    """Name in the file to attribute; the second and further names of one are tried when the first is absent."""
    if own:
        return {key: key for key in OWN_ARGS}
    return {
        name: key if not i else f"{key}_{i}" for key, names in ARGS.items() for i, name in enumerate(names)
    }  # fmt: skip


def _is_text(slot: str) -> bool:
    return slot.removesuffix("_1") in _TEXTS


Decode = Callable[[bytes], list[Any]]


class DecodeError(Exception):
    """Text that is not a list of events."""


def decoder(*, exact: bool, fast: bool = True, own: bool = False) -> Decode:
    """A function from ``[event, …]`` to events with the attributes of EVENT; ``exact`` keeps the text of ``ts``."""
    return _typed(exact, _slots(own)) if fast and msgspec is not None else _plain(exact, _slots(own))


def text_of(value: Any) -> str:
    """The list that was written, in one spelling."""
    if isinstance(value, str):
        return value
    try:
        found = json.loads(bytes(value))
        return found if isinstance(found, str) else json.dumps(found)
    except (ValueError, TypeError, RecursionError):
        return ""


def _typed(exact: bool, slots: Mapping[str, str]) -> Decode:
    raw, unset = msgspec.Raw | msgspec.UnsetType, msgspec.UNSET
    args = msgspec.defstruct(
        "Args",
        [(slot, raw, unset) if _is_text(slot) else (slot, Any, None) for slot in slots.values()],
        gc=False,
        rename={slot: name for name, slot in slots.items()},
    )
    kinds = {"args": (args | None, None)} | ({"ts": (raw, unset)} if exact else {})
    event = msgspec.defstruct(
        "Event", [(key, *kinds.get(key, (Any, default))) for key, default in EVENT.items()], gc=False
    )
    decode = msgspec.json.Decoder(list[event]).decode  # type: ignore[valid-type]
    refused = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError)

    def events(text: bytes) -> list[Any]:
        try:
            return decode(text)
        except refused as error:
            raise DecodeError(str(error)) from error

    return events


class _Args:
    """Arguments of an event, read by the standard library."""

    def __init__(self, given: Mapping[str, Any], slots: Mapping[str, str]) -> None:
        for name, slot in slots.items():
            value = given.get(name)
            if _is_text(slot) and value is not None and not isinstance(value, str):
                value = json.dumps(value)
            setattr(self, slot, value)


class _Event:
    __slots__ = tuple(EVENT)

    def __init__(self, given: Mapping[str, Any], slots: Mapping[str, str]) -> None:
        for key, default in EVENT.items():
            setattr(self, key, given.get(key, default))
        args = given.get("args")
        self.args: Any = _Args(args, slots) if isinstance(args, dict) and args else None


def event_of(event: Any, **changes: Any) -> Any:
    """A copy of an event with some fields changed."""
    copy = _Event({}, {})
    for key in EVENT:
        setattr(copy, key, changes[key] if key in changes else getattr(event, key))
    return copy


def _plain(exact: bool, slots: Mapping[str, str]) -> Decode:
    """The standard library's reader, which also takes NaN and stray control characters."""
    reader = json.JSONDecoder(strict=False, parse_float=str if exact else None)

    def events(text: bytes) -> list[Any]:
        try:
            found = reader.decode(text.decode("utf-8", "replace"))
        except (ValueError, RecursionError) as error:
            raise DecodeError(str(error)) from error
        return [_Event(event, slots) for event in found if isinstance(event, dict)] if isinstance(found, list) else []

    return events
