"""What looks like a mistake and is none: rules are silent where nobody could take their advice."""

from __future__ import annotations

import json

import pytest
from stage import Stage, healthy, rules_of

from ridgeline.findings.context.kernel_name import kernel_name
from ridgeline.findings.rule import rule_named
from ridgeline.trace import Kind

PRODUCT = "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT"
POINTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"


def _twice(play) -> Stage:
    stage = Stage()
    for _ in range(2):
        with stage.step():
            play(stage)
    return stage


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("triton_poi_fused_add_mm_relu_3", "fused"),
        ("triton_poi_fused_convolution_native_dropout_1", "fused"),
        ("triton_red_fused__to_copy_bernoulli_mul_sum_7", "fused"),
        ("triton_per_fused__softmax_div_2", "softmax"),
        ("triton_red_fused_native_layer_norm_backward_4", "norm"),
        ("triton_tem_fused_mm_0", "gemm"),
    ],
)
def test_generated_kernels_are_no_products_and_are_fused_already(name, family):
    assert kernel_name(name).family == family


def test_what_a_compiler_made_is_not_told_to_be_compiled():
    def play(stage: Stage, name: str) -> None:
        for _ in range(6):
            healthy(stage, 2)
            for i in range(6):
                stage.kernel(name.format(i % 3), 80.0, op="aten::op")

    assert rules_of(_twice(lambda stage: play(stage, "triton_poi_fused_add_bernoulli_mul_{}")).findings()) == []
    assert rules_of(_twice(lambda stage: play(stage, "vectorized_elementwise_kernel<Mul{}>")).findings()) == [
        "pointwise-chains"
    ]


def test_an_optimizer_with_products_of_its_own_has_no_fused_form():
    def play(stage: Stage, name: str, product: bool) -> None:
        healthy(stage, 10)
        with stage.span(f"Optimizer.step#{name}.step", Kind.ANNOTATION):
            for _ in range(80):
                stage.kernel("vectorized_elementwise_kernel<Mul>", 8.0, op="aten::mul", host_us=12.0)
            if product:
                healthy(stage, 4)

    assert rules_of(_twice(lambda stage: play(stage, "Muon", True)).findings()) == []
    plain = _twice(lambda stage: play(stage, "RMSprop", False)).findings()[0]
    assert plain.rule == "unfused-optimizer" and "torch.compile(optimizer.step)" in plain.change
    assert "fused=True" in _twice(lambda stage: play(stage, "AdamW", False)).findings()[0].change


def _trained(stage: Stage, passes: int) -> None:
    """Passes under autocast, every weight cast in each of them."""
    for _ in range(passes):
        for _ in range(6):
            with stage.span("aten::linear"):
                shapes, dtypes = [[4096, 4096]] * 2, ["c10::BFloat16", "float"]
                stage.kernel("bfloat16_copy_kernel_cuda", 60.0, op="aten::copy_", shapes=shapes, dtypes=dtypes)
            healthy(stage, 2)
        with stage.span("autograd::engine::evaluate_function: MseLossBackward0"):
            healthy(stage, 1)
        healthy(stage, 10)


def test_in_training_weights_are_cast_once_a_step_by_nature():
    once, four = (_twice(lambda stage, n=n: _trained(stage, n)).findings() for n in (1, 4))
    assert "weight-casts" not in rules_of(once)
    found = next(finding for finding in four if finding.rule == "weight-casts")
    assert "one autocast region" in found.change
    most_ms = 4 * 6 * 0.060 * 1.35 * (1.0 + rule_named("weight-casts").more_at_best)
    assert found.low_ms <= 3 * 6 * 0.060 <= found.high_ms < most_ms


@pytest.mark.parametrize(("heads", "named"), [(1, True), (16, False)])
def test_a_bias_for_every_head_is_no_causal_mask(heads, named):
    def play(stage: Stage) -> None:
        qkv, mask = [2, 16, 4096, 64], [1, heads, 4096, 4096]
        for _ in range(4):
            healthy(stage, 1)
            stage.kernel("fmha_fprop", 900.0, op="aten::_cudnn_attention_forward", shapes=[qkv, qkv, qkv, mask])

    assert ("attention" in rules_of(_twice(play).findings())) is named


def test_the_first_batch_of_an_epoch_is_late_although_workers_are_kept():
    name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"

    def play(stage: Stage, first_us: float, others_us: float) -> None:
        stage.work(300)
        for us in (first_us, others_us, others_us):
            stage.host(name, us, Kind.DATALOADER)
            healthy(stage, 10, 100.0)
        stage.host(name, 100.0, Kind.DATALOADER)

    late = _twice(lambda stage: play(stage, 6000.0, 50.0)).findings()[0]
    slow = _twice(lambda stage: play(stage, 3000.0, 3000.0)).findings()[0]
    assert late.rule == slow.rule == "data-loader"
    assert "endless epoch" in late.change and "num_workers" in slow.change


def test_a_pause_of_a_millisecond_in_a_short_step_is_no_launching():
    def play(stage: Stage, pause_us: float) -> None:
        for _ in range(12):
            stage.kernel("nvjet_tst_64x8", 50.0, op="aten::mm", host_us=15.0)
        stage.work(pause_us)

    def timed(pause_us: float) -> list[str]:
        stage = _twice(lambda stage: play(stage, pause_us))
        stage.facts["unprofiled_step_s"] = stage.now_s / 2
        return rules_of(stage.findings())

    assert timed(1200.0)[0] == "host-code"
    assert timed(20.0) == []


def test_pauses_of_a_recorded_stack_are_host_code_only_where_they_surely_are():
    """Recorded, every call of Python takes longer than it does: how long a pause is without is a guess."""

    def timed(frame: str, pause_us: float, spread_s: float) -> list[str]:
        stage = Stage()
        for _ in range(2):
            with stage.step():
                for _ in range(12):
                    stage.kernel("nvjet_tst_64x8", 50.0, op="aten::mm", host_us=15.0)
                stage.host(frame, pause_us, Kind.PYTHON) if frame else stage.work(pause_us)
        stage.facts |= {"unprofiled_step_s": stage.now_s / 2 - 1e-4, "unprofiled_spread_s": spread_s}
        return rules_of(stage.findings())

    assert timed("", 600.0, 1e-4) == ["host-code"] and timed("nn.Module: Layer_3", 600.0, 1e-4) == []
    assert timed("nn.Module: Layer_3", 1000.0, 1e-4) == ["host-code"]


