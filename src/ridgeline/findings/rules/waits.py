"""The host waiting for the device: reading a value back, explicit synchronization, logging every step."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from ridgeline.findings.context.candidate import Candidate
from ridgeline.findings.context.context import TraceContext
from ridgeline.findings.context.evidence import host_evidence, place_of_host
from ridgeline.findings.context.host_time import main_threads
from ridgeline.findings.context.kernels import copies_of_memory, looks_like, stream_order
from ridgeline.findings.context.nesting import FACTORED, op_time, outermost
from ridgeline.findings.context.offload import kept_for_later
from ridgeline.findings.context.rounds import comes_again, num_rounds
from ridgeline.findings.context.shapes import first_dtype
from ridgeline.findings.context.waits import Wait, copies_of, host_waits, launches_between, next_launch
from ridgeline.findings.finding import Where
from ridgeline.findings.replay.calibration import Trust
from ridgeline.findings.replay.fix import NOWHERE, Fix, joined
from ridgeline.findings.replay.replay import Index
from ridgeline.findings.rule import rule
from ridgeline.trace.intervals import Intervals, covered_within, difference, union
from ridgeline.trace.kind import Kind

READS = re.compile(
    r"aten::(item|_local_scalar_dense|is_nonzero|nonzero|masked_select|unique|_unique|equal|allclose|bincount)"
)
SEARCHES = re.compile(r"^Optimizer\.step#LBFGS")
LOGS = re.compile(
    r"(?<!method )(?<!function )\blog(ging|ger)?\b|\bprint\b|tensorboard|SummaryWriter|wandb|add_scalar|tqdm|mlflow"
    r"|metrics?\b",
    re.IGNORECASE,
)
LOG_SPANS = (
    r"\blogging\b|\blogger\b|\bprint\b|tensorboard|SummaryWriter|\bwandb\b|add_scalar|\blog_metrics"
    r"|(?<!method )(?<!function )\blog\b(?!\W*(prob|lik|sum|soft|mel|det|odds|ratio|dens|norm))"
)
"""Of annotations and lines of Python; a built-in ``log`` is a logarithm, and so is one of chances."""
READ_SPANS = r"^aten::(item|_local_scalar_dense|is_nonzero|nonzero|masked_select|to|_to_copy|copy_|cpu)$"
TENSOR_BYTES = 1024
"""Less is a value or two that a program looks at; more is a tensor that it works on."""
BUSY_S = 300e-6
"""No launch takes this long: the host does something with what it has read."""
FETCHED_BYTES = 1e6
WATCHES = (
    r"^aten::(linalg_vector_norm|norm|abs|pow|square|sum|mean|max|min|amax|amin|any|all|isinf|isnan|isfinite|eq|ne|lt|le"
    r"|gt|ge|std|var|argmax|logical_not|logical_and|bitwise_or|bitwise_and|fill_|copy_|_to_copy|div|sqrt|stack|cat)$"
)
"""Ops that make a value or two of a tensor in order to look at it."""
WRITTEN_S = 150e-6
"""Of Python between two ops: 98 of 100 reads are followed by 45 µs or less, formatting and writing takes over 200."""
AFTER_S = 60e-6
"""The same of what may be written, where nothing is told by it alone."""
QUESTION = "aten::is_nonzero"
"""What Python calls for ``if tensor:``, which decides what comes next and is nothing that somebody writes down."""
ASKED_FRAC = 0.05
"""The same where that read is such a question, asked once: a library's own (whether a mask is needed). Four such were
taken away on an H200, and brought 0.21 ± 0.32 of 16.8 ms, 1.03 ± 0.98 of 30.6, 0.36 ± 0.90 of 83 and 0.15 ± 0.52 of
8.3, where up to 4 % of the step were promised at worst."""
NO_OP = -1
OWN_READS = FACTORED + r"|^torchvision::|_ctc_loss$|^aten::(_?coalesce|_?sparse_\w+)$|\b(Cumprod|Prod)Backward\d*$"
COPIES_BACK = re.compile(r"dtoh|device -> (pageable|pinned|host)")


def _is_log(wait: Wait) -> bool:
    return any(LOGS.search(name) for name in wait.names[1:])


def _is_read(wait: Wait) -> bool:
    """Whether a value is read that the program could leave where it is; a search along a line asks for its slopes."""
    asks = any(SEARCHES.search(name) for name in wait.names)
    return not asks and (any(READS.search(name) for name in wait.names) or _is_copy_back(wait))


def _is_upload(wait: Wait) -> bool:
    return "htod" in wait.copy


def _regular(context: TraceContext, waits: list[Wait]) -> list[Wait]:
    """Those of the waits that come in every round, told apart by what is around them: a step is not what a program does
    every hundredth time."""
    alike = dict[tuple[str, ...], list[Wait]]()
    for wait in waits:
        alike.setdefault(_kind(wait), []).append(wait)
    kept = {kind for kind, found in alike.items() if comes_again(context, _rows(found))}
    return [wait for wait in waits if _kind(wait) in kept]


def _kind(wait: Wait) -> tuple[str, ...]:
    """Its line, its call and its ops; what somebody wrote around them may have the step's number in it."""
    return (wait.source, wait.names[0], *(name for name in wait.names if name.startswith("aten::")))


