"""The optimizer: updates tensor by tensor, and gradients zeroed instead of dropped."""

from __future__ import annotations

from collections import Counter

import numpy as np

from ridgeline.findings.context.candidate import Candidate
from ridgeline.findings.context.context import TraceContext
from ridgeline.findings.context.evidence import kernel_evidence, place_of, place_of_host
from ridgeline.findings.context.host_time import main_threads
from ridgeline.findings.context.kernels import linked
from ridgeline.findings.context.nesting import op_time, spans_under, under
from ridgeline.findings.context.rounds import num_rounds
from ridgeline.findings.context.shapes import Product, first_shape, is_shape, parsed, product_of, shaped_ops
from ridgeline.findings.context.training import BACKWARD, passes_a_step, turns_a_step
from ridgeline.findings.replay.fix import Fix, joined
from ridgeline.findings.replay.replay import Index, Mask, Seconds
from ridgeline.findings.rule import rule
from ridgeline.trace.intervals import Intervals, covered_within, union
from ridgeline.trace.kind import Kind

MANY = 32
"""Kernels of one optimizer step from which on it is not fused: a fused one needs a few for any number of tensors."""
FEW_PASSES = 3
"""Of a foreach optimizer over its tensors: SGD without momentum has one or two, with it three, Adam ten."""
LIBRARY = ("pointwise", "reduce", "copy", "fill", "foreach", "index", "sort", "random", "dropout", "norm", "embedding")
"""Families of kernels that PyTorch updates weights by where it has no fused form; others are somebody's own."""
UPDATES = r"^aten::(add|sub|mul|div|addcmul|addcdiv|lerp|copy|sqrt|sign|square|pow|rsub|neg|clamp|maximum)_?$"
FORWARD = r"^aten::(linear|matmul|addmm|mm|bmm|conv\w*|embedding|layer_norm|batch_norm)$"
UNWANTED = 4
"""Gradients a round of weights that nobody updates, at least: one or two are of inputs that somebody changes."""
COMPILED = "torch._foreach_… over lists of weights, or torch.compile(optimizer.step): this optimizer has no fused form"


def perhaps_updates(context: TraceContext) -> Candidate | None:
    """Ops over tensors of the weights' sizes between a backward pass and the next forward one, without an optimizer of
    PyTorch's: they may write new weights instead of writing over the old."""
    if len(context.host_spans(r"^Optimizer\.step", Kind.ANNOTATION, Kind.OP)):
        return None
    ops, _ = _after_gradients(context, _sizes_learned(context) | _sizes_called_with(context))
    time = _in_a_row(context, ops)
    works = np.flatnonzero(context.launched_in(time) & context.family(*LIBRARY))
    if len(works) / num_rounds(context) < MANY:
        return None
    return Candidate(
        what=f"{len(works) / context.num_steps:,.0f} kernels a step over what has the weights' sizes, after gradients",
        cause="unfused optimizer: weights are updated one tensor after another",
        change=_fused_form(context, ops[:0]),
        where=place_of(context, works),
        fix=Fix(works=works, keep_best=0.2, keep_worst=0.6, host=time, host_best=0.05, host_worst=0.4),
        evidence=kernel_evidence(context, works),
        spans=tuple(context.rows[works[:200]].tolist()),
    )


