"""The seconds of a search: what is left of them, what is kept for its end, and what a candidate may take."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ridgeline.optimizer.receipt import (
    OVERRAN,
)
from ridgeline.optimizer.search.facts import (
    AS_IT_IS,
    COMPILING_S,
    DEFAULT_BUDGET_S,
    PLAIN,
    STOCK,
    Proposal,
)
from ridgeline.optimizer.search.loss_curve import LEAST_STEPS, STEPS
from ridgeline.optimizer.search.order import Stages
from ridgeline.optimizer.search.prices import CAPTURE_S

if TYPE_CHECKING:
    from ridgeline.optimizer.search.search import Search


RACE_FRAC, LAST_RACE_FRAC = 0.02, 0.06
"""Shares of the budget for one candidate's race and for the last one."""
LEAST_RACE_S, MOST_RACE_S = 0.3, 4.0
REFERENCE_TIMES = 40
"""A call in float64 takes about this many of eager's."""
TRACK_TIMES = 3.0
"""Steps of the optimizer and both runs, in eager calls."""
TRACK_FRAC = 0.15
"""Share of the budget that is kept for them, and taken where nothing is left of it."""
RESERVE_FRAC = 0.5
"""Of a short budget for a slow model, proofs and races would take everything: half is for candidates."""
LENIENCY, SHORT_TIMES = 1.2, 2.0
QUICK_FRAC = 0.5
"""What takes at most this share of the time left is made without regard to what is kept for torch.compile."""
OVERRUN_FRAC, PRICE_TIMES = 0.4, 1.5
"""By how much of the budget torch.compile may overrun it in training, and how many times too high its price may be."""
NARROW_FRAC = 0.35
"""Of the time, what is kept for fewer bits where they are allowed: measuring layers, building and proving a choice."""
LATE_FRAC = 0.5
"""By how much of the budget a search may be late and still make torch.compile's code past its guards, or go on with
what a C++ compiler takes longer for than its price says."""
OVER_FRAC = 1.05
"""Beyond so much of the budget a receipt says what took it."""
MOST_CAUSES = 3


@dataclass(frozen=True, slots=True)
class Lap:
    """Something that took a part of the budget, and what it was expected to take."""

    what: str
    spent_s: float
    price_s: float | None = None

    def __str__(self) -> str:
        priced = "" if self.price_s is None else f" where {self.price_s:.1f} were expected"
        return f"{self.what} took {self.spent_s:.1f} s{priced}"


