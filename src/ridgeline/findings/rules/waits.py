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
from ridgeline.findings.replay.fix import NOWHERE, Cure, joined
from ridgeline.findings.replay.replay import Index
from ridgeline.findings.rule import rule, suspicion
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
TEXT_S_PER_BYTE = 1e-7
"""Of formatting, at least (7e-7 for a table of floats that numpy prints); numpy computes ten times as fast."""
FETCHED = 4.0
"""Times as long as what the host does with it: then fetching a tensor is what costs (15 on an H200 where 50 MB were
fetched and looked at, at most 1.1 where something was worked out of them)."""
WATCHES = (
    r"^aten::(linalg_vector_norm|norm|abs|pow|square|sum|mean|max|min|amax|amin|any|all|isinf|isnan|isfinite|eq|ne|lt|le"
    r"|gt|ge|std|var|argmax|logical_not|logical_and|bitwise_or|bitwise_and|fill_|copy_|_to_copy|div|sqrt|stack|cat)$"
)
"""Ops that make a value or two of a tensor in order to look at it."""
MADE = 8
"""Kernels before a read that may have made what is read."""
WHOLE, WHOLE_BYTES = ("int64", "int32", "uint8", "bool"), 8
"""Of a whole number: sizes and counts are read to go on with (what to send to whom, how many rows there are), and what
is written down is a loss in two or four."""
WRITTEN_S = 150e-6
"""Of Python between two ops: 98 of 100 reads are followed by 45 µs or less, formatting and writing takes over 200."""
AFTER_S = 60e-6
"""The same of what may be written, where nothing is told by it alone."""
ONCE_FRAC = 0.01
"""Of the step, what one read in it must cost at worst: a queue that is drained once is soon filled again (0.21 ± 0.32
of 16.8 ms on an H200, where 0.13 to 0.97 were promised)."""
QUESTION = "aten::is_nonzero"
"""What Python calls for ``if tensor:``, which decides what comes next and is nothing that somebody writes down."""
ASKED_FRAC = 0.05
"""The same where that read is such a question, asked once: a library's own (whether a mask is needed). Four such were
taken away on an H200, and brought 0.21 ± 0.32 of 16.8 ms, 1.03 ± 0.98 of 30.6, 0.36 ± 0.90 of 83 and 0.15 ± 0.52 of
8.3, where up to 4 % of the step were promised at worst."""
TURN_WORKS, TURN_S, MANY_TURNS = 24, 30e-6, 8
"""Works between two reads at most, and the time of each, for a turn of a loop over samples; and how many turns a round
has."""
TURN_FAMILIES = ("pointwise", "reduce", "copy", "fill", "index", "sort", "random")
"""Of a turn's kernels: what has products is a layer, and what is compiled has its own reasons to stop."""
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


def _regular(scene: TraceContext, waits: list[Wait]) -> list[Wait]:
    """Those of the waits that come in every round, told apart by what is around them: a step is not what a program does
    every hundredth time."""
    alike = dict[tuple[str, ...], list[Wait]]()
    for wait in waits:
        alike.setdefault(_kind(wait), []).append(wait)
    kept = {kind for kind, found in alike.items() if comes_again(scene, _rows(found))}
    return [wait for wait in waits if _kind(wait) in kept]


def _kind(wait: Wait) -> tuple[str, ...]:
    """Its line, its call and its ops; what somebody wrote around them may have the step's number in it."""
    return (wait.source, wait.names[0], *(name for name in wait.names if name.startswith("aten::")))


@rule("logging", version=6, order=14)
def logging(scene: TraceContext) -> Candidate | None:
    """Values read back, formatted and written in every step."""
    scalars = [
        wait
        for wait in host_waits(scene)
        if _is_read(wait) and wait.num_bytes < TENSOR_BYTES and not (_is_upload(wait) or QUESTION in wait.names)
    ]
    scalars = [wait for wait in scalars if not _reads_by_itself(scene, _outermost(scene, wait))]
    scalars = [wait for wait in scalars if not _are_whole(scene, wait)]
    launching = scene.time_of(
        np.union1d(scene.of_kind(Kind.OP), scene.host_spans(r"^Optimizer\.", Kind.ANNOTATION, Kind.OP))
    )
    scalars = [wait for wait in scalars if not _answered(scene, wait)]
    used, handled = _followed(scene, _regular(scene, scalars), WRITTEN_S, launching)
    waits = _regular(scene, [wait for wait in host_waits(scene) if _is_log(wait) and not _is_upload(wait)])
    shown, formatted = _followed(scene, _regular(scene, _shown(scene)), BUSY_S, launching)
    waits += [wait for wait in (*used, *shown) if wait not in waits]
    spans = scene.host_spans(LOG_SPANS, Kind.ANNOTATION, Kind.PYTHON)
    spans = spans[np.isin(scene.trace.thread[spans], main_threads(scene))]
    spans = spans if comes_again(scene, spans) else spans[:0]
    if not waits and not len(spans):
        return None
    return Candidate(
        what=f"Logging in the step: {len(waits) / scene.num_steps:.3g} reads of device values a step",
        cause="synchronous logging: the value is waited for, and the thread that launches formats and writes it",
        change="log every N steps, keep values on the device (loss.detach() into a list) and read them together, "
        "or log from a thread",
        where=_place(waits) if waits else place_of_host(scene, spans),
        cure=_unread(scene, waits, joined(scene.time_of(spans), handled, formatted)),
        evidence=host_evidence(scene, np.concatenate((spans, _rows(waits)))),
        spans=tuple(spans[:200].tolist()),
    )


