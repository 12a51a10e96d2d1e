"""Calls that repeat themselves leave Python: what one call allocates and launches is noted, and repeated in C++.

An op is written once, in Python. Where it says that its calls only allocate and launch (``repeats=True`` in its
declaration), the second call of a shape is noted as a plan: tensors to allocate, kernels to start (through the launcher
where they take tensor maps or start early), products that are PyTorch's own (``multiplies=True``), which of the tensors
go where, and what the backward pass keeps. Further calls with the same description (shapes, types, alignment, numbers)
run call_cache.cpp alone, gradients included. That file
needs PyTorch's headers and half a minute of a C++ compiler, so it is built with a pack and never behind the user's
back; without it every call takes the Python path.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import struct
import subprocess
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.errors import KernelError
from ridgeline.kernels import launcher, pack
from ridgeline.kernels.files import cache_folder, extension, install_library, is_installed, private_folder

RECORD_AFTER = 1
"""Calls of a description that run in Python before one is noted: a shape seen once is not worth a plan."""

_aten = torch.ops.aten
_ALLOCATIONS = frozenset({
    _aten.empty_like.default, _aten.empty.memory_format, _aten.new_empty.default, _aten.empty_strided.default,
    _aten.new_empty_strided.default,
})  # fmt: skip
_VIEWS = frozenset({
    _aten.detach.default, _aten.view.default, _aten.alias.default, _aten.slice.Tensor, _aten.expand.default,
    _aten.unsqueeze.default, _aten.transpose.int, _aten._unsafe_view.default,
})  # fmt: skip
_PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default})
_NUMBER_OF = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5, torch.float32: 6,
    torch.float64: 7, torch.bool: 11, torch.bfloat16: 15, torch.float8_e5m2: 23, torch.float8_e4m3fn: 24,
}  # fmt: skip
"""PyTorch's own numbers of its types (c10/core/ScalarType.h)."""

_ids = itertools.count(1)
_lock = threading.RLock()
_noting: int | None = None  # the thread whose launches are being noted


class Unrepeatable(Exception):
    """A call that does more than allocate and launch."""


def noting() -> bool:
    """Whether this thread's call is being noted: the mode that is active then is our own."""
    return _noting == threading.get_ident()


class Notes(TorchDispatchMode):
    """What a call allocates and launches. Places count the arguments first, then what was allocated."""

    def __init__(self, args: Sequence[Any], multiplies: bool = False) -> None:
        super().__init__()
        self.multiplies = multiplies
        self.tensors: list[Tensor | None] = [value if isinstance(value, Tensor) else None for value in args]
        self.num_args = len(args)
        self.steps: list[tuple[int, ...]] = []
        self.device = -1
        self.strange = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self.tensors.append(found)
        elif self.multiplies and func in _PRODUCTS and not kwargs:
            self.multiplied(found, args)
        elif func not in _VIEWS:
            self.strange = str(func)
        return found

    def multiplied(self, found: Tensor, factors: Sequence[Tensor]) -> None:
        """A product of PyTorch's: its result is one more allocation, its factors are views of what is there."""
        self.tensors.append(found)
        try:
            seen = [number for factor in factors for number in self.view(factor)]
        except Unrepeatable as error:
            self.strange = str(error)
            return
        self.steps.append((len(self.tensors) - 1, -2, -2, *seen))

    def view(self, value: Tensor) -> tuple[int, ...]:
        """(place, offset in bytes, number of sizes, *sizes, *strides) of what a product reads."""
        place, offset = self.place(value.data_ptr())
        base = self.tensors[place] if place >= 0 else None
        if base is None or base.dtype != value.dtype:
            raise Unrepeatable("a product reads a tensor in another type than it was made in")
        return place, offset, value.dim(), *value.shape, *value.stride()

    def launched(self, plan: int, *args: Any) -> None:
        """Called by the launcher for every launch of the process."""
        if not noting():
            return
        handle, device, grid_x, grid_y, plain = launcher.native().parts(plan)
        self.device = device
        if not plain:  # tensor maps, or a start before what is ahead has ended: the launcher's own plan does that
            handle, grid_x, grid_y = plan, -1, -1
        try:
            params = [number for value in args for number in self.param(value)]
        except Unrepeatable as error:
            self.strange = str(error)
            return
        self.steps.append((handle, grid_x, grid_y, *params))

    def param(self, value: Any) -> tuple[int, int]:
        """(place, offset) of an address, (-1, bits) of a number."""
        if isinstance(value, Tensor):
            return self.place(value.data_ptr())
        if isinstance(value, launcher.Pointer):
            return self.place(int(value))
        if value is None:
            return -1, 0
        if isinstance(value, float):
            return -1, struct.unpack("<I", struct.pack("<f", value))[0]
        return -1, int(value) & (2**64 - 1)

    def place(self, address: int) -> tuple[int, int]:
        """Arguments are known by where they start; that two of them start together is part of the description."""
        if not address:
            return -1, 0
        if launcher.is_sink(address):
            return -1, address
        for i, tensor in enumerate(self.tensors):
            if tensor is not None and tensor.data_ptr() == address:
                return i, 0
        for i, tensor in enumerate(self.tensors[self.num_args :], self.num_args):
            if tensor is not None and tensor.data_ptr() < address < tensor.data_ptr() + tensor.nbytes:
                return i, address - tensor.data_ptr()
        raise Unrepeatable("a kernel reads memory that is neither an argument nor allocated by the call")

    def place_of(self, value: Tensor | None) -> int:
        """Where a result or a kept tensor lies; an empty one is allocated anew."""
        if value is None:
            return -1
        for i, tensor in enumerate(self.tensors):
            if tensor is value:
                return i
            same = tensor is not None and value.numel() and tensor.data_ptr() == value.data_ptr()
            if same and tensor is not None and _looks(tensor) == _looks(value):
                return i
        if value.numel():
            raise Unrepeatable("a result is a view of something else")
        self.tensors.append(value)
        return len(self.tensors) - 1

    def plan(
        self,
        outputs: Sequence[Any],
        num_shown: int,
        single: bool,
        saved: Sequence[Any] | None = None,
        fills: bool = False,
    ) -> tuple[Any, ...]:
        """The plan as numbers, for call_cache.cpp."""
        if self.strange or not self.steps:
            raise Unrepeatable(self.strange or "nothing was launched")
        places = [self.place_of(value) for value in outputs]
        if any(0 <= place < self.num_args for place in places):
            raise Unrepeatable("a result is an argument")
        kept = [self.place_of(value) for value in saved or ()]
        made = self.tensors[self.num_args :]
        first = next(i for i, t in enumerate(self.tensors) if t is not None)
        allocations = [_allocation(t) for t in made if t is not None]
        return (
            next(_ids), self.device, first, self.num_args, num_shown, single, saved is not None, fills, allocations,
            self.steps, places, kept,
        )  # fmt: skip


