"""Products far from what the device allows, where no rule knows why."""

from __future__ import annotations

import numpy as np

from ridgeline.findings.context.candidate import Candidate
from ridgeline.findings.context.context import TraceContext
from ridgeline.findings.context.evidence import kernel_evidence, place_of
from ridgeline.findings.context.floors import priced
from ridgeline.findings.context.shapes import product_of, shaped_ops
from ridgeline.findings.replay.fix import Fix
from ridgeline.findings.replay.replay import Mask
from ridgeline.findings.rule import rule

BEGINS_S = 4e-6
"""No kernel is over sooner, whatever it has to do."""
THIN = 64
"""Of a product's smallest side: less fills no tile, and far from the limits is where such products are by nature (small
matrices by the thousand in a filter, heads that are mixed)."""
DECIDES = 0.3
"""Of the step, what products must take to be worth it."""
FAR, USUAL = 0.3, 0.65
"""Of products' time, what their flops and bytes need at the device's limits: 0.34 at least in healthy programs on an
H200 and two thirds in the median, 0.14 to 0.28 where sizes are odd. Convolutions, norms and copies of healthy programs
have a fifth of it as well (single channels, group norms, strides), so that nothing is told of those."""
LEAST_FRAC = 0.1
"""Of the step: who cannot say why has to have much to say."""


@rule("slow-products", order=95)
def slow_products(context: TraceContext) -> Candidate | None:
    """Products that take several times what their flops and bytes need."""
    trace = priced(context)
    if trace is None:
        return None
    floor_s = np.maximum(trace.optional("floor_s")[context.rows], BEGINS_S)
    counted = context.family("gemm") & np.isfinite(floor_s) & _fills_tiles(context)
    taken_s, least_s = context.per_step_s(counted), float(floor_s[counted].sum()) / context.num_steps
    if taken_s < DECIDES * context.step_s or least_s > FAR * taken_s:
        return None
    works = np.flatnonzero(counted & (floor_s < USUAL * context.work_s))
    return Candidate(
        what=f"Products take {taken_s / least_s:.1f} times what their flops and bytes need at this device's limits, "
        f"{context.frac(taken_s):.0%} of the step",
        cause="slow products: in programs that are well they take one and a half times that, and no rule knows why "
        "these do not",
        change="look at the sizes and strides below: multiples of 64, contiguous operands, one large product instead "
        "of many thin ones, 16 bits or TF32; a kernel of another library for sizes that this one has none for",
        where=place_of(context, works),
        fix=Fix(works=works, keep_best=floor_s[works] / (USUAL * context.work_s[works]), keep_worst=1.0),
        evidence=kernel_evidence(context, works),
        spans=tuple(context.rows[works[:200]].tolist()),
        unchecked=("whether there are faster kernels for these sizes at all",),
        least_frac=LEAST_FRAC,
    )


def _fills_tiles(context: TraceContext) -> Mask:
    """Works of products whose sides are all long enough."""
    trace, shapes = context.trace, context.trace.optional("shapes")
    ops = shaped_ops(trace, context.rows)
    known = np.unique(ops[ops >= 0]).tolist()
    found = {op: product_of(trace.words[int(trace.name[op])], trace.words[int(shapes[op])]) for op in known}
    thick = {op for op, product in found.items() if product is not None and min(product[1:]) >= THIN}
    return np.array([op in thick for op in ops.tolist()], dtype=bool)
