"""A program: the calls that a model issues, as data. Every op is of a closed, versioned set.

An argument is a plain JSON value or one of these one-key objects: ``{"v": 3}`` a value of the program,
``{"w": "fc.weight"}`` a weight, ``{"dtype": …}``, ``{"device": "engine"}``, ``{"layout": …}``,
``{"memory_format": …}``, ``{"float": "inf"}``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ridgeline.errors import EngineError, nearest

OPSET = 1
MAX_DEPTH = 16
DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16",
          "int8", "uint8", "bool", "complex64", "complex128")  # fmt: skip
MEMORY_FORMATS = ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
SPECIAL_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
SIZE_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv, "mod": operator.mod,
    "truediv": operator.truediv, "neg": operator.neg, "min": min, "max": max, "floor": math.floor, "ceil": math.ceil,
    "trunc": math.trunc, "int": int, "float": float, "eq": operator.eq, "ne": operator.ne, "lt": operator.lt,
    "le": operator.le, "gt": operator.gt, "ge": operator.ge, "not": operator.not_, "item": operator.getitem,
    "and": operator.and_, "or": operator.or_,
}  # fmt: skip
"""Arithmetic on sizes, written ``size::mul``."""


@cache
def aten_names() -> frozenset[str]:
    """Names of the ATen ops that a program may call."""
    lines = Path(__file__).with_name("opset.txt").read_text(encoding="utf-8").splitlines()
    return frozenset(word for line in lines if not line.startswith("#") for word in line.split())


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor that the program takes; a dim is a size or the name of one."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One call. ``out`` has the number of each value it makes; several if the call returns a tuple."""

    op: str  # "aten::linear.default", "size::mul", "ridgeline_kernels::rms_norm.default", "engine::int8_linear"
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: tuple[int, ...]
    several: bool = False
    module: str = ""
    types: tuple[str, ...] = ()

    def values(self) -> Iterator[int]:
        """Numbers of the values it reads."""
        for found in leaves([*self.args, *self.kwargs.values()]):
            if isinstance(found, dict) and "v" in found:
                yield found["v"]

    def weights(self) -> Iterator[str]:
        for found in leaves([*self.args, *self.kwargs.values()]):
            if isinstance(found, dict) and "w" in found:
                yield found["w"]

    def to_json(self) -> dict[str, Any]:
        made: dict[str, Any] = {"op": self.op, "args": list(self.args), "out": list(self.out)}
        made |= {"kwargs": dict(self.kwargs)} if self.kwargs else {}
        made |= {"several": True} if self.several else {}
        made |= {"module": self.module} if self.module else {}
        return made | ({"types": list(self.types)} if self.types else {})


@dataclass(frozen=True, slots=True)
class Program:
    """The steps of one call, for the sizes that ``dims`` allow; without ``dims``, for exactly the inputs' shapes.

    ``outputs`` is the structure of what is returned: an argument as above, or ``{"tuple": […]}``, ``{"list": […]}``,
    ``{"dict": [[name, …], …]}``, or ``record`` likewise for an object with named fields. ``issued`` says
    that the steps are what a candidate of the search issued, kernels included, on the engine's target.
    """

    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: Any
    dims: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    issued: bool = False

    @property
    def num_values(self) -> int:
        return max([len(self.inputs), *(i + 1 for step in self.steps for i in step.out)])

    def weight_names(self) -> frozenset[str]:
        held = [found["w"] for found in leaves(self.outputs) if isinstance(found, dict) and "w" in found]
        return frozenset([*(name for step in self.steps for name in step.weights()), *held])

    def to_json(self) -> dict[str, Any]:
        return {
            "inputs": [{"name": i.name, "dtype": i.dtype, "shape": list(i.shape)} for i in self.inputs],
            "dims": {name: list(bounds) for name, bounds in self.dims.items()},
            "issued": self.issued,
            "outputs": self.outputs,
            "steps": [step.to_json() for step in self.steps],
        }

    @classmethod
    def from_json(cls, found: Any, weights: frozenset[str] | set[str], what: str) -> Program:
        """A program read from a file: every op known, every value made before it is read, every weight in the file."""
        reader = _Reader(what, weights)
        return reader.program(found)


