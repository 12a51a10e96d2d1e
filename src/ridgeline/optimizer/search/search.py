"""Runs a search: candidates are built, timed, proved, and accepted or rejected."""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ridgeline.engine.capture.capture import uncached_casts
from ridgeline.engine.replay.compiled import Shortcut
from ridgeline.engine.replay.training import mark_accumulators, renew_accumulators
from ridgeline.errors import OptimizeError
from ridgeline.kernels.tensorfloat import convolutions_round
from ridgeline.optimizer.backend import Report
from ridgeline.optimizer.compile.deadline import OutOfTime, within
from ridgeline.optimizer.precision.choice import FIRST_FRAC, MOST_TRIES, Study, study
from ridgeline.optimizer.precision.sensitivity import Choice
from ridgeline.optimizer.receipt import (
    BEATEN,
    EQUAL,
    FAILED,
    LARGE,
    SKIPPED,
    SLOWER,
    WINNER,
    WRONG,
    Entry,
    Step,
)
from ridgeline.optimizer.search.budget import REFERENCE_TIMES, Budget
from ridgeline.optimizer.search.builds import Builds
from ridgeline.optimizer.search.candidate import Built, Candidate, capture_again
from ridgeline.optimizer.search.facts import (
    COMPILING_S,
    GRAPHED,
    PLAIN,
    STOCK,
    Proposal,
)
from ridgeline.optimizer.search.final_proofs import prove_in_training, prove_without_dropout
from ridgeline.optimizer.search.forecast import Forecast
from ridgeline.optimizer.search.handover import as_stock
from ridgeline.optimizer.search.judge import LEAST_DRAWS, MOST_DRAWS, Prover, Subject, Verdict, unproved
from ridgeline.optimizer.search.last_race import SAME_FRAC, LastRace
from ridgeline.optimizer.search.memory import Memory
from ridgeline.optimizer.search.order import Stages
from ridgeline.optimizer.search.prepare import TRACER, facts_of, prepare, price_late
from ridgeline.optimizer.search.problem import Outcome, Problem, why_failed
from ridgeline.optimizer.search.summary import explained, parts, receipt_of, regions
from ridgeline.optimizer.search.timing import LAST_ROUNDS, Comparison, Timed, Track, compare, reserved_bytes

STANDS_OUT = "as right as eager, and elements are 1e-4 from eager's, where those of torch.compile or eager are not"
COMPILERS = (TRACER, "torch._inductor.compile_fx", "torch._inductor.select_algorithm")
REMADE = "nothing was tried: calls change the shape, memory or gradients of an input in place"


