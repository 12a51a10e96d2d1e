"""Which library calls eager PyTorch makes for an op, and which of its kernels they are."""

from __future__ import annotations

import pytest

from ridgeline.cost.call import Call
from ridgeline.cost.lower.eager import NoLowering, lower, lowering, reduced_extent
from ridgeline.errors import CostError
from ridgeline.graph import OpDecl, ops, tensor


def kinds(calls: tuple[Call, ...]) -> list[str]:
    return [made.kind for made in calls]


def dims(calls: tuple[Call, ...]) -> dict:
    (only,) = calls
    return only.dims()


# Matrix products.


def test_a_single_product_is_a_gemm_with_its_layout(site) -> None:
    attrs = {"b": 1, "m": 8, "n": 32, "k": 16}
    (made,) = lower(site("matmul", [(8, 16), (16, 32)], [(8, 32)], trans_b=True, **attrs), "hopper")
    assert (made.kind, made.library, made.dims()["layout"]) == ("gemm", "cublas", "nt")
    weight_gradient = lower(site("matmul", [(8, 16), (8, 32)], [(16, 32)], trans_a=True, trans_b=False, **attrs), "x")
    assert dims(weight_gradient)["layout"] == "tn"


def test_several_products_are_a_bmm(site) -> None:
    made = lower(site("matmul", [(3, 8, 16), (3, 16, 32)], [(3, 8, 32)], b=3, m=8, n=32, k=16), "hopper")
    assert kinds(made) == ["bmm"] and dims(made)["b"] == 3


def test_the_weight_gradient_of_experts_reduces_over_their_rows(site) -> None:
    shape = {"ins": [(64, 16), (64, 32)], "outs": [(8, 16, 32)], "groups": 8, "m": 16, "n": 32, "k": 64}
    assert dims(lower(site("grouped_matmul", which="reduction", **shape), "hopper"))["reduction"] == 1
    assert dims(lower(site("grouped_matmul", which="rows", **shape), "hopper"))["reduction"] == 0


# Convolutions.

CONV = {
    "n": 2, "c": 16, "o": 32, "spatial": (8, 8), "kernel": (3, 3), "stride": (2, 2), "padding": (1, 1),
    "dilation": (1, 1), "groups": 1, "transposed": False, "out_spatial": (4, 4), "which": "fwd",
}  # fmt: skip
CONV_TYPES = [(2, 16, 8, 8), (32, 16, 3, 3)], [(2, 32, 4, 4)]


def test_a_convolution_is_one_cudnn_call(site) -> None:
    (made,) = lower(site("conv", *CONV_TYPES, **CONV), "hopper")
    assert (made.kind, made.library, made.phase) == ("conv", "cudnn", "fwd")
    assert {k: made.dims()[k] for k in ("in_px", "out_px", "kernel_elems", "stride_max", "nhwc")} == {
        "in_px": 64, "out_px": 16, "kernel_elems": 9, "stride_max": 2, "nhwc": 0}  # fmt: skip


def test_a_single_precision_convolution_is_rounded_to_tf32_as_the_framework_does(site) -> None:
    (made,) = lower(site("conv", *CONV_TYPES, dtype="fp32", **CONV), "hopper")
    assert made.dtype == "tf32"
    assert lower(site("conv", *CONV_TYPES, **CONV), "hopper")[0].dtype == "bf16"


def test_a_channels_last_convolution_says_so(site) -> None:
    assert dims(lower(site("conv", *CONV_TYPES, layout="channels_last", **CONV), "hopper"))["nhwc"] == 1


def test_the_bias_of_a_convolution_is_a_second_pass_over_its_output(site) -> None:
    made = lower(site("conv", *CONV_TYPES, bias=True, **CONV), "hopper")
    assert kinds(made) == ["conv", "pointwise"]
    assert made[1].dims()["numel"] == 2 * 32 * 16


def test_the_bias_gradient_of_a_convolution_is_a_reduction(site) -> None:
    attrs = {**CONV, "which": "bwd", "grads": ("input", "weight", "bias")}
    made = lower(site("conv", [(2, 32, 4, 4), *CONV_TYPES[0]], CONV_TYPES[0], **attrs), "hopper")
    assert kinds(made) == ["conv", "reduce"] and made[0].phase == "bwd"