def perhaps_logging(context: TraceContext) -> Candidate | None:
    """Whatever is read or fetched in every round, and then worked on while nothing of it comes back at once."""
    reads = [wait for wait in host_waits(context) if (_is_read(wait) or _is_copy_back(wait)) and not _is_upload(wait)]
    reads = [wait for wait in reads if not _answered(context, wait) and not _are_whole(context, wait)]
    waits, busy = _followed(context, _regular(context, reads), AFTER_S)
    if not waits:
        return None
    return Candidate(
        what=f"{len(waits) / context.num_steps:.3g} reads a step after which the host is busy and sends nothing back",
        cause="synchronous logging: what is read is formatted, printed or written by the thread that launches",
        change="log every N steps, keep values on the device and read them together, or log from a thread",
        where=_place(waits),
        fix=_unread(context, waits, busy),
        evidence=host_evidence(context, _rows(waits)),
        spans=tuple(_rows(waits)[:200].tolist()),
    )


@rule(
    "logging",
    version=6,
    order=14,
    saves="host",
    suspect=perhaps_logging,
    is_ambiguous=True,
    tell="whether what is read is printed or written, and nothing is computed with it",
)
def logging(context: TraceContext) -> Candidate | None:
    """Values read back, formatted and written in every step."""
    scalars = [
        wait
        for wait in host_waits(context)
        if _is_read(wait) and wait.num_bytes < TENSOR_BYTES and not (_is_upload(wait) or QUESTION in wait.names)
    ]
    scalars = [wait for wait in scalars if not _reads_by_itself(context, _outermost(context, wait))]
    scalars = [wait for wait in scalars if not _are_whole(context, wait)]
    launching = context.time_of(
        np.union1d(context.of_kind(Kind.OP), context.host_spans(r"^Optimizer\.", Kind.ANNOTATION, Kind.OP))
    )
    scalars = [wait for wait in scalars if not _answered(context, wait)]
    used, handled = _followed(context, _regular(context, scalars), WRITTEN_S, launching)
    waits = _regular(context, [wait for wait in host_waits(context) if _is_log(wait) and not _is_upload(wait)])
    shown, formatted = _followed(context, _regular(context, _shown(context)), BUSY_S, launching)
    waits += [wait for wait in (*used, *shown) if wait not in waits]
    spans = context.host_spans(LOG_SPANS, Kind.ANNOTATION, Kind.PYTHON)
    spans = spans[np.isin(context.trace.thread[spans], main_threads(context))]
    spans = spans if comes_again(context, spans) else spans[:0]
    if not waits and not len(spans):
        return None
    return Candidate(
        what=f"Logging in the step: {len(waits) / context.num_steps:.3g} reads of device values a step",
        cause="synchronous logging: the value is waited for, and the thread that launches formats and writes it",
        change="log every N steps, keep values on the device (loss.detach() into a list) and read them together, "
        "or log from a thread",
        where=_place(waits) if waits else place_of_host(context, spans),
        fix=_unread(context, waits, joined(context.time_of(spans), handled, formatted)),
        evidence=host_evidence(context, np.concatenate((spans, _rows(waits)))),
        spans=tuple(spans[:200].tolist()),
    )


