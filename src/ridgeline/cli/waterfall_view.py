"""The waterfall in a terminal: stages with their largest bars, and what generally helps against the largest."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from ridgeline.cli.draw import DIM, bar, clipped, hanging, percent, shortened, table
from ridgeline.findings.accounting.labels import STAGES
from ridgeline.findings.accounting.needed import Comparison
from ridgeline.findings.accounting.waterfall import Bar, Waterfall

STYLES = {"floor": "green", "kernels": "yellow", "unpriced": "blue", "avoidable": "magenta", "copies": "cyan",
          "communication": "bright_magenta", "idle": "red", "unrecorded": "blue", "host": "red"}  # fmt: skip
WIDTH = 24


def show_waterfall(out: Console, found: Waterfall) -> None:
    """Stages in order, each with its bars of half a percent of the step or more; the last line is the sum."""
    if not found.bars:
        return
    steps = f", mean of {found.num_steps} steps" if found.num_steps > 1 else ""
    devices = f" and {found.num_devices} devices" if found.num_devices > 1 else ""
    made = table(
        f"From the floor to the step{steps}{devices}",
        *(("", "left"), ("ms", "right"), ("share", "right"), ("", "left"), ("mostly", "left")),
    )
    rows: list[tuple[Text | str, ...]] = []
    recording = found.bar("recording")
    for stage, label in STAGES.items():
        if stage == "recording":
            continue
        own = [one for one in found.bars if one.stage == stage]
        if not own:
            continue
        ms, frac = sum(one.ms for one in own), sum(one.frac for one in own)
        alone = len(own) == 1
        names_itself = stage in ("floor", "communication", "unrecorded")
        text = own[0].label if alone and names_itself else f"{label}: {own[0].label}" if alone else label
        rows.append((Text(text, style="bold"), *_cells(ms, frac, STYLES[stage]), _mostly(own[0]) if alone else ""))
        shown = [] if alone else [one for one in own if one.frac >= 0.005][:8]
        rows += [(f"  {one.label}", *_cells(one.ms, one.frac, STYLES[stage]), _mostly(one)) for one in shown]
        rest = [one for one in own if one not in shown]
        if shown and rest:
            total = sum(one.ms for one in rest), sum(one.frac for one in rest)
            rows.append((f"  {len(rest)} more", *_cells(*total, STYLES[stage]), ""))
    name = "step without the recording" if recording else "step"
    rows.append((Text(name, style="bold"), *_cells(found.unrecorded_ms, 1.0, "white"), ""))
    if recording:
        rows.append((f"  {recording.label}", *_cells(recording.ms, recording.frac, "bright_black"), ""))
        rows.append(("  step as recorded", f"{found.step_ms:,.3f}", percent(found.step_ms / found.unrecorded_ms),
                     Text(), ""))  # fmt: skip
    numbers = 10 + 6 + WIDTH + 8  # the columns between the name and the place, with the gaps beside them
    room = min(48, max(24, out.width - numbers - 30))
    place = max(0, out.width - numbers - room - 2)
    for row in rows:
        head = Text(clipped(str(row[0]), room), style="bold" if isinstance(row[0], Text) else "")
        made.add_row(head, *row[1:4], clipped(str(row[4]), place))
    out.print(made)
    notes = [*found.notes]
    if found.named_idle_frac < 0.995:
        notes.append(f"{percent(1 - found.named_idle_frac)} of the idle time has no host activity in the trace")
    for note in notes:
        out.print(hanging("· ", Text(note, style=DIM)))
    out.print()


def show_largest(out: Console, found: Waterfall, num: int = 3) -> None:
    """Where no finding says what to do: the largest bars, and what generally helps against their kind."""
    shown = [one for one in found.largest(num) if one.frac >= 0.02]
    if not shown:
        return
    out.print(Text("The largest bars, and what generally helps", style="bold"))
    for number, one in enumerate(shown, start=1):
        head = Text.assemble((f"{one.ms:,.3g} ms ({percent(one.frac)})", "bold yellow"), (f"  {one.label}", "bold"))
        out.print(hanging(f"{number:2d}. ", head))
        for part in one.parts[:2]:
            out.print(hanging("      ", Text(f"{place_of(part)}: {part.ms:,.3g} ms", style=DIM)))
        out.print(hanging("      ", Text(one.remedy)))
    out.print()


def show_against(out: Console, found: Comparison) -> None:
    """What a step ran more often than its model needs."""
    batches = f", {found.num_batches} micro-batches a step" if found.num_batches > 1 else ""
    extra = [need for need in found.needs if need.extra_ms > 0]
    if not extra and not found.notes:
        text = f"Every product runs as often as {found.model} needs it{batches}."
        out.print(hanging("· ", Text(text, style=DIM)))
    for note in found.notes:
        out.print(hanging("· ", Text(f"against {found.model}{batches}: {note}", style="yellow")))
    if extra:
        made = table(f"More often than {found.model} needs{batches}", ("", "left"), ("sizes", "left"),
                     ("run", "right"), ("needed", "right"), ("extra ms", "right"))  # fmt: skip
        for need in extra[:8]:
            sizes = "×".join(map(str, need.sizes))
            numbers = (f"{need.num_recorded:g}", f"{need.num_needed:g}", f"{need.extra_ms:,.3g}")
            made.add_row(f"{need.sort}, {need.phase}", sizes, *numbers)
        out.print(made)
    out.print()


def place_of(part: object) -> str:
    """Module, line, op and name of a part, as far as they are known and differ."""
    words = [getattr(part, name) for name in ("module", "source", "op", "name")]
    words[1] = words[1].rsplit("/", 1)[-1]
    return " · ".join(shortened(word, 48) for word in dict.fromkeys(words) if word) or "no place recorded"


def _cells(ms: float, frac: float, style: str) -> tuple[str, str, Text]:
    return f"{ms:,.3f}", percent(frac), bar(frac, WIDTH, style)


def _mostly(one: Bar) -> str:
    return place_of(one.parts[0]) if one.parts else ""
