"""Recurrent layers that drop: seen in a call, and their state begun anew where the generator was."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

from recorder import TapeExecutor
from torch import nn

from ridgeline.engine.capture import capture as studio
from ridgeline.engine.capture import rnn_dropout as recurrent
from ridgeline.engine.capture.probe import Journal, Observation
from ridgeline.engine.replay.training import graph_training

_layers: Any = torch.ops.aten._cudnn_rnn.default


class Generator:
    seed, offset = 7, 16

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset


class Recording:
    """Draws four numbers at every replay."""

    def __init__(self, generator: Generator) -> None:
        self.generator, self.replays = generator, 0

    def replay(self) -> None:
        self.generator.offset += 4
        self.replays += 1


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The offsets at which states were made."""
    found: list[int] = []

    def make(generator: Generator, device: torch.device) -> torch.Tensor:
        found.append(generator.offset)
        return torch.full((4,), len(found), dtype=torch.uint8)

    monkeypatch.setattr(recurrent, "_made", make)
    return found


def _called(*, dropout: float, train: bool) -> Observation:
    seen = Observation()
    x, weights = torch.empty(3, 2, 4, device="meta"), [torch.empty(16, 4, device="meta") for _ in range(4)]
    h = torch.empty(2, 2, 4, device="meta")
    with Journal(seen):
        _layers(x, weights, 2, None, h, h, 2, 4, 0, 2, False, dropout, train, False, [], None)
    return seen


def test_layers_that_drop_are_seen_and_others_are_not() -> None:
    assert _called(dropout=0.5, train=True).recurrent == torch.device("meta")
    assert _called(dropout=0.0, train=True).recurrent is None
    assert _called(dropout=0.5, train=False).recurrent is None


def test_a_state_is_begun_once_and_again_after_a_seeding(made: list[int]) -> None:
    generator, state = Generator(), torch.zeros(4, dtype=torch.uint8)
    followed = recurrent.Following(Recording(generator), state, generator)  # type: ignore[arg-type]
    followed.replay()
    followed.replay()
    assert made == [16], "the first replay begins it, wherever searches have left it"
    generator.offset += 100  # drawn by somebody else
    followed.replay()
    assert len(made) == 1
    generator.offset = 0
    followed.replay()
    generator.seed = 8
    followed.replay()
    assert made == [16, 0, 4] and state.tolist() == [3] * 4, "in the place that the recording reads"


def test_the_forward_is_captured_with_a_state_of_its_own_and_the_backward_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order, executor = [], TapeExecutor()
    record = executor.record
    monkeypatch.setattr(studio, "settled", lambda device: order.append("state") or torch.zeros(1))
    monkeypatch.setattr(studio, "following", lambda inner, device, state: order.append("held") or inner)
    monkeypatch.setattr(executor, "record", lambda *args, **kwargs: order.append("recorded") or record(*args, **kwargs))
    judge = studio.Studio.judge

    def judged(self: Any, seen: Observation, statics: Any) -> None:
        judge(self, seen, statics)
        self._recurrent = seen.recurrent or torch.device("cpu")

    monkeypatch.setattr(studio.Studio, "judge", judged)
    model, x = nn.LSTM(4, 4, 2), torch.randn(3, 2, 4)
    graphed = graph_training(model, (x,), {}, model, loss=lambda found: found[0].sum(), executor=executor)
    assert order == ["state", "recorded", "held", "recorded"]
    graphed(x)[0].sum().backward()
    assert graphed.replays == 1 and not graphed.misses
