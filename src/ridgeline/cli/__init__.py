"""The command line: ``ridgeline predict``, ``devices``, ``models``, ``calibrate`` and ``validate``."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and leave with its exit code."""
    from ridgeline.cli.app import run

    sys.exit(run(sys.argv[1:] if argv is None else list(argv)))
