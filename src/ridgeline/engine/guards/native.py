"""One look at many tensors before a recorded call starts: the same objects, of the same form, where they lay.

In C where a compiler is there (guards.c, built once in well under a second, as the kernel launcher is), in Python with
the same answers where none is. After a wait for the device the caches are cold, and Python follows one pointer after
the other.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sysconfig
import warnings
import weakref
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from itertools import repeat
from operator import attrgetter, call, getitem, is_, is_not
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ridgeline.kernels.files import cache_folder, extension, install_library, is_installed, private_folder

Named = tuple[Any, Any, Any]
"""A mapping or a list, a key or a number, and what is to be found there; or an object, ``type`` and its class,
or an object, ``vars`` and the dictionary of its attributes."""
Asked = tuple[Any, Any]
"""A function without arguments and what it answers, or a set and what equals it."""
_APART = (type, vars)
GONE = -1
"""The address of a tensor whose memory was taken from it."""
_FORM = (Tensor.size, Tensor.stride, attrgetter("dtype"), Tensor.is_conj, Tensor.is_neg)


class Look(Protocol):
    """Knows tensors, and tells whether they are what they were."""

    def same(self) -> bool:
        """Whether all are the same objects, alike, where they lay, and all names stand for what they stood for."""

    def held(self) -> list[Tensor] | None:
        """The tensors, if all are there and alike, wherever they lie."""


def glance(tensors: Sequence[Tensor], *, weak: bool = False, names: Sequence[Named] = (),
           lists: Sequence[list[Any]] = (), asks: Sequence[Asked] = ()) -> Look:  # fmt: skip
    """A look at tensors, names, lengths of lists and answers; ``weak`` if it must not keep the tensors alive."""
    made, wide = native(), any(tensor.is_complex() for tensor in tensors)  # which may be conjugated: only Python asks
    if made is not None and not wide:
        try:
            return made.Glance(list(tensors), weak, list(names), list(lists), list(asks))
        except (TypeError, ValueError):  # a tensor or a container of an unusual kind
            pass
    return Plain(tensors, weak=weak, names=names, lists=lists, asks=asks)


def form(tensor: Tensor) -> tuple[Any, ...]:
    """What a tensor is besides its address and its contents."""
    return tuple(ask(tensor) for ask in _FORM)


def address(tensor: Tensor) -> int:
    """Where a tensor lies."""
    try:
        return tensor.data_ptr()
    except RuntimeError:  # its storage was emptied
        return GONE


class Plain:
    """The look in Python."""

    def __init__(self, tensors: Sequence[Tensor], *, weak: bool = False, names: Sequence[Named] = (),
                 lists: Sequence[list[Any]] = (), asks: Sequence[Asked] = ()) -> None:  # fmt: skip
        self._refs: list[Any] | None = [weakref.ref(tensor) for tensor in tensors] if weak else None
        self._tensors = [] if weak else list(tensors)
        self._forms = _forms(tensors)
        self._guards = _guards(tensors)
        self._places = Places([address(tensor) for tensor in tensors], list(range(len(tensors))))
        columns: list[list[Any]] = [[row[i] for row in names if row[1] not in _APART] for i in range(3)]
        self._holders, self._keys, self._values = columns
        self._objects, self._classes = ([row[i] for row in names if row[1] is type] for i in (0, 2))
        self._owners, self._dicts = ([row[i] for row in names if row[1] is vars] for i in (0, 2))
        self._lists, self._asks = list(lists), list(asks)
        self._list_size = sum(map(len, self._lists))

    def same(self) -> bool:
        tensors = self.held()
        try:
            return (tensors is not None and self._places.hold(tensors)
                    and (not self._lists or sum(map(len, self._lists)) == self._list_size)
                    and (not self._holders or all(map(is_, map(getitem, self._holders, self._keys), self._values)))
                    and all(map(is_, map(type, self._objects), self._classes))
                    and all(map(is_, map(vars, self._owners), self._dicts))
                    and all((ask() if callable(ask) else ask) == seen for ask, seen in self._asks))  # fmt: skip
        except LookupError:
            return False

    def held(self) -> list[Tensor] | None:
        tensors: list[Any] = self._tensors if self._refs is None else list(map(call, self._refs))
        if self._refs is not None and not all(map(is_not, tensors, repeat(None))):
            return None
        return tensors if self._alike(tensors) else None

    def _alike(self, tensors: list[Any]) -> bool:
        """PyTorch's guards say yes at half the price, or do not know."""
        return (self._guards is not None and self._guards.check(*tensors)) or _forms(tensors) == self._forms


