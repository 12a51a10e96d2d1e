"""The tables of the kernels' result note from a recorded run.

    python benchmarks/kernels_note.py results/kernels.json.gz > tables.md
"""

from __future__ import annotations

import gzip
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from ridgeline.bench.race import Row, paired, standings

SHORT = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}


def table(*headings: str) -> Iterator[str]:
    yield f"| {' | '.join(headings)} |".replace("_", " ")
    yield "|" + "---|" * len(headings)


def summary(rows: list[Row]) -> Iterator[str]:
    if not rows:
        return
    yield "### Against the best contender of each case\n"
    yield from table("function", "phase", "cases", "geometric mean", "lost")
    for found in standings(rows):
        yield f"| {found.primitive} | {found.phase} | {found.num_cases} | {found.speedup:.2f}× | {found.num_lost} |"
    for phase in ("fwd", "bwd", "step", "call"):
        ratios = [math.log(best.median_s / ours.median_s) for ours, best in paired(rows) if ours.phase == phase]
        if ratios:
            yield f"| **all** | {phase} | {len(ratios)} | **{math.exp(statistics.fmean(ratios)):.2f}×** | |"


def microseconds(row: Row | None) -> str:
    if row is None:
        return "–"
    return "fails" if math.isnan(row.median_s) else f"{1e6 * row.median_s:.1f}"


def sizes_of(text: str) -> str:
    parts = (part.split("=") for part in text.split())
    return " ".join(value if name in ("rows", "cols") else f"{name}={value}" for name, value in parts)


def copy_time(floor: list[dict[str, Any]], num_bytes: int) -> float:
    """Seconds that a bare copy of so many bytes takes by the race's clock, between those that were timed."""
    points = sorted((entry["moved_bytes"], entry["s"]) for entry in floor)
    if not points or num_bytes < points[0][0]:
        return math.nan
    pairs = list(pairwise(points))
    (a, s), (b, t) = next((pair for pair in pairs if num_bytes <= pair[1][0]), pairs[-1])
    return s + (t - s) * (num_bytes - a) / (b - a)