@rule(
    "unfused-optimizer",
    version=8,
    order=15,
    saves="host",
    suspect=perhaps_updates,
    is_ambiguous=True,
    tell="whether it is weights that these kernels write",
)
def unfused_optimizer(context: TraceContext) -> Candidate | None:
    """Updates tensor by tensor, or pass by pass over all of them."""
    spans = context.host_spans(r"^Optimizer\.step", Kind.ANNOTATION, Kind.OP)
    by_hand = not len(spans)
    spans = _updated_by_hand(context) if by_hand else spans[~_has_no_fused_form(context, spans)]
    time = _in_a_row(context, spans) if by_hand else context.time_of(spans)
    works = np.flatnonzero(context.launched_in(time) & ~context.family("optimizer", "communication", "fused"))
    if not len(works) or len(works) / num_rounds(context) < MANY:
        return None
    foreach = context.per_step_s(works[context.family("foreach")[works]]) > 0.5 * context.per_step_s(works)
    if foreach and _num_passes(context, spans) < FEW_PASSES:  # a fused one reads and writes as much
        return None
    fusible = bool(
        context.words_like(r"^Optimizer\.step#(Adam|AdamW|SGD|Adagrad)\.step|^Optimizer\.step$")[
            context.trace.name[spans]
        ].any()
    )
    if foreach and not fusible:  # over lists of weights: there is nothing better to be had by a setting
        return None
    keep = (0.35, 0.7) if foreach else _kept_one_by_one(context, works)
    how = "foreach: several passes over all weights" if foreach else "one tensor after another"
    return Candidate(
        what=f"The optimizer runs {len(works) / context.num_steps:,.0f} kernels a step, "
        f"{context.per_step_s(works) * 1e3:.3g} ms",
        cause=f"unfused optimizer: {how}",
        change=_fused_form(context, spans) if fusible else COMPILED,
        where=place_of_host(context, spans),
        fix=Fix(
            works=works,
            keep_best=keep[0],
            keep_worst=keep[1],
            host=time,
            host_best=0.05 if not foreach else 0.3,
            host_worst=0.25 if not foreach else 0.8,
        ),
        evidence=kernel_evidence(context, works),
        spans=tuple(spans[:200].tolist()),
    )


def _fused_form(context: TraceContext, steps: Index) -> str:
    """How to get the fused form of the optimizer that runs in these steps; of none by name where nothing names it."""
    names = {context.trace.words[int(word)] for word in np.unique(context.trace.name[steps])}
    named = sorted({name.split("#")[1].split(".")[0] for name in names if "#" in name})
    which = f"torch.optim.{named[0]}(…, fused=True)" if len(named) == 1 else "fused=True in the optimizer's arguments"
    return f"{which}; foreach=True where a parameter or the device has no fused form"


def _sizes_learned(context: TraceContext) -> set[str]:
    """Of leaves that get gradients."""
    learned = context.host_spans(r"^torch::autograd::AccumulateGrad$", Kind.OP)
    return {_first_size(context, row) for row in learned.tolist()} - {""}


def _sizes_called_with(context: TraceContext) -> set[str]:
    """Of matrices and filters that layers are called with, and turned ones, as products are given them."""
    calls = context.host_spans(r"^aten::(linear|conv\dd|embedding)$", Kind.OP)
    words = {context.trace.text("shapes", row) for row in calls.tolist()}
    given = [[shape for shape in parsed(word)[:2] if is_shape(shape)] for word in words]
    weights = [tuple(shapes[1]) for shapes in given if len(shapes) == 2 and len(shapes[1]) >= 2]
    return {", ".join(map(str, each)) for weight in weights for each in (weight, weight[::-1])}


def _kept_one_by_one(context: TraceContext, works: Index) -> tuple[Seconds, Seconds]:
    """Of the device's time, what is left at best and at worst of updates one tensor after another: of a few kernels for
    each that is about all there is to do, of a kernel that somebody wrote for the whole update all of it, and of one
    kernel a tensor what lies within its beginning and its end."""
    num, few = (found := _num_kernels_a_tensor(context, works)), found < FEW_PASSES
    written = (context.work_kind == int(Kind.KERNEL))[works] & ~context.family(*LIBRARY)[works]
    # Kernels of a tensor's update, less than which are one, and seconds of a kernel from which on it is its traffic
    # that takes them.
    alone = written | ((num < 1.5) & (context.work_s[works] > 12e-6))
    best = np.where(alone, 1.0, 0.5 if few else 0.2)
    return best, np.where(alone, 1.0, 1.0 if few else 0.5)


def _updated_by_hand(context: TraceContext) -> Index:
    """Ops over tensors of the gradients' sizes after a backward pass, where the program has no optimizer of PyTorch's:
    most of them have been written over once the last one is done. Averages of weights have an optimizer beside them."""
    sizes = _sizes_learned(context)
    ops, num_passes = _after_gradients(context, sizes)
    written = context.words_like(r"[a-z]_$")[context.trace.name[ops]]
    covered = {_first_size(context, row) for row in ops[written].tolist()}
    # Tensors that are written over after a backward pass, at least: pictures or a state that are moved along their own
    # gradients are one or two, and no list of them is longer.
    many = written.sum() >= 6 * num_passes
    # Of the sizes that gradients have, those that an update by hand writes over.
    return np.asarray(ops if many and len(covered) >= 0.8 * len(sizes) else ops[:0], dtype=np.int64)


