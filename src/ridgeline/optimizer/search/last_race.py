"""The winner, eager and torch.compile once more, in turns, as they are handed over; the winner may change here."""

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


LOOP_STEPS = 3
"""Steps in a row of the last race in training: loops start the next step while the device is at the last."""
LEAST_GAIN_FRAC = 0.01
"""What a winner must gain over eager in the last race; eager needs no explanation."""
MOST_GUARDED_S = 5e-3
"""Calls shorter than this feel the 30 to 50 µs of torch.compile's guards and our look on top of them."""
SAME_FRAC = 0.98
"""What torch.compile makes, called past its guards, is taken in its place if it is not behind by more in its race."""


class LastRace:
    """The last race of one search."""

    def __init__(self, search: Search) -> None:
        self.search = search

    def last_race(self) -> tuple[dict[str, Timed], Built | None]:
        """Winner, eager and torch.compile once more, in turns; the winner may change here."""
        search = self.search
        search.recapture()
        search.renew_histories()
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
        except Exception as error:  # what cannot be handed over is out; whoever is left races again
            search.track.restore()
            if not self.unseat_broken(why_failed(error)):
                raise
            return self.last_race()
        looped = self.whole_steps(budget_s)
        before = {name: search.entries[name].speedup for name in runners}
        self.show_last(timed)
        self.give_way(looped or timed, "the last race, of whole steps," if looped else "the last race", before)
        self.restate(timed)
        tried = AS_IT_IS in search.entries and search.entries[AS_IT_IS].status != SKIPPED
        if search.best is search.stock and not tried and self.feels_guards(timed[STOCK]):
            timed |= self.past_guards()
        return timed, search.stock

    def overturns(self, timed: dict[str, Timed]) -> bool:
        """Whether eager would take the place of a winner that was ahead of it beyond noise when it was tried, by what
        few rounds of a busy machine do not show: then as many again are raced.

        Simulated with turns that others slow to 1.5 or 2 times at random: of races of twelve rounds one in ten put
        eager before what is 1.3 times as fast, and one in five before 1.15 times; with as many again 1.5 and 4 %.
        """
        search = self.search
        if search.best is search.eager or (search.entries[search.best.candidate.name].speedup_low or 0.0) <= 1.0:
            return False
        against = compare(timed[search.best.candidate.name], timed["eager"])
        return not against.faster and (against.ahead or self.hardly_gains(timed))

    def show_last(self, timed: dict[str, Timed]) -> None:
        """Those that were in the last race are shown with what they took there, which is what decides."""
        search = self.search
        for name, each in timed.items():
            gain = compare(timed["eager"], each)
            search.entries[name] = replace(
                search.entries[name], measured_s=each.median_s, low_s=each.low_s, high_s=each.high_s,
                speedup=gain.speedup, speedup_low=gain.low, speedup_high=gain.high, last=True)  # fmt: skip

    def restate(self, timed: dict[str, Timed]) -> None:
        """Those the winner had beaten when it was tried are behind by what the last race says."""
        search = self.search
        winner = search.best.candidate.name
        for name in timed.keys() - {winner}:
            if search.entries[name].reason.startswith(f"{winner} is "):
                reason = f"{winner} is {compare(timed[name], timed[winner]).speedup:.2f}× as fast"
                search.entries[name] = replace(search.entries[name], reason=reason)

    def unseat_broken(self, why: str) -> bool:
        """Those that can take no turn by themselves are out; where all can, the best, which could not be handed over.

        Whether there was one.
        """
        search = self.search
        suspects = [each for each in (search.best, search.stock) if each is not None and each is not search.eager]
        broken = {id(each): (each, found) for each in suspects if (found := search.failure_of(each))}
        for each, found in list(broken.values()) or [(each, why) for each in suspects[:1]]:
            search.invalidate(each, f"failed in the last race: {found}")
        return bool(suspects)

    def whole_steps(self, budget_s: float) -> dict[str, Timed]:
        """The same as a loop runs them, with an update in every step, each as it would be handed over.

        Forward and backward alone say little where an update holds up the host too: what hides behind the device's
        work in one is in everybody's way in the other. Nothing where steps cannot be taken so.
        """
        search = self.search
        built = {each.candidate.name: each for each in (search.eager, search.stock, search.best) if each is not None}
        if search.problem.mode != "train" or len(built) < 2:
            return {}
        runners = {name: handed(search.problem, each, search.asked) for name, each in built.items()}
        try:
            with updating(search.track, search.problem.optimizer, runners) as (name, updated):
                found = search.track.race(updated, budget_s, least_rounds=LAST_ROUNDS, least_calls=LOOP_STEPS)
        except Exception as error:  # no memory for its state, gradients that it does not take
            search.notes.append(f"whole steps were not compared: {why_failed(error)}")
            return {}
        finally:
            search.track.restore()
        shown = ", ".join(f"{who} {1e3 * timed.median_s:.3g} ms" for who, timed in found.items())
        search.notes.append(f"whole steps with {name}: {shown}")
        return found

    def feels_guards(self, timed: Timed) -> bool:
        """Whether torch.compile's guards and our look on top of them show in a call, and its code is made in time.

        What it compiled is remembered: a fraction of that. A second late is well spent; a search of 5 s in a new
        process, which took eight for what it imported, ends.
        """
        search = self.search
        budget_s = search.problem.budget_s
        made = search.best.build_s < budget_s and search.budget.left_s() > -LATE_FRAC * budget_s
        inference = search.problem.mode == "infer" and search.problem.device.type == "cuda"
        return inference and made and timed.median_s < MOST_GUARDED_S

    def past_guards(self) -> dict[str, Timed]:
        """torch.compile's code past its guards in its place, where it came to lead in the last race alone, or where no
        time was left: a convolution of 1.29 ms was returned 19 µs slower for want of that second (KernelBench 2/11)."""
        search = self.search
        candidate = Candidate(name=AS_IT_IS, compiler="inductor", straight=True)
        built = Built(candidate, search.problem.model, Report())
        try:
            built = search.builds.built(candidate)
            both = {each.candidate.name: handed(search.problem, each, search.asked) for each in (search.best, built)}
            timed = search.track.race({"eager": search.eager, **both}, search.budget.race_s(), least_rounds=LAST_ROUNDS)
        except Exception as error:  # what cannot be built or timed changes nothing
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
        self.show_last(timed)
        return timed

    def give_way(self, timed: dict[str, Timed], race: str, tried: dict[str, float | None]) -> None:
        """A rival that is ahead of the winner takes its place: rivals are simpler, and win where a race cannot tell.

        ``tried`` are their speeds over eager from when each was tried.
        """
        search = self.search
        before, own = search.best.candidate.name, timed[search.best.candidate.name]
        rivals = [built for built in (search.stock, search.eager) if built is not None and built is not search.best]
        found = [(compare(own, timed[built.candidate.name]), built) for built in rivals]
        found = [(against, built) for against, built in found if not self.is_itself(built, against)]
        for against, built in sorted(found, key=lambda pair: -pair[0].speedup):
            barred = search.barred(built) if against.ahead else ""
            if built is search.eager and not against.ahead and self.hardly_gains(timed):
                why = f"in {race} no faster beyond noise than eager ({1 / against.speedup:.3f}×)"
                self.hand_over(before, built, why + _tried(tried[before]))
                return
            if barred:
                said = f"{built.candidate.name} was {_ahead_by(against)} in {race} and is not returned"
                search.notes.append(f"{said}: {barred}")
            elif against.ahead:
                why = f"in {race} {built.candidate.name} was {_ahead_by(against)}"
                self.hand_over(before, built, why + _tried(tried[before]))
                return

    def is_itself(self, rival: Built, against: Comparison) -> bool:
        """Whether the winner is this rival past its guards: as far as the race sees them apart it is noise, and behind
        our look the rival would be called with its guards on top."""
        search = self.search
        lean = search.best.call.__class__ is Shortcut and as_stock(search.best)
        return lean and rival is search.stock and against.speedup * SAME_FRAC <= 1.0

    def hardly_gains(self, timed: dict[str, Timed]) -> bool:
        """Whether the winner gains so little over eager in the last race that another day it may lose it."""
        search = self.search
        gain = compare(timed["eager"], timed[search.best.candidate.name])
        return max(gain.speedup, gain.undisturbed) < 1.0 + LEAST_GAIN_FRAC

    def hand_over(self, before: str, built: Built, why: str) -> None:
        search = self.search
        search.entries[before] = replace(search.entries[before], status=BEATEN, reason=why)
        search.best = built
        kept = search.entries[built.candidate.name]
        search.entries[built.candidate.name] = replace(kept, status=WINNER, reason="")


def _tried(speedup: float | None) -> str:
    """What a candidate gained when it was tried, before it was called as a person calls it."""
    return "" if speedup is None else f"; {speedup:.2f}× eager when tried, without our look at every call"


def _ahead_by(against: Comparison) -> str:
    if against.speedup >= against.undisturbed:
        return f"{against.speedup:.2f}× as fast"
    return f"{against.speedup:.2f}× as fast, and {against.undisturbed:.2f}× in its fastest rounds"
