"""Matrix products and convolutions that do not run as the hardware could: precision, layout, alignment."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ridgeline.errors import RidgelineError
from ridgeline.findings.context.attention_upcast import cast_up
from ridgeline.findings.context.candidate import Candidate
from ridgeline.findings.context.context import SURE_FRAC, TraceContext
from ridgeline.findings.context.evidence import kernel_evidence, place_of
from ridgeline.findings.context.fact import positive
from ridgeline.findings.context.kernels import half_type, in_precision, stream_order
from ridgeline.findings.context.nesting import factored, under
from ridgeline.findings.context.shapes import Product, first_dtype, is_shape, parsed, product_of, shaped_ops
from ridgeline.findings.context.training import BACKWARD
from ridgeline.findings.replay.calibration import Trust
from ridgeline.findings.replay.fix import Fix
from ridgeline.findings.replay.pricing import alignment_ratio, product_ratio
from ridgeline.findings.replay.replay import Index, Mask, Seconds
from ridgeline.findings.rule import rule
from ridgeline.trace.kind import Kind

NHWC_NORM, NHWC_CONV = (0.4, 0.85), (0.85, 1.1)
"""Share of the time of norms and of convolutions that is left in channels_last (0.43 and 0.88 for a ResNet-50 on an
H200; of eleven networks convolutions kept 0.88 to 1.10 in ten, and 1.45 in one with transposed ones)."""
NHWC_DEPTHWISE, WALKS_DEPTHWISE = (0.2, 0.8), r"conv_depthwise2d_"
"""The same of convolutions of single channels, whose own kernels for NCHW are the slow ones (0.21 in a network for
phones on an H200), and what those are called."""
NHWC_SUMS = (1.0, 3.3)
"""The same of gradients of a convolution's bias, which are sums over pixels and then walk strides (1.01 and 3.27 ms in
a network without norms on an H200)."""
STRIDES, BESIDE = r"at::native::elementwise_kernel<", 3
"""The kernel that walks strides, and how many kernels away from a convolution one may be its own."""
NO_PRODUCT = r"splitkreduce|reduce_1block|c1_k1|depthwise|grouped_direct|gemv|dot_kernel|trsm_batch"
"""Sums after products, convolutions of single channels, products with a vector and triangular solves, which wait for
memory: Tensor Cores do nothing for them."""
SHORTEST_S, SHORT_S = 2.5e-6, 12e-6
"""No product takes less than the first, on Tensor Cores or not; below the second they may gain nothing (0.15 of 0.35 ms
in products of 4 to 11 µs on an H200)."""


def _has_tensor_cores(context: TraceContext) -> bool:
    """By the device if it is known, else by what its kernels are called."""
    if context.device is not None:
        return any(unit == "tensor" for unit, _ in context.device.peaks) and context.device.arch not in (
            "pascal",
            "maxwell",
            "kepler",
        )
    return bool(context.named(r"volta|turing|ampere|hopper|sm7[05]|sm8[069]|sm90|sm100|cutlass_[789]0").any())


def _speedup(context: TraceContext, dtype: str, otherwise: float) -> float:
    """Tensor-Core peak over vector fp32 peak."""
    if context.device is None:
        return otherwise
    try:
        return context.device.peak_flops_per_s("tensor", dtype) / context.device.peak_flops_per_s("vector", "fp32")
    except RidgelineError:
        return otherwise


def _products(context: TraceContext, works: Index) -> list[Product | None]:
    """The matrix product behind each piece of work, where shapes were recorded."""
    trace, ops = context.trace, shaped_ops(context.trace, context.rows[works])
    shapes = trace.optional("shapes")
    return [
        product_of(trace.words[int(trace.name[op])], trace.words[int(shapes[op])]) if op >= 0 else None
        for op in ops.tolist()
    ]


def _ratios(
    products: list[Product | None], price: Callable[[Product | None], float | None], otherwise: float
) -> Seconds:
    found = [price(product) for product in products]
    return np.array([otherwise if ratio is None else ratio for ratio in found])


@rule("tensor-cores-unused", version=10, order=40)
def tensor_cores_unused(context: TraceContext) -> Candidate | None:
    """fp32 products on hardware that has Tensor Cores."""
    return _in_single(context) or _in_double(context)


def _in_double(context: TraceContext) -> Candidate | None:
    """Products of doubles in layers, which most networks have because numpy makes them. What solves equations or
    searches along lines wants them, and a program without layers is likely to."""
    if factored(context).any() or len(context.host_spans(r"^Optimizer\.step#LBFGS")) or not _layers_of_doubles(context):
        return None
    mask = context.family("gemm", "conv") & ~context.named(NO_PRODUCT) & ~factored(context)
    works = np.flatnonzero(mask)
    works = works[np.array([dtype == "fp64" for dtype in _dtypes(context, works)], dtype=bool)] if len(works) else works
    share = context.per_step_s(works) / max(1e-12, context.per_step_s(context.work_kind == 1))
    if not len(works) or not _has_tensor_cores(context):
        return None
    others = np.flatnonzero(_reads_doubles(context) & ~mask)
    products, long = _products(context, works), context.work_s[works] > SHORT_S
    best = np.where(long, _ratios(products, lambda p: product_ratio(context.device, p, "fp64", "bf16"), 0.1), 1.0)
    worst = np.ones(len(works))  # as floats without TF32 they may take as long
    return Candidate(
        what=f"Products in double precision: {share:.0%} of kernel time",
        cause="fp64 matrix products: twice the bytes everywhere, and a small part of the Tensor Cores' rate",
        change="x.float() where the data comes in (numpy makes doubles), and "
        'torch.set_float32_matmul_precision("high") (TF32) or '
        f"torch.autocast('cuda', dtype=torch.{half_type(context)})",
        where=place_of(context, works),
        fix=Fix(
            works=np.concatenate((works, others)),
            keep_best=np.concatenate((best, np.full(len(others), 0.5))),
            keep_worst=np.concatenate((worst, np.full(len(others), 0.75))),
        ),
        evidence=kernel_evidence(context, works),
        spans=tuple(context.rows[works[:200]].tolist()),
        unchecked=("whether the program needs double precision",),
    )


def _layers_of_doubles(context: TraceContext) -> bool:
    trace, dtypes = context.trace, context.trace.optional("dtypes")
    layers = context.host_spans(r"^aten::(linear|conv\dd|convolution)$", Kind.OP)
    return any(first_dtype(trace.words[word]) == "fp64" for word in np.unique(dtypes[layers]).tolist())


def _reads_doubles(context: TraceContext) -> Mask:
    """Light works whose op was given doubles."""
    words, dtypes = context.trace.words, context.trace.optional("dtypes")
    ops = shaped_ops(context.trace, context.rows)
    known = {op: first_dtype(words[int(dtypes[op])]) == "fp64" for op in set(ops.tolist()) if op >= 0}
    light = context.family("pointwise", "norm", "copy", "reduce", "softmax", "dropout")
    return np.asarray(light & np.array([known.get(op, False) for op in ops.tolist()], dtype=bool), dtype=bool)


def _in_single(context: TraceContext) -> Candidate | None:
    mask = (
        context.family("gemm", "conv")
        & in_precision(context, "fp32")
        & ~context.named(NO_PRODUCT)
        & ~_beyond_settings(context)
    )
    # The smallest tiles there are: for so long they go over many matrices that fit into one of them.
    mask &= ~(context.named(r"tilesize32x32x8_") & (context.work_s > 50e-6))
    mask[mask] = [dtype not in ("bf16", "fp16") for dtype in _dtypes(context, np.flatnonzero(mask))]
    share = context.per_step_s(mask) / max(1e-12, context.per_step_s(context.work_kind == 1))
    works = np.flatnonzero(_whole_convolutions(context, mask))
    if not len(works) or not _has_tensor_cores(context):
        return None
    has_tf32 = context.device is None or ("tensor", "tf32") in context.device.peaks
    products = _products(context, works)
    # Of a product's smallest side: less does not fill an instruction of the Tensor Cores (16 by 8 by 8 and larger).
    flat = np.array([p is not None and min(p.m, p.n, p.k) < 8 for p in products], bool)  # they wait for memory
    tf32 = max(0.12, 1.5 / _speedup(context, "tf32", 7.0)) if has_tf32 else 0.5
    half = max(0.1, 2.0 / _speedup(context, "fp16", 14.0))
    worst = _ratios(
        products, lambda p: product_ratio(context.device, p, "fp32", "tf32") if has_tf32 else None, min(0.75, 2 * tf32)
    )
    best = np.minimum(worst, _ratios(products, lambda p: product_ratio(context.device, p, "fp32", "bf16"), half))
    least = np.minimum(1.0, SHORTEST_S / np.maximum(context.work_s[works], 1e-12))
    best, worst = np.maximum(best, least), np.where(context.work_s[works] < SHORT_S, 1.0, np.maximum(worst, least))
    best[flat] = worst[flat] = 1.0
    best[~mask[works] | context.named(r"fft", "name")[works]] = 0.0  # another algorithm has no such parts
    high = 'torch.set_float32_matmul_precision("high") (TF32), or ' if has_tf32 else ""
    return Candidate(
        what=f"Tensor Cores unused: {share:.0%} of kernel time is fp32 products without them",
        cause="TF32/BF16 off: fp32 matrix products and convolutions run on the vector units",
        change=f"{high}torch.autocast('cuda', dtype=torch.{half_type(context)})",
        where=place_of(context, works),
        fix=Fix(works=works, keep_best=best, keep_worst=worst),
        evidence=kernel_evidence(context, works),
        spans=tuple(context.rows[works[:200]].tolist()),
        unchecked=("whether the model tolerates the lower precision",)
        + (() if any(products) else ("shapes were not recorded: the gain is from peak rates",)),
        # A share of kernel time that deserves a word even when something else holds the step.
        least_frac=0.01 if share > 0.5 else 0.02,
    )


def _beyond_settings(context: TraceContext) -> Mask:
    """Products that nothing a user can set sends to the Tensor Cores: those inside of factorizations, and those that
    stay in fp32 (complex, or of sizes that have no such kernel) where others are in TF32 already: it is set for
    all, for products and for convolutions each. Attention in its reference form is asked for something else."""
    beyond, tf32 = np.asarray(factored(context) | cast_up(context), dtype=bool), in_precision(context, "tf32")
    products = context.family("gemm") & (
        context.named(r"^aten::(mm|addmm|bmm|baddbmm|_addmm_activation)$", "op") | (context.trace.op[context.rows] == 0)
    )
    for alike in (products, context.family("conv")):
        if (alike & tf32).any():
            beyond = np.asarray(beyond | alike, dtype=bool)
    return beyond


def _whole_convolutions(context: TraceContext, mask: Mask) -> Mask:
    """With its fp32 product goes all that a convolution does around it: transforms of its operands, FFTs, sums."""
    convolution = context.named(r"conv", "op")
    launch = context.trace.launch[context.rows]
    op = np.where(launch >= 0, context.trace.parent[np.maximum(launch, 0)], -1)
    return np.asarray(mask | (convolution & (op >= 0) & np.isin(op, op[mask & convolution])), dtype=bool)


@rule("misaligned-sizes", version=7, order=42)
def misaligned_sizes(context: TraceContext) -> Candidate | None:
    """Products on Tensor Cores whose sizes are not multiples of 8, by name (align1, align2) or by shape; kernels that
    load whole tiles (nvjet) only take rows that are aligned, a number of rows is no stride, and of convolutions nobody
    knows what padding brings."""
    works = np.flatnonzero(context.family("gemm", "conv") & in_precision(context, "half", "tf32", "fp8", ""))
    # Ops that multiply what they have laid out themselves, with columns of their own.
    works = works[
        (context.work_s[works] > 2e-6) & ~under(context, r"^aten::(cdist|_cdist_forward|_euclidean_dist)$")[works]
    ]
    if not len(works):
        return None
    products, dtypes = _products(context, works), _dtypes(context, works)
    rows = _row_counts(context, works, products)
    odd = np.array([p is not None and any(size % 8 and size > 8 for size in _strides(p, rows)) for p in products])
    named = context.named(r"align[12]\b|align[12]_|align[12]>")[works] & context.family("gemm")[works]
    odd &= ~context.named(r"^nvjet_")[works]
    slow = np.array(
        [_is_slow(context, p, dtypes[i], float(context.work_s[works[i]])) for i, p in enumerate(products)], dtype=bool
    )
    chosen = np.flatnonzero(named | (odd & slow))
    if not len(chosen):
        return None
    picked = [products[i] for i in chosen.tolist()]
    best = np.array(
        [
            alignment_ratio(context.device, product, dtypes[i] or "bf16", float(context.work_s[works[i]])) or 0.3
            for product, i in zip(picked, chosen.tolist(), strict=True)
        ]
    )
    shaped = shaped_ops(context.trace, context.rows[works[chosen]]) >= 0
    # Of a product that begins and ends: 36 of 3.8 µs each kept 0.88 of their time once they were padded.
    brief = ~shaped & (context.work_s[works[chosen]] < 8e-6)  # mostly its beginning and its end
    # Share that is left at worst of a product called after its alignment whose sizes were not recorded: some sizes cost
    # nothing when they are odd (rows of a transposed operand).
    worst = np.where(shaped, np.minimum(1.0, np.sqrt(best)), np.where(brief, 1.0, 0.8))
    sizes = sorted({size for p in picked if p for size in _strides(p, rows) if size % 8})
    works = works[chosen]
    return Candidate(
        what=f"Products with sizes that are not multiples of 8 "
        f"({', '.join(map(str, sizes[:4])) or 'by their kernels'})",
        cause="rows that are not 16-byte aligned force slow loads and older kernels on the Tensor Cores",
        change="pad the size to a multiple of 64 (vocabulary 50257 → 50304, hidden 2731 → 2752), or the sequence "
        "to a multiple of 8",
        where=place_of(context, works),
        fix=Fix(works=works, keep_best=best, keep_worst=worst),
        evidence=kernel_evidence(context, works),
        spans=tuple(context.rows[works[:200]].tolist()),
        sure_frac=SURE_FRAC,
    )


def _row_counts(context: TraceContext, works: Index, products: list[Product | None]) -> frozenset[int]:
    """How many rows (tokens, samples) forward products have: in the gradient of a weight they are summed over, and
    where rows lie one behind the other their number is nobody's stride."""
    forward = ~under(context, BACKWARD)[works]
    found = zip(products, forward.tolist(), strict=True)
    return frozenset(product.m for product, is_forward in found if product is not None and is_forward)


