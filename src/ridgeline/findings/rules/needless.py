"""Work that a step need not do: results that it has or drops, factors of zero, copies that only make a tensor longer,
gradients that nobody reads, memsets of gradients, recomputation while memory is free."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ridgeline.findings.accounting.avoidable import unread_of
from ridgeline.findings.accounting.labels import label_of, remedy_of
from ridgeline.findings.context.candidate import Candidate
from ridgeline.findings.context.context import TraceContext
from ridgeline.findings.context.evidence import kernel_evidence, place_of
from ridgeline.findings.context.gains import touched_by_s
from ridgeline.findings.context.nesting import op_time
from ridgeline.findings.context.rounds import num_rounds
from ridgeline.findings.replay.fix import Fix
from ridgeline.findings.rule import rule
from ridgeline.findings.rules.memory import recompute
from ridgeline.findings.rules.optimizer import needless_gradients, zero_grad

#: Sort of avoidable work: what to say of it.
CAUSES: Mapping[str, str] = {
    "again": "a pass that is not needed: the same products run once more, autograd records them for nothing, and what "
    "follows counts hits in their outputs",
    "zero": "a factor of zero: what is multiplied by it need not be computed",
    "grown": "a tensor that grows by torch.cat: all of it is copied for every row that is appended",
}


@rule("needless-work", order=16, more_at_best=0.1)
def needless_work(context: TraceContext) -> Candidate | None:
    """The sort of needless work that takes most time."""
    known = (unread(context), needless_gradients(context), zero_grad(context), recompute(context))
    found = [candidate for candidate in known if candidate is not None]
    return max(found, key=lambda candidate: touched_by_s(context, candidate.fix), default=None)


def unread(context: TraceContext) -> Candidate | None:
    """Work that the accounting takes for avoidable: a second pass, factors of zero, tensors grown by copies."""
    of = {name: np.flatnonzero(chosen) for name, chosen in unread_of(context.trace, context.rows).items()}
    if len(of["grown"]) < 4 * num_rounds(context):  # one a step in a program that was well, 16 for a token of a cache
        del of["grown"]
    name = max(of, key=lambda one: context.per_step_s(of[one]))
    works = of[name]
    if not len(works):
        return None
    return Candidate(
        what=f"{label_of(f'avoidable:{name}').capitalize()}: {len(works) / context.num_steps:,.0f} kernels, "
        f"{context.per_step_s(works) * 1e3:.3g} ms a step",
        cause=CAUSES[name],
        change=remedy_of(f"avoidable:{name}"),
        where=place_of(context, works),
        fix=Fix(
            works=works, keep_best=0.0, keep_worst=0.1, host=op_time(context, works), host_best=0.0, host_worst=0.5
        ),
        evidence=kernel_evidence(context, works),
        spans=tuple(context.rows[works[:200]].tolist()),
    )