def perhaps_round_trip(context: TraceContext) -> Candidate | None:
    """The same reads, whether something comes back or not."""
    reads = [wait for wait in host_waits(context) if (_is_read(wait) or _is_copy_back(wait)) and not _is_upload(wait)]
    waits, busy = _followed(context, _regular(context, reads), BUSY_S)
    if not waits:
        return None
    return Candidate(
        what=f"{len(waits) / context.num_steps:.3g} reads a step after which the host is busy before it launches again",
        cause="a round trip through the host: what is read is computed with there",
        change="compute it on the device with CUDA tensors, and move only what leaves the program",
        where=_place(waits),
        fix=_unread(context, waits, busy),
        evidence=host_evidence(context, _rows(waits)),
        spans=tuple(_rows(waits)[:200].tolist()),
    )


@rule(
    "host-round-trip",
    version=6,
    order=19,
    saves="host",
    more_at_best=0.1,
    suspect=perhaps_round_trip,
    is_ambiguous=True,
    tell="whether something is computed on the host with what is read",
)
def host_round_trip(context: TraceContext) -> Candidate | None:
    """A tensor goes to the host, is computed on there, and comes back."""
    shown = _shown(context)
    fetched = [wait for wait in _fetched(context) if wait not in shown]
    values = [wait for wait in host_waits(context) if 0 < wait.num_bytes < TENSOR_BYTES and _is_copy_back(wait)]
    fetched += [wait for wait in values if _answered(context, wait)]
    fetched = _regular(context, sorted(fetched, key=lambda wait: wait.call))
    waits, time = _followed(context, fetched, BUSY_S)
    alike = {_kind(wait) for wait in waits}
    last = [wait for wait in fetched if wait not in waits and _kind(wait) in alike]
    waits, time = waits + last, joined(time, _after_the_end(context, last))
    copies = _read_back(context, waits)
    # Times as long as what the host does with it: then fetching a tensor is what costs (15 on an H200 where 50 MB were
    # fetched and looked at, at most 1.1 where something was worked out of them).
    if not waits or float(context.work_s[copies].sum()) > 4.0 * time.total / 1e9:
        return None
    change = "keep it on the device: sample, mask and sort with CUDA tensors; move only what leaves the program"
    if not copies_of_memory(context, "htod").any():
        change = (
            "nothing of it comes back: compute it on the device, and fetch, print or write it every N steps, or in "
            "another thread"
        )
    return Candidate(
        what=f"{len(waits) / context.num_steps:.3g} times a step a tensor goes to the host, is worked on there, and "
        "the device waits",
        cause="a round trip through the host: computation on CPU tensors in the middle of the step",
        change=change,
        where=_place(waits),
        fix=Fix(
            host=joined(time, context.time_of(_rows(waits))),
            host_best=0.02,
            host_worst=0.15,
            freed=np.array([wait.call for wait in waits], dtype=np.int64),
            works=copies,
            keep_best=0.0,
            keep_worst=0.15,
        ),
        evidence=host_evidence(context, _rows(waits)),
        spans=tuple(_rows(waits)[:200].tolist()),
    )


def _are_whole(context: TraceContext, wait: Wait) -> bool:
    """Whether whole numbers are read, by what their op was given, else by their bytes."""
    dtypes, words = context.trace.optional("dtypes"), context.trace.words
    given = (first_dtype(words[int(dtypes[row])]) for row in context.trace.path(wait.row))
    kind = next((found for found in given if found), "")
    # Of a whole number: sizes and counts are read to go on with (what to send to whom, how many rows there are), and
    # what is written down is a loss in two or four.
    return kind in ("int64", "int32", "uint8", "bool") if kind else wait.num_bytes > 0 and wait.num_bytes % 8 == 0


def _after_the_end(context: TraceContext, waits: list[Wait]) -> Intervals:
    """Host time after the end of a round whose last call is such a fetch: somebody waits there for the device first."""
    ends = [call for wait in waits if (call := next_launch(context, wait.call)) is not None]
    calls = [call for end in ends if (call := next_launch(context, end)) is not None]
    calls = [call for call in calls if float(context.wiring.program.gap_s[call]) > BUSY_S]
    return union(context.clock.gap_start_ns[calls], context.clock.start_ns[calls])


