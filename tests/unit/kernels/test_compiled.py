"""What the compiler makes of the kernels for sm_90, read without a GPU: registers, spills, width of accesses."""

import re
import tempfile
from pathlib import Path

import pytest
import torch

from ridgeline import kernels
from ridgeline.kernels import compiler, launcher, tuning
from ridgeline.kernels.compiler import facts_of, triton_kernel
from ridgeline.kernels.contract import case, trials
from ridgeline.kernels.rms_norm.config import ahead as rows_ahead
from ridgeline.kernels.softmax.config import Shares
from ridgeline.kernels.variants import variants_of


def variants(call, *shapes, dtype=torch.bfloat16, grad=True, aligned=True):
    args = [torch.empty(shape, device="meta", dtype=dtype, requires_grad=grad) for shape in shapes]
    with launcher.collecting(aligned=aligned) as found:
        out = call(*args)
        if grad:
            torch.autograd.grad(out, args, torch.empty_like(out))
    return {variant.kernel: variant for variant in found}


def facts(variant):
    return facts_of(launcher.kernel(variant.kernel).function, variant)


@pytest.mark.parametrize("cols", [128, 4096, 8192])
def test_rms_norm_backward_keeps_rows_on_their_way_and_spills_nothing(cols):
    found = variants(lambda x, w: kernels.rms_norm(x, w, 1e-6), (8192, cols), (cols,))
    made = facts(found["rms_norm_backward"])
    assert made.num_spills == 0
    assert made.num("LDGSTS.E.BYPASS.128") > 0, "rows come in 16-byte copies to shared memory, ahead of their use"
    assert made.num("STG.E.128") > 0
    programs = 2 if cols <= 4096 else 1
    assert made.num_registers * 32 * found["rms_norm_backward"].num_warps * programs <= 65536
    assert made.shared_bytes * programs <= 227 * 1024


@pytest.mark.parametrize(
    ("call", "kernel", "cols"),
    [
        (lambda x: kernels.rms_norm(x, None, 1e-6), "rms_norm_forward", 8192),
        (lambda x: kernels.layer_norm(x), "layer_norm_forward", 8192),
        (kernels.softmax, "softmax_forward", 12288),
        (lambda x: kernels.swiglu(x, x), "gated_forward", 14336),
        (kernels.relu2, "relu2_forward", 4096),
        (kernels.gelu, "gelu_forward", 4096),
    ],
)
def test_forward_kernels_read_and_write_sixteen_bytes_at_a_time(call, kernel, cols):
    made = facts(variants(call, (4096, cols), grad=False)[kernel])
    assert made.num_spills == 0
    assert made.num("LDG.E.128") + made.num("LDG.E.EL.128") > 0 and made.num("STG.E.128") > 0
    assert made.num("LDG.E.U16") == 0 and made.num("STG.E.U16") == 0


def order_of(variant):
    """Reads and writes of a kernel without loops, in the order of its machine code."""
    made = compiler.compile_variant(launcher.kernel(variant.kernel).function, variant)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.cubin)
        return re.findall(r"\b(LDG|STG|BAR)\b", compiler._tool("nvdisasm", "-c", file.name))


@pytest.mark.parametrize(
    ("call", "kernel", "cols"),
    [
        (lambda x, w: kernels.rms_norm(x, w, 1e-6), "rms_norm_forward", 4096),
        (lambda x, w: kernels.layer_norm(x, w, w), "layer_norm_forward", 4096),
    ],
)
def test_weights_that_are_asked_for_early_come_while_sums_are_taken(call, kernel, cols):
    order = order_of(variants(call, (512, cols), (cols,), grad=False)[kernel])
    assert "LDG" not in order[order.index("STG") :], "no read waits for a write that it might have to see"
    last = max(i for i, name in enumerate(order) if name == "LDG")
    assert "BAR" in order[last:], "and none begins after the last meeting"


