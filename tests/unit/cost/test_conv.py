"""Which kernels a convolution runs, and what follows from it."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ridgeline.cost.call import Call, Time, call, family_of
from ridgeline.cost.time.chip import Chip
from ridgeline.cost.time.conv.conv import model
from ridgeline.cost.time.conv.depthwise import _tiled
from ridgeline.cost.time.conv.group_choice import Step, _side_by_side
from ridgeline.cost.time.conv.groups import direct_groups
from ridgeline.cost.time.conv.kernel_choice import chosen_kernel, likely_cost
from ridgeline.cost.time.conv.pointwise import product_of
from ridgeline.cost.time.conv.problem import DEFAULTS, Site, conv_of_call
from ridgeline.cost.time.conv.vector_units import _spectrum, fourier_terms, num_fourier_tiles
from ridgeline.errors import CostError

H200 = Chip(
    name="h200", arch="hopper", num_sms=132, clock_hz=1.98e9, dram_bytes_per_s=4.8e12, l2_bytes=60 * 2.0**20,
    l2_bytes_per_s=10.14e12, smem_bytes=233472.0, vector_flops_per_s=66.9e12,
    tensor_flops_per_s={"tf32": 494.7e12, "fp16": 989.4e12, "bf16": 989.4e12}, tdp_w=700.0, idle_w=75.0,
)  # fmt: skip
A100 = replace(H200, name="a100", arch="ampere", num_sms=108, clock_hz=1.41e9, dram_bytes_per_s=2.0e12,
               l2_bytes=40 * 2.0**20, l2_bytes_per_s=7.2e12, vector_flops_per_s=19.5e12,
               tensor_flops_per_s={"tf32": 156e12, "fp16": 312e12, "bf16": 312e12})  # fmt: skip
P100 = replace(H200, name="p100", arch="pascal", num_sms=56, clock_hz=1.48e9, dram_bytes_per_s=0.73e12,
               l2_bytes=4 * 2.0**20, l2_bytes_per_s=1.6e12, vector_flops_per_s=10.6e12,
               tensor_flops_per_s={})  # fmt: skip
CHIPS = (H200, A100, P100)
RECORDINGS = Path(__file__).resolve().parents[3] / "data" / "recordings" / "h200"


def made(phase: str = "fwd", dtype: str = "bf16", **changes: int) -> Call:
    shape = {"n": 16, "c": 128, "h": 56, "w": 56, "o": 128, "k": 3, "stride": 1, "groups": 1, "nhwc": 1} | changes
    return call("conv2d", dtype, phase, "cudnn", **shape)


def time(call_: Call, chip: Chip = H200, warm_frac: float = 0.0) -> Time:
    return model(call_, chip, DEFAULTS, warm_frac)


@pytest.mark.parametrize(
    ("size", "k", "stride", "pad"),
    [(224, 7, 2, 3), (224, 16, 16, 0), (56, 3, 1, 1), (56, 3, 2, 1), (56, 1, 2, 0), (32, 2, 2, 0), (28, 5, 1, 0)],
)
def test_padding_is_found_again_where_only_pixels_are_known(size, k, stride, pad):
    out = (size + 2 * pad - k) // stride + 1
    flat = call("conv", "bf16", "fwd", "cudnn", n=8, c=64, o=64, groups=1, in_px=size**2, out_px=out**2,
                kernel_elems=k * k, stride_max=stride, nhwc=1, spatial_rank=2, width=size)  # fmt: skip
    assert conv_of_call(flat, flat.dims()).pad == pad


def test_every_kind_is_priced_by_this_family():
    assert {family_of(kind).name for kind in ("conv", "conv1d", "conv2d", "conv3d")} == {"conv"}


def test_channels_first_tensors_are_transposed_around_the_convolution():
    last, first = time(made(nhwc=1)), time(made(nhwc=0))
    assert first.num_kernels == last.num_kernels + 3
    assert first.busy_s > 1.3 * last.busy_s


def test_a_pointwise_convolution_is_one_gemm_in_either_layout():
    assert time(made(k=1, nhwc=1)).num_kernels == time(made(k=1, nhwc=0)).num_kernels == 1


def test_small_channels_first_images_are_transposed_even_for_a_pointwise_convolution():
    small = {"n": 135, "h": 8, "w": 8, "c": 256, "o": 320, "k": 1, "nhwc": 0}
    assert time(made(**small)).num_kernels == 4  # as recorded
    assert time(made(**small | {"n": 4})).num_kernels == 1  # few of them are one product


def test_weight_gradients_of_small_channels_first_images_are_transposed_too():
    small = {"n": 26, "h": 16, "w": 16, "c": 256, "o": 1024, "k": 1, "nhwc": 0}
    assert time(made("bwd", **small)).num_kernels > 3  # a product; two transposes and a loop, as recorded


def test_strides_of_two_and_three_take_the_same_large_tile_over_few_pixels():
    few = {"n": 46, "c": 384, "o": 384, "h": 14, "w": 14, "k": 3}
    calls = [made(**few, stride=stride) for stride in (2, 3)]
    (two,), (three,) = (
        chosen_kernel(Site(H200, DEFAULTS, 0.0), conv_of_call(found, found.dims()), "fwd") for found in calls
    )
    assert two == three
    assert (two.way, two.rows, two.columns) == ("tma", 256, 128)  # as the library's heuristic answers


def test_single_precision_with_few_channels_is_read_where_it_lies():
    assert time(made(dtype="fp32", c=3)).num_kernels == 1
    assert time(made(dtype="fp32", c=64, stride=2)).num_kernels == 4  # turned to channels first and back


def test_backward_is_the_sum_of_the_gradients_asked_for():
    flat = {"n": 8, "c": 64, "o": 128, "groups": 1, "in_px": 3136, "out_px": 3136, "kernel_elems": 9, "stride_max": 1,
            "nhwc": 1, "transposed": 0, "spatial_rank": 2}  # fmt: skip
    both, of_input, of_weight = (
        time(call("conv", "bf16", "bwd", "cudnn", **flat, dgrad=d, wgrad=w)).busy_s for d, w in ((1, 1), (1, 0), (0, 1))
    )
    assert both == pytest.approx(of_input + of_weight)


def test_the_flat_form_prices_like_the_spatial_one():
    flat = call("conv", "bf16", "fwd", "cudnn", n=16, c=128, o=128, groups=1, in_px=3136, out_px=3136, kernel_elems=9,
                stride_max=1, nhwc=1, transposed=0, dgrad=1, wgrad=1, spatial_rank=2)  # fmt: skip
    assert time(flat) == time(made())


def test_a_transposed_convolution_runs_as_an_input_gradient():
    flat = {"n": 8, "groups": 1, "kernel_elems": 4, "stride_max": 2, "nhwc": 1, "spatial_rank": 2}
    up = call(
        "conv", "bf16", "fwd", "cudnn", **flat, c=256, o=128, in_px=784, out_px=3136, transposed=1, dgrad=1, wgrad=1
    )
    down = call(
        "conv", "bf16", "bwd", "cudnn", **flat, c=128, o=256, in_px=3136, out_px=784, transposed=0, dgrad=1, wgrad=0
    )
    assert time(up).busy_s == pytest.approx(time(down).busy_s)


def test_groups_that_pack_into_a_tile_take_few_kernels_and_narrow_ones_one_each():
    assert time(made(c=256, o=256, groups=32, nhwc=0)).num_kernels < 8
    assert time(made(c=64, o=320, groups=32, nhwc=0)).num_kernels == 32  # as recorded
    assert time(made(c=96, o=96, groups=32, nhwc=0)).num_kernels == 1


def test_groups_are_not_looped_over_where_the_library_takes_its_direct_kernel():
    narrow = made("bwd", n=46, c=12, o=12, h=246, w=246, k=1, groups=6, nhwc=0, dgrad=1, wgrad=0)
    assert time(narrow).num_kernels == 1
    assert 1e-4 < time(narrow).busy_s < 1e-3  # took 278 us


def test_groups_one_after_another_run_beside_each_other_where_there_is_room():
    few = {"n": 8, "c": 512, "o": 512, "h": 14, "w": 14, "k": 3, "groups": 8, "nhwc": 1}
    alone = model(made(**few), H200, DEFAULTS | {"streams": 1.0}, 0.0)
    assert time(made(**few)).busy_s < 0.6 * alone.busy_s
    assert time(made(**few)).num_kernels == alone.num_kernels


def test_durations_of_groups_beside_each_other_add_up_to_more_than_they_take():
    looped = time(made(n=8, c=512, o=512, h=14, w=14, k=3, groups=8, nhwc=1))
    assert looped.num_kernels > 8 and 1.3 < looped.beside <= 8 * 1.45 + 1e-9
    assert time(made()).beside == 1.0


def test_eight_groups_run_side_by_side_and_nine_take_another_round():
    site, steps = Site(H200, DEFAULTS, 0.0), [Step(5e-6, 0.02), Step(40e-6, 0.02)]
    one, eight, nine = (_side_by_side(site, steps, groups)[0] for groups in (1, 8, 9))
    assert 45e-6 < one < eight < 2.0 * one
    assert nine == pytest.approx(eight + one)
    assert _side_by_side(site, steps, 9)[1] == 18


def test_a_kernel_that_fills_the_chip_leaves_no_room_for_another_group():
    site = Site(H200, DEFAULTS, 0.0)
    full, small = (_side_by_side(site, [Step(100e-6, fill)], 8)[0] for fill in (1.0, 0.05))
    assert full > 7 * 95e-6 > 3 * small


def test_groups_of_over_256_channels_never_share_a_kernel():
    wide = time(made(c=1024, o=1024, groups=2, h=14, w=14, nhwc=1))
    assert wide.num_kernels >= 6  # each cut out, computed and put back
    assert time(made(c=256, o=256, groups=32, nhwc=1)).num_kernels < 4


def test_cutting_odd_groups_out_takes_more_kernels_than_whole_eights():
    shape = {"n": 3, "h": 27, "w": 27, "k": 7, "groups": 32, "nhwc": 1}
    even, odd = (time(made(c=32 * c, o=32 * c, dtype="fp16", **shape)).num_kernels for c in (32, 19))
    assert odd == 192 > even  # as recorded: two clearings, two copies from strides to strides, a widened filter


def test_weight_gradients_of_resnext_come_from_shared_memory():
    shape = made("bwd", n=17, c=128, o=128, h=32, w=32, groups=32, nhwc=0)  # 30 us, as recorded
    found = conv_of_call(shape, shape.dims())
    assert chosen_kernel(Site(H200, DEFAULTS, 0.0), found, "wgrad")[0].way == "shared"


@pytest.mark.parametrize("op", ["fwd", "dgrad", "wgrad"])
@pytest.mark.parametrize("nhwc", [0, 1])
def test_the_direct_kernel_of_groups_never_takes_less_for_more_taps(op, nhwc):
    site = Site(H200, DEFAULTS, 0.0)
    shapes = [made(c=64, o=64, groups=32, k=k, nhwc=nhwc) for k in (1, 3, 5, 7)]
    times = [direct_groups(site, conv_of_call(shape, shape.dims()), op)[0] for shape in shapes]
    assert times == sorted(times) and times[0] > 2e-6


@pytest.mark.parametrize(("size", "tiles"), [(16, 1), (56, 4), (64, 9), (112, 16)])
def test_input_gradients_through_fourier_transforms_go_tile_by_tile(size, tiles):
    shape = made(dtype="fp32", h=size, w=size, nhwc=0)
    assert num_fourier_tiles(conv_of_call(shape, shape.dims())) == tiles  # as the recorded kernels' numbers say


def test_products_of_spectra_come_in_whole_tiles():
    terms = [
        fourier_terms(conv_of_call(found, found.dims()), "fwd")["product"]
        for found in (made(dtype="fp32", n=n, c=64, o=64, h=14, w=14, k=5) for n in (1, 32, 33))
    ]
    assert terms[0] == terms[1] == terms[2] / 2


@pytest.mark.parametrize(
    ("times", "told"),
    [
        ((4.0,), 4.0),
        ((4.0, 1.0, 1.0, 4.0), 1.0),
        ((4.0, 3.9, 3.8, 2.0), 3.9),
        ((4.0, 4.0, 4.0, 1.0), 4.0),
        ((8.0, 8.0, 8.0, 1.0), 1.0),
        ((3.0, None), 3.0),
    ],
)
def test_where_trees_disagree_the_time_missed_least_is_told(times, told):
    """Each time weighs its inverse: told four times what passes, a call is off by three times what passes."""
    found = likely_cost([None if seconds is None else (seconds, 1) for seconds in times])
    assert found == (told, 1)
    known = [(seconds, say) for seconds, say in zip(times, (3, 1, 1, 1), strict=False) if seconds is not None]

    def missed(guess):
        return sum(say * abs(guess / seconds - 1.0) for seconds, say in known)

    assert missed(told) == pytest.approx(min(missed(seconds) for seconds, _ in known))


def test_nothing_is_told_where_no_tree_knows():
    assert likely_cost([]) is None and likely_cost([None]) is None


@pytest.mark.parametrize(("size", "side"), [(14, 16), (16, 32), (30, 32), (31, 64)])
def test_forward_spectra_hold_image_and_filter(size, side):
    shape = made(dtype="fp32", h=size, w=size, nhwc=0)
    assert _spectrum(conv_of_call(shape, shape.dims())) == side


def test_aligned_images_are_one_product_and_odd_ones_a_product_each():
    odd, even = (conv_of_call(s, s.dims()) for s in (made(k=1, nhwc=0, h=size, w=size) for size in (14, 8)))
    assert product_of(odd, "fwd")[0] == "bmm" and product_of(even, "fwd")[0] == "gemm"
    assert product_of(even, "fwd")[1] == {"m": 128, "n": 16 * 64, "k": 128, "layout": "nn"}


def test_groups_in_one_kernel_are_padded_to_one_power_of_two():
    shape = {"n": 72, "c": 128, "h": 81, "w": 81, "k": 1, "stride": 2, "groups": 4, "nhwc": 1}
    padded = time(made(o=192, **shape))  # images of 32 and 48 channels a group are rewritten
    assert padded.busy_s == pytest.approx(853e-6, rel=0.25)


def test_a_channels_first_image_of_eight_channels_is_convolved_where_it_lies():
    assert time(made(n=23, c=8, o=128, h=16, w=16, nhwc=0)).num_kernels == 1  # as recorded
    assert time(made(n=23, c=32, o=128, h=16, w=16, nhwc=0)).num_kernels > 3


def test_pointwise_rows_off_16_bytes_cost_what_odd_products_cost():
    even, odd = (time(made(c=256, o=256, h=h, w=h, k=1, nhwc=0)).busy_s for h in (56, 57))
    assert odd > 2.0 * even


@pytest.mark.parametrize(
    ("shape", "tiled"),
    [({"stride": 1, "k": 3}, True), ({"stride": 1, "k": 7}, False), ({"stride": 2, "k": 3, "c": 96}, False),
     ({"stride": 2, "k": 3, "c": 512}, True), ({"stride": 2, "k": 5, "n": 1, "c": 96}, True),
     ({"stride": 1, "k": 1}, True), ({"stride": 1, "k": 3, "c": 16}, False)],
)  # fmt: skip
def test_half_precision_depthwise_filters_go_to_the_library_by_the_frameworks_rule(shape, tiled):
    full = {"n": 16, "c": 256, "h": 56, "w": 56} | shape
    conv = conv_of_call(made(dtype="fp16", o=full["c"], groups=full["c"], nhwc=0, **full), {**full, "o": full["c"],
                 "groups": full["c"]})  # fmt: skip
    assert _tiled(conv) is tiled


def test_small_batches_of_channels_last_depthwise_filters_take_a_slower_kernel():
    small, large = (
        time(made(n=n, c=512, o=512, h=64, w=64, k=5, groups=512, nhwc=1)).busy_s / n for n in (7, 8)
    )  # recorded: 1.7 cycles of an SM for an element against 1.0
    assert small > 1.3 * large


def test_strides_that_no_stencil_takes_run_the_kernel_of_any_groups():
    shape = {"n": 23, "c": 672, "o": 672, "groups": 672, "h": 90, "w": 86, "k": 1}
    plain, leaping = time(made(**shape, stride=1)), time(made(**shape, stride=2))
    assert leaping.busy_s == pytest.approx(686e-6, rel=0.25)  # as recorded
    assert plain.busy_s < 0.5 * leaping.busy_s  # for four times the outputs


def test_depthwise_costs_what_its_taps_cost():
    three, seven = (time(made(c=128, o=128, groups=128, k=k, nhwc=0)).busy_s for k in (3, 7))
    assert 2.0 < seven / three < 5.0


def test_single_precision_is_bound_by_the_vector_units():
    assert time(made(dtype="fp32", c=512, o=512)).busy_s > 8.0 * time(made(c=512, o=512)).busy_s


def test_a_chip_without_matrix_units_uses_its_vector_units():
    assert time(made(), P100).busy_s > time(made(), A100).busy_s > time(made(), H200).busy_s


def test_nothing_to_do_takes_no_time():
    assert time(made(n=0)) == Time(0.0, 0.0, "latency", 0)
    assert time(made(h=1, w=1, k=5, padding=0)).num_kernels == 0


def test_a_missing_dimension_is_named():
    with pytest.raises(CostError, match="'stride'"):
        time(call("conv2d", "bf16", n=1, c=8, h=8, w=8, o=8, k=3))


def test_an_unknown_dtype_is_refused():
    with pytest.raises(CostError, match="complex32"):
        time(made(dtype="complex32"))


sizes = st.sampled_from((1, 3, 8, 24, 64, 96, 320, 1280))
SHAPES = st.fixed_dictionaries({
    "n": st.integers(1, 256), "c": sizes, "o": sizes, "h": st.integers(7, 128), "w": st.integers(7, 128),
    "k": st.sampled_from((1, 2, 3, 5, 7)), "stride": st.sampled_from((1, 2, 3)), "nhwc": st.sampled_from((0, 1)),
})  # fmt: skip


@given(
    shape=SHAPES, dtype=st.sampled_from(("bf16", "fp16", "tf32", "fp32")), phase=st.sampled_from(("fwd", "bwd")),
    chip=st.sampled_from(CHIPS), warm_frac=st.floats(0.0, 1.0), depthwise=st.booleans(),
)  # fmt: skip
def test_time_is_finite_and_never_below_its_floor(shape, dtype, phase, chip, warm_frac, depthwise):
    if depthwise:
        shape = shape | {"o": shape["c"], "groups": shape["c"]}
    found = time(call("conv2d", dtype, phase, "cudnn", **shape), chip, warm_frac)
    assert 0.0 < found.floor_s <= found.busy_s < 1e4
    assert found.num_kernels >= 1
    assert found.bound in ("compute", "memory", "latency")


@given(SHAPES, st.sampled_from(("bf16", "fp32")), st.sampled_from(("fwd", "bwd")))
def test_warm_inputs_never_cost_more(shape, dtype, phase):
    cold, warm = (time(call("conv2d", dtype, phase, "cudnn", **shape), H200, w) for w in (0.0, 1.0))
    assert warm.busy_s <= cold.busy_s * (1.0 + 1e-9)


@given(SHAPES, st.sampled_from(("bf16", "fp32")))
def test_sixteen_times_the_batch_takes_longer_in_the_same_kernel(shape, dtype):
    """In another one it may take less: cuDNN's heuristic leaves some small batches to slow kernels."""
    small, large = (call("conv2d", dtype, "fwd", "cudnn", **shape | {"n": n}) for n in (shape["n"], 16 * shape["n"]))
    kernels = [chosen_kernel(Site(H200, DEFAULTS, 0.0), conv_of_call(c, c.dims()), "fwd") for c in (small, large)]
    assume(kernels[0] == kernels[1])
    slack = 0.9  # two launches that do little more than start differ by what was learned of each
    assert time(large).busy_s > time(small).busy_s * slack


