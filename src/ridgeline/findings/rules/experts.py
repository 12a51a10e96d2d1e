"""Experts called one after another from Python: a gather, the products of one expert and a scatter, again and again."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ridgeline.findings.context.candidate import Candidate
from ridgeline.findings.context.context import TraceContext
from ridgeline.findings.context.evidence import kernel_evidence, place_of
from ridgeline.findings.context.host_time import main_threads
from ridgeline.findings.context.loop_turns import made_ns
from ridgeline.findings.context.nesting import op_time
from ridgeline.findings.context.rounds import num_rounds
from ridgeline.findings.context.shapes import is_shape, parsed
from ridgeline.findings.replay.fix import Fix, joined
from ridgeline.trace.intervals import covered_within, union
from ridgeline.trace.kind import Kind


def over_experts(context: TraceContext) -> Candidate | None:
    """Four turns in a row at least, each with products by weights of the same sizes as the one before."""
    runs = list(_runs(context))
    num_turns = sum(len(run) for run in runs)
    if num_turns < 4 * num_rounds(context):
        return None
    once = len(runs) / num_turns
    turns = [turn for run in runs for turn in run]
    time = union(np.array([start for start, _ in turns]), np.array([end for _, end in turns]))
    made = made_ns(context, np.arange(context.program.num_works))  # the gradient of a turn is of the loop as well
    works = np.flatnonzero(covered_within(time, made, made + 1) > 0)
    if not len(works):
        return None
    long = context.work_s[works] > 20e-6  # has rows enough to fill the device: grouped, it takes about as long
    host = joined(time, op_time(context, works))
    waits = np.flatnonzero(context.program.waits_for >= 0)
    waits = waits[covered_within(time, context.clock.start_ns[waits], context.clock.start_ns[waits] + 1) > 0]
    if 2 * len(waits) < num_turns:  # which tokens are whose is known before the loop
        return None
    return Candidate(
        what=f"A Python loop calls experts one after another: {num_turns / context.num_steps:,.0f} turns and "
        f"{len(works) / context.num_steps:,.0f} launches a step",
        cause="a Python loop over experts: each has its own gather, products and scatter, launched one by one, and the "
        "host reads from the device which tokens are whose",
        change="group the experts: sort tokens by expert once and multiply all of them in one grouped product "
        "(torch.nn.functional.grouped_mm, or a fused mixture-of-experts kernel); torch.bmm over a fixed capacity where "
        "that is missing",
        where=place_of(context, works),
        fix=Fix(
            works=works,
            keep_best=np.where(long, 0.9, once),
            keep_worst=np.where(long, 1.0, 0.6),
            host=host,
            host_best=once,
            host_worst=0.25,
            freed=waits,
            closed=works[1:],
        ),
        evidence=kernel_evidence(context, works),
        spans=tuple(context.rows[works[:200]].tolist()),
    )


def _runs(context: TraceContext) -> Iterator[list[tuple[int, int]]]:
    """Start and end of each turn of a loop over experts, one list for each time that the loop runs."""
    trace, shapes = context.trace, context.trace.optional("shapes")
    ops = context.of_kind(Kind.OP)
    ops = ops[np.isin(trace.thread[ops], main_threads(context)) & ~np.isin(trace.parent[ops], ops)]
    ops = ops[np.argsort(context.start_ns[ops], kind="stable")]
    gathers, products, scatters = (
        context.words_like(pattern)[trace.name[ops]]
        for pattern in (
            r"^aten::(index|index_select|gather|nonzero|where|masked_select)$",
            r"^aten::(linear|matmul|mm|addmm|bmm|einsum)$",
            r"^aten::(index_add|index_put|_index_put_impl|scatter_add|index_copy|scatter)_?$",
        )
    )
    run, rows, before = list[tuple[int, int]](), set[tuple[int, ...]](), -1
    last: tuple[tuple[int, ...], ...] = ()
    for at in np.flatnonzero(scatters).tolist():
        inside = np.arange(max(before + 1, at - 60), at)
        before = at
        first = inside[gathers[inside]]
        multiplied = inside[products[inside]]
        multiplied = multiplied[multiplied > first[0]] if len(first) else multiplied[:0]
        given = [_sizes(trace.words[int(shapes[op])]) for op in ops[multiplied].tolist()]
        weights = tuple(weight for _, weight in given)
        if not weights or weights != last:
            if len(run) >= 4 and len(rows) > 1:
                yield run
            run, rows = [], set()
        rows.update(each for each, _ in given[:1])  # layers of a network over a graph all have the same rows
        if weights:
            run.append((int(context.start_ns[ops[first[0]]]), int(context.end_ns[ops[at]])))
        last = weights
    if len(run) >= 4 and len(rows) > 1:
        yield run


def _sizes(shapes: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The rows of a recorded product, and the size of what they are multiplied with."""
    given = [tuple(shape) for shape in parsed(shapes) if is_shape(shape)]
    return (given[0][:-1], given[1]) if len(given) > 1 else ((), ())