class Search:
    """The state of one search: live candidates, the best so far, and the entries of the receipt."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.budget, self.memory, self.builds = Budget(self), Memory(problem), Builds(self)
        held = [] if problem.optimizer is None else [p for g in problem.optimizer.param_groups for p in g["params"]]
        self.track = Track(problem.model, problem.inputs, problem.mode, problem.loss, problem.device, held)
        mark_accumulators(self.track.parameters if problem.mode == "train" else ())
        self.eager = Built(Candidate(name="eager"), problem.model, Report())
        self.best = self.eager
        self.stock: Built | None = None
        self.plain: Candidate | None = None  # eager's own kernels captured, once that was right and faster
        self.asked: tuple[str, ...] = ()
        self.random = False  # whether results depend on random numbers
        self.compared = False  # whether it is a function of few ops whose better rival equals eager elementwise
        self.entries: dict[str, Entry] = {}
        self.steps: list[Step] = []
        self.skipped: list[tuple[str, str]] = []  # stages, and why
        self.notes: list[str] = []
        self._prover: Prover | None = None
        self.forecast: Forecast | None = None
        self.eager_s = 0.0
        self.study: Study | None = None
        self.quantizing = False
        self.choices: dict[tuple[tuple[str, str], ...], dict[str, Choice]] = {}

    def run(self) -> Outcome:
        """Search until everything is tried or the time is spent.

        Autocast's weight cache is off for all candidates: captures need that, and compiled code is guarded by the
        switch, so that it would be compiled a second time for a capture.
        """
        with _undisturbed(self.problem.budget_s), uncached_casts():
            return self._run()

    def _run(self) -> Outcome:
        try:
            with self.budget.lap("eager's first calls"):
                prepare(self)
            if self.track.remade:
                self.notes.append(REMADE)
                return self._finish()
            stages = Stages(facts_of(self))
            for proposal in stages.proposals(self):
                self._evaluate(proposal, stages)
            self._quantize(stages)
            self.skipped = stages.skipped
            return self._finish()
        finally:
            self.track.hand_back()
            reserved_bytes(self.problem.device)  # frees the memory of rejected candidates

    @property
    def prover(self) -> Prover:
        """Made when the first faster candidate has to be proved."""
        if self._prover is None:
            problem = self.problem
            subject = Subject(problem.model, problem.inputs, problem.mode, self.track.loss, self.track.state)
            cheap = 2 * REFERENCE_TIMES * self.eager_s < 0.2 * self.problem.budget_s
            # One set of inputs above 2 GB: half a billion numbers are enough.
            cheap = cheap and sum(tensor.nbytes for tensor in problem.inputs.tensors()) < 2 << 30
            affordable = int(0.008 * self.problem.budget_s / max(self.eager_s, 1e-6))  # runs of a random candidate
            self._prover = Prover(subject, num_inputs=2 if cheap else 1, random=self.random,
                                  num_draws=max(LEAST_DRAWS, min(MOST_DRAWS, affordable)))  # fmt: skip
        return self._prover

    def _quantize(self, stages: Stages) -> None:
        """Quantize layers within the error budget, if one was given."""
        budget = self.problem.error_budget
        if budget is None:
            return
        self.quantizing = True
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
            frac = self._try_formats(stages, turn, frac) if frac is not None else None

    def _try_formats(self, stages: Stages, turn: int, frac: float) -> float | None:
        """Evaluate one choice of formats; returns the share of the error budget to try next, if any."""
        assert self.study is not None
        chosen = self.study.chosen(frac)
        if not chosen:
            self.notes.append("no fewer bits: every format that gains exceeds the budget")
            return None
        name = "fewer bits" if not turn else f"fewer bits, try {turn + 1}"
        pairs = tuple((layer, choice.format) for layer, choice in chosen.items())
        self.choices[pairs] = chosen
        errors = []
        for proposal in stages.fewer_bits(self, name, pairs):
            self._evaluate(proposal, stages)
            verdict = self.entries[proposal.candidate.name].verdict
            if verdict is not None:
                errors.append(verdict["rms_frac"] if verdict["rms_frac"] is not None else float("inf"))
        return self.study.next_frac(frac, chosen, max(errors)) if errors else None

    def _evaluate(self, proposal: Proposal, stages: Stages) -> None:
        spare_s, limit_s = self.budget.spare_s(proposal, stages), self.budget.stock_limit_s(proposal)
        if limit_s is not None and not stages.facts.groups:  # nothing else is left to try: what is left is for this
            spare_s = max(spare_s, 1.5 * limit_s)  # prices may be too high by half
        if self._tunes(proposal):
            limit_s = max(0.0, self.budget.left_s() - self.budget.least_s())
            # Its price may be twice too high where nothing of ours is ahead of torch.compile, as may be its own tuning.
            spare_s = max(spare_s, 2.0 * limit_s if as_stock(self.best) else 0.0)
        if limit_s is None:
            limit_s = self.budget.host_limit_s(proposal, stages)
        deadline_s = self.budget.deadline_s()
        limit_s = deadline_s if limit_s is None else min(limit_s, deadline_s)
        if not deadline_s or (proposal.cost_s > spare_s and not self.builds.captures_compiled(proposal)):
            left_s = max(0.0, min(spare_s, self.budget.left_s()))
            why = f"needs about {proposal.cost_s:.0f} s, {left_s:.0f} s are left of the budget"
            skipped = Built(proposal.candidate, self.problem.model, Report())
            self.record(skipped, SKIPPED, why, predicted=proposal.predicted_s, price=proposal.cost_s)
            return
        self.problem.say(f"trying {proposal.candidate.name}")
        try:
            with self.budget.lap(f"making {proposal.candidate.name}", proposal.cost_s), within(
                    limit_s, importing=proposal.candidate.compiler != "none"):
                built = self.builds.built(proposal.candidate)
        except Exception as error:  # a candidate that cannot be built is one that lost; the model still works
            self.track.restore()
            late = isinstance(error, OutOfTime)
            status, why = (SKIPPED, str(error)) if late else (FAILED, why_failed(error))
            self.record(Built(proposal.candidate, self.problem.model, Report()), status, why, price=proposal.cost_s)
            self.recapture()
            return
        stages.make.prices.took(proposal, built.build_s)
        self.recapture()
        if built.candidate.holds_places and built.moved(self.problem.model):
            self.builds.capture_again(built)
        with self.budget.lap(f"racing and proving {proposal.candidate.name}"):
            self.judge(built, proposal)
        if proposal.candidate.name == STOCK:  # whether the better of eager and torch.compile equals eager elementwise
            stock = self.entries[STOCK]
            same = stock.verdict is not None and stock.verdict["ok"] and stock.verdict["like_eagers"]
            self.compared = stages.is_short and (stock.status in (SLOWER, EQUAL) or bool(same))

    def _tunes(self, proposal: Proposal) -> bool:
        """Whether a compiler benchmarks alternatives, until the time is spent: max-autotune took 87 to 226 s where
        torch.compile takes 20 to 60 (H200)."""
        return proposal.candidate.tunes and self.problem.mode == "infer" and not self.builds.captures_compiled(proposal)

    def shrink_pool(self) -> None:
        """Capture the winner again without gaps in its pool, if it reserves more than eager."""
        if not self.memory.outgrows(self.best):
            return
        name = self.best.candidate.name
        try:
            self.best = self.builds.recapture_expandable(self.best)
            self.entries[name] = replace(self.entries[name], peak_bytes=self._peak_bytes(self.best))
        except Exception as error:
            self.track.restore()
            self.invalidate(self.best, f"could not be captured again: {why_failed(error)}")

    def judge(self, built: Built, proposal: Proposal, *, again: bool = False) -> None:
        """Check memory, then time, then, if it is faster, correctness; ``again`` after the best was repaired."""
        if self._is_eager(built):
            self.record(built, EQUAL, "no rewrite matched", predicted=proposal.predicted_s)
            return self._drop(built)
        try:
            peak = self._peak_bytes(built)
            fits = self.memory.fits(built, peak)
            if not fits and self.memory.outgrows(built):
                built = self.builds.recapture_expandable(built)
                peak = self._peak_bytes(built)
                fits = self.memory.fits(built, peak)
            if not fits and built.candidate.name != STOCK:
                self.record(built, LARGE, self.memory.why_large(built), peak=peak)
                return self._drop(built)
            timed = self.race(built)
        except Exception as error:
            self.track.restore()
            if not again and self.repair_best():  # it was not this one that failed
                return self.judge(built, proposal, again=True)
            self.record(built, FAILED, why_failed(error))
            return self._drop(built)
        against = compare(timed[self.best.candidate.name], timed[built.candidate.name])
        if "eager" in timed:
            comparison = compare(timed["eager"], timed[built.candidate.name])
        else:
            speedup = self.eager_s / timed[built.candidate.name].median_s
            comparison = Comparison(speedup, speedup, speedup, 0)
        shown: dict[str, Any] = {"timed": timed[built.candidate.name], "comparison": comparison, "peak": peak,
                                 "predicted": proposal.predicted_s}  # fmt: skip
        if not fits:  # the rival is timed whatever it needs, for the receipt
            self.record(built, LARGE, self.memory.why_large(built), **shown)
            return self._drop(built)
        simpler = built.candidate.complexity < self.best.candidate.complexity and not against.slower
        if against.faster or simpler or self._leaner(built, against) or self._hopeful(against):
            verdict = self.prove(built)
            if not verdict:
                self.record(built, WRONG, verdict.reason, verdict=verdict, **shown)
                return self._drop(built)
            if self._stands_out(built, verdict):
                self.record(built, WRONG, STANDS_OUT, verdict=verdict, **shown)
                return self._drop(built)
            return self.accept(built, against, verdict, shown)
        status = SLOWER if against.slower else EQUAL
        word = "slower than" if against.slower else "no faster beyond noise than"
        reason = f"{word} {self.best.candidate.name} ({against.speedup:.3f}×)"
        misses: dict[str, int] = getattr(built.call, "misses", None) or {}
        if sum(misses.values()) > getattr(built.call, "replays", 0):  # it mostly ran uncaptured
            reason += f"; captured, and not replayed: {max(misses, key=lambda why: misses[why])}"
        self.record(built, status, reason, **shown)
        self._keep_or_drop(built)
        return None

    def _stands_out(self, built: Built, verdict: Verdict) -> bool:
        """Whether the result is accurate but differs visibly from eager, while the better rival's does not.

        Convolutions with another rounding differ by 1e-4, and so do other summation orders of sums that cancel: 18 of
        242 problems of KernelBench were returned so, of which torch.compile agrees with eager in some.
        """
        return self.compared and not (verdict.like_eagers or as_stock(built) or self.problem.error_budget)

    def _leaner(self, built: Built, against: Comparison) -> bool:
        """Whether it runs torch.compile's code past its guards and is no slower: our guard check replaces them then,
        where torch.compile itself would be called behind both."""
        least = SAME_FRAC if as_stock(built) else 1.0  # the same kernels: less is noise
        return self.best.candidate.name == STOCK and built.call.__class__ is Shortcut and against.speedup >= least

    def _hopeful(self, against: Comparison) -> bool:
        """Whether a training step seems ahead of eager within the noise of few rounds: the last race decides.

        Whisper's captured step, 10 % ahead on a busy device, was rejected as no faster beyond noise, and only eager was
        left to return.
        """
        training = self.best is self.eager and self.problem.mode == "train"
        return training and against.seems_apart and against.speedup > 1.0

    def _is_eager(self, built: Built) -> bool:
        """Whether no rewrite matched and nothing is compiled: then it is eager code behind a tracer."""
        return bool(built.candidate.rewrites) and built.candidate.compiler == "none" and not built.report.matches

    def accept(self, built: Built, against: Comparison, verdict: Verdict, shown: dict[str, Any]) -> None:
        before = self.best
        entry = self.entries[before.candidate.name]
        reason = f"{built.candidate.name} is {against.speedup:.2f}× as fast"
        self.entries[before.candidate.name] = replace(entry, status=BEATEN, reason=reason)
        self.best = built
        if built.candidate.name == PLAIN:
            self.plain = built.candidate
        self.record(built, WINNER, "", verdict=verdict, **shown)
        self.steps.append(Step(built.candidate.name, self.eager_s / shown["comparison"].speedup))
        self._keep_or_drop(before)
        self._keep_or_drop(built)

    def _keep_or_drop(self, built: Built) -> None:
        if built.candidate.name == "torch.compile":
            self.stock = built
        if built is not self.best and built is not self.stock and built is not self.eager:
            self._drop(built)

    def _drop(self, built: Built) -> None:
        """Release a graph that lost; compiled code is kept until the end, because other candidates may reuse it."""
        if built is not self.stock and built is not self.eager:
            built.release()

    def _peak_bytes(self, built: Built) -> int | None:
        with built.switched() as call:
            extra = self.track.extra_bytes(call)
        return None if extra is None else self.memory.base_bytes + built.kept_bytes + extra

    def race(self, built: Built) -> dict[str, Timed]:
        """Race a candidate; if the race is undecided and the medians differ by 2 %, race more rounds."""
        before, own = self.best.candidate.name, built.candidate.name
        runners = {before: self.best, own: built}
        if self.eager_s * 3 * 7 < 2 * self.budget.race_s():
            runners["eager"] = self.eager
        timed = self.track.race(runners, self.budget.race_s(), [(before, own)])
        against = compare(timed[before], timed[own])
        if against.decided or not against.seems_apart or self.budget.left_s() < self.budget.reserve_s():
            return timed
        more = self.track.race(runners, 2 * self.budget.race_s(), [(before, own)], least_rounds=LAST_ROUNDS)
        return {name: Timed(timed[name].seconds + more[name].seconds) for name in timed}

    def prove(self, built: Built) -> Verdict:
        try:
            prover = self.prover
            stock = as_stock(built) or built.candidate.compiler.startswith("stock")
            budget = (self.problem.error_budget or 0.0) if built.candidate.narrow or stock else 0.0
            with built.switched() as call:
                rounded = stock and self._rounds()
                # torch.compile may be off by eighty roundings of float32: anyone who compiles the model gets that.
                return prover.judge(call, max(budget, 1e-5) if stock else budget, rounded=rounded)
        except Exception as error:  # what cannot be proved is not returned
            return unproved(f"could not be proved: {why_failed(error)}")
        finally:
            self.track.restore()

    def _rounds(self) -> bool:
        """Whether PyTorch may round float32 convolutions of this model to TensorFloat-32, as it does by default.

        cuDNN chooses by layout which ones it rounds, and Inductor makes them channels last: a network whose first
        convolution eager computes in float32 (RegNet's, 3 channels) is 1e-4 off there, and 1.4 times as fast.
        """
        layers = [m for m in self.problem.model.modules() if isinstance(m, nn.modules.conv._ConvNd)]
        wide = any(layer.weight.dtype is torch.float32 for layer in layers)
        return wide and self.problem.mode == "infer" and convolutions_round()

    def recapture(self) -> None:
        """Capture graphs again whose weights a candidate has moved."""
        problem = self.problem
        for built in {id(b): b for b in (self.best, self.stock) if b is not None and b.candidate.holds_places}.values():
            try:
                if built.moved(problem.model):
                    capture_again(built, problem.model, problem.inputs, problem.mode, problem.loss)
            except Exception as error:  # it no longer works: it is out
                self.invalidate(built, f"could not be captured again: {why_failed(error)}")
            finally:
                self.track.restore()

    def repair_best(self) -> bool:
        """Whether the best so far is what failed in a race; it is captured again, or replaced by the next best.

        Everything raced against a broken best fails too: a capture broken by a later one was named in the receipts of
        eight candidates, torch.compile among them, and eager was returned (H200).
        """
        if self.best is self.eager or not (why := self.failure_of(self.best)):
            return False
        name = self.best.candidate.name
        if self.best.candidate.graphed:
            self.builds.capture_again(self.best)
            if not self.failure_of(self.best):
                self.notes.append(f"{name} failed after it had worked, and was captured again: {why}")
                return True
        self.invalidate(self.best, f"failed after it had worked: {why}")
        return True

    def failure_of(self, built: Built) -> str:
        """Why a contender fails now; empty if it works."""
        try:
            with built.switched() as call:
                self.track.turn_s(call, 1)
        except Exception as error:
            return why_failed(error)
        finally:
            self.track.restore()
        return ""

    def invalidate(self, built: Built, why: str) -> None:
        """Reject a measured candidate that no longer works; the best is replaced by eager."""
        name = built.candidate.name
        self.entries[name] = replace(self.entries[name], status=FAILED, reason=why)
        if built is self.stock:
            self.stock = None
        if built is self.best:
            self._fall_back()

    def _fall_back(self) -> None:
        """Make eager the best, captured if that was correct and faster."""
        self.best = self.eager
        self.entries["eager"] = replace(self.entries["eager"], status=WINNER, reason="")
        if self.plain is None or self.entries[PLAIN].status != BEATEN:
            return
        try:
            self.best = self.builds.made(self.plain, None)
        except Exception as error:  # eager itself still works
            self.track.restore()
            self.notes.append(f"{self.plain.name} could not be captured again: {why_failed(error)}")
            return
        for name, status in (("eager", BEATEN), (PLAIN, WINNER)):
            self.entries[name] = replace(self.entries[name], status=status, reason="")

    def record(
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

    def _finish(self) -> Outcome:
        with self.budget.lap("the winner's last proofs"):
            self.shrink_pool()
            prove_without_dropout(self)
            prove_in_training(self)
        with self.budget.lap("the last race"):
            timed, stock = LastRace(self).last_race()
        self.memory.tell(self)
        eager, best = timed["eager"], timed[self.best.candidate.name]
        over_eager = compare(eager, best)
        rivals = [eager, *([timed[stock.candidate.name]] if stock else [])]
        strongest = min(rivals, key=lambda each: each.median_s)
        price_late(self)
        with self.budget.lap("measuring time by part"):
            kinds, by_part = regions(self, stock), parts(self, eager, best)
        self._settle_winner()
        self.budget.note_overrun()
        over_best = compare(strongest, best).speedup
        receipt = receipt_of(self, eager, best, timed.get("torch.compile"), over_eager, over_best)
        return Outcome(self.best, explained(replace(receipt, regions=kinds, parts=by_part), self.problem.inputs))

    def renew_gradient_accumulators(self) -> None:
        """Renew autograd's gradient accumulators after a failed capture, which may bind them to the capture stream.

        Every later call would synchronize with that stream, parameter by parameter.
        """
        tried = [entry for name, entry in self.entries.items() if name == PLAIN or name.endswith(GRAPHED)]
        if self.problem.mode == "train" and any(entry.status == FAILED for entry in tried):
            gc.collect()
            renew_accumulators(self.track.parameters)

    def reject(self, why: str, verdict: Verdict | None = None) -> None:
        """Reject the winner; eager takes its place."""
        entry = self.entries[self.best.candidate.name]
        shown = verdict.to_dict() if verdict else entry.verdict
        self.entries[self.best.candidate.name] = replace(entry, status=WRONG, reason=why, verdict=shown)
        self.best.release()
        self._fall_back()

    def barred(self, built: Built) -> str:
        """Why a rival cannot be returned: memory, or correctness. Empty if it can."""
        if built is self.eager:
            return ""
        if not self.memory.fits(built, self.entries[built.candidate.name].peak_bytes):
            return f"it needs too much memory: {self.memory.why_large(built)}"
        verdict = self.prove(built)
        if verdict:
            return ""
        reason = verdict.reason or "it could not be proved"
        if verdict.allowed_rms_frac < verdict.rms_frac < 2e-3:  # TensorFloat-32 explains such an error
            reason += f"; within error_budget={1.5 * verdict.rms_frac:.0e} it would be"
        return reason

    def _settle_winner(self) -> None:
        """Release everything but the winner."""
        if not self.best.report.undos:  # otherwise weights are packed as the winner needs them
            for built in self.builds.families.values():
                if built.report is not self.best.report:
                    built.undo()
        self.recapture()
        self.best.forget_trials()
        self.renew_gradient_accumulators()
        self.track.restore()


@contextlib.contextmanager
def _undisturbed(budget_s: float) -> Iterator[None]:
    """Import compilers, and freeze garbage collection of existing objects: saves half a second per collection."""
    for name in COMPILERS if budget_s >= COMPILING_S else ():
        importlib.import_module(name)
    own = gc.get_freeze_count() < 1000  # Python 3.12 starts with 375 frozen objects; more were frozen by the caller
    if own:
        gc.collect()
        gc.freeze()
    try:
        yield
    finally:
        if own:
            gc.unfreeze()


def search(problem: Problem) -> Outcome:
    """The fastest correct way to run a model, found within a budget."""
    if problem.budget_s <= 0:
        raise OptimizeError(f"budget_s is {problem.budget_s}: give the search some seconds")
    return Search(problem).run()
