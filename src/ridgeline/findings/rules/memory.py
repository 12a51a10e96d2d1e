"""Memory traffic that need not be: logits in fp32, embedding gradients, recomputation."""

from __future__ import annotations

from typing import Any

import numpy as np

from ridgeline.findings.context.candidate import Candidate
from ridgeline.findings.context.context import TraceContext
from ridgeline.findings.context.evidence import kernel_evidence, memory_frac, place_of
from ridgeline.findings.context.kernels import half_type
from ridgeline.findings.context.nesting import op_time, spans_under, under
from ridgeline.findings.context.rounds import num_rounds
from ridgeline.findings.context.shapes import (
    dtype_named,
    first_dtype,
    first_shape,
    is_shape,
    parsed,
    product_of,
    shaped_ops,
)
from ridgeline.findings.context.training import BACKWARD, recomputed, recomputing_time, trains
from ridgeline.findings.replay.calibration import Trust
from ridgeline.findings.replay.fix import Fix, joined
from ridgeline.findings.rule import rule
from ridgeline.trace.kind import Kind

LARGE_VOCAB = 8192
FREE_FRAC = 0.5
"""Recomputation is needless while the peak leaves this share of the device's memory free."""

LOOKUP_BACKWARD = r"embedding(_bag)?_(dense_)?backward$|^Embedding(Bag)?Backward\d*$"
ROWS_BACKWARD = r"^Index(Select)?Backward\d*$"
"""Gradients of rows that were taken out of any tensor: of a table, if it is a leaf that gets all of them."""
PASS_BYTES, FUSED_BYTES, PEAK_FRAC = 12.0, 28.0, 0.75
"""Moved for each fp32 value by a pass over lists (two read, one written), and by a fused Adam; and of the memory's peak
rate, what updates reach at least."""


@rule("logits", version=5, order=47)
def logits(context: TraceContext) -> Candidate | None:
    """The loss reads and writes tensors of tokens by vocabulary several times."""
    light = np.flatnonzero(context.family("loss", "softmax", "copy", "pointwise", "reduce", "fill", "index"))
    ops = shaped_ops(context.trace, context.rows[light])
    shapes, sizes = context.trace.optional("shapes"), _class_counts(context)
    wide = np.array(
        [op >= 0 and _is_logits(context.trace.words[int(shapes[op])], sizes) for op in ops.tolist()], dtype=bool
    )
    works = light[wide] if len(light) else light
    if not sizes or len(works) < 3:
        return None
    casts = works[context.family("copy")[works]]
    casts = casts[_changes_type(context, casts)]
    fp32 = len(casts) > 0 and context.per_step_s(casts) > 0.1 * context.per_step_s(works)
    laid_out = fp32 or _are_laid_out(context, sizes)
    # Of the step, from which on the loss is worth fusing although it has no needless copies.
    if not laid_out and (context.frac(context.per_step_s(works)) < 0.3 or _are_compared(context, sizes)):
        return None
    return Candidate(
        what=f"Logits are written out for the loss: {context.per_step_s(works) * 1e3:.3g} ms a step on tensors of "
        "the vocabulary's width",
        cause="logits materialized"
        + (" in fp32: a copy of every logit and its gradient" if fp32 else " and walked by every part of the loss"),
        change=f"leave the logits in {half_type(context)} for F.cross_entropy (it accumulates in fp32), or a fused or "
        "chunked linear-cross-entropy",
        where=place_of(context, works),
        fix=Fix(works=works, keep_best=0.2, keep_worst=0.75),
        evidence=kernel_evidence(context, works),
        spans=tuple(context.rows[works[:200]].tolist()),
    )


def _are_laid_out(context: TraceContext, sizes: set[int]) -> bool:
    """Whether targets are as wide as the logits: zeros with some ones among them, that log-probabilities are then
    multiplied with. What a network gives as a target is multiplied with as well, but nobody fills it."""
    trace, shapes = context.trace, context.trace.optional("shapes")
    filled, products = (
        context.host_spans(r"^aten::(zero_|fill_|scatter_?|one_hot|full_like|zeros_like)$", Kind.OP),
        context.host_spans(r"^aten::mul_?$", Kind.OP),
    )
    filled, products = (spans[~spans_under(context, spans, BACKWARD)] for spans in (filled, products))
    if not any(_is_logits(trace.words[word], sizes) for word in np.unique(shapes[filled]).tolist()):
        return False
    given = [parsed(trace.words[word])[:2] for word in np.unique(shapes[products]).tolist()]
    alike = (tuple(pair[0]) for pair in given if len(pair) == 2 and is_shape(pair[0]) and pair[0] == pair[1])
    return any(len(shape) >= 2 and shape[-1] in sizes for shape in alike)