def _after_gradients(context: TraceContext, sizes: set[str]) -> tuple[Index, int]:
    """Ops over tensors of these sizes after a backward pass and before the next forward one, and how many such passes
    there are."""
    trace, ops = context.trace, context.host_spans(UPDATES, Kind.OP)
    ops = ops[~np.isin(trace.parent[ops], context.of_kind(Kind.OP)) & np.isin(trace.thread[ops], main_threads(context))]
    passes = context.host_spans(r"^autograd::engine::evaluate_function", Kind.OP)
    if not len(ops) or not sizes or not len(passes):
        return ops[:0], 0
    launches = context.host_spans(FORWARD, Kind.OP)
    launches = np.sort(context.start_ns[launches[~spans_under(context, launches, BACKWARD)]])
    ended = np.sort(context.end_ns[passes])
    last = np.searchsorted(ended, context.start_ns[ops]) - 1
    since = np.where(last >= 0, ended[np.maximum(last, 0)], np.iinfo(np.int64).max)
    between = np.searchsorted(launches, context.start_ns[ops]) > np.searchsorted(launches, since)
    sized = np.array([_first_size(context, row) in sizes for row in ops.tolist()], dtype=bool)
    chosen = (last >= 0) & ~between & sized
    return np.asarray(ops[chosen], dtype=np.int64), len(np.unique(last[chosen]))


def _in_a_row(context: TraceContext, ops: Index) -> Intervals:
    """The time of ops that follow each other, with the Python between them."""
    ops = ops[np.argsort(context.start_ns[ops], kind="stable")]
    start, end = context.start_ns[ops], context.end_ns[ops]
    following = np.append(start[1:], end[-1:])
    return union(start, np.where(following - end < 100_000, np.maximum(end, following), end))


def _has_no_fused_form(context: TraceContext, spans: Index) -> Mask:
    """Which steps have products of their own, as Muon and Shampoo have, gradients of rows alone, or a whole backward
    pass, as those have that call for the loss themselves."""
    backward = context.start_ns[context.host_spans(r"evaluate_function", Kind.OP)]
    products = context.launch_ns[context.family("gemm") & linked(context)]
    sparse = context.start_ns[context.host_spans(r"^aten::(_?coalesce|sparse_mask|_nnz|sparse_dim)$", Kind.OP)]
    inside = np.sort(np.concatenate((products, sparse, backward)))
    starts, ends = context.start_ns[spans], context.end_ns[spans]
    return np.asarray(np.searchsorted(inside, ends) > np.searchsorted(inside, starts), dtype=bool)


def _num_passes(context: TraceContext, spans: Index) -> float:
    """How often an optimizer step goes over its lists of tensors."""
    calls = np.sort(context.start_ns[context.host_spans(r"^aten::_foreach_", Kind.OP)])
    inside = np.searchsorted(calls, context.end_ns[spans]) - np.searchsorted(calls, context.start_ns[spans])
    return float(inside.mean()) if len(spans) else 0.0


def _num_kernels_a_tensor(context: TraceContext, works: Index) -> float:
    """Kernels of an update over tensors that got a gradient; many where nobody knows how many those are."""
    tensors = len(context.host_spans(r"^autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", Kind.OP))
    passes = passes_a_step(context) or turns_a_step(context)  # a loss may be written out
    return len(works) * passes / tensors if tensors and passes >= 1 else float(MANY)


def _zeroed_by_hand(context: TraceContext) -> Index:
    """Zeros written into what a backward pass then adds to: as many, and of the same sizes."""
    trace, zeros = context.trace, context.host_spans(r"^aten::(zero_|fill_|zeros_like)$", Kind.OP)
    if "shapes" not in trace.extra:
        return zeros[:0]
    if len(lists := _lists_zeroed(context)):
        return lists
    zeros = zeros[~np.isin(trace.parent[zeros], context.of_kind(Kind.OP))]
    added = context.host_spans(r"^aten::add_$", Kind.OP)
    added = added[np.isin(trace.parent[added], context.host_spans(r"AccumulateGrad", Kind.OP))]
    sizes = {_first_size(context, row) for row in added.tolist()}
    found = np.array([row for row in zeros.tolist() if _first_size(context, row) in sizes], dtype=np.int64)
    return found if 0.9 * len(added) <= len(found) <= 1.1 * len(added) else found[:0]


