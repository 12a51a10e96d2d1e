"""One training step on a cluster: partition, prices, pipeline, gradients, optimizer; and what it all amounts to."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ridgeline.basis import Basis, worst
from ridgeline.cost import energy, interval
from ridgeline.cost.lower.template import Lowering
from ridgeline.cost.price import pricer_of
from ridgeline.errors import PlanError
from ridgeline.graph import Graph, Phase
from ridgeline.hardware import Cluster
from ridgeline.plan import Plan, partition
from ridgeline.plan.schedule import Schedule, schedule
from ridgeline.plan.shard import sequence_of
from ridgeline.result import Result
from ridgeline.sim.compose import Position, Setting, positions_of
from ridgeline.sim.footprint import OFFLOADED_FRAC, Footprint, Held, footprint, footprint_of_graph
from ridgeline.sim.generation import Stack
from ridgeline.sim.pieces import OPTIMIZER, Priced, blended, groups_of, price, wall_factor
from ridgeline.sim.pipeline import Pass, Timeline, run_steady
from ridgeline.units import show_bytes, show_seconds

BUCKET_NUMEL = 40e6
"""Parameters whose gradients travel together (what Megatron and DDP-like trainers use, order of magnitude)."""
OPTIMIZER_BYTES = {"adamw": 30.0, "sgd": 18.0, "adamw-8bit": 18.0, "adamw-no-master": 14.0}
"""Bytes moved per parameter stepped over: gradient, master copy and moments read and written, narrow copy written."""
STREAM_FRAC = 0.8
"""Share of the DRAM bandwidth that optimizer kernels reach (the multi-tensor fits reach 0.75 to 0.87)."""
PARTS = ("compute", "tp", "cp", "ep", "dp", "bubble", "optimizer", "other")


@dataclass(frozen=True, slots=True)
class Trouble:
    """What breaks the symmetry of equal ranks: a slow device or a slow link in one stage."""

    stage: int = 0
    slow_compute: float = 1.0
    slow_link: float = 1.0

    @property
    def is_none(self) -> bool:
        return self.slow_compute == 1.0 and self.slow_link == 1.0


@dataclass(frozen=True, repr=False)
class Step(Result):
    """A simulated step; seconds of ``parts`` are of the stage that ends last and sum to ``step_s``."""

    model: str
    plan: Plan
    cluster: Cluster
    stack: Stack
    step_s: float
    interval_s: tuple[float, float]
    basis: Basis
    tokens: int
    model_flops: float  # of the whole step, all ranks
    device_flops: float  # done by one rank, recomputation included
    parts: Mapping[str, float]
    stages: tuple[Mapping[str, float], ...]
    throttle: float
    num_params: int
    timeline: Timeline
    order: Schedule
    positions: tuple[Position, ...]
    priced: Priced
    tail_s: tuple[float, ...]  # gradients still under way when each stage's passes are done
    run: StepRun = field(repr=False)

    @cached_property
    def footprints(self) -> tuple[Footprint, ...]:
        """Memory of a rank of each stage."""
        return self.run.footprints()

    @cached_property
    def energy_j(self) -> float:
        """Joules of all devices and their hosts."""
        return self.run.energy_j()

    @property
    def unit(self) -> str:
        """What ``tokens`` counts: images and other samples have none inside."""
        return "sample" if self.tokens == self.plan.global_batch else "token"

    @property
    def tokens_per_s_per_device(self) -> float:
        return self.tokens / self.step_s / self.plan.world

    @property
    def peak_flops_per_s(self) -> float:
        """The matrix peak that utilizations are counted against: bf16, or what the device has nearest to it."""
        name = "bf16" if self.plan.precision not in ("fp32", "tf32") else self.plan.precision
        unit = "vector" if name == "fp32" else "tensor"
        return self.cluster.device.peak_flops_per_s(unit, name)

    @property
    def flops_per_s_per_device(self) -> float:
        return self.model_flops / self.step_s / self.plan.world

    def summary(self) -> str:
        low, high = (show_seconds(s) for s in self.interval_s)
        return (
            f"{self.model} on {self.cluster.name}, {self.plan.words()}: {show_seconds(self.step_s)} ({low} to {high}), "
            f"MFU {self.mfu_frac:.0%}, {show_bytes(self.peak_bytes)}"
        )

    def records(self) -> list[dict[str, Any]]:
        """One row a stage: where its time goes, and its memory at the peak."""
        return [{"stage": f.stage, **{f"{name}_s": s for name, s in parts.items()}, "peak_bytes": f.peak_bytes}
                for f, parts in zip(self.footprints, self.stages, strict=True)]  # fmt: skip

    @property
    def mfu_frac(self) -> float:
        """Model arithmetic over the peak; recomputation does not count."""
        return self.flops_per_s_per_device / self.peak_flops_per_s

    @property
    def hfu_frac(self) -> float:
        """Arithmetic done over the peak, recomputation included."""
        again = sum(p.again_flops for p in self.positions) / max(1e-9, sum(p.flops for p in self.positions))
        return self.mfu_frac / max(1e-9, 1.0 - again)

    @property
    def exposed_s(self) -> float:
        return sum(self.parts[name] for name in ("tp", "cp", "ep", "dp"))

    @property
    def bubble_frac(self) -> float:
        return self.parts["bubble"] / self.step_s

    @property
    def usd(self) -> float:
        return self.step_s / 3600.0 * self.cluster.price_usd_per_hour

    @cached_property
    def peak_bytes(self) -> float:
        return max(f.peak_bytes for f in self.footprints)

    @property
    def fits(self) -> bool:
        return all(f.fits for f in self.footprints)

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model, "cluster": self.cluster.name, "num_devices": self.plan.world,
            "plan": self.plan.to_dict(), "stack": self.stack.name, "step_s": self.step_s,
            "interval_s": list(self.interval_s), "basis": str(self.basis), "tokens": self.tokens, "unit": self.unit,
            "tokens_per_s_per_device": self.tokens_per_s_per_device, "mfu_frac": self.mfu_frac,
            "hfu_frac": self.hfu_frac, "flops_per_s_per_device": self.flops_per_s_per_device,
            "model_flops": self.model_flops, "num_params": self.num_params, "parts_s": dict(self.parts),
            "exposed_s": self.exposed_s, "bubble_frac": self.bubble_frac, "throttle": self.throttle,
            "energy_j": self.energy_j, "usd": self.usd, "peak_bytes": self.peak_bytes,
            "capacity_bytes": self.cluster.device.dram.capacity_bytes, "fits": self.fits,
            "memory": [{"stage": f.stage, "peak_bytes": f.peak_bytes, **f.by_kind} for f in self.footprints],
            "stages": [dict(s) for s in self.stages],
        }  # fmt: skip


class Prices:
    """Remembers priced partitions and positions, so that plans which share a rank's graph share its price."""

    def __init__(self, max_kept: int = 256) -> None:
        self.kept: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self.max_kept = max_kept

    def priced(self, graph: Graph, plan: Plan, cluster: Cluster) -> Priced:
        """The price of a plan's rank; recomputing some layers only is a blend of all and none."""
        if not plan.recompute_layers or plan.recompute == "none":
            return self._whole(graph, plan, cluster)
        some = self._whole(graph, plan, cluster)
        others = self._whole(graph, replace(plan, recompute="none"), cluster)
        frac = plan.recompute_layers * plan.pp / max(1, some.partition.num_layers)
        return blended(some, others, min(1.0, frac))

    def _whole(self, graph: Graph, plan: Plan, cluster: Cluster) -> Priced:
        key = (graph.content_hash, plan.key(), cluster.device, cluster.scale_up, cluster.scale_out, cluster.host,
               _spans(cluster, plan))  # fmt: skip
        if key not in self.kept:
            if len(self.kept) >= self.max_kept:
                self.kept.popitem(last=False)
            made = partition(graph, plan, fused=plan.execution == "compiled")
            self.kept[key] = price(made, cluster, plan)
        found: Priced = self.kept[key]
        return found

    def flops(self, graph: Graph, cluster: Cluster) -> float:
        key = ("flops", graph.content_hash)
        if key not in self.kept:
            self.kept[key] = model_flops(graph, cluster)
        found: float = self.kept[key]
        return found


