"""Kineto and Chrome JSON into the span table: dialects are told apart by what is in the file."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

from ridgeline.trace.assemble import assembled
from ridgeline.trace.blocks import blocks_of
from ridgeline.trace.columns import BAD_TIME, instants_ns, is_given
from ridgeline.trace.decode import event_of
from ridgeline.trace.events import Document, event_batches
from ridgeline.trace.gather import Gathered
from ridgeline.trace.table import Trace

#: Some 5 GB of columns; whoever has more wants one file a rank or a shorter recording.
MAX_SPANS = 20_000_000


def read_kineto(path: Path, *, fast: bool = True, rank: int | None = None) -> Trace:
    """A trace of PyTorch's profiler, or any Chrome trace, with launches, ops, modules and steps linked."""
    document, gathered = Document(), Gathered()
    collecting = gc.isenabled()
    gc.disable()  # nothing here is cyclic, and a million fresh objects would be walked again and again
    try:
        with blocks_of(path) as blocks:
            for batch in event_batches(path, blocks, document, fast=fast):
                gathered.own = document.own is not None
                gathered.take(batch, exact=document.exact)
                document.linked = "correlation" in gathered.sparse
                if gathered.num_rows > MAX_SPANS:
                    document.truncated = f"reading stopped after {MAX_SPANS:,} spans"
                    break
        # Begin and end events as complete ones; one without the other is counted as lost
        stacks: dict[Any, list[Any]] = {}
        found = []
        for event in gathered.opened:
            key = (
                (str(event.pid), str(event.tid))
                if event.ph in "BE"
                else (str(event.cat), str(event.id), str(event.name))
            )
            stack = stacks.setdefault(key, [])
            if event.ph in "Bb":
                stack.append(event)
            elif stack:
                begun = stack.pop()
                first, last = instants_ns([_text(begun.ts), _text(event.ts)], exact=True).tolist()
                found.append(event_of(begun, ph="X", dur=(0.0 if BAD_TIME in (first, last) else (last - first) / 1e3)))
            else:
                document.lose()
        document.lose(sum(map(len, stacks.values())))
        gathered.take(found, exact=document.exact)
        return assembled(path, gathered, document, rank)
    finally:
        if collecting:
            gc.enable()


def _text(value: Any) -> str:
    if isinstance(value, (int, float, str)):
        return str(value)
    return "" if isinstance(value, (list, dict)) or not is_given(value) else bytes(value).decode("utf-8", "replace")
