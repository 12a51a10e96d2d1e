"""A prediction as one HTML file: data, style and script inside, nothing fetched, nothing in it ever read as markup."""

from __future__ import annotations

import html
import json
import os
from pathlib import Path
from typing import Any

from ridgeline.cost.prediction import Prediction
from ridgeline.errors import InputError
from ridgeline.web.data import report_data

_ASSETS = Path(__file__).resolve().parent / "assets"
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
{body}
<script type="application/json" id="data">{data}</script>
<script>
{script}
</script>
</body>
</html>
"""


def write_report(prediction: Prediction, path: str | os.PathLike[str], rate: tuple[str, float] | None = None) -> Path:
    """Write the report; ``rate`` is what the step yields, such as ``("tokens", 41_000.0)`` a second."""
    target = Path(path)
    try:
        target.write_text(render_report(prediction, rate), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}; choose a folder you may write to") from error
    return target


def render_report(prediction: Prediction, rate: tuple[str, float] | None = None) -> str:
    """The report as text."""
    title = f"{prediction.graph.name} on {prediction.device.name} · Ridgeline"
    return page(title, "report", report_data(prediction, rate))


def page(title: str, stem: str, data: Any) -> str:
    """One file: the assets called ``stem`` around ``data``."""
    return PAGE.format(
        policy=html.escape(POLICY),
        title=html.escape(title),
        style=asset("report.css"),
        body=asset(f"{stem}.html"),
        data=embedded(data),
        script=asset(f"{stem}.js"),
    )


def asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def embedded(document: Any) -> str:
    """JSON that cannot end the script element it stands in, whatever the names in it are."""
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text
