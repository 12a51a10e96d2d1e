"""Kernels that one kernel could replace: attention spelled out, chains of pointwise kernels, casts of weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ridgeline.findings.context.attention_upcast import cast_up
from ridgeline.findings.context.candidate import Candidate
from ridgeline.findings.context.context import SURE_FRAC, TraceContext
from ridgeline.findings.context.evidence import kernel_evidence, place_of
from ridgeline.findings.context.kernels import half_type, is_on_device_copy
from ridgeline.findings.context.nesting import is_under, op_time, under
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
from ridgeline.findings.context.training import BACKWARD, passes_a_step, trains
from ridgeline.findings.replay.fix import Fix
from ridgeline.findings.replay.replay import Index, Mask, Seconds
from ridgeline.findings.rule import rule
from ridgeline.findings.rules.experts import over_experts
from ridgeline.trace.kind import Kind

BATCHED = frozenset({"aten::bmm", "aten::baddbmm", "aten::matmul", "aten::einsum"})
WIDEST = 256
"""Values of a head for which fused attention exists."""
SECOND = "scores are a sum of two products: a fused kernel takes one of them as a mask that somebody has made"
REFERENCED = "; its reference form is what runs: leave sdpa_kernel(SDPBackend.MATH), or what keeps the others off"
CHAIN = 4
"""Pointwise kernels in a row from which on a compiler pays; eager PyTorch has two or three between products by
nature."""
CHAIN_UNKNOWN = 6
"""The same where ops are unknown, as in a replayed graph, and all but one are sums: a bias and the sums of gradients
after it are no chain."""
ALIKE = 0.05
"""Of the longest kernel's time: less is a kernel over another, small tensor, and no link of the chain."""
SHAPES = 4
"""Of tensors that a loop goes over, at least (seven to 38 in four recorded loops)."""
LONGEST_BODY, AGAIN_FRAC, ANOTHER_FRAC = 16, 0.6, 0.2
"""Kernels of a loop's body at most, of them those that come again, and of those the ones over another tensor."""
LOOP, SMALL_S = 48, 30e-6
"""Small kernels in a row from which on they are a loop over tensors, and what small means."""
MOVES_S = 10e-6
"""Of kernels in a row over tensors of one size, from which on they move them rather than begin and end."""
CALLED = r"aten::(linear|matmul|addmm|mm|bmm|conv\w*|convolution|embedding)$"
"""What autocast casts weights for."""
MANY_LIGHT, MOSTLY_LIGHT = 32, 0.65
"""Kernels of a round, and their share of its time: 0.52 at most in healthy programs on an H200."""


def _runs(mask: Mask, stream: Index) -> tuple[Index, Index]:
    """Start and end of stretches of consecutive chosen works on a stream, in the order given."""
    breaks = np.concatenate(([True], (stream[1:] != stream[:-1])))
    on = mask.astype(np.int8)
    starts = np.flatnonzero(mask & (breaks | (np.concatenate(([0], on[:-1])) == 0)))
    follows = np.concatenate((breaks[1:], [True]))
    ends = np.flatnonzero(mask & (follows | (np.concatenate((on[1:], [0])) == 0))) + 1
    return starts, ends


@rule("attention", version=9, order=41, more_at_best=0.3)
def attention(context: TraceContext) -> Candidate | None:
    """Attention spelled out op by op, or fused attention that a dense mask keeps from its fast kernels."""
    return _spelled_out(context) or _masked(context)