def _answered(context: TraceContext, wait: Wait) -> bool:
    """Whether the next that is launched after a read, in the same round and after a while, is a copy to the device:
    what was read is worked on at the host, and what comes of it goes back."""
    call = next_launch(context, wait.call)
    if call is None or float(context.wiring.program.gap_s[call]) <= BUSY_S:
        return False
    starts = np.asarray(context.window.marks_ns, dtype=np.int64)
    ends, begins = context.end_ns[wait.row], context.clock.start_ns[call]
    same = np.searchsorted(starts, ends, side="right") == np.searchsorted(starts, begins, side="right")
    first, last = np.searchsorted(context.program.call, (call, call + 2)).tolist()
    return bool(same and copies_of_memory(context, "htod")[first:last].any())


def _fetched(context: TraceContext) -> list[Wait]:
    return [wait for wait in host_waits(context) if _is_copy_back(wait) and wait.num_bytes >= TENSOR_BYTES]


def _is_written(context: TraceContext, wait: Wait) -> bool:
    """Whether what follows a fetch takes as long as making text of it does."""
    call = next_launch(context, wait.call)
    # Of formatting, at least (7e-7 for a table of floats that numpy prints); numpy computes ten times as fast.
    return call is not None and float(context.wiring.program.gap_s[call]) >= 1e-7 * wait.num_bytes


def _shown(context: TraceContext) -> list[Wait]:
    """Fetches of tables that are made text of: small, and nothing goes back to the device in the same round. Of 11
    tensors that were worked on at the host ten came back, and the other one was 8 MB (H200)."""
    returns = np.sort(context.launch_ns[copies_of_memory(context, "htod")])
    ends = np.append(np.asarray(context.window.marks_ns, dtype=np.int64), context.window.end_ns)
    found = [wait for wait in _fetched(context) if wait.num_bytes < FETCHED_BYTES and _is_written(context, wait)]
    after = np.array([context.end_ns[wait.row] for wait in found], dtype=np.int64)
    until = ends[np.minimum(np.searchsorted(ends, after, side="right"), len(ends) - 1)]
    back = np.searchsorted(returns, until) > np.searchsorted(returns, after)
    answered = {_kind(wait) for wait, comes_back in zip(found, back.tolist(), strict=True) if comes_back}
    return [wait for wait in found if _kind(wait) not in answered]  # the last of a round comes back in the next


def _followed(
    context: TraceContext, waits: list[Wait], least_s: float, beside: Intervals = NOWHERE
) -> tuple[list[Wait], Intervals]:
    """Those of the waits after which the host is busy for a while before it launches again, with the waits right before
    them, and that time; ``beside`` is host time that does not count."""
    clock, kept, calls = context.clock, list[Wait](), list[int]()
    made = _makers(context, waits)
    busy_s = context.wiring.program.gap_s - covered_within(beside, clock.gap_start_ns, clock.start_ns) / 1e9
    series = list[Wait]()
    for wait in waits:
        if series and launches_between(context, series[-1].call, wait.call, but=made.get(wait.call, ())):
            series = []
        series.append(wait)
        call = next_launch(context, wait.call)
        if call is not None and float(busy_s[call]) > least_s:
            kept += series
            calls.append(call)
            series = []
    return kept, difference(union(clock.gap_start_ns[calls], clock.start_ns[calls]), beside)


def _is_copy_back(wait: Wait) -> bool:
    return bool(COPIES_BACK.search(wait.copy))


@rule(
    "synchronization",
    version=8,
    order=20,
    saves="host",
    is_ambiguous=True,
    tell="a step without these reads, timed",
)
def synchronization(context: TraceContext) -> Candidate | None:
    """The host waits for a value, or explicitly for the device."""
    return _value_read(context) or _synchronize(context)


