"""From a Python call to a kernel on the device in microseconds: variants compiled once, then launched directly.

Triton's own ``kernel[grid](...)`` examines every argument on every call. Here an op works out the variant of a shape
once, keeps a ``Bound`` for it, and each further call is one C function that fills in pointers and starts the kernel.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from ridgeline.errors import KernelError
from ridgeline.kernels import pack
from ridgeline.kernels.compiler import POINTER_ALIGNMENT_BYTES, SM_90, Compiled, Variant, compile_variant
from ridgeline.kernels.files import cache_folder, extension, install_library, is_installed, private_folder
from ridgeline.kernels.function import names_of

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter stands in for the GPU: kernels run on CPU tensors, slowly."""

ASSUMED_SMS = 132
"""SMs of an H200: where no device is there to ask, while packing and interpreting."""

MAX_PLANS = 4096
SINK_BYTES = 1 << 20
OVERLAPPED_BYTES = 32 << 20
TYPE_OF = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float64: "fp64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}

MAP_TYPE_OF = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
"""CUtensorMapDataType of what the copy engine moves."""

Run = Callable[..., None]
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # a CPU build has none
_kernels: dict[str, Kernel] = {}
_all_plans: list[Plans] = []
_collected: list[Variant] | None = None
_collect_aligned = True
_told: Run | None = None
_once_there: list[Callable[[], None]] = []
_when_forgotten: list[Callable[[], None]] = []
_sinks: dict[int, torch.Tensor] = {}
_overlapping = False
_rehearsing = False


class Plans(dict[Any, Any]):
    """Launch plans of an op by what they depend on; forgets everything when it grows past any sensible use."""

    def __init__(self) -> None:
        super().__init__()
        _all_plans.append(self)

    def __setitem__(self, key: Any, plan: Any) -> None:
        if len(self) >= MAX_PLANS:
            self.clear()
        super().__setitem__(key, plan)


def forget_plans() -> None:
    """Make every op plan anew: after a tuning file changed, or when another device answers."""
    for plans in _all_plans:
        plans.clear()
    for clear in _when_forgotten:
        clear()


def when_plans_are_forgotten(clear: Callable[[], None]) -> None:
    """Have something else forgotten together with the plans."""
    _when_forgotten.append(clear)


def when_native_is_there(run: Callable[[], None]) -> None:
    """Run something as soon as the C launcher is loaded."""
    _once_there.append(run)


def overlapping() -> bool:
    """Whether kernels may be launched to start before the one ahead of them has ended."""
    return _overlapping


@contextmanager
def overlapped(allowed: bool = True) -> Iterator[None]:
    """Inside, kernels that can fetch their weights while the kernel ahead of them is still running do so.

    Only for whoever knows that nothing launched inside writes a weight or a table that a later kernel reads: a recorded
    inference step, say. Activations are always waited for.
    """
    global _overlapping
    before, _overlapping = _overlapping, allowed and not INTERPRETING
    try:
        yield
    finally:
        _overlapping = before


def recording() -> bool:
    """Whether what is launched now goes into a CUDA graph instead of running, or is run to get ready for one.

    The device itself is asked: what PyTorch's function answers may be what a model is to believe while it is recorded.
    """
    return _rehearsing or (torch.backends.cuda.is_built() and torch._C._cuda_isCurrentStreamCapturing())


@contextmanager
def rehearsing() -> Iterator[None]:
    """Inside, ops launch what they will launch into a graph: kernels are compiled and loaded before it is recorded."""
    global _rehearsing
    before, _rehearsing = _rehearsing, True
    try:
        yield
    finally:
        _rehearsing = before


def launchable(x: torch.Tensor) -> bool:
    """Whether kernels run on this tensor; anything else is computed by the reference."""
    return x.is_cuda or INTERPRETING or _collected is not None


def overlaps(num_bytes: int) -> bool:
    """Whether a kernel that finishes what another began is worth starting early: measured from 32 MB on; below, it is
    the host that takes time."""
    return num_bytes >= OVERLAPPED_BYTES and not INTERPRETING