def _looks(value: Tensor) -> tuple[Any, ...]:
    return value.shape, value.dtype, value.stride()


def _allocation(value: Tensor) -> tuple[int, ...]:
    """(type, number of sizes, *sizes, *strides), strides only where they are not the usual ones."""
    strides = () if value.is_contiguous() else value.stride()
    return (_NUMBER_OF[value.dtype], value.dim(), *value.shape, *strides)


@contextmanager
def noted(args: Sequence[Any], multiplies: bool = False) -> Iterator[Notes]:
    """Inside, allocations, launches and, where an op has them, products of this thread are noted."""
    global _noting
    with _lock:
        notes = Notes(args, multiplies)
        _noting = threading.get_ident()
        launcher.native().watch(notes.launched)
        try:
            with torch.no_grad(), notes:
                yield notes
        finally:
            launcher.native().watch(None)
            _noting = None


class Context:
    """Stands in for autograd's context: remembers what a setup function keeps."""

    def __init__(self, needs: tuple[bool, ...] = ()) -> None:
        self.needs_input_grad = needs
        self.saved_tensors: tuple[Any, ...] = ()
        self.materialize_grads = True

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize_grads = value

    def mark_non_differentiable(self, *tensors: Any) -> None:
        """What is not shown has no history anyway."""

    def again(self, saved: tuple[Any, ...]) -> Context:
        """The same context around other tensors."""
        made = Context()
        made.__dict__.update(self.__dict__, saved_tensors=saved)
        return made


