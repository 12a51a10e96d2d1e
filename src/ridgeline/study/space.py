"""The space of a study: what is fixed, and axes with their levels; points are numbered, any part can be made."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.cost.estimate import EXECUTIONS
from ridgeline.errors import HardwareError, InputError, UnitError, nearest
from ridgeline.hardware import clusters as cluster_words
from ridgeline.hardware import device as device_named
from ridgeline.hardware.override import FIELD_OF, dimension_of, field_of
from ridgeline.models.card import SIZES, find
from ridgeline.plan import Plan
from ridgeline.sim.serving.compose import Wanted
from ridgeline.study.price import assumption_names
from ridgeline.units import parse_quantity

Columns = dict[str, NDArray[Any]]
EVALUATORS = ("predict", "simulate", "serve")
LOAD = ("concurrency", "rate", "isl", "osl", "requests", "burst", "ratio")
KINDS = ("on", "model", "option", "plan", "deployment", "load", "execution", "cluster", "price", "device")
"""What an axis changes, the slowest to change first: a batch shares everything but the numbers of its devices."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One thing that is varied."""

    name: str
    kind: str
    levels: tuple[Any, ...]
    is_factor: bool = False  # levels multiply the device's own number
    bounds: tuple[float, float] | None = None  # of a range without a step: any number between can be drawn

    def values(self, unit: NDArray[np.float64]) -> NDArray[Any]:
        """Values for numbers from 0 to 1: of a range any in between, else one of the levels."""
        if self.bounds is not None:
            return np.asarray(self.bounds[0] + unit * (self.bounds[1] - self.bounds[0]))
        return self.at(np.minimum((unit * len(self.levels)).astype(np.intp), len(self.levels) - 1))

    def at(self, numbers: NDArray[np.intp]) -> NDArray[Any]:
        """The levels of these numbers."""
        return np.asarray(self.levels)[numbers]


