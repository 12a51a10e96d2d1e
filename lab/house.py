"""How the code is cut: the share of private functions used once, and module constants per 1,000 lines.

    python -m lab.house [--packages] [src/ridgeline]

A private function counts as used once if its name occurs once beside its definition, in the whole tree. A constant is
a name in capitals that a module assigns. Both are printed, and fail nothing; `--packages` adds a line per package.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from lab import ROOT


@dataclass
class Count:
    lines: int = 0
    constants: int = 0
    private: list[str] = field(default_factory=list)  # names of functions, one per definition

    def row(self, once: set[str]) -> str:
        used_once = sum(name in once for name in self.private)
        return (f"{self.lines:,} lines, {len(self.private):,} private functions, "
                f"{used_once / max(1, len(self.private)):.1%} used once; "
                f"{1e3 * self.constants / max(1, self.lines):.1f} constants per 1,000 lines")  # fmt: skip


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("folder", nargs="?", type=Path, default=ROOT / "src" / "ridgeline")
    arguments.add_argument("--packages", action="store_true")
    given = arguments.parse_args()
    uses: Counter[str] = Counter()
    whole, packages = Count(), defaultdict[str, Count](Count)
    for path in sorted(given.folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        uses.update(re.findall(r"\b_\w+", text))
        private = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                   and node.name.startswith("_") and not node.name.startswith("__")]  # fmt: skip
        for count in (whole, packages[path.relative_to(given.folder).parts[0].removesuffix(".py")]):
            count.lines += text.count("\n")
            count.constants += sum(len(_constants(node)) for node in tree.body)
            count.private += private
    definitions = Counter(whole.private)
    once = {name for name in whole.private if uses[name] - definitions[name] == 1}
    if given.packages:
        for name, count in sorted(packages.items(), key=lambda item: -item[1].lines):
            print(f"{name:12} {count.row(once)}")
    print(whole.row(once))


def _constants(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    names = [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
    return [name for name in names if re.fullmatch(r"_?[A-Z][A-Z0-9_]*", name)]


if __name__ == "__main__":
    main()
