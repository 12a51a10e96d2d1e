"""What an interval needs beside the noise of its steps: from what rules promised before they had seen a case.

    python -m lab.planted.interval_slack [--wanted 0.86]

Reads ``blind.json`` of every suite (what was promised by rules frozen before it ran) and its measured gains. The score
of a case is how far its gain lies past the nearer end, as a share of that end, once the spread of its steps is allowed;
split-conformal: the smallest score that as many cases as wanted stay under, for all rules and by family.

Then upper ends: how many gains that count (5 % of the step and three times what it varies by) lie inside as promised,
with what rules add to their upper ends now, and, leaving out each suite in turn, with what the others would have added.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.planted.recordings import InjectedCase, injected_cases, second_fixes, suite_folder, suites
from lab.planted.score import NAMES
from ridgeline.findings.replay.calibration import NOISE
from ridgeline.findings.rule import rule_named

ALLOWED = {"f3bd770": 0.5, "447759c": 0.5}
"""Of the spread, already in what those rules promised; later ones have all of it and their slack."""
FEW = 8
PRIOR = 20
"""Cases that the common score counts for beside a family's own."""


@dataclass(frozen=True, slots=True)
class Promise:
    case: InjectedCase
    low_ms: float
    high_ms: float
    allowed: float
    suite: str = ""

    @property
    def counts(self) -> bool:
        """Whether the fix brought 5 % of the step, and three times what both vary by."""
        return self.case.gain_s >= max(0.05 * self.case.injected.median_s, 3 * self.case.uncertainty_s)

    @property
    def above(self) -> float:
        """Past the upper end, as a share of it."""
        return max(0.0, self.case.gain_s * 1e3 / max(self.high_ms, 1e-3) - 1.0)

    @property
    def of_host(self) -> bool:
        return any(rule_named(name).saves == "host" for name in NAMES[self.case.cause])

    @property
    def score(self) -> float:
        """Past the nearer end, as a share of it; negative inside."""
        spread_ms, gain_ms = self.case.injected.spread_s * 1e3, self.case.gain_s * 1e3
        noise_ms = max(0.0, NOISE - self.allowed) * spread_ms
        above = (gain_ms - self.high_ms - noise_ms) / self.high_ms if self.high_ms > 0 else math.inf
        if self.low_ms > 0:
            return max(above, (self.low_ms - noise_ms - gain_ms) / self.low_ms)
        return above if gain_ms >= -spread_ms else math.inf  # nothing was promised for sure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wanted", type=float, default=0.86)
    wanted = parser.parse_args().wanted
    found = [promise for suite in suites() for promise in promises(suite_folder(suite))]
    common = quantile([promise.score for promise in found], wanted)
    print(f"{len(found)} blind promises; {_held(found, 0.0)} hold with the noise alone, "
          f"{_held(found, common)} with a slack of {common:.3f} of the end")  # fmt: skip
    for name, chosen in (("host", True), ("device", False)):
        own = [promise for promise in found if promise.of_host is chosen]
        alone = min(quantile([promise.score for promise in own], wanted), 1.0)
        shrunk = (len(own) * max(0.0, alone) + PRIOR * common) / (len(own) + PRIOR)
        print(f"{name}: {len(own)} promises, {_held(own, 0.0)} with the noise alone, slack {alone:.3f} alone, "
              f"{shrunk:.3f} shrunk")  # fmt: skip
    print_upper_ends([promise for promise in found if promise.counts])
    for promise in sorted(found, key=lambda promise: -promise.score)[:12]:
        print(f"  {promise.case.name:32} {promise.low_ms:8.2f} to {promise.high_ms:8.2f}, realized "
              f"{promise.case.gain_s * 1e3:8.2f}, score {promise.score:.3f}")  # fmt: skip


def print_upper_ends(found: Sequence[Promise]) -> None:
    """As promised, with what is added now, and with what the other suites would have added."""
    found = [promise for promise in found if NAMES[promise.case.cause]]
    now = [rule_named(NAMES[promise.case.cause][0]).more_at_best for promise in found]
    others = [_added([promise for promise in found if promise.suite != one.suite], one) for one in found]
    for word, more in (("as promised", [0.0] * len(found)), ("as now", now), ("left out by suite", others)):
        ends = [min(max(p.high_ms, p.case.injected.median_s * 1e3), (1 + m) * p.high_ms) for p, m in zip(found, more)]
        gains = [promise.case.gain_s * 1e3 for promise in found]
        inside = sum(p.low_ms <= gain <= end for p, gain, end in zip(found, gains, ends))
        width = statistics.median((end - p.low_ms) / gain for p, gain, end in zip(found, gains, ends))
        print(
            f"upper ends {word}: {inside} of {len(found)} gains that count inside, median width {width:.2f} of the gain"
        )


def _added(known: Sequence[Promise], one: Promise) -> float:
    """What nine in ten gains of the same cause lie past their upper end by at most, shrunk to those of its family."""
    family = min(0.3, quantile([promise.above for promise in known if promise.of_host is one.of_host], 0.9))
    own = [promise.above for promise in known if promise.case.cause == one.case.cause]
    alone = min(0.5, quantile(own, 0.9)) if own else family
    return (len(own) * alone + FEW * family) / (len(own) + FEW)


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
    cases = {case.name: case for case in (*injected_cases(folder), *second_fixes(folder))}
    made = [document, *([document["later"]] if "later" in document else [])]
    return [
        Promise(cases[name], low, high, ALLOWED.get(part["rules"], NOISE), folder.name)
        for part in made
        for name, (low, high) in part["promised_ms"].items()
    ]


if __name__ == "__main__":
    main()
