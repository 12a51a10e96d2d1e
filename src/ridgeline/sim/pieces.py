"""What each piece of a rank's graph costs: compute by the device's prices, communication by the cluster's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ridgeline.basis import Basis, worst
from ridgeline.cost import energy, host, interval
from ridgeline.cost.estimate import Line, activity, segments_of
from ridgeline.cost.price import Pricer, pricer_of
from ridgeline.cost.schedule import Segment, entry_s, wall_s
from ridgeline.graph import Block, Graph, Node, Phase
from ridgeline.hardware import Cluster, Group
from ridgeline.plan import Partition, Plan
from ridgeline.plan.recompute import AGAIN, pairs
from ridgeline.sim.collectives import collective_s
from ridgeline.sim.stack import Stack

FORWARD, BACKWARD, OPTIMIZER = 0, 1, 2
MATRIX_OPS = frozenset({"matmul", "grouped_matmul", "attention", "conv"})


@dataclass(slots=True)
class Exchange:
    """Seconds of communication of one kind within a pass, and what happens to it."""

    group: str
    fn: str
    seconds: float
    num_bytes: float
    later: bool  # runs beside weight gradients, or fetches what only they need
    basis: Basis
    module: str


@dataclass(slots=True)
class Load:
    """One pass (forward or backward) of one piece, one micro-batch."""

    compute_s: float = 0.0
    matrix_s: float = 0.0  # the part that a lower clock stretches
    weight_s: float = 0.0  # products for weight gradients
    attention_s: float = 0.0
    host_s: float = 0.0
    num_kernels: int = 0
    flops: float = 0.0  # matrix arithmetic done
    again_flops: float = 0.0  # the part of it that recomputes
    activity: energy.Activity = field(default_factory=lambda: energy.Activity(0.0, 0.0, 0.0))
    exchanges: list[Exchange] = field(default_factory=list)
    lines: list[tuple[Line, float]] = field(default_factory=list)

    def comm_s(self, group: str = "", *, later: bool | None = None) -> float:
        return sum(e.seconds for e in self.exchanges
                   if (not group or e.group == group) and (later is None or e.later == later))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Priced:
    """A partition with prices: loads by piece and phase, and what belongs to the step as a whole."""

    partition: Partition
    loads: Mapping[tuple[int, int], Load]
    segments: list[Segment]
    entry_s: float  # entering the model, once a micro-batch
    wall_factor: float  # launch effects that the sum over pieces does not see
    width: float  # log half-width of the kernels' interval
    basis: Basis
    pricer: Pricer
    execution: str

    def load(self, piece: int, phase: int) -> Load:
        return self.loads.get((piece, phase), Load())


def groups_of(cluster: Cluster, plan: Plan) -> Mapping[str, Group]:
    """Which ranks talk, axis by axis: tensor innermost, then context, data, pipeline outermost."""
    data = plan.dp * plan.cp
    inner = plan.tp
    found = {
        "tp": cluster.group(plan.tp),
        "cp": cluster.group(plan.cp, stride=inner),
        "etp": cluster.group(plan.etp),
        "ep": cluster.group(plan.ep, stride=plan.etp),
        "dp": cluster.group(data, stride=inner),
        "shard": cluster.group(plan.sharders, stride=inner),
        "replicate": cluster.group(max(1, data // plan.sharders), stride=inner * plan.sharders),
        "edp": cluster.group(plan.expert_dp, stride=plan.ep * plan.etp),
    }
    if plan.pp > 1:
        found["pp"] = cluster.group(2, stride=plan.tp * plan.cp * plan.dp)
    if plan.cp > 1:
        across = found["cp"].num_domains > 1
        hop = inner if not across else -(-cluster.domain_size // inner) * inner
        found["ring"] = cluster.group(2, stride=min(hop, max(1, cluster.num_devices - 1)))
    return found


def link_of(group: Group) -> str:
    """The narrowest link a group uses: ``up`` inside a scale-up domain, ``out`` across the network."""
    return "out" if group.num_domains > 1 else "up"


def exchange_s(fn: str, num_bytes: float, name: str, groups: Mapping[str, Group], cluster: Cluster,
               stack: Stack) -> tuple[float, Basis]:  # fmt: skip
    """Seconds of a collective of a plan's group under a software generation."""
    group = groups[name]
    if group.num_ranks == 1 or fn == "spread":
        return 0.0, Basis.MEASURED
    if fn == "ring":
        one = collective_s("send_recv", num_bytes / group.num_ranks, groups["ring"], cluster)
        return one.expected_s * (group.num_ranks - 1) * stack[link_of(groups["ring"])], one.basis
    found = collective_s(fn, num_bytes, group, cluster)
    return found.expected_s * stack[link_of(group)], found.basis


