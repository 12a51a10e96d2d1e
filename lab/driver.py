"""One command a package: ``python -m lab.PACKAGE COMMAND …`` runs the module of that name."""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path


def commands(package: str) -> dict[str, str]:
    """The modules of a package that have a ``main``, with the first sentence of each."""
    spec = find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    found = {}
    for path in sorted(path for folder in folders or () for path in Path(folder).glob("*.py") if path.stem[0] != "_"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            found[path.stem] = (ast.get_docstring(tree) or "").split("\n")[0]
    return found


def run(package: str) -> None:
    """Runs ``package.COMMAND.main()``, which reads the rest of the command line; without a command, lists them."""
    known, argv = commands(package), sys.argv[1:]
    if not argv or argv[0] not in known:
        print(f"python -m {package} COMMAND …\n")
        for name, sentence in known.items():
            print(f"  {name:20} {sentence}")
        if argv and argv[0] not in ("-h", "--help"):
            sys.exit(f"\nno command {argv[0]!r}")
        return
    sys.argv = [f"python -m {package} {argv[0]}", *argv[1:]]
    import_module(f"{package}.{argv[0]}").main()
