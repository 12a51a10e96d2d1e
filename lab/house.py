"""How the code is cut: the share of private functions used once, and module constants per 1,000 lines.

    python -m lab.house [src/ridgeline]

A private function counts as used once if its name occurs once beside its definition, in the whole tree. A constant is
a name in capitals that a module assigns. Both are printed, and fail nothing.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from pathlib import Path

from lab import ROOT


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "src" / "ridgeline"
    uses: Counter[str] = Counter()
    private: list[str] = []
    num_lines = num_constants = 0
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        uses.update(re.findall(r"\b_\w+", text))
        private += [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                    and node.name.startswith("_") and not node.name.startswith("__")]  # fmt: skip
        num_constants += sum(len(_constants(node)) for node in tree.body)
        num_lines += text.count("\n")
    definitions = Counter(private)
    once = sum(uses[name] - definitions[name] == 1 for name in private)
    print(f"{num_lines:,} lines, {len(private):,} private functions, {once / max(1, len(private)):.1%} used once; "
          f"{1e3 * num_constants / num_lines:.1f} constants per 1,000 lines")  # fmt: skip


def _constants(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    names = [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
    return [name for name in names if re.fullmatch(r"_?[A-Z][A-Z0-9_]*", name)]


if __name__ == "__main__":
    main()
