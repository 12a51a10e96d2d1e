"""Memory of a rank: parameters, gradients, optimizer states, activations in flight, buffers, and what fragments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ridgeline.cost.memory import memory_of
from ridgeline.dtypes import dtype
from ridgeline.graph import Graph
from ridgeline.plan import Plan
from ridgeline.plan.precision import recipe
from ridgeline.plan.schedule import BACKWARD, FORWARD, WEIGHT, Schedule

CONTEXT_BYTES = 0.9e9
"""CUDA context, library handles and workspaces of a training process on a data-center GPU (assumed: 0.6 to 1.2 GB)."""
FRAGMENTED_FRAC = 0.04
"""Share of the allocated bytes that the caching allocator cannot hand out (assumed; PyTorch reports 2 to 8 %)."""
OFFLOADED_FRAC = 0.9
"""Share of the saved activations that offloading keeps on the host; the rest is the layer that computes (assumed)."""
LATE_FRAC = 0.5
"""Share of a layer's kept activations that weight gradients run apart still need: the inputs of its products."""
STATE_BYTES = {"adamw": 12.0, "sgd": 8.0, "adamw-8bit": 6.0, "adamw-no-master": 4.0}
"""Master copy and moments of a parameter: 4 + 4 + 4; 4 + 4; 4 + 1 + 1; 2 + 2."""


@dataclass(frozen=True, slots=True)
class Held:
    """Elements and activation bytes of one model position: what a stage's chunk holds."""

    numel: float
    expert_numel: float
    frozen_numel: float
    largest_layer_numel: float
    saved_bytes: float  # of one micro-batch, its chunk
    working_bytes: float  # alive only while a pass runs


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of a rank of one stage by what they are, at the peak, and activations over the schedule."""

    stage: int
    by_kind: Mapping[str, float]
    over_time: tuple[tuple[int, float], ...]  # (number of passes run, live bytes)
    capacity_bytes: float

    @property
    def peak_bytes(self) -> float:
        return sum(self.by_kind.values())

    @property
    def allocated_bytes(self) -> float:
        """What the framework's allocator hands out at the peak: no context, no buffers of its libraries."""
        return self.peak_bytes - sum(self.by_kind.get(k, 0.0) for k in ("context", "buffers", "fragments"))

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.capacity_bytes


def footprint(stage: int, held: Sequence[Held], order: Schedule, plan: Plan, capacity_bytes: float) -> Footprint:
    """The peak of a stage that holds these chunks, in the order its passes run."""
    static = static_bytes(held, plan)
    offloaded = 1.0 - OFFLOADED_FRAC if plan.offload == "activations" else 1.0
    saved = [h.saved_bytes * offloaded for h in held]
    working = max((h.working_bytes for h in held), default=0.0)
    live, peak, curve = 0.0, 0.0, []
    freed = {BACKWARD: 1.0 - LATE_FRAC, WEIGHT: LATE_FRAC} if order.split else {BACKWARD: 1.0}
    for number, work in enumerate(order.orders[stage]):
        if work.kind == FORWARD:
            live += saved[work.chunk]
        peak = max(peak, live)
        curve.append((number, live))
        live -= saved[work.chunk] * freed.get(work.kind, 0.0)
    base = sum(static.values())
    kinds = {**static, "activations": peak, "working": working}
    # What a communicator keeps for its channels' buffers (assumed; NCCL's default is 4 MB a channel and peer)
    kinds["buffers"] = 0.15e9 * sum(n > 1 for n in (plan.tp, plan.cp, plan.dp * plan.cp, plan.pp, plan.ep))
    kinds["fragments"] = FRAGMENTED_FRAC * (sum(kinds.values()))
    kinds["context"] = CONTEXT_BYTES
    fixed = base + working + kinds["buffers"] + kinds["fragments"] + CONTEXT_BYTES
    return Footprint(stage, kinds, tuple((n, fixed + b) for n, b in curve), capacity_bytes)


def footprint_of_graph(graph: Graph, capacity_bytes: float) -> Footprint:
    """The peak of one rank that runs the whole graph once, by the liveness of its values, as ``predict`` has it."""
    live = memory_of(graph)
    kinds = {"parameters": 0.0, "gradients": 0.0, "optimizer": 0.0, "activations": 0.0}
    named = {"param": "parameters", "buffer": "parameters", "grad": "gradients", "state": "optimizer"}
    for kind, num_bytes in live.by_kind.items():
        kinds[named.get(kind, "activations")] += num_bytes
    kinds["fragments"] = FRAGMENTED_FRAC * sum(kinds.values())
    kinds["context"] = CONTEXT_BYTES
    fixed = kinds["fragments"] + CONTEXT_BYTES
    return Footprint(0, kinds, tuple((n, num_bytes + fixed) for n, num_bytes in live.timeline), capacity_bytes)


def static_bytes(held: Sequence[Held], plan: Plan) -> dict[str, float]:
    """Parameters, gradients and optimizer states, shared out as the plan says."""
    plain, expert = sum(h.numel for h in held), sum(h.expert_numel for h in held)
    frozen = sum(h.frozen_numel for h in held)
    kept = recipe(plan.precision).kept_bytes(plan.narrow_params)
    grad = dtype(plan.reduce_dtype).itemsize
    state = STATE_BYTES[plan.optimizer]
    if plan.precision in ("fp32", "tf32"):  # the parameters are their own master copy
        state += 4.0 if plan.optimizer == "adamw-no-master" else -4.0
    ranks, expert_ranks = float(plan.sharders), float(plan.expert_dp)
    split = {stage: (ranks if plan.zero >= stage else 1.0, expert_ranks if plan.zero >= stage else 1.0)
             for stage in (1, 2, 3)}  # fmt: skip

    def shared(num_bytes: float, stage: int) -> float:
        return num_bytes * (plain / split[stage][0] + expert / split[stage][1])

    found = {
        "parameters": shared(kept if plan.zero < 3 else 0.0, 3) + frozen * kept / (ranks if plan.zero >= 3 else 1.0),
        "gradients": shared(grad, 2),
        "optimizer": 0.0 if plan.offload == "optimizer" else shared(state, 1),
    }
    if plan.zero >= 3:  # two layers are whole at a time: one computes, the next arrives
        wide = dtype(recipe(plan.precision).wide).itemsize
        found["gathered"] = 2 * max((h.largest_layer_numel for h in held), default=0.0) * wide
    return found
