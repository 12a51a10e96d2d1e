"""Pointwise operators and copies: which kernel runs, and what that costs."""

from __future__ import annotations

import pytest

from ridgeline.cost.call import Call, Time, call
from ridgeline.cost.time.chip import Chip
from ridgeline.cost.time.stream.elementwise import ALU, DEFAULTS, alu_of, model, sweeps
from ridgeline.errors import CostError

H200 = Chip(
    name="h200", arch="hopper", num_sms=132, clock_hz=1.98e9, dram_bytes_per_s=4.8e12, l2_bytes=62914560.0,
    l2_bytes_per_s=10.14e12, smem_bytes=233472.0, tensor_flops_per_s={}, vector_flops_per_s=66.9e12,
    tdp_w=700.0, idle_w=75.0,
)  # fmt: skip


def time(made: Call, warm_frac: float = 0.0) -> Time:
    return model(made, H200, DEFAULTS, warm_frac)


def paths(made: Call) -> list[str]:
    return [sweep.path for sweep in sweeps(made, H200, DEFAULTS)]


def generic(numel: int, num_inputs: int = 2, alu: int = 1, library: str = "aten", **more: int) -> Call:
    size = 2 * numel
    shape = {
        "numel": numel,
        "read_bytes": num_inputs * size,
        "written_bytes": size,
        "num_inputs": num_inputs,
        "alu": alu,
        "vector": 1,
    }
    return call("pointwise", "bf16", "fwd", library, **(shape | more))


def test_a_large_addition_runs_at_memory_speed():
    moved = 3 * 2 * 2**28
    assert time(call("add", "bf16", n=2**14, c=2**14)).busy_s == pytest.approx(moved / 4.4e12, rel=0.03)


def test_a_tiny_addition_costs_a_launch_and_a_miss():
    assert 1.0e-6 < time(call("add", "bf16", n=1, c=1000)).busy_s < 2.0e-6
    assert time(call("add", "bf16", n=1, c=1000)).bound == "latency"


def test_exact_gelu_in_bf16_is_bound_by_instructions_and_addition_is_not():
    assert time(call("gelu", "bf16", n=2**13, c=2**13)).bound == "compute"
    assert time(call("add", "bf16", n=2**13, c=2**13)).bound == "memory"


def test_the_generic_kind_and_the_named_one_agree():
    assert time(generic(2**24)).busy_s == time(call("add", "bf16", n=2**12, c=2**12)).busy_s


def test_operands_that_do_not_line_up_take_the_index_computing_kernel():
    assert paths(call("add_row", "bf16", n=128, c=4096)) == ["strided"]
    assert paths(call("add_row", "bf16", n=1, c=4096)) == ["vector"]
    assert paths(call("permute0213", "bf16", b=2, s=1, h=8, d=64)) == ["copy"]
    assert time(generic(2**24, vector=0)).busy_s > 1.5 * time(generic(2**24)).busy_s


def test_widening_casts_are_slower_than_narrowing_ones():
    wide, narrow = (time(call("cast", dtype, n=4096, c=8192)).busy_s for dtype in ("bf16", "fp32"))
    assert wide > 1.5 * narrow


def test_transposing_tall_matrices_fetches_a_granule_per_element():
    ordinary = time(call("transpose", "bf16", n=8192, c=8192)).busy_s / 8192**2
    tall = time(call("transpose", "bf16", n=2**20, c=64)).busy_s / 2**26
    assert tall > 1.5 * ordinary


def test_concatenated_rows_that_end_inside_a_sector_are_slower():
    aligned, ragged = (time(call("cat", "bf16", n=100_000, c=c, c2=c)).busy_s for c in (64, 63))
    assert ragged > 2 * aligned


def test_warm_inputs_are_faster_while_they_fit():
    made = call("add", "bf16", n=1024, c=2048)
    assert time(made, 1.0).busy_s < 0.7 * time(made).busy_s


def test_copies_above_a_mebibyte_pay_the_bulk_kernels_start():
    small, large = (time(call("copy", "bf16", n=1, c=c)).busy_s for c in (2**19 - 8, 2**19 + 8))
    assert large - small > 2e-6


def test_fused_kernels_with_many_inputs_run_at_memory_speed():
    made = generic(2**26, num_inputs=6, alu=20, library="inductor")
    assert time(made).busy_s == pytest.approx(7 * 2 * 2**26 / (4.8e12 * DEFAULTS["fused_frac"]), rel=0.1)


def test_random_numbers_cost_more_than_a_fill():
    assert time(call("random", "bf16", n=1, c=2**26)).busy_s > 1.5 * time(call("fill", "bf16", n=1, c=2**26)).busy_s


@pytest.mark.parametrize(
    ("spelled", "plain"),
    [("aten.gelu.default", "gelu"), ("aten::add_", "add"), ("_to_copy", "to_copy"), ("__and__", "and")],
)
def test_functions_are_known_by_any_spelling(spelled: str, plain: str):
    assert alu_of(spelled) == ALU[plain]


def test_gradients_without_an_entry_cost_a_little_more_than_their_function():
    assert alu_of("cos_backward") == ALU["cos"] + 2.0


def test_an_unknown_function_is_an_error_that_names_a_near_one():
    with pytest.raises(CostError, match="gelu"):
        alu_of("geluu")


def test_an_unknown_phase_is_an_error():
    with pytest.raises(CostError, match="no phase"):
        model(Call("unheard", "bf16", "fwd", "aten", (("n", 1), ("c", 1))), H200, DEFAULTS, 0.0)


def test_nothing_takes_no_time():
    assert time(call("add", "bf16", n=0, c=128)).busy_s == 0.0
