"""Which share of each kernel is work that the step need not do: recompute, a forward pass for metrics alone, factors of
zero, tensors grown by copies, casts, layout copies, repeated passes."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ridgeline.findings.context.kernel_name import kernel_name
from ridgeline.trace.kernels import recomputed
from ridgeline.trace.kind import Kind
from ridgeline.trace.table import Index, Trace

SORTS = ("recompute", "again", "zero", "grown", "casts", "layout", "passes", "extra")
"""Sorts of avoidable work; ``extra`` is what a model given with ``--model`` does not need."""
_LAYOUT_OPS = ("aten::contiguous", "aten::clone", "aten::reshape", "aten::_reshape_copy", "aten::flatten")
_ROW_OPS = ("pointwise", "fill", "dropout", "copy")


class Avoidable(NamedTuple):
    """Beside each of the given rows: the sort (-1: none) and the share of the kernel that is avoidable."""

    sort: NDArray[np.int8]
    frac: NDArray[np.float64]


def unread_of(trace: Trace, rows: Index) -> dict[str, NDArray[np.bool_]]:
    """Kernels whose results somebody has already, multiplies by zero, or copies only to make a tensor longer."""
    zero, grown = _arguments(trace, rows)
    return {"again": _again(trace, rows), "zero": zero, "grown": grown}


def avoidable_of(trace: Trace, rows: Index, extra: NDArray[np.float64] | None = None) -> Avoidable:
    """Sorts and shares for device spans; each kernel has one sort, the first that applies."""
    sort, frac = np.full(len(rows), -1, np.int8), np.zeros(len(rows))
    kernels = trace.of_kind(Kind.KERNEL)[rows]

    def mark(name: str, chosen: NDArray[np.bool_], share: NDArray[np.float64] | float = 1.0) -> None:
        fresh = chosen & (sort < 0)
        sort[fresh] = SORTS.index(name)
        frac[fresh] = np.broadcast_to(share, len(rows))[fresh]

    if extra is not None:
        mark("extra", extra > 0, extra)
    mark("recompute", recomputed(trace)[rows])
    for name, chosen in unread_of(trace, rows).items():
        mark(name, chosen & kernels)
    cast, layout = _copies(trace, rows)
    mark("casts", cast & kernels)
    mark("layout", layout & kernels)
    share = _repeated_passes(trace, rows)
    mark("passes", share > 0, share)
    return Avoidable(sort, frac)


_MEASURES = re.compile(r"^aten::(argmax|topk|eq|ne|gt|lt|ge|le|max|sort|isclose|bincount)$")
_LOSSES = re.compile(r"loss|kl_div|cross_entropy|_softmax$|logsumexp|sigmoid")


def _again(trace: Trace, rows: Index) -> NDArray[np.bool_]:
    """Kernels of a forward pass that runs a second time for what is counted in its outputs: the same products in the
    same order as a pass whose gradients are made, autograd recording both, and after the second comparisons and no
    loss. (A teacher goes into a loss; a pass over held-out data runs under ``no_grad``.)"""
    found = np.zeros(len(rows), np.bool_)
    sequence, shapes, launch = trace.optional("sequence"), trace.optional("shapes"), trace.launch[rows]
    backward = trace.word_id("backward")
    ops = np.flatnonzero(trace.of_kind(Kind.OP) & (trace.device < 0))
    calls = trace.start_ns[launch[launch >= 0]]
    if not len(calls):
        return found
    ops = ops[(trace.end_ns[ops] >= calls.min()) & (trace.start_ns[ops] <= calls.max())]
    if not len(ops) or not (trace.phase[ops] == backward).any() or not (shapes[ops] > 0).any():
        return found
    ops = ops[np.argsort(trace.start_ns[ops], kind="stable")]
    names = {int(i): trace.words[int(i)] for i in np.unique(trace.name[ops])}
    forward = ops[trace.phase[ops] == trace.word_id("forward")]
    # Of forward ops with one number, the last and innermost has the gradient of that number
    last = dict(zip(sequence[forward].tolist(), forward.tolist(), strict=True))
    numbers = set(sequence[ops[(trace.phase[ops] == backward) & (sequence[ops] >= 0)]].tolist())
    products = forward[np.isin(trace.name[forward], [i for i, name in names.items() if name in _PRODUCTS])]
    learns = np.array(
        [
            number in numbers and last[number] == op
            for number, op in zip(sequence[products].tolist(), products.tolist(), strict=True)
        ],
        np.bool_,
    )
    key = trace.name[products].astype(np.int64) * (len(trace.words) + 1) + shapes[products]
    for step in np.unique(trace.step[products]).tolist():
        own = np.flatnonzero(trace.step[products] == step)
        with_gradient, bare = key[own[learns[own]]], own[~learns[own]]
        num = len(with_gradient)
        if num < 4 or len(bare) < num:
            continue
        for at in np.flatnonzero(key[bare] == with_gradient[0]).tolist():
            chosen = bare[at : at + num]
            if len(chosen) < num or chosen[-1] - chosen[0] != num - 1 or not (key[chosen] == with_gradient).all():
                continue
            if len(np.unique(sequence[products[chosen]])) < num:  # under no_grad: it may judge another batch
                continue
            begin, end = products[chosen[0]], products[chosen[-1]]
            after = ops[np.searchsorted(trace.start_ns[ops], trace.end_ns[end]) :][:40]
            after = after[~np.isin(trace.name[after], [i for i, name in names.items() if name in _PRODUCTS])]
            said = [names[int(i)] for i in trace.name[after].tolist()]
            measured = next((i for i, name in enumerate(said) if _MEASURES.search(name)), None)
            if measured is None or any(_LOSSES.search(name) for name in said[:measured]):
                continue
            first = trace.start_ns[begin]
            called = np.where(launch >= 0, trace.start_ns[np.maximum(launch, 0)], -1)
            found |= (called >= first) & (called <= trace.end_ns[end])
    return found


_PRODUCTS = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::convolution",
    "aten::_convolution",
    "aten::cudnn_convolution",
)


def _arguments(trace: Trace, rows: Index) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """(kernels of a product with a factor of zero, copies of a long tensor that only append a short one to it)."""
    words, op = trace.words, trace.op[rows]
    wanted = {i: words[i] for i in np.unique(op).tolist() if words[i] in ("aten::mul", "aten::mul_", "aten::cat")}
    zero, grown = np.zeros(len(rows), np.bool_), np.zeros(len(rows), np.bool_)
    for i in np.flatnonzero(np.isin(op, list(wanted))).tolist():
        at = int(trace.launch[rows[i]])
        while at >= 0 and int(trace.name[at]) not in wanted:
            at = int(trace.parent[at])
        if at < 0:
            continue
        if wanted[int(trace.name[at])] == "aten::cat":
            grown[i] = _appends(words[int(trace.optional("shapes")[at])])
        else:
            zero[i] = _has_zero(words[int(trace.optional("concrete")[at])])
    return zero, grown


@lru_cache(maxsize=10_000)
def _appends(shapes: str) -> bool:
    """Whether one of the joined tensors has nine tenths of what is written."""
    try:
        sizes = [float(np.prod(shape)) for shape in json.loads(shapes)[0]]
    except (ValueError, TypeError, IndexError):
        return False
    return len(sizes) > 1 and sizes[0] >= 2**16 and max(sizes) >= 0.9 * sum(sizes)


@lru_cache(maxsize=10_000)
def _has_zero(concrete: str) -> bool:
    try:
        return json.loads(concrete)[1] in ("0", "0.", "0.0", "-0.")
    except (ValueError, TypeError, IndexError):
        return False


def _copies(trace: Trace, rows: Index) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """(kernels that only change a type, kernels that only change a layout)."""
    words = trace.words
    copies = np.zeros(len(words), np.bool_)
    copies[[i for i in np.unique(trace.op[rows]).tolist() if words[i] in ("aten::copy_", "aten::_to_copy")]] = True
    is_layout = np.zeros(len(words), np.bool_)
    names = np.unique(trace.name[rows]).tolist()
    is_layout[[i for i in names if kernel_name(words[i]).family == "layout"]] = True
    cast, layout = np.zeros(len(rows), np.bool_), is_layout[trace.name[rows]]
    dtypes = trace.optional("dtypes")
    for i in np.flatnonzero(copies[trace.op[rows]]).tolist():
        at, seen = int(trace.launch[rows[i]]), 0
        while at >= 0 and seen < 6:
            name = words[int(trace.name[at])]
            if name == "aten::copy_" and dtypes[at] > 0:
                one, other = _first_two(words[int(dtypes[at])])
                cast[i] = bool(one and other and one != other)
                if cast[i]:
                    break
            elif name == "aten::_to_copy" and not dtypes[at] > 0:
                cast[i] = True
                break
            elif name in _LAYOUT_OPS:
                layout[i] = True
                break
            seen += trace.kind[at] == Kind.OP
            at = int(trace.parent[at])
    return cast, layout & ~cast


@lru_cache(maxsize=10_000)
def _first_two(dtypes: str) -> tuple[str, str]:
    """The types of a copy's target and source."""
    try:
        found = json.loads(dtypes)
    except ValueError:
        return "", ""
    return (str(found[0]), str(found[1])) if isinstance(found, list) and len(found) > 1 else ("", "")


