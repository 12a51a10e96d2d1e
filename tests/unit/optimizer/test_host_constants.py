"""Tensors brought from the host, with the meta device in the place of a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

from recorder import TapeExecutor
from torch import nn

from ridgeline.engine.capture.capture import Studio
from ridgeline.engine.capture.host_constants import Constants, compiled_as_ever
from ridgeline.engine.guards.check import Watch
from ridgeline.engine.replay.inference import graph_inference, graph_training
from ridgeline.engine.shallow_clone import shallow_clone
from ridgeline.errors import NotGraphable
from ridgeline.optimizer.search.blocks import Group
from ridgeline.optimizer.search.candidate import _in_python, compile_blocks


def _brings(scale: float = 1.0, num: int = 1) -> Callable[[], list[torch.Tensor]]:
    def run() -> list[torch.Tensor]:
        made = [torch.full((3,), scale).to("meta") for _ in range(num)]
        target = torch.empty(4, device="meta")
        target.copy_(torch.ones(4))
        picked = [target[torch.tensor([0, 3])], target[[0, 3]], target[None, [1]]]
        return [*made, torch.tensor([1.0, 2.0], device="meta"), target, *picked]

    return run


def _collected(run: Callable[[], object]) -> Constants:
    constants = Constants("meta", factories=True)
    with constants.collecting():
        run()
    return constants


def test_every_way_to_bring_a_tensor_is_seen() -> None:
    constants = _collected(_brings())
    assert len(constants.held) == 6
    with constants.serving():
        again = _brings()()
    assert [t.device.type for t in again] == ["meta"] * 6
    assert again[0] is not constants.held[0][1]  # what a call does to it is done to a copy


def test_a_call_that_brings_nothing_has_no_constants() -> None:
    assert not _collected(lambda: torch.ones(3) + 1)


@pytest.mark.parametrize("other", [_brings(2.0), _brings(num=2), _brings(num=0)])
def test_contents_that_differ_from_call_to_call_are_refused(other: Callable[[], object]) -> None:
    constants = _collected(_brings())
    with pytest.raises(NotGraphable, match="host"), constants.serving():
        other()


def test_a_number_that_is_no_number_is_the_same_again() -> None:
    run = _brings(float("nan"))
    with _collected(run).serving():
        run()


class Positions(nn.Module):
    """Looks at values on the device: of positions, which are the same at every call, or of its input."""

    def __init__(self, looks_at: str) -> None:
        super().__init__()
        self.layer, self.looks_at = nn.Linear(8, 8), looks_at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        place = torch.arange(x.shape[0])
        jumps = (place.diff() != 1).cumsum(0)
        if self.looks_at == "a written one":
            jumps[0] = x[0, 0] > 0
        looked = x if self.looks_at == "the input" else torch.rand(3) if self.looks_at == "a draw" else jumps
        if bool((looked == 0).all()):
            x = x + 1
        return self.layer(x)


@pytest.mark.parametrize("training", [False, True])
def test_values_made_of_positions_may_be_read(training: bool) -> None:
    torch.manual_seed(0)
    model, x = Positions("positions"), torch.randn(4, 8)
    record = graph_training if training else graph_inference
    with torch.set_grad_enabled(training):
        graphed = record(model, (x,), {}, model, executor=TapeExecutor())
        other = torch.randn(4, 8)
        assert torch.equal(graphed(other), model(other)) and graphed.replays == 1


@pytest.mark.parametrize("looks_at", ["the input", "a draw", "a written one"])
def test_values_of_anything_else_may_not_be_read(looks_at: str) -> None:
    model = Positions(looks_at)
    with pytest.raises(NotGraphable), torch.no_grad():
        graph_inference(model, (torch.randn(4, 8),), {}, model, executor=TapeExecutor())


def test_compiled_code_sees_nothing_of_ours_and_what_is_around_it_is_still_looked_at() -> None:
    from torch.overrides import _get_current_function_mode

    seen = []

    def run() -> None:
        torch.tensor(1.0, device="meta")
        with compiled_as_ever():
            seen.append(_get_current_function_mode())
            torch.tensor([2.0, 3.0], device="meta")  # compiled code brings what it brings by itself
        torch.tensor(4.0, device="meta")

    constants = _collected(run)
    assert seen == [None]
    assert [float(source) for source, _ in constants.held] == [1.0, 4.0]
    with compiled_as_ever():  # where nothing is looked at there is nothing to hide
        assert _get_current_function_mode() is None


def test_blocks_are_called_as_compiled_while_the_model_around_them_is_looked_at() -> None:
    """gpt-oss makes ``torch.tensor(0.0, device=…)`` for its masks, outside of blocks, and was not recorded for it."""
    from torch.overrides import _get_current_function_mode

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.tensor(0.5, device="meta")
            for block in self.blocks:
                x = block(x)
            return x

    model, seen = Model(), []

    def compiler(group: Group) -> Callable[..., object]:
        def run(block: nn.Module, *args: object) -> object:
            seen.append(_get_current_function_mode())
            return group.kind.forward(block, *args)

        return run

    blocks = _in_python(compile_blocks(shallow_clone(model), compiler))
    constants = _collected(lambda: blocks(torch.ones(2, 4)))
    assert seen == [None] * 3 and len(constants.held) == 1
    assert Studio(blocks, model, Watch(model), TapeExecutor())._in_python
