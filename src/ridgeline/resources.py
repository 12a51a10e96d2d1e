"""Where the data files live, installed or in a checkout."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def data_dir() -> Path:
    """The folder with ``devices/``, ``calibrations/`` and ``recordings/``."""
    here = Path(__file__).resolve().parent
    for candidate in (here / "data", here.parent.parent / "data"):
        if (candidate / "devices").is_dir():
            return candidate
    raise FileNotFoundError("Ridgeline's data folder is missing: reinstall the package")
