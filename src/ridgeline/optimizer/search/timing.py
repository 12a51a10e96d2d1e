"""Interleaved timing of callables that compute the same, with confidence intervals, and their memory use."""

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
MIN_ROUNDS, MAX_ROUNDS = 5, 40
LAST_ROUNDS = 12
"""Rounds of a final race. Simulated (tests/unit/optimizer/test_guarantee.py): if every turn is slowed by 1.4 at random,
five rounds overlook a rival that is 5 % ahead in one of ten races, twelve in one of a hundred."""
NOISE_FRAC = 0.005
"""Medians closer than this count as equal, even if a test could tell them apart."""
CLEAR_FRAC = 0.02


class Contender(Protocol):
    """A contender of a race; ``switched`` holds what must be active around its turn."""

    def switched(self) -> AbstractContextManager[Call]: ...


@dataclass(frozen=True, slots=True)
class Timed:
    """One contender's seconds per call, a number for every round."""

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
    """The speedup of ``b`` over ``a`` with its 95 % confidence interval."""

    speedup: float
    low: float
    high: float
    num_rounds: int
    undisturbed: float = 1.0  # the speedup in the fastest tenth of the rounds

    @property
    def faster(self) -> bool:
        """Faster beyond noise."""
        return self.low > 1.0 and self.speedup > 1.0 + NOISE_FRAC

    @property
    def ahead(self) -> bool:
        """Faster by the median of rounds or in the fastest ones, significant or not.

        Medians of paired rounds cancel drift, the fastest rounds avoid interruptions.
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
        """Apart by so much that more rounds may show it."""
        return abs(self.speedup - 1.0) > CLEAR_FRAC

    @property
    def clear(self) -> bool:
        """Decided so clearly that a race can stop early; stopping at any significance would favor luck."""
        return self.low > 1.0 + CLEAR_FRAC or self.high < 1.0 - CLEAR_FRAC


def compare(a: Timed, b: Timed) -> Comparison:
    """The median of the rounds' ratios with its bootstrap interval; rounds are paired, so drift cancels."""
    ratios = np.array([x / y for x, y in zip(a.seconds, b.seconds, strict=True)])
    drawn = np.random.default_rng(0).choice(ratios, size=(1000, len(ratios)))
    tail = 50 * (1 - 0.95)
    low, high = np.percentile(np.median(drawn, axis=1), [tail, 100 - tail])
    return Comparison(float(np.median(ratios)), float(low), float(high), len(ratios), a.low_s / b.low_s)


