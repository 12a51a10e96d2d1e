"""What each piece of a rank's graph costs: compute by the device's prices, communication by the cluster's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ridgeline.basis import Basis, worst
from ridgeline.cost import energy, host, interval
from ridgeline.cost.estimate import Line, segments_of
from ridgeline.cost.price import Pricer, pricer_of
from ridgeline.cost.schedule import Segment, entry_s, wall_s
from ridgeline.graph import Block, Graph, Phase
from ridgeline.hardware import Cluster, Group
from ridgeline.plan import Partition, Plan
from ridgeline.plan.recompute import AGAIN, forward_blocks, pairs, weight_gradient
from ridgeline.sim.collectives import collective_s
from ridgeline.sim.generation import Stack

FORWARD, BACKWARD, OPTIMIZER = 0, 1, 2
FAMILIES = ("matrix", "fp8", "fp4", "grouped", "attention", "memory")
_FAMILY = {"conv": "matrix", "grouped_matmul": "grouped", "attention": "attention"}


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective of a pass: who talks, how, how long by the collectives' model."""

    group: str
    fn: str
    link: str  # up or out: the narrowest link it crosses
    seconds: float
    num_bytes: float
    later: bool  # runs beside weight gradients, or fetches what only they need
    basis: Basis
    module: str


@dataclass(slots=True)
class Load:
    """One pass (forward or backward) of one piece, one micro-batch: modeled seconds by family of kernels.

    ``hot`` is the part of each family that the clock limits, ``weight`` the part that makes weight gradients.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(FAMILIES, 0.0))
    hot: dict[str, float] = field(default_factory=lambda: dict.fromkeys(FAMILIES, 0.0))
    weight: dict[str, float] = field(default_factory=lambda: dict.fromkeys(FAMILIES, 0.0))
    gap_s: float = 0.0
    host_s: float = 0.0
    num_kernels: float = 0.0
    expert_calls: float = 0.0  # products of single experts
    routed: float = 0.0  # layers of experts
    flops: float = 0.0  # matrix arithmetic done
    again_flops: float = 0.0  # the part of it that recomputes
    activity: energy.Activity = field(default_factory=lambda: energy.Activity(0.0, 0.0, 0.0))
    exchanges: list[Exchange] = field(default_factory=list)
    lines: list[tuple[Line, float]] = field(default_factory=list)

    def family_s(self, name: str, stack: Stack, stretch: float) -> float:
        """Seconds of a family under a software generation and a clock."""
        return (self.seconds[name] + (stretch - 1.0) * self.hot[name]) * stack[name]

    def compute_s(self, stack: Stack, stretch: float, execution: str, *, waits: bool = False) -> float:
        """Seconds of the pass on its own: kernels with their gaps, or the host that launches them.

        A host that ``waits`` to learn how many tokens each expert got launches expert by expert after that.
        """
        busy_s = sum(self.family_s(name, stack, stretch) for name in FAMILIES) + self.gap_s
        if execution == "cudagraph":
            return busy_s
        launched_s = self.expert_calls * stack["expert_s"] if waits else 0.0
        return max(busy_s, self.host_s * stack["host"] + launched_s)

    def weight_s(self, stack: Stack, stretch: float) -> float:
        return sum(self.weight[n] * stack[n] for n in FAMILIES) * stretch

    def comm_s(self, stack: Stack, group: str, *, later: bool | None = None, fn: str = "") -> float:
        return sum(e.seconds * stack[e.link] for e in self.exchanges
                   if e.group == group and (later is None or e.later == later) and (not fn or e.fn == fn))  # fmt: skip


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


def exchange(fn: str, num_bytes: float, name: str, groups: Mapping[str, Group],
             cluster: Cluster) -> tuple[float, str, Basis]:  # fmt: skip
    """Modeled seconds of a collective of a plan's group, and the link it crosses."""
    group = groups[name]
    if group.num_ranks == 1 or fn == "spread" or not num_bytes:
        return 0.0, "up", Basis.MEASURED
    if fn == "ring":
        one = collective_s("send_recv", num_bytes / group.num_ranks, groups["ring"], cluster)
        return one.expected_s * (group.num_ranks - 1), link_of(groups["ring"]), one.basis
    found = collective_s(fn, num_bytes, group, cluster)
    return found.expected_s, link_of(group), found.basis