def _spelled_out(context: TraceContext) -> Candidate | None:
    order = np.lexsort((context.base.work_start_s, context.program.stream))
    by_hand = _exponentials(context)
    product, softmax = (
        context.family("gemm")[order],
        # Softmax over another dim than the last: over queries, channels or slots, which is no attention.
        ((context.family("softmax") & ~context.named(r"SpatialSoftMax")) | by_hand)[order],
    )
    batched, wide = _may_be_batched(context)[order], _wide_heads(context)[order]
    sizes = _sizes(context, np.flatnonzero(product | softmax), order)
    light = (
        context.family(*("pointwise", "reduce", "dropout", "copy", "fill", "random", "other"), "softmax", "index")
        | is_on_device_copy(context)
    )[order]
    copied = (context.family("copy") | is_on_device_copy(context) | (context.work_kind == int(Kind.MEMSET)))[order]
    chosen, apart = np.zeros(len(order), dtype=bool), 0
    inside = under(context, BACKWARD)[order]
    for at in np.flatnonzero(softmax).tolist():
        before, after = _reach(product, light, at, -1), _reach(product, light, at, +1)
        if before is None or after is None or wide[before] or not (batched[before] and batched[after]):
            continue
        if by_hand[order[at]] and not all(map(sizes.get, (at, before, after))):
            continue
        if _are_scores(sizes[at], sizes[before], sizes[after]):
            first, last = _further(product, before, -1), _further(product, after, +1)
            chosen[_along(copied, first, -1) : _along(copied, last, +1) + 1] = True
            apart += not inside[at] and _has_a_second(sizes, before, _reach(product, light, before, -1))
    works = np.sort(order[chosen])
    works = works[~context.family("loss", "attention")[works]]
    if not len(works) or not _is_batched(context, works):
        return None
    num = int(softmax[chosen].sum())
    forward = works[
        ((context.family("softmax") & ~context.named(r"backward")) | (by_hand & ~under(context, BACKWARD)))[works]
    ]
    if not len(forward) or _are_read_by_others(context, works, forward):
        return None
    in_parts = 2 * apart >= len(forward)
    products = works[context.family("gemm")[works]]
    is_cast = bool(cast_up(context)[products].mean() > 0.5)
    fp32 = _is_fp32(context, products) and not is_cast  # its fused kernels are slow ones
    return Candidate(
        what=f"Attention is spelled out {num / context.num_steps:.3g} times a step: product, softmax, product",
        cause="unfused attention: the score matrix is written to memory and read back several times",
        change="torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=…) instead of matmul, softmax, "
        "matmul; FlexAttention where something is done to the scores" + REFERENCED * is_cast,
        where=place_of(context, works),
        # Of attention whose scores are a sum of two products, what is left at best: one of them is made apart and read.
        fix=_fused(context, works, 0.4 if in_parts else 0.06, 1.0 if fp32 or in_parts else 0.35),
        evidence=kernel_evidence(context, works),
        spans=tuple(context.rows[works[:200]].tolist()),
        unchecked=("whether the mask, bias or dropout has a fused form",) + (SECOND,) * in_parts,
    )


def _has_a_second(sizes: dict[int, tuple[int, ...]], scores: int, other: int | None) -> bool:
    """Whether right before one product of the scores there is another of the same queries: with places, say."""
    one, two = sizes.get(scores, ()), sizes.get(other, ()) if other is not None else ()
    return len(one) == len(two) == 4 and (one[0], one[1], one[3]) == (two[0], two[1], two[3]) and one[3] <= WIDEST


def _sizes(context: TraceContext, places: Index, order: Index) -> dict[int, tuple[int, ...]]:
    """For places in an order of works what the op was given: the sizes of a product, or the scores of a softmax."""
    trace, shapes = context.trace, context.trace.optional("shapes")
    ops, found = shaped_ops(trace, context.rows[order[places]]), dict[int, tuple[int, ...]]()
    for place, op in zip(places.tolist(), ops.tolist(), strict=True):
        name, word = (trace.words[int(trace.name[op])], trace.words[int(shapes[op])]) if op >= 0 else ("", "")
        # The op that makes a softmax, and the one in its gradient.
        scores = "softmax" in name or name in ("aten::exp", "aten::exp_", "aten::mul")
        found[place] = product_of(name, word) or (first_shape(word) if scores else ())
    return found


def _exponentials(context: TraceContext) -> Mask:
    """Kernels of ``exp`` over scores, and of its gradient: a softmax that somebody wrote out."""
    forward = context.named(r"^aten::exp_?$", "op") & ~under(context, BACKWARD)
    return np.asarray((forward | under(context, r"^ExpBackward\d*$")) & context.family("pointwise"), dtype=bool)


