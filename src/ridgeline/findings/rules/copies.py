"""Copies over the host link: pageable memory, copies that block or are not overlapped, weights streamed every step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import RidgelineError
from ridgeline.findings.context.candidate import Candidate
from ridgeline.findings.context.context import TraceContext, num_devices
from ridgeline.findings.context.evidence import memory_frac, place_of
from ridgeline.findings.context.kernels import copies_of_memory, copy_word
from ridgeline.findings.context.nesting import op_time
from ridgeline.findings.context.offload import kept_for_later
from ridgeline.findings.context.rounds import num_rounds
from ridgeline.findings.context.shapes import first_shape, is_shape, parsed, shaped_ops
from ridgeline.findings.replay.calibration import Trust
from ridgeline.findings.replay.fix import Fix, joined
from ridgeline.findings.replay.replay import Index, Mask
from ridgeline.findings.rule import rule
from ridgeline.trace.intervals import difference
from ridgeline.trace.kind import Kind

LINK_BYTES_PER_S = 12e9
"""Of an unknown host link: PCIe 3.0 x16, the slowest still in use."""
SMALL_BYTES, MANY = 1e6, 32
VALUE_BYTES = 4096
"""Less is a value that somebody reads, not data that is moved."""
STREAMED_BYTES = 64e6
FETCHED, FETCHED_BYTES = 4, 8e6
"""Tensors a round, and bytes, from which on weights that come from the host are told."""


def _link_bytes_per_s(context: TraceContext) -> float:
    try:
        # Share of a host link's rate that large copies from pinned memory reach (55 of 64 GB/s on an H200).
        return 0.85 * context.device.link("pcie").bandwidth_bytes_per_s if context.device else LINK_BYTES_PER_S
    except RidgelineError:
        return LINK_BYTES_PER_S


def _times(num: float, one: str, many: str) -> str:
    return f"{num:.3g} {one if num == 1 else many}"


def _bytes(context: TraceContext, works: Index) -> NDArray[np.float64]:
    return np.maximum(0, context.trace.optional("bytes")[context.rows[works]]).astype(np.float64)


def _calls_of(context: TraceContext, works: Index) -> Index:
    """The calls that waited for these copies: those that made them, and those that wait for their end."""
    chosen = np.zeros(context.program.num_works + 1, dtype=bool)
    chosen[works] = True
    return np.flatnonzero(chosen[context.program.waits_for] & (context.program.waits_for >= 0))


def _exposed(context: TraceContext, works: Index) -> float:
    """Share of the copies' time in which no kernel runs."""
    copies = context.time_of(context.rows[works])
    kernels = context.time_of(context.rows[np.isin(context.work_kind, (int(Kind.KERNEL), int(Kind.COMMUNICATION)))])
    return difference(copies, kernels).total / max(1, copies.total)


def _beside_the_next(context: TraceContext) -> Mask:
    """Copies on a stream of their own after the last kernel of a recording of one step: the next one would run beside
    them."""
    kernels = context.work_kind == int(Kind.KERNEL)
    start, end = context.start_ns[context.rows], context.end_ns[context.rows]
    last = int(end[kernels].max()) if kernels.any() else 0
    apart = ~np.isin(context.program.stream, context.program.stream[kernels])
    return np.asarray(apart & (start >= last) & (context.num_steps == 1), dtype=bool)


def _there_and_back(context: TraceContext) -> Index:
    """Copies to the device whose sizes come back: tensors of many sizes that go first and return are a model that is
    moved; what is kept on the host for a backward pass, and gradients for an optimizer there, come first."""
    away, back = np.flatnonzero(copies_of_memory(context, "htod")), np.flatnonzero(copies_of_memory(context, "dtoh"))
    sizes = [_bytes(context, works) for works in (away, back)]
    known, counts = np.unique(sizes[0], return_counts=True)
    same = [int(min(count, (sizes[1] == size).sum())) for size, count in zip(known, counts, strict=True)]
    # Of the copies of one size, how many come back, and tensors a round, at least: a picture that comes back is one.
    both = known[(np.array(same) >= np.maximum(1, 0.9 * counts)) & (known >= VALUE_BYTES)]
    works = np.concatenate((away[np.isin(sizes[0], both)], back[np.isin(sizes[1], both)]))
    num, moved = len(works) / 2, _bytes(context, works).sum() / 2
    if len(both) < 2 or num < 6 * num_rounds(context) or moved / context.num_steps < STREAMED_BYTES:
        return works[:0]
    first = works[np.argmin(context.start_ns[context.rows[works]])]
    return np.sort(works) if first in away else works[:0]