def price(partition: Partition, cluster: Cluster, plan: Plan) -> Priced:
    """Price every line of the rank's graph once and file it under its piece and phase."""
    pricer = pricer_of(cluster.device, plan.world == 1)
    graph = partition.graph
    coef = {**host.DEFAULTS, **pricer.calibration.host}
    segments = segments_of(graph, pricer, coef, plan.execution)
    where, groups = _places(graph), groups_of(cluster, plan)
    loads: dict[tuple[int, int], Load] = {}
    gap_s = coef["graph_gap_s"] if plan.execution == "cudagraph" else coef["gap_s"]
    for segment in segments:
        for line in segment.lines:
            if plan.narrow_attention and line.node.op == "attention":
                # Time of attention in eight bits over that in sixteen, forward and backward: NVIDIA's benchmark of
                # cuDNN 9.18 on a GB200 at 32,768 tokens (cudnn-frontend v1.18.0).
                line.busy_s, line.floor_s = line.busy_s * 0.83, line.floor_s * 0.5
            piece, phase = where.get(id(line.node), (0, FORWARD))
            load = loads.setdefault((piece, phase), Load())
            share = line.times / (partition.pieces[piece].repeat if phase != OPTIMIZER else 1)
            if line.node.op == "collective":
                _exchange(load, line, share, groups, cluster, _once(graph, plan, groups))
            else:
                _compute(load, line, share, pricer, gap_s)
    lines = [line for segment in segments for line in segment.lines]
    busy_s = sum(line.busy_s * line.times for line in lines)
    basis = worst(line.basis for line in lines)
    entry = entry_s(coef, plan.execution) if cluster.device.kind == "gpu" else 0.0
    made = Priced(partition, loads, segments, entry, 1.0, interval.spread(lines, busy_s, basis), basis, pricer,
                  plan.execution)  # fmt: skip
    return replace(made, wall_factor=wall_factor(made, 1.0))


def _places(graph: Graph) -> dict[int, tuple[int, int]]:
    """Node identity → (piece, phase). Pieces: 0 the head, then blocks, then the tail."""
    fore = forward_blocks(graph)
    tail = len(fore) + 1
    numbers = {at: number for number, at in enumerate(fore, 1)}
    numbers |= {back: numbers[at] for at, back in pairs(graph)}
    found: dict[int, tuple[int, int]] = {}
    passed = reversed_ = 0
    for at, item in enumerate(graph.items):
        if isinstance(item, Block) and item.nodes[0].phase is Phase.OPTIMIZER:
            found.update({id(n): (0, OPTIMIZER) for n in item.nodes})
        elif isinstance(item, Block):
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


def _family(line: Line) -> str:
    if line.node.op == "matmul":
        return line.work.dtype if line.work.dtype in ("fp8", "fp4") else "matrix"
    return _FAMILY.get(line.node.op, "memory")


def _compute(load: Load, line: Line, share: float, pricer: Pricer, gap_s: float) -> None:
    node = line.node
    seconds, family = line.busy_s * share, _family(line)
    load.seconds[family] += seconds
    load.gap_s += line.num_kernels * share * gap_s
    load.host_s += line.host_s * share
    load.num_kernels += line.num_kernels * share
    load.lines.append((line, share))
    if line.bound == "compute" and line.work.matrix_flops:
        load.hot[family] += seconds
    if node.op == "grouped_matmul":
        load.expert_calls += node.attrs["groups"] * share
        load.routed += share / (2 if node.phase is Phase.FORWARD else 4)  # two products a layer, four gradients
    if node.phase is Phase.BACKWARD and weight_gradient(node):
        load.weight[family] += seconds
    load.flops += line.work.matrix_flops * share
    if node.target == AGAIN:
        load.again_flops += line.work.matrix_flops * share
    if line.busy_s:
        chip = pricer.chip
        peak = energy.matrix_rate_flops_per_s(chip, line.work.dtype, {**energy.DEFAULTS, **pricer.calibration.power})
        spent = energy.activity_of(line.work, line.busy_s, peak, chip.dram_bytes_per_s, line.cold_frac)
        load.activity += energy.Activity(spent.busy_s * share, spent.peak_matrix_s * share, spent.peak_dram_s * share)


