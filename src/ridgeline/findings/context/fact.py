"""What somebody wrote into a trace beside its spans, taken for no more than it is."""

from __future__ import annotations

from typing import Any


def positive(value: Any) -> float | None:
    """A finite number above nothing; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e18:
        return None
    return float(value)
