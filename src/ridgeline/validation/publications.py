"""What other people ran their published measurements with: rows of ``data/publications``, checked when they are read.

A file has ``[sources]``, documents with their dates; ``[facts]``, what the conditions of a table may use; ``[tables]``.
A row of a table says ``when`` it holds, what it then ``set``s, and from which ``source`` that is known. A condition is
a value (``"vllm"``, ``8``, ``true``), a list of values, or a comparison: ``"!= 4"``, ``"> 64"``, ``"~ ^deepseek"`` for
a regular expression that is found, ``"!~ ^kimi"`` for one that is not. A value is taken as it is; a table of
coefficients is a linear form of facts, as in ``{ isl = 2, at_least = 2048 }`` (also ``plus`` and ``multiple_of``).
"""

from __future__ import annotations

import math
import operator
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ridgeline.errors import InputError, nearest
from ridgeline.resources import data_dir

Fact = str | float | bool
Compare = Callable[[Any, Any], bool]
COMPARE: Mapping[str, Compare] = {
    ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "!=": operator.ne, "==": operator.eq,
    "~": lambda fact, pattern: pattern.search(fact) is not None, "!~": lambda fact, pattern: not pattern.search(fact),
    "in": lambda fact, values: fact in values,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setting:
    """One row: the facts it needs, and the values it then sets."""

    when: tuple[tuple[str, Compare, Any], ...]
    values: Mapping[str, Any]
    source: str

    def holds(self, facts: Mapping[str, Fact]) -> bool:
        return all(compare(facts[name], wanted) for name, compare, wanted in self.when)


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of one table, in the order in which they are tried."""

    name: str
    rows: tuple[Setting, ...]

    def choose(self, facts: Mapping[str, Fact]) -> dict[str, Any]:
        """What the rows that hold set; the first that sets a name decides it. Later rows may use values as facts."""
        found: dict[str, Any] = {}
        for row in self.rows:
            if any(name not in found for name in row.values) and row.holds(facts):
                for name, value in row.values.items():
                    found.setdefault(name, _linear(value, {**facts, **found}) if isinstance(value, dict) else value)
        return found


@cache
def publications(file: str) -> Mapping[str, Table]:
    """The tables of ``data/publications/<file>.toml``."""
    path = data_dir() / "publications" / f"{file}.toml"
    try:
        return _checked(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, tomllib.TOMLDecodeError, InputError) as error:
        raise InputError(f"{path.name} cannot be read: {error}") from None


def _checked(content: dict[str, Any]) -> dict[str, Table]:
    sources = content.pop("sources", {})
    for name, source in sources.items():
        if set(source) != {"what", "date"} or not re.fullmatch(r"\d{4}(-\d\d)?(-\d\d)?(/.*)?", source["date"]):
            raise InputError(f"source {name!r} needs what it is and a date, as in 2026-04")
    facts, tables = content.pop("facts", {}), content.pop("tables", {})
    if content or set(facts) != set(tables):
        odd = sorted(set(content) | set(facts) ^ set(tables))
        raise InputError(f"{', '.join(odd)}: a file has sources, facts and tables, and facts for every table")
    return {name: Table(name, tuple(_row(f"{name}[{at}]", row, sources, facts[name]) for at, row in enumerate(rows)))
            for name, rows in tables.items()}  # fmt: skip


def _row(where: str, row: Mapping[str, Any], sources: Mapping[str, Any], facts: Sequence[str]) -> Setting:
    if not {"set", "source"} <= set(row) <= {"when", "set", "source"}:
        raise InputError(f"{where} has {', '.join(row)}: a row has set and source, and may have when")
    if row["source"] not in sources:
        raise InputError(f"{where} names the source {row['source']!r}{nearest(row['source'], sources)}")
    when = [(name, *_condition(f"{where}, {name}", wanted)) for name, wanted in row.get("when", {}).items()]
    forms = [value for value in row["set"].values() if isinstance(value, dict)]
    used = [name for name, *_ in when] + [name for form in forms for name in form if name not in FORM_WORDS]
    if unknown := [name for name in used if name not in facts]:
        raise InputError(f"{where} depends on {unknown[0]!r}{nearest(unknown[0], facts)}")
    return Setting(tuple(when), row["set"], row["source"])


def _condition(where: str, wanted: Any) -> tuple[Compare, Any]:
    if not isinstance(wanted, str):
        return COMPARE["in" if isinstance(wanted, list) else "=="], wanted
    sign, _, operand = wanted.partition(" ")
    if sign not in COMPARE:
        return COMPARE["=="], wanted
    if sign not in ("~", "!~"):
        return COMPARE[sign], float(operand) if re.fullmatch(r"[\d.]+(e\d+)?", operand) else operand
    try:
        return COMPARE[sign], re.compile(operand)
    except re.error as error:
        raise InputError(f"{where} is no regular expression: {operand!r} ({error})") from None


FORM_WORDS = ("plus", "multiple_of", "at_least")


def _linear(form: Mapping[str, int | float], facts: Mapping[str, Any]) -> int:
    value = math.floor(sum(coef * facts[name] for name, coef in form.items() if name not in FORM_WORDS))
    multiple = form.get("multiple_of", 1)
    return int(max(-(-(value + form.get("plus", 0)) // multiple) * multiple, form.get("at_least", 0)))
