"""Kernels of a recorded run matched with the nodes of the captured graph: floor, expected and measured side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.cost.prediction import Prediction
from ridgeline.graph import Block
from ridgeline.profiler.align import align
from ridgeline.profiler.ops import base_name
from ridgeline.trace import Kind, Trace

Index = NDArray[np.intp]
#: Names under which eager PyTorch on CUDA, and the capture, dispatch one and the same thing.
_SAME = {
    name: meaning
    for meaning, names in {
        "attention": "_cudnn_attention_forward _flash_attention_forward _efficient_attention_forward attention "
        "scaled_dot_product_attention "
        "_scaled_dot_product_flash_attention _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_efficient_attention",
        "attention_backward": "_cudnn_attention_backward _flash_attention_backward _efficient_attention_backward "
        "attention_backward _scaled_dot_product_attention_backward "
        "_scaled_dot_product_flash_attention_backward _scaled_dot_product_cudnn_attention_backward "
        "_scaled_dot_product_efficient_attention_backward",
        "cat": "cat stack",
        "copy": "copy _to_copy clone contiguous _copy_from",
        "fill": "fill zero zeros zeros_like ones ones_like full full_like new_zeros new_ones new_full",
        "convolution": "convolution cudnn_convolution _convolution",
        "batch_norm": "native_batch_norm cudnn_batch_norm _native_batch_norm_legit _batch_norm_with_update",
        "batch_norm_backward": "native_batch_norm_backward cudnn_batch_norm_backward batch_norm_backward",
        "relu": "relu clamp_min threshold",
        "rms_norm": "_fused_rms_norm rms_norm",
        "rms_norm_backward": "_fused_rms_norm_backward rms_norm_backward",
        "add": "add sub",
        "index": "index index_select embedding gather",
        "norm": "linalg_vector_norm norm",
    }.items()
    for name in names.split()
}


@dataclass(frozen=True, slots=True)
class NodeRun:
    """One run of a node: what it is called in the trace, and what it should take."""

    label: str
    module: str
    key: str
    phase: str
    floor_s: float
    expected_s: float


@dataclass(frozen=True, slots=True)
class Matched:
    """How much of a run and of its graph found each other."""

    num_ops: int
    num_matched: int
    num_nodes: int
    busy_s: float
    matched_s: float

    @property
    def frac(self) -> float:
        """Share of the device's time that belongs to a node."""
        return self.matched_s / self.busy_s if self.busy_s > 0 else 0.0


def node_runs(prediction: Prediction) -> list[NodeRun]:
    """Every node that launches kernels, in dispatch order, repeats unrolled."""
    reverse = {
        id(node): item.reverse for item in prediction.graph.items if isinstance(item, Block) for node in item.nodes
    }
    found: list[NodeRun] = []
    seen: dict[str, int] = {}
    for number, group in groupby(prediction.lines, key=lambda line: line.block):
        lines = list(group)
        for turn in range(lines[0].times if number else 1):
            for line in lines:
                if line.num_kernels:
                    at = lines[0].times - 1 - turn if reverse.get(id(line.node)) else turn
                    found.append(_node_run(line, at, seen))
    return found


def _node_run(line: Any, turn: int, seen: dict[str, int]) -> NodeRun:
    node = line.node
    module = node.module.replace("*", str(turn), 1)
    name = node.target or node.op
    label = f"{module or 'top'}/{name}"
    seen[label] = seen.get(label, 0) + 1
    label = label if seen[label] == 1 else f"{label}~{seen[label]}"
    # `aten.mm.default` as `mm`; in-place forms as the plain ones
    parts = name.split(".")
    return NodeRun(
        label,
        module,
        canonical(base_name(parts[1] if len(parts) > 1 else parts[0])),
        str(node.phase),
        line.floor_s,
        line.busy_s * line.stretch,
    )


def canonical(name: str) -> str:
    """One word for every spelling of an op."""
    return _SAME.get(name, name)


