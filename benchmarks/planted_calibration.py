"""What an interval needs beside the noise of its steps: from what rules promised before they had seen a case.

    python benchmarks/planted_calibration.py [--wanted 0.86]

Reads ``blind.json`` of every suite (what was promised by rules frozen before it ran) and its measured gains. The score
of a case is how far its gain lies past the nearer end, as a share of that end, once the spread of its steps is allowed;
split-conformal: the smallest score that as many cases as wanted stay under, for all rules and by family.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ridgeline.findings.calibration import HOST_RULES, NOISE
from ridgeline.findings.score import NAMES
from ridgeline.profiler.recordings import Planted, planted_cases, planted_folder, second_fixes

SUITES = (
    *("fresh", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh", "twelfth"),
    *("thirteenth", "fifteenth", "seventeenth", "eighteenth", "nineteenth"),
)
ALLOWED = {"f3bd770": 0.5, "447759c": 0.5}
"""Of the spread, already in what those rules promised; later ones have all of it and their slack."""
PRIOR = 20
"""Cases that the common score counts for beside a family's own."""


@dataclass(frozen=True, slots=True)
class Promise:
    case: Planted
    low_ms: float
    high_ms: float
    allowed: float

    @property
    def of_host(self) -> bool:
        return bool(set(NAMES[self.case.cause]) & set(HOST_RULES))

    @property
    def score(self) -> float:
        """Past the nearer end, as a share of it; negative inside."""
        spread_ms, gain_ms = self.case.planted.spread_s * 1e3, self.case.gain_s * 1e3
        noise_ms = max(0.0, NOISE - self.allowed) * spread_ms
        above = (gain_ms - self.high_ms - noise_ms) / self.high_ms if self.high_ms > 0 else math.inf
        if self.low_ms > 0:
            return max(above, (self.low_ms - noise_ms - gain_ms) / self.low_ms)
        return above if gain_ms >= -spread_ms else math.inf  # nothing was promised for sure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wanted", type=float, default=0.86)
    wanted = parser.parse_args().wanted
    found = [promise for suite in SUITES for promise in promises(planted_folder(suite=suite))]
    common = quantile([promise.score for promise in found], wanted)
    print(f"{len(found)} blind promises; {_held(found, 0.0)} hold with the noise alone, "
          f"{_held(found, common)} with a slack of {common:.3f} of the end")  # fmt: skip
    for name, chosen in (("host", True), ("device", False)):
        own = [promise for promise in found if promise.of_host is chosen]
        alone = min(quantile([promise.score for promise in own], wanted), 1.0)
        shrunk = (len(own) * max(0.0, alone) + PRIOR * common) / (len(own) + PRIOR)
        print(f"{name}: {len(own)} promises, {_held(own, 0.0)} with the noise alone, slack {alone:.3f} alone, "
              f"{shrunk:.3f} shrunk")  # fmt: skip
    for promise in sorted(found, key=lambda promise: -promise.score)[:12]:
        print(f"  {promise.case.name:32} {promise.low_ms:8.2f} to {promise.high_ms:8.2f}, realized "
              f"{promise.case.gain_s * 1e3:8.2f}, score {promise.score:.3f}")  # fmt: skip


def quantile(scores: Sequence[float], wanted: float) -> float:
    """The score that a next case stays under with the wanted chance, if cases are alike."""
    place = min(len(scores), math.ceil((len(scores) + 1) * wanted))
    return sorted(scores)[place - 1]


def _held(promises: Sequence[Promise], slack: float) -> str:
    return f"{sum(promise.score <= slack for promise in promises)} of {len(promises)}"


def promises(folder: Path) -> list[Promise]:
    file = folder / "blind.json"
    if not file.exists():
        return []
    document = json.loads(file.read_text(encoding="utf-8"))
    others = [planted_folder(suite=name) for name in ("planted", *SUITES)]
    cases = {case.name: case for case in (*planted_cases(folder), *second_fixes(folder, *others))}
    made = [document, *([document["later"]] if "later" in document else [])]
    return [
        Promise(cases[name], low, high, ALLOWED.get(part["rules"], NOISE))
        for part in made
        for name, (low, high) in part["promised_ms"].items()
    ]


if __name__ == "__main__":
    main()
