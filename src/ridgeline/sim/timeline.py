"""A simulated step as a Trace: one rank for each pipeline stage, compute and communication streams, memory beside."""

from __future__ import annotations

from collections.abc import Iterator

from ridgeline.plan.schedule import schedule
from ridgeline.sim.compose import Position, Timed
from ridgeline.sim.pipeline import Done, Timeline, run_pipeline
from ridgeline.sim.step import Step
from ridgeline.trace import Kind, Trace, TraceBuilder

COMPUTE, COMMUNICATION = 7, 20
"""Streams of a simulated rank."""
MAX_PASSES = 20_000
PHASES = {"F": "forward", "B": "backward", "W": "backward"}
COLLECTIVE = {"tp": "tensor-parallel exchange", "cp": "context exchange", "ep": "expert all-to-all",
              "dp": "parameters and gradients"}  # fmt: skip


def timeline_of(step: Step) -> Trace:
    """Every pass of every stage, layer by layer; equal ranks are shown once, by the first of their stage."""
    walked = _full(step)
    title = f"{step.model} on {step.cluster.name}, {step.plan.words()}, simulated"
    made = TraceBuilder(name=title)
    made.describe(devices=[{"name": step.cluster.device.name}], origin="simulated")
    if walked.skipped_s:
        made.note(f"a steady stretch of {walked.skipped_s:.4g} s, every round like the one shown, is left out")
    made.note(f"{step.plan.world:,} ranks; each stage is shown by its first rank, the others are equal to it")
    per_stage = step.plan.tp * step.plan.cp * step.plan.dp
    for stage, done in enumerate(walked.done):
        _stage(made, step, stage, stage * per_stage, done, walked)
    return made.build()


def _full(step: Step) -> Timeline:
    """All micro-batches if that is not too many, else the walked ones."""
    plan = step.plan
    if not step.timeline.skipped_s or plan.pp * plan.vp * plan.num_micro_batches * 2 > MAX_PASSES:
        return step.timeline
    order = schedule(plan.schedule, plan.pp, plan.num_micro_batches, plan.vp)
    return run_pipeline(order, step.run.passes, step.run.slow)


def _stage(made: TraceBuilder, step: Step, stage: int, rank: int, done: tuple[Done, ...], walked: Timeline) -> None:
    lanes = f"stage {stage} compute", f"stage {stage} communication"
    end_s, last_s = walked.end_s[stage] - walked.skipped_s, max(walked.end_s) - walked.skipped_s
    splits = any(one.work.kind == "W" for one in done)
    narrow = next((name for name in ("fp4", "fp8") if name in step.plan.precision), "bf16")
    # A floor must hold for products in the narrowest type of the plan, whatever utilizations are counted against.
    peak_flops_per_s = max(step.peak_flops_per_s, step.cluster.device.peak_flops_per_s("tensor", narrow))
    at_s = 0.0
    for one in done:
        if one.start_s > at_s:
            made.add("bubble", lanes[0], at_s, one.start_s - at_s, kind=Kind.BUBBLE, device=0, stream=COMPUTE,
                     rank=rank, step=0, extra={"stage": stage})  # fmt: skip
        _pass(made, step, one, rank, lanes, splits, peak_flops_per_s)
        at_s = one.end_s
    tail_s = step.tail_s[stage]
    if tail_s:
        made.add("reduce gradients", lanes[1], end_s, tail_s, kind=Kind.COMMUNICATION, device=0,
                 stream=COMMUNICATION, rank=rank, step=0, phase="backward",
                 extra={"stage": stage, "collective": "reduce_scatter", "group": "dp"})  # fmt: skip
    ready_s = max(last_s, max(e + t for e, t in zip(walked.end_s, step.tail_s, strict=True)) - walked.skipped_s)
    made.add("optimizer", lanes[0], ready_s, step.parts["optimizer"], kind=Kind.KERNEL, device=0, stream=COMPUTE,
             rank=rank, step=0, phase="optimizer", op="optimizer", extra={"stage": stage})  # fmt: skip
    made.add("step", f"stage {stage}", 0.0, ready_s + step.parts["optimizer"], kind=Kind.STEP, rank=rank, step=0)
    _memory(made, step, stage, done)


def _pass(
    made: TraceBuilder, step: Step, one: Done, rank: int, lanes: tuple[str, str], splits: bool, peak_flops_per_s: float
) -> None:
    position = step.positions[step.order.position(one.stage, one.work.chunk)]
    phase = PHASES[one.work.kind]
    name = f"{phase} {one.work.micro}" if one.work.kind != "W" else f"weight gradients {one.work.micro}"
    extra = {"stage": one.stage, "microbatch": one.work.micro}
    module = f"chunk{one.work.chunk}"
    at_s = one.start_s
    layers = max(1, round(position.num_layers)) if one.work.kind != "W" else 1
    # A third of a micro-batch's products is the forward pass, and where weight gradients are apart, each of the others.
    thirds = 2 if one.work.kind == "B" and not splits else 1
    floor_s = (position.flops - position.again_flops) * thirds / 3 / peak_flops_per_s / layers
    for layer, part, seconds in _slices(step, position, one):
        where = f"{module}.layer{layer}"
        if part == "compute":
            priced = {**extra, "floor_s": min(floor_s, seconds)}
            made.add(name, lanes[0], at_s, seconds, kind=Kind.KERNEL, device=0, stream=COMPUTE, rank=rank, step=0,
                     module=where, op=phase, phase=phase, extra=priced)  # fmt: skip
        else:
            made.add(COLLECTIVE[part], lanes[1], at_s, seconds, kind=Kind.COMMUNICATION, device=0,
                     stream=COMMUNICATION, rank=rank, step=0, module=where, phase=phase,
                     extra={**extra, "group": part})  # fmt: skip
        at_s += seconds


def _slices(step: Step, position: Position, one: Done) -> Iterator[tuple[int, str, float]]:
    """(layer, compute or the group that talks, seconds), filling the pass exactly."""
    length = one.end_s - one.start_s
    if one.work.kind == "W":
        yield 0, "compute", length
        return
    timed: Timed = position.forward if one.work.kind == "F" else position.backward
    exposed = {name: seconds for name, seconds in timed.exposed.items() if seconds > 0.0}
    scale = min(1.0, length / max(1e-12, timed.seconds))
    layers = max(1, round(position.num_layers))
    for layer in range(layers):
        talked = 0.0
        parts = {name: seconds * scale / layers for name, seconds in exposed.items()}
        talked = sum(parts.values())
        yield layer, "compute", max(0.0, length / layers - talked)
        yield from ((layer, name, seconds) for name, seconds in parts.items())


def _memory(made: TraceBuilder, step: Step, stage: int, done: tuple[Done, ...]) -> None:
    over = step.footprints[stage].over_time
    for one, (_, live_bytes) in zip(done, over, strict=False):
        made.count(f"memory_bytes stage {stage}", one.start_s, live_bytes)
