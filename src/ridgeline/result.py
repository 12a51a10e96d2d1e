"""What every result of a verb can do: say itself in a line, as JSON, as an HTML table in a notebook, as a DataFrame."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping
from typing import Any


class Result:
    """A mixin; the class has ``summary()``, ``records()`` (the rows of its main table) and ``to_dict()``."""

    __slots__ = ()

    def summary(self) -> str:
        """The result in a line."""
        raise NotImplementedError

    def records(self) -> Iterable[Mapping[str, Any]]:
        """The rows of the result's main table, in SI units."""
        raise NotImplementedError

    def to_dict(self) -> Mapping[str, Any]:
        raise NotImplementedError

    def to_json(self) -> str:
        """Everything, in SI units."""
        return json.dumps(self.to_dict(), allow_nan=False)

    def to_dataframe(self) -> Any:
        """The main table as a pandas DataFrame."""
        try:
            import pandas
        except ImportError:
            from ridgeline.errors import InputError

            raise InputError("a DataFrame needs pandas: pip install pandas, or use .records()") from None
        return pandas.DataFrame([dict(row) for row in self.records()])

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.summary()}>"

    def _repr_html_(self) -> str:
        rows = [dict(row) for _, row in zip(range(12), self.records(), strict=False)]
        names = list(rows[0]) if rows else []
        head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
        body = "".join("<tr>" + "".join(f"<td>{_cell(row[name])}</td>" for name in names) + "</tr>" for row in rows)
        return (
            f"<b>{html.escape(self.summary())}</b><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        )


def _cell(value: Any) -> str:
    return html.escape(f"{value:.4g}" if isinstance(value, float) else str(value))