@dataclass(frozen=True)
class Space:
    """What is fixed and what is varied: ``Space("llama3-70b", on="h200", vary={"sms": "100..240/4"}, batch=8)``."""

    model: str
    on: str = "h200"
    vary: Mapping[str, Any] = field(default_factory=dict)
    evaluator: str = "predict"
    execution: str = "eager"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.evaluator not in EVALUATORS:
            raise InputError(f"no evaluator {self.evaluator!r}{nearest(self.evaluator, EVALUATORS)}")
        if self.execution not in EXECUTIONS:
            raise InputError(f"unknown execution mode {self.execution!r}{nearest(self.execution, EXECUTIONS)}")
        if not self.vary:
            raise InputError("nothing is varied: give an axis, such as --vary 'hbm_bandwidth=1x..4x'")
        find(self.model) if self.evaluator != "serve" else None
        for name in self.options:
            self.kind(name)

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """Axes, the slowest to change first."""
        made = [self._axis(name, given) for name, given in self.vary.items()]
        twice = [axis.name for axis in made if axis.name in self.options]
        if twice:
            raise InputError(f"{twice[0]} is fixed and varied: give it once")
        def place(axis: Axis) -> tuple[int, bool, str]:
            is_cores = axis.kind == "device" and field_of(axis.name) == "num_cores"  # shared by what is priced together
            return KINDS.index(axis.kind), not is_cores, axis.name

        return tuple(sorted(made, key=place))

    @property
    def size(self) -> int:
        """Points of the grid."""
        return math.prod(len(axis.levels) for axis in self.axes)

    def grid(self, numbers: NDArray[np.int64]) -> Columns:
        """Points of the grid by number; the last axis changes fastest."""
        found, rest = Columns(), numbers.copy()
        for axis in reversed(self.axes):
            found[axis.name] = axis.at((rest % len(axis.levels)).astype(np.intp))
            rest //= len(axis.levels)
        return {axis.name: found[axis.name] for axis in self.axes}

    def drawn(self, unit: NDArray[np.float64]) -> Columns:
        """Points for rows of numbers from 0 to 1, one an axis."""
        return {axis.name: axis.values(unit[:, at]) for at, axis in enumerate(self.axes)}

    def chosen(self, levels: NDArray[np.intp]) -> Columns:
        """Points for rows of level numbers, one an axis."""
        return {axis.name: axis.at(levels[:, at]) for at, axis in enumerate(self.axes)}

    def to_dict(self) -> dict[str, Any]:
        """What the space is made of, to make it again."""
        vary = {name: given if isinstance(given, str) else ",".join(str(level) for level in given)
                for name, given in self.vary.items()}  # fmt: skip
        return {"model": self.model, "on": self.on, "vary": vary, "evaluator": self.evaluator,
                "execution": self.execution, "options": dict(self.options)}  # fmt: skip

    def _axis(self, name: str, given: Any) -> Axis:
        kind = self.kind(name)
        if isinstance(given, str):
            levels, is_factor, bounds = _levels(name, given, kind)
        else:
            levels, is_factor, bounds = tuple(given) if isinstance(given, (Sequence, range)) else (given,), False, None
            if any(isinstance(level, str) for level in levels):
                levels, is_factor, bounds = _levels(name, ",".join(str(level) for level in levels), kind)
        if kind == "device" and bounds is not None and dimension_of(field_of(name)).whole and not is_factor:
            levels, bounds = tuple(float(v) for v in range(math.ceil(bounds[0]), math.floor(bounds[1]) + 1)), None
        if kind in ("option", "plan", "load", "deployment") and bounds is not None:
            raise InputError(f"{name}={given}: give the step of the range, such as {name}=1..8/1, or levels: 1,2,4")
        if not levels:
            raise InputError(f"{name}={given} has no level")
        if len(set(levels)) != len(levels):
            raise InputError(f"{name}={given} has a level twice")
        if kind in ("device", "price", "cluster") and not is_factor:
            for level in levels:
                if isinstance(level, float) and level <= 0 and kind == "device":
                    raise InputError(f"{name}={given}: {level:g} is not above zero")
        if kind == "device":
            for on in self.devices():
                device_named(on)  # an unknown device is told before anything is evaluated
        return Axis(name, kind, levels, is_factor, bounds)

    def devices(self) -> list[str]:
        """The devices the study begins from."""
        given = self.vary.get("on", self.on)
        words = given.split(",") if isinstance(given, str) else list(given)
        return [word.partition("*")[0].strip() for word in words]

    def kind(self, name: str) -> str:
        """What an axis or a fixed setting changes."""
        if name in ("on", "model", "execution"):
            return name
        plan = {f.name for f in fields(Plan)} | {"num_devices", "stack"}
        deployment = {f.name for f in fields(Wanted)} - {"settings"} | {"num_devices"}
        if self.evaluator == "simulate" and (name in plan or name in ("seq",)):
            return "plan"
        if self.evaluator == "serve" and name in LOAD:
            return "load"
        if self.evaluator == "serve" and name in deployment:
            return "deployment"
        options = {"batch", "mode", "precision", "optimizer", *SIZES}
        if self.evaluator == "predict":
            options |= set(find(self.model)[0].options)
            if name in options:
                return "option"
        if name in assumption_names():
            return "price"
        try:
            field_of(name)
            return "device"
        except HardwareError:
            pass
        if self.evaluator != "predict" and name in cluster_words.FIELD_OF:
            return "cluster"
        known = {"on", "model", "execution", *assumption_names(), *(word for word in FIELD_OF if "." not in word)}
        known |= options if self.evaluator == "predict" else plan if self.evaluator == "simulate" else deployment
        known |= set(LOAD) if self.evaluator == "serve" else set()
        raise InputError(f"no axis {name!r}{nearest(name, known)}")


_NUMBER = re.compile(r"^[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?$")


