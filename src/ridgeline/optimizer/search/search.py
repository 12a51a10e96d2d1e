"""The search: candidates in the order of what they promise a second, built, timed, proved, kept or rejected."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ridgeline.bench.environment import environment
from ridgeline.engine.capture.capture import uncached_casts
from ridgeline.engine.capture.probe import asking
from ridgeline.engine.drop_in import Optimized, Plan
from ridgeline.engine.example_inputs import Inputs, RandomState, leaves
from ridgeline.engine.guards.check import Watch, installed, library
from ridgeline.engine.replay.compiled import Shortcut
from ridgeline.engine.replay.training import mark_accumulators, renew_accumulators
from ridgeline.engine.shallow_clone import shallow_clone
from ridgeline.engine.signature import Signature
from ridgeline.errors import OptimizeError
from ridgeline.kernels.tensorfloat import convolutions_round
from ridgeline.optimizer.backend import Report
from ridgeline.optimizer.compile.deadline import OutOfTime, within
from ridgeline.optimizer.in_place.channels_last import channels_last_layers
from ridgeline.optimizer.precision.choice import FIRST_FRAC, MOST_TRIES, Study, study
from ridgeline.optimizer.precision.sensitivity import Choice
from ridgeline.optimizer.receipt import (
    BEATEN,
    EQUAL,
    FAILED,
    LARGE,
    OVERRAN,
    SKIPPED,
    SLOWER,
    WINNER,
    WRONG,
    Entry,
    Narrow,
    Part,
    Receipt,
    Step,
)
from ridgeline.optimizer.search.blocks import (
    grouped_frac,
    groups,
    has_head,
    has_long_rows,
    is_checkpointed,
    num_products,
    regions_of,
    unlike_frac,
)
from ridgeline.optimizer.search.candidate import Built, Candidate, Traces, build, capture_again
from ridgeline.optimizer.search.dropout_off import stilled
from ridgeline.optimizer.search.explanation import explanations, remaining
from ridgeline.optimizer.search.forecast import Forecast, forecast, known_device
from ridgeline.optimizer.search.judge import LEAST_DRAWS, MOST_DRAWS, Prover, Subject, Verdict, unproved
from ridgeline.optimizer.search.loss_curve import LEAST_STEPS, STEPS, track
from ridgeline.optimizer.search.order import (
    AS_IT_IS,
    CAPTURE_S,
    COMPILING_S,
    DEFAULT_BUDGET_S,
    GRAPHED,
    IMPORTS_S,
    PLAIN,
    STOCK,
    Facts,
    Ladder,
    Rung,
)
from ridgeline.optimizer.search.redundant_arguments import simplified
from ridgeline.optimizer.search.time_by_part import parts_of
from ridgeline.optimizer.search.timing import LAST_ROUNDS, Comparison, Timed, Track, compare, held_bytes, reserved_bytes
from ridgeline.optimizer.training.optimizer_update import updating

MOST_SEEDS, SEEDS_S = 32, 1.0
"""Seeds after which random numbers that never showed are taken for unused, and the seconds for trying them."""
RACE_FRAC, LAST_RACE_FRAC = 0.02, 0.06
"""Shares of the budget for one candidate's race and for the last one."""
LEAST_RACE_S, MOST_RACE_S = 0.3, 4.0
LOOP_STEPS = 3
"""Steps in a row of the last race in training: loops start the next step while the device is at the last."""
REFERENCE_TIMES = 40
"""A call in float64 takes about this many of eager's."""
MOST_TWICE_BYTES = 2 << 30
"""Inputs above this are proved once: half a billion numbers say what two times as many would."""
TRACK_TIMES = 3.0
"""Steps of the optimizer and both runs, in eager calls."""
TRACK_FRAC = 0.15
"""Share of the budget that is kept for them, and taken where nothing is left of it."""
DRAWS_FRAC = 0.008
"""Share of the budget for the runs of one random contender; the winner is compared without its dice besides."""
RESERVE_FRAC = 0.5
"""Of a short budget for a slow model, proofs and races would take everything: half is for candidates."""
LEAST_GAIN_FRAC = 0.01
"""What a winner must gain over eager in the last race; eager needs no explanation."""
MOST_GUARDED_S = 5e-3
"""Calls shorter than this feel the 30 to 50 µs of torch.compile's guards and our look on top of them."""
SAME_FRAC = 0.98
"""What torch.compile makes, called past its guards, is taken in its place if it is not behind by more in its race."""
STOCK_FRAC = 1e-5
"""What PyTorch's own compiler may be off whatever eager is, eighty roundings of float32: who compiles a model finds the
same difference, and the guarantee is never to be slower than that."""
STANDS_OUT = "as right as eager, and elements are 1e-4 from eager's, where those of torch.compile or eager are not"
LENIENCY, SHORT_TIMES = 1.2, 2.0
QUICK_FRAC = 0.25
"""What takes at most this share of the time left is made without regard to what is kept for torch.compile."""
OVERRUN_FRAC, PRICE_TIMES = 0.4, 1.5
"""By how much of the budget torch.compile may overrun it in training, and how many times too high its price may be."""
HOPE_TIMES = 2.0
"""How many times too high the price of tuning may be where nothing of ours is ahead of torch.compile: its own tuning is
what may be."""
NARROW_FRAC = 0.35
"""Of the time, what is kept for fewer bits where they are allowed: measuring layers, building and proving a choice."""
MOST_ROUNDING = 2e-3
"""An error up to which products in TensorFloat-32 explain it."""
TRACER = "torch._dynamo"
MOST_COMPILE_THREADS = 32
"""What Inductor takes at most by itself."""
COMPILERS = (TRACER, "torch._inductor.compile_fx", "torch._inductor.select_algorithm")
PRICED_FRAC = 0.6
"""Of the budget, what must be left for a model to be priced: on a slow host the first calls may take seconds."""
IMPORT_FRAC = 0.25
"""Of the budget, what a price may take to import: in a new process PyTorch's tracer takes 2.5 s, half of five."""
UNPRICED = "not priced: what is left of the budget is for candidates"
LATE_PRICE_S = 0.5
"""Seconds that must be left for a price once the candidates are done and the tracer is there: 0.25 for the first model
of a process, 0.2 for 24 layers."""
LATE_FRAC = 0.5
"""By how much of the budget a search may be late and still make torch.compile's code past its guards, or go on with
what a C++ compiler takes longer for than its price says."""
OVER_FRAC = 1.05
"""Beyond so much of the budget a receipt says what took it."""
MOST_CAUSES = 3
FROZEN_BY_PYTHON = 1000
"""Python 3.12 starts with 375 objects that are never collected."""
MEMORY_SLACK = 1.01
"""The allocator rounds: a hundredth more is not more."""
REMADE = "nothing was tried: calls make something else of an input in place, its shape, memory or gradients"
WORKSPACE_BYTES = 32 << 20
"""What a recording may reserve beyond eager's steps: its copies of the inputs, and segments that are handed out whole.
Of a step of a few gigabytes it is less than a hundredth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is to be made faster, and within what."""

    model: nn.Module
    inputs: Inputs
    mode: str
    device: torch.device
    loss: Callable[..., Any] | None = None
    optimizer: torch.optim.Optimizer | None = None  # what the loop updates with, where it is known
    budget_s: float = DEFAULT_BUDGET_S
    memory_limit_bytes: int | None = None
    error_budget: float | None = None  # relative root mean square error that results may have in fewer bits
    say: Callable[[str], None] = lambda text: None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The best way found to run the model, switched on, and its receipt."""

    built: Built
    receipt: Receipt


@dataclass(frozen=True, slots=True)
class Lap:
    """Something that took a part of the budget, and what it was expected to take."""

    what: str
    spent_s: float
    price_s: float | None = None

    def __str__(self) -> str:
        priced = "" if self.price_s is None else f" where {self.price_s:.1f} were expected"
        return f"{self.what} took {self.spent_s:.1f} s{priced}"


class Search:
    """State of one search: the clock, what is alive, the best so far and what was written down."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.began = time.perf_counter()
        held = [] if problem.optimizer is None else [p for g in problem.optimizer.param_groups for p in g["params"]]
        self.track = Track(problem.model, problem.inputs, problem.mode, problem.loss, problem.device, held)
        mark_accumulators(self.track.parameters if problem.mode == "train" else ())
        self.eager = Built(Candidate(name="eager"), problem.model, Report())
        self.best = self.eager
        self.stock: Built | None = None
        self.plain: Candidate | None = None  # eager's own kernels recorded, once that was right and faster
        self.asked: tuple[str, ...] = ()
        self.compared = False  # whether it is a function of few ops whose better rival returns what eager does
        self.entries: dict[str, Entry] = {}
        self.steps: list[Step] = []
        self.families: dict[Any, Built] = {}
        self.notes: list[str] = []
        self.traces = Traces()
        self._prover: Prover | None = None
        self.forecast: Forecast | None = None
        self.eager_s = 0.0
        self.eager_bytes: int | None = None
        self.base_bytes = self.base_reserved = self.eager_reserved = 0
        self.limit_bytes = problem.memory_limit_bytes
        self.study: Study | None = None
        self.narrowing = False
        self.choices: dict[tuple[tuple[str, str], ...], dict[str, Choice]] = {}
        self.laps: list[Lap] = []

    def left_s(self) -> float:
        return self.problem.budget_s - (time.perf_counter() - self.began)

    @contextlib.contextmanager
    def _lap(self, what: str, price_s: float | None = None) -> Iterator[None]:
        """What is done here is a part of the budget, and is named if that is exceeded."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.laps.append(Lap(what, time.perf_counter() - began, price_s))

    def run(self) -> Outcome:
        """Search until everything worth trying was tried or the time is spent.

        Recordings are made without autocast's cache, and compiled code is guarded by that switch: it is off for all, or
        every candidate would be compiled a second time to be recorded.
        """
        with _undisturbed(self.problem.budget_s), uncached_casts():
            return self._run()

    def _run(self) -> Outcome:
        try:
            with self._lap("eager's first calls"):
                self._prepare()
            if self.track.remade:
                self.notes.append(REMADE)
                return self._finish()
            ladder = Ladder(self._facts())
            for rung in ladder.rungs(self):
                self._climb(rung, ladder)
            self._narrow(ladder)
            return self._finish()
        finally:
            self.track.hand_back()
            reserved_bytes(self.problem.device)  # what losers held is given back

    # Before anything is tried: what eager does.

    def _prepare(self) -> None:
        problem = self.problem
        random = RandomState()
        self.eager_s = self.track.settle(problem.model)
        self.random = self._draws_random(random) and self._results_vary(random)
        self.base_bytes, self.base_reserved = held_bytes(problem.device), reserved_bytes(problem.device)
        extra = self.track.extra_bytes(problem.model)
        self.eager_bytes = None if extra is None else self.base_bytes + extra
        self.eager_reserved = self.track.reserved_bytes(problem.model)
        if self.limit_bytes is None and problem.mode == "train":
            self.limit_bytes = self.eager_bytes
        timed = self.track.race({"eager": self.eager}, self._race_s())["eager"]
        self.eager_s = timed.median_s
        self._note(self.eager, WINNER, "", timed=timed, peak=self.eager_bytes, comparison=compare(timed, timed))
        self.steps.append(Step("eager", self.eager_s))
        tracer_s = 0.0 if TRACER in sys.modules else IMPORTS_S[TRACER]
        if self.left_s() > PRICED_FRAC * problem.budget_s and tracer_s <= IMPORT_FRAC * problem.budget_s:
            self._price()
        else:
            self.notes.append(UNPRICED)

    def _draws_random(self, before: RandomState) -> bool:
        before.restore()
        self._listen()
        moved = before.moved()  # asked before anything is put back: a model's state is, generators included
        self.track.restore()
        before.restore()
        return moved

    def _listen(self) -> None:
        """One call, and what the model's code asks in it besides values."""
        model, ready = self.problem.model, self.problem.inputs.copied()
        with asking(ready.tensors(), chain(model.parameters(), model.buffers())) as asked:
            self.track.run(model, ready)
        self.asked = tuple(sorted(asked))

    def _results_vary(self, before: RandomState) -> bool:
        """Whether the numbers drawn show in the results; layers dropped with probability zero draw them too.

        Of few samples none may be dropped in most runs, so several are looked at, as long as they are quick.
        """
        first = self._seeded(1)
        seeds = range(2, 2 + max(1, min(MOST_SEEDS, int(SEEDS_S / max(self.eager_s, 1e-6)))))
        varies = any(not _equal(first, self._seeded(seed)) for seed in seeds)
        before.restore()
        return varies

    def _seeded(self, seed: int) -> list[torch.Tensor]:
        """What a call returns after this seed."""
        torch.manual_seed(seed)
        ready = self.problem.inputs.copied()
        with torch.set_grad_enabled(self.problem.mode == "train"):  # a model may differentiate inside of its forward
            found = [t.detach().clone() for _, t in leaves(self.problem.model(*ready.args, **ready.kwargs))]
        self.track.restore()
        return found

    def _price(self) -> None:
        device = known_device(self.problem.device)
        if device is None:
            self.notes.append(f"not priced: no description of {device_name(self.problem.device)}")
            return
        found = forecast(self.problem.model, self.problem.inputs, self.problem.mode, self.problem.loss, device)
        if isinstance(found, str):
            self.notes.append(found)
        else:
            self.forecast = found

    def _price_late(self) -> None:
        """The floors of a receipt, where a short budget had no time for them before candidates and has some now."""
        if UNPRICED in self.notes and TRACER in sys.modules and self.left_s() > LATE_PRICE_S:
            self.notes.remove(UNPRICED)
            self._price()

    def _facts(self) -> Facts:
        model = self.problem.model
        parts = () if self.track.state.rebinds else substitutable(model, self.problem.device)
        return Facts(
            mode=self.problem.mode,
            cuda=self.problem.device.type == "cuda",
            eager_s=self.eager_s,
            groups=() if self.track.state.rebinds or is_checkpointed(model) else tuple(groups(model)),
            unlike_frac=unlike_frac(groups(model)),
            num_leaves=sum(1 for m in model.modules() if not any(True for _ in m.children())),
            has_conv=bool(channels_last_layers(model)) and self.problem.device.type == "cuda",
            substitutable=parts,
            has_cache=self.problem.inputs.has_cache,
            unmasked=simplified(model, self.problem.inputs.args, self.problem.inputs.kwargs) is not None,
            forecast=self.forecast,
            budget_s=self.problem.budget_s,
            num_products=num_products(model, groups(model)),
            num_threads=compile_threads(),
            input_bytes=sum(tensor.nbytes for tensor in self.problem.inputs.tensors()),
            num_convs=sum(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules()),
            convolves=any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules()),
            grouped_frac=grouped_frac(model, groups(model)),
            long_rows=has_long_rows(model),
            groups_channels=any(isinstance(module, nn.GroupNorm) for module in model.modules()),
            random=self.random,
            headed="loss" not in parts and has_head(model),
            host_s=self.track.host_s(model) if self.problem.mode == "infer" else 0.0,
            recurrent=any(isinstance(module, nn.RNNBase) for module in model.modules()),
            import_s=sum(seconds for name, seconds in IMPORTS_S.items() if name not in sys.modules),
        )

    @property
    def prover(self) -> Prover:
        """Made when the first candidate that is faster has to be proved."""
        if self._prover is None:
            problem = self.problem
            subject = Subject(problem.model, problem.inputs, problem.mode, self.track.loss, self.track.state)
            cheap = 2 * REFERENCE_TIMES * self.eager_s < 0.2 * self.problem.budget_s
            cheap = cheap and sum(tensor.nbytes for tensor in problem.inputs.tensors()) < MOST_TWICE_BYTES
            affordable = int(DRAWS_FRAC * self.problem.budget_s / max(self.eager_s, 1e-6))
            self._prover = Prover(subject, num_inputs=2 if cheap else 1, random=self.random,
                                  num_draws=max(LEAST_DRAWS, min(MOST_DRAWS, affordable)))  # fmt: skip
        return self._prover

    # Fewer bits, if a budget for their error was given: after everything that costs no accuracy.

    def _narrow(self, ladder: Ladder) -> None:
        budget = self.problem.error_budget
        if budget is None:
            return
        self.narrowing = True
        self.problem.say("measuring what fewer bits would cost")
        try:
            self.study = study(self.prover, budget, self.problem.budget_s)
        except Exception as error:  # what cannot be measured is not changed
            self.notes.append(f"no fewer bits: layers could not be measured: {why_failed(error)}")
            return
        finally:
            self.track.restore()
        if self.study.refusal:
            self.notes.append(self.study.refusal)
            return
        frac: float | None = FIRST_FRAC
        for turn in range(MOST_TRIES):
            frac = self._narrowed(ladder, turn, frac) if frac is not None else None

    def _narrowed(self, ladder: Ladder, turn: int, frac: float) -> float | None:
        """One choice of formats built, timed and proved; the share of the room to try next, if another promises."""
        assert self.study is not None
        chosen = self.study.chosen(frac)
        if not chosen:
            self.notes.append("no fewer bits: every format that gains exceeds the budget")
            return None
        name = "fewer bits" if not turn else f"fewer bits, try {turn + 1}"
        pairs = tuple((layer, choice.format) for layer, choice in chosen.items())
        self.choices[pairs] = chosen
        errors = []
        for rung in ladder.narrow_rungs(self, name, pairs):
            self._climb(rung, ladder)
            verdict = self.entries[rung.candidate.name].verdict
            if verdict is not None:
                errors.append(verdict["rms_frac"] if verdict["rms_frac"] is not None else float("inf"))
        return self.study.next_frac(frac, chosen, max(errors)) if errors else None

    # One rung: build, time, prove.

    def _climb(self, rung: Rung, ladder: Ladder) -> None:
        spare_s, limit_s = self._spare_s(rung, ladder), self._stock_limit_s(rung)
        if limit_s is not None and not ladder.facts.groups:  # nothing else is left to try: what is left is for this
            spare_s = max(spare_s, PRICE_TIMES * limit_s)
        if self._tunes(rung):
            limit_s = max(0.0, self.left_s() - self._least_s())
            spare_s = max(spare_s, HOPE_TIMES * limit_s if as_stock(self.best) else 0.0)
        if limit_s is None:
            limit_s = self._host_limit_s(rung, ladder)
        deadline_s = self._deadline_s()
        limit_s = deadline_s if limit_s is None else min(limit_s, deadline_s)
        if not deadline_s or (rung.cost_s > spare_s and not self._records_made(rung)):
            left_s = max(0.0, min(spare_s, self.left_s()))
            why = f"needs about {rung.cost_s:.0f} s, {left_s:.0f} s are left of the budget"
            self._note(Built(rung.candidate, self.problem.model, Report()), SKIPPED, why, predicted=rung.predicted_s,
                       price=rung.cost_s)  # fmt: skip
            return
        self.problem.say(f"trying {rung.candidate.name}")
        try:
            with self._lap(f"making {rung.candidate.name}", rung.cost_s), within(
                    limit_s, importing=rung.candidate.compiler != "none"):
                built = self._built(rung.candidate)
        except Exception as error:  # a candidate that cannot be built is one that lost; the model still works
            self.track.restore()
            late = isinstance(error, OutOfTime)
            status, why = (SKIPPED, str(error)) if late else (FAILED, why_failed(error))
            self._note(Built(rung.candidate, self.problem.model, Report()), status, why, price=rung.cost_s)
            self._recapture()
            return
        ladder.took(rung, built.build_s)
        self._recapture()
        if built.candidate.holds_places and built.moved(self.problem.model):
            self._capture_again(built)
        with self._lap(f"racing and proving {rung.candidate.name}"):
            self._judge(built, rung)
        if rung.candidate.name == STOCK:
            self.compared = ladder.is_short and self._is_like_eagers(self.entries[STOCK])

    def _is_like_eagers(self, stock: Entry) -> bool:
        """Whether the better of eager and torch.compile returns what eager does; if torch.compile gains nothing, eager
        is that."""
        return stock.status in (SLOWER, EQUAL) or bool(stock.verdict and stock.verdict["ok"]
                                                       and stock.verdict["like_eagers"])  # fmt: skip

    def _spare_s(self, rung: Rung, ladder: Ladder) -> float:
        """Seconds that a candidate may take to make: what is kept for proofs, the last race and torch.compile is not
        spent, except where estimates are rough or the guarantee rests on it."""
        left_s, budget_s = self.left_s(), self.problem.budget_s
        reserve_s = min(self._reserve_s(), RESERVE_FRAC * budget_s)
        # Without a compiler seconds gain what compilers take minutes for: torch.compile's share does not hold them up.
        quick = rung.candidate.compiler == "none" and rung.cost_s <= max(2 * CAPTURE_S, QUICK_FRAC * left_s)
        spare_s = left_s - reserve_s - (ladder.owed_s(rung, self) if rung.cost_s > 2 * CAPTURE_S and not quick else 0.0)
        compiled = any(built.candidate.compiler != "none" for built in self.families.values())
        first = rung.candidate.compiler != "none" and not compiled  # estimates are rough: the first gets its chance
        first = first or (rung.candidate.name in (PLAIN, AS_IT_IS) and left_s > 0)  # less of the host, a second
        if first:
            spare_s = max(spare_s, LENIENCY * left_s)
        if rung.candidate.name != STOCK:
            return spare_s
        if budget_s >= DEFAULT_BUDGET_S:  # whoever asks for nothing else is told how it compares, and may wait for it
            return max(spare_s, rung.cost_s)
        if ladder.is_short:  # a second or two; a new process imports the compiler, for which a few may be exceeded
            return max(spare_s, left_s + (SHORT_TIMES - 1) * budget_s)
        times = LENIENCY if budget_s >= COMPILING_S else 1.0  # a short budget is kept
        return max(spare_s, times * left_s - self._least_s())

    def _deadline_s(self) -> float:
        """Seconds after which whatever is made is given up, so that the whole search, on a busy machine, too, takes
        at most a quarter more than its budget, or three seconds: importing PyTorch's compiler takes four."""
        budget_s, steps = self.problem.budget_s, LEAST_STEPS if self.problem.mode == "train" else 0
        closing_s = 2 * LAST_RACE_FRAC * budget_s + 2 * self._race_s() + (20 + TRACK_TIMES * steps) * self.eager_s
        return max(0.0, self.left_s() + max(0.25 * budget_s, 3.0) - closing_s)

    def _stock_limit_s(self, rung: Rung) -> float | None:
        """Seconds after which a training step's torch.compile is given up; none for others, or in short budgets.

        Its price may be off by a factor of two either way: EfficientNet's took 97 s where 58 were expected (H200).
        """
        training = self.problem.mode == "train" and self.problem.budget_s >= COMPILING_S
        if rung.candidate.name != STOCK or not training:
            return None
        return max(0.0, self.left_s() + OVERRUN_FRAC * self.problem.budget_s - self._least_s())

    def _host_limit_s(self, rung: Rung, ladder: Ladder) -> float | None:
        """Seconds after which what a C++ compiler makes within a short budget is given up; none on a device.

        The first compilation of a machine tries which instructions its compiler knows and makes a header of it, and one
        that is busy takes four times as long: a search of 10 s took 27 (two cores, shared).
        """
        short = self.problem.mode == "infer" and self.problem.budget_s < COMPILING_S
        if ladder.facts.cuda or not short or rung.candidate.compiler == "none":
            return None
        return max(0.0, self.left_s() + LATE_FRAC * self.problem.budget_s)

    def _tunes(self, rung: Rung) -> bool:
        """Whether ways to compute are timed for it, which ends when the time does: max-autotune took 87 to 226 s for
        what torch.compile takes 20 to 60 (H200)."""
        return rung.candidate.tunes and self.problem.mode == "infer" and not self._records_made(rung)

    def _records_made(self, rung: Rung) -> bool:
        """Whether it is what was compiled before or the best so far, recorded: a second that takes the host out.

        Whatever time is left: SegFormer compiled took 13.8 ms for 5.8 of kernels, and lost to what took 9.3 for want of
        that second (H200). In training a recording takes memory and steps, so that the best alone is.
        """
        candidate = rung.candidate
        made = candidate.graphed and candidate.compiles and _family(candidate) in self.families
        made = made and self.problem.mode == "infer" and rung.cost_s <= CAPTURE_S
        return made or self._records_best(candidate)

    def _records_best(self, candidate: Candidate) -> bool:
        """Whether it is the best so far, recorded."""
        bare = replace(_family(candidate), name=self.best.candidate.name)
        return candidate.graphed and bare == replace(self.best.candidate, tries_convolutions=False)

    def _capture_again(self, built: Built) -> None:
        problem = self.problem
        try:
            capture_again(built, problem.model, problem.inputs, problem.mode, problem.loss)
        except Exception as error:  # judged as it is, it fails its race, with this as the reason
            self.notes.append(f"{built.candidate.name} could not be captured again: {why_failed(error)}")
        finally:
            self.track.restore()

    def _built(self, candidate: Candidate) -> Built:
        """Made on top of what was compiled before, if only the graph differs; what is compiled is kept for that."""
        family = _family(candidate)
        if candidate.compiles and family not in self.families:
            self.families[family] = self._made(replace(candidate, graphed=False, tries_convolutions=False), None)
            if not candidate.graphed and not candidate.tries_convolutions:
                return self.families[family]
        built = self._made(candidate, self.families.get(family))
        built.build_s += self.families[family].build_s if candidate.compiles else 0.0
        return built

    def _made(self, candidate: Candidate, base: Built | None) -> Built:
        """A candidate made, and what it keeps of the device's memory."""
        problem = self.problem
        before = _kept(problem.device)
        built = build(candidate, problem.model, problem.inputs, problem.mode, base=base, loss=problem.loss,
                      traces=self.traces)  # fmt: skip
        self.track.restore()
        after = _kept(problem.device)
        kept, grown = (now - was for now, was in zip(after, before, strict=True))
        if candidate.graphed:  # a graph's pool is reserved, and its blocks count as free between replays
            kept, built.reserved_bytes = max(kept, grown), self.base_reserved + grown
        built.kept_bytes = max(0, kept) + (base.kept_bytes if base else 0)
        return built

    def _outgrows(self, built: Built) -> bool:
        """Whether a training step's recording reserves more than eager's steps do, gaps included."""
        own_limit = self.problem.memory_limit_bytes is None and self.problem.mode == "train"
        recorded = built.candidate.graphed and not built.candidate.grows
        return own_limit and recorded and built.reserved_bytes > self.eager_reserved > 0

    def _regrown(self, built: Built) -> Built:
        """Recorded once more, into ranges that grow, which have no gaps between segments of other sizes."""
        first, base = built.reserved_bytes, self.families.get(_family(built.candidate))
        built.release()
        try:
            again = self._made(replace(built.candidate, grows=True), base)
        except Exception as error:  # an allocator that cannot: as it was
            self.notes.append(f"{built.candidate.name}: no memory that grows: {why_failed(error)}")
            self.track.restore()
            again = self._made(built.candidate, base)
        else:
            told = f"{first / 1e9:.2f} GB, {again.reserved_bytes / 1e9:.2f} in ranges that grow"
            self.notes.append(f"{built.candidate.name}: recorded once more for its memory: {told}")
        again.build_s = built.build_s
        return again

    def _slim(self) -> None:
        """A winner whose recording has gaps beyond what eager reserves is recorded once more, without them."""
        if not self._outgrows(self.best):
            return
        name = self.best.candidate.name
        try:
            self.best = self._regrown(self.best)
            self.entries[name] = replace(self.entries[name], peak_bytes=self._peak_bytes(self.best))
        except Exception as error:
            self.track.restore()
            self._unseat(self.best, f"could not be captured again: {why_failed(error)}")

    def _judge(self, built: Built, rung: Rung, *, again: bool = False) -> None:
        """Memory, then time, then (only if it is faster) whether it is right; ``again`` once the best was mended."""
        if self._is_eager(built):
            self._note(built, EQUAL, "no rewrite matched", predicted=rung.predicted_s)
            return self._drop(built)
        try:
            peak = self._peak_bytes(built)
            fits = self._fits(built, peak)
            if not fits and self._outgrows(built):
                built = self._regrown(built)
                peak = self._peak_bytes(built)
                fits = self._fits(built, peak)
            if not fits and built.candidate.name != STOCK:
                self._note(built, LARGE, self._why_large(built), peak=peak)
                return self._drop(built)
            timed = self._raced(built)
        except Exception as error:
            self.track.restore()
            if not again and self._mended_best():  # it was not this one that failed
                return self._judge(built, rung, again=True)
            self._note(built, FAILED, why_failed(error))
            return self._drop(built)
        against = compare(timed[self.best.candidate.name], timed[built.candidate.name])
        comparison = self._over_eager(timed, built)
        shown: dict[str, Any] = {"timed": timed[built.candidate.name], "comparison": comparison, "peak": peak,
                                 "predicted": rung.predicted_s}  # fmt: skip
        if not fits:  # the rival is timed whatever it needs, so that everybody sees what was not taken
            self._note(built, LARGE, self._why_large(built), **shown)
            return self._drop(built)
        simpler = built.candidate.complexity < self.best.candidate.complexity and not against.slower
        if against.faster or simpler or self._leaner(built, against) or self._hopeful(against):
            verdict = self._proved(built)
            if not verdict:
                self._note(built, WRONG, verdict.reason, verdict=verdict, **shown)
                return self._drop(built)
            if self._stands_out(built, verdict):
                self._note(built, WRONG, STANDS_OUT, verdict=verdict, **shown)
                return self._drop(built)
            return self._crown(built, against, verdict, shown)
        status = SLOWER if against.slower else EQUAL
        word = "slower than" if against.slower else "no faster beyond noise than"
        reason = f"{word} {self.best.candidate.name} ({against.speedup:.3f}×){_unreplayed(built.call)}"
        self._note(built, status, reason, **shown)
        self._keep_or_drop(built)
        return None

    def _stands_out(self, built: Built, verdict: Verdict) -> bool:
        """Whether a result as right as eager's is not eager's to whoever compares the two, and the better rival's is.

        Convolutions that round in a way of their own are 1e-4 apart, sums of products in another order too where they
        cancel: 18 of 242 problems of KernelBench were returned so, of which torch.compile agrees with eager in some.
        """
        return self.compared and not (verdict.like_eagers or as_stock(built) or self.problem.error_budget)

    def _leaner(self, built: Built, against: Comparison) -> bool:
        """Whether it does what torch.compile does, no later, past its guards: our look at a call comes in their place
        there, and on top of them where torch.compile itself is handed over."""
        least = SAME_FRAC if as_stock(built) else 1.0  # the same kernels: less is noise
        return self.best.candidate.name == STOCK and built.call.__class__ is Shortcut and against.speedup >= least

    def _hopeful(self, against: Comparison) -> bool:
        """Whether it seems ahead of eager by what few rounds of a busy device do not show: the last race will tell.

        Whisper's recorded step, ten percent ahead where other work took the device by turns, was put aside as no faster
        beyond noise, and nothing else was left to return but eager.
        """
        training = self.best is self.eager and self.problem.mode == "train"
        return training and against.seems_apart and against.speedup > 1.0

    def _is_eager(self, built: Built) -> bool:
        """Whether it was made to be rewritten and nothing was: then it is eager code behind a tracer."""
        return bool(built.candidate.rewrites) and built.candidate.compiler == "none" and not built.report.matches

    def _crown(self, built: Built, against: Comparison, verdict: Verdict, shown: dict[str, Any]) -> None:
        before = self.best
        entry = self.entries[before.candidate.name]
        reason = f"{built.candidate.name} is {against.speedup:.2f}× as fast"
        self.entries[before.candidate.name] = replace(entry, status=BEATEN, reason=reason)
        self.best = built
        if built.candidate.name == PLAIN:
            self.plain = built.candidate
        self._note(built, WINNER, "", verdict=verdict, **shown)
        self.steps.append(Step(built.candidate.name, self.eager_s / shown["comparison"].speedup))
        self._keep_or_drop(before)
        self._keep_or_drop(built)

    def _keep_or_drop(self, built: Built) -> None:
        if built.candidate.name == "torch.compile":
            self.stock = built
        if built is not self.best and built is not self.stock and built is not self.eager:
            self._drop(built)

    def _drop(self, built: Built) -> None:
        """Let go of a loser's graph; compiled code is kept until the end, another candidate may stand on it."""
        if built is not self.stock and built is not self.eager:
            built.release()

    def _peak_bytes(self, built: Built) -> int | None:
        with built.switched() as call:
            extra = self.track.extra_bytes(call)
        return None if extra is None else self.base_bytes + built.kept_bytes + extra

    def _raced(self, built: Built) -> dict[str, Timed]:
        """A race; where it cannot tell and the two seem apart, it goes on: few rounds of a busy machine say little."""
        before, own = self.best.candidate.name, built.candidate.name
        runners = {before: self.best, own: built}
        if self.eager_s * 3 * 7 < 2 * self._race_s():
            runners["eager"] = self.eager
        timed = self.track.race(runners, self._race_s(), [(before, own)])
        against = compare(timed[before], timed[own])
        if against.decided or not against.seems_apart or self.left_s() < self._reserve_s():
            return timed
        more = self.track.race(runners, 2 * self._race_s(), [(before, own)], least_rounds=LAST_ROUNDS)
        return {name: Timed(timed[name].seconds + more[name].seconds) for name in timed}

    def _over_eager(self, timed: dict[str, Timed], built: Built) -> Comparison:
        if "eager" in timed:
            return compare(timed["eager"], timed[built.candidate.name])
        speedup = self.eager_s / timed[built.candidate.name].median_s
        return Comparison(speedup, speedup, speedup, 0)

    def _proved(self, built: Built) -> Verdict:
        try:
            prover = self.prover
            stock = as_stock(built) or built.candidate.compiler.startswith("stock")
            budget = (self.problem.error_budget or 0.0) if built.candidate.narrow or stock else 0.0
            with built.switched() as call:
                rounded = stock and self._rounds()
                return prover.judge(call, max(budget, STOCK_FRAC) if stock else budget, rounded=rounded)
        except Exception as error:  # whatever keeps it from being proved keeps it from being returned
            return unproved(f"could not be proved: {why_failed(error)}")
        finally:
            self.track.restore()

    def _rounds(self) -> bool:
        """Whether PyTorch may round convolutions of this model to TensorFloat-32, as it does unless told otherwise.

        Which of them it rounds is cuDNN's choice by their layout, and its compiler lays them channels last: a network
        whose first one eager takes in float32 (RegNet's, 3 channels) is 1e-4 off there, and 1.4 times as fast.
        """
        layers = [m for m in self.problem.model.modules() if isinstance(m, nn.modules.conv._ConvNd)]
        wide = any(layer.weight.dtype is torch.float32 for layer in layers)
        return wide and self.problem.mode == "infer" and convolutions_round()

    def _recapture(self) -> None:
        """Graphs hold the addresses of weights: those captured before a candidate moved them are captured again."""
        problem = self.problem
        for built in {id(b): b for b in (self.best, self.stock) if b is not None and b.candidate.holds_places}.values():
            try:
                if built.moved(problem.model):
                    capture_again(built, problem.model, problem.inputs, problem.mode, problem.loss)
            except Exception as error:  # it was captured once and cannot be now: it is out of the race
                self._unseat(built, f"could not be captured again: {why_failed(error)}")
            finally:
                self.track.restore()

    def _mended_best(self) -> bool:
        """Whether the best so far is what failed in a race; it is recorded anew, or makes room for the next best.

        Whatever is raced against one that no longer works fails too: a recording that a later capture had broken was
        named in the receipts of eight candidates, torch.compile among them, and eager was returned (H200).
        """
        if self.best is self.eager or not (why := self._fails(self.best)):
            return False
        name = self.best.candidate.name
        if self.best.candidate.graphed:
            self._capture_again(self.best)
            if not self._fails(self.best):
                self.notes.append(f"{name} failed after it had worked, and was recorded again: {why}")
                return True
        self._unseat(self.best, f"failed after it had worked: {why}")
        return True

    def _fails(self, built: Built) -> str:
        """Why a contender cannot take a turn now; nothing where it can."""
        try:
            with built.switched() as call:
                self.track.turn_s(call, 1)
        except Exception as error:
            return why_failed(error)
        finally:
            self.track.restore()
        return ""

    def _unseat(self, built: Built, why: str) -> None:
        """One that was measured no longer works; if it was the best, the next best that needs nothing takes its
        place."""
        name = built.candidate.name
        self.entries[name] = replace(self.entries[name], status=FAILED, reason=why)
        if built is self.stock:
            self.stock = None
        if built is self.best:
            self._fall_back()

    def _fall_back(self) -> None:
        """Eager takes the place of the best, recorded where that was right and faster."""
        self.best = self.eager
        self.entries["eager"] = replace(self.entries["eager"], status=WINNER, reason="")
        if self.plain is not None and self.entries[PLAIN].status == BEATEN:
            self._record_eager(self.plain)

    def _race_s(self) -> float:
        return min(MOST_RACE_S, max(LEAST_RACE_S, RACE_FRAC * self.problem.budget_s))

    def _reserve_s(self) -> float:
        """Seconds to keep for proving and for the last race."""
        budget_s = self.problem.budget_s
        proving_s = 0.0 if self._prover else 2 * REFERENCE_TIMES * min(self.eager_s, 0.1)
        tracking_s = TRACK_TIMES * STEPS * self.eager_s if self.problem.mode == "train" else 0.0
        kept_s = min(proving_s, 0.2 * budget_s) + min(tracking_s, TRACK_FRAC * budget_s)
        narrow_s = NARROW_FRAC * budget_s if self.problem.error_budget and not self.narrowing else 0.0
        return LAST_RACE_FRAC * budget_s + 20 * self.eager_s + kept_s + narrow_s

    def _least_s(self) -> float:
        """Seconds without which nothing could be returned that was compared in the end."""
        steps = LEAST_STEPS if self.problem.mode == "train" else 0
        return LAST_RACE_FRAC * self.problem.budget_s + (20 + TRACK_TIMES * steps) * self.eager_s

    def _note(
        self,
        built: Built,
        status: str,
        reason: str,
        *,
        timed: Timed | None = None,
        comparison: Comparison | None = None,
        peak: int | None = None,
        verdict: Verdict | None = None,
        predicted: float | None = None,
        price: float | None = None,
    ) -> None:
        candidate, report = built.candidate, built.report
        self.entries[candidate.name] = Entry(
            name=candidate.name, changes=tuple(candidate.changes(report.counts() if built.build_s else None)),
            status=status, reason=reason,
            predicted_s=predicted, price_s=price, build_s=built.build_s or None,
            measured_s=timed.median_s if timed else None, low_s=timed.low_s if timed else None,
            high_s=timed.high_s if timed else None, speedup=comparison.speedup if comparison else None,
            speedup_low=comparison.low if comparison else None, speedup_high=comparison.high if comparison else None,
            peak_bytes=peak, verdict=verdict.to_dict() if verdict else None, rewrites=report.counts(),
            places={name: sorted(set(report.places(name)))[:50] for name in report.counts()},
            breaks=dict(report.breaks), recompiles=report.recompiles,
        )  # fmt: skip

    # The end: the last race, and what it says.

    def _finish(self) -> Outcome:
        with self._lap("the winner's last proofs"):
            self._slim()
            self._stilled()
            self._tracked()
        with self._lap("the last race"):
            timed, stock = self._last_race()
        self._tell_memory()
        eager, best = timed["eager"], timed[self.best.candidate.name]
        over_eager = compare(eager, best)
        rivals = [eager, *([timed[stock.candidate.name]] if stock else [])]
        strongest = min(rivals, key=lambda each: each.median_s)
        self._price_late()
        with self._lap("telling time by part"):
            regions, parts = self._regions(stock), self._parts(eager, best)
        self._settle_winner()
        self._tell_overrun()
        receipt = self._receipt(eager, best, timed.get("torch.compile"), over_eager, compare(strongest, best).speedup)
        return Outcome(self.best, explained(replace(receipt, regions=regions, parts=parts), self.problem.inputs))

    def _last_race(self) -> tuple[dict[str, Timed], Built | None]:
        """Winner, eager and torch.compile once more, in turns; the winner may change here."""
        self._recapture()
        self._renew_histories()
        runners = {"eager": self.eager}
        if self.stock is not None:
            runners[self.stock.candidate.name] = self.stock
        budget_s = max(LEAST_RACE_S, min(2 * MOST_RACE_S, LAST_RACE_FRAC * self.problem.budget_s))
        try:
            if self.best is not self.eager:
                runners[self.best.candidate.name] = handed(self.problem, self.best, self.asked)
            timed = self.track.race(runners, budget_s, least_rounds=LAST_ROUNDS)
            if self._overturns(timed):
                more = self.track.race(runners, budget_s, least_rounds=LAST_ROUNDS)
                timed = {name: Timed(each.seconds + more[name].seconds) for name, each in timed.items()}
        except Exception as error:  # what cannot be handed over is out; whoever is left races again
            self.track.restore()
            if not self._unseat_broken(why_failed(error)):
                raise
            return self._last_race()
        looped = self._whole_steps(budget_s)
        before = {name: self.entries[name].speedup for name in runners}
        self._show_last(timed)
        self._give_way(looped or timed, "the last race, of whole steps," if looped else "the last race", before)
        self._restate(timed)
        tried = AS_IT_IS in self.entries and self.entries[AS_IT_IS].status != SKIPPED
        if self.best is self.stock and not tried and self._feels_guards(timed[STOCK]):
            timed |= self._past_guards()
        return timed, self.stock

    def _overturns(self, timed: dict[str, Timed]) -> bool:
        """Whether eager would take the place of a winner that was ahead of it beyond noise when it was tried, by what
        few rounds of a busy machine do not show: then as many again are raced.

        Simulated with turns that others slow to 1.5 or 2 times at random: of races of twelve rounds one in ten put
        eager before what is 1.3 times as fast, and one in five before 1.15 times; with as many again 1.5 and 4 %.
        """
        if self.best is self.eager or (self.entries[self.best.candidate.name].speedup_low or 0.0) <= 1.0:
            return False
        against = compare(timed[self.best.candidate.name], timed["eager"])
        return not against.faster and (against.ahead or self._hardly_gains(timed))

    def _show_last(self, timed: dict[str, Timed]) -> None:
        """Those that were in the last race are shown with what they took there, which is what decides."""
        for name, each in timed.items():
            gain = compare(timed["eager"], each)
            self.entries[name] = replace(
                self.entries[name], measured_s=each.median_s, low_s=each.low_s, high_s=each.high_s,
                speedup=gain.speedup, speedup_low=gain.low, speedup_high=gain.high, last=True)  # fmt: skip

    def _restate(self, timed: dict[str, Timed]) -> None:
        """Those the winner had beaten when it was tried are behind by what the last race says."""
        winner = self.best.candidate.name
        for name in timed.keys() - {winner}:
            if self.entries[name].reason.startswith(f"{winner} is "):
                reason = f"{winner} is {compare(timed[name], timed[winner]).speedup:.2f}× as fast"
                self.entries[name] = replace(self.entries[name], reason=reason)

    def _tell_overrun(self) -> None:
        """Where the budget was exceeded, by how much and by what: what took longer than expected first."""
        over_s = -self.left_s()
        if over_s <= (OVER_FRAC - 1) * self.problem.budget_s:
            return
        costly = sorted(self.laps, key=lambda lap: (lap.price_s or 0.0) - lap.spent_s)[:MOST_CAUSES]
        causes = "; ".join(str(lap) for lap in costly if lap.spent_s > 0.1 * over_s)
        self.notes.append(f"{OVERRAN} {over_s:.1f} s over its {self.problem.budget_s:.0f} s: {causes}")

    def _unseat_broken(self, why: str) -> bool:
        """Those that can take no turn by themselves are out; where all can, the best, which could not be handed over.

        Whether there was one.
        """
        suspects = [each for each in (self.best, self.stock) if each is not None and each is not self.eager]
        broken = {id(each): (each, found) for each in suspects if (found := self._fails(each))}
        for each, found in list(broken.values()) or [(each, why) for each in suspects[:1]]:
            self._unseat(each, f"failed in the last race: {found}")
        return bool(suspects)

    def _renew_histories(self) -> None:
        """Recordings that failed may leave nodes behind that gather gradients on the stream of recordings.

        Whatever is called afterwards waits for that stream and is waited for, parameter by parameter.
        """
        tried = [entry for name, entry in self.entries.items() if name == PLAIN or name.endswith(GRAPHED)]
        if self.problem.mode == "train" and any(entry.status == FAILED for entry in tried):
            gc.collect()
            renew_accumulators(self.track.parameters)

    def _whole_steps(self, budget_s: float) -> dict[str, Timed]:
        """The same as a loop runs them, with an update in every step, each as it would be handed over.

        Forward and backward alone say little where an update holds up the host too: what hides behind the device's
        work in one is in everybody's way in the other. Nothing where steps cannot be taken so.
        """
        built = {each.candidate.name: each for each in (self.eager, self.stock, self.best) if each is not None}
        if self.problem.mode != "train" or len(built) < 2:
            return {}
        runners = {name: handed(self.problem, each, self.asked) for name, each in built.items()}
        try:
            with updating(self.track, self.problem.optimizer, runners) as (name, updated):
                found = self.track.race(updated, budget_s, least_rounds=LAST_ROUNDS, least_calls=LOOP_STEPS)
        except Exception as error:  # no memory for its state, gradients that it does not take
            self.notes.append(f"whole steps were not compared: {why_failed(error)}")
            return {}
        finally:
            self.track.restore()
        shown = ", ".join(f"{who} {1e3 * timed.median_s:.3g} ms" for who, timed in found.items())
        self.notes.append(f"whole steps with {name}: {shown}")
        return found

    def _feels_guards(self, timed: Timed) -> bool:
        """Whether torch.compile's guards and our look on top of them show in a call, and its code is made in time.

        What it compiled is remembered: a fraction of that. A second late is well spent; a search of 5 s in a new
        process, which took eight for what it imported, ends.
        """
        budget_s = self.problem.budget_s
        made = self.best.build_s < budget_s and self.left_s() > -LATE_FRAC * budget_s
        inference = self.problem.mode == "infer" and self.problem.device.type == "cuda"
        return inference and made and timed.median_s < MOST_GUARDED_S

    def _past_guards(self) -> dict[str, Timed]:
        """torch.compile's code past its guards in its place, where it came to lead in the last race alone, or where no
        time was left: a convolution of 1.29 ms was returned 19 µs slower for want of that second (KernelBench 2/11)."""
        candidate = Candidate(name=AS_IT_IS, compiler="inductor", straight=True)
        built = Built(candidate, self.problem.model, Report())
        try:
            built = self._built(candidate)
            both = {each.candidate.name: handed(self.problem, each, self.asked) for each in (self.best, built)}
            timed = self.track.race({"eager": self.eager, **both}, self._race_s(), least_rounds=LAST_ROUNDS)
        except Exception as error:  # what cannot be built or timed changes nothing
            self.track.restore()
            self._note(built, FAILED, why_failed(error))
            return {}
        against, shown = compare(timed[STOCK], timed[AS_IT_IS]), timed[AS_IT_IS]
        if against.speedup < SAME_FRAC or built.call.__class__ is not Shortcut or not (verdict := self._proved(built)):
            why = f"slower than torch.compile ({against.speedup:.3f}×), more than one graph or not proved"
            self._note(built, EQUAL, why, timed=shown)
            return {}
        self._note(built, WINNER, "", timed=shown, verdict=verdict, comparison=compare(timed["eager"], shown))
        why = f"{AS_IT_IS} is {against.speedup:.2f}× as fast"
        self.entries[STOCK] = replace(self.entries[STOCK], status=BEATEN, reason=why)
        self.best = built
        self._show_last(timed)
        return timed

    def _give_way(self, timed: dict[str, Timed], race: str, tried: dict[str, float | None]) -> None:
        """A rival that is ahead of the winner takes its place: rivals are simpler, and win where a race cannot tell.

        ``tried`` are their speeds over eager from when each was tried.
        """
        before, own = self.best.candidate.name, timed[self.best.candidate.name]
        rivals = [built for built in (self.stock, self.eager) if built is not None and built is not self.best]
        found = [(compare(own, timed[built.candidate.name]), built) for built in rivals]
        found = [(against, built) for against, built in found if not self._is_itself(built, against)]
        for against, built in sorted(found, key=lambda pair: -pair[0].speedup):
            barred = self._barred(built) if against.ahead else ""
            if built is self.eager and not against.ahead and self._hardly_gains(timed):
                why = f"in {race} no faster beyond noise than eager ({1 / against.speedup:.3f}×)"
                self._hand_over(before, built, why + _tried(tried[before]))
                return
            if barred:
                said = f"{built.candidate.name} was {_ahead_by(against)} in {race} and is not returned"
                self.notes.append(f"{said}: {barred}")
            elif against.ahead:
                why = f"in {race} {built.candidate.name} was {_ahead_by(against)}"
                self._hand_over(before, built, why + _tried(tried[before]))
                return

    def _is_itself(self, rival: Built, against: Comparison) -> bool:
        """Whether the winner is this rival past its guards: as far as the race sees them apart it is noise, and behind
        our look the rival would be called with its guards on top."""
        lean = self.best.call.__class__ is Shortcut and as_stock(self.best)
        return lean and rival is self.stock and against.speedup * SAME_FRAC <= 1.0

    def _hardly_gains(self, timed: dict[str, Timed]) -> bool:
        """Whether the winner gains so little over eager in the last race that another day it may lose it."""
        gain = compare(timed["eager"], timed[self.best.candidate.name])
        return max(gain.speedup, gain.undisturbed) < 1.0 + LEAST_GAIN_FRAC

    def _hand_over(self, before: str, built: Built, why: str) -> None:
        self.entries[before] = replace(self.entries[before], status=BEATEN, reason=why)
        self.best = built
        kept = self.entries[built.candidate.name]
        self.entries[built.candidate.name] = replace(kept, status=WINNER, reason="")

    def _stilled(self) -> None:
        """A random winner once more without dropout, number by number, if the time allows; whoever is wrong goes."""
        built = self.best
        if not self.random or built is self.eager:
            return
        needed_s, left_s = 1.2 * built.build_s + self._race_s(), self.left_s() - self._reserve_s()
        placed = built.candidate.needs_clone and not built.candidate.graphed
        if built.report.undos or placed or built.candidate.layout != "keep":
            self.notes.append("not compared without dropout: the winner lays weights or kernels its own way")
        elif needed_s > left_s:
            self.notes.append(
                f"not compared without dropout: about {needed_s:.0f} s are needed, {max(0.0, left_s):.0f} s left"
            )
        else:
            self._judge_still(built)

    def _judge_still(self, built: Built) -> None:
        problem, before = self.problem, RandomState()
        try:
            with stilled(problem.model) as num:
                if not num or self._draws_random(before):
                    self.notes.append("not compared without dropout: it is not all that is random")
                    return
                subject = Subject(problem.model, problem.inputs, problem.mode, self.track.loss, self.track.state)
                prover = Prover(subject, num_inputs=1)
                twin = self._made(built.candidate, None)
                with twin.switched() as call:
                    verdict = prover.judge(call)
                twin.undo()
        except Exception as error:  # it was judged by its means and spreads: this would have been more
            self.notes.append(f"not compared without dropout: {why_failed(error)}")
            return
        finally:
            before.restore()
            self.track.restore()
        self.notes.append(f"without dropout: {verdict}")
        if not verdict:
            self._strike(f"without dropout {verdict.reason}", verdict)

    def _strike(self, why: str, verdict: Verdict | None = None) -> None:
        """The winner is wrong: eager takes its place."""
        entry = self.entries[self.best.candidate.name]
        shown = verdict.to_dict() if verdict else entry.verdict
        self.entries[self.best.candidate.name] = replace(entry, status=WRONG, reason=why, verdict=shown)
        self.best.release()
        self._fall_back()

    def _record_eager(self, plain: Candidate) -> None:
        try:
            self.best = self._made(plain, None)
        except Exception as error:  # it was recorded before, and need not be
            self.track.restore()
            self.notes.append(f"{plain.name} could not be recorded again: {why_failed(error)}")
            return
        for name, status in (("eager", BEATEN), (PLAIN, WINNER)):
            self.entries[name] = replace(self.entries[name], status=status, reason="")

    def _tracked(self) -> None:
        """In training, a run of steps beside eager's, if the time allows; whoever strays is not returned."""
        if self.problem.mode != "train" or self.best is self.eager:
            return
        least_s = TRACK_TIMES * LEAST_STEPS * self.eager_s  # a proof of few steps is made late, too
        left_s = max(self.left_s(), min(least_s, TRACK_FRAC * self.problem.budget_s))
        steps = min(STEPS, int(left_s / (TRACK_TIMES * self.eager_s)))
        if steps < LEAST_STEPS:
            needed_s = TRACK_TIMES * LEAST_STEPS * self.eager_s
            self.notes.append(f"no run of steps: {LEAST_STEPS} take about {needed_s:.0f} s, {left_s:.0f} s are kept")
            return
        problem, track_ = self.problem, self.track
        try:
            with self.best.switched() as call:
                found = track(problem.model, call, problem.inputs, track_.loss, track_.state, steps)
        except torch.OutOfMemoryError:
            self.notes.append("no run of steps: an optimizer's state does not fit beside the model")
            return
        except Exception as error:  # as it would in a loop
            self._strike(f"fails in training: {why_failed(error)}")
            return
        finally:
            track_.restore()
        self.notes.append(str(found))
        if not found.ok:
            self._strike(f"strays in training: {found}")

    def _barred(self, built: Built) -> str:
        """Why a rival cannot be returned: beyond the limits, or not proved; eager always can."""
        if built is self.eager:
            return ""
        if not self._fits(built, self.entries[built.candidate.name].peak_bytes):
            return f"it needs too much memory: {self._why_large(built)}"
        verdict = self._proved(built)
        return "" if verdict else f"{verdict.reason or 'it could not be proved'}{_allowing(verdict)}"

    def _fits(self, built: Built, peak: int | None) -> bool:
        """Within the limit; a graph's pool has gaps, and may be what eager's own pool grows to, and no more."""
        if peak is None or not self.limit_bytes:
            return True
        if self.problem.memory_limit_bytes is None and built.candidate.graphed:
            return peak <= self.limit_bytes or built.reserved_bytes <= self.eager_reserved + WORKSPACE_BYTES
        return peak <= MEMORY_SLACK * self.limit_bytes

    def _tell_memory(self) -> None:
        """A pool is compared with what eager's allocator holds, not with what eager uses of that: say so."""
        peak = self.entries[self.best.candidate.name].peak_bytes
        if self.best.candidate.graphed and peak is not None and self.problem.mode == "train":
            held, eager = self.best.reserved_bytes / 1e9, self.eager_reserved / 1e9
            self.notes.append(f"memory: {held:.2f} GB reserved with its graphs, gaps included, {eager:.2f} GB by eager;"
                              " peak memory is what is allocated, and of graphs all that they reserve")  # fmt: skip

    def _why_large(self, built: Built) -> str:
        limit = f"{(self.limit_bytes or 0) / 1e9:.2f} GB"
        if self.problem.memory_limit_bytes is not None:
            return f"the limit is {limit}"
        if not built.candidate.graphed:
            return f"training must not need more than eager does, {limit}"
        return (f"training must not need more than eager does: {built.reserved_bytes / 1e9:.2f} GB reserved with its "
                f"graphs, {self.eager_reserved / 1e9:.2f} by eager")  # fmt: skip

    def _regions(self, stock: Built | None) -> tuple[Any, ...]:
        if self.problem.device.type != "cuda" or self.left_s() < 10 * self.eager_s:
            return ()
        try:
            return regions_of(self.track, self.eager, self.best, stock)
        except Exception as error:  # a profiler that cannot record takes nothing from the result
            self.notes.append(f"no breakdown by kind of kernel: {why_failed(error)}")
            return ()
        finally:
            self.track.restore()

    def _parts(self, eager: Timed, best: Timed) -> tuple[Part, ...]:
        """Time by part of the model, if there is time to record a call of each."""
        if self.left_s() < 20 * self.eager_s:
            self.notes.append("no breakdown by part of the model: no time was left to record it")
            return ()
        floors = self.forecast.floors if self.forecast else None
        try:
            return parts_of(self.track, self.eager, self.best, (eager.median_s, best.median_s), floors)
        except Exception as error:  # as above
            self.notes.append(f"no breakdown by part of the model: {why_failed(error)}")
            return ()
        finally:
            self.track.restore()

    def _narrow_rows(self) -> tuple[Narrow, ...]:
        chosen = self.choices.get(self.best.candidate.narrow, {})
        if self.study is None or not chosen:
            return ()
        self.notes.append(self.study.summary(chosen))
        return self.study.rows(chosen)

    def _settle_winner(self) -> None:
        """Only the winner stays, switched on."""
        if not self.best.report.undos:  # else weights lie as the winner wants them, and stay
            for built in self.families.values():
                if built.report is not self.best.report:
                    built.undo()
        self._recapture()
        self.best.forget_trials()
        self._renew_histories()
        self.track.restore()

    def _floor_s(self, final_s: float) -> float | None:
        """The floor of the model as it is written; none where a rewrite does with less work than that."""
        if self.forecast is None or self.forecast.floor_s <= final_s:
            return self.forecast.floor_s if self.forecast else None
        written_ms = 1e3 * self.forecast.floor_s
        self.notes.append(f"no floor: as the model is written it is {written_ms:.3g} ms, and the result does less work")
        return None

    def _receipt(
        self, eager: Timed, best: Timed, stock: Timed | None, over_eager: Comparison, over_best: float
    ) -> Receipt:
        problem, winner = self.problem, self.entries[self.best.candidate.name]
        floor_s = self._floor_s(best.median_s)
        scale = eager.median_s / self.eager_s  # rungs were measured at other times: all are shown beside one eager
        between = [Step(step.name, scale * step.measured_s) for step in self.steps[1:]
                   if best.median_s < scale * step.measured_s and step.name != self.best.candidate.name]  # fmt: skip
        last = [Step(self.best.candidate.name, best.median_s)] if self.best is not self.eager else []
        return Receipt(
            model=type(problem.model).__name__, mode=problem.mode, device=device_name(problem.device),
            inputs=described(problem.inputs), environment=environment(), winner=winner.name, changes=winner.changes,
            eager_s=eager.median_s, final_s=best.median_s, stock_s=stock.median_s if stock else None,
            speedup=over_eager.speedup, speedup_low=over_eager.low, speedup_high=over_eager.high, over_best=over_best,
            floor_s=floor_s, eager_bytes=self.eager_bytes, final_bytes=winner.peak_bytes,
            memory_limit_bytes=self.limit_bytes, budget_s=problem.budget_s,
            spent_s=time.perf_counter() - self.began, verdict=winner.verdict, entries=tuple(self.entries.values()),
            steps=(Step("eager", eager.median_s), *between, *last),
            forecast=self.forecast.to_dict() if self.forecast else None, asked=self.asked,
            error_budget=problem.error_budget, narrowed=self._narrow_rows(),
            searched_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            notes=(*self.notes, *(self._prover.notes if self._prover else ())),
        )  # fmt: skip


