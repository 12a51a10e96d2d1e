"""Findings against planted causes: every case, where its cause stands, the promised gain and the realized one.

    python benchmarks/planted_findings.py [--folder FOLDER]

Reads data/recordings/h200/planted, or another folder of the same form.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from ridgeline.findings.score import GENERAL, Score, score
from ridgeline.profiler.recordings import planted_cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=None)
    scores = [score(case) for case in planted_cases(parser.parse_args().folder)]
    print("| case | cause | place | promised ms | realized ms | held | in the fixed run |")
    print("|---|---|---|---|---|---|---|")
    for found in scores:
        print(_row(found))
    named, held = sum(found.named for found in scores), sum(found.held for found in scores)
    specific = [(found.case, rule) for found in scores for rule, _ in found.others if rule not in GENERAL]
    print(f"\n{len(scores)} cases: {named} named first or second, {held} intervals held ({held / len(scores):.0%}).")
    widths = [(f.finding.high_ms - f.finding.low_ms) / f.gain_ms for f in scores if f.finding and f.gain_ms > 0]
    print(f"Width of an interval over the realized gain: median {statistics.median(widths):.2f}.")
    print(f"Findings of fixed runs over 2 % of the step: {sum(len(found.others) for found in scores)}, of which")
    listed = ", ".join(f"{rule} in {case}" for case, rule in specific) or "none"
    print(f"{len(specific)} name more than a slow host: {listed}.")


def _row(found: Score) -> str:
    finding = found.finding
    promised = f"{finding.low_ms:.2f} to {finding.high_ms:.2f}" if finding else "–"
    place = "–" if found.place is None else str(found.place + 1)
    others = ", ".join(f"{rule} {share:.0%}" for rule, share in found.others)
    cells = (found.case, found.cause, place, promised, f"{found.gain_ms:.2f}", "yes" if found.held else "no", others)
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