def _are_compared(context: TraceContext, sizes: set[int]) -> bool:
    """Whether the loss is a distance between two distributions that networks give: in 16 bits nothing better is at hand
    (compiled, a step of 9.68 ms took 10.53). Targets that somebody lays out are no network's."""
    trace, shapes = context.trace, context.trace.optional("shapes")
    given = context.host_spans(r"^aten::_(log_)?softmax$", Kind.OP).tolist()
    wide = sum(_is_logits(trace.words[int(shapes[span])], sizes) for span in given)
    distances = len(context.host_spans(r"^aten::kl_div$", Kind.OP))
    return distances > 0 and wide >= 2 * distances


def _changes_type(context: TraceContext, copies: np.ndarray) -> np.ndarray:
    """Which copies are of another type than what they read; one that lays half of the logits out anew is not."""
    trace, dtypes = context.trace, context.trace.optional("dtypes")
    ops = shaped_ops(trace, context.rows[copies])
    given = [[kind for kind in map(dtype_named, parsed(trace.words[int(dtypes[op])])) if kind] for op in ops.tolist()]
    return np.array([op < 0 or len(kinds) < 2 or kinds[0] != kinds[1] for op, kinds in zip(ops, given)], dtype=bool)


def _class_counts(context: TraceContext) -> set[int]:
    """Widths of what losses read: so many classes there are. Hidden layers can be as wide, and are no logits."""
    shapes = context.trace.optional("shapes")
    ops = shaped_ops(context.trace, context.rows[context.family("loss")])
    found = (first_shape(context.trace.words[int(shapes[op])]) for op in np.unique(ops[ops >= 0]).tolist())
    return {shape[-1] for shape in found if len(shape) >= 2 and shape[-1] >= LARGE_VOCAB} | _summed_up(context)


def _summed_up(context: TraceContext) -> set[int]:
    """The same of losses that are written out as a logarithm of sums: of what a layer gives, and once or twice of each.
    Plans of transport sum up the same matrix again and again."""
    trace, shapes = context.trace, context.trace.optional("shapes")
    sums = [
        first_shape(trace.words[int(shapes[span])])
        for span in context.host_spans(r"^aten::logsumexp$", Kind.OP).tolist()
    ]
    calls = context.host_spans(r"^aten::(linear|mm|addmm)$", Kind.OP)
    calls = calls[~spans_under(context, calls, r"^aten::linear$|" + BACKWARD)]
    made = [product_of(trace.words[int(trace.name[at])], trace.words[int(shapes[at])]) for at in calls.tolist()]
    widths = [product.n for product in made if product is not None]
    summed = [shape[-1] for shape in sums if len(shape) >= 2 and shape[-1] >= LARGE_VOCAB]
    return {width for width in summed if summed.count(width) <= 2 * widths.count(width)}


def _is_logits(shapes: str, sizes: set[int]) -> bool:
    shape = first_shape(shapes)
    return len(shape) >= 2 and shape[-1] in sizes and int(np.prod(shape[:-1])) >= 256


def _index_backward(context: TraceContext) -> Candidate | None:
    """Gradients of ``table[index]`` sort the indices and add row by row. A lookup's own backward sorts as well, and a
    sparse gradient is sorted by its optimizer: of those nothing is told."""
    works = np.flatnonzero(
        context.named(
            r"indexing_backward|index_put|compute_grad_weight|krn_partial|sum_and_scatter|embedding.*backward"
        )
        | (
            context.family("sort", "index", "reduce", "embedding")
            & under(context, r"IndexBackward|index_put|embedding_dense_backward|EmbeddingBackward")
        )
    )
    works = works[under(context, BACKWARD)[works]]  # elsewhere values are put into a cache, or counted
    if not len(works) or not context.named(r"indexing_backward|index_put")[works].any():
        return None
    least = _least_frac(context, works)
    if context.frac(context.per_step_s(works)) < 0.02 or least > 0.6 or not _one_after_another(context, works):
        return None  # as fast as memory or sorting allows
    return Candidate(
        what=f"The gradient of a lookup takes {context.per_step_s(works) * 1e3:.3g} ms a step",
        cause="index backward: indices are sorted and rows are added one after another",
        change="F.embedding(index, table) instead of table[index]: its backward does not sort element by element",
        where=place_of(context, works),
        fix=Fix(
            works=works,
            keep_best=max(0.1, least),
            keep_worst=max(0.6, least),
            host=op_time(context, works),
            host_best=0.4,
            host_worst=1.0,
        ),
        evidence=kernel_evidence(context, works),
        spans=tuple(context.rows[works[:200]].tolist()),
    )


