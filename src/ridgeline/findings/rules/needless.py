"""Work whose result somebody has already, multiplies by zero, or copies only to make it longer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ridgeline.findings.accounting.avoidable import SORTS, avoidable_of
from ridgeline.findings.accounting.labels import label_of, remedy_of
from ridgeline.findings.context.candidate import Candidate
from ridgeline.findings.context.context import TraceContext
from ridgeline.findings.context.evidence import kernel_evidence, place_of
from ridgeline.findings.context.nesting import op_time
from ridgeline.findings.replay.fix import Fix
from ridgeline.findings.rule import rule

#: Sort of avoidable work: what to say of it.
CAUSES: Mapping[str, str] = {
    "again": "a pass that is not needed: the same products run once more without gradients, and what follows counts "
    "hits in their outputs",
    "zero": "a factor of zero: what is multiplied by it need not be computed",
    "grown": "a tensor that grows by torch.cat: all of it is copied for every row that is appended",
}


@rule("needless-work", order=34)
def needless_work(context: TraceContext) -> Candidate | None:
    """The sort of avoidable work that takes most time, of those that no other rule knows."""
    sort = avoidable_of(context.trace, context.rows).sort
    of = {name: np.flatnonzero(sort == SORTS.index(name)) for name in CAUSES}
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
