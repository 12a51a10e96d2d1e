"""The table of ONNX ops: each a function of PyTorch values, with what it needs to know on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ridgeline.capture.importers.onnx.file import AttrRef, Node
from ridgeline.capture.importers.program import Context
from ridgeline.errors import ModelFileError

FIRST_OPSET, LAST_OPSET = 7, 23


@dataclass(frozen=True, slots=True)
class Op:
    """``host`` arguments are given as data, ``known`` ones where the host has it.

    ``raw`` functions take values unconverted; ``eager`` ones are never folded; those that ``grow`` are tried on meta
    tensors first; ``scalars`` take constants of one element as Python numbers.
    """

    name: str
    fn: Callable[..., Any]
    since: int
    host: frozenset[int]
    raw: bool
    eager: bool
    grows: bool
    scalars: bool
    known: frozenset[int]


OPS: dict[tuple[str, str], Op] = {}


def op(names: str, *, host: tuple[int, ...] = (), since: int = 1, raw: bool = False, eager: bool = False,
       grows: bool = False, scalars: bool = False, known: tuple[int, ...] = (),
       domain: str = "") -> Callable[[Any], Any]:  # fmt: skip
    """Register a function for ops of these names."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        for name in names.split():
            assert (domain, name) not in OPS, name
            OPS[domain, name] = Op(name, fn, since, frozenset(host), raw, eager, grows, scalars, frozenset(known))
        return fn

    return register


class Call:
    """One node being run: its attributes, the op-set version of its domain, and what is around it."""

    __slots__ = ("ctx", "device", "evaluate", "node", "opset", "where")

    def __init__(self, node: Node, opset: int, ctx: Context, where: str, evaluate: Any) -> None:
        self.node, self.opset, self.ctx, self.where, self.evaluate = node, opset, ctx, where, evaluate
        self.device = torch.device("cpu")  # where a tensor is made that nothing leads to

    def get(self, name: str, default: Any = None) -> Any:
        value = self.node.attrs.get(name, default)
        if isinstance(value, AttrRef):
            raise self.wrong(f"attribute {name!r} refers to {value.name!r} outside of a function")
        return value

    def integer(self, name: str, default: int = 0) -> int:
        value = self.get(name, default)
        if not isinstance(value, int):
            raise self.wrong(f"attribute {name!r} is no integer")
        return value

    def ints(self, name: str, default: list[int] | None = None) -> Any:
        value = self.get(name, default)
        if value is not None and (not isinstance(value, list) or any(not isinstance(v, int) for v in value)):
            raise self.wrong(f"attribute {name!r} is no list of integers")
        return value

    def number(self, name: str, default: float = 0.0) -> float:
        value = self.get(name, default)
        if not isinstance(value, (int, float)):
            raise self.wrong(f"attribute {name!r} is no number")
        return float(value)

    def text(self, name: str, default: str = "") -> str:
        value = self.get(name, default)
        if not isinstance(value, (bytes, str)):
            raise self.wrong(f"attribute {name!r} is no string")
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else value

    def texts(self, name: str) -> Any:
        value = self.get(name)
        return None if value is None else [v.decode("utf-8", "replace") for v in value]

    @property
    def num_outputs(self) -> Any:
        return len(self.node.outputs)

    def wants(self, index: Any) -> Any:
        """Whether output ``index`` is used."""
        return len(self.node.outputs) > index and bool(self.node.outputs[index])

    def put(self, t: Any) -> Any:
        """A tensor of the host where the op runs."""
        return t if self.device.type == "cpu" or t.is_meta else self.ctx.constant(t)

    def wrong(self, why: str) -> ModelFileError:
        return ModelFileError(f"{self.where}: {why}")


def items(t: torch.Tensor) -> list[Any]:
    """Host data as Python numbers."""
    return t.reshape(-1).tolist()
