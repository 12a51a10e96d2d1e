"""What is right passes, what is wrong is caught, whatever a call leaves behind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from torch import nn

from ridgeline.engine.example_inputs import Inputs, State
from ridgeline.engine.guards.check import Watch
from ridgeline.optimizer.search import judge as proof
from ridgeline.optimizer.search.judge import Prover, Subject
from ridgeline.optimizer.search.loss import Loss
from ridgeline.optimizer.search.loss_curve import perturbed


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(32, 64, dtype=dtype), nn.Linear(64, 16, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(F.gelu(self.a(x)))


def _prover(model: nn.Module, *args: torch.Tensor, mode: str = "infer", random: bool = False) -> Prover:
    return Prover(Subject(model, Inputs(args), mode, Loss(None), State(model)), random=random)


def test_the_model_itself_passes_against_float64() -> None:
    model = Net()
    verdict = _prover(model, torch.randn(8, 32, dtype=torch.bfloat16)).judge(model)
    assert verdict and verdict.reference == "float64" and verdict.rms_frac == verdict.eager_rms_frac > 0


def test_more_exact_passes_and_a_slightly_wrong_weight_does_not() -> None:
    model = Net()
    prover = _prover(model, torch.randn(8, 32, dtype=torch.bfloat16))
    wide = Net().float()
    assert prover.judge(lambda x: wide(x.float()).bfloat16())

    def biased(x: torch.Tensor) -> torch.Tensor:
        return model(x) * 1.05

    found = prover.judge(biased)
    assert not found and "rms" in found.reason


def test_one_wrong_element_is_caught() -> None:
    model = Net(torch.float32)
    prover = _prover(model, torch.randn(64, 32))

    def flawed(x: torch.Tensor) -> torch.Tensor:
        out = model(x).clone()
        out[-1, -1] += 0.1
        return out

    assert not prover.judge(flawed)


def test_a_nan_where_eager_has_none_is_caught() -> None:
    model = Net()
    prover = _prover(model, torch.randn(8, 32, dtype=torch.bfloat16))

    def poisoned(x: torch.Tensor) -> torch.Tensor:
        out = model(x).clone()
        out[0, 0] = torch.nan
        return out

    assert not prover.judge(poisoned)


@pytest.mark.parametrize(("off", "like"), [(2e-4, False), (5e-5, True)])
def test_what_a_harness_would_call_different_is_told_however_right_it_is(off: float, like: bool) -> None:
    model = Net(torch.float32)
    prover = _prover(model, torch.randn(64, 32))
    found = prover.judge(lambda x: model(x) + off, error_budget=1e-2)
    assert found and found.like_eagers is like
    assert prover.judge(model).like_eagers


class Overflowing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 300 * 300 / 90000


def test_a_number_where_eager_overflows_is_caught() -> None:
    """Closer to float64 than eager is, and something else than eager returns."""
    model = Overflowing()
    prover = _prover(model, torch.linspace(0.1, 2.0, 64).half())
    assert prover.judge(model)
    found = prover.judge(lambda x: model(x.float()).half())
    assert not found and "are finite where eager's overflow" in found.reason
    assert _prover(model, torch.linspace(0.1, 0.5, 64).half()).judge(lambda x: model(x.float()).half())


def test_another_type_or_shape_is_caught() -> None:
    model = Net()
    prover = _prover(model, torch.randn(8, 32, dtype=torch.bfloat16))
    assert "float32" in prover.judge(lambda x: model(x).float()).reason
    assert not prover.judge(lambda x: model(x)[:4])


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x * 3


def test_a_branch_taken_once_and_for_all_is_caught_by_the_second_input() -> None:
    x = torch.randn(100) + 0.2
    frozen = (lambda x: x * 2) if x.sum() > 0 else (lambda x: x * 3)
    prover = _prover(Branching(), x)
    assert prover.judge(Branching())
    assert not prover.judge(frozen)


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += x.sum(0)
        return x + self.total


def test_a_buffer_that_is_not_updated_is_caught() -> None:
    model = Remembering()
    prover = _prover(model, torch.randn(3, 4))
    assert prover.reference == "float64" and prover.judge(model)
    assert not prover.judge(lambda x: x + x.sum(0)), "the output is right and the buffer is not"


class Writing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x.sum()


def test_an_input_that_is_not_written_to_is_caught() -> None:
    prover = _prover(Writing(), torch.randn(5))
    assert prover.judge(Writing())
    assert not prover.judge(lambda x: (x * 2).sum())


def test_gradients_are_judged_in_training() -> None:
    model = Net(torch.float32)
    prover = _prover(model, torch.randn(8, 32), mode="train")
    assert prover.judge(model)

    def detached(x: torch.Tensor) -> torch.Tensor:
        return model.b(F.gelu(model.a(x)).detach() * 1.0) + 0 * model.a(x).sum()

    found = prover.judge(detached)
    assert not found and "gradient" in found.reason


def test_indices_must_be_equal() -> None:
    class Arg(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.argmax(-1)

    prover = _prover(Arg(), torch.randn(6, 9))
    assert prover.judge(Arg())
    assert not prover.judge(lambda x: (x.argmax(-1) + 1) % 9)


def test_dropout_is_judged_by_means_and_spreads() -> None:
    model = nn.Sequential(Net(torch.float32), nn.Dropout(0.5)).train()
    prover = _prover(model, torch.randn(64, 32), random=True)
    assert prover.judge(model) and "random" in prover.judge(model).notes[0]
    assert not prover.judge(model[0]), "dropout left out: the spread is not there"
    assert not prover.judge(lambda x: 1.5 * model(x)), "the mean is elsewhere"


class Dropping(nn.Module):
    """Layers that the host drops whole, as speech models do: runs differ in which weights have gradients at all."""

    def __init__(self, share: float = 0.25) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.share, self.times = nn.ModuleList(nn.Linear(32, 32) for _ in range(6)), share, 1.0
        self.first = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + self.times * torch.tanh(layer(x)) if torch.rand([]) >= self.share else x
        return x


def test_layers_that_are_dropped_whole_are_judged_with_the_gradients_they_have(monkeypatch: Any) -> None:
    monkeypatch.setattr("ridgeline.optimizer.search.judge.LEAST_ELEMENTS", 8)
    monkeypatch.setattr("ridgeline.optimizer.search.judge.MAX_ELEMENTS", 6000)  # a sample, as of large models
    model, x = Dropping().train(), torch.randn(16, 32)
    prover = Prover(Subject(model, Inputs((x,)), "train", Loss(None), State(model)), random=True, num_draws=12)
    assert prover.judge(model)

    def doubled(given: torch.Tensor) -> torch.Tensor:
        model.times = 2.0
        try:
            return model(given)
        finally:
            model.times = 1.0

    assert not prover.judge(doubled)
    first = model.layers[0].requires_grad_(False)  # its gradients are missing always, not now and then
    assert not prover.judge(model)
    first.requires_grad_(True)


def test_a_layer_that_some_runs_never_had_is_judged_beside_none(monkeypatch: Any) -> None:
    """Dropped nine times of ten: of eight runs of each side some have no gradient of it at all."""
    model = Dropping(0.9).train()
    subject = Subject(model, Inputs((torch.randn(16, 32),)), "train", Loss(None), State(model))
    prover = Prover(subject, random=True, num_draws=8)
    names = {name for name, _ in model.named_parameters()}
    seen = [set(prover._moments(model, subject.inputs, first, 8)) for first in (0, 8, 16)]
    assert any(len(each) < len(names) + 1 for each in seen) and seen[0] != seen[1]
    assert "could not be proved" not in prover.judge(model).reason and prover.judge(model)


def test_what_is_only_just_beyond_chance_is_judged_again_by_more_runs(monkeypatch: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).train()
    asked: list[int] = []
    judged_by = Prover._judged_by

    def unlucky(self: Prover, call: Any, num: int, first: int) -> Any:
        asked.append(num)
        verdict, badness = judged_by(self, call, num, first)
        return (replace(verdict, ok=False), 1.2) if len(asked) == 1 else (verdict, badness)

    monkeypatch.setattr(Prover, "_judged_by", unlucky)
    subject = Subject(model, Inputs((torch.randn(64, 8),)), "infer", Loss(None), State(model))
    prover = Prover(subject, random=True, num_draws=8)
    assert prover.judge(model).ok and asked == [8, 24]
    asked.clear()
    monkeypatch.setattr(Prover, "_judged_by", judged_by)
    assert not prover.judge(lambda x: 1.5 * model(x)).ok


class Attending(nn.Module):
    """Attention: a bias of its keys adds the same to every score, so its gradient is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(32, 32, dtype=torch.bfloat16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))


