"""Trace events out of JSON text: typed and fast with msgspec, the same answers with the standard library without it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Union

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
    "concrete": ("Concrete Inputs",),
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
TEXTS = frozenset(("shapes", "dtypes", "strides", "concrete", "grid", "block"))
#: Arguments that are words, and numbers that are not whole; all others are whole numbers.
WORDS = frozenset(
    ("collective", "group", "dtype", "stack", "hierarchy", "module", "op", "phase", "source", "node", "copy", "link")
)
FLOATS = frozenset(("occupancy", "occupancy_frac", "flops", "floor_s", "expected_s", "energy_j"))
MARKS = frozenset(("name", "labels"))


def absent(slot: str) -> Any:
    """What an event has for an argument it does not state: columns are made without a look at each value."""
    key = slot.removesuffix("_1").removesuffix("_2")
    if key in TEXTS:
        return UNSET
    return "" if key in WORDS else None if key in FLOATS or key in MARKS else -1


def _slots(own: bool) -> dict[str, str]:
    """Name in the file to attribute; the second and further names of one are tried when the first is absent."""
    if own:
        return {key: key for key in OWN_ARGS}
    return {
        name: key if not i else f"{key}_{i}" for key, names in ARGS.items() for i, name in enumerate(names)
    }  # fmt: skip


def _is_text(slot: str) -> bool:
    return slot.removesuffix("_1") in TEXTS


Decode = Callable[[bytes], list[Any]]


class DecodeError(Exception):
    """Text that is not a list of events."""


def decoder(*, exact: bool, fast: bool = True, own: bool = False, flows: bool = True) -> Decode:
    """A function from ``[event, …]`` to events with the attributes of EVENT; ``exact`` keeps the text of ``ts``."""
    return _typed(exact, _slots(own), flows) if fast and msgspec is not None else _plain(exact, _slots(own))


def text_of(value: Any) -> str:
    """The list that was written, in one spelling."""
    if isinstance(value, str):
        return value
    try:
        found = json.loads(bytes(value))
        return found if isinstance(found, str) else json.dumps(found)
    except (ValueError, TypeError, RecursionError):
        return ""


#: Phases whose events are read, the fields they have, and the arguments that matter there; all others are skipped.
_PHASES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "X": (("cat", "name", "pid", "tid", "ts", "dur", "args"), "span"),
    "B": (tuple(EVENT)[1:], "span"),
    "E": (("pid", "tid", "ts"), ""),
    "b": (tuple(EVENT)[1:], "span"),
    "e": (("cat", "name", "pid", "tid", "ts", "id"), ""),
    "i": (("name", "pid", "tid", "ts", "args"), "instant"),
    "I": (("name", "pid", "tid", "ts", "args"), "instant"),
    "M": (("name", "pid", "tid", "args"), "mark"),
    "s": (("id", "pid", "tid", "ts"), ""),
    "f": (("id", "pid", "tid", "ts"), ""),
}
_SKIPPED = "tCnNODPRSTpFcvV()"
INSTANT = frozenset(("addr", "size", "device_type", "device_id", "allocated", "reserved"))


def _typed(exact: bool, slots: Mapping[str, str], flows: bool) -> Decode:
    """A type for each phase, so that an event costs no more than what is read of it."""
    raw = msgspec.Raw | msgspec.UnsetType
    sorts = {
        "span": {name: slot for name, slot in slots.items() if slot not in INSTANT | MARKS},
        "instant": {name: slot for name, slot in slots.items() if slot in INSTANT},
        "mark": {name: slot for name, slot in slots.items() if slot in MARKS},
    }
    args = {
        sort: msgspec.defstruct(
            f"{sort}_args",
            [(slot, raw if _is_text(slot) else Any, absent(slot)) for slot in own.values()],
            gc=False,
            rename={slot: name for name, slot in own.items()},
        )
        for sort, own in sorts.items()
    }

    def event(phase: str) -> Any:
        names, sort = _PHASES.get(phase, ((), "")) if flows or phase not in "sf" else ((), "")
        kinds = {"args": (args[sort] | None, None)} if sort else {}
        kinds |= {"ts": (raw, UNSET)} if exact and phase in "XBbEe" else {}
        fields = [(name, *kinds.get(name, (Any, EVENT[name]))) for name in names]
        return msgspec.defstruct(
            f"Event_{ord(phase)}", fields, gc=False, tag_field="ph", tag=phase, namespace={"ph": phase}
        )

    every: Any = Union[tuple(event(phase) for phase in (*_PHASES, *_SKIPPED))]  # noqa: UP007
    decode = msgspec.json.Decoder(list[every]).decode
    refused = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError)

    patient = _plain(exact, slots)

    def events(text: bytes) -> list[Any]:
        try:
            return decode(text)
        except refused:  # a value of another type, or not quite JSON
            return patient(text)

    return events


class _Args:
    """Arguments of an event, read by the standard library."""

    def __init__(self, given: Mapping[str, Any], slots: Mapping[str, str]) -> None:
        for name, slot in slots.items():
            value = given.get(name)
            if value is None:
                value = absent(slot)
            elif _is_text(slot) and not isinstance(value, str):
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
        setattr(copy, key, changes[key] if key in changes else getattr(event, key, EVENT[key]))
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
