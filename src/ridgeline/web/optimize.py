"""A receipt of ``optimize`` as one HTML file: the way from eager to the result, what was rejected, and what is left."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ridgeline.errors import InputError
from ridgeline.web.report import page


def write_receipt(receipt: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write the page; ``receipt`` is ``fast.receipt.to_dict()``, or the same read from JSON."""
    target = Path(path)
    try:
        target.write_text(render_receipt(receipt), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}; choose a folder you may write to") from error
    return target


def render_receipt(receipt: Mapping[str, Any]) -> str:
    """The page as text."""
    title = f"{receipt['model']} optimized on {receipt['device']} · Ridgeline"
    return page(title, "optimize", dict(receipt))
