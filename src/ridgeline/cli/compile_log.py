"""``ridgeline explain`` of what ``TORCH_TRACE`` wrote: compilations and graph breaks, by line and cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.text import Text

from ridgeline.cli.draw import DIM, add_rows, console, hanging, shortened, table
from ridgeline.errors import InputError
from ridgeline.trace.payload import head_of
from ridgeline.trace.read import trace_files
from ridgeline.trace.torchlog import CompileLog, is_compile_log, read_compile_log
from ridgeline.units import show_seconds


def compile_log_of(sources: Sequence[str]) -> CompileLog | None:
    """The log, if one source is given and it is a log, or a folder of logs without a trace."""
    path = Path(sources[0])
    if len(sources) != 1 or not path.exists():
        return None
    logs = sorted(path.glob("*.log*")) if path.is_dir() and not _has_traces(path) else [path] if path.is_file() else []
    return read_compile_log(path) if logs and is_compile_log(head_of(logs[0])) else None


def _has_traces(folder: Path) -> bool:
    try:
        return bool(trace_files(folder))
    except InputError:
        return False


def verdict_of(log: CompileLog) -> str:
    """One sentence a person would say."""
    again = sum(one.again for one in log.compilations)
    made, broken = _counted(len(log.compilations), "compilation"), _counted(len(log.breaks), "graph break")
    return f"Compilation alone: {show_seconds(log.compile_s)} in {made}, of which {again} again, with {broken}."


def _counted(num: int, noun: str) -> str:
    return f"{num:,} {noun}{'' if num == 1 else 's'}"


def document_of(log: CompileLog) -> dict[str, Any]:
    """What ``--json`` prints; a log knows nothing of the device, so the rest of an explanation is not in it."""
    return {
        "verdict": verdict_of(log),
        "compile_s": log.compile_s,
        "num_compilations": len(log.compilations),
        "num_recompilations": sum(one.again for one in log.compilations),
        "num_graph_breaks": len(log.breaks),
        "causes": [asdict(cause) for cause in log.causes()],
        "notes": list(log.notes),
    }


def show(log: CompileLog, title: str, top: int) -> None:
    """The verdict, and the dearest lines."""
    out = console()
    out.print(Text(title, style="bold"))
    out.print(Text(verdict_of(log), style="bold yellow" if log.breaks else "bold green"))
    out.print()
    causes = log.causes()
    made = table("By line", ("where", "left"), ("n", "right"), ("time", "right"), ("what", "left"), ("why", "left"))
    made.columns[-1].no_wrap = False
    rows = [(one.where, f"{one.num}", show_seconds(one.compile_s), one.kind, one.reason) for one in causes[:top]]
    add_rows(made, [(shortened(row[0], max(20, out.width // 4)), *row[1:]) for row in rows], out.width, shortened)
    out.print(made)
    if len(causes) > top:
        out.print(Text(f"  {len(causes) - top} more with --top {len(causes)} or --json", style=DIM))
    for note in log.notes:
        out.print(hanging("· ", Text(note, style=DIM)))