def _allowing(verdict: Verdict) -> str:
    """The budget within which a result that is less accurate than eager's would be returned; none for a wrong one."""
    if not verdict.allowed_rms_frac < verdict.rms_frac < MOST_ROUNDING:
        return ""
    return f"; within error_budget={1.5 * verdict.rms_frac:.0e} it would be"


def _unreplayed(call: Any) -> str:
    """Why a recorded call mostly ran as it was written, if it did."""
    misses: dict[str, int] = getattr(call, "misses", None) or {}
    if sum(misses.values()) <= getattr(call, "replays", 0):
        return ""
    return f"; recorded, and not replayed: {max(misses, key=lambda reason: misses[reason])}"


def as_stock(built: Built) -> bool:
    """Whether what runs is what torch.compile makes: its own, or what Inductor makes where no rewrite matched."""
    found = built.candidate if built.report.matches else replace(built.candidate, rewrites=())
    return found.is_stock


def _kept(device: torch.device) -> tuple[int, int]:
    """Bytes in use and reserved without the workspaces of products, which come back with the next of them.

    Those of eager are in what rests beside it: counted once more, 67 MB, they kept torch.compile from a small model.
    """
    reserved = reserved_bytes(device)  # which gives them back
    return held_bytes(device), reserved


def _family(candidate: Candidate) -> Candidate:
    """What was compiled for a candidate: all of it but its recording."""
    return replace(candidate, name="", graphed=False, tries_convolutions=False, grows=False, guesses=False)


