"""What is computed: an immutable graph of operators over typed values, with repeated structure kept once."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from ridgeline.dtypes import DType, dtype

if TYPE_CHECKING:
    import os
    from pathlib import Path


class Phase(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Kind(StrEnum):
    """Why a value's memory exists; peak memory is reported by it."""

    PARAM = "param"
    BUFFER = "buffer"
    INPUT = "input"
    CONSTANT = "constant"
    ACTIVATION = "activation"
    GRAD = "grad"
    STATE = "state"  # optimizer state


RESIDENT = frozenset({Kind.PARAM, Kind.BUFFER, Kind.INPUT, Kind.CONSTANT, Kind.STATE})
"""Kinds that exist before the first node runs."""


_numbers: dict[tuple[tuple[int, ...], str, str], int] = {}
_next_number = itertools.count()


def _number(*key: Any) -> int:
    """A number for a type: memories keyed by numbers cost no hashing of types, and the collector nothing."""
    found = _numbers.get(key)
    if found is None:
        # distinct types a process keeps numbered; afterwards known ones may get a second number
        if len(_numbers) >= 500_000:
            _numbers.clear()
        found = _numbers[key] = next(_next_number)
    return found


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape, element type and memory layout.

    ``contiguous``, ``channels_last``, ``transposed`` (dense along another dim than the last) or ``strided`` (any other
    view with gaps or reordered outer dims).
    """

    shape: tuple[int, ...]
    dtype: DType
    layout: str = "contiguous"
    numel: int = field(init=False, compare=False, repr=False)
    num_bytes: int = field(init=False, compare=False, repr=False)
    number: int = field(init=False, compare=False, repr=False)  # types of one number are equal

    def __post_init__(self) -> None:
        """What every walk over a graph asks of its types, again and again, is worked out once."""
        numel = math.prod(self.shape)
        object.__setattr__(self, "numel", numel)
        num_bytes = -(-numel * self.dtype.bits // 8)
        object.__setattr__(self, "num_bytes", int(num_bytes) if self.dtype.family == "packed" else num_bytes)
        object.__setattr__(self, "number", _number(self.shape, self.dtype.name, self.layout))

    def __reduce__(self) -> tuple[type[TensorType], tuple[tuple[int, ...], DType, str]]:
        return TensorType, (self.shape, self.dtype, self.layout)  # numbers are a process's own

    def __str__(self) -> str:
        suffix = "" if self.layout == "contiguous" else f":{self.layout}"
        return f"{self.dtype}[{','.join(map(str, self.shape))}]{suffix}"


@lru_cache(maxsize=1 << 16)
def typed(shape: tuple[int, ...], dtype: DType, layout: str = "contiguous") -> TensorType:
    """The tensor type of these parts, one object for all who ask: a network has far fewer types than tensors."""
    return TensorType(shape, dtype, layout)


def tensor(shape: tuple[int, ...] | list[int], dt: str | DType = "bf16", layout: str = "contiguous") -> TensorType:
    """A tensor type, from a shape and a dtype's name."""
    return TensorType(tuple(shape), dtype(dt), layout)


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor of the graph.

    ``alias`` names the value whose storage it shares (a view, or the result of an in-place op); a value without
    alias owns ``type.num_bytes`` of memory (or ``storage_bytes`` where the allocation is larger than the tensor).
    ``count`` > 1 marks a stack: one such tensor per iteration of a Block; nodes inside the block mean their own
    iteration's.
    """

    id: int
    type: TensorType
    kind: Kind = Kind.ACTIVATION
    alias: int | None = None
    count: int = 1
    name: str = ""
    storage_bytes: int | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of memory owned per iteration; 0 for an alias."""
        if self.alias is not None:
            return 0
        return self.type.num_bytes if self.storage_bytes is None else self.storage_bytes


