"""From priced pieces to pipeline positions: the layers each holds, how long its passes take, what it exposes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ridgeline.cost import energy
from ridgeline.dtypes import dtype
from ridgeline.hardware import Cluster, Group
from ridgeline.plan import Plan
from ridgeline.plan.precision import recipe
from ridgeline.sim.footprint import Held
from ridgeline.sim.generation import Stack
from ridgeline.sim.pieces import BACKWARD, FORWARD, Load, Priced, exchange

Part = tuple[int, float]
"""(piece, how many of its iterations): a layer of a block that repeats two together is half an iteration."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One pass of one model position: total seconds, and the parts that are exposed communication."""

    seconds: float
    weight_s: float  # within it, what nothing waits for
    exposed: Mapping[str, float]
    compute_s: float


@dataclass(frozen=True, slots=True)
class Position:
    """What one place of the pipeline runs and holds."""

    forward: Timed
    backward: Timed
    held: Held
    activity: energy.Activity  # forward and backward, one micro-batch
    flops: float
    again_flops: float
    num_layers: float
    carried_bytes: float
    grads_s: float  # gradients of this position reduced, once a step
    params_s: float  # its parameters gathered, once a step
    shard_numel: float  # parameters this rank's optimizer steps over


def layers_at(num_layers: int, num_positions: int) -> list[int]:
    """Layers of each position: equal, else the middle gets one more than the ends, which embed and compute loss."""
    each, rest = divmod(num_layers, num_positions)
    order = sorted(range(num_positions), key=lambda p: (p in (0, num_positions - 1), p == num_positions - 1, p))
    extra = set(order[:rest])
    return [each + (p in extra) for p in range(num_positions)]


def parts_of(priced: Priced, num_positions: int) -> list[list[Part]]:
    """The pieces of each position: head first, tail last, layers in order between."""
    pieces = priced.partition.pieces
    layers = [(number, 1.0 / piece.layers) for number, piece in enumerate(pieces) if piece.layers
              for _ in range(piece.repeat * piece.layers)]  # fmt: skip
    found: list[list[Part]] = []
    at = 0
    for count in layers_at(len(layers), num_positions):
        merged: dict[int, float] = {}
        for number, share in layers[at : at + count]:
            merged[number] = merged.get(number, 0.0) + share
        found.append(list(merged.items()))
        at += count
    found[0].insert(0, (0, 1.0))
    found[-1].append((len(pieces) - 1, 1.0))
    return found


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything that positions are composed under."""

    plan: Plan
    cluster: Cluster
    stack: Stack
    groups: Mapping[str, Group]
    stretch: float = 1.0  # how much longer matrix kernels take under the power limit
    factor: float = 1.0  # launch effects between pieces

    def exchange_s(self, fn: str, num_bytes: float, group: str) -> float:
        """Seconds of a collective under the software generation."""
        seconds, link, _ = exchange(fn, num_bytes, group, self.groups, self.cluster)
        return seconds * self.stack[link]


def pass_of(load: Load, priced: Priced, setting: Setting) -> Timed:
    """One pass of one piece: compute, what communication stays exposed beside it, and what sharing SMs costs."""
    plan, stack = setting.plan, setting.stack
    waits = plan.dispatch in ("all-to-all", "deep") and not plan.replayed
    execution = "cudagraph" if plan.replayed else priced.execution
    compute = load.compute_s(stack, setting.stretch, execution, waits=waits) * setting.factor
    weight = load.weight_s(stack, setting.stretch) * setting.factor
    exposed = {"tp": 0.0, "cp": 0.0, "ep": 0.0}
    later = load.comm_s(stack, "tp", later=True)
    beside = min(later, weight)
    blocking = load.comm_s(stack, "tp", later=False)
    busy = sum(load.family_s(name, stack, setting.stretch) for name in ("matrix", "fp8", "fp4", "grouped"))
    covered = min(blocking * stack["tp_hidden"], busy) if plan.overlap_tp else 0.0
    exposed["tp"] = later - beside + blocking - covered
    ring = load.comm_s(stack, "cp", fn="ring")
    attention = load.family_s("attention", stack, setting.stretch)
    under = min(ring, attention * (plan.cp - 1) / max(1, plan.cp))
    exposed["cp"] = load.comm_s(stack, "cp") - under
    experts = load.comm_s(stack, "ep") + load.comm_s(stack, "etp")
    away = min(experts * stack["ep_hidden"], compute) if plan.overlap_ep else 0.0
    exposed["ep"] = experts - away
    compute += stack["interference"] * (beside + covered + under + away)
    if waits:
        compute += load.routed * stack["route_s"]
    total = compute + sum(exposed.values())
    return Timed(total, min(weight, total), exposed, compute)


def positions_of(priced: Priced, num_positions: int, setting: Setting) -> list[Position]:
    """Every position of the model under the plan."""
    passes = {place: pass_of(load, priced, setting) for place, load in priced.loads.items()}
    known: dict[tuple[Part, ...], Position] = {}
    found = []
    for parts in parts_of(priced, num_positions):
        key = tuple(parts)
        if key not in known:
            known[key] = _position(priced, parts, passes, setting)
        found.append(known[key])
    return found


def _position(priced: Priced, parts: Sequence[Part], passes: Mapping[tuple[int, int], Timed],
              setting: Setting) -> Position:  # fmt: skip
    plan, stack = setting.plan, setting.stack
    pieces = priced.partition.pieces
    held = _held(priced, parts)
    num_layers = sum(share * pieces[n].layers for n, share in parts)
    launched_s = 0.0 if plan.replayed else num_layers * stack["layer_s"]
    forward = _added([(passes.get((n, FORWARD)), share) for n, share in parts], launched_s)
    backward = _added([(passes.get((n, BACKWARD)), share) for n, share in parts], launched_s)
    if plan.zero >= 2 and plan.sharders > 1:
        forward, backward = _fully_sharded(forward, backward, held, num_layers, setting)
    spent = energy.Activity(0.0, 0.0, 0.0)
    flops = again = 0.0
    for number, share in parts:
        for phase in (FORWARD, BACKWARD):
            load = priced.load(number, phase)
            a = load.activity
            spent += energy.Activity(a.busy_s * share, a.peak_matrix_s * share, a.peak_dram_s * share)
            flops += load.flops * share
            again += load.again_flops * share
    grads, params = _step_traffic(held, setting)
    carried = max((pieces[n].carried_bytes for n, _ in parts), default=0)
    return Position(forward, backward, held, spent, flops, again, num_layers, carried, grads, params,
                    _shard_numel(held, plan))  # fmt: skip


def _added(timed: Sequence[tuple[Timed | None, float]], extra_s: float) -> Timed:
    seconds = weight = compute = 0.0
    exposed: dict[str, float] = {"tp": 0.0, "cp": 0.0, "ep": 0.0}
    for one, share in timed:
        if one is None:
            continue
        seconds += one.seconds * share
        weight += one.weight_s * share
        compute += one.compute_s * share
        for name, value in one.exposed.items():
            exposed[name] += value * share
    return Timed(seconds + extra_s, weight, exposed, compute + extra_s)


def _held(priced: Priced, parts: Sequence[Part]) -> Held:
    pieces = priced.partition.pieces
    return Held(
        sum(pieces[n].param_numel * s for n, s in parts),
        sum(pieces[n].expert_numel * s for n, s in parts),
        sum(pieces[n].frozen_numel * s for n, s in parts),
        max(((pieces[n].param_numel + pieces[n].expert_numel + pieces[n].frozen_numel) / max(1, pieces[n].layers)
             for n, _ in parts), default=0.0),
        sum(pieces[n].saved_bytes * s for n, s in parts),
        max((pieces[n].working_bytes for n, _ in parts), default=0),
    )  # fmt: skip


def _shard_numel(held: Held, plan: Plan) -> float:
    if plan.zero == 0:
        return held.numel + held.expert_numel
    return held.numel / plan.sharders + held.expert_numel / plan.expert_dp


def grad_bytes(plan: Plan) -> float:
    return dtype(plan.reduce_dtype).itemsize


def param_bytes(plan: Plan) -> float:
    """Bytes of a parameter as it travels: gathered in the type products read, where that is known ahead."""
    if plan.narrow_params and not plan.gather_dtype:
        return dtype(recipe(plan.precision).compute).itemsize
    return dtype(plan.gather_dtype or recipe(plan.precision).wide).itemsize


def _traffic(held: Held, fn: str, size: float, setting: Setting, shard: str = "shard") -> float:
    """A collective over the data-parallel ranks, for all of a position's plain and expert parameters."""
    return setting.exchange_s(fn, held.numel * size, shard) + setting.exchange_s(fn, held.expert_numel * size, "edp")


