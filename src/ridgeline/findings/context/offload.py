"""Tensors that a forward pass sends to the host and a backward pass fetches again."""

from __future__ import annotations

import numpy as np

from ridgeline.findings.context.context import TraceContext
from ridgeline.findings.context.evidence import memory_frac
from ridgeline.findings.context.kernels import copies_of_memory
from ridgeline.findings.context.nesting import under
from ridgeline.findings.context.rounds import num_rounds
from ridgeline.findings.context.training import BACKWARD
from ridgeline.findings.replay.replay import Index

VALUE_BYTES, LEAST_BYTES = 4096, 64e6
"""Of a tensor, and of all of a step, at least."""


def kept_for_later(context: TraceContext) -> Index:
    """Copies to the host of tensors that come back, of the same sizes, inside of a backward pass, and those back: what
    would be kept on the device, where it has room."""
    away, back = (
        np.flatnonzero(copies_of_memory(context, "dtoh")),
        np.flatnonzero(copies_of_memory(context, "htod") & under(context, BACKWARD)),
    )
    sizes = [np.maximum(0, context.trace.optional("bytes")[context.rows[works]]) for works in (away, back)]
    both = np.intersect1d(sizes[0][sizes[0] >= VALUE_BYTES], sizes[1])
    moved = float(sizes[1][np.isin(sizes[1], both)].sum()) / context.num_steps
    away, back = away[np.isin(sizes[0], both)], back[np.isin(sizes[1], both)]
    # Tensors of a round that come back, at least, and of those how many are seen to go.
    few = len(back) < 6 * num_rounds(context) or len(away) < 0.9 * len(back) or moved < LEAST_BYTES
    # Of the memory, what the peak may take for activations to have room beside it.
    full = (memory_frac(context) or 0.0) > 0.5
    return away[:0] if few or full else np.sort(np.concatenate((away, back)))
