"""A difference of two runs, or a gate's verdict, as one HTML file or as Markdown for a pull request."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from pathlib import Path

from ridgeline.errors import InputError
from ridgeline.findings.diff import Change, Difference
from ridgeline.findings.labels import spoken
from ridgeline.findings.regression import Gate
from ridgeline.web.report import POLICY, asset

_HEADS = ("what", "A ms", "B ms", "change ms", "why")


def write_text(text: str, path: str | os.PathLike[str]) -> Path:
    """Write a page or a comment."""
    target = Path(path)
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}; choose a folder you may write to") from error
    return target


def difference_head(found: Difference) -> str:
    """One sentence: which run is slower, and by how much."""
    share = abs(found.delta_ms) / found.a_step_ms if found.a_step_ms else 0.0
    moved = f"{found.a_step_ms:,.4g} → {found.b_step_ms:,.4g} ms a step ({found.delta_ms:+,.3g} ms)"
    if share < 0.0005:
        return f"No difference: {moved}"
    return f"B is {share:.1%} {'slower' if found.delta_ms > 0 else 'faster'}: {moved}"


def difference_markdown(found: Difference, top: int = 15) -> str:
    """A heading, what differs before any kernel does, and the largest changes as a table."""
    lines = [f"### {_plain(difference_head(found))}", "", f"A: {_plain(found.a)}  ", f"B: {_plain(found.b)}", ""]
    return "\n".join([*lines, *_markdown_body(found, top)]) + "\n"


def gate_markdown(found: Gate, top: int = 15) -> str:
    """The verdict in one line, the runs it rests on, and what changed most."""
    sign = {"regression": "❌", "inconclusive": "⚠️", "ok": "✅", "improvement": "✅"}[found.verdict.verdict]
    head, end, why = found.message.partition(" allowed); ")  # what changed is in the table too, where there is one
    lines = [f"### {sign} {_plain(head + end.removesuffix('; '))}", ""]
    lines += [_plain(why), ""] if why and found.difference is None else []
    lines += [_plain(_rests_on(found)), "", *(f"- {_plain(note)}" for note in found.verdict.notes), ""]
    body = _markdown_body(found.difference, top) if found.difference is not None else []
    return "\n".join([*lines, *body]) + "\n"


def difference_page(found: Difference, top: int = 60) -> str:
    """The difference as a page of its own."""
    body = [_tag("p", difference_head(found), "verdict"), _tag("p", f"A: {found.a}"), _tag("p", f"B: {found.b}")]
    return _page(f"{found.a} against {found.b}", "compared", [*body, *_html_body(found, top)])


def gate_page(found: Gate, top: int = 60) -> str:
    """The verdict as a page of its own."""
    body = [_tag("p", found.message, "verdict"), _tag("p", _rests_on(found), "dim")]
    body += [_tag("p", note, "dim") for note in found.verdict.notes]
    return _page(f"gate: {found.verdict.verdict}", "gate",
                 [*body, *(_html_body(found.difference, top) if found.difference is not None else [])])  # fmt: skip


def _rests_on(found: Gate) -> str:
    v = found.verdict
    return (f"{v.num_baseline} runs of the baseline, {v.num_runs} judged; a run scatters by {v.noise_frac:.1%}; "
            f"p = {v.p_slower:.2g} that runs no slower than the baseline look like this by chance")  # fmt: skip


def _rows(changes: Sequence[Change]) -> list[tuple[str, ...]]:
    return [
        (spoken(c.key), f"{c.a_ms:,.3f}", f"{c.b_ms:,.3f}", f"{c.delta_ms:+,.3f}", c.why) for c in changes if c.delta_ms
    ]


def _notes(found: Difference) -> list[str]:
    ranks = [f"mean over {found.num_ranks} ranks"] if found.num_ranks > 1 else []
    aligned = f"aligned by {found.aligned_by}, {found.matched_frac:.0%} of the time matches"
    return [*ranks, aligned, *found.notes]


def _markdown_body(found: Difference, top: int) -> list[str]:
    lines = [f"- {_plain(setting)}" for setting in found.settings]
    lines += [""] if lines else []
    rows = _rows(found.changes[:top])
    if rows:
        lines += ["| " + " | ".join(_HEADS) + " |", "| :-- | --: | --: | --: | :-- |"]
        lines += ["| " + " | ".join(_plain(cell) for cell in row) + " |" for row in rows]
    rest = found.delta_ms - sum(change.delta_ms for change in found.changes[:top])
    lines += ["", f"Everything else: {rest:+,.3f} ms."] if abs(rest) > 5e-4 else []
    return [*lines, "", *(f"- {_plain(note)}" for note in _notes(found))]


def _plain(text: str) -> str:
    """Text that Markdown shows as it is: no markup, no table cell, no mention, no line of its own."""
    clean = "".join(char if char.isprintable() else " " for char in text)
    return "".join(f"&#{ord(char)};" if char in "\\`*_{}[]<>|#@~$&" else char for char in clean[:400])


def _html_body(found: Difference, top: int) -> list[str]:
    body = [_tag("h2", "What differs before any kernel does")] if found.settings else []
    body += [_tag("li", setting) for setting in found.settings]
    numbers = ["", "num", "num", "num", ""]
    heads = "".join(_tag("th", head, sort) for head, sort in zip(_HEADS, numbers, strict=True))
    rows = "".join(
        f"<tr>{''.join(_tag('td', cell, sort) for cell, sort in zip(row, numbers, strict=True))}</tr>"
        for row in _rows(found.changes[:top])
    )
    table = f'<div class="scroll"><table id="table"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
    return [*body, _tag("h2", "What changed"), table, *(_tag("p", note, "dim") for note in _notes(found))]


def _tag(name: str, text: str, sort: str = "") -> str:
    clean = "".join(char if char.isprintable() else " " for char in text)
    return f"<{name}{f' class={chr(34)}{sort}{chr(34)}' if sort else ''}>{html.escape(clean)}</{name}>"


def _page(title: str, kind: str, body: Sequence[str]) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)} · Ridgeline</title>\n<style>\n{asset('report.css')}{asset('explain.css')}"
        "#table td, p, li, h1 { white-space: normal; overflow-wrap: anywhere; max-width: none; }\n"
        "#table td:first-child, #table td:last-child { min-width: 200px; }\n</style>\n</head>\n<body>\n"
        f'<header><div class="wrap head"><div><div class="brand">Ridgeline <span>{html.escape(kind)}</span></div>'
        f"{_tag('h1', title)}</div></div></header>\n"
        f'<main class="wrap"><section class="panel">\n{chr(10).join(body)}\n</section></main>\n</body>\n</html>\n'
    )
