"""Which share of each kernel is work that the step need not do: recompute, casts, layout copies, repeated passes."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ridgeline.findings.context.kernel_name import kernel_name
from ridgeline.trace.kernels import recomputed
from ridgeline.trace.kind import Kind
from ridgeline.trace.table import Index, Trace

SORTS = ("recompute", "casts", "layout", "passes", "extra")
"""Sorts of avoidable work; ``extra`` is what a model given with ``--model`` does not need."""
_LAYOUT_OPS = ("aten::contiguous", "aten::clone", "aten::reshape", "aten::_reshape_copy", "aten::flatten")
_ROW_OPS = ("pointwise", "fill", "dropout", "copy")


class Avoidable(NamedTuple):
    """Beside each of the given rows: the sort (-1: none) and the share of the kernel that is avoidable."""

    sort: NDArray[np.int8]
    frac: NDArray[np.float64]


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
    cast, layout = _copies(trace, rows)
    mark("casts", cast & kernels)
    mark("layout", layout & kernels)
    share = _repeated_passes(trace, rows)
    mark("passes", share > 0, share)
    return Avoidable(sort, frac)


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