def _strides(product: Product, rows: frozenset[int]) -> tuple[int, ...]:
    """Sizes of a product that are strides of what it reads and writes; of batches of products any may be."""
    if product.b > 1:
        return product[1:]
    return (product.n,) if product.k in rows else (product.n, product.k)


def _is_slow(context: TraceContext, product: Product | None, dtype: str, measured_s: float) -> bool:
    """Whether padded sizes would take at most two thirds of the time: not every odd size hurts."""
    ratio = alignment_ratio(context.device, product, dtype or "bf16", measured_s)
    return ratio is not None and ratio < 0.67


def _dtypes(context: TraceContext, works: Index) -> list[str]:
    trace, ops = context.trace, shaped_ops(context.trace, context.rows[works])
    words = trace.optional("dtypes")
    return [first_dtype(trace.words[int(words[op])]) if op >= 0 else "" for op in ops.tolist()]


@rule("channels-first", version=9, order=42)
def channels_first(context: TraceContext) -> Candidate | None:
    """Convolutions in NCHW: transforms around them, and norms and pools that walk planes."""
    convs, walks = context.family("conv"), _walks_planes(context)
    transforms = context.family("layout") | walks
    if not convs.any() or not transforms.any() or _is_channels_last(context):
        return None
    # At least one Fourier transform for every two convolutions: transforms over space walk planes, so between them and
    # convolutions in channels_last somebody transposes all the same.
    if (
        2 * int(context.named(r"^aten::_fft_(r2c|c2r|c2c)$", "op").sum()) >= int(context.family("conv").sum())
    ) or _between_planes(context):
        return None
    if context.per_step_s(transforms) < 0.02 * context.per_step_s(context.work_kind == 1):
        return None
    transforms &= ~_around_one_channel(context, transforms)
    if context.per_step_s(transforms) < 0.02 * context.per_step_s(context.work_kind == 1):
        return None
    moved = np.flatnonzero(transforms)
    # Norms and pools of images, and convolutions done as products.
    others = np.flatnonzero(
        (
            convs
            | (
                context.family("pool")
                | (context.family("norm") & context.named(r"batch_?norm|bn_|Batch", "name"))
                | (context.family("gemm") & under(context, r"conv"))
            )
            | _bias_sums(context)
        )
        & ~walks
    )
    in_graph = bool((context.trace.op[context.rows[moved]] == 0).all())  # a replayed graph has neither ops nor shapes
    shaped = in_graph or bool((context.trace.optional("shapes") > 0).any())
    if not shaped and _only_begins_with_convs(context):  # whether they can change their layout is then unknown
        return None
    flat = context.per_step_s(moved[_along_one_axis(context, moved)]) > 0.5 * context.per_step_s(moved)
    change = "model.to(memory_format=torch.channels_last) and images.to(memory_format=torch.channels_last)"
    if flat:
        change = "convolutions along one axis as Conv2d over pictures of height one, in channels_last"
    thin = bool(_of_width_one(context, moved).all())
    if thin:
        change = "nn.Linear over rows of channels instead of convolutions of width one between transposed copies"
    deep = context.per_step_s(moved[_over_volumes(context, moved)]) > 0.5 * context.per_step_s(moved)
    if deep:
        change = "model.to(memory_format=torch.channels_last_3d) and clips.to(memory_format=torch.channels_last_3d)"
    beside = f", and {walks.sum() / context.num_steps:.3g} convolutions of single channels plane by plane"
    return Candidate(
        what=f"{(~walks[moved]).sum() / context.num_steps:.3g} layout transforms a step around the convolutions"
        + (beside if walks.any() else ""),
        cause="NCHW convolutions: Tensor-Core kernels want NHWC, so every convolution transposes its operands",
        change=change,
        where=place_of(context, moved),
        fix=_as_products(context, moved, others)
        if thin
        else _in_channels_last(context, moved, others, sure=shaped and not flat and not deep),
        evidence=kernel_evidence(context, moved),
        spans=tuple(context.rows[moved[:200]].tolist()),
    )


