"""Backward passes, optimizer steps, and forward work that runs again in a backward pass."""

from __future__ import annotations

import numpy as np

from ridgeline.findings.context.context import TraceContext, derived
from ridgeline.findings.context.nesting import children_of, next_start, spans_inside, spans_under, under
from ridgeline.findings.replay.replay import Index, Mask
from ridgeline.trace.intervals import Intervals, union
from ridgeline.trace.kind import Kind

FORWARD_OPS = (
    r"^aten::(linear|layer_norm|rms_norm|group_norm|batch_norm|scaled_dot_product_attention|gelu|silu|relu|softmax|dropout"
    r"|conv\dd|embedding)$"
)
"""Ops that only a forward pass calls: in a backward pass they are a second time."""
BACKWARD = r"evaluate_function|Backward\d*$"
LOSS_BACKWARD = (
    r"^autograd::engine::evaluate_function: (NllLoss|CrossEntropy|MseLoss|L1Loss|SmoothL1|HuberLoss|BinaryCross|KlDiv)"
)


def trains(context: TraceContext) -> bool:
    """Whether there is a backward pass or an optimizer in the trace."""
    return len(context.host_spans(r"Backward\d*$|^Optimizer\.step")) > 0


@derived
def num_backward_passes(context: TraceContext) -> int:
    """Backward passes of the window: losses of several tasks follow each other at once, those of several batches do
    not, and between two passes there is a forward one: losses of every layer or moment are of one pass."""
    starts = np.sort(context.start_ns[context.host_spans(LOSS_BACKWARD, Kind.OP)])
    if len(starts) < 2:
        return len(starts)
    # Launches between the gradients of two losses from which on they are of two passes.
    between = np.diff(np.searchsorted(np.sort(context.launch_ns), starts)) >= 10
    calls = context.host_spans(FORWARD_OPS, Kind.OP)
    forward = np.sort(context.start_ns[calls[~spans_under(context, calls, BACKWARD)]])
    if len(forward):
        between &= np.diff(np.searchsorted(forward, starts)) > 0
    return 1 + int(between.sum())


@derived
def num_turns(context: TraceContext) -> int:
    """How often a forward pass is followed by a backward one, whatever its loss is made of."""
    nodes = context.host_spans(r"^autograd::engine::evaluate_function", Kind.OP)
    calls = context.host_spans(FORWARD_OPS, Kind.OP)
    forward = np.sort(context.start_ns[calls[~spans_under(context, calls, BACKWARD)]])
    before = np.unique(np.searchsorted(forward, context.start_ns[nodes]))
    return int((before > 0).sum())


def passes_a_step(context: TraceContext) -> float:
    """Backward passes of an optimizer step, also where nobody marked the steps of a recording."""
    return num_backward_passes(context) / _num_updates(context)


def turns_a_step(context: TraceContext) -> float:
    """The same by turns."""
    return num_turns(context) / _num_updates(context)


@derived
def _num_updates(context: TraceContext) -> int:
    return max(context.num_steps, len(context.host_spans(r"^Optimizer\.step", Kind.ANNOTATION, Kind.OP)))


@derived
def recomputed(context: TraceContext) -> Mask:
    """Forward work that runs again inside the backward pass."""
    backward = under(context, BACKWARD)
    inside = _forward_again(context)
    reentrant = under(context, r"CheckpointFunctionBackward") & ~under(context, r"evaluate_function: (?!Checkpoint)")
    if not len(inside):
        return np.asarray(reentrant, dtype=bool)
    return np.asarray((backward & context.launched_in(recomputing_time(context))) | reentrant, dtype=bool)


@derived
def _forward_again(context: TraceContext) -> Index:
    """Ops of a forward pass inside of a backward one, but not those that somebody's own gradient is made of."""
    spans = context.host_spans(FORWARD_OPS, Kind.OP)
    # Gradients that a program wrote itself (those of PyTorch end in a number): reversible layers and the like compute
    # forward work there by design.
    own = context.host_spans(r"^(?!CheckpointFunction)\w+Backward$", Kind.OP)
    own = own[~np.array([_goes_through_again(context, span) for span in own.tolist()], dtype=bool)]
    return spans[spans_under(context, spans, BACKWARD) & ~spans_inside(context, spans, own)]


def _goes_through_again(context: TraceContext, node: int) -> bool:
    """Whether a gradient that somebody wrote runs layers forward and then backward, as checkpoints do: a reversible
    layer subtracts what it has computed again from what it was given."""
    names = context.trace.name[children_of(context, node)]
    forward, backward, taken = (
        bool(context.words_like(pattern)[names].any())
        for pattern in (FORWARD_OPS, r"^autograd::engine", r"^aten::(sub|rsub)_?$")
    )
    return forward and backward and not taken


@derived
def recomputing_time(context: TraceContext) -> Intervals:
    """Host time of forward passes inside the backward pass: from the node's start to the op after the last of
    them."""
    spans = _forward_again(context)
    parent = context.trace.parent[spans]
    order = np.lexsort((context.start_ns[spans], parent))
    spans, parent = spans[order], parent[order]
    if not len(spans):
        return Intervals(spans, spans)
    last = np.flatnonzero(np.concatenate((parent[1:] != parent[:-1], [True])))
    return union(context.start_ns[parent[last]], np.array([next_start(context, int(spans[i])) for i in last.tolist()]))
