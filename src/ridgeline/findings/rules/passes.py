"""Forward passes that nothing goes back through."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ridgeline.findings.context.candidate import Candidate
from ridgeline.findings.context.context import TraceContext
from ridgeline.findings.context.evidence import kernel_evidence, place_of
from ridgeline.findings.context.host_time import main_threads
from ridgeline.findings.context.nesting import spans_under
from ridgeline.findings.context.rounds import num_rounds
from ridgeline.findings.context.training import BACKWARD
from ridgeline.findings.replay.fix import Fix
from ridgeline.findings.replay.replay import Index, Mask
from ridgeline.findings.rule import rule
from ridgeline.trace.intervals import union
from ridgeline.trace.kind import Kind

LAYERS = r"^aten::(linear|conv\dd|embedding|layer_norm|group_norm)$"
MAKES_NODES = r"^aten::(addmm|mm|bmm|convolution|embedding|native_layer_norm|native_group_norm)$"
"""Ops inside of layers whose gradient is a node of its own."""
DEEP = 6
"""Layers of a pass, at least: less is a head that is asked twice."""


@rule("redundant-pass", order=16)
def redundant_pass(context: TraceContext) -> Candidate | None:
    """A network is asked twice about a batch of the same size, both times for its gradients, and goes back through one
    of the two. A teacher or a target is asked without gradients, and of that nobody can tell whose weights it has."""
    spans = list(_never_gone_back_through(context))
    if len(spans) < num_rounds(context):
        return None
    time = union(context.start_ns[[first for first, _ in spans]], context.end_ns[[last for _, last in spans]])
    works = np.flatnonzero(context.launched_in(time))
    layers = np.array([row for span in spans for row in span], dtype=np.int64)
    return Candidate(
        what=f"{context.per_step_s(works) * 1e3:.3g} ms of a forward pass like the one before it, and no gradient goes "
        "back through it",
        cause="a pass that is not needed: the network is asked again what it has said already, for a metric say",
        change="use what the first pass gave (out.detach()); where the batch or the weights are others, "
        "torch.no_grad() around the second",
        where=place_of(context, works),
        fix=Fix(works=works, keep_best=0.0, keep_worst=1.0, host=time, host_best=0.0, host_worst=1.0),
        evidence=kernel_evidence(context, works),
        spans=tuple(layers[:200].tolist()),
        unchecked=("whether both passes are over the same batch with the same weights",),
    )


def _never_gone_back_through(context: TraceContext) -> Iterator[tuple[int, int]]:
    """Of each round the first and the last layer of such a pass."""
    nodes = _nodes(context)
    if not len(nodes):
        return
    layers = context.host_spans(LAYERS, Kind.OP)
    layers = layers[
        np.isin(context.trace.thread[layers], main_threads(context)) & ~spans_under(context, layers, BACKWARD)
    ]
    layers = layers[np.argsort(context.start_ns[layers], kind="stable")]
    if not len(layers):  # functions of somebody's own, or products by themselves
        return
    made = _made(context, layers)
    layers, made = layers[made >= 0], made[made >= 0]
    left = ~np.isin(made, nodes)
    rounds = np.searchsorted(
        np.asarray(context.window.marks_ns, dtype=np.int64), context.start_ns[layers], side="right"
    )
    for each in np.unique(rounds).tolist():
        own = rounds == each
        if _is_the_same_again(context, layers[own], made[own], left[own]):
            again = layers[own & left]
            yield int(again[0]), int(again[-1])


def _nodes(context: TraceContext) -> Index:
    """Numbers of the nodes that backward passes went through."""
    gone = context.host_spans(r"^autograd::engine::evaluate_function", Kind.OP)
    inner = context.host_spans(r"Backward\d*$", Kind.OP)
    numbers = context.trace.extra.get("sequence")
    found = numbers[np.union1d(gone, inner)] if numbers is not None else np.zeros(0, dtype=np.int64)
    return np.unique(found[found >= 0]).astype(np.int64)


def _made(context: TraceContext, layers: Index) -> Index:
    """The number of the node that each layer has made; none where it was asked without gradients."""
    trace, numbers = context.trace, context.trace.extra["sequence"]
    found = np.full(len(layers), -1, dtype=np.int64)
    ops = context.host_spans(MAKES_NODES, Kind.OP)
    ops = ops[numbers[ops] >= 0]
    at = np.searchsorted(context.start_ns[layers], context.start_ns[ops], side="right") - 1
    same = (at >= 0) & (context.end_ns[ops] <= context.end_ns[layers[np.maximum(at, 0)]])
    same &= trace.thread[ops] == trace.thread[layers[np.maximum(at, 0)]]
    found[at[same]] = numbers[ops[same]]
    return found


def _is_the_same_again(context: TraceContext, layers: Index, made: Index, left: Mask) -> bool:
    """Whether the layers that are left make up a whole pass, in one piece, with nodes of their own, and are given what
    those of the other are."""
    names, shapes = context.trace.name[layers], context.trace.optional("shapes")[layers]
    numbers, places = made[left], np.flatnonzero(left)
    if len(numbers) < DEEP or len(np.unique(numbers)) < len(numbers) or places[-1] - places[0] >= len(places):
        return False
    if len(layers) != 2 * len(numbers) or not (shapes > 0).all():
        return False
    return bool((names[~left] == names[left]).all() and (shapes[~left] == shapes[left]).all())