@suspicion("logging")
def perhaps_logging(scene: TraceContext) -> Candidate | None:
    """Whatever is read or fetched in every round, and then worked on while nothing of it comes back at once."""
    reads = [wait for wait in host_waits(scene) if (_is_read(wait) or _is_copy_back(wait)) and not _is_upload(wait)]
    reads = [wait for wait in reads if not _answered(scene, wait) and not _are_whole(scene, wait)]
    waits, busy = _followed(scene, _regular(scene, reads), AFTER_S)
    if not waits:
        return None
    return Candidate(
        what=f"{len(waits) / scene.num_steps:.3g} reads a step after which the host is busy and sends nothing back",
        cause="synchronous logging: what is read is formatted, printed or written by the thread that launches",
        change="log every N steps, keep values on the device and read them together, or log from a thread",
        where=_place(waits),
        cure=_unread(scene, waits, busy),
        evidence=host_evidence(scene, _rows(waits)),
        spans=tuple(_rows(waits)[:200].tolist()),
    )


@suspicion("host-round-trip")
def perhaps_round_trip(scene: TraceContext) -> Candidate | None:
    """The same reads, whether something comes back or not."""
    reads = [wait for wait in host_waits(scene) if (_is_read(wait) or _is_copy_back(wait)) and not _is_upload(wait)]
    waits, busy = _followed(scene, _regular(scene, reads), BUSY_S)
    if not waits:
        return None
    return Candidate(
        what=f"{len(waits) / scene.num_steps:.3g} reads a step after which the host is busy before it launches again",
        cause="a round trip through the host: what is read is computed with there",
        change="compute it on the device with CUDA tensors, and move only what leaves the program",
        where=_place(waits),
        cure=_unread(scene, waits, busy),
        evidence=host_evidence(scene, _rows(waits)),
        spans=tuple(_rows(waits)[:200].tolist()),
    )


@rule("host-round-trip", version=6, order=19)
def host_round_trip(scene: TraceContext) -> Candidate | None:
    """A tensor goes to the host, is computed on there, and comes back."""
    shown = _shown(scene)
    fetched = [wait for wait in _fetched(scene) if wait not in shown]
    values = [wait for wait in host_waits(scene) if 0 < wait.num_bytes < TENSOR_BYTES and _is_copy_back(wait)]
    fetched += [wait for wait in values if _answered(scene, wait)]
    fetched = _regular(scene, sorted(fetched, key=lambda wait: wait.call))
    waits, time = _followed(scene, fetched, BUSY_S)
    alike = {_kind(wait) for wait in waits}
    last = [wait for wait in fetched if wait not in waits and _kind(wait) in alike]
    waits, time = waits + last, joined(time, _after_the_end(scene, last))
    copies = _read_back(scene, waits)
    if not waits or float(scene.work_s[copies].sum()) > FETCHED * time.total / 1e9:
        return None
    change = "keep it on the device: sample, mask and sort with CUDA tensors; move only what leaves the program"
    if not copies_of_memory(scene, "htod").any():
        change = (
            "nothing of it comes back: compute it on the device, and fetch, print or write it every N steps, or in "
            "another thread"
        )
    return Candidate(
        what=f"{len(waits) / scene.num_steps:.3g} times a step a tensor goes to the host, is worked on there, and "
        "the device waits",
        cause="a round trip through the host: computation on CPU tensors in the middle of the step",
        change=change,
        where=_place(waits),
        cure=Cure(
            host=joined(time, scene.time_of(_rows(waits))),
            host_best=0.02,
            host_worst=0.15,
            freed=np.array([wait.call for wait in waits], dtype=np.int64),
            works=copies,
            keep_best=0.0,
            keep_worst=0.15,
        ),
        evidence=host_evidence(scene, _rows(waits)),
        spans=tuple(_rows(waits)[:200].tolist()),
    )


