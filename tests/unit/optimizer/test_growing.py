"""Recordings that reserve more than eager are recorded once more, into memory that grows."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from ridgeline.errors import NotGraphable
from ridgeline.optimizer import executor
from ridgeline.optimizer import search as searching
from ridgeline.optimizer.backend import Report
from ridgeline.optimizer.candidate import Built, Candidate
from ridgeline.optimizer.inputs import Inputs
from ridgeline.optimizer.search import Problem, Search


@pytest.fixture
def settings(monkeypatch: Any) -> list[str]:
    """What the allocator is told."""
    told: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append, raising=False)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return told


def test_the_allocator_is_told_for_the_time_of_a_recording_and_only_where_nobody_else_has(
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
        self.reserved, self.able, self.asked = 100, able, list[bool]()
        monkeypatch.setattr(searching, "build", self.build)
        monkeypatch.setattr(searching, "reserved_bytes", lambda device: self.reserved)
        monkeypatch.setattr(Built, "release", lambda built: self.released(built))
        problem = Problem(model=nn.Linear(2, 2), inputs=Inputs((torch.zeros(1, 2),)), mode=mode,
                          device=torch.device("cpu"))  # fmt: skip
        self.search = Search(problem)
        self.search.base_reserved, self.search.eager_reserved = 100, eager_reserved

    def build(self, candidate: Candidate, model: Any, *args: Any, **kwargs: Any) -> Built:
        self.asked.append(candidate.grows)
        if candidate.grows and not self.able:
            raise NotGraphable("no such allocator")
        self.reserved = 140 if candidate.grows else 160
        return Built(candidate, model, Report())

    def made_with(self, base: Built | None = None, **more: Any) -> Built:
        self.reserved = 100
        return self.search._made(Candidate(name="graph", graphed=True, **more), base)

    def released(self, built: Built) -> None:
        self.reserved = 100


def test_what_reserves_more_than_eager_is_recorded_into_memory_that_grows(monkeypatch: Any) -> None:
    device = Device(monkeypatch, 150)
    built = device.made_with()
    assert device.asked == [False, True] and built.candidate.grows and built.reserved_bytes == 140
    assert any("ranges that grow" in note for note in device.search.notes)


@pytest.mark.parametrize(("eager_reserved", "mode"), [(170, "train"), (150, "infer")])
def test_what_fits_is_left_as_it_is(monkeypatch: Any, eager_reserved: int, mode: str) -> None:
    device = Device(monkeypatch, eager_reserved, mode=mode)
    assert not device.made_with().candidate.grows and device.asked == [False]


def test_an_allocator_that_cannot_grow_leaves_the_recording_as_it_was(monkeypatch: Any) -> None:
    device = Device(monkeypatch, 150, able=False)
    built = device.made_with()
    assert device.asked == [False, True, False] and not built.candidate.grows and built.reserved_bytes == 160


def test_nothing_is_compiled_a_second_time_for_its_memory(monkeypatch: Any) -> None:
    device = Device(monkeypatch, 150)
    assert not device.made_with(compiler="inductor").candidate.grows and device.asked == [False]
    base = Built(Candidate(name="compiled", compiler="inductor"), device.search.problem.model, Report())
    assert device.made_with(base, compiler="inductor").candidate.grows