class _Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias: torch.Tensor, times: float) -> torch.Tensor:
        ctx.times = times
        return bias.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.times, None


@pytest.mark.parametrize(("times", "right"), [(4.0, True), (40.0, False)])
def test_gradients_that_are_noise_may_be_other_noise_but_not_much_more(times: float, right: bool) -> None:
    model, x = Attending().train(), torch.randn(4, 64, 32).bfloat16()
    prover = _prover(model, x, mode="train")

    def call(x: torch.Tensor) -> torch.Tensor:
        keys = F.linear(x, model.k.weight, _Noisy.apply(model.k.bias, times))
        return F.scaled_dot_product_attention(model.q(x), keys, model.v(x))

    verdict = prover.judge(call)
    assert verdict.ok == right and (right or "k.bias" in verdict.reason), str(verdict)


def test_an_input_without_the_reference_of_the_others_is_left_out(monkeypatch: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).to(torch.bfloat16)
    inputs = Inputs((torch.randn(16, 32, dtype=torch.bfloat16),))
    subject = Subject(model, inputs, "infer", Loss(None), State(model))
    answers = iter([False, True, True])  # memory is short when the second input is to be widened
    monkeypatch.setattr(proof, "_too_large", lambda model, dtype: next(answers))
    prover = Prover(subject, num_inputs=2)
    assert prover.reference == "float64" and len(prover.cases) == 1
    assert any("one input fewer" in note for note in prover.notes)
    rounded = lambda x: model[2](model[1](model[0](x).float()).to(torch.bfloat16))  # as right, with other roundings
    verdict = prover.judge(rounded)
    assert verdict and verdict.eager_rms_frac > 0


