"""One careful call of a model: what it writes to, what it draws and what it leaves behind, with everything put back."""

from __future__ import annotations

import gc
import io
import logging
import random
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ridgeline.optimizer.recurrent import dropping
from ridgeline.optimizer.watch import Watch, installed, library

_ADOPTED = frozenset(("aten::lift_fresh", "aten::lift_fresh_copy", "aten::lift"))
_COMPARED_BYTES = 1 << 30
"""Memory below this is compared with what it held before, for writes that no operator announces."""
_UNANNOUNCED = frozenset(("running_mean", "running_var"))
"""Arguments that batch norms write to in training without their schemas saying so."""
_SPEAKING = {print: "prints", input: "asks the user", open: "opens a file"}
_CLOCKS = frozenset(("time", "_random"))
_MOMENTS = frozenset(("now", "utcnow", "today"))
_SYSTEM = frozenset(("urandom", "getrandom"))
_WRITES = frozenset(("write", "writelines"))
_FETCHING = ("linecache.py", "tokenize.py", "<frozen importlib._bootstrap_external>")
"""Where the interpreter opens files of code by itself, to show a line of it or to import it."""


@dataclass(slots=True)
class Observation:
    """What a call was seen to do."""

    written: set[int] = field(default_factory=set)
    """Storages that existed before the call and were written to."""
    externals: dict[int, Tensor] = field(default_factory=dict)
    """Tensors that were used and are neither inputs nor the model's, by storage."""
    codes: dict[types.CodeType, dict[str, Any]] = field(default_factory=dict)
    acts: list[str] = field(default_factory=list)
    """Things done outside of PyTorch that a replay would not do."""
    drawn: frozenset[str] = frozenset()
    """Which random generators moved: ``python``, ``numpy``, ``cpu``, ``cuda``."""
    recurrent: torch.device | None = None
    """Where cuDNN's recurrent layers ran that drop."""


class Journal(TorchDispatchMode):
    """Notes every write to memory that existed before, after saving what was there."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else the tracer gives up code that it first meets here, for good

    def __init__(self, seen: Observation) -> None:
        super().__init__()
        self.seen = seen
        self.made: set[int] = set()
        self.saved: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        adopted = schema.name in _ADOPTED
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                self._use(tensor, adopted)
        if schema.is_mutable or "batch_norm" in schema.name:
            self._write(schema, args, kwargs)
        self.seen.recurrent = self.seen.recurrent or dropping(schema, args)
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided and not _is_view(schema):
                self.made.add(_storage(tensor))
        return result

    def _use(self, tensor: Tensor, adopted: bool) -> None:
        key = _storage(tensor)
        if adopted:
            self.made.add(key)
        elif key not in self.made:
            self.seen.externals.setdefault(key, tensor)

    def _write(self, schema: Any, args: Any, kwargs: Any) -> None:
        for i, argument in enumerate(schema.arguments):
            if argument.name in _UNANNOUNCED or (argument.alias_info is not None and argument.alias_info.is_write):
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                for tensor in tree_leaves(value):
                    if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                        self._save(tensor)

    def _save(self, tensor: Tensor) -> None:
        key = _storage(tensor)
        if key in self.made or key in self.saved:
            return
        self.seen.written.add(key)
        self.saved[key] = keep(tensor)

    def notice(self, tensors: list[Tensor]) -> Callable[[], None]:
        """Keeps what these hold; the returned function notes those that changed unannounced, as batch norm's do."""
        kept = [(tensor, *keep(tensor)) for tensor in tensors if tensor.untyped_storage().nbytes() < _COMPARED_BYTES]

        def compare() -> None:
            for tensor, whole, was in kept:
                if _storage(tensor) not in self.saved and not torch.equal(whole, was):
                    self.seen.written.add(_storage(tensor))
                    self.saved[_storage(tensor)] = (whole, was)

        return compare

    def put_back(self) -> None:
        for whole, was in self.saved.values():
            put_back(whole, was)


