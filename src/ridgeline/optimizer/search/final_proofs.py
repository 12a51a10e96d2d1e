"""Proofs of the winner alone: with dropout off, and over a run of training steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ridgeline.engine.example_inputs import RandomState
from ridgeline.optimizer.search.budget import TRACK_FRAC, TRACK_TIMES
from ridgeline.optimizer.search.candidate import Built
from ridgeline.optimizer.search.dropout_off import dropout_off
from ridgeline.optimizer.search.judge import Prover, Subject
from ridgeline.optimizer.search.loss_curve import LEAST_STEPS, STEPS, track
from ridgeline.optimizer.search.prepare import draws_random
from ridgeline.optimizer.search.problem import why_failed

if TYPE_CHECKING:
    from ridgeline.optimizer.search.search import Search


def prove_without_dropout(search: Search) -> None:
    """Judge a random winner once more with dropout off, element by element, if time allows; reject it if wrong."""
    built = search.best
    if not search.random or built is search.eager:
        return
    needed_s, left_s = 1.2 * built.build_s + search.budget.race_s(), search.budget.left_s() - search.budget.reserve_s()
    placed = built.candidate.needs_clone and not built.candidate.graphed
    if built.report.undos or placed or built.candidate.layout != "keep":
        search.notes.append("not compared without dropout: the winner has its own layout of weights or its own kernels")
    elif needed_s > left_s:
        search.notes.append(
            f"not compared without dropout: about {needed_s:.0f} s are needed, {max(0.0, left_s):.0f} s left"
        )
    else:
        _judge_without_dropout(search, built)


def _judge_without_dropout(search: Search, built: Built) -> None:
    problem, before = search.problem, RandomState()
    try:
        with dropout_off(problem.model) as num:
            if not num or draws_random(search, before):
                search.notes.append("not compared without dropout: it is not all that is random")
                return
            subject = Subject(problem.model, problem.inputs, problem.mode, search.track.loss, search.track.state)
            prover = Prover(subject, num_inputs=1)
            twin = search.builds.made(built.candidate, None)
            with twin.switched() as call:
                verdict = prover.judge(call)
            twin.undo()
    except Exception as error:  # this proof is additional: its failure rejects nothing
        search.notes.append(f"not compared without dropout: {why_failed(error)}")
        return
    finally:
        before.restore()
        search.track.restore()
    search.notes.append(f"without dropout: {verdict}")
    if not verdict:
        search.reject(f"without dropout {verdict.reason}", verdict)


def prove_in_training(search: Search) -> None:
    """Compare a run of training steps with eager's, if time allows; reject a winner whose losses diverge."""
    if search.problem.mode != "train" or search.best is search.eager:
        return
    least_s = TRACK_TIMES * LEAST_STEPS * search.eager_s  # the shortest comparison is made even if time has run out
    left_s = max(search.budget.left_s(), min(least_s, TRACK_FRAC * search.problem.budget_s))
    steps = min(STEPS, int(left_s / (TRACK_TIMES * search.eager_s)))
    if steps < LEAST_STEPS:
        needed_s = TRACK_TIMES * LEAST_STEPS * search.eager_s
        search.notes.append(f"no run of steps: {LEAST_STEPS} take about {needed_s:.0f} s, {left_s:.0f} s are kept")
        return
    problem, track_ = search.problem, search.track
    try:
        with search.best.switched() as call:
            found = track(problem.model, call, problem.inputs, track_.loss, track_.state, steps)
    except torch.OutOfMemoryError:
        search.notes.append("no run of steps: an optimizer's state does not fit beside the model")
        return
    except Exception as error:  # it would fail in a training loop too
        search.reject(f"fails in training: {why_failed(error)}")
        return
    finally:
        track_.restore()
    search.notes.append(str(found))
    if not found.ok:
        search.reject(f"diverges in training: {found}")
