"""A stand-in for CUDA graphs on the CPU: records ATen calls and replays them into the same memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from ridgeline.engine import autocast as casts
from ridgeline.engine.capture.host_constants import READ, _Courier
from ridgeline.engine.capture.probe import Journal, Observation
from ridgeline.errors import NotGraphable

_READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.is_nonzero.default)


def _shaped_by_values(func: Any, args: Any) -> bool:
    """Whether the shape of a result depends on values; an index does so only through masks."""
    if func is torch.ops.aten.index.Tensor:
        return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return torch.Tag.dynamic_output_shape in func.tags


class Tape(TorchDispatchMode):
    """Every call with its arguments and the tensors it returned."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # what was compiled is recorded as compiled

    def __init__(self, vacated: tuple[Tensor, ...] = ()) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.vacated = vacated

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is READ and any(isinstance(mode, _Courier) for mode in _get_current_dispatch_mode_stack()):
            return func(*args, **kwargs)  # it knows the value, or refuses
        if func in _READS or _shaped_by_values(func, args):
            raise NotGraphable(f"the host waits for a value of a tensor ({func})")
        result = func(*args, **kwargs)
        fresh = not any(r.alias_info is not None for r in func._schema.returns)
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)] if fresh else []
        self.calls.append((func, args, kwargs, made))
        return result

    def replay(self) -> None:
        """Runs every call again, as it was recorded; results go where the first ones went."""
        inferred = any(made.is_inference() for *_, results in self.calls for made in results)
        with torch.no_grad(), torch.inference_mode(inferred), torch._C._AutoDispatchBelowAutograd(), casts.off():
            for func, args, kwargs, results in self.calls:
                again = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, Tensor)]
                for mine, fresh in zip(results, again):
                    if func._schema.name not in ("aten::lift_fresh", "aten::lift_fresh_copy"):
                        mine.copy_(fresh)
            for tensor in self.vacated:  # somebody else's by now
                tensor.fill_(float("nan") if tensor.is_floating_point() else 1)


class _Quiet(Journal):
    """Notes writes of compiled code that runs as compiled."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class TapeExecutor:
    """Records on the CPU what a CUDA graph would: fixed addresses, Python run once, contents with a replay."""

    device_type = "cpu"
    generator = "cpu"

    def __init__(self) -> None:
        self.recorded = 0
        self.arrivals = 0
        self.vacated: list[Tensor] = []

    def warm_up(self, run: Any) -> None:
        run()

    def rehearse(self, run: Any, *, told: bool) -> None:
        with Tape():
            run()

    def record(self, run: Any, *, told: bool) -> tuple[Tape, Any]:
        """Nothing that is written while recording stays, as nothing runs while a graph is captured."""
        self.recorded += 1
        journal, tape = _Quiet(Observation()), Tape(tuple(self.vacated))
        self.tape = tape
        with journal, tape:
            result = run()
        journal.put_back()
        for *_, results in tape.calls:
            for tensor in results:
                if tensor.is_floating_point() and tensor.numel():
                    tensor.data.fill_(float("nan"))
        return tape, result

    def fork(self) -> TapeExecutor:
        return self

    def pool_bytes(self) -> int:
        return 0

    def is_recording(self) -> bool:
        return False

    def vacate(self, tensor: Tensor) -> Any:
        """The memory is spoiled by whatever is recorded from now on, when that is replayed."""
        memory = tensor.detach()
        self.vacated.append(memory)
        return lambda holding: memory.detach()

    def arrive(self) -> None:
        self.arrivals += 1

    def rewound(self) -> Rewinding:
        return Rewinding(self)


class Rewinding:
    """Numbers drawn once more by checkpointed parts: what keeps and sets the generator's state goes onto the tape.

    On a device a state is a place in the numbers (``engine.capture.checkpoint_rng``); here it is the state itself.
    """

    def __init__(self, executor: TapeExecutor) -> None:
        self.executor = executor
        self.places: list[int] = []
        self.states: dict[int, Tensor] = {}

    def begin(self) -> None:
        pass

    def followed(self, recording: Any, part: str) -> Any:
        return recording

    @contextmanager
    def counting(self) -> Iterator[None]:
        kept, found = torch.get_rng_state, []
        torch.get_rng_state = lambda: found.append(1) or kept()
        try:
            yield
        finally:
            torch.get_rng_state = kept
        self.places = found

    @contextmanager
    def recording(self) -> Iterator[None]:
        kept = torch.get_rng_state, torch.set_rng_state, torch.random.fork_rng
        torch.get_rng_state, torch.set_rng_state, torch.random.fork_rng = self._keep, self._set, self._fork
        self.real = kept[:2]
        try:
            yield
        finally:
            torch.get_rng_state, torch.set_rng_state, torch.random.fork_rng = kept

    def _keep(self) -> int:
        number, get = len(self.states), self.real[0]
        self.states[number] = get()
        self.executor.tape.calls.append((lambda: self.states.__setitem__(number, get()), (), {}, []))
        return number

    def _set(self, number: int) -> None:
        put = self.real[1]
        put(self.states[number])
        self.executor.tape.calls.append((lambda: put(self.states[number]), (), {}, []))

    @contextmanager
    def _fork(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        number = self._keep()
        try:
            yield
        finally:
            self._set(number)