@pytest.mark.parametrize(("cols", "kernel"), [(5120, "rms_norm_forward"), (7001, "rms_norm_forward_apart")])
def test_rows_and_residuals_are_asked_for_before_their_sum_is_written(cols, kernel):
    shapes = ((16384, cols), (16384, cols), (cols,))
    found = variants(lambda x, more, w: kernels.add_rms_norm(x, more, w, 1e-6), *shapes, grad=False)
    order = order_of(found[kernel])
    order = order[: order.index("BAR")]
    assert "LDG" not in order[order.index("STG") :] and order.count("LDG") >= 2 * -(-cols // 1024)


@pytest.mark.parametrize("shape", [(6555, 12458), (1001, 4097)])
@pytest.mark.parametrize(
    ("call", "kernel"),
    [(kernels.relu2, "relu2"), (kernels.gelu, "gelu"), (lambda x: kernels.swiglu(x, x), "gated")],
)
def test_pointwise_kernels_have_wide_accesses_whatever_the_number_of_elements(call, kernel, shape):
    found = variants(call, shape)
    for name in (f"{kernel}_forward", f"{kernel}_backward"):
        made = facts(found[name])
        assert made.num("LDG.E.128") + made.num("LDG.E.EF.128") + made.num("LDG.E.EL.128") > 0
        assert sum(made.num(f"STG.E.{kind}128") for kind in ("", "EF.", "EL.")) > 0 and made.num_spills == 0


def test_an_unaligned_tensor_is_still_right_only_slower():
    args = torch.empty((8, 4097), device="meta", dtype=torch.bfloat16)
    with launcher.collecting(aligned=False) as found:
        kernels.rms_norm(args, None, 1e-6)
    assert found[0].divisible == ()
    assert facts(found[0]).num("LDG.E.128") == 0


TARGET = torch.zeros(4096, dtype=torch.long, device="meta")


@pytest.mark.parametrize(
    ("call", "cols", "kernel", "wide"),
    [
        (kernels.softmax, 4097, "softmax_forward_ends", "LDG.E.128"),
        (kernels.softmax, 4097, "softmax_backward_ends", "LDG.E.128"),
        (kernels.softmax, 50257, "softmax_forward_packed", "LDGSTS.E.BYPASS.128"),
        (kernels.softmax, 70001, "softmax_forward_packed", "LDGSTS.E.BYPASS.128"),
        (kernels.softmax, 50257, "softmax_backward_streamed", "LDGSTS.E.BYPASS.128"),
        (lambda x: kernels.layer_norm(x), 4097, "layer_norm_forward_apart", "LDG.E.128"),
        (lambda x: kernels.layer_norm(x), 4097, "norm_backward_ahead", "LDGSTS.E.BYPASS.128"),
        (lambda x: kernels.layer_norm(x), 1001, "layer_norm_backward_ends", "LDGSTS.E.BYPASS.128"),
        (lambda x: kernels.layer_norm(x), 1501, "norm_backward_words", "LDGSTS.E.BYPASS.128"),
        (lambda x: kernels.rms_norm(x, None, 1e-6), 6001, "norm_backward_words", "LDGSTS.E.BYPASS.128"),
        (lambda x: kernels.rms_norm(x, None, 1e-6), 7001, "norm_backward_ahead", "LDGSTS.E.BYPASS.128"),
        (lambda x: kernels.layer_norm(x), 9001, "layer_norm_forward_apart", "LDG.E.128"),
        (lambda x: kernels.layer_norm(x), 19001, "layer_norm_forward_apart", "LDG.E.EL.128"),
        (lambda x: kernels.layer_norm(x), 20501, "layer_norm_forward", "LDG.E.EL.128"),
        (lambda x: kernels.rms_norm(x, None, 1e-6), 4097, "rms_norm_forward_apart", "LDG.E.128"),
        (lambda x: kernels.rms_norm(x, None, 1e-6), 4097, "rms_norm_backward", "LDGSTS.E.BYPASS.128"),
        (lambda x: kernels.cross_entropy(x, TARGET), 1001, "cross_entropy_short", "LDG.E.128"),
        (lambda x: kernels.cross_entropy(x, TARGET), 1001, "cross_entropy_backward_ends", "LDG.E.128"),
        (lambda x: kernels.cross_entropy(x, TARGET), 50257, "cross_entropy_stretches", "LDG.E.128"),
        (lambda x: kernels.cross_entropy(x, TARGET), 50257, "cross_entropy_backward_flat", "LDG.E.128"),
    ],
)
def test_rows_that_start_inside_accesses_are_read_sixteen_bytes_at_a_time(call, cols, kernel, wide):
    made = facts(variants(call, (4096, cols))[kernel])
    assert made.num_spills == 0
    assert made.num(wide) > 0
    assert made.num("LDG.E.U16") + made.num("LDGSTS.E.U16") <= 8, "a few elements at the ends, and numbers of a row"
    assert "cross_entropy_s" in kernel or made.num("STG.E.128") > 0


def test_cross_entropy_asks_for_a_whole_block_before_it_looks_at_it():
    target = torch.zeros(4096, dtype=torch.long, device="meta")
    found = variants(lambda x: kernels.cross_entropy(x, target), (4096, 128256), grad=False)
    made = facts(found["cross_entropy_stretches"])
    assert made.num("LDG.E.128") >= 8, "four accesses a thread in the loop, four in what is left"
    assert made.num("MUFU.EX2") <= 80, "one exponential an element, in the loop and in what is left"


def test_the_pipeliner_is_really_at_work():
    found = variants(lambda x, w: kernels.rms_norm(x, w, 1e-6), (8192, 4096), (4096,))["rms_norm_backward"]
    ir = triton_kernel(launcher.kernel(found.kernel).function, found).asm["ttgir"]
    assert "ttg.async_copy_global_to_local" in ir and "ttg.async_wait" in ir


@pytest.mark.parametrize(
    ("cols", "dtype"),
    [(524288, torch.bfloat16), (32768, torch.float32), (131072, torch.float32)],
)
def test_programs_that_share_a_softmax_row_fit_on_the_device_and_copy_ahead(cols, dtype):
    found = variants(kernels.softmax, (200, cols), dtype=dtype)
    for name, inputs in (("softmax_forward_streamed", 1), ("softmax_backward_streamed", 2)):
        made = facts(found[name])
        constants = dict(found[name].constants)
        assert made.num_spills == 0
        assert made.num_registers * 32 * found[name].num_warps <= 65536 and made.shared_bytes <= 232448
        assert made.num("LDGSTS.E.BYPASS.128") >= 3 * inputs * constants["CHUNKS"] and made.num("STG.E.128") > 0
        if constants["MEET"]:
            assert made.num("ATOM") + made.num("RED") > 0, "a share's word is written whole"
            assert made.num("LDG.E.64.STRONG.SYS") > 0, "words are read anew"


def test_group_norm_of_large_images_reads_them_once():
    weight = torch.ones(320, dtype=torch.bfloat16, device="meta")
    found = variants(lambda x: kernels.group_norm(x, 32, weight, weight), (4, 320, 192, 192))
    assert {"group_norm_streamed", "group_norm_backward_streamed"} <= set(found)
    for name in ("group_norm_streamed", "group_norm_backward_streamed"):
        made = facts(found[name])
        assert made.num_spills == 0 and made.shared_bytes <= 232448
        assert made.num("LDGSTS.E.BYPASS.128") > 0 and made.num("STG.E.128") > 0
        assert dict(found[name].constants)["CHUNKS"] == found[name].num_warps, "a warp has one piece of a share"
    fewer = variants(lambda x: kernels.group_norm(x, 2, weight, weight), (32, 320, 56, 56))["group_norm_streamed"]
    assert dict(fewer.constants)["BLOCK"] == 64, "56 x 56 positions are 49 pieces of 64"
    odd = variants(lambda x: kernels.group_norm(x, 32, weight, weight), (8, 320, 63, 65))
    assert "group_norm_streamed" not in odd, "no access of 63 x 65 positions ends where a channel does"


def test_short_groups_backward_leave_room_for_four_programs():
    weight = torch.ones(1280, dtype=torch.bfloat16, device="meta")
    found = variants(lambda x: kernels.group_norm(x, 32, weight, weight, silu=True), (64, 1280, 16, 16))
    packed = found["group_norm_backward_packed"]
    made = facts(packed)
    assert made.num_spills == 0 and made.num_registers <= 64 and 4 * made.shared_bytes <= 227 * 1024
    assert made.num("LDGSTS.E.BYPASS.128") == made.num("LDGSTS") == 2 * dict(packed.constants)["CHUNKS"]


@pytest.mark.parametrize(
    ("dtype", "shape", "wide"),
    [
        (torch.bfloat16, (64, 2048, 7, 7), True),
        (torch.bfloat16, (64, 1024, 14, 14), True),
        (torch.float32, (64, 1024, 14, 14), True),
        (torch.bfloat16, (16, 2048, 14, 14), True),
        (torch.bfloat16, (64, 32, 13, 13), False),
        (torch.float16, (16, 256, 25, 42), True),
    ],
)
def test_short_groups_are_read_once_wherever_their_channels_start(dtype, shape, wide):
    weight = torch.ones(shape[1], dtype=dtype, device="meta")
    found = variants(lambda x: kernels.group_norm(x, 32, weight, weight, silu=True), shape, dtype=dtype)
    flat = found["group_norm_flat"]
    tile = found.get("group_norm_tile") or found["group_norm_backward_walk"]
    made = facts(flat)
    assert made.num_spills == 0 and made.num_registers * flat.num_warps * 32 * (32 // flat.num_warps) <= 65536
    chunks, straddle = (dict(flat.constants)[name] for name in ("CHUNKS", "STRADDLE"))
    if wide:  # groups start on 16 bytes though channels do not
        assert made.num("LDG.E.128") == made.num("STG.E.128") == chunks
    assert made.num("LDG") <= (16 * chunks if not wide else chunks + (4 if straddle else 2) * chunks)
    back = facts(tile)
    sizes = dict(tile.constants)
    lines = sizes.get("PER_GROUP") or sizes["LINES"]
    assert back.num_spills == 0 and tile.num_warps * 32 <= lines * sizes["WIDTH"]
    assert "group_norm_channel_sums" not in found and "group_norm_stats" not in found


def test_channels_that_powers_of_two_hardly_divide_have_pieces_of_their_own():
    weight = torch.ones(512, dtype=torch.bfloat16, device="meta")
    found = variants(lambda x: kernels.group_norm(x, 32, weight, weight, silu=True), (64, 512, 28, 28))
    streamed = found["group_norm_backward_streamed"]
    constants, made = dict(streamed.constants), facts(streamed)
    assert (constants["STEP"], constants["BLOCK"]) == (784, 1024)
    assert made.num_spills == 0 and made.num("LDGSTS.E.BYPASS.128") == made.num("LDGSTS") > 0
    even = variants(lambda x: kernels.group_norm(x, 2, weight, weight), (8, 512, 56, 56))
    assert dict(even["group_norm_backward_streamed"].constants)["STEP"] == 64


def test_silu_behind_group_norm_is_computed_once_an_element_and_without_divisions():
    weight = torch.ones(512, dtype=torch.bfloat16, device="meta")
    found = variants(lambda x: kernels.group_norm(x, 32, weight, weight, silu=True), (4, 512, 256, 256))
    for name, elements, inverses in (("group_norm_streamed", 64, 32), ("group_norm_backward_streamed", 32, 32)):
        made = facts(found[name])
        assert made.num_spills == 0
        least = elements + inverses
        assert least <= made.num("MUFU") <= least + 12, "a power an element; an inverse an element, or for two of them"
        assert made.num("FSETP") <= 16, "nothing asks whether a number is out of range"


def test_warps_read_the_words_of_other_programs_without_waiting_for_each_other():
    weight = torch.ones(512, dtype=torch.bfloat16, device="meta")
    found = variants(lambda x: kernels.group_norm(x, 32, weight, weight, silu=True), (16, 512, 128, 128))
    constants = dict(found["group_norm_backward_streamed"].constants)
    assert constants["SHARES"] == 64, "more words than a warp has lanes"
    assert facts(found["group_norm_backward_streamed"]).num("BAR") <= 8, "one meeting for both sums of a share"


def test_powers_that_wait_for_their_row_in_registers_are_computed_once():
    for kept, most in ((False, 136), (True, 72)):
        with tuning.forced("softmax.forward", Shares(8, 4, 4, 3, kept=kept)):
            found = variants(kernels.softmax, (2048, 65536), grad=False)["softmax_forward_streamed"]
        made = facts(found)
        assert made.num_spills == 0 and made.num("MUFU.EX2") <= most
        assert dict(found.constants)["KEPT"] is kept
    default = variants(kernels.softmax, (4, 1500000), grad=False)["softmax_forward_streamed"]
    assert dict(default.constants)["KEPT"], "what is faster is what is taken, where rows are too long for clusters"


def test_long_float32_rows_of_softmax_have_no_branch_an_element():
    made = facts(variants(kernels.softmax, (2048, 65536), dtype=torch.float32, grad=False)["softmax_forward_streamed"])
    assert made.num_spills == 0
    assert made.num("CALL") == made.num("FCHK") == 0, "quotients are products, put right"
    assert made.num("BRA") <= 24


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_head_norms_read_sixteen_bytes_at_a_time_and_twenty_warps_share_a_multiprocessor(dtype):
    of = case(dtype, batch=4, seq=512, heads=40, keys=8, dim=128)
    found = {variant.kernel: variant for variant in variants_of("qk_norm_rope", [of])}
    for name in ("qk_norm_rope_forward", "qk_norm_rope_backward"):
        made = facts(found[name])
        assert made.num_spills == 0
        assert made.num("LDG.E.128") >= 8 and made.num("STG.E.128") >= 4, "both halves of queries and of keys"
        assert made.num_registers * 32 * 20 <= 65536
        assert dict(found[name].constants)["Q_HEADS"] == 40, "no tile is filled up with heads that are not there"


@pytest.mark.parametrize("name", ["rms_norm_quant", "layer_norm_quant"])
def test_scales_of_a_rows_pieces_are_stored_together(name):
    of = case("bfloat16", rows=16384, cols=5120, kind="float8_e4m3fn", block=128)
    made = facts(variants_of(name, [of])[0])
    assert made.num_spills == 0 and made.num("LDGSTS.E.BYPASS.128") > 0
    assert made.num("BAR") <= 12, "five pieces, one rearrangement"


def test_cross_entropy_keeps_a_number_a_thread_not_a_block():
    target = torch.zeros(8192, dtype=torch.long, device="meta")
    found = variants(lambda x: kernels.cross_entropy(x, target), (8192, 32000), grad=False)
    made = facts(found["cross_entropy_stretches"])
    assert made.num_spills == 0
    assert made.num_registers <= 48, "ten programs and more share a multiprocessor"


@pytest.mark.parametrize("cols", [3000, 4096, 5000, 8192, 10000, 12000, 20000])
def test_middling_cross_entropy_rows_are_held_two_logits_a_word(cols):
    target = torch.zeros(16384, dtype=torch.long, device="meta")
    found = variants(lambda x: kernels.cross_entropy(x, target, label_smoothing=0.1), (16384, cols), grad=False)
    held = found["cross_entropy_packed"]
    made = facts(held)
    chunks = dict(held.constants)["CHUNKS"]
    assert made.num_spills == 0 and made.num("LDG.E.128") + made.num("LDG.E.EF.128") == chunks
    assert dict(held.constants)["LINES"] == (cols % 64 > 0)
    assert made.num_registers * 32 * held.num_warps * (24 // held.num_warps) <= 65536, "24 warps a multiprocessor"
    assert made.num("MUFU.EX2") <= 8 * chunks + 4, "one exponential an element"
    assert dict(found["cross_entropy_finish"].constants)["BLOCK"] < 16384, "programs leave sums of their rows"


def test_few_long_or_unaligned_cross_entropy_rows_are_read_in_blocks():
    for rows, cols, aligned in ((1024, 8192, True), (8192, 16384, True), (8192, 32000, True), (8192, 8192, False)):
        target = torch.zeros(rows, dtype=torch.long, device="meta")
        found = variants(lambda x, t=target: kernels.cross_entropy(x, t), (rows, cols), grad=False, aligned=aligned)
        assert "cross_entropy_stretches" in found


def test_short_cross_entropy_rows_leave_one_number_a_program():
    target = torch.zeros(65536, dtype=torch.long, device="meta")
    found = variants(lambda x: kernels.cross_entropy(x, target), (65536, 1000), grad=False)
    constants = dict(found["cross_entropy_short"].constants)
    assert constants["SUM"] is True
    assert dict(found["cross_entropy_finish"].constants)["BLOCK"] < 65536


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cross_entropy_with_smoothing_compiles_for_long_and_short_rows(dtype):
    target = torch.zeros(64, dtype=torch.long, device="meta")
    for cols in (1000, 50257):
        found = variants(lambda x: kernels.cross_entropy(x, target, label_smoothing=0.1), (64, cols), dtype=dtype)
        for variant in found.values():
            assert facts(variant).num_spills == 0, variant


def of_trial(name, kernel, number=0):
    trial = trials()[name][1]
    return facts(next(v for v in variants_of(name, [trial.races[number]]) if v.kernel == kernel))


@pytest.mark.parametrize("number", [0, 3, 5])  # float32; bfloat16 with master weights, with moments of its own
def test_adamw_moves_every_stream_in_one_layout(number):
    made = of_trial("adamw", "adamw_update", number)
    assert made.num_spills == 0 and made.shared_bytes == 0, "no stream is rearranged for another"
    times = 1 if number == 5 else 2  # blocks of as many elements are half as many accesses
    assert made.num("LDG.E.128") >= 3 * times and made.num("STG.E.128") >= 3 * times
    assert made.num_registers * 128 * 8 <= 65536, "eight programs a multiprocessor"


def test_eight_bit_moments_are_coded_without_spills():
    made = of_trial("adamw_8bit", "adamw_update_8bit")
    assert made.num_spills == 0 and made.num("LDG.E.128") > 0
    assert made.shared_bytes <= 64, "only the largest of a block crosses warps"


def test_a_norm_reads_sixteen_bytes_at_a_time():
    made = of_trial("clip_grad_norm_", "norm_shares", 1)
    assert made.num_spills == 0 and made.num("LDG.E.128") > 0


def test_bags_are_summed_inside_a_warp():
    made = of_trial("embedding_bags", "embedding_bag_forward")
    assert made.num_spills == 0 and made.shared_bytes == 0
    assert made.num("LDG.E.128") == 8, "eight rows on their way"


def test_rows_are_updated_by_one_warp_without_spills():
    for number in range(3):
        made = of_trial("embedding_bags_update", "embedding_update", number)
        assert made.num_spills == 0 and made.shared_bytes == 0


@pytest.mark.parametrize("kernel", ["dot_interaction_forward", "dot_interaction_backward"])
@pytest.mark.parametrize("number", [0, 2])  # bfloat16; float32 in three products of tf32
def test_interactions_are_products_of_the_matrix_units(kernel, number):
    made = of_trial("dot_interaction", kernel, number)
    assert made.num_spills == 0 and made.num("HMMA") > 0 and made.num("LDG.E.128") > 0


def test_the_cross_layers_product_carries_its_epilogue():
    made = of_trial("cross_layer", "cross_product")
    assert made.num_spills == 0 and made.num("HGMMA") > 0 and made.num("LDGSTS.E.BYPASS.128") > 0
    assert made.num("LDG.E.128") >= 16 and made.num("STG.E.128") >= 8, "x0 and x in, y out"
    assert made.shared_bytes <= 227 * 1024


def test_quantization_holds_its_rows():
    made = of_trial("quantize", "quantize_rows")
    assert made.num_spills == 0 and made.num("LDG.E.128") == 4 and made.num("STG.E.64") == 4


@pytest.mark.parametrize(
    ("name", "case", "tensor_cores"),
    [("depthwise", 0, False), ("depthwise", 5, False), ("short_attention", 0, True), ("group_norm_last", 0, False),
     ("grouped_convolution", 1, True),
     ("sequence_convolution", 0, True)],
)  # fmt: skip
def test_kernels_of_images_and_sequences_spill_nothing_and_move_sixteen_bytes(name, case, tensor_cores):
    found = variants_of(name, [trials()[name][1].races[case]])
    made = facts(found[0])
    assert made.num_spills == 0
    assert made.num("LDG.E.128") + made.num("LDGSTS.E.BYPASS.128") + made.num("LDGSTS.E.128") > 0
    assert (made.num("HGMMA") > 0) == tensor_cores


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("sequence_convolution", {"t": 70, "size_in": 128, "size_out": 128}),
        ("short_attention", {"b": 4, "h": 2, "n": 128, "d": 128, "period": 1}),
    ],
    ids=str,
)
def test_the_widest_problems_fit_into_shared_memory(name, of):
    sequence = {"b": 1, "groups": 2, "taps": 9, "padding": 4} if name == "sequence_convolution" else {}
    for variant in variants_of(name, [case("bfloat16", **of, **sequence)]):
        made = facts(variant)
        assert made.shared_bytes <= 227 * 1024 and made.num_spills == 0


@pytest.mark.parametrize("cols", [16384, 20000, 24000, 28672, 32768, 50304, 50257, 65536, 20483, 32769])
def test_programs_that_share_a_multiprocessor_hold_a_row_of_softmax_each(cols):
    found = variants(kernels.softmax, (4096, cols), grad=False)["softmax_forward_packed"]
    constants, made = dict(found.constants), facts(found)
    programs = 3 if found.num_warps == 8 else 2
    assert constants["CHUNKS"] == -(-(cols // 8 * 8) // (256 * found.num_warps)), "no power of two, whole accesses"
    assert made.num_spills == 0 and made.shared_bytes * programs <= 232448
    assert made.num_registers * 32 * found.num_warps * programs <= 65536
    assert made.num("LDGSTS.E.BYPASS.128") == constants["SHARED"] and made.num("STG.E.128") == constants["CHUNKS"]
    assert made.num("LDG.E.128") + made.num("LDG.E.EL.128") == constants["CHUNKS"] - constants["SHARED"]
    assert made.num("MUFU.EX2") <= 16 * constants["CHUNKS"] + 12, "two powers an element, none of them in registers"


@pytest.mark.parametrize(
    ("rows", "cols", "shares"),
    [(300, 65544, 4), (300, 80000, 4), (300, 131072, 8), (300, 131075, 2), (300, 262144, 16), (300, 327680, 16),
     (64, 50304, 4), (100, 50257, 4), (3, 20724, 4), (4, 262147, 16), (16, 65536, 16), (128, 32768, 2), (64, 128256, 8),
     (4, 262144, 16), (1, 24000, 4)],
)  # fmt: skip
def test_a_long_row_of_softmax_is_a_clusters(rows, cols, shares):
    found = variants(kernels.softmax, (rows, cols), grad=False)["softmax_forward_packed"]
    constants, made = dict(found.constants), facts(found)
    programs = 3 if found.num_warps == 8 else 2
    assert constants["SHARES"] == shares and made.num_spills <= (8 if cols % 8 else 0), "a few at the ends of odd rows"
    assert made.shared_bytes * programs <= 232448 and made.num_registers * 32 * found.num_warps * programs <= 65536
    assert made.num("UCGABAR_ARV") == 1 and made.num("MEMBAR") == 0, "programs wait for numbers, not for memory"
    assert made.num("STG.E.128") == constants["CHUNKS"]


@pytest.mark.parametrize(("dtype", "cols", "rows"), [(torch.bfloat16, 394, 8), (torch.float32, 231, 4)])
def test_short_odd_rows_share_a_program(dtype, cols, rows):
    found = variants(kernels.softmax, (65536, cols), dtype=dtype)
    for name, shared in (("softmax_forward_ends_shared", rows), ("softmax_backward_ends_shared", 4)):
        made, constants = facts(found[name]), dict(found[name].constants)
        assert constants["ROWS"] == shared and found[name].num_warps == 4 and made.num_spills == 0
        assert made.num("LDG.E.128") >= constants["CHUNKS"] and made.num_registers <= 64
        assert made.num("BAR") <= 1, "a row is one warp's, or part of one's"


@pytest.mark.parametrize(
    ("cols", "rows", "chunks"), [(1048, 4, 5), (1232, 4, 5), (1536, 2, 3), (1552, 4, 7), (2048, 1, 2)]
)
def test_rows_of_softmax_fill_the_places_of_their_warps(cols, rows, chunks):
    found = variants(kernels.softmax, (65536, cols), grad=False)["softmax_forward"]
    constants, made = dict(found.constants), facts(found)
    assert (constants["ROWS"], constants["CHUNKS"]) == (rows, chunks) and made.num_spills == 0
    assert cols > 0.79 * constants["CHUNKS"] * constants["BLOCK"] and made.num_registers <= 96


def test_a_row_too_long_for_a_cluster_is_shared_by_programs_that_are_all_on_the_device():
    assert "softmax_forward_packed" not in variants(kernels.softmax, (300, 1 << 20), grad=False)


@pytest.mark.parametrize(("cols", "pieces"), [(1001, 4), (2049, 4), (4099, 4), (7001, 7), (12289, 6)])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_odd_rows_read_weights_from_copies_that_start_where_they_do(norm, cols, pieces):
    weight = torch.ones(cols, dtype=torch.bfloat16, device="meta")
    calls = {
        "layer_norm": lambda x: kernels.layer_norm(x, weight, weight),
        "rms_norm": lambda x: kernels.rms_norm(x, weight, 1e-6),
    }
    found = variants(calls[norm], (33554432 // cols, cols), grad=False)
    made = facts(found[f"{norm}_forward_apart"])
    assert "copy_shifted" in found and made.num_spills == 0
    asked = made.num("LDG.E.128") + made.num("LDG.E.EL.128")
    assert asked == pieces * (3 if norm == "layer_norm" else 2) and made.num("STG.E.128") == pieces
    assert made.num("ACQBULK") == 1, "rows are read while copies are made"


def test_few_odd_rows_are_not_worth_copies_of_their_weights():
    assert "copy_shifted" not in variants(lambda x: kernels.rms_norm(x, None, 1e-6), (100, 4099), grad=False)


@pytest.mark.parametrize(("channels", "side"), [(640, 32), (1280, 16), (320, 24)])
def test_many_groups_are_held_two_numbers_a_word(channels, side):
    weight = torch.ones(channels, dtype=torch.bfloat16, device="meta")
    found = variants(
        lambda x: kernels.group_norm(x, 32, weight, weight, silu=True), (64, channels, side, side), grad=False
    )["group_norm_packed"]
    made, chunks = facts(found), dict(found.constants)["CHUNKS"]
    assert chunks <= 5 and made.num_spills == 0 and made.num_registers <= 64, "32 warps a multiprocessor"
    assert made.num("LDG.E.128") == made.num("STG.E.128") == chunks
    assert made.num("BAR") <= 3, "warps meet once a group"
    assert made.num("MUFU") <= 12 * chunks + 10, "a power an element, an inverse for two"


@pytest.mark.parametrize(
    ("batch", "channels", "side", "shares"),
    [(32, 320, 64, 1), (32, 320, 56, 1), (8, 512, 64, 4), (16, 640, 64, 4), (8, 320, 128, 8), (4, 512, 128, 16)],
)
def test_long_groups_are_a_programs_or_a_clusters(batch, channels, side, shares):
    weight = torch.ones(channels, dtype=torch.bfloat16, device="meta")
    found = variants(
        lambda x: kernels.group_norm(x, 32, weight, weight, silu=True), (batch, channels, side, side), grad=False
    )["group_norm_packed"]
    constants, made, programs = dict(found.constants), facts(found), 32 // found.num_warps
    assert constants["SHARES"] == shares and made.num_spills == 0
    assert made.shared_bytes * programs <= 232448 and made.num_registers * 32 * found.num_warps * programs <= 65536
    assert made.num("LDG.E.128") == 4, "four accesses wait in registers"
    assert made.num("LDGSTS.E.BYPASS.128") == constants["CHUNKS"] - 4 and made.num("STG.E.128") == constants["CHUNKS"]
    assert made.num("UCGABAR_ARV") == (shares > 1) and made.num("MEMBAR") == 0, "programs wait for numbers alone"


def test_more_samples_than_a_grid_has_are_walked_over():
    assert "group_norm_packed" in variants(lambda x: kernels.group_norm(x, 1), (65535, 96, 8, 8), grad=False)
    assert "group_norm_whole" in variants(lambda x: kernels.group_norm(x, 1), (65536, 96, 8, 8), grad=False)


def test_groups_too_long_for_a_cluster_pass_through_shared_memory():
    for channels, side, silu in ((512, 256, True), (512, 128, False)):
        weight = torch.ones(channels, dtype=torch.bfloat16, device="meta")
        found = variants(
            lambda x, w=weight, s=silu: kernels.group_norm(x, 32, w, w, silu=s), (4, channels, side, side), grad=False
        )
        assert "group_norm_streamed" in found


def turn_of(variant, folder):
    """The instructions of a kernel's longest loop."""
    path = folder / "kernel.cubin"
    path.write_bytes(compiler.compile_variant(launcher.kernel(variant.kernel).function, variant).cubin)
    loops = re.findall(r"(\.L_x_\d+):\n(.*?)BRA `\(\1\)", compiler._tool("nvdisasm", "-c", str(path)), re.DOTALL)
    return max((body for _, body in loops), key=len)


@pytest.mark.parametrize(
    ("norm", "dtype", "cols"),
    [("layer_norm", "bfloat16", 735), ("layer_norm", "bfloat16", 1001), ("layer_norm", "float16", 2941),
     ("layer_norm", "bfloat16", 4099), ("layer_norm", "bfloat16", 5376), ("layer_norm", "float32", 1035),
     ("layer_norm", "float32", 768), ("layer_norm", "float32", 10234), ("rms_norm", "float16", 642),
     ("rms_norm", "bfloat16", 9001), ("rms_norm", "bfloat16", 7001), ("rms_norm", "float32", 14336),
     ("rms_norm", "bfloat16", 5896), ("rms_norm", "bfloat16", 392), ("layer_norm", "bfloat16", 11752),
     ("layer_norm", "float32", 429)],
)  # fmt: skip
def test_rows_are_finished_a_turn_after_their_sums_were_taken(norm, dtype, cols):
    shapes = ((20000, cols), (cols,), (cols,))[: 3 if norm == "layer_norm" else 2]
    with tuning.asked() as chosen:
        found = variants(getattr(kernels, norm), *shapes, dtype=getattr(torch, dtype))["norm_backward_ahead"]
    config = next(of for name, _, of in chosen if name == f"{norm}.backward")
    constants, made = dict(found.constants), facts(found)
    asked = 2 * constants["CHUNKS"] * (constants["SLOTS"] + 1)
    assert made.num("LDGSTS.E.BYPASS.128") == asked, "rows come in 16-byte copies, ahead of their use"
    assert made.num_spills <= (32 if dtype == "float32" else 16)
    assert made.num_registers * 32 * found.num_warps * config.programs_per_sm <= 65536
    assert (made.shared_bytes + 1024) * config.programs_per_sm <= 228 * 1024, "all programs are there at once"


@pytest.mark.parametrize(("norm", "cols"), [("layer_norm", 2433), ("rms_norm", 3386), ("rms_norm", 9001)])
def test_odd_rows_to_eight_bits_are_read_and_written_in_whole_accesses(norm, cols):
    of = case("bfloat16", rows=20000, cols=cols, kind="float8_e4m3fn", block=0)
    (found,) = variants_of(f"{norm}_quant", [of])
    constants, made = dict(found.constants), facts(found)
    assert constants["UNALIGNED"] and made.num("LDGSTS.E.BYPASS.128") == 3 * constants["CHUNKS"]
    assert made.num("STG.E.64") == constants["CHUNKS"] and made.num_spills <= 16


@pytest.mark.parametrize(
    ("norm", "dtype", "cols"),
    [("layer_norm", "float32", 12292), ("layer_norm", "float32", 20480), ("layer_norm", "float32", 15737),
     ("layer_norm", "bfloat16", 24576), ("rms_norm", "float32", 20480), ("rms_norm", "float32", 13001),
     ("rms_norm", "bfloat16", 32001)],
)  # fmt: skip
def test_two_programs_share_rows_that_one_does_not_hold(norm, dtype, cols):
    (found,) = (v for v in variants_of(norm, [case(dtype, rows=800, cols=cols)]) if "_backward" in v.kernel)
    made = facts(found)
    assert found.kernel == "norm_backward_ahead" and dict(found.constants)["SPLIT"] == 2 and found.num_warps == 16
    assert made.num_spills <= 32 and made.num_registers <= 128 and made.shared_bytes + 528 + 1024 <= 228 * 1024


def test_shares_of_odd_columns_are_added_four_columns_at_a_time():
    found = variants(kernels.layer_norm, (9000, 4099), (4099,), (4099,))["reduce_partials"]
    assert dict(found.constants)["UNALIGNED"] and facts(found).num("LDG.E.128") > 0


def test_a_turn_has_two_barriers_next_to_each_other(tmp_path):
    found = variants(kernels.layer_norm, (9000, 5376), (5376,), (5376,))["norm_backward_ahead"]
    turn = turn_of(found, tmp_path)
    barriers = [place.start() for place in re.finditer(r"BAR\.SYNC", turn)]
    assert len(barriers) == 2 and barriers[1] < len(turn) / 2, "no chain of sums lies between a row's halves"


@pytest.mark.parametrize(
    ("norm", "cols", "kernel", "most"),
    [("layer_norm", 3499, "norm_backward_ahead", 420), ("layer_norm", 11197, "norm_backward_words", 1040),
     ("rms_norm", 16303, "norm_backward_words", 570)],
)  # fmt: skip
def test_places_in_memory_are_counted_along(norm, cols, kernel, most, tmp_path):
    """From a turn's number they take 456, 1109 and 622 instructions a turn, of which a tenth compute places."""
    shapes = ((20000, cols), (cols,), (cols,))[: 3 if norm == "layer_norm" else 2]
    turn = turn_of(variants(getattr(kernels, norm), *shapes)[kernel], tmp_path)
    assert len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/ ", turn, re.MULTILINE)) <= most
    assert not re.search(r"UIMAD\.WIDE\.U32", turn), "no product of 64 bits"


def test_a_number_is_added_to_weights_only_where_there_is_one():
    given = {}
    for offset in (0.0, 1.0):
        found = variants(lambda x, w, offset=offset: kernels.rms_norm(x, w, 1e-6, offset=offset), (9000, 9001), (9001,))
        given[offset] = found["norm_backward_ahead"]
    assert [dict(found.constants)["OFFSET"] for found in given.values()] == [False, True]
    assert facts(given[0.0]).num("FADD") < facts(given[1.0]).num("FADD")


@pytest.mark.parametrize(
    ("norm", "dtype", "cols", "way"),
    [("layer_norm", "bfloat16", 12288, (8, 3, 2, 2)), ("layer_norm", "bfloat16", 7362, (8, 3, 2, 2)),
     ("layer_norm", "float32", 15736, (8, 3, 2, 4)), ("rms_norm", "bfloat16", 18748, (8, 3, 2, 4))],
)  # fmt: skip
def test_programs_that_share_rows_wait_for_numbers_alone(norm, dtype, cols, way, tmp_path):
    warps, slots, programs, split = way
    chosen = rows_ahead(cols, warps, slots, programs, itemsize=4 if dtype == "float32" else 2, split=split)
    with tuning.forced(f"{norm}.backward", chosen):
        (found,) = (v for v in variants_of(norm, [case(dtype, rows=3000, cols=cols)]) if "ahead" in v.kernel)
    constants, made = dict(found.constants), facts(found)
    assert constants["SPLIT"] == split
    assert made.num("STAS") == 2, "every warp tells every program of its cluster, before the first turn and in each"
    assert made.num("UCGABAR_ARV") == 1, "they meet once, when they have begun"
    assert made.num_spills <= 8 and made.num_registers * 32 * warps * programs <= 65536
    assert (made.shared_bytes + 528 + 1024) * programs <= 228 * 1024, "all programs are there at once"
    turn = turn_of(found, tmp_path)
    assert len(re.findall(r"BAR\.SYNC", turn)) <= 3 and not re.search("UCGABAR|MEMBAR", turn)


@pytest.mark.parametrize(
    ("norm", "rows", "cols"),
    [("layer_norm", 8192, 12289), ("layer_norm", 4096, 16384), ("layer_norm", 4096, 14336), ("layer_norm", 65536, 1536),
     ("layer_norm", 8107, 7538), ("rms_norm", 9000, 6001), ("rms_norm", 3904, 15708), ("rms_norm", 4096, 20480),
     ("rms_norm", 65536, 1588), ("layer_norm", 20000, 2501), ("rms_norm", 4096, 14336), ("rms_norm", 8000, 5001),
     ("rms_norm", 9000, 14803)],
)  # fmt: skip
def test_rows_that_wait_in_shared_memory_are_read_there_twice(norm, rows, cols, tmp_path):
    call = getattr(kernels, norm)
    shapes = ((rows, cols), (cols,), (cols,))[: 3 if norm == "layer_norm" else 2]
    with tuning.asked() as chosen:
        found = variants(call, *shapes)["norm_backward_words"]
    config = next(of for name, _, of in chosen if name == f"{norm}.backward")
    constants, made = dict(found.constants), facts(found)
    chunks, slots = constants["CHUNKS"], constants["SLOTS"]
    assert made.num("LDGSTS.E.BYPASS.128") == 2 * chunks * slots and made.num("STG.E.128") >= chunks
    assert made.num("LDS.128") >= 4 * chunks and made.num_spills <= 16
    turn = turn_of(found, tmp_path)
    assert len(re.findall(r"\b(?:LDL|STL)", turn)) <= 5
    assert len(re.findall(r"BAR\.SYNC", turn)) <= 5, "a meeting for what has come, two for the sums"
    assert made.num_registers * 32 * found.num_warps * config.programs_per_sm <= 65536
    assert (made.shared_bytes + 1024) * config.programs_per_sm <= 228 * 1024, "all programs are there at once"


@pytest.mark.parametrize(("cols", "kind"), [(17408, "float8_e4m3fn"), (18432, "int8"), (29568, "float8_e4m3fn")])
def test_two_programs_that_quantize_long_rows_share_a_multiprocessor(cols, kind):
    (found,) = variants_of("quantize", [case("bfloat16", rows=4096, cols=cols, kind=kind, per="row", block=0)])
    made, constants = facts(found), dict(found.constants)
    assert made.num("LDG.E.128") == constants["CHUNKS"], "a row is read once"
    assert 2 * made.num_registers * 32 * found.num_warps <= 65536 and made.num_spills <= 8


@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_two_programs_of_eighteen_thousand_columns_share_a_multiprocessor(norm):
    shapes = ((4096, 18432), (18432,), (18432,))[: 3 if norm == "layer_norm" else 2]
    found = variants(getattr(kernels, norm), *shapes, grad=False)[f"{norm}_forward"]
    made = facts(found)
    assert 2 * made.num_registers * 32 * found.num_warps <= 65536 and made.num_spills == 0


@pytest.mark.parametrize(
    ("name", "rows", "cols"),
    [("add_rms_norm", 3000, 14336), ("add_rms_norm", 2048, 18432), ("add_layer_norm", 4096, 16384),
     ("add_layer_norm", 2048, 18432)],
)  # fmt: skip
def test_gradients_past_a_norm_of_long_rows_are_asked_for_before_its_sums_are_known(name, rows, cols, tmp_path):
    found = variants_of(name, [case("bfloat16", rows=rows, cols=cols)])
    found = next(variant for variant in found if variant.kernel == "norm_backward_words")
    constants, made = dict(found.constants), facts(found)
    turn = turn_of(found, tmp_path)
    asked = turn[: turn.index("SHFL")]
    assert constants["HAS_DH"] and made.num_spills <= 24
    assert len(re.findall(r"LDG\.E\.128", asked)) == constants["CHUNKS"]
    assert made.num_registers * 32 * found.num_warps <= 65536 and made.shared_bytes + 1024 <= 228 * 1024


@pytest.mark.parametrize(
    ("norm", "dtype", "rows", "cols"),
    [("rms_norm", "bfloat16", 2000, 2241), ("rms_norm", "bfloat16", 16384, 3501), ("rms_norm", "float32", 31713, 1781),
     ("rms_norm", "bfloat16", 2000, 1588), ("layer_norm", "float32", 32768, 1280), ("rms_norm", "float32", 8192, 2241),
     ("layer_norm", "bfloat16", 65536, 1280), ("layer_norm", "float32", 4096, 12288),
     ("rms_norm", "bfloat16", 65536, 973), ("layer_norm", "float32", 65536, 448), ("rms_norm", "float32", 8192, 2560),
     ("layer_norm", "bfloat16", 65536, 305), ("layer_norm", "float32", 65536, 353)],
)  # fmt: skip
def test_programs_that_walk_over_rows_are_all_there_at_once(norm, dtype, rows, cols):
    """What comes a wave later would take as long as all the others."""
    shapes = ((rows, cols), (cols,), (cols,))[: 3 if norm == "layer_norm" else 2]
    with tuning.asked() as chosen:
        found = variants(getattr(kernels, norm), *shapes, dtype=getattr(torch, dtype))[f"{norm}_backward"]
    config = next(of for name, _, of in chosen if name == f"{norm}.backward")
    made = facts(found)
    registers = -(-made.num_registers // 8) * 8
    assert registers * 32 * found.num_warps * config.programs_per_sm <= 65536 and made.num_spills <= 4
    assert (made.shared_bytes + 1024) * config.programs_per_sm <= 228 * 1024


def test_a_program_holds_a_group_of_channels_whole():
    weight = torch.ones(320, dtype=torch.bfloat16, device="meta")
    found = variants(
        lambda x: kernels.group_norm(x, 32, weight, weight, silu=True), (8, 320, 64, 64), grad=False
    )["group_norm_whole"]
    made = facts(found)
    assert made.num_spills == 0 and made.shared_bytes <= 232448
    assert made.num("LDGSTS.E.BYPASS.128") == 3 * 10 and made.num("STG.E.128") == 10
    assert made.num("MUFU") <= 80 + 40 + 8, "a power an element, an inverse for two"


def test_logits_that_fill_the_l2_leave_it_first():
    for rows, policy in ((1024, "LDG.E.128"), (65536, "LDG.E.EF.128")):
        target = torch.zeros(rows, dtype=torch.long, device="meta")
        found = variants(lambda x, t=target: kernels.cross_entropy(x, t), (rows, 1000), grad=False)
        assert facts(found["cross_entropy_short"]).num(policy) >= 8


@pytest.mark.parametrize(("cols", "dtype"), [(4096, torch.bfloat16), (8192, torch.bfloat16), (2049, torch.float32)])
def test_both_sums_of_a_layer_norm_row_backward_are_one_meeting_of_its_warps(cols, dtype):
    found = variants(lambda x, w, b: kernels.layer_norm(x, w, b), (8192, cols), (cols,), (cols,), dtype=dtype)
    variant = found["layer_norm_backward_ends" if cols % 8 else "layer_norm_backward"]
    stored = 4 * dict(variant.constants)["CHUNKS"]  # two a piece of either share: the compiler rearranges float32
    assert facts(variant).num("BAR") <= 4 + stored, "three a row, six with a sum after the other, and one at the end"


def test_one_long_row_of_a_gated_unit_divides_nothing():
    flat = facts(variants(kernels.swiglu, (4096, 8192), (4096, 8192), grad=False)["gated_forward"])
    assert flat.num("I2F") == 0 and flat.num("LDG.E.128") == 2


@pytest.mark.parametrize(
    ("call", "kernel", "accesses"),
    [
        (lambda x: kernels.rms_norm(x), "rms_norm_forward", 2),
        (lambda x: kernels.layer_norm(x), "layer_norm_forward", 4),
        (kernels.softmax, "softmax_forward", 4),
        (lambda x: kernels.swiglu(x, x), "gated_forward", 2),
    ],
)
def test_rows_that_no_l2_holds_are_told_to_stay_in_it(call, kernel, accesses):
    for rows, policy in ((1024, "LDG.E.128"), (16384, "LDG.E.EL.128")):
        assert facts(variants(call, (rows, 4096), grad=False)[kernel]).num(policy) == accesses


def test_column_sums_start_while_shares_are_written_whatever_the_size():
    for rows in (64, 16384):
        found = variants(lambda x, w: kernels.rms_norm(x, w, 1e-6), (rows, 4096), (4096,))
        assert facts(found["rms_norm_backward"]).num("PREEXIT") == 1
        assert dict(found["reduce_partials"].constants)["DEPENDENT"]


@pytest.mark.parametrize("centered", [False, True])
def test_weights_are_asked_for_early_where_no_program_loses_its_place(centered):
    from ridgeline.kernels.layer_norm import config as layers
    from ridgeline.kernels.rms_norm import config as rms

    forward = layers.forward if centered else rms.forward
    assert forward(64, 4096, 2).early and forward(64, 4096, 4).early, "all programs are there at once"
    assert forward(16384, 4096, 2).early == (not centered), "one vector of weights has registers that are left over"
    assert not forward(16384, 5120, 2).early and not forward(16384, 8192, 2).early and not forward(8192, 4096, 4).early


@pytest.mark.parametrize(("dtype", "rows", "cols"), [
    ("bfloat16", 105, 3072), ("bfloat16", 1147, 13696), ("bfloat16", 1616, 2763), ("float32", 169, 1912),
    ("float32", 333, 1001),
])  # fmt: skip
def test_a_dropout_mask_stays_in_the_threads_that_make_it(dtype, rows, cols):
    found = variants_of("dropout_add", [case(dtype, rows=rows, cols=cols, p=0.1)])
    assert {v.kernel for v in found} == {"dropout_add_forward", "dropout_backward"}
    for variant in found:
        made = facts(variant)
        assert made.shared_bytes == 0 and made.num("BAR") == 0, "what a thread reads is of its own counters"
        assert made.num("LDG.E.128") and made.num("STG.E.128") and made.num_spills == 0
