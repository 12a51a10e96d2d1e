"""Objectives and constraints: a small language of numbers with units, names, comparisons, ``and``, ``or`` and ``not``.

``fits and tpot < 40ms``, ``usd_per_mtoken``, ``energy_j / tokens``, ``min(area_mm2, 800)``. Nothing is ever evaluated
as Python. An expression is a tree of tuples; names are columns, and the value is a column.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import InputError, UnitError, nearest
from ridgeline.units import parse_quantity

Tree = tuple[Any, ...]
_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?:[A-Za-zµ%]+(?:/[A-Za-z]+)?)?)"
    r"|(?P<text>'[^']*'|\"[^\"]*\")|(?P<name>[A-Za-z_][\w.]*)|(?P<sign><=|>=|==|!=|<|>|\+|-|\*|/|\(|\)|,))"
)
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal, "==": np.equal, "!=": np.not_equal,
}  # fmt: skip
_FUNCTIONS: dict[str, tuple[Callable[..., Any], int]] = {
    "min": (np.minimum, 2), "max": (np.maximum, 2), "abs": (np.abs, 1), "sqrt": (np.sqrt, 1), "log": (np.log, 1),
}  # fmt: skip
_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide, "and": np.logical_and, "or": np.logical_or,
}  # fmt: skip
_LEVELS = {"or": 0, "and": 1, "not": 2, **dict.fromkeys(_COMPARISONS, 3), "+": 4, "-": 4, "*": 5, "/": 5}
"""How strongly an operator binds."""
MAX_LENGTH = 1000


@dataclass(frozen=True, slots=True)
class Expression:
    """What was written, and what it means."""

    text: str
    tree: Tree

    def names(self) -> tuple[str, ...]:
        """The columns it needs, in the order they are met."""
        return tuple(dict.fromkeys(_names(self.tree)))

    def value(self, columns: Mapping[str, Any]) -> NDArray[Any]:
        """Its value for every row."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(_value(self.tree, columns))

    def parts(self) -> tuple[Expression, ...]:
        """What ``and`` joins at the top: a point that fails one of them says which."""
        if self.tree[0] != "and":
            return (self,)
        return tuple(part for side in self.tree[1:] for part in Expression(text_of(side), side).parts())


def parse(text: str, rename: Mapping[str, str] | None = None) -> Expression:
    """Read an expression; ``rename`` gives names that people write the names of columns."""
    if len(text) > MAX_LENGTH:
        raise InputError(f"expression of {len(text)} characters: at most {MAX_LENGTH}")
    tokens, position = list[tuple[str, str]](), 0
    while position < len(text.rstrip()):
        match = _TOKEN.match(text, position)
        if match is None:
            raise InputError(f"cannot read {text!r} at {text[position:].strip()[:12]!r}")
        kind = str(match.lastgroup)
        tokens.append((kind, match.group(kind)))
        position = match.end()
    reader = _Reader(text, tokens, rename or {})
    if not tokens:
        raise InputError("an expression is empty: write a measure such as step_s, or a condition such as tpot<40ms")
    tree = reader.either()
    if reader.at < len(tokens):
        raise InputError(f"cannot read {text!r}: {tokens[reader.at][1]!r} is not expected there")
    return Expression(text.strip(), tree)


