"""The tables of the notes, from recordings: ``python -m lab.notes`` writes them, ``--check`` fails where one is stale.

A note marks a table by ``<!-- table: NAME ARGUMENTS -->`` and ``<!-- end -->``; between them stands what the function
of that name in ``lab/notes/tables.py`` returns for these arguments. Prose, its source and its date stay as written.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from lab.notes.tables import TABLES

HERE = Path(__file__).resolve().parent
_TABLE = re.compile(r"(<!-- table: (?P<call>[^>]+?) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)


def generated(text: str) -> str:
    """The note with every table as the recordings have it now."""

    def table(match: re.Match[str]) -> str:
        name, *arguments = match["call"].split()
        return f"{match[1]}\n" + "\n".join(TABLES[name](*arguments)).strip() + f"\n\n{match[4]}"

    return _TABLE.sub(table, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a table is stale")
    check = parser.parse_args().check
    notes, num_tables, stale = sorted(HERE.glob("*.md")), 0, []
    for path in notes:
        text = path.read_text(encoding="utf-8")
        num_tables += len(_TABLE.findall(text))
        if text.count("<!-- table:") != len(_TABLE.findall(text)):
            sys.exit(f"{path.name}: a table without its end")
        new = generated(text)
        if new != text:
            stale.append(path.name)
            if not check:
                path.write_text(new, encoding="utf-8")
    if not num_tables:
        sys.exit(f"no tables in {HERE}")
    print(f"{len(notes)} notes, {num_tables} tables, {len(stale)} {'stale' if check else 'written'} {' '.join(stale)}")
    if check and stale:
        sys.exit("run python -m lab.notes")


if __name__ == "__main__":
    main()
