"""Whether a loop over tensors and what the host stops for are one loop: stops in each of its turns, and kernels in
between, or in the gradient of what was computed in between."""

from __future__ import annotations

import numpy as np

from ridgeline.findings.context.context import TraceContext
from ridgeline.findings.context.nesting import spans_under, under
from ridgeline.findings.context.rounds import num_rounds
from ridgeline.findings.context.training import BACKWARD
from ridgeline.findings.replay.fix import Fix
from ridgeline.findings.replay.replay import Index
from ridgeline.trace.kind import Kind

LOOPS, STOPS = frozenset({"tensor-loop"}), frozenset({"synchronization"})
"""Findings about a loop, and about what it may do in each of its turns: one op over all of it has neither."""


def are_one_loop(context: TraceContext, loop: Fix, stops: Fix) -> bool:
    """Whether most of the stops follow each other closely, with something of the loop in between."""
    calls = np.sort(stops.freed)
    # Stops of a round and calls between two of them for turns of a loop, and of the turns those with kernels of the
    # loop.
    if len(calls) < 8 * num_rounds(context):
        return False
    times_ns = np.sort(made_ns(context, loop.works))
    reached = np.searchsorted(times_ns, context.clock.start_ns[calls])
    turns = (np.diff(reached) > 0) & (np.diff(calls) <= 24)
    return bool(turns.mean() >= 0.75)


def made_ns(context: TraceContext, works: Index) -> Index:
    """When works were launched; those of a gradient when what it is the gradient of was."""
    numbers = context.trace.extra.get("sequence")
    times_ns = context.launch_ns[works].copy()
    if numbers is None:
        return times_ns
    ops = context.of_kind(Kind.OP)
    ops = ops[(numbers[ops] >= 0) & ~context.words_like(BACKWARD)[context.trace.name[ops]]]
    ops = ops[~spans_under(context, ops, BACKWARD)]
    made = dict(zip(numbers[ops].tolist(), context.start_ns[ops].tolist(), strict=True))
    backward = under(context, BACKWARD)[works]
    for place in np.flatnonzero(backward).tolist():
        path = context.trace.path(int(context.trace.launch[context.rows[works[place]]]))
        known = (made[number] for number in numbers[list(path)].tolist() if number in made)
        times_ns[place] = next(known, times_ns[place])
    return times_ns