def test_a_first_layer_needs_no_input_gradient(site) -> None:
    attrs = {**CONV, "which": "bwd", "grads": ("weight",)}
    made = lower(site("conv", [(2, 32, 4, 4), *CONV_TYPES[0]], [(32, 16, 3, 3)], **attrs), "hopper")
    assert (dims(made)["dgrad"], dims(made)["wgrad"]) == (0, 1)


def test_a_squeeze_and_excite_convolution_is_a_product(site) -> None:
    attrs = {**CONV, "spatial": (1, 1), "out_spatial": (1, 1), "kernel": (1, 1), "stride": (1, 1)}
    made = lower(site("conv", [(2, 16, 1, 1), (32, 16, 1, 1)], [(2, 32, 1, 1)], **attrs), "hopper")
    assert kinds(made) == ["gemm"]
    assert [dims(made)[k] for k in "mnk"] == [2, 32, 16]


# Attention.


def attention(site, arch: str, dtype: str = "bf16", **more) -> tuple[Call, ...]:
    attrs = {"b": 2, "h": 8, "hkv": 8, "s": 64, "skv": 64, "d": 64, "causal": False, **more}
    q = (2, 8, 64, attrs["d"])
    return lower(site("attention", [q, q, q], [q], dtype=dtype, **attrs), arch)


@pytest.mark.parametrize(
    ("arch", "more", "library"),
    [
        ("hopper", {}, "cudnn"),
        ("blackwell", {"d": 128}, "cudnn"),
        ("hopper", {"d": 256}, "fa2"),
        ("ampere", {}, "fa2"),
        ("ada", {"d": 128, "causal": True}, "fa2"),
        ("ampere", {"d": 512}, "efficient"),
        ("hopper", {"mask": True}, "cudnn"),
        ("ampere", {"mask": True}, "efficient"),
        ("hopper", {"dtype": "fp32"}, "efficient"),
        ("hopper", {"backend": "fa2"}, "fa2"),
    ],
)
def test_sdpa_takes_the_backend_that_pytorch_would(site, arch, more, library) -> None:
    (made,) = attention(site, arch, **more)
    assert (made.kind, made.library) == ("attention", library)


def test_a_mask_no_fused_kernel_takes_runs_unfused(site) -> None:
    made = kinds(attention(site, "hopper", mask=True, backend="math"))
    assert made.count("bmm") == 2 and made.count("softmax") == 1 and "attention" not in made
    assert kinds(attention(site, "hopper", d=36, mask=True)).count("bmm") == 2


def test_a_window_and_another_value_width_reach_the_kernel(site) -> None:
    found = dims(attention(site, "hopper", window=16, dv=32))
    assert (found["window"], found["dv"]) == (16, 32)


def test_attention_backward_is_a_call_of_that_phase(site) -> None:
    (made,) = attention(site, "hopper", which="bwd")
    assert made.phase == "bwd"


# Elementwise.


def pointwise(site, ins, out, **more) -> dict:
    return dims(lower(site("pointwise", ins, [out], fn="add", **more), "hopper"))


def test_operands_that_line_up_are_vectorized(site) -> None:
    found = pointwise(site, [(64, 32), (64, 32)], (64, 32))
    assert (found["vector"], found["transposed"], found["cast"]) == (1, 0, 0)
    assert (found["numel"], found["read_bytes"], found["written_bytes"]) == (2048, 2 * 4096, 4096)


def test_channels_last_on_both_sides_is_vectorized_too(site) -> None:
    x = tensor((2, 8, 4, 4), layout="channels_last")
    assert pointwise(site, [x, x], x)["vector"] == 1


def test_a_broadcast_row_indexes_element_by_element(site) -> None:
    assert pointwise(site, [(64, 32), (32,)], (64, 32))["vector"] == 0


def test_a_scalar_operand_does_not_spoil_vectorization(site) -> None:
    assert pointwise(site, [(64, 32), ()], (64, 32))["vector"] == 1


def test_a_strided_operand_indexes_element_by_element(site) -> None:
    found = pointwise(site, [tensor((64, 32), layout="strided"), (64, 32)], (64, 32))
    assert (found["vector"], found["transposed"]) == (0, 0)