def _one_after_another(context: TraceContext, works: np.ndarray) -> bool:
    """Whether rows are looked up so often that adding to them in turn is what takes the time: by the sizes of most of
    it, or where they are unknown by what sorting takes. A lookup's own backward sorts as well: at two lookups a row it
    took 6.9 ms in place of 2.1, and at fifteen 5.4 in place of 1.9 (H200)."""
    trace, shapes = context.trace, context.trace.optional("shapes")
    ops = shaped_ops(trace, context.rows[works])
    times = {op: _times_a_row(trace.words[int(shapes[op])]) for op in np.unique(ops[ops >= 0]).tolist()}
    # Lookups of a row from which on they are added in turn (2,048 and 5,461 in two recordings that gained by a lookup
    # of its own, 2 and 15 in two that lost), and what that then takes over sorting them.
    often = np.array([times.get(op, 0.0) >= 100.0 for op in ops.tolist()], dtype=bool)
    if any(times.values()):
        return context.per_step_s(works[often]) > 0.5 * context.per_step_s(works)
    adding = works[context.named(r"indexing_backward|index_put")[works]]
    return context.per_step_s(adding) > 4.0 * context.per_step_s(works[~np.isin(works, adding)])


def _times_a_row(shapes: str) -> float:
    """How often each row of a table is looked up in the mean; 0 where that is not recorded."""
    given = [shape for shape in parsed(shapes) if is_shape(shape) and shape]
    if len(given) < 2 or len(given[0]) < 2:
        return 0.0
    return float(np.prod(given[-1])) / max(1.0, float(np.prod(given[0])))


def _least_frac(context: TraceContext, works: np.ndarray) -> float:
    """What reading the gradients once and adding them to their rows takes, as a share of what it took."""
    if context.device is None:
        return 0.0
    shapes, dtypes = context.trace.optional("shapes"), context.trace.optional("dtypes")
    ops = shaped_ops(context.trace, context.rows[works])
    moved_bytes = 0.0
    for op in np.unique(ops[ops >= 0]).tolist():
        sizes = [
            float(np.prod(shape)) for shape in parsed(context.trace.words[int(shapes[op])]) if is_shape(shape) and shape
        ]
        wide = 2 if first_dtype(context.trace.words[int(dtypes[op])]) in ("bf16", "fp16") else 4
        moved_bytes += 3.0 * wide * max(sizes, default=0.0)
    taken_s = float(context.work_s[works].sum())
    return moved_bytes / context.device.dram.bandwidth_bytes_per_s / taken_s if taken_s > 0 else 0.0


@rule("lookup-gradient", version=8, order=8)
def lookup_gradient(context: TraceContext) -> Candidate | None:
    """The gradient of a lookup is as large as its table, or rows are added to it one after another."""
    return _dense_gradient(context) or _index_backward(context)


def _dense_gradient(context: TraceContext) -> Candidate | None:
    """A table far larger than the rows a step touches gets a dense gradient that is filled, added and applied in
    full."""
    works = np.flatnonzero(
        context.family("pointwise", "fill", "foreach", "optimizer", "copy", "embedding") | (context.work_kind == 4)
    )
    largest = _table_elements(context)
    if not largest or not trains(context) or len(context.host_spans(r"embedding(_bag)?_sparse_backward$")):
        return None
    updated = context.launched_in(context.time_of(context.host_spans(r"^Optimizer\.")))
    tables = under(context, r"embedding|EmbeddingBag") | updated
    if _taken_out_of(context):
        tables |= under(context, ROWS_BACKWARD)
    heavy = works[tables[works] & ~context.named(r"updateOutput|forward")[works]]
    if not len(heavy):
        return None
    # Values of all tables that get a dense gradient in a step; 0 where sizes were not recorded.
    known, all_of_them = (
        heavy[updated[heavy]],
        max(largest, sum(float(np.prod(shape)) for shape in _zeroed(context)) / num_rounds(context)),
    )
    at_best = np.where(updated[heavy], _updated_frac(context, known, all_of_them / PEAK_FRAC), 1.0)
    at_worst = np.where(updated[heavy], _updated_frac(context, known, largest), 1.0)
    return Candidate(
        what=f"A table of {largest / 1e6:,.0f} M values gets a dense gradient every step",
        cause="dense embedding gradient: all rows are zeroed, written and updated for the few that were looked up",
        change="nn.Embedding(…, sparse=True) with SGD, Adagrad or SparseAdam; or an embedding library that updates "
        "rows in place (fbgemm)",
        where=place_of(context, heavy),
        fix=Fix(works=heavy, keep_best=1.0 - 0.9 * at_best, keep_worst=1.0 - 0.6 * at_worst),
        evidence=kernel_evidence(context, heavy),
        spans=tuple(context.rows[heavy[:200]].tolist()),
    )