def _walks_planes(context: TraceContext) -> Mask:
    """Convolutions of single channels by the kernels for NCHW."""
    return context.named(WALKS_DEPTHWISE)


def _turned_beside(context: TraceContext, moved: Index) -> Index:
    """Copies right beside convolutions of single channels along one axis: rows of channels are turned into rows of time
    and back (4.5 of 42 ms in a network for speech on an H200, 1.2 as flat pictures in channels_last)."""
    flat = moved[_walks_planes(context)[moved] & _along_one_axis(context, moved)]
    order, place = stream_order(context)
    near = (place[flat][:, None] + np.arange(-BESIDE, BESIDE + 1)).ravel()
    near = np.unique(order[near[(near >= 0) & (near < len(order))]])
    return np.asarray(near[(context.family("copy") & context.named(STRIDES))[near]], dtype=np.int64)


def _around_one_channel(context: TraceContext, transforms: Mask) -> Mask:
    """Transforms around convolutions over a single channel, and around those that read what such a one gives: a tensor
    of one channel has no layout to tell, so its convolution works in NCHW, and what it gives is transposed by somebody
    (two convolutions over spectrograms on an H200 gained 0.08 of 26 ms)."""
    trace, works = context.trace, np.flatnonzero(transforms)
    ops, shapes = shaped_ops(trace, context.rows[works]), trace.optional("shapes")
    pairs = {op: _conv_channels(trace.words[int(shapes[op])]) for op in np.unique(ops[ops >= 0]).tolist()}
    given = {outer for inner, outer in pairs.values() if inner == 1}
    found = np.zeros(len(transforms), dtype=bool)
    found[works] = [bool(given) and (pairs.get(op, (0, 0))[0] in given | {1}) for op in ops.tolist()]
    return found


