"""Scripts run as they would alone, and their steps are counted."""

from __future__ import annotations

import sys

import pytest

from ridgeline.errors import InputError
from ridgeline.profiler.recorder import Run, Wanted
from ridgeline.profiler.sampler import Samples, parse_smi
from ridgeline.profiler.script import run_script
from ridgeline.trace import steps

TRAIN = """
import sys, torch
net = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(int(sys.argv[1])):
    net(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
sys.exit(3 if sys.argv[2:] == ["--fail"] else 0)
"""
INFER = """
import torch
net = torch.nn.Linear(4, 4)
for batch in torch.utils.data.DataLoader(torch.randn(30, 4)):
    net(batch)
"""


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "trace.json", wanted=Wanted(steps=2, warmup=0))


def written(tmp_path, text):
    path = tmp_path / "program.py"
    path.write_text(text)
    return str(path)


def test_optimizer_steps_are_steps_and_arguments_are_the_scripts_own(tmp_path, run):
    before = sys.argv[:]
    ended = run_script(written(tmp_path, TRAIN), ["20", "--fail"], run)
    assert (ended.code, ended.failure, ended.counted) == (3, "", "optimizer steps")
    assert len(steps(run.trace)) == 2 and sys.argv == before


def test_batches_are_steps_where_nothing_is_trained(tmp_path, run):
    ended = run_script(written(tmp_path, INFER), [], run)
    assert ended.counted == "batches of a DataLoader" and len(steps(run.trace)) == 2


def test_a_named_function_may_be_the_step(tmp_path, run):
    text = "import torch\nfor _ in range(20):\n    torch.nn.functional.relu(torch.ones(3))\n"
    ended = run_script(written(tmp_path, text), [], run, step_on="torch.nn.functional:relu")
    assert ended.counted == "calls of torch.nn.functional:relu" and len(steps(run.trace)) == 2


def test_a_failing_script_shows_its_own_traceback_and_nothing_of_ours(tmp_path, run):
    ended = run_script(written(tmp_path, "def f():\n    return 1 / 0\nf()\n"), [], run)
    assert ended.code == 1 and "ZeroDivisionError" in ended.failure and "program.py" in ended.failure
    assert "profiler/script.py" not in ended.failure and "runpy" not in ended.failure


@pytest.mark.parametrize("step_on", ["nowhere:f", "torch:nothing", "torch"])
def test_a_step_that_does_not_exist_is_refused(tmp_path, run, step_on):
    with pytest.raises(InputError, match="to count steps on"):
        run_script(written(tmp_path, INFER), [], run, step_on=step_on)


def test_a_missing_script_is_refused(run):
    with pytest.raises(InputError, match="does not exist"):
        run_script("no_such_script.py", [], run)


def test_nvidia_smi_is_read_and_what_it_does_not_support_is_left_out():
    assert parse_smi("312.5, 1980, 3201, 41\n") == {
        "power_w": 312.5, "clock_hz": 1.98e9, "dram_hz": 3.201e9, "temperature_c": 41.0,
    }  # fmt: skip
    assert parse_smi("[N/A], 1980, 3201, 41") == {"clock_hz": 1.98e9, "dram_hz": 3.201e9, "temperature_c": 41.0}


def test_readings_the_board_refused_are_no_samples():
    samples = Samples("NVML", [1, 2], [{"power_w": 5.0}, {"power_w": float("nan")}])
    assert samples.columns() == {"power_w": ([1], [5.0])}
