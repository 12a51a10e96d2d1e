"""Gathered columns into a Trace: kinds, places, links, optional columns, allocations and what is known of the run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import InputError
from ridgeline.trace.allocations import Allocations, allocations_of
from ridgeline.trace.columns import BAD_TIME, MAX_NS, Ints, instants_ns, ints, triples
from ridgeline.trace.dialect import ELEMENT_BYTES, copy_of, kind_of
from ridgeline.trace.events import Document
from ridgeline.trace.gather import Gathered
from ridgeline.trace.kind import WORK, Kind
from ridgeline.trace.link import Rows, link, module_path, user_line
from ridgeline.trace.nesting import Stacks
from ridgeline.trace.table import VOCABULARY, Column, Counter, Trace, absent_of, from_columns

Ids = NDArray[np.int32]
_RANK_IN_NAME = re.compile(r"(?:rank|worker)[-_]?(\d+)", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")
_DEVICE_PROCESS = re.compile(r"/device:(?:GPU|TPU)|^CUDA functions$")
_NO_STREAM = re.compile(r"^(?:XLA|Framework|Steps|Source|TensorFlow)", re.IGNORECASE)
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def assembled(path: Path, gathered: Gathered, document: Document, rank: int | None) -> Trace:
    """The trace of everything gathered from a file."""
    if not gathered.num_rows and document.num_lost:
        raise InputError(f"{path}: none of its events could be read; the file is damaged or not a trace")
    gathered.settle()
    _place_by_label(gathered)
    facts = document.own
    names = _without_addresses(gathered)
    # A kind for each different (category, name, place on a device), then for each row
    category, device = gathered.column("category", np.int32), gathered.column("on_device", np.bool_)
    code = (category.astype(np.int64) * 2 + device) * (len(gathered.words) + 1) + names
    different, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    categories = gathered.categories.frozen()
    words = gathered.words.frozen()
    kinds = np.fromiter(
        (kind_of(categories[category[i]], words[names[i]], on_device=bool(device[i])) for i in first),
        dtype=np.int8,
        count=len(different),
    )
    kind = np.asarray(kinds[inverse], dtype=np.int8)
    places = _Places(gathered, facts)
    held = allocations_of(gathered, exact=document.exact)
    rows = _rows(gathered, names, kind, places, held, document.exact)
    stacks = link(rows, filled=gathered.own)
    rank = _rank(path, document) if rank is None else rank
    return _table(path, gathered, document, rows, stacks, places, held, rank)


def _place_by_label(gathered: Gathered) -> None:
    """Rows without a category are a device's if their process or thread is called so, as in traces of XLA."""
    labels = gathered.labels
    devices = [
        bool(_DEVICE_PROCESS.search(labels.get(("process_name", pid, "0"), labels.get(("process_name", pid, ""), pid))))
        and not _NO_STREAM.search(labels.get(("thread_name", pid, tid), ""))
        for pid, tid in gathered.places
    ]
    if gathered.own or not any(devices):
        return
    known = np.array([bool(word) for word in gathered.categories.frozen()], dtype=np.bool_)
    unknown = ~known[gathered.column("category", np.int32)]
    moved = unknown & np.array(devices, dtype=np.bool_)[gathered.column("place", np.int32)]
    gathered.dense["on_device"] = [gathered.column("on_device", np.bool_) | moved]


def _without_addresses(gathered: Gathered) -> Ids:
    """Names with the addresses of objects cut off: two calls of one method have one name."""
    names = gathered.column("name", np.int32).astype(np.int32)
    words = gathered.words
    moved = {number: _ADDRESS.sub("", word) for word, number in words.items() if type(word) is str and " at 0x" in word}
    if not moved:
        return names
    table = np.arange(len(words) + len(moved), dtype=np.int32)
    for number, word in moved.items():
        table[number] = words[word]
    return np.asarray(table[names], dtype=np.int32)


