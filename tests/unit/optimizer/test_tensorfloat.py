"""TensorFloat-32 is asked for and set aside in PyTorch's two ways to say so, and what was planned is for one answer."""

import pytest

torch = pytest.importorskip("torch")
from torch import nn

from ridgeline.engine.drop_in import Optimized, Plan, RunsEagerly
from ridgeline.engine.example_inputs import Inputs, State
from ridgeline.engine.signature import Signature, difference
from ridgeline.kernels import tensorfloat
from ridgeline.optimizer.backend import Report
from ridgeline.optimizer.rewrites.registry import Match
from ridgeline.optimizer.search.candidate import Built, Candidate
from ridgeline.optimizer.search.judge import Prover, Subject
from ridgeline.optimizer.search.problem import Problem
from ridgeline.optimizer.search.search import Search


@pytest.fixture(autouse=True)
def _as_it_was():
    kinds = [(backend, kind) for backend in ("cuda", "mkldnn") for kind in ("matmul", "conv", "rnn")]
    kept = [torch._C._get_fp32_precision_getter(*kind) for kind in kinds]
    precision, rounds = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = True  # what PyTorch begins with, and measuring operators leaves otherwise
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = rounds
    for kind, before in zip(kinds, kept):
        torch._C._set_fp32_precision_setter(*kind, before)


def test_both_of_pytorchs_settings_are_read():
    torch.set_float32_matmul_precision("highest")
    assert not tensorfloat.products_round()
    torch.set_float32_matmul_precision("high")
    assert tensorfloat.products_round()
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert not tensorfloat.products_round()
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    assert not tensorfloat.convolutions_round()
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    assert tensorfloat.convolutions_round()


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_full_precision_for_a_while_leaves_everything_as_it_was(precision):
    torch.set_float32_matmul_precision(precision)
    before = (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, tensorfloat.settings())
    with tensorfloat.products_in("ieee"):
        assert not tensorfloat.products_round() and not tensorfloat.convolutions_round()
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, tensorfloat.settings()) == before


def test_a_setting_made_the_newer_way_does_not_stop_a_proof():
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    model, inputs = nn.Linear(4, 4), Inputs((torch.randn(2, 4),), {})
    prover = Prover(Subject(model, inputs, "infer", lambda out: out, State(model)))
    assert prover.judge(model) and not prover.judge(lambda x: model(x) * 1.01)


def test_what_was_planned_with_one_setting_is_not_used_with_another():
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    with torch.no_grad():
        signature = Signature.of((x,), {}, model)
        fast = Optimized(model, [Plan(signature, lambda x: model(x) + 1)])
        assert torch.equal(fast(x), model(x) + 1)
        torch.backends.cudnn.allow_tf32 = False
        assert "float32 precision" in difference(signature, Signature.of((x,), {}, model))
        with pytest.warns(RunsEagerly, match="float32 precision"):
            assert torch.equal(fast(x), model(x))


def test_what_nobody_set_is_what_saying_so_sets(recwarn):
    """Who sets TensorFloat-32 and back, or says that it is off as it was, calls what was planned."""
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    for kind in ("matmul", "conv", "rnn"):
        torch._C._set_fp32_precision_setter("cuda", kind, "none")
    torch._C._set_fp32_precision_setter("mkldnn", "matmul", "none")
    with torch.no_grad():
        fast = Optimized(model, [Plan(Signature.of((x,), {}, model), lambda x: model(x) + 1)])
        for precision in ("ieee", "none"):
            for kind in (("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"), ("mkldnn", "matmul")):
                torch._C._set_fp32_precision_setter(*kind, precision)
            assert torch.equal(fast(x), model(x) + 1)
    assert not fast.fallbacks and not [each for each in recwarn if each.category is RunsEagerly]


def _prover_of(model, x):
    inputs = Inputs((x,), {})
    return Prover(Subject(model, inputs, "infer", lambda out: out, State(model)))


def test_convolutions_of_another_layout_may_be_rounded_where_it_takes_more_than_a_look_to_see():
    torch.manual_seed(0)
    model = nn.Conv2d(3, 8, 3)
    prover = _prover_of(model, torch.randn(2, 3, 8, 8))

    def off(by):
        return lambda x: model(x) * (1 + by * torch.cos(torch.arange(6.0)))

    assert not prover.judge(off(8e-5), 1e-5), "without the leave it is what it was"
    verdict = prover.judge(off(8e-5), 1e-5, rounded=True)
    assert verdict and verdict.rms_frac > 1e-5 and verdict.allowed_rms_frac == pytest.approx(5e-4)
    assert not prover.judge(off(2e-3), 1e-5, rounded=True), "seen at a look"
    assert not prover.judge(lambda x: model(x) * float("nan"), 1e-5, rounded=True)


def test_small_results_are_held_to_their_size_not_to_an_absolute_distance():
    torch.manual_seed(0)
    model = nn.Conv2d(3, 8, 3)
    with torch.no_grad():
        model.weight.mul_(1e-5)
        model.bias.mul_(1e-5)
    prover = _prover_of(model, torch.randn(2, 3, 8, 8))
    assert not prover.judge(lambda x: model(x) * 1.01, 1e-5, rounded=True)
    assert not prover.judge(lambda x: torch.zeros_like(model(x)), 1e-5, rounded=True)


def test_only_pytorchs_own_compiler_may_and_only_where_convolutions_may_be_rounded():
    def search(model, mode="infer"):
        return Search(Problem(model=model, inputs=Inputs((torch.randn(1, 3, 8, 8),)), mode=mode,
                              device=torch.device("cpu")))  # fmt: skip

    model = nn.Sequential(nn.Conv2d(3, 8, 3))
    assert search(model)._rounds() and not search(model, "train")._rounds()
    assert not search(nn.Linear(8, 8))._rounds() and not search(nn.Conv2d(3, 8, 3).double())._rounds()
    asked = []
    found = search(model)
    found._prover = type("Asked", (), {"judge": lambda self, call, budget, rounded: asked.append(rounded)})()
    for candidate in (Candidate(name="torch.compile", compiler="stock"), Candidate(name="channels last"),
                      Candidate(name="compiled", compiler="inductor", rewrites=("norm",))):  # fmt: skip
        built = Built(candidate, model, Report())
        if candidate.rewrites:
            built.report.matches.append(Match("norm", "", ""))
        found.prove(built)
    assert asked == [True, False, False]
    torch.backends.cudnn.allow_tf32 = False
    assert not search(model)._rounds()
