"""A table of results: named columns with units, rows of plain values; as CSV, as JSON, as a DataFrame."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.errors import InputError, nearest

Value = str | int | float | None
#: A spreadsheet would run a cell that begins with one of these.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under named columns; a column's name ends with the unit of its numbers (``_ms``, ``_bytes``, ``_frac``)."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    note: str = ""

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, name: str) -> list[Value]:
        if name not in self.columns:
            raise InputError(f"the table {self.name} has no column {name!r}{nearest(name, self.columns)}")
        at = self.columns.index(name)
        return [row[at] for row in self.rows]

    def top(self, num: int) -> Table:
        """The first rows."""
        return Table(self.name, self.columns, self.rows[:num], self.note)

    def to_dict(self) -> dict[str, Any]:
        return {
            "table": self.name,
            "columns": list(self.columns),
            "rows": [[None if _is_nan(value) else value for value in row] for row in self.rows],
            "note": self.note,
        }

    def to_csv(self) -> str:
        """Comma-separated text; cells that a spreadsheet would run as a formula begin with an apostrophe."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([[_cell(value) for value in row] for row in self.rows])
        return out.getvalue()

    def to_dataframe(self) -> Any:
        """The same as a pandas DataFrame."""
        try:
            import pandas
        except ImportError as error:
            raise InputError("to_dataframe() needs pandas: pip install pandas") from error
        return pandas.DataFrame(list(self.rows), columns=list(self.columns))


def _is_nan(value: Value) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _cell(value: Value) -> Value:
    if value is None or _is_nan(value):
        return ""
    if isinstance(value, str):
        text = "".join(char if char.isprintable() else " " for char in value)
        return f"'{text}" if value.startswith(_FORMULA) else text
    return value


def sorted_rows(rows: Sequence[tuple[Value, ...]], at: int) -> tuple[tuple[Value, ...], ...]:
    """Rows by one of their numbers, the largest first."""

    def key(row: tuple[Value, ...]) -> float:
        value = row[at]
        return -float(value) if isinstance(value, (int, float)) and not _is_nan(value) else math.inf

    return tuple(sorted(rows, key=key))
