"""``ridgeline predict``: build or capture the graph, predict it on every device asked for, and show it."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ridgeline.api import predict
from ridgeline.cli.keep import chosen, graph_settings, keep
from ridgeline.cli.rates import rate_of
from ridgeline.cli.source import graph_of
from ridgeline.cost.analyses.utilization import utilization
from ridgeline.cost.prediction import Prediction
from ridgeline.errors import InputError, nearest

KEYS = ("op", "module", "phase", "bound", "kernel", "basis")


@dataclass(frozen=True, slots=True)
class Wish:
    """Everything that was asked for on the command line."""

    model: str
    devices: tuple[str, ...]
    options: Mapping[str, Any]
    further: tuple[str, ...]
    execution: str
    by: str
    top: int
    json: bool
    html: Path | None
    trace: Path | None


def predict_and_show(wish: Wish) -> None:
    """Print JSON or tables, and write the files that were asked for."""
    if wish.by not in KEYS:
        raise InputError(f"cannot break down by {wish.by!r}{nearest(wish.by, KEYS)}")
    graph = graph_of(wish.model, wish.options, wish.further)
    predictions = [predict(graph, on=device, execution=wish.execution) for device in wish.devices]
    if wish.json:
        from ridgeline.cli.draw import print_json

        documents = [document(p) for p in predictions]
        print_json(documents[0] if len(documents) == 1 else {"predictions": documents})
    else:
        from ridgeline.cli.prediction_view import show

        show(predictions, wish.by, wish.top)
    for prediction in predictions if chosen() else ():
        keep("predict", wish.model, partial(document, prediction), device=prediction.device.name,
             settings=graph_settings(graph, wish.options, wish.execution), subject_hash=graph.content_hash,
             quiet=wish.json)  # fmt: skip
    for prediction in predictions:
        # Files go where they were asked for; of several devices, each has its name in the file's
        alone = len(predictions) == 1
        if wish.html:
            from ridgeline.web import write_report

            rate = rate_of(prediction)
            path = write_report(
                prediction, _named(wish.html, prediction, alone), (rate.unit, rate.per_s) if rate else None
            )
            print(f"report: {path}", file=sys.stderr)
        if wish.trace:
            from ridgeline.trace import write_chrome

            made = prediction.trace()
            path = write_chrome(made, _named(wish.trace, prediction, alone))
            print(f"trace: {path}, open it at https://ui.perfetto.dev", file=sys.stderr)
            for note in made.notes:
                print(f"trace: {note}", file=sys.stderr)


def document(prediction: Prediction) -> dict[str, Any]:
    """What ``--json`` prints: the prediction, its rate and its utilization."""
    rate = rate_of(prediction)
    return {
        **prediction.to_dict(),
        "rate": asdict(rate) if rate else None,
        "utilization": asdict(utilization(prediction)),
    }


def _named(path: Path, prediction: Prediction, alone: bool) -> Path:
    device = re.sub(r"[^A-Za-z0-9.+-]+", "-", prediction.device.name)
    return path if alone else path.with_name(f"{path.stem}-{device}{path.suffix}")
