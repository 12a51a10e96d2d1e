"""Fewer bits in engines: errors within the budget on calls not seen before, outlier channels found, choices by gain."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ridgeline as rl
from ridgeline.engine.file import ops
from ridgeline.engine.file.engine import Engine
from ridgeline.errors import EngineError
from ridgeline.optimizer.quantize import rounding
from ridgeline.optimizer.quantize.choose import Option, pick


class Block(nn.Module):
    """A norm and three layers; ``alpha`` scales four channels up in the norm and down in the layer that reads it, which
    leaves the function as it is and makes bytes of the activations useless unless it is found."""

    def __init__(self, alpha: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.a, self.b, self.c = (
            nn.LayerNorm(64),
            nn.Linear(64, 256),
            nn.Linear(256, 128),
            nn.Linear(128, 64),
        )
        with torch.no_grad():
            few = torch.tensor([3, 17, 40, 63])
            self.norm.weight[few] *= alpha
            self.a.weight[:, few] /= alpha

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.relu(self.b(nn.functional.gelu(self.a(self.norm(x))))))


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each format is as fast as it is narrow: nothing is measured."""
    from ridgeline.optimizer.quantize import choose

    seconds = {"fp32": 4e-6, "bf16": 2e-6, "int8": 1e-6}
    monkeypatch.setattr(choose.Choice, "_time", lambda self, name, rows, n, k: seconds[name])


def build(model: nn.Module, budget: float, **options) -> Engine:
    """With time for everything: what is chosen depends on no clock."""
    torch.manual_seed(1)
    x = torch.randn(32, 64)
    return rl.build(model, (x,), shapes={"batch": (1, 32)}, error_budget=budget, **{"budget_s": 1e6, **options})


def errors(engine: Engine, model: nn.Module, num: int) -> list[float]:
    """Relative errors of calls that the build has not seen, half of them of a single row."""
    torch.manual_seed(99)
    wide, found = model.double(), []
    with torch.no_grad():
        for i in range(num):
            x = torch.randn(1 if i % 2 else 32, 64)
            meant = wide(x.double())
            found.append(float((engine(x).double() - meant).norm() / meant.norm()))
    model.float()
    return found


@pytest.mark.usefixtures("times")
@pytest.mark.parametrize("alpha", [1.0, 100.0])
def test_900_unseen_calls_stay_within_the_budget(alpha: float) -> None:
    model = Block(alpha).eval()
    for budget in (0.02, 0.05):
        engine = build(model, budget)
        formats = {layer["format"] for layer in engine.receipt["precision"]["layers"]}
        assert "int8" in formats
        assert max(errors(engine, model, 450)) <= budget


@pytest.mark.usefixtures("times")
def test_outlier_channels_cost_nothing_once_they_are_found() -> None:
    plain, planted = (build(Block(alpha).eval(), 0.05) for alpha in (1.0, 1000.0))
    ours, theirs = (e.receipt["precision"]["result"]["rms_mean"] for e in (plain, planted))
    assert theirs < 1.3 * ours
    # Without smoothing, the same weights in bytes are wrong
    model = Block(1000.0).eval()
    x = model.norm(torch.randn(512, 64)).detach()
    parts = rounding.int8_parts(model.a.weight.detach(), x, torch.ones(64), 1.0)
    meant = x @ model.a.weight.detach().t()
    assert float((ops.int8_linear(x, *parts) - meant).norm() / meant.norm()) > 0.2


@pytest.mark.usefixtures("times")
def test_a_smaller_budget_gives_more_bits() -> None:
    found = [build(Block().eval(), budget).receipt["precision"] for budget in (1e-6, 0.008, 0.05)]
    assert [layer["format"] for layer in found[0]["layers"]] == []
    assert {layer["format"] for layer in found[1]["layers"]} == {"bf16"}
    assert {layer["format"] for layer in found[2]["layers"]} == {"int8"}


@pytest.mark.usefixtures("times")
def test_narrow_engines_are_smaller_refitted_and_the_same_twice(tmp_path) -> None:
    model = Block().eval()
    first, again = build(model, 0.05), build(model, 0.05)
    wide = build(model, 1e-6)
    assert first.weight_bytes < 0.4 * wide.weight_bytes
    assert first.save(tmp_path / "a.ridge").read_bytes() == again.save(tmp_path / "b.ridge").read_bytes()
    other = Block().eval()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.0 + 0.02 * torch.randn_like(parameter))
    loaded = Engine.load(tmp_path / "a.ridge")
    loaded.refit(other)
    assert loaded.verify()
    assert max(errors(loaded, other, 50)) < 0.05


def test_the_smallest_file_has_four_bits_where_they_fit() -> None:
    engine = build(Block().eval(), 0.2, objective="size")
    formats = [layer["format"] for layer in engine.receipt["precision"]["layers"]]
    assert "int4" in formats
    assert max(errors(engine, Block().eval(), 100)) <= 0.2
    with pytest.raises(EngineError, match="without a recipe"):
        engine.refit(Block())


@pytest.mark.usefixtures("times")
def test_a_metric_may_fall_by_so_much_and_no_more() -> None:
    model = Block().eval()
    torch.manual_seed(5)
    x = torch.randn(256, 64)
    labels = model(x).argmax(-1)

    def agreement(call) -> float:
        return float((call(x).argmax(-1) == labels).double().mean())

    engine = build(model, 0.3, metric=agreement, max_drop=0.05)
    assert engine.receipt["precision"]["layers"]
    assert agreement(lambda x: torch.cat([engine(rows) for rows in x.split(32)])) >= 0.95
    assert not build(model, 0.3, metric=agreement, max_drop=-0.1).receipt["precision"]["layers"]


