"""Tensors brought from the host, with the meta device in the place of a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from ridgeline.errors import NotGraphable
from ridgeline.optimizer.constants import Constants


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