def _conv_channels(shapes: str) -> tuple[int, int]:
    """Channels that a recorded convolution reads and gives: an input is followed by a weight, in a backward pass after
    the gradient of what it gives; (0, 0) if that is not known, or each channel is by itself."""
    given = [shape for shape in parsed(shapes) if is_shape(shape) and len(shape) == 4]
    weight = given[-1] if len(given) >= 2 else [0, 0, 0, 0]
    read = given[-2] if len(given) >= 2 else weight
    return (read[1], weight[0]) if read[1] == weight[1] else (0, 0)


def _in_channels_last(context: TraceContext, moved: Index, others: Index, *, sure: bool) -> Fix:
    """No transforms, and faster norms and convolutions.

    Convolutions along one axis have no such layout of their own: somebody else may have to transform, and of those
    whose shapes were not recorded nobody knows. Group norms bring every input back to NCHW on a GPU: at best half of
    the transforms go, at worst none.
    """
    works = np.concatenate((moved, others))
    if _between_group_norms(context):
        return Fix(works=works, keep_best=np.where(np.isin(works, moved), 0.5, 1.0), keep_worst=np.ones(len(works)))
    norms, walks = context.family("norm")[others], _walks_planes(context)
    strided = np.setdiff1d(np.union1d(_strided_after_patches(context), _turned_beside(context, moved)), works)
    sums = _bias_sums(context)[others]
    kinds = zip(NHWC_NORM, NHWC_SUMS, NHWC_CONV, strict=True)
    left = [np.where(norms, norm, np.where(sums, total, conv)) for norm, total, conv in kinds]
    best, worst = (np.concatenate((NHWC_DEPTHWISE[i] * walks[moved], left[i])) for i in (0, 1))
    worst = worst if sure else np.ones(len(works))
    return Fix(
        works=np.concatenate((works, strided)),
        # Share of the time of copies and sums on strided tokens that is left once tokens are contiguous (1.1 of 5.5 ms
        # in a vision transformer on an H200).
        keep_best=np.concatenate((best, np.full(len(strided), 0.25))),
        keep_worst=np.concatenate((worst, np.ones(len(strided)))),
    )


