"""The last race: winner, eager and torch.compile in turns, as they will be called; the winner may change here."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ridgeline.engine.replay.compiled import Shortcut
from ridgeline.optimizer.backend import Report
from ridgeline.optimizer.receipt import (
    BEATEN,
    EQUAL,
    FAILED,
    SKIPPED,
    WINNER,
)
from ridgeline.optimizer.search.budget import LAST_RACE_FRAC, LATE_FRAC, LEAST_RACE_S, MOST_RACE_S
from ridgeline.optimizer.search.candidate import Built, Candidate
from ridgeline.optimizer.search.facts import (
    AS_IT_IS,
    STOCK,
)
from ridgeline.optimizer.search.handover import as_stock, handed
from ridgeline.optimizer.search.problem import why_failed
from ridgeline.optimizer.search.timing import LAST_ROUNDS, Comparison, Timed, compare
from ridgeline.optimizer.training.optimizer_update import updating

if TYPE_CHECKING:
    from ridgeline.optimizer.search.search import Search


SAME_FRAC = 0.98
"""The code of torch.compile called past its guards replaces torch.compile if it is at least this fast in their race."""


class LastRace:
    """The last race of one search: times, hand-over and receipt entries."""

    def __init__(self, search: Search) -> None:
        self.search = search

    def last_race(self) -> tuple[dict[str, Timed], Built | None]:
        """Race winner, eager and torch.compile once more; the winner may change here."""
        search = self.search
        search.recapture()
        search.renew_gradient_accumulators()
        runners = {"eager": search.eager}
        if search.stock is not None:
            runners[search.stock.candidate.name] = search.stock
        budget_s = max(LEAST_RACE_S, min(2 * MOST_RACE_S, LAST_RACE_FRAC * search.problem.budget_s))
        try:
            if search.best is not search.eager:
                runners[search.best.candidate.name] = handed(search.problem, search.best, search.asked)
            timed = search.track.race(runners, budget_s, least_rounds=LAST_ROUNDS)
            if self.overturns(timed):
                more = search.track.race(runners, budget_s, least_rounds=LAST_ROUNDS)
                timed = {name: Timed(each.seconds + more[name].seconds) for name, each in timed.items()}
        except Exception as error:  # reject what fails behind the drop-in, and race again
            search.track.restore()
            if not self.reject_broken(why_failed(error)):
                raise
            return self.last_race()
        looped = self.whole_steps(budget_s)
        before = {name: search.entries[name].speedup for name in runners}
        self.record_times(timed)
        self.yield_to_rival(looped or timed, "the last race, of whole steps," if looped else "the last race", before)
        self.update_reasons(timed)
        tried = AS_IT_IS in search.entries and search.entries[AS_IT_IS].status != SKIPPED
        if search.best is search.stock and not tried and self.guards_matter(timed[STOCK]):
            timed |= self.past_guards()
        return timed, search.stock

    def overturns(self, timed: dict[str, Timed]) -> bool:
        """Whether eager would replace a winner that was clearly faster when it was tried: then the rounds are doubled.

        Simulated with turns slowed to 1.5 or 2 times at random: of races of twelve rounds one in ten put eager before
        a winner that is 1.3 times as fast, and one in five before 1.15 times; with twice the rounds 1.5 and 4 %.
        """
        search = self.search
        if search.best is search.eager or (search.entries[search.best.candidate.name].speedup_low or 0.0) <= 1.0:
            return False
        against = compare(timed[search.best.candidate.name], timed["eager"])
        return not against.faster and (against.ahead or self.hardly_gains(timed))

    def record_times(self, timed: dict[str, Timed]) -> None:
        """Write the times of the last race into the receipt entries."""
        search = self.search
        for name, each in timed.items():
            gain = compare(timed["eager"], each)
            search.entries[name] = replace(
                search.entries[name], measured_s=each.median_s, low_s=each.low_s, high_s=each.high_s,
                speedup=gain.speedup, speedup_low=gain.low, speedup_high=gain.high, last=True)  # fmt: skip

    def update_reasons(self, timed: dict[str, Timed]) -> None:
        """Update the reasons of those that the winner had beaten, with the times of the last race."""
        search = self.search
        winner = search.best.candidate.name
        for name in timed.keys() - {winner}:
            if search.entries[name].reason.startswith(f"{winner} is "):
                reason = f"{winner} is {compare(timed[name], timed[winner]).speedup:.2f}× as fast"
                search.entries[name] = replace(search.entries[name], reason=reason)

    def reject_broken(self, why: str) -> bool:
        """Reject contenders that fail by themselves; if none does, the best, which fails behind the drop-in.

        Returns whether there was one to reject.
        """
        search = self.search
        suspects = [each for each in (search.best, search.stock) if each is not None and each is not search.eager]
        broken = {id(each): (each, found) for each in suspects if (found := search.failure_of(each))}
        for each, found in list(broken.values()) or [(each, why) for each in suspects[:1]]:
            search.invalidate(each, f"failed in the last race: {found}")
        return bool(suspects)

    def whole_steps(self, budget_s: float) -> dict[str, Timed]:
        """Race whole training steps, with the optimizer's update, as a loop runs them and as they will be called.

        Forward and backward alone are not enough if the update takes host time too: host time that is hidden behind
        device work in one adds up in the other. Empty if such steps fail.
        """
        search = self.search
        built = {each.candidate.name: each for each in (search.eager, search.stock, search.best) if each is not None}
        if search.problem.mode != "train" or len(built) < 2:
            return {}
        runners = {name: handed(search.problem, each, search.asked) for name, each in built.items()}
        try:
            with updating(search.track, search.problem.optimizer, runners) as (name, updated):
                # Three steps in a row: a loop launches the next step while the device is at the last.
                found = search.track.race(updated, budget_s, least_rounds=LAST_ROUNDS, least_calls=3)
        except Exception as error:  # no memory for the optimizer's state, or unsupported gradients
            search.notes.append(f"whole steps were not compared: {why_failed(error)}")
            return {}
        finally:
            search.track.restore()
        shown = ", ".join(f"{who} {1e3 * timed.median_s:.3g} ms" for who, timed in found.items())
        search.notes.append(f"whole steps with {name}: {shown}")
        return found

    def guards_matter(self, timed: Timed) -> bool:
        """Whether torch.compile's guards on top of ours (30 to 50 µs) matter for a call of this length, and there is
        time to avoid them: the code is cached, so building takes a fraction of the first time."""
        search = self.search
        budget_s = search.problem.budget_s
        made = search.best.build_s < budget_s and search.budget.left_s() > -LATE_FRAC * budget_s
        inference = search.problem.mode == "infer" and search.problem.device.type == "cuda"
        return inference and made and timed.median_s < 5e-3

    def past_guards(self) -> dict[str, Timed]:
        """Try the code of torch.compile past its guards, where torch.compile leads only in the last race or no time
        was left before: a convolution of 1.29 ms was returned 19 µs slower for want of it (KernelBench 2/11)."""
        search = self.search
        candidate = Candidate(name=AS_IT_IS, compiler="inductor", straight=True)
        built = Built(candidate, search.problem.model, Report())
        try:
            built = search.builds.built(candidate)
            both = {each.candidate.name: handed(search.problem, each, search.asked) for each in (search.best, built)}
            timed = search.track.race({"eager": search.eager, **both}, search.budget.race_s(), least_rounds=LAST_ROUNDS)
        except Exception as error:  # the result is unchanged
            search.track.restore()
            search.record(built, FAILED, why_failed(error))
            return {}
        against, shown = compare(timed[STOCK], timed[AS_IT_IS]), timed[AS_IT_IS]
        if against.speedup < SAME_FRAC or built.call.__class__ is not Shortcut or not (verdict := search.prove(built)):
            why = f"slower than torch.compile ({against.speedup:.3f}×), more than one graph or not proved"
            search.record(built, EQUAL, why, timed=shown)
            return {}
        search.record(built, WINNER, "", timed=shown, verdict=verdict, comparison=compare(timed["eager"], shown))
        why = f"{AS_IT_IS} is {against.speedup:.2f}× as fast"
        search.entries[STOCK] = replace(search.entries[STOCK], status=BEATEN, reason=why)
        search.best = built
        self.record_times(timed)
        return timed

    def yield_to_rival(self, timed: dict[str, Timed], race: str, tried: dict[str, float | None]) -> None:
        """Return a rival that is ahead of the winner instead: rivals are simpler, and win where a race is undecided.

        ``tried`` are the speeds over eager at the time each candidate was tried.
        """
        search = self.search
        before, own = search.best.candidate.name, timed[search.best.candidate.name]
        rivals = [built for built in (search.stock, search.eager) if built is not None and built is not search.best]
        found = [(compare(own, timed[built.candidate.name]), built) for built in rivals]
        found = [(against, built) for against, built in found if not self.is_same_code(built, against)]
        for against, built in sorted(found, key=lambda pair: -pair[0].speedup):
            barred = search.barred(built) if against.ahead else ""
            if built is search.eager and not against.ahead and self.hardly_gains(timed):
                why = f"in {race} no faster beyond noise than eager ({1 / against.speedup:.3f}×)"
                self.replace_winner(before, built, why + _tried(tried[before]))
                return
            if barred:
                said = f"{built.candidate.name} was {_ahead_by(against)} in {race} and is not returned"
                search.notes.append(f"{said}: {barred}")
            elif against.ahead:
                why = f"in {race} {built.candidate.name} was {_ahead_by(against)}"
                self.replace_winner(before, built, why + _tried(tried[before]))
                return

    def is_same_code(self, rival: Built, against: Comparison) -> bool:
        """Whether the winner is this rival called past its guards: a small difference is noise then, and behind the
        drop-in the rival would be called with its guards on top."""
        search = self.search
        lean = search.best.call.__class__ is Shortcut and as_stock(search.best)
        return lean and rival is search.stock and against.speedup * SAME_FRAC <= 1.0

    def hardly_gains(self, timed: dict[str, Timed]) -> bool:
        """Whether the winner gains less than 1 % over eager in the last race."""
        search = self.search
        gain = compare(timed["eager"], timed[search.best.candidate.name])
        # Least gain of a winner over eager in the last race.
        return max(gain.speedup, gain.undisturbed) < 1.0 + 0.01

    def replace_winner(self, before: str, built: Built, why: str) -> None:
        search = self.search
        search.entries[before] = replace(search.entries[before], status=BEATEN, reason=why)
        search.best = built
        kept = search.entries[built.candidate.name]
        search.entries[built.candidate.name] = replace(kept, status=WINNER, reason="")


def _tried(speedup: float | None) -> str:
    """The gain when the candidate was tried, without the drop-in's guard check."""
    return "" if speedup is None else f"; {speedup:.2f}× eager when tried, without our guard check"


def _ahead_by(against: Comparison) -> str:
    if against.speedup >= against.undisturbed:
        return f"{against.speedup:.2f}× as fast"
    return f"{against.speedup:.2f}× as fast, and {against.undisturbed:.2f}× in its fastest rounds"
