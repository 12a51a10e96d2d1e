"""Communication between ranks: not overlapped, too fine, or waiting for whoever comes last."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from ridgeline.findings.context.candidate import Candidate
from ridgeline.findings.context.context import TraceContext
from ridgeline.findings.context.evidence import host_evidence, kernel_evidence, place_of
from ridgeline.findings.context.nesting import op_time
from ridgeline.findings.context.rounds import num_rounds
from ridgeline.findings.context.training import trains
from ridgeline.findings.finding import Where
from ridgeline.findings.replay.calibration import Trust
from ridgeline.findings.replay.fix import Fix
from ridgeline.findings.replay.replay import Index, Seconds
from ridgeline.findings.rule import rule
from ridgeline.trace.intervals import difference
from ridgeline.trace.kind import Kind
from ridgeline.trace.table import Trace

EXPERTS = re.compile(r"all_?to_?all|sendrecv", re.IGNORECASE)
STAGES = re.compile(r"\bsend\b|\brecv\b|SendRecv|ncclKernel_Send|_p2p|isend|irecv", re.IGNORECASE)


def _collectives(context: TraceContext) -> Index:
    return np.flatnonzero(context.work_kind == int(Kind.COMMUNICATION))


@dataclass(frozen=True, slots=True)
class _Arrivals:
    """What a rank would save if everyone arrived together, for each of its collectives, and who came last."""

    keep: Seconds
    last_rank: Index
    names: tuple[str, ...]


def _arrivals(context: TraceContext) -> _Arrivals | None:
    """Collectives matched over ranks by their order; None when ranks differ or there is one."""
    works = _collectives(context)
    own = context.rows[works]
    if not context.others or not len(works):
        return None
    tables = [trace.in_order(trace.of_kind(Kind.COMMUNICATION) & (trace.device >= 0)) for trace in context.others]
    inside = [_inside(context, trace, rows) for trace, rows in zip(context.others, tables, strict=True)]
    if any(len(rows) != len(works) for rows in inside):
        return None
    order = np.argsort(context.start_ns[own], kind="stable")
    starts = [trace.start_s[rows] + trace.origin_ns / 1e9 for trace, rows in zip(context.others, inside, strict=True)]
    lasts = [trace.duration_s[rows] for trace, rows in zip(context.others, inside, strict=True)]
    starts.append(context.trace.start_s[own][order] + context.trace.origin_ns / 1e9)
    lasts.append(context.trace.duration_s[own][order])
    ranks = np.array([_rank(trace) for trace in context.others] + [_rank(context.trace)])
    least = np.min(np.stack(lasts), axis=0)
    last = ranks[np.argmax(np.stack(starts), axis=0)]
    keep = np.ones(len(works))
    keep[order] = np.clip(least / np.maximum(lasts[-1], 1e-12), 0.0, 1.0)
    names = tuple(context.trace.words[int(word)] for word in context.trace.name[own])
    return _Arrivals(keep, last, names)


def _inside(context: TraceContext, trace: Trace, rows: Index) -> Index:
    """Those of another rank's collectives that fall into the window, by step if steps are known."""
    works = _collectives(context)
    if len(rows) == len(works):
        return rows
    steps = np.unique(context.trace.step[context.rows[works]])
    return rows[np.isin(trace.step[rows], steps)]


def _rank(trace: Trace) -> int:
    return int(trace.rank[0]) if len(trace) else -1


def _waiting(context: TraceContext) -> tuple[_Arrivals, int, float] | None:
    """Arrivals, the rank that comes last most often, and in which share; only where waiting matters."""
    found = _arrivals(context)
    if found is None:
        return None
    works = _collectives(context)
    waited_s = float((context.work_s[works] * (1 - found.keep)).sum()) / context.num_steps
    if context.frac(waited_s) < 0.02:
        return None
    ranks, counts = np.unique(found.last_rank, return_counts=True)
    most = int(np.argmax(counts))
    return found, int(ranks[most]), float(counts[most] / len(found.last_rank))


def _candidate(
    context: TraceContext, found: _Arrivals, rank: int | None, what: str, cause: str, change: str
) -> Candidate:
    works = _collectives(context)
    return Candidate(
        what=what,
        cause=cause,
        change=change,
        where=Where(rank=rank) if rank is not None else place_of(context, works),
        fix=Fix(works=works, keep_best=found.keep, keep_worst=0.5 + 0.5 * found.keep),
        evidence=kernel_evidence(context, works),
        spans=tuple(context.rows[works[:200]].tolist()),
        unchecked=("clocks of the ranks are taken as they are",),
    )


def _straggler(context: TraceContext) -> Candidate | None:
    waiting = _waiting(context)
    # Share of the collectives in which the same rank comes last, from which on it is a straggler and not chance.
    if waiting is None or waiting[2] < 0.6:
        return None
    found, rank, share = waiting
    return _candidate(
        context, found, rank,
        f"Rank {rank} comes last in {share:.0%} of the collectives; the others wait inside them",
        "waiting for a straggler: the time is in the collectives, the cause is on the rank that comes last",
        f"look at rank {rank}: its input, host and clocks (ridgeline diff of its trace and another's); give it "
        "less work",
    )  # fmt: skip