def _as_products(context: TraceContext, moved: Index, others: Index) -> Fix:
    """Neither transforms nor, right beside the convolutions, copies and sums that walk strides."""
    order, place = stream_order(context)
    # Ops around a convolution's kernels, and of one of width one what a product takes at best.
    convs = np.flatnonzero(under(context, r"^aten::(convolution|convolution_backward)$"))
    near = (place[convs][:, None] + np.arange(-BESIDE, BESIDE + 1)).ravel()
    near = np.unique(order[near[(near >= 0) & (near < len(order))]])
    strided = near[(context.family("copy", "pointwise") & context.named(STRIDES))[near]]
    strided = np.setdiff1d(strided, np.concatenate((moved, others)))
    return Fix(
        works=np.concatenate((moved, others, strided)),
        keep_best=np.concatenate((np.zeros(len(moved)), np.full(len(others), 0.6), np.zeros(len(strided)))),
        keep_worst=np.concatenate((np.full(len(moved), 0.25), np.ones(len(others)), np.full(len(strided), 0.75))),
    )


def _of_width_one(context: TraceContext, works: Index) -> Mask:
    """Whether each is of a convolution along one axis whose weight has one value for each pair of channels."""
    trace, ops = context.trace, shaped_ops(context.trace, context.rows[works])
    shapes = trace.optional("shapes")
    known = {op: _is_thin(trace.words[int(shapes[op])]) for op in np.unique(ops[ops >= 0]).tolist()}
    return np.array([known.get(op, False) for op in ops.tolist()], dtype=bool)


