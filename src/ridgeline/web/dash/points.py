"""Points of a study for the dashboard: columns decoded once, an exact frontier, a thinned scatter, filtered rows."""

from __future__ import annotations

import csv
import io
import json
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import InputError, RidgelineError, nearest
from ridgeline.store.store import Store, StudyRow, coded
from ridgeline.store.transfer import defused
from ridgeline.study.frontier import frontier
from ridgeline.study.run import Spec, Study

GRID = (200, 130)  # cells of the scatter: about four pixels each on a wide screen


@dataclass(slots=True)
class Column:
    """Numbers, or numbers of words."""

    values: NDArray[Any]
    words: list[str] | None = None


@dataclass(slots=True)
class Table:
    """A study as far as it was evaluated; columns are read when first asked for."""

    row: StudyRow
    spec: Spec | None  # None where this version cannot read it: the table is still shown
    chunks: tuple[int, ...] = ()
    columns: dict[str, Column] = field(default_factory=dict)
    made: dict[Any, Any] = field(default_factory=dict)  # what was computed of these chunks

    def __len__(self) -> int:
        return len(self.columns["reason"].values)

    def load(self, store: Store, names: Sequence[str]) -> None:
        """Read what is missing of these columns; a running study has grown since."""
        now = tuple(sorted(store.chunk_numbers(self.row.id)))
        if now != self.chunks:
            names = list(dict.fromkeys([*self.columns, *names]))
            self.chunks, self.columns, self.made = now, {}, {}
        missing = [name for name in names if name not in self.columns and name in self.row.columns]
        if not missing:
            return
        parts: dict[str, list[NDArray[Any]]] = {name: [] for name in missing}
        words: dict[str, dict[str, int]] = {}
        for number, body in store.bodies(self.row.id):
            if number not in self.chunks:
                continue  # it came after the others were listed
            for name, (values, spoken) in coded(body, missing).items():
                if spoken is not None:
                    known = words.setdefault(name, {})
                    place = np.array([known.setdefault(word, len(known)) for word in spoken], dtype=np.int32)
                    parts[name].append(place[values])
                else:
                    parts[name].append(values.astype(np.float64, copy=False))
        for name, found in parts.items():
            joined = np.concatenate(found) if found else np.empty(0)
            self.columns[name] = Column(joined, list(words[name]) if name in words else None)

    def feasible(self) -> NDArray[np.bool_]:
        reason = self.columns["reason"]
        if "feasible" not in self.made:
            is_none = np.array([not word for word in reason.words or [""]])
            self.made["feasible"] = is_none[reason.values.astype(np.int32, copy=False)]
        found: NDArray[np.bool_] = self.made["feasible"]
        return found

    def objectives(self) -> list[dict[str, Any]]:
        if self.spec is None:
            return []
        return [{"text": text, "names": sorted(parsed.names()), "better": "low" if sign > 0 else "high"}
                for text, parsed, sign in self.spec.objectives()]  # fmt: skip

    def needed(self, text: str) -> list[str]:
        """Columns that a number of the plot is made of: a column, or an objective as it was written."""
        if text in self.row.columns:
            return [text]
        for objective in self.objectives():
            if objective["text"] == text:
                return list(objective["names"])
        known = [*self.row.columns, *(objective["text"] for objective in self.objectives())]
        raise InputError(f"study {self.row.name!r} has no column {text!r}{nearest(text, known)}")

    def value(self, text: str) -> NDArray[np.float64]:
        if text in self.row.columns:
            return np.asarray(self.columns[text].values, dtype=np.float64)
        assert self.spec is not None  # ``needed`` found it among the objectives
        part = {name: self.columns[name].values for name in self.needed(text)}
        with np.errstate(all="ignore"):
            found = self.spec.parsed(text).value(part)
        return np.broadcast_to(np.asarray(found, dtype=np.float64), len(self))

    def study(self) -> Study:
        """The study as its own package computes with it; text stays as numbers of words."""
        if self.spec is None:
            raise InputError(f"study {self.row.name!r} was made by another version, whose spec cannot be read here")
        columns = {name: column.values for name, column in self.columns.items()}
        columns["reason"] = np.where(self.feasible(), "", "x")
        return Study(self.spec, self.row, columns)

    def frontier(self, sure: bool = False) -> NDArray[np.intp]:
        """Points that no other beats, of all points."""
        key = ("frontier", sure)
        if key not in self.made:
            study = self.study()
            if sure:
                self.made[key] = study.frontier(sure=True)
            else:
                costs = study.costs()
                kept = _not_beaten_by_a_few(costs)
                self.made[key] = study.feasible[kept[frontier(costs[kept])]]
        found: NDArray[np.intp] = self.made[key]
        return found


