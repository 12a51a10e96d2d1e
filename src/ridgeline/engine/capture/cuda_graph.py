"""Recording work on a device so that it can be run again without Python: CUDA graphs, and what keeps them safe."""

from __future__ import annotations

import gc
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor

from ridgeline.engine import OWN_CODE
from ridgeline.engine.capture.checkpoint_rng import Rewound
from ridgeline.engine.replay.static_inputs import extent, view_of
from ridgeline.errors import NotGraphable

_CAPTURING = threading.Lock()
"""One capture at a time in a process."""
_GROWS: ContextVar[bool] = ContextVar("grows", default=False)
"""Whether a recording's memory is one range that grows page by page (PyTorch's expandable segments), without gaps
between segments of different sizes."""


class Recording(Protocol):
    """Work that was recorded: running it again reads and writes the same addresses."""

    def replay(self) -> None: ...


Remake = Callable[[Any], Tensor]
"""Makes a tensor over memory that recordings hold, given what keeps those recordings alive."""


class Executor(Protocol):
    """A device that can record work and run it again."""

    device_type: str
    generator: str
    """Which random generator replays move, as ``observe`` names them."""

    def warm_up(self, run: Callable[[], Any]) -> None:
        """Runs once where recordings run, so that nothing is initialized or compiled while recording."""

    def rehearse(self, run: Callable[[], Any], *, told: bool) -> None:
        """Runs once more, raising NotGraphable where recording would fail; ``told`` if code that asks is told so."""

    def record(self, run: Callable[[], Any], *, told: bool) -> tuple[Recording, Any]:
        """Records a run, and hands back its result, whose contents are undefined until the first replay."""

    def fork(self) -> Executor:
        """Another that records into memory of its own: what one lends, the other does not write to."""

    def pool_bytes(self) -> int:
        """Memory that recordings hold as long as they live, forks included."""

    def is_recording(self) -> bool:
        """Whether somebody records what is done here, and would record a replay."""

    def vacate(self, tensor: Tensor) -> Remake:
        """How to make a tensor over the same memory once this one is let go of and later recordings may use it."""

    def arrive(self) -> None:
        """Makes the work that follows here wait for the work of the last replay elsewhere."""

    def rewound(self) -> Rewound:
        """How parts that are computed again draw the same numbers, for one call that is recorded."""