def _value_read(context: TraceContext) -> Candidate | None:
    # Ops that read a tensor back and wait for uploads as well, as a CTC loss does with its lengths: without the read
    # they wait all the same, and what they read is theirs, not the program's.
    held = {_outermost(context, wait) for wait in host_waits(context) if _is_upload(wait)} - {NO_OP}
    reads = [wait for wait in host_waits(context) if _is_read(wait) and not _is_upload(wait)]
    kept = set(kept_for_later(context).tolist())  # nobody reads those
    # Whether so much comes back through pageable memory that the copy is what is waited for.
    waits = [
        wait
        for wait in reads
        if not (wait.num_bytes >= FETCHED_BYTES and "pageable" in wait.copy)
        and not kept.intersection(copies_of(context, wait))
    ]
    waits = [
        wait for wait in waits if (op := _outermost(context, wait)) not in held and not _reads_by_itself(context, op)
    ]
    waits = _regular(context, waits)
    if not waits:
        return None
    ops = sorted({name for wait in waits for name in wait.names if READS.search(name)})
    return Candidate(
        what=f"{len(waits) / context.num_steps:.3g} times a step the host waits for a value from the device",
        cause=f"synchronization: {', '.join(ops[:3]) or 'a copy to the host'} waits until everything launched so "
        "far is done",
        change="keep the value on the device (torch.where, masks, capturable optimizers), read it once after the step, "
        "or copy it with non_blocking=True and look at it a step later; what is only logged, read every N steps",
        where=_place(waits),
        fix=_with_turns(context, _unread(context, waits, NOWHERE), waits),
        evidence=host_evidence(context, _rows(waits)),
        spans=tuple(_rows(waits)[:200].tolist()),
        sure_frac=_least_sure(context, waits),
    )


def _least_sure(context: TraceContext, waits: list[Wait]) -> float:
    if not _are_few(context, waits):
        return 0.0
    # Of the step, what one read in it must cost at worst: a queue that is drained once is soon filled again (0.21 ±
    # 0.32 of 16.8 ms on an H200, where 0.13 to 0.97 were promised).
    return ASKED_FRAC if all(QUESTION in wait.names for wait in waits) else 0.01


def _are_few(context: TraceContext, waits: list[Wait]) -> bool:
    """Whether a value is read once in a step: then what it costs must be sure, since libraries ask such questions
    themselves (whether a mask is needed), and a copy and its wait are two calls of one read."""
    ops = [(_outermost(context, wait), wait.call) for wait in waits]
    return len({op if op != NO_OP else -2 - call for op, call in ops}) <= num_rounds(context)


def _outermost(context: TraceContext, wait: Wait) -> int:
    """The op that a program called and that made this wait."""
    path = [at for at in context.trace.path(wait.row) if context.trace.kind[at] == int(Kind.OP)]
    return int(path[-1]) if path else NO_OP


def _reads_by_itself(context: TraceContext, op: int) -> bool:
    """Whether an op looks at a value in order to do what it does: solvers at their errors, suppression of boxes at its
    mask. Nothing that the program keeps elsewhere spares it that."""
    return op != NO_OP and bool(context.words_like(OWN_READS)[context.trace.name[op]])


def _synchronize(context: TraceContext) -> Candidate | None:
    waits = [
        wait
        for wait in host_waits(context)
        if "Synchronize" in wait.names[0]
        and next_launch(context, wait.call) is not None
        and not (_is_read(wait) or _is_copy_back(wait) or _is_upload(wait) or _is_log(wait))
        and _outermost(context, wait) == NO_OP  # an op that waits by itself is no line that somebody could remove
    ]
    waits = _regular(context, waits)
    if not waits:
        return None
    return Candidate(
        what=f"{len(waits) / context.num_steps:.3g} explicit synchronizations a step",
        cause=f"{waits[0].names[0]}: the host stops until the device is done, then the device waits for the host",
        change="remove torch.cuda.synchronize() from the loop; time with CUDA events, order streams with "
        "wait_stream or events",
        where=_place(waits),
        fix=Fix(
            freed=np.array([wait.call for wait in waits], dtype=np.int64),
            host=context.time_of(_rows(waits)),
            host_best=0.0,
            host_worst=0.0,
        ),
        evidence=host_evidence(context, _rows(waits)),
        spans=tuple(_rows(waits)[:200].tolist()),
        unchecked=("whether the program needs the order that the synchronization gives",),
        trust=Trust(
            0.75,
            1.25,
            "fitted: recordings on an H200 gained 0.81 of the replayed worst to 1.2 times the best: graphs "
            "that follow each other at once still begin one after another",
        ),
    )