def collects() -> bool:
    """Whether variants are only being collected, on tensors without storage."""
    return _collected is not None


def num_sms(device: int) -> int:
    """SMs of a CUDA device; of an H200 where none is there to ask."""
    return _num_sms(device) if device >= 0 else ASSUMED_SMS


@cache
def _num_sms(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True, slots=True)
class Blocks:
    """A tensor that a kernel reads or writes in blocks through the copy engine; its last dim is dense.

    Only binding needs this: a launch is given the tensor itself.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]

    @property
    def swizzle_bytes(self) -> int:
        """How wide a stripe of shared memory is interleaved: as wide as a row allows, nothing for single rows."""
        row_bytes = self.block[-1] * self.tensor.element_size()
        return 0 if len(self.block) == 1 else min(128, row_bytes)

    @property
    def type_name(self) -> str:
        kind, width = TYPE_OF[self.tensor.dtype], 8 * self.tensor.element_size()
        return (
            f"tensordesc<{kind}{list(self.block)},NVMMASharedLayout(swizzle_byte_width={self.swizzle_bytes}, "
            f"element_bitwidth={width}, rank={len(self.block)}, transposed=False, fp4_padded=False, cga_layout=[])>"
        )

    @property
    def box(self) -> tuple[int, ...]:
        """What one copy moves: a block, or a stripe of one."""
        stripe = self.swizzle_bytes // self.tensor.element_size() or self.block[-1]
        return (*self.block[:-1], min(self.block[-1], stripe))

    def described(self) -> int:
        """The launcher's own form of this."""
        code, swizzle = MAP_TYPE_OF[self.tensor.dtype], {0: 0, 32: 1, 64: 2, 128: 3}[self.swizzle_bytes]
        found: int = native().blocks(code, self.tensor.element_size(), swizzle, self.shape, self.strides, self.box)
        return found


class Kernel:
    """A Triton or Gluon function together with its compiled variants on every device.

    ``vectors`` names the integer arguments (row lengths, strides) that must be multiples of a vector for wide accesses,
    ``loose`` the pointers that may lie anywhere: a slice of labels starts where it starts. A ``dependent`` kernel may
    be started while the one before it in the stream still runs, and waits for its results itself. A variant with the
    constant ``UNALIGNED`` is told nothing of row lengths and strides: its rows start anywhere inside an access.
    """

    def __init__(
        self,
        function: Any,
        *,
        vectors: Sequence[str] = (),
        loose: Sequence[str] = (),
        cooperative: bool = False,
        dependent: bool = False,
    ) -> None:
        self.name = function.fn.__name__
        if self.name in _kernels:
            raise KernelError(f"kernel {self.name!r} is declared twice")
        _kernels[self.name] = self
        self.function = function
        self.names = names_of(function)
        self.vectors = frozenset(vectors)
        self.loose = frozenset(loose)
        self.cooperative = cooperative
        self.dependent = dependent
        self._handles: dict[tuple[int, Variant], int] = {}
        self._lock = threading.Lock()

    def bind(
        self,
        args: Sequence[Any],
        *,
        grid: tuple[int, int] | tuple[int],
        constants: Mapping[str, Any],
        num_warps: int,
        device: int,
        vector: int = 0,
        num_stages: int = 1,
        max_registers: int = 0,
        cluster: int = 1,
    ) -> Run:
        """A callable that launches the variant these arguments need, over arguments like them.

        ``vector`` is how many elements of the widest access divide every pointer and row: 0 or 1 for unaligned.
        ``max_registers`` of a thread, where programs must fit on the device together. ``cluster``: programs in a row
        that start together and reach each other's shared memory.
        """
        grid_x, grid_y = grid[0], grid[1] if len(grid) > 1 else 1
        if INTERPRETING:
            return _interpreted(self.function, (grid_x, grid_y), dict(constants))
        arch = SM_90 if device < 0 else _arch(device)
        variant = self.variant(args, constants, num_warps, num_stages, vector, arch, max_registers)
        if _collected is not None:
            _collected.append(variant)
            special = self.cooperative or cluster > 1 or any(isinstance(value, Blocks) for value in args)
            return _nothing if _told is None else partial(_told, self, variant, (grid_x, grid_y), special)
        handle = self._handles.get((device, variant)) or self._load(device, variant)
        maps = tuple((i, value.described()) for i, value in enumerate(args) if isinstance(value, Blocks))
        dependent = self.dependent or bool(constants.get("DEPENDENT", False))
        return _bound(handle, device, grid_x, grid_y, dependent, maps, cluster)

    def variant(
        self,
        args: Sequence[Any],
        constants: Mapping[str, Any],
        num_warps: int,
        num_stages: int,
        vector: int,
        arch: int,
        max_registers: int = 0,
    ) -> Variant:
        names = [name for name in self.names if name not in constants]
        if len(names) != len(args):
            raise KernelError(f"kernel {self.name} takes {names}, given {len(args)} arguments")
        types = tuple((name, type_of(value)) for name, value in zip(names, args, strict=True))
        divisible = tuple(
            (name, POINTER_ALIGNMENT_BYTES if kind.startswith("*") else vector)
            for name, kind in types
            if vector > 1
            and name not in self.loose
            and (kind.startswith("*") or (name in self.vectors and not constants.get("UNALIGNED", False)))
        )
        fixed = tuple(constants.items())
        return Variant(self.name, types, fixed, divisible, num_warps, num_stages, arch, max_registers)

    def _load(self, device: int, variant: Variant) -> int:
        compiled = pack.find(variant) or compile_variant(self.function, variant)  # others may compile theirs meanwhile
        with self._lock:
            found = self._handles.get((device, variant))
            if found is None:
                found = _load(device, compiled, self.cooperative)
                self._handles[device, variant] = found
            return found


