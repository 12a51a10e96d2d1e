"""Programs on the stand-in GPU: healthy ones are told nothing, injected causes are found, and the clock is its own."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from lab.planted import blind, healthy
from lab.planted.stand_in import StandIn


@pytest.mark.parametrize("name", ["a_convolutional_network_serving", "few_large_experts_in_turn", "two_towers"])
def test_a_healthy_program_is_told_nothing(name: str, tmp_path: Path) -> None:
    assert healthy.told(name, tmp_path) == ()


@pytest.mark.parametrize(
    "name", ["a_ranker_left_in_fp32", "windows_from_ordinary_memory", "a_cache_joined_at_every_token"]
)
def test_an_injected_cause_is_found_and_its_gain_is_inside(name: str, tmp_path: Path) -> None:
    said = blind.said_of(name, tmp_path)
    assert said.found and said.held, said


def test_a_step_takes_the_same_time_whatever_the_machine_does(tmp_path: Path) -> None:
    with StandIn() as gpu:
        step = blind.CASES["boxes_sorted_on_the_host"].build(gpu, False)
        times = [gpu.record(step, tmp_path / f"{i}.json", steps=1) for i in range(2)]
    assert times[0] == times[1] > 0