def _losses(stage: Stage, wide_op: str, wide: int) -> None:
    """A loss over 16,384 classes, and light kernels on tensors of some width."""
    healthy(stage, 10)
    for _ in range(6):
        stage.kernel("bfloat16_copy_kernel_cuda", 150.0, op=wide_op, shapes=[[12288, wide]] * 2)
    with stage.span("aten::cross_entropy_loss"):
        stage.kernel("cunn_SoftMaxForward<log_softmax>", 100.0, op="aten::_log_softmax", shapes=[[12288, 16384]])


def test_a_hidden_layer_as_wide_as_a_vocabulary_has_no_logits():
    wide, logits = (_twice(lambda stage, n=n: _losses(stage, "aten::copy_", n)).findings() for n in (8192, 16384))
    assert "logits" in rules_of(logits) and "logits" not in rules_of(wide)


def test_an_op_that_stalls_once_is_no_host_code():
    def play(stage: Stage, name: str, *seen: int) -> Stage:
        for number in range(4):
            with stage.step():
                for _ in range(20):
                    stage.host("aten::t", 3.0)
                    stage.kernel("nvjet_tst_64x8", 20.0, op="aten::mm", host_us=15.0)
                if number in seen:
                    stage.host(name, 6000.0)
                stage.kernel("nvjet_tst_64x8", 20.0, op="aten::mm", host_us=15.0)
        return stage

    assert "host-code" not in rules_of(play(Stage(), "aten::t", 1, 2, 3).findings())
    assert rules_of(play(Stage(), "aten::bucketize", 1, 2, 3).findings())[0] == "host-code"
    assert "host-code" not in rules_of(play(Stage(), "aten::bucketize", 2).findings())


def test_gradients_that_are_added_to_others_are_no_chain_to_compile():
    def play(stage: Stage, around: str) -> None:
        for _ in range(6):
            healthy(stage, 2)
            for i in range(6):
                stage.kernel(f"vectorized_elementwise_kernel<Add{i % 3}>", 80.0, op="aten::add_", around=around)

    added = _twice(lambda stage: play(stage, "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"))
    assert "pointwise-chains" not in rules_of(added.findings())
    assert "pointwise-chains" in rules_of(_twice(lambda stage: play(stage, "MulBackward0")).findings())


def test_a_loop_over_tensors_has_memsets_in_it():
    def play(stage: Stage) -> None:
        healthy(stage, 10)
        for _ in range(30):
            stage.kernel("Memset (Device)", 1.0, op="aten::linalg_vector_norm", kind=Kind.MEMSET, host_us=8.0)
            stage.kernel("reduce_kernel<NormTwoOps>", 8.0, op="aten::linalg_vector_norm", host_us=12.0)

    assert rules_of(_twice(play).findings())[0] == "tensor-loop"


def test_sums_of_gradients_in_a_replayed_graph_are_no_chain():
    """A sum over a bias and sums of gradients after it: in a graph no op tells them from a chain."""

    def play(stage: Stage, last: str) -> None:
        for _ in range(8):
            names = ("nvjet_tst_64x8", "reduce_kernel<Sum>", "CUDAFunctor_add<c10::BFloat16>", *[last] * 2)
            for name in (*names, "nvjet_tst_64x8"):
                stage._launch(name, 60.0, 7, Kind.KERNEL, "", 100, "", None, "cudaGraphLaunch")
                stage.work(3)

    assert "pointwise-chains" not in rules_of(_twice(lambda s: play(s, "vectorized<CUDAFunctor_add>")).findings())
    assert "pointwise-chains" in rules_of(_twice(lambda s: play(s, "vectorized<TanhFunctor>")).findings())


@pytest.mark.parametrize(("by_lists", "named"), [(False, True), (True, False)])
def test_an_optimizer_without_a_fused_form_is_well_over_lists_of_weights(by_lists, named):
    kernel = "multi_tensor_apply_kernel<TernaryOpScalarFunctor>" if by_lists else "vectorized_elementwise_kernel<Mul>"

    def play(stage: Stage) -> None:
        healthy(stage, 6)
        with stage.span("Optimizer.step#Lion.step", Kind.ANNOTATION):
            for _ in range(60):
                stage.kernel(kernel, 20.0, op="aten::_foreach_lerp_" if by_lists else "aten::mul_", host_us=20.0)

    assert ("unfused-optimizer" in rules_of(_twice(play).findings())) is named


@pytest.mark.parametrize(("before", "named"), [("aten::bmm", True), ("aten::mm", False)])
def test_a_softmax_between_a_linear_layer_and_batched_experts_is_no_attention(before, named):
    def play(stage: Stage) -> None:
        for _ in range(4):
            healthy(stage, 1)
            stage.kernel("nvjet_tst_64x8", 60.0, op=before)
            stage.kernel("softmax_warp_forward", 60.0, op="aten::_softmax")
            stage.kernel("nvjet_tst_256x128", 200.0, op="aten::bmm")

    assert ("attention" in rules_of(_twice(play).findings())) is named


def _adapted(stage: Stage, learned: bool) -> None:
    """A pass under autocast; the backward pass of a cast is there for weights that learn."""
    shapes, dtypes = [[4096, 4096]] * 2, ["c10::BFloat16", "float"]
    for _ in range(6):
        with stage.span("aten::linear"):
            stage.kernel("bfloat16_copy_kernel_cuda", 60.0, op="aten::copy_", shapes=shapes, dtypes=dtypes)
        healthy(stage, 2)
    with stage.span("autograd::engine::evaluate_function: MseLossBackward0"):
        healthy(stage, 1)
    words = {"shapes": json.dumps([[4096, 4096]] if learned else [[4096, 8]])}
    stage.host("ToCopyBackward0", 10.0, extra=words)
    healthy(stage, 10)