def _is_thin(shapes: str) -> bool:
    given = [shape for shape in parsed(shapes) if is_shape(shape) and len(shape) in (3, 4)]
    along = len(given) >= 2 and (len(given[-2]) == 3 or given[-2][2] == 1)
    return along and min(given[-1][:2]) > 1 and set(given[-1][2:]) == {1}


def _bias_sums(context: TraceContext) -> Mask:
    return context.family("reduce") & under(context, r"^ConvolutionBackward\d*$")


def _strided_after_patches(context: TraceContext) -> Index:
    """Copies and sums that walk strides, in a network that only begins with a convolution: its pictures in NCHW become
    rows of tokens through a transposed view, and what follows keeps that view's strides."""
    if not _only_begins_with_convs(context):
        return np.zeros(0, dtype=np.int64)
    walks = context.named(STRIDES)
    return np.flatnonzero(walks & context.family("copy", "pointwise"))


def _only_begins_with_convs(context: TraceContext) -> bool:
    return context.per_step_s(context.family("conv")) <= 0.2 * context.per_step_s(context.family("gemm"))


def _along_one_axis(context: TraceContext, works: Index) -> Mask:
    """Whether each is of a convolution, or of its gradient, whose weight has one dim of space: recorded as three dims,
    or as four with a height of one."""
    trace, ops = context.trace, shaped_ops(context.trace, context.rows[works])
    shapes = trace.optional("shapes")
    flat = {
        op: "conv" in trace.words[int(trace.name[op])] and _is_flat(trace.words[int(shapes[op])])
        for op in np.unique(ops[ops >= 0]).tolist()
    }
    return np.array([flat.get(op, False) for op in ops.tolist()], dtype=bool)


