"""Which layers to compute in fewer bits: how much each minds, what each gains, and the best choice within a budget.

The error of a layer in a format is measured in two parts. *At the layer*: the relative error of its own product on the
inputs given, format by format, exact and cheap. *At the outputs*: one layer at a time is perturbed by a probe (its
weight in four bits a row) that stands out from the rounding of the model's own type, and the error it leaves on the
outputs, over the probe's error at the layer, says how much of a layer's error arrives there. Products of the two
are the errors at the outputs; errors of different layers are independent, so their squares add. The sum is an
estimate that chooses; the choice itself is proved as a whole on fresh inputs.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
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

PROBE_LEVELS = 7
"""The probe rounds a weight to 15 levels a row."""
CALIBRATION_ROWS = 2048
"""Rows of a layer's input that its errors are measured on."""
TIMES = 7


@dataclass(frozen=True, slots=True)
class Choice:
    """A format a layer could have: its error at the layer and at the outputs, and what it gains."""

    format: str
    local_frac: float
    error_frac: float
    gain_s: float


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer, how it is called, and what it could become."""

    name: str
    shape: Shape
    arrives: float = 0.0  # the share of an error at the layer that arrives at the outputs
    alone: bool = True  # measured by itself; otherwise taken from the nearest layer of its kind
    choices: tuple[Choice, ...] = ()


@dataclass(slots=True)
class Seen:
    """What one call showed of a layer."""

    rows: int = 0
    calls: int = 0
    local: dict[str, float] = field(default_factory=dict)
    probe: float = 0.0


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Layers that may change: plain ones, without hooks, each weight once."""
    seen: set[int] = set()
    found = {}
    for name, module in model.named_modules():
        plain = type(module) is nn.Linear and "forward" not in vars(module) and not module._forward_hooks
        if plain and not module._forward_pre_hooks and id(module.weight) not in seen and module.weight.is_contiguous():
            seen.add(id(module.weight))
            found[name] = module
    return found


def probed(weight: Tensor) -> Tensor:
    """A weight rounded to 15 levels a row."""
    scale = (weight.abs().amax(1, keepdim=True) / PROBE_LEVELS).clamp(min=torch.finfo(weight.dtype).tiny)
    return (weight / scale).round() * scale


def _distance(found: Tensor, meant: Tensor) -> float:
    return error_of(found, meant.double()).rms_frac


@torch.no_grad()
def look(model: nn.Module, inputs: Inputs, layers: Mapping[str, nn.Linear]) -> dict[str, Seen]:
    """One call with every layer's own error in every format it may have, on the inputs it gets."""
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
    """The layer's product, without its bias, in each format against float32 or better."""
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
    """The layer computes otherwise while this is open."""
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        vars(module).pop("forward", None)


def arriving(subject: Subject, inputs: Inputs, eager: list[Leaf], reference: list[Leaf], module: nn.Linear) -> float:
    """The error at the outputs, beyond eager's own, that a layer's probe leaves there."""
    weight = probed(module.weight.detach())
    with computed_as(module, lambda x: F.linear(x, weight, module.bias)):
        found = subject.observe(subject.model, inputs.copied())
    return max((excess(ours, theirs, wide) for ours, theirs, wide in zip(found, eager, reference, strict=True)
                if ours.dtype.is_floating_point), default=0.0)  # fmt: skip


def excess(ours: Leaf, theirs: Leaf, wide: Leaf) -> float:
    """How much farther from the reference a result is than eager's, errors being independent."""
    meant = wide.values.double()
    far, own = error_of(ours.values, meant).rms_frac, error_of(theirs.values, meant).rms_frac
    return math.sqrt(max(0.0, far**2 - own**2)) if math.isfinite(far) else math.inf


def own_error(eager: list[Leaf], reference: list[Leaf]) -> float:
    """The largest error of eager's own results."""
    return max((error_of(a.values, b.values.double()).rms_frac for a, b in zip(eager, reference, strict=True)
                if a.dtype.is_floating_point), default=0.0)  # fmt: skip


def measured(subject: Subject, case: tuple[Inputs, list[Leaf], list[Leaf]], budget_s: float,
             gain: Callable[[Shape, str], float]) -> list[Layer]:  # fmt: skip
    """Every layer with what it could become; what is not measured alone within the time is like its neighbor."""
    layers = linears(subject.model)
    seen = look(subject.model, case[0].copied(), layers)
    subject.state.restore()
    alike: dict[Any, list[str]] = {}
    for name in seen:
        if seen[name].local:
            alike.setdefault(_kind(name, layers[name]), []).append(name)
    shares = _probed_alone(subject, case, layers, seen, _in_order(alike), time.perf_counter() + budget_s)
    found = []
    for names in alike.values():
        for name in names:
            share, alone = _share(name, names, shares)
            found.append(_layer(name, layers[name], seen[name], share, alone, subject, gain))
    return found


