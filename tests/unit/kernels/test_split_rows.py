"""How long rows are cut into shares for programs that are all on the device at once."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from hypothesis import given
from hypothesis import strategies as st

from ridgeline.kernels import split_rows, variants
from ridgeline.kernels.compiler import facts_of
from ridgeline.kernels.contract import case
from ridgeline.kernels.launcher import kernel
from ridgeline.kernels.rows import power_of_two
from ridgeline.kernels.softmax import config as softmax
from ridgeline.kernels.split_rows import Streamed

NOWHERE = -1  # stands for an H200 with 132 multiprocessors
configs = st.builds(
    Streamed, st.sampled_from([1, 2, 4, 8]), st.sampled_from([4, 8, 16]), st.integers(2, 6), st.integers(1, 4)
)


@given(
    configs, st.integers(1, 10**6), st.integers(1, 2**22), st.sampled_from([4, 8]), st.sampled_from([0, 2, 32]),
    st.booleans(),
)  # fmt: skip
def test_shares_cover_a_row_and_their_programs_fit_on_the_device(chosen, rows, cols, vector, accesses, odd):
    piece, unaligned = accesses * vector, odd and not accesses
    cols = cols * (piece or vector) + unaligned
    found = split_rows.cut(chosen, rows, cols, NOWHERE, vector=vector, piece=piece, unaligned=unaligned)
    fits = chosen.chunks * 32 * chosen.num_warps * vector
    if found is None:
        assert cols > fits * (chosen.programs_per_sm * 132 // (2 * vector if unaligned else 2))
        return
    most = cols + vector - 1 if unaligned else cols
    assert found.length <= fits and found.block == (piece or 32 * chosen.num_warps * vector)
    assert (found.shares - 1) * found.length < most <= found.shares * found.length, "no share is empty"
    assert 1 <= found.groups <= rows and found.groups * found.shares <= chosen.programs_per_sm * 132
    assert found.length % (piece or vector) == 0
    assert not unaligned or found.groups == rows or found.groups % vector == 0, "a program's rows start alike"


@pytest.mark.parametrize(("cols", "piece"), [(31360, 448), (31360, 784), (12544, 112), (25600, 400), (12544, 392)])
def test_pieces_that_are_no_power_of_two_fit_into_places_that_are(cols, piece):
    found = split_rows.cut(Streamed(4, 4, 3, 4), 1024, cols, NOWHERE, vector=8, piece=piece)
    num = -(-found.length // piece)
    assert found.block == piece and found.length == num * piece and found.length * found.shares >= cols
    assert power_of_two(num) * power_of_two(piece) <= 4 * 4 * 32 * 8, "what a share has room for"


def test_one_long_row_is_the_work_of_many_programs():
    found = split_rows.cut(softmax.streamed_forward(262144, 2), 1, 262144, NOWHERE, vector=8)
    assert found.shares >= 64
    assert split_rows.cut(softmax.streamed_forward(262144, 2), 4096, 262144, NOWHERE, vector=8).shares == 32


def test_a_row_too_long_for_all_programs_together_is_refused():
    assert split_rows.cut(Streamed(1, 4, 3, 1), 1, 2**24, NOWHERE, vector=8) is None


@pytest.mark.parametrize(
    ("name", "of", "wanted"),
    [
        ("softmax", case("float32", rows=140, cols=50260), "softmax_forward_streamed"),
        ("softmax", case("float16", rows=4, cols=1500000), "softmax_forward_streamed"),
        ("group_norm_silu", case("bfloat16", batch=10, channels=96, side=96, groups=4), "group_norm_backward_streamed"),
    ],
)
def test_programs_of_a_cooperative_launch_have_the_registers_they_need(name, of, wanted):
    found = [variant for variant in variants.variants_of(name, [of]) if variant.kernel == wanted]
    assert found
    for variant in found:
        made = facts_of(kernel(variant.kernel).function, variant)
        assert 0 < made.num_registers <= variant.max_registers
        together = split_rows.REGISTERS // (32 * variant.num_warps * variant.max_registers)
        assert together * (made.shared_bytes + 1024) <= 233472


@given(st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 32))
def test_registers_leave_room_for_every_warp_in_its_quarter_of_a_multiprocessor(num_warps, programs):
    found = split_rows.registers_of(num_warps, programs)
    in_a_quarter = -(-num_warps * programs // 4)
    assert found % 8 == 0 or found == split_rows.MOST_REGISTERS
    assert in_a_quarter * 32 * found <= 65536 // 4
    assert found == split_rows.MOST_REGISTERS or in_a_quarter * 32 * (found + 8) > 65536 // 4
    assert num_warps * programs % 4 or found == min(255, 65536 // (32 * num_warps * programs) // 8 * 8)
