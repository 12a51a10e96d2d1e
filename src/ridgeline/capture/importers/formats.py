"""Which importer reads a file: by what is in it, not by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ridgeline.errors import ModelFileError

Reader = Callable[..., Any]


def reader_of(path: Path) -> Reader:
    """The importer of a file or folder."""
    from ridgeline.capture.importers.onnx import load_onnx

    if path.is_dir():
        raise ModelFileError(f"{path} is a folder without a model that is known here")
    return load_onnx
