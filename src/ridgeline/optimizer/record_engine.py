"""What a call issues, as a program: ops by a dispatch mode, Inductor's generated kernels by their launches.

The kernel path is written against the static launcher of PyTorch 2.11 and 2.13 and has not been run on a GPU yet; the
rest is tested on the CPU, launches included, with a launcher that stands in for the driver's.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.engine.drop_in import state_of
from ridgeline.engine.file.engine import Engine
from ridgeline.engine.file.export import described_output, plain, pruned
from ridgeline.engine.file.program import Input, Program, Step, check_op
from ridgeline.errors import EngineError

KINDS = {"O": "*", "i": "i32", "b": "i8", "h": "i16", "l": "i64", "I": "u32", "B": "u8", "H": "u16", "K": "u64",
         "f": "fp32", "d": "fp64"}  # fmt: skip
"""Types of arguments in Inductor's static launcher."""


class Recording(TorchDispatchMode):
    """Keeps every op that reaches the dispatcher, and every launch that ``launched`` is told of, as steps.

    Memory decides what a tensor is: a weight, an input, a result, a view of one of these, or a buffer that generated
    code allocated past the dispatcher.
    """

    def __init__(self, inputs: Sequence[Tensor], weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.inputs = list(inputs)
        self.steps: list[Step] = []
        self.kernels: dict[str, dict[str, Any]] = {}
        self.cubins: dict[str, bytes] = {}
        self.constants: dict[str, Tensor] = {}
        self.count = len(self.inputs)
        self._kept: list[Tensor] = []  # nothing that was seen is freed, so that addresses stay apart
        self._known: dict[Any, Any] = {}
        self._bases: dict[int, tuple[Any, Tensor]] = {}
        self._before = {_address(x) for x in gc.get_objects() if issubclass(type(x), Tensor) and _has_storage(x)}
        for name, weight in weights.items():
            self._add(weight, {"w": name})
        for number, x in enumerate(self.inputs):
            self._add(x, {"v": number})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            return self._written(func, args, kwargs)
        given = [self._argument(a) for a in args]
        named = {name: self._argument(a) for name, a in kwargs.items() if name != "pin_memory"}
        result = func(*args, **kwargs)
        self._step(func, given, named, result)
        return result

    def _step(self, func: Any, args: list[Any], kwargs: dict[str, Any], result: Any) -> None:
        op = check_op(f"{func._schema.name}.{func._overloadname}", "a recorded call")
        several = isinstance(result, (list, tuple))
        results = list(result) if several else [result]
        out = tuple(range(self.count, self.count + len(results)))
        self.count += len(results)
        for number, value in zip(out, results, strict=True):
            if isinstance(value, Tensor):
                self._add(value, {"v": number})
        self.steps.append(Step(op, tuple(args), kwargs, out, several))

    def _written(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An op that writes to an argument: recorded as the one that returns a new tensor, which takes its place."""
        schema = func._schema
        target = kwargs.get("out", args[0] if args else None)
        base = schema.name.partition("::")[2]
        plain_name = base[:-1] if base.endswith("_") else base
        packet = getattr(getattr(torch.ops, schema.name.partition("::")[0]), plain_name)
        if not isinstance(target, Tensor) or target.untyped_storage().nbytes() != target.nbytes:
            raise EngineError(f"{schema.name} writes to a part of a buffer, which is not recorded")
        overload = func._overloadname if base.endswith("_") else func._overloadname.replace("out", "") or "default"
        found = getattr(packet, overload.strip("_") or "default", None)
        if found is None:
            raise EngineError(f"{schema.name} has no form that writes to nothing")
        given = [self._argument(a) for a in args]
        named = {name: self._argument(a) for name, a in kwargs.items() if name not in ("out", "pin_memory")}
        result = func(*args, **kwargs)
        if any(_address(target) == _address(x) for x in self.inputs):
            raise EngineError("the call writes to its input")
        for key in [key for key in self._known if key[0] == _address(target)]:
            del self._known[key]
        self._bases.pop(_address(target), None)
        self._step(found, given, named, target)
        return result

    def launched(self, name: str, cubin: bytes, kinds: Sequence[str], grid: Sequence[int], num_warps: int,
                 shared_bytes: int, scratch: int, args: Sequence[Any]) -> None:  # fmt: skip
        """A generated kernel was launched with these arguments."""
        key = hashlib.sha256(cubin + name.encode()).hexdigest()[:24]
        self.cubins[key] = cubin
        self.kernels[key] = {"key": key, "name": name, "arguments": list(kinds), "num_warps": num_warps,
                             "shared_bytes": shared_bytes, "scratch": scratch}  # fmt: skip
        given = [self._argument(value) for value in args]
        self.steps.append(Step(f"kernel::k{key}", tuple(given), {"grid": [int(n) for n in grid]}, (), True))

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._reference(value)
        if isinstance(value, (list, tuple)):
            return [self._argument(each) for each in value]
        return plain(value)

    def _reference(self, x: Tensor) -> Any:
        """What a tensor is called: known, a view of something known, a constant, or a buffer nobody told of."""
        key = _key(x)
        if key in self._known:
            return self._known[key]
        if _address(x) in self._bases:
            held, base = self._bases[_address(x)]
            if base.dtype != x.dtype:
                raise EngineError("generated code reads a buffer as another type, which is not recorded")
            if base.storage_offset():
                raise EngineError("generated code reads memory before a tensor it was given, which is not recorded")
            args = (held, list(x.shape), list(x.stride()), x.storage_offset())
            return self._made("aten::as_strided.default", args, {}, x)
        if _address(x) in self._before:
            name = f"constant.{len(self.constants)}"
            self.constants[name] = x.detach()
            return self._add(x, {"w": name})
        options = {"dtype": plain(x.dtype), "device": {"device": "engine"}}
        num = x.untyped_storage().nbytes() // x.element_size()
        whole = x.as_strided((num,), (1,), 0)
        self._made("aten::empty_strided.default", ([num], [1]), options, whole)
        return self._reference(x)

    def _made(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor) -> Any:
        self.steps.append(Step(op, args, kwargs, (self.count,)))
        self.count += 1
        return self._add(x, {"v": self.count - 1})

    def _add(self, x: Tensor, held: Any) -> Any:
        self._kept.append(x)
        self._known[_key(x)] = held
        if _has_storage(x):
            self._bases.setdefault(_address(x), (held, x))
        return held

    def program(self, names: Sequence[str], found: Any) -> Program:
        """The recorded steps as a program that returns what the call did."""
        inputs = tuple(Input(name, str(x.dtype).removeprefix("torch."), tuple(x.shape))
                       for name, x in zip(names, self.inputs, strict=True))  # fmt: skip
        outputs = described_output(_mapped(found, self._argument))
        return pruned(Program(inputs, tuple(self.steps), outputs, issued=True))

    def index(self) -> tuple[dict[str, Any], bytes]:
        """The kernels' index and their cubins, one after another."""
        entries, code = [], b""
        for key in sorted(self.kernels):
            cubin = self.cubins[key]
            entries.append({**self.kernels[key], "key": f"k{key}", "offset": len(code), "bytes": len(cubin)})
            code += cubin
        return ({"kernels": entries} if entries else {}), code


def _has_storage(x: Tensor) -> bool:
    return x.layout is torch.strided and not x.is_meta and type(x) in (Tensor, torch.nn.Parameter) and x.numel() > 0


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _key(x: Tensor) -> Any:
    if not _has_storage(x):
        return (id(x),)
    return (_address(x), x.storage_offset(), tuple(x.shape), x.stride(), x.dtype)


def _mapped(found: Any, change: Callable[[Any], Any]) -> Any:
    """A structure of outputs with references in place of tensors."""
    if isinstance(found, Tensor):
        return change(found)
    if isinstance(found, Mapping):
        made = {name: _mapped(each, change) for name, each in found.items()}
        return made if type(found) is dict else _Fields(made)
    if isinstance(found, tuple) and hasattr(found, "_fields"):
        return _Fields({name: _mapped(getattr(found, name), change) for name in found._fields})
    return type(found)(_mapped(each, change) for each in found) if isinstance(found, (list, tuple)) else found


class _Fields(dict[str, Any]):
    """Named fields of an output object."""


def record(call: Callable[..., Any], inputs: Sequence[Tensor], names: Sequence[str], weights: Mapping[str, Tensor],
           args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Program, Recording]:  # fmt: skip
    """The program that a call issues. It has to have run before: what is compiled lazily is compiled by then."""
    with torch.no_grad(), Recording(inputs, weights) as recording, launches(recording):
        found = call(*args, **kwargs)
    return recording.program(names, found), recording


@contextlib.contextmanager
def launches(recording: Recording) -> Iterator[None]:
    """Inside, launches of Inductor's static launcher are told to a recording."""
    try:
        from torch._inductor.runtime.static_triton_launcher import StaticallyLaunchedCudaKernel as Launcher
    except ImportError:
        yield
        return
    run = Launcher.run

    def told(self: Any, x: int, y: int, z: int, stream: int, *args: Any) -> None:
        code = _cubins.get(id(self)) or getattr(self, "cubin_raw", None)
        if code is None:
            raise EngineError(f"the code of {self.name} was let go of before it was kept")
        scratch = int(self.has_global_scratch) + int(self.has_profile_scratch)
        kinds = [KINDS[kind] for kind in self.arg_tys]
        recording.launched(self.name, code, kinds, (x, y, z), self.num_warps, self.shared, scratch, args)
        run(self, x, y, z, stream, *args)

    Launcher.run = told
    try:
        yield
    finally:
        Launcher.run = run


_cubins: dict[int, bytes] = {}


@contextlib.contextmanager
def keeping_code() -> Iterator[None]:
    """Inside, the code of kernels that Inductor loads is kept; it lets go of it once it is on the device."""
    try:
        from torch._inductor.runtime.static_triton_launcher import StaticallyLaunchedCudaKernel as Launcher
    except ImportError:
        yield
        return
    load = Launcher.load_kernel

    def kept(self: Any, device: int) -> None:
        if getattr(self, "cubin_raw", None) is not None:
            _cubins[id(self)] = self.cubin_raw
        load(self, device)

    Launcher.load_kernel = kept
    try:
        yield
    finally:
        Launcher.load_kernel = load


def with_winner(engine: Engine, question: Any, weights: Mapping[str, Tensor], notes: list[str]) -> Engine:
    """The engine with what ``optimize`` finds fastest as the program of its profile, if that can be recorded."""
    from ridgeline.engine.file.export import named_inputs
    from ridgeline.optimizer.request import optimize

    args, kwargs = question.call_at(question.profiles[len(question.profiles) // 2])
    inputs = named_inputs(question.model, args, kwargs)
    with keeping_code(), torch.enable_grad():
        fast = optimize(question.model, args, kwargs, mode="infer", budget_s=question.budget_s, say=question.say)
    receipt = state_of(fast).receipt
    contents = replace(engine.contents, receipt={**engine.contents.receipt, "winner": receipt.winner})
    plan = next(iter(state_of(fast).plans.values()), None)
    if plan is None or receipt.winner == "eager":
        return engine.with_contents(contents)
    call = getattr(plan.call, "call", plan.call)  # what a CUDA graph was recorded of
    try:
        program, recording = record(call, list(inputs.values()), list(inputs), weights, args, kwargs)
    except (EngineError, RuntimeError, AttributeError, TypeError) as error:
        notes.append(f"{receipt.winner} is not in the engine, the exported program is: {error}")
        return engine.with_contents(contents)
    index, code = recording.index()
    held = {**contents.weights, **{name: x.cpu() for name, x in recording.constants.items()}}
    constants = contents.constants | frozenset(recording.constants)
    made = replace(contents, programs=(program, *contents.programs), weights=held, constants=constants, kernels=index,
                   cubins=code)  # fmt: skip
    return engine.with_contents(made)
