"""``ridgeline diff``: two runs side by side, what got slower, by how much, and why."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from rich.text import Text

from ridgeline.api import diff
from ridgeline.cli.draw import DIM, clipped, console, hanging, percent, print_json, shortened, table
from ridgeline.cli.keep import keep
from ridgeline.findings.diff import Change, Difference
from ridgeline.findings.labels import spoken
from ridgeline.web import compare

LEAST_FRAC = 0.002
_CALL = re.compile(r"^((?:copy|communication): )?(?:void )?([\w:]+)\(.*\)$")


def diff_and_show(
    a: str, b: str, top: int, json: bool, html: Path | None = None, markdown: Path | None = None
) -> None:
    found = diff(a, b)
    keep("diff", f"{Path(a).name} against {Path(b).name}", found.to_dict, measured=True,
         files=[("trace", Path(a)), ("trace", Path(b))])  # fmt: skip
    for path, write in ((html, compare.difference_page), (markdown, lambda one: compare.difference_markdown(one, top))):
        if path is not None:
            print(f"report: {compare.write_text(write(found), path)}", file=sys.stderr)
    if json:
        print_json(found.to_dict())
    else:
        show(found, top)


def show(found: Difference, top: int) -> None:
    """The verdict, then the largest changes; they add up to the difference."""
    out = console()
    slower = found.delta_ms > 0
    share = abs(found.delta_ms) / found.a_step_ms if found.a_step_ms else 0.0
    out.print(Text(f"A  {found.a}", style=DIM))
    out.print(Text(f"B  {found.b}", style=DIM))
    for setting in found.settings:
        out.print(hanging("·  ", Text(setting, style="yellow")))
    moved = f"{found.a_step_ms:,.4g} → {found.b_step_ms:,.4g} ms a step ({found.delta_ms:+,.3g} ms)"
    same = share < 0.0005  # of the step: less than this is printed as no difference
    head = f"No difference: {moved}" if same else f"B is {percent(share)} {'slower' if slower else 'faster'}: {moved}"
    out.print(Text(head, style="bold red" if slower and share > 0.01 else "bold green"))
    out.print()
    shown = [change for change in found.changes if abs(change.delta_ms) > LEAST_FRAC * found.a_step_ms][:top]
    ranks = f"{found.num_ranks} ranks, " if found.num_ranks > 1 else ""
    aligned = f"{ranks}aligned by {found.aligned_by} ({percent(found.matched_frac)} of the time matches)"
    if shown:
        changes_table(shown, aligned[:1].upper() + aligned[1:])
    else:
        out.print(Text(f"{aligned}: no change above {percent(LEAST_FRAC)} of the step", style=DIM))
    rest_ms = found.delta_ms - sum(change.delta_ms for change in shown)
    if len(shown) < len(found.changes) and abs(rest_ms) >= 5e-4:
        out.print(Text(f"everything else: {rest_ms:+,.3g} ms", style=DIM))
    for note in found.notes:
        out.print(hanging("· ", Text(note, style=DIM)))


def changes_table(changes: list[Change], title: str) -> None:
    out = console()
    made = table(title, ("", "left"), ("A ms", "right"), ("B ms", "right"), ("change", "right"), ("why", "left"))
    made.columns[-1].no_wrap = False
    room = max(30, min(60, out.width - 64))
    for c in changes:
        delta = Text(f"{c.delta_ms:+,.3f}", style="red" if c.delta_ms > 0 else "green")
        # A row's name in the room there is: copies and kernels say most where they begin, paths where they end
        key = c.key
        match = _CALL.match(key)
        if match:
            key = f"{match[1] or ''}{match[2]}"
        text = spoken(key).replace("copy: Memcpy ", "copy: ")
        made.add_row(
            (
                clipped(text, room)
                if text.startswith(("idle: ", "copy: ", "communication: "))
                else shortened(text, room)
            ),
            f"{c.a_ms:,.3f}",
            f"{c.b_ms:,.3f}",
            delta,
            c.why,
        )
    out.print(made)
