"""A simulated training step in the terminal: the answer, where the time goes, memory by stage, and the whole run."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ridgeline.cli import draw
from ridgeline.sim.campaign import Campaign
from ridgeline.sim.footprint import Footprint
from ridgeline.sim.step import PARTS, Step
from ridgeline.units import show_bytes, show_flops, show_seconds

PART_NAMES = {"compute": "compute", "tp": "tensor-parallel exchange", "cp": "context exchange", "ep": "expert exchange",
              "dp": "gradients and parameters", "bubble": "pipeline bubble", "optimizer": "optimizer",
              "other": "overheads and stragglers"}  # fmt: skip
PART_STYLES = {"compute": "green", "tp": "cyan", "cp": "blue", "ep": "magenta", "dp": "bright_cyan",
               "bubble": "yellow", "optimizer": "bright_magenta", "other": "red"}  # fmt: skip


def show_step(step: Step, run: Campaign | None) -> None:
    """Print the whole answer."""
    out = draw.console()
    out.print(summary(step, out.width))
    out.print()
    out.print(breakdown(step, out.width))
    out.print()
    out.print(memory(step, out.width))
    if run is not None:
        out.print()
        out.print(whole_run(run))
    if not step.fits:
        worst = max(step.footprints, key=lambda f: f.peak_bytes)
        missing = worst.peak_bytes - worst.capacity_bytes
        fix = "raise tp, pp or zero, recompute, or take a smaller micro-batch; `ridgeline plan` finds plans that fit"
        out.print(Text(f"• stage {worst.stage} misses {show_bytes(missing)}: {fix}", style="red"))


def summary(step: Step, width: int) -> RenderableType:
    """The panel that answers the question."""
    left, right = draw.grid(_time_lines(step)), draw.grid(_need_lines(step))
    body: RenderableType = Group(left, Text(), right)
    if width >= 118:
        body = Table.grid(padding=(0, 3), expand=True)
        body.add_column(ratio=1)
        body.add_column(ratio=1)
        body.add_row(left, right)
    title = Text.assemble((f" {step.model} ", "bold"), ("on ", draw.DIM), (step.cluster.name, "bold"),
                          (f" · {step.plan.words()} ", draw.DIM))  # fmt: skip
    return Panel(body, title=title, title_align="left", box=box.ROUNDED, border_style="cyan", padding=(0, 1))


def _batch(step: Step) -> str:
    batch, num = step.plan.global_batch, step.plan.num_micro_batches
    held = f"{batch:,} samples" if step.unit == "sample" else f"{batch:,} sequences, {step.tokens:,} tokens"
    return f"{held}, {num:,} micro-batch{'' if num == 1 else 'es'} a rank"


def _time_lines(step: Step) -> list[draw.Line]:
    low, high = (show_seconds(s) for s in step.interval_s)
    return [
        ("step", Text.assemble((show_seconds(step.step_s), "bold"), (f"  90 % interval {low} … {high}", draw.DIM))),
        ("utilization", Text.assemble((f"MFU {draw.percent(step.mfu_frac)}", "bold"),
                                      (f"  HFU {draw.percent(step.hfu_frac)}, "
                                       f"{show_flops(step.flops_per_s_per_device)}/s a device", draw.DIM))),
        ("throughput", f"{step.tokens_per_s_per_device:,.0f} {step.unit}s/s a device, "
                       f"{step.tokens_per_s_per_device * step.plan.world:,.0f} in all"),
        ("exposed traffic", f"{show_seconds(step.exposed_s)} ({draw.percent(step.exposed_s / step.step_s)})"),
        ("bubble", f"{show_seconds(step.parts['bubble'])} ({draw.percent(step.bubble_frac)})"),
        ("clock", "not limited by power" if step.throttle <= 1.0 else
         f"matrix kernels {step.throttle:.2f}× slower at the power limit"),
    ]  # fmt: skip


def _need_lines(step: Step) -> list[draw.Line]:
    capacity = step.cluster.device.dram.capacity_bytes
    frac = step.peak_bytes / capacity
    verdict = ("fits", "green") if frac <= 0.95 else ("tight", "yellow") if step.fits else ("does not fit", "bold red")
    hourly = step.cluster.device.price_usd_per_hour
    tensors = max(stage.allocated_bytes for stage in step.footprints)
    return [
        ("memory", Text.assemble((show_bytes(step.peak_bytes), "bold"), (f" of {show_bytes(capacity)}: ", draw.DIM),
                                 verdict, (f", {show_bytes(tensors)} of it tensors", draw.DIM))),
        ("batch", _batch(step)),
        ("parameters", f"{step.num_params / 1e9:,.2f} billion"),
        ("energy", f"{step.energy_j / 3.6e6:,.3g} kWh a step, {step.energy_j / step.tokens:.3g} J a {step.unit}"),
        ("money", f"{draw.money(step.usd)} a step at {draw.money(hourly)} a device-hour"),
        ("basis", Text.assemble(draw.basis(step.basis), (f"  software: {step.stack.title}"
                                                        f" ({step.stack.basis} on {step.stack.device})", draw.DIM))),
    ]  # fmt: skip


def breakdown(step: Step, width: int) -> Table:
    """Where the step's seconds go, on the stage that waits least."""
    made = draw.table("Where the time goes", ("part", "left"), ("time", "right"), ("share", "right"), ("", "left"))
    room = max(10, min(60, width - 52))
    for name in PARTS:
        seconds = step.parts[name]
        if seconds > 0.0:
            made.add_row(PART_NAMES[name], show_seconds(seconds), draw.percent(seconds / step.step_s),
                         draw.bar(seconds / step.step_s, room, PART_STYLES[name]))  # fmt: skip
    return made