def _are_whole(scene: TraceContext, wait: Wait) -> bool:
    """Whether whole numbers are read, by what their op was given, else by their bytes."""
    dtypes, words = scene.trace.optional("dtypes"), scene.trace.words
    given = (first_dtype(words[int(dtypes[row])]) for row in scene.trace.path(wait.row))
    kind = next((found for found in given if found), "")
    return kind in WHOLE if kind else wait.num_bytes > 0 and wait.num_bytes % WHOLE_BYTES == 0


def _after_the_end(scene: TraceContext, waits: list[Wait]) -> Intervals:
    """Host time after the end of a round whose last call is such a fetch: somebody waits there for the device first."""
    ends = [call for wait in waits if (call := next_launch(scene, wait.call)) is not None]
    calls = [call for end in ends if (call := next_launch(scene, end)) is not None]
    calls = [call for call in calls if float(scene.wiring.program.gap_s[call]) > BUSY_S]
    return union(scene.clock.gap_start_ns[calls], scene.clock.start_ns[calls])


def _answered(scene: TraceContext, wait: Wait) -> bool:
    """Whether the next that is launched after a read, in the same round and after a while, is a copy to the device:
    what was read is worked on at the host, and what comes of it goes back."""
    call = next_launch(scene, wait.call)
    if call is None or float(scene.wiring.program.gap_s[call]) <= BUSY_S:
        return False
    starts = np.asarray(scene.window.marks_ns, dtype=np.int64)
    ends, begins = scene.end_ns[wait.row], scene.clock.start_ns[call]
    same = np.searchsorted(starts, ends, side="right") == np.searchsorted(starts, begins, side="right")
    first, last = np.searchsorted(scene.program.call, (call, call + 2)).tolist()
    return bool(same and copies_of_memory(scene, "htod")[first:last].any())


def _fetched(scene: TraceContext) -> list[Wait]:
    return [wait for wait in host_waits(scene) if _is_copy_back(wait) and wait.num_bytes >= TENSOR_BYTES]


def _is_written(scene: TraceContext, wait: Wait) -> bool:
    """Whether what follows a fetch takes as long as making text of it does."""
    call = next_launch(scene, wait.call)
    return call is not None and float(scene.wiring.program.gap_s[call]) >= TEXT_S_PER_BYTE * wait.num_bytes


def _shown(scene: TraceContext) -> list[Wait]:
    """Fetches of tables that are made text of: small, and nothing goes back to the device in the same round. Of 11
    tensors that were worked on at the host ten came back, and the other one was 8 MB (H200)."""
    returns = np.sort(scene.launch_ns[copies_of_memory(scene, "htod")])
    ends = np.append(np.asarray(scene.window.marks_ns, dtype=np.int64), scene.window.end_ns)
    found = [wait for wait in _fetched(scene) if wait.num_bytes < FETCHED_BYTES and _is_written(scene, wait)]
    after = np.array([scene.end_ns[wait.row] for wait in found], dtype=np.int64)
    until = ends[np.minimum(np.searchsorted(ends, after, side="right"), len(ends) - 1)]
    back = np.searchsorted(returns, until) > np.searchsorted(returns, after)
    answered = {_kind(wait) for wait, comes_back in zip(found, back.tolist(), strict=True) if comes_back}
    return [wait for wait in found if _kind(wait) not in answered]  # the last of a round comes back in the next


def _followed(
    scene: TraceContext, waits: list[Wait], least_s: float, beside: Intervals = NOWHERE
) -> tuple[list[Wait], Intervals]:
    """Those of the waits after which the host is busy for a while before it launches again, with the waits right before
    them, and that time; ``beside`` is host time that does not count."""
    clock, kept, calls = scene.clock, list[Wait](), list[int]()
    made = _makers(scene, waits)
    busy_s = scene.wiring.program.gap_s - covered_within(beside, clock.gap_start_ns, clock.start_ns) / 1e9
    series = list[Wait]()
    for wait in waits:
        if series and launches_between(scene, series[-1].call, wait.call, but=made.get(wait.call, ())):
            series = []
        series.append(wait)
        call = next_launch(scene, wait.call)
        if call is not None and float(busy_s[call]) > least_s:
            kept += series
            calls.append(call)
            series = []
    return kept, difference(union(clock.gap_start_ns[calls], clock.start_ns[calls]), beside)


