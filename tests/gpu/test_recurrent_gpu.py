"""Recorded steps of recurrent layers on a device: eager's gradients, and eager's dropout after a seeding."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from ridgeline.engine.replay.training import graph_training

KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():  # 16-bit weights are put together at every call, with a warning
        warnings.simplefilter("ignore")
        yield


def _layers(kind: str, dtype: Any, dropout: float) -> tuple[Any, Any]:
    torch.manual_seed(0)
    layers = KINDS[kind](48, 64, 2, dropout=dropout, bidirectional=kind == "gru").to("cuda", dtype).train()
    return layers, torch.randn(7, 5, 48, device="cuda", dtype=dtype)


def _loss(found: Any) -> Any:
    return found[0].float().square().mean()


def _stepped(call: Any, layers: Any, x: Any) -> list[Any]:
    layers.zero_grad(set_to_none=True)
    found = call(x)
    _loss(found).backward()
    return [found[0].detach().clone(), *(p.grad.clone() for p in layers.parameters())]


def _apart(these: list[Any], those: list[Any]) -> float:
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(these, those, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "float32"])
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_recorded_layers_take_eager_steps_also_after_a_seeding(kind: str, dtype: Any, dropout: float) -> None:
    layers, x = _layers(kind, dtype, dropout)
    graphed = graph_training(layers, (x,), {}, layers, loss=_loss)
    for seed in (5, 6, 5):
        found = {}
        for who, call in (("eager", layers), ("recorded", graphed)):
            torch.manual_seed(seed)
            found[who] = [_stepped(call, layers, x) for _ in range(3)]
        for mine, eager in zip(found["recorded"], found["eager"], strict=True):
            assert _apart(mine, eager) < (2e-2 if dtype is torch.bfloat16 else 1e-3)
        if dropout:
            assert _apart(found["eager"][1], found["eager"][0]) > 0.1, "every step drops others"
    assert graphed.replays == 9 and not graphed.misses


def test_a_recording_holds_the_state_that_its_layers_drop_by() -> None:
    layers, x = _layers("lstm", torch.float32, 0.5)
    graphed = graph_training(layers, (x,), {}, layers, loss=_loss)
    _stepped(graphed, layers, x)
    torch.manual_seed(1)
    _stepped(layers, layers, x)  # PyTorch lets go of its old state here, which is anybody's now
    sevens = [torch.full((size,), 7, dtype=torch.uint8, device="cuda") for size in [3 << 20, 2 << 20, 1 << 20] * 40]
    for _ in range(5):
        _stepped(graphed, layers, x)
    torch.cuda.synchronize()
    assert all(bool((each == 7).all()) for each in sevens)
    assert graphed.replays == 6


def test_steps_without_a_seeding_drop_others_every_time() -> None:
    layers, x = _layers("gru", torch.float32, 0.5)
    graphed = graph_training(layers, (x,), {}, layers, loss=_loss)
    steps = [_stepped(graphed, layers, x)[0] for _ in range(6)]
    assert min(_apart([a], [b]) for i, a in enumerate(steps) for b in steps[:i]) > 0.05


def test_gradients_of_recorded_layers_add_up() -> None:
    """cuDNN leaves those of all weights in one stretch of memory, in which the next step's are written."""
    layers, x = _layers("lstm", torch.float32, 0.0)
    graphed = graph_training(layers, (x,), {}, layers, loss=_loss)
    found = []
    for call in (layers, graphed):
        layers.zero_grad(set_to_none=True)
        for i in range(3):
            _loss(call(x + i)).backward()
        found.append([p.grad.clone() for p in layers.parameters()])
    assert _apart(found[1], found[0]) < 1e-3 and graphed.replays == 3
