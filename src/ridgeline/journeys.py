"""The verbs, each short enough to be the documentation."""

from __future__ import annotations

from typing import Any

from ridgeline.cost.estimate import estimate
from ridgeline.cost.prediction import Prediction
from ridgeline.errors import InputError
from ridgeline.graph import Graph
from ridgeline.hardware import Device
from ridgeline.hardware import device as device_named
from ridgeline.models import build


def predict(model: Graph | str, on: str | Device = "h200", execution: str = "eager", **options: Any) -> Prediction:
    """How long one step takes, what bounds it, and what it needs in memory, energy and money.

    ``model`` is a captured graph or a name of the zoo; for a name, ``options`` are the zoo's (batch, seq, mode,
    precision, …). ``on`` is a device's name, with overrides if you like: ``"h200 hbm_bandwidth=2x"``.
    """
    if isinstance(model, Graph) and options:
        raise InputError(f"{', '.join(options)}: a captured graph has its sizes already; options are for names of the zoo")
    if not isinstance(model, (Graph, str)):
        raise InputError(f"predict takes a graph or a zoo name, not {type(model).__name__}: capture the model first with ridgeline.capture(model, args=…)")
    graph = build(model, **options) if isinstance(model, str) else model
    return estimate(graph, device_named(on), execution)
