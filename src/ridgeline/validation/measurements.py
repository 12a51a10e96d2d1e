"""Measured operators as people hand them over: a CSV file with one call a line."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping
from pathlib import Path

from ridgeline.errors import InputError, nearest

REQUIRED = ("kind", "dtype", "phase", "library", "shape", "measured_s")
OPTIONAL = ("cache",)
MAX_BYTES = 1 << 28


def read_measurements(path: str | os.PathLike[str]) -> list[tuple[int, Mapping[str, str]]]:
    """(line, columns) of every row; a file without the required columns is an error, a bad row is judged later."""
    header, rows = read_table(path)
    source = Path(path)
    missing = [name for name in REQUIRED if name not in header]
    if missing:
        known = nearest(missing[0], header) if header else "; the file is empty"
        raise InputError(
            f"{source} has no column {missing[0]!r}{known} "
            f"(needed: {', '.join(REQUIRED)}; optional: {', '.join(OPTIONAL)})"
        )
    twice = {name for name in header if header.count(name) > 1 and name in REQUIRED + OPTIONAL}
    if twice:
        raise InputError(f"{source} has the column {sorted(twice)[0]!r} twice: keep one")
    return rows


def read_table(path: str | os.PathLike[str]) -> tuple[list[str], list[tuple[int, Mapping[str, str]]]]:
    """The header of a CSV file, and (line, columns) of every row."""
    source = Path(path)
    try:
        if source.stat().st_size > MAX_BYTES:
            raise InputError(f"{source} is larger than {MAX_BYTES:,} bytes: split it, or hand over a sample")
        text = source.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"cannot read {source}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise InputError(f"{source} is not text: hand over a CSV file with the columns {', '.join(REQUIRED)}") from None
    return _rows(text, source)


def _rows(text: str, source: Path) -> tuple[list[str], list[tuple[int, Mapping[str, str]]]]:
    reader = csv.reader(io.StringIO(text, newline=""))  # a quoted cell may hold a line break
    try:
        header = [name.strip().lower() for name in next(reader, [])]
        return header, [
            (reader.line_num, _record(header, cells)) for cells in reader if any(cell.strip() for cell in cells)
        ]
    except csv.Error as error:
        raise InputError(f"{source}, line {reader.line_num}: {error}; write plain comma-separated values") from None


def _record(header: list[str], cells: list[str]) -> dict[str, str]:
    """Columns by name; what a short line lacks is empty, and judged as such."""
    padded = cells + [""] * (len(header) - len(cells))
    return {name: cell.strip() for name, cell in zip(header, padded, strict=False)}