def _repeated_passes(trace: Trace, rows: Index) -> NDArray[np.float64]:
    """Of a light kernel that writes what the next one reads: the share of its bytes that one fused kernel would not
    move. Two kernels of a stream that follow each other, of the same module and phase, on the same number of bytes
    written are taken for such a pair."""
    share = np.zeros(len(rows))
    written, read = trace.optional("written_bytes")[rows], trace.optional("read_bytes")[rows]
    if not (written > 0).any():
        return share
    names = np.unique(trace.name[rows])
    light = np.zeros(len(trace.words), np.bool_)
    light[[i for i in names.tolist() if kernel_name(trace.words[i]).family in _ROW_OPS]] = True
    chosen = light[trace.name[rows]] & (written > 0) & (read >= 0) & trace.of_kind(Kind.KERNEL)[rows]
    lane = (trace.rank[rows].astype(np.int64) * 64 + trace.device[rows]) * 4096 + trace.stream[rows]
    order = np.lexsort((trace.start_ns[rows], lane))
    a, b = order[:-1], order[1:]
    pair = chosen[a] & chosen[b] & (lane[a] == lane[b]) & (written[a] == written[b]) & (written[a] >= 2**16)
    for column in (trace.module, trace.phase, trace.step):
        pair &= column[rows][a] == column[rows][b]
    pair &= read[b] >= written[a]
    moved = np.maximum(written + np.maximum(read, 0), 1)
    np.add.at(share, a[pair], (written[a] / moved[a])[pair])
    np.add.at(share, b[pair], (written[a] / moved[b])[pair])
    return np.minimum(share, 0.9)