def test_a_transposed_operand_crosses_the_other(site) -> None:
    found = pointwise(site, [tensor((64, 32), layout="transposed"), (64, 32)], (64, 32))
    assert (found["vector"], found["transposed"], found["rows"], found["row_bytes"]) == (0, 1, 64, 64)


def test_mixed_precision_operands_are_cast_on_the_way(site) -> None:
    found = pointwise(site, [(64, 32), tensor((64, 32), "fp32")], tensor((64, 32), "fp32"))
    assert (found["vector"], found["cast"]) == (0, 1)


def test_a_comparison_writes_its_narrow_result_vectorized(site) -> None:
    assert pointwise(site, [(64, 32)], tensor((64, 32), "bool"))["vector"] == 1


# Copies.


def test_a_plain_clone_is_a_memory_copy(site) -> None:
    assert kinds(lower(site("copy", [(64, 32)], [(64, 32)], fn="clone"), "hopper")) == ["copy"]


def test_a_widening_cast_is_a_kernel_that_converts(site) -> None:
    made = lower(site("copy", [(64, 32)], [tensor((64, 32), "fp32")], fn="to"), "hopper")
    assert kinds(made) == ["pointwise"] and dims(made)["cast"] == 1


def test_making_a_transpose_contiguous_walks_both_orders(site) -> None:
    made = lower(site("copy", [tensor((64, 32), layout="transposed")], [(64, 32)], fn="clone"), "hopper")
    assert kinds(made) == ["pointwise"] and (dims(made)["vector"], dims(made)["transposed"]) == (0, 1)


def test_joining_dense_pieces_copies_them_side_by_side(site) -> None:
    made = lower(site("copy", [(4, 8, 16), (4, 24, 16)], [(4, 32, 16)], fn="cat", dim=1), "hopper")
    assert kinds(made) == ["cat"] and dims(made) == {"n": 4, "c": 8 * 16, "c2": 24 * 16}


def test_joining_strided_pieces_goes_element_by_element(site) -> None:
    pieces = [tensor((4, 8, 16), layout="strided"), (4, 8, 16)]
    made = lower(site("copy", pieces, [(4, 16, 16)], fn="cat", dim=1), "hopper")
    assert kinds(made) == ["pointwise"] and dims(made)["vector"] == 0


def test_unequal_strided_pieces_idle_more(site) -> None:
    def alu(first: int) -> float:
        pieces = [tensor((4, first, 16), layout="strided"), (4, 16 - first, 16)]
        return dims(lower(site("copy", pieces, [(4, 16, 16)], fn="cat", dim=1), "hopper"))["alu"]

    assert alu(15) > alu(8)


# Rows.


def test_a_norm_of_a_dense_tensor_is_one_call(site) -> None:
    made = lower(site("norm", [(64, 32), (32,)], [(64, 32)], fn="layer_norm", n=64, c=32), "hopper")
    assert kinds(made) == ["layer_norm"] and dims(made) == {"n": 64, "c": 32}


def test_a_norm_of_a_transposed_tensor_hides_a_copy(site) -> None:
    x = tensor((4, 64, 32), layout="transposed")
    made = lower(site("norm", [x, (32,)], [(4, 64, 32)], fn="layer_norm", n=256, c=32), "hopper")
    assert kinds(made) == ["pointwise", "layer_norm"]
    assert made[0].dims()["transposed"] == 1 and made[0].dims()["numel"] == 4 * 64 * 32


def test_a_softmax_of_a_strided_tensor_hides_a_copy(site) -> None:
    x = tensor((64, 32), layout="strided")
    assert kinds(lower(site("softmax", [x], [(64, 32)], n=64, c=32), "hopper")) == ["pointwise", "softmax"]
    assert kinds(lower(site("softmax", [(64, 32)], [(64, 32)], n=64, c=32, log=True), "hopper")) == ["log_softmax"]


def test_group_norm_names_its_groups_and_batch_norm_its_mode(site) -> None:
    x = (2, 64, 8, 8)
    group = lower(site("norm", [x], [x], fn="group_norm", n=2 * 32, c=128), "hopper")
    assert (dims(group)["groups"], dims(group)["nhwc"]) == (32, 0)
    instance = lower(site("norm", [x], [x], fn="instance_norm", n=128, c=64), "hopper")
    assert dims(instance)["groups"] == 64
    nhwc = tensor(x, layout="channels_last")
    batch = lower(site("norm", [nhwc], [nhwc], fn="batch_norm", n=64, c=128, training=True), "hopper")
    assert (batch[0].library, dims(batch)["training"], dims(batch)["nhwc"]) == ("cudnn", 1, 1)