def _over_volumes(context: TraceContext, works: Index) -> Mask:
    """Whether each is of a convolution over three dims of space or time."""
    trace, ops = context.trace, shaped_ops(context.trace, context.rows[works])
    shapes = trace.optional("shapes")
    given = {op: filter(is_shape, parsed(trace.words[int(shapes[op])])) for op in np.unique(ops[ops >= 0]).tolist()}
    known = {op: max(map(len, found), default=0) == 5 for op, found in given.items()}
    return np.array([known.get(op, False) for op in ops.tolist()], dtype=bool)


def _is_channels_last(context: TraceContext) -> bool:
    """Whether norms and pools walk channels, which they do only where somebody chose that layout: transforms that are
    left are of a few convolutions whose kernels want another one."""
    around = context.family("norm", "pool") & context.named(r"batch_?norm|bn_|pool")
    walks = around & context.named(r"channels_last|nhwc")
    return bool(around.any()) and context.per_step_s(walks) > 0.5 * context.per_step_s(around)


def _is_flat(shapes: str) -> bool:
    given = [shape for shape in parsed(shapes) if is_shape(shape) and len(shape) >= 3]
    weight = given[-1] if given else []
    return len(weight) == 3 or (len(weight) == 4 and weight[2] == 1 and weight[3] > 1)