def _table_elements(context: TraceContext) -> float:
    """Values of the largest table whose dense gradient matters; 0 if there is none."""
    shapes, learned, multiplied = context.trace.optional("shapes"), _learned_tables(context), _multiplied(context)
    spans = context.host_spans(r"aten::(embedding|_embedding_bag|embedding_bag)$").tolist()[:50]
    given = {first_shape(context.trace.words[int(shapes[span])]) for span in spans}
    tables = {shape for shape in given if learned is None or shape in learned} | _taken_out_of(context)
    matter = (shape for shape in tables if _matters(context, shape) and not multiplied & set(shape[:1]))
    return max((float(np.prod(shape)) for shape in matter), default=0.0)


def _matters(context: TraceContext, shape: tuple[int, ...]) -> bool:
    """Whether a table is so large that what its dense gradient takes is worth a word."""
    values = float(np.prod(shape)) if len(shape) == 2 else 0.0
    # Values of a lookup table from which on its dense gradient matters; vocabularies of language models stay below.
    # Rows that no vocabulary of a language model has, and values from which on a table of so many rows matters.
    large = values >= 5e8 or (values >= 1e8 and shape[0] >= 500_000) or _holds_up(context, shape)
    return large and _num_lookups(context, shape) < shape[0]


def _num_lookups(context: TraceContext, table: tuple[int, ...]) -> float:
    """Rows that a step takes out of tables of this size: as many as there are, and most are touched."""
    trace, shapes = context.trace, context.trace.optional("shapes")
    spans = context.host_spans(r"^aten::(embedding|embedding_bag|index|index_select)$", Kind.OP)
    spans = spans[~spans_under(context, spans, BACKWARD)]
    given = [parsed(trace.words[int(shapes[span])]) for span in spans.tolist()]
    return sum(_num_ids(each) for each in given if each[:1] == ([*table],)) / num_rounds(context)


def _num_ids(given: tuple[Any, ...]) -> float:
    """How many rows a lookup asks for, by the first tensor after its table, in a list or not; 0 if unknown."""
    lists = ([entry] if is_shape(entry) else entry for entry in given[1:] if isinstance(entry, list))
    found = (shape for entry in lists for shape in entry if is_shape(shape) and shape)
    return float(np.prod(next(found, [0])))


def _taken_out_of(context: TraceContext) -> set[tuple[int, ...]]:
    """Sizes of leaves that rows are taken out of by ``table[ids]`` or ``index_select``, and whose gradients are zeroed
    for it. What layers have computed is indexed as well (messages along edges), and is no leaf."""
    if not len(context.host_spans(ROWS_BACKWARD)):
        return set()
    shapes, words = context.trace.optional("shapes"), context.trace.words
    leaves = context.host_spans(r"^torch::autograd::AccumulateGrad$", Kind.OP)
    learned = {first_shape(words[int(shapes[span])]) for span in leaves.tolist()}
    return {shape for shape in _zeroed(context, ROWS_BACKWARD) if len(shape) == 2 and shape in learned}


def _holds_up(context: TraceContext, shape: tuple[int, ...]) -> bool:
    """Whether zeroing and updating a table of many rows is much of a step, at the memory's rate."""
    # Rows of a table, and what its fused update takes of the step at least, from which on smaller ones matter as well.
    if context.device is None or len(shape) != 2 or shape[0] < 160_000:
        return False
    return context.frac(float(np.prod(shape)) * FUSED_BYTES / context.device.dram.bandwidth_bytes_per_s) >= 0.2


def _learned_tables(context: TraceContext) -> set[tuple[int, ...]] | None:
    """Sizes of tables that get a dense gradient, by what is zeroed for it: a frozen table gets none. None where sizes
    of such were not recorded, and none at all where no lookup has a backward pass."""
    if not len(context.host_spans(LOOKUP_BACKWARD)):
        return set()
    return set(_zeroed(context)) or None


