"""What a software stack of its time reaches on a device: a step priced from a graph's work with a handful of numbers.

``cost`` prices the libraries of today kernel by kernel. Published results come from other stacks (NGC containers of
2019 to 2022, MLPerf submissions, TensorRT, FasterTransformer), whose kernels nobody tabulated: here one set of
coefficients for each stack and device stands for all of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.basis import Basis
from ridgeline.cost.work import Site, site_of, work_of
from ridgeline.errors import CalibrationError, InputError, nearest
from ridgeline.graph import Block, Graph, Kind, Node, root_of
from ridgeline.hardware import Device
from ridgeline.resources import data_dir

Array = NDArray[np.float64]
KINDS = ("gemm", "conv", "volume", "thin", "norm", "memory", "lookup", "depthwise")
NUM_PRODUCT_KINDS = 4  # of which the first so many multiply matrices
_KIND_OF = {"matmul": "gemm", "grouped_matmul": "gemm", "attention": "gemm", "conv": "conv", "embedding": "lookup",
            "embedding_bag": "lookup", "gather": "lookup", "scatter": "lookup"}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Shares of a device's peaks that a stack reaches, and what its kernels, calls and steps cost."""

    gemm_frac: float
    conv_frac: float
    volume_frac: float  # convolutions over three dims
    thin_frac: float  # grouped convolutions, of the same peak
    traffic_frac: float  # of memory bandwidth, for the operands of products and convolutions
    norm_frac: float  # batch and layer norms, of memory bandwidth; instance and group norms are plain memory passes
    memory_frac: float  # may exceed 1 where a stack fuses what the graph keeps apart
    lookup_frac: float
    depthwise_frac: float  # convolutions of a channel each, which move far more than they compute
    kernel_s: float  # products, convolutions and attention
    pass_s: float  # every other kernel; next to nothing where a stack fuses them into the first
    op_s: float  # the host, for each op it launches
    cast_factor: float  # the same in half precision, where a framework casts as it goes: relative to single
    step_s: float
    score_passes: float  # how often attention's scores travel through memory
    cell_s: float  # one time step of one recurrent layer
    winograd: float  # multiplications that convolutions in fp32 save
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
    rows: Array  # of the products behind convolutions and products: rows, columns, depth, and how many at once
    cols: Array
    depth: Array
    count: Array
    score_bytes: float  # attention scores of the whole step, one pass
    cells: float  # time steps × recurrent layers
    num_ops: float
    params: float
    trains: bool

    def split(self, ranks: int) -> Load:
        """One rank's part where products are split by columns."""
        return replace(self.scaled(1.0 / ranks), cols=self.cols / ranks)

    def scaled(self, factor: float) -> Load:
        """The same nodes with ``factor`` times the work each."""
        return replace(self, flops=self.flops * factor, num_bytes=self.num_bytes * factor,
                       score_bytes=self.score_bytes * factor)  # fmt: skip


def load_of(graph: Graph) -> Load:
    """The work of every node, equal ones counted together."""
    found: dict[tuple[float, ...], float] = {}
    mixed = graph.mode == "train" and graph.meta.get("precision") == "fp16"
    if mixed:  # half-precision copies are made of all parameters
        # Parameters outside of huge tables
        params = (value for value in graph.values if value.kind is Kind.PARAM and value.alias is None)
        small = (value for value in params if not value.type.shape or value.type.shape[0] < SPARSE_ROWS)
        dense_params = float(sum(value.type.numel * value.count for value in small))
        found[KINDS.index("memory"), 0.0, 6.0 * dense_params, *NO_PRODUCT] = 1.0
    score_bytes = cells = num_ops = 0.0
    for node, times in _nodes(graph):
        values = graph.values
        ins = tuple(values[v].type for v in node.inputs)
        outs = tuple(values[v].type for v in node.outputs)
        held = [values[root_of(values, v)].num_bytes for v in node.inputs]
        site = site_of(node, ins, outs, [min(t.num_bytes, h) if h else t.num_bytes for t, h in zip(ins, held)])
        work = work_of(site)
        if not work.num_bytes and not work.flops:
            continue
        num_ops += times
        key = (_kind(node), work.matrix_flops, _traffic_bytes(node, site, work.num_bytes, mixed), *_product(node))
        found[key] = found.get(key, 0.0) + times
        if node.op == "attention":
            a = node.attrs
            passes = 3.0 if site.backward else 1.0
            score_bytes += times * passes * a["b"] * a["h"] * a["s"] * a["skv"] * site.ins[0].dtype.bits / 8
        if node.op == "rnn":
            cells += times * node.attrs["seq"] * node.attrs["layers"]
    table = np.array(list(found)).T
    return Load(
        kind=table[0].astype(np.int64), flops=table[1], num_bytes=table[2], times=np.array(list(found.values())),
        rows=table[3], cols=table[4], depth=table[5], count=table[6], score_bytes=score_bytes, cells=cells,
        num_ops=num_ops, params=float(graph.num_params), trains=graph.mode == "train",
    )  # fmt: skip