def price(partition: Partition, cluster: Cluster, plan: Plan, stack: Stack) -> Priced:
    """Price every line of the rank's graph once and file it under its piece and phase."""
    pricer = pricer_of(cluster.device)
    graph = partition.graph
    coef = {**host.DEFAULTS, **pricer.calibration.host}
    segments = segments_of(graph, pricer, coef, plan.execution)
    where = _places(graph)
    groups = groups_of(cluster, plan)
    loads: dict[tuple[int, int], Load] = {}
    repeats = {number: piece.repeat for number, piece in enumerate(partition.pieces)}
    for segment in segments:
        for line in segment.lines:
            _scale(line, stack)
            place = where.get(id(line.node), (0, FORWARD))
            load = loads.setdefault(place, Load())
            share = line.times / repeats.get(place[0], 1)
            if line.node.op == "collective":
                _exchange(load, line.node, share, groups, cluster, stack)
            else:
                _compute(load, line, share, pricer, coef["gap_s"])
    lines = [line for segment in segments for line in segment.lines]
    busy_s = sum(line.busy_s * line.times for line in lines)
    basis = worst(line.basis for line in lines)
    entry = entry_s(coef, plan.execution) if cluster.device.kind == "gpu" else 0.0
    made = Priced(partition, loads, segments, entry, 1.0, interval.spread(lines, busy_s, basis), basis, pricer,
                  plan.execution)  # fmt: skip
    return replace(made, wall_factor=_wall_factor(made, coef, cluster.device.kind))


def _scale(line: Line, stack: Stack) -> None:
    """The generation's share of the modeled speed, by what the line runs."""
    op = line.node.op
    if op == "attention":
        line.busy_s *= stack["attention"]
    elif op in MATRIX_OPS:
        line.busy_s *= stack["matrix"] * (stack["grouped"] if op == "grouped_matmul" else 1.0)
    elif line.num_kernels:
        line.busy_s *= stack["memory"]


def _places(graph: Graph) -> dict[int, tuple[int, int]]:
    """Node identity → (piece, phase). Pieces: 0 the head, then blocks, then the tail."""
    fore = [i for i, item in enumerate(graph.items) if isinstance(item, Block) and not item.reverse]
    tail = len(fore) + 1
    numbers = {at: number for number, at in enumerate(fore, 1)}
    numbers |= {back: numbers[at] for at, back in pairs(graph)}
    found: dict[int, tuple[int, int]] = {}
    passed = reversed_ = 0
    for at, item in enumerate(graph.items):
        if isinstance(item, Block):
            passed += at in fore
            reversed_ += at not in fore
            phase = BACKWARD if item.reverse else FORWARD
            found.update({id(n): (numbers.get(at, tail), phase) for n in item.nodes})
        elif item.phase is Phase.OPTIMIZER:
            found[id(item)] = (0, OPTIMIZER)
        elif item.phase is Phase.FORWARD:
            found[id(item)] = (0 if passed == 0 and fore else tail, FORWARD)
        else:
            found[id(item)] = (tail if not reversed_ else 0, BACKWARD)
    return found


