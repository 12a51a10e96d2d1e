"""Findings against injected causes: every case, where its cause stands, the promised gain and the realized one.

    python -m lab.planted score_table [--suite twenty-fifth]
    python -m lab.planted score_table --untimed --suite eleventh

With ``--untimed`` the suite is judged as others would hand it over: without what our recorder noted of unrecorded
steps, and recorded plainly (no shapes, no marks, three steps in a row).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lab.planted.recordings import InjectedCase, control_programs, injected_cases, suite_folder, suites
from lab.planted.score import GENERAL, NAMES, WEIGHTY_FRAC, Score, found_in, score
from ridgeline.findings.context.context import TraceContext
from ridgeline.findings.explain import findings_of
from ridgeline.findings.finding import Finding
from ridgeline.profiler.floors import device_of
from ridgeline.trace import read

ROUNDS = 3
"""Of a program in a plain recording, which has no marks: all of them are one step."""
WAYS = (("untimed", "planted", "fixed", 1), ("plain", "planted-plain", "plain", ROUNDS))
"""To record: the word for it, the recordings of planted and of fixed programs, and rounds in a step."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="twenty-fifth", choices=suites())
    parser.add_argument("--untimed", action="store_true")
    args = parser.parse_args()
    folder = suite_folder(args.suite)
    if args.untimed:
        untimed(folder)
        return
    scores = [score(case) for case in injected_cases(folder) if "planted" in case.files]
    _table(scores)
    specific = [(found.case, rule) for found in scores for rule, _ in found.others if rule not in GENERAL]
    print(f"Findings of fixed runs over 2 % of the step: {sum(len(found.others) for found in scores)}, of which")
    listed = ", ".join(f"{rule} in {case}" for case, rule in specific) or "none"
    print(f"{len(specific)} name more than a slow host: {listed}.")
    for program in control_programs(folder):
        found = ", ".join(f"{rule} {share:.0%}" for rule, share in found_in(program)) or "nothing over 2 %"
        print(f"{program.name} ({program.measured.median_s * 1e3:.2f} ms): {found}")


def untimed(folder: Path) -> None:
    """What is said of recordings that nobody timed, and of plain ones."""
    for word, planted, fixed, rounds in WAYS:
        found = [(case, *_promised(folder / f"{case.name}.{planted}.json.xz", case, rounds)) for case in _cases(folder)]
        for case, place, promised, held in found:
            gain_ms = rounds * case.gain_s * 1e3
            print(f"{word} {case.name}: place {place}, promised {promised}, realized {gain_ms:.2f}, held {held}")
        named, held_num = sum(place in (1, 2) for _, place, *_ in found), sum(held for *_, held in found)
        print(f"{word}: {named} of {len(found)} named first or second, {held_num} held")
        for file in sorted(folder.glob(f"*.{fixed}.json.xz")):
            told = [x for x in _bare(file) if x.step_frac > WEIGHTY_FRAC] if "again_" not in file.name else []
            for x in told:
                print(f"{word} {file.name.split('.')[0]} is told {x.rule} {x.low_ms:.2f} to {x.high_ms:.2f} ms")


def _cases(folder: Path) -> list[InjectedCase]:
    return [case for case in injected_cases(folder) if (folder / f"{case.name}.planted-plain.json.xz").exists()]


def _promised(file: Path, case: InjectedCase, rounds: int) -> tuple[int | None, str, bool]:
    """The place of the cause among the findings, what is promised, and whether the gain is inside."""
    found = _bare(file)
    place = next((i for i, x in enumerate(found) if x.rule in NAMES[case.cause]), None)
    if place is None:
        return None, "–", False
    low, high = found[place].low_ms, found[place].high_ms
    return place + 1, f"{low:.2f} to {high:.2f}", low <= rounds * case.gain_s * 1e3 <= high


def _bare(file: Path) -> Sequence[Finding]:
    """Findings of a trace without anything that Ridgeline's own recorder wrote into it."""
    trace = read(file, cache=False)
    bare = replace(trace, meta={key: value for key, value in trace.meta.items() if key != "ridgeline"})
    return findings_of(TraceContext(bare, device_of(bare)))


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