def memory(step: Step, width: int) -> Table:
    """Bytes at the peak, a row a stage (only those that differ)."""
    made = draw.table("Memory of a rank at its peak", ("stage", "left"), ("peak", "right"), ("parameters", "right"),
                      ("gradients", "right"), ("optimizer", "right"), ("activations", "right"), ("other", "right"),
                      ("", "left"))  # fmt: skip
    for label, found in _distinct(step):
        kinds = found.by_kind
        known = [kinds.get(k, 0.0) for k in ("parameters", "gradients", "optimizer", "activations")]
        rest = found.peak_bytes - sum(known)
        frac = found.peak_bytes / found.capacity_bytes
        style = "green" if frac <= 0.95 else "yellow" if found.fits else "red"
        made.add_row(label, show_bytes(found.peak_bytes), *(show_bytes(b) for b in known), show_bytes(rest),
                     draw.bar(frac, max(8, min(24, width - 92)), style))  # fmt: skip
    return made


def _distinct(step: Step) -> list[tuple[str, Footprint]]:
    """Stages with equal memory under one label; at most eight."""
    groups: list[tuple[list[int], Footprint]] = []
    for found in step.footprints:
        if groups and abs(groups[-1][1].peak_bytes - found.peak_bytes) < 1e6:
            groups[-1][0].append(found.stage)
        else:
            groups.append(([found.stage], found))
    shown = groups if len(groups) <= 8 else [*groups[:4], *groups[-3:]]
    return [(f"{g[0]}" if len(g) == 1 else f"{g[0]} to {g[-1]}", found) for g, found in shown]


def whole_run(run: Campaign) -> RenderableType:
    """A campaign's days, goodput, energy and money."""
    low, high = run.interval_days
    lines: list[draw.Line] = [
        ("duration", Text.assemble((f"{run.days:,.1f} days", "bold"), (f"  90 % interval {low:,.1f} … {high:,.1f}",
                                                                       draw.DIM))),
        ("goodput", f"{draw.percent(run.goodput_frac)}: {run.num_failures:,.1f} failures expected, a checkpoint every "
                    f"{run.checkpoint_every_s / 60:,.1f} min that stops {show_seconds(run.checkpoint_s)}"),
        ("energy", f"{run.energy_j / 3.6e9:,.4g} MWh"),
        ("money", f"${run.usd:,.0f}"),
    ]  # fmt: skip
    title = Text(f" the whole run: {run.tokens:.4g} tokens, {run.num_steps:,} steps ", style="bold")
    shown = draw.grid(lines)
    return Panel(shown, title=title, title_align="left", box=box.ROUNDED, border_style="cyan", padding=(0, 1))