def test_a_miss_of_the_timing_table_is_an_error_if_asked() -> None:
    with pytest.raises(EngineError, match="timing table has no"):
        build(Block().eval(), 0.05, error_on_miss=True)


def test_a_complete_timing_table_gives_the_same_bytes(tmp_path) -> None:
    model = Block().eval()
    first = build(model, 0.05)
    again = build(model, 0.05, timings=first.contents.timings, error_on_miss=True)
    assert first.save(tmp_path / "a.ridge").read_bytes() == again.save(tmp_path / "b.ridge").read_bytes()


def test_gptq_and_awq_leave_less_error_than_the_nearest_numbers() -> None:
    torch.manual_seed(0)
    # Inputs whose channels depend on each other, a few of them large
    x = torch.randn(512, 32) @ torch.randn(32, 64) + 0.1 * torch.randn(512, 64)
    x[:, :4] *= 30
    w = torch.randn(48, 64)
    meant = x @ w.t()
    found = {each.method: float((x @ each.restored().t() - meant).norm() / meant.norm())
             for each in (rounding.nearest(w), rounding.awq(w, x), rounding.gptq(w, x.t() @ x))}  # fmt: skip
    assert found["gptq"] < 0.7 * found["nearest"]
    assert found["awq"] < 0.9 * found["nearest"]


def test_a_rotation_spreads_large_weights() -> None:
    torch.manual_seed(0)
    w = 0.02 * torch.randn(48, 64)
    w[torch.arange(48), torch.randint(0, 64, (48,))] = 3.0
    assert ops.hadamard(w, 64).abs().max() < 0.4 * w.abs().max()
    assert torch.allclose(ops.hadamard(ops.hadamard(w, 64), 64), w, atol=1e-5)


def test_four_bits_are_packed_and_restored() -> None:
    q = torch.randint(-8, 8, (6, 64), dtype=torch.int8)
    scale = torch.rand(6, 2) + 0.1
    meant = (q.float().reshape(6, 2, 32) * scale.unsqueeze(-1)).reshape(6, 64)
    assert torch.equal(ops.int4_restored(ops.int4_packed(q), scale), meant)


def test_options_are_taken_by_gain_for_their_squared_error() -> None:
    options = [Option(0, "bf16", 0.01, 1.0, 1.0), Option(0, "int8", 0.1, 1.0, 2.0), Option(1, "bf16", 0.01, 1.0, 5.0)]
    assert [(o.step, o.format) for o in pick(options, 0.0)] == []
    assert [(o.step, o.format) for o in pick(options, 1.5e-4)] == [(1, "bf16")]
    assert [(o.step, o.format) for o in pick(options, 1.0)] == [(0, "int8"), (1, "bf16")]


def test_batch_norms_are_folded_and_refitted() -> None:
    from ridgeline.optimizer import tune_engine

    from .conftest import convolutional

    model = convolutional()
    torch.manual_seed(2)
    x = torch.randn(4, 3, 20, 20)
    found = rl.build(model, (x,), level=0)
    times = iter([2.0, 1.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune_engine, "_time", lambda *given: next(times))
        folded = rl.build(model, (x,), level=1)
    assert not any(step.op.startswith("aten::batch_norm") for step in folded.contents.programs[0].steps)
    assert torch.allclose(folded(x), found(x), atol=1e-5)
    other = convolutional(4)
    folded.refit(other)
    with torch.no_grad():
        assert torch.allclose(folded(x), other(x), atol=1e-5)


@pytest.mark.usefixtures("times")
def test_a_build_whose_time_is_up_says_what_it_did_not_examine(monkeypatch: pytest.MonkeyPatch) -> None:
    from ridgeline.optimizer import tune_engine
    from ridgeline.optimizer.quantize.choose import LEAST_CALLS, Choice

    def ticking(*args: object, deadline_s: float, **options: object) -> Choice:
        ticks = iter(range(1000))  # each look at the clock is a second later
        return Choice(*args, deadline_s=15.0, clock=lambda: float(next(ticks)), **options)

    monkeypatch.setattr(tune_engine, "Choice", ticking)
    receipt = build(Block().eval(), 0.05).receipt
    assert "fewer bits: the time was up after 2 of 3 layers; a larger budget_s examines the others" in receipt["notes"]
    assert {layer["module"] for layer in receipt["precision"]["layers"]} <= {"a", "b"}
    assert receipt["precision"]["eager"]["calls"] == LEAST_CALLS


def test_calls_end_at_the_first_that_the_budget_cannot_hold() -> None:
    from ridgeline.optimizer.quantize.choose import accuracy

    calls = [[torch.full((2, 2), float(i + 1))] for i in range(9)]
    meant = [[x.double()] for (x,) in calls]
    asked = list[float]()

    def call(inputs: list[torch.Tensor]) -> torch.Tensor:
        asked.append(float(inputs[0][0, 0]))
        return inputs[0] * (1.1 if len(asked) == 3 else 1.001)

    assert accuracy(call, calls, meant, 0.05).num_calls == 3
    # Of as many calls, fewer are asked to be farther below the budget
    few, many = (accuracy(lambda inputs: inputs[0] * 1.001, (calls * 6)[:num], (meant * 6)[:num]) for num in (8, 48))
    assert few.bound > many.bound == pytest.approx(1.3e-3, rel=1e-3)