def _lists_zeroed(context: TraceContext) -> Index:
    """``torch._foreach_zero_`` over as many tensors as gradients are added to."""
    lists = context.host_spans(r"^aten::_foreach_zero_$", Kind.OP)
    lists = lists[~spans_under(context, lists, r"^Optimizer\.")]
    given = [parsed(context.trace.text("shapes", row)) for row in lists.tolist()]
    zeroed = sum(len(found[0]) for found in given if found and isinstance(found[0], list))
    added = context.host_spans(r"^aten::add_$", Kind.OP)
    num = int(np.isin(context.trace.parent[added], context.host_spans(r"AccumulateGrad", Kind.OP)).sum())
    return lists if num and 0.9 * num <= zeroed <= 1.1 * num else lists[:0]


def _first_size(context: TraceContext, row: int) -> str:
    return context.trace.text("shapes", row).split("]")[0].lstrip("[")


def needless_gradients(context: TraceContext) -> Candidate | None:
    """A backward pass goes on into weights that no optimizer has."""
    leaves = context.host_spans(r"^torch::autograd::AccumulateGrad$", Kind.OP)
    steps = context.host_spans(r"^Optimizer\.step", Kind.ANNOTATION, Kind.OP)
    if len(leaves) < UNWANTED or not len(steps) or (context.work_kind == int(Kind.COMMUNICATION)).any():
        return None  # of many devices, weights are updated in pieces
    updated = _sizes_updated(context, context.time_of(steps))
    leaves = leaves[np.argsort(context.start_ns[leaves])]
    shapes, words = context.trace.optional("shapes"), context.trace.words
    sizes = [first_shape(words[int(shapes[row])]) for row in leaves.tolist()]
    wanted = np.array([not size or size in updated for size in sizes], dtype=bool)
    time, num = _beyond(context, leaves, wanted, np.sort(context.start_ns[steps]))
    if not updated or not wanted.any():
        return None
    if num < UNWANTED * num_rounds(context):
        if not wanted[-1] or not any(len(size) > 1 for size in set(sizes) & updated):
            return None  # lists of vectors alone may be of something else than weights
        return _learned_in_passing(context, Counter(size for size in sizes if size and size not in updated))
    works = np.flatnonzero(context.launched_in(time) & under(context, BACKWARD))
    if not len(works):
        return None
    return Candidate(
        what=f"{num / context.num_steps:.3g} gradients a step are of weights that the optimizer does not have",
        cause="needless gradients: the backward pass goes through layers that are never updated",
        change="requires_grad_(False) on the layers that stay, or torch.no_grad() around them",
        where=place_of(context, works),
        fix=Fix(
            works=works, keep_best=0.0, keep_worst=0.1, host=op_time(context, works), host_best=0.0, host_worst=0.25
        ),
        evidence=kernel_evidence(context, works),
        spans=tuple(context.rows[works[:200]].tolist()),
        unchecked=("whether anybody reads these gradients, or updates these weights in other steps",),
    )


def _learned_in_passing(context: TraceContext, unwanted: Counter[tuple[int, ...]]) -> Candidate | None:
    """A backward pass must go through layers to something that is learned before them (a prompt, adapters), and makes
    gradients of their weights on its way: products whose result has such a weight's size, as many as there are. Where
    there are more, what layers work on has the same size."""
    inside, num = under(context, BACKWARD), unwanted.total()
    products = np.flatnonzero(context.family("gemm") & inside)
    trace, ops = context.trace, shaped_ops(context.trace, context.rows[products])
    shapes = trace.optional("shapes")
    known = np.unique(ops[ops >= 0]).tolist()
    made = {op: product_of(trace.words[int(trace.name[op])], trace.words[int(shapes[op])]) for op in known}
    results = {op: _weight_of(p, unwanted) for op, p in made.items() if p is not None and p.b == 1}
    many = {size for size, count in Counter(results.values()).items() if count > unwanted[size]}
    weights = {op for op, size in results.items() if size and size not in many}
    works = products[[op in weights for op in ops.tolist()]]
    if num < UNWANTED * num_rounds(context) or len(works) < UNWANTED * num_rounds(context):
        return None
    beside = np.flatnonzero(inside & (context.named(r"GammaBeta") | (context.named(r"^aten::sum$", "op"))))
    return Candidate(
        what=f"{num / context.num_steps:.3g} gradients a step are of weights that the optimizer does not have",
        cause="needless gradients: of layers that the backward pass goes through and that are never updated",
        change="requires_grad_(False) on the weights that stay: what is learned before them still gets its gradients",
        where=place_of(context, works),
        fix=Fix(
            works=np.concatenate((works, beside)),
            keep_best=0.0,
            keep_worst=np.concatenate((np.full(len(works), 0.1), np.ones(len(beside)))),
            host=op_time(context, works),
            host_best=0.0,
            host_worst=0.5,
        ),
        evidence=kernel_evidence(context, works),
        spans=tuple(context.rows[works[:200]].tolist()),
        unchecked=("whether anybody reads these gradients, or updates these weights in other steps",),
    )