class CudaExecutor:
    """Records CUDA graphs into a pool of memory of its own; one per graphed call."""

    device_type = "cuda"
    generator = "cuda"

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())
        self.pool = torch.cuda.graph_pool_handle()
        self._last: Any = None
        self._raw = -1
        self._forks: list[CudaExecutor] = []
        self._rewound: Rewound | None = None

    def warm_up(self, run: Callable[[], Any]) -> None:
        with torch.cuda.device(self.device):
            stream, current = _side_stream(self.device), torch.cuda.current_stream()
            stream.wait_stream(current)
            with torch.cuda.stream(stream), _rehearsing():
                run()
            current.wait_stream(stream)
            torch.cuda.synchronize()

    def rehearse(self, run: Callable[[], Any], *, told: bool) -> None:
        """Runs with synchronizations forbidden."""
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.synchronize(self.device)
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.stream(_side_stream(self.device)), _answering(told), _rehearsing():
                run()
        except Exception as error:
            raise NotGraphable(reason_of(error)) from error
        finally:
            torch.cuda.set_sync_debug_mode(before)
            torch.cuda.synchronize(self.device)

    def record(self, run: Callable[[], Any], *, told: bool) -> tuple[Recording, Any]:
        with _CAPTURING, torch.cuda.device(self.device), _uncollected(), self._recoverable(), _answering(told):
            graph = torch.cuda.CUDAGraph()
            for generator in self._rewound.states if self._rewound else ():
                graph.register_generator_state(generator)
            torch._C._cuda_clearCublasWorkspaces()  # the graph's workspace then lies in its own pool, where it stays
            with _growing(), torch.cuda.graph(graph, pool=self.pool, stream=_side_stream(self.device),
                                              capture_error_mode="thread_local"):  # fmt: skip
                result = run()
            torch._C._cuda_clearCublasWorkspaces()
        return graph, result

    @contextmanager
    def _recoverable(self) -> Iterator[None]:
        """After a capture that failed: the stream, the random generator and the allocator as they were before."""
        stream = torch.cuda.current_stream()
        generator = torch.cuda.default_generators[self.device.index]
        clean = generator.clone_state()
        try:
            yield
        except Exception as error:
            torch.cuda.set_stream(stream)
            _end_allocations(self.device, self.pool)
            self.pool = torch.cuda.graph_pool_handle()
            torch.cuda.synchronize(self.device)
            if not _closed(self.device):
                generator.graphsafe_set_state(clean)
            if isinstance(error, NotGraphable):
                raise
            raise NotGraphable(reason_of(error)) from error

    def rewound(self) -> Rewound:
        self._rewound = Rewound(torch.cuda.default_generators[self.device.index])
        return self._rewound

    def fork(self) -> CudaExecutor:
        made = CudaExecutor(self.device)
        self._forks.append(made)
        return made

    def pool_bytes(self) -> int:
        pools = {tuple(executor.pool) for executor in (self, *self._forks)}
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s.get("segment_pool_id", ())) in pools)

    def is_recording(self) -> bool:
        return torch._C._cuda_isCurrentStreamCapturing()

    def vacate(self, tensor: Tensor) -> Remake:
        storage = tensor.untyped_storage()
        place, num_bytes, start = storage.data_ptr(), storage.nbytes(), extent(tensor)[0]
        dtype, size, stride = tensor.dtype, tensor.shape, tensor.stride()

        def remake(holding: Any) -> Tensor:
            memory = torch.as_tensor(_Memory(place, num_bytes, holding), device=self.device)
            return view_of(memory, dtype, start, size, stride)

        return remake

    def arrive(self) -> None:
        raw = torch._C._cuda_getCurrentRawStream(self.device.index)
        if raw == self._raw:
            return
        stream = torch.cuda.current_stream(self.device)
        if self._last is not None:
            stream.wait_stream(self._last)
        self._last, self._raw = stream, raw


class _Memory:
    """Bytes on a device as other libraries hand them to PyTorch, which keeps this object as long as it uses them."""

    __slots__ = ("__cuda_array_interface__", "_holding")

    def __init__(self, place: int, num_bytes: int, holding: Any) -> None:
        self._holding = holding
        self.__cuda_array_interface__ = {"data": (place, False), "shape": (num_bytes,), "typestr": "|u1", "version": 2}


def _rehearsing() -> AbstractContextManager[None]:
    """Kernels of ours run as they will be recorded, if any were loaded."""
    launcher: Any = sys.modules.get("ridgeline.kernels.launcher")
    return nullcontext() if launcher is None else launcher.rehearsing()


@contextmanager
def growing(wanted: bool = True) -> Iterator[None]:
    """What is recorded inside gets memory that grows: segments are simpler, and are tried first."""
    token = _GROWS.set(wanted)
    try:
        yield
    finally:
        _GROWS.reset(token)


@contextmanager
def _growing() -> Iterator[None]:
    """What is allocated meanwhile lies in ranges that grow, where nobody has said how the allocator has to do it."""
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    given = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if not _GROWS.get() or change is None or given:
        yield
        return
    change("expandable_segments:True")
    try:
        yield
    finally:
        change("expandable_segments:False")


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection: a graph that is destroyed while another is captured invalidates the capture."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextmanager
def _answering(told: bool) -> Iterator[None]:
    """What code hears that asks whether a capture is under way: some takes a slower way through the model then.

    The answer is changed where PyTorch's function takes it from. Traced code is guarded by the function itself, and
    would be traced and compiled once more for another one.
    """
    home, name = _ANSWER
    asked = getattr(home, name)
    setattr(home, name, lambda: told)
    try:
        yield
    finally:
        setattr(home, name, asked)