class Budget:
    """The clock of one search."""

    def __init__(self, search: Search) -> None:
        self.search, self.began = search, time.perf_counter()
        self.laps: list[Lap] = []

    def left_s(self) -> float:
        return self.search.problem.budget_s - (time.perf_counter() - self.began)

    @contextlib.contextmanager
    def lap(self, what: str, price_s: float | None = None) -> Iterator[None]:
        """What is done here is a part of the budget, and is named if that is exceeded."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.laps.append(Lap(what, time.perf_counter() - began, price_s))

    def spare_s(self, proposal: Proposal, stages: Stages) -> float:
        """Seconds that a candidate may take to make: what is kept for proofs, the last race and torch.compile is not
        spent, except where estimates are rough or the guarantee rests on it."""
        left_s, budget_s = self.left_s(), self.search.problem.budget_s
        reserve_s = min(self.reserve_s(), RESERVE_FRAC * budget_s)
        # Without a compiler seconds gain what compilers take minutes for: torch.compile's share does not hold them up.
        quick = proposal.candidate.compiler == "none" and proposal.cost_s <= max(2 * CAPTURE_S, QUICK_FRAC * left_s)
        owed_s = 0.0 if quick or proposal.cost_s <= 2 * CAPTURE_S else stages.make.owed_s(proposal, self.search)
        spare_s = left_s - reserve_s - owed_s
        compiled = any(built.candidate.compiler != "none" for built in self.search.builds.families.values())
        first = proposal.candidate.compiler != "none" and not compiled  # estimates are rough: the first gets its chance
        first = first or (proposal.candidate.name in (PLAIN, AS_IT_IS) and left_s > 0)  # less of the host, a second
        if first:
            spare_s = max(spare_s, LENIENCY * left_s)
        if proposal.candidate.name != STOCK:
            return spare_s
        if budget_s >= DEFAULT_BUDGET_S:  # whoever asks for nothing else is told how it compares, and may wait for it
            return max(spare_s, proposal.cost_s)
        if stages.is_short:  # a second or two; a new process imports the compiler, for which a few may be exceeded
            return max(spare_s, left_s + (SHORT_TIMES - 1) * budget_s)
        times = LENIENCY if budget_s >= COMPILING_S else 1.0  # a short budget is kept
        return max(spare_s, times * left_s - self.least_s())

    def deadline_s(self) -> float:
        """Seconds after which whatever is made is given up, so that the whole search, on a busy machine, too, takes
        at most a quarter more than its budget, or three seconds: importing PyTorch's compiler takes four."""
        budget_s, steps = self.search.problem.budget_s, LEAST_STEPS if self.search.problem.mode == "train" else 0
        closing_s = 2 * LAST_RACE_FRAC * budget_s + 2 * self.race_s() + (20 + TRACK_TIMES * steps) * self.search.eager_s
        return max(0.0, self.left_s() + max(0.25 * budget_s, 3.0) - closing_s)

    def stock_limit_s(self, proposal: Proposal) -> float | None:
        """Seconds after which a training step's torch.compile is given up; none for others, or in short budgets.

        Its price may be off by a factor of two either way: EfficientNet's took 97 s where 58 were expected (H200).
        """
        training = self.search.problem.mode == "train" and self.search.problem.budget_s >= COMPILING_S
        if proposal.candidate.name != STOCK or not training:
            return None
        return max(0.0, self.left_s() + OVERRUN_FRAC * self.search.problem.budget_s - self.least_s())

    def host_limit_s(self, proposal: Proposal, stages: Stages) -> float | None:
        """Seconds after which what a C++ compiler makes within a short budget is given up; none on a device.

        The first compilation of a machine tries which instructions its compiler knows and makes a header of it, and one
        that is busy takes four times as long: a search of 10 s took 27 (two cores, shared).
        """
        short = self.search.problem.mode == "infer" and self.search.problem.budget_s < COMPILING_S
        if stages.facts.cuda or not short or proposal.candidate.compiler == "none":
            return None
        return max(0.0, self.left_s() + LATE_FRAC * self.search.problem.budget_s)

    def race_s(self) -> float:
        return min(MOST_RACE_S, max(LEAST_RACE_S, RACE_FRAC * self.search.problem.budget_s))

    def reserve_s(self) -> float:
        """Seconds to keep for proving and for the last race."""
        budget_s = self.search.problem.budget_s
        proving_s = 0.0 if self.search._prover else 2 * REFERENCE_TIMES * min(self.search.eager_s, 0.1)
        tracking_s = TRACK_TIMES * STEPS * self.search.eager_s if self.search.problem.mode == "train" else 0.0
        kept_s = min(proving_s, 0.2 * budget_s) + min(tracking_s, TRACK_FRAC * budget_s)
        narrow_s = NARROW_FRAC * budget_s if self.search.problem.error_budget and not self.search.narrowing else 0.0
        return LAST_RACE_FRAC * budget_s + 20 * self.search.eager_s + kept_s + narrow_s

    def least_s(self) -> float:
        """Seconds without which nothing could be returned that was compared in the end."""
        steps = LEAST_STEPS if self.search.problem.mode == "train" else 0
        return LAST_RACE_FRAC * self.search.problem.budget_s + (20 + TRACK_TIMES * steps) * self.search.eager_s

    def tell_overrun(self) -> None:
        """Where the budget was exceeded, by how much and by what: what took longer than expected first."""
        over_s = -self.left_s()
        if over_s <= (OVER_FRAC - 1) * self.search.problem.budget_s:
            return
        costly = sorted(self.laps, key=lambda lap: (lap.price_s or 0.0) - lap.spent_s)[:MOST_CAUSES]
        causes = "; ".join(str(lap) for lap in costly if lap.spent_s > 0.1 * over_s)
        self.search.notes.append(f"{OVERRAN} {over_s:.1f} s over its {self.search.problem.budget_s:.0f} s: {causes}")
