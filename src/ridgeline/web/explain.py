"""An explanation as one HTML file: data, style and script inside, nothing fetched, nothing in it ever read as
markup."""

from __future__ import annotations

import html
import os
from pathlib import Path

from ridgeline.errors import InputError
from ridgeline.findings.explanation import Explanation
from ridgeline.web.explain_data import explanation_data
from ridgeline.web.report import PAGE, POLICY, asset, embedded


def write_explanation(found: Explanation, path: str | os.PathLike[str]) -> Path:
    """Write the report."""
    target = Path(path)
    try:
        target.write_text(render_explanation(found), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}; choose a folder you may write to") from error
    return target


def render_explanation(found: Explanation) -> str:
    """The report as text."""
    return PAGE.format(
        policy=html.escape(POLICY),
        title=html.escape(f"{found.title} explained · Ridgeline"),
        style=asset("report.css") + asset("explain.css"),
        body=asset("explain.html"),
        data=embedded(explanation_data(found)),
        script=asset("explain.js"),
    )