def _levels(name: str, text: str, kind: str) -> tuple[tuple[Any, ...], bool, tuple[float, float] | None]:
    """Levels of an axis as written, whether they are factors, and the bounds of a range without a step."""
    text = text.strip().strip("[]")
    if match := re.fullmatch(r"([^,]+?)\.\.([^,.][^,]*?)(?:([/:])([^,]+))?", text):
        low, high, mark, step_text = match.groups()
        (a, factor), (b, other) = _number(name, low), _number(name, high)
        if factor != other:
            raise InputError(f"{name}={text}: both ends of a range are factors (1x..4x) or neither is")
        if b <= a:
            raise InputError(f"{name}={text}: the range ends where it begins or before")
        if mark == "/":
            step = _number(name, step_text)[0]
            if step <= 0:
                raise InputError(f"{name}={text}: the step is not above zero")
            count = math.floor((b - a) / step + 1e-9) + 1
            if count > 10_000_000:
                raise InputError(f"{name}={text}: {count:,} levels are too many")
            return _tidy([a + step * at for at in range(count)], kind), factor, None
        if mark == ":":
            if not step_text.isdigit() or int(step_text) < 2:
                raise InputError(f"{name}={text}: after the colon comes the number of levels, such as {low}..{high}:9")
            return _tidy(np.linspace(a, b, int(step_text)).tolist(), kind), factor, None
        # of a range without a step, where a sampler needs levels
        return _tidy(np.linspace(a, b, 33).tolist(), kind), factor, (a, b)
    words = [word.strip() for word in text.split(",")]
    if "" in words:
        raise InputError(f"{name}={text}: a level is empty")
    if any(word in ("…", "...") for word in words):
        return _tidy(_continued(name, text, words), kind), False, None
    try:
        read = [_number(name, word) for word in words]
    except InputError:
        read = []
    if not read:
        if kind in ("device", "price"):
            _number(name, words[0])
        return tuple(_word(word) for word in words), False, None
    if len({factor for _, factor in read}) > 1:
        raise InputError(f"{name}={text}: levels are factors (2x) or values, not both")
    return _tidy([value for value, _ in read], kind), read[0][1], None


def _continued(name: str, text: str, words: list[str]) -> list[float]:
    """``1,2,4,…,512`` goes on by the factor of its first levels, ``4,8,12,…,32`` by their step."""
    at = next(i for i, word in enumerate(words) if word in ("…", "..."))
    if at < 2 or at != len(words) - 2:
        raise InputError(f"{name}={text}: write two levels or more, …, and the last: 1,2,4,…,512")
    head, last = [_number(name, word)[0] for word in words[:at]], _number(name, words[-1])[0]
    steps = [b - a for a, b in pairwise(head)]
    ratios = [b / a for a, b in pairwise(head)] if all(head) else [0.0]
    by_step = max(steps) - min(steps) < 1e-9 * abs(steps[0])
    by_ratio = max(ratios) - min(ratios) < 1e-9 * abs(ratios[0])
    if len(head) == 2:  # 1,2,…,512 doubles where that ends at the last level, and counts where it does not
        by_ratio = by_ratio and ratios[0] > 1 and abs(math.log(last / head[0], ratios[0]) % 1.0 - 0.5) > 0.499
        by_step = not by_ratio
    if not (by_step or by_ratio):
        raise InputError(f"{name}={text}: {', '.join(words[:at])} goes on neither by a step nor by a factor")
    found = list(head)
    while len(found) < 10_000_000:
        value = found[-1] * ratios[0] if by_ratio and not (by_step and len(head) > 2) else found[-1] + steps[0]
        if (value - last) * (1 if steps[0] > 0 else -1) > 1e-9 * abs(last):
            break
        found.append(value)
    if abs(found[-1] - last) > 1e-9 * abs(last):
        raise InputError(f"{name}={text}: {last:g} is not reached; the levels end at {found[-1]:g}")
    return found


def _number(name: str, word: str) -> tuple[float, bool]:
    """A value in SI units, or a factor."""
    word = word.strip()
    if match := re.fullmatch(r"(.+?)\s*[x×X]", word):
        if _NUMBER.match(match.group(1)):
            return float(match.group(1).replace("_", "")), True
    if word.endswith("%") and _NUMBER.match(word[:-1]):
        return float(word[:-1]) / 100, False
    try:
        return parse_quantity(word), False
    except UnitError as error:
        raise InputError(f"{name}: {error}") from error


def _tidy(values: list[float], kind: str) -> tuple[Any, ...]:
    """Levels without the dust of their arithmetic; whole numbers where options are counted."""
    clean = [float(f"{value:.12g}") for value in values]
    if kind in ("option", "plan", "deployment", "load") and all(value == int(value) for value in clean):
        return tuple(int(value) for value in clean)
    return tuple(clean)


def _word(word: str) -> Any:
    return {"true": True, "false": False}.get(word.lower(), word)
