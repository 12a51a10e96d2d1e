"""What mkdocs fills in: the reference of commands, made from their declarations, and the list of design pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    if "<!-- commands -->" in markdown:
        return markdown.replace("<!-- commands -->", _commands())
    if "<!-- design -->" in markdown:
        pages = sorted(path for path in (Path(__file__).parent / "design").glob("*.md") if path.name != "index.md")
        lines = [f"- [{path.read_text(encoding='utf-8').splitlines()[0].lstrip('# ')}]({path.name})" for path in pages]
        return markdown.replace("<!-- design -->", "\n".join(lines))
    return markdown


def _commands() -> str:
    import typer

    from ridgeline.cli.app import app

    return "\n".join(_described(typer.main.get_command(app), "ridgeline", 1))


def _described(command: Any, name: str, depth: int) -> list[str]:
    subcommands = getattr(command, "commands", {})
    lines = [f"{'#' * min(depth + 1, 4)} {name}", "", command.help or "", ""] if depth > 1 else []
    options = [param for param in command.params if param.name != "help"]
    if options and not subcommands:
        lines += ["| option | what |", "|---|---|"]
        for param in options:
            spelled = ", ".join(param.opts) if param.param_type_name == "option" else param.name.upper()
            text = (getattr(param, "help", "") or "").replace("|", "\\|").replace("<", "&lt;")
            lines.append(f"| `{spelled}` | {text} |")
        lines.append("")
    for sub, made in subcommands.items():
        lines += _described(made, f"{name} {sub}", depth + 1)
    return lines
