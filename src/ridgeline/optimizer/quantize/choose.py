"""Which linear layers get fewer bits: errors and gains measured, the whole proved on inputs not seen before.

The budget is the relative root mean square error of each output of each call, against float64. A choice is kept if the
mean of that error over validation calls plus six of its standard deviations, and 1.3 times the worst of them, are
within the budget: errors of single calls have a long tail where activations are clipped. Of few calls, more is asked.

Calls are what the time goes into. What float64 returns for a validation call is computed once; how many calls there are
follows from what one of them takes and from the time that is left, and is kept in the timing table; a choice is given
up at the first call that the budget cannot hold.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.bench.verdict import error_of
from ridgeline.engine.file import ops
from ridgeline.engine.file.compare import class_agreement
from ridgeline.engine.file.execute import interpret
from ridgeline.engine.file.program import Program, Step
from ridgeline.engine.file.proof import Reference, flat
from ridgeline.errors import EngineError
from ridgeline.optimizer.quantize import rounding
from ridgeline.optimizer.quantize.draft import Draft, linears, timed

LEAST_WEIGHT = 1 << 10
ROWS = 512
"""Rows of a layer's input that its errors are measured on; as many others choose among ways to round."""
LEAST_CALLS, MOST_CALLS = 8, 48
"""Validation calls of a choice."""
FORMATS = {"time": ("bf16", "int8", "fp8"), "size": ("bf16", "int8", "int4")}
BITS = {"bf16": 16, "int8": 8, "fp8": 8, "int4": 4}


@dataclass(frozen=True, slots=True)
class Option:
    """A layer in a format: its error at the layer and, estimated, at the outputs; what it gains."""

    step: int
    format: str
    local: float
    arrives: float
    gain: float  # seconds, or bytes

    @property
    def error(self) -> float:
        return self.local * self.arrives