def _moved(context: TraceContext, works: Index) -> Candidate:
    moved = _bytes(context, works).sum() / 2 / context.num_steps
    calls = context.wiring.call_rows[np.unique(context.program.call[works])]
    return Candidate(
        what=f"Weights go to the device and back: {len(works) / 2 / context.num_steps:.3g} tensors, "
        f"{moved / 1e9:.3g} GB each way in a step, {context.frac(context.per_step_s(works)):.0%} of the time",
        cause="streaming weights over PCIe: a model is moved to the device, used, and moved away again",
        change="move it once, before the loop, and leave it there; if it does not fit, keep it in pinned memory and "
        "use it for many batches at a time",
        where=place_of(context, works),
        fix=Fix(
            works=works, keep_best=0.0, keep_worst=0.1, freed=_calls_of(context, works), aside=works,
            host=joined(context.time_of(calls), op_time(context, works)), host_best=0.0, host_worst=0.1,
        ),
        evidence=_copy_evidence(context, works),
        spans=tuple(context.rows[works[:200]].tolist()),
        unchecked=("whether the model fits into device memory",),
    )  # fmt: skip


def _left_there(context: TraceContext, works: Index) -> Candidate:
    moved = _bytes(context, works).sum() / 2 / context.num_steps
    used = memory_frac(context)
    known = f"the peak is {used:.0%} of the memory" if used is not None else "the trace does not say how full memory is"
    return replace(
        _moved(context, works),
        what="What the backward pass needs goes to the host and back: "
        f"{len(works) / 2 / context.num_steps:.3g} tensors, {moved / 1e9:.3g} GB each way in a step",
        cause=f"activations are kept on the host, over PCIe: {known}",
        change="no save_on_cpu or offloading while memory is free; else for the largest layers only, from pinned "
        "memory and on a stream of its own",
        unchecked=() if used is not None else ("whether the activations fit: record with memory",),
    )


def _roles(context: TraceContext, works: Index) -> tuple[Mask, Mask]:
    """Which copies to the device are of tensors that layers are called with as weights and never as what they work on,
    and which are of what they work on."""
    trace, shapes = context.trace, context.trace.optional("shapes")
    weights, worked_on = set[tuple[int, ...]](), set[tuple[int, ...]]()
    spans = context.host_spans(r"^aten::(linear|matmul|conv\dd)$", Kind.OP)
    for name, word in set(zip(trace.name[spans].tolist(), shapes[spans].tolist(), strict=True)):
        given = [tuple(shape) for shape in parsed(trace.words[word])[:2] if is_shape(shape) and shape]
        mixes = trace.words[name] == "aten::matmul" and [len(shape) for shape in given] != [3, 2]
        worked_on.update(given[:1])
        weights.update(shape for shape in given[1:] if len(shape) >= 2 and not mixes)
    weights -= worked_on
    ops = shaped_ops(trace, context.rows[works])
    sizes = [first_shape(trace.words[int(shapes[op])]) if op >= 0 else () for op in ops.tolist()]
    called, given_to = (np.array([size in chosen for size in sizes], dtype=bool) for chosen in (weights, worked_on))
    return called, given_to


def _fetched_weights(context: TraceContext, works: Index) -> Candidate:
    moved = _bytes(context, works)
    calls = context.wiring.call_rows[np.unique(context.program.call[works])]
    return Candidate(
        what=f"Weights come from the host: {len(works) / context.num_steps:.3g} tensors that layers are called with, "
        f"{moved.sum() / context.num_steps / 1e9:.3g} GB a step, "
        f"{context.frac(context.per_step_s(works)):.0%} of the time",
        cause="streaming weights over PCIe: layers are called with tensors that were copied from the host in this step",
        change="keep the weights on the device (quantize, shard over GPUs, offload fewer layers); else prefetch "
        "the next layer from pinned memory on its own stream",
        where=place_of(context, works),
        fix=Fix(
            works=works, keep_best=0.0, keep_worst=1.0, freed=_calls_of(context, works), aside=works,
            aside_at_worst=True,
            host=joined(context.time_of(calls), op_time(context, works)), host_best=0.0, host_worst=1.0,
        ),
        evidence=_copy_evidence(context, works),
        spans=tuple(context.rows[works[:200]].tolist()),
        unchecked=("whether the model fits into device memory",),
    )  # fmt: skip