def _kind(name: str, module: nn.Linear) -> Any:
    """Layers of one kind: the same name but for numbers, the same sizes."""
    return tuple(part for part in name.split(".") if not part.isdigit()), module.out_features, module.in_features


def _in_order(alike: Mapping[Any, list[str]]) -> list[str]:
    """First, last and middle of every kind, then the rest: whenever time ends, measured layers are spread."""
    found: list[str] = []
    for step in (1 << power for power in range(12, -1, -1)):
        found += [name for names in alike.values() for name in (names[::step] if step > 1 else names)]
        found += [names[-1] for names in alike.values()]
    return list(dict.fromkeys(found))


def _probed_alone(
    subject: Subject,
    case: tuple[Inputs, list[Leaf], list[Leaf]],
    layers: Mapping[str, nn.Linear],
    seen: Mapping[str, Seen],
    names: Iterable[str],
    until: float,
) -> dict[str, float]:
    shares: dict[str, float] = {}
    inputs, eager, reference = case
    for name in names:
        if shares and time.perf_counter() > until:
            break
        if seen[name].probe > 0:
            shares[name] = arriving(subject, inputs, eager, reference, layers[name]) / seen[name].probe
        else:
            shares[name] = 0.0
    return shares


def _share(name: str, names: list[str], shares: Mapping[str, float]) -> tuple[float, bool]:
    """What was measured of a layer; else the larger of its nearest neighbors' of the same kind."""
    if name in shares:
        return shares[name], True
    at = names.index(name)
    before = next((shares[each] for each in reversed(names[:at]) if each in shares), None)
    after = next((shares[each] for each in names[at:] if each in shares), None)
    known = [value for value in (before, after) if value is not None]
    return (max(known), False) if known else (max(shares.values(), default=1.0), False)


def _layer(name: str, module: nn.Linear, seen: Seen, share: float, alone: bool, subject: Subject,
           gain: Callable[[Shape, str], float]) -> Layer:  # fmt: skip
    device = module.weight.device.type
    shape = Shape(seen.rows, module.out_features, module.in_features, module.weight.dtype, device)
    choices = tuple(
        Choice(kind, local, share * local, seen.calls * gain(shape, kind)) for kind, local in seen.local.items()
    )
    return Layer(name, shape, share, alone, choices)


# What a format gains.


class Gains:
    """Seconds a layer gains in a format, measured once for every size."""

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
    """Seconds a call takes with nothing of it in the cache."""
    if device == "cuda":
        from ridgeline.bench.clock import Clock

        return Clock().cold(run, 0.0, 0.02, max_num=20).median_s
    run()
    found = []
    for _ in range(TIMES):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


# The choice.


@dataclass(frozen=True, slots=True)
class _Step:
    """One layer from one format to a faster and coarser one."""

    layer: int
    choice: Choice
    gain_s: float
    cost: float

    @property
    def worth(self) -> float:
        return self.gain_s / self.cost if self.cost > 0 else math.inf


def choose(layers: list[Layer], room: float) -> dict[str, Choice]:
    """The formats that gain the most while the sum of squared errors at the outputs stays within ``room``.

    Each layer offers steps of falling worth (seconds a squared error); the best step anywhere is taken while it fits.
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
    """From the layer as it is to ever faster formats, only those on the upper hull of gain over squared error."""
    left = [choice for choice in layer.choices if choice.gain_s > 0 and math.isfinite(choice.error_frac)]
    gain_s, cost = 0.0, 0.0
    while left:
        best = max(left, key=lambda each: _slope(each, gain_s, cost))
        yield _Step(place, best, best.gain_s - gain_s, max(0.0, best.error_frac**2 - cost))
        gain_s, cost = best.gain_s, max(cost, best.error_frac**2)
        left = [choice for choice in left if choice.gain_s > gain_s]


def _slope(choice: Choice, gain_s: float, cost: float) -> float:
    more = choice.error_frac**2 - cost
    return math.inf if more <= 0 else (choice.gain_s - gain_s) / more


def total_error(own: float, chosen: Mapping[str, Choice]) -> float:
    """The error expected at the outputs: eager's own and every layer's, as independent ones add."""
    return math.sqrt(own**2 + sum(choice.error_frac**2 for choice in chosen.values()))