def _step_traffic(held: Held, setting: Setting) -> tuple[float, float]:
    """Gradients reduced and parameters gathered once a step (not under full sharding, which does so all the time)."""
    plan = setting.plan
    if plan.zero >= 2 and plan.sharders > 1:
        return _across_replicas(held, setting), 0.0
    if plan.zero == 0:
        return _traffic(held, "all_reduce", grad_bytes(plan), setting, "dp"), 0.0
    grads = _traffic(held, "reduce_scatter", grad_bytes(plan), setting) + _across_replicas(held, setting)
    return grads, _traffic(held, "all_gather", param_bytes(plan), setting)


def _across_replicas(held: Held, setting: Setting) -> float:
    """Hybrid sharding: groups that hold the same shards average their gradients."""
    size = held.numel * grad_bytes(setting.plan) / setting.plan.sharders
    return setting.exchange_s("all_reduce", size, "replicate")


def _fully_sharded(forward: Timed, backward: Timed, held: Held, num_layers: float,
                   setting: Setting) -> tuple[Timed, Timed]:  # fmt: skip
    """Parameters arrive layer by layer ahead of use, gradients leave behind: the slower of link and compute leads."""
    plan, stack = setting.plan, setting.stack
    num = max(1.0, num_layers)
    gather = _traffic(held, "all_gather", param_bytes(plan), setting)
    if held.frozen_numel:
        gather += setting.exchange_s("all_gather", held.frozen_numel * param_bytes(plan), "shard")
    reduce = _traffic(held, "reduce_scatter", grad_bytes(plan), setting)
    back = (gather if plan.zero >= 3 else 0.0) + reduce
    hides = (plan.overlap_params, plan.overlap_grads)
    return (_paced(forward, gather, num, stack, hides[0]), _paced(backward, back, num, stack, hides[1]))


def _paced(one: Timed, traffic_s: float, num_layers: float, stack: Stack, overlaps: bool) -> Timed:
    """A pass whose layers each wait for ``traffic_s / num_layers`` of transfers issued a layer ahead."""
    if not overlaps:
        late, beside = traffic_s, 0.0
    else:
        beside = min(traffic_s * stack["grads_hidden"], one.seconds)
        late = (traffic_s - beside) + beside / num_layers
    slowed = stack["interference"] * beside
    exposed = {**one.exposed, "dp": late}
    return Timed(one.seconds + late + slowed, one.weight_s, exposed, one.compute_s + slowed)