def _are_scores(softmax: tuple[int, ...], before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Whether both products have the width of what the softmax is over, as far as sizes are known: between scores and
    their softmax heads may be mixed by a product of their own, which no fused kernel has."""
    if not (softmax and before and after):
        return True
    return softmax[-1] in before[1:] and softmax[-1] in after[1:]


def _are_read_by_others(context: TraceContext, works: Index, softmaxes: Index) -> bool:
    """Whether the weights of half of the attentions go elsewhere as well (into a mean over heads that somebody reads, a
    loss, a choice of tokens): a fused kernel never writes them."""
    trace, shapes = context.trace, context.trace.optional("shapes")
    own = shaped_ops(trace, context.rows[softmaxes])
    weights = {_as_scores(trace.words[int(shapes[op])]) for op in own[own >= 0].tolist()} - {()}
    others = np.ones(len(context.rows), dtype=bool)
    others[works] = False
    others &= ~under(context, BACKWARD) & (context.work_kind == int(Kind.KERNEL))
    ops = shaped_ops(trace, context.rows[others])
    given = {op: _as_scores(trace.words[int(shapes[op])]) for op in np.unique(ops[ops >= 0]).tolist()}
    read = [op for op, scores in given.items() if scores in weights]
    means = [op for op in read if trace.words[int(trace.name[op])] in ("aten::mean", "aten::sum")]
    sides = {(scores[1:], scores[0]) for scores in weights}
    used = sum(any(made[1:] == two and made[0] < num for two, num in sides) for made in given.values() if made)
    return 2 * (len(read) - len(means) + min(len(means), used)) >= len(softmaxes) > 0


def _as_scores(shapes: str) -> tuple[int, ...]:
    """A tensor's number of score matrices and their sides: heads and samples may be one dim or two."""
    shape = first_shape(shapes)
    return (int(np.prod(shape[:-2])), *shape[-2:]) if len(shape) >= 3 else ()


def _is_fp32(context: TraceContext, works: Index) -> bool:
    trace, ops = context.trace, shaped_ops(context.trace, context.rows[works])
    dtypes = trace.optional("dtypes")
    kinds = [first_dtype(trace.words[int(dtypes[op])]) for op in ops[ops >= 0].tolist()]
    return 2 * kinds.count("fp32") > len(kinds) > 0


def _fused(context: TraceContext, works: Index, best: Seconds | float, worst: Seconds | float) -> Fix:
    """One kernel instead of many: most of their time on the device goes, and most of what the host needs for them."""
    return Fix(
        works=works, keep_best=best, keep_worst=worst, host=op_time(context, works), host_best=0.1, host_worst=0.5
    )


def _further(product: Mask, at: int, step: int) -> int:
    """A product right beside this one belongs to it: a backward pass has them in pairs."""
    place = at + step
    return place if 0 <= place < len(product) and product[place] else at


def _along(copied: Mask, at: int, step: int) -> int:
    """The last of a few copies right beside a product: operands laid out for it, which a fused kernel reads as they
    are."""
    # Of attention: what may be laid out anew right beside a product (queries, keys, values, a bias, what the product is
    # added to, and a memset of its workspace).
    for _ in range(6):
        if not 0 <= at + step < len(copied) or not copied[at + step]:
            break
        at += step
    return at


def _reach(product: Mask, light: Mask, at: int, step: int) -> int | None:
    """The nearest product in a direction with only light kernels in between."""
    # Kernels between a product and the softmax that still belong to the same attention: scale, mask, dropout, casts.
    for distance in range(1, 8 + 1):
        place = at + step * distance
        if not 0 <= place < len(product):
            return None
        if product[place]:
            return place
        if not light[place]:
            return None
    return None


def _may_be_batched(context: TraceContext) -> Mask:
    """Works whose op multiplies batches, or is not known: scores come from one such product and go into another. A
    router's softmax has a linear layer on one side, whatever experts have on the other."""
    words = context.trace.words
    known = {int(word): words[int(word)] for word in np.unique(context.trace.op[context.rows])}
    fitting = [word for word, name in known.items() if not name or name in BATCHED]
    return np.isin(context.trace.op[context.rows], fitting)


def _wide_heads(context: TraceContext) -> Mask:
    """Products that make scores of rows too wide for any fused kernel: slots and memories have such, heads have not.
    Gradients are told by their own products, which have the scores' sizes."""
    trace, works = context.trace, np.flatnonzero(context.family("gemm"))
    ops, shapes = shaped_ops(trace, context.rows[works]), trace.optional("shapes")
    found = {op: product_of(trace.words[int(trace.name[op])], trace.words[int(shapes[op])]) for op in set(ops.tolist())}
    inside = under(context, BACKWARD)
    wide = np.zeros(len(context.rows), dtype=bool)
    for work, op in zip(works.tolist(), ops.tolist(), strict=True):
        product = found[op] if op >= 0 else None
        if product is not None:
            sizes = sorted(product[1:])
            wide[work] = sizes[0] > WIDEST if inside[work] else product.k > WIDEST
    return wide


def _is_batched(context: TraceContext, works: Index) -> bool:
    """Attention multiplies batches; a classifier's softmax after a linear layer does not. Where ops are unknown, as in
    a replayed graph, softmaxes of a few microseconds are not over scores."""
    products = works[context.family("gemm")[works]]
    ops = shaped_ops(context.trace, context.rows[products])
    names = {context.trace.words[int(context.trace.name[op])] for op in ops.tolist() if op >= 0}
    names |= {context.trace.words[int(word)] for word in np.unique(context.trace.op[context.rows[products]])}
    names -= {""}
    if not names:
        return float(np.median(context.work_s[works[context.family("softmax")[works]]])) > 12e-6
    return bool(names & BATCHED)


def _masked(context: TraceContext) -> Candidate | None:
    """Fused attention that reads a dense mask where a causal flag would do."""
    attention = np.flatnonzero(context.family("attention"))
    shapes = context.trace.optional("shapes")
    ops = shaped_ops(context.trace, context.rows[attention])
    dtypes, words = context.trace.optional("dtypes"), context.trace.words
    masked = np.array(
        [op >= 0 and _replaceable(words[int(shapes[op])], words[int(dtypes[op])]) for op in ops.tolist()], dtype=bool
    )
    works = attention[masked] if len(attention) else attention
    if not len(works):
        return None
    shared = any(_for_all_samples(context.trace.words[int(shapes[op])]) for op in np.unique(ops[masked]).tolist())
    least = _read_frac(context, works, ops[masked])
    return Candidate(
        what="Fused attention reads a dense mask",
        cause="a dense attention mask: nothing is skipped, the mask is read for every head, and faster kernels do "
        "not take it",
        change="is_causal=True instead of a triangular mask; FlexAttention or varlen for others",
        where=place_of(context, works),
        fix=Fix(works=works, keep_best=np.maximum(0.25, least), keep_worst=np.maximum(0.7 if shared else 1.0, least)),
        evidence=kernel_evidence(context, works),
        spans=tuple(context.rows[works[:200]].tolist()),
        unchecked=(
            "whether the mask is causal: its values are not in the trace"
            if shared
            else "how much of the mask may be seen: there is one for each sample, and its values are not in the trace",
        ),
    )


def _replaceable(shapes: str, dtypes: str) -> bool:
    """Whether there is a dense mask, and a faster kernel without one: in fp32 the same kernel runs all the same, and
    only a causal one, which is for all samples, is skipped in part."""
    return _dense_mask(shapes) and (first_dtype(dtypes) != "fp32" or _for_all_samples(shapes))


def _for_all_samples(shapes: str) -> bool:
    """Whether there is one mask for all: it then depends on places alone, and not on how long each text is."""
    given = [shape for shape in parsed(shapes) if is_shape(shape) and len(shape) == 4]
    return len(given) >= 4 and given[0][0] > 1 and given[3][0] == 1


def _read_frac(context: TraceContext, works: Index, ops: Index) -> Seconds:
    """Of each kernel's time what reading queries, keys and values takes, which no other kernel saves."""
    if context.device is None:
        return np.zeros(len(works))
    shapes, words = context.trace.optional("shapes"), context.trace.words
    given = [[shape for shape in parsed(words[int(shapes[op])]) if is_shape(shape)][:3] for op in ops.tolist()]
    moved = np.array([2.0 * sum(float(np.prod(shape)) for shape in found) for found in given])
    read_s = moved / context.device.dram.bandwidth_bytes_per_s
    return np.asarray(np.minimum(1.0, read_s / np.maximum(context.work_s[works], 1e-12)), dtype=np.float64)


def _dense_mask(shapes: str) -> bool:
    """Beside q, k and v there is a tensor of query length by key length, the same for all heads: one for each head is a
    bias that no flag replaces, and where a few queries look at many keys (a tree of drafts) there is little to skip."""
    given = [shape for shape in parsed(shapes) if is_shape(shape) and len(shape) == 4]
    if len(given) < 4:
        return False
    q, k = given[0], given[1]
    return any(
        q[-2] == k[-2] and shape[-2:] == [q[-2], k[-2]] and shape[-2] > 1 and shape[-3] == 1 and shape not in (q, k)
        for shape in given[3:]
    )


@rule(
    "weight-casts",
    version=7,
    order=46,
    saves="host",
    more_at_best=0.2,
)
def weight_casts(context: TraceContext) -> Candidate | None:
    """The same tensors are converted to another dtype again and again."""
    works = _weight_casts(context)
    passes = passes_a_step(context)
    if trains(context) and passes < 2:  # an optimizer wants them in fp32, and once a step they must be cast
        return _frozen_casts(context, works[_are_frozen(context, works)])
    works = works[_come_again(context, works, passes)] if trains(context) else works
    if len(works) < 4 or context.frac(context.per_step_s(works)) < 0.02:
        return None
    change = "one autocast region around all passes of a step: within it a weight is cast once"
    return Candidate(
        what=f"{len(works) / context.num_steps:.3g} casts of weights a step",
        cause="autocast, or a cast that somebody wrote, converts weights to the compute dtype in every pass",
        change=change
        if trains(context)
        else f"keep the weights in 16 bits for inference (model.to(torch.{half_type(context)})); of eight bits, "
        "products that read them as they are (torch.compile, torch._weight_int8pack_mm, torch._scaled_mm)",
        where=place_of(context, works),
        fix=_cast_once(context, works, 1.0 / passes) if trains(context) else _weights_kept(context, works),
        evidence=kernel_evidence(context, works),
        spans=tuple(context.rows[works[:200]].tolist()),
    )


def _come_again(context: TraceContext, casts: Index, passes: float) -> Mask:
    """Casts of weights of which there are as many in every pass: those of two networks, each with a pass of its own,
    are done once."""
    shapes, words = context.trace.optional("shapes"), context.trace.words
    ops = shaped_ops(context.trace, context.rows[casts])
    sizes = [first_shape(words[int(shapes[op])]) if op >= 0 else () for op in ops.tolist()]
    num = max(2, round(passes)) * num_rounds(context)
    counts = Counter(sizes)
    return np.array([not size or counts[size] % num == 0 for size in sizes], dtype=bool)


def _frozen_casts(context: TraceContext, works: Index) -> Candidate | None:
    # Of the step, for casts of weights that never change: what is cast and computed in fp32 around them comes on top.
    if len(works) < 4 or context.frac(context.per_step_s(works)) < 0.01:
        return None
    return Candidate(
        what=f"{len(works) / context.num_steps:.3g} casts of frozen weights a step",
        cause="autocast converts fp32 weights that never change to the compute dtype, again in every pass",
        change=f"keep the frozen weights in 16 bits (module.to(torch.{half_type(context)})): no optimizer wants them "
        "in fp32",
        where=place_of(context, works),
        fix=_weights_kept(context, works),
        evidence=kernel_evidence(context, works),
        spans=tuple(context.rows[works[:200]].tolist()),
    )


def _are_frozen(context: TraceContext, casts: Index) -> Mask:
    """Casts of weights that get no gradient: a cast of one that does has its own backward, of the same shape."""
    shapes, words = context.trace.optional("shapes"), context.trace.words
    learned = {
        tuple(first_shape(words[int(shapes[span])])) for span in context.host_spans(r"^ToCopyBackward\d*$").tolist()
    }
    ops = shaped_ops(context.trace, context.rows[casts])
    seen = [op >= 0 and tuple(first_shape(words[int(shapes[op])])) not in learned for op in ops.tolist()]
    return np.array(seen, dtype=bool) & bool(learned)


def _weight_casts(context: TraceContext) -> Index:
    """Kernels that convert weights."""
    casts = context.family("copy") & context.named(r"bfloat16_copy|float16_copy|direct_copy|copy_kernel")
    if trains(context):  # weights that are written over have others in fp32, which an optimizer keeps
        casts &= under(context, r"_to_copy|aten::to\b|aten::_to|" + CALLED)
    works = np.flatnonzero(casts & context.named(r"_to_copy|aten::to\b|aten::copy_|aten::_to", "op"))
    ops = shaped_ops(context.trace, context.rows[works])
    shapes, dtypes = context.trace.optional("shapes"), context.trace.optional("dtypes")
    called = _weights_called_with(context)
    found = {op: _is_weight_cast(context, op, shapes, dtypes, called) for op in set(ops[ops >= 0].tolist())}
    weights = np.array([found.get(op, False) for op in ops.tolist()], dtype=bool)
    return works[weights] if len(works) else works


def _cast_once(context: TraceContext, casts: Index, share: float) -> Fix:
    """The casts of one pass remain."""
    return Fix(works=casts, keep_best=share, keep_worst=share, host=op_time(context, casts), host_best=share)


def _weights_kept(context: TraceContext, casts: Index) -> Fix:
    """No casts of weights; at best none of activations either, and what ran in fp32 between products moves half the
    bytes."""
    between = context.family("pointwise", "norm", "copy", "embedding", "index")
    between[casts] = False
    others = np.flatnonzero(between & _reads_fp32(context))
    moved = context.family("copy")[others]
    none, whole = np.zeros(len(casts)), np.ones(len(others))
    return Fix(
        works=np.concatenate((casts, others)),
        keep_best=np.concatenate((none, np.where(moved, 0.0, 0.5))),
        keep_worst=np.concatenate((none, whole)),
        host=op_time(context, casts),
        host_best=0.0,
        host_worst=0.3,
    )


def _reads_fp32(context: TraceContext) -> Mask:
    """Works whose op was given an fp32 tensor; a sum of one with another in 16 bits is in fp32 as well."""
    words, dtypes = context.trace.words, context.trace.optional("dtypes")
    ops = shaped_ops(context.trace, context.rows)
    known = {op: "fp32" in map(dtype_named, parsed(words[int(dtypes[op])])) for op in set(ops.tolist()) if op >= 0}
    return np.array([known.get(op, False) for op in ops.tolist()], dtype=bool)


def _is_weight_cast(
    context: TraceContext, op: int, shapes: np.ndarray, dtypes: np.ndarray, called: frozenset[tuple[int, ...]]
) -> bool:
    """An fp32 tensor that has the shape of a weight (nothing in it is the batch) becomes another type."""
    shape = first_shape(context.trace.words[int(shapes[op])])
    kinds = [word for word in map(dtype_named, parsed(context.trace.words[int(dtypes[op])])) if word]
    converted = kinds[-1:] == ["fp32"] and (len(kinds) < 2 or kinds[0] != "fp32")  # copy_(into, from)
    # Whether eight bits become sixteen: a weight that is kept small, and made large again for every call.
    if len(shape) not in (1, 2, 4) or not (
        converted or (kinds[:1] in (["bf16"], ["fp16"]) and kinds[-1] in ("int8", "uint8", "fp8"))
    ):
        return False
    if not converted:
        return not trains(context) and shape in called
    if is_under(context, op, CALLED):
        return not _is_activation(context, op, shape, shapes)
    return shape in called  # somebody wrote weight.to(x.dtype)


def _weights_called_with(context: TraceContext) -> frozenset[tuple[int, ...]]:
    """Sizes of matrices and filters that layers in 16 bits are called with as weights, and never as their input."""
    trace, shapes, dtypes = context.trace, context.trace.optional("shapes"), context.trace.optional("dtypes")
    weights, worked_on = set[tuple[int, ...]](), set[tuple[int, ...]]()
    spans = context.host_spans(r"^aten::(linear|conv\dd)$", Kind.OP)
    for word, kinds in set(zip(shapes[spans].tolist(), dtypes[spans].tolist(), strict=True)):
        given = [tuple(shape) for shape in parsed(trace.words[word])[:2] if is_shape(shape) and shape]
        worked_on.update(given[:1])
        if first_dtype(trace.words[kinds]) in ("bf16", "fp16"):
            weights.update(shape for shape in given[1:] if len(shape) in (2, 4))
    return frozenset(weights - worked_on)


def _is_activation(context: TraceContext, cast: int, shape: tuple[int, ...], shapes: np.ndarray) -> bool:
    """Whether the call around a cast is given a tensor of this shape as what it works on, and no weight of it."""
    calls = context.words_like(CALLED)
    around = [at for at in context.trace.path(cast) if calls[context.trace.name[at]] and shapes[at] > 0]
    if not around:
        return False
    given = [
        tuple(found) for found in parsed(context.trace.words[int(shapes[around[-1]])]) if is_shape(found) and found
    ]
    first = 1 if context.trace.words[int(context.trace.name[around[-1]])] == "aten::addmm" else 0
    return shape in given[first : first + 1] and shape not in given[first + 1 :]


def perhaps_a_loop(context: TraceContext) -> Candidate | None:
    """Runs in which the same few ops come again and again: one state that moves on, or things that could be done at
    once."""
    trace = context.trace
    pieces = [piece for piece in _small_runs(context) if (trace.op[context.rows[piece]] > 0).any()]
    pieces = [piece for piece in pieces if _comes_again(trace.op[context.rows[piece]])]
    return _one_for_all(context, pieces) if pieces else None


@rule(
    "tensor-loop",
    version=7,
    order=18,
    saves="host",
    more_at_best=0.1,
    suspect=perhaps_a_loop,
    is_ambiguous=True,
    tell="whether a turn of the loop needs what the one before gave; if not, all of them can be one op",
)
def tensor_loop(context: TraceContext) -> Candidate | None:
    """The same small op again and again, tensor by tensor: averages of weights, norms of gradients, schedules; or
    experts one by one."""
    if (experts := over_experts(context)) is not None:
        return experts
    pieces = _small_runs(context)
    joins = context.named(r"^aten::(cat|stack)$", "op")
    pieces = [piece for piece in pieces if _over_tensors(context, piece, _joins_many(context, piece[joins[piece]]))]
    return _one_for_all(context, pieces) if pieces else None


def _small_runs(context: TraceContext) -> list[Index]:
    """Stretches of many small light kernels in a row, outside of an optimizer's step."""
    order = np.lexsort((context.base.work_start_s, context.program.stream))
    light = context.family("pointwise", "reduce", "copy", "fill", "index") | is_on_device_copy(context)
    small = light[order] & (context.work_s[order] < SMALL_S)
    outside = ~context.launched_in(context.time_of(context.host_spans(r"^Optimizer\.")))[order]
    starts, ends = _runs(small & outside, context.program.stream[order])
    return [order[starts[i] : ends[i]] for i in np.flatnonzero(ends - starts >= LOOP).tolist()]


def _one_for_all(context: TraceContext, pieces: list[Index]) -> Candidate:
    works = np.concatenate(pieces)
    return Candidate(
        what=f"A loop over tensors launches {len(works) / context.num_steps:,.0f} small kernels a step",
        cause="host-bound loop over tensors: one launch and a few microseconds for every tensor",
        change="torch._foreach_mul_, _foreach_add_, _foreach_lerp_, _foreach_copy_, _foreach_norm over the whole list; "
        "one op over the stacked batch where the loop is over samples; torch.optim with fused=True for an update of "
        "weights, torch.optim.swa_utils for averages",
        where=place_of(context, works),
        fix=Fix(
            works=works, keep_best=0.05, keep_worst=0.5, host=op_time(context, works), host_best=0.02, host_worst=0.15,
            closed=np.concatenate([piece[1:] for piece in pieces]),
        ),
        evidence=kernel_evidence(context, works),
        spans=tuple(context.rows[works[:200]].tolist()),
    )  # fmt: skip


def _over_tensors(context: TraceContext, piece: Index, joined: bool) -> bool:
    """Whether a run of small kernels goes from tensor to tensor: weights have many shapes, and what is done sample by
    sample is joined at its end. Else it is as likely one state that moves on, whose steps no list of tensors replaces;
    and where ops are unknown, as in a replayed graph, nobody can tell."""
    trace, rows = context.trace, context.rows[piece]
    if joined or not (trace.op[rows] > 0).any():
        return joined
    shapes, ops = trace.optional("shapes"), shaped_ops(trace, rows)
    found = {first_shape(trace.words[int(shapes[op])]) for op in np.unique(ops[ops >= 0]).tolist()}
    return not found or (len(found) >= SHAPES and _goes_on(trace.op[rows], np.where(ops >= 0, shapes[ops], 0)))


def _goes_on(names: NDArray[np.int32], shapes: NDArray[np.int32]) -> bool:
    """Whether the same few ops come again and again, and over another tensor each time: a state that moves on has the
    same ones over the same tensors, and a stretch of code that is run once has others. A body is as long as most of it
    comes again after: of five ops two are alike after two already, and those are of one turn."""
    periods = range(1, min(LONGEST_BODY, len(names) // 2) + 1)
    period = max(periods, key=lambda period: float((names[period:] == names[:-period]).mean()), default=0)
    again = names[period:] == names[: len(names) - period]
    if not period or again.mean() < AGAIN_FRAC:
        return False
    return bool((shapes[period:] != shapes[:-period])[again].mean() >= ANOTHER_FRAC)


def _comes_again(names: NDArray[np.int32]) -> bool:
    """Whether the same few ops come again and again, whatever they are over."""
    longest = min(LONGEST_BODY, len(names) // 2)
    return any((names[period:] == names[:-period]).mean() >= AGAIN_FRAC for period in range(1, longest + 1))


def _joins_many(context: TraceContext, works: Index) -> bool:
    """Whether results of a loop over samples are put together: many at once, where sizes were recorded."""
    trace, shapes = context.trace, context.trace.optional("shapes")
    ops = shaped_ops(trace, context.rows[works])
    given = [parsed(trace.words[int(shapes[op])]) for op in np.unique(ops[ops >= 0]).tolist()]
    lists = [len(part) for found in given for part in found if isinstance(part, list) and part and is_shape(part[0])]
    # Tensors that one op puts together, from which on they came out of a loop: two are halves, three are parts.
    return max(lists) >= 8 if lists else len(works) > 0


def _compilable(context: TraceContext) -> Mask:
    """What compiling a module reaches: not its optimizer, not gradients added to others, weights are cast all the same,
    and for complex numbers no code is generated."""
    outside = context.launched_in(context.time_of(context.host_spans(r"^Optimizer\."))) | under(
        context, r"AccumulateGrad"
    )
    outside[_weight_casts(context)] = True
    return ~(outside | _complex(context))


def _complex(context: TraceContext) -> Mask:
    """Works over complex numbers, by their names or by what their ops were given."""
    named = context.named(r"complex<")
    if not named.any():
        return named
    given, ops = context.trace.optional("dtypes"), shaped_ops(context.trace, context.rows)
    return np.asarray(named | ((ops >= 0) & context.words_like("complex")[given[np.maximum(ops, 0)]]), dtype=bool)


def _num_alike(taken_s: Seconds) -> int:
    """How many of a chain walk tensors of the size that its longest kernel does."""
    return int((taken_s > ALIKE * taken_s.max()).sum())


def _num_kinds(context: TraceContext, piece: Index) -> int:
    """How many different kernels walk tensors of that size: the same one again and again goes over tensors that have
    nothing to do with each other (inputs that are cast, buffers that are filled), and each of them moves as much when
    one kernel does it for all."""
    taken_s = context.work_s[piece]
    return len(np.unique(context.trace.name[context.rows[piece[taken_s > ALIKE * taken_s.max()]]]))


def _is_one_chain(context: TraceContext, piece: Index) -> bool:
    """Whether a long run of kernels walks the same large tensors and is no loop over small ones."""
    typical_s = float(np.median(context.work_s[piece]))
    if typical_s > SMALL_S or typical_s < MOVES_S:
        return typical_s > SMALL_S
    trace, ops = context.trace, shaped_ops(context.trace, context.rows[piece])
    shapes, known = trace.optional("shapes"), ops[ops >= 0]
    found = {first_shape(trace.words[int(shapes[op])]) for op in np.unique(known).tolist()}
    return 2 * len(known) > len(piece) and len(found) < SHAPES


def _are_launches(context: TraceContext, works: Index) -> bool:
    """Whether what chains cost is that they are launched: kernels too short to move anything in a step that waits for
    its host, as far as somebody timed one. Fusing them is one way out, and a graph of the whole step the other."""
    busy_s = context.per_step_s(context.work_kind == int(Kind.KERNEL))
    return (
        # Of a step, less than which kernels take where its host decides.
        context.is_timed and busy_s < 0.3 * context.step_s and float(np.median(context.work_s[works])) < MOVES_S
    )


def _stays(context: TraceContext, works: Index) -> Mask:
    """Kernels that no longer chain makes shorter for sure: sums, which must be complete before what follows can be
    computed, and those that compute rather than move (a tenth of the memory's rate)."""
    stays = context.family("reduce")[works]
    if context.device is None:
        return stays
    trace, ops = context.trace, shaped_ops(context.trace, context.rows[works])
    shapes, dtypes = trace.optional("shapes"), trace.optional("dtypes")
    moved = {op: _least_bytes(trace.words[int(shapes[op])], trace.words[int(dtypes[op])]) for op in set(ops.tolist())}
    least = np.array([moved[op] if op >= 0 else np.inf for op in ops.tolist()])
    taken_s, least_s = context.work_s[works], least / context.device.dram.bandwidth_bytes_per_s
    # Of the memory's rate, and of kernels that are longer than it takes to begin one.
    return np.asarray(stays | ((taken_s > 50e-6) & (least_s < 0.1 * taken_s)), dtype=bool)


def _least_bytes(shapes: str, dtypes: str) -> float:
    """What an op moves at least: the largest tensor that it was given, once; without end where that is unknown."""
    sizes = [float(np.prod(shape)) for shape in parsed(shapes) if is_shape(shape) and shape]
    return max(sizes) * (2.0 if first_dtype(dtypes) in ("bf16", "fp16") else 4.0) if sizes else np.inf


def _links(context: TraceContext, run: Index, light: Mask) -> list[Index]:
    """Light kernels of a run in one piece, or, where that is as long as a loop or they are too short to move anything,
    cut where a scalar is set."""
    if int(light.sum()) < LOOP and float(np.median(context.work_s[run[light]])) >= MOVES_S:
        return [run[light]]
    return [piece[chosen] for piece, chosen in zip(*(np.split(of, np.flatnonzero(~light)) for of in (run, light)))]


@rule(
    "pointwise-chains",
    version=10,
    order=50,
    more_at_best=0.1,
    is_ambiguous=True,
    tell="the functions around these kernels compiled, and a step timed",
)
def pointwise_chains(context: TraceContext) -> Candidate | None:
    # Nodes of gradients that are differentiated again: code that torch.compile made does not let that happen.
    if len(context.host_spans(r"BackwardBackward\d*$")):
        return None
    order = np.lexsort((context.base.work_start_s, context.program.stream))
    light = context.family("pointwise", "reduce", "dropout", "copy", "random") & _compilable(context)
    # Of a kernel that fills a few values, and the gradient that does so before it chooses: no end of a chain.
    set_ = context.family("fill") & (context.work_s < 4e-6) & under(context, r"^WhereBackward\d*$") & ~light
    starts, ends = _runs((light | set_)[order], context.program.stream[order])
    runs = [order[starts[i] : ends[i]] for i in np.flatnonzero(ends - starts >= CHAIN).tolist()]
    pieces = [piece for run in runs for piece in _links(context, run, light[run]) if len(piece) >= CHAIN]
    sums = (context.trace.op[context.rows] == 0) & (context.family("reduce") | context.named(r"CUDAFunctor_add"))
    pieces = [piece for piece in pieces if len(piece) >= CHAIN_UNKNOWN or sums[piece].sum() < len(piece) - 1]
    pieces = [piece for piece in pieces if len(piece) < LOOP or _is_one_chain(context, piece)]
    drawn_s = np.where(context.family("random"), 0.0, context.work_s)  # draws have no input that another kernel writes
    # Different kernels of a chain, at least.
    pieces = [piece for piece in pieces if _num_alike(drawn_s[piece]) >= CHAIN and _num_kinds(context, piece) >= 3]
    if not pieces:
        return None
    works = np.concatenate(pieces)
    lengths = np.concatenate([np.full(len(piece), len(piece)) for piece in pieces])
    # Of a chain's time what its longest kernel takes, which at worst remains: one kernel for all has its traffic.
    longest = np.concatenate(
        [
            np.full(len(piece), float(context.work_s[piece].max() / max(1e-12, context.work_s[piece].sum())))
            for piece in pieces
        ]
    )
    if context.frac(context.per_step_s(works)) < 0.1 or _are_launches(context, works):
        return None
    return Candidate(
        what=f"{len(pieces) / context.num_steps:.3g} chains of {np.median(lengths):.0f} or so pointwise kernels a "
        f"step, {context.frac(context.per_step_s(works)):.0%} of its time",
        cause="unfused pointwise operations: each reads and writes the whole tensor",
        change="torch.compile the module (or just these functions); use the fused op (F.layer_norm, F.rms_norm, "
        "F.gelu) where one exists",
        where=place_of(context, works),
        fix=replace(
            _fused(
                context,
                works,
                np.maximum(0.06, 1.2 / lengths),
                np.where(_stays(context, works), 1.0, np.maximum(longest, np.maximum(0.35, 2.5 / lengths))),
            ),
            closed=np.concatenate([piece[1:] for piece in pieces]),  # one kernel has no gaps inside
        ),
        evidence=kernel_evidence(context, works),
        spans=tuple(context.rows[works[:200]].tolist()),
        sure_frac=SURE_FRAC,
    )
