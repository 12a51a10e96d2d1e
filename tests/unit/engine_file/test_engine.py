"""Engines: built, saved, loaded, called, refitted, verified."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ridgeline as rl
from ridgeline.engine.file.engine import Engine
from ridgeline.errors import EngineError

from .conftest import attention, convolutional, perceptron


@pytest.mark.parametrize(
    ("make", "shape"), [(perceptron, (4, 16)), (convolutional, (4, 3, 20, 20)), (attention, (4, 6, 32))]
)
def test_an_engine_returns_the_bits_of_its_model_at_every_batch(make, shape, tmp_path: Path) -> None:
    model = make()
    engine = rl.build(model, (torch.randn(shape),), shapes={"batch": (1, 4, 9)}, level=0)
    loaded = Engine.load(engine.save(tmp_path / "m.ridge"))
    for batch in (1, 2, 9):
        x = torch.randn(batch, *shape[1:])
        with torch.no_grad():
            meant = model(x)
        for found in (engine(x), loaded(x)):
            if isinstance(meant, dict):
                assert list(found) == list(meant)
                assert all(torch.equal(found[name], meant[name]) for name in meant)
            else:
                assert torch.equal(found, meant)


def test_a_thousand_runs_return_the_same_bits(engine: Engine) -> None:
    x = torch.randn(8, 16)
    first = engine(x)
    assert all(torch.equal(engine(x), first) for _ in range(1000))


def test_ten_builds_write_the_same_bytes(tmp_path: Path) -> None:
    made = set()
    for i in range(10):
        torch.manual_seed(1)
        engine = rl.build(perceptron(), (torch.randn(4, 16),), shapes={"batch": (1, 8)}, level=0, name="p")
        made.add(engine.save(tmp_path / f"{i}.ridge").read_bytes())
    assert len(made) == 1


def test_a_file_says_nothing_of_where_and_when_it_was_made(saved: Path, tmp_path: Path) -> None:
    data = saved.read_bytes()
    assert str(tmp_path).encode() not in data
    assert b"2026" not in data


def test_refits_write_the_bytes_of_a_rebuild(engine: Engine, tmp_path: Path) -> None:
    x = torch.randn(4, 16)
    torch.manual_seed(5)
    example = torch.randn(4, 16)
    engine = rl.build(perceptron(), (example,), shapes={"batch": (1, 8)}, level=0, name="p")
    for seed in range(1, 20):
        other = perceptron(seed)
        engine.refit(other.state_dict())
        rebuilt = rl.build(other, (example,), shapes={"batch": (1, 8)}, level=0, name="p")
        refitted = engine.save(tmp_path / "a.ridge").read_bytes()
        assert refitted == rebuilt.save(tmp_path / "b.ridge").read_bytes()
        assert torch.equal(engine(x), rebuilt(x))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state.pop("0.bias"), "without '0.bias'"),
        (lambda state: state.update(extra=torch.ones(2)), "'extra'"),
        (lambda state: state.update({"0.weight": torch.ones(3, 3)}), "instead of"),
        (lambda state: state.update({"0.weight": state["0.weight"].double()}), "float64"),
    ],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(engine: Engine, change, said: str) -> None:
    x = torch.randn(2, 16)
    before = engine(x)
    state = dict(perceptron(3).state_dict())
    change(state)
    with pytest.raises(EngineError, match=said):
        engine.refit(state)
    assert torch.equal(engine(x), before)


def test_a_pickled_checkpoint_is_refused(engine: Engine, tmp_path: Path) -> None:
    torch.save(perceptron(1).state_dict(), tmp_path / "w.pt")
    with pytest.raises(EngineError, match="safetensors"):
        engine.refit(tmp_path / "w.pt")


def test_shared_weights_are_stored_once_and_refitted_together() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(ids))

    model = Tied()
    ids = torch.randint(0, 50, (3, 7))
    engine = rl.build(model, (ids,), level=0)
    assert engine.weight_bytes == 50 * 16 * 4
    other = Tied()
    engine.refit(other)
    assert torch.equal(engine(ids), other(ids))
    state = dict(other.state_dict())
    state["head.weight"] = state["head.weight"] + 1
    with pytest.raises(EngineError, match="one weight"):
        engine.refit(state)


def test_verify_tells_a_right_engine_from_one_whose_weights_were_changed(saved: Path) -> None:
    engine = Engine.load(saved)
    found = engine.verify()
    assert found and "verified" in str(found)
    engine.contents.weights["0.weight"].mul_(1.001)
    assert not engine.verify()


def test_arrays_in_give_arrays_out_and_buffers_are_filled(engine: Engine) -> None:
    x = np.random.RandomState(0).standard_normal((2, 16)).astype(np.float32)
    found = engine.run({"input": x})["output"]
    assert isinstance(found, np.ndarray) and np.array_equal(found, engine(torch.from_numpy(x)).numpy())
    buffer = torch.empty(2, 10)
    assert engine.run({"input": torch.from_numpy(x)}, out={"output": buffer})["output"] is buffer
    assert np.array_equal(buffer.numpy(), found)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda e: e(torch.randn(9, 16)), "no profile for 9x16.*batch 1..8"),
        (lambda e: e(torch.randn(2, 17)), "no profile for 2x17"),
        (lambda e: e(torch.randn(2, 16).double()), "float64.*takes float32"),
        (lambda e: e(torch.randn(2, 16, 1)), "3 dims"),
        (lambda e: e(), "'input' is missing"),
        (lambda e: e(torch.randn(2, 16), 3), "1 positional"),
        (lambda e: e(other=torch.randn(2, 16)), "no input 'other'"),
        (lambda e: e("text"), "str"),
        (lambda e: e(torch.randn(2, 16), input=torch.randn(2, 16)), "twice"),
    ],
)
def test_a_call_that_does_not_fit_is_told_why(engine: Engine, call, said: str) -> None:
    with pytest.raises(EngineError, match=said):
        call(engine)


def test_gradients_are_neither_wanted_nor_left() -> None:
    engine = rl.build(perceptron(), (torch.randn(4, 16),), level=0)
    assert not engine(torch.randn(4, 16, requires_grad=True)).requires_grad


def test_a_model_that_writes_to_its_buffers_is_refused() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return x + self.calls

    with pytest.raises(EngineError, match="calls"):
        rl.build(Counting(), (torch.randn(3),), level=0)


def test_building_leaves_the_model_in_training_mode() -> None:
    model = convolutional().train()
    rl.build(model, (torch.randn(2, 3, 20, 20),), level=0)
    assert all(module.training for module in model.modules())


def test_weights_beyond_the_budget_are_fetched_by_every_call(saved: Path) -> None:
    whole, streamed = Engine.load(saved), Engine.load(saved, weight_budget="1 kB")
    assert streamed.streamed_bytes > whole.streamed_bytes == 0
    x = torch.randn(3, 16)
    assert torch.equal(whole(x), streamed(x))


def test_shapes_by_input_name_their_dims(tmp_path: Path) -> None:
    engine = rl.build(attention(), (torch.randn(2, 6, 32),), shapes={"x": ["1x4x32", "2x6x32", "4x12x32"]}, level=0)
    for batch, length in ((1, 4), (3, 11), (4, 12)):
        assert engine(torch.randn(batch, length, 32))["hidden"].shape == (batch, length, 32)
    with pytest.raises(EngineError, match="no profile"):
        engine(torch.randn(2, 13, 32))


def test_the_zoo_still_answers_to_its_names() -> None:
    assert rl.build("resnet50", batch=2).name


def test_operators_of_masks_are_in_the_op_set() -> None:
    class Masked(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return (a & b) | (a ^ b)

    a, b = torch.tensor([True, False]), torch.tensor([True, True])
    assert torch.equal(rl.build(Masked(), (a, b), level=0)(a, b), Masked()(a, b))


def test_bindings_reach_the_ops_that_programs_name() -> None:
    """PyTorch's bindings, which engines call for speed, against the overloads themselves."""
    from ridgeline.engine.file.execute import BOUND, function_of, overload_of

    x, w = torch.rand(4, 4) + 0.5, torch.randn(4, 4)
    image, kernel, row = torch.randn(1, 4, 4, 4), torch.randn(2, 4, 3, 3), torch.randn(4)
    arguments = {
        "linear.default": (x, w, row), "layer_norm.default": (x, [4], row, row, 1e-5), "matmul.default": (x, w),
        "view.default": (x, [2, 8]), "reshape.default": (x, [2, 8]), "permute.default": (x, [1, 0]),
        "conv2d.default": (image, kernel, None, [1, 1], [1, 1]), "mm.default": (x, w),
        "bmm.default": (image[0], image[0]),
        "batch_norm.default": (image, row, row, row, x[0], False, 0.1, 1e-5, False), "transpose.int": (x, 0, 1),
        "softmax.int": (x, -1),
    }  # fmt: skip
    for name in BOUND:
        for given in (arguments.get(name, (x, w) if name.endswith(".Tensor") else (x,)),
                      *([(x, 2.5)] if name.endswith(".Tensor") else [])):  # fmt: skip
            found, meant = function_of(f"aten::{name}")(*given), overload_of(f"aten::{name}")(*given)
            assert torch.equal(found, meant) and found.stride() == meant.stride(), name