class Repeater:
    """The Python side of one primitive's direct calls: what is asked where there is no plan yet."""

    def __init__(self, primitive: Any) -> None:
        self.primitive = primitive
        self.direct = module().Direct(primitive.name, self.missed, self.missed_back)
        self.front = module().Front(self.direct, primitive.front) if primitive.front is not None else None
        self.contexts: dict[int, Context] = {}  # by plan; a graph may outlive its plan, so none is dropped
        self.distinct: dict[str, Context] = {}
        self.seen: dict[Any, int] = {}

    def clear(self) -> None:
        self.direct.clear()
        if self.front is not None:
            self.front.clear()
        self.seen.clear()

    def missed(self, words: bytes | None, args: tuple[Any, ...]) -> Any:
        """A call without a plan: computed here, and noted if it comes again."""
        found = self.primitive.slow(*args)
        if words is not None and _notable(args) and self._due(words):
            self.direct.add(words, self._noted(args))
        return found

    def missed_back(self, plan: int, words: bytes | None, saved: tuple[Any, ...], grads: tuple[Any, ...]) -> Any:
        context = self.contexts[plan].again(saved)
        found = _tuple(self.primitive.backward(context, *grads))
        if words is not None and _notable(grads) and self._due((plan, words)):
            self.direct.add_back(plan, words, self._noted_back(context, saved, grads))
        return found

    def _due(self, key: Any) -> bool:
        # max seen
        if len(self.seen) >= 4096:
            self.seen.clear()
        self.seen[key] = self.seen.get(key, 0) + 1
        return self.seen[key] > RECORD_AFTER

    def _noted(self, args: tuple[Any, ...]) -> Any:
        made = self.primitive
        _connect()
        recorded = torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)
        try:
            with noted(args, made.multiplies) as notes:
                outputs = made.forward(*args) if recorded else made.infer(*args)
            single = made.num_results == 1
            if not recorded:
                return notes.plan(_tuple(outputs), len(_tuple(outputs)), not isinstance(outputs, (tuple, list)))
            context = Context(tuple(isinstance(a, Tensor) and a.requires_grad for a in args))
            made.setup(context, args, outputs)
            plan = notes.plan(
                _tuple(outputs), made.num_results, single, context.saved_tensors, context.materialize_grads
            )
        except Unrepeatable:
            return None
        kept = context.again(())
        self.contexts[plan[0]] = self.distinct.setdefault(repr(sorted(kept.__dict__.items())), kept)
        return plan

    def _noted_back(self, context: Context, saved: tuple[Any, ...], grads: tuple[Any, ...]) -> Any:
        _connect()
        try:
            with noted((*saved, *grads), self.primitive.multiplies) as notes:
                found = _tuple(self.primitive.backward(context, *grads))
            return notes.plan(found, len(found), False)
        except Unrepeatable:
            return None


@cache
def _connect() -> None:
    """Tell the extension how the launcher starts what is no plain launch."""
    module().starts(launcher.native().starter())


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _notable(args: tuple[Any, ...]) -> bool:
    """Whether a call may be run once more to note it: on a device, and not into a graph that would keep the second."""
    on_device = all(value.is_cuda for value in args if isinstance(value, Tensor))
    return on_device and not torch._C._cuda_isCurrentStreamCapturing()


# --- the extension -----------------------------------------------------------------------------------------------


@cache
def module() -> Any:
    """The extension from the pack or the cache folder, or None where nobody has built it for this PyTorch."""
    name = file_name()
    for folder in (pack.pack_folder(), cache_folder()):
        if (folder / name).exists():
            try:
                return _imported(folder / name)
            except ImportError:
                continue
    return None


def _imported(path: Path) -> Any:
    made = extension("ridgeline_direct", path)
    made.types(Tensor, torch.nn.Parameter)
    return made


@cache
def file_name() -> str:
    """The extension's name: a hash of its source, and everything its binary interface depends on."""
    source = Path(__file__).with_name("call_cache.cpp").read_bytes()
    told = f"{torch.__version__} {torch._C._GLIBCXX_USE_CXX11_ABI}"
    digest = hashlib.sha256(source + told.encode()).hexdigest()[:12]
    return f"ridgeline_direct-{digest}{sysconfig.get_config_var('EXT_SUFFIX')}"


def build(folder: Path) -> Path:
    """Compile call_cache.cpp into ``folder`` unless it is there already; needs a C++ compiler and PyTorch's headers."""
    target = folder / file_name()
    if is_installed(target):
        return target
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if compiler is None:
        raise KernelError("direct calls need a C++ compiler once: install g++; without it calls take the Python path")
    made = target.with_suffix(f".{os.getpid()}.tmp")
    try:
        private_folder(folder)
    except OSError as error:
        raise KernelError(f"direct calls cannot be kept: {error}") from None
    done = subprocess.run(_command(compiler, made), capture_output=True, text=True, check=False)
    if done.returncode:
        raise KernelError(f"direct calls could not be built with {compiler}: {done.stderr.strip()[-800:]}")
    install_library(target, made)
    module.cache_clear()
    return target


def _command(compiler: str, made: Path) -> list[str]:
    root = Path(torch.__file__).parent
    include = root / "include"
    return [
        compiler, "-O2", "-std=c++20", "-shared", "-fPIC", "-w",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-I{include}", f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}",
        f"-I{sysconfig.get_paths(scheme='posix_prefix')['include']}",
        "-o", str(made), str(Path(__file__).with_name("call_cache.cpp")),
        f"-L{root / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10", "-ldl",
    ]  # fmt: skip


def attach(primitives: Callable[[], Sequence[Any]]) -> None:
    """Give every primitive that repeats its direct call, once kernels are launched at all."""

    def attached() -> None:
        if module() is None:
            return
        for made in primitives():
            if made.repeats and made.direct is None:
                repeater = Repeater(made)
                made.direct, made.quick = repeater.direct, repeater.front
                launcher.when_plans_are_forgotten(repeater.clear)

    launcher.when_native_is_there(attached)
