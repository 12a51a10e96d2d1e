"""What a software stack of its time reaches on a device: a step priced from a graph's work with a handful of numbers.

``cost`` prices the libraries of today kernel by kernel. Published results come from other stacks (NGC containers of
2019 to 2022, MLPerf submissions, TensorRT, FasterTransformer), whose kernels nobody tabulated: here one set of
coefficients for each stack and device stands for all of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.basis import Basis
from ridgeline.cost.work import site_of, work_of
from ridgeline.errors import CalibrationError, InputError, nearest
from ridgeline.graph import Block, Graph, Node, root_of
from ridgeline.hardware import Device
from ridgeline.resources import data_dir

Array = NDArray[np.float64]
KINDS = ("gemm", "conv", "thin", "memory", "lookup")
_KIND_OF = {"matmul": "gemm", "grouped_matmul": "gemm", "attention": "gemm", "conv": "conv", "embedding": "lookup",
            "embedding_bag": "lookup", "gather": "lookup", "scatter": "lookup"}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Shares of a device's peaks that a stack reaches, and what its kernels, calls and steps cost."""

    gemm_frac: float
    conv_frac: float
    thin_frac: float  # grouped and depthwise convolutions, of the same peak
    memory_frac: float  # may exceed 1 where a stack fuses what the graph keeps apart
    lookup_frac: float
    kernel_s: float
    op_s: float  # the host, for each op it launches
    step_s: float
    score_passes: float  # how often attention's scores travel through memory
    cell_s: float  # one time step of one recurrent layer
    fp32_frac: float  # reached share of the vector peak, relative to half precision's share of its own
    tf32_frac: float
    int8_frac: float
    sync_frac: float  # slowdown of a step that waits for other ranks
    overlap_frac: float  # share of the backward pass under which gradients travel


@dataclass(frozen=True, slots=True)
class Load:
    """The work of one step: distinct nodes by kind with their flops, bytes and how often they run."""

    kind: NDArray[np.int64]
    flops: Array
    num_bytes: Array
    times: Array
    score_bytes: float  # attention scores of the whole step, one pass
    cells: float  # time steps × recurrent layers
    num_ops: float
    params: float
    trains: bool

    def scaled(self, factor: float) -> Load:
        """The same nodes with ``factor`` times the work each."""
        return Load(self.kind, self.flops * factor, self.num_bytes * factor, self.times, self.score_bytes * factor,
                    self.cells, self.num_ops, self.params, self.trains)  # fmt: skip


def load_of(graph: Graph) -> Load:
    """The work of every node, equal ones counted together."""
    found: dict[tuple[int, float, float], float] = {}
    score_bytes = cells = num_ops = 0.0
    for node, times in _nodes(graph):
        site = _site(graph, node)
        work = work_of(site)
        if not work.num_bytes and not work.flops:
            continue
        num_ops += times
        key = (_kind(node), work.matrix_flops, work.num_bytes)
        found[key] = found.get(key, 0.0) + times
        if node.op == "attention":
            a = node.attrs
            passes = 3.0 if site.backward else 1.0
            score_bytes += times * passes * a["b"] * a["h"] * a["s"] * a["skv"] * site.ins[0].dtype.bits / 8
        if node.op == "rnn":
            cells += times * node.attrs["seq"] * node.attrs["layers"]
    keys = list(found)
    return Load(
        np.array([key[0] for key in keys]), np.array([key[1] for key in keys]), np.array([key[2] for key in keys]),
        np.array([found[key] for key in keys]), score_bytes, cells, num_ops, float(graph.num_params),
        graph.mode == "train",
    )  # fmt: skip


def _nodes(graph: Graph) -> Iterator[tuple[Node, int]]:
    for item in graph.items:
        if isinstance(item, Block):
            yield from ((node, item.repeat) for node in item.nodes)
        else:
            yield item, 1


def _site(graph: Graph, node: Node) -> Any:
    values = graph.values
    ins = tuple(values[v].type for v in node.inputs)
    outs = tuple(values[v].type for v in node.outputs)
    held = [values[root_of(values, v)].num_bytes for v in node.inputs]
    return site_of(node, ins, outs, [min(t.num_bytes, h) if h else t.num_bytes for t, h in zip(ins, held)])


