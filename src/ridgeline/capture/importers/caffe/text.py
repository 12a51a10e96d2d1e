"""Protobuf text format, as ``prototxt`` files are written: messages as dicts of lists."""

from __future__ import annotations

import re
from typing import Any

from ridgeline.errors import ModelFileError

MAX_DEPTH = 32
MAX_BYTES = 1 << 26
Message = dict[str, list[Any]]
_TOKEN = re.compile(
    r"""\s+|\#[^\n]*|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|[A-Za-z_][\w./\-]*|[-+.\d][\w.+\-]*|[{}<>:\[\],;]"""
)


def parsed(content: str, where: str) -> Message:
    """The message that a text holds."""
    if len(content) > MAX_BYTES:
        raise ModelFileError(f"{where} takes {len(content) / 1e6:,.0f} MB: no definition does")
    tokens: list[tuple[str, int]] = []
    at, line = 0, 1
    while at < len(content):
        found = _TOKEN.match(content, at)
        if found is None:
            raise ModelFileError(f"{where}, line {line}: cannot read {content[at : at + 20]!r}: it is no prototxt")
        token = found[0]
        if not token.isspace() and not token.startswith("#"):
            tokens.append((token, line))
        line += token.count("\n")
        at = found.end()
    message, end = _message(tokens, 0, where, 0)
    if end != len(tokens):
        raise ModelFileError(f"{where}, line {tokens[end][1]}: a closing brace too many")
    return message


def _message(tokens: list[tuple[str, int]], at: int, where: str, depth: int) -> tuple[Message, int]:
    if depth > MAX_DEPTH:
        raise ModelFileError(f"{where}: messages nest more than {MAX_DEPTH} deep: no definition does")
    out: Message = {}
    while at < len(tokens) and tokens[at][0] not in "}>":
        name, line = tokens[at]
        if not (name[0].isalpha() or name[0] == "_"):
            raise ModelFileError(f"{where}, line {line}: {name!r} where a field's name belongs")
        at += 1
        if at < len(tokens) and tokens[at][0] == ":":
            at += 1
        if at >= len(tokens):
            raise ModelFileError(f"{where}: ends after {name!r}: the file is cut short")
        if tokens[at][0] == "[":
            at += 1
            while at < len(tokens) and tokens[at][0] != "]":
                if tokens[at][0] != ",":
                    out.setdefault(name, []).append(_scalar(tokens[at], where))
                at += 1
            at += 1
        elif tokens[at][0] in "{<":
            inner, at = _message(tokens, at + 1, where, depth + 1)
            if at >= len(tokens):
                raise ModelFileError(f"{where}: {name!r} of line {line} is not closed: the file is cut short")
            at += 1
            out.setdefault(name, []).append(inner)
        else:
            value = _scalar(tokens[at], where)
            at += 1
            while (
                isinstance(value, str)
                and at < len(tokens)
                and tokens[at][0][0] in "\"'"
                and tokens[at - 1][0][0] in "\"'"
            ):
                value += _scalar(tokens[at], where)  # strings side by side are one
                at += 1
            out.setdefault(name, []).append(value)
        if at < len(tokens) and tokens[at][0] in ",;":
            at += 1
    return out, at


def _scalar(token: tuple[str, int], where: str) -> Any:
    text, line = token
    if text[0] in "\"'":
        return re.sub(r"\\(.)", lambda m: {"n": "\n", "t": "\t"}.get(m[1], m[1]), text[1:-1])
    if text[0].isalpha() or text[0] == "_":
        return {"true": True, "false": False, "True": True, "False": False}.get(text, text)
    for kind in (int, float):
        try:
            return kind(text.rstrip("fF") if kind is float else text)
        except ValueError:
            continue
    raise ModelFileError(f"{where}, line {line}: cannot read {text!r} as a value")