SPARSE_ROWS = 1_000_000
NO_PRODUCT = (0.0, 0.0, 0.0, 0.0)


def _product(node: Node) -> tuple[float, float, float, float]:
    """Rows, columns, depth and count of the products a node is made of."""
    a = node.attrs
    if node.op == "matmul":
        return float(a["m"]), float(a["n"]), float(a["k"]), float(a["b"])
    if node.op != "conv":
        return NO_PRODUCT
    positions = math.prod(a["spatial"] if a["transposed"] else a["out_spatial"])
    groups = a["groups"]
    return float(a["n"] * positions), a["o"] / groups, a["c"] * math.prod(a["kernel"]) / groups, float(groups)


def _traffic_bytes(node: Node, site: Site, num_bytes: float, mixed: bool) -> float:
    """Bytes of a node; optimizers of mixed precision update in fp32, gradients of a huge table touch only some rows."""
    if mixed and node.op in ("optimizer", "foreach"):
        return 2.0 * num_bytes
    if not site.backward or node.op not in ("embedding", "embedding_bag") or site.outs[0].shape[0] < SPARSE_ROWS:
        return num_bytes
    rows = node.attrs["num"] if node.op == "embedding" else node.attrs["b"] * node.attrs["l"]
    row_bytes = site.outs[0].shape[1] * site.outs[0].dtype.bits / 8
    return site.in_bytes[0] + 2.0 * float(rows) * row_bytes


def _nodes(graph: Graph) -> Iterator[tuple[Node, int]]:
    for item in graph.items:
        if isinstance(item, Block):
            yield from ((node, item.repeat) for node in item.nodes)
        else:
            yield item, 1


def _kind(node: Node) -> int:
    if node.op == "conv" and node.attrs["groups"] > 1:
        return KINDS.index("depthwise" if node.attrs["groups"] == node.attrs["c"] else "thin")
    if node.op == "conv" and len(node.attrs["kernel"]) == 3:
        return KINDS.index("volume")
    if node.op == "norm" and node.attrs["fn"] in ("batch_norm", "layer_norm"):
        return KINDS.index("norm")
    if node.op == "rnn":
        return KINDS.index("gemm")
    return KINDS.index(_KIND_OF.get(node.op, "memory"))


def step_s(load: Load, device: Device, precision: str, reach: Reach, comm_s: float = 0.0, ranks: int = 1) -> float:
    """Seconds of one step on each of ``ranks`` devices that exchange gradients for ``comm_s``."""
    busy_s = _busy_s(load, device, precision, reach)
    hidden_s = reach.overlap_frac * busy_s * (2 / 3 if load.trains else 0.0)
    exposed_s = max(0.0, comm_s - hidden_s)
    waits = 1.0 + reach.sync_frac * (1.0 - 1.0 / ranks)
    op_s = reach.op_s * (reach.cast_factor if precision == "fp16" else 1.0)
    return max(busy_s * waits, load.num_ops * op_s) + exposed_s + reach.step_s


def _busy_s(load: Load, device: Device, precision: str, reach: Reach) -> float:
    peak, (share, bytes_frac) = peak_of(device, precision), _relative(precision, reach)
    saved = reach.winograd if precision == "fp32" else 1.0
    shares = (reach.gemm_frac, saved * reach.conv_frac, reach.volume_frac, reach.thin_frac, 1.0, 1.0, 1.0, 1.0)
    matrix, plain = reach.traffic_frac, reach.memory_frac
    passes = (matrix, matrix, matrix, plain, reach.norm_frac, plain, reach.lookup_frac, reach.depthwise_frac)
    fracs = np.array(shares)[load.kind]
    rates = np.array(passes)[load.kind] * device.dram.bandwidth_bytes_per_s
    compute = load.flops * idle_factor(load, device.num_cores) / (peak * share * fracs)
    memory = load.num_bytes * bytes_frac / rates
    launch = np.where(load.kind < NUM_PRODUCT_KINDS, reach.kernel_s, reach.pass_s)
    each = launch + np.maximum(compute, memory)
    scores = reach.score_passes * load.score_bytes * bytes_frac
    scores_s = scores / (reach.memory_frac * device.dram.bandwidth_bytes_per_s)
    return float(np.dot(load.times, each)) + scores_s + load.cells * reach.cell_s


