"""Runs a program on tensors: each op is looked up once, and the steps become one straight Python function.

The text of that function is made of numbers that this module counts (``v3 = f2(v1, c0)``). Nothing that stands in a
file gets into it: ops, constants and names of arguments are looked up, checked and handed over as objects.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ridgeline.engine.file import ops
from ridgeline.engine.file.program import (
    SIZE_FUNCTIONS,
    SPECIAL_FLOATS,
    Program,
    Step,
    check_op,
    kind_of,
    leaves,
    shown,
)
from ridgeline.errors import EngineError

Call = Callable[..., Any]
NO_EFFECT = ("aten::dropout.default", "aten::feature_dropout.default", "aten::alpha_dropout.default")
"""In inference these return their first argument."""


BOUND = frozenset({
    "add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "relu.default", "sigmoid.default", "tanh.default",
    "exp.default", "neg.default", "rsqrt.default", "sqrt.default", "gelu.default", "silu.default", "detach.default",
    "linear.default", "layer_norm.default", "matmul.default", "view.default", "reshape.default", "permute.default",
    "conv2d.default", "batch_norm.default", "bmm.default", "mm.default", "transpose.int", "softmax.int",
})  # fmt: skip
"""Overloads that PyTorch's own bindings reach with the same arguments. They parse these faster than the general call
does: by 0.4 µs an op, 5 µs for layer_norm."""


@cache
def function_of(name: str) -> Call:
    """The function behind an op's name."""
    check_op(name, "the program")
    space, _, rest = name.partition("::")
    if space == "size":
        return SIZE_FUNCTIONS[rest]
    if space == "engine":
        return ops.function_of(rest)
    overload = overload_of(name)
    if space == "aten" and rest in BOUND:
        base = rest.partition(".")[0]
        owner = next(owner for owner in (torch, torch._C._nn, Tensor) if hasattr(owner, base))
        found: Call = getattr(owner, base)
        return found
    return overload._op  # past the Python method around it


@cache
def overload_of(name: str) -> Any:
    """The overload of a dispatcher's op: it has to be known here, and to write to none of its arguments."""
    space, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    if space == "ridgeline_kernels" and importlib.util.find_spec("triton") is not None:
        import ridgeline.kernels  # noqa: F401  (declares its ops)
    try:
        found = getattr(getattr(getattr(torch.ops, space), base), overload or "default")
    except (AttributeError, RuntimeError):
        found = None
    if not isinstance(found, torch._ops.OpOverload):
        raise EngineError(f"this PyTorch ({torch.__version__}) has no {name}: install the version the engine was built "
                          "with (`ridgeline engine inspect` says which)") from None  # fmt: skip
    if found._schema.is_mutable:
        raise EngineError(f"{name} writes to its arguments, which a program must not")
    return found


