"""The front door: a trace file of any kind, or a folder with one for each rank, into the span table."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from ridgeline.errors import InputError
from ridgeline.trace import compact
from ridgeline.trace.archive import MAGIC, load
from ridgeline.trace.blocks import wrapping
from ridgeline.trace.cache import cached
from ridgeline.trace.foreign import refuse_foreign
from ridgeline.trace.kineto import read_kineto
from ridgeline.trace.memory_timeline import is_memory_timeline, read_memory_timeline
from ridgeline.trace.nsys import read_nsys
from ridgeline.trace.payload import head_of
from ridgeline.trace.snapshot import is_snapshot, read_snapshot
from ridgeline.trace.table import Trace, concat
from ridgeline.trace.torchlog import is_compile_log
from ridgeline.trace.xplane import read_xplane

_SUFFIXES = (
    *(".json", ".json.gz", ".json.xz", ".json.zip", ".zip", ".sqlite"),
    *(".trace", ".pt.trace.json", ".pt.trace.json.gz", ".xplane.pb"),
)


def read(path: str | os.PathLike[str], *, cache: bool = True, rank: int | None = None) -> Trace:
    """One trace file: Kineto or Chrome JSON (plain, gzip or zip), an Nsight Systems SQLite export, or one of ours."""
    file = Path(path)
    if file.is_dir():
        raise InputError(f"{file} is a folder: read_ranks reads every trace in it")
    if not file.exists():
        raise InputError(f"{file} does not exist")

    refuse_foreign(file)

    def fresh() -> Trace:
        if file.name.endswith(".xplane.pb"):
            return read_xplane(file)
        if wrapping(file) == "sqlite":
            return read_nsys(file)
        with file.open("rb") as opened:
            begins = opened.read(64)
        if begins.startswith(MAGIC):
            return load(file)
        if begins.startswith(compact.MAGIC):
            return compact.read_compact(file, rank=rank)
        head = head_of(file)
        if is_snapshot(head):
            return read_snapshot(file).trace(file.name)
        if is_memory_timeline(head):
            return read_memory_timeline(file).trace(file.name)
        if is_compile_log(head):
            raise InputError(
                f"{file} is a compile log, not a trace: ridgeline.trace.torchlog.read_compile_log reads it"
            )
        return read_kineto(file, rank=rank)

    trace = cached(file, fresh, variant=f"rank {rank}") if cache else fresh()
    return replace(trace, meta={**trace.meta, "path": str(file)})


def trace_files(path: str | os.PathLike[str]) -> list[Path]:
    """The trace files of a folder, in the order of their names with numbers as numbers; a file is itself."""
    given = Path(path)
    if not given.is_dir():
        return [given]
    found = [file for file in given.iterdir() if is_trace_file(file)]
    if not found:
        raise InputError(f"no trace in {given}: looked for {', '.join(_SUFFIXES[:6])}")
    return sorted(found, key=_natural)


def is_trace_file(path: Path) -> bool:
    """Whether a file may be a trace, by its name."""
    return path.is_file() and path.name.endswith(_SUFFIXES)


def _natural(path: Path) -> list[tuple[int, int | str]]:
    import re

    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", path.name) if part]


def read_ranks(
    paths: Iterable[str | os.PathLike[str]] | str | os.PathLike[str],
    *,
    cache: bool = True,
    aside: list[str] | None = None,
) -> Iterator[Trace]:
    """One trace after another, each with a rank of its own; no more than one is held here at a time.

    Ranks are those the files state; where two state the same, later ones get the next free number. What lies in a
    folder beside traces and is none ends the reading, unless a list ``aside`` is given: then its error goes there.
    """
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    taken: set[int] = set()
    for trace in _read_all(given, cache, aside):
        ranks = trace.ranks()
        if len(ranks) == 1 and ranks[0] in taken:
            free = max(taken) + 1
            trace = trace.with_columns(rank=np.full(len(trace), free, dtype=np.int32))
            ranks = [free]
        taken.update(ranks)
        yield trace
        del trace  # before the next is read
    if aside and not taken:
        raise InputError(aside[0])


def _read_all(given: Iterable[str | os.PathLike[str]], cache: bool, aside: list[str] | None) -> Iterator[Trace]:
    for path in given:
        for file in trace_files(path):
            try:
                yield read(file, cache=cache)
            except InputError as error:
                if aside is None or not Path(path).is_dir():
                    raise
                aside.append(str(error))


def read_job(paths: Iterable[str | os.PathLike[str]] | str | os.PathLike[str], *, cache: bool = True) -> Trace:
    """All ranks in one table; for jobs whose ranks fit into memory together."""
    traces = list(read_ranks(paths, cache=cache))
    return traces[0] if len(traces) == 1 else concat(traces, f"{len(traces)} ranks of {traces[0].title}")
