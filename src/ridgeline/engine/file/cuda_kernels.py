"""Kernels of an engine on a GPU: cubins loaded and launched by the driver, whole programs recorded as CUDA graphs.

Written against the driver's documented interface and not yet run on a GPU: an engine with such steps falls back to its
general program wherever anything here fails, and says so.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ridgeline.engine.file.program import shown
from ridgeline.errors import EngineError

MAX_THREADS, MAX_SHARED_BYTES, MAX_GRID = 1024, 232_448, (1 << 31) - 1
SCALARS: dict[str, Any] = {
    "i1": ctypes.c_int8, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32, "i64": ctypes.c_int64,
    "u8": ctypes.c_uint8, "u16": ctypes.c_uint16, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64,
    "fp32": ctypes.c_float, "f32": ctypes.c_float, "fp64": ctypes.c_double, "f64": ctypes.c_double,
}  # fmt: skip
_SHARED_SIZE_ATTRIBUTE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Driver:
    """The few functions of libcuda that launching takes."""

    def __init__(self) -> None:
        try:
            self.lib = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise EngineError(f"no CUDA driver: {error}") from None
        self.lib.cuLaunchKernel.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p,
                                            ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p]  # fmt: skip

    def call(self, name: str, *args: Any) -> None:
        code = getattr(self.lib, name)(*args)
        if code:
            raise EngineError(f"{name} failed with CUDA error {code}")

    def load(self, cubin: bytes, name: str, shared_bytes: int) -> int:
        """The handle of a function in a cubin, in the current context."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(cubin))
        self.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        if shared_bytes > 48 << 10:
            self.call("cuFuncSetAttribute", function, _SHARED_SIZE_ATTRIBUTE, ctypes.c_int(shared_bytes))
        assert function.value is not None
        return function.value


class Kernels:
    """The kernels of a file, each loaded when it is first launched."""

    def __init__(self, index: Mapping[str, Any], cubins: bytes) -> None:
        self.entries: dict[str, Mapping[str, Any]] = {}
        self.cubins, self._handles = cubins, dict[tuple[int, str], int]()
        self._driver: Driver | None = None
        for entry in index.get("kernels", []):
            _check(entry, len(cubins))
            self.entries[entry["key"]] = entry

    def entry(self, key: str, grid: Any) -> Mapping[str, Any]:
        """What a launch of a kernel on a grid needs; an error where the file has no such kernel."""
        if key not in self.entries:
            raise EngineError(f"the file has no kernel {shown(key)}")
        if not isinstance(grid, list) or len(grid) != 3 or not all(type(n) is int and 0 < n <= MAX_GRID for n in grid):
            raise EngineError(f"kernel {shown(key)} has an impossible grid {shown(grid)}")
        return self.entries[key]

    def code(self, key: str) -> bytes:
        entry = self.entries[key]
        return self.cubins[entry["offset"] : entry["offset"] + entry["bytes"]]

    def launcher(self, key: str, grid: Any, device: torch.device) -> Callable[..., None]:
        """A function that launches a kernel over tensors and numbers on the current stream."""
        entry = self.entry(key, grid)
        kinds: list[str] = entry["arguments"]
        self._driver = self._driver or Driver()
        driver, place = self._driver, device.index or 0
        if (place, key) not in self._handles:
            torch.cuda.current_stream(device)  # the context exists
            self._handles[place, key] = driver.load(self.code(key), entry["name"], entry["shared_bytes"])
        handle, threads, shared = self._handles[place, key], 32 * entry["num_warps"], entry["shared_bytes"]

        def launch(*args: Any) -> None:
            held = [_argument(kind, value) for kind, value in zip(kinds, args, strict=True)]
            held += [ctypes.c_void_p(0)] * entry.get("scratch", 0)  # global and profile scratch, which Triton may add
            pointers = (ctypes.c_void_p * len(held))(*(ctypes.cast(ctypes.pointer(x), ctypes.c_void_p) for x in held))
            stream = torch.cuda.current_stream(device).cuda_stream
            driver.call("cuLaunchKernel", handle, *grid, threads, 1, 1, shared, stream, pointers, None)

        return launch


def _argument(kind: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    return SCALARS[kind](value)


def _check(entry: Mapping[str, Any], size: int) -> None:
    """A kernel's entry lies inside of the file and asks for what a GPU has."""
    numbers = {"offset": size, "bytes": size, "shared_bytes": MAX_SHARED_BYTES, "num_warps": MAX_THREADS // 32}
    for name, most in numbers.items():
        if type(entry.get(name)) is not int or not 0 <= entry[name] <= most:
            raise EngineError(f"kernel {shown(entry.get('key'))} has an impossible {name}")
    if type(entry.get("scratch", 0)) is not int or not 0 <= entry.get("scratch", 0) <= 2:
        raise EngineError(f"kernel {shown(entry.get('key'))} has impossible scratch pointers")
    kinds = entry.get("arguments")
    named = isinstance(entry.get("key"), str) and isinstance(entry.get("name"), str)
    if not named or entry["offset"] + entry["bytes"] > size or not isinstance(kinds, list):
        raise EngineError(f"kernel {shown(entry.get('key'))} is not complete")
    if not all(isinstance(kind, str) and (kind.startswith("*") or kind in SCALARS) for kind in kinds):
        raise EngineError(f"kernel {shown(entry['key'])} takes an argument of an unknown type")


def graphed(call: Callable[..., Any], inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """A program for these shapes as a CUDA graph: inputs are copied in, outputs are copies that stay the caller's."""
    held = [x.clone() for x in inputs]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(2):  # libraries choose and allocate
            call(*held)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        made = call(*held)

    def run(*given: Tensor) -> Any:
        for into, x in zip(held, given, strict=True):
            into.copy_(x)
        graph.replay()
        return _copied(made)

    return run


def _copied(found: Any) -> Any:
    if isinstance(found, Tensor):
        return found.clone()
    if isinstance(found, dict):
        return type(found)({name: _copied(each) for name, each in found.items()})
    return type(found)(map(_copied, found)) if isinstance(found, (list, tuple)) else found
