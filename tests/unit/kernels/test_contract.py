"""One declaration, every view of it: registered op, routes, support, price."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import ridgeline
from ridgeline import kernels
from ridgeline.bench.check import check_mistakes, mistake_case
from ridgeline.errors import KernelError
from ridgeline.kernels.adamw import reference as adamw
from ridgeline.kernels.contract import declare, elementwise_cost, primitive, primitives, trials
from ridgeline.kernels.rms_norm import reference as norm_reference


def drawn(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def leaf(*shape):
    return drawn(*shape).requires_grad_()


def pieces():
    return [drawn(300), drawn(5, 7)]


def squares():
    return [p.square() for p in pieces()]


def counters():
    return [torch.zeros(()), torch.zeros(())]


def codes(exp_avgs, exp_avg_sqs):
    found = [adamw.coded(m, v) for m, v in zip(exp_avgs, exp_avg_sqs, strict=True)]
    return [[each[i] for each in found] for i in range(4)]


X, W = (4, 16), (16,)
BAGS = (torch.tensor([1, 3, 3, 0, 2, 3]), torch.tensor([0, 2, 2, 5, 6]), torch.tensor([0, 9]))
SAMPLES = {
    "attention": lambda: (leaf(1, 2, 5, 8), leaf(1, 1, 5, 8), leaf(1, 1, 5, 8), True, 0.3, 0),
    "varlen_attention": lambda: (
        leaf(5, 2, 8),
        leaf(6, 1, 8),
        leaf(6, 1, 8),
        torch.tensor([0, 2, 5], dtype=torch.int32),
        torch.tensor([0, 4, 6], dtype=torch.int32),
        3,
        4,
        False,
        0.3,
    ),
    "paged_attention": lambda: (
        drawn(2, 4, 8),
        drawn(3, 4, 2, 8),
        drawn(3, 4, 2, 8),
        torch.tensor([[0, 2], [1, 0]], dtype=torch.int32),
        torch.tensor([5, 2], dtype=torch.int32),
        0.3,
    ),
    "clip_grad_norm_": lambda: (pieces(), 0.5),
    "adamw": lambda: (pieces(), pieces(), pieces(), squares(), counters(), 1e-3, 0.9, 0.99, 1e-8, 0.1, 0.5, False),
    "adamw_8bit": lambda: (
        pieces(),
        pieces(),
        *codes(pieces(), squares()),
        counters(),
        1e-3,
        0.9,
        0.99,
        1e-8,
        0.1,
        -1.0,
        False,
    ),
    "quantize": lambda: (drawn(4, 64), None, "int8", "block", 32),
    "dequantize": lambda: (drawn(4, 64).to(torch.int8), drawn(4, 2), "bfloat16"),
    "embedding_bag": lambda: (leaf(20, 8), *BAGS, leaf(6), None, 2, False, -1, "float32"),
    "embedding_bags_update": lambda: (
        drawn(20, 8),
        drawn(20).abs(),
        torch.zeros(1),
        torch.zeros(()),
        drawn(2, 16),
        *BAGS,
        drawn(6),
        2,
        False,
        "rowwise_adagrad",
        0.1,
        1e-8,
        0.0,
        0.9,
        0.99,
    ),
    "dot_interaction": lambda: (leaf(4, 8), leaf(4, 3, 8)),
    "cross_layer": lambda: (leaf(4, 16), leaf(4, 16), leaf(16, 3), leaf(16), leaf(3, 16)),
    "decode_attention": lambda: (drawn(2, 4, 1, 8), drawn(2, 2, 5, 8), drawn(2, 2, 5, 8), None, None, 0.3),
    "selective_scan": lambda: (
        drawn(2, 3, 4),
        drawn(2, 3, 4),
        -drawn(3, 5).abs(),
        drawn(2, 5, 4),
        drawn(2, 5, 4),
        drawn(3),
        drawn(2, 3, 4),
        None,
        True,
    ),
    "unshuffle": lambda: (drawn(2, 3, 5, 8), 4, 6, 1, 2),
    "resize": lambda: (drawn(2, 3, 4, 5), 8, 7, False, 0.5, 5 / 7),
    "drop_padding": lambda: (drawn(3, 8)[:, :5],),
    "dense": lambda: (
        drawn(8, 16).bfloat16(),
        drawn(24, 16).bfloat16(),
        None,
        drawn(8, 24).bfloat16(),
        drawn(24),
        drawn(24).abs(),
        drawn(24),
        None,
        1e-5,
        "relu",
        False,
    ),
    "depthwise": lambda: (
        drawn(2, 8, 6, 5).bfloat16().to(memory_format=torch.channels_last),
        drawn(8, 1, 3, 3).bfloat16(),
        drawn(8),
        None,
        None,
        None,
        None,
        1e-5,
        "silu",
        [2, 1],
        [1, 1],
    ),
    "short_attention": lambda: (*(drawn(4, 2, 9, 8).bfloat16() for _ in range(3)), drawn(2, 2, 9, 9).bfloat16(), 0.3),
    "group_norm_last": lambda: (
        drawn(2, 8, 6, 5).to(memory_format=torch.channels_last),
        2,
        drawn(8),
        drawn(8),
        1e-5,
        True,
    ),
    "sequence_convolution": lambda: (
        drawn(2, 9, 16).bfloat16().transpose(1, 2),
        drawn(16, 8, 3).bfloat16(),
        drawn(16),
        1,
        2,
    ),
    "grouped_convolution": lambda: (
        drawn(2, 32, 6, 5).bfloat16().to(memory_format=torch.channels_last),
        drawn(16, 16, 3, 3).bfloat16(),
        drawn(16),
        None,
        None,
        None,
        None,
        1e-5,
        "relu",
        2,
        [1, 1],
        2,
    ),
    "matmul": lambda: (drawn(3, 4, 256), drawn(256, 8), drawn(8)),
    "convolution": lambda: (
        drawn(2, 3, 6, 5),
        drawn(3, 4, 3, 2),
        drawn(4),
        drawn(1, 4),
        [2, 1],
        [1, 0],
        [1, 1],
        [1, 0],
        1,
        True,
        "relu shifts@0",
    ),
    "scan": lambda: (drawn(3, 5), drawn(3, 5) > 0, 1, False, True, False),
    "pool": lambda: (drawn(2, 3, 8, 7), [3, 2], [2, 1], [1, 0], [1, 2], False),
    "top_k": lambda: (drawn(2, 5, 40), 3, True),
    "long_norm": lambda: (drawn(4, 12), "norm", 12, drawn(4), drawn(4), 2, 1e-5),
    "linear": lambda: (drawn(*X), drawn(12, 16), drawn(12), drawn(*W), drawn(4, 6), 1e-6, 0.0, "silu", True),
    "quantized_linear": lambda: (
        drawn(4, 16).bfloat16(),
        torch.ones(12, 16, dtype=torch.int8),
        torch.ones(12),
        None,
        None,
        None,
        1e-6,
        0.0,
        "silu",
        True,
    ),
    "paged_latent_attention": lambda: (
        drawn(2, 4, 24),
        drawn(3, 4, 24),
        torch.tensor([[0, 2], [1, 0]], dtype=torch.int32),
        torch.tensor([5, 2], dtype=torch.int32),
        16,
        0.3,
    ),
    "rms_norm": lambda: (leaf(*X), leaf(*W), 1e-6, 0.0),
    "add_rms_norm": lambda: (leaf(*X), leaf(*X), leaf(*W), 1e-6, 1.0),
    "layer_norm": lambda: (leaf(*X), leaf(*W), leaf(*W), 1e-5),
    "add_layer_norm": lambda: (leaf(*X), leaf(*X), leaf(*W), leaf(*W), 1e-5),
    "softmax": lambda: (leaf(*X),),
    "cross_entropy": lambda: (leaf(*X), torch.tensor([1, 3, -100, 0]), -100, 0.1, 0.01, "mean", False),
    "linear_cross_entropy": lambda: (
        leaf(*X),
        leaf(7, 16),
        torch.tensor([1, 3, -100, 0]),
        -100,
        0.1,
        0.01,
        "mean",
        True,
        True,
    ),
    "group_norm": lambda: (leaf(2, 6, 3, 3), 3, leaf(6), leaf(6), 1e-5, True),
    "rms_norm_quant": lambda: (drawn(4, 64), drawn(4, 64), drawn(64), 1e-6, 0.0, "int8", 32),
    "layer_norm_quant": lambda: (drawn(4, 64), None, drawn(64), drawn(64), 1e-6, "int8", 32),
    "dropout_add": lambda: (leaf(*X), leaf(*X), torch.tensor(7), 0.25),
    "gated": lambda: (leaf(*X), leaf(*X), "gelu_tanh"),
    "qk_norm_rope": lambda: (
        leaf(2, 3, 5, 8),
        leaf(2, 1, 5, 8),
        leaf(8),
        leaf(8),
        drawn(5, 4),
        drawn(5, 4),
        1e-6,
        0.0,
        2,
    ),
    "gelu": lambda: (leaf(*X).detach().bfloat16().requires_grad_(), "none"),
    "relu2": lambda: (leaf(*X),),
    "rope": lambda: (leaf(2, 3, 5, 8), leaf(2, 1, 5, 8), drawn(5, 4), drawn(5, 4), False, 2),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_the_registered_op_passes_opcheck(name):
    torch.library.opcheck(primitive(name).op, SAMPLES[name]())


def test_every_public_function_has_a_sample_here():
    assert {made.name for made, _ in trials().values()} == set(SAMPLES)


@pytest.mark.parametrize("name", SAMPLES)
def test_the_eager_path_and_the_registered_op_agree(name):
    made = primitive(name)

    def gradients(call):
        args = SAMPLES[name]()  # fresh ones: some ops change them
        tensors = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
        out = call(*args)
        outs = out if isinstance(out, tuple) else (out,)
        return outs, torch.autograd.grad([o.sum() for o in outs], tensors, allow_unused=True) if tensors else ()

    (ours, our_grads), (theirs, their_grads) = gradients(made), gradients(made.traced)
    for a, b in (*zip(ours, theirs, strict=True), *zip(our_grads, their_grads, strict=True)):
        torch.testing.assert_close(a, b)


def test_compile_sees_one_graph_without_breaks():
    def block(x, w):
        y, h = kernels.add_rms_norm(x, x * 0.5, w)
        return kernels.swiglu(y, h) + kernels.softmax(h)

    x, w = leaf(4, 16), leaf(16)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, w), block(x, w))
    meant = torch.autograd.grad(block(x, w).sum(), (x, w))
    torch.testing.assert_close(torch.autograd.grad(compiled(x, w).sum(), (x, w)), meant)


def test_fake_tensors_take_the_registered_op():
    with FakeTensorMode():
        y = kernels.rms_norm(torch.empty(3, 8, dtype=torch.bfloat16), torch.empty(8))
    assert y.shape == (3, 8) and y.dtype == torch.bfloat16


def test_functorch_transforms_see_plain_pytorch():
    x, w = drawn(4, 16), drawn(16)
    found = torch.func.grad(lambda x: kernels.rms_norm(x, w, 1e-6).sum())(x)
    x.requires_grad_()
    torch.testing.assert_close(found, torch.autograd.grad(kernels.rms_norm(x, w, 1e-6).sum(), x)[0])
    batched = torch.func.vmap(lambda row: kernels.softmax(row))(x.detach())
    torch.testing.assert_close(batched, torch.softmax(x.detach(), -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_default_eps_is_pytorchs(dtype):
    x = (1e-4 * drawn(4, 16)).to(dtype)
    torch.testing.assert_close(kernels.rms_norm(x), torch.nn.functional.rms_norm(x, (16,)))


def test_an_offset_is_added_to_the_weight():
    x, w = drawn(4, 16), drawn(16)
    torch.testing.assert_close(kernels.rms_norm(x, w, 1e-6, offset=1.0), kernels.rms_norm(x, w + 1, 1e-6))


def test_out_takes_the_result_and_refuses_gradients():
    x, w, out = drawn(4, 16), drawn(16), torch.empty(4, 16)
    assert kernels.rms_norm(x, w, 1e-6, out=out) is out
    torch.testing.assert_close(out, kernels.rms_norm(x, w, 1e-6))
    with pytest.raises(KernelError, match="no_grad"):
        kernels.rms_norm(x.requires_grad_(), w, 1e-6, out=out)
    with pytest.raises(KernelError, match="shape, type and device"):
        kernels.rms_norm(x, w, 1e-6, out=torch.empty(4, 8))


def test_cross_entropy_has_the_semantics_of_pytorch():
    x, target = drawn(2, 7, 3, 5), torch.randint(0, 7, (2, 3, 5))
    target[0, 0, 0] = 3
    for reduction in ("mean", "sum", "none"):
        found = kernels.cross_entropy(x, target, ignore_index=3, reduction=reduction, label_smoothing=0.1)
        meant = torch.nn.functional.cross_entropy(x, target, ignore_index=3, reduction=reduction, label_smoothing=0.1)
        torch.testing.assert_close(found, meant)
    with pytest.raises(KernelError, match=r"F\.cross_entropy"):
        kernels.cross_entropy(x, target, torch.ones(7))
    with pytest.raises(KernelError, match="reduction is one of"):
        kernels.cross_entropy(x, target, reduction="median")


def test_support_says_yes_or_why_not():
    x, w = drawn(4, 16), drawn(16)
    assert "on cpu" in str(kernels.supports("rms_norm", x, w))
    assert "last dim of x is 16" in str(kernels.supports("rms_norm", x, drawn(8)))
    assert "float64" in str(kernels.supports("softmax", x.double()))
    assert not kernels.supports("cross_entropy", x, torch.zeros(4))
    assert not kernels.supports("rope", x, x, x, x)
    with pytest.raises(KernelError, match="did you mean"):
        kernels.supports("rms_nrom", x)


def test_a_second_declaration_of_a_name_is_an_error():
    with pytest.raises(KernelError, match="declared twice"):
        declare(
            name="rms_norm", summary="", schema="(Tensor x) -> Tensor", forward=torch.neg, fake=torch.empty_like,
            reference=torch.neg, support=lambda x: None, cost=elementwise_cost(1),
        )  # fmt: skip


def test_predict_prices_a_model_made_of_primitives():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4096))

        def forward(self, x):
            return kernels.rms_norm(x, self.weight, 1e-6)

    graph = ridgeline.capture(Block(), (torch.empty(8192, 4096, device="meta"),), mode="train", optimizer=None)
    names = {node.attrs.get("name") for node, _ in graph.nodes() if node.op == "custom"}
    assert names == {"ridgeline_kernels::rms_norm", "ridgeline_kernels::rms_norm_backward"}
    found = ridgeline.predict(graph, "h200")
    assert found.expected_s > 5 * 8192 * 4096 * 4 / 4.8e12  # five tensors moved: more than the datasheet allows


def test_every_primitive_has_a_summary_and_a_reference():
    for made in primitives().values():
        assert made.summary and callable(made.reference) and made.schema.startswith("(")


@pytest.mark.parametrize("name", list(trials()))
def test_the_tolerance_rejects_wrong_kernels(name):
    found = check_mistakes(name, mistake_case(trials()[name][1]), torch.device("cpu"), 5)
    assert found
    for finding in found:
        assert finding.ok, finding


def test_matrix_work_is_priced_by_the_matrix_units():
    class Head(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(32000, 4096, device="meta", dtype=torch.bfloat16))

        def forward(self, x, target):
            return kernels.linear_cross_entropy(x, self.weight, target)

    x = torch.empty(8192, 4096, device="meta", dtype=torch.bfloat16, requires_grad=True)
    target = torch.empty(8192, device="meta", dtype=torch.long)
    graph = ridgeline.capture(Head(), (x, target), mode="train", optimizer=None, loss=lambda out: out)
    found = ridgeline.predict(graph, "h200")
    flops = 6 * 8192 * 4096 * 32000
    assert flops / 989e12 < found.expected_s < 4 * flops / 989e12


def test_dropout_keeps_its_share_and_repeats_with_the_seed():
    x, zero = torch.ones(1000, 100), torch.zeros(1000, 100)
    torch.manual_seed(3)
    first = kernels.dropout_add(x, zero, 0.2)
    torch.manual_seed(3)
    assert torch.equal(first, kernels.dropout_add(x, zero, 0.2))
    assert not torch.equal(first, kernels.dropout_add(x, zero, 0.2))
    assert (first != 0).float().mean().item() == pytest.approx(0.8, abs=0.01)
    torch.testing.assert_close(first[first != 0], torch.full_like(first[first != 0], 1.25))
    assert torch.equal(kernels.dropout_add(x, x, 0.2, training=False), x + x)
    with pytest.raises(KernelError, match="below one"):
        kernels.dropout_add(x, x, 1.0)


@pytest.mark.parametrize("p", [1e-7, 0.1, 1 / 3, 0.9999])
def test_dropout_scales_by_the_step_of_probability_that_it_takes(p):
    x, zero = torch.ones(4000, 250), torch.zeros(4000, 250)
    found = kernels.dropout_add(x, zero, p, seed=torch.tensor(12345))
    spread = (p / (1 - p) / x.numel()) ** 0.5
    assert found.mean().item() == pytest.approx(1.0, abs=4 * spread + 1e-6)
    assert (found != 0).float().mean().item() == pytest.approx(1 - p, abs=1e-5 + 4 * (p * (1 - p) / x.numel()) ** 0.5)


def test_frozen_and_missing_weights_get_no_gradient():
    x, w, b, dy = leaf(5, 40), drawn(40), leaf(40), drawn(5, 40)
    functional = torch.nn.functional
    for ours, theirs, wanted in (
        (kernels.rms_norm(x, w, 1e-6), functional.rms_norm(x, (40,), w, 1e-6), (x,)),
        (kernels.rms_norm(x, None, 1e-6), functional.rms_norm(x, (40,), None, 1e-6), (x,)),
        (kernels.layer_norm(x, w, b), functional.layer_norm(x, (40,), w, b), (x, b)),
        (kernels.layer_norm(x), functional.layer_norm(x, (40,)), (x,)),
    ):
        found, meant = (torch.autograd.grad(y, wanted, dy) for y in (ours, theirs))
        torch.testing.assert_close(found, meant)


def test_a_gradient_of_a_gradient_is_refused():
    x = leaf(4, 16)
    (gradient,) = torch.autograd.grad(kernels.rms_norm(x, drawn(16), 1e-6).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="rms_norm_backward"):
        gradient.sum().backward()


def test_softmax_works_along_any_dim():
    x = drawn(3, 4, 5)
    for dim in (0, 1, 2, -1):
        torch.testing.assert_close(kernels.softmax(x, dim), torch.softmax(x, dim))


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn", "ntk", "none"])
def test_rotary_tables_slow_down_long_waves_only_as_their_scaling_says(kind):
    given = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 64}
    plain_cos, plain_sin = kernels.rope_tables(torch.arange(100), 32)
    cos, sin = kernels.rope_tables(torch.arange(100), 32, scaling=given)
    magnitude = (cos.square() + sin.square()).sqrt()
    torch.testing.assert_close(magnitude, torch.full_like(magnitude, 1.1386294 if kind == "yarn" else 1.0))
    fast = torch.atan2(sin[1, 0], cos[1, 0]) / torch.atan2(plain_sin[1, 0], plain_cos[1, 0])
    slow = torch.atan2(sin[1, -1], cos[1, -1]) / torch.atan2(plain_sin[1, -1], plain_cos[1, -1])
    assert fast.item() == pytest.approx(0.25 if kind == "linear" else 1.0, rel=1e-4)
    assert slow.item() == pytest.approx(1.0 if kind == "none" else 0.25, rel=0.02)
    with pytest.raises(KernelError, match="rope_type"):
        kernels.rope_tables(torch.arange(4), 8, scaling={"rope_type": "spiral"})


def test_an_offset_reaches_every_form_of_the_norm_and_its_gradient():
    """Against a weight that has the offset in it: forward, with a residual, normalized behind a product, backward."""
    x, h, w, dy = drawn(4, 16), drawn(4, 16), drawn(16), drawn(4, 16)
    for found, meant in zip(kernels.add_rms_norm(x, h, w, 1e-6, offset=1.0),
                            kernels.add_rms_norm(x, h, w + 1, 1e-6), strict=True):  # fmt: skip
        torch.testing.assert_close(found, meant)
    torch.testing.assert_close(kernels.linear(x, h, norm_weight=w, eps=1e-6, offset=1.0),
                               kernels.linear(x, h, norm_weight=w + 1, eps=1e-6))  # fmt: skip
    grads = []
    for weight, offset in ((w, 1.0), (w + 1, 0.0)):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        grads.append(torch.autograd.grad(kernels.rms_norm(*leaves, 1e-6, offset=offset), leaves, dy))
    for found, meant in zip(*grads, strict=True):
        torch.testing.assert_close(found, meant)


def test_softmax_of_a_row_that_is_all_minus_infinity_is_that_of_pytorch():
    x = drawn(4, 16)
    x[1], x[2, :15] = float("-inf"), float("-inf")
    found = kernels.softmax(x)
    assert bool(found[1].isnan().all()), "as in PyTorch: there is no distribution over nothing"
    torch.testing.assert_close(found, torch.softmax(x, -1), equal_nan=True)
    assert found[2].tolist() == [0.0] * 15 + [1.0]


def test_a_query_that_sees_no_key_attends_to_nothing_and_has_no_gradient():
    q, k, v = (drawn(1, 2, 5, 16).requires_grad_() for _ in range(3))
    seen = torch.tensor([[False] * 5])
    out = kernels.attention(q, k, v, key_mask=seen)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(bool((t == 0).all()) for t in (out, *grads))


def test_the_gradient_of_a_norm_with_an_offset_is_that_of_autograd():
    """The reference that kernels are held to, where the weight is stored less one."""
    x, w, dy = (drawn(*shape, dtype=torch.float64).requires_grad_() for shape in ((4, 16), (16,), (4, 16)))
    y, rstd = norm_reference.forward(x, w, 1e-6, 1.0)
    meant = torch.autograd.grad(y, (x, w), dy)
    for found, grad in zip(norm_reference.backward(dy, x, w, rstd, None, 1.0, True), meant, strict=True):
        torch.testing.assert_close(found, grad)
    past = norm_reference.backward(dy, x, w, rstd, dy, 1.0, True)[0]
    torch.testing.assert_close(past, meant[0] + dy)
