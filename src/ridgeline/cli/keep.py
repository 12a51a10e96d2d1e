"""``--store``: keep what a verb printed, and show a stored measurement of the same thing beside a prediction."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.units import show_seconds

if TYPE_CHECKING:
    from ridgeline.graph import Graph
    from ridgeline.store.record import Record
    from ridgeline.store.store import Store

_CHOSEN: list[str] = []  # the store of this command line, if any


def choose(url: str | None) -> str | None:
    """Remember the store of this command line; one that cannot be used is refused before minutes are spent."""
    _CHOSEN.clear()
    if url:
        from ridgeline.store.store import Store

        Store(url).close()
        _CHOSEN.append(url)
    return url


def chosen() -> str | None:
    return _CHOSEN[0] if _CHOSEN else None


def keep(
    kind: str,
    subject: str,
    document: Callable[[], Any],
    *,
    device: str = "",
    settings: Mapping[str, Any] | None = None,
    subject_hash: str = "",
    measured: bool = False,
    files: Sequence[tuple[str, Path]] = (),
    quiet: bool = False,
) -> None:
    """Keep a run in the store of this command line; without one, not even its document is made."""
    if not _CHOSEN:
        return
    from ridgeline.store.record import Record, artifact, metrics_of
    from ridgeline.store.store import Store

    made = document()
    record = Record(
        kind=kind, subject=subject, device=device, settings=dict(settings or {}), subject_hash=subject_hash,
        measured=measured, document=made, metrics=metrics_of(made),
        artifacts=tuple(artifact(what, path) for what, path in files if path.exists()),
    )  # fmt: skip
    with Store(_CHOSEN[0]) as store:
        store.add(record)
        for line in [] if measured else beside(store, record):
            print(line, file=sys.stderr if quiet else sys.stdout)
        print(f"stored: run {record.id[:10]} in {store.name}", file=sys.stderr)


def beside(store: Store, record: Record) -> list[str]:
    """Lines that show the newest measurement of what a record predicts, and the ratio."""
    lines = []
    for metric in record.metrics:
        found = store.measurement(record.thing, metric.name)
        if found is None or not metric.value or not found[1].value:
            continue
        run, measured = found
        text = show_seconds if metric.name.endswith("_s") else lambda value: f"{value:,.4g}"
        low, high = metric.low, metric.high
        inside = "" if low is None or high is None else (
            ", inside the interval" if low <= measured.value <= high else ", outside of the interval"
        )  # fmt: skip
        lines.append(
            f"{metric.name}: predicted {text(metric.value)}, measured {text(measured.value)} "
            f"({metric.value / measured.value:.3f}×{inside}; run {run.id[:10]} of {run.at[:10]})"
        )
    return lines


def graph_settings(graph: Graph, options: Mapping[str, Any], execution: str) -> dict[str, Any]:
    """What tells one step of a network from another: its mode, its sizes (defaults filled in) and the execution."""
    sizes = {key: value for key, value in graph.meta.items() if isinstance(value, (str, bool, int, float))}
    return {**sizes, **options, "mode": graph.mode, "execution": execution}
