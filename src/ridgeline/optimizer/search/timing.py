"""Interleaved A/B timing of callables that do the same, with a stated confidence, and the memory each needs."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from ridgeline.engine import autocast as casts
from ridgeline.engine.example_inputs import Before, Inputs, State, given_dice, writable
from ridgeline.engine.guards.check import Watch
from ridgeline.engine.pytree import TooLarge, flatten
from ridgeline.engine.state import Beside
from ridgeline.optimizer.search.loss import Loss

Call = Callable[..., Any]
SLICE_S = 4e-3
"""A turn lasts about this long: short calls are made several times."""
MAX_CALLS = 50
HOST_ROUNDS = 3
MIN_ROUNDS, MAX_ROUNDS = 5, 40
LAST_ROUNDS = 12
"""Rounds of a race that nothing comes after. Simulated (tests/unit/optimizer/test_guarantee.py): where every turn is
slowed by a factor of 1.4 or not at random, five rounds overlook a rival that is 5 % ahead in one of ten races, twelve
in one of a hundred."""
CONFIDENCE = 0.95
NOISE_FRAC = 0.005
"""Medians closer than this are taken as equal even where a test could tell them apart."""
CLEAR_FRAC = 0.02
_COPY_BYTES = 64 << 20
"""Inputs up to this size go round in copies at other addresses; so do larger ones, but caches, where there is room."""
ROOM_FRAC = 0.1


class Contender(Protocol):
    """Something to be timed, with what it needs switched on around the turn, not inside it."""

    def switched(self) -> AbstractContextManager[Call]: ...


@dataclass(frozen=True, slots=True)
class Timed:
    """One contender's seconds a call, a number for every round."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def low_s(self) -> float:
        return sorted(self.seconds)[len(self.seconds) // 10]

    @property
    def high_s(self) -> float:
        return sorted(self.seconds)[-1 - len(self.seconds) // 10]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How many times as fast ``b`` is as ``a``, and the interval that holds it with 95 % confidence."""

    speedup: float
    low: float
    high: float
    num_rounds: int
    undisturbed: float = 1.0  # how many times as fast in the fastest tenth of the rounds

    @property
    def faster(self) -> bool:
        """Beyond noise."""
        return self.low > 1.0 and self.speedup > 1.0 + NOISE_FRAC

    @property
    def ahead(self) -> bool:
        """Faster by the median of rounds or where least disturbed, whether chance explains it or not.

        Medians of pairs see through drift, the fastest rounds through a machine that is slowed now and then.
        """
        return max(self.speedup, self.undisturbed) > 1.0 + NOISE_FRAC

    @property
    def slower(self) -> bool:
        return self.high < 1.0 and self.speedup < 1.0 - NOISE_FRAC

    @property
    def decided(self) -> bool:
        return self.faster or self.slower

    @property
    def seems_apart(self) -> bool:
        """By so much that more rounds may show it."""
        return abs(self.speedup - 1.0) > CLEAR_FRAC

    @property
    def clear(self) -> bool:
        """Decided by so much that further rounds need not be looked at; looking after every round would favor luck."""
        return self.low > 1.0 + CLEAR_FRAC or self.high < 1.0 - CLEAR_FRAC


def compare(a: Timed, b: Timed) -> Comparison:
    """The median of the rounds' ratios, with its bootstrap interval; rounds are paired, so drift cancels."""
    ratios = np.array([x / y for x, y in zip(a.seconds, b.seconds, strict=True)])
    drawn = np.random.default_rng(0).choice(ratios, size=(1000, len(ratios)))
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(np.median(drawn, axis=1), [tail, 100 - tail])
    return Comparison(float(np.median(ratios)), float(low), float(high), len(ratios), a.low_s / b.low_s)


class Track:
    """Where contenders take turns: inputs to go round, the model's state to put back, and a clock.

    In training a turn is forward, backward and clearing the gradients, and ``update`` before that where there is one;
    in inference a call without gradients.
    """

    def __init__(self, model: nn.Module, inputs: Inputs, mode: str, loss: Call | None, device: torch.device,
                 others: Sequence[torch.Tensor] = ()) -> None:  # fmt: skip
        self.model, self.inputs, self.mode, self.device = model, inputs, mode, device
        self.loss = Loss(loss)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.gradients = [(p, p.grad) for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        self.state = State(model)
        hidden = [t for _, t in self.state.watch.tensors.values() if t.requires_grad and t.is_leaf]
        self.beside = Beside(model, loss, [*others, *hidden])
        made = [(held, key, held.get(key)) for _, held, key in self.state.watch.made()]
        self.made = made  # weights that hooks make before every call
        self.state.given = [*given_dice(inputs), self.beside.restore, self._forget_made]
        self.origin: Watch | None = None  # the model before its first call, where every call changes it
        self.mutates = self.appends = False
        self.copies = [inputs]
        self._turns = 0
        self.steady = False
        self.update: Callable[[], Any] | None = None
        self.waits = mode == "infer"  # after every call, as whoever wants its result does
        self._kept: dict[int, tuple[Inputs, Inputs, Any]] = {}
        self.written: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.remade: list[tuple[torch.Tensor, torch.Tensor]] = []  # inputs that calls turn, resize or mark in place

    def settle(self, call: Call) -> float:
        """One call of eager PyTorch: whether calls change their inputs, and about how long they take."""
        trial = self.inputs.copied()
        before, places, form = Before(trial), [id(tensor) for _, tensor in trial.named()], _form(trial)
        find_written = self.state.looking_for_written_weights(self.model)
        given = [(tensor, _kind_of(tensor)) for _, tensor in trial.named()]
        own = self.inputs.named()
        kept = [each.detach().requires_grad_(each.requires_grad) for _, each in own]
        self.run(call, trial)
        find_written()
        self.remade = [(own[i][1], kept[i]) for i, (tensor, kind) in enumerate(given) if _kind_of(tensor) != kind]
        self.steady = form is not None and _form(trial) == form
        self.appends = places != [id(tensor) for _, tensor in trial.named()]
        changed = before.written()
        self.written = [(own[i][1], own[i][1].detach().clone()) for i in changed]
        self.mutates = bool(changed or self.remade or self.state.changed())
        if self.state.watch.changes() or self.state.watch.toggled():
            self._settle_names(call)
        self.restore()
        num_bytes = sum(t.nbytes for t in self.inputs.tensors())
        if not self.mutates and num_bytes < _COPY_BYTES:
            self.copies = [self.inputs, self._taken(call, 8), self._taken(call, 10)]
        elif not self.mutates and not self.inputs.has_cache and num_bytes < ROOM_FRAC * free_bytes(self.device):
            self.copies = [self.inputs, self._taken(call, 8)]
        return self.about_s(call)

    def _taken(self, call: Call, seed: int) -> Inputs:
        """Inputs to go round that the model takes."""

        def turn(inputs: Inputs) -> None:
            try:
                self.run(call, inputs)
            finally:
                self.restore()

        return self.inputs.taken(seed, turn)[0]

    def _settle_names(self, call: Call) -> None:
        """What the first call sets up stays; what every call changes is put back after each, and all in the end."""
        self.state.watch.detach()
        self.state.restore()
        again = State(self.model)
        self.run(call, self.inputs.copied())
        if again.watch.changes() or again.watch.toggled():
            again.rebinds = self.mutates = True
            self.origin = self.state.watch
        again.random, again.given, again.moving = self.state.random, self.state.given, self.state.moving
        known = {name for name, *_ in again.tensors}
        again.weights = self.state.weights
        again.tensors += [each for each in again.weights if each[0] not in known]
        self.state = again

    def restore(self) -> None:
        """The model's state and the inputs it writes to as they were."""
        self.state.restore()
        for tensor, kept in self.remade:
            if _kind_of(tensor) != _kind_of(kept):
                tensor.data = kept.detach()
                tensor.requires_grad_(kept.requires_grad)
        for tensor, kept in self.written:
            with torch.no_grad(), writable(tensor):
                tensor.detach().copy_(kept)

    def _forget_made(self) -> None:
        """The last call's, without its history, which keeps parameters' gradients on the stream of that call."""
        for held, key, _ in self.made:
            if isinstance(held.get(key), torch.Tensor):
                held[key] = held[key].detach()

    def hand_back(self) -> None:
        """Everything as it was found, gradients included: turns clear them."""
        self.restore()
        if self.origin is not None:
            self.origin.restore()
            for put_back in self.state.moving:  # iterators, whose places names do not keep
                put_back()
        for held, key, value in self.made:
            held[key] = value
        self.beside.hand_back()
        for parameter, gradient in self.gradients:
            parameter.grad = gradient

    def run(self, call: Call, inputs: Inputs) -> Any:
        """One turn's work."""
        if self.mode == "infer":
            with torch.no_grad():
                return call(*inputs.args, **inputs.kwargs)
        value = self.loss(call(*inputs.args, **inputs.kwargs))  # results let go of: nobody needs less memory than so
        with casts.off():
            value.backward()
        if self.update is not None:
            self.update()
        for parameter in self.parameters:
            parameter.grad = None
        return None

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def about_s(self, call: Call) -> float:
        return min(self.turn_s(call, 1), self.turn_s(call, 1))

    def turn_s(self, call: Call, num: int) -> float:
        """Seconds a call, over ``num`` of them in a row.

        In inference each is waited for. What the host does before the first kernel then counts, as it does for a caller
        who looks at the result; in a row it hides behind the device's work for the call before, and a candidate that
        starts late would win by a hair what it loses by itself.
        """
        ready = [self._next(self._turns + i) for i in range(num)]
        self._turns += num
        self.synchronize()
        began = time.perf_counter()
        for inputs in ready:
            self.run(call, inputs)
            if self.waits:
                self.synchronize()
        self.synchronize()
        spent_s = (time.perf_counter() - began) / num
        if self.mutates:
            self.restore()
        self._look_over()
        return spent_s

    def host_s(self, call: Call) -> float:
        """Seconds until a call returns, whether the device is done or not: the least of a few."""
        found = []
        for i in range(HOST_ROUNDS):
            ready = self._next(i)
            self.synchronize()
            began = time.perf_counter()
            self.run(call, ready)
            found.append(time.perf_counter() - began)
            self.synchronize()
            if self.mutates:
                self.restore()
        self._look_over()
        return min(found)

    def once(self, call: Call, around: AbstractContextManager[Any]) -> None:
        """One call within a context, a recording say; nothing but the call is in it."""
        ready = self._next(0)
        self.synchronize()
        with around:
            self.run(call, ready)
            self.synchronize()
        if self.mutates:
            self.restore()
        self._look_over()

    def _next(self, i: int) -> Inputs:
        """Containers that calls leave as they are go round, as a cache does in generation; others are new each time."""
        given = self.copies[i % len(self.copies)]
        if not self.steady:
            return given.reused()
        if id(given) not in self._kept:
            self._keep(given)
        return self._kept[id(given)][1]

    def _keep(self, given: Inputs) -> None:
        again = given.reused()
        self._kept[id(given)] = (given, again, _form(again))

    def _look_over(self) -> None:
        """A contender that leaves its mark on a container spoils it for nobody else."""
        for given, again, form in list(self._kept.values()):
            if _form(again) != form:
                self._keep(given)

    def race(
        self,
        runners: Mapping[str, Contender],
        budget_s: float,
        pairs: Sequence[tuple[str, str]] = (),
        least_rounds: int = MIN_ROUNDS,
        least_calls: int = 1,
    ) -> dict[str, Timed]:
        """All contenders in turns, until ``pairs`` are clearly decided or the time is spent, at most twice over.

        ``least_calls`` in a row are a turn where the time is enough for them: a loop does not wait for its steps.
        """
        about_s = {}
        for name, runner in runners.items():
            with runner.switched() as call:
                about_s[name] = self.about_s(call)
        row = 1 if self.written else min(least_calls, int(budget_s / (least_rounds * sum(about_s.values()) + 1e-9)))
        num = {name: max(self._calls_a_turn(one_s), row) for name, one_s in about_s.items()}
        found: dict[str, list[float]] = {name: [] for name in runners}
        began = time.perf_counter()
        for i in range(MAX_ROUNDS):
            for name, runner in in_turn(list(runners.items()), i):
                with runner.switched() as call:
                    found[name].append(self.turn_s(call, num[name]))
            spent_s = time.perf_counter() - began
            late = spent_s * (i + 2) / (i + 1) > budget_s
            if i + 1 >= least_rounds and (late or (pairs and _all_clear(found, pairs))):
                break
            if late and i + 1 >= 3 and spent_s > 2 * budget_s:
                break
        return {name: Timed(tuple(seconds)) for name, seconds in found.items()}

    def _calls_a_turn(self, one_s: float) -> int:
        return 1 if self.mutates else max(1, min(MAX_CALLS, math.ceil(SLICE_S / max(one_s, 1e-6))))

    def extra_bytes(self, call: Call) -> int | None:
        """The most memory a call needs beyond what rests between calls; None where the device does not count."""
        if self.device.type != "cuda":
            return None
        self.turn_s(call, 1)
        ready = self._next(0)
        resting = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.run(call, ready)
        self.synchronize()
        peak = torch.cuda.max_memory_allocated(self.device)
        if self.mutates:
            self.restore()
        self._look_over()
        return peak - resting

    def reserved_bytes(self, call: Call) -> int:
        """The most memory the allocator holds for a call, gaps between blocks included; 0 where nothing is counted."""
        if self.device.type != "cuda":
            return 0
        reserved_bytes(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.turn_s(call, 1)
        return torch.cuda.max_memory_reserved(self.device)


def in_turn(order: Sequence[Any], i: int) -> list[Any]:
    """The order of the i-th round: everybody is first, and everybody comes behind everybody else, equally often.

    What ran before leaves its marks on caches and clocks: with three in a ring the one behind the slowest was measured
    40 to 100 µs slower than the same code behind itself.
    """
    turned = list(order[i // 2 % len(order) :]) + list(order[: i // 2 % len(order)])
    return turned[::-1] if i % 2 else turned


def _form(inputs: Inputs) -> Any:
    """All of a call's arguments but the contents of their tensors, and which tensors; None where that is too much."""
    try:
        flat = flatten((inputs.args, tuple(inputs.kwargs.items())), grad=False)
    except TooLarge:
        return None
    return flat.tokens, [id(tensor) for tensor in flat.tensors], [id(box) for box in flat.containers]


def _kind_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a tensor is besides the numbers in it; of one that is not strided its shape and type."""
    told = (tensor.layout, tensor.shape, tensor.dtype, tensor.requires_grad)
    if tensor.layout is not torch.strided or type(tensor) is not torch.Tensor:
        return told
    return *told, tensor.stride(), tensor.storage_offset(), tensor.data_ptr()


def _all_clear(found: Mapping[str, Sequence[float]], pairs: Sequence[tuple[str, str]]) -> bool:
    return all(compare(Timed(tuple(found[a])), Timed(tuple(found[b]))).clear for a, b in pairs)


def free_bytes(device: torch.device) -> int:
    """Memory that nobody uses on the device; 0 where it does not count."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0


def held_bytes(device: torch.device) -> int:
    """Memory in use on the device after rubbish is collected; 0 where the device does not count."""
    if device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


def reserved_bytes(device: torch.device) -> int:
    """Memory the allocator keeps, pools of captured graphs included, after what it can give back was given back.

    So are the workspaces of products: those of recordings lie in their pools, and eager's, if it ran last, beside them.
    """
    if device.type != "cuda":
        return 0
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)