class Track:
    """The timing harness: rotates inputs, restores the model's state after every turn, and holds the clock.

    In training a turn is forward, backward, ``update`` if there is one, and clearing the gradients; in inference a call
    without gradients.
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
        self.made = made  # weights that hooks recompute before every call
        self.state.given = [*given_dice(inputs), self.beside.restore, self._forget_made]
        self.origin: Watch | None = None  # the model before its first call, if every call changes it
        self.mutates = self.appends = False
        self.copies = [inputs]
        self._turns = 0
        self.steady = False
        self.update: Callable[[], Any] | None = None
        self.waits = mode == "infer"  # synchronizes after every call, as a caller who reads the result does
        self._kept: dict[int, tuple[Inputs, Inputs, Any]] = {}
        self.written: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.remade: list[tuple[torch.Tensor, torch.Tensor]] = []  # inputs whose metadata calls change in place

    def settle(self, call: Call) -> float:
        """Make one eager call: find out whether calls change their inputs, and about how long they take."""
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
        # Small inputs rotate through copies at other addresses; so do larger ones, except caches, if memory allows.
        if not self.mutates and num_bytes < 64 << 20:
            self.copies = [self.inputs, self._taken(call, 8), self._taken(call, 10)]
        elif not self.mutates and not self.inputs.has_cache and num_bytes < 0.1 * free_bytes(self.device):
            self.copies = [self.inputs, self._taken(call, 8)]
        return self.about_s(call)

    def _taken(self, call: Call, seed: int) -> Inputs:
        """Other inputs that the model accepts."""

        def turn(inputs: Inputs) -> None:
            try:
                self.run(call, inputs)
            finally:
                self.restore()

        return self.inputs.taken(seed, turn)[0]

    def _settle_names(self, call: Call) -> None:
        """Keep what the first call initializes; restore what every call changes, and all of it in the end."""
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
        """Restore the model's state and the inputs that calls write to."""
        self.state.restore()
        for tensor, kept in self.remade:
            if _kind_of(tensor) != _kind_of(kept):
                tensor.data = kept.detach()
                tensor.requires_grad_(kept.requires_grad)
        for tensor, kept in self.written:
            with torch.no_grad(), writable(tensor):
                tensor.detach().copy_(kept)

    def _forget_made(self) -> None:
        """Detach weights made by hooks: their autograd history would bind gradients to the stream of the last call."""
        for held, key, _ in self.made:
            if isinstance(held.get(key), torch.Tensor):
                held[key] = held[key].detach()

    def hand_back(self) -> None:
        """Restore everything as it was found, gradients included."""
        self.restore()
        if self.origin is not None:
            self.origin.restore()
            for put_back in self.state.moving:  # iterators, whose positions are not attributes
                put_back()
        for held, key, value in self.made:
            held[key] = value
        self.beside.hand_back()
        for parameter, gradient in self.gradients:
            parameter.grad = gradient

    def run(self, call: Call, inputs: Inputs) -> Any:
        """The work of one turn."""
        if self.mode == "infer":
            with torch.no_grad():
                return call(*inputs.args, **inputs.kwargs)
        value = self.loss(call(*inputs.args, **inputs.kwargs))  # drops the outputs, which saves memory
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
        """Seconds per call, over ``num`` calls in a row.

        In inference each call is synchronized, so that host time before the first kernel counts, as it does for a
        caller who reads the result. Unsynchronized calls hide it behind the device work of the call before.
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
        """Seconds until a call returns, whether the device is done or not: the least of three."""
        found = []
        for i in range(3):
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
        """Make one call inside a context, a profiler for example, which sees nothing else."""
        ready = self._next(0)
        self.synchronize()
        with around:
            self.run(call, ready)
            self.synchronize()
        if self.mutates:
            self.restore()
        self._look_over()

    def _next(self, i: int) -> Inputs:
        """The next inputs. Containers that calls leave unchanged are reused, as caches are in generation."""
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
        """Replace containers that a contender has changed."""
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
        """Time all contenders in turns, until ``pairs`` are clearly decided or twice the time is spent.

        A turn has ``least_calls`` calls in a row if there is time for them: a loop does not wait for its steps.
        """
        about_s = {}
        for name, runner in runners.items():
            with runner.switched() as call:
                about_s[name] = self.about_s(call)
        row = 1 if self.written else min(least_calls, int(budget_s / (least_rounds * sum(about_s.values()) + 1e-9)))
        # Short calls are repeated so that a turn lasts about 4 ms.
        most = 1 if self.mutates else 50
        num = {name: max(1, row, min(most, math.ceil(4e-3 / max(one_s, 1e-6)))) for name, one_s in about_s.items()}
        found: dict[str, list[float]] = {name: [] for name in runners}
        began = time.perf_counter()
        for i in range(MAX_ROUNDS):
            for name, runner in in_turn(list(runners.items()), i):
                with runner.switched() as call:
                    found[name].append(self.turn_s(call, num[name]))
            spent_s = time.perf_counter() - began
            late = spent_s * (i + 2) / (i + 1) > budget_s
            clear = i + 1 >= least_rounds and bool(pairs) and not late and all(
                compare(Timed(tuple(found[a])), Timed(tuple(found[b]))).clear for a, b in pairs)  # fmt: skip
            if i + 1 >= least_rounds and (late or clear):
                break
            if late and i + 1 >= 3 and spent_s > 2 * budget_s:
                break
        return {name: Timed(tuple(seconds)) for name, seconds in found.items()}

    def extra_bytes(self, call: Call) -> int | None:
        """Peak memory of a call beyond what stays allocated between calls; None if the device does not count."""
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
        """Peak memory that the allocator reserves for a call, gaps included; 0 if the device does not count."""
        if self.device.type != "cuda":
            return 0
        reserved_bytes(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.turn_s(call, 1)
        return torch.cuda.max_memory_reserved(self.device)


def in_turn(order: Sequence[Any], i: int) -> list[Any]:
    """The order of the i-th round: every contender is first, and follows every other one, equally often.

    The previous contender affects caches and clocks: with three in a fixed order the one behind the slowest was
    measured 40 to 100 µs slower than the same code behind itself.
    """
    turned = list(order[i // 2 % len(order) :]) + list(order[: i // 2 % len(order)])
    return turned[::-1] if i % 2 else turned


def _form(inputs: Inputs) -> Any:
    """Everything about a call's arguments but the contents of tensors; None if that is too much."""
    try:
        flat = flatten((inputs.args, tuple(inputs.kwargs.items())), grad=False)
    except TooLarge:
        return None
    return flat.tokens, [id(tensor) for tensor in flat.tensors], [id(box) for box in flat.containers]


def _kind_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The metadata of a tensor; for one that is not strided only shape and dtype."""
    told = (tensor.layout, tensor.shape, tensor.dtype, tensor.requires_grad)
    if tensor.layout is not torch.strided or type(tensor) is not torch.Tensor:
        return told
    return *told, tensor.stride(), tensor.storage_offset(), tensor.data_ptr()


def free_bytes(device: torch.device) -> int:
    """Free memory of the device; 0 if it does not count."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0


def held_bytes(device: torch.device) -> int:
    """Allocated memory of the device after garbage collection; 0 if it does not count."""
    if device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


def reserved_bytes(device: torch.device) -> int:
    """Reserved memory of the device, pools of captured graphs included, after freeing all cached blocks.

    cuBLAS workspaces are freed too: those of captures lie in their pools, eager's outside.
    """
    if device.type != "cuda":
        return 0
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)