def _zeroed(context: TraceContext, nodes: str = LOOKUP_BACKWARD) -> list[tuple[int, ...]]:
    """Sizes of what is zeroed for the gradients of lookups, once for each."""
    shapes = context.trace.optional("shapes")
    spans = context.host_spans(r"^aten::(zero_|fill_)$", Kind.OP)
    spans = spans[spans_under(context, spans, nodes)]
    found = (first_shape(context.trace.words[int(shapes[span])]) for span in spans.tolist())
    return [shape for shape in found if shape]


def _multiplied(context: TraceContext) -> set[int]:
    """Sizes of products: a table of a language model is multiplied with as well, in the layer that says the next word,
    and where that is the same one, its gradient has every row."""
    shapes, words = context.trace.optional("shapes"), context.trace.words
    spans = context.host_spans(r"^aten::(mm|addmm|linear|matmul)$")
    given = {int(word) for word in np.unique(shapes[spans]).tolist()}
    return {size for word in given for shape in parsed(words[word]) if is_shape(shape) for size in shape}


def _updated_frac(context: TraceContext, works: np.ndarray, values: float) -> float:
    """Of what an optimizer updates, the table: by what all passes move for it, at the memory's rate."""
    taken_s = float(context.work_s[works].sum()) / num_rounds(context)
    if context.device is None or taken_s <= 0:
        return 1.0
    passes = len(context.host_spans(r"^aten::_foreach_", Kind.OP)) / num_rounds(context)
    moved_bytes = values * (PASS_BYTES * passes if passes else FUSED_BYTES)
    return min(1.0, moved_bytes / (taken_s * context.device.dram.bandwidth_bytes_per_s))


def recompute(context: TraceContext) -> Candidate | None:
    """Forward work inside the backward pass: activation checkpointing, while memory is free."""
    works = np.flatnonzero(recomputed(context))
    if not len(works) or context.frac(context.per_step_s(works)) < 0.02:
        return None
    used = memory_frac(context)
    if (used is not None and used > FREE_FRAC) or _would_not_fit(context, works, used):
        return None
    known = (
        f"the peak is {used:.0%} of the memory" if used is not None else "the trace does not say how full the memory is"
    )
    return Candidate(
        what=f"{context.per_step_s(works) * 1e3:.3g} ms of forward work is computed again in the backward pass",
        cause=f"recompute that memory does not need: {known}",
        change="drop torch.utils.checkpoint, or keep it for the largest activations only (selective checkpointing)",
        where=place_of(context, works),
        fix=Fix(
            works=works,
            keep_best=0.0,
            keep_worst=0.1 if used is not None else 1.0,
            host=joined(recomputing_time(context), op_time(context, works)),
            host_best=0.0,
            host_worst=0.4 if used is not None else 1.0,
        ),
        evidence=kernel_evidence(context, works),
        spans=tuple(context.rows[works[:200]].tolist()),
        unchecked=() if used is not None else ("whether the activations fit: record with memory",),
        trust=Trust(
            0.85,
            1.65,
            "fitted: recordings on an H200 gained 1.59 and 1.08 times the replayed best: hooks on saved tensors "
            "cost the forward pass as well",
        ),
    )


def _would_not_fit(context: TraceContext, works: np.ndarray, used: float | None) -> bool:
    """Whether what is computed again is more than the free memory: at most what its kernels can write in their time.
    Where nobody said how much is taken, what the optimizer goes over in its time is."""
    if context.device is None:
        return False
    # Of the memory, for inputs, workspaces and what lies between segments.
    held = max(1.0 - FREE_FRAC, _held_frac(context) + 0.1) if used is None else used
    products = context.family("gemm", "conv", "attention")[works]
    # Of what the memory could move in a kernel's time, its output at most: light kernels read as much as they write,
    # and products, convolutions and attention compute (3.5 % for a bf16 product over 4,096 at 700 TFLOP/s).
    share = np.where(products, 0.1, 0.5)
    dram = context.device.dram
    kept_bytes = float((share * context.work_s[works]).sum()) / num_rounds(context) * dram.bandwidth_bytes_per_s
    return kept_bytes > (1.0 - held) * dram.capacity_bytes


def _held_frac(context: TraceContext) -> float:
    """Of the memory, weights, gradients and what the optimizer keeps of them: it reads all and writes three quarters in
    every step, at no more than the memory's rate."""
    if context.device is None:
        return 0.0
    works = context.launched_in(context.time_of(context.host_spans(r"^Optimizer\.step"))) & context.family("optimizer")
    moved_bytes = float(context.work_s[works].sum()) / num_rounds(context) * context.device.dram.bandwidth_bytes_per_s
    # Of what a fused update moves: four values of every weight are read, three are written.
    return (4.0 / 7.0) * moved_bytes / context.device.dram.capacity_bytes
