"""Every primitive on the GPU, from its declaration: fresh inputs, layouts, poisoned outputs, gradients, repeats."""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from lab.race.special_cases import specials
from ridgeline.bench.check import LAYOUTS, check_case, check_mistakes, mistake_case
from ridgeline.bench.clock import host_time
from ridgeline.kernels import call_cache, layer_norm, pack, rms_norm, softmax
from ridgeline.kernels.contract import trials
from ridgeline.kernels.files import cache_folder
from ridgeline.kernels.variants import variants_of

CASES = [(name, of) for name, (_, trial) in trials().items() for of in trial.checks]


def odd_cases(trial):
    return [of for of in trial.checks if of.dtype == "bfloat16"][1:5] if trial.layouts else []


@pytest.fixture(scope="module", autouse=True)
def packed(tmp_path_factory):
    """Everything compiled first, by all cores: one kernel after the other would take ten minutes.

    A pack of this very source that ``RIDGELINE_KERNEL_PACK`` points at is used as it is.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call_cache, "RECORD_AFTER", 0)  # so that the repeated call is one without Python
        if pack.opened(pack.pack_folder()) is None:
            patch.setenv("RIDGELINE_KERNEL_PACK", str(tmp_path_factory.mktemp("pack")))
            pack.write(pack.pack_folder(), wanted_variants(), jobs=max(1, (os.cpu_count() or 2) - 2))
        call_cache.build(cache_folder())
        yield


def wanted_variants():
    wanted = []
    for name, (_, trial) in trials().items():
        wanted += variants_of(name, trial.checks)
        wanted += variants_of(name, odd_cases(trial), aligned=False)
    return wanted


@pytest.mark.parametrize(("name", "of"), CASES, ids=lambda value: str(value))
def test_a_case_is_as_right_as_pytorch_and_repeats_bit_for_bit(name, of):
    wrong = [finding for finding in check_case(name, of, torch.device("cuda"), 1) if not finding.ok]
    assert not wrong, wrong


@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize("name", [name for name, (_, trial) in trials().items() if trial.layouts])
def test_other_layouts_give_the_same_numbers(name, layout):
    for of in odd_cases(trials()[name][1]):
        wrong = [finding for finding in check_case(name, of, torch.device("cuda"), 2, layout) if not finding.ok]
        assert not wrong, wrong


@pytest.mark.parametrize("name", list(trials()))
def test_wrong_kernels_are_rejected(name):
    found = check_mistakes(name, mistake_case(trials()[name][1]), torch.device("cuda"), 3)
    assert found and all(finding.ok for finding in found), found


@pytest.mark.parametrize("name", list(specials()))
def test_special_situations(name):
    assert "WRONG" not in str(specials()[name]())


@pytest.mark.parametrize("recorded", [False, True], ids=["without a gradient", "with a gradient"])
def test_a_call_costs_the_host_less_than_pytorchs(recorded):
    x = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=recorded)
    w = torch.ones(4096, device="cuda", dtype=torch.bfloat16, requires_grad=recorded)
    b = torch.zeros(4096, device="cuda", dtype=torch.bfloat16, requires_grad=recorded)
    functional = torch.nn.functional
    for ours, theirs in (
        (lambda: rms_norm(x, w, 1e-6), lambda: functional.rms_norm(x, (4096,), w, 1e-6)),
        (lambda: layer_norm(x, w, b, 1e-5), lambda: functional.layer_norm(x, (4096,), w, b, 1e-5)),
        (lambda: softmax(x), lambda: torch.softmax(x, -1)),
    ):
        ours(), ours(), ours()
        turns = [(host_time(ours), host_time(theirs)) for _ in range(5)]  # a busy host slows both, but not at once
        assert min(mine for mine, _ in turns) <= min(other for _, other in turns)