def test_casts_of_frozen_weights_are_told_and_of_learned_ones_not():
    frozen, learned = (_twice(lambda stage, v=v: _adapted(stage, v)).findings() for v in (False, True))
    assert "weight-casts" not in rules_of(learned)
    assert "frozen" in next(found.change for found in frozen if found.rule == "weight-casts")


@pytest.mark.parametrize(("rows", "named"), [(128_256, False), (1_000_000, True)])
def test_a_table_of_entities_is_no_vocabulary(rows, named):
    def play(stage: Stage) -> None:
        stage.kernel("embedding_kernel", 20.0, op="aten::embedding", shapes=[[rows, 1024], [8192]])
        healthy(stage, 4)
        with stage.span("aten::embedding_dense_backward"):
            stage.kernel("FillFunctor", 300.0, op="aten::zeros")
        with stage.span("Optimizer.step#SGD.step", Kind.ANNOTATION):
            stage.kernel("multi_tensor_apply_kernel", 300.0, op="aten::_foreach_add_")

    assert ("lookup-gradient" in rules_of(_twice(play).findings())) is named


def test_launches_that_only_the_recording_makes_slow_are_not_told():
    """Shapes were recorded and nobody timed the step: at half of the recorded host time the device is busy."""

    def play(stage: Stage, host_us: float) -> None:
        for _ in range(40):
            stage.kernel("nvjet_tst_64x8", 30.0, op="aten::mm", host_us=host_us, shapes=[[64, 64]] * 2)

    assert rules_of(_twice(lambda stage: play(stage, 38.0)).findings()) == []
    assert rules_of(_twice(lambda stage: play(stage, 200.0)).findings()) == ["launch-bound"]


def test_kernels_of_several_streams_share_one_device():
    """Every stream runs dry before its next kernel is launched, and the device never does."""

    def play(stage: Stage, us: float) -> None:
        for i in range(60):
            stage.kernel("nvjet_tst_64x8", us, op="aten::_cudnn_rnn", stream=7 + i % 4, host_us=50.0)

    def timed(us: float) -> list[str]:
        stage = _twice(lambda stage: play(stage, us))
        stage.facts["unprofiled_step_s"] = stage.now_s / 2
        return rules_of(stage.findings())

    assert timed(55.0) == []
    assert timed(5.0) == ["launch-bound"]


def _added(stage: Stage) -> None:
    """A gradient that is added to that of the batch before."""
    with stage.span("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"):
        stage.kernel("vectorized_elementwise_kernel<Add>", 2.0, op="aten::add_", host_us=10.0)


@pytest.mark.parametrize(("updates", "named"), [(1, True), (8, False)])
def test_backward_passes_are_counted_by_optimizer_step_where_steps_are_not_marked(updates, named):
    stage = Stage()
    for i in range(8):
        for _ in range(10):
            stage.kernel("nvjet_tst_64x8", 8.0, op="aten::mm", host_us=40.0)
        with stage.span("autograd::engine::evaluate_function: NllLossBackward0"):
            stage.kernel("nvjet_tst_64x8", 8.0, op="aten::mm", host_us=40.0)
        _added(stage)
        if i >= 8 - updates:
            with stage.span("Optimizer.step#AdamW.step", Kind.ANNOTATION):
                stage.kernel("multi_tensor_apply_kernel<FusedAdam>", 8.0, op="aten::_fused_adamw_", host_us=40.0)
    assert ("micro-batches" in rules_of(stage.findings())) is named


def _rounds(play, num: int, marked: bool) -> Stage:
    """Several rounds, each ended by an optimizer's step; ``play`` is told which round it is."""
    stage = Stage()
    for i in range(num):
        with stage.step() if marked else stage.span("round", Kind.ANNOTATION):
            play(stage, i)
            with stage.span("Optimizer.step#AdamW.step", Kind.ANNOTATION):
                stage.kernel("multi_tensor_apply_kernel<FusedAdamMathFunctor>", 50.0, op="aten::_fused_adamw_")
    return stage


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize(("rounds", "named"), [((0,), False), ((0, 1, 2), True)])
def test_memory_that_a_program_takes_when_it_begins_is_no_finding(marked, rounds, named):
    def play(stage: Stage, i: int) -> None:
        healthy(stage, 10)
        if i in rounds:
            stage.wait("cudaFree")
            for _ in range(4):
                stage.call("cudaMalloc", 150)
        healthy(stage, 10)

    assert ("allocator" in rules_of(_rounds(play, 3, marked).findings())) is named


@pytest.mark.parametrize(("rounds", "named"), [((0,), False), ((0, 1, 2), True)])
def test_kernels_that_are_loaded_when_a_recording_begins_are_no_contention(rounds, named):
    def play(stage: Stage, i: int) -> None:
        for at in range(60):
            stage.kernel("nvjet_tst_64x8", 25.0, op="aten::mm", host_us=10.0)
            stage.host("aten::empty", 1500.0 if i in rounds and at % 10 == 0 else 2.0)

    assert ("host-contention" in rules_of(_rounds(play, 3, marked=False).findings())) is named


def test_a_first_step_that_is_a_beginning_is_not_replayed():
    """Two steps must be left after it, and a step that is only somewhat longer is one of them."""

    def first(us: float, num: int) -> Stage:
        return _rounds(lambda stage, i: (stage.work(us if i == 0 else 0.0), healthy(stage, 10)), num, marked=True)

    assert [first(us, 4).context().num_steps for us in (0.0, 40.0, 9000.0)] == [4, 4, 3]
    assert first(9000.0, 2).context().num_steps == 2


def _recomputing(stage: Stage, us: float, kernel: str) -> None:
    healthy(stage, 6)
    for _ in range(6):
        with stage.span("autograd::engine::evaluate_function: MulBackward0"):
            with stage.span("aten::linear"):
                stage.kernel(kernel, us, op="aten::op")
            stage.kernel("nvjet_tst_128x256", us, op="aten::mm")


