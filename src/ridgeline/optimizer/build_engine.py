"""``ridgeline.build``: a model as an engine. Exported, tuned within a budget, proved, and complete in one file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ridgeline.engine.file.contents import Contents
from ridgeline.engine.file.engine import Engine
from ridgeline.engine.file.execute import compiled
from ridgeline.engine.file.export import Exported, export, named_inputs, parameter_names, path_name
from ridgeline.engine.file.generalize import generalized
from ridgeline.engine.file.padding import rows_are_independent
from ridgeline.engine.file.program import Program
from ridgeline.engine.file.proof import cases_like, flat, prove
from ridgeline.errors import EngineError
from ridgeline.optimizer.tune_engine import tuned

Sizes = Mapping[str, Any]
LEVELS = (0, 1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What an engine is built for."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dims: Mapping[str, Mapping[int, str]]  # input → axis → name
    profiles: tuple[Mapping[str, int], ...]  # sizes of the named dims, one a profile
    error_budget: float | None
    budget_s: float
    deadline_s: float  # of time.perf_counter
    level: int
    timings: dict[str, Any]
    name: str
    say: Callable[[str], None]
    error_on_miss: bool = False
    calibration: tuple[tuple[Any, ...], ...] = ()  # positional arguments of further calls
    objective: str = "time"
    metric: Callable[[Callable[..., Any]], float] | None = None
    max_drop: float = 0.0

    @property
    def bounds(self) -> dict[str, tuple[int, int]]:
        names = {name for axes in self.dims.values() for name in axes.values()}
        return {n: (min(p[n] for p in self.profiles), max(p[n] for p in self.profiles)) for n in sorted(names)}

    def call_at(self, sizes: Mapping[str, int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments at other sizes: rows of the given ones, over and over."""
        return self.sized(self.args, sizes)

    def sized(self, args: tuple[Any, ...], sizes: Mapping[str, int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same of other positional arguments."""
        names = parameter_names(self.model, len(args))

        def sized(path: Any, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            for axis, name in self.dims.get(path_name(path), {}).items():
                if value.shape[axis] != sizes[name]:
                    value = value.index_select(axis, torch.arange(sizes[name], device=value.device) % value.shape[axis])
            return value

        made = pytree.tree_map_with_path(sized, {**dict(zip(names, args, strict=True)), **self.kwargs})
        return tuple(made[name] for name in names), {name: made[name] for name in self.kwargs}


def build_engine(
    model: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    shapes: Sizes | None = None,
    error_budget: float | None = None,
    budget_s: float = 60.0,
    level: int | None = None,
    timings: Mapping[str, Any] | None = None,
    error_on_miss: bool = False,
    calibration: Sequence[Sequence[Any]] = (),
    objective: str = "time",
    metric: Callable[[Callable[..., Any]], float] | None = None,
    max_drop: float = 0.0,
    name: str | None = None,
    say: Callable[[str], None] | None = None,
) -> Engine:
    """Build an engine of a model's inference.

    ``shapes`` says which sizes are served: ``{"batch": (1, 8, 64)}`` for the first dim of the inputs, or shapes by
    input, ``{"x": ["1x3x224x224", "8..128x3x224x224"]}``. Each size that is named is a profile, and everything between
    the smallest and the largest runs, too. ``level`` 0 exports and proves; 1 also times alternatives; 2 also searches
    as ``optimize`` does (the default on a GPU). ``timings`` are those of an earlier build: with all of them, the build
    measures nothing and its bytes are the same; ``error_on_miss`` makes sure of that.

    Layers get fewer bits only within ``error_budget``, the relative error that outputs may have against float64, chosen
    by measured gain in ``objective`` (time or size) on ``calibration``, a list of positional arguments (drawn like
    ``args`` without). ``metric`` takes the model as a function and returns a number that may fall by ``max_drop``.
    """
    question = _question(model, args, kwargs, shapes, error_budget, budget_s, level, timings, name, say)
    if objective not in ("time", "size"):
        raise EngineError(f"objective is {objective!r}: time or size")
    if metric is not None and error_budget is None:
        question = replace(question, error_budget=0.5)  # the metric decides
    question = replace(question, error_on_miss=error_on_miss, calibration=tuple(map(tuple, calibration)),
                       objective=objective, metric=metric, max_drop=max_drop)  # fmt: skip
    with _evaluating(question.model), torch.no_grad():
        return _Build(question).run()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _question(
    model: Any, args: Any, kwargs: Any, shapes: Any, error_budget: Any, budget_s: Any, level: Any, timings: Any,
    name: str | None, say: Any,
) -> Question:  # fmt: skip
    if not isinstance(model, nn.Module):
        raise EngineError(f"build takes a module, not {type(model).__name__}: load a file with ridgeline.load, "
                          "or wrap what it does in a module")  # fmt: skip
    if not isinstance(args, (tuple, list)):
        raise EngineError(f"args is a tuple of positional arguments, not {type(args).__name__}: write args=(x,)")
    if error_budget is not None and not (isinstance(error_budget, (int, float)) and 0 < error_budget < 1):
        raise EngineError(
            f"error_budget is {error_budget!r}: it is the relative error that results may have; 0.01 is 1 %"
        )
    if not isinstance(budget_s, (int, float)) or not budget_s > 0:
        raise EngineError(f"budget_s is {budget_s!r}: give the build some seconds")
    held = [
        *model.parameters(),
        *model.buffers(),
        *(x for x in pytree.tree_leaves([args, kwargs]) if isinstance(x, Tensor)),
    ]
    devices = {tensor.device for tensor in held}
    if any(device.type == "meta" for device in devices):
        raise EngineError("the model or its inputs are on the meta device and hold no values: load them first")
    if len(devices) > 1:
        raise EngineError(f"the model and its inputs are on several devices ({', '.join(sorted(map(str, devices)))})")
    default = 2 if any(device.type == "cuda" for device in devices) else 1
    if level is not None and level not in LEVELS:
        raise EngineError(f"level is {level!r}: 0 exports, 1 also times alternatives, 2 also searches")
    inputs = named_inputs(model, args, kwargs or {})
    dims, profiles = read_shapes(shapes or {}, inputs)
    return Question(model=model, args=tuple(args), kwargs=dict(kwargs or {}), dims=dims, profiles=profiles,
                    error_budget=error_budget, budget_s=float(budget_s),
                    deadline_s=time.perf_counter() + float(budget_s), level=default if level is None else level,
                    timings=dict(timings or {}), name=name or type(model).__name__,
                    say=say or (lambda text: None))  # fmt: skip


def read_shapes(
    shapes: Sizes, inputs: Mapping[str, Tensor]
) -> tuple[dict[str, dict[int, str]], tuple[dict[str, int], ...]]:
    """Named dims by input and axis, and the sizes of every profile."""
    dims: dict[str, dict[int, str]] = {}
    sizes: dict[str, list[int]] = {}
    for key, value in shapes.items():
        if key in inputs:
            for axis, found in _varying(key, value, inputs[key]).items():
                # Dims of different inputs that vary alike are one dim
                name = next(
                    (n for n, known in sizes.items() if known == found and axis in _axes(dims, n)), f"{key}_{axis}"
                )
                sizes[name] = found
                dims.setdefault(key, {})[axis] = name
            continue
        found = [value] if isinstance(value, int) else list(value) if isinstance(value, (tuple, list, range)) else []
        if not found or not all(type(n) is int and n > 0 for n in found):
            raise EngineError(f"shapes[{key!r}] is {value!r}: give sizes, as (1, 8, 64), or shapes of an input "
                              f"({', '.join(inputs)})")  # fmt: skip
        batched = [name for name, x in inputs.items() if x.dim()]
        if not batched:
            raise EngineError(f"shapes[{key!r}]: no input has a first dim")
        sizes[key] = sorted(set(found))
        length = inputs[batched[0]].shape[0]
        for name in batched:
            if inputs[name].shape[0] == length:
                dims.setdefault(name, {})[0] = key
    count = max((len(found) for found in sizes.values()), default=1)
    profiles = tuple({name: found[min(i, len(found) - 1)] for name, found in sizes.items()} for i in range(count))
    return dims, tuple(dict(p) for p in {tuple(p.items()): p for p in profiles}.values())


def _axes(dims: Mapping[str, Mapping[int, str]], name: str) -> set[int]:
    return {axis for axes in dims.values() for axis, known in axes.items() if known == name}


def _varying(name: str, value: Any, example: Tensor) -> dict[int, list[int]]:
    """Axes of an input that have several sizes, and the sizes."""
    given = [value] if isinstance(value, str) or (value and isinstance(value[0], int)) else list(value)
    rows = []
    for shape in given:
        parts = shape.split("x") if isinstance(shape, str) else list(shape)
        try:
            rows.append([[int(n) for n in str(part).split("..")] for part in parts])
        except ValueError:
            raise EngineError(
                f"shapes[{name!r}]: cannot read {shape!r}: write 8x3x224x224, or 1..64x3x224x224"
            ) from None
        if len(rows[-1]) != example.dim():
            raise EngineError(f"shapes[{name!r}]: {shape!r} has {len(rows[-1])} dims, and the input {example.dim()}")
    found = {axis: sorted({n for row in rows for n in row[axis]}) for axis in range(example.dim())}
    for axis, sizes in found.items():
        if sizes[0] < 1:
            raise EngineError(f"shapes[{name!r}]: axis {axis} has size {sizes[0]}")
    return {axis: sizes for axis, sizes in found.items() if len(sizes) > 1 or sizes[0] != example.shape[axis]}


class _Build:
    """One build, step by step; what it decides goes into the receipt."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.notes: list[str] = []

    def run(self) -> Engine:
        programs, exported = self._programs()
        contents = self._contents(programs, exported)
        engine = Engine(contents, device=self._device())
        if len(programs) > 1:
            engine = self._padded(engine)
        if self.question.level >= 1:
            engine = tuned(engine, exported, self.question, self.notes)
        if self.question.level >= 2:
            from ridgeline.optimizer.record_engine import with_winner

            engine = with_winner(engine, self.question, exported.weights, self.notes)
        return self._proved(engine, programs, exported)

    def _device(self) -> torch.device:
        first = next((p for p in self.question.model.parameters()), None)
        return first.device if first is not None else torch.device("cpu")

    def _programs(self) -> tuple[list[Program], Exported]:
        """One program for every size; where the exporter cannot leave a size open, one for each profile."""
        question = self.question
        middle = question.profiles[len(question.profiles) // 2]
        args, kwargs = question.call_at(middle)
        if not any(low < high for low, high in question.bounds.values()):
            found = export(question.model, args, kwargs)
            return [found.program], found
        varying = {name for name, (low, high) in question.bounds.items() if low < high}
        dims = {
            path: {axis: name for axis, name in axes.items() if name in varying} for path, axes in question.dims.items()
        }
        bounds = {name: question.bounds[name] for name in varying}
        try:
            sizes = {**middle, **{name: max(2, middle[name]) for name in varying}}
            args, kwargs = question.call_at(sizes)
            found = export(question.model, args, kwargs, dims, bounds)
            return [found.program], found
        except EngineError as error:
            if (merged := self._merged(bounds)) is not None:
                return [merged.program], merged
            self.notes.append(f"no program for every size: {error}; one is built for each profile")
        each = [export(question.model, *question.call_at(profile)) for profile in question.profiles]
        return [one.program for one in each], each[-1]

    def _merged(self, bounds: Mapping[str, tuple[int, int]]) -> Exported | None:
        """One program of three exported ones, where one dim varies and the exporter sees its sizes as numbers. It has
        to return what the model does at the smallest and the largest size."""
        question = self.question
        if len(bounds) != 1:
            return None
        (name, (low, high)) = next(iter(bounds.items()))
        sizes = [5, 7, 11]  # numbers that no other size is likely to be, none of them 1
        try:
            found = [export(question.model, *question.call_at({**question.profiles[0], name: size})) for size in sizes]
        except EngineError:
            return None
        first = found[0]
        alike = all(each.weights.keys() == first.weights.keys() and each.signature == first.signature
                    and all(torch.equal(each.weights[n], first.weights[n]) for n in first.constants)
                    for each in found)  # fmt: skip
        made = generalized([each.program for each in found], sizes, name, (low, high)) if alike else None
        if made is None:
            return None
        run = compiled(made, first.weights, self._device())
        for size in (low, high):
            args, kwargs = question.call_at({**question.profiles[0], name: size})
            ours = flat(run(*named_inputs(question.model, args, kwargs).values()))
            if not all(map(torch.equal, ours, flat(question.model(*args, **kwargs)))):
                return None
        return replace(first, program=made)

    def _padded(self, engine: Engine) -> Engine:
        """Whether calls between profiles may be padded: where only first dims vary, and rows do not see each other."""
        question = self.question
        axes = {axis for found in question.dims.values() for axis in found}
        names = {name for found in question.dims.values() for name in found.values()}
        inputs = named_inputs(question.model, *question.call_at(question.profiles[-1]))
        batched = [i for i, path in enumerate(inputs) if path in question.dims]
        if axes != {0} or len(names) != 1:
            return engine
        if not rows_are_independent(engine, engine.contents.programs[-1], list(inputs.values()), batched):
            self.notes.append("rows depend on each other: calls between profiles are not padded")
            return engine
        return engine.with_contents(replace(engine.contents, padding={"inputs": batched}))

    def _contents(self, programs: list[Program], exported: Exported) -> Contents:
        state = self.question.model.state_dict()
        checkpoint = {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in state.items()}
        device = self._device()
        target: dict[str, Any] = {
            "device": device.type,
            "ridgeline": sys.modules["ridgeline"].__version__,
            "torch": torch.__version__.split("+")[0],
        }
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            target |= {"gpu": properties.name, "capability": f"{properties.major}.{properties.minor}"}
        weights = {name: tensor.detach().cpu() for name, tensor in exported.weights.items()}
        return Contents(
            name=self.question.name, signature=exported.signature, programs=tuple(programs), weights=weights,
            target=target, checkpoint=checkpoint, aliases=exported.aliases,
            constants=frozenset(name for name in weights if name not in checkpoint), timings=self.question.timings,
        )  # fmt: skip

    def _proved(self, engine: Engine, bases: list[Program], exported: Exported) -> Engine:
        """The engine with its proof and receipt; one that is wrong is not handed over."""
        question, contents = self.question, engine.contents
        ends = dict.fromkeys((0, len(question.profiles) // 2, len(question.profiles) - 1))
        examples = [list(named_inputs(question.model, *question.call_at(question.profiles[i])).values()) for i in ends]
        weights = {**exported.weights, **{a: exported.weights[n] for a, n in exported.aliases.items()}}
        notes = list(self.notes)
        try:
            cases = cases_like(examples, bases, weights)
            proof, values, wrong = prove(engine, bases, weights, cases, question.error_budget)
        except EngineError as error:
            proof, values, wrong = {"cases": [], "reference": "none"}, {}, []
            notes.append(f"no proof: {error}")
        if wrong:
            raise EngineError(f"the engine of {question.name} is not as accurate as the model: {'; '.join(wrong[:3])}")
        receipt = {**contents.receipt, "level": question.level, "error_budget": question.error_budget, "notes": notes}
        return engine.with_contents(replace(contents, proof=proof, proof_values=values, receipt=receipt))
