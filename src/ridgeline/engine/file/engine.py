"""An engine: a model as one file that runs, is inspected, verified and refitted without the model's code."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ridgeline.engine.file import contents as files
from ridgeline.engine.file.binding import Binding, tensor_of
from ridgeline.engine.file.contents import Contents
from ridgeline.engine.file.execute import compiled, interpret
from ridgeline.engine.file.program import Program
from ridgeline.errors import EngineError
from ridgeline.units import parse_quantity, show_bytes

if TYPE_CHECKING:
    from ridgeline.engine.file.compare import Comparison
    from ridgeline.engine.file.inspect import Inspection
    from ridgeline.engine.file.proof import Verification

Call = Callable[..., Any]
MAX_SHAPES = 4096


class BetweenProfiles(UserWarning):
    """A call has a shape that no profile was built for."""


class Engine:
    """Runs a program for the shapes of each call. ``load`` reads one from a file, ``ridgeline.build`` makes one.

    An engine infers: nothing is recorded for gradients. It may be called from several threads.
    """

    def __init__(
        self,
        contents: Contents,
        *,
        device: str | torch.device | None = None,
        trusted: bool = True,
        memory_limit: int | str | None = None,
        weight_budget: int | str | None = None,
    ) -> None:
        self.contents = contents
        self.device = _device(device, contents)
        self.trusted = trusted
        self.limit_bytes = _bytes(memory_limit) or _free_bytes(self.device)
        self.weight_budget_bytes = _bytes(weight_budget)
        self.notes: list[str] = []
        self._binding = Binding(contents.signature, contents.programs[0].inputs)
        self._plain, self._num = self._binding.is_plain, len(contents.programs[0].inputs)
        self._place(contents)

    def _place(self, contents: Contents) -> None:
        """Weights on the device, and no program compiled yet."""
        from ridgeline.engine.file.streaming import placed

        self._weights, self.streamed_bytes = placed(contents.weights, self.device, self.weight_budget_bytes)
        self._calls: dict[int, Call] = {}
        self._runs: dict[Any, Call] = {}

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        device: str | torch.device | None = None,
        *,
        trust: bool = False,
        check: bool = True,
        memory_limit: int | str | None = None,
        weight_budget: int | str | None = None,
    ) -> Engine:
        """Read an engine. Its weights are used where they lie in the file until they are copied to a device.

        ``trust`` lets device code that another machine put into the file run here; without it, and on another GPU,
        ATen computes those steps. ``check=False`` leaves out the digests of the members.
        """
        contents = files.read(path, check)
        return cls(contents, device=device, trusted=trust or contents.made_here, memory_limit=memory_limit,
                   weight_budget=weight_budget)  # fmt: skip

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the engine to a file; the same engine gives the same bytes."""
        self.contents = self.contents.save(path)
        return Path(path)

    @property
    def name(self) -> str:
        return self.contents.name

    @property
    def receipt(self) -> Mapping[str, Any]:
        """What the build tried, measured, chose and left out."""
        return self.contents.receipt

    @property
    def inputs(self) -> dict[str, str]:
        """Inputs by name: their types and shapes, with names of dims that vary."""
        general = self.contents.programs[-1]
        return {i.name: f"{i.dtype}[{', '.join(map(str, i.shape))}]" for i in general.inputs}

    @property
    def profiles(self) -> list[str]:
        """The shapes that are built, one line a program."""
        return [_profile(program) for program in self.contents.programs]

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.contents.weights.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._plain and not kwargs and len(args) == self._num:
            return self.on_inputs(args)
        return self.on_inputs(self._binding.bind(args, kwargs))

    def on_inputs(self, inputs: Sequence[Any]) -> Any:
        """The outputs for the program's inputs, in their order."""
        try:
            run = self._runs.get(tuple([(x.shape, x.dtype, x.device) for x in inputs]))
        except AttributeError:  # something else than tensors
            inputs = [tensor_of(x, i.name) for x, i in zip(inputs, self._binding.inputs, strict=True)]
            return self.on_inputs(inputs)
        if run is None:
            run = self._resolve(inputs)
        try:
            if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
                with torch.no_grad():
                    return run(*inputs)
            return run(*inputs)
        except EngineError:
            raise
        except Exception as error:
            raise self._explained(inputs, error) from error

    def _explained(self, inputs: Sequence[Tensor], error: Exception) -> EngineError:
        """Which step fails on these inputs: looked for by running them once more, one by one."""
        shapes = [tuple(x.shape) for x in inputs]
        program = next((p for p in self.contents.programs if sizes_of(p, shapes) is not None), None)
        done = [0]

        def each(index: int, step: Any, results: list[Any]) -> None:
            done[0] = index + 1

        where = "a step"
        if program is not None:
            weights = lambda name: held if isinstance(held := self._weights[name], Tensor) else held()
            try:
                with torch.no_grad():
                    interpret(program, inputs, weights, self.device, each)
            except Exception:
                step = program.steps[min(done[0], len(program.steps) - 1)]
                where = f"step {done[0]} ({step.op}{' in ' + step.module if step.module else ''})"
        first = str(error).strip().splitlines()
        return EngineError(f"{self.name}: {where} fails on inputs of {_shown(shapes)}: "
                           f"{ascii(first[0][:300])[1:-1] if first else type(error).__name__}")  # fmt: skip

    def run(self, inputs: Mapping[str, Any], out: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
        """Run with inputs by name; outputs by name, or by number where they have none.

        ``out`` has tensors that outputs are copied into. Arrays in give arrays out.
        """
        as_arrays = any(
            not isinstance(value, Tensor) and hasattr(value, "__array_interface__") for value in inputs.values()
        )
        found = named_outputs(self(**inputs))
        for name, buffer in (out or {}).items():
            if name not in found:
                raise EngineError(f"the engine has no output {name!r}; it has {', '.join(found)}")
            if buffer.shape != found[name].shape or buffer.dtype != found[name].dtype:
                raise EngineError(f"output {name!r} is {found[name].dtype} {tuple(found[name].shape)}, and the buffer "
                                  f"is {buffer.dtype} {tuple(buffer.shape)}")  # fmt: skip
            found[name] = buffer.copy_(found[name])
        return {name: value.numpy() for name, value in found.items()} if as_arrays else found

    def _resolve(self, inputs: Sequence[Tensor]) -> Call:
        """What runs these shapes, looked for once; the most exact program that takes them."""
        programs = self.contents.programs
        for given, want in zip(inputs, programs[0].inputs, strict=True):
            if given.dtype != getattr(torch, want.dtype):
                raise EngineError(f"input {want.name!r} is {given.dtype}, and the engine takes {want.dtype}")
            if given.device != self.device:
                raise EngineError(f"input {want.name!r} is on {given.device}, and the engine on {self.device}")
            if given.layout is not torch.strided:
                raise EngineError(f"input {want.name!r} is {given.layout}, and the engine takes dense tensors")
            if given.dim() != len(want.shape):
                raise EngineError(f"input {want.name!r} has {given.dim()} dims, and the engine takes "
                                  f"[{', '.join(map(str, want.shape))}]")  # fmt: skip
        shapes = [tuple(given.shape) for given in inputs]
        fitting = [i for i, program in enumerate(programs) if sizes_of(program, shapes) is not None]
        fitting = [i for i in fitting if not programs[i].issued or self._runs_issued()]
        exact = [i for i in fitting if not programs[i].dims]
        run: Call | None = self.compiled_for(exact[0], shapes) if exact else None
        if run is None and not fitting and self.contents.padding:
            from ridgeline.engine.file.padding import padded

            run = padded(self, shapes)
        if run is None and fitting:
            run = self.compiled_for(fitting[0], shapes)
            if any(not program.dims for program in programs):
                self.note(f"{_shown(shapes)} is no profile of {self.name}: it runs as the general program, not as "
                          "one that was tuned for it")  # fmt: skip
        if run is None:
            raise EngineError(f"{self.name} has no profile for {_shown(shapes)}; it is built for "
                              f"{'; '.join(self.profiles[:8])}: build it with shapes= that include this")  # fmt: skip
        if len(self._runs) >= MAX_SHAPES:
            self._runs.clear()
        self._runs[tuple((x.shape, x.dtype, x.device) for x in inputs)] = run
        return run

    def compiled_for(self, index: int, shapes: Sequence[tuple[int, ...]]) -> Call:
        """A program as a function. Before a stranger's runs, it is run without values."""
        program = self.contents.programs[index]
        if program.issued and self.device.type == "cuda":
            return self._replayed(program, shapes)
        if not self.trusted:
            from ridgeline.engine.file.dry_run import peak_bytes

            what = f"{self.name}, program {index}"
            peak_bytes(program, shapes, self.contents.weights, self.limit_bytes, what)
        if index not in self._calls:
            self._calls[index] = compiled(program, self._weights, self.device)
        return self._calls[index]

    def _runs_issued(self) -> bool:
        """Whether programs that were recorded on a GPU run here; if not, says once what is lost."""
        target = self.contents.target
        why = ""
        if self.device.type != str(target.get("device")):
            why = f"it was recorded on {target.get('device')}"
        elif not self.trusted and self.contents.kernels:
            why = "its device code was made on another machine (load with trust=True to run it)"
        elif self.device.type == "cuda":
            mine = ".".join(map(str, torch.cuda.get_device_capability(self.device)))
            why = (
                ""
                if mine == target.get("capability")
                else f"it was recorded for compute capability {target.get('capability')}"
            )
        if why:
            self.note(f"{self.name} runs as ATen, without the search's {self.contents.receipt.get('winner')}: {why}")
        return not why

    def _replayed(self, program: Program, shapes: Sequence[tuple[int, ...]]) -> Call:
        """A recorded program as a CUDA graph, or the general program where it cannot be made here."""
        from ridgeline.engine.file.cuda_kernels import Kernels, graphed

        try:
            with torch.cuda.device(self.device):  # kernels are loaded into the current device's context
                kernels = Kernels(self.contents.kernels, self.contents.cubins)
                call = compiled(program, self._weights, self.device, kernels)
                example = [torch.zeros(shape, dtype=getattr(torch, want.dtype), device=self.device)
                           for shape, want in zip(shapes, program.inputs, strict=True)]  # fmt: skip
                return graphed(call, example)
        except (EngineError, RuntimeError) as error:
            self.note(f"{self.name} runs as ATen, not as recorded: {str(error)[:200]}")
            return compiled(self.contents.programs[-1], self._weights, self.device)

    def note(self, text: str) -> None:
        """Say something once."""
        if text not in self.notes:
            self.notes.append(text)
            warnings.warn(text, BetweenProfiles, stacklevel=4)

    def refit(self, checkpoint: Any) -> Engine:
        """Replace all weights by those of a checkpoint (a safetensors file, a state dict or a module), or none.

        Derived weights are made again by the recipes of the build. The bits are those of a new build with the same
        timings.
        """
        from ridgeline.engine.file.refit import refitted

        made = refitted(self, checkpoint)
        self.contents, self._weights, self.streamed_bytes = made.contents, made._weights, made.streamed_bytes
        self._calls, self._runs = made._calls, made._runs
        return self

    def with_contents(self, contents: Contents) -> Engine:
        """An engine of other contents on the same device, as trusted as this one."""
        return Engine(contents, device=self.device, trusted=self.trusted, memory_limit=self.limit_bytes,
                      weight_budget=self.weight_budget_bytes)  # fmt: skip

    def verify(self) -> Verification:
        """Run the proof of the build again, on this machine."""
        from ridgeline.engine.file.proof import verify

        return verify(self)

    def inspect(self, *, times: bool = False, on: str | None = None) -> Inspection:
        """Layers, steps, types, memory and precision; with ``times``, what each step takes here; ``on``, its floor."""
        from ridgeline.engine.file.inspect import inspect

        return inspect(self, times=times, on=on)

    def compare(self, other: Any, num_inputs: int = 3) -> Comparison:
        """How far the results of another engine, module or function are from this one's, and what differs."""
        from ridgeline.engine.file.compare import compare

        return compare(self, other, num_inputs)

    def __repr__(self) -> str:
        size = show_bytes(self.weight_bytes)
        return f"<Engine {self.name}: {len(self.contents.programs)} profiles, {size} of weights, on {self.device}>"


def sizes_of(program: Program, shapes: Sequence[Sequence[int]]) -> dict[str, int] | None:
    """The sizes of a program's dims for these shapes, or None where it does not take them."""
    sizes: dict[str, int] = {}
    for shape, want in zip(shapes, program.inputs, strict=True):
        if len(shape) != len(want.shape):
            return None
        for size, dim in zip(shape, want.shape, strict=True):
            if isinstance(dim, int) and size != dim:
                return None
            if isinstance(dim, str) and sizes.setdefault(dim, size) != size:
                return None
    return sizes if all(program.dims[n][0] <= size <= program.dims[n][1] for n, size in sizes.items()) else None


def named_outputs(found: Any) -> dict[str, Any]:
    """Tensors among outputs by the path under which the model returned them; one alone is ``output``."""
    made: dict[str, Any] = {}

    def walk(item: Any, path: str) -> None:
        if isinstance(item, Tensor):
            made[path or "output"] = item
        elif isinstance(item, (Mapping, list, tuple)):
            for name, each in item.items() if isinstance(item, Mapping) else enumerate(item):
                walk(each, f"{path}.{name}" if path else str(name))

    walk(found, "")
    return made


def _profile(program: Program) -> str:
    sizes = ", ".join(f"{name} {low}..{high}" for name, (low, high) in program.dims.items())
    shapes = ", ".join(f"{i.name} {'x'.join(map(str, i.shape)) or 'scalar'}" for i in program.inputs)
    return f"{shapes} ({sizes})" if sizes else shapes


def _shown(shapes: Sequence[Sequence[int]]) -> str:
    return ", ".join("x".join(map(str, shape)) or "scalar" for shape in shapes)


def _bytes(given: int | str | None) -> int | None:
    return None if given is None else int(parse_quantity(given)) if isinstance(given, str) else int(given)


def _free_bytes(device: torch.device) -> int:
    """What a stranger's program may need unless told: the memory that is there."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _device(device: str | torch.device | None, contents: Contents) -> torch.device:
    if device is None:
        wants_cuda = str(contents.target.get("device", "cpu")).startswith("cuda")
        return (
            torch.device("cuda", torch.cuda.current_device())
            if wants_cuda and torch.cuda.is_available()
            else torch.device("cpu")
        )
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise EngineError(f"no device {device!r}: {error}") from None
    if found.type == "cuda":
        if not torch.cuda.is_available():
            raise EngineError("this machine has no CUDA device: load the engine with device='cpu'")
        return torch.device("cuda", found.index if found.index is not None else torch.cuda.current_device())
    if found.type != "cpu":
        raise EngineError(f"engines run on cpu and cuda, not on {found.type}")
    return found