def test_recomputation_is_promised_for_sure_only_where_memory_is_known_to_be_free():
    untold = _twice(lambda stage: _recomputing(stage, 180.0, "nvjet_tst_128x256"))
    told = _twice(lambda stage: _recomputing(stage, 180.0, "nvjet_tst_128x256"))
    told.facts = {"peak_allocated_bytes": 20e9, "total_bytes": 140e9}
    (sure,), (unsure,) = told.findings(), untold.findings()
    assert sure.rule == unsure.rule == "needless-work"
    assert sure.low_ms > 0.5 and unsure.low_ms == 0.0 and unsure.high_ms > 0.9 and unsure.unchecked


@pytest.mark.parametrize(("us", "kernel", "named"), [
    (4_000.0, "vectorized_elementwise_kernel<Gelu>", True),  # 58 GB at most
    (20_000.0, "vectorized_elementwise_kernel<Gelu>", False),  # 288 GB
    (20_000.0, "nvjet_tst_128x256", True),  # 58 GB at most: products compute
])  # fmt: skip
def test_what_would_not_fit_is_rightly_computed_again(us, kernel, named):
    assert ("needless-work" in rules_of(_twice(lambda stage: _recomputing(stage, us, kernel)).findings())) is named


@pytest.mark.parametrize(("num", "named"), [(12, False), (40, True)])
def test_copies_are_counted_by_optimizer_step_where_nobody_marked_steps(num, named):
    def play(stage: Stage, i: int) -> None:
        for _ in range(num):
            stage.copy("HtoD pageable", 100_000, 60.0, waits=True)
        healthy(stage, 5)

    found = _rounds(play, 4, marked=False).findings()
    assert any(finding.cause.startswith("many small copies") for finding in found) is named


def test_what_an_op_reads_for_itself_is_no_read_of_the_program():
    """A CTC loss copies its letters to the host and its lengths to the device, and waits for each."""

    def play(stage: Stage, inside: bool) -> None:
        for _ in range(8):
            healthy(stage, 2, 60.0)
            with stage.span("aten::ctc_loss" if inside else "aten::to"):
                stage.copy("DtoH pageable", 46_080, 10.0, waits=True)
                if inside:
                    stage.copy("HtoD pageable", 384, 2.0, waits=True)

    own, program = (rules_of(_twice(lambda stage, i=i: play(stage, i)).findings()) for i in (True, False))
    assert "synchronization" in program and "synchronization" not in own


def test_products_with_a_vector_are_not_sent_to_the_tensor_cores():
    def play(stage: Stage, kernel: str) -> None:
        for _ in range(20):
            stage.kernel(kernel, 200.0, op="aten::mm")

    named = [rules_of(_twice(lambda stage, k=k: play(stage, k)).findings()) for k in ("sgemm_128x128", "gemvNSP_sgemm")]
    assert named == [["tensor-cores-unused"], []]


@pytest.mark.parametrize(("first", "named"), [(1, False), (3, True)])
def test_pictures_of_one_channel_have_no_layout_to_change(first, named):
    """The convolution over them works in NCHW, and what it gives is transposed by somebody."""
    shapes = [[[8, first, 64, 64], [64, first, 3, 3]], [[8, 64, 64, 64], [96, 64, 3, 3]]]

    def play(stage: Stage) -> None:
        for pair in shapes * 5:
            for kernel, us in (("nchwToNhwcKernel<bf16>", 60.0), ("sm90_xmma_fprop_implicit_gemm_bf16_nhwc", 200.0)):
                stage.kernel(kernel, us, op="aten::cudnn_convolution", shapes=pair)

    assert ("channels-first" in rules_of(_twice(play).findings())) is named


@pytest.mark.parametrize(("product_us", "named"), [(10.0, True), (1500.0, False)])
def test_without_shapes_a_network_that_only_begins_with_convolutions_is_not_told_their_layout(product_us, named):
    def play(stage: Stage) -> None:
        for _ in range(10):
            for kernel, us in (("nchwToNhwcKernel<bf16>", 90.0), ("sm90_xmma_fprop_implicit_gemm_bf16_nhwc", 200.0)):
                stage.kernel(kernel, us, op="aten::cudnn_convolution")
            stage.kernel("nvjet_tst_128x256", product_us, op="aten::mm")

    found = _twice(play).findings()
    assert ("channels-first" in rules_of(found)) is named
    assert all(finding.low_ms == 0.0 for finding in found)


@pytest.mark.parametrize(
    ("op", "around", "named"),
    [
        ("aten::mm", "", True),
        ("aten::linalg_cholesky_ex", "", False),
        ("aten::mm", "MmBackward0", True),
        ("aten::mm", "LinalgCholeskyExBackward0", False),  # PyTorch keeps TF32 out of it
    ],
)
def test_products_inside_of_a_factorization_have_no_setting(op, around, named):
    def play(stage: Stage) -> None:
        for _ in range(20):
            stage.kernel("ampere_sgemm_128x64_nt", 200.0, op=op, around=around)

    assert ("tensor-cores-unused" in rules_of(_twice(play).findings())) is named


@pytest.mark.parametrize(("other", "named"), [("nvjet_sm90_tst_128x256", True), ("nvjet_sm90_sss_128x256", False)])
def test_complex_products_beside_others_in_tf32_have_no_setting_left(other, named):
    def play(stage: Stage) -> None:
        for _ in range(10):
            stage.kernel(other, 100.0, op="aten::mm")
            stage.kernel("cutlass_80_simt_cgemm_64x64", 200.0, op="aten::bmm")

    assert ("tensor-cores-unused" in rules_of(_twice(play).findings())) is named


@pytest.mark.parametrize(("op", "named"), [("aten::gelu", True), ("aten::_fft_r2c", False)])
def test_convolutions_between_fourier_transforms_keep_their_layout(op, named):
    def play(stage: Stage) -> None:
        for _ in range(10):
            for kernel, us in (("nchwToNhwcKernel<float>", 90.0), ("sm90_xmma_fprop_implicit_gemm_tf32_nhwc", 200.0)):
                stage.kernel(kernel, us, op="aten::cudnn_convolution", shapes=[[8, 64, 64, 64], [64, 64, 3, 3]])
            stage.kernel("regular_fft_kernel", 100.0, op=op)

    assert ("channels-first" in rules_of(_twice(play).findings())) is named