class Resolver:
    """Turns arguments of a program into objects on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def constant(self, value: Any) -> Any:
        """An argument without values or weights in it."""
        if isinstance(value, (list, tuple)):
            return [self.constant(each) for each in value]
        if not isinstance(value, dict):
            return value
        kind, name = next(iter(value.items()))
        if kind == "device":
            return self.device if name == "engine" else torch.device("cpu")
        return SPECIAL_FLOATS[name] if kind == "float" else getattr(torch, name)


def is_constant(value: Any) -> bool:
    return not any(isinstance(x, dict) and ("v" in x or "w" in x) for x in leaves(value))


def check_arguments(step: Step) -> None:
    """Names of arguments are those of the op, and it makes several values if the step says so."""
    if step.op.startswith(("aten::", "ridgeline_kernels::")):
        returns = overload_of(step.op)._schema.returns
        if step.several != (len(returns) > 1 or returns[0].type.kind() == "ListType"):
            raise EngineError(f"{step.op} makes {len(returns)} values, and the program says otherwise")
    if step.kwargs and not step.op.startswith(("size::", "kernel::")):
        if step.op.startswith("engine::"):
            known = ops.names_of(step.op.partition("::")[2])
        else:
            known = {argument.name for argument in overload_of(step.op)._schema.arguments}
        for name in step.kwargs:
            if name not in known:
                raise EngineError(f"{step.op} has no argument {shown(name)}")


def compiled(program: Program, weights: Mapping[str, Any], device: torch.device, kernels: Any = None) -> Call:
    """A function from the program's inputs to its outputs, in the structure that the model returned.

    A weight is a tensor, or a function that fetches it when a step needs it. ``kernels`` launch what ``kernel::`` steps
    name.
    """
    resolver, held, text = Resolver(device), list[Any](), list[str]()
    last = last_uses(program)
    same = dict[int, str]()

    def keep(value: Any) -> str:
        held.append(value)
        return f"c{len(held) - 1}"

    def written(value: Any) -> str:
        """The text of an argument."""
        if is_constant(value):
            return keep(resolver.constant(value))
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(map(written, value)) + "]"
        if "w" in value:
            if value["w"] not in known:
                known[value["w"]] = keep(weights[value["w"]])
            name = known[value["w"]]
            return name if isinstance(weights[value["w"]], Tensor) else f"{name}()"
        return same.get(value["v"], f"v{value['v']}")

    known = dict[str, str]()
    for index, step in enumerate(program.steps):
        check_arguments(step)
        if step.op in NO_EFFECT and len(step.args) == 3 and step.args[2] is False and is_value(step.args[0]):
            same[step.out[0]] = written(step.args[0])
            continue
        args = [written(value) for value in step.args]
        if step.op.startswith("kernel::"):
            if kernels is None:
                raise EngineError(f"{step.op} is device code, which does not run here")
            launch = keep(kernels.launcher(step.op.partition("::")[2], step.kwargs.get("grid"), device))
            text.append(f"{launch}({', '.join(args)})")
            dead = [number for number in last.get(index, ()) if number not in same]
            text += [" = ".join(f"v{number}" for number in dead) + " = None"] if dead else []
            continue
        args += [f"{name}={written(value)}" for name, value in step.kwargs.items()]
        function = keep(function_of(step.op))
        if step.several:
            text.append(f"t = {function}({', '.join(args)})")
            text += [f"v{number} = t[{i}]" for i, number in enumerate(step.out)]
        else:
            text.append(f"v{step.out[0]} = {function}({', '.join(args)})")
        dead = [number for number in last.get(index, ()) if number not in same]
        if dead:
            text.append(" = ".join(f"v{number}" for number in dead) + " = None")
    text.append(f"return {_structure(program.outputs, written, keep)}")
    inputs = ", ".join(f"v{i}" for i in range(len(program.inputs)))
    body = "\n        ".join(text)
    names = ", ".join(f"c{i}" for i in range(len(held)))
    source = f"def make({names}):\n    def run({inputs}):\n        {body}\n    return run\n"
    space: dict[str, Any] = {}
    exec(compile(source, "<engine>", "exec"), space)
    made: Call = space["make"](*held)
    return made


def is_value(argument: Any) -> bool:
    return isinstance(argument, dict) and ("v" in argument or "w" in argument)


def last_uses(program: Program) -> dict[int, list[int]]:
    """Values by the step after which nobody reads them; inputs belong to the caller."""
    last: dict[int, int] = {}
    for index, step in enumerate(program.steps):
        for number in (*step.out, *step.values()):
            last[number] = index
    # What stands for another value (see NO_EFFECT) keeps it alive
    for index in range(len(program.steps) - 1, -1, -1):
        step = program.steps[index]
        if step.op in NO_EFFECT:
            for number in step.values():
                last[number] = max(last[number], last[step.out[0]])
    returned = {x["v"] for x in leaves(program.outputs) if isinstance(x, dict) and "v" in x}
    for index in range(len(program.steps) - 1, -1, -1):
        step = program.steps[index]
        if step.op in NO_EFFECT and step.out[0] in returned:
            returned |= set(step.values())
    found: dict[int, list[int]] = {}
    for number, index in last.items():
        if number not in returned and number >= len(program.inputs):
            found.setdefault(index, []).append(number)
    return found


class Record(dict[str, Any]):
    """What a model returned as an object with named fields: the same names, as attributes and as keys, or by place."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __getitem__(self, key: Any) -> Any:
        # By place, as model outputs of transformers are read
        return list(self.values())[key] if isinstance(key, (int, slice)) else super().__getitem__(key)

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self.values())


def _structure(found: Any, written: Callable[[Any], str], keep: Callable[[Any], str]) -> str:
    kind = kind_of(found)
    if kind == "tuple":
        return "(" + "".join(f"{_structure(each, written, keep)}, " for each in found[kind]) + ")"
    if kind == "list":
        return "[" + ", ".join(_structure(each, written, keep) for each in found[kind]) + "]"
    if kind in ("dict", "record"):
        pairs = ", ".join(f"{keep(name)}: {_structure(each, written, keep)}" for name, each in found[kind])
        return f"{keep(Record)}({{{pairs}}})" if kind == "record" else f"{{{pairs}}}"
    return written(found)


def interpret(
    program: Program,
    inputs: Sequence[Any],
    weights: Callable[[str], Any],
    device: torch.device,
    each: Callable[[int, Step, list[Any]], Any] | None = None,
    before: Callable[[int, Step, list[Any]], Any] | None = None,
) -> Any:
    """The same, step by step: slower, for whoever wants to look at every step or to change what it makes.

    ``each`` is called with a step and its results after it has run; what it returns, if anything, replaces them.
    ``before`` is called with a step and its positional arguments.
    """
    resolver, values = Resolver(device), dict[int, Any](enumerate(inputs))

    def read(value: Any) -> Any:
        if is_constant(value):
            return resolver.constant(value)
        if isinstance(value, (list, tuple)):
            return [read(item) for item in value]
        return values[value["v"]] if "v" in value else weights(value["w"])

    last = last_uses(program)
    for index, step in enumerate(program.steps):
        check_arguments(step)
        args = [read(value) for value in step.args]
        if before is not None:
            before(index, step, args)
        if step.op.startswith("kernel::"):
            raise EngineError(f"{step.op} is device code, which does not run step by step")
        result = function_of(step.op)(*args, **{n: read(v) for n, v in step.kwargs.items()})
        results = list(result) if step.several else [result]
        if len(results) < len(step.out):
            raise EngineError(
                f"step {index} ({step.op}) made {len(results)} values, and the program reads {len(step.out)}"
            )
        if each is not None:
            results = each(index, step, results) or results
        values.update(zip(step.out, results, strict=False))
        for number in last.get(index, ()):
            values.pop(number, None)
    return _built(program.outputs, read)


def _built(found: Any, read: Callable[[Any], Any]) -> Any:
    kind = kind_of(found)
    if kind in ("tuple", "list"):
        made = [_built(each, read) for each in found[kind]]
        return tuple(made) if kind == "tuple" else made
    if kind in ("dict", "record"):
        pairs = {name: _built(each, read) for name, each in found[kind]}
        return Record(pairs) if kind == "record" else pairs
    return read(found)