class _Places:
    """Which thread or stream each (process, thread) pair of the file is."""

    def __init__(self, gathered: Gathered, facts: Mapping[str, Any] | None) -> None:
        self.pairs = gathered.places
        self.labels = gathered.labels
        self.device = np.array([_number(pid) for pid, _ in self.pairs], dtype=np.int32)
        self.stream = np.array([_number(tid) for _, tid in self.pairs], dtype=np.int32)
        self.threads = list(self.pairs)
        self.own = _own_lanes(facts)

    def label(self, pid: str, tid: str) -> str:
        """What the file calls a thread, or its number."""
        found = self.labels.get(("thread_name", pid, tid), "").strip()
        return found or f"thread {tid}"


def _own_lanes(facts: Mapping[str, Any] | None) -> dict[tuple[str, str], Mapping[str, Any]]:
    lanes = facts.get("lanes") if facts else None
    if not isinstance(lanes, list):
        return {}
    return {(str(lane.get("pid")), str(lane.get("tid"))): lane for lane in lanes if isinstance(lane, dict)}


def _number(value: Any) -> int:
    found = _NUMBER.search(str(value))
    return int(found.group()) % (2**31) if found else 0


def _rows(
    gathered: Gathered, names: Ids, kind: NDArray[np.int8], places: _Places, held: Allocations, exact: bool
) -> Rows:
    """What linking works on: the file's rows, then one for each allocation."""
    num, more = gathered.num_rows, len(held.start)
    start, place = gathered.column("start", np.int64), gathered.column("place", np.int32)
    device, stream = _device_and_stream(gathered, kind, places)
    thread = np.where(device < 0, place, -1)

    def argument(name: str, absent: int = -1) -> Ints:
        return _longer(gathered.argument(name, absent, np.int64), more, absent)

    def words(name: str) -> Ids:
        return argument(name, 0).astype(np.int32)

    correlation = argument("correlation")
    if gathered.flows and "correlation" not in gathered.sparse:
        correlation[:num] = _from_flows(gathered, exact=exact)
    if gathered.own:
        # Device, stream and thread as our own writer noted them for each lane
        lanes = [places.own.get(pair, {}) for pair in places.pairs]
        found = [
            np.array([_whole(lane.get(key)) for lane in lanes], np.int32) for key in ("device", "stream", "thread")
        ]
        device, stream, thread = found[0][place], found[1][place], found[2][place]
    ends = start + gathered.column("duration", np.int64)
    starts = np.concatenate((start, held.start))
    # What the file's times are multiples of: a microsecond in old traces, a nanosecond in new ones
    return Rows(
        words=gathered.words,
        start=starts,
        end=np.concatenate((ends, held.start)),  # an instant, until links are made
        kind=np.concatenate((kind, np.full(more, Kind.ALLOCATION, np.int8))),
        name=np.concatenate((names, np.full(more, gathered.words["[memory]"], np.int32))),
        thread=np.concatenate((thread, held.thread_of(places.threads))).astype(np.int32),
        device=np.concatenate((device, held.device)).astype(np.int32),
        stream=np.concatenate((stream, np.full(more, -1))).astype(np.int32),
        correlation=correlation,
        external=argument("external"),
        sequence=argument("sequence"),
        forward_thread=argument("forward_thread"),
        module=words("module") if gathered.own else _derived(gathered, words("hierarchy"), module_path),
        op=words("op"),
        phase=words("phase"),
        source=words("source") if gathered.own else _derived(gathered, words("stack"), user_line),
        step=argument("step").astype(np.int32),
        launch=np.full(num + more, -1, dtype=np.int32),
        clock_ns=1000 if len(starts) and not (starts % 1000).any() and not (ends % 1000).any() else 1,
    )


def _from_flows(gathered: Gathered, *, exact: bool) -> Ints:
    """Correlations from arrows between events: an arrow begins, and ends, at the start of the span it belongs to."""
    at = instants_ns([flow[4] for flow in gathered.flows], exact=exact).tolist()
    number = {pair: i for i, pair in enumerate(gathered.places)}
    keys = [(number.get((str(flow[2]), str(flow[3])), -1), when) for flow, when in zip(gathered.flows, at, strict=True)]
    ids = dict(zip(keys, ints([flow[1] for flow in gathered.flows]).tolist(), strict=True))
    place, start = gathered.column("place", np.int32).tolist(), gathered.column("start", np.int64).tolist()
    return np.array([ids.get(key, -1) for key in zip(place, start, strict=True)], dtype=np.int64)