def _once(graph: Graph, plan: Plan, groups: Mapping[str, Group]) -> float:
    """Share of the copies of a token that cross the network when each host is sent one and hands it on."""
    num, top = groups["ep"].num_domains, int(graph.meta.get("top", 1))
    if plan.dispatch not in ("deep", "hybrid") or num == 1 or top == 1:
        return 1.0
    return num * (1.0 - (1.0 - 1.0 / num) ** top) / top


def _exchange(load: Load, line: Line, share: float, groups: Mapping[str, Group], cluster: Cluster,
              once: float) -> None:  # fmt: skip
    node, a = line.node, line.node.attrs
    if not a["num_bytes"]:
        return
    size = a["num_bytes"] * (once if a["group"] == "ep" else 1.0)
    seconds, link, basis = exchange(a["fn"], size, a["group"], groups, cluster)
    fetched = node.target == AGAIN and a["fn"] == "all_gather"
    later = node.phase is Phase.BACKWARD and a["group"] == "tp" and (
        fetched or (node.target != AGAIN and a["fn"] in ("reduce_scatter", "all_reduce")))  # fmt: skip
    load.exchanges.append(Exchange(a["group"], a["fn"], link, seconds * share, a["num_bytes"] * share, later, basis,
                                   node.module))  # fmt: skip
    load.host_s += line.host_s * share


def wall_factor(priced: Priced, stretch: float) -> float:
    """Wall seconds of the whole graph on one queue over the sum of its pieces' own, at a clock."""
    from ridgeline.sim.generation import PLAIN, stack_of

    plain, device = stack_of(PLAIN, priced.pricer.device), priced.pricer.device
    total_s = sum(load.compute_s(plain, stretch, priced.execution) * repeat for load, repeat in _repeated(priced))
    for segment in priced.segments:
        for line in segment.lines:
            line.stretch = stretch if line.bound == "compute" and line.work.matrix_flops else 1.0
    coef = {**host.DEFAULTS, **priced.pricer.calibration.host}
    walked_s, _ = wall_s(priced.segments, coef, priced.execution, device.kind)
    return max(0.0, walked_s - priced.entry_s) / total_s if total_s else 1.0


def _repeated(priced: Priced) -> Iterable[tuple[Load, int]]:
    for (piece, phase), load in priced.loads.items():
        yield load, 1 if phase == OPTIMIZER else priced.partition.pieces[piece].repeat


def blended(some: Priced, others: Priced, frac: float) -> Priced:
    """A model of which ``frac`` of the layers run as in ``some`` and the rest as in ``others``, spread evenly."""
    loads = {place: _mixed(some.load(*place), others.load(*place), frac) for place in {**some.loads, **others.loads}}
    pieces = tuple(
        replace(a, saved_bytes=round(a.saved_bytes * frac + b.saved_bytes * (1.0 - frac)),
                working_bytes=max(a.working_bytes, b.working_bytes))
        for a, b in zip(some.partition.pieces, others.partition.pieces, strict=True)
    )  # fmt: skip
    partition = replace(some.partition, pieces=pieces)
    return replace(some, partition=partition, loads=loads, width=max(some.width, others.width))


def _mixed(a: Load, b: Load, frac: float) -> Load:
    def mixed(x: float, y: float) -> float:
        return x * frac + y * (1.0 - frac)

    def each(x: Mapping[str, float], y: Mapping[str, float]) -> dict[str, float]:
        return {name: mixed(x[name], y[name]) for name in FAMILIES}

    spent = energy.Activity(mixed(a.activity.busy_s, b.activity.busy_s),
                            mixed(a.activity.peak_matrix_s, b.activity.peak_matrix_s),
                            mixed(a.activity.peak_dram_s, b.activity.peak_dram_s))  # fmt: skip
    talks = [replace(e, seconds=e.seconds * part, num_bytes=e.num_bytes * part)
             for load, part in ((a, frac), (b, 1.0 - frac)) for e in load.exchanges]  # fmt: skip
    lines = [(line, share * part) for load, part in ((a, frac), (b, 1.0 - frac)) for line, share in load.lines]
    return Load(each(a.seconds, b.seconds), each(a.hot, b.hot), each(a.weight, b.weight), mixed(a.gap_s, b.gap_s),
                mixed(a.host_s, b.host_s), mixed(a.num_kernels, b.num_kernels), mixed(a.expert_calls, b.expert_calls),
                mixed(a.routed, b.routed), mixed(a.flops, b.flops), mixed(a.again_flops, b.again_flops), spent, talks,
                lines)  # fmt: skip