def _answer() -> tuple[Any, str]:
    """Where code that asks gets its answer: the name PyTorch's function calls, or the function."""
    inner = "_cuda_isCurrentStreamCapturing"
    home = sys.modules.get(torch.cuda.is_current_stream_capturing.__module__)
    return (home, inner) if hasattr(home, inner) else (torch.cuda, "is_current_stream_capturing")


_ANSWER = _answer()


_STREAMS: dict[torch.device, Any] = {}


def _side_stream(device: torch.device) -> Any:
    """The stream of warm-ups and captures, one a device: workspaces are kept per stream."""
    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream(device)
    return _STREAMS[device]


def _closed(device: torch.device) -> bool:
    """Ends, for the random generator, a capture that failed, by another that does not; whether that could be done.

    Its state believes that a capture is under way, and every recording made before has that very state: another in its
    place left them with one that refuses to draw. The best candidate so far could no longer be replayed, nor anything
    be compared with it, and eager was returned where it was 2.4 times as slow (convolutions that drop, H200).
    """
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=_side_stream(device), capture_error_mode="thread_local"):
            torch.zeros(1, device=device)
    except RuntimeError:
        return False
    return True


def _end_allocations(device: torch.device, pool: Any) -> None:
    """A capture that failed neither ends its allocations nor lets go of its pool: each would keep a step's memory."""
    try:
        torch._C._cuda_endAllocateToPool(device.index, pool)
    except (RuntimeError, AttributeError):
        return  # the failed capture had ended them itself
    with suppress(RuntimeError, AttributeError):
        torch._C._cuda_releasePool(device.index, pool)


LEGACY = "work is put on the legacy default stream"
_WORDS = {
    "called a synchronizing CUDA operation": "the host waits for a value of a tensor",
    "operation not permitted when stream is capturing": "the host waits for the device",
    "operation would make the legacy stream depend": LEGACY,
    "out of memory": "there is not enough memory to record it",
    "Cannot copy between CPU and CUDA tensors during CUDA graph capture": "tensors are copied between host and device",
    "captures_underway": "memory is given back to the device while it is recorded",
    "Cannot call CUDAGeneratorImpl": "the random generator's state is read, as checkpointing of parts that drop does",
}


def reason_of(error: BaseException) -> str:
    """Why a call could not be recorded, in words, and where in the model."""
    while error.__context__ is not None and "captur" in str(error):  # the end of a capture fails after what broke it
        error = error.__context__
    text = str(error).strip().split("\n", 1)[0]
    said = next((words for sign, words in _WORDS.items() if sign in str(error)), f"{type(error).__name__}: {text}")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _ours(f.filename)]
    where = frames[-1] if frames else None
    return f"{said}, at {where.filename.rpartition('/')[2]}:{where.lineno} ({where.line})" if where else said


_PYTORCH = os.path.join(os.path.dirname(torch.__file__), "")
"""Where PyTorch lies: by its name alone every file of an environment under ``/opt/torch`` was taken for its own, and
receipts said why something could not be recorded and never where."""


def _ours(filename: str) -> bool:
    return filename.startswith((_PYTORCH, *OWN_CODE))


def executor_for(tensors: list[Tensor]) -> Executor:
    """The executor of the one device that these tensors are on."""
    devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
    if not devices:
        raise NotGraphable("nothing of this call is on a CUDA device")
    if len(devices) > 1:
        raise NotGraphable(f"the call is spread over {', '.join(sorted(map(str, devices)))}")
    device = devices.pop()
    if device.type != "cuda":
        raise NotGraphable(f"graphs are recorded on CUDA devices, not on {device}")
    return CudaExecutor(device)
