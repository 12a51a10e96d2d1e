"""One careful call of a model: what it writes to, what it draws and what it leaves behind, with everything put back."""

from __future__ import annotations

import builtins
import gc
import importlib
import io
import logging
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, _tensor_str
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ridgeline.engine.capture.rnn_dropout import dropping
from ridgeline.engine.guards import tensor_queries as questioning
from ridgeline.engine.guards.check import Watch
from ridgeline.engine.guards.code_reads import Free, installed, library, standard
from ridgeline.engine.guards.tensor_queries import Asking, asked_by_names, missing, state_asked
from ridgeline.engine.replay.static_inputs import extent

_ADOPTED = frozenset(("aten::lift_fresh", "aten::lift_fresh_copy", "aten::lift"))
_COMPARED_BYTES = 1 << 30
"""Memory below this is compared with what it held before, for writes that no operator announces."""
_UNANNOUNCED = frozenset(("running_mean", "running_var"))
"""Arguments that batch norms write to in training without their schemas saying so."""
_STRIDING = frozenset(("aten::as_strided", "aten::as_strided_", "aten::as_strided_copy", "aten::as_strided_scatter"))
_READS = frozenset(("aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::is_nonzero"))
_SPEAKING = {print: "prints", input: "asks the user", open: "opens a file"}
_CLOCKS = frozenset(("time", "_random"))
_MOMENTS = frozenset(("now", "utcnow", "today"))
_SYSTEM = frozenset(("urandom", "getrandom"))
_DISK = frozenset(("stat", "lstat", "access", "listdir", "scandir", "getcwd", "readlink"))
_WRITES = frozenset(("write", "writelines"))
_GOES_ON = frozenset(("read", "read1", "readinto", "readline", "readlines", "seek"))
_LOOKING_AROUND = frozenset(("_getframe", "getrefcount", "_current_frames"))
_SETTINGS = frozenset(("get_ident", "get_native_id", "getpid", "getrecursionlimit", "gettrace", "getswitchinterval"))
_GETTERS = ("_get_", "get_", "_is_", "is_", "_has_", "are_")
_PASSING_ON = ("/threading.py", "/inspect.py", "/traceback.py", "torch/__init__.py", "torch/random.py",
               "torch/backends/__init__.py", "torch/backends/cuda/__init__.py", "torch/backends/cudnn/__init__.py",
               "torch/backends/mkldnn/__init__.py", "torch/utils/_contextlib.py")  # fmt: skip
_FETCHING = ("linecache.py", "tokenize.py", "<frozen importlib._bootstrap_external>")
"""Where the interpreter opens files of code by itself, to show a line of it or to import it."""


@dataclass(slots=True)
class Observation:
    """What a call was seen to do."""

    written: set[int] = field(default_factory=set)
    """Storages that existed before the call and were written to."""
    externals: dict[int, Tensor] = field(default_factory=dict)
    """Tensors that were used and are neither inputs nor the model's, by storage."""
    used: frozenset[int] | None = None
    """Storages that existed before the call and were used by it, the model's included; None where nobody looked."""
    codes: dict[types.CodeType, dict[str, Any]] = field(default_factory=dict)
    acts: list[str] = field(default_factory=list)
    """Things done outside of PyTorch that a replay would not do."""
    drawn: frozenset[str] = frozenset()
    """Which random generators moved: ``python``, ``numpy``, ``cpu``, ``cuda``."""
    recurrent: torch.device | None = None
    """Where cuDNN's recurrent layers ran that drop."""
    waits: bool = False
    """Whether the host waited for a value, on which it may have branched."""
    asked: set[str] = field(default_factory=set)
    """What the model's code asked besides values, as ``asking`` names it."""
    places: dict[str, str] = field(default_factory=dict)
    """What it asked of inputs that no copy of them answers as they do, and where."""
    weights: dict[int, set[str]] = field(default_factory=dict)
    """What it asked of the model's own tensors."""
    lookups: list[tuple[Any, str]] = field(default_factory=list)
    """Whom it asked for attributes by words."""
    free: Free = field(default_factory=dict)
    """What variables held that functions have from around them."""
    answers: dict[Any, Any] = field(default_factory=dict)
    """Functions without arguments that tell of the interpreter's and of PyTorch's settings, and what they told."""


def _only_reads(schema: Any, args: Any, kwargs: Any) -> bool:
    """Whether it is a batch norm that is told not to train: its running means are read, whatever it announces."""
    names = [argument.name for argument in schema.arguments]
    if "batch_norm" not in schema.name or "training" not in names:
        return False
    place = names.index("training")
    return (args[place] if place < len(args) else kwargs.get("training", True)) is False