def _spans(cluster: Cluster, plan: Plan) -> tuple[Any, ...]:
    """Which groups a rank's graph talks to; the data and pipeline axes do not matter to it."""
    groups = groups_of(cluster, plan)
    return tuple(groups.get(name) for name in ("tp", "cp", "ep", "etp", "ring"))


PRICES = Prices()


def model_flops(graph: Graph, cluster: Cluster) -> float:
    """Matrix arithmetic of one micro-batch, forward and backward, on no particular plan."""
    pricer, networked = pricer_of(cluster.device), replace(graph, meta={**graph.meta, "networked": True})
    lowering = Lowering(networked, pricer.chip.arch, pricer.lowered)
    counted = [(lowering.lowered(n)[0], times) for n, times in graph.nodes() if n.phase is not Phase.OPTIMIZER]
    return sum(work.matrix_flops * times for work, times in counted)


def simulate_step(graph: Graph, plan: Plan, cluster: Cluster, stack: Stack, *, trouble: Trouble | None = None,
                  prices: Prices = PRICES) -> Step:  # fmt: skip
    """One step of a training graph (one micro-batch, unsharded) under ``plan`` on ``cluster``."""
    priced = prices.priced(graph, plan, cluster)
    run = StepRun(graph, plan, cluster, stack, priced, trouble)
    stretch = run.throttle()
    if stretch != 1.0:
        run = StepRun(graph, plan, cluster, stack, priced, trouble, stretch)
    return run.result(stretch, prices.flops(graph, cluster))