@dataclass(slots=True)
class Layer:
    """A linear layer's inputs, as calibration met them."""

    step: int
    weight: Tensor
    seen: list[Tensor] = field(default_factory=list)
    parts: dict[str, Any] = field(default_factory=dict)

    def rows(self, part: int) -> Tensor:
        """A third of the rows: 0 to fit to, 1 to choose by, 2 to judge."""
        every = torch.cat(self.seen)
        rows = every[part::3] if every.shape[0] >= 3 else every
        return rows[:: max(1, rows.shape[0] // ROWS)][:ROWS]


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How far the outputs of many calls are from float64."""

    mean: float
    deviation: float
    most: float
    agreement: float | None
    kl: float | None
    num_calls: int

    @property
    def bound(self) -> float:
        """What calls to come are expected to stay below."""
        few = LEAST_CALLS / max(1, self.num_calls) if self.num_calls < MOST_CALLS else 0.0
        return max(self.mean + (6 + 4 * few) * self.deviation, (1.3 + 0.3 * few) * self.most)

    def to_dict(self) -> dict[str, Any]:
        return {
            "rms_mean": self.mean,
            "rms_most": self.most,
            "rms_bound": self.bound,
            "calls": self.num_calls,
            "top1": self.agreement,
            "kl": self.kl,
        }


def accuracy(
    call: Callable[..., Any], calls: Sequence[Sequence[Tensor]], meant: Sequence[Sequence[Tensor]],
    budget: float = math.inf,
) -> Accuracy:  # fmt: skip
    """Errors of calls against what they should return, up to the first one that the budget cannot hold."""
    errors, agreements, divergences = list[float](), list[float](), list[float]()
    for inputs, wide in zip(calls, meant, strict=True):
        worst = 0.0
        for ours, want in zip(flat(call(inputs)), wide, strict=True):
            if not ours.is_floating_point():
                continue
            error = error_of(ours.double(), want.double())
            worst = max(worst, error.rms_frac if not error.num_misplaced else math.inf)
            agreement, kl = class_agreement(want, ours)
            if agreement is not None and kl is not None:
                agreements.append(agreement)
                divergences.append(kl)
        errors.append(worst)
        if 1.3 * worst > budget:
            break
    mean = sum(errors) / len(errors)
    spread = (
        math.sqrt(sum((e - mean) ** 2 for e in errors) / max(1, len(errors) - 1)) if math.isfinite(mean) else math.inf
    )
    average = lambda values: sum(values) / len(values) if values else None
    return Accuracy(mean, spread, max(errors), average(agreements), average(divergences), len(errors))


class Choice:
    """The choice for one engine."""

    def __init__(
        self, draft: Draft, weights: Mapping[str, Tensor], calibration: Sequence[Sequence[Tensor]],
        validation: Sequence[Sequence[Tensor]], *, budget: float, objective: str, timings: dict[str, Any],
        error_on_miss: bool = False, deadline_s: float = math.inf, clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self.draft, self.weights, self.budget, self.objective = draft, dict(weights), budget, objective
        self.calibration, self.validation = calibration, validation
        self.timings, self.error_on_miss, self.deadline_s, self.clock = timings, error_on_miss, deadline_s, clock
        self.notes: list[str] = []
        self.late, self.began_s = False, clock() if math.isfinite(deadline_s) else 0.0
        self.program = Program(draft.base.inputs, tuple(draft.steps), draft.base.outputs, draft.base.dims)
        self.device = calibration[0][0].device if calibration and calibration[0] else torch.device("cpu")
        self.layers = {i: Layer(i, self._weight(i)) for i in linears(draft.steps, self.weights)
                       if self._weight(i).numel() >= LEAST_WEIGHT}  # fmt: skip
        self.base = draft.base

    def _weight(self, index: int) -> Tensor:
        return self.weights[self.draft.steps[index].args[1]["w"]]

    def run(self, metric: Callable[[Callable[..., Any]], float] | None, max_drop: float) -> dict[str, Any]:
        """Change the draft, and say what was chosen and how accurate it is."""
        wide, eager = Reference(self.base, self.weights), self._runner(self.program, self.weights)
        self.validation = self.validation[: self._num_calls(wide, eager)]
        meant = [wide(inputs) for inputs in self.validation]
        plain = accuracy(eager, self.validation, meant)
        told: dict[str, Any] = {"objective": self.objective, "eager": plain.to_dict(), "layers": []}
        room = self.budget**2 - plain.bound**2
        if room <= 0 or not self.layers:
            why = "the model itself is farther from float64 than the budget" if room <= 0 else "no linear layer"
            self.notes.append(f"no fewer bits: {why}")
            return told
        self._observe()
        options = self._options()
        examined = len({option.step for option in options})
        limit, floor = metric(self._as_model(self.program, self.weights)) if metric else 0.0, 0.7 * room
        best: tuple[list[Option], Accuracy] | None = None
        tried: set[tuple[tuple[int, str], ...]] = set()
        for turn in range(6):
            if turn and self.clock() > self.deadline_s:
                self.notes.append("fewer bits: the time was up before more choices were tried")
                break
            chosen = pick(options, floor)
            key = tuple((o.step, o.format) for o in chosen)
            if not chosen or key in tried:
                break
            tried.add(key)
            steps, weights = self._built(chosen)
            program = Program(self.base.inputs, steps, self.base.outputs, self.base.dims)
            found = accuracy(self._runner(program, weights), self.validation, meant, self.budget)
            drop = limit - metric(self._as_model(program, weights)) if metric else 0.0
            if found.bound <= self.budget and drop <= max_drop:
                best = (chosen, found)
                if found.bound > 0.6 * self.budget:
                    break
                floor *= min(4.0, 0.7 * room / max(found.bound**2 - plain.bound**2, 1e-12))
            elif best is not None:
                break
            else:
                # Of calls that stopped early, the worst so far is known and nothing of the others
                over = min(found.bound, 1.3 * found.most) / self.budget if math.isfinite(found.most) else 4.0
                floor /= max(2.0, over**2 * 1.3)
        if examined < len(self.layers) and self.late:
            self.notes.append(f"fewer bits: the time was up after {examined} of {len(self.layers)} layers; a larger "
                              "budget_s examines the others")  # fmt: skip
        if best is None:
            self.notes.append("no fewer bits: " + (
                f"the {len(tried)} choices that were tried leave the error budget" if options else "no layer gains"))
            return told
        self._apply(best[0])
        for option in best[0]:
            step = self.base.steps[option.step] if option.step < len(self.base.steps) else None
            told["layers"].append({
                "module": step.module if step else "", "format": option.format, "local": option.local,
                "error": option.error, "gain_s" if self.objective == "time" else "gain_bytes": option.gain,
                **({"method": self.layers[option.step].parts["int4"].method} if option.format == "int4" else {}),
            })  # fmt: skip
        told |= {"result": best[1].to_dict()}
        if metric:
            told |= {"metric": {"before": limit, "max_drop": max_drop}}
        return told

    def _num_calls(self, wide: Reference, eager: Callable[..., Any]) -> int:
        """How many validation calls the time is enough for: half of it, for one in float64 and four others each."""
        key = f"validation of {len(self.layers)} layers {self.device.type} threads={torch.get_num_threads()}"
        if key not in self.timings:
            began = self.clock()
            wide(self.validation[0])
            eager(self.validation[0])
            each = 3 * (self.clock() - began)
            left = self.deadline_s - self.clock()
            num = MOST_CALLS if math.isinf(left) else int(0.5 * left / max(each, 1e-9))
            self.timings[key] = max(LEAST_CALLS, min(MOST_CALLS, num))
        return int(self.timings[key])

    def _runner(self, program: Program, weights: Mapping[str, Tensor]) -> Callable[..., Any]:
        return lambda inputs: interpret(program, inputs, weights.__getitem__, self.device)

    def _as_model(self, program: Program, weights: Mapping[str, Tensor]) -> Callable[..., Any]:
        run = self._runner(program, weights)
        return lambda *inputs: run(inputs)

    def _observe(self) -> None:
        """The inputs of every layer, over all calibration calls."""

        def before(index: int, step: Step, args: list[Any]) -> None:
            if index in self.layers:
                self.layers[index].seen.append(args[0].reshape(-1, args[0].shape[-1]).float())

        for inputs in self.calibration:
            interpret(self.program, inputs, self.weights.__getitem__, self.device, before=before)

    def _options(self) -> list[Option]:
        arrives = self._arrivals()
        found = list[Option]()
        for index, layer in self.layers.items():
            if not layer.seen:
                continue
            judged = layer.rows(2)
            meant = judged @ layer.weight.t()
            for name in FORMATS[self.objective]:
                # A third of the time is for trying what is chosen
                if self.clock() > self.began_s + 0.7 * (self.deadline_s - self.began_s):
                    self.late = True
                    break
                made = self._made(layer, name)
                if made is None:
                    continue
                error = error_of(made(judged), meant.double()).rms_frac
                gain = self._gain(layer, name)
                if gain > 0 and math.isfinite(error):
                    found.append(Option(index, name, error, arrives.get(index, 1.0), gain))
        return found

    def _arrivals(self) -> dict[int, float]:
        """The share of an error at a layer that arrives at the outputs: by perturbing one layer after another."""
        inputs = min(self.calibration, key=lambda inputs: sum(x.numel() for x in inputs))
        found = dict[int, float]()
        clean = flat(interpret(self.program, inputs, self.weights.__getitem__, self.device))
        for index in self.layers:
            if self.clock() > self.began_s + 0.3 * (self.deadline_s - self.began_s):
                known = max(found.values(), default=1.0)  # layers that were not perturbed count as the worst
                return {i: found.get(i, known) for i in self.layers}

            def each(at: int, step: Step, results: list[Any], index: int = index) -> Any:
                if at != index:
                    return None
                generator = torch.Generator().manual_seed(at)
                noise = torch.randn(results[0].shape, generator=generator).to(results[0])
                return [results[0] + 0.01 * results[0].square().mean().sqrt() * noise]

            moved = flat(interpret(self.program, inputs, self.weights.__getitem__, self.device, each))
            errors = [error_of(a.double(), b.double()).rms_frac for a, b in zip(moved, clean, strict=True)
                      if a.is_floating_point()]  # fmt: skip
            found[index] = max(errors, default=0.0) / 0.01
        return found

    def _made(self, layer: Layer, name: str) -> Callable[[Tensor], Tensor] | None:
        """The layer's product in a format, made once."""
        weight, k = layer.weight, layer.weight.shape[1]
        if name == "bf16":
            return lambda x: F.linear(x.to(torch.bfloat16), weight.to(torch.bfloat16)).float()
        if name == "int8":
            if "int8" not in layer.parts:
                layer.parts["int8"] = rounding.static_scales(weight, layer.rows(0), layer.rows(1))
            _, q, scale, inverse = layer.parts["int8"]
            return lambda x: ops.int8_linear(x, q, scale, inverse)
        if name == "fp8":
            if self.device.type != "cuda" or k % 16 or weight.shape[0] % 16:
                return None
            inverse = 448 / layer.rows(0).abs().max().clamp_min(1e-12)
            row = ops.row_scale(weight, 448.0)
            layer.parts["fp8"] = (inverse,)
            narrow = ops.as_float8(weight, row)
            return lambda x: ops.fp8_linear(x, narrow, row / inverse, inverse)
        if k % rounding.GROUP:
            return None
        if "int4" not in layer.parts:
            layer.parts["int4"] = rounding.rounded(weight, layer.rows(0), layer.rows(1))
        restored = layer.parts["int4"].restored()
        return lambda x: x @ restored.t()

    def _gain(self, layer: Layer, name: str) -> float:
        n, k = layer.weight.shape
        if self.objective == "size":
            return layer.weight.numel() * (32 - BITS[name] - (32 / rounding.GROUP if name == "int4" else 0)) / 8
        rows = max(x.shape[0] for x in layer.seen)
        return self._time("fp32", rows, n, k) - self._time(name, rows, n, k)

    def _time(self, name: str, rows: int, n: int, k: int) -> float:
        """Seconds of a product, from the table or measured."""
        key = f"linear {name} {rows}x{k}x{n} {self.device.type} threads={torch.get_num_threads()}"
        if key in self.timings:
            return float(self.timings[key])
        if self.error_on_miss:
            raise EngineError(f"the timing table has no {key!r}: build without --errorOnTimingCacheMiss to measure it")
        generator = torch.Generator().manual_seed(0)
        x, w = torch.randn(rows, k, generator=generator), torch.randn(n, k, generator=generator)
        x, w = x.to(self.device), w.to(self.device)
        if name == "fp32":
            call = lambda: F.linear(x, w)
        elif name == "bf16":
            narrow = w.to(torch.bfloat16)
            call = lambda: ops.bf16_linear(x, narrow)
        elif name == "fp8":
            row = ops.row_scale(w, 448.0)
            eighth = ops.as_float8(w, row)
            call = lambda: ops.fp8_linear(x, eighth, row, torch.full((), 16.0, device=self.device))
        else:
            parts = rounding.int8_parts(w, x, torch.ones(k, device=self.device), 1.0)
            call = lambda: ops.int8_linear(x, *parts)

        def synced() -> None:
            call()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

        self.timings[key] = float(f"{timed(synced, self.clock):.3g}")
        return float(self.timings[key])

    def _built(self, chosen: Sequence[Option]) -> tuple[tuple[Step, ...], dict[str, Tensor]]:
        """Steps and weights with a choice, on a copy of the draft."""
        kept = (list(self.draft.steps), dict(self.draft.weights), set(self.draft.constants), set(self.draft.frozen),
                list(self.draft._recipe))  # fmt: skip
        self._apply(chosen)
        made = tuple(self.draft.steps), {**self.weights, **self.draft.weights}
        (self.draft.steps, self.draft.weights, self.draft.constants, self.draft.frozen, self.draft._recipe) = kept
        return made

    def _apply(self, chosen: Sequence[Option]) -> None:
        for option in chosen:
            apply_format(self.draft, option.step, option.format, self.layers[option.step].parts)


def apply_format(draft: Draft, index: int, name: str, parts: Mapping[str, Any]) -> None:
    """Put a layer into a format, its weights derived by recipe where that is possible."""
    step = draft.steps[index]
    x, weight = step.args[0], step.args[1]
    bias = step.args[2] if len(step.args) > 2 else step.kwargs.get("bias")
    own = f"{weight['w']}.{name}"
    derive = lambda part, op, *args: {"w": draft.derive(f"{own}.{part}", op, *args)}
    constant = lambda part, value: {"w": draft.constant(f"{own}.{part}", value)}
    if name == "bf16":
        half = lambda part, source: {
            "w": draft.derive(f"{own}.{part}", "aten::_to_copy.default", source, dtype={"dtype": "bfloat16"})
        }
        made, narrow = half("weight", weight), None if bias is None else half("bias", bias)
        draft.steps[index] = replace(step, op="engine::bf16_linear", args=(x, made, narrow), kwargs={})
    elif name == "int8":
        channels, _, _, inverse = parts["int8"]
        wide = derive("smoothed", "aten::mul.Tensor", weight, constant("channels", channels))
        row = derive("rows", "engine::row_scale", wide, 127.0)
        q = derive("weight", "engine::rounded", wide, row, 127)
        step_of_x = constant("step", (1 / (channels * inverse)).mean())
        total = derive("scale", "aten::mul.Tensor", row, step_of_x)
        args = (x, q, total, constant("inverse", inverse), bias)
        draft.steps[index] = replace(step, op="engine::int8_linear", args=args, kwargs={})
    elif name == "fp8":
        (inverse,) = parts["fp8"]
        row = derive("rows", "engine::row_scale", weight, 448.0)
        q = derive("weight", "engine::as_float8", weight, row)
        held = constant("inverse", inverse)
        total = derive("scale", "aten::div.Tensor", row, held)
        draft.steps[index] = replace(step, op="engine::fp8_linear", args=(x, q, total, held, bias), kwargs={})
    else:
        made = parts["int4"]
        freeze = lambda part, value: {"w": draft.freeze(f"{own}.{part}", value)}
        inverse = None if made.channels is None else freeze("inverse", 1 / made.channels)
        given = (
            x,
            freeze("weight", ops.int4_packed(made.q)),
            freeze("scale", made.scale),
            inverse,
            bias,
            made.rotation,
        )
        draft.steps[index] = replace(step, op="engine::int4_linear", args=given, kwargs={})


def pick(options: Sequence[Option], room: float) -> list[Option]:
    """One option a layer: steps of the best gain a squared error, as long as the squares fit into the room."""
    chosen: dict[int, Option] = {}
    spent = 0.0
    while True:
        best: tuple[float, Option, float] | None = None
        for option in options:
            now = chosen.get(option.step)
            gain = option.gain - (now.gain if now else 0.0)
            cost = option.error**2 - (now.error**2 if now else 0.0)
            if gain <= 0 or spent + cost > room:
                continue
            worth = gain / max(cost, 1e-30)
            if best is None or worth > best[0]:
                best = (worth, option, cost)
        if best is None:
            return sorted(chosen.values(), key=lambda option: option.step)
        chosen[best[1].step] = best[1]
        spent += best[2]
