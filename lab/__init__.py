"""What measures, fits, races and plants for Ridgeline; not part of the wheel, and never imported by the package.

From the root of a checkout: ``python -m lab.fit``, ``lab.record``, ``lab.race``, ``lab.optimize``, ``lab.kernelbench``,
``lab.planted`` and ``lab.notes`` list their commands.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The checkout."""

if importlib.util.find_spec("ridgeline") is None:  # a GPU host runs the tree as it was copied there
    sys.path.insert(0, str(ROOT / "src"))
