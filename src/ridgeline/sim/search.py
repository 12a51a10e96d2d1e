"""The best plan for a model on a cluster: all legal ones, pruned by memory and by bounds, the rest simulated."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ridgeline.dtypes import dtype
from ridgeline.errors import PlanError
from ridgeline.graph import Graph
from ridgeline.hardware import Cluster
from ridgeline.plan import Plan
from ridgeline.plan.legality import Facts, facts_of, problems
from ridgeline.plan.precision import recipe
from ridgeline.plan.schedule import schedule
from ridgeline.result import Result
from ridgeline.sim.compose import Setting, positions_of
from ridgeline.sim.footprint import STATE_BYTES, footprint
from ridgeline.sim.generation import Stack
from ridgeline.sim.pieces import groups_of
from ridgeline.sim.step import Prices, Step, simulate_step
from ridgeline.units import show_bytes

Progress = Callable[[int, int], None]
CHOICES = ("tp", "pp", "vp", "cp", "ep", "micro_batch", "zero", "recompute", "schedule", "sequence_parallel",
           "overlap_tp", "overlap_grads")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Space:
    """What a search may choose from; empty means whatever divides."""

    tp: tuple[int, ...] = ()
    pp: tuple[int, ...] = ()
    cp: tuple[int, ...] = ()
    ep: tuple[int, ...] = ()
    vp: tuple[int, ...] = (1, 2, 4, 5, 8)
    micro_batch: tuple[int, ...] = ()
    zero: tuple[int, ...] = (1, 3)
    recompute: tuple[str, ...] = ("none", "selective", "full")
    schedule: tuple[str, ...] = ("1f1b",)


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What changing one choice of the winner does: the best step with another value, and why it is worse."""

    choice: str
    value: Any
    step_s: float | None  # None: impossible or out of memory
    why: str


@dataclass(frozen=True, repr=False)
class Search(Result):
    """The best few plans, what became of the others, and how much each choice matters."""

    best: tuple[Step, ...]
    num_candidates: int
    outcomes: Mapping[str, int]  # simulated, out of memory, pruned by bound: adds up to num_candidates
    sensitivity: tuple[Sensitivity, ...]
    frontier: tuple[tuple[float, float, str], ...]  # (step_s, peak_bytes, plan): nothing is better in both
    points: tuple[tuple[float, float], ...]

    def summary(self) -> str:
        outcomes = ", ".join(f"{num:,} {what}" for what, num in self.outcomes.items())
        return f"{self.best[0].summary()}; best of {self.num_candidates:,} plans ({outcomes})"

    def records(self) -> list[dict[str, Any]]:
        """One row a plan, the best first."""
        return [{"plan": step.plan.words(), "step_s": step.step_s, "mfu_frac": step.mfu_frac,
                 "peak_bytes": step.peak_bytes, "exposed_s": step.exposed_s, "usd": step.usd}
                for step in self.best]  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        return {
            "num_candidates": self.num_candidates, "outcomes": dict(self.outcomes),
            "best": [step.to_dict() for step in self.best],
            "sensitivity": [{"choice": s.choice, "value": s.value, "step_s": s.step_s, "why": s.why}
                            for s in self.sensitivity],
            "frontier": [{"step_s": t, "peak_bytes": b, "plan": p} for t, b, p in self.frontier],
        }  # fmt: skip


GraphOf = Callable[[int], Graph]
"""The training graph of a micro-batch of so many samples."""


def micro_batches(facts: Facts, space: Space) -> tuple[int, ...]:
    """Those asked for, else more where samples are small."""
    # Tokens below which, as with images, eight samples are too few for a device
    return space.micro_batch or ((1, 4, 16, 32, 64, 128, 256) if facts.seq <= 512 else (1, 2, 4, 8))


