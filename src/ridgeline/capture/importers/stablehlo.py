"""StableHLO modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ridgeline.errors import ModelFileError


def load_stablehlo(path: Path, **_: Any) -> Any:
    """The program of a file."""
    raise ModelFileError(f"{path.name} is StableHLO, which is not imported yet: convert it with jax2tf and tf2onnx")