def perhaps_weights(context: TraceContext) -> Candidate | None:
    """Many tensors of several sizes come from the host, the same ones in every round."""
    works = np.flatnonzero(copies_of_memory(context, "htod"))
    # Of a tensor, and of all in a round, that may be weights.
    works = works[_bytes(context, works) > 65536]
    sizes, times = np.unique(_bytes(context, works), return_counts=True)
    again = sizes[times >= max(2, num_rounds(context))]
    works = works[np.isin(_bytes(context, works), again)]
    moved = _bytes(context, works).sum() / context.num_steps
    if len(again) < 2 or len(works) / num_rounds(context) < FETCHED or moved < 16e6:
        return None
    back = np.flatnonzero(copies_of_memory(context, "dtoh"))
    back = back[np.isin(_bytes(context, back), again)]
    both = 2 * len(back) > len(works)
    made = _moved(context, np.union1d(works, back)) if both else _fetched_weights(context, works)
    return replace(
        made,
        what=f"{len(works) / context.num_steps:.3g} tensors of the same sizes come from the host in every step"
        + (", and go back" if both else ""),
    )


@rule(
    "weight-streaming",
    version=4,
    order=30,
    more_at_best=0.1,
    suspect=perhaps_weights,
    is_ambiguous=True,
    tell="whether it is weights that are copied: the same values in every step",
)
def weight_streaming(context: TraceContext) -> Candidate | None:
    """Most of the step is copies from the host, far more than inputs: the weights do not live on the device."""
    works = np.flatnonzero(copies_of_memory(context, "htod"))
    if not len(works):
        return None
    if len(both := _there_and_back(context)):
        return _moved(context, both)
    if len(kept := kept_for_later(context)):
        return _left_there(context, kept)
    moved = _bytes(context, works)
    per_step_s, busy_s = context.per_step_s(works), context.per_step_s(np.arange(context.program.num_works))
    large = moved > 1e6
    called, given = _roles(context, works)
    streamed = (
        per_step_s >= 0.3 * context.step_s * num_devices(context)
        and per_step_s >= 0.5 * busy_s
        and moved.sum() / context.num_steps >= STREAMED_BYTES
    )
    if (
        not streamed
        or copies_of_memory(context, "htod", "pageable")[works].mean() > 0.5
        # Large copies a step, at least: weights come layer by layer, what is computed on comes in a few pieces.
        or large.sum() / num_rounds(context) < 8
    ):
        weights = works if moved[called].sum() > 0.5 * moved.sum() else works[called]
        enough = (
            called.sum() / num_rounds(context) >= FETCHED and moved[called].sum() / context.num_steps >= FETCHED_BYTES
        )
        return _fetched_weights(context, weights) if enough else None
    if moved[given].sum() > 0.5 * moved.sum():  # batches of many tensors
        return None
    rate, each = moved.sum() / max(1e-12, context.work_s[works].sum()), context.num_steps * num_devices(context)
    return Candidate(
        what=f"Weights are streamed over the host link: {moved.sum() / each / 1e9:.3g} GB a step and device at "
        f"{rate / 1e9:.3g} GB/s, "
        f"{context.frac(per_step_s / num_devices(context)):.0%} of the time",
        cause=f"streaming weights over PCIe: {int(large.sum())} large copies from pinned host memory, and kernels "
        "wait for them",
        change="keep the weights on the device (quantize, shard over GPUs, offload fewer layers); else prefetch "
        "the next layer on its own stream",
        where=place_of(context, works),
        fix=Fix(
            works=works, keep_best=0.0, keep_worst=1.0, aside=works, aside_at_worst=True,
            host=op_time(context, works), host_best=0.0, host_worst=1.0,
        ),
        evidence=_copy_evidence(context, works),
        spans=tuple(context.rows[works[:200]].tolist()),
        unchecked=("whether the model fits into device memory",),
    )  # fmt: skip


def perhaps_small_copies(context: TraceContext) -> Candidate | None:
    """Fewer than that, and still several that could be one."""
    works = np.flatnonzero(copies_of_memory(context, "htod"))
    works = works[_bytes(context, works) < SMALL_BYTES]
    return _packed(context, works) if len(works) / num_rounds(context) >= 8 else None


def _small_copies(context: TraceContext) -> Candidate | None:
    """Many copies that could be one: each pays a call, a staging buffer and a wait."""
    works = np.flatnonzero(copies_of_memory(context, "htod"))
    works = works[_bytes(context, works) < SMALL_BYTES]
    if len(works) / num_rounds(context) < MANY:
        # Of copies that are all call and no transfer, fewer are many.
        works = works[_bytes(context, works) < 65536]
    return _packed(context, works) if len(works) / num_rounds(context) >= 16 else None