@given(st.integers(1, 64), st.sampled_from((3, 5, 7)), st.sampled_from((0, 1)))
def test_a_larger_depthwise_batch_never_takes_less(n, k, nhwc):
    shape = {"c": 96, "o": 96, "groups": 96, "k": k, "nhwc": nhwc}
    slack = 0.95  # what was learned of either may differ
    assert time(made(n=n + 1, **shape)).busy_s >= slack * time(made(n=n, **shape)).busy_s


def _recorded(kind: str) -> list[tuple[Call, float, int]]:
    rows = []
    for file in sorted(RECORDINGS.glob("operators_seed*.jsonl.gz")):
        with gzip.open(file, "rt") as lines:
            for line in list(lines)[1:]:
                row = json.loads(line)
                if row["kind"] == kind and "error" not in row and "kernels" in row:
                    made_ = call(kind, row["dtype"], row["phase"], row["library"], **row["shape"])
                    rows.append((made_, sum(k[1] for k in row["kernels"]), len(row["kernels"])))
    if not rows:
        pytest.skip("no recordings of the H200 here")
    return rows


@pytest.mark.parametrize(
    ("kind", "most_median", "most_mean"), [("conv1d", 0.06, 0.09), ("conv2d", 0.09, 0.17), ("conv3d", 0.13, 0.16)]
)
def test_recorded_convolutions_are_priced_within_the_stated_error(kind, most_median, most_mean):
    """Dense and depthwise ones: in between, the library's choices are half chance, and intervals say so."""
    off = []
    for made_, kernels_s, num_kernels in _recorded(kind):
        dims = made_.dims()
        if 1 < dims.get("groups", 1) < dims["c"]:
            continue
        found = time(made_)
        event_s = kernels_s + 3e-6 + 1e-6 * (num_kernels - 1)
        off.append(abs((found.busy_s + 3e-6 + 1e-6 * (found.num_kernels - 1)) / event_s - 1.0))
    assert median(off) < most_median
    assert mean(off) < most_mean


@pytest.mark.parametrize("kind", ["conv1d", "conv2d", "conv3d"])
def test_no_recorded_convolution_beats_the_floor(kind):
    assert all(time(made_).floor_s <= kernels_s for made_, kernels_s, _ in _recorded(kind))
