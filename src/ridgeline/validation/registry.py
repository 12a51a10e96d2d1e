"""Which published file is which, by its header, and the module that judges its rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from ridgeline.errors import InputError
from ridgeline.validation.measurements import read_table
from ridgeline.validation.verdict import Judged, PublishedCheck, Row, Unused

Judge = Callable[[Sequence[Row]], Iterable[Judged | Unused]]
UNTHOUGHT = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""What a strange row may raise inside a model that never met its like."""


@dataclass(frozen=True, slots=True)
class Published:
    """A kind of file: columns that only it has, and the module whose ``judge(rows)`` turns rows into verdicts."""

    name: str
    columns: frozenset[str]
    module: str

    def judge(self) -> Judge:
        if find_spec(self.module) is None:
            raise InputError(f"files of the kind {self.name} cannot be judged yet: {self.module} is missing")
        found: Judge = import_module(self.module).judge
        return found


def _published(name: str, columns: str) -> Published:
    return Published(name, frozenset(columns.split()), f"ridgeline.validation.{name}")


PUBLISHED = (
    _published("collectives", "collective device num_devices message_bytes time_us busbw_gbps"),
    _published("training_llm", "model layers hidden device num_devices tp pp dp mbs gbs metric value"),
    _published("inference_llm", "model device tp isl osl batch engine scenario metric value"),
    _published("serving_ttft_tpot", "backend model_path system mode isl osl silicon_ttft_ms silicon_tpot_ms"),
    _published("training_other", "model task device num_devices per_device_batch global_batch framework metric value"),
    _published("inference_other", "model task input device batch engine scenario metric value"),
)


def published_kind(path: str | os.PathLike[str]) -> Published | None:
    """The kind of published file that ``path`` is, by its header; None for anything else."""
    header = frozenset(read_table(path)[0])
    return next((kind for kind in PUBLISHED if kind.columns <= header), None)


def check_published(path: str | os.PathLike[str]) -> PublishedCheck:
    """Judge every row of a published file; each row ends among the judged or, with its reason, among the unused."""
    header, records = read_table(path)
    kind = next((kind for kind in PUBLISHED if kind.columns <= frozenset(header)), None)
    if kind is None:
        raise InputError(f"{path} is none of the published files: {', '.join(kind.name for kind in PUBLISHED)}")
    rows = [Row(line, record) for line, record in records]
    verdicts = _verdicts(kind.judge(), rows)
    return PublishedCheck(
        name=Path(path).name,
        rows=tuple(found for found in verdicts if isinstance(found, Judged)),
        unused=tuple(found for found in verdicts if isinstance(found, Unused)),
    )


def check_rows(name: str, rows: Sequence[Row]) -> list[Judged | Unused]:
    """Verdicts of rows that are known to be of the kind ``name``."""
    return _verdicts(next(kind for kind in PUBLISHED if kind.name == name).judge(), rows)


def _verdicts(judge: Judge, rows: Sequence[Row]) -> list[Judged | Unused]:
    """Verdicts of all rows; where one holds what nobody thought of, row by row, and that one is set aside."""
    try:
        return list(judge(rows))
    except UNTHOUGHT:
        return [verdict for row in rows for verdict in _alone(judge, row)]


def _alone(judge: Judge, row: Row) -> list[Judged | Unused]:
    try:
        return list(judge([row]))
    except UNTHOUGHT as error:
        why = f"its columns cannot be judged together ({type(error).__name__}: {error})"
        return [Unused(row=row.line, source=row.text("source"), why=why)]