def _device_and_stream(gathered: Gathered, kind: NDArray[np.int8], places: _Places) -> tuple[Ids, Ids]:
    place, on_device = gathered.column("place", np.int32), gathered.column("on_device", np.bool_)
    device = gathered.argument("device", -1, np.int64)
    stream = gathered.argument("stream", -1, np.int64)
    if not gathered.num_rows:
        return device.astype(np.int32), stream.astype(np.int32)
    device = np.where(device >= 0, device, places.device[place])
    stream = np.where(stream >= 0, stream, places.stream[place])
    work = on_device | np.isin(kind, WORK)
    return (
        np.where(work, np.minimum(device, 2**31 - 1), -1).astype(np.int32),
        np.where(work, np.minimum(stream, 2**31 - 1), -1).astype(np.int32),
    )


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and -1 <= value < 2**31 else -1


def _derived(gathered: Gathered, ids: Ids, answer: Callable[[str], str]) -> Ids:
    """Words made from other words, each different one once."""
    if not ids.any():
        return ids
    different = np.unique(ids)
    texts = gathered.words.texts(different)
    table = {int(i): gathered.words[answer(text)] if text else 0 for i, text in zip(different, texts, strict=True)}
    lookup = np.zeros(int(different.max(initial=0)) + 1, dtype=np.int32)
    lookup[list(table)] = list(table.values())
    return np.asarray(lookup[ids], dtype=np.int32)


def _rank(path: Path, document: Document) -> int:
    distributed = document.head.get("distributedInfo")
    found = distributed.get("rank") if isinstance(distributed, dict) else None
    if isinstance(found, int) and 0 <= found < 2**31:
        return found
    named = _RANK_IN_NAME.search(path.name)
    return int(named.group(1)) % 2**31 if named else 0


def _table(
    path: Path,
    gathered: Gathered,
    document: Document,
    rows: Rows,
    stacks: Stacks,
    places: _Places,
    held: Allocations,
    rank: int,
) -> Trace:
    facts = document.own or {}
    origin = int(rows.start.min(initial=2**62)) if len(rows.start) else 0
    rows.end[gathered.num_rows :] = held.end
    lane, ranks = _lanes(gathered, rows, places, rank)
    # Optional columns that at least one row has
    more = len(held.start)
    found: dict[str, Column] = {}
    for name in gathered.sparse:
        if name in VOCABULARY and name not in ("grid", "block"):
            kind = np.int32 if VOCABULARY[name] is str else VOCABULARY[name]
            found[name] = _longer(gathered.argument(name, absent_of(name), kind), more, absent_of(name))
    for name in ("grid", "block"):
        if name in gathered.sparse:
            found[name] = _longer(_sizes(gathered, name), more, -1)
    if "occupancy" in gathered.sparse:
        found["occupancy_frac"] = _longer(gathered.argument("occupancy", np.nan, np.float64) / 100, more, np.nan)
    if not gathered.own:
        found |= _copies(rows)
        found |= _collectives(gathered, rows, stacks, more)
    if more:
        sizes = found.get("bytes", np.full(len(rows.start), -1, dtype=np.int64))
        sizes[gathered.num_rows :] = held.num_bytes
        found["bytes"] = sizes
    for name in ("correlation", "external", "sequence"):
        if name in found and not (found[name] >= 0).any():
            del found[name]
    extra = found
    base_ns = document.head.get("baseTimeNanoseconds")
    own_origin = facts.get("origin_ns")
    base_ns = base_ns if isinstance(base_ns, int) and abs(base_ns + origin) < MAX_NS else 0
    if isinstance(own_origin, int) and abs(own_origin) < MAX_NS:  # our files count from their own origin
        base_ns, origin = own_origin, 0
    return from_columns(
        str(facts.get("title") or path.name),
        rows.words.frozen(),
        name=rows.name,
        start_s=(rows.start - origin) / 1e9,
        duration_s=(rows.end - rows.start) / 1e9,
        lane=lane,
        module=rows.module,
        op=rows.op,
        phase=rows.phase,
        source=rows.source,
        kind=rows.kind,
        rank=ranks,
        device=rows.device,
        stream=rows.stream,
        thread=rows.thread,
        launch=rows.launch,
        parent=stacks.parent,
        step=rows.step,
        extra=extra,
        counters=_counters(document, held, origin) | _recorded_counters(document, base_ns + origin),
        notes=_notes(gathered, document, facts),
        meta=_meta(path, gathered, document, places, rows.clock_ns, origin, facts),
        origin_ns=base_ns + origin,
    )


