"""The time budget of a search: what is left, what is reserved for the end, and what one candidate may take."""

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
"""Shares of the budget for the race of one candidate and for the last race."""
LEAST_RACE_S, MOST_RACE_S = 0.3, 4.0
REFERENCE_TIMES = 40
"""A float64 call takes about this many eager calls."""
TRACK_TIMES = 3.0
"""Eager calls per step of the training comparison: two runs and their optimizer updates."""
TRACK_FRAC = 0.15
"""Share of the budget reserved for that comparison, and spent on it even if nothing is left."""
LATE_FRAC = 0.5
"""By how much of the budget a search may overrun to call torch.compile's code past its guards, or to let a slow C++
compiler finish."""


@dataclass(frozen=True, slots=True)
class Lap:
    """A timed section of a search, with the time it was expected to take."""

    what: str
    spent_s: float
    price_s: float | None = None

    def __str__(self) -> str:
        priced = "" if self.price_s is None else f" where {self.price_s:.1f} were expected"
        return f"{self.what} took {self.spent_s:.1f} s{priced}"


class Budget:
    """The clock of one search, and the limits that follow from it."""

    def __init__(self, search: Search) -> None:
        self.search, self.began = search, time.perf_counter()
        self.laps: list[Lap] = []

    def left_s(self) -> float:
        return self.search.problem.budget_s - (time.perf_counter() - self.began)

    @contextlib.contextmanager
    def lap(self, what: str, price_s: float | None = None) -> Iterator[None]:
        """Time a section of the search, to be named if the budget is exceeded."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.laps.append(Lap(what, time.perf_counter() - began, price_s))

    def spare_s(self, proposal: Proposal, stages: Stages) -> float:
        """Seconds that building a candidate may take: what is left, less the reserve for proofs, the last race and
        torch.compile, except where estimates are rough or the guarantee depends on it."""
        left_s, budget_s = self.left_s(), self.search.problem.budget_s
        reserve_s = min(self.reserve_s(), 0.5 * budget_s)  # half of a short budget remains for candidates
        # Candidates without a compiler gain in seconds what compilers gain in minutes: nothing is reserved.
        quick = proposal.candidate.compiler == "none" and proposal.cost_s <= max(2 * CAPTURE_S, 0.5 * left_s)
        owed_s = 0.0 if quick or proposal.cost_s <= 2 * CAPTURE_S else stages.make.owed_s(proposal, self.search)
        spare_s = left_s - reserve_s - owed_s
        compiled = any(built.candidate.compiler != "none" for built in self.search.builds.families.values())
        first = proposal.candidate.compiler != "none" and not compiled  # the first estimate is rough: always try one
        first = first or (proposal.candidate.name in (PLAIN, AS_IT_IS) and left_s > 0)  # these take about a second
        if first:
            spare_s = max(spare_s, 1.2 * left_s)
        if proposal.candidate.name != STOCK:
            return spare_s
        if budget_s >= DEFAULT_BUDGET_S:  # with the default budget torch.compile is always measured
            return max(spare_s, proposal.cost_s)
        if stages.is_short:  # a second or two, plus the import of the compiler in a new process
            return max(spare_s, left_s + budget_s)
        times = 1.2 if budget_s >= COMPILING_S else 1.0  # short budgets are kept strictly
        return max(spare_s, times * left_s - self.least_s())

    def deadline_s(self) -> float:
        """Seconds after which any build is aborted, so that the whole search, also on a busy machine, exceeds its
        budget by at most a quarter or three seconds (importing PyTorch's compiler takes four)."""
        budget_s, steps = self.search.problem.budget_s, LEAST_STEPS if self.search.problem.mode == "train" else 0
        closing_s = 2 * LAST_RACE_FRAC * budget_s + 2 * self.race_s() + (20 + TRACK_TIMES * steps) * self.search.eager_s
        return max(0.0, self.left_s() + max(0.25 * budget_s, 3.0) - closing_s)

    def stock_limit_s(self, proposal: Proposal) -> float | None:
        """Seconds after which torch.compile of a training step is aborted; None for other candidates and short budgets.

        Its estimate is off by up to a factor of two: EfficientNet's took 97 s where 58 were expected (H200).
        """
        training = self.search.problem.mode == "train" and self.search.problem.budget_s >= COMPILING_S
        if proposal.candidate.name != STOCK or not training:
            return None
        return max(0.0, self.left_s() + 0.4 * self.search.problem.budget_s - self.least_s())

    def host_limit_s(self, proposal: Proposal, stages: Stages) -> float | None:
        """Seconds after which a C++ compilation within a short budget is aborted; None on a device.

        The first compilation on a machine probes its vector instructions and precompiles a header, and a busy machine
        takes four times as long: a search of 10 s took 27 (two shared cores).
        """
        short = self.search.problem.mode == "infer" and self.search.problem.budget_s < COMPILING_S
        if stages.facts.cuda or not short or proposal.candidate.compiler == "none":
            return None
        return max(0.0, self.left_s() + LATE_FRAC * self.search.problem.budget_s)

    def race_s(self) -> float:
        return min(MOST_RACE_S, max(LEAST_RACE_S, RACE_FRAC * self.search.problem.budget_s))

    def reserve_s(self) -> float:
        """Seconds reserved for proofs, the training comparison, quantization and the last race."""
        budget_s = self.search.problem.budget_s
        proving_s = 0.0 if self.search._prover else 2 * REFERENCE_TIMES * min(self.search.eager_s, 0.1)
        tracking_s = TRACK_TIMES * STEPS * self.search.eager_s if self.search.problem.mode == "train" else 0.0
        kept_s = min(proving_s, 0.2 * budget_s) + min(tracking_s, TRACK_FRAC * budget_s)
        quantize_s = 0.35 * budget_s if self.search.problem.error_budget and not self.search.quantizing else 0.0
        return LAST_RACE_FRAC * budget_s + 20 * self.search.eager_s + kept_s + quantize_s

    def least_s(self) -> float:
        """Seconds of the last race and the shortest training comparison, which every result needs."""
        steps = LEAST_STEPS if self.search.problem.mode == "train" else 0
        return LAST_RACE_FRAC * self.search.problem.budget_s + (20 + TRACK_TIMES * steps) * self.search.eager_s

    def note_overrun(self) -> None:
        """Add a note if the budget was exceeded: by how much, and the sections that took longer than expected."""
        over_s = -self.left_s()
        if over_s <= 0.05 * self.search.problem.budget_s:
            return
        costly = sorted(self.laps, key=lambda lap: (lap.price_s or 0.0) - lap.spent_s)[:3]
        causes = "; ".join(str(lap) for lap in costly if lap.spent_s > 0.1 * over_s)
        self.search.notes.append(f"{OVERRAN} {over_s:.1f} s over its {self.search.problem.budget_s:.0f} s: {causes}")
