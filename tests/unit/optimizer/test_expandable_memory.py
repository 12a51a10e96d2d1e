"""Captures that reserve more memory than eager are repeated with expandable segments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from ridgeline.engine.capture import cuda_graph as executor
from ridgeline.engine.example_inputs import Inputs
from ridgeline.errors import NotGraphable
from ridgeline.optimizer.backend import Report
from ridgeline.optimizer.search import builds, memory
from ridgeline.optimizer.search import search as searching
from ridgeline.optimizer.search.candidate import Built, Candidate
from ridgeline.optimizer.search.facts import Proposal
from ridgeline.optimizer.search.problem import Problem
from ridgeline.optimizer.search.search import Search


@pytest.fixture
def settings(monkeypatch: Any) -> list[str]:
    """What the allocator is told."""
    told: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append, raising=False)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return told


def test_the_allocator_is_told_for_the_time_of_a_capture_and_only_where_nobody_else_has(
    settings: list[str], monkeypatch: Any
) -> None:
    with executor._growing():
        assert not settings
    with executor.growing(), executor._growing():
        assert settings == ["expandable_segments:True"]
    assert settings.pop() == "expandable_segments:False"
    settings.clear()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    with executor.growing(), executor._growing():
        assert not settings


class Device:
    """A device whose recordings reserve 60 bytes in segments and 40 in ranges, where they can grow."""

    def __init__(self, monkeypatch: Any, eager_reserved: int, *, mode: str = "train", able: bool = True) -> None:
        self.reserved, self.able, self.asked, self.bases = 100, able, list[bool](), list[Any]()
        monkeypatch.setattr(builds, "build", self.build)
        for module in (searching, builds):
            monkeypatch.setattr(module, "reserved_bytes", lambda device: self.reserved)
        monkeypatch.setattr(Built, "release", lambda built: self.released(built))
        problem = Problem(model=nn.Linear(2, 2), inputs=Inputs((torch.zeros(1, 2),)), mode=mode,
                          device=torch.device("cpu"))  # fmt: skip
        self.search = Search(problem)
        self.search.memory.base_reserved, self.search.memory.eager_reserved = 100, eager_reserved

    def build(self, candidate: Candidate, model: Any, *args: Any, **kwargs: Any) -> Built:
        self.asked.append(candidate.grows)
        self.bases.append(kwargs["base"])
        if candidate.grows and not self.able:
            raise NotGraphable("no such allocator")
        self.reserved = 140 if candidate.grows else 160
        return Built(candidate, model, Report())

    def won_by(self, **more: Any) -> Built:
        """The winner after it was looked at, where a recording has won."""
        candidate = Candidate(name="graph", graphed=True, **more)
        if candidate.compiles:
            bare = replace(candidate, name="", graphed=False)
            self.search.builds.families[bare] = Built(bare, self.search.problem.model, Report())
        self.reserved, self.search.best = 100, self.search.builds.made(candidate, None)
        self.search.record(self.search.best, "winner", "")
        self.search.shrink_pool()
        return self.search.best

    def released(self, built: Built) -> None:
        self.reserved = 100


def test_a_winner_that_reserves_more_than_eager_is_captured_into_expandable_segments(monkeypatch: Any) -> None:
    device = Device(monkeypatch, 150)
    built = device.won_by()
    assert device.asked == [False, True] and built.candidate.grows and built.reserved_bytes == 140
    assert any("expandable segments" in note for note in device.search.notes)


@pytest.mark.parametrize(("eager_reserved", "mode"), [(170, "train"), (150, "infer")])
def test_what_fits_is_left_as_it_is(monkeypatch: Any, eager_reserved: int, mode: str) -> None:
    device = Device(monkeypatch, eager_reserved, mode=mode)
    assert not device.won_by().candidate.grows and device.asked == [False]


def test_an_allocator_without_expandable_segments_leaves_the_capture_as_it_was(monkeypatch: Any) -> None:
    device = Device(monkeypatch, 150, able=False)
    built = device.won_by()
    assert device.asked == [False, True, False] and not built.candidate.grows and built.reserved_bytes == 160


def test_compiled_code_is_captured_again_and_not_compiled_again(monkeypatch: Any) -> None:
    device = Device(monkeypatch, 150)
    assert device.won_by(compiler="inductor").candidate.grows
    assert [base is not None for base in device.bases] == [False, True]


def test_one_too_large_in_segments_gets_its_chance_before_it_is_turned_down(monkeypatch: Any) -> None:
    device = Device(monkeypatch, 130)
    monkeypatch.setattr(memory, "WORKSPACE_BYTES", 10)
    monkeypatch.setattr(Search, "_peak_bytes", lambda self, built: built.reserved_bytes)
    monkeypatch.setattr(Search, "race", _stopped)
    search = device.search
    search.memory.limit_bytes, device.reserved = 120, 100
    built = search.builds.made(Candidate(name="graph", graphed=True), None)
    search.judge(built, Proposal(Candidate(name="graph"), 1.0))
    assert device.asked == [False, True] and "raced" in search.entries["graph"].reason


def _stopped(self: Search, built: Built) -> Any:
    raise NotGraphable(f"raced, {built.candidate.grows}")