_TILES = ((128, 128, 1.0), (128, 64, 0.9), (64, 64, 0.7), (64, 32, 0.5), (32, 32, 0.3))
"""Rows and columns of a tile, and the rate it reaches of the largest's."""


def idle_factor(load: Load, num_cores: int) -> Array:
    """How much longer products take than their arithmetic, because tiles do not fill all cores: 1 to 2.

    The best of a few tiles, with the depth split over cores where it is deep enough. Libraries know more shapes, so
    no more than half of the cores are believed to idle.
    """
    rows, cols, depth, count = (np.maximum(1.0, each) for each in (load.rows, load.cols, load.depth, load.count))
    best = np.full(len(rows), np.inf)
    for tile_rows, tile_cols, frac in _TILES:
        tiles = np.ceil(rows / tile_rows) * np.ceil(cols / tile_cols) * count
        for parts in (1, 2, 4, 8, 16):
            waves = np.ceil(tiles * parts / num_cores) * num_cores
            spent = waves * tile_rows * tile_cols * depth / parts / (frac * (0.9 if parts > 1 else 1.0))
            best = np.where((parts == 1) | (depth >= 128 * parts), np.minimum(best, spent), best)
    dense = (load.rows > 0) & ~np.isin(load.kind, (KINDS.index("thin"), KINDS.index("depthwise")))
    factor: Array = np.where(dense, np.clip(best / (rows * cols * depth * count), 1.0, 2.0), 1.0)
    return factor


def peak_of(device: Device, precision: str) -> float:
    """Arithmetic a second that products of this precision could reach at most."""
    if precision == "fp32":
        return device.peak_flops_per_s("vector", "fp32")
    return device.peak_flops_per_s("tensor", precision if precision in ("tf32", "int8", "fp8") else "fp16")


def _relative(precision: str, reach: Reach) -> tuple[float, float]:
    """The share reached relative to half precision, and bytes relative to the graph's."""
    if precision in ("int8", "fp8"):
        return reach.int8_frac, 0.5
    return {"fp32": reach.fp32_frac, "tf32": reach.tf32_frac}.get(precision, 1.0), 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trait:
    """What a device and the hosts it came in do to every stack alike, relative to the devices of all rows."""

    host: float = 1.0  # seconds of a call and of a step
    kernel: float = 1.0  # seconds of a kernel
    compute: float = 1.0  # reached shares of the matrix peak
    memory: float = 1.0  # reached shares of memory bandwidth

    def applied(self, reach: Reach) -> Reach:
        """The reach of a stack on this device, as far as other stacks tell."""
        shares = ("gemm_frac", "conv_frac", "volume_frac", "thin_frac")
        rates = ("traffic_frac", "norm_frac", "memory_frac", "lookup_frac", "depthwise_frac")
        return replace(
            reach, op_s=reach.op_s * self.host, step_s=reach.step_s * self.host,
            kernel_s=reach.kernel_s * self.kernel, pass_s=reach.pass_s * self.kernel,
            **{name: min(MOST_FRAC, getattr(reach, name) * self.compute) for name in shares},
            **{name: getattr(reach, name) * self.memory for name in rates},
        )  # fmt: skip


MOST_FRAC = 0.9
"""No product reaches more of a peak, at any precision."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """The coefficients of a stack on a device, how far they spread, and on what they rest."""

    reach: Reach
    spread_frac: float
    basis: Basis


def reach_of(stack: str, device: str) -> Fitted:
    """Coefficients of ``stack`` on ``device``: its own, else the stack's with the device's traits, as assumed."""
    tables = _tables()
    if stack not in tables["stacks"]:
        raise InputError(f"no coefficients for the software {stack!r}{nearest(stack, tables['stacks'])}")
    entry = tables["stacks"][stack]
    own = entry["devices"].get(device)
    if own is not None:
        return Fitted(Reach(**own), entry["spread_frac"], Basis.FITTED)
    trait = Trait(**tables["devices"].get(device, {}))
    return Fitted(trait.applied(Reach(**entry["all"])), max(0.25, 1.5 * entry["spread_frac"]), Basis.ASSUMED)


def stacks() -> tuple[str, ...]:
    return tuple(_tables()["stacks"])


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
