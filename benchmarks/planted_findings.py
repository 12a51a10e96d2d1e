"""Findings against planted causes: every case, where its cause stands, the promised gain and the realized one.

    python benchmarks/planted_findings.py [--folder FOLDER]

Reads data/recordings/h200/planted, or another folder of the same form; what it has of healthy programs and of second
fixes is judged as well.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from ridgeline.findings.score import GENERAL, Score, found_in, score
from ridgeline.profiler.recordings import healthy_programs, planted_cases, planted_folder, second_fixes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=None)
    folder = parser.parse_args().folder or planted_folder()
    scores = [score(case) for case in planted_cases(folder)]
    _table(scores)
    specific = [(found.case, rule) for found in scores for rule, _ in found.others if rule not in GENERAL]
    print(f"Findings of fixed runs over 2 % of the step: {sum(len(found.others) for found in scores)}, of which")
    listed = ", ".join(f"{rule} in {case}" for case, rule in specific) or "none"
    print(f"{len(specific)} name more than a slow host: {listed}.")
    for program in healthy_programs(folder):
        found = ", ".join(f"{rule} {share:.0%}" for rule, share in found_in(program)) or "nothing over 2 %"
        print(f"{program.name} ({program.measured.median_s * 1e3:.2f} ms): {found}")
    again = second_fixes(folder, *(planted_folder(suite=name) for name in ("planted", "fresh", "third", "fourth")))
    if again:
        print("\nWhat is found in fixed and healthy programs, done:\n")
        _table([score(case) for case in again])


def _table(scores: Sequence[Score]) -> None:
    print("| case | cause | place | promised ms | realized ms | held | in the fixed run |")
    print("|---|---|---|---|---|---|---|")
    for found in scores:
        print(_row(found))
    named, held = sum(found.named for found in scores), sum(found.held for found in scores)
    print(f"\n{len(scores)} cases: {named} named first or second, {held} intervals held ({held / len(scores):.0%}).")
    widths = [found.width for found in scores if found.width is not None]
    print(f"Width of an interval over the realized gain: median {statistics.median(widths or [0.0]):.2f}.")


def _row(found: Score) -> str:
    finding = found.finding
    promised = f"{finding.low_ms:.2f} to {finding.high_ms:.2f}" if finding else "–"
    place = "–" if found.place is None else str(found.place + 1)
    others = ", ".join(f"{rule} {share:.0%}" for rule, share in found.others)
    cells = (found.case, found.cause, place, promised, f"{found.gain_ms:.2f}", "yes" if found.held else "no", others)
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
