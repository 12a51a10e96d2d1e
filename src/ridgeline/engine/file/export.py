"""A model as a program: PyTorch's exporter traces it, and its graph is written in the engine's op set."""

from __future__ import annotations

import inspect
import math
import operator
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ridgeline.engine.file.program import SIZE_FUNCTIONS, Input, Program, Step, check_op, leaves
from ridgeline.errors import EngineError

_SIZES: dict[Any, str] = {function: name for name, function in SIZE_FUNCTIONS.items()}
_SIZES |= {torch.sym_int: "int", torch.sym_float: "float", torch.sym_max: "max", torch.sym_min: "min",
           torch.sym_not: "not", math.floor: "floor", math.ceil: "ceil", math.trunc: "trunc"}  # fmt: skip
_DROPPED = ("_assert_tensor_metadata", "sym_constrain_range", "sym_constrain_range_for_size", "_assert_scalar",
            "_assert_async")  # fmt: skip
_INLINED = ("wrap_with_set_grad_enabled", "wrap_with_autocast")


@dataclass(slots=True)
class Exported:
    """A program, the tensors it reads by name, and how it is called."""

    program: Program
    weights: dict[str, Tensor]
    signature: dict[str, Any]
    aliases: dict[str, str] = field(default_factory=dict)
    constants: frozenset[str] = frozenset()  # weights that no checkpoint has


def export(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dims: Mapping[str, Mapping[int, str]] | None = None,
    bounds: Mapping[str, tuple[int, int]] | None = None,
) -> Exported:
    """Export a model's inference for these arguments.

    ``dims`` names sizes that may vary: ``{"x": {0: "batch"}}``, within ``bounds``; a name of an input is its path
    (``x``, ``batch.ids``).
    """
    shapes = _dynamic(args, kwargs, model, dims or {}, bounds or {})
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            made = torch.export.export(model, tuple(args), dict(kwargs), dynamic_shapes=shapes, strict=False)
            if _writes(made):
                made = made.run_decompositions({})
    except Exception as error:
        first = str(error).strip().splitlines()
        raise EngineError(f"{type(model).__name__} cannot be exported: {type(error).__name__}: "
                          f"{first[0][:300] if first else ''}") from error  # fmt: skip
    signature = made.graph_signature
    written = {**signature.buffers_to_mutate, **getattr(signature, "user_inputs_to_mutate", {})}
    if written:
        names = ", ".join(sorted(map(str, written.values()))[:5])
        raise EngineError(f"{type(model).__name__} writes to {names} in every call, and an engine keeps no state: put "
                          "the model in eval mode, or return what it writes")  # fmt: skip
    return _Translation(made, model, dims or {}, bounds or {}).run()


def _writes(made: Any) -> bool:
    return any(node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
               and node.target._schema.is_mutable for node in made.graph.nodes)  # fmt: skip