def _unread(context: TraceContext, waits: list[Wait], host: Intervals) -> Fix:
    """Nobody waits, nothing is copied back; at best what was only computed to be looked at is not computed either."""
    # Kernels that reduce a tensor to what these waits are for.
    copies, made = (
        _read_back(context, waits),
        np.array(sorted({work for chain in _makers(context, waits).values() for work in chain}), dtype=np.int64),
    )
    return Fix(
        freed=np.array([wait.call for wait in waits], dtype=np.int64),
        host=joined(host, context.time_of(outermost(context, _rows(waits), READ_SPANS))),
        host_best=0.0,
        host_worst=0.3,
        spare=op_time(context, made),
        works=np.concatenate((copies, made)),
        keep_best=0.0,
        keep_worst=np.concatenate((np.full(len(copies), 0.3), np.ones(len(made)))),
        elastic=True,
    )


def _with_turns(context: TraceContext, fix: Fix, waits: list[Wait]) -> Fix:
    """A loop in each of whose turns a few small kernels run and a value is read: at best all turns are one op over all
    (9.1 of 16.8 ms on an H200, where reads alone were 7.0 at most)."""
    calls = np.sort(np.array([wait.call for wait in waits], dtype=np.int64))
    first, last = (
        np.searchsorted(context.program.call, calls[:-1] + 1),
        np.searchsorted(context.program.call, calls[1:]),
    )
    # Of a turn's kernels: what has products is a layer, and what is compiled has its own reasons to stop.
    light = context.family(*("pointwise", "reduce", "copy", "fill", "index", "sort", "random")) | (
        context.work_kind != int(Kind.KERNEL)
    )
    # Works between two reads at most, and the time of each, for a turn of a loop over samples; and how many turns a
    # round has.
    small, gap_s = light & (context.work_s < 30e-6), context.wiring.program.gap_s
    turns = [
        (i, np.arange(low, high))
        for i, (low, high) in enumerate(zip(first.tolist(), last.tolist(), strict=True))
        if 0 < high - low <= 24
        and small[low:high].all()
        and gap_s[calls[i] + 1 : calls[i + 1] + 1].max() < WRITTEN_S  # else the host does more than launch
    ]
    if len(turns) < 8 * num_rounds(context):
        return fix
    works = np.setdiff1d(np.concatenate([inside for _, inside in turns]), fix.works)
    ends, starts = context.wiring.call_end_ns[calls[[i for i, _ in turns]]], context.clock.start_ns[calls[1:]]
    between = union(ends, starts[[i for i, _ in turns]])
    once = num_rounds(context) / len(turns)
    best = np.broadcast_to(fix.keep_best, fix.works.shape)
    worst = np.broadcast_to(fix.keep_worst, fix.works.shape)
    return replace(
        fix,
        works=np.concatenate((fix.works, works)),
        keep_best=np.concatenate((best, np.full(len(works), once))),
        keep_worst=np.concatenate((worst, np.ones(len(works)))),
        spare=joined(fix.spare, between),
    )


def _makers(context: TraceContext, waits: list[Wait]) -> dict[int, list[int]]:
    """For each waiting call the kernels right before its copy that make what it reads: a value from a tensor, or the
    tensor in another type."""
    order, place = stream_order(context)
    looks, reduces, back = looks_like(context, WATCHES), context.family("reduce"), copies_of_memory(context, "dtoh")
    found = dict[int, list[int]]()
    for wait in waits:
        for copy in (work for work in copies_of(context, wait) if back[work]):
            chain, at = list[int](), int(place[copy]) - 1
            # Kernels before a read that may have made what is read.
            while at >= 0 and len(chain) < 8 and looks[order[at]]:
                chain.append(int(order[at]))
                at -= 1
            if wait.num_bytes >= TENSOR_BYTES or any(reduces[work] for work in chain[:3]):
                found.setdefault(wait.call, []).extend(chain)
    return found


def _read_back(context: TraceContext, waits: list[Wait]) -> Index:
    """The copies of a value or two that these waits are for."""
    works = np.array(sorted({work for wait in waits for work in copies_of(context, wait)}), dtype=np.int64)
    return works[copies_of_memory(context, "dtoh")[works]] if len(works) else works


def _rows(waits: list[Wait]) -> np.ndarray:
    return np.array([wait.row for wait in waits], dtype=np.int64)


def _place(waits: list[Wait]) -> Where:
    """The line and op that most of the waits share."""
    sources = [wait.source for wait in waits if wait.source]
    ops = [next((name for name in wait.names if name.startswith("aten::")), wait.names[0]) for wait in waits]
    source = max(set(sources), key=sources.count) if sources else ""
    return Where(source=source, op=max(set(ops), key=ops.count))