def _is_copy_back(wait: Wait) -> bool:
    return bool(COPIES_BACK.search(wait.copy))


@rule("value-read", version=8, order=20)
def value_read(scene: TraceContext) -> Candidate | None:
    held = _ops_that_upload(scene)
    reads = [wait for wait in host_waits(scene) if _is_read(wait) and not _is_upload(wait)]
    kept = set(kept_for_later(scene).tolist())  # nobody reads those
    waits = [wait for wait in reads if not _is_fetch(wait) and not kept.intersection(copies_of(scene, wait))]
    waits = [wait for wait in waits if (op := _outermost(scene, wait)) not in held and not _reads_by_itself(scene, op)]
    waits = _regular(scene, waits)
    if not waits:
        return None
    ops = sorted({name for wait in waits for name in wait.names if READS.search(name)})
    return Candidate(
        what=f"{len(waits) / scene.num_steps:.3g} times a step the host waits for a value from the device",
        cause=f"synchronization: {', '.join(ops[:3]) or 'a copy to the host'} waits until everything launched so "
        "far is done",
        change="keep the value on the device (torch.where, masks, capturable optimizers), read it once after the step, "
        "or copy it with non_blocking=True and look at it a step later",
        where=_place(waits),
        cure=_with_turns(scene, _unread(scene, waits, NOWHERE), waits),
        evidence=host_evidence(scene, _rows(waits)),
        spans=tuple(_rows(waits)[:200].tolist()),
        sure_frac=_least_sure(scene, waits),
    )


def _least_sure(scene: TraceContext, waits: list[Wait]) -> float:
    if not _are_few(scene, waits):
        return 0.0
    return ASKED_FRAC if all(QUESTION in wait.names for wait in waits) else ONCE_FRAC


def _are_few(scene: TraceContext, waits: list[Wait]) -> bool:
    """Whether a value is read once in a step: then what it costs must be sure, since libraries ask such questions
    themselves (whether a mask is needed), and a copy and its wait are two calls of one read."""
    ops = [(_outermost(scene, wait), wait.call) for wait in waits]
    return len({op if op != NO_OP else -2 - call for op, call in ops}) <= num_rounds(scene)


def _is_fetch(wait: Wait) -> bool:
    """Whether so much comes back through pageable memory that the copy is what is waited for."""
    return wait.num_bytes >= FETCHED_BYTES and "pageable" in wait.copy


def _outermost(scene: TraceContext, wait: Wait) -> int:
    """The op that a program called and that made this wait."""
    path = [at for at in scene.trace.path(wait.row) if scene.trace.kind[at] == int(Kind.OP)]
    return int(path[-1]) if path else NO_OP


def _reads_by_itself(scene: TraceContext, op: int) -> bool:
    """Whether an op looks at a value in order to do what it does: solvers at their errors, suppression of boxes at its
    mask. Nothing that the program keeps elsewhere spares it that."""
    return op != NO_OP and bool(scene.words_like(OWN_READS)[scene.trace.name[op]])


def _ops_that_upload(scene: TraceContext) -> set[int]:
    """Ops that read a tensor back and wait for uploads as well, as a CTC loss does with its lengths: without the read
    they wait all the same, and what they read is theirs, not the program's."""
    return {_outermost(scene, wait) for wait in host_waits(scene) if _is_upload(wait)} - {NO_OP}


@rule("synchronize", version=3, order=21)
def synchronize(scene: TraceContext) -> Candidate | None:
    waits = [
        wait
        for wait in host_waits(scene)
        if "Synchronize" in wait.names[0]
        and next_launch(scene, wait.call) is not None
        and not (_is_read(wait) or _is_copy_back(wait) or _is_upload(wait) or _is_log(wait))
        and _outermost(scene, wait) == NO_OP  # an op that waits by itself is no line that somebody could remove
    ]
    waits = _regular(scene, waits)
    if not waits:
        return None
    return Candidate(
        what=f"{len(waits) / scene.num_steps:.3g} explicit synchronizations a step",
        cause=f"{waits[0].names[0]}: the host stops until the device is done, then the device waits for the host",
        change="remove torch.cuda.synchronize() from the loop; time with CUDA events, order streams with "
        "wait_stream or events",
        where=_place(waits),
        cure=Cure(
            freed=np.array([wait.call for wait in waits], dtype=np.int64),
            host=scene.time_of(_rows(waits)),
            host_best=0.0,
            host_worst=0.0,
        ),
        evidence=host_evidence(scene, _rows(waits)),
        spans=tuple(_rows(waits)[:200].tolist()),
        unchecked=("whether the program needs the order that the synchronization gives",),
    )