def _equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def _tried(speedup: float | None) -> str:
    """What a candidate gained when it was tried, before it was called as a person calls it."""
    return "" if speedup is None else f"; {speedup:.2f}× eager when tried, without our look at every call"


def _ahead_by(against: Comparison) -> str:
    if against.speedup >= against.undisturbed:
        return f"{against.speedup:.2f}× as fast"
    return f"{against.speedup:.2f}× as fast, and {against.undisturbed:.2f}× in its fastest rounds"


def explained(receipt: Receipt, inputs: Inputs) -> Receipt:
    """The receipt with its sentences."""
    return replace(receipt, explanations=tuple(explanations(receipt, inputs)), remaining=tuple(remaining(receipt)))


@contextlib.contextmanager
def _undisturbed(budget_s: float) -> Iterator[None]:
    """Rubbish is looked for among what the search makes: half a second less for each of dozens of collections."""
    for name in COMPILERS if budget_s >= COMPILING_S else ():
        importlib.import_module(name)
    own = gc.get_freeze_count() < FROZEN_BY_PYTHON  # else somebody has reasons of their own
    if own:
        gc.collect()
        gc.freeze()
    try:
        yield
    finally:
        if own:
            gc.unfreeze()


def compile_threads() -> int:
    """Processes that Inductor compiles in; where nobody has imported it, as many as it would take.

    To ask it would import it, and PyTorch's tracer with it: 5.0 s of a search of five (H200).
    """
    config = sys.modules.get("torch._inductor.config")
    if config is not None:
        return max(1, int(config.compile_threads or 1))
    asked = os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", "")
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(asked)) if asked.isdigit() else min(MOST_COMPILE_THREADS, usable)