def leaves(item: Any) -> Iterator[Any]:
    """Every argument inside lists and structures."""
    if isinstance(item, (list, tuple)):
        for each in item:
            yield from leaves(each)
    elif (kind := kind_of(item)) is not None:
        for each in item[kind]:
            yield from leaves(each[1] if kind in ("dict", "record") else each)
    else:
        yield item


def kind_of(item: Any) -> str | None:
    """Which structure something is, if it is one."""
    kind = next(iter(item)) if isinstance(item, dict) and len(item) == 1 else None
    return kind if kind in ("tuple", "list", "dict", "record") else None


class _Reader:
    """Reads a program and refuses what is not one."""

    def __init__(self, what: str, weights: frozenset[str] | set[str]) -> None:
        self.what, self.weights, self.made = what, weights, set[int]()

    def fail(self, why: str) -> EngineError:
        return EngineError(f"{self.what}: {why}")

    def program(self, found: Any) -> Program:
        if not isinstance(found, dict) or not {"inputs", "steps", "outputs", "dims"} <= set(found):
            raise self.fail("is not a program (inputs, dims, steps and outputs)")
        dims = self._dims(found["dims"])
        inputs = self._inputs(found["inputs"], dims)
        self.made = set(range(len(inputs)))
        if not isinstance(found["steps"], list):
            raise self.fail("steps is not a list")
        steps = tuple(self._step(i, step) for i, step in enumerate(found["steps"]))
        self._structure(found["outputs"], "outputs", 0)
        return Program(inputs, steps, found["outputs"], dims, found.get("issued") is True)

    def _dims(self, found: Any) -> dict[str, tuple[int, int]]:
        if not isinstance(found, dict):
            raise self.fail("dims is not an object")
        made = {}
        for name, bounds in found.items():
            ends = isinstance(bounds, list) and len(bounds) == 2 and all(type(b) is int for b in bounds)
            if not ends or not 0 <= bounds[0] <= bounds[1] < 1 << 40:
                raise self.fail(f"dim {shown(name)} has no bounds [low, high]")
            made[name] = (bounds[0], bounds[1])
        return made

    def _inputs(self, found: Any, dims: Mapping[str, Any]) -> tuple[Input, ...]:
        if not isinstance(found, list) or len(found) > 10_000:
            raise self.fail("inputs is not a list")
        made = []
        for each in found:
            if not isinstance(each, dict) or not isinstance(each.get("name"), str) or each.get("dtype") not in DTYPES:
                raise self.fail("an input has no name or no known dtype")
            shape = each.get("shape")
            if not isinstance(shape, list) or len(shape) > 64:
                raise self.fail(f"input {shown(each['name'])} has no shape")
            for size in shape:
                if not (size in dims if isinstance(size, str) else type(size) is int and 0 <= size < 1 << 40):
                    raise self.fail(f"input {shown(each['name'])} has an impossible dim {shown(size)}")
            made.append(Input(each["name"], each["dtype"], tuple(shape)))
        return tuple(made)

    def _step(self, index: int, found: Any) -> Step:
        where = f"step {index}"
        if not isinstance(found, dict) or not isinstance(found.get("op"), str):
            raise self.fail(f"{where} has no op")
        op = check_op(found["op"], f"{self.what}: {where}")
        args, kwargs, out = found.get("args"), found.get("kwargs", {}), found.get("out")
        if not isinstance(args, list) or not isinstance(kwargs, dict) or not isinstance(out, list):
            raise self.fail(f"{where} ({op}) has no args or out")
        for value in (*args, *kwargs.values()):
            self._argument(value, f"{where} ({op})", 0)
        if not all(name.isidentifier() and name.isascii() for name in kwargs):
            raise self.fail(f"{where} ({op}) has an argument without a name")
        for value in out:
            if type(value) is not int or not 0 <= value < 1 << 24 or value in self.made:
                raise self.fail(f"{where} ({op}) makes value {shown(value)}, which is impossible or made before")
            self.made.add(value)
        several = found.get("several", False)
        if type(several) is not bool or (not several and len(out) != 1):
            raise self.fail(f"{where} ({op}) makes {len(out)} values without saying that it makes several")
        types, module = found.get("types", []), found.get("module", "")
        if not isinstance(module, str) or not isinstance(types, list) or not all(isinstance(t, str) for t in types):
            raise self.fail(f"{where} ({op}) has no readable module or types")
        return Step(op, tuple(args), kwargs, tuple(out), several, module, tuple(types))

    def _argument(self, value: Any, where: str, depth: int) -> None:
        if value is None or isinstance(value, (bool, float, str)):
            return
        if isinstance(value, int):
            if abs(value) >= 1 << 63:
                raise self.fail(f"{where} has a number beyond 64 bits")
        elif isinstance(value, list):
            if depth > MAX_DEPTH:
                raise self.fail(f"{where} has lists nested too deeply")
            for each in value:
                self._argument(each, where, depth + 1)
        elif isinstance(value, dict) and len(value) == 1:
            self._reference(*next(iter(value.items())), where)
        else:
            raise self.fail(f"{where} has an argument that is none: {shown(value)}")

    def _reference(self, kind: str, value: Any, where: str) -> None:
        known: dict[str, Any] = {"dtype": DTYPES, "device": ("engine", "cpu"), "layout": ("strided",),
                                 "memory_format": MEMORY_FORMATS, "float": SPECIAL_FLOATS}  # fmt: skip
        if kind == "v":
            if type(value) is not int or value not in self.made:
                raise self.fail(f"{where} reads value {shown(value)}, which no step before makes")
        elif kind == "w":
            if not isinstance(value, str) or value not in self.weights:
                raise self.fail(f"{where} reads weight {shown(value)}, which the file does not have")
        elif kind not in known or not isinstance(value, str) or value not in known[kind]:
            raise self.fail(f"{where} has an argument that is none: {shown({kind: value})}")

    def _structure(self, found: Any, where: str, depth: int) -> None:
        kind = kind_of(found)
        if kind is None:
            self._argument(found, where, 0)
            return
        inner = found[kind]
        if depth > MAX_DEPTH or not isinstance(inner, list):
            raise self.fail(f"{where} is no structure of values")
        for each in inner:
            if kind in ("dict", "record"):
                if not isinstance(each, list) or len(each) != 2 or not isinstance(each[0], str):
                    raise self.fail(f"{where} is no structure of values")
                each = each[1]
            self._structure(each, where, depth + 1)


def check_op(name: str, where: str) -> str:
    """The name of an op, if it is of the op set."""
    space, _, rest = name.partition("::")
    base = rest.partition(".")[0]
    if space == "aten" and base not in aten_names():
        raise EngineError(f"{where} calls {shown(name)}, which is not in op set {OPSET}{nearest(base, aten_names())}")
    if space == "size" and rest not in SIZE_FUNCTIONS:
        raise EngineError(f"{where} calls {shown(name)}{nearest(rest, SIZE_FUNCTIONS)}")
    if space not in ("aten", "size", "engine", "ridgeline_kernels", "kernel") or not all(
        p.isidentifier() for p in rest.split(".")
    ):
        raise EngineError(f"{where} calls {shown(name)}, which is not in op set {OPSET}")
    return name


def shown(value: Any) -> str:
    """Something of a file in a message: short, and without control characters."""
    words = ascii(value)
    return words if len(words) <= 60 else words[:57] + "…"