def _unread(scene: TraceContext, waits: list[Wait], host: Intervals) -> Cure:
    """Nobody waits, nothing is copied back; at best what was only computed to be looked at is not computed either."""
    copies, made = _read_back(scene, waits), _made_for(scene, waits)
    return Cure(
        freed=np.array([wait.call for wait in waits], dtype=np.int64),
        host=joined(host, scene.time_of(outermost(scene, _rows(waits), READ_SPANS))),
        host_best=0.0,
        host_worst=0.3,
        spare=op_time(scene, made),
        works=np.concatenate((copies, made)),
        keep_best=0.0,
        keep_worst=np.concatenate((np.full(len(copies), 0.3), np.ones(len(made)))),
        elastic=True,
    )


def _with_turns(scene: TraceContext, cure: Cure, waits: list[Wait]) -> Cure:
    """A loop in each of whose turns a few small kernels run and a value is read: at best all turns are one op over all
    (9.1 of 16.8 ms on an H200, where reads alone were 7.0 at most)."""
    calls = np.sort(np.array([wait.call for wait in waits], dtype=np.int64))
    first, last = np.searchsorted(scene.program.call, calls[:-1] + 1), np.searchsorted(scene.program.call, calls[1:])
    light = scene.family(*TURN_FAMILIES) | (scene.work_kind != int(Kind.KERNEL))
    small, gap_s = light & (scene.work_s < TURN_S), scene.wiring.program.gap_s
    turns = [
        (i, np.arange(low, high))
        for i, (low, high) in enumerate(zip(first.tolist(), last.tolist(), strict=True))
        if 0 < high - low <= TURN_WORKS
        and small[low:high].all()
        and gap_s[calls[i] + 1 : calls[i + 1] + 1].max() < WRITTEN_S  # else the host does more than launch
    ]
    if len(turns) < MANY_TURNS * num_rounds(scene):
        return cure
    works = np.setdiff1d(np.concatenate([inside for _, inside in turns]), cure.works)
    ends, starts = scene.wiring.call_end_ns[calls[[i for i, _ in turns]]], scene.clock.start_ns[calls[1:]]
    between = union(ends, starts[[i for i, _ in turns]])
    once = num_rounds(scene) / len(turns)
    best = np.broadcast_to(cure.keep_best, cure.works.shape)
    worst = np.broadcast_to(cure.keep_worst, cure.works.shape)
    return replace(
        cure,
        works=np.concatenate((cure.works, works)),
        keep_best=np.concatenate((best, np.full(len(works), once))),
        keep_worst=np.concatenate((worst, np.ones(len(works)))),
        spare=joined(cure.spare, between),
    )


def _made_for(scene: TraceContext, waits: list[Wait]) -> Index:
    """Kernels that reduce a tensor to what these waits are for."""
    return np.array(sorted({work for chain in _makers(scene, waits).values() for work in chain}), dtype=np.int64)


def _makers(scene: TraceContext, waits: list[Wait]) -> dict[int, list[int]]:
    """For each waiting call the kernels right before its copy that make what it reads: a value from a tensor, or the
    tensor in another type."""
    order, place = stream_order(scene)
    looks, reduces, back = looks_like(scene, WATCHES), scene.family("reduce"), copies_of_memory(scene, "dtoh")
    found = dict[int, list[int]]()
    for wait in waits:
        for copy in (work for work in copies_of(scene, wait) if back[work]):
            chain, at = list[int](), int(place[copy]) - 1
            while at >= 0 and len(chain) < MADE and looks[order[at]]:
                chain.append(int(order[at]))
                at -= 1
            if wait.num_bytes >= TENSOR_BYTES or any(reduces[work] for work in chain[:3]):
                found.setdefault(wait.call, []).extend(chain)
    return found


def _read_back(scene: TraceContext, waits: list[Wait]) -> Index:
    """The copies of a value or two that these waits are for."""
    works = np.array(sorted({work for wait in waits for work in copies_of(scene, wait)}), dtype=np.int64)
    return works[copies_of_memory(scene, "dtoh")[works]] if len(works) else works


def _rows(waits: list[Wait]) -> np.ndarray:
    return np.array([wait.row for wait in waits], dtype=np.int64)


def _place(waits: list[Wait]) -> Where:
    """The line and op that most of the waits share."""
    sources = [wait.source for wait in waits if wait.source]
    ops = [next((name for name in wait.names if name.startswith("aten::")), wait.names[0]) for wait in waits]
    source = max(set(sources), key=sources.count) if sources else ""
    return Where(source=source, op=max(set(ops), key=ops.count))