def _kind(node: Node) -> int:
    if node.op == "conv" and node.attrs["groups"] > 1:
        return KINDS.index("thin")
    if node.op == "rnn":
        return KINDS.index("gemm")
    return KINDS.index(_KIND_OF.get(node.op, "memory"))


def step_s(load: Load, device: Device, precision: str, reach: Reach, comm_s: float = 0.0, ranks: int = 1) -> float:
    """Seconds of one step on each of ``ranks`` devices that exchange gradients for ``comm_s``."""
    busy_s = _busy_s(load, device, precision, reach)
    hidden_s = reach.overlap_frac * busy_s * (2 / 3 if load.trains else 0.0)
    exposed_s = max(0.0, comm_s - hidden_s)
    waits = 1.0 + reach.sync_frac * (1.0 - 1.0 / ranks)
    return max(busy_s * waits, load.num_ops * reach.op_s) + exposed_s + reach.step_s


def _busy_s(load: Load, device: Device, precision: str, reach: Reach) -> float:
    peak, share, bytes_frac = _peak(device, precision, reach)
    fracs = np.array([reach.gemm_frac, reach.conv_frac, reach.thin_frac, 1.0, 1.0])[load.kind]
    rates = np.array([reach.memory_frac] * 4 + [reach.lookup_frac])[load.kind] * device.dram.bandwidth_bytes_per_s
    compute = load.flops / (peak * share * fracs)
    memory = load.num_bytes * bytes_frac / rates
    each = reach.kernel_s + np.maximum(compute, memory)
    scores = reach.score_passes * load.score_bytes * bytes_frac
    scores_s = scores / (reach.memory_frac * device.dram.bandwidth_bytes_per_s)
    return float(np.dot(load.times, each)) + scores_s + load.cells * reach.cell_s


def _peak(device: Device, precision: str, reach: Reach) -> tuple[float, float, float]:
    """Peak rate, the share reached relative to half precision, and bytes relative to the graph's."""
    if precision == "fp32":
        return device.peak_flops_per_s("vector", "fp32"), reach.fp32_frac, 1.0
    if precision == "tf32":
        return device.peak_flops_per_s("tensor", "tf32"), reach.tf32_frac, 1.0
    if precision == "int8":
        return device.peak_flops_per_s("tensor", "int8"), reach.int8_frac, 0.5
    if precision == "fp8":
        return device.peak_flops_per_s("tensor", "fp8"), reach.int8_frac, 0.5
    return device.peak_flops_per_s("tensor", "fp16"), 1.0, 1.0


@dataclass(frozen=True, slots=True)
class Fitted:
    """The coefficients of a stack on a device, how far they spread, and on what they rest."""

    reach: Reach
    spread_frac: float
    basis: Basis


def reach_of(stack: str, device: str) -> Fitted:
    """Coefficients of ``stack`` on ``device``: its own, else the stack's on all devices, as assumed."""
    stacks = _tables()
    if stack not in stacks:
        raise InputError(f"no coefficients for the software {stack!r}{nearest(stack, stacks)}")
    entry = stacks[stack]
    own = entry["devices"].get(device)
    values = {**entry["all"], **(own or {})}
    reach = Reach(**{field.name: values[field.name] for field in fields(Reach)})
    if own is None:
        return Fitted(reach, max(0.25, 1.5 * entry["spread_frac"]), Basis.ASSUMED)
    return Fitted(reach, entry["spread_frac"], Basis.FITTED)


def stacks() -> tuple[str, ...]:
    return tuple(_tables())


@cache
def _tables() -> Mapping[str, Any]:
    path = data_dir() / "stacks.json"
    try:
        tables: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CalibrationError(f"{path.name}: cannot be read: {error}; reinstall the package") from error
    return tables


def spread_interval(seconds: float, spread_frac: float) -> tuple[float, float]:
    """The 90 % interval of a time whose logarithm spreads so far."""
    factor = math.exp(1.645 * spread_frac)
    return seconds / factor, seconds * factor