def test_recurrent_layers_are_afterwards_what_they_were() -> None:
    """They make their lists of weights anew when they meet others, and a recording watches those lists."""
    model = nn.LSTM(8, 8, num_layers=2)
    watch = Watch(model)
    prover = _prover(model, torch.randn(5, 3, 8), mode="train")
    assert prover.judge(model) and prover.reference == "float64"
    model(torch.randn(5, 3, 8))
    assert watch.same(), watch.changes()


class _Spectral(nn.Module):
    """A layer over frequencies, whose weights are complex."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(5, 5, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        found = torch.fft.rfft(x) @ self.weight
        return {"loss": torch.fft.irfft(found, n=8).square().sum(), "found": found.conj()}


@pytest.mark.parametrize("turn", [1.0, 1.0 + 1e-3, 1.0 + 1e-3j])
def test_complex_weights_and_results_are_judged_in_both_parts(turn: complex) -> None:
    torch.manual_seed(0)
    model = _Spectral()

    def turned(x: torch.Tensor) -> dict[str, torch.Tensor]:
        found = model(x)
        return found | {"found": found["found"] * turn}

    prover = _prover(model, torch.randn(3, 8), mode="train")
    verdict = prover.judge(turned)
    assert prover.reference == "float64" and bool(verdict) == (turn == 1.0), verdict
    assert model.weight.dtype is torch.complex64 and model.weight.grad is None


def test_experts_have_a_float64_reference_too() -> None:
    """Products of groups have none, and eager's own results in its place would call every other rounding wrong."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=31,
                                        num_key_value_heads=2, intermediate_size=32, num_local_experts=4)  # fmt: skip
    model = transformers.MixtralForCausalLM(config).train()
    before = model.config._experts_implementation
    ids = torch.randint(0, 31, (2, 8))
    inputs = Inputs((), {"input_ids": ids, "labels": ids, "use_cache": False})
    prover = Prover(Subject(model, inputs, "train", Loss(None), State(model)), num_inputs=1)
    assert prover.reference == "float64" and prover.judge(model)
    assert model.config._experts_implementation == before != "eager"


def _leaf_of(name: str, values: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> proof.Leaf:
    return proof.Leaf(name, dtype, tuple(values.shape), values)


@pytest.mark.parametrize(("name", "off", "ok"), [("gradient of w", 0.9, True), ("gradient of w", 3.0, False),
                                                 ("output", 0.9, False)])  # fmt: skip
def test_a_far_element_of_a_noisy_gradient_is_no_mistake(name: str, off: float, ok: bool) -> None:
    prover = _prover(Net(), torch.randn(8, 32, dtype=torch.bfloat16))
    generator = torch.Generator().manual_seed(0)
    right, noise = (torch.randn(100_000, generator=generator, dtype=torch.float64) for _ in range(2))
    found = right + 0.08 * noise
    found[0] = right[0] + off
    leaves = [_leaf_of(name, values) for values in (found, right + 0.07 * noise, right)]
    verdict = prover._leaf_verdict(*leaves, 1)
    assert verdict.ok is ok, verdict


class Routed(nn.Module):
    """Every row goes to one of two experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(512, 512, bias=False, dtype=torch.bfloat16)
        self.gate = nn.Parameter(torch.randn(512, dtype=torch.bfloat16))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.experts = nn.ModuleList(nn.Linear(512, 16, dtype=torch.bfloat16) for _ in range(2))

    def forward(self, x: torch.Tensor, sign: float = 1.0) -> torch.Tensor:
        self.calls += 1
        x = self.first(x)
        return torch.where((x @ self.gate * sign)[:, None] > 0, self.experts[0](x), self.experts[1](x))


def test_a_row_that_a_rounding_sends_elsewhere_is_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Routed()
    gate = model.gate.detach().float() @ model.first.weight.detach().float()
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(2)) / 4
    x[:4] -= (x[:4] @ gate)[:, None] * gate / gate.square().sum()  # these lie where one expert's rows end
    x[4:] += torch.where(x[4:] @ gate > 0, 4.0, -4.0)[:, None] * gate / gate.norm()

    def rounded_otherwise(seed: int) -> Any:
        def call(x: torch.Tensor) -> torch.Tensor:
            with perturbed(list(model.parameters()), 1 / 1024, seed):
                return model(x)

        return call

    prover = _prover(model, x.bfloat16())
    prover.cases = [prover.case_of(Inputs((x.bfloat16(),)))]
    calls = [rounded_otherwise(seed) for seed in range(8, 13)]
    assert all(map(prover.judge, calls))
    assert not prover.judge(lambda x: model(x, -1.0)) and not prover.judge(lambda x: model(x) * 1.5)
    monkeypatch.setattr(Prover, "_perturbed_errors", lambda self, case: [])
    assert not all(map(prover.judge, calls))
