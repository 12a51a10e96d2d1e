"""Draws the picture of the README again, from what ``ridgeline predict llama3-8b --on h200`` prints.

python -m lab.picture [--check]
"""

from __future__ import annotations

import io
import re
import sys

from rich.console import Console

from lab import ROOT
from ridgeline.cli import draw
from ridgeline.cli.app import run

FILE = ROOT / "docs" / "images" / "predict.svg"
COMMAND = "ridgeline predict llama3-8b --on h200"


def drawn() -> str:
    """The terminal after the command, as SVG that names fonts and fetches none."""
    console = Console(record=True, width=128, force_terminal=True, color_system="truecolor", file=io.StringIO(),
                      highlight=False, markup=False, emoji=False)  # fmt: skip
    usual, draw.console = draw.console, lambda: console
    try:
        run(COMMAND.split()[1:])
    finally:
        draw.console = usual
    text = console.export_svg(title=COMMAND, unique_id="terminal")
    text = re.sub(r"@font-face \{.*?\}\s*", "", text, flags=re.DOTALL)
    return text.replace("Fira Code, monospace", "DejaVu Sans Mono, Menlo, Consolas, monospace")


def numbers(text: str) -> list[str]:
    return re.findall(r"\d[\d.,]*", re.sub(r"<[^>]*>", " ", text.partition("</style>")[2]).replace("&#160;", " "))


def main() -> None:
    new = drawn()
    if "--check" in sys.argv:
        sys.exit(f"{FILE.name} shows other numbers than {COMMAND!r}: run python -m lab.picture"
                 if numbers(new) != numbers(FILE.read_text(encoding="utf-8")) else 0)  # fmt: skip
    FILE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