def _forms(tensors: Sequence[Tensor]) -> list[list[Any]]:
    return [list(map(ask, tensors)) for ask in _FORM]


def _guards(tensors: Sequence[Tensor]) -> Any:
    """What compares types, sizes and strides of many tensors at once, where this PyTorch has it."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        sizes: list[Any] = [list(t.size()) for t in tensors]
        strides: list[Any] = [list(t.stride()) for t in tensors]
        made = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        return made if made.check(*tensors) else None
    except Exception:  # an interface of PyTorch's own, which may change: the plain comparison does as well
        return None


_bulk: Callable[[list[Tensor], list[int], list[int]], bool] | None = getattr(
    torch._C, "_tensors_data_ptrs_at_indices_equal", None)  # fmt: skip


class Places:
    """Addresses of tensors in a row, and whether those that count are still there."""

    __slots__ = ("_counted", "_indices", "_native", "_packed", "addresses", "indices")

    def __init__(self, addresses: list[int], indices: list[int]) -> None:
        self.addresses, self.indices = addresses, indices
        self._native = native() if all(each >= 0 for each in addresses) else None
        self._packed = array("Q", addresses if self._native else ()).tobytes()
        self._counted = array("q", indices if self._native else ()).tobytes()

    def hold(self, tensors: list[Tensor]) -> bool:
        """Whether those that are named lie at the addresses of the same number."""
        if self._native is not None:
            return self._native.lie_at(tensors, self._packed, self._counted)
        try:
            if _bulk is not None:
                return _bulk(tensors, self.addresses, self.indices)
        except RuntimeError:  # a tensor without memory
            return False
        return [address(tensors[i]) for i in self.indices] == [self.addresses[i] for i in self.indices]


# --- the extension -----------------------------------------------------------------------------------------------


@cache
def native() -> Any:
    """The look in C, or None where it cannot be built or this PyTorch's tensors are made in another way."""
    try:
        made = extension("ridgeline_glance", build(cache_folder()))
    except PermissionError as error:
        warnings.warn(f"guards are checked in Python: {error}", stacklevel=2)
        return None
    except (OSError, ImportError, subprocess.SubprocessError):
        return None
    at = _where()
    return made if at and made.opened(at, Tensor, nn.Parameter) else None


def _where() -> int:
    """How many bytes into a Python tensor its implementation is named; zero where that is not plain to see."""
    if not hasattr(Tensor, "_cdata") or not hasattr(Tensor, "__basicsize__"):
        return 0
    import ctypes

    samples = [torch.empty(2), torch.empty(2, 3, dtype=torch.int64).t(), nn.Parameter(torch.empty(1)), torch.empty(0)]
    steps = range(object.__basicsize__, Tensor.__basicsize__ - 7, 8)
    found = [at for at in steps
             if all(ctypes.c_uint64.from_address(id(t) + at).value == t._cdata for t in samples)]  # fmt: skip
    return found[0] if len(found) == 1 else 0


def build(folder: Path) -> Path:
    """Compiles guards.c into a folder unless it is there already."""
    source = Path(__file__).with_name("guards.c")
    target = folder / f"ridgeline_glance-{hashlib.sha256(source.read_bytes()).hexdigest()[:12]}.abi3.so"
    if is_installed(target):
        return target
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    if compiler is None:
        raise OSError("no C compiler")
    include = sysconfig.get_paths(scheme="posix_prefix")["include"]
    made = target.with_suffix(f".{os.getpid()}.tmp")
    private_folder(folder)
    command = [compiler, "-O2", "-shared", "-fPIC", "-w", f"-I{include}", "-o", str(made), str(source), "-ldl"]
    subprocess.run(command, capture_output=True, check=True, timeout=60)
    install_library(target, made)
    return target