def _weight_of(product: Product, sizes: Counter[tuple[int, ...]]) -> tuple[int, ...]:
    """The weight that a product's result may be the gradient of, as it is or turned; nothing if there is none."""
    return next((size for size in ((product.m, product.n), (product.n, product.m)) if size in sizes), ())


def _sizes_updated(context: TraceContext, time: Intervals) -> set[tuple[int, ...]]:
    """Of what ops inside of updates were given, in lists or not; none where an update tells nothing of its tensors."""
    trace, shapes = context.trace, context.trace.optional("shapes")
    ops = context.of_kind(Kind.OP)
    ops = ops[(shapes[ops] > 0) & (covered_within(time, context.start_ns[ops], context.end_ns[ops]) > 0)]
    given = (parsed(trace.words[word]) for word in np.unique(shapes[ops]).tolist())
    entries = (entry for each in given for entry in each if isinstance(entry, list))
    lists = ([entry] if is_shape(entry) else entry for entry in entries)
    return {tuple(size) for entry in lists for size in entry if is_shape(size) and size}


def _beyond(context: TraceContext, leaves: Index, wanted: Mask, steps_ns: Index) -> tuple[Intervals, int]:
    """From the last gradient that is wanted before an update to the last that is not, and how many those are."""
    first, last, num = list[int](), list[int](), 0
    turn = np.searchsorted(steps_ns, context.start_ns[leaves])
    for each in np.unique(turn).tolist():
        own = np.flatnonzero(turn == each)
        kept = own[wanted[own]]
        tail = own[own > kept[-1]] if len(kept) else own[:0]
        if len(tail):
            first.append(int(context.end_ns[leaves[kept[-1]]]))
            last.append(int(context.end_ns[leaves[tail[-1]]]))
            num += len(tail)
    return Intervals(np.array(first, dtype=np.int64), np.array(last, dtype=np.int64)), num


def zero_grad(context: TraceContext) -> Candidate | None:
    spans = context.host_spans(r"^Optimizer\.zero_grad|zero_grad", Kind.ANNOTATION, Kind.OP)
    adds = under(context, r"AccumulateGrad") & context.family("pointwise")
    spans = spans if len(spans) else _zeroed_by_hand(context)
    time = context.time_of(spans)
    fills = context.launched_in(time)
    if not fills.any():
        return None
    works = np.flatnonzero(fills | adds)
    time = joined(time, op_time(context, np.flatnonzero(adds)))
    meant = 1.0 - 1.0 / max(
        1.0, passes_a_step(context)
    )  # of the additions: gradients of later batches are added anyway
    meant = min(meant, max(0.0, 1.0 - float(fills.sum()) / max(1, adds.sum())))  # unless zeroed before each
    kept = np.where(adds[works] & ~fills[works], meant, 0.0)
    return Candidate(
        what=f"zero_grad writes zeros: {fills.sum() / context.num_steps:.3g} kernels a step"
        + (f", and {adds.sum() / context.num_steps:.3g} additions to them in the backward pass" if adds.any() else ""),
        cause="gradient memsets: gradients are zeroed and added to instead of dropped and written",
        change="optimizer.zero_grad(set_to_none=True) (the default): drop the argument, or model.zero_grad() likewise",
        where=place_of_host(context, spans),
        fix=Fix(
            works=works, keep_best=kept, keep_worst=np.maximum(0.1, kept), host=time,
            host_best=max(0.1, meant), host_worst=max(0.5, meant),
        ),
        evidence=kernel_evidence(context, works),
        spans=tuple(spans[:200].tolist()),
        unchecked=("whether the gradients are accumulated over several backward passes on purpose",),
    )  # fmt: skip
