"""The note on training steps says what was recorded, and recorded steps did not drift."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from optimize_train import _table

NOTE = (ROOT / "benchmarks" / "2026-11-15-optimize-train.md").read_text(encoding="utf-8")
RECORDING = ROOT / "data" / "recordings" / "h200" / "optimize_train_1.json.gz"


def _parts() -> dict[str, Any]:
    with gzip.open(RECORDING, "rt", encoding="utf-8") as file:
        return json.load(file)["parts"]


def test_the_note_holds_every_row_of_the_recording() -> None:
    for line in _table(RECORDING):
        assert line in NOTE


def test_recorded_steps_are_eager_steps_to_the_last_bit() -> None:
    trails = _parts()["drift"]["trails"]
    assert len(trails["eager"]) == 50 and trails["recorded"] == trails["eager again"] == trails["eager"]
    assert trails["nudged"] != trails["eager"]


def test_what_was_kept_was_proved_and_fits_in_memory() -> None:
    receipts = [found["receipt"] for found in _parts().values() if "receipt" in found]
    assert receipts and all(receipt["verdict"]["ok"] for receipt in receipts)
    for found in _parts().values():
        peaks = found.get("peak_bytes") or {}
        assert not peaks or peaks["result"][0] <= peaks["eager"][0]