def plans_of(problem: Problem, built: Built) -> list[Plan]:
    """What the drop-in runs for calls like the one that was optimized; eager needs no plan."""
    if built.candidate.name == "eager":
        return []
    signature = Signature.of(
        problem.inputs.args, dict(problem.inputs.kwargs), problem.model, grad=problem.mode != "infer"
    )
    watch = clone_watch(problem.model) if built.candidate.needs_clone else None
    return [Plan(signature, built.call, built.candidate.name, watch=watch)]


def clone_watch(model: nn.Module) -> Watch:
    """What must not change for a clone of a model to compute what the model does; weights may, which they share."""
    return Watch(model, shared_weights=True)


def handed(problem: Problem, built: Built, asked: tuple[str, ...] = ()) -> Built:
    """The candidate as a person will call it, with the look at every call's arguments that comes before it."""
    if built.candidate.name == "eager":
        return built
    mode = "inference" if problem.mode == "infer" else "train"
    return replace(built, call=Optimized(problem.model, plans_of(problem, built), mode=mode, asked=asked))


def given_up(problem: Problem, reason: str) -> Outcome:
    """The model itself, with a receipt that says why nothing was tried."""
    receipt = Receipt(
        model=type(problem.model).__name__, mode=problem.mode, device=device_name(problem.device),
        inputs=described(problem.inputs), environment=environment(), winner="eager", changes=("nothing",),
        eager_s=0.0, final_s=0.0, stock_s=None, speedup=1.0, speedup_low=1.0, speedup_high=1.0, over_best=1.0,
        floor_s=None, eager_bytes=None, final_bytes=None, memory_limit_bytes=problem.memory_limit_bytes,
        budget_s=problem.budget_s, spent_s=0.0, verdict=None, entries=(), steps=(), notes=(reason,),
    )  # fmt: skip
    return Outcome(Built(Candidate(name="eager"), problem.model, Report()), receipt)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def substitutable(model: nn.Module, device: torch.device) -> tuple[str, ...]:
    """The parts of this model that kernels can be put in place of."""
    if device.type != "cuda":
        return ()
    from ridgeline.optimizer.in_place.substitution import PARTS, apply

    found = []
    for part in PARTS:
        with contextlib.suppress(Exception):  # a part that cannot be recognized stays as it is
            if apply(shallow_clone(model), (part,)).replaced:
                found.append(part)
    return tuple(found)