class _Reader:
    """Recursive descent: or, and, not, comparison, sum, product, sign, atom."""

    def __init__(self, text: str, tokens: list[tuple[str, str]], rename: Mapping[str, str]) -> None:
        self.text, self.tokens, self.rename, self.at, self.depth = text, tokens, rename, 0, 0

    def peek(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else ""

    def taken(self, *words: str) -> str:
        """The next token, if it is one of these words."""
        if self.at < len(self.tokens) and self.tokens[self.at][0] != "text" and self.peek() in words:
            self.at += 1
            return self.tokens[self.at - 1][1]
        return ""

    def either(self) -> Tree:
        self.depth += 1
        if self.depth > 40:
            raise InputError(f"{self.text!r} nests too deeply")
        tree = self.both()
        while self.taken("or"):
            tree = ("or", tree, self.both())
        self.depth -= 1
        return tree

    def both(self) -> Tree:
        tree = self.negated()
        while self.taken("and"):
            tree = ("and", tree, self.negated())
        return tree

    def negated(self) -> Tree:
        if self.taken("not"):
            return ("not", self.negated())
        tree = self.added()
        if sign := self.taken(*_COMPARISONS):
            return (sign, tree, self.added())
        return tree

    def added(self) -> Tree:
        tree = self.multiplied()
        while sign := self.taken("+", "-"):
            tree = (sign, tree, self.multiplied())
        return tree

    def multiplied(self) -> Tree:
        tree = self.signed()
        while sign := self.taken("*", "/"):
            tree = (sign, tree, self.signed())
        return tree

    def signed(self) -> Tree:
        return ("-", ("number", 0.0), self.signed()) if self.taken("-") else self.atom()

    def atom(self) -> Tree:
        if self.taken("("):
            tree = self.either()
            self.closed()
            return tree
        if self.at >= len(self.tokens):
            raise InputError(f"cannot read {self.text!r}: something is missing at its end")
        kind, word = self.tokens[self.at]
        self.at += 1
        if kind == "number":
            try:
                return ("number", float(word[:-1]) / 100 if word.endswith("%") else parse_quantity(word))
            except (UnitError, ValueError) as error:
                raise InputError(f"cannot read the number {word!r} in {self.text!r}: {error}") from error
        if kind == "text":
            return ("text", word[1:-1])
        if kind == "name" and word not in ("and", "or", "not"):
            return self.called(word) if self.taken("(") else ("name", self.rename.get(word, word))
        raise InputError(f"cannot read {self.text!r}: {word!r} is not expected there")

    def called(self, name: str) -> Tree:
        if name not in _FUNCTIONS:
            raise InputError(f"no function {name!r} in {self.text!r}{nearest(name, _FUNCTIONS)}")
        given = [self.either()]
        while self.taken(","):
            given.append(self.either())
        self.closed()
        if len(given) != _FUNCTIONS[name][1]:
            raise InputError(f"{name} takes {_FUNCTIONS[name][1]} values, not {len(given)}, in {self.text!r}")
        return ("call", name, *given)

    def closed(self) -> None:
        if not self.taken(")"):
            raise InputError(f"a parenthesis of {self.text!r} is not closed")


def _names(tree: Tree) -> list[str]:
    if tree[0] == "name":
        return [tree[1]]
    return [name for part in tree[1:] if isinstance(part, tuple) for name in _names(part)]


def _value(tree: Tree, columns: Mapping[str, Any]) -> Any:
    kind = tree[0]
    if kind in ("number", "text"):
        return tree[1]
    if kind == "name":
        if tree[1] not in columns:
            raise InputError(f"nothing is called {tree[1]!r}{nearest(tree[1], columns)}")
        return columns[tree[1]]
    if kind == "not":
        return np.logical_not(_value(tree[1], columns))
    if kind == "call":
        return _FUNCTIONS[tree[1]][0](*(_value(part, columns) for part in tree[2:]))
    return (_COMPARISONS.get(kind) or _ARITHMETIC[kind])(_value(tree[1], columns), _value(tree[2], columns))


def text_of(tree: Tree) -> str:
    """The expression as it would be written."""
    kind = tree[0]
    if kind == "number":
        return f"{tree[1]:g}"
    if kind == "text":
        return repr(tree[1])
    if kind == "name":
        return str(tree[1])
    if kind == "not":
        return f"not {_side(tree[1], _LEVELS['not'])}"
    if kind == "call":
        return f"{tree[1]}({', '.join(text_of(part) for part in tree[2:])})"
    level = _LEVELS[kind]
    return f"{_side(tree[1], level + (kind in _COMPARISONS))} {kind} {_side(tree[2], level + 1)}"


def _side(tree: Tree, level: int) -> str:
    """An operand, in parentheses where it binds less than ``level``: operators of one level are read from the left."""
    return text_of(tree) if _LEVELS.get(tree[0], level) >= level else f"({text_of(tree)})"
