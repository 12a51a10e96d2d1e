"""Measures how sensitive a model's outputs are to quantizing each layer, and chooses formats within an error budget.

The error of a layer in a format is measured in two parts. *At the layer*: the relative error of its own GEMM on the
given inputs, format by format, which is exact and cheap. *At the outputs*: one layer at a time is perturbed by a probe
(its weight in four bits a row, above the rounding noise of the model's dtype); the error at the outputs over the
probe's error at the layer is the share that arrives there. Their products are the errors at the outputs; errors of
different layers are independent, so their squares add. The sum is an estimate; the choice is proved as a whole on
fresh inputs.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.bench.verdict import error_of
from ridgeline.engine.example_inputs import Inputs
from ridgeline.kernels import linear
from ridgeline.kernels.quantized_linear.config import MAX_ROWS
from ridgeline.optimizer.precision.formats import FORMATS, HALVES, Shape, options
from ridgeline.optimizer.search.judge import Leaf, Subject

CALIBRATION_ROWS = 2048
"""Rows of a layer's input on which its errors are measured."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A possible format of a layer: its error at the layer and at the outputs, and its gain."""

    format: str
    local_frac: float
    error_frac: float
    gain_s: float


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer, its shape, and its possible formats."""

    name: str
    shape: Shape
    arrives: float = 0.0  # share of an error at the layer that arrives at the outputs
    alone: bool = True  # measured by itself, not taken from the nearest layer of its kind
    choices: tuple[Choice, ...] = ()


@dataclass(slots=True)
class Seen:
    """Observations of a layer in one call."""

    rows: int = 0
    calls: int = 0
    local: dict[str, float] = field(default_factory=dict)
    probe: float = 0.0


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Layers that can be quantized: plain linear layers without hooks, each weight once."""
    seen: set[int] = set()
    found = {}
    for name, module in model.named_modules():
        plain = type(module) is nn.Linear and "forward" not in vars(module) and not module._forward_hooks
        if plain and not module._forward_pre_hooks and id(module.weight) not in seen and module.weight.is_contiguous():
            seen.add(id(module.weight))
            found[name] = module
    return found


def probed(weight: Tensor) -> Tensor:
    """A weight rounded to 15 levels per row."""
    # The probe rounds a weight to 15 levels per row.
    scale = (weight.abs().amax(1, keepdim=True) / 7).clamp(min=torch.finfo(weight.dtype).tiny)
    return (weight / scale).round() * scale


def _distance(found: Tensor, meant: Tensor) -> float:
    return error_of(found, meant.double()).rms_frac