def described(inputs: Inputs) -> str:
    """Shapes and types, the largest few."""
    shown = sorted(inputs.named(), key=lambda pair: -pair[1].numel())
    text = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for _, t in shown[:4]]
    return ", ".join(text) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


def why_failed(error: BaseException) -> str:
    """An error in one line; of an error that wraps another, what the other says."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith("raised:"):
        return lines[1][:240]
    found = f"{type(error).__name__}: {lines[0][:240]}" if lines else type(error).__name__
    unclear = isinstance(error, (TypeError, AttributeError, AssertionError, LookupError))
    return found + raised_in(error) if unclear else found


def raised_in(error: BaseException) -> str:
    """The last line of the model's own code that an error passed through; of any code where none is."""
    frames, at = [], error.__traceback__
    while at is not None:
        frames.append((at.tb_frame.f_code.co_filename, at.tb_lineno))
        at = at.tb_next
    own = [each for each in frames if not library(each[0]) and not installed(each[0])]
    file, line = (own or frames or [("", 0)])[-1]
    return f" ({'/'.join(Path(file).parts[-3:])}:{line})" if file else ""


def search(problem: Problem) -> Outcome:
    """The best way to run a model within a budget; what it leaves of the model is the winner's."""
    if problem.budget_s <= 0:
        raise OptimizeError(f"budget_s is {problem.budget_s}: give the search some seconds")
    return Search(problem).run()
