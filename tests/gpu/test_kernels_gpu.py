"""Every primitive on the GPU, from its declaration: fresh inputs, layouts, poisoned outputs, gradients, repeats."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from ridgeline.bench.check import LAYOUTS, check_case, check_mistakes, mistake_case
from ridgeline.bench.clock import host_time
from ridgeline.kernels import rms_norm
from ridgeline.kernels.contract import trials

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from kernels_special import specials

CASES = [(name, of) for name, (_, trial) in trials().items() for of in trial.checks]


@pytest.mark.parametrize(("name", "of"), CASES, ids=lambda value: str(value))
def test_a_case_is_as_right_as_pytorch_and_repeats_bit_for_bit(name, of):
    wrong = [finding for finding in check_case(name, of, torch.device("cuda"), 1) if not finding.ok]
    assert not wrong, wrong


@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize("name", [name for name, (_, trial) in trials().items() if trial.layouts])
def test_other_layouts_give_the_same_numbers(name, layout):
    for of in [of for of in trials()[name][1].checks if of.dtype == "bfloat16"][1:5]:
        wrong = [finding for finding in check_case(name, of, torch.device("cuda"), 2, layout) if not finding.ok]
        assert not wrong, wrong


@pytest.mark.parametrize("name", list(trials()))
def test_wrong_kernels_are_rejected(name):
    found = check_mistakes(name, mistake_case(trials()[name][1]), torch.device("cuda"), 3)
    assert found and all(finding.ok for finding in found), found


@pytest.mark.parametrize("name", list(specials()))
def test_special_situations(name):
    assert "WRONG" not in str(specials()[name]())


def test_a_call_costs_the_host_less_than_pytorchs():
    x = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16)
    w = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        ours = host_time(lambda: rms_norm(x, w, 1e-6))
        theirs = host_time(lambda: torch.nn.functional.rms_norm(x, (4096,), w, 1e-6))
    assert ours <= theirs