def _not_beaten_by_a_few(costs: NDArray[np.float64]) -> NDArray[np.intp]:
    """Rows that remain after a few good ones struck out what they beat: no row of the frontier is lost."""
    if len(costs) < 50_000:
        return np.arange(len(costs))
    some = costs[:: len(costs) // 4096]
    rivals = some[frontier(some)]
    middle = np.abs(np.argsort(np.argsort(rivals[:, 0])) - len(rivals) / 2)  # the middle of a frontier beats the most
    left, columns = np.arange(len(costs)), list(costs.T)
    for rival in rivals[np.argsort(middle)][:: max(1, len(rivals) // 12)]:
        better, equal = np.zeros(len(left), dtype=bool), np.ones(len(left), dtype=bool)
        for column, limit in zip(columns, rival):
            better |= column < limit
            equal &= column == limit
        kept = better | equal
        left, columns = left[kept], [column[kept] for column in columns]
    return left


class Tables:
    """The last studies that were looked at; one lock, for a table is read by one request at a time."""

    def __init__(self, keep: int = 3) -> None:
        self.keep, self.lock = keep, threading.Lock()
        self.kept: OrderedDict[str, Table] = OrderedDict()

    def table(self, store: Store, name: str, columns: Callable[[Table], Sequence[str]]) -> Table:
        """The study of this name or id with these columns; the caller holds the lock."""
        row = store.study(name)
        found = self.kept.get(row.id)
        if found is None:
            try:
                spec = Spec.from_dict(row.spec)
                spec.objectives()
            except (RidgelineError, KeyError, TypeError, ValueError):
                spec = None
            found = self.kept[row.id] = Table(row, spec)
        found.row = row
        self.kept.move_to_end(row.id)
        while len(self.kept) > self.keep:
            self.kept.popitem(last=False)
        found.load(store, ["reason", *columns(found)])
        return found


def summary(store: Store, tables: Tables, name: str) -> dict[str, Any]:
    """What a study is and how far it is."""
    with tables.lock:
        table = tables.table(store, name, lambda found: [])
        reason, row = table.columns["reason"], table.row
        counts = np.bincount(reason.values.astype(np.intp), minlength=len(reason.words or []))
        axes = [axis.name for axis in table.spec.space.axes] if table.spec else []
        return {
            **overview(row), "points": len(table), "chunks": len(table.chunks), "columns": list(row.columns),
            "axes": axes, "objectives": table.objectives(), "spec": row.spec, "readable": table.spec is not None,
            "outcomes": [[(reason.words or [])[at], int(counts[at])]
                         for at in np.argsort(-counts, kind="stable")[:200]],
        }  # fmt: skip


def overview(row: StudyRow) -> dict[str, Any]:
    return {"id": row.id, "name": row.name, "state": row.state, "planned": row.num_points, "at": row.at,
            "version": row.version, "git": row.git}  # fmt: skip


def sample(store: Store, tables: Tables, name: str, x: str, y: str, *, sure: bool, every: bool) -> bytes:
    """Points to draw, as binary columns: one for each cell of a grid, with the count of its cell, and the frontier.

    ``every`` adds the study's other columns for the same points; without it the plot needs only its own.
    """
    with tables.lock:
        table = tables.table(store, name, lambda found: [
            *found.needed(x), *found.needed(y), *(n for o in found.objectives() for n in o["names"]),
            *(f"{n}{end}" for o in found.objectives() for n in o["names"] for end in (".low", ".high") if sure),
            *(found.row.columns if every else ()),
        ])  # fmt: skip
        key = ("sample", x, y, sure)
        if key not in table.made:
            table.made[key] = _thinned(table, x, y, sure)
        index, counts, flags, scales = table.made[key]
        columns: dict[str, tuple[NDArray[Any], list[str] | None]] = {
            "#": (index.astype("<i4"), None), "#count": (counts.astype("<i4"), None), "#flags": (flags, None),
        }  # fmt: skip
        for text in (x, y):
            columns[text] = table.value(text)[index].astype("<f4"), getattr(table.columns.get(text), "words", None)
        for column in table.row.columns if every else ():
            found = table.columns[column]
            columns[column] = found.values[index].astype("<f4"), found.words
        return packed({"points": len(table), "x": x, "y": y, "scales": scales, "rows": len(index)}, columns)


def _thinned(table: Table, x: str, y: str, sure: bool) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], list[Any]]:
    xs, ys, feasible = table.value(x), table.value(y), table.feasible()
    alive = np.flatnonzero(np.isfinite(xs) & np.isfinite(ys))
    places, scales = [], []
    for values, cells in zip((xs[alive], ys[alive]), GRID):
        low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
        is_log = low > 0 and high > 20 * low
        scales.append({"low": low, "high": high, "log": is_log})
        if is_log:
            values, low, high = np.log(values), math.log(low), math.log(high)
        places.append(np.minimum(((values - low) * (cells / ((high - low) or 1.0))).astype(np.intp), cells - 1))
    num = GRID[0] * GRID[1]
    cell = places[1] * GRID[0] + places[0] + num * feasible[alive]
    first = np.full(2 * num, -1, dtype=np.intp)
    first[cell[::-1]] = alive[::-1]
    counts = np.bincount(cell, minlength=2 * num)
    best = table.frontier(sure) if table.objectives() else np.empty(0, dtype=np.intp)
    best = best[np.isfinite(xs[best]) & np.isfinite(ys[best])]
    index = np.concatenate([first[first >= 0], np.setdiff1d(best, first)])
    shown = np.concatenate([counts[first >= 0], np.zeros(len(index) - int((first >= 0).sum()), dtype=np.intp)])
    is_best = np.zeros(len(table), dtype=bool)
    is_best[best] = True
    flags = feasible[index].astype(np.uint8) + 2 * is_best[index].astype(np.uint8)
    return index, shown, flags, scales


def packed(head: Mapping[str, Any], columns: Mapping[str, tuple[NDArray[Any], list[str] | None]]) -> bytes:
    """Four bytes of length, a header as JSON, then the columns, each from a multiple of eight bytes on."""
    names = [{"name": name, "type": values.dtype.str.lstrip("<|"), "words": words}
             for name, (values, words) in columns.items()]  # fmt: skip
    text = json.dumps({**head, "columns": names}).encode()
    text += b" " * (-(len(text) + 4) % 8)
    bodies = [values.tobytes() for values, _ in columns.values()]
    return b"".join([len(text).to_bytes(4, "little"), text, *(body + bytes(-len(body) % 8) for body in bodies)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which rows, and in what order."""

    where: Mapping[str, Any] = field(default_factory=dict)  # column → [low, high], or a list of words
    only: str = "feasible"  # all, feasible or frontier
    sort: str = ""
    down: bool = False


def chosen(table: Table, wanted: Wanted) -> NDArray[np.intp]:
    """Rows that match, in order; all of the study's points are looked at."""
    mask = np.ones(len(table), dtype=bool)
    if wanted.only == "feasible":
        mask = table.feasible().copy()
    elif wanted.only == "frontier":
        mask = np.zeros(len(table), dtype=bool)
        mask[table.frontier()] = True
    for name, limits in wanted.where.items():
        column = table.columns.get(name)
        if not isinstance(limits, list) or (column is None and len(limits) != 2):
            raise InputError(f"a filter of {name!r} is [low, high], or a list of words")
        if column is not None and column.words is not None:
            mask &= np.isin(column.values, [at for at, word in enumerate(column.words) if word in limits])
        else:
            values = table.value(name)
            low, high = (float(limit) if limit is not None else math.nan for limit in limits)
            mask &= ~(values < low) & ~(values > high) & ~np.isnan(values)
    found = np.flatnonzero(mask)
    if wanted.sort:
        column = table.columns.get(wanted.sort)
        values = table.value(wanted.sort)[found]
        if column is not None and column.words is not None:
            rank = np.argsort(np.argsort(np.array(column.words, dtype=str), kind="stable"), kind="stable")
            values = rank[values.astype(np.intp)].astype(np.float64)
        order = np.argsort(values * (-1.0 if wanted.down else 1.0), kind="stable")  # what is not known comes last
        found = found[order]
    return found


def rows(store: Store, tables: Tables, name: str, wanted: Wanted, start: int, limit: int) -> dict[str, Any]:
    """A part of the table."""
    with tables.lock:
        table = tables.table(store, name, lambda found: found.row.columns)
        index = chosen(table, wanted)
        shown = index[max(0, start) : max(0, start) + min(limit, 1000)]
        return {"total": len(index), "points": shown.tolist(), "names": list(table.row.columns),
                "rows": [[_plain(cell) for cell in row] for row in zip(*_cells(table, shown))]}  # fmt: skip


def point(store: Store, tables: Tables, name: str, number: int) -> dict[str, Any]:
    """One point with all of its columns."""
    with tables.lock:
        table = tables.table(store, name, lambda found: found.row.columns)
        if not 0 <= number < len(table):
            raise InputError(f"no point {number}: study {table.row.name!r} has {len(table):,}, counted from 0")
        cells = _cells(table, np.array([number]))
        return {**overview(table.row), "point": number, "axes": [a.name for a in table.spec.space.axes]
                if table.spec else [], "evaluator": table.spec.space.evaluator if table.spec else "",
                "values": {name: _plain(cell[0]) for name, cell in zip(table.row.columns, cells)}}  # fmt: skip


def spoken(table: Table, numbers: Sequence[int]) -> Study:
    """Some points of the study with their text as text, as its own package keeps them."""
    if table.spec is None:
        raise InputError(f"study {table.row.name!r} was made by another version, whose spec cannot be read here")
    index = np.asarray(numbers, dtype=np.intp)
    if index.min() < 0 or index.max() >= len(table):
        raise InputError(f"study {table.row.name!r} has {len(table):,} points, counted from 0")
    columns = zip(table.row.columns, _cells(table, index))
    return Study(table.spec, table.row, {name: np.array(cells) for name, cells in columns})


def csv_lines(store: Store, tables: Tables, name: str, wanted: Wanted) -> Iterator[str]:
    """The chosen points as CSV; text that a spreadsheet would compute is quoted."""
    with tables.lock:
        table = tables.table(store, name, lambda found: found.row.columns)
        index = chosen(table, wanted)

    def lines() -> Iterator[str]:
        yield _csv([["point", *(defused(column) for column in table.row.columns)]])
        for start in range(0, len(index), 16_384):
            part = index[start : start + 16_384]
            rows = zip(part.tolist(), *_cells(table, part))
            yield _csv([[defused(cell) if isinstance(cell, str) else cell for cell in row] for row in rows])

    return lines()


def _csv(lines: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(lines)
    return text.getvalue()


def _cells(table: Table, index: NDArray[np.intp]) -> list[list[Any]]:
    found = []
    for name in table.row.columns:
        column = table.columns[name]
        values = column.values[index].tolist()
        found.append([column.words[int(value)] for value in values] if column.words is not None else values)
    return found


def _plain(cell: Any) -> Any:
    return None if isinstance(cell, float) and not math.isfinite(cell) else cell


def matters(store: Store, tables: Tables, name: str) -> dict[str, dict[str, float]]:
    """Share of each objective's variance that each axis explains alone."""
    with tables.lock:
        table = tables.table(store, name, lambda found: [
            *(axis.name for axis in found.spec.space.axes if found.spec),
            *(n for o in found.objectives() for n in o["names"])] if found.spec else [])  # fmt: skip
        if "matters" not in table.made:
            table.made["matters"] = table.study().sensitivities() if table.spec else {}
        found: dict[str, dict[str, float]] = table.made["matters"]
        return found