@dataclass(frozen=True, slots=True)
class Node:
    """One operator call. ``frees`` are the values whose storage nobody needs after it has run."""

    op: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    phase: Phase = Phase.FORWARD
    module: str = ""  # dotted module path; ``*`` stands for the iteration inside a block
    source: str = ""  # file:line of the model's code
    target: str = ""  # what the framework called it, e.g. aten.addmm.default
    frees: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Carry:
    """A value handed from one iteration to the next: ``inner`` is ``init`` in the first, then the last ``next``."""

    init: int
    inner: int
    next: int


@dataclass(frozen=True, slots=True)
class Block:
    """A body that runs ``repeat`` times.

    Stacked values (``count`` > 1) used inside mean the slice of this iteration; with ``reverse`` iteration i uses
    slice ``repeat - 1 - i``, as a backward pass does. A value defined inside and used after the block without being
    stacked is that of the last iteration run.
    """

    nodes: tuple[Node, ...]
    repeat: int
    carries: tuple[Carry, ...] = ()
    reverse: bool = False
    module: str = ""


Item = Node | Block


@dataclass(frozen=True)
class Graph:
    """Operators in schedule order, with every value they touch."""

    name: str
    values: tuple[Value, ...]  # values[i].id == i
    items: tuple[Item, ...]
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    mode: str = "infer"
    meta: Mapping[str, Any] = field(default_factory=dict)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """A graph made from a template has no values until somebody asks for them."""
            template = self.__dict__.get("template")
            if name != "values" or template is None:
                raise AttributeError(f"a graph has no {name}")
            made, _, numbers = template
            values = self.__dict__["values"] = made.values(numbers)
            return values

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Graph:
        """Read a graph that ``save`` wrote; anything else is a GraphError that says what is wrong and where."""
        from ridgeline.graph.serial import load

        return load(path)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the graph as JSON, compressed when the name ends in ``.gz``."""
        from ridgeline.graph.serial import save

        return save(self, path)

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def nodes(self) -> Iterator[tuple[Node, int]]:
        """Every distinct node with the number of times it runs."""
        for item in self.items:
            if isinstance(item, Block):
                for node in item.nodes:
                    yield node, item.repeat
            else:
                yield item, 1

    @property
    def num_nodes(self) -> int:
        """Nodes as run, repeats counted."""
        return sum(times for _, times in self.nodes())

    def type_of(self, value: int) -> TensorType:
        return self.values[value].type

    def in_types(self, node: Node) -> tuple[TensorType, ...]:
        values = self.values
        return tuple(values[i].type for i in node.inputs)

    def out_types(self, node: Node) -> tuple[TensorType, ...]:
        values = self.values
        return tuple(values[i].type for i in node.outputs)

    @property
    def num_params(self) -> int:
        """Elements of all distinct parameters."""
        return sum(v.type.numel * v.count for v in self.values if v.kind is Kind.PARAM and v.alias is None)

    @property
    def param_bytes(self) -> int:
        return sum(v.num_bytes * v.count for v in self.values if v.kind is Kind.PARAM)

    @cached_property
    def content_hash(self) -> str:
        """Equal graphs hash equal, whatever their name, source lines or machine."""
        digest = hashlib.sha256()
        for v in self.values:
            digest.update(f"{v.id}|{v.type}|{v.kind}|{v.alias}|{v.count}|{v.storage_bytes};".encode())
        for item in self.items:
            digest.update(_item_text(item).encode())
        digest.update(f"{self.inputs}{self.outputs}{self.mode}".encode())
        return digest.hexdigest()[:32]

    def __str__(self) -> str:
        from ridgeline.graph.text import to_text

        return to_text(self)


def _node_text(n: Node) -> str:
    attrs = json.dumps(dict(n.attrs), sort_keys=True, default=str)
    return f"{n.op}|{n.inputs}|{n.outputs}|{attrs}|{n.phase}|{n.target}|{n.frees};"


def _item_text(item: Item) -> str:
    if isinstance(item, Node):
        return _node_text(item)
    body = "".join(_node_text(n) for n in item.nodes)
    return f"block {item.repeat} {item.reverse} {item.carries} {{{body}}}"
