"""The error tree: every mistake a user can make ends here, saying what, where and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RidgelineError(Exception):
    """Base of everything Ridgeline raises on purpose; the command line prints it without a traceback."""


class UnitError(RidgelineError):
    """A quantity that cannot be read."""


class GraphError(RidgelineError):
    """A graph that is not well formed."""


class CaptureError(RidgelineError):
    """A model that could not be captured."""


class HardwareError(RidgelineError):
    """A device that is unknown, malformed or overridden in an impossible way."""


class CostError(RidgelineError):
    """Something that cannot be priced."""


class CalibrationError(RidgelineError):
    """A calibration that is missing, malformed or does not fit the device."""


class ModelError(RidgelineError):
    """A network of the zoo that is unknown or asked for with impossible options."""


class PlanError(RidgelineError):
    """A parallel plan that cannot be: impossible for the model, the cluster or the graph."""


class InputError(RidgelineError):
    """A file or option a person handed over that cannot be used."""


class ModelFileError(InputError):
    """A model file that cannot be imported: damaged, of an unknown format, or with what no importer supports."""


class FindingError(RidgelineError):
    """A trace that cannot be explained, compared or gated as asked."""


class KernelError(RidgelineError):
    """A primitive called with what it does not support, or a kernel that cannot be built or loaded."""


class OptimizeError(RidgelineError):
    """A model that cannot be optimized as asked, or an unknown rewrite, compiler or candidate."""


class EngineError(RidgelineError):
    """An engine that cannot be built, read, trusted, refitted or called as asked."""


class NotGraphable(OptimizeError):
    """A call that cannot be recorded as a CUDA graph and replayed with the same results; says why."""


class MissingExtra(RidgelineError):
    """An optional library is needed and not installed."""

    def __init__(self, library: str, extra: str, needed_for: str) -> None:
        super().__init__(f"{needed_for} needs {library}: pip install 'ridgeline[{extra}]'")


def nearest(word: str, known: Iterable[str], *, num: int = 3) -> str:
    """A ready-made ``; did you mean …?`` for an unknown word, or the first few known ones."""
    choices = sorted(set(known))
    lowered = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(word.lower(), list(lowered), n=num, cutoff=0.5)
    if close:
        return "; did you mean " + " or ".join(repr(lowered[c]) for c in close) + "?"
    shown = ", ".join(choices[:12]) + (", …" if len(choices) > 12 else "")
    return f"; known: {shown}" if choices else ""