@torch.no_grad()
def look(model: nn.Module, inputs: Inputs, layers: Mapping[str, nn.Linear]) -> dict[str, Seen]:
    """One call that measures every layer's error in every available format, on the inputs it gets."""
    seen = {name: Seen() for name in layers}

    def hook(name: str) -> Callable[..., None]:
        def note(module: Any, args: tuple[Any, ...], output: Any) -> None:
            found, x = seen[name], args[0]
            found.calls += 1
            found.rows = max(found.rows, x.shape[:-1].numel())
            if found.calls == 1:
                _note_errors(found, module, x)

        return note

    handles = [module.register_forward_hook(hook(name)) for name, module in layers.items()]
    try:
        model(*inputs.args, **inputs.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return {name: found for name, found in seen.items() if found.calls}


def _note_errors(found: Seen, module: nn.Linear, x: Tensor) -> None:
    """The error of the layer's GEMM, without bias, in each format against float32 or float64."""
    shape = shape_of(module, found.rows, x)
    kinds = options(shape)
    if not kinds:
        return
    flat = x.reshape(-1, x.shape[-1])
    few = flat[:: max(1, flat.shape[0] // CALIBRATION_ROWS)][:CALIBRATION_ROWS]
    few = few if shape.rows > MAX_ROWS else few[:MAX_ROWS]
    wide = torch.float32 if x.dtype in HALVES else torch.float64
    meant = F.linear(few.to(wide), module.weight.to(wide))
    for kind in kinds:
        found.local[kind.name] = _distance(kind(few, kind.make(module.weight), None), meant)
    found.probe = _distance(F.linear(few.to(wide), probed(module.weight.to(wide))), meant)


def shape_of(module: nn.Linear, rows: int, x: Tensor) -> Shape:
    return Shape(rows, module.out_features, module.in_features, x.dtype, x.device.type)


@contextmanager
def computed_as(module: nn.Linear, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replace the layer's forward inside the context."""
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        vars(module).pop("forward", None)


def arriving(subject: Subject, inputs: Inputs, eager: list[Leaf], reference: list[Leaf], module: nn.Linear) -> float:
    """The error at the outputs, beyond eager's own, that a layer's probe causes."""
    weight = probed(module.weight.detach())
    with computed_as(module, lambda x: F.linear(x, weight, module.bias)):
        found = subject.observe(subject.model, inputs.copied())
    return max((excess(ours, theirs, wide) for ours, theirs, wide in zip(found, eager, reference, strict=True)
                if ours.dtype.is_floating_point), default=0.0)  # fmt: skip


def excess(ours: Leaf, theirs: Leaf, wide: Leaf) -> float:
    """How much farther from the reference a result is than eager's, for independent errors."""
    meant = wide.values.double()
    far, own = error_of(ours.values, meant).rms_frac, error_of(theirs.values, meant).rms_frac
    return math.sqrt(max(0.0, far**2 - own**2)) if math.isfinite(far) else math.inf


def own_error(eager: list[Leaf], reference: list[Leaf]) -> float:
    """The largest error of eager's own results."""
    return max((error_of(a.values, b.values.double()).rms_frac for a, b in zip(eager, reference, strict=True)
                if a.dtype.is_floating_point), default=0.0)  # fmt: skip


def measured(subject: Subject, case: tuple[Inputs, list[Leaf], list[Leaf]], budget_s: float,
             gain: Callable[[Shape, str], float]) -> list[Layer]:  # fmt: skip
    """Every layer with its formats; a layer not measured in time takes the values of its neighbors."""
    layers = linears(subject.model)
    seen = look(subject.model, case[0].copied(), layers)
    subject.state.restore()
    alike: dict[Any, list[str]] = {}
    for name in seen:
        if seen[name].local:
            alike.setdefault(_kind(name, layers[name]), []).append(name)
    shares: dict[str, float] = {}
    until = time.perf_counter() + budget_s
    for name in _in_order(alike):
        if shares and time.perf_counter() > until:
            break
        probe = seen[name].probe
        shares[name] = arriving(subject, *case, layers[name]) / probe if probe > 0 else 0.0
    return [_layer(name, layers[name], seen[name], *_share(name, names, shares), gain)
            for names in alike.values() for name in names]  # fmt: skip


def _kind(name: str, module: nn.Linear) -> Any:
    """The kind of a layer: its name without numbers, and its sizes."""
    return tuple(part for part in name.split(".") if not part.isdigit()), module.out_features, module.in_features


def _in_order(alike: Mapping[Any, list[str]]) -> list[str]:
    """First, last and middle of every kind, then the rest, so that measured layers are spread whenever time ends."""
    found: list[str] = []
    for step in (1 << power for power in range(12, -1, -1)):
        found += [name for names in alike.values() for name in (names[::step] if step > 1 else names)]
        found += [names[-1] for names in alike.values()]
    return list(dict.fromkeys(found))


def _share(name: str, names: list[str], shares: Mapping[str, float]) -> tuple[float, bool]:
    """The measured share of a layer; otherwise the larger one of its nearest neighbors of the same kind."""
    if name in shares:
        return shares[name], True
    at = names.index(name)
    before = next((shares[each] for each in reversed(names[:at]) if each in shares), None)
    after = next((shares[each] for each in names[at:] if each in shares), None)
    known = [value for value in (before, after) if value is not None]
    return (max(known), False) if known else (max(shares.values(), default=1.0), False)


def _layer(name: str, module: nn.Linear, seen: Seen, share: float, alone: bool,
           gain: Callable[[Shape, str], float]) -> Layer:  # fmt: skip
    device = module.weight.device.type
    shape = Shape(seen.rows, module.out_features, module.in_features, module.weight.dtype, device)
    choices = tuple(
        Choice(kind, local, share * local, seen.calls * gain(shape, kind)) for kind, local in seen.local.items()
    )
    return Layer(name, shape, share, alone, choices)


class Gains:
    """Seconds that a layer gains in a format, measured once per shape."""

    def __init__(self) -> None:
        self.known: dict[tuple[Shape, str], float] = {}

    def __call__(self, shape: Shape, format: str) -> float:
        if (shape, format) not in self.known:
            self.known[shape, format] = self._measured(shape, format)
        return self.known[shape, format]

    @torch.no_grad()
    def _measured(self, shape: Shape, format: str) -> float:
        x = torch.randn(shape.rows, shape.k, device=shape.device).to(shape.dtype)
        weight = (torch.randn(shape.n, shape.k, device=shape.device) * shape.k**-0.5).to(shape.dtype)
        kind = FORMATS[format]
        made = tuple(tensor.contiguous() for tensor in kind.make(weight))
        plain = seconds(lambda: F.linear(x, weight), shape.device)
        if shape.device == "cuda" and shape.rows <= MAX_ROWS:
            plain = min(plain, seconds(lambda: linear(x, weight), shape.device))
        return plain - seconds(lambda: kind(x, made, None), shape.device)


def seconds(run: Callable[[], Any], device: str) -> float:
    """Seconds per call with cold caches."""
    if device == "cuda":
        from ridgeline.bench.clock import Clock

        return Clock().cold(run, 0.0, 0.02, max_num=20).median_s
    run()
    found = []
    for _ in range(7):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


@dataclass(frozen=True, slots=True)
class _Step:
    """A layer's change from one format to a faster and coarser one."""

    layer: int
    choice: Choice
    gain_s: float
    cost: float

    @property
    def worth(self) -> float:
        return self.gain_s / self.cost if self.cost > 0 else math.inf


def choose(layers: list[Layer], room: float) -> dict[str, Choice]:
    """The formats with the largest gain whose sum of squared errors at the outputs stays within ``room``.

    Each layer offers steps of falling worth (seconds per squared error); the best steps are taken while they fit.
    """
    steps = sorted((step for i, layer in enumerate(layers) for step in _steps(i, layer)), key=lambda s: -s.worth)
    taken: dict[int, Choice] = {}
    stopped: set[int] = set()
    spent = 0.0
    for step in steps:
        if step.layer in stopped:
            continue
        if spent + step.cost > room:
            stopped.add(step.layer)
            continue
        spent += step.cost
        taken[step.layer] = step.choice
    return {layers[i].name: choice for i, choice in sorted(taken.items())}


def _steps(place: int, layer: Layer) -> Iterator[_Step]:
    """Steps to ever faster formats: those on the upper hull of gain over squared error."""
    left = [choice for choice in layer.choices if choice.gain_s > 0 and math.isfinite(choice.error_frac)]
    gain_s, cost = 0.0, 0.0

    def slope(choice: Choice) -> float:
        more = choice.error_frac**2 - cost
        return math.inf if more <= 0 else (choice.gain_s - gain_s) / more

    while left:
        best = max(left, key=slope)
        yield _Step(place, best, best.gain_s - gain_s, max(0.0, best.error_frac**2 - cost))
        gain_s, cost = best.gain_s, max(cost, best.error_frac**2)
        left = [choice for choice in left if choice.gain_s > gain_s]


def total_error(own: float, chosen: Mapping[str, Choice]) -> float:
    """The expected error at the outputs: eager's own and every layer's, added as independent errors."""
    return math.sqrt(own**2 + sum(choice.error_frac**2 for choice in chosen.values()))