def _dynamic(args: Any, kwargs: Any, model: nn.Module, dims: Mapping[str, Any], bounds: Mapping[str, Any]) -> Any:
    """The exporter's description of the dims that vary, in the structure of the arguments."""
    if not dims:
        return None
    made = {name: torch.export.Dim(name, min=low, max=high) for name, (low, high) in bounds.items()}
    names = parameter_names(model, len(args))
    given = {**dict(zip(names, args, strict=False)), **kwargs}

    def shape_of(path: Any, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        return {axis: made[dim] for axis, dim in dims.get(path_name(path), {}).items()} or None

    mapped = pytree.tree_map_with_path(shape_of, given, is_leaf=lambda x: x is None)
    # Positional arguments that a signature collects (``*args``) are described as a tuple under its name
    parameters = inspect.signature(model.forward).parameters
    collects = next((p.name for p in parameters.values() if p.kind is p.VAR_POSITIONAL), None)
    if collects is None:
        return mapped
    rest = [name for name in names if name not in parameters]
    return {**{n: v for n, v in mapped.items() if n not in rest}, collects: tuple(mapped[name] for name in rest)}


def parameter_names(model: nn.Module, num: int) -> list[str]:
    """Names of the first parameters of ``forward``."""
    found: list[str] = []
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            # An imported model says what its inputs are called
            own = list(model.inputs) if isinstance(getattr(model, "inputs", None), Mapping) else []
            found += own or [f"{parameter.name}_{i}" for i in range(max(0, num - len(found)))]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            found.append(parameter.name)
    return found[:num]


def path_name(path: Sequence[Any]) -> str:
    """``batch.ids`` of a path into arguments."""
    return ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", "?")))) for key in path)


def named_inputs(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every tensor among the arguments by its path, in the order in which they are handed over."""
    given = {**dict(zip(parameter_names(model, len(args)), args, strict=True)), **kwargs}
    return {path_name(path): value for path, value in pytree.tree_flatten_with_path(given)[0]
            if isinstance(value, Tensor)}  # fmt: skip


class _Translation:
    """From the exporter's graph to steps."""

    def __init__(
        self, made: Any, model: nn.Module, dims: Mapping[str, Any], bounds: Mapping[str, tuple[int, int]]
    ) -> None:
        self.made, self.model, self.dims, self.bounds = made, model, dims, bounds
        self.steps: list[Step] = []
        self.refs: dict[Any, Any] = {}  # node → argument, or a list of them
        self.weights: dict[str, Tensor] = {}
        self.aliases: dict[str, str] = {}
        self.constants: set[str] = set()
        self.symbols: dict[str, str] = {}
        self.count = 0

    def run(self) -> Exported:
        made = self.made
        specs = made.graph_signature.input_specs
        kinds = torch.export.graph_signature.InputKind
        nodes = [node for node in made.graph.nodes if node.op == "placeholder"]
        users, seen = list[tuple[Any, Any]](), dict[Any, str]()
        state = {**made.state_dict, **made.constants}
        for node, spec in zip(nodes, specs, strict=True):
            if spec.kind is kinds.USER_INPUT:
                users.append((node, spec))
            elif spec.kind in (kinds.PARAMETER, kinds.BUFFER, kinds.CONSTANT_TENSOR):
                tensor = state[spec.target].detach()
                key = (
                    (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype) if tensor.numel() else node
                )
                if key in seen:
                    self.aliases[spec.target] = seen[key]
                else:
                    seen[key] = spec.target
                    self.weights[spec.target] = tensor
                if spec.kind is kinds.CONSTANT_TENSOR or (spec.kind is kinds.BUFFER and spec.persistent is False):
                    self.constants.add(spec.target)
                self.refs[node] = {"w": seen[key]}
            else:
                raise EngineError(f"{type(self.model).__name__} takes {spec.kind.name.lower()} {node.name}, which "
                                  "engines cannot hold")  # fmt: skip
        inputs, signature = self._inputs(users)
        self.count = len(inputs)
        for node in made.graph.nodes:
            if node.op == "call_function":
                self.step(node, made.graph_module, "")
        outputs = self._outputs()
        program = pruned(Program(tuple(inputs), tuple(self.steps), outputs, self._dims(inputs)))
        used = program.weight_names()
        return Exported(program, {n: t for n, t in self.weights.items() if n in used}, signature,
                        {a: n for a, n in self.aliases.items() if n in used},
                        frozenset(self.constants & used))  # fmt: skip

    def _inputs(self, users: list[tuple[Any, Any]]) -> tuple[list[Input], dict[str, Any]]:
        """The tensors that calls hand over, and the structure in which they do."""
        inputs, leaves = list[Input](), list[Any]()
        spec = self.made.call_spec.in_spec
        args, kwargs = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
        names = parameter_names(self.model, len(args))
        given = {**dict(zip(names, args, strict=True)), **kwargs}
        paths = {leaf: path_name(path) for path, leaf in pytree.tree_flatten_with_path(given)[0]}
        for place, (node, _) in enumerate(users):
            value = node.meta.get("val")
            if not isinstance(value, Tensor):
                leaves.append({"constant": plain(value)})
                continue
            named = self.dims.get(paths[place], {})
            shape = tuple(self._size(size, named.get(axis)) for axis, size in enumerate(value.shape))
            self.refs[node] = {"v": len(inputs)}
            leaves.append({"input": len(inputs)})
            inputs.append(Input(paths[place], str(value.dtype).removeprefix("torch."), shape))
        made_args, made_kwargs = pytree.tree_unflatten(leaves, spec)
        signature = {"names": names, "args": [_described(each) for each in made_args],
                     "kwargs": {name: _described(each) for name, each in made_kwargs.items()}}  # fmt: skip
        return inputs, signature

    def _size(self, size: Any, name: str | None) -> int | str:
        """A size of an input: a number, or the name its dim was given."""
        if isinstance(size, int) or size.node.expr.is_number:
            return int(size)
        return self.symbols.setdefault(str(size.node.expr), name or f"s{len(self.symbols)}")

    def _dims(self, inputs: Sequence[Input]) -> dict[str, tuple[int, int]]:
        found = {}
        for symbol, bounds in self.made.range_constraints.items():
            name = self.symbols.get(str(symbol))
            if name is not None:
                low, high = self.bounds.get(name, (0, 1 << 39))
                found[name] = (max(low, int(bounds.lower)), int(min(high, bounds.upper)))
        for given in inputs:
            for size in given.shape:
                if isinstance(size, str):
                    found.setdefault(size, (0, 1 << 39))
        return found

    def step(self, node: Any, owner: Any, module: str) -> None:
        """One call of the graph."""
        target = node.target
        if target is operator.getitem and isinstance(self.refs.get(node.args[0]), list):
            self.refs[node] = self.refs[node.args[0]][node.args[1]]
            return
        if getattr(target, "__name__", "") in _INLINED and not isinstance(target, torch._ops.OpOverload):
            self._inline(node, owner)
            return
        if isinstance(target, torch._ops.OpOverload):
            if target._schema.name.partition("::")[2] in _DROPPED:
                return
            op = f"{target._schema.name}.{target._overloadname}"
        elif target in _SIZES:
            op = f"size::{_SIZES[target]}"
        else:
            raise EngineError(f"{type(self.model).__name__} calls {getattr(target, '__name__', target)}, which engines "
                              "cannot hold")  # fmt: skip
        stack = node.meta.get("nn_module_stack") or {}
        path = str(next(reversed(stack.values()))[0]) if stack else module
        check_op(op, f"{type(self.model).__name__} at {path or 'its top'}")
        args, kwargs = [self._argument(a) for a in node.args], {n: self._argument(a) for n, a in node.kwargs.items()}
        kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        value = node.meta.get("val")
        several = isinstance(value, (list, tuple))
        results = list(value) if several else [value]
        out = tuple(range(self.count, self.count + len(results)))
        self.count += len(results)
        self.refs[node] = [{"v": number} for number in out] if several else {"v": out[0]}
        types = tuple(_type_of(result, self.symbols) for result in results)
        self.steps.append(Step(op, tuple(args), kwargs, out, several, path, types))

    def _inline(self, node: Any, owner: Any) -> None:
        """A part of the graph under another mode: its steps stand where it was called."""
        if node.target.__name__ == "wrap_with_autocast" and node.args[2]:
            raise EngineError(f"{type(self.model).__name__} turns autocast on for a part of itself, which engines "
                              "cannot hold: convert the model's weights instead")  # fmt: skip
        place = next(i for i, arg in enumerate(node.args) if getattr(arg, "op", "") == "get_attr")
        inner = getattr(owner, node.args[place].target)
        holders = [each for each in inner.graph.nodes if each.op == "placeholder"]
        for holder, given in zip(holders, node.args[place + 1 :], strict=True):
            self.refs[holder] = self._argument(given)
        for each in inner.graph.nodes:
            if each.op == "call_function":
                self.step(each, inner, "")
            elif each.op == "output":
                found = [self._argument(value) for value in each.args[0]]
                self.refs[node] = found

    def _argument(self, value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            return self.refs[value]
        if isinstance(value, (list, tuple)):
            return [self._argument(each) for each in value]
        return plain(value)

    def _outputs(self) -> Any:
        output = next(node for node in self.made.graph.nodes if node.op == "output")
        leaves = [self._argument(value) for value in output.args[0]]
        tree = pytree.tree_unflatten(leaves, self.made.call_spec.out_spec) if leaves else ()
        return described_output(tree)


def plain(value: Any) -> Any:
    """A constant as an argument of a program."""
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": "engine"}
    if isinstance(value, torch.layout):
        return {"layout": str(value).removeprefix("torch.")}
    if isinstance(value, torch.memory_format):
        return {"memory_format": str(value).removeprefix("torch.")}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise EngineError(f"engines cannot hold an argument of type {type(value).__name__}")


def _type_of(value: Any, symbols: Mapping[str, str]) -> str:
    """A tensor's type and shape, dims that vary by their names."""
    if not isinstance(value, Tensor):
        return type(value).__name__.removeprefix("Sym").lower()
    sizes = [re.sub(r"[A-Za-z_]\w*", lambda found: symbols.get(found[0], found[0]), str(size)) for size in value.shape]
    return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(sizes)}]"


def _described(value: Any) -> Any:
    """The structure of one argument of a call."""
    if isinstance(value, dict) and set(value) <= {"input", "constant"} and len(value) == 1:
        return value
    if isinstance(value, (list, tuple)):
        return {"list": [_described(each) for each in value]}
    if isinstance(value, dict):
        return {"dict": {str(name): _described(each) for name, each in value.items()}}
    if value is None:
        return {"constant": None}
    raise EngineError(f"engines cannot take an argument of type {type(value).__name__}: hand over its tensors")


def described_output(value: Any) -> Any:
    """The structure of what is returned, with arguments at its leaves."""
    if isinstance(value, dict) and len(value) == 1 and next(iter(value)) in ("v", "w", "float", "dtype"):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {"record": [[name, described_output(getattr(value, name))] for name in value._fields]}
    if is_dataclass(value) and not isinstance(value, dict):
        value = vars(value)
        return {"record": [[name, described_output(each)] for name, each in value.items() if each is not None]}
    if isinstance(value, dict):
        kind = "dict" if type(value) in (dict, OrderedDict) else "record"
        return {kind: [[str(name), described_output(each)] for name, each in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"tuple" if isinstance(value, tuple) else "list": [described_output(each) for each in value]}
    return plain(value)


def pruned(program: Program) -> Program:
    """The program without steps whose results nobody reads, and with values numbered in order."""
    needed = {x["v"] for x in leaves(program.outputs) if isinstance(x, dict) and "v" in x}
    kept: list[Step] = []
    for step in reversed(program.steps):
        if needed & set(step.out) or not step.out:  # a kernel writes to what it is given
            needed |= set(step.values())
            kept.append(step)
    kept.reverse()
    numbers = {i: i for i in range(len(program.inputs))}
    for step in kept:
        for number in step.out:
            numbers[number] = len(numbers)
    steps = tuple(renumbered(step, lambda n: numbers[n]) for step in kept)
    return Program(program.inputs, steps, mapped(program.outputs, lambda n: numbers[n]), program.dims, program.issued)


def renumbered(step: Step, number: Callable[[int], int]) -> Step:
    return Step(step.op, tuple(mapped(list(step.args), number)), mapped(dict(step.kwargs), number),
                tuple(map(number, step.out)), step.several, step.module, step.types)  # fmt: skip


def mapped(value: Any, number: Callable[[int], int]) -> Any:
    """An argument or a structure with other numbers of values."""
    if isinstance(value, dict):
        if set(value) == {"v"}:
            return {"v": number(value["v"])}
        return {name: mapped(each, number) for name, each in value.items()}
    return [mapped(each, number) for each in value] if isinstance(value, (list, tuple)) else value