def with_nodes(trace: Trace, prediction: Prediction) -> tuple[Trace, Matched]:
    """The trace with the node of each kernel, its floor and its expected time, and modules where none were recorded.

    Ops are matched with nodes step by step, in the order in which they were dispatched; the longest common
    sequence of names decides, so that an op the capture did not see, or a node that ran differently, costs itself only.
    """
    runs = node_runs(prediction)
    works = np.flatnonzero(trace.gpu & trace.of_kind(Kind.KERNEL, Kind.MEMSET) & (trace.launch >= 0))
    caller = launching_ops(trace, works, {run.key for run in runs})
    columns = _Columns(trace)
    num_ops = num_matched = 0
    for ops in _steps(trace, np.unique(caller[caller >= 0])):
        partner = align([canonical(base_name(trace.words[i])) for i in trace.name[ops]], [run.key for run in runs])
        num_ops, num_matched = num_ops + len(ops), num_matched + int((partner >= 0).sum())
        order = np.argsort(caller, kind="stable")
        first = np.searchsorted(caller[order], ops, side="left")
        last = np.searchsorted(caller[order], ops, side="right")
        members = {int(op): works[order[a:b]] for op, a, b in zip(ops, first, last, strict=True)}
        for op, place in zip(ops.tolist(), partner.tolist(), strict=True):
            if place >= 0:
                columns.set(members[op], runs[place])
    busy_s = float(trace.duration_s[trace.gpu].sum())
    matched_s = float(trace.duration_s[columns.matched].sum())
    return columns.trace(), Matched(num_ops, num_matched, len(runs), busy_s, matched_s)


def launching_ops(trace: Trace, works: Index, keys: set[str]) -> Index:
    """The op each kernel belongs to: the outermost around its launch that has a node's name, else the innermost.

    What one node stands for may run as several ops (a loss's gradient is filled with zeros first).
    """
    is_op = trace.of_kind(Kind.OP)
    named = np.fromiter(
        (canonical(base_name(word)) in keys if word.startswith("aten::") else False for word in trace.words),
        dtype=np.bool_,
        count=len(trace.words),
    )
    is_node = is_op & named[trace.name]
    at = trace.launch[works].astype(np.int64)
    innermost, outermost = np.full(len(works), -1, dtype=np.int64), np.full(len(works), -1, dtype=np.int64)
    # depth
    for _ in range(24):
        inside = at >= 0
        if not inside.any():
            break
        here = np.maximum(at, 0)
        innermost = np.where(inside & is_op[here] & (innermost < 0), at, innermost)
        outermost = np.where(inside & is_node[here], at, outermost)
        at = np.where(inside, trace.parent[here], -1)
    return np.where(outermost >= 0, outermost, innermost).astype(np.intp)


def _steps(trace: Trace, ops: Index) -> Iterator[Index]:
    """Ops of each step in dispatch order."""
    ordered = ops[np.argsort(trace.start_s[ops], kind="stable")]
    for step in np.unique(trace.step[ordered]):
        yield ordered[trace.step[ordered] == step]


class _Columns:
    """Columns that are filled in as nodes are found."""

    def __init__(self, trace: Trace) -> None:
        self.source = trace
        self.floor = trace.optional("floor_s").astype(np.float64).copy()
        self.expected = trace.optional("expected_s").astype(np.float64).copy()
        self.node = [trace.words[i] for i in trace.optional("node")]
        self.module = [trace.words[i] for i in trace.module]
        self.matched = np.zeros(len(trace), dtype=np.bool_)

    def set(self, rows: Index, run: NodeRun) -> None:
        spent = self.source.duration_s[rows]
        share = spent / spent.sum() if spent.sum() > 0 else np.full(len(rows), 1.0 / max(len(rows), 1))
        self.floor[rows], self.expected[rows] = run.floor_s * share, run.expected_s * share
        self.matched[rows] = True
        for row in rows.tolist():
            self.node[row] = run.label
            self.module[row] = self.module[row] or run.module

    def trace(self) -> Trace:
        named = self.source.with_words(node=self.node, module=self.module)
        return named.with_columns(floor_s=self.floor, expected_s=self.expected)