def _stage_imbalance(context: TraceContext) -> Candidate | None:
    waiting = _waiting(context)
    if waiting is None or not any(STAGES.search(name) for name in waiting[0].names):
        return None
    return _candidate(
        context, waiting[0], None,
        "Pipeline stages wait for each other",
        "imbalance of stages: a send or receive waits for the slower neighbor",
        "move layers from the slowest stage, more micro-batches, or an interleaved schedule",
    )  # fmt: skip


def _expert_imbalance(context: TraceContext) -> Candidate | None:
    waiting = _waiting(context)
    if waiting is None or not any(EXPERTS.search(name) for name in waiting[0].names):
        return None
    return _candidate(
        context, waiting[0], None,
        "Ranks reach the exchange of tokens at different times",
        "imbalance of experts: ranks with popular experts compute longer, the others wait in all-to-all",
        "raise the load-balancing loss or its bias update, cap capacity, or place popular experts on several ranks",
    )  # fmt: skip


def _pipeline_bubble(context: TraceContext) -> Candidate | None:
    """Planned waits of a pipeline's schedule, in runs that mark them."""
    bubbles = context.of_kind(Kind.BUBBLE)
    waits = bubbles[context.trace.duration_s[bubbles] > 0]
    if not len(waits):
        return None
    per_step_s = float(context.trace.duration_s[waits].sum()) / context.num_steps
    starts = context.start_ns[context.rows]
    ends = np.unique(context.end_ns[waits])
    works = np.flatnonzero(np.isin(starts, np.concatenate((ends - 1, ends, ends + 1))))
    return Candidate(
        what=f"{per_step_s * 1e3:.3g} ms of bubbles a step ({context.frac(per_step_s):.0%})",
        cause="pipeline bubble: the stage waits for others to fill and drain the pipeline",
        change="more micro-batches a step, an interleaved or zero-bubble schedule, or fewer stages",
        where=Where(rank=_rank(context.trace)),
        fix=Fix(closed=works),
        evidence=host_evidence(context, waits),
        spans=tuple(waits[:200].tolist()),
        unchecked=("whether the memory allows more micro-batches in flight",),
        trust=Trust(0.65, 1.0, "assumed: a schedule without bubbles is the best there is"),
    )


def _small_buckets(context: TraceContext) -> Candidate | None:
    works = _collectives(context)
    reductions = works[context.named(r"all_?reduce|reduce_?scatter|all_?gather")[works]]
    # Whether ops were recorded and none of them is of learning: then there are no gradients.
    if len(reductions) / num_rounds(context) < 12 or (
        len(context.of_kind(Kind.OP)) > 0 and not trains(context)
    ):  # layers that are split have results to exchange
        return None
    sent = context.trace.optional("message_bytes")[context.rows[reductions]].astype(np.float64)
    known = sent > 0
    small = (known & (sent < 4e6)) | (~known & (context.work_s[reductions] < 150e-6))
    if small.mean() < 0.6:
        return None
    chosen = reductions[small]
    return Candidate(
        what=f"{len(reductions) / context.num_steps:.3g} small collectives a step"
        + (f", {np.median(sent[known]) / 1e6:.2g} MB each" if known.any() else ""),
        cause="gradient buckets too small: each collective pays its latency and none fills the link",
        change="DistributedDataParallel(…, bucket_cap_mb=25 or more); FSDP: wrap larger units",
        where=place_of(context, chosen),
        fix=Fix(
            works=chosen,
            keep_best=0.3,
            keep_worst=0.85,
            aside=chosen,
            host=op_time(context, chosen),
            host_best=0.3,
            host_worst=1.0,
        ),
        evidence=kernel_evidence(context, chosen),
        spans=tuple(context.rows[chosen[:200]].tolist()),
    )


@rule("exposed-communication", order=37)
def exposed_communication(context: TraceContext) -> Candidate | None:
    """Collectives that nothing computes beside, or so small that each pays its latency."""
    return _small_buckets(context) or _exposed(context)


@rule("rank-imbalance", version=2, order=33)
def rank_imbalance(context: TraceContext) -> Candidate | None:
    """The rank waits for others: for one that is late, for a stage or experts with more work, or by its schedule."""
    late = _straggler(context) or _stage_imbalance(context) or _expert_imbalance(context)
    return late or _pipeline_bubble(context)


def _exposed(context: TraceContext) -> Candidate | None:
    works = _collectives(context)
    if not len(works):
        return None
    busy = context.time_of(context.rows[works])
    kernels = context.time_of(context.rows[context.work_kind == int(Kind.KERNEL)])
    exposed = difference(busy, kernels)
    per_step_s = exposed.total / 1e9 / context.num_steps
    if context.frac(per_step_s) < 0.02:
        return None
    return Candidate(
        what=f"{per_step_s * 1e3:.3g} ms of communication a step with no computation beside it "
        f"({exposed.total / max(1, busy.total):.0%} of it)",
        cause="exposed communication: collectives are not overlapped with computation",
        change="overlap: DDP with gradient_as_bucket_view and static_graph, FSDP2 prefetch and "
        "reshard_after_forward, async_op=True and a later wait()",
        where=place_of(context, works),
        fix=Fix(aside=works, works=works, keep_best=1.0, keep_worst=0.75),
        evidence=kernel_evidence(context, works),
        spans=tuple(context.rows[works[:200]].tolist()),
        unchecked=() if context.others else ("how much of it is waiting for other ranks: only one rank is here",),
    )
