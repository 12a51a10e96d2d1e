"""Two queues, host and device: when kernels run, and how long the step takes on the wall."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from ridgeline.cost.call import Coef

if TYPE_CHECKING:
    from ridgeline.cost.estimate import Line
    from ridgeline.cost.prediction import Prediction, Span


@dataclass(slots=True)
class Segment:
    """Lines that run ``repeat`` times in a row; ``compiled`` ones are launched by generated code."""

    lines: list[Line]
    repeat: int
    compiled: bool = False


@dataclass(slots=True)
class _Clock:
    host_s: float = 0.0
    device_s: float = 0.0
    spent_s: float = 0.0  # host seconds in all


def wall_s(segments: list[Segment], coef: Coef, execution: str, kind: str) -> tuple[float, float]:
    """(seconds from the step's start to its last kernel's end, host seconds spent)."""
    if kind != "gpu":
        return _busy_s(segments), 0.0
    if execution == "cudagraph":
        num_kernels = sum(line.num_kernels * segment.repeat for segment in segments for line in segment.lines)
        queued_s = _busy_s(segments) + num_kernels * coef["graph_gap_s"]
        return queued_s + coef["launch_s"] + coef["step_s"] * 0.3, coef["launch_s"]
    clock = _Clock(host_s=entry_s(coef, execution))
    clock.spent_s = clock.host_s
    for segment in segments:
        _run(segment, clock, coef)
    return max(clock.device_s, clock.host_s), clock.spent_s


def _busy_s(segments: list[Segment]) -> float:
    return sum(line.busy_s * line.stretch * segment.repeat for segment in segments for line in segment.lines)


def entry_s(coef: Coef, execution: str) -> float:
    """Host seconds before the first launch."""
    return coef["compiled_step_s"] if execution == "compiled" else coef["step_s"]


def _run(segment: Segment, clock: _Clock, coef: Coef) -> None:
    """Three iterations are walked; the rest go on like the third, on each queue by itself."""
    walked = min(segment.repeat, 3)
    launch_s, gap_s = coef["launch_s"], coef["gap_s"]
    steps = [
        (line.host_s, line.busy_s * line.stretch + (line.num_kernels - 1) * gap_s, line.node.op == "sync")
        if line.num_kernels
        else (line.host_s, None, False)
        for line in segment.lines
    ]  # host seconds, device seconds from a line's start to its end (none: no kernels), whether the host waits
    before = (clock.host_s, clock.device_s, clock.spent_s)
    for _ in range(walked):
        before = (clock.host_s, clock.device_s, clock.spent_s)
        host_s, device_s, spent_s = before
        for line_s, runs_s, waits in steps:  # as ``_launch`` does, one line after the other
            host_s += line_s
            spent_s += line_s
            if runs_s is not None:
                launched_s, free_s = host_s + launch_s, device_s + gap_s
                device_s = (launched_s if launched_s > free_s else free_s) + runs_s
                if waits:
                    host_s = max(host_s, device_s)
        clock.host_s, clock.device_s, clock.spent_s = host_s, device_s, spent_s
    more = segment.repeat - walked
    if more:
        clock.device_s += (clock.device_s - before[1]) * more
        clock.host_s += (clock.host_s - before[0]) * more
        clock.spent_s += (clock.spent_s - before[2]) * more


def _launch(line: Line, clock: _Clock, coef: Coef) -> float:
    """Queue one line; returns when its first kernel starts."""
    clock.host_s += line.host_s
    clock.spent_s += line.host_s
    if not line.num_kernels:
        return clock.device_s
    start = max(clock.host_s + coef["launch_s"], clock.device_s + coef["gap_s"])
    clock.device_s = start + line.busy_s * line.stretch + (line.num_kernels - 1) * coef["gap_s"]
    if line.node.op == "sync":
        clock.host_s = max(clock.host_s, clock.device_s)
    return start


def spans_of(prediction: Prediction) -> Iterator[Span]:
    """Every kernel of the step on the device's clock, repeats unrolled."""
    from ridgeline.cost import host
    from ridgeline.cost.prediction import Span
    from ridgeline.cost.price import pricer_of

    coef = {**host.DEFAULTS, **pricer_of(prediction.device).calibration.host}
    if prediction.execution == "cudagraph":  # nothing but the gaps between kernels
        coef |= {"gap_s": coef["graph_gap_s"], "launch_s": 0.0}
    clock = _Clock(host_s=entry_s(coef, prediction.execution) * (0.3 if prediction.execution == "cudagraph" else 1.0))
    alone = prediction.device.kind != "gpu"  # the processor runs the program itself: nothing is launched
    if alone:
        clock, coef = _Clock(), coef | {"gap_s": 0.0, "launch_s": 0.0}
    done = Counter[int]()  # runs of each node of a block: of compiled ones the first and the last stand apart
    for block, group in groupby(prediction.lines, key=lambda line: line.block):
        lines = [replace(line, host_s=0.0) if alone else line for line in group]
        for _ in range(lines[0].times if block else 1):
            for line in lines:
                yield from _spans_of_line(line, done[id(line.node)], clock, coef, Span)
                done[id(line.node)] += 1


def _spans_of_line(line: Line, iteration: int, clock: _Clock, coef: Coef, span: type[Span]) -> Iterator[Span]:
    node, began = line.node, clock.host_s
    start = _launch(line, clock, coef)
    module = node.module.replace("*", str(iteration), 1)
    if line.num_kernels:
        name = line.calls[0].kind if line.calls else node.op
        yield span(name, module, node.op, str(node.phase), start, line.busy_s * line.stretch, "device",
                   line.floor_s)  # fmt: skip
    if line.host_s:
        yield span(node.target or node.op, module, node.op, str(node.phase), began, line.host_s, "host")
