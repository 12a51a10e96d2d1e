"""Small pieces that the tables share: bars, ratios, colors by bound and by basis."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from ridgeline.basis import Basis
from ridgeline.units import show_bytes, show_flops, show_usd

BOUND_STYLE = {
    "compute": "magenta",
    "memory": "cyan",
    "cache": "blue",
    "latency": "yellow",
    "issue": "bright_magenta",
    "free": "bright_black",
}
BASIS_STYLE = {Basis.MEASURED: "green", Basis.FITTED: "green", Basis.DATASHEET: "yellow", Basis.ASSUMED: "red"}
DIM = "bright_black"


Line = tuple[str, Text | str]


schema_name = ""
"""The command that runs; its name and version stand in every JSON document."""


def printable(text: str) -> str:
    """Control characters, which could drive a terminal, as their escapes; line breaks and tabs stay."""
    return "".join(char if char in "\n\t" or char.isprintable() else repr(char)[1:-1] for char in text)


class _Console(Console):
    """A console on which text cannot drive the terminal: control characters of names are replaced."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            is_safe = segment.control or all(char == "\n" or char.isprintable() for char in segment.text)
            safe = (
                segment.text if is_safe else "".join(c if c == "\n" or c.isprintable() else "�" for c in segment.text)
            )
            yield segment if is_safe else Segment(safe, segment.style)


def console() -> Console:
    """Where tables go; nothing in a name is ever read as markup or as a command to the terminal."""
    return _Console(highlight=False, markup=False, emoji=False, soft_wrap=False)


def print_json(document: Any) -> None:
    """Only JSON on stdout, with the name and version of its schema first; infinities and NaN would not be JSON."""
    tagged = {"schema": f"ridgeline.{schema_name}/1"} if schema_name else {}
    named = document if isinstance(document, dict) else {schema_name or "items": document}
    json.dump({**tagged, **named}, sys.stdout, allow_nan=False, indent=1)
    sys.stdout.write("\n")


def bar(frac: float, width: int, style: str = "cyan") -> Text:
    """A bar of ``width`` cells, to an eighth of a cell."""
    eighths = round(max(0.0, min(1.0, frac)) * width * 8)
    if frac > 0 and not eighths:
        eighths = 1
    full, part = divmod(eighths, 8)
    drawn = "█" * full + (" ▏▎▍▌▋▊▉█"[part] if part else "")
    return Text(drawn, style=style) + Text("·" * (width - len(drawn)), style=DIM)


def percent(frac: float) -> str:
    if 0 < frac < 0.0005:
        return "<0.1%"
    return f"{100 * frac:.1f}%" if frac < 0.0995 else f"{100 * frac:.0f}%"


def money(value_usd: float) -> str:
    """Dollars without an exponent, to three digits."""
    if value_usd >= 0.01 or value_usd <= 0:
        return show_usd(value_usd)
    return f"${value_usd:.{2 - math.floor(math.log10(value_usd))}f}"


def ratio(above_s: float, below_s: float) -> Text:
    """How many times the floor; far from it is what deserves a look."""
    if below_s <= 0:
        return Text("–", style=DIM)
    value = above_s / below_s
    style = "green" if value < 1.5 else "yellow" if value < 4 else "red"
    return Text(f"{value:.2f}×" if value < 99.5 else f"{value:.0f}×" if value < 999.5 else ">999×", style=style)


def bound(name: str) -> Text:
    return Text(name, style=BOUND_STYLE.get(name, "white"))


def basis(found: Basis) -> Text:
    return Text(str(found), style=BASIS_STYLE[found])


def speed(flops: float, num_bytes: float, seconds: float, bound_name: str) -> str:
    """What was achieved, in the unit of what limits it."""
    if seconds <= 0:
        return "–"
    if bound_name == "compute" and flops:
        return f"{show_flops(flops / seconds)}/s"
    return f"{show_bytes(num_bytes / seconds)}/s" if num_bytes else "–"


def shortened(text: str, width: int) -> str:
    """The end of a dotted path says more than its start."""
    return text if len(text) <= width else "…" + text[len(text) - width + 1 :]


def clipped(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def grid(lines: Iterable[Line]) -> Table:
    """Labels and what they say, side by side, without a frame."""
    made = Table.grid(padding=(0, 2))
    made.add_column(style=DIM, no_wrap=True)
    made.add_column()
    for label, value in lines:
        made.add_row(label, value)
    return made


def hanging(mark: str, text: Text) -> Table:
    """Text whose further lines begin below its first word, not below its number or bullet."""
    made = Table.grid()
    made.add_column(no_wrap=True)
    made.add_column()
    made.add_row(Text(mark, style="bold"), text)
    return made


def table(title: str, *columns: tuple[str, str], tight: bool = False) -> Table:
    """A plain table; columns are (heading, left or right), a tight one has a single space between them."""
    made = Table(
        title=Text(title, style="bold", no_wrap=True, overflow="ignore"),  # a narrow table does not break its title
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        padding=(0, 0 if tight else 1, 0, 0),
        header_style=DIM,
    )
    for heading, side in columns:
        made.add_column(heading, justify="right" if side == "right" else "left", no_wrap=True, overflow="ellipsis")
    return made


def add_rows(made: Table, rows: Sequence[Sequence[Text | str]], width: int, cut: Callable[[str, int], str]) -> None:
    """Add rows whose first cell, a name, takes the room that the others leave: numbers are never cut."""
    headings = [str(column.header) for column in made.columns]
    others = [max([len(heading), *(len(row[i]) for row in rows if i < len(row))]) for i, heading in enumerate(headings)]
    gap = 1 + made.padding[1]
    # cells a name keeps, however narrow the terminal
    room = max(12, width - sum(others[1:]) - gap * len(headings))
    for name, *cells in rows:
        made.add_row(name if isinstance(name, Text) else cut(name, room), *cells)