def _lanes(gathered: Gathered, rows: Rows, places: _Places, rank: int) -> tuple[Ids, Ids]:
    """The lane's word and the rank of every row."""
    ranks = np.full(len(rows.start), rank, dtype=np.int32)
    if gathered.own:
        lanes = [places.own.get(pair, {}) for pair in places.pairs]
        place = gathered.column("place", np.int32)
        words = np.array([rows.words[str(lane.get("lane", ""))] for lane in lanes], dtype=np.int32)
        return words[place], np.array([_whole(lane.get("rank", 0)) for lane in lanes], np.int32)[place]
    lane = np.zeros(len(rows.start), dtype=np.int32)
    on_host = rows.thread >= 0
    threads = [rows.words[places.label(pid, tid)] for pid, tid in places.threads]
    lane[on_host] = np.array(threads or [0], dtype=np.int32)[rows.thread[on_host]]
    streams = np.flatnonzero(~on_host)
    code = rows.device[streams].astype(np.int64) * 2**32 + rows.stream[streams]
    different, inverse = np.unique(code, return_inverse=True)
    names = [rows.words[f"GPU {c >> 32} stream {c & (2**32 - 1)}"] for c in different.tolist()]
    lane[streams] = np.array(names or [0], dtype=np.int32)[inverse]
    lane[rows.kind == Kind.ALLOCATION] = rows.words["memory"]
    return lane, ranks


def _longer(column: Column, more: int, absent: float) -> Column:
    return np.concatenate((column, np.full((more, *column.shape[1:]), absent, dtype=column.dtype))) if more else column


def _sizes(gathered: Gathered, name: str) -> Column:
    ids = gathered.argument(name, 0, np.int32)
    rows = np.flatnonzero(ids)
    different, inverse = np.unique(ids[rows], return_inverse=True)
    column = np.full((len(ids), 3), -1, dtype=np.int32)
    column[rows] = triples(gathered.words.texts(different))[inverse]
    return column


def _copies(rows: Rows) -> dict[str, Column]:
    copies = np.flatnonzero(rows.kind == Kind.MEMCPY)
    if not len(copies):
        return {}
    different, inverse = np.unique(rows.name[copies], return_inverse=True)
    ids = np.array([rows.words[copy_of(text)] for text in rows.words.texts(different)], dtype=np.int32)
    column = np.zeros(len(rows.start), dtype=np.int32)
    column[copies] = ids[inverse]
    return {"copy": column}


def _collectives(gathered: Gathered, rows: Rows, stacks: Stacks, more: int) -> dict[str, Column]:
    """What a collective moves, from its kernel or from the op that launched it."""
    if "collective" not in gathered.sparse:
        return {}
    size = np.zeros(len(gathered.words) + 1, dtype=np.int64)
    for word, number in list(gathered.words.items()):
        size[number] = ELEMENT_BYTES.get(str(word).lower(), 0)
    element = size[gathered.argument("dtype", 0, np.int32)]
    elements = np.maximum(
        gathered.argument("in_elements", -1, np.int64), gathered.argument("out_elements", -1, np.int64)
    )
    moved = np.where((elements >= 0) & (element > 0), np.minimum(elements, 2**53) * element, -1)
    own = {
        "collective": _longer(gathered.argument("collective", 0, np.int32), more, 0),
        "group": _longer(gathered.argument("group", 0, np.int32), more, 0),
        "group_size": _longer(gathered.argument("group_size", -1, np.int64).astype(np.int32), more, -1),
        "message_bytes": _longer(moved, more, -1),
    }
    holder = stacks.inherit(np.where(own["collective"] > 0, np.arange(len(rows.start)), -1).astype(np.int32), absent=-1)
    comm = np.flatnonzero((rows.kind == Kind.COMMUNICATION) & (own["collective"] == 0) & (rows.launch >= 0))
    source = holder[rows.launch[comm]]
    comm, source = comm[source >= 0], source[source >= 0]
    for column in own.values():
        column[comm] = column[source]
    return own


