"""What a call issues, as a program: ops by a dispatch mode, Inductor's generated kernels by their launches.

Launches are read from PyTorch 2.11's and 2.13's static launcher. Tests drive that launcher's own code with real cubins
and a driver that stands in for libcuda; on a GPU it has not been run yet.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.bench.verdict import error_of
from ridgeline.engine.deferred import Later
from ridgeline.engine.drop_in import state_of
from ridgeline.engine.file.engine import Engine
from ridgeline.engine.file.export import described_output, plain, pruned
from ridgeline.engine.file.program import Input, Program, Step, check_op
from ridgeline.engine.file.proof import flat
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

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions run as they are: under a mode that says no, PyTorch runs their Python eagerly."""
        return True

    is_infra_mode = ignore_compile_internals  # what releases before 2.10 ask instead

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
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
        if "out" in kwargs and not target.is_contiguous():
            raise EngineError(f"{schema.name} writes to a buffer of another layout than its own, which is not recorded")
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
                 shared_bytes: int, scratch: int, args: Sequence[Any],
                 texts: Mapping[str, str] | None = None) -> None:  # fmt: skip
        """A generated kernel was launched with these arguments."""
        key = hashlib.sha256(cubin + name.encode()).hexdigest()[:24]
        self.cubins[key] = cubin
        self.kernels[key] = {"key": key, "name": name, "arguments": list(kinds), "num_warps": num_warps,
                             "shared_bytes": shared_bytes, "scratch": scratch, **(texts or {})}  # fmt: skip
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
    """Inside, launches of Inductor's generated kernels are told to a recording.

    Compiled code looks ``run`` up on the class for every launch. The launchers behind it hold bound methods of the
    kernel (or, from PyTorch 2.13 on, an extension's object), so nothing below this method can be exchanged later.
    """
    try:
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner as Tuner
    except ImportError:
        yield
        return
    run = Tuner.run

    def told(self: Any, *args: Any, stream: int, **kwargs: Any) -> None:
        launcher = self.launchers[0] if len(self.launchers) == 1 else None
        kernel = getattr(launcher and launcher.__globals__.get("runner"), "__self__", None)
        kinds = [KINDS.get(kind, "") for kind in getattr(kernel, "arg_tys", "?")]
        if launcher is None or kernel is None or not all(kinds):
            name = self.inductor_meta.get("kernel_name", "a generated kernel")
            raise EngineError(f"{name} was not run before, or is not launched from its cubin alone")
        code, texts = code_of(self, kernel)
        scratch = int(kernel.has_global_scratch) + int(getattr(kernel, "has_profile_scratch", False))

        def issue(x: int, y: int, z: int, stream: int, *given: Any) -> None:
            recording.launched(kernel.name, code, kinds, (x, y, z), kernel.num_warps, kernel.shared, scratch, given,
                               texts)  # fmt: skip
            kernel.run(x, y, z, stream, *given)

        # The launcher computes the grid and leaves out constants; only what it calls at the end is another
        namespace = {**launcher.__globals__, "runner": issue}
        types.FunctionType(launcher.__code__, namespace, "launcher")(*args, **kwargs, stream=stream)

    Tuner.run = told
    try:
        yield
    finally:
        Tuner.run = run


def code_of(tuner: Any, kernel: Any) -> tuple[bytes, dict[str, str]]:
    """A kernel's cubin and its text in ``ttgir`` and ``ptx``, where there is one. Inductor lets go of the cubin once it
    is on the device, and leaves the files in Triton's cache."""
    from torch._inductor.runtime import triton_heuristics as inductor

    folder = Path(inductor.triton_cache_dir(tuner.triton_meta.get("device") or 0),
                  inductor.triton_hash_to_path_key(kernel.hash))  # fmt: skip
    texts = {}
    for kind in ("ttgir", "ptx"):
        with contextlib.suppress(OSError):
            texts[kind] = (folder / f"{kernel.name}.{kind}").read_text(encoding="utf-8", errors="replace")
    raw: bytes | None = getattr(kernel, "cubin_raw", None)
    try:
        return (folder / f"{kernel.name}.cubin").read_bytes() if raw is None else raw, texts
    except OSError as error:
        raise EngineError(f"the code of {kernel.name} is not in Triton's cache any more: {error.strerror}") from None


def with_winner(engine: Engine, question: Any, weights: Mapping[str, Tensor], notes: list[str]) -> Engine:
    """The engine with what ``optimize`` finds fastest as the program of its profile, if that can be recorded and
    returns what the winner does on other inputs, too."""
    from ridgeline.engine.file.export import named_inputs
    from ridgeline.optimizer.request import optimize

    args, kwargs = question.call_at(question.profiles[len(question.profiles) // 2])
    inputs = named_inputs(question.model, args, kwargs)
    with torch.enable_grad():
        left_s = max(1.0, question.deadline_s - time.perf_counter())
        fast = optimize(question.model, args, kwargs, mode="infer", budget_s=left_s, say=question.say)
    receipt = state_of(fast).receipt
    contents = replace(engine.contents, receipt={**engine.contents.receipt, "winner": receipt.winner})
    plan = next(iter(state_of(fast).plans.values()), None)
    if plan is None or receipt.winner == "eager":
        return engine.with_contents(contents)
    call = plan.call.ready() if isinstance(plan.call, Later) else plan.call
    call = getattr(call, "call", call)  # what a CUDA graph was recorded of
    try:
        program, recording = record(call, list(inputs.values()), list(inputs), weights, args, kwargs)
        index, code = recording.index()
        held = {**contents.weights, **{name: x.cpu() for name, x in recording.constants.items()}}
        constants = contents.constants | frozenset(recording.constants)
        made = engine.with_contents(replace(contents, programs=(program, *contents.programs), weights=held,
                                            constants=constants, kernels=index, cubins=code))  # fmt: skip
        rolled, named = pytree.tree_map_only(Tensor, lambda x: x.roll(1), (tuple(args), dict(kwargs)))
        with torch.no_grad():
            meant = flat(call(*rolled, **named))
        found = flat(made.on_inputs(list(named_inputs(question.model, rolled, named).values())))
        apart = max((error_of(a.double(), b.double()).rms_frac for a, b in zip(found, meant, strict=True)), default=0.0)
        if made.notes or not apart < 1e-2:  # bits are the same but where the winner's own differ from call to call
            raise EngineError(made.notes[0] if made.notes else
                              f"what was recorded is {apart:.1e} from it on other inputs (code outside of PyTorch's "
                              "dispatcher and Inductor's launchers ran)")  # fmt: skip
    except (EngineError, RuntimeError, AttributeError, TypeError, ValueError) as error:
        notes.append(f"{receipt.winner} is not in the engine, the exported program is: {error}")
        return engine.with_contents(contents)
    return made