@pytest.mark.parametrize(
    ("shape", "reduced_dims", "extent"),
    [
        ((4, 8), (1,), (4, 8, 1)),
        ((4, 8), (0,), (1, 4, 8)),
        ((4, 8), (-1,), (4, 8, 1)),
        ((4, 8, 16), (0, 1), (1, 32, 16)),
        ((4, 8, 16), (1,), (4, 8, 16)),
        ((4, 8), (), (1, 32, 1)),
        ((), (), (1, 1, 1)),
    ],
)
def test_a_reduction_is_seen_as_outer_reduced_inner(shape, reduced_dims, extent) -> None:
    assert reduced_extent(shape, reduced_dims) == extent


@pytest.mark.parametrize(("fn", "flag"), [("argmax", "index"), ("amax", "guard"), ("vector_norm", "norm")])
def test_reductions_that_do_more_say_so(site, fn, flag) -> None:
    assert dims(lower(site("reduce", [(4, 8)], [(4,)], fn=fn, dims=(1,)), "hopper"))[flag] == 1
    assert flag not in dims(lower(site("reduce", [(4, 8)], [(4,)], fn="sum", dims=(1,)), "hopper"))


def test_a_mean_squared_loss_is_a_pass_and_a_reduction(site) -> None:
    made = lower(site("loss", [(64, 32), (64, 32)], [()], fn="mse_loss", n=64, c=32), "hopper")
    assert kinds(made) == ["pointwise", "reduce"]


# The rest.


def test_views_host_work_and_empty_tensors_launch_nothing(site) -> None:
    for op in ("view", "alloc", "host"):
        assert lower(site(op, [(4, 8)], [(4, 8)], fn="x"), "hopper") == ()
    assert lower(site("pointwise", [(0, 8)], [(0, 8)], fn="add"), "hopper") == ()


def test_a_gather_of_rows_moves_rows_and_of_elements_moves_elements(site) -> None:
    table, ids = (1000, 16), tensor((3,), "int64")
    rows = dims(lower(site("gather", [table, ids], [(3, 16)], fn="index_select"), "hopper"))
    elements = dims(lower(site("gather", [table, ids], [(3, 16)], fn="gather"), "hopper"))
    assert (rows["rows"], rows["row_bytes"]) == (3, 32)
    assert (elements["rows"], elements["row_bytes"]) == (48, 2)


def test_a_fused_optimizer_is_priced_per_tensor(site) -> None:
    made = lower(site("optimizer", [(100,)], [(100,)], fn="adamw", num_tensors=4, numel=1000), "hopper")
    assert (made[0].library, dims(made)["numel"], dims(made)["tensors"]) == ("fused", 250, 4)


def test_a_declared_op_is_a_roofline_of_its_own_name(site) -> None:
    declared = {"name": "mine", "flops": 7e9, "read_bytes": 1e6, "written_bytes": 2e6}
    (made,) = lower(site("custom", [(4,)], [(4,)], **declared), "hopper")
    assert (made.kind, made.library, made.dims()["flops"]) == ("roofline", "mine", 7_000_000_000)


def test_an_op_without_a_kernel_names_op_place_and_cure(site, monkeypatch) -> None:
    monkeypatch.setitem(ops(), "levitate", OpDecl("levitate", "rises"))
    with pytest.raises(NoLowering, match=r"'levitate' at net\.layer.*cost/lower/eager\.py"):
        lower(site("levitate", [(4, 8)], [(4, 8)]), "hopper")


def test_two_lowerings_of_an_op_are_refused() -> None:
    with pytest.raises(CostError, match="'conv' is lowered twice"):
        lowering("conv")(lambda site, arch: ())


@pytest.mark.parametrize("op", [name for name, declared in ops().items() if not declared.free])
def test_every_op_that_works_has_a_lowering(site, op) -> None:
    try:
        lower(site(op, [(4, 8)], [(4, 8)]), "hopper")
    except NoLowering as error:
        pytest.fail(str(error))
    except (KeyError, StopIteration):
        pass  # asks for an attribute this bare site lacks