def _compute(load: Load, line: Line, share: float, pricer: Pricer, gap_s: float) -> None:
    node = line.node
    seconds = line.busy_s * share
    load.compute_s += seconds + line.num_kernels * share * gap_s
    load.host_s += line.host_s * share
    load.num_kernels += round(line.num_kernels * share)
    load.lines.append((line, share))
    if line.bound == "compute" and line.work.matrix_flops:
        load.matrix_s += seconds
    if node.op == "attention":
        load.attention_s += seconds
    if node.phase is Phase.BACKWARD and _is_weight_gradient(node):
        load.weight_s += seconds
    load.flops += line.work.matrix_flops * share
    if node.target == AGAIN:
        load.again_flops += line.work.matrix_flops * share
    if line.busy_s:
        chip = pricer.chip
        peak = chip.tensor_flops_per_s.get(line.work.dtype, chip.vector_flops_per_s)
        spent = energy.activity_of(line.work, line.busy_s, peak, chip.dram_bytes_per_s, line.cold_frac)
        load.activity += energy.Activity(spent.busy_s * share, spent.peak_matrix_s * share, spent.peak_dram_s * share)


def _is_weight_gradient(node: Node) -> bool:
    return (node.op == "matmul" and bool(node.attrs.get("trans_a"))) or (
        node.op == "grouped_matmul" and node.attrs.get("which") == "reduction")  # fmt: skip


def _exchange(load: Load, node: Node, share: float, groups: Mapping[str, Group], cluster: Cluster,
              stack: Stack) -> None:  # fmt: skip
    a = node.attrs
    if not a["num_bytes"]:
        return
    seconds, basis = exchange_s(a["fn"], a["num_bytes"], a["group"], groups, cluster, stack)
    later = node.phase is Phase.BACKWARD and a["group"] == "tp" and (
        (node.target == AGAIN and a["fn"] == "all_gather") or a["fn"] == "reduce_scatter" or a["fn"] == "all_reduce")
    load.exchanges.append(Exchange(a["group"], a["fn"], seconds * share, a["num_bytes"] * share, later, basis,
                                   node.module))  # fmt: skip


def _wall_factor(priced: Priced, coef: Mapping[str, float], kind: str) -> float:
    """Wall seconds of the whole graph on one queue over the sum of its pieces' own."""
    total_s = sum(piece_s(load, priced.execution) * repeat for load, repeat in _repeated(priced))
    walked_s, _ = wall_s(priced.segments, coef, priced.execution, kind)
    return max(0.0, walked_s - priced.entry_s) / total_s if total_s else 1.0


def _repeated(priced: Priced) -> Iterable[tuple[Load, int]]:
    for (piece, phase), load in priced.loads.items():
        yield load, 1 if phase == OPTIMIZER else priced.partition.pieces[piece].repeat


def piece_s(load: Load, execution: str) -> float:
    """Seconds of a pass on its own: kernels with their gaps, or the host that launches them."""
    return max(load.compute_s, load.host_s) if execution == "eager" else max(load.compute_s, 0.9 * load.host_s)


def stretched(priced: Priced, factor: float, stack: Stack) -> Priced:
    """The same under a lower clock: matrix kernels take ``factor`` times as long."""
    if factor == 1.0:
        return priced
    for segment in priced.segments:
        for line in segment.lines:
            line.stretch = factor if line.bound == "compute" and line.work.matrix_flops else 1.0
    loads = {place: replace(load, compute_s=load.compute_s + (factor - 1.0) * load.matrix_s,
                            matrix_s=load.matrix_s * factor, weight_s=load.weight_s * factor,
                            attention_s=load.attention_s * factor)
             for place, load in priced.loads.items()}  # fmt: skip
    made = replace(priced, loads=loads, wall_factor=1.0)
    coef = {**host.DEFAULTS, **priced.pricer.calibration.host}
    return replace(made, wall_factor=_wall_factor(made, coef, priced.pricer.device.kind))


__all__ = ["Exchange", "Load", "Priced", "activity", "exchange_s", "groups_of", "price", "stretched"]
