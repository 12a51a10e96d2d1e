"""Kernels and copies of the window: what they are by name, how they were launched, in which order they ran."""

from __future__ import annotations

import numpy as np

from ridgeline.findings.context.context import TraceContext, derived, kernel_names
from ridgeline.findings.replay.program import BACK_TO_BACK_S
from ridgeline.findings.replay.replay import Index, Mask
from ridgeline.trace.kind import Kind


def in_precision(context: TraceContext, *precisions: str) -> Mask:
    """Products of these precisions, by their names."""
    chosen = np.fromiter(
        (name.precision in precisions for name in kernel_names(context)), dtype=bool, count=len(kernel_names(context))
    )
    return np.asarray(chosen[context.trace.name[context.rows]], dtype=bool)


@derived
def linked(context: TraceContext) -> Mask:
    return context.trace.launch[context.rows] >= 0


@derived
def launched_late(context: TraceContext) -> Index:
    """Works that a call of their own launched after their stream had run dry."""
    order = np.lexsort((context.base.work_start_s, context.program.stream))
    same = np.concatenate(([False], context.program.stream[order][1:] == context.program.stream[order][:-1]))
    freed_s = np.concatenate(([0.0], context.base.work_end_s[order][:-1]))
    dry = np.zeros(len(order), dtype=bool)
    dry[order] = same & (context.base.work_start_s[order] - freed_s > BACK_TO_BACK_S)
    alone = np.bincount(context.program.call, minlength=context.program.num_calls)[context.program.call] == 1
    return np.flatnonzero(dry & alone & linked(context))


def half_type(context: TraceContext) -> str:
    """The type of 16 bits that this device multiplies fastest, as PyTorch calls it."""
    has_bf16 = context.device is None or ("tensor", "bf16") in context.device.peaks
    return "bfloat16" if has_bf16 else "float16"


@derived
def stream_order(context: TraceContext) -> tuple[Index, Index]:
    """Works in the order in which they ran, stream by stream, and the place of each in it."""
    order = np.lexsort((context.base.work_start_s, context.program.stream))
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    return order, place


def looks_like(context: TraceContext, pattern: str) -> Mask:
    """Kernels and memsets whose op has the pattern."""
    return np.asarray(context.named(pattern, "op") & (context.work_kind != int(Kind.MEMCPY)), dtype=bool)


@derived
def is_on_device_copy(context: TraceContext) -> Mask:
    return np.asarray(copies_of_memory(context, "dtod") | (context.work_kind == int(Kind.MEMSET)), dtype=bool)


def copy_word(context: TraceContext, work: int) -> str:
    """Direction and memory of a copy, lower case: ``htod pageable``; empty for other work."""
    row = int(context.rows[work])
    if context.trace.kind[row] != int(Kind.MEMCPY):
        return ""
    word = (
        context.trace.words[int(context.trace.optional("copy")[row])]
        or context.trace.words[int(context.trace.name[row])]
    )
    return word.lower()


def copies_of_memory(context: TraceContext, direction: str, memory: str = "") -> Mask:
    """Copies in a direction (``htod``, ``dtoh``), of pageable or pinned memory if asked for."""
    words = np.fromiter(
        (direction in word.lower() and memory in word.lower() for word in context.trace.words),
        dtype=bool,
        count=len(context.trace.words),
    )
    named = words[context.trace.optional("copy")[context.rows]] | words[context.trace.name[context.rows]]
    return np.asarray(named & (context.work_kind == int(Kind.MEMCPY)), dtype=bool)