class Journal(TorchDispatchMode):
    """Notes every write to memory that existed before, after saving what was there."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else the tracer gives up code that it first meets here, for good

    def __init__(self, seen: Observation, given: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.seen = seen
        self.given = frozenset(_storage(tensor) for tensor in given if tensor.layout is torch.strided)
        self.made: set[int] = set()
        self.saved: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        adopted = schema.name in _ADOPTED
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                self._use(tensor, adopted)
        if schema.name in _STRIDING and _storage(args[0]) in self.given and _reaches_beyond(args, kwargs):
            self.seen.places["as_strided"] = "past its own elements"
        if (schema.is_mutable or "batch_norm" in schema.name) and not _only_reads(schema, args, kwargs):
            self._write(schema, args, kwargs)
        self.seen.recurrent = self.seen.recurrent or dropping(schema, args)
        self.seen.waits = self.seen.waits or schema.name in _READS
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


def _reaches_beyond(args: Any, kwargs: Any) -> bool:
    """Whether a tensor is looked at by strides that lead past its elements: to its neighbors, which no copy has."""
    tensor, size, stride = args[:3] if len(args) > 2 else (args[0], kwargs.get("size"), kwargs.get("stride"))
    if len(args) > 3 or kwargs.get("storage_offset") is not None:
        return True
    reach = 1 + sum((num - 1) * step for num, step in zip(size, stride)) if 0 not in size else 0
    low, high = extent(tensor)
    return reach > tensor.numel() or high - low != tensor.nbytes  # or to what lies between them


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


def observe(call: Callable[[], Any], given: list[Tensor], watch: Watch, *, profiled: bool, journaled: bool = True,
            inputs: Iterable[Tensor] = ()) -> Observation:  # fmt: skip
    """Calls once with everything noted, and puts back every memory that was written to and every random state.

    ``profiled`` notes also which code runs, and what it asks of ``inputs`` and others: of use from the second call on,
    when all is imported and set up. Without ``journaled``, writes are found by comparing alone.
    """
    seen = Observation()
    journal = Journal(seen, inputs)
    questions = Asking(inputs, (tensor for _, tensor in watch.tensors.values()))
    compare = journal.notice([*given, *watch.buffers()])
    with restored_random() as drawn:
        try:
            with (as_written(), journal if journaled else nullcontext(), questions if profiled else nullcontext(),
                  _profiled(seen, frozenset(watch.tensors)) if profiled else nullcontext()):  # fmt: skip
                call()
        finally:
            compare()
            seen.drawn = drawn()
            journal.put_back()
    seen.used = frozenset(seen.externals) if journaled else None
    for _, tensor in watch.tensors.values():
        if tensor.layout is torch.strided and tensor.device.type != "meta":
            seen.externals.pop(_storage(tensor), None)
    seen.asked |= questions.asked | asked_by_names(seen.codes)
    seen.places, seen.weights = seen.places | questions.places, questions.weights
    seen.externals = {key: _without_history(tensor) for key, tensor in seen.externals.items()}
    return seen


@contextmanager
def asking(inputs: Iterable[Tensor], own: Iterable[Tensor]) -> Iterator[set[str]]:
    """Inside, what a model's code asks besides values is noted, as far as plans of any kind depend on it."""
    questions, seen = Asking(inputs, own), Observation()
    before = sys.getprofile()

    def note(frame: types.FrameType, event: str, arg: Any) -> None:
        if event == "c_call" and (state := state_asked(arg)) and not library(frame.f_code.co_filename):
            questions.asked.add(state)

    with as_written(), questions, _noting(seen, frozenset()):
        sys.setprofile(note)
        try:
            yield questions.asked
        finally:
            sys.setprofile(before)
            questions.asked |= missing(seen.lookups)


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


_HANDLE, _TEXT, _IMPORT = logging.Logger.handle.__code__, _tensor_str._str.__code__, importlib.import_module.__code__
_TENSOR_TEXT = tuple(str(each.__file__) for each in (_tensor_str, torch._tensor, torch.overrides, questioning))


def _outside(frame: types.FrameType, *filenames: str) -> types.FrameType | None:
    """The model's own code that called into a file; None where it is a library's or an installed package's."""
    found: types.FrameType | None = frame
    while found is not None and found.f_code.co_filename in filenames:
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
    if name in _GOES_ON and isinstance(owner, io.IOBase):
        return "reads on in a file"
    return "writes to a file or to its output" if name in _WRITES and isinstance(owner, io.IOBase) else None


def _anywhere(function: Any, frame: types.FrameType) -> str | None:
    """The same for what counts wherever it is called from: libraries open files on a model's behalf."""
    if function is open and not frame.f_code.co_filename.endswith(_FETCHING):
        return _SPEAKING[open]
    name = getattr(function, "__name__", "")
    if name in _LOOKING_AROUND and getattr(function, "__module__", "") == "sys" and _asked_from(frame) is not None:
        return f"looks at who calls it, or holds something ({name})"
    if getattr(function, "__module__", "") not in ("posix", "nt"):
        return None
    if name in _DISK and _on_behalf(frame) is not None:
        return f"looks at files ({name})"
    return "draws random numbers of the system" if name in _SYSTEM else None