@pytest.mark.parametrize(("dtype", "named"), [("float", True), ("c10::complex<float>", False)])
def test_no_code_is_generated_for_complex_numbers(dtype, named):
    def play(stage: Stage) -> None:
        for _ in range(6):
            healthy(stage, 2)
            for i in range(6):
                stage.kernel(f"vectorized_elementwise_kernel<Mul{i % 3}<{dtype}>>", 80.0, op="aten::mul")

    assert ("pointwise-chains" in rules_of(_twice(play).findings())) is named


@pytest.mark.parametrize(("node", "named"), [("TanhBackward0", True), ("TanhBackwardBackward0", False)])
def test_gradients_that_are_differentiated_again_cannot_be_compiled(node, named):
    def play(stage: Stage) -> None:
        for _ in range(6):
            healthy(stage, 2)
            for i in range(6):
                stage.kernel(f"vectorized_elementwise_kernel<Mul{i % 3}>", 80.0, op="aten::mul", around=node)

    assert ("pointwise-chains" in rules_of(_twice(play).findings())) is named


@pytest.mark.parametrize("inside", [True, False])
def test_functions_that_were_compiled_one_by_one_are_no_graph_that_broke(inside):
    """Stages of a network, each compiled by itself, are called one after another; what follows a break is called from
    inside of what broke."""

    def play(stage: Stage) -> None:
        for i in range(4):
            with stage.span(f"Torch-Compiled Region: {i}/0", Kind.ANNOTATION):
                healthy(stage, 2, 40.0)
                stage.work(1500)
                if inside:
                    with stage.span(f"Torch-Compiled Region: {i + 4}/0", Kind.ANNOTATION):
                        healthy(stage, 2, 40.0)
            stage.kernel("multi_tensor_apply_kernel<FusedAdam>", 100.0, op="aten::op")

    assert ("graph-breaks" in rules_of(_twice(play).findings())) is inside


@pytest.mark.parametrize(
    ("kernel", "named"), [("indexing_backward_kernel<float>", True), ("compute_grad_weight<float>", False)]
)
def test_a_lookup_of_its_own_sorts_as_any_other_gradient_of_rows_does(kernel, named):
    def play(stage: Stage) -> None:
        stage.kernel("indexSelectLarge", 50.0, op="aten::embedding", shapes=[[1_000_000, 64], [65536]])
        healthy(stage)
        for _ in range(4):
            stage.kernel(kernel, 300.0, op="aten::embedding_dense_backward", around="EmbeddingBackward0")

    assert ("lookup-gradient" in rules_of(_twice(play).findings())) is named


@pytest.mark.parametrize(("worked_us", "rule"), [(600.0, "slow-copies"), (9000.0, "host-round-trip")])
def test_a_tensor_that_is_fetched_and_looked_at_is_no_round_trip(worked_us, rule):
    """Fifty megabytes take the host 9 ms to fetch."""

    def play(stage: Stage) -> None:
        healthy(stage)
        with stage.span("aten::to"):
            stage.copy("DtoH pageable", 50_000_000, 9000.0, waits=True)
        stage.work(worked_us)

    assert rules_of(_twice(play).findings())[0] == rule


@pytest.mark.parametrize(
    ("kernels", "named"),
    [
        ([(f"vectorized_elementwise_kernel<{name}>", 80.0) for name in ("Mul", "Add", "Exp")] * 2, True),
        ([("vectorized_elementwise_kernel<bfloat16_copy_kernel_cuda>", 80.0)] * 6, False),
        ([("reduce_kernel<Sum>", 300.0)] + [("vectorized_elementwise_kernel<Mul>", 2.0)] * 5, False),
        ([("distribution_elementwise_grid_stride_kernel<normal>", 80.0)] * 6, False),
    ],
)
def test_kernels_over_small_tensors_and_draws_are_no_links_of_a_chain(kernels, named):
    def play(stage: Stage) -> None:
        for _ in range(6):
            healthy(stage, 2)
            for name, us in kernels:
                stage.kernel(name, us, op="aten::op")

    assert ("pointwise-chains" in rules_of(_twice(play).findings())) is named


@pytest.mark.parametrize("by_itself", [True, False])
def test_memory_that_a_pinning_thread_takes_is_the_loaders(by_itself):
    def play(stage: Stage) -> None:
        for _ in range(4):
            for call in ("cudaHostAlloc", "cudaFreeHost"):
                stage.call(call, 750.0)
                stage._spans[-1]["thread"] = 2 if by_itself else 1
            healthy(stage, 2)

    assert ("allocator" in rules_of(_twice(play).findings())) is not by_itself


@pytest.mark.parametrize(("every", "named"), [(1, True), (2, False)])
def test_a_collection_that_falls_into_the_recording_once_is_no_habit(every, named):
    stage = Stage()
    for i in range(2):
        with stage.step():
            healthy(stage, 10)
            if i % every == 0:
                stage.wait()
                stage.host("python gc generation 2", 3000, Kind.GC)
            healthy(stage, 10)
    assert ("garbage-collection" in rules_of(stage.findings())) is named


@pytest.mark.parametrize(("forward", "named"), [("aten::linear", True), ("MmBackward0", False)])
def test_losses_of_every_layer_are_of_one_pass(forward, named):
    """Between two batches there is a forward pass; between the losses of two layers there are gradients alone."""

    def play(stage: Stage) -> None:
        stage.host("aten::linear", 5)
        for _ in range(8):
            with stage.span(forward):
                for _ in range(10):
                    stage.kernel("nvjet_tst_64x8", 8.0, op="aten::mm", host_us=40.0)
            with stage.span("autograd::engine::evaluate_function: NllLossBackward0"):
                stage.kernel("nvjet_tst_64x8", 8.0, op="aten::mm", host_us=40.0)
            _added(stage)

    assert ("micro-batches" in rules_of(_twice(play).findings())) is named


