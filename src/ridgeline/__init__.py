"""Ridgeline: how fast can your model run, how fast does it run, why is there a gap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ridgeline.entry import announce

if TYPE_CHECKING:
    from ridgeline import llm
    from ridgeline.api import (
        apply,
        build,
        diff,
        explain,
        gate,
        link,
        optimize,
        plans,
        predict,
        price,
        profile,
        revert,
        serve,
        simulate,
        what_if,
    )
    from ridgeline.capture import capture, cost_of, decode_kwargs, spec
    from ridgeline.capture.importers import load
    from ridgeline.cost.prediction import Prediction, Row
    from ridgeline.engine.file.engine import Engine
    from ridgeline.findings.diff import Difference
    from ridgeline.findings.explanation import Explanation
    from ridgeline.findings.finding import Finding
    from ridgeline.graph import Graph, save
    from ridgeline.hardware import Cluster, Device, device, devices
    from ridgeline.models import models
    from ridgeline.plan import Plan
    from ridgeline.study import study
    from ridgeline.study.space import Space
    from ridgeline.trace import Trace

__version__ = "0.1.0"
announce()

_NAMES = {
    "ridgeline.capture": ("capture", "cost_of", "decode_kwargs", "spec"),
    "ridgeline.capture.importers": ("load",),
    "ridgeline.cost.prediction": ("Prediction", "Row"),
    "ridgeline.graph": ("Graph", "save"),
    "ridgeline.hardware": ("Cluster", "Device", "device", "devices"),
    "ridgeline.findings.diff": ("Difference",),
    "ridgeline.findings.explanation": ("Explanation",),
    "ridgeline.findings.finding": ("Finding",),
    "ridgeline.plan": ("Plan",),
    "ridgeline.trace": ("Trace",),
    "ridgeline.api": (
        "apply", "build", "diff", "explain", "gate", "link", "optimize",
        "plans", "predict", "price", "profile", "revert", "serve", "simulate", "what_if",
    ),
    "ridgeline.models": ("models",),
    "ridgeline.engine.file.engine": ("Engine",),
    "ridgeline.study": ("Space", "study"),
}
_HOME = {name: home for home, names in _NAMES.items() for name in names}
__all__ = [
    "Cluster",
    "Device",
    "Difference",
    "Engine",
    "Explanation",
    "Finding",
    "Graph",
    "Plan",
    "Prediction",
    "Row",
    "Space",
    "Trace",
    "__version__",
    "apply",
    "build",
    "capture",
    "cost_of",
    "decode_kwargs",
    "device",
    "devices",
    "diff",
    "explain",
    "gate",
    "link",
    "llm",
    "load",
    "models",
    "optimize",
    "plans",
    "predict",
    "price",
    "profile",
    "revert",
    "save",
    "serve",
    "simulate",
    "spec",
    "study",
    "what_if",
]


def __getattr__(name: str) -> Any:
    """Names are loaded when first used, so that ``import ridgeline`` costs next to nothing."""
    from importlib import import_module

    if name == "llm":
        return import_module("ridgeline.llm")
    if name not in _HOME:
        raise AttributeError(f"module 'ridgeline' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
