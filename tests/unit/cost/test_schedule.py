"""Two queues: when kernels start, what the host delays, and what a repeat extrapolates to."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from ridgeline.api import predict
from ridgeline.cost.host import DEFAULTS
from ridgeline.cost.schedule import Segment, wall_s
from ridgeline.graph import Node

STEP, LAUNCH, GAP = DEFAULTS["step_s"], DEFAULTS["launch_s"], DEFAULTS["gap_s"]


@dataclass
class Line:
    """As much of a priced line as the queues look at."""

    busy_s: float
    host_s: float
    num_kernels: int = 1
    stretch: float = 1.0
    node: Node = field(default_factory=lambda: Node("pointwise", (), ()))


def wall(*lines: Line, repeat: int = 1, execution: str = "eager", kind: str = "gpu") -> float:
    return wall_s([Segment(list(lines), repeat)], DEFAULTS, execution, kind)[0]  # type: ignore[arg-type]


def test_one_kernel_waits_for_its_launch() -> None:
    assert wall(Line(1e-3, 10e-6)) == pytest.approx(STEP + 10e-6 + LAUNCH + 1e-3)


def test_long_kernels_hide_the_host() -> None:
    lines = [Line(1e-3, 10e-6)] * 10
    assert wall(*lines) == pytest.approx(STEP + 10e-6 + LAUNCH + 10 * 1e-3 + 9 * GAP)


def test_short_kernels_wait_for_the_host() -> None:
    lines = [Line(1e-6, 10e-6)] * 10
    assert wall(*lines) == pytest.approx(STEP + 10 * 10e-6 + LAUNCH + 1e-6)


def test_views_delay_the_next_launch_and_launch_nothing() -> None:
    view = Line(0.0, 3e-6, num_kernels=0)
    assert wall(view, view, Line(1e-6, 10e-6)) == pytest.approx(STEP + 16e-6 + LAUNCH + 1e-6)


def test_kernels_of_one_call_leave_gaps_between_them() -> None:
    assert wall(Line(1e-3, 10e-6, num_kernels=5)) - wall(Line(1e-3, 10e-6)) == pytest.approx(4 * GAP)


def test_a_sync_makes_the_host_wait_for_the_device() -> None:
    sync = Line(1e-6, 5e-6, node=Node("sync", (), ()))
    quick = Line(1e-6, 10e-6)
    run_ahead = wall(Line(1e-3, 10e-6), quick, quick)
    stalled = wall(Line(1e-3, 10e-6), sync, quick, quick)
    after = 2 * 10e-6 + LAUNCH + 1e-6  # everything behind the sync is launched on an empty queue
    assert stalled == pytest.approx(STEP + 10e-6 + LAUNCH + 1e-3 + GAP + 1e-6 + after)
    assert stalled - run_ahead > 15e-6


@pytest.mark.parametrize("line", [Line(1e-3, 10e-6), Line(1e-6, 10e-6)])
def test_a_repeat_takes_as_long_as_its_iterations_written_out(line: Line) -> None:
    assert wall(line, line, repeat=50) == pytest.approx(wall(*[line] * 100))


def test_a_host_that_falls_behind_only_later_is_still_seen() -> None:
    long, short = Segment([Line(1e-3, 10e-6)], 1), Segment([Line(1e-6, 10e-6)], 500)
    found, _ = wall_s([long, short], DEFAULTS, "eager", "gpu")  # type: ignore[arg-type]
    assert found == pytest.approx(STEP + 501 * 10e-6 + LAUNCH + 1e-6, rel=0.01)


def test_a_cuda_graph_pays_one_launch_and_short_gaps() -> None:
    lines = [Line(1e-6, 10e-6)] * 10
    found = wall(*lines, execution="cudagraph")
    assert found == pytest.approx(10e-6 + 10 * DEFAULTS["graph_gap_s"] + LAUNCH + 0.3 * STEP)
    assert found < wall(*lines)


def test_a_stretched_kernel_takes_that_much_longer() -> None:
    assert wall(Line(1e-3, 1e-6, stretch=1.2)) - wall(Line(1e-3, 1e-6)) == pytest.approx(0.2e-3)


def test_a_processor_that_runs_the_program_itself_has_no_queue() -> None:
    assert wall(Line(1e-3, 10e-6), Line(1e-3, 10e-6), kind="cpu") == pytest.approx(2e-3)


@pytest.mark.parametrize("on", ["h200", "grace"])
@pytest.mark.parametrize("execution", ["eager", "compiled", "cudagraph"])
@pytest.mark.parametrize("name", ["llama3-8b", "resnet50", "t5-large", "dlrm"])
def test_the_last_span_ends_when_the_step_does(name: str, execution: str, on: str) -> None:
    p = predict(name, execution=execution, on=on)
    spans = list(p.spans())
    end_s = max(span.start_s + span.duration_s for span in spans)
    assert end_s == pytest.approx(p.expected_s, rel=0.02, abs=6e-6)
    device = [span for span in spans if span.lane == "device"]
    assert sum(span.duration_s for span in device) == pytest.approx(p.busy_s)
    starts = [span.start_s for span in device]
    assert starts == sorted(starts)
    assert all(a.start_s + a.duration_s <= b.start_s + 1e-12 for a, b in pairwise(device))


@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("execution", ["eager", "compiled"])
def test_spans_name_the_layer_they_belong_to(execution: str, mode: str) -> None:
    """Compiled, the first and the last layer stand apart from the rest."""
    p = predict("llama3-8b", seq=128, mode=mode, execution=execution)
    runs = Counter(
        span.module.split(".")[2] for span in p.spans() if span.op == "matmul" and "layers." in span.module
    )
    assert set(runs) == {str(i) for i in range(32)} and len(set(runs.values())) == 1