def _packed(context: TraceContext, works: Index) -> Candidate:
    moved = _bytes(context, works)
    best = np.clip(moved / _link_bytes_per_s(context) / np.maximum(context.work_s[works], 1e-12), 0.0, 1.0)
    return Candidate(
        what=f"{len(works) / context.num_steps:,.0f} copies a step to the device, {np.median(moved) / 1e3:.3g} kB each",
        cause="many small copies: every one is a call of its own, and from pageable memory a wait as well",
        change="pack the tensors into one pinned buffer, copy it once with non_blocking=True, and split it on the "
        "device",
        where=place_of(context, works),
        fix=Fix(
            works=works, keep_best=best, keep_worst=np.minimum(1.0, best + 0.2), freed=_calls_of(context, works),
            host=op_time(context, works), host_best=0.0, host_worst=0.2,
        ),
        evidence=_copy_evidence(context, works),
        spans=tuple(context.rows[works[:200]].tolist()),
    )  # fmt: skip


@rule(
    "slow-copies",
    version=2,
    order=31,
    saves="host",
    suspect=perhaps_small_copies,
    is_ambiguous=True,
    tell="is_pinned() of what is copied, and a step whose batch is on the device already, timed",
)
def slow_copies(context: TraceContext) -> Candidate | None:
    """Copies far below the link's rate: many small ones, or copies of pageable memory."""
    return _small_copies(context) or _pageable_copies(context)


def _pageable_copies(context: TraceContext) -> Candidate | None:
    works = np.flatnonzero(
        copies_of_memory(context, "htod", "pageable") | copies_of_memory(context, "dtoh", "pageable")
    )
    works = works[_bytes(context, works) > 65536]
    if not len(works):
        return None
    moved, seconds = _bytes(context, works), context.work_s[works]
    faster = np.clip(moved / _link_bytes_per_s(context) / np.maximum(seconds, 1e-12), 0.0, 1.0)
    calls = _calls_of(context, works)
    return Candidate(
        what=f"{_times(len(works) / context.num_steps, 'copy', 'copies')} a step from pageable memory, "
        f"{moved.sum() / max(1e-12, seconds.sum()) / 1e9:.3g} GB/s",
        cause="pageable memory: the driver stages every copy through a buffer of its own and the host thread waits",
        change="DataLoader(pin_memory=True) or tensor.pin_memory(), then .to(device, non_blocking=True)",
        where=place_of(context, works),
        fix=Fix(
            works=works,
            keep_best=faster,
            keep_worst=np.minimum(1.0, faster + 0.15),
            freed=calls,
            aside=works,
            host=context.time_of(context.wiring.call_rows[np.unique(context.program.call[works])]),
            host_best=0.0,
            host_worst=0.1,
        ),
        evidence=_copy_evidence(context, works),
        spans=tuple(context.rows[works[:200]].tolist()),
    )


@rule(
    "exposed-copies",
    version=2,
    order=32,
    trust=Trust(
        0.5,
        1.1,
        "fitted: one recording on an H200 gained 0.68 of the replay: copies take bandwidth from kernels beside them",
    ),
    is_ambiguous=True,
    tell="a step whose batch is on the device already, timed",
)
def exposed_copies(context: TraceContext) -> Candidate | None:
    works = np.flatnonzero(
        (copies_of_memory(context, "htod") & ~copies_of_memory(context, "htod", "pageable"))
        | copies_of_memory(context, "dtoh", "pinned")
    )
    works = works[(_bytes(context, works) > VALUE_BYTES) & ~_beside_the_next(context)[works]]
    if not len(works) or _exposed(context, works) < 0.5:
        return None
    calls = _calls_of(context, works)
    return Candidate(
        what=f"{context.per_step_s(works) * 1e3:.3g} ms of copies a step, {_exposed(context, works):.0%} of it with no "
        "kernel running",
        cause="copies are on the compute stream or the host waits for them: nothing else runs meanwhile",
        change="copy the next batch with non_blocking=True on a second torch.cuda.Stream while this one computes "
        "(a prefetcher)",
        where=place_of(context, works),
        fix=Fix(freed=calls, aside=works, aside_at_worst=True),
        evidence=_copy_evidence(context, works),
        spans=tuple(context.rows[works[:200]].tolist()),
    )


def _copy_evidence(context: TraceContext, works: Index) -> tuple[dict[str, object], ...]:
    moved, seconds = _bytes(context, works), context.work_s[works]
    heaviest = np.argsort(-seconds, kind="stable")[:5]
    return tuple(
        {
            "copy": copy_word(context, int(works[i])),
            "bytes": int(moved[i]),
            "ms": round(float(seconds[i]) * 1e3, 6),
            "bytes_per_s": float(moved[i] / seconds[i]) if seconds[i] > 0 else 0.0,
        }
        for i in heaviest.tolist()
    )