@pytest.mark.parametrize(("around", "rule"), [("", "synchronization"), ("aten::linalg_eigh", None)])
def test_an_op_that_waits_by_itself_is_no_line_to_remove(around, rule):
    def play(stage: Stage) -> None:
        for _ in range(10):
            healthy(stage, 2, 60.0)
            if around:
                with stage.span(around):
                    stage.wait("cudaStreamSynchronize")
            else:
                stage.wait("cudaStreamSynchronize")
            stage.work(40)

    found = rules_of(_twice(play).findings())
    assert ("synchronization" in found) is (rule == "synchronization")


@pytest.mark.parametrize(
    ("around", "kind", "named"),
    [
        ("forward", Kind.ANNOTATION, True),
        ("Optimizer.step#LBFGS.step", Kind.ANNOTATION, False),
        ("aten::linalg_solve", Kind.OP, False),
    ],
)
def test_searches_and_solvers_read_what_they_must(around, kind, named):
    def play(stage: Stage) -> None:
        for _ in range(10):
            healthy(stage, 2, 60.0)
            with stage.span(around, kind), stage.span("aten::item"), stage.span("aten::_local_scalar_dense"):
                stage.wait()
            stage.work(40)

    assert ("synchronization" in rules_of(_twice(play).findings())) is named