def _is_own(filename: str) -> bool:
    """Whether code is the model's own, and no package's."""
    return not library(filename) and not installed(filename)


def _tells(function: Any) -> bool:
    """Whether a built-in function tells of a setting of the interpreter's or of PyTorch's, and is asked nothing."""
    name, owner = getattr(function, "__name__", ""), getattr(function, "__self__", None)
    if isinstance(owner, torch.Generator):
        return name == "initial_seed"
    return name in _SETTINGS or (name.startswith(_GETTERS) and getattr(torch._C, name, None) is function)


def _asked_from(frame: types.FrameType) -> types.FrameType | None:
    """The model's own code that asked, by itself or through those files of libraries that only pass a question on."""
    found: types.FrameType | None = frame
    while found is not None and found.f_code.co_filename.endswith(_PASSING_ON):
        found = found.f_back
    return found if found is not None and _is_own(found.f_code.co_filename) else None


def _on_behalf(frame: types.FrameType) -> types.FrameType | None:
    """The model's own code for which the interpreter's libraries do something; None where it is another's."""
    found: types.FrameType | None = frame
    while found is not None and (standard(found.f_code.co_filename) or found.f_code.co_filename.startswith("<frozen")):
        if found.f_code.co_filename.endswith(_FETCHING):
            return None
        found = found.f_back
    own = found is not None and not library(found.f_code.co_filename) and not installed(found.f_code.co_filename)
    return found if own else None


@contextmanager
def _profiled(seen: Observation, own: frozenset[int]) -> Iterator[None]:
    """Notes which code runs and what it does that PyTorch does not see."""

    def note(frame: types.FrameType, event: str, arg: Any) -> None:
        if event == "call":
            seen.codes.setdefault(frame.f_code, frame.f_globals)
            if frame.f_code.co_freevars and _is_own(frame.f_code.co_filename):
                held = frame.f_locals
                around = tuple(id(held.get(name)) for name in frame.f_code.co_freevars)
                seen.free.setdefault(frame.f_code, set()).add(around)
            if frame.f_code is _HANDLE and (by := _outside(frame, logging.__file__)) is not None:
                act("logs", by)
            elif frame.f_code is _TEXT and (by := _outside(frame, *_TENSOR_TEXT)) is not None:
                act("makes a text of a tensor's values", by)
            elif frame.f_code is _IMPORT:
                seen.lookups.append((sys.modules, str(frame.f_locals.get("name"))))
        elif event == "c_call":
            try:
                what = _SPEAKING.get(arg)
            except TypeError:  # a bound method of something that cannot be hashed
                return
            if what is None and getattr(arg, "__module__", None) in _CLOCKS and arg.__name__ != "sleep":
                what = f"calls {arg.__module__}.{arg.__name__}"
            what = what or _reaches_out(arg)
            if (state := state_asked(arg)) is not None and not library(frame.f_code.co_filename):
                seen.asked.add(state)
            if _tells(arg) and _asked_from(frame) is not None:
                seen.answers.setdefault(arg, None)
            anywhere = "seeds random numbers" if _seeds(arg) else _anywhere(arg, frame)
            if anywhere or (what is not None and not library(frame.f_code.co_filename)):
                act(anywhere or str(what), frame)

    def act(what: str, frame: types.FrameType) -> None:
        seen.acts.append(f"{what} ({frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno})")

    before, collecting = sys.getprofile(), gc.isenabled()
    gc.disable()  # what others do when garbage is collected is no act of the model's
    with _noting(seen, own):
        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(before)
            if collecting:
                gc.enable()


@contextmanager
def _noting(seen: Observation, own: frozenset[int]) -> Iterator[None]:
    """Notes what is asked for by a word, which a profile does not say; of whom, where that is not a passing object."""
    plain = {name: getattr(builtins, name) for name in ("getattr", "hasattr")}

    def noted(ask: Callable[..., Any]) -> Callable[..., Any]:
        def asking(owner: Any, *asked: Any) -> Any:
            if asked and type(asked[0]) is str and not library(sys._getframe(1).f_code.co_filename):
                stays = isinstance(owner, types.ModuleType | types.FunctionType | type) or id(owner) in own
                seen.lookups.append((owner if stays else None, asked[0]))
            return ask(owner, *asked)

        return asking

    for name, ask in plain.items():
        setattr(builtins, name, noted(ask))
    try:
        yield
    finally:
        for name, ask in plain.items():
            setattr(builtins, name, ask)

