"""Memory of a rank against counts made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.plan import Plan
from ridgeline.plan.schedule import BACKWARD, FORWARD, WEIGHT, Schedule, Work
from ridgeline.sim.footprint import Held, footprint, static_bytes

HELD = Held(numel=1000.0, expert_numel=0.0, frozen_numel=0.0, largest_layer_numel=100.0, saved_bytes=64.0,
            working_bytes=8.0)  # fmt: skip
SPLIT = (Work(FORWARD, 0, 0), Work(BACKWARD, 0, 0), Work(FORWARD, 1, 0), Work(WEIGHT, 0, 0), Work(BACKWARD, 1, 0))


def activations(order: tuple[Work, ...], *, split: bool) -> list[float]:
    made = footprint(0, [HELD], Schedule((order,), 1, split), Plan(), 1e12)
    return [live - made.over_time[0][1] + HELD.saved_bytes for _, live in made.over_time]


def test_a_split_backward_keeps_half_of_the_activations_for_the_weight_gradient():
    assert activations(SPLIT, split=True) == pytest.approx([64, 64, 96, 96, 64])


def test_a_whole_backward_frees_all_activations_at_once():
    assert activations(SPLIT[:3], split=False) == pytest.approx([64, 64, 64])


def test_chunks_of_a_stage_share_the_memory_of_the_one_that_runs():
    made = footprint(0, [HELD, replace(HELD, working_bytes=24.0)], Schedule((SPLIT[:2],), 1, False), Plan(), 1e12)
    assert made.by_kind["working"] == 24.0


@pytest.mark.parametrize(
    ("zero", "parameters", "gradients", "optimizer"),
    [(0, 2000, 4000, 12000), (1, 2000, 4000, 3000), (2, 2000, 1000, 3000)],
)
def test_each_stage_of_sharding_divides_one_more_state(zero, parameters, gradients, optimizer):
    found = static_bytes([HELD], Plan(dp=4, zero=zero, reduce_dtype="fp32"))
    assert (found["parameters"], found["gradients"], found["optimizer"]) == (parameters, gradients, optimizer)


def test_full_sharding_holds_two_whole_layers_in_the_wide_type():
    found = static_bytes([HELD], Plan(dp=4, zero=3, reduce_dtype="fp32"))
    assert found["gathered"] == 2 * 100 * 2


def test_parameters_of_float32_are_their_own_master_copy():
    plain, wide = (static_bytes([HELD], Plan(precision=p, zero=0))["optimizer"] for p in ("bf16", "fp32"))
    assert (plain, wide) == (12000.0, 8000.0)
