"""Software stacks: work read off a graph, and steps priced with a handful of numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.basis import Basis
from ridgeline.errors import InputError
from ridgeline.hardware import device
from ridgeline.models import build
from ridgeline.sim.stack import KINDS, NUM_PRODUCT_KINDS, Reach, idle_factor, load_of, reach_of, stacks, step_s

A100 = device("a100")
LOAD = load_of(build("resnet50", batch=64, precision="fp16"))
REACH = reach_of("ngc-pytorch-train", "a100").reach


def test_the_load_holds_the_flops_of_the_graph() -> None:
    flops = float((LOAD.flops * LOAD.times).sum())
    assert flops == pytest.approx(64 * 8.2e9, rel=0.02)  # ResNet-50: 4.1 billion multiply-adds
    assert {KINDS[kind] for kind in LOAD.kind} >= {"conv", "gemm", "norm", "memory"}
    assert LOAD.params == 25_557_032


def test_rows_of_a_huge_table_are_updated_alone() -> None:
    load = load_of(build("dlrm", batch=1024, precision="fp16", mode="train", optimizer="none"))
    assert float((load.num_bytes * load.times).sum()) < 3e9  # the tables hold 48e9


def test_mixed_precision_pays_for_its_copies() -> None:
    half, single = (load_of(build("bert-base", batch=1, seq=128, precision=p, mode="train")) for p in ("fp16", "fp32"))
    assert float((half.num_bytes * half.times).sum()) > 0.75 * float((single.num_bytes * single.times).sum())


@pytest.mark.parametrize("name", sorted(field for field in Reach.__slots__ if field.endswith("_frac")))
def test_reaching_more_is_never_slower(name: str) -> None:
    if name == "sync_frac":
        pytest.skip("a slowdown, not a share")
    more = replace(REACH, **{name: getattr(REACH, name) * 1.5})
    for precision in ("fp16", "tf32", "fp32", "int8"):
        before, after = (step_s(LOAD, A100, precision, reach, 1e-2, 8) for reach in (REACH, more))
        assert after <= before


def test_gradients_travel_under_the_backward_pass_as_far_as_it_reaches() -> None:
    load = load_of(build("resnet50", batch=64, precision="fp16", mode="train"))
    alone, little, much = (step_s(load, A100, "fp16", REACH, comm_s, 8) for comm_s in (0.0, 1e-4, 1.0))
    assert alone == pytest.approx(little) and much > alone + 0.9


def test_a_stack_on_a_device_it_never_ran_on_is_assumed_and_wider() -> None:
    known, unknown = reach_of("tensorrt", "a100"), reach_of("tensorrt", "rtx-4090")
    assert known.basis is Basis.FITTED and unknown.basis is Basis.ASSUMED
    assert unknown.spread_frac > known.spread_frac
    with pytest.raises(InputError, match="no coefficients for the software 'tensorrd'; did you mean 'tensorrt"):
        reach_of("tensorrd", "a100")


@pytest.mark.parametrize("stack", stacks())
def test_no_stack_beats_a_peak(stack: str) -> None:
    reach = reach_of(stack, "nowhere").reach
    for share in (reach.gemm_frac, reach.conv_frac, reach.volume_frac, reach.thin_frac):
        assert 0 < share * max(1.0, reach.fp32_frac, reach.tf32_frac, reach.int8_frac) <= 1.0


def test_products_that_leave_cores_idle_take_up_to_twice_their_arithmetic() -> None:
    small, large = (load_of(build("bert-base", batch=b, seq=128, head="none", precision="fp16")) for b in (1, 64))
    few, many = (idle_factor(load, A100.num_cores)[load.rows > 0] for load in (small, large))
    assert few.max() > 1.3 and few.mean() > 1.1 * many.mean()
    assert sorted(many)[-2] < 1.15  # all but the pooler, one row a sample
    assert few.min() >= 1.0 and few.max() <= 2.0
    assert (idle_factor(small, A100.num_cores)[small.rows == 0] == 1.0).all()


def test_a_split_load_has_its_ranks_part_of_the_work_and_of_the_columns() -> None:
    half = LOAD.split(2)
    assert float((half.flops * half.times).sum()) == pytest.approx(0.5 * float((LOAD.flops * LOAD.times).sum()))
    assert (half.cols == LOAD.cols / 2).all() and (half.times == LOAD.times).all()


def test_casting_costs_the_host_only_in_half_precision() -> None:
    slow = replace(REACH, cast_factor=1.5, op_s=1e-3)
    plain = replace(slow, cast_factor=1.0)
    assert step_s(LOAD, A100, "fp16", slow) > 1.4 * step_s(LOAD, A100, "fp16", plain)
    assert step_s(LOAD, A100, "tf32", slow) == step_s(LOAD, A100, "tf32", plain)


def test_kernels_between_products_have_a_cost_of_their_own() -> None:
    free = replace(REACH, pass_s=0.0)
    passes = float(LOAD.times[LOAD.kind >= NUM_PRODUCT_KINDS].sum())
    saved_s = step_s(LOAD, A100, "fp16", REACH) - step_s(LOAD, A100, "fp16", free)
    assert saved_s == pytest.approx(passes * REACH.pass_s, rel=0.01)