def _between_group_norms(context: TraceContext) -> bool:
    """At least one group norm for every two convolutions of a forward pass, by the kernel that only they have."""
    norms = int(context.named(r"ComputeFusedParamsCUDAKernel|group_?norm").sum())
    return norms > 0 and 2 * norms >= _num_forward(context)


def _between_planes(context: TraceContext) -> bool:
    """At least one op for every two convolutions of a forward pass that walks planes whatever layout it is given:
    somebody transposes before and after it all the same."""
    # Ops over pictures that bring their input back to NCHW, or whose output is there.
    walks = len(
        context.host_spans(
            r"^aten::(instance_norm|reflection_pad2d|replication_pad2d|pixel_shuffle|pixel_unshuffle|grid_sampler)$",
            Kind.OP,
        )
    )
    return walks > 0 and 2 * walks >= _num_forward(context)


def _num_forward(context: TraceContext) -> int:
    return int((context.family("conv") & context.named(r"fprop|cutlass|convolve|conv.*fwd")).sum())


@rule(
    "padding",
    version=3,
    order=43,
    trust=Trust(
        0.6, 1.2, "fitted: one recording on an H200, whose fix left half of the padding, gained 0.7 of the worst"
    ),
)
def padding(context: TraceContext) -> Candidate | None:
    """Tokens that are padding: from sequences joined by pad_sequence, or from what the recorder noted of masks."""
    real = _real_frac(context)
    # Of tokens: texts of different lengths, padded to the longest of their batch, are three quarters real. Cutting such
    # a batch into pieces doubled its step (37 against 17 ms on an H200): the host could not launch them fast enough.
    if real is None or real > 0.7:
        return None
    works = np.flatnonzero(context.work_kind == 1)
    works = works[~context.family("optimizer", "foreach", "communication")[works]]
    return Candidate(
        what=f"{1 - real:.0%} of the tokens are padding",
        cause="padding: every sequence is padded to the longest of the batch and computed in full",
        change="sort the data by length, so that a whole batch is of similar ones and padded to its own longest "
        "(pieces of one batch leave the device idle), or pack sequences (FlashAttention varlen, nested tensors)",
        where=place_of(context, works),
        fix=Fix(works=works, keep_best=real, keep_worst=min(1.0, real + 0.75 * (1 - real))),
        evidence=({"real_tokens_frac": round(real, 4)},),
        unchecked=("how much of the time is not proportional to tokens",),
    )


def _real_frac(context: TraceContext) -> float | None:
    noted = context.facts.get("padding")
    given = [_noted_frac(fact) for fact in noted if isinstance(fact, dict)] if isinstance(noted, list) else []
    fractions = [frac for frac in given if frac is not None]
    if fractions:
        return min(1.0, *fractions)
    shapes = context.trace.optional("shapes")
    found = [
        _pad_frac(context.trace.words[int(shapes[span])]) for span in context.host_spans("pad_sequence").tolist()[:100]
    ]
    known = [frac for frac in found if frac is not None]
    return float(np.mean(known)) if known else None


def _noted_frac(fact: dict[str, object]) -> float | None:
    """What a mask says is real: those that PyTorch's layers call key_padding_mask say what is not."""
    share = positive(fact.get("real_frac"))
    if share is None or not str(fact.get("argument", "")).endswith("key_padding_mask"):
        return share
    return 1.0 - share if share < 1.0 else None


def _pad_frac(shapes: str) -> float | None:
    """Share of the padded tensor that sequences fill."""
    lists = [entry for entry in parsed(shapes) if isinstance(entry, list) and entry and is_shape(entry[0])]
    lengths = [shape[0] for shape in lists[0] if shape] if lists else []
    return sum(lengths) / (len(lengths) * max(lengths)) if lengths and max(lengths) else None
