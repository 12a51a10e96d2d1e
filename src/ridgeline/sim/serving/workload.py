"""Requests and when they arrive: fixed concurrency, Poisson, bursty, all at once, or as recorded."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import InputError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival. With ``concurrency`` a request arrives when an earlier one leaves; without, at its
    ``arrival_s``."""

    isl: Ints
    osl: Ints
    arrival_s: Floats
    concurrency: int = 0
    prefix: Ints | None = None  # requests of equal, nonnegative prefix share their first tokens
    prefix_tokens: Ints | None = None
    title: str = ""

    def __post_init__(self) -> None:
        if not len(self.isl):
            raise InputError("a workload needs at least one request")
        if self.isl.min() < 1 or self.osl.min() < 1:
            raise InputError("every request needs at least one input and one output token")

    def __len__(self) -> int:
        return len(self.isl)


def lengths(num: int, mean: int, ratio: float, rng: np.random.Generator) -> Ints:
    """Token counts drawn evenly from ``ratio`` × mean to mean; a ratio of 1 is a fixed length."""
    if not 0 < ratio <= 1:
        raise InputError(f"length ratio {ratio} must lie in (0, 1]")
    low = max(1, int(mean * ratio))
    return rng.integers(low, mean + 1, size=num, dtype=np.int64)


def closed(concurrency: int, isl: int, osl: int, *, num: int = 0, ratio: float = 1.0, seed: int = 0) -> Workload:
    """``concurrency`` requests kept in flight, ten times as many in all unless ``num`` says otherwise."""
    if concurrency < 1:
        raise InputError(f"concurrency={concurrency} must be at least 1")
    rng, total = np.random.default_rng(seed), num or 10 * concurrency
    title = f"{concurrency} in flight, {isl} in, {osl} out"
    return Workload(lengths(total, isl, ratio, rng), lengths(total, osl, ratio, rng), np.zeros(total), concurrency,
                    title=title)  # fmt: skip


def static(batch: int, isl: int, osl: int) -> Workload:
    """One batch, all at once."""
    if batch < 1:
        raise InputError(f"batch={batch} must be at least 1")
    same = np.full(batch, isl, dtype=np.int64), np.full(batch, osl, dtype=np.int64)
    return Workload(*same, np.zeros(batch), title=f"one batch of {batch}, {isl} in, {osl} out")


def opened(
    rate_per_s: float, isl: int, osl: int, *, num: int = 2000, burst: float = 1.0, ratio: float = 1.0, seed: int = 0
) -> Workload:
    """Poisson arrivals at ``rate_per_s``; ``burst`` above 1 clusters them (gamma with that squared variation)."""
    if rate_per_s <= 0 or burst <= 0:
        raise InputError(f"rate={rate_per_s} and burst={burst} must be above 0")
    rng = np.random.default_rng(seed)
    gaps = rng.gamma(1 / burst, burst / rate_per_s, size=num)
    title = f"{rate_per_s:g} requests a second, {isl} in, {osl} out"
    return Workload(lengths(num, isl, ratio, rng), lengths(num, osl, ratio, rng), np.cumsum(gaps), title=title)


_NAMES: Mapping[str, tuple[str, ...]] = {
    "arrival": ("arrival_s", "timestamp", "arrival", "arrived_at", "time", "arrival_time"),
    "isl": ("isl", "input_tokens", "input_length", "input_len", "num_prefill_tokens", "contexttokens", "prompt_len"),
    "osl": ("osl", "output_tokens", "output_length", "output_len", "num_decode_tokens", "generatedtokens"),
    "prefix": ("prefix_id", "prefix", "session_id"),
    "prefix_tokens": ("prefix_tokens", "prefix_len", "prefix_length"),
}


def recorded(path: str | Path) -> Workload:
    """Requests of a CSV or JSONL file: arrival (seconds, or milliseconds in ``*_ms``), input and output tokens."""
    source = Path(path)
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the request trace {source}: {error}") from None
    rows = _jsonl(source, text) if text.lstrip().startswith("{") else list(csv.DictReader(io.StringIO(text)))
    if not rows:
        raise InputError(f"{source} holds no requests")
    columns = {str(name).strip().lower(): name for name in rows[0]}
    isl = _column(source, rows, columns, "isl")
    osl = _column(source, rows, columns, "osl")
    arrival = _arrivals(source, rows, columns)
    order = np.argsort(arrival, kind="stable")
    ids = _prefixes(rows, columns)
    shared = _column(source, rows, columns, "prefix_tokens") if ids is not None else None
    read, made = (np.maximum(values[order], 1).astype(np.int64) for values in (isl, osl))
    return Workload(
        read, made, (arrival - arrival.min())[order], prefix=None if ids is None else ids[order],
        prefix_tokens=None if shared is None else shared[order].astype(np.int64),
        title=f"{len(rows):,} requests of {source.name}",
    )  # fmt: skip


def _jsonl(source: Path, text: str) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise InputError(f"{source}, line {number}: not JSON ({error})") from None
            if not isinstance(row, dict):
                raise InputError(f"{source}, line {number}: a request is an object with arrival, isl and osl")
            rows.append(row)
    return rows


def _column(source: Path, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], what: str) -> Floats:
    name = next((columns[n] for n in _NAMES[what] if n in columns), None)
    if name is None:
        raise InputError(f"{source} has no column for {what}: name it one of {', '.join(_NAMES[what])}")
    return _numbers(source, rows, name)


def _numbers(source: Path, rows: Sequence[Mapping[str, Any]], name: str) -> Floats:
    values = np.empty(len(rows))
    for i, row in enumerate(rows):
        try:
            values[i] = float(row[name])
        except (TypeError, ValueError, KeyError):
            raise InputError(f"{source}, request {i + 1}: {name}={row.get(name)!r} is not a number") from None
        if not np.isfinite(values[i]) or values[i] < 0:
            raise InputError(f"{source}, request {i + 1}: {name}={values[i]} must be a number of at least 0")
    return values


def _arrivals(source: Path, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> Floats:
    in_ms = next((columns[n] for n in columns if n in ("arrival_ms", "timestamp_ms")), None)
    if in_ms is not None:
        return _numbers(source, rows, in_ms) / 1e3
    return _column(source, rows, columns, "arrival")


def _prefixes(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> Ints | None:
    name = next((columns[n] for n in _NAMES["prefix"] if n in columns), None)
    if name is None or not any(n in columns for n in _NAMES["prefix_tokens"]):
        return None
    known: dict[str, int] = {}
    words = [str(row.get(name) or "") for row in rows]
    return np.array([known.setdefault(word, len(known)) if word else -1 for word in words], dtype=np.int64)
