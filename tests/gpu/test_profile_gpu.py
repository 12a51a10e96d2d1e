"""Recording on a real device: kernels linked to modules and nodes, floors below what was measured, power beside."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ridgeline as rl
from ridgeline.trace import steps

ROWS = 65536


class Net(torch.nn.Module):
    def __init__(self, width=1024):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = (
            torch.nn.Linear(width, 4 * width, bias=False),
            torch.nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    torch.manual_seed(0)
    model = Net().cuda().to(torch.bfloat16)
    x = torch.randn(ROWS, 1024, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), rl.profile(model, tmp_path_factory.mktemp("run") / "trace.json", steps=20) as run:
        for _ in range(200):
            model(x)
            run.step()
            if run.done:
                break
    return run


def test_kernels_are_linked_to_modules(recorded):
    trace = recorded.trace
    assert trace.gpu.sum() >= 20 * 5
    assert (trace.launch[trace.gpu] >= 0).mean() > 0.99
    assert {"norm", "up", "down"} <= {trace.words[i] for i in trace.module[trace.gpu]}


def test_steps_and_overhead_are_there(recorded):
    facts = recorded.trace.meta["ridgeline"]
    assert len(steps(recorded.trace)) == 20
    assert facts["unprofiled_step_s"] > 0 and facts["overhead_frac"] > -0.5


def test_power_and_clocks_are_sampled_into_the_trace(recorded):
    counters = recorded.trace.counters
    if recorded.trace.meta["ridgeline"]["power_source"] not in ("NVML", "nvidia-smi"):
        pytest.skip("no driver answers here")
    assert counters["power_w"].value.max() > 50 and counters["clock_hz"].value.max() > 5e8


def test_no_kernel_is_faster_than_its_floor(recorded):
    trace = recorded.trace
    floor = trace.extra["floor_s"]
    known = ~np.isnan(floor) & (floor > 0)
    assert known.sum() >= 0.9 * trace.gpu.sum()
    assert (trace.duration_s[known] >= 0.98 * floor[known]).all()


def test_kernels_find_the_nodes_of_the_captured_graph(recorded):
    graph = rl.capture(Net().to(torch.bfloat16), args=(rl.spec((ROWS, 1024), "bf16"),))
    linked = rl.link(recorded.trace, graph)
    found = linked.optional("node")[linked.gpu] > 0
    assert found.mean() > 0.95
    assert any("ops found their node" in note for note in linked.notes)