def kernel(name: str) -> Kernel:
    return _kernels[name]


def type_of(value: Any) -> str:
    """A value's type in Triton's words."""
    if isinstance(value, Blocks):
        return value.type_name
    if isinstance(value, torch.Tensor):
        return "*" + TYPE_OF[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def vector_of(itemsize: int, pointers: int, *lengths: int) -> int:
    """Elements of the widest access, of 16 bytes at most, that divide all lengths; 1 where addresses (or-ed together)
    are not aligned to 16 bytes."""
    if (_collected is not None and not _collect_aligned) or pointers % POINTER_ALIGNMENT_BYTES:
        return 1
    vector = POINTER_ALIGNMENT_BYTES // itemsize
    while any(length % vector for length in lengths):
        vector //= 2
    return vector


def access_of(itemsize: int, pointers: int, *lengths: int) -> tuple[int, bool]:
    """As ``vector_of``; and whether rows are unaligned, which are then the widest all the same: a kernel reads
    from the access in which a row starts to the one in which it ends, and leaves out what belongs to its neighbors."""
    vector, widest = vector_of(itemsize, pointers, *lengths), vector_of(itemsize, pointers)
    return (widest, True) if vector < widest and min(lengths) >= 2 * widest else (vector, False)


def policy(leaves: bool) -> str:
    """How long the L2 keeps what a kernel reads: what leaves first makes room for what is written."""
    return "evict_first" if leaves else ""


def is_widest(vector: int, itemsize: int) -> bool:
    """Whether every access is one of 16 bytes."""
    return vector * itemsize == POINTER_ALIGNMENT_BYTES


class Pointer(int):
    """An address inside a tensor, as a kernel argument."""


def carved(buffer: torch.Tensor, *lengths: int) -> tuple[Any, ...]:
    """Stretches of a float32 buffer as kernel arguments: addresses, since tensors would cost the host more."""
    if INTERPRETING or _collected is not None:
        return tuple(buffer.flatten().split([*lengths, buffer.numel() - sum(lengths)])[: len(lengths)])
    start, found = buffer.data_ptr(), []
    for length in lengths:
        found.append(Pointer(start))
        start += 4 * length
    return tuple(found)


@cache
def _sink(device: int) -> torch.Tensor:
    return torch.empty(SINK_BYTES // 4, dtype=torch.float32, device=torch.device("cuda", device))


def sink(num: int, device: int) -> torch.Tensor | None:
    """Room for so many float32 numbers that a kernel writes and nobody reads: one place a device, kept for ever and
    shared by everybody. None where they are too many, and while a graph is recorded that would own it."""
    if device < 0 or 4 * num > SINK_BYTES or (device not in _sinks and recording()):
        return None
    found = _sinks[device] = _sink(device)
    return found


def is_sink(address: int) -> bool:
    """Whether this is where such numbers go."""
    return any(address == x.data_ptr() for x in _sinks.values())


def _bound(
    handle: int, device: int, grid_x: int, grid_y: int, dependent: bool, maps: tuple[tuple[int, int], ...], cluster: int
) -> Run:
    found = native()
    return partial(found.launch, found.plan(handle, device, grid_x, grid_y, _raw_stream, dependent, maps, cluster))


def fits(run: Run, clusters: tuple[int, int]) -> bool:
    """Whether (number, size) clusters of a launch are resident on its device together: how many SMs are neighbors
    differs from chip to chip."""
    num, size = clusters
    return not isinstance(run, partial) or native().fitting(run.args[0], size) >= num


def _interpreted(function: Any, grid: tuple[int, int], constants: dict[str, Any]) -> Run:
    def run(*args: Any) -> None:
        if grid[0] and grid[1]:
            function[grid](*args, **constants)

    return run


def _nothing(*args: Any) -> None:
    """Stands in for a launch while variants are only collected."""


@contextmanager
def collecting(*, aligned: bool = True) -> Iterator[list[Variant]]:
    """Inside, ops called on meta tensors launch nothing and only tell which variants they would launch."""
    global _collected, _collect_aligned
    forget_plans()
    _collected, _collect_aligned = [], aligned
    try:
        yield _collected
    finally:
        _collected = None
        forget_plans()


@contextmanager
def lowering(tell: Run) -> Iterator[None]:
    """Inside, ops called on meta tensors tell of every launch instead: the kernel, its variant and grid, whether it
    takes more than a plain launch (a cluster, the whole device, tensor maps), then the arguments."""
    global _told
    with collecting():
        _told = tell
        try:
            yield
        finally:
            _told = None


def _load(device: int, compiled: Compiled, cooperative: bool) -> int:
    try:
        handle, _, _ = native().load(
            device, compiled.cubin, compiled.name, 32 * compiled.num_warps, compiled.shared_bytes, cooperative
        )
    except RuntimeError as error:
        raise KernelError(f"kernel {compiled.name} cannot be loaded on cuda:{device}: {error}") from error
    return handle


@cache
def _arch(device: int) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


@cache
def native() -> Any:
    """The C launcher: from the pack where it fits this machine, else built once and kept in the cache folder."""
    found = _native()
    for run in _once_there:
        run()
    return found


def _native() -> Any:
    packed = pack.launcher_path()
    if packed is not None:
        try:
            return extension("ridgeline_launcher", packed)
        except ImportError:
            pass  # built for another machine: build our own
    return extension("ridgeline_launcher", build_native(cache_folder()))


def build_native(folder: Path) -> Path:
    """Compile launcher.c into ``folder`` unless it is there already; needs a C compiler and Python's headers."""
    source = Path(__file__).with_name("launcher.c")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    target = folder / f"ridgeline_launcher-{digest}.abi3.so"
    if is_installed(target):
        return target
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    if compiler is None:
        raise KernelError(
            "the kernel launcher needs a C compiler once: install gcc, or point RIDGELINE_KERNEL_PACK at a pack "
            "made with `ridgeline kernels pack` on a machine that has one"
        )
    include = sysconfig.get_paths(scheme="posix_prefix")["include"]
    made = target.with_suffix(f".{os.getpid()}.tmp")
    try:
        private_folder(folder)
    except OSError as error:
        raise KernelError(f"the kernel launcher cannot be kept: {error}") from None
    command = [compiler, "-O2", "-shared", "-fPIC", f"-I{include}", "-o", str(made), str(source), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KernelError(f"the kernel launcher could not be built with {compiler}: {done.stderr.strip()[-500:]}")
    install_library(target, made)
    return target