class StepRun:
    """The step put together: passes of the pipeline, gradients behind it, the optimizer, and the frame around."""

    def __init__(self, graph: Graph, plan: Plan, cluster: Cluster, stack: Stack, priced: Priced,
                 trouble: Trouble | None, stretch: float = 1.0) -> None:  # fmt: skip
        self.graph, self.plan, self.cluster, self.stack, self.priced = graph, plan, cluster, stack, priced
        self.trouble, self.stretch = trouble or Trouble(), stretch
        if not 0 <= self.trouble.stage < plan.pp:
            raise PlanError(f"no stage {self.trouble.stage}: the plan has {plan.pp}, counted from 0")
        factor = priced.wall_factor if stretch == 1.0 or plan.world > 1 else wall_factor(priced, stretch)
        self.setting = Setting(plan, cluster, stack, groups_of(cluster, plan), stretch, factor)
        self.order = schedule(plan.schedule, plan.pp, 2 * plan.pp, plan.vp)  # for where chunks lie
        self.positions = positions_of(priced, self.order.num_positions, self.setting)
        self.send_s = self._send_s()
        self.passes = self._passes()
        self.order, self.timeline = self._run()
        self.tails = [self._gradients(stage) for stage in range(plan.pp)]
        self.optimizer_s = self._optimizer_s()
        self.compute_end_s = max(e + t for e, t in zip(self.timeline.end_s, self.tails, strict=True))
        # What surrounds the passes: the step's own overhead, and waiting for the slowest of many ranks
        base = self.compute_end_s + self.optimizer_s
        hosts = max(1.0, self.plan.world / self.cluster.host.num_devices)
        self.frame_s = self.stack["step_s"] + base * self.stack["straggle"] * math.log2(hosts)

    def _send_s(self) -> float:
        if self.plan.pp == 1:
            return 0.0
        carried = max(p.carried_bytes for p in self.positions)
        return self.setting.exchange_s("send_recv", carried, "pp")

    def _micro_s(self, at: int) -> float:
        """Entering the model and bookkeeping, at the position that starts a micro-batch."""
        if at or self.plan.replayed:
            return 0.0
        return self.priced.entry_s + self.stack["micro_s"]

    def _passes(self) -> list[Pass]:
        plan, kappa = self.plan, self.stack["interference"]
        found, arrived = [], 0.0
        for at, p in enumerate(self.positions):
            buckets = max(1.0, (p.held.numel + p.held.expert_numel) / BUCKET_NUMEL)
            copied_s = self._copied_s(p)
            forward = max(p.forward.seconds + self._micro_s(at), copied_s)
            first = ready = 0.0
            if plan.overlap_params and p.params_s:
                chunk = at // plan.pp
                arrived = (arrived if at % plan.pp and chunk else 0.0) if plan.vp == 1 else arrived
                whole = p.params_s * (chunk + 1)
                ready = max(whole - p.params_s + p.params_s / buckets, whole - forward)
                first = kappa * min(p.params_s, forward)
            last = kappa * min(p.grads_s, p.backward.seconds) if plan.overlap_grads else 0.0
            send = self.send_s * (self.trouble.slow_link if at % plan.pp == self.trouble.stage else 1.0)
            backward = max(p.backward.seconds, copied_s) - p.backward.weight_s
            found.append(Pass(forward, backward, p.backward.weight_s, send, ready, first, last))
        return found

    def _copied_s(self, position: Position) -> float:
        """Saved activations on their way to the host beside the forward pass, or back beside the backward pass."""
        if self.plan.offload != "activations":
            return 0.0
        link = self.cluster.device.link("pcie")
        return position.held.saved_bytes * OFFLOADED_FRAC / (STREAM_FRAC * link.bandwidth_bytes_per_s)

    def _run(self) -> tuple[Schedule, Timeline]:
        plan, self.slow = self.plan, [1.0] * self.plan.pp
        self.slow[self.trouble.stage] = self.trouble.slow_compute
        return run_steady(plan.schedule, plan.pp, plan.num_micro_batches, plan.vp, self.passes, self.slow)

    def _gradients(self, stage: int) -> float:
        """How long after a stage's last pass its gradients are reduced."""
        last = [(*self.timeline.last_backward(stage, c), c) for c in range(self.order.num_chunks)]
        link = self.trouble.slow_link if stage == self.trouble.stage else 1.0
        at = 0.0
        for start, end, chunk in sorted(last, key=lambda item: item[1]):
            p = self.positions[self.order.position(stage, chunk)]
            grads = p.grads_s * link
            if not self.plan.overlap_grads:
                at = max(at, self.timeline.end_s[stage]) + grads
                continue
            buckets = max(1.0, (p.held.numel + p.held.expert_numel) / BUCKET_NUMEL)
            beside = grads * self.stack["grads_hidden"]
            at = max(max(at, start + (end - start) / buckets) + beside, end + beside / buckets) + grads - beside
        return max(0.0, at - self.timeline.end_s[stage])

    def _optimizer_s(self) -> float:
        if (0, OPTIMIZER) in self.priced.loads:
            load = self.priced.loads[0, OPTIMIZER]
            return load.compute_s(self.stack, self.stretch, self.priced.execution) * self.setting.factor
        numel = max(self._stage_numel(stage) for stage in range(self.plan.pp))
        moved = numel * OPTIMIZER_BYTES[self.plan.optimizer]
        seconds = moved / (STREAM_FRAC * self.cluster.device.dram.bandwidth_bytes_per_s)
        if self.plan.offload == "optimizer":
            seconds += numel * 8.0 / self.cluster.device.link("pcie").bandwidth_bytes_per_s
        if not self.plan.overlap_params:
            seconds += max(sum(self.positions[self.order.position(s, c)].params_s for c in range(self.order.num_chunks))
                           for s in range(self.plan.pp))  # fmt: skip
        return seconds

    def _stage_numel(self, stage: int) -> float:
        return sum(self.positions[self.order.position(stage, c)].shard_numel for c in range(self.order.num_chunks))

    @property
    def step_s(self) -> float:
        return self.compute_end_s + self.optimizer_s + self.frame_s

    # Power.

    def activity(self) -> energy.Activity:
        """What the busiest rank does in the step."""
        spent = [self._stage_activity(stage) for stage in range(self.plan.pp)]
        return max(spent, key=lambda a: a.busy_s + a.peak_matrix_s)

    def _stage_activity(self, stage: int) -> energy.Activity:
        num = self.plan.num_micro_batches / (2 if self.order.mirrored else 1)
        found = energy.Activity(0.0, 0.0, 0.0)
        for chunk in range(self.order.num_chunks):
            a = self.positions[self.order.position(stage, chunk)].activity
            found += energy.Activity(a.busy_s * num, a.peak_matrix_s * num, a.peak_dram_s * num)
        if (0, OPTIMIZER) in self.priced.loads:
            return found + self.priced.loads[0, OPTIMIZER].activity
        busy = self.optimizer_s
        return found + energy.Activity(busy, 0.0, busy * STREAM_FRAC)

    def throttle(self) -> float:
        pricer = self.priced.pricer
        power = {**energy.DEFAULTS, **pricer.calibration.power}
        factor = energy.throttle_factor(self.activity(), self.step_s, power, pricer.designed_w, pricer.chip.tdp_w)
        return round(factor, 4) if self.plan.world > 1 else factor

    def energy_j(self) -> float:
        pricer = self.priced.pricer
        power = {**energy.DEFAULTS, **pricer.calibration.power}
        each = [energy.energy_j(self._stage_activity(s), self.step_s, power, pricer.designed_w, pricer.chip.tdp_w)
                for s in range(self.plan.pp)]  # fmt: skip
        devices = sum(each) / self.plan.pp * self.plan.world
        hosts = self.plan.world / self.cluster.host.num_devices  # a device's share of its host
        return devices + (hosts * self.cluster.host.power_w * self.step_s if self.plan.world > 1 else 0.0)

    # Results.

    def _stage_parts(self, stage: int) -> dict[str, float]:
        num = self.plan.num_micro_batches / (2 if self.order.mirrored else 1)
        parts = dict.fromkeys(PARTS, 0.0)
        for chunk in range(self.order.num_chunks):
            p = self.positions[self.order.position(stage, chunk)]
            for one in (p.forward, p.backward):
                for name, seconds in one.exposed.items():
                    parts[name] += seconds * num
        busy = self.timeline.busy_s(stage)
        parts["compute"] = busy - parts["tp"] - parts["cp"] - parts["ep"] - parts["dp"]
        parts["bubble"] = self.timeline.end_s[stage] - busy
        parts["dp"] += self.tails[stage]
        parts["bubble"] += self.compute_end_s - self.timeline.end_s[stage] - self.tails[stage]
        parts["optimizer"] = self.optimizer_s
        parts["other"] = self.frame_s
        return parts

    def footprints(self) -> tuple[Footprint, ...]:
        plan, capacity = self.plan, self.cluster.device.dram.capacity_bytes
        alike = (plan.num_micro_batches, plan.recompute, plan.offload, plan.optimizer, plan.execution)
        if plan.world == 1 and alike == (1, "none", "none", "adamw-no-master", "eager"):
            return (footprint_of_graph(self.graph, capacity),)  # the step is the graph's own
        return tuple(
            footprint(stage, self.held(stage), self.order, self.plan, capacity) for stage in range(self.plan.pp)
        )

    def held(self, stage: int) -> Sequence[Held]:
        return [self.positions[self.order.position(stage, c)].held for c in range(self.order.num_chunks)]

    def result(self, throttle: float, flops: float) -> Step:
        plan = self.plan
        stages = [self._stage_parts(s) for s in range(plan.pp)]
        slowest = min(range(plan.pp), key=lambda s: stages[s]["bubble"])
        tokens = plan.global_batch * max(1, sequence_of(self.graph))
        network = [e.basis for load in self.priced.loads.values() for e in load.exchanges]
        basis = worst([self.priced.basis, self.stack.basis, *network]) if plan.world > 1 else self.priced.basis
        return Step(
            model=self.graph.name, plan=plan, cluster=self.cluster, stack=self.stack, step_s=self.step_s,
            interval_s=self._interval(basis, stages[slowest]), basis=basis, tokens=tokens,
            model_flops=flops * plan.num_micro_batches * plan.dp,
            device_flops=sum(p.flops for p in self.positions) / plan.pp * plan.num_micro_batches,
            parts=stages[slowest], stages=tuple(stages), throttle=throttle,
            num_params=self.graph.num_params, timeline=self.timeline, order=self.order,
            positions=tuple(self.positions), priced=self.priced, tail_s=tuple(self.tails), run=self,
        )  # fmt: skip

    def _interval(self, basis: Basis, parts: Mapping[str, float]) -> tuple[float, float]:
        """Kernels' errors on compute, the network's on what is exposed, the software's on everything."""
        step = self.step_s
        network = (parts["tp"] + parts["cp"] + parts["ep"] + parts["dp"]) / step
        own = self.priced.width * (1.0 - network)
        width = math.hypot(own, 0.35 * network)
        if self.plan.world > 1 or self.stack.name != "plain":
            # A stack's own spread holds most of the kernels' error: this share of it is what held 90 % of 452 published
            # steps whose sources were left out of the fit (lab/notes/intervals.md).
            width = math.hypot(width * (1.0 if self.stack.name == "plain" else 0.3), self.stack["spread"])
        low, high = interval.factors(width)
        return step * low, step * high