def _counters(document: Document, held: Allocations, origin: int) -> dict[str, Counter]:
    found = {name: Counter((at - origin) / 1e9, value) for name, (at, value) in held.totals.items()}
    for name, samples in document.counters.items():
        at = np.array([sample[0] for sample in samples], dtype=np.int64)
        good = at != BAD_TIME
        found[name] = Counter((at[good] - origin) / 1e9, np.array([sample[1] for sample in samples])[good])
    return found


def _recorded_counters(document: Document, origin_ns: int) -> dict[str, Counter]:
    """Quantities our recorder sampled beside the run, on the clock of the day."""
    recorded = document.head.get("ridgeline")
    columns = recorded.get("counters") if isinstance(recorded, dict) else None
    found = {}
    for name, column in columns.items() if isinstance(columns, dict) else ():
        try:
            at_ns, value = np.array(column["at_ns"], np.int64), np.array(column["value"], np.float64)
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
        if at_ns.ndim == 1 and at_ns.shape == value.shape:
            found[str(name)] = Counter((at_ns - origin_ns) / 1e9, value)
    return found


def _notes(gathered: Gathered, document: Document, facts: Mapping[str, Any]) -> list[str]:
    given = facts.get("notes")
    notes = [note for note in given if isinstance(note, str)] if isinstance(given, list) else []
    if document.note:
        notes.append(document.note)
    if document.truncated:
        notes.append(f"the file is incomplete: {document.truncated}")
    if document.num_lost:
        notes.append(f"{document.num_lost:,} events could not be read and are left out")
    if gathered.num_bad_times:
        notes.append(f"{gathered.num_bad_times:,} events without a readable time are left out")
    return notes


_META_TYPES: Mapping[str, type] = {"grid_ns": int, "devices": list, "distributed": dict, "ridgeline": dict}


def _meta(
    path: Path,
    gathered: Gathered,
    document: Document,
    places: _Places,
    clock_ns: int,
    origin: int,
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    head = document.head
    devices = head.get("deviceProperties")
    distributed = head.get("distributedInfo")
    labels = ((pid, tid, places.label(pid, tid)) for pid, tid in places.threads)
    # What our writer noted; entries that are not what they are called are left out
    given = facts.get("meta")
    entries = given.items() if isinstance(given, dict) else ()
    meta = {key: value for key, value in entries if isinstance(value, _META_TYPES.get(key, object))}
    meta |= {
        "format": "ridgeline" if gathered.own else "kineto" if "schemaVersion" in head or devices else "chrome",
        "source_file": path.name,
        "clock_ns": clock_ns,
        "threads": [{"pid": pid, "tid": tid, "name": name} for pid, tid, name in labels],
        "truncated": document.truncated,
        "num_lost": document.num_lost + gathered.num_bad_times,
        "num_negative": gathered.num_negative,
        "unread": document.note,
        "categories": sorted(str(word) for word in gathered.categories if word),
        "recorded": {
            flag: bool(head[flag])
            for flag in ("record_shapes", "with_stack", "with_modules", "profile_memory", "with_flops")
            if flag in head
        },
        "windows_s": [((start - origin) / 1e9, (end - origin) / 1e9) for start, end in gathered.windows],
    }
    if document.exact and gathered.num_rows:  # how far apart JSON numbers of this size are
        meta["grid_ns"] = round(float(np.spacing(abs(origin) / 1e3)) * 1e3)
    if isinstance(devices, list) and devices:
        meta["devices"] = [device for device in devices if isinstance(device, dict)]
    if isinstance(distributed, dict):
        meta["distributed"] = distributed
    if isinstance(head.get("ridgeline"), dict):  # what our recorder wrote beside the events
        meta["ridgeline"] = {key: value for key, value in head["ridgeline"].items() if key != "counters"}
    versions = {key: head[key] for key in head if str(key).endswith("_version") or key == "trace_id"}
    return meta | ({"versions": versions} if versions else {})