def every_row(
    rows: list[Row], copy_bytes_per_s: float, title: str = "Every row", floor: list[dict[str, Any]] | None = None
) -> Iterator[str]:
    if not rows:
        return
    yield f"\n### {title}\n"
    yield "Times in µs: median, for ours also the 10th and 90th percentile.\n"
    columns = "function case phase ridgeline TB/s of_copy of_a_copy_as_large eager compiled Liger ×_best".split()
    yield from table(*(name for name in columns if floor or name != "of_a_copy_as_large"))
    cases: dict[tuple[str, str, str, str], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        cases[row.primitive, row.dtype, row.sizes, row.phase][row.contender] = row
    for (name, dtype, sizes, phase), together in cases.items():
        ours = together.get("ridgeline")
        if ours is None:
            continue
        rivals = [r.median_s for who, r in together.items() if who != "ridgeline" and not math.isnan(r.median_s)]
        moved = phase != "call" and name != "linear_cross_entropy"
        alike = copy_time(floor or [], ours.num_bytes) / ours.median_s
        shown = "–" if math.isnan(alike) or not moved else f"{alike:.0%}"
        yield "| " + " | ".join(
            [
                name, f"{SHORT[dtype]} {sizes_of(sizes)}", phase,
                f"{1e6 * ours.median_s:.1f} ({1e6 * ours.low_s:.1f}–{1e6 * ours.high_s:.1f})",
                f"{ours.bytes_per_s / 1e12:.2f}" if moved else "–",
                f"{ours.bytes_per_s / copy_bytes_per_s:.0%}" if moved else "–",
                *([shown] if floor else []),
                *(microseconds(together.get(who)) for who in ("eager", "compiled", "liger")),
                f"{min(rivals) / ours.median_s:.2f}" if rivals else "–",
            ]
        ) + " |"  # fmt: skip


def floors(found: dict[str, Any]) -> Iterator[str]:
    if found.get("floor"):
        yield "\n### A bare copy by the same clock\n"
        yield from table("MB read and written", "µs", "TB/s")
    for entry in found.get("floor", []):
        yield (
            f"| {entry['moved_bytes'] / 1e6:.0f} | {1e6 * entry['s']:.1f} |"
            f" {entry['moved_bytes'] / entry['s'] / 1e12:.2f} |"
        )
    if found.get("floor"):
        yield ""


def host(found: dict[str, Any]) -> Iterator[str]:
    if not found.get("host") and not found.get("cold"):
        return
    yield "\n### Host\n"
    yield from table("call", "µs until it returns")
    for entry in found.get("host", []):
        shown = f"{1e6 * entry['host_s']:.1f}" if entry["host_s"] else "failed"
        yield f"| {entry['what']} | {shown} |"
    for entry in found.get("cold", []):
        values = entry["import_first_second_s"]
        if isinstance(values, list):
            yield f"| first call in a fresh process, {entry['what']} | {1e6 * values[1]:.0f} |"


def correctness(found: dict[str, Any]) -> Iterator[str]:
    yield "\n### Correctness\n"
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    judged = [entry for entry in found.get("check", []) if "ok" in entry]
    for entry in judged:
        counts[entry["primitive"]][not entry["ok"]] += 1
    yield from table("function", "right", "wrong")
    for name, (right, wrong) in counts.items():
        yield f"| {name} | {right} | {wrong} |"
    yield ""
    for entry in judged:
        if not entry["ok"]:
            yield f"- {entry['primitive']} {entry['case']} {entry['layout']} {entry['what']}: {entry['note']}"
    yield ""
    if found.get("special"):
        yield from table("situation", "outcome")
    for entry in found.get("special", []):
        yield f"| {entry['what']} | {entry['outcome']} |"
    mistakes = found.get("mistakes", [])
    if mistakes:
        rejected = sum(m["ok"] for m in mistakes)
        yield f"\n{rejected} of {len(mistakes)} declared wrong kernels are rejected by the tolerance."


def memory(found: dict[str, Any]) -> Iterator[str]:
    """Fused linear cross-entropy: a training step's time and peak memory, merged from two entries a contender."""
    steps: dict[tuple[int, int, int, str], dict[str, Any]] = defaultdict(dict)
    for entry in found.get("memory", []):
        steps[entry["rows"], entry["cols"], entry["hidden"], entry["who"]].update(entry)
    if steps:
        yield "\n### Linear layer and cross-entropy, forward and backward\n"
        yield from table("tokens × classes × width", "who", "ms", "peak GB", "of it above the inputs")
    for (rows, cols, hidden, who), entry in steps.items():
        yield (
            f"| {rows}×{cols}×{hidden} | {who} | {1e3 * statistics.median(entry['s']):.2f} |"
            f" {entry['peak_bytes'] / 1e9:.2f} | {entry['above_inputs_bytes'] / 1e9:.2f} |"
        )


def split(found: dict[str, Any]) -> Iterator[str]:
    """What each kernel of a call takes by the profiler; a race's figure holds launches and events besides."""
    if found.get("split"):
        yield "\n### Kernels of a call, by the profiler\n"
        yield from table("function", "case", "phase", "µs of each kernel")
    for entry in found.get("split", []):
        dtype, _, sizes = entry["case"].partition(" ")
        shown = ", ".join(f"{kernel_name(name)} {1e6 * s:.1f}" for name, s in entry["kernels_s"].items())
        yield f"| {entry['primitive']} | {SHORT[dtype]} {sizes_of(sizes)} | {entry['phase']} | {shown} |"


def kernel_name(name: str) -> str:
    """A kernel's own name, without templates and arguments."""
    return name.removeprefix("void ").split("<")[0].split("(")[0].strip()


def rest(found: dict[str, Any]) -> Iterator[str]:
    for entry in found.get("pack", []):
        yield (
            f"\nPack: {entry['variants']} variants, {entry['bytes'] / 1e6:.1f} MB, {entry['seconds']:.0f} s with"
            f" {entry['jobs']} processes."
        )
    if found.get("ladder"):
        yield "\n### Ladder: RMSNorm's backward pass, 16384×4096 bf16\n"
        yield from table("step", "µs", "TB/s")
        for entry in found["ladder"]:
            yield f"| {entry['step']} | {1e6 * entry['s']:.1f} | {entry['tb_s']:.2f} |"
    if found.get("sweep"):
        yield "\n### Sweeps\n"
        yield from table("kernel", "case", "configuration", "µs", "TB/s")
    for entry in found.get("sweep", []):
        config = " ".join(f"{name}={value}" for name, value in entry["config"].items())
        mark = " (default)" if entry.get("default") else ""
        case = entry["case"].replace("bfloat16", "bf16")
        of = entry.get("primitive", entry["kernel"])
        kernel = entry["kernel"] if entry["kernel"].startswith(of) else f"{entry['kernel']} of {of}"
        yield f"| {kernel} | {case} | {config}{mark} | {1e6 * entry['s']:.1f} | {entry['tb_s']:.2f} |"
    if found.get("errors"):
        yield "\n### What failed in the run\n"
    for entry in found.get("errors", []):
        yield f"- {entry['what']}: {entry['error'][:200]}"


def rows_of(entries: list[dict[str, Any]]) -> list[Row]:
    return [Row(**{key: math.nan if value is None else value for key, value in entry.items()}) for entry in entries]


def main() -> None:
    found = json.loads(gzip.decompress(Path(sys.argv[1]).read_bytes()))
    rows, compiled = (rows_of(found.get(part, [])) for part in ("race", "compiled"))
    copy_bytes_per_s = found.get("copy_bytes_per_s", math.nan)
    if rows:
        print(f"Copy bandwidth in the same run: {copy_bytes_per_s / 1e12:.2f} TB/s (1 GiB, read and write).\n")
    parts = (
        floors(found), summary(rows), every_row(rows, copy_bytes_per_s, floor=found.get("floor")),
        every_row(compiled, copy_bytes_per_s, "With torch.compile (max-autotune), first case of each"),
        memory(found), host(found), correctness(found), split(found), rest(found),
    )  # fmt: skip
    for lines in parts:
        for line in lines:
            print(line)


if __name__ == "__main__":
    main()
