"""Samples that a network is asked about one by one: the same pass many times a round, each over another piece of one
tensor, or over a sample that got a dim for its batch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from ridgeline.findings.context.context import TraceContext
from ridgeline.findings.context.host_time import main_threads
from ridgeline.findings.context.nesting import under
from ridgeline.findings.context.rounds import num_rounds
from ridgeline.findings.context.shapes import is_shape, parsed
from ridgeline.findings.context.training import BACKWARD
from ridgeline.findings.replay.replay import Index
from ridgeline.trace.kind import Kind

MANY_PASSES, MANY_CALLS = 6, 200_000
CUTS = frozenset(
    f"aten::{name}" for name in ("split", "split_with_sizes", "chunk", "tensor_split", "unbind", "slice", "narrow")
)
ENTERS = (
    r"^aten::(linear|matmul|addmm|mm|conv\w*|embedding(_bag)?|\w*layer_norm|rms_norm|batch_norm|group_norm|lstm|gru)$"
)
"""Where a network begins to work on what it is given."""
JOINS, BESIDE, DEEP = frozenset({"aten::cat", "aten::stack"}), 2, 6
"""What joins results of passes, how many passes there may be beside them (a teacher's), and layers of a pass, at least:
less is a cell of a recurrence."""
LOOKUPS = frozenset({"aten::embedding"})
CHOOSES, CHOICES = r"^aten::(argmax|multinomial|topk|sort|max)$", 1000
"""What turns the answer of a pass into the words of the next one, out of so many at least: labels are fewer."""
LAYS_OUT = r"^aten::(to|_to_copy|contiguous|detach|copy_|view|reshape|lift_fresh|pin_memory)$"
SHAPED = r"^aten::(unsqueeze|squeeze|(un)?flatten|permute|transpose|unfold|split|chunk|unbind|slice|select|pad|cat)$"
Shape = tuple[int, ...]


def passes_over_samples(context: TraceContext) -> float:
    """How many passes of a round are over pieces of one tensor or over samples by themselves; 0 where there are none,
    or sizes were not recorded. Moments of a sequence are pieces along another dim, and one state that is changed again
    and again has no pieces."""
    if "shapes" not in context.trace.extra:
        return 0.0
    calls = _calls(context)
    if len(calls) > MANY_CALLS:
        return 0.0
    given = [(context.trace.words[int(context.trace.name[row])], _tensors(context, row)) for row in calls.tolist()]
    series = (*_series(context, calls, given), *_lone(context, calls, given), *_joined(context, calls, given))
    return max((_num_passes(context, starts) for starts in series), default=0) / num_rounds(context)


def passes_again(context: TraceContext) -> float:
    """How many passes of a round may be over samples by themselves: those that begin as its first one does, over a few
    samples each, or those of a network all of whose layers are called as often. Whether they follow from each other is
    asked as far as sizes tell: words that are chosen, or an input that is changed, after each."""
    if "shapes" not in context.trace.extra:
        return 0.0
    calls = _calls(context)
    if len(calls) > MANY_CALLS:
        return 0.0
    entering = calls[context.words_like(ENTERS)[context.trace.name[calls]]]
    called = defaultdict[tuple[str, Shape], list[tuple[int, Shape]]](list)
    for row in entering.tolist():
        name, shapes = context.trace.words[int(context.trace.name[row])], _tensors(context, row)
        if len(shapes) > 1:
            table, given = (shapes[0], shapes[1]) if name in LOOKUPS else (shapes[1], shapes[0])
            called[name, table].append((int(context.start_ns[row]), given))
    first = min(called.values(), key=lambda each: each[0], default=[])
    # Of a batch that may be one of several: what a person labels, a request, an episode.
    few = [one for one in first if one[1][0] <= 8 or len(one[1]) == 1]
    rare = min(called.values(), key=len, default=[])
    rare = rare if len(entering) >= DEEP * len(rare) else []
    num_few, num_rare = (_num_passes(context, [start for start, _ in each]) if each else 0 for each in (few, rare))
    if num_few and 2 * _num_changed(context, calls, {given for _, given in few}) >= num_few:
        num_few = 0
    passes = max(num_few, num_rare)
    return 0.0 if 2 * _num_chosen(context, calls) >= passes else passes / num_rounds(context)


def _num_changed(context: TraceContext, calls: Index, inputs: set[Shape]) -> int:
    """How often something of the size of what passes begin with is computed with outside of layers."""
    others = calls[~context.words_like(f"{ENTERS}|{LAYS_OUT}|{SHAPED}")[context.trace.name[calls]]]
    return sum(any(shape in inputs for shape in _tensors(context, row)) for row in others.tolist())


def _num_chosen(context: TraceContext, calls: Index) -> int:
    """How often a word is chosen out of many."""
    chooses = calls[context.words_like(CHOOSES)[context.trace.name[calls]]]
    return sum(bool(shapes := _tensors(context, row)) and shapes[0][-1] >= CHOICES for row in chooses.tolist())


def _calls(context: TraceContext) -> Index:
    """Ops that a program called itself, outside of backward passes, in their order."""
    ops = context.of_kind(Kind.OP)
    ops = ops[np.isin(context.trace.thread[ops], main_threads(context))]
    inner = np.isin(context.trace.parent[ops], ops)
    ops = ops[~inner & ~context.words_like(r"evaluate_function|Backward\d*$|^Optimizer\.")[context.trace.name[ops]]]
    return ops[np.argsort(context.start_ns[ops], kind="stable")]


def _tensors(context: TraceContext, row: int) -> tuple[Shape, ...]:
    return tuple(tuple(shape) for shape in parsed(context.trace.text("shapes", row)) if is_shape(shape) and shape)


def _series(context: TraceContext, calls: Index, given: Sequence[tuple[str, tuple[Shape, ...]]]) -> Iterator[list[int]]:
    """Times at which passes may begin: ops that are given a piece of a tensor, as often as it has pieces, and ops that
    are given a sample with a dim of its own, once after each that was made."""
    enters = context.words_like(ENTERS)[context.trace.name[calls]]
    whole = {shapes[0] for name, shapes in given if name in CUTS and shapes and shapes[0][0] >= MANY_PASSES}
    samples, fresh = defaultdict[int, list[int]](list), set[Shape]()
    pieces = defaultdict[tuple[str, Shape], list[int]](list)
    for row, (name, shapes), enter in zip(calls.tolist(), given, enters.tolist(), strict=True):
        if name == "aten::unsqueeze" and shapes:
            fresh.add((1, *shapes[0]))
        if not enter:
            continue
        for shape in dict.fromkeys(shapes):
            pieces[name, shape].append(int(context.start_ns[row]))
            if shape in fresh:
                samples[len(shape)].append(int(context.start_ns[row]))
                fresh.discard(shape)
    yield from samples.values()
    for (_, shape), starts in pieces.items():
        num = len(starts) / num_rounds(context)
        if any(all_[1:] == shape[1:] and abs(all_[0] - num * shape[0]) <= 0.1 * all_[0] for all_ in whole):
            yield starts


def _joined(context: TraceContext, calls: Index, given: Sequence[tuple[str, tuple[Shape, ...]]]) -> Iterator[list[int]]:
    """Times at which one layer is called, once for each of many results that are joined in the end and that nothing
    else reads: states that follow from each other are read by the next pass, and words by what chooses them."""
    read = Counter(shape for _, shapes in given for shape in set(shapes))
    joins = calls[np.isin(context.trace.name[calls], np.flatnonzero(context.words_like(r"^aten::(cat|stack)$")))]
    lists = [entry for row in joins.tolist() for entry in parsed(context.trace.text("shapes", row))[:1]]
    parts = [[tuple(shape) for shape in entry] for entry in lists if entry and isinstance(entry[0], list)]
    nums = {
        len(found) for found in parts if len(found) >= MANY_PASSES and _are_unread(found, read, num_rounds(context))
    }
    called = defaultdict[tuple[str, Shape], list[int]](list)
    enters = context.words_like(ENTERS)[context.trace.name[calls]]
    for row, (name, shapes) in zip(calls[enters].tolist(), (given[i] for i in np.flatnonzero(enters)), strict=True):
        called[name, shapes[1] if len(shapes) > 1 else ()].append(int(context.start_ns[row]))
    deep = int(enters.sum()) / num_rounds(context)
    for starts in called.values():
        often = len(starts) / num_rounds(context)
        if any(num <= often <= num + BESIDE for num in nums) and deep >= DEEP * often:
            yield starts


def _are_unread(parts: Sequence[Shape], read: Counter[Shape], rounds: int) -> bool:
    """Whether fewer than half of the joined have others that are given tensors of their size."""
    return 2 * sum(read[shape] for shape in set(parts)) < rounds * len(parts)


def _lone(context: TraceContext, calls: Index, given: Sequence[tuple[str, tuple[Shape, ...]]]) -> Iterator[list[int]]:
    """Times at which passes over batches of one begin that came from outside: texts whose words no pass has made, and
    pictures or series that nothing but the first layer touches."""
    names = context.trace.name[calls]
    enters, lays_out = context.words_like(ENTERS)[names], context.words_like(LAYS_OUT)[names]
    texts, lone, touched = list[tuple[int, int]](), defaultdict[tuple[str, Shape], list[int]](list), set[Shape]()
    for row, (name, shapes), enter, moved in zip(
        calls.tolist(), given, enters.tolist(), lays_out.tolist(), strict=True
    ):
        if enter and name in LOOKUPS and len(shapes) > 1 and len(shapes[1]) == 2 and shapes[1][0] == 1 < shapes[1][1]:
            texts.append((int(context.start_ns[row]), shapes[1][1]))
        elif enter and name not in LOOKUPS and shapes and shapes[0][0] == 1 and len(shapes[0]) >= 3:
            lone[name, shapes[0]].append(int(context.start_ns[row]))
        elif not moved:
            touched.update(shapes)
    # What changes words, where it is given texts; masks of scores have more dims.
    chooses, changes = (
        context.words_like(CHOOSES)[names].tolist(),
        context.words_like(r"^aten::(where|scatter_?|index_put_|masked_fill_?)$")[names].tolist(),
    )
    makes_words = sum(
        bool(shapes) and ((choose and shapes[0][-1] >= CHOICES) or (change and len(shapes[0]) <= 2))
        for (_, shapes), choose, change in zip(given, chooses, changes, strict=True)
    )
    grows = np.diff([length for _, length in texts])
    if 2 * makes_words < len(texts) and not (len(grows) and (grows == 1).mean() > 0.5):
        yield [start for start, _ in texts]
    yield from (starts for (_, shape), starts in lone.items() if shape not in touched)


def _num_passes(context: TraceContext, starts: Sequence[int]) -> int:
    """How many passes begin there, if about as many kernels follow each, enough for a network, and most of what is
    launched; else 0."""
    launches = np.sort(context.launch_ns[~under(context, BACKWARD) & (context.work_kind == int(Kind.KERNEL))])
    at = np.searchsorted(launches, np.sort(starts))
    # Of one pass, at least: less is a loop over tensors, or an expert.
    at = at[np.append(np.diff(at) >= 10, True)]  # words and their places are looked up in the same pass
    if len(starts) < 2 or len(at) < MANY_PASSES * num_rounds(context):
        return 0
    follow = np.diff(at)
    usual = float(np.median(follow))
    # Passes differ by so much, so many of them do not differ by more, and of the kernels outside of backward passes so
    # many are theirs.
    alike = float((np.abs(follow - usual) <= 0.25 * usual).mean())
    return len(at) if alike >= 0.75 and usual * len(at) >= 0.5 * len(launches) else 0
