"""PyTorch's compile logs (``TORCH_TRACE``): compilations, graph breaks and recompilations with their reasons."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.errors import InputError
from ridgeline.trace.payload import read_bytes

_HEADER = re.compile(r"[VIWEC]\d{4} \d\d:\d\d:\d\d\.\d+ (?:\d+ )?[^\]\s]+\] (?=\{)")
_BREAK_AT = re.compile(r"Graph break in user code at (.+?):(\d+)")
_REASON = re.compile(r"(?:Graph Break Reason|Reason): *(.+)")
_EXPLANATION = re.compile(r"Explanation: *(.+)")
_ARTIFACTS = ("dynamo_graph_break_reason", "recompile_reasons")
MAX_REASON = 2_000


@dataclass(frozen=True, slots=True)
class Compilation:
    """One compilation of a frame: seconds it took, why it happened again, why it failed."""

    compile_id: str
    function: str
    file: str
    line: int
    start_s: float
    compile_s: float
    backend_s: float
    num_ops: int
    reason: str
    failure: str

    @property
    def again(self) -> bool:
        """Whether the frame had been compiled before."""
        return not self.compile_id.endswith("/0")


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """Where a graph ended early, and why."""

    compile_id: str
    file: str
    line: int
    reason: str
    hint: str


@dataclass(frozen=True, slots=True)
class Cause:
    """All compile events of one cause at one line: how many, and the seconds they took."""

    kind: str
    where: str
    reason: str
    num: int
    compile_s: float


@dataclass(frozen=True, slots=True)
class CompileLog:
    """Everything of one process."""

    compilations: tuple[Compilation, ...]
    breaks: tuple[GraphBreak, ...]
    notes: tuple[str, ...] = ()

    @property
    def compile_s(self) -> float:
        return sum(compilation.compile_s for compilation in self.compilations)

    def causes(self) -> list[Cause]:
        """Compile events by kind, line and reason; the dearest first."""
        sums: dict[tuple[str, str, str], list[float]] = {}
        for compilation in self.compilations:
            kind = "failed" if compilation.failure else "recompilation" if compilation.again else "first compilation"
            why = compilation.failure or compilation.reason
            _count(sums, kind, f"{compilation.file}:{compilation.line}", _family(why), compilation.compile_s)
        for found in self.breaks:
            _count(sums, "graph break", f"{found.file}:{found.line}", found.reason, 0.0)
        rows = [Cause(*key, num=int(num), compile_s=spent) for key, (num, spent) in sums.items()]
        return sorted(rows, key=lambda row: (-row.compile_s, -row.num, row.where))


def read_compile_log(path: str | os.PathLike[str]) -> CompileLog:
    """A ``dedicated_log_torch_trace_*.log`` file, or the folder ``TORCH_TRACE`` named."""
    source = Path(path)
    if source.is_dir():
        return _joined([_read(file) for file in sorted(source.glob("*.log*"))], source)
    return _read(source)


def is_compile_log(head: bytes) -> bool:
    """Whether a file that begins like this is a structured log."""
    return bool(_HEADER.match(head[:400].decode("utf-8", "replace")))


def _joined(logs: list[CompileLog], source: Path) -> CompileLog:
    if not logs:
        raise InputError(f"{source} holds no .log file: set TORCH_TRACE to a folder before the program imports torch")
    return CompileLog(
        tuple(row for log in logs for row in log.compilations),
        tuple(row for log in logs for row in log.breaks),
        tuple(note for log in logs for note in log.notes),
    )


def _read(path: Path) -> CompileLog:
    text = read_bytes(path).decode("utf-8", "replace")
    if not _HEADER.search(text[:20_000]):
        raise InputError(f"{path} is not a structured compile log: no line begins as TORCH_TRACE's do")
    reader = _Reader()
    for line, payload in _entries(text):
        reader.take(line, payload)
    notes = (f"{reader.num_bad:,} lines could not be read",) if reader.num_bad else ()
    return CompileLog(tuple(reader.compilations), tuple(reader.breaks), notes)


def _entries(text: str) -> Iterator[tuple[str, str]]:
    """Header lines with the indented lines below them."""
    header, payload = "", list[str]()
    for line in text.splitlines():
        if line.startswith("\t"):
            payload.append(line[1:])
            continue
        if header:
            yield header, "\n".join(payload)
        header, payload = line, []
    if header:
        yield header, "\n".join(payload)


class _Reader:
    def __init__(self) -> None:
        self.compilations: list[Compilation] = []
        self.breaks: list[GraphBreak] = []
        self.reasons: dict[str, str] = {}
        self.num_bad = 0

    def take(self, header: str, payload: str) -> None:
        found = _HEADER.match(header)
        if not found or not any(
            f'"{word}"' in header[found.end() : found.end() + 40]
            for word in ("compilation_metrics", "artifact", "str", "dynamo_start", "bwd_compilation_metrics")
        ):
            self.num_bad += not found
            return
        try:
            entry = json.loads(header[found.end() :])
        except (ValueError, RecursionError):
            self.num_bad += 1
            return
        identity = f"{entry.get('frame_id', '')}/{entry.get('frame_compile_id', '')}"
        if isinstance(entry.get("compilation_metrics"), dict):
            self.compilations.append(self._compilation(entry["compilation_metrics"], identity))
        elif isinstance(entry.get("artifact"), dict):
            name = str(entry["artifact"].get("name"))
            if name == "recompile_reasons":
                self.reasons[identity] = _clean_reason(payload)
            elif name == "dynamo_graph_break_reason":
                at, reason, hint = _BREAK_AT.search(payload), _REASON.search(payload), _EXPLANATION.search(payload)
                what = reason.group(1) if reason else _first_line(payload)
                lines = [line.strip() for line in payload.splitlines() if line.strip()]
                if what.rstrip().endswith(":"):  # newer logs put the reason itself on the line after
                    place = next((i for i, line in enumerate(lines) if line.endswith(what.strip())), -1)
                    what = lines[place + 1] if 0 <= place < len(lines) - 1 else what
                self.breaks.append(
                    GraphBreak(
                        identity,
                        at.group(1) if at else "",
                        int(at.group(2)) if at else 0,
                        what.strip()[:MAX_REASON],
                        hint.group(1).strip()[:MAX_REASON] if hint else "",
                    )
                )

    def _compilation(self, facts: dict[str, Any], identity: str) -> Compilation:
        given = str(facts.get("compile_id") or identity)
        restarts = facts.get("restart_reasons")
        reason = self.reasons.get(given) or self.reasons.get(identity) or _text(facts.get("recompile_reason"))
        if not reason and isinstance(restarts, list) and restarts:
            reason = _first_line(str(restarts[0]))
        return Compilation(
            compile_id=given,
            function=_text(facts.get("co_name")),
            file=_text(facts.get("co_filename")),
            line=_whole(facts.get("co_firstlineno")),
            start_s=_number(facts.get("start_time")),
            compile_s=_number(facts.get("entire_frame_compile_time_s")),
            backend_s=_number(facts.get("backend_compile_time_s")),
            num_ops=_whole(facts.get("graph_op_count")),
            reason=reason[:MAX_REASON],
            failure=_first_line(_text(facts.get("fail_reason")))[:MAX_REASON],
        )


def _clean_reason(payload: str) -> str:
    """The guard that failed, from a JSON list or plain text."""
    try:
        found = json.loads(payload)
    except (ValueError, RecursionError):
        found = payload
    lines = [str(line) for line in found] if isinstance(found, list) else str(found).splitlines()
    cleaned = (re.sub(r"^\d+/\d+: ", "", line.strip()) for line in lines if line.strip())
    unique = {_family(line): line for line in cleaned}  # one guard failed in every earlier compilation
    return "; ".join(list(unique.values())[:3])


def _family(reason: str) -> str:
    """The same guard with other numbers is the same cause."""
    return re.sub(r"\d+", "#", reason)


def _count(sums: dict[tuple[str, str, str], list[float]], kind: str, where: str, why: str, spent_s: float) -> None:
    row = sums.setdefault((kind, where, why), [0, 0.0])
    row[0] += 1
    row[1] += spent_s


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and value == value else 0.0


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def reasons_by_line(logs: Iterable[CompileLog]) -> list[Cause]:
    """Causes over several processes, as one table."""
    joined = _joined(list(logs), Path("the logs"))
    return joined.causes()