@pytest.mark.parametrize(("passes", "named"), [(10, True), (1, False)])
def test_an_optimizer_that_goes_over_its_weights_once_has_nothing_to_fuse(passes, named):
    def play(stage: Stage) -> None:
        healthy(stage)
        with stage.span("Optimizer.step#SGD.step", Kind.ANNOTATION):
            for _ in range(passes):
                with stage.span("aten::_foreach_add_"):
                    for _ in range(40 // passes):
                        stage.kernel("multi_tensor_apply_kernel<BinaryOpListAlphaFunctor>", 60.0, op="aten::op")

    assert ("unfused-optimizer" in rules_of(_twice(play).findings())) is named


@pytest.mark.parametrize(("inside", "named"), [("aten::add", True), ("autograd::engine::evaluate_function: X", False)])
def test_an_optimizer_that_calls_for_the_loss_is_not_unfused(inside, named):
    def play(stage: Stage) -> None:
        healthy(stage)
        with stage.span("Optimizer.step#LBFGS.step", Kind.ANNOTATION):
            for _ in range(60):
                stage.kernel("vectorized_elementwise_kernel<Mul>", 60.0, op="aten::mul", around=inside)

    assert ("unfused-optimizer" in rules_of(_twice(play).findings())) is named


@pytest.mark.parametrize(("cast", "named"), [([2048, 1024], True), ([65536, 1024], False)])
def test_inputs_that_are_cast_are_no_weights(cast, named):
    def play(stage: Stage) -> None:
        call = {"shapes": json.dumps([[65536, 1024], [2048, 1024]])}
        for _ in range(6):
            with stage.span("aten::linear", extra=call):
                stage.kernel("vectorized_elementwise_kernel<bfloat16_copy_kernel_cuda>", 60.0, op="aten::_to_copy",
                             shapes=[cast], dtypes=["float"])  # fmt: skip
            healthy(stage, 2)

    assert ("weight-casts" in rules_of(_twice(play).findings())) is named


@pytest.mark.parametrize(("around", "named"), [("IndexBackward0", True), ("aten::op", False)])
def test_values_put_into_a_cache_are_no_gradients_of_a_lookup(around, named):
    def play(stage: Stage) -> None:
        healthy(stage)
        with stage.span(around), stage.span("aten::index_put_"):
            stage.kernel("indexing_backward_kernel_stride_1<float>", 2500.0, op="aten::index_put_")

    assert ("lookup-gradient" in rules_of(_twice(play).findings())) is named


@pytest.mark.parametrize(("node", "named"), [("MulBackward0", True), ("_ReversedBackward", False)])
def test_what_a_program_wrote_as_its_gradient_is_not_recomputed(node, named):
    """Layers that work their input out again have no activations that could be kept."""

    def play(stage: Stage) -> None:
        stage.facts = {"peak_allocated_bytes": 20e9, "total_bytes": 140e9}
        healthy(stage, 6)
        for _ in range(6):
            with stage.span(f"autograd::engine::evaluate_function: {node}"), stage.span(node):
                with stage.span("aten::linear"):
                    stage.kernel("nvjet_tst_128x256", 180.0, op="aten::addmm")
                stage.kernel("nvjet_tst_128x256", 180.0, op="aten::mm")

    assert ("needless-work" in rules_of(_twice(play).findings())) is named


@pytest.mark.parametrize(
    ("kernel", "named"),
    [("cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128", True), ("nvjet_tst_64x8_64x16", False)],
)
def test_kernels_that_load_whole_tiles_have_aligned_rows(kernel, named):
    """Whatever sizes were recorded, such a kernel was given rows that are aligned."""

    def play(stage: Stage) -> None:
        healthy(stage, 4)
        for _ in range(4):
            stage.kernel(kernel, 600.0, op="aten::mm", shapes=[[8192, 4099], [4099, 4096]],
                         dtypes=["c10::BFloat16"] * 2)  # fmt: skip

    assert ("misaligned-sizes" in rules_of(_twice(play).findings())) is named


@pytest.mark.parametrize(("other", "named"), [("cutlass_80_simt_sgemm", True), ("nvjet_sm90_sss_128x128", False)])
def test_where_some_products_are_in_tf32_the_setting_is_made_for_all(other, named):
    def play(stage: Stage) -> None:
        wide = {"op": "aten::mm", "shapes": [[4096, 4096], [4096, 4096]], "dtypes": ["float"] * 2}
        for _ in range(10):
            stage.kernel("cutlass_80_simt_sgemm_256x128_8x4_nn_align1", 2700.0, **wide)
            stage.kernel(other, 400.0, **wide)

    assert ("tensor-cores-unused" in rules_of(_twice(play).findings())) is named


@pytest.mark.parametrize(
    ("softmax", "deep", "named"),
    [
        ("cunn_SoftMaxForward<4, bf16>", 64, True),
        ("cunn_SpatialSoftMaxForward<bf16>", 64, False),  # over slots that compete
        ("cunn_SoftMaxForward<4, bf16>", 1024, False),  # no fused kernel has such heads
    ],
)
def test_softmaxes_between_products_are_not_always_attention(softmax, deep, named):
    def play(stage: Stage) -> None:
        scores = {"op": "aten::bmm", "shapes": [[64, 2048, deep], [64, deep, 2048]], "dtypes": ["c10::BFloat16"] * 2}
        values = {"op": "aten::bmm", "shapes": [[64, 2048, 2048], [64, 2048, deep]], "dtypes": ["c10::BFloat16"] * 2}
        for _ in range(6):
            healthy(stage, 2)
            stage.kernel("nvjet_tst_128x128", 200.0, **scores)
            stage.kernel(softmax, 250.0, op="aten::_softmax")
            stage.kernel("nvjet_tst_128x128", 200.0, **values)

    assert ("attention" in rules_of(_twice(play).findings())) is named


@pytest.mark.parametrize(("num", "named"), [(16, True), (2, False)])
def test_inputs_in_a_few_large_pieces_are_no_weights(num, named):
    def play(stage: Stage) -> None:
        for _ in range(num):
            stage.copy("HtoD pinned", 1_600_000_000 // num, 32_000.0 / num)
            healthy(stage, 2)

    assert ("weight-streaming" in rules_of(_twice(play).findings())) is named


@pytest.mark.parametrize(("shapes", "named"), [(12, True), (1, False)])
def test_one_state_that_moves_on_is_no_loop_over_tensors(shapes, named):
    def play(stage: Stage) -> None:
        healthy(stage)
        for i in range(200):
            stage.kernel("vectorized_elementwise_kernel<Mul>", 3.0, op="aten::mul_", host_us=12.0,
                         shapes=[[64 * (1 + i % shapes), 64]], dtypes=["float"])  # fmt: skip

    assert ("tensor-loop" in rules_of(_twice(play).findings())) is named


@pytest.mark.parametrize(("dtypes", "named"), [(["float", "c10::BFloat16"], True), (["c10::BFloat16"] * 2, False)])
def test_logits_that_are_laid_out_anew_are_not_in_fp32(dtypes, named):
    def play(stage: Stage) -> None:
        wide = {"shapes": [[8192, 32768], [8192, 32768]]}
        healthy(stage, 30)
        stage.kernel("elementwise_kernel<bfloat16_copy_kernel_cuda>", 300.0, op="aten::copy_", dtypes=dtypes, **wide)
        stage.kernel("cunn_SoftMaxForward<LogSoftMax>", 400.0, op="aten::_log_softmax", **wide)
        stage.kernel("reduce_kernel<Sum>", 200.0, op="aten::sum", **wide)

    assert ("logits" in rules_of(_twice(play).findings())) is named


@pytest.mark.parametrize("rows", [0, 4096])
def test_products_of_nothing_are_no_products(rows):
    """An expert that got no tokens multiplies an empty tensor."""

    def play(stage: Stage) -> None:
        wide = {"op": "aten::mm", "shapes": [[rows, 4096], [4096, 4096]], "dtypes": ["float"] * 2}
        for _ in range(20):
            stage.kernel("cutlass_80_simt_sgemm_256x128_8x4_nn_align1", 2700.0, **wide)

    assert rules_of(_twice(play).findings()) == ["tensor-cores-unused"]


@pytest.mark.parametrize(("queries", "named"), [(4096, True), (64, False)])
def test_a_tree_of_drafts_is_no_causal_mask(queries, named):
    def play(stage: Stage) -> None:
        q, kv, mask = [2, 16, queries, 64], [2, 16, 4096, 64], [1, 1, queries, 4096]
        for _ in range(4):
            healthy(stage, 1)
            stage.kernel("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", 900.0, op="aten::_efficient_attention_forward",
                         shapes=[q, kv, kv, mask])  # fmt: skip

    assert ("attention" in rules_of(_twice(play).findings())) is named


@pytest.mark.parametrize(("reads", "named"), [(10, True), (1, False)])
def test_one_read_a_step_that_costs_little_is_not_told(reads, named):
    def play(stage: Stage) -> None:
        for i in range(20):
            healthy(stage, 2, 60.0)
            if i < reads:
                with stage.span("aten::item"), stage.span("aten::_local_scalar_dense"):
                    stage.wait()
                stage.work(20)

    assert ("synchronization" in rules_of(_twice(play).findings())) is named


@pytest.mark.parametrize(("update_us", "named"), [(3_000.0, True), (50_000.0, False)])
def test_recomputation_beside_states_that_fill_the_memory_is_needed(update_us, named):
    """Nobody noted the memory; seven billion weights in fp32 are updated in 50 ms, and take all of it."""

    def play(stage: Stage) -> None:
        _recomputing(stage, 1800.0, "nvjet_tst_128x256")
        with stage.span("Optimizer.step#AdamW.step", Kind.ANNOTATION):
            stage.kernel("multi_tensor_apply_kernel<FusedAdamMathFunctor>", update_us, op="aten::_fused_adamw_")

    assert ("needless-work" in rules_of(_twice(play).findings())) is named


@pytest.mark.parametrize(("kernel", "named"), [("_lion_kernel", False), (POINTWISE, True)])
def test_an_update_that_is_one_kernel_of_somebodys_own_a_tensor_is_fused(kernel, named):
    """The device decides the step; one kernel of its own reads and writes all there is to."""
    stage = Stage()
    for _ in range(2):
        with stage.step():
            healthy(stage, 20, 300.0)
            for _ in range(40):
                stage.host("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 2.0)
            with stage.span("Optimizer.step#Lion.step", Kind.ANNOTATION):
                for _ in range(40 if not named else 240):
                    stage.kernel(kernel, 40.0, op="" if not named else "aten::mul_")
    assert ("unfused-optimizer" in rules_of(stage.findings())) is named


@pytest.mark.parametrize(("by_hand", "named"), [(True, False), (False, True)])
def test_weights_that_are_written_over_in_16_bits_have_others_in_fp32_by_nature(by_hand, named):
    """Once a step, after the update of those that the optimizer keeps; frozen ones are cast inside of their layers."""
    stage, size, logits = Stage(), [2048, 2048], [8192, 32000]
    kinds = ["c10::BFloat16", "float"]
    cast = "unrolled_elementwise_kernel<bfloat16_copy_kernel_cuda>"

    def copied() -> None:
        stage.kernel(cast, 20.0, op="aten::copy_", shapes=[size, size, []], dtypes=kinds)

    for _ in range(2):
        with stage.step():
            for _ in range(8):
                if not by_hand:
                    with stage.span("aten::linear"), stage.span("aten::to"), stage.span("aten::_to_copy"):
                        copied()
                stage.kernel(PRODUCT, 150.0, op="aten::linear", shapes=[[8192, 2048], size], dtypes=kinds[:1] * 2)
            with stage.span("ToCopyBackward0", extra={"shapes": json.dumps([logits])}):
                stage.kernel(cast, 60.0, op="aten::copy_", shapes=[logits] * 2, dtypes=kinds)
            with stage.span("Optimizer.step#AdamW.step", Kind.ANNOTATION):
                stage.kernel("multi_tensor_apply_kernel<FusedAdamMathFunctor>", 300.0, op="aten::_fused_adamw_")
            for _ in range(8 if by_hand else 0):
                copied()
    assert ("weight-casts" in rules_of(stage.findings())) is named


@pytest.mark.parametrize(("second", "sure"), [(True, False), (False, True)])
def test_of_attention_whose_scores_are_a_sum_of_two_products_nothing_is_promised_for_sure(second, sure):
    """Positions relative to each other: a fused kernel takes their product as a mask, which somebody has to make."""
    stage, half = Stage(), ["c10::BFloat16"] * 2
    for _ in range(2):
        with stage.step():
            for _ in range(4):
                stage.kernel(PRODUCT, 300.0, op="aten::linear", shapes=[[8192, 512], [1536, 512]], dtypes=half)
                if second:
                    stage.kernel(PRODUCT, 60.0, op="aten::bmm", shapes=[[64, 1024, 64], [64, 64, 1024]], dtypes=half)
                stage.kernel(PRODUCT, 110.0, op="aten::bmm", shapes=[[64, 1024, 64], [64, 64, 1024]], dtypes=half)
                stage.kernel(POINTWISE, 110.0, op="aten::add", shapes=[[64, 1024, 1024]] * 2, dtypes=half)
                stage.kernel("softmax_warp_forward", 90.0, op="aten::_softmax", shapes=[[64, 1024, 1024]], dtypes=half)
                stage.kernel(PRODUCT, 60.0, op="aten::bmm", shapes=[[64, 1024, 1024], [64, 1024, 64]], dtypes=half)
    found = next(finding for finding in stage.findings() if finding.rule == "attention")
    assert (found.low_ms > 0.5) is sure and found.high_ms > 0.8


@pytest.mark.parametrize(("num", "named"), [(1, False), (12, True)])
def test_pictures_that_follow_their_own_gradients_are_no_weights_updated_by_hand(num, named):
    """Ten steps of an attack change one tensor each; an update by hand goes over all weights."""
    stage = Stage()
    sizes = [[64 + i, 3, 224, 224] for i in range(num)]
    for _ in range(2):
        with stage.step():
            for _ in range(10 if num == 1 else 1):
                stage.kernel(PRODUCT, 900.0, op="aten::linear", shapes=[[4096, 512], [512, 512]])
                with stage.span("autograd::engine::evaluate_function: NllLossBackward0"):
                    stage.kernel(PRODUCT, 900.0, op="aten::mm", shapes=[[4096, 512], [512, 512]])
                for size in sizes:
                    with (
                        stage.span("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"),
                        stage.span("torch::autograd::AccumulateGrad", extra={"shapes": json.dumps([size])}),
                    ):
                        stage.work(3.0)
                for size in sizes:
                    for op in ("aten::sign", "aten::add_", "aten::sub", "aten::clamp_"):
                        stage.kernel(POINTWISE, 30.0, op=op, shapes=[size, size, []])
    assert ("unfused-optimizer" in rules_of(stage.findings())) is named


@pytest.mark.parametrize(("shared", "named"), [(False, False), (True, True)])
def test_weights_of_two_networks_are_cast_once_in_two_passes(shared, named):
    stage, kinds = Stage(), ["c10::BFloat16", "float"]
    for _ in range(2):
        with stage.step():
            for turn in range(2):
                for i in range(8):
                    size = [1024 + 64 * i + (0 if shared else turn), 2048]
                    with stage.span("aten::linear"), stage.span("aten::to"), stage.span("aten::_to_copy"):
                        stage.kernel("unrolled_elementwise_kernel<bfloat16_copy_kernel_cuda>", 12.0, op="aten::copy_",
                                     shapes=[size, size, []], dtypes=kinds)  # fmt: skip
                    stage.kernel(PRODUCT, 60.0, op="aten::linear", shapes=[[4096, 2048], size], dtypes=kinds[:1] * 2)
                with stage.span("autograd::engine::evaluate_function: MseLossBackward0"):
                    stage.kernel(POINTWISE, 5.0, op="aten::mse_loss_backward")
                for _ in range(16):
                    with stage.span("autograd::engine::evaluate_function: MmBackward0"):
                        stage.kernel(PRODUCT, 60.0, op="aten::mm", shapes=[[4096, 2048], [2048, 2048]])
            with stage.span("Optimizer.step#Adam.step", Kind.ANNOTATION):
                stage.kernel("multi_tensor_apply_kernel<FusedAdamMathFunctor>", 100.0, op="aten::_fused_adam_")
    assert ("weight-casts" in rules_of(stage.findings())) is named
