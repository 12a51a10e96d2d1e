"""``ridgeline explain``: what a trace means, as a verdict, three numbers and findings, or as JSON, a report, a
trace."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ridgeline.api import explain
from ridgeline.cli import compile_log
from ridgeline.cli.compile_log import compile_log_of
from ridgeline.cli.draw import DIM, add_rows, bar, clipped, console, hanging, percent, print_json, shortened, table
from ridgeline.cli.keep import keep
from ridgeline.cli.table_view import show_table
from ridgeline.cli.waterfall_view import show_against, show_largest, show_waterfall
from ridgeline.errors import InputError, RidgelineError
from ridgeline.findings.explanation import Explanation
from ridgeline.findings.finding import Alternative, Finding
from ridgeline.findings.replay.what_if import WhatIf, what_if
from ridgeline.trace.memory import Holder
from ridgeline.trace.read import is_trace_file
from ridgeline.units import show_bytes


@dataclass(frozen=True, slots=True)
class Wish:
    """What was asked for on the command line."""

    sources: tuple[str, ...]
    device: str | None
    top: int | None
    json: bool
    html: Path | None
    trace: Path | None
    what_if: tuple[str, ...] = ()
    table: str = ""
    by: tuple[str, ...] = ()
    csv: Path | None = None
    rank: int | None = None
    step: int | None = None
    between: str | None = None
    annotation: str = ""
    model: str = ""
    model_options: tuple[str, ...] = ()

    @property
    def num_findings(self) -> int:
        return 5 if self.top is None else self.top


def explain_and_show(wish: Wish) -> None:
    """Write the files that were asked for, and print JSON or the summary; whoever reads may stop after a few lines."""
    log = compile_log_of(wish.sources)
    if log is not None:
        if wish.table or wish.model:
            raise InputError(f"{wish.sources[0]} is a compile log: --table and --model need a trace")
        if wish.html or wish.trace or wish.what_if:
            raise InputError(f"{wish.sources[0]} is a compile log: --html, --trace and --what-if need a trace")
        if wish.json:
            print_json(compile_log.document_of(log))
        else:
            compile_log.show(log, Path(wish.sources[0]).name, wish.num_findings)
        return
    if (wish.csv or wish.by) and not wish.table:
        raise InputError("--csv and --by need a --table, such as --table kernels")
    found = explained(wish)
    if wish.table:
        show_table(found.table(wish.table, wish.by), wish.top, wish.json, wish.csv)
        return
    tried = what_if(found.context, wish.what_if) if wish.what_if and found.context else []
    # A line for each file that was written
    lines = []
    if wish.html:
        from ridgeline.web.explain import write_explanation

        lines.append(f"report: {write_explanation(found, wish.html)}")
    if wish.trace:
        from ridgeline.api import annotated
        from ridgeline.trace import write_chrome

        path = write_chrome(annotated(found), wish.trace)
        lines.append(f"trace: {path}, open it at https://ui.perfetto.dev")
    keep("explain", " ".join(Path(source).name for source in wish.sources), found.to_dict, measured=True,
         device=wish.device or "", files=[("trace", Path(source)) for source in wish.sources])  # fmt: skip
    written = lines
    if wish.json:
        print_json({**found.to_dict(), **({"what_if": [one.to_dict() for one in tried]} if tried else {})})
    else:
        show(found, wish.num_findings)
        _tried(tried)
    for line in written:
        print(line, file=sys.stderr)


def explained(wish: Wish) -> Explanation:
    """The part of the run that was asked for, with its progress on a terminal where there are many ranks."""
    model = None
    if wish.model:
        from ridgeline.cli.source import graph_of

        # A name of the zoo is trained unless an option says otherwise; a file knows its mode
        is_zoo = not wish.model.endswith((".json", ".json.gz")) and ".py:" not in wish.model and not any(
            option.replace(" ", "").startswith("mode=") for option in wish.model_options
        )  # fmt: skip
        model = graph_of(wish.model, {"mode": "train"} if is_zoo else {}, wish.model_options)

    def progress(done: int, total: int) -> None:
        if total > 4 and sys.stderr.isatty():
            print(f"\rread {done:,} of {total:,} files", end="\n" if done == total else "", file=sys.stderr, flush=True)

    return explain(
        list(wish.sources), on=wish.device, model=model, rank=wish.rank, step=wish.step, between=wish.between,
        annotation=wish.annotation, progress=progress,
    )  # fmt: skip


def show(found: Explanation, top: int) -> None:
    """Verdict, three numbers, findings, and where the time went."""
    out = console()
    many = f"{len(found.ranks)} ranks" if len(found.ranks) > 1 else ""
    beside = "".join(f"  {part}" for part in (found.device, many) if part)
    out.print(Text.assemble((found.title, "bold"), (beside, DIM)))
    out.print(Text(found.verdict, style="bold yellow" if found.findings else "bold green"))
    out.print()
    _numbers(out, found)
    if found.waterfall is not None:
        show_waterfall(out, found.waterfall)
    if found.against_model is not None:
        show_against(out, found.against_model)
    _findings(out, found, top)
    if found.waterfall is not None and not found.findings:
        show_largest(out, found.waterfall)
    # What is held where most is, by category, and by whom
    for peak in found.memory:
        reserved = f", {show_bytes(peak.reserved_bytes)} reserved" if peak.reserved_bytes >= 0 else ""
        where = f" of device {peak.device}" if len(found.memory) > 1 else ""
        title = f"Memory at its peak{where}: {show_bytes(peak.allocated_bytes)}{reserved}"
        if not peak.categories and not peak.holders:
            out.print(Text(title, style="bold"))
            out.print()
            continue
        made = table(title, ("", "left"), ("held", "right"), ("share", "right"), ("", "left"))
        rows = [(name, num, "cyan") for name, num in peak.categories]
        # who holds the peak, at most, in the terminal; the JSON has more
        rows += [(f"  {_holder(holder)}", holder.num_bytes, "blue") for holder in peak.holders[:5]]
        shares = [(name, num, num / max(1, peak.allocated_bytes), style) for name, num, style in rows]
        add_rows(
            made,
            [(name, show_bytes(num), percent(frac), bar(frac, 24, style)) for name, num, frac, style in shares],
            out.width,
            _ending,
        )
        out.print(made)
        out.print()
    # What the answers rest on
    linked, whole = found.totals["linked"], found.totals["all"]
    # What makes the answers less than certain; mere notes are in the JSON
    issues = [issue for issue in found.quality.get("issues", ()) if issue["severity"] != "note"]
    notes = [f"{issue['what']}; {issue['effect']}" for issue in issues if issue["code"] != "unlinked"]
    if 0 < linked["num_gpu_events"] < whole["num_gpu_events"]:
        lost = int(whole["num_gpu_events"] - linked["num_gpu_events"])
        notes.append(
            f"{lost:,} of {int(whole['num_gpu_events']):,} device events have no launch in the file; they are counted "
            f"(without them: {linked['busy_ms']:,.2f} instead of {whole['busy_ms']:,.2f} ms busy)"
        )
    if found.replay.unexplained_frac > 0.02:
        notes.append(
            f"{percent(found.replay.unexplained_frac)} of the time the device waits for something the trace does "
            "not show"
        )
    if found.replay.host_frac < 0.995:
        notes.append(_host_note(found))
    for note in notes:
        out.print(hanging("· ", Text(note, style=DIM)))


def _tried(found: Sequence[WhatIf]) -> None:
    """Changes that were tried on the replay."""
    if not found:
        return
    out = console()
    made = table(
        "What if", ("", "left"), ("applied to", "right"), ("step ms", "right"), ("saved ms", "right"), ("", "right")
    )
    for one in found:
        speedup = one.before_ms / one.after_ms if one.after_ms > 0 else float("inf")
        made.add_row(
            one.change, f"{one.touched_ms:,.3g} ms", f"{one.after_ms:,.4g}", f"{one.saved_ms:,.3g}", f"{speedup:.2f}×"
        )
    out.print()
    out.print(made)


def _numbers(out: Console, found: Explanation) -> None:
    """The three numbers: how long a step is, how busy the device, how much can be won back; in one line if it fits."""
    if not found.totals["all"]["num_gpu_events"]:
        return
    won = found.recoverable_ms / found.step_ms if found.step_ms else 0.0
    # What the step's length rests on: how many were recorded, and what they took then
    replay = found.replay
    said = [f"mean of {replay.num_steps}"] if replay.num_steps > 1 else []
    if replay.recorded_ms > 1.02 * replay.step_ms:
        said.append(f"{_short(replay.recorded_ms, 4)} as recorded")
    step_basis = f" ({', '.join(said)})" if said else ""
    numbers = (
        (f"{_short(found.step_ms, 4)} ms", f"a step{step_basis}"),
        (percent(found.step_busy_frac), "device busy"),
        (f"{_short(found.recoverable_ms)} ms", f"to win back ({percent(won)})"),
    )
    parts = [Text.assemble((value, "bold"), (f" {label}", DIM)) for value, label in numbers]
    one = Text("    ").join(parts)
    for line in [one] if len(one) + 2 <= out.width else parts:
        out.print(Text("  ") + line)
    out.print()


def _findings(out: Console, found: Explanation, top: int) -> None:
    if not found.findings:
        return
    for number, finding in enumerate(found.findings[:top], start=1):
        gain = f"{_short(finding.low_ms)} to {_short(finding.high_ms)} ms"
        likely = f", likely {_short(finding.expected_ms)}" if finding.expected_ms > 0.01 * finding.high_ms else ""
        head = Text.assemble((gain, "bold yellow"), (likely, "yellow"), (f"  {finding.what}", "bold"))
        out.print(hanging(f"{number:2d}. ", head))
        lines = Table.grid(padding=(0, 1, 0, 0))
        lines.add_column(style=DIM, no_wrap=True)
        lines.add_column(overflow="fold")
        for label, text in (
            ("why", finding.cause),
            ("where", str(finding.where)),
            ("do", finding.change),
            *_more(finding),
        ):
            lines.add_row(label, Text(text))
        out.print(Padding(lines, (0, 0, 1, 4)))
    left = len(found.findings) - top
    if left > 0:
        out.print(Text(f"  {left} more with --top {len(found.findings)} or --json", style=DIM))
        out.print()


def _short(value: float, num_digits: int = 3) -> str:
    """Digits that matter, never an exponent."""
    return f"{value:,.0f}" if value >= 10**num_digits else f"{value:.{num_digits}g}"


def _more(finding: Finding) -> list[tuple[str, str]]:
    more = []
    if finding.later_ms > 1.5 * finding.high_ms:
        more.append(("later", f"up to {_short(finding.later_ms)} ms once the findings above are fixed"))
    if finding.unchecked:
        more.append(("unchecked", "; ".join(finding.unchecked)))
    return more + [("or", _other(other)) for other in finding.alternatives]


def _other(other: Alternative) -> str:
    """What the same time may be lost to instead, what to do then, and what tells."""
    gain = f"{_short(other.low_ms)} to {_short(other.high_ms)} ms"
    tell = f". What tells: {other.tell}" if other.tell else ""
    return f"for the same time ({gain}), {other.cause.split(':')[0]}: {other.change.split(';')[0]}{tell}"


def _ending(text: str, width: int) -> str:
    """Of a long path the end: modules of a network begin alike, and differ where they end."""
    return f"  {shortened(text.strip(), width - 2)}" if text.startswith("  ") else clipped(text, width)


def _holder(holder: Holder) -> str:
    # characters of a module's path, its end: the modules of a network begin alike
    module, source = shortened(holder.module, 36), holder.source.rsplit("/", 1)[-1]
    return " · ".join(part for part in (module, source, holder.op) if part) or holder.phase


def _host_note(found: Explanation) -> str:
    """What was done about the host, which a recorder slows."""
    left = f"calls of the host are taken at {percent(found.replay.host_frac)} of their recorded time"
    if found.context is not None and found.context.is_timed:
        return f"the step and the gains are those measured without the recording: {left}"
    return (
        f"recording slows the host, and nobody timed this program without it: {left}, as is usual; "
        "`ridgeline profile` times it"
    )


def watch_and_show(wish: Wish, wait: Callable[[], bool] | None = None) -> None:
    """Explain each profiler file of a folder once it has arrived whole; ends when interrupted or ``wait`` is false.

    A file counts as whole when its size has not changed between two looks.
    """
    folders = [Path(source) for source in wish.sources]
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"--watch needs a folder, and {folder} is none")
    if wish.html or wish.trace or wish.csv:
        raise InputError("--watch prints each file as it arrives: --html, --trace and --csv would overwrite each other")
    rest = wait or _rest
    sizes: dict[Path, int] = {}
    done: set[Path] = set()
    print(f"waiting for traces in {', '.join(map(str, folders))}; Ctrl-C ends", file=sys.stderr)
    while True:
        for file in sorted(file for folder in folders for file in folder.rglob("*") if is_trace_file(file)):
            size = file.stat().st_size
            if file in done or sizes.get(file) != size or not size:
                sizes[file] = size
                continue
            done.add(file)
            print(f"{file}:", file=sys.stderr)
            try:
                explain_and_show(replace(wish, sources=(str(file),)))
            except RidgelineError as error:  # a file of another kind: the job goes on
                print(f"ridgeline: {error}", file=sys.stderr)
        if not rest():
            return


def _rest() -> bool:
    time.sleep(2.0)
    return True
