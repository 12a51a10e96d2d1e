"""Fewer bits within a stated error: measured layer by layer, chosen by gain, proved as a whole, true to weights."""

from __future__ import annotations

import json
from typing import Any

import pytest
import simulated_clock as clock

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch import Tensor, nn

import ridgeline as rl
from ridgeline.engine.example_inputs import Inputs, State
from ridgeline.errors import OptimizeError
from ridgeline.kernels.quantized_linear import reference
from ridgeline.optimizer.backend import Report, Traced
from ridgeline.optimizer.precision import choice as narrowing
from ridgeline.optimizer.precision import sensitivity
from ridgeline.optimizer.precision.formats import FORMATS, Shape, options
from ridgeline.optimizer.precision.sensitivity import Choice, Layer, choose
from ridgeline.optimizer.precision.weight_bank import WeightBank
from ridgeline.optimizer.receipt import Receipt
from ridgeline.optimizer.search.candidate import Candidate, build
from ridgeline.optimizer.search.judge import Prover, Subject
from ridgeline.optimizer.search.loss import Loss

WIDTH = 256


class Block(nn.Module):
    """A gated layer as language models have it: norm, gate and up, down, sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Net(nn.Module):
    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.blocks[1].down.weight *= gain

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def _net(dtype: torch.dtype = torch.bfloat16, gain: float = 1.0) -> Net:
    torch.manual_seed(0)
    return Net(gain).to(dtype).eval()


def _x(rows: int = 4, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(3)).to(dtype)


def _prover(model: nn.Module, x: Tensor) -> Prover:
    return Prover(Subject(model, Inputs((x,)), "infer", Loss(None), State(model)), num_inputs=1)


def _as_if(monkeypatch: Any, gains: dict[str, float]) -> None:
    """Formats gain as on a device that has them; this one has not."""
    monkeypatch.setattr(sensitivity.Gains, "_measured", lambda self, shape, format: gains.get(format, -1.0))


@pytest.mark.parametrize(("dtype", "rows", "names"), [
    (torch.float32, 4, ["bf16"]),
    (torch.float32, 64, ["bf16", "fp8"]),
    (torch.bfloat16, 64, ["fp8"]),
    (torch.bfloat16, 4, ["int8", "int4"]),
    (torch.float64, 4, []),
])  # fmt: skip
def test_formats_are_those_that_a_layers_type_and_rows_allow(dtype: torch.dtype, rows: int, names: list[str]) -> None:
    assert [each.name for each in options(Shape(rows, 256, 256, dtype, "cpu"))] == names
    assert not options(Shape(rows, 16, 256, dtype, "cpu")), "small weights are not what a product costs"


@pytest.mark.parametrize(("name", "rows", "low", "high"), [
    ("tf32", 64, 1e-4, 6e-4), ("bf16", 64, 1e-3, 5e-3), ("fp8", 64, 1e-2, 5e-2), ("int8", 4, 2e-3, 1.2e-2),
    ("int4", 4, 5e-2, 0.13),
])  # fmt: skip
def test_a_format_is_as_exact_as_its_bits(name: str, rows: int, low: float, high: float) -> None:
    dtype = torch.bfloat16 if name.startswith("int") else torch.float32
    x, weight, bias = _x(rows, dtype), _net(dtype).head.weight, _net(dtype).head.bias
    weight, bias = weight.detach(), bias.detach()
    found = FORMATS[name](x, FORMATS[name].make(weight), bias)
    meant = nn.functional.linear(x.double(), weight.double(), bias.double())
    assert found.dtype == dtype
    assert low < float((found.double() - meant).norm() / meant.norm()) < high


def test_layers_whose_error_arrives_are_told_from_those_whose_does_not() -> None:
    model = _net(torch.float32, gain=20.0)
    prover = _prover(model, _x(32, torch.float32))
    found = narrowing.study(prover, 0.1, 100.0)
    arrives = {layer.name: layer.arrives for layer in found.layers}
    assert arrives.keys() == {*(f"blocks.{i}.{name}" for i in (0, 1) for name in ("gate", "up", "down")), "head"}
    assert arrives["head"] == pytest.approx(1.0, rel=0.15), "nothing stands between the head and the output"
    assert arrives["blocks.1.down"] > 3 * arrives["blocks.0.down"] > 0
    assert all(layer.alone for layer in found.layers)
    torch.testing.assert_close(model(_x(2, torch.float32)), _net(torch.float32, 20.0)(_x(2, torch.float32)))


def test_without_time_to_measure_each_layer_is_like_the_nearest_of_its_kind() -> None:
    prover = _prover(_net(torch.float32), _x(32, torch.float32))
    found = sensitivity.measured(prover.subject, prover.case_of(prover.subject.inputs), 0.0, lambda shape, format: 1.0)
    assert sum(layer.alone for layer in found) == 1 and all(layer.arrives > 0 for layer in found)


def _layer(name: str, *choices: tuple[str, float, float]) -> Layer:
    shape = Shape(4, 64, 64, torch.bfloat16, "cpu")
    return Layer(name, shape, 1.0, True, tuple(Choice(f, error, error, gain) for f, error, gain in choices))


def test_the_budget_goes_where_a_squared_error_gains_most() -> None:
    layers = [_layer("a", ("int8", 0.01, 2.0), ("int4", 0.04, 3.0)), _layer("b", ("int8", 0.03, 2.0)),
              _layer("c", ("int8", 0.01, -1.0))]  # fmt: skip
    pick = lambda room: {name: choice.format for name, choice in choose(layers, room**2).items()}
    assert pick(0.005) == {} and pick(0.011) == {"a": "int8"}
    assert pick(0.033) == {"a": "int8", "b": "int8"}
    assert pick(0.06) == {"a": "int4", "b": "int8"}, "what gains nothing is never changed"


def test_a_format_that_is_coarser_and_slower_is_never_a_step() -> None:
    layers = [_layer("a", ("int4", 0.04, 1.0), ("int8", 0.01, 2.0))]
    assert {choice.format for choice in choose(layers, 1.0).values()} == {"int8"}


def test_a_choice_that_turned_out_too_coarse_is_tried_smaller_and_a_fine_one_larger() -> None:
    layers = tuple(_layer(f"l{i}", ("int8", 0.01, 1.0)) for i in range(100))
    study = narrowing.Study(layers, 0.0, 0.1)
    chosen = study.chosen(0.8)
    assert len(chosen) in (79, 80)
    smaller, larger = study.next_frac(0.8, chosen, 0.2), study.next_frac(0.8, chosen, 0.07)
    assert smaller is not None and len(study.chosen(smaller)) < 25
    assert larger is not None and len(study.chosen(larger)) == 100
    assert study.next_frac(0.8, study.chosen(1.0), 0.05) is None, "all are chosen already"
    assert "eager itself" in narrowing.Study(layers, 0.2, 0.1).refusal


PLAN = {
    "blocks.0.gate": "int8", "blocks.0.up": "int8", "blocks.0.down": "int4", "blocks.1.down": "int8", "head": "int4",
}  # fmt: skip


def _built(model: nn.Module, plan: dict[str, str], x: Tensor, compiler: str = "none") -> Any:
    rewrites = ("norm", "norm-call", "gate", "horizontal", "products", "narrow")
    candidate = Candidate(name="n", rewrites=rewrites, compiler=compiler, narrow=tuple(plan.items()))
    return build(candidate, model, Inputs((x,)), "infer")


def test_layers_of_the_list_are_computed_in_their_formats_with_what_is_around_them() -> None:
    model, x = _net(), _x()
    built = _built(model, PLAN, x)
    whats = [match.what for match in built.report.matches if match.rewrite == "narrow"]
    both = [what for what in whats if "2 × " in what]
    assert len(whats) == 4 and "RMSNorm" in both[0] and "silu gate" in both[0], whats
    assert any(what.startswith("int4") and "sum" in what for what in whats)
    wide = _net(torch.float64)
    for name, format in PLAN.items():
        layer, own = wide.get_submodule(name), model.get_submodule(name)
        bits = 8 if format == "int8" else 4
        layer.weight.data = reference.restored(*reference.narrowed(own.weight, bits), torch.float64)
    for name, parameter in wide.named_parameters():
        if name.removesuffix(".weight") not in PLAN:
            parameter.data = model.get_parameter(name).double()
    with torch.no_grad():
        found, meant = built.call(x), wide(x.double())
    assert float((found.double() - meant).norm() / meant.norm()) < 1e-2, "only rounding of bfloat16 is left"


@pytest.mark.parametrize("format", ["bf16", "fp8"])
def test_many_rows_are_computed_in_fewer_bits_too_and_by_inductor(format: str) -> None:
    model, x = _net(torch.float32), _x(64, torch.float32)
    plan = dict.fromkeys(("blocks.0.gate", "blocks.0.up", "head"), format)
    with torch.no_grad():
        meant, (found, compiled) = model(x), (_built(model, plan, x, kind).call(x) for kind in ("none", "inductor"))
    error = float((found - meant).norm() / meant.norm())
    assert 1e-4 < error < 0.05
    assert float((compiled - found).norm() / found.norm()) < max(1e-3, error / 2)


def test_narrow_weights_follow_every_change_of_the_parameters() -> None:
    model, x = _net(), _x()
    built = _built(model, PLAN, x)
    with torch.no_grad():
        before = built.call(x)
        model.head.weight.mul_(2.0)
        model.head.bias.zero_()
        doubled = built.call(x)
        model.head.weight = nn.Parameter(torch.zeros_like(model.head.weight), requires_grad=False)
        zero = built.call(x)
    assert not torch.equal(before, doubled) and not zero.any()


@pytest.mark.parametrize("compiler", ["none", "inductor"])
def test_layers_are_known_by_their_weights_in_a_graph_that_was_lowered_before(compiler: str) -> None:
    model, x, report = _net(), _x(), Report()
    traced = Traced(model)
    with torch.no_grad():
        traced.lowered(rewrites=())(x)
        bank = WeightBank(model, dict.fromkeys(PLAN, "int8"))
        found = traced.lowered(rewrites=("narrow",), compiler=compiler, options={"narrow": bank}, report=report)(x)
        assert report.counts()["narrow"] and 0 < float((found - model(x)).norm() / model(x).norm()) < 0.03


def test_the_bank_names_a_layer_it_does_not_know() -> None:
    with pytest.raises(OptimizeError, match="no linear layer"):
        WeightBank(_net(), {"nowhere": "int8"})


def _optimized(model: nn.Module, x: Tensor, **given: Any) -> Receipt:
    return rl.optimize(model, (x,), **{"budget_s": 8, "use_cache": False, **given}).receipt


def test_nothing_is_narrowed_unless_an_error_is_allowed(monkeypatch: Any) -> None:
    _as_if(monkeypatch, {"int8": 1.0, "int4": 2.0})
    receipt = _optimized(_net(), _x())
    assert receipt.error_budget is None and not receipt.narrowed and "fewer bits" not in str(receipt)


def _sleeping(model: nn.Module) -> nn.Module:
    """The eager model sleeps, so that any rewritten one is faster."""

    class Slow(Net):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.compiler.is_compiling():
                clock.sleep(0.004)
            return super().forward(x)

    model.__class__ = Slow
    return model


def test_a_search_with_an_error_budget_stays_within_it_and_says_what_it_did(monkeypatch: Any) -> None:
    _as_if(monkeypatch, {"int8": 1.0, "int4": 1.5})
    model, x = _sleeping(_net()), _x()
    receipt = _optimized(model, x, error_budget=0.04, budget_s=9)
    assert any(entry.name.startswith("fewer bits") for entry in receipt.entries)
    proved = [entry for entry in receipt.entries if entry.name.startswith("fewer bits") and entry.verdict]
    for entry in proved:
        assert (entry.verdict["rms_frac"] <= 0.04) == entry.verdict["ok"], entry.verdict
        assert entry.verdict["allowed_rms_frac"] == pytest.approx(0.04)
    again = Receipt.from_dict(json.loads(receipt.to_json()))
    assert again.narrowed == receipt.narrowed and again.error_budget == 0.04


def test_a_budget_below_eagers_own_error_is_refused_with_the_number() -> None:
    receipt = _optimized(_net(), _x(), error_budget=1e-4)
    assert any("eager itself is" in note for note in receipt.notes) and not receipt.narrowed


def test_candidates_with_formats_survive_the_cache() -> None:
    made = Candidate(name="n", rewrites=("narrow",), narrow=(("a", "int8"), ("b", "int4")))
    again = Candidate.from_dict(json.loads(json.dumps(made.to_dict())))
    assert again == made and hash(again) == hash(made) and "int8 ×1" in "; ".join(made.changes())
    assert made.complexity > 100, "of two that are equally fast, the one that keeps its bits is returned"