def candidates(facts: Facts, cluster: Cluster, base: Plan, space: Space) -> Iterator[Plan]:
    """Every legal plan of the space, batches and precision as in ``base``."""
    devices = cluster.num_devices
    powers = [d for d in (1, 2, 4, 8, 16, 32, 64, 128) if devices % d == 0]
    tps = space.tp or tuple(d for d in powers if d <= max(cluster.devices_per_host, min(16, cluster.domain_size)))
    pps = space.pp or tuple(d for d in range(1, min(64, facts.layers) + 1) if devices % d == 0)
    cps = space.cp or tuple(d for d in powers if d == 1 or facts.seq // d >= 2048)
    eps = space.ep or (tuple(d for d in powers if facts.experts % d == 0) if facts.experts else (1,))
    for tp in tps:
        for pp in pps:
            for cp in cps:
                if devices % (tp * pp * cp) == 0:
                    sized = replace(base, tp=tp, pp=pp, cp=cp, dp=devices // (tp * pp * cp))
                    yield from _finer(sized, facts, cluster, space, eps)


def _finer(sized: Plan, facts: Facts, cluster: Cluster, space: Space, eps: Iterable[int]) -> Iterator[Plan]:
    for ep in eps:
        for micro in micro_batches(facts, space):
            for zero in space.zero if sized.dp * sized.cp > 1 else (0,):
                # Selective recomputation is of attention: without any it is no choice
                for recompute in [name for name in space.recompute if facts.heads or name != "selective"]:
                    for vp in space.vp if sized.pp > 1 else (1,):
                        for name in ("interleaved",) if vp > 1 else space.schedule if sized.pp > 1 else ("1f1b",):
                            made = replace(sized, ep=ep, micro_batch=micro, zero=zero, recompute=recompute, vp=vp,
                                           schedule=name, overlap_tp=sized.tp > 1)  # fmt: skip
                            if not problems(made, facts, cluster):
                                yield made


def search(graph_of: GraphOf, cluster: Cluster, stack: Stack, base: Plan, space: Space | None = None, *, top: int = 5,
           progress: Progress | None = None, prices: Prices | None = None) -> Search:  # fmt: skip
    """Simulate what could still win, cheapest lower bound first."""
    return _Search(graph_of, cluster, stack, base, space or Space(), top, prices or Prices(1024)).run(progress)


class _Search:
    def __init__(self, graph_of: GraphOf, cluster: Cluster, stack: Stack, base: Plan, space: Space, top: int,
                 prices: Prices) -> None:  # fmt: skip
        self.cluster, self.stack, self.base, self.space, self.top = cluster, stack, base, space, top
        self.prices, self.graphs, self.graph_of = prices, dict[int, Graph](), graph_of
        self.facts = facts_of(self.graph(base.micro_batch))
        self.outcomes: Counter[str] = Counter()
        self.points: list[tuple[float, float, str]] = []
        self.num_params = self.graph(base.micro_batch).num_params

    def graph(self, micro_batch: int) -> Graph:
        if micro_batch not in self.graphs:
            self.graphs[micro_batch] = self.graph_of(micro_batch)
        return self.graphs[micro_batch]

    def run(self, progress: Progress | None) -> Search:
        everyone = list(candidates(self.facts, self.cluster, self.base, self.space))
        if not everyone:
            raise PlanError("no legal plan: the batch, the sequence or the number of devices divides by nothing usable")
        bounded = []
        for number, plan in enumerate(everyone):
            bound_s = self._bound_s(plan)
            if bound_s is not None:
                bounded.append((bound_s, number, plan))
            if progress and number % 64 == 0:
                progress(number // 2, len(everyone))
        bounded.sort(key=lambda item: item[:2])
        best = self._simulated(bounded, len(everyone), progress)
        if not best:
            raise PlanError(
                f"none of {len(everyone):,} legal plans fits in {self.cluster.device.name}: "
                "use more devices, a shorter sequence, a smaller batch, or offload"
            )
        return Search(tuple(best), len(everyone), dict(self.outcomes), tuple(self._sensitivity(best[0])),
                      tuple(_frontier(self.points)), tuple((t, b) for t, b, _ in self.points[:4000]))  # fmt: skip

    def _simulated(self, bounded: list[tuple[float, int, Plan]], total: int, progress: Progress | None) -> list[Step]:
        best: list[Step] = []
        for number, (bound_s, _, plan) in enumerate(bounded):
            if len(best) >= self.top and bound_s >= best[-1].step_s:
                self.outcomes["pruned by bound"] += len(bounded) - number
                break
            step = simulate_step(self.graph(plan.micro_batch), plan, self.cluster, self.stack, prices=self.prices)
            self.points.append((step.step_s, step.peak_bytes, plan.words()))
            self.outcomes["simulated" if step.fits else "out of memory"] += 1
            if not step.fits:
                continue
            best = sorted([*best, step], key=lambda s: s.step_s)[: self.top]
            if progress and number % 8 == 0:
                progress(total // 2 + number * total // (2 * len(bounded)), total)
        if progress:
            progress(total, total)
        return best

    def _bound_s(self, plan: Plan) -> float | None:
        """No schedule is faster than its busiest stage's compute; None if the plan cannot fit."""
        if self._least_bytes(plan) > self.cluster.device.dram.capacity_bytes:
            self.outcomes["out of memory"] += 1
            return None
        priced = self.prices.priced(self.graph(plan.micro_batch), plan, self.cluster)
        setting = Setting(plan, self.cluster, self.stack, groups_of(self.cluster, plan), 1.0, priced.wall_factor)
        order = schedule(plan.schedule, plan.pp, max(2, plan.pp + plan.pp % 2), plan.vp)
        positions = positions_of(priced, order.num_positions, setting)
        stages = [[positions[order.position(s, c)] for c in range(order.num_chunks)] for s in range(plan.pp)]
        memory = footprint(0, [p.held for p in stages[0]], order, plan, self.cluster.device.dram.capacity_bytes)
        if not memory.fits and plan.num_micro_batches >= plan.pp:
            self.outcomes["out of memory"] += 1
            return None
        num = plan.num_micro_batches / (2 if order.mirrored else 1)
        busiest = max(sum(p.forward.seconds + p.backward.seconds for p in stage) for stage in stages)
        ramp = 0.0 if plan.pp == 1 else (plan.pp - 1) / plan.vp / plan.pp * 0.5 * sum(
            p.forward.seconds for p in positions) / max(1, plan.vp)  # fmt: skip
        return num * busiest + ramp

    def _least_bytes(self, plan: Plan) -> float:
        """Weights, gradients and states alone, perfectly spread."""
        per = recipe(plan.precision).kept_bytes(plan.narrow_params) / (plan.sharders if plan.zero >= 3 else 1)
        per += dtype(plan.reduce_dtype).itemsize / (plan.sharders if plan.zero >= 2 else 1)
        per += STATE_BYTES[plan.optimizer] / (plan.sharders if plan.zero >= 1 else 1)
        return self.num_params / (plan.tp * plan.pp * max(1, plan.ep)) * per

    def _sensitivity(self, best: Step) -> Iterator[Sensitivity]:
        """Change one choice at a time, keep the rest as near as is legal."""
        for choice in CHOICES:
            for value in self._others(choice, best.plan):
                yield self._changed(best, choice, value)

    def _others(self, choice: str, plan: Plan) -> list[Any]:
        now = getattr(plan, choice)
        if isinstance(now, bool):
            return [not now] if choice != "overlap_tp" or plan.tp > 1 else []
        if choice == "recompute":
            return [v for v in ("none", "selective", "full") if v != now]
        if choice == "schedule":
            return [v for v in ("1f1b", "gpipe", "zero-bubble") if plan.pp > 1 and v != now and plan.vp == 1]
        if choice == "zero":
            return [v for v in (0, 1, 2, 3) if v != now and plan.dp * plan.cp > 1]
        if choice == "ep" and not self.facts.experts:
            return []
        return sorted({max(1, now // 2), now * 2} - {now})

    def _changed(self, best: Step, choice: str, value: Any) -> Sensitivity:
        plan = replace(best.plan, **{choice: value})
        if choice in ("tp", "pp", "cp"):
            inner = plan.tp * plan.pp * plan.cp
            if self.cluster.num_devices % inner:
                return Sensitivity(choice, value, None, "does not divide the devices")
            plan = replace(plan, dp=self.cluster.num_devices // inner)
            plan = plan if plan.pp > 1 else replace(plan, vp=1, schedule="1f1b")
        wrong = problems(plan, self.facts, self.cluster)
        if wrong:
            return Sensitivity(choice, value, None, wrong[0].why)
        step = simulate_step(self.graph(plan.micro_batch), plan, self.cluster, self.stack, prices=self.prices)
        if not step.fits:
            missing = step.peak_bytes - self.cluster.device.dram.capacity_bytes
            return Sensitivity(choice, value, None, f"misses {show_bytes(missing)} of memory")
        return Sensitivity(choice, value, step.step_s, _difference(best, step))


def _difference(best: Step, other: Step) -> str:
    """The part of the step that grew most, per sample of work."""
    scale = best.step_s and other.step_s / best.step_s
    grown = {name: other.parts[name] - best.parts[name] for name in best.parts}
    name = max(grown, key=lambda n: grown[n]) if scale >= 1.0 else min(grown, key=lambda n: grown[n])
    words = {"tp": "exposed tensor-parallel traffic", "cp": "exposed context traffic", "ep": "expert exchange",
             "dp": "gradient and parameter traffic", "other": "overheads"}  # fmt: skip
    return f"{'more' if grown[name] > 0 else 'less'} {words.get(name, name)}"


def _frontier(points: list[tuple[float, float, str]]) -> Iterator[tuple[float, float, str]]:
    """Plans that nothing beats in both time and memory."""
    least = math.inf
    for step_s, peak, words in sorted(points):
        if peak < least:
            least = peak
            yield step_s, peak, words
