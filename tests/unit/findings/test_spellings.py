"""The same mistakes in other words: how programs that nobody has recorded yet spell what rules look for."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from stage import Stage, healthy, rules_of

from ridgeline.findings.rule import rules
from ridgeline.trace import Kind

HALF, SINGLE = ["c10::BFloat16"] * 2, ["float"] * 2
PRODUCT = "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT"
POINTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"
CAST = "void at::native::unrolled_elementwise_kernel<at::native::bfloat16_copy_kernel_cuda>"


def _rules(play: Callable[[Stage], None], rounds: int = 2) -> list[str]:
    stage = Stage()
    for _ in range(rounds):
        with stage.step():
            play(stage)
    return rules_of(stage.findings())


def _shapes(*shapes: object) -> dict[str, str]:
    return {"shapes": json.dumps(list(shapes))}


def _layers(stage: Stage, rows: list[int], first: str = "aten::linear", given: list[list[int]] | None = None) -> None:
    """A network of twenty small kernels over a batch of these rows."""
    stage.kernel(PRODUCT, 3.0, op=first, shapes=given or [[*rows, 80], [512, 80]], dtypes=HALF, host_us=40.0, blocks=8)
    for _ in range(20):
        stage.kernel(
            PRODUCT, 3.0, op="aten::linear", shapes=[[*rows, 512], [512, 512]], dtypes=HALF, host_us=40.0, blocks=8
        )


def _with_a_dim(stage: Stage) -> None:
    for _ in range(12):
        stage.host("aten::unsqueeze", 3.0, extra=_shapes([400, 80], []))
        _layers(stage, [1, 400])


def _in_pieces(stage: Stage) -> None:
    stage.host("aten::split", 5.0, extra=_shapes([24, 400, 80], [], []))
    for _ in range(12):
        _layers(stage, [2, 400])


def _texts_of_a_list(stage: Stage) -> None:
    for length in (31, 80, 12, 44, 63, 97, 20, 55):
        ids = [1, length]
        _layers(stage, ids, "aten::embedding", [[30000, 512], ids])
        stage.kernel(PRODUCT, 3.0, op="aten::linear", shapes=[[1, 512], [2, 512]], dtypes=HALF, host_us=40.0)


def _words_one_after_another(stage: Stage) -> None:
    for length in range(31, 43):
        _layers(stage, [1, length], "aten::embedding", [[30000, 512], [1, length]])


def _words_drawn_anew(stage: Stage) -> None:
    for _ in range(12):
        _layers(stage, [1, 64], "aten::embedding", [[30000, 512], [1, 64]])
        stage.kernel(POINTWISE, 3.0, op="aten::argmax", shapes=[[1, 64, 30000]], host_us=40.0)


def _moments_of_a_sequence(stage: Stage) -> None:
    stage.host("aten::unbind", 5.0, extra=_shapes([12, 64, 80], []))
    for _ in range(12):
        _layers(stage, [64])


def _a_picture_that_is_changed(stage: Stage) -> None:
    for _ in range(12):
        _layers(stage, [1, 64], "aten::conv2d", [[1, 4, 64, 64], [512, 4, 3, 3]])
        stage.kernel(POINTWISE, 3.0, op="aten::sub", shapes=[[1, 4, 64, 64], [1, 4, 64, 64]], host_us=40.0)


@pytest.mark.parametrize(
    ("play", "named"),
    [
        (_with_a_dim, True),
        (_in_pieces, True),
        (_texts_of_a_list, True),
        (_words_one_after_another, False),
        (_words_drawn_anew, False),
        (_moments_of_a_sequence, False),
        (_a_picture_that_is_changed, False),
    ],
)
def test_passes_over_samples_are_a_small_batch_and_passes_that_follow_from_each_other_are_not(play, named):
    found = _rules(play)
    assert found[0] == ("micro-batches" if named else "launch-bound"), found


@pytest.mark.parametrize(
    ("num_bytes", "back", "rule"),
    [(9216, False, "logging"), (9216, True, "host-round-trip"), (8_388_608, False, "host-round-trip")],
)
def test_a_small_table_of_which_nothing_comes_back_is_shown(num_bytes, back, rule):
    def play(stage: Stage) -> None:
        for _ in range(4):
            stage.kernel(PRODUCT, 200.0, op="aten::mm", shapes=[[4096, 4096]] * 2, dtypes=HALF)
        stage.copy("DtoH (Device -> Pageable)", num_bytes, 20.0, waits=True)
        stage.work(3000.0)
        if back:
            stage.copy("HtoD (Pageable -> Device)", num_bytes, 5.0)
        stage.kernel(PRODUCT, 200.0, op="aten::mm", shapes=[[4096, 4096]] * 2, dtypes=HALF)

    assert _rules(play)[0] == rule


@pytest.mark.parametrize(("back", "rule"), [(True, "host-round-trip"), (False, "logging")])
def test_a_few_values_that_are_worked_on_and_come_back_are_a_round_trip(back, rule):
    def play(stage: Stage) -> None:
        stage.kernel(PRODUCT, 300.0, op="aten::mm", shapes=[[4096, 4096]] * 2, dtypes=HALF)
        stage.copy("DtoH (Device -> Pageable)", 260, 3.0, waits=True)
        stage.work(2000.0)
        if back:
            stage.copy("HtoD (Pageable -> Device)", 4096, 3.0)
        stage.kernel(PRODUCT, 300.0, op="aten::mm", shapes=[[4096, 4096]] * 2, dtypes=HALF)

    assert _rules(play)[0] == rule


def _backward(stage: Stage, sizes: list[list[int]], added: bool = False) -> None:
    for size in sizes:
        with stage.span("autograd::engine::evaluate_function: AddmmBackward0"):
            stage.kernel(PRODUCT, 30.0, op="aten::mm", shapes=[[512, 512]] * 2, dtypes=SINGLE)
        with (
            stage.span("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"),
            stage.span("torch::autograd::AccumulateGrad", extra=_shapes(size)),
        ):
            if added:
                stage.kernel(POINTWISE, 20.0, op="aten::add_", shapes=[size, size, []])


SIZES = [[512 + 8 * i, 512] for i in range(24)]


@pytest.mark.parametrize(("op", "named"), [("aten::add_", True), ("aten::add", False)])
def test_weights_updated_by_hand_are_an_unfused_optimizer(op, named):
    def play(stage: Stage) -> None:
        stage.kernel(PRODUCT, 30.0, op="aten::linear", shapes=[[64, 512], [512, 512]], dtypes=SINGLE)
        _backward(stage, SIZES)
        for size in SIZES:
            for _ in range(3):
                stage.kernel(POINTWISE, 4.0, op=op, shapes=[size, size, []], host_us=30.0)

    assert ("unfused-optimizer" in _rules(play)) is named


@pytest.mark.parametrize("op", ["aten::zero_", "aten::fill_", "aten::_foreach_zero_"])
def test_gradients_zeroed_by_hand_are_memsets_in_any_words(op):
    def play(stage: Stage) -> None:
        stage.kernel(PRODUCT, 100.0, op="aten::linear", shapes=[[64, 512], [512, 512]], dtypes=SINGLE)
        if "foreach" in op:
            stage.kernel("void at::native::multi_tensor_apply_kernel<ZeroFunctor>", 300.0, op=op, shapes=[SIZES])
        else:
            for size in SIZES:
                stage.kernel("FillFunctor<float>", 20.0, op=op, shapes=[size, []])
        _backward(stage, SIZES, added=True)
        stage.kernel(PRODUCT, 100.0, op="aten::linear", shapes=[[64, 512], [512, 512]], dtypes=SINGLE)

    assert "needless-work" in _rules(play)


@pytest.mark.parametrize(("size", "named"), [([1024, 2048], True), ([64, 2048], False)])
def test_weights_cast_by_hand_are_told_from_what_a_layer_works_on(size, named):
    def play(stage: Stage) -> None:
        for _ in range(12):
            with stage.span("aten::to", extra=_shapes(size)):
                stage.kernel(CAST, 40.0, op="aten::copy_", shapes=[size, size, []], dtypes=["c10::BFloat16", "float"])
            stage.kernel(PRODUCT, 30.0, op="aten::linear", shapes=[[64, 2048], [1024, 2048]], dtypes=HALF)

    assert ("weight-casts" in _rules(play)) is named


@pytest.mark.parametrize(("size", "named"), [([4096, 1024], True), ([512, 1024], False)])
@pytest.mark.parametrize("memory", ["Pageable", "Pinned"])
def test_weights_that_come_from_the_host_are_told_from_batches_that_do(size, named, memory):
    def play(stage: Stage) -> None:
        for _ in range(6):
            with stage.span("aten::to", extra=_shapes(size)):
                stage.copy(f"HtoD ({memory} -> Device)", 8_000_000, 900.0, waits=True)
            stage.kernel(PRODUCT, 100.0, op="aten::linear", shapes=[[512, 1024], [4096, 1024]], dtypes=HALF)

    assert ("weight-streaming" in _rules(play)) is named


@pytest.mark.parametrize(("us", "named"), [(200.0, True), (20_000.0, False)])
def test_a_table_of_many_rows_matters_where_its_update_is_much_of_the_step(us, named):
    def play(stage: Stage) -> None:
        stage.kernel("embedding_kernel", 10.0, op="aten::embedding", shapes=[[200_000, 256], [4096]])
        stage.kernel(PRODUCT, us, op="aten::mm", shapes=[[4096, 256], [256, 256]], dtypes=SINGLE)
        with stage.span("autograd::engine::evaluate_function: EmbeddingBackward0"), stage.span("EmbeddingBackward0"):
            stage.kernel("FillFunctor<float>", 60.0, op="aten::zero_", shapes=[[200_000, 256]])
            stage.kernel("compute_grad_weight", 20.0, op="aten::embedding_dense_backward", shapes=[[4096, 256]])
        with stage.span("Optimizer.step#Adam.step", Kind.ANNOTATION):
            stage.kernel("multi_tensor_apply_kernel<FusedAdamMathFunctor>", 400.0, op="aten::_fused_adam_")

    assert ("lookup-gradient" in _rules(play)) is named


@pytest.mark.parametrize(("size", "rule"), [([512, 1024], "exposed-copies"), ([8_000_000], "weight-streaming")])
def test_batches_of_many_large_tensors_are_no_weights(size, rule):
    def play(stage: Stage) -> None:
        for _ in range(12):
            with stage.span("aten::copy_", extra=_shapes(size)):
                stage._launch("Memcpy HtoD (Pinned -> Device)", 900.0, 7, Kind.MEMCPY, "aten::copy_", 0, "",
                              {"copy": "HtoD pinned", "bytes": 8_000_000}, "cudaMemcpyAsync")  # fmt: skip
            stage.kernel(PRODUCT, 100.0, op="aten::linear", shapes=[[512, 1024], [4096, 1024]], dtypes=HALF)

    assert _rules(play)[0] == rule


@pytest.mark.parametrize(("stops", "rule"), [((3, 17, 29, 41, 58), "host-contention"), ((59,), "host-code")])
def test_a_thread_that_does_not_get_to_run_stops_at_other_places_each_time(stops, rule):
    """Python beside the loop holds the lock for five milliseconds at a time; code in the loop has its place."""

    def play(stage: Stage) -> None:
        for i in range(60):
            stage.kernel(PRODUCT, 40.0, op=("aten::mm", "aten::gelu")[i % 2], host_us=30.0)
            if i in stops:
                stage.work(5000.0)
        stage.kernel(POINTWISE, 40.0, op="aten::sum", host_us=30.0)

    assert _rules(play, rounds=3)[0] == rule


@pytest.mark.parametrize(("scores", "named"), [([64, 2048, 2048], True), ([64, 2048, 512], False)])
def test_a_softmax_written_out_is_attention_where_it_is_over_scores(scores, named):
    def play(stage: Stage) -> None:
        for _ in range(4):
            stage.kernel(PRODUCT, 200.0, op="aten::bmm", shapes=[[64, 2048, 64], [64, 64, 2048]], dtypes=HALF)
            stage.kernel("reduce_kernel<512, MaxOps>", 150.0, op="aten::amax", shapes=[scores])
            stage.kernel(POINTWISE, 200.0, op="aten::sub", shapes=[scores, [64, 2048, 1]], dtypes=HALF)
            stage.kernel(POINTWISE, 200.0, op="aten::exp", shapes=[scores], dtypes=HALF)
            stage.kernel("reduce_kernel<512, SumOps>", 150.0, op="aten::sum", shapes=[scores])
            stage.kernel(POINTWISE, 200.0, op="aten::div", shapes=[scores, [64, 2048, 1]], dtypes=HALF)
            stage.kernel(PRODUCT, 200.0, op="aten::bmm", shapes=[[64, 2048, 2048], [64, 2048, 64]], dtypes=HALF)

    assert (_rules(play)[0] == "attention") is named


@pytest.mark.parametrize(
    ("argument", "share", "named"),
    [("Encoder.attention_mask", 0.25, True), ("Encoder.attention_mask", 0.75, False),
     ("TransformerEncoder.src_key_padding_mask", 0.75, True), ("TransformerEncoder.src_key_padding_mask", 0.2, False)],
)  # fmt: skip
def test_a_mask_of_padding_says_what_is_not_real(argument, share, named):
    stage = Stage()
    stage.facts = {"padding": [{"argument": argument, "real_frac": share}]}
    for _ in range(2):
        with stage.step():
            healthy(stage, 10)
    assert ("padding" in rules_of(stage.findings())) is named


def test_batches_whose_loss_is_written_out_are_counted_by_their_turns():
    """A loss over soft targets has no node of its own."""

    def play(stage: Stage) -> None:
        for _ in range(8):
            _layers(stage, [4, 400])
            for _ in range(4):
                with stage.span("autograd::engine::evaluate_function: LogSoftmaxBackward0"):
                    stage.kernel(PRODUCT, 3.0, op="aten::mm", host_us=40.0)
            for size in SIZES[:4]:
                stage.kernel(POINTWISE, 3.0, op="aten::add_", shapes=[size, size, []],
                             around="autograd::engine::evaluate_function: torch::autograd::AccumulateGrad")  # fmt: skip

    assert _rules(play)[0] == "micro-batches"


@pytest.mark.parametrize(("around", "named"), [("CumprodBackward0", False), ("PowBackward0", True)])
def test_what_a_gradient_reads_by_itself_nobody_can_leave_where_it_is(around, named):
    def play(stage: Stage) -> None:
        for _ in range(3):
            healthy(stage, 3, 60.0)
            with stage.span(f"autograd::engine::evaluate_function: {around}"), stage.span("aten::item"):
                stage.copy("DtoH (Device -> Pageable)", 1, 2.0, waits=True)
            stage.work(100.0)

    assert ("synchronization" in _rules(play)) is named


def test_what_has_a_cause_of_its_own_is_not_cut_for_a_slow_host():
    """Seven of 16 ms were to be had from a round trip of which 2 were promised, behind 12 of a slow host."""

    def play(stage: Stage) -> None:
        for _ in range(4):
            for _ in range(60):
                stage.kernel(PRODUCT, 5.0, op="aten::linear", host_us=60.0)
            stage.copy("DtoH (Device -> Pageable)", 8192, 3.0, waits=True)
            stage.work(2000.0)
            stage.copy("HtoD (Pageable -> Device)", 8192, 3.0, waits=True)

    stage = Stage()
    for _ in range(3):
        with stage.step():
            play(stage)
    found = {finding.rule: finding for finding in stage.findings()}
    assert found["host-round-trip"].low_ms < 8.0 < found["host-round-trip"].high_ms
    assert sum(finding.high_ms for finding in found.values()) <= stage.now_s / 3 * 1e3 * 1.01


@pytest.mark.parametrize(
    ("layer", "solver", "named"),
    [("aten::linear", "", True), ("aten::mm", "", False), ("aten::linear", "aten::linalg_eigh", False)],
)
def test_layers_of_doubles_are_told_and_nothing_is_promised_of_them_for_sure(layer, solver, named):
    """What solves equations wants them, and so may whatever has no layers."""
    stage = Stage()
    for _ in range(2):
        with stage.step():
            for _ in range(12):
                stage.kernel("cutlass_80_tensorop_d884gemm_128x128_16x3_tn_align1", 900.0, op=layer,
                             shapes=[[4096, 1024], [1024, 1024]], dtypes=["double"] * 2)  # fmt: skip
                stage.kernel(POINTWISE, 40.0, op="aten::relu", shapes=[[4096, 1024]], dtypes=["double"])
            if solver:
                stage.kernel("syevd_kernel", 100.0, op=solver, shapes=[[1024, 1024]], dtypes=["double"])
    found = {finding.rule: finding for finding in stage.findings()}
    assert ("tensor-cores-unused" in found) is named
    if named:
        assert found["tensor-cores-unused"].low_ms < 0.3 < 9.0 < found["tensor-cores-unused"].high_ms


@pytest.mark.parametrize(("vocab", "times", "named"), [(50304, 1, True), (4096, 1, False), (50304, 8, False)])
def test_a_loss_that_is_written_out_as_a_logarithm_of_sums_has_logits(vocab, times, named):
    """Plans of transport sum up one matrix again and again."""

    def play(stage: Stage) -> None:
        logits = [8192, vocab]
        stage.kernel(PRODUCT, 1200.0, op="aten::linear", shapes=[[8192, 1024], [vocab, 1024]], dtypes=HALF)
        with stage.span("aten::to", extra=_shapes(logits)):
            stage.kernel("direct_copy_kernel", 550.0, op="aten::copy_", shapes=[logits] * 2,
                         dtypes=["float", "c10::BFloat16"])  # fmt: skip
        for _ in range(times):
            with stage.span("aten::logsumexp", extra=_shapes(logits, [], [])):
                stage.kernel("reduce_kernel<512, MaxOps>", 350.0, op="aten::amax", shapes=[logits], dtypes=SINGLE)
                stage.kernel(POINTWISE, 700.0, op="aten::sub", shapes=[logits, [8192, 1]], dtypes=SINGLE)
                stage.kernel("exp_elementwise", 700.0, op="aten::exp", shapes=[logits], dtypes=SINGLE)
                stage.kernel("reduce_kernel<512, SumOps>", 350.0, op="aten::sum", shapes=[logits], dtypes=SINGLE)

    assert ("logits" in _rules(play)) is named


@pytest.mark.parametrize("copied", ["DtoD", "cast"])
def test_weights_copied_one_by_one_are_a_loop_however_they_are_copied(copied):
    """A target network that is set to the learned one; of the same type the driver copies, of another a kernel."""

    def play(stage: Stage) -> None:
        healthy(stage, 10, 60.0)
        for i in range(120):
            size = [256 + 8 * (i % 24), 256]
            if copied == "cast":
                stage.kernel(CAST, 3.0, op="aten::copy_", shapes=[size, size, []], host_us=25.0)
                continue
            with stage.span("aten::copy_", extra=_shapes(size, size, [])):
                stage.work(20.0)
                stage._launch("Memcpy DtoD (Device -> Device)", 3.0, 7, Kind.MEMCPY, "aten::copy_", 0, "",
                              {"copy": "DtoD", "bytes": 262_144}, "cudaMemcpyAsync")  # fmt: skip

    assert _rules(play)[0] == "tensor-loop"


@pytest.mark.parametrize(("node", "kernel"), [("Index", "aten::_index_put_impl_"), ("IndexSelect", "aten::index_add_")])
@pytest.mark.parametrize(("leaf", "rows", "named"), [(True, 65536, True), (False, 65536, False), (True, 9**7, False)])
def test_a_table_whose_rows_are_taken_by_index_gets_a_dense_gradient_if_it_is_learned(node, kernel, leaf, rows, named):
    """Messages along edges are taken out of what layers have computed, by the same op; and where as many rows are asked
    for as there are, most of them get a gradient."""

    def play(stage: Stage) -> None:
        table = [2_000_000, 128]
        stage.kernel("index_elementwise_kernel", 30.0, op="aten::index", shapes=[table, [[rows]]], dtypes=["float"])
        healthy(stage, 6, 100.0)
        with stage.span(f"autograd::engine::evaluate_function: {node}Backward0"), stage.span(f"{node}Backward0"):
            stage.kernel("FillFunctor<float>", 300.0, op="aten::zero_", shapes=[table])
            stage.kernel("indexFuncLargeIndex", 60.0, op=kernel, shapes=[table, [65536], [65536, 128]])
        with stage.span("torch::autograd::AccumulateGrad", extra=_shapes(table if leaf else [128, 128])):
            stage.work(3.0)
        with stage.span("Optimizer.step#Adam.step", Kind.ANNOTATION):
            stage.kernel("multi_tensor_apply_kernel<FusedAdamMathFunctor>", 1900.0, op="aten::_fused_adam_")

    assert ("lookup-gradient" in _rules(play)) is named


@pytest.mark.parametrize(("size", "named"), [([4096, 4096], True), ([64, 4096], False)])
def test_weights_made_large_again_for_every_call_are_cast(size, named):
    """Out of eight bits; what a layer works on may come out of them as well."""

    def play(stage: Stage) -> None:
        for _ in range(12):
            with stage.span("aten::to", extra=_shapes(size)):
                stage.kernel("direct_copy_kernel_cuda", 14.0, op="aten::copy_", shapes=[size, size, []],
                             dtypes=["c10::BFloat16", "signed char"])  # fmt: skip
            stage.kernel(PRODUCT, 20.0, op="aten::linear", shapes=[[64, 4096], [4096, 4096]], dtypes=HALF)

    assert ("weight-casts" in _rules(play)) is named


@pytest.mark.parametrize(
    ("wanted", "deep", "named"),
    [("head", "frozen", True), ("all", "frozen", False), ("head", "wanted", False)],
)
def test_gradients_of_weights_that_no_optimizer_has_are_needless_beyond_the_last_it_has(wanted, deep, named):
    sizes = [[10, 512], *([512 + 8 * i, 512] for i in range(12)), [96, 512] if deep == "frozen" else [10, 512]]

    def play(stage: Stage) -> None:
        stage.kernel(PRODUCT, 100.0, op="aten::linear", shapes=[[64, 512], [512, 512]], dtypes=HALF)
        _backward(stage, sizes)
        with stage.span("Optimizer.step#AdamW.step", Kind.ANNOTATION):
            held = sizes if wanted == "all" else sizes[:1]
            stage.kernel(POINTWISE, 10.0, op="aten::_fused_adamw_", shapes=[held, held])

    assert ("needless-work" in _rules(play)) is named


@pytest.mark.parametrize(("often", "rule"), [(True, "host-code"), (False, "host-contention")])
def test_an_op_that_takes_as_long_each_time_it_is_given_the_same_computes_on_the_host(often, rule):
    rounds = iter(range(4))

    def play(stage: Stage) -> None:
        now = next(rounds)
        for _ in range(12):
            stage.kernel(PRODUCT, 60.0, op="aten::mm", shapes=[[64, 512], [512, 512]], dtypes=HALF)
        for i in range(3):
            size = [6464 + i, 201] if often else [64 + 8 * now + i, 512]
            stage.host("aten::mm", 2500.0, extra=_shapes(size, [201, 80]))

    found = _rules(play, rounds=4)
    assert found[0] == rule, found


@pytest.mark.parametrize(("sizes", "us", "named"), [(1, 20.0, True), (40, 20.0, False), (1, 4.0, False)])
def test_a_long_run_of_kernels_over_one_large_tensor_is_a_chain_and_one_over_many_is_not(sizes, us, named):
    def play(stage: Stage) -> None:
        for i in range(240):
            name = POINTWISE.replace("add", ("add", "mul", "pow")[i % 3])
            stage.kernel(name, us, op="aten::mul", shapes=[[9, 1024, 1000 + 8 * (i % sizes)]], host_us=8.0)

    assert ("pointwise-chains" in _rules(play)) is named


@pytest.mark.parametrize(("us", "rule"), [(1.5, "launch-bound"), (40.0, "pointwise-chains")])
def test_chains_of_kernels_too_short_to_move_anything_are_launches(us, rule):
    stage = Stage()
    for _ in range(2):
        with stage.step():
            for i in range(440):
                name = PRODUCT if i % 11 == 10 else POINTWISE.replace("add", ("add", "mul", "pow")[i % 3])
                op = "aten::mm" if i % 11 == 10 else "aten::mul"
                stage.kernel(name, us, op=op, shapes=[[64, 64]] * 2, host_us=12.0)
    stage.facts = {"unprofiled_step_s": 440 * max(12.0, us + 1) * 1e-6}
    assert rules_of(stage.findings())[0] == rule


@pytest.mark.parametrize(("num", "named"), [(6, True), (0, False)])
def test_light_kernels_that_run_eagerly_in_a_break_are_the_breaks(num, named):
    def play(stage: Stage) -> None:
        for _ in range(8):
            stage.kernel(PRODUCT, 100.0, op="aten::mm", shapes=[[4096, 512]] * 2, dtypes=HALF)
            with stage.span("Torch-Compiled Region: 0/0", Kind.ANNOTATION):
                with stage.span("## Call CompiledFxGraph a ##", Kind.ANNOTATION):
                    stage.kernel("triton_poi_fused_add_0", 20.0, op="triton_poi_fused_add_0")
                for i in range(num):
                    name = POINTWISE.replace("add", ("add", "mul", "pow")[i % 3])
                    stage.kernel(name, 40.0, op="aten::mul", shapes=[[8192, 2048]])
                with (
                    stage.span("Torch-Compiled Region: 1/0", Kind.ANNOTATION),
                    stage.span("## Call CompiledFxGraph b ##", Kind.ANNOTATION),
                ):
                    stage.kernel("triton_poi_fused_add_1", 20.0, op="triton_poi_fused_add_1")

    stage = Stage()
    for _ in range(2):
        with stage.step():
            play(stage)
    found = stage.findings()[0]
    assert found.rule == "graph-breaks" and (found.low_ms > 0) is named


@pytest.mark.parametrize(("distances", "num", "named"), [(0, 2, True), (1, 2, False), (1, 1, True)])
def test_a_distance_between_what_two_networks_give_is_told_nothing_in_16_bits(distances, num, named):
    loss = "void (anonymous namespace)::cunn_SoftMaxForward<LogSoftMaxForwardEpilogue>"

    def play(stage: Stage) -> None:
        stage.kernel(PRODUCT, 500.0, op="aten::linear", shapes=[[8192, 512], [32000, 512]], dtypes=HALF)
        for _ in range(distances):
            stage.host("aten::kl_div", 20.0, extra=_shapes([8192, 32000], [8192, 32000], [], []))
        stage.kernel("nll_loss_forward_reduce", 10.0, op="aten::nll_loss", shapes=[[8192, 32000]], dtypes=HALF)
        for _ in range(num):
            stage.kernel(loss, 400.0, op="aten::_log_softmax", shapes=[[8192, 32000], [], []], dtypes=HALF)
        for _ in range(6 - num):
            stage.kernel(POINTWISE, 400.0, op="aten::mul", shapes=[[8192, 32000]], dtypes=HALF)

    assert ("logits" in _rules(play)) is named


@pytest.mark.parametrize(("us", "named"), [(3.8, False), (60.0, True)])
def test_of_products_that_begin_and_end_nobody_knows_what_padding_brings(us, named):
    def play(stage: Stage) -> None:
        for _ in range(36):
            stage.kernel("cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_32x1_tn_align2", us, host_us=4.0)
            stage.kernel(PRODUCT, 5.0, host_us=4.0)

    assert ("misaligned-sizes" in _rules(play)) is named


@pytest.mark.parametrize(("width", "change"), [(1, "nn.Linear"), (5, "height one")])
def test_convolutions_of_width_one_are_products(width, change):
    stage = Stage()
    for _ in range(2):
        with stage.step():
            for _ in range(8):
                given = [[96, 512, 1, 256], [2048, 512, 1, width]]
                stage.kernel("void at::native::elementwise_kernel<128, 4, direct_copy>", 80.0, op="aten::copy_")
                with stage.span("aten::convolution", extra=_shapes([96, 512, 256], [2048, 512, width])):
                    stage.kernel("cudnn::nchwToNhwcKernel<bf16>", 50.0, op="aten::cudnn_convolution", shapes=given)
                    stage.kernel("sm90_xmma_fprop_gemm_bf16", 200.0, op="aten::cudnn_convolution", shapes=given)
    found = next(finding for finding in stage.findings() if finding.rule == "channels-first")
    assert change in found.change and (found.low_ms > 0) is (width == 1)


@pytest.mark.parametrize(("filled", "named"), [("aten::zero_", True), ("aten::add_", False)])
def test_targets_laid_out_as_wide_as_the_logits_are_told_however_small_their_share(filled, named):
    """Ones among zeros times log-probabilities; what a network gives is multiplied with too, and nobody fills it."""
    stage, wide = Stage(), [4096, 16384]
    for _ in range(2):
        with stage.step():
            healthy(stage, num_kernels=20)
            stage.kernel("cunn_SoftMaxForward<LogSoftMax>", 100.0, op="aten::_log_softmax", shapes=[wide], dtypes=HALF)
            stage.kernel(POINTWISE, 100.0, op=filled, shapes=[wide, []], dtypes=HALF)
            stage.kernel(POINTWISE, 200.0, op="aten::mul", shapes=[wide, wide], dtypes=HALF)
    assert ("logits" in rules_of(stage.findings())) == named


@pytest.mark.parametrize(("updated", "named"), [([1, 32, 1024], True), ([4096, 1024], False)])
def test_gradients_of_weights_before_which_something_is_learned_are_needless(updated, named):
    """A prompt is learned through layers that stay: their products for weights are made in passing."""
    stage = Stage()
    for _ in range(2):
        with stage.step():
            healthy(stage, num_kernels=6)
            for _ in range(8):
                with stage.span("autograd::engine::evaluate_function: AddmmBackward0"):
                    for given in ([[8192, 4096], [4096, 1024]], [[4096, 8192], [8192, 1024]]):
                        stage.kernel(PRODUCT, 150.0, op="aten::mm", shapes=given, dtypes=HALF)
                stage.host("torch::autograd::AccumulateGrad", 5.0, extra=_shapes([4096, 1024]))
            stage.host("torch::autograd::AccumulateGrad", 5.0, extra=_shapes([1, 32, 1024]))
            with stage.span("Optimizer.step#AdamW.step", Kind.ANNOTATION):
                stage.kernel("multi_tensor_apply_kernel<FusedAdam>", 20.0, op="aten::_fused_adamw_", shapes=[[updated]])
    assert ("needless-work" in rules_of(stage.findings())) == named


@pytest.mark.parametrize(("taken", "named"), [("aten::add", True), ("aten::sub", False)])
def test_a_gradient_that_goes_through_layers_again_recomputes_and_one_that_inverts_them_does_not(taken, named):
    stage = Stage()
    stage.facts = {"peak_allocated_bytes": 1e9, "total_bytes": 141e9}
    for _ in range(2):
        with stage.step():
            healthy(stage, num_kernels=8)
            for _ in range(6):
                with (
                    stage.span("autograd::engine::evaluate_function: RecomputedBackward"),
                    stage.span("RecomputedBackward"),
                ):
                    stage.kernel(PRODUCT, 200.0, op="aten::linear", shapes=[[4096, 4096]] * 2, dtypes=HALF)
                    stage.kernel(POINTWISE, 20.0, op=taken, shapes=[[4096, 4096]] * 2, dtypes=HALF)
                    with stage.span("autograd::engine::evaluate_function: AddmmBackward0"):
                        stage.kernel(PRODUCT, 200.0, op="aten::mm", shapes=[[4096, 4096]] * 2, dtypes=HALF)
    assert ("needless-work" in rules_of(stage.findings())) == named


@pytest.mark.parametrize("read", [False, True])
def test_passes_whose_results_are_joined_and_that_nothing_else_reads_are_a_small_batch(read):
    """Ten crops through one network; results that the next pass is given follow from each other."""
    stage = Stage()
    for _ in range(2):
        with stage.step():
            for _ in range(10):
                if read:
                    stage.kernel(POINTWISE, 3.0, op="aten::add", shapes=[[16, 4096]] * 2, host_us=40.0)
                _layers(stage, [16, 36])
                given = [[16, 512], [4096, 512]]
                stage.kernel(PRODUCT, 3.0, op="aten::linear", shapes=given, dtypes=HALF, host_us=40.0)
            stage.kernel("CatArrayBatchedCopy", 5.0, op="aten::cat", shapes=[[[16, 4096]] * 10, []])
    assert rules_of(stage.findings())[0] == ("launch-bound" if read else "micro-batches")


@pytest.mark.parametrize(("around", "named"), [("autograd::engine::evaluate_function: MmBackward0", True), ("", False)])
def test_what_goes_to_the_host_and_comes_back_in_the_backward_pass_was_kept_there(around, named):
    stage = Stage()
    for _ in range(2):
        with stage.step():
            for _ in range(8):
                stage.kernel(PRODUCT, 200.0, op="aten::linear", shapes=[[4096, 4096]] * 2, dtypes=HALF)
                stage.copy("DtoH pinned", 2**24, 300.0, waits=True)
            for _ in range(8):
                with stage.span(around or "fetch"):
                    stage.copy("HtoD pinned", 2**24, 300.0, waits=True)
                    stage.kernel(PRODUCT, 200.0, op="aten::mm", shapes=[[4096, 4096]] * 2, dtypes=HALF)
    found = stage.findings()
    assert ("activations" in found[0].cause) == named and (found[0].rule == "weight-streaming") == named


@pytest.mark.parametrize(("us", "num"), [(2.0, 8), (40.0, 4)])
def test_a_scalar_that_is_set_between_pointwise_kernels_is_no_end_of_a_chain(us, num):
    stage, kinds = Stage(), ("add", "mul", "sub", "div")
    for _ in range(2):
        with stage.step():
            healthy(stage, num_kernels=4)
            for half in range(2):
                for kind in kinds:
                    word = POINTWISE.replace("CUDAFunctor_add", f"{kind}_functor")
                    stage.kernel(word, 60.0, op=f"aten::{kind}", shapes=[[4096, 4096]] * 2, dtypes=HALF)
                if not half:
                    with stage.span("WhereBackward0"):
                        name = "vectorized_elementwise_kernel<FillFunctor>"
                        stage.kernel(name, us, op="aten::fill_", shapes=[[], []])
    found = next(one for one in stage.findings() if one.rule == "pointwise-chains")
    assert f"chains of {num} " in found.what


@pytest.mark.parametrize(("op", "rule"), [("aten::select", "launch-bound"), ("aten::randn", "host-code")])
def test_a_tensor_taken_apart_into_hundreds_of_views_is_launching(op, rule):
    stage = Stage()
    for _ in range(2):
        with stage.step():
            for _ in range(800):
                stage.host(op, 6.0)
            for _ in range(100):
                given = [[64, 256], [256, 256]]
                stage.kernel(PRODUCT, 3.0, op="aten::mm", shapes=given, dtypes=HALF, host_us=40.0)
    assert rules_of(stage.findings())[0] == rule


@pytest.mark.parametrize(("pieces", "most"), [(4, 0.7), (1, 0.0)])
def test_light_kernels_of_a_graph_in_pieces_may_become_one(pieces, most):
    """Of four kernels over the same large tensors three may go with the breaks between them."""
    stage = Stage()
    for _ in range(2):
        with stage.step():
            for _ in range(12):
                with stage.span("Torch-Compiled Region: 0/0"):
                    for piece in range(pieces):
                        inner = "Torch-Compiled Region: 0/1" if piece else "## Call CompiledFxGraph ##"
                        with stage.span(inner), stage.span("## Call CompiledFxGraph ##"):
                            stage.kernel("triton_poi_fused_add_0", 100.0, op="triton_poi_fused_add_0", host_us=10.0)
    found = {one.rule: one for one in stage.findings()}
    assert ("graph-breaks" in found) == (pieces > 1)
    assert pieces == 1 or found["graph-breaks"].high_ms > most * 12 * pieces * 0.1


@pytest.mark.parametrize(
    ("kernels", "name", "gone"), [(6, POINTWISE, True), (40, POINTWISE, False), (6, PRODUCT, False)]
)
def test_a_loop_that_reads_a_value_in_each_turn_may_be_one_op_over_all(kernels, name, gone):
    """Of short turns all but one may go with the reads; a network or a layer between two reads stays."""
    stage = Stage()
    for _ in range(2):
        with stage.step():
            healthy(stage, num_kernels=5)
            for _ in range(240 // kernels):
                for _ in range(kernels):
                    stage.kernel(name, 5.0, op="aten::mul", shapes=[[64, 256]] * 2, dtypes=HALF, host_us=40.0)
                with stage.span("aten::item"), stage.span("aten::_local_scalar_dense"):
                    stage.copy("DtoH pageable", 4, 2.0, waits=True)
    stage.facts = {"unprofiled_step_s": stage.now_s / 2}
    found = next((one for one in stage.findings() if one.rule == "synchronization"), None)
    assert (found is not None and found.high_ms > 8.0) == gone


@pytest.mark.parametrize(("stream", "named"), [(21, False), (7, True)])
def test_a_copy_on_its_own_stream_at_the_end_of_a_recording_runs_beside_the_next_step(stream, named):
    stage = Stage()
    with stage.step():
        healthy(stage, num_kernels=20)
        stage.wait()
        stage.copy("DtoH pinned", 2**24, 600.0, stream=stream)
    suspect = next(rule for rule in rules() if rule.name == "exposed-copies").detect(stage.context())
    assert (suspect is not None) == named


def test_lists_of_vectors_alone_do_not_say_that_weights_are_not_updated():
    stage = Stage()
    for _ in range(2):
        with stage.step():
            healthy(stage, num_kernels=6)
            for _ in range(8):
                with stage.span("autograd::engine::evaluate_function: AddmmBackward0"):
                    stage.kernel(PRODUCT, 150.0, op="aten::mm", shapes=[[4096, 8192], [8192, 1024]], dtypes=HALF)
                stage.host("torch::autograd::AccumulateGrad", 5.0, extra=_shapes([4096, 1024]))
                stage.host("torch::autograd::AccumulateGrad", 5.0, extra=_shapes([4096]))
            with stage.span("Optimizer.step#AdamW.step", Kind.ANNOTATION):
                stage.kernel("multi_tensor_apply_kernel<FusedAdam>", 20.0, op="aten::_fused_adamw_", shapes=[[[4096]]])
    assert "needless-work" not in rules_of(stage.findings())


@pytest.mark.parametrize(("sizes", "named"), [((*(512,) * 5, 2048, 1024, 768), True), ((512,), False)])
def test_a_body_of_a_loop_is_as_long_as_most_of_it_comes_again_after(sizes, named):
    """Of five ops three are alike after two, most of them in the same turn; the next tensor comes after five."""
    stage = Stage()
    for _ in range(2):
        with stage.step():
            healthy(stage, num_kernels=4)
            for i in range(60):
                for kind in ("mul", "mul", "add", "mul", "add"):
                    word, size = POINTWISE.replace("CUDAFunctor_add", f"{kind}_functor"), [sizes[i % len(sizes)]]
                    stage.kernel(word, 1.5, op=f"aten::{kind}", shapes=[size, size], dtypes=HALF, host_us=20.0)
    assert ("tensor-loop" in rules_of(stage.findings())) == named


@pytest.mark.parametrize(("steady", "rule"), [(True, "host-code"), (False, "host-contention")])
def test_an_op_that_takes_long_wherever_it_launches_nothing_computes_on_the_host(steady, rule):
    """A batch is copied into pinned memory, and then to the device by an op of the same name and sizes."""
    stage, given = Stage(), [[24, 4, 240, 304]] * 2
    for turn in range(4):
        with stage.step():
            stage.work(3000.0)
            if steady or turn % 2:
                stage.host("aten::copy_", 3000.0, extra=_shapes(*given))
            else:
                stage.host("aten::copy_", 5.0, extra=_shapes(*given))
            for _ in range(12):
                stage.kernel(CAST, 20.0, op="aten::copy_", shapes=given, host_us=12.0)
            healthy(stage, num_kernels=20)
            stage.wait()
    assert rules_of(stage.findings())[0] == rule


@pytest.mark.parametrize(("given", "first"), [("c10::BFloat16", "attention"), ("float", "tensor-cores-unused")])
def test_attention_in_its_reference_form_casts_up_what_a_fused_kernel_takes_as_it_comes(given, first):
    """Its products are in fp32 and those of its gradient too; where queries are, only Tensor Cores are asked for."""
    stage, gemm = Stage(), "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_ffma"
    heads, scores = [192, 1024, 64], [192, 1024, 1024]
    softmax = "void at::native::(anonymous namespace)::cunn_SoftMaxForward<float>"

    def spelled_out(words: tuple[str, str]) -> None:
        stage.kernel(gemm, 700.0, op="aten::bmm", shapes=[heads, [192, 64, 1024]], dtypes=SINGLE)
        stage.kernel(softmax.replace("Forward", words[0]), 400.0, op=words[1], shapes=[scores], dtypes=SINGLE)
        stage.kernel(gemm, 700.0, op="aten::bmm", shapes=[scores, heads], dtypes=SINGLE)

    for _ in range(2):
        with stage.step():
            healthy(stage, num_kernels=4)
            for _ in range(4):
                words = {"shapes": json.dumps([[16, 12, 1024, 64]] * 3), "dtypes": json.dumps([given] * 3)}
                with stage.span("aten::_scaled_dot_product_attention_math", extra=words):
                    spelled_out(("Forward", "aten::_softmax"))
                stage.kernel(PRODUCT, 100.0, op="aten::mm", shapes=[[4096, 4096]] * 2, dtypes=HALF)
            for _ in range(4):
                with stage.span("autograd::engine::evaluate_function: BmmBackward0"):
                    spelled_out(("Backward", "aten::_softmax_backward_data"))
                stage.kernel(PRODUCT, 100.0, op="aten::mm", shapes=[[4096, 4096]] * 2, dtypes=HALF)
    found = stage.findings()
    assert found[0].rule == first and (found[0].low_ms > 0.5 * 8 * 1.8) == (first == "attention")


def test_products_by_themselves_are_no_pass():
    def play(stage: Stage) -> None:
        for name in ("aten::mm", "autograd::engine::evaluate_function: MmBackward0"):
            for number in range(8):
                with stage.span(name, extra={"sequence": number}):
                    healthy(stage, num_kernels=1)

    assert _rules(play) == []


def _read_in_turns(of_reads: bool) -> dict[str, float]:
    """Upper ends of findings: values are read picture by picture, and the gradient of what is between two reads is a
    loop over tensors, or of something else."""
    stage, wide = Stage(), "void at::native::sbtopk::gatherTopK<float>"
    for turn in range(2):
        with stage.step():
            healthy(stage, num_kernels=40)
            for i in range(32):
                with stage.span("aten::item"), stage.span("aten::_local_scalar_dense"):
                    stage.copy("DtoH pageable", 4, 2.0, waits=True)
                number = {"sequence": 100 * turn + i} if of_reads else {}
                with stage.span("aten::mul", extra=_shapes([8192]) | number):
                    stage.kernel(wide, 50.0, op="aten::topk", shapes=[[8192]], dtypes=SINGLE, host_us=60.0)
            for i in reversed(range(32)):
                size = [(512, 1024, 768, 256, 2048)[i % 5]]
                node = {"sequence": 100 * turn + i}
                with stage.span("autograd::engine::evaluate_function: MulBackward0", extra=node):
                    for kind in ("mul", "add", "sub"):
                        word = POINTWISE.replace("CUDAFunctor_add", f"{kind}_functor")
                        stage.kernel(word, 3.0, op=f"aten::{kind}", shapes=[size, size], dtypes=SINGLE, host_us=20.0)
    return {one.rule: one.high_ms for one in stage.findings()}


def test_a_loop_and_what_it_reads_in_each_turn_may_go_with_one_change():
    joined, apart = _read_in_turns(of_reads=True), _read_in_turns(of_reads=False)
    first, other = list(apart)[:2]
    assert {first, other} == {"tensor-loop", "synchronization"} and list(joined)[:2] == [first, other]
    assert joined[first] == pytest.approx(apart[first] + apart[other]) and joined[other] == apart[other]