class Values:
    """What tensors hold, put back wherever they lie by then."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._kept = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def put_back(self) -> None:
        with torch.inference_mode(False), torch.no_grad():  # in this order: the first switches gradients on
            for tensor, was in self._kept:
                tensor.copy_(was)


def keep(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """All memory under a tensor, and a copy of it."""
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())  # type: ignore[call-overload]
        return whole, whole.clone()


def put_back(whole: Tensor, was: Tensor) -> None:
    with torch.inference_mode(False), torch.no_grad():
        whole.copy_(was)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_view(schema: Any) -> bool:
    return any(r.alias_info is not None for r in schema.returns)


def observe(call: Callable[[], Any], given: list[Tensor], watch: Watch, *, profiled: bool,
            journaled: bool = True) -> Observation:  # fmt: skip
    """Calls once with everything noted, and puts back every memory that was written to and every random state.

    ``profiled`` notes also which code runs: of use from the second call on, when all is imported and set up.
    Without ``journaled``, writes are found by comparing alone.
    """
    seen = Observation()
    journal = Journal(seen)
    compare = journal.notice([*given, *watch.buffers()])
    with restored_random() as drawn:
        try:
            with as_written(), _profiled(seen) if profiled else nullcontext(), journal if journaled else nullcontext():
                call()
        finally:
            compare()
            seen.drawn = drawn()
            journal.put_back()
    for _, tensor in watch.tensors.values():
        if tensor.layout is torch.strided and tensor.device.type != "meta":
            seen.externals.pop(_storage(tensor), None)
    seen.externals = {key: _without_history(tensor) for key, tensor in seen.externals.items()}
    return seen


def _without_history(tensor: Tensor) -> Tensor:
    """What keeps a tensor's memory and nothing that led to it.

    The history of an observed loss held every parameter's gradients to the stream of the observation, and no step
    with a loss of the caller's could be recorded (H200).
    """
    return tensor if tensor.grad_fn is None else tensor.detach()


def as_written() -> AbstractContextManager[Any]:
    """Inside, what was compiled runs as it was written: a dispatch mode sees all of it.

    PyTorch's tracer does not run compiled code under such modes either, but then leaves that very code alone for good:
    the model's own, and that of every model of its class.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo.eval_frame" in sys.modules else nullcontext()


@contextmanager
def restored_random() -> Iterator[Callable[[], frozenset[str]]]:
    """Random generators as they were before; the yielded function says which of them have moved so far."""
    before = _states()
    try:
        yield lambda: frozenset(name for name, state in _states().items() if name in before
                                and not _equal(state, before[name]))  # fmt: skip
    finally:
        _restore(before)


def _states() -> dict[str, Any]:
    states: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def _restore(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    torch.set_rng_state(states["cpu"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, tuple | list):
        return all(map(_equal, a, b))
    same = a == b
    return bool(same.all()) if hasattr(same, "all") else bool(same)


def _draws(owner: Any) -> bool:
    """Whether a method's owner is a random generator of Python's or numpy's."""
    return isinstance(owner, random.Random) or type(owner).__module__.startswith("numpy.random")


def _seeds(method: Any) -> bool:
    """Whether a generator of PyTorch's is begun anew, which is always done through PyTorch's own functions."""
    return isinstance(getattr(method, "__self__", None), torch.Generator) and method.__name__ in ("manual_seed", "seed")


_HANDLE = logging.Logger.handle.__code__


def _outside(frame: types.FrameType, filename: str) -> types.FrameType | None:
    """The model's own code that called into a file; None where it is a library's or an installed package's."""
    found: types.FrameType | None = frame
    while found is not None and found.f_code.co_filename == filename:
        found = found.f_back
    own = found is not None and not library(found.f_code.co_filename) and not installed(found.f_code.co_filename)
    return found if own else None


def _reaches_out(function: Any) -> str | None:
    """What a built-in function does beyond computing, where the model's code calls it."""
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if _draws(owner):
        return "draws random numbers on the host"
    if name in _MOMENTS and getattr(owner, "__module__", None) == "datetime":
        return f"asks for the time ({name})"
    return "writes to a file or to its output" if name in _WRITES and isinstance(owner, io.IOBase) else None


def _anywhere(function: Any, frame: types.FrameType) -> str | None:
    """The same for what counts wherever it is called from: libraries open files on a model's behalf."""
    if function is open and not frame.f_code.co_filename.endswith(_FETCHING):
        return _SPEAKING[open]
    system = getattr(function, "__name__", "") in _SYSTEM and getattr(function, "__module__", "") in ("posix", "nt")
    return "draws random numbers of the system" if system else None


@contextmanager
def _profiled(seen: Observation) -> Iterator[None]:
    """Notes which code runs and what it does that PyTorch does not see."""

    def note(frame: types.FrameType, event: str, arg: Any) -> None:
        if event == "call":
            seen.codes.setdefault(frame.f_code, frame.f_globals)
            if frame.f_code is _HANDLE and (by := _outside(frame, logging.__file__)) is not None:
                act("logs", by)
        elif event == "c_call":
            try:
                what = _SPEAKING.get(arg)
            except TypeError:  # a bound method of something that cannot be hashed
                return
            if what is None and getattr(arg, "__module__", None) in _CLOCKS and arg.__name__ != "sleep":
                what = f"calls {arg.__module__}.{arg.__name__}"
            what = what or _reaches_out(arg)
            anywhere = "seeds random numbers" if _seeds(arg) else _anywhere(arg, frame)
            if anywhere or (what is not None and not library(frame.f_code.co_filename)):
                act(anywhere or str(what), frame)

    def act(what: str, frame: types.FrameType) -> None:
        seen.acts.append(f"{what} ({frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno})")

    before, collecting = sys.getprofile(), gc.isenabled()
    gc.disable()  # what others do when garbage is collected is no act of the model's
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)
        if collecting:
            gc.enable()

